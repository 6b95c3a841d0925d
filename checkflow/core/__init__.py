"""Types that both wings speak; imports nothing else of checkflow."""
