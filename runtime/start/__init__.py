"""How a job begins: several ranks with one step, restored by each rank in part; a script with a look at that step."""
