"""Graph + costs -> timeline."""
