"""The resumable DataLoader; sample_rng.py seeds the randomness of each sample."""
