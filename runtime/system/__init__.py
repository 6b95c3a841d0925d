"""System calls, aligned memory, NUMA, signal errors."""
