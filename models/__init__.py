"""Plannable training steps: one file per model, each with a ``build`` function."""

# One import name for every class: a second copy under a top-level name would make isinstance checks fail.
if __name__ != "checkflow.models":
    raise ImportError(f"import checkflow.models, not {__name__}: checkflow's folders are parts of one package")
