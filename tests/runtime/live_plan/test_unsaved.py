"""A job that carries values which no checkpoint holds is told so once, and not of those that it saves."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import checkflow
from checkflow import api
from checkflow.api import Checkpointer
from checkflow.planner.live import planner
from checkflow.planner.live.bandwidth import CopyBandwidths
from tests.support.own_plans import Beside

ITERATIONS = 6  # the second is recorded


@pytest.fixture(autouse=True)
def _planner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "make_planner", Beside)
    monkeypatch.setattr(planner, "_bandwidths", lambda _: CopyBandwidths(1e10, 2e10))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.read, self.cell, self.say = nn.Embedding(7, 4), nn.GRUCell(4, 4), nn.Linear(4, 7)


class Environment:
    def __init__(self) -> None:
        self.rng = numpy.random.default_rng(0)

    def state_dict(self) -> dict[str, Any]:
        return {"rng": self.rng.bit_generator.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rng.bit_generator.state = state["rng"]


class Job:
    """A recurrent net that reads on where it stopped, with an average of itself and an environment that draws."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.net = Net()
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
        self.average = torch.optim.swa_utils.AveragedModel(self.net)
        self.environment = Environment()
        self.kept = checkflow.Variables(hidden=torch.zeros(2, 4), losses=[])

    def iterate(self) -> None:
        x = torch.from_numpy(self.environment.rng.integers(0, 7, 2))
        self.kept.hidden = self.net.cell(self.net.read(x), self.kept.hidden.detach())
        loss = self.net.say(self.kept.hidden).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.average.update_parameters(self.net)
        self.kept.losses.append(loss.item())


def train(job: Job, directory: Path, state: dict[str, Any], iterations: int = ITERATIONS) -> None:
    with Checkpointer(job.net, job.optimizer, directory=directory, state=state, every=1) as checkpointer:
        for _ in checkpointer.steps(iterations):
            job.iterate()


ALL: dict[str, Callable[[Job], Any]] = {
    "kept": lambda job: job.kept,
    "average": lambda job: job.average,
    "environment": lambda job: job.environment,
}
SAYS = {"kept": "a tensor float32[2, 4]", "average": "a tensor int64[]", "environment": "a random generator of numpy"}


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "the job carries" in record.getMessage()]


@pytest.mark.parametrize("missing", ["", *ALL])
def test_what_is_not_named_is_told_once(missing: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "checkflow")
    job = Job()
    train(job, tmp_path, {name: take(job) for name, take in ALL.items() if name != missing})
    lines = told(caplog)
    assert any(SAYS[missing] in line for line in lines) if missing else not lines
    assert len(lines) <= 4
    train(Job(), tmp_path, {name: take(job) for name, take in ALL.items() if name != missing}, 2 * ITERATIONS)
    assert told(caplog) == lines  # a kept plan records nothing


@pytest.mark.slow
def test_with_all_named_a_resumed_run_is_the_same(tmp_path: Path) -> None:
    whole = Job()
    train(whole, tmp_path / "whole", {name: take(whole) for name, take in ALL.items()}, 9)
    for end in (4, 9):
        part = Job()
        train(part, tmp_path / "parts", {name: take(part) for name, take in ALL.items()}, end)
    assert part.kept.losses == whole.kept.losses
    assert torch.equal(part.kept.hidden, whole.kept.hidden)
