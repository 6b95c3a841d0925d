"""Copy engines for host memory and CUDA."""
