"""Traces a training step on fake tensors into a graph."""
