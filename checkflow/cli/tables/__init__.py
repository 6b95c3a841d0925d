"""What commands print: pure functions from data to tables and JSON."""
