"""Watches one iteration, for trace and record alike: hooks, storages, placement, numbers read."""
