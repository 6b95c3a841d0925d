"""Where a job gets its plan, and which plan runs."""
