"""Finds where an iteration ends and acts there; a signal ends the job in preemption.py."""
