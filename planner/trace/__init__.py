"""Fake tensors: a training step -> graph."""
