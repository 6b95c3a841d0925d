"""Kills of jobs of several ranks."""
