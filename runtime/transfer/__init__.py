"""Copy engines: host.py copies on the CPU, cuda.py to and from a GPU."""
