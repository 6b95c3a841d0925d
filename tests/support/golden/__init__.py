"""The jobs whose files lie in tests/data, and what wrote these."""
