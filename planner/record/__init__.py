"""Records an iteration of a live job into a graph."""
