"""Collects state from a job and restores it."""
