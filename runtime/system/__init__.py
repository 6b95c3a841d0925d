"""System calls, aligned memory, NUMA, errors of signal handlers."""
