"""Copy engines: host.py for state in host memory, cuda.py for state on a GPU."""
