"""Where the plan comes from, and which one runs."""
