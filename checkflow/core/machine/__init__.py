"""What machines are made of: devices, clusters of them, and host memory."""
