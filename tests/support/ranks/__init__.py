"""Jobs of several ranks, for tests: started, watched, killed."""
