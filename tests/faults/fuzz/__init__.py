"""Damaged and hostile inputs for everything that reads files."""
