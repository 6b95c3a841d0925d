"""Measures this machine."""
