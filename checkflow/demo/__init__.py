"""A job that is killed three times."""
