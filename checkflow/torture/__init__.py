"""Kill a user's own job and check what is left; the demo, and the tests' own kills, use its parts."""
