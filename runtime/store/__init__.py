"""A directory of checkpoints: commit, read, retain, lock. Store.commit in store.py makes one durable."""
