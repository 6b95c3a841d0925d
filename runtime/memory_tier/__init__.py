"""Staging in shared memory that outlives the process."""
