"""Closed rules and bounds; the whole-unit problem."""
