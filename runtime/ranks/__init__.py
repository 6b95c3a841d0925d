"""The ranks of one job agree: which boundaries are saved, which versions exist, where training ends."""
