"""What one operator reads, writes, costs."""
