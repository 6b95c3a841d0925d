"""Loads the user's model file as a TrainingStep."""
