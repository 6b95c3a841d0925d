"""Plans, runs and simulations as pages for a browser and traces for Perfetto, written to files."""
