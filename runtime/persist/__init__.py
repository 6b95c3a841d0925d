"""Captured checkpoints -> committed ones, in the background."""
