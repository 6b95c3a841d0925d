"""The integer programs and their solvers; per_tensor.py is the paper's ILP, flow.py the one that scales."""
