"""A small job that makes its own plan, and a planner that makes it at once."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from checkflow.api import Checkpointer
from checkflow.core.planner_api import PlannerInput, PlanResponse
from checkflow.planner.live import process
from checkflow.planner.live.planner import LivePlanner
from checkflow.planner.record.recorder import RecordedIteration
from checkflow.runtime.store.discovery import find
from checkflow.runtime.store.reader import open_checkpoint
from tests.support.oracle import Truth, assert_checkpoint_is, clone_state, run_oracle

RECORDED_BY = (
    4  # iterations: one that makes the state, one recorded, two timed; the plan is in place at the fifth's end
)


class Done:
    """An answer that is there when somebody looks for it."""

    def __init__(self, given: PlannerInput) -> None:
        self._answer: PlanResponse | None = process.respond(given)

    def poll(self) -> PlanResponse | None:
        return self._answer

    def close(self) -> None:
        self._answer = None


class Never:
    """A plan that is not there before the job ends, however slow that is."""

    def poll(self) -> PlanResponse | None:
        return None

    def close(self) -> None:
        """There is nothing to give back."""


class Beside(LivePlanner):
    """The planner, making its plans in this process; only what starting another one is like has tests of its own."""

    recordings = 0

    def recorder(self, *arguments: Any, **keywords: Any) -> Any:
        Beside.recordings += 1
        return super().recorder(*arguments, **keywords)

    def start(self, recorded: RecordedIteration, **asked: Any) -> Done:
        return Done(self.planner_input(recorded, **asked))


class Job:
    """A small job with batch norm and dropout; ``iterate`` is one iteration of it."""

    def __init__(self, width: int = 16, **options: Any) -> None:
        torch.manual_seed(0)
        body = [nn.Linear(8, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(width, 5)]
        self.model = nn.Sequential(*body)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01, **options)
        self.models, self.optimizers = {"model": self.model}, {"optimizer": self.optimizer}
        self.batch_size, self.micro_batches = 6, 1

    def iterate(self, x: torch.Tensor | None = None, y: torch.Tensor | None = None) -> None:
        self.optimizer.zero_grad()
        for _ in range(self.micro_batches):
            self.backward(x, y)
        self.optimizer.step()

    def backward(self, x: torch.Tensor | None = None, y: torch.Tensor | None = None) -> None:
        x = torch.randn(self.batch_size, 8) if x is None else x
        y = torch.randint(0, 5, (len(x),)) if y is None else y
        F.cross_entropy(self.model(x), y).backward()

    def state(self) -> Truth:
        return clone_state(self.models, self.optimizers)


def open_job(job: Job, directory: Path, **options: Any) -> Checkpointer:
    chosen = {"audit": 1, "keep_latest": 50, "on_error": "raise", **options}
    return Checkpointer(job.models, job.optimizers, directory=directory, **chosen)


def train(
    job: Job, checkpointer: Checkpointer, until: int, before: Callable[[int], Any] = lambda n: None
) -> dict[int, Truth]:
    """Train by ``steps``; the truth of each boundary."""

    def iterate(n: int) -> None:
        before(n)
        job.iterate()

    return run_oracle(checkpointer, iterate, job.models, job.optimizers, iterations=until)


def check(directory: Path, truths: dict[int, Truth]) -> list[int]:
    """Hold every checkpoint against its truth; returns the steps there are."""
    steps = []
    for path in find(directory):
        steps.append(int(path.name[5:]))
        assert_checkpoint_is(path, truths[steps[-1]])
    return sorted(steps)


def kept(directory: Path) -> list[Path]:
    return sorted((directory / "plans").iterdir()) if (directory / "plans").is_dir() else []


def remove_checkpoints(directory: Path) -> None:
    """And leave the plans."""
    for path in find(directory):
        shutil.rmtree(path)


def nothing_left(job: Job) -> bool:
    """No mode watches, and no module has a hook."""
    return not _get_current_dispatch_mode_stack() and not any(
        module._forward_pre_hooks or module._forward_hooks for module in job.model.modules()
    )


def all_planned(directory: Path, after: int) -> bool:
    """Whether every checkpoint after a step was made under a plan, and none before it."""
    said = {}
    for path in find(directory):
        with open_checkpoint(path) as checkpoint:
            said[int(path.name[5:])] = bool(checkpoint.manifest.plan_digest)
    return all(planned == (step > after) for step, planned in said.items())
