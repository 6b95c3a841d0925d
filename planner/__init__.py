"""Training step -> TrainingGraph -> Timeline -> Plan. Never imports the runtime."""

# One import name for every class: a second copy under a top-level name would make isinstance checks fail.
if __name__ != "checkflow.planner":
    raise ImportError(f"import checkflow.planner, not {__name__}: checkflow's folders are parts of one package")
