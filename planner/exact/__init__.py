"""Exact scheduling rules, their bounds, and the problem in whole units that they solve."""
