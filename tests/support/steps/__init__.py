"""Training steps of many kinds, as tables that tests go through."""
