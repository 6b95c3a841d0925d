"""The planner of a running job, in a process of its own."""
