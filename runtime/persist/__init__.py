"""Commits captured checkpoints in the background."""
