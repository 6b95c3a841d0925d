"""How often: arithmetic and controllers, no clock, no torch."""
