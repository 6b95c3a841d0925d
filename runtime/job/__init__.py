"""The live job, what it looks like, and whether a plan fits it."""
