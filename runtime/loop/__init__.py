"""Where an iteration ends, what is done there, signals, time by phase."""
