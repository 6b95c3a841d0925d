"""Arguments that are the same on all ranks are taken for the same."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import torch, checkflow
from checkflow.core.planner_api import PlanLimits
from checkflow.runtime.arguments import Arguments
from checkflow.runtime.interval.algorithm import Asked
from checkflow.runtime.job.job import Job
from checkflow.runtime.start.ranks import _digest_of
from checkflow.runtime.state.collect import StateWalk
from checkflow.runtime.store.retention import Rules

names = frozenset(f"name{number}" for number in range(9))
arguments = Arguments(
    "directory", Rules(2), Asked(0.1), PlanLimits(0.1, None), follow=False, resume="auto", hyperparameters="script",
    host_buffers=3, audit=1, raising=False, signals=(), grace_seconds=1.0, trust=None, fresh=names, accept=names,
    on_report=lambda numbers: None,
)
print(_digest_of(arguments, Job({}, {}, {}, None, StateWalk({}, {})), 2))
"""


def test_sets_and_functions_are_the_same_in_all_processes(tmp_path: Path) -> None:
    """Each orders a set, and places a function, in its own way."""
    found = {
        subprocess.run(
            [sys.executable, "-c", PROGRAM], cwd=Path(__file__).parents[3], text=True, capture_output=True, check=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    assert len(found) == 1
