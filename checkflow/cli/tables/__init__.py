"""What commands print: data -> tables and JSON."""
