"""Types that planner and runtime share; imports nothing else of checkflow."""
