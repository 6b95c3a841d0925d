"""Plans, runs and comparisons as pages for a browser."""
