"""A live iteration -> graph."""
