"""Copy engines: host, CUDA."""
