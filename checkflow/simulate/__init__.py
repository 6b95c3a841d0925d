"""Failures, simulated under several strategies."""
