"""Says what one operator reads, writes and costs."""
