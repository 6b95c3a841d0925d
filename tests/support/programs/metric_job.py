"""A training job that validates after each epoch and tells what came of it; it may kill itself in a validation."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from checkflow import api
from checkflow.api import Checkpointer
from checkflow.core import plan as plans
from checkflow.core.plan import Plan
from checkflow.runtime.data.loader import DataLoader
from tests.support.oracle import random_plan
from tests.support.waiting import wait_until_saved

BATCHES = 4  # an epoch


class Job:
    """A small network on noise, the same each time."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        data = TensorDataset(torch.randn(3 * BATCHES, 4), torch.randint(0, 3, (3 * BATCHES,)))
        self.loader = DataLoader(data, 3, shuffle=True, seed=1)

    def iterate(self, x: torch.Tensor | None = None, y: torch.Tensor | None = None) -> None:
        x, y = (torch.ones(6, 4), torch.arange(6) % 3) if x is None or y is None else (x, y)
        self.optimizer.zero_grad()
        F.cross_entropy(self.model(x), y).backward()
        self.optimizer.step()

    def evaluate(self) -> None:
        self.model.eval()
        with torch.no_grad():
            self.model(torch.ones(2, 4))
        self.model.train()


def make_plan() -> Plan:
    job = Job()
    job.iterate()
    return random_plan({"model": job.model}, {"optimizer": job.optimizer}, 0)


def run(
    directory: Path, plan: Plan | Path, losses: Sequence[float], *, die_in: int | None = None, **options: Any
) -> Checkpointer:
    """Train to the end, an epoch for each loss; or be killed in the validation of one, once step 15 is durable."""
    job = Job()
    with Checkpointer(
        job.model, job.optimizer, job.loader, directory=directory, plan=plan, every=5, audit=1, on_error="raise",
        keep_epochs=False, monitor="loss", **options,
    ) as checkpointer:  # fmt: skip
        for epoch in checkpointer.epochs(len(losses)):
            for x, y in checkpointer.loader:
                job.iterate(x, y)
            job.evaluate()
            if epoch == die_in:
                wait_until_saved(directory, 15)
                os.kill(os.getpid(), signal.SIGKILL)
            checkpointer.metric("loss", losses[epoch])
            checkpointer.metric("epoch", epoch)
    return checkpointer


if __name__ == "__main__":
    torch.set_num_threads(1)
    api.check_plan = plans.validate
    given = json.loads(sys.argv[3])
    run(Path(sys.argv[1]), Path(sys.argv[2]), given["losses"], die_in=given["die_in"], **given["options"])
