"""Collect state from a job, restore it."""
