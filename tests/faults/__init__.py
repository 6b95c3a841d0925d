"""Kills, power cuts, full disks, damage and fuzzing: programs, and the tests that run each in short."""
