"""A GPU without one: a simulated device, locked memory, and what a part of a run on a GPU may do wrong."""
