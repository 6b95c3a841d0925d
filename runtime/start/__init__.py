"""How several ranks begin: with one step, restored by each rank in part. A job of one process needs only state/."""
