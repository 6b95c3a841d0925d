"""Anchors: the places of a training step where hooks hang, and the numbers of their occurrences."""
