"""Everything that needs a GPU, in one command: the CUDA tests, and all measurements."""
