"""The live job and what it looks like; does the plan fit it."""
