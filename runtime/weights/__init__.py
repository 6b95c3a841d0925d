"""Imports and exports weights, and loads them into a model."""
