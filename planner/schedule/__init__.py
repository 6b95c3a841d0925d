"""Makes certified, replayed plans of timelines, and explains and compares them."""
