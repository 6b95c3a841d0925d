"""Kill a user's own job and check what is left."""
