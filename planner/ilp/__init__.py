"""The integer programs and their solvers."""
