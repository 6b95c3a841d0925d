"""The user's file -> TrainingStep."""
