"""The runtime: from a plan and a live job to durable checkpoints and resumed jobs. Never imports the planner."""

# One import name for every class: a second copy under a top-level name would make isinstance checks fail.
if __name__ != "checkflow.runtime":
    raise ImportError(f"import checkflow.runtime, not {__name__}: checkflow's folders are parts of one package")
