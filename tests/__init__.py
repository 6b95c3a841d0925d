"""The tests, which mirror the packages, and what they share."""
