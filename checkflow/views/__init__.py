"""Pictures of plans, runs and simulations, written to files."""
