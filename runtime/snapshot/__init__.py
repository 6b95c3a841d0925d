"""Gathers the state at one boundary, by the plan's anchors."""
