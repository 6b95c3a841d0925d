"""Training jobs that are killed, and what must be left of them."""
