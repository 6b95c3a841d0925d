"""A job without a plan whose lives are short.

``python -m tests.support.programs.cut_job LOOP PLANNER DIRECTORY ITERATIONS``

It kills itself after so many iterations of this life, or ends: then its outcome goes to ``FINAL`` in the directory.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import TensorDataset

from checkflow import api
from checkflow.api import Checkpointer
from checkflow.core.errors import TraceError
from checkflow.planner.live.planner import LivePlanner
from checkflow.runtime.data.loader import DataLoader
from tests.support.own_plans import Job, Never
from tests.support.simulated import rest

TOTAL = 13  # iterations
FINAL = "final.pt"


class Slow(LivePlanner):
    """Its plan is not there before the job ends."""

    def start(self, recorded: Any, **asked: Any) -> Never:
        return Never()


class Refusing(LivePlanner):
    """Records nothing."""

    def recorder(self, *arguments: Any, **keywords: Any) -> Any:
        raise TraceError("this job cannot be recorded")


PLANNERS = {"slow": Slow, "refusing": Refusing}


def turns(loop: str, job: Job, checkpointer: Checkpointer) -> Iterator[None]:
    """The iterations that are left; none of these loops knows an epoch."""
    if loop == "steps":
        for _ in checkpointer.steps(TOTAL):
            job.iterate()
            yield
    elif loop == "step":
        while checkpointer.iteration < TOTAL:  # numbers drawn before the first forward would not be those of before
            generator = torch.Generator().manual_seed(checkpointer.iteration)
            job.iterate(torch.randn(6, 8, generator=generator), torch.randint(0, 5, (6,), generator=generator))
            checkpointer.step()
            yield
    else:
        while checkpointer.iteration + 1 < TOTAL:  # the last one ends where the loop is left
            for x, y in checkpointer.loader:
                job.iterate(x, y)
                yield
                if checkpointer.iteration + 1 == TOTAL:
                    break


def run(loop: str, directory: Path, life: int) -> Job:
    """Train for this life, or to the end."""
    torch.set_num_threads(1)
    job = Job()
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(18, 8, generator=generator), torch.randint(0, 5, (18,), generator=generator)
    loader = DataLoader(TensorDataset(x, y), 6, shuffle=True, seed=2) if loop == "loader" else None
    torch.manual_seed(3)
    with Checkpointer(job.models, job.optimizers, loader, directory=directory) as checkpointer:
        for number, _ in enumerate(turns(loop, job, checkpointer), 1):
            saving = checkpointer._saving
            rest(saving.engine, saving.writer)  # so that the number of iterations decides, and no time
            if number == life:
                os.kill(os.getpid(), signal.SIGKILL)
    return job


def outcome(job: Job) -> dict[str, torch.Tensor]:
    """What a job ends with: its state, and the numbers that it would draw next."""
    return {**job.state(), "next": torch.randn(3)}


if __name__ == "__main__":
    loop, planner, directory, life = sys.argv[1:]
    api.make_planner = PLANNERS[planner]
    job = run(loop, Path(directory), int(life))
    torch.save(outcome(job), Path(directory) / FINAL)
