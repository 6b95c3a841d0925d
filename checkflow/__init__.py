"""checkflow: checkpoints of every iteration, planned so that they cost (almost) nothing.

Importing this package imports neither torch nor any wing; names are looked up when they are used.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

_here = os.path.dirname(os.path.abspath(__file__))
if not os.path.isdir(os.path.join(_here, "planner")):
    raise ImportError(
        f"{_here}/planner, runtime and models must be symbolic links, which this checkout lacks: "
        "git config core.symlinks true, then git checkout -- checkflow"
    )

if TYPE_CHECKING:
    from checkflow.api import Checkpointer
    from checkflow.core.errors import (
        CheckflowError,
        ConsistencyError,
        CorruptCheckpointError,
        InfeasibleError,
        LockedError,
        MismatchError,
        MissingShardsError,
        ModelError,
        PlanError,
        Preempted,
        ReportError,
        SolverError,
        StorageError,
        TraceError,
        UnsupportedError,
    )
    from checkflow.core.plan import Plan
    from checkflow.core.training_step import TrainingStep
    from checkflow.runtime import shards
    from checkflow.runtime.data.adapters.resumable import resumable
    from checkflow.runtime.data.loader import DataLoader
    from checkflow.runtime.start.peek import Peeked, peek
    from checkflow.runtime.state.variables import Variables
    from checkflow.runtime.weights.load import LoadReport, load_weights

__version__ = "0.1.0"

__all__ = [
    "CheckflowError",
    "Checkpointer",
    "ConsistencyError",
    "CorruptCheckpointError",
    "DataLoader",
    "InfeasibleError",
    "LoadReport",
    "LockedError",
    "MismatchError",
    "MissingShardsError",
    "ModelError",
    "Peeked",
    "Plan",
    "PlanError",
    "Preempted",
    "ReportError",
    "SolverError",
    "StorageError",
    "TraceError",
    "TrainingStep",
    "UnsupportedError",
    "Variables",
    "load_weights",
    "peek",
    "resumable",
    "shards",
]

_HOMES = {
    "Checkpointer": "checkflow.api",
    "DataLoader": "checkflow.runtime.data.loader",
    "LoadReport": "checkflow.runtime.weights.load",
    "Peeked": "checkflow.runtime.start.peek",
    "Plan": "checkflow.core.plan",
    "TrainingStep": "checkflow.core.training_step",
    "Variables": "checkflow.runtime.state.variables",
    "load_weights": "checkflow.runtime.weights.load",
    "peek": "checkflow.runtime.start.peek",
    "resumable": "checkflow.runtime.data.adapters.resumable",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'checkflow' has no attribute {name!r}")
    if name == "shards":
        return importlib.import_module("checkflow.runtime.shards")
    return getattr(importlib.import_module(_HOMES.get(name, "checkflow.core.errors")), name)


def __dir__() -> list[str]:
    return sorted(__all__)
