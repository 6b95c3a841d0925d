"""The state at one boundary, gathered by the plan's anchors."""
