"""A directory of checkpoints: commit, read, retain, lock."""
