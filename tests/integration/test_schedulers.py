"""Every learning rate scheduler that torch has: one plan for all rates, and a resume that goes on as if uncut.

A scheduler changes numbers in the optimizer's groups (rates, momenta, betas): extra state, of which no plan knows.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import lr_scheduler as torchs
from torch.optim.swa_utils import SWALR

from checkflow.api import Checkpointer
from checkflow.core.training_step import TrainingStep
from tests.support.oracle import clone_state, same_bits
from tests.support.planned_jobs import assert_every_checkpoint_is_true, plan_by_trace

ITERATIONS, CUT = 12, 7
Make = Callable[[torch.optim.Optimizer], Any]


def sequential(optimizer: torch.optim.Optimizer) -> Any:
    warm = torchs.LinearLR(optimizer, 0.1, total_iters=4)
    return torchs.SequentialLR(optimizer, [warm, torchs.CosineAnnealingLR(optimizer, 6)], milestones=[4])


def chained(optimizer: torch.optim.Optimizer) -> Any:
    return torchs.ChainedScheduler([torchs.ConstantLR(optimizer, 0.1, 3), torchs.ExponentialLR(optimizer, 0.9)])


SCHEDULERS: dict[str, Make] = {
    "ChainedScheduler": chained,
    "ConstantLR": lambda o: torchs.ConstantLR(o, 0.5, total_iters=5),
    "CosineAnnealingLR": lambda o: torchs.CosineAnnealingLR(o, T_max=8, eta_min=1e-4),
    "CosineAnnealingWarmRestarts": lambda o: torchs.CosineAnnealingWarmRestarts(o, T_0=3, T_mult=2),
    "CyclicLR": lambda o: torchs.CyclicLR(o, 1e-3, 0.1, step_size_up=3, mode="exp_range", gamma=0.9),
    "ExponentialLR": lambda o: torchs.ExponentialLR(o, 0.8),
    "LambdaLR": lambda o: torchs.LambdaLR(o, lambda epoch: 0.9**epoch),
    "LinearLR": lambda o: torchs.LinearLR(o, 0.1, total_iters=6),
    "MultiStepLR": lambda o: torchs.MultiStepLR(o, [2, 5, 8], gamma=0.3),
    "MultiplicativeLR": lambda o: torchs.MultiplicativeLR(o, lambda epoch: 0.9),
    "OneCycleLR": lambda o: torchs.OneCycleLR(o, 0.1, total_steps=ITERATIONS + 1),
    "PolynomialLR": lambda o: torchs.PolynomialLR(o, total_iters=9, power=2.0),
    "ReduceLROnPlateau": lambda o: torchs.ReduceLROnPlateau(o, factor=0.5, patience=0, threshold=10.0),
    "SequentialLR": sequential,
    "StepLR": lambda o: torchs.StepLR(o, 3, gamma=0.5),
    "SWALR": lambda o: SWALR(o, swa_lr=0.01, anneal_epochs=6),
}


class Job:
    """A small model that a scheduler accompanies; ``rates`` is what the groups held when each iteration ran."""

    def __init__(self, make: Make, kind: str = "sgd", rate: Any = 0.05) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 24), nn.BatchNorm1d(24), nn.Tanh(), nn.Dropout(0.2), nn.Linear(24, 3))
        halves = [{"params": model[0].parameters()}, {"params": [*model[1].parameters(), *model[4].parameters()]}]
        halves[1]["lr"] = rate / 2
        self.optimizer: torch.optim.Optimizer
        if kind == "sgd":
            self.optimizer = torch.optim.SGD(halves, lr=rate, momentum=0.9)
        else:
            self.optimizer = torch.optim.Adam(halves, lr=rate)
        self.scheduler = make(self.optimizer)
        self.rates: list[Any] = []
        self.step = TrainingStep(
            step=self.iterate,
            models={"model": model},
            optimizers={"optimizer": self.optimizer},
            batch=(torch.randn(8, 6), torch.randint(3, (8,))),
        )

    def iterate(self, batch: Any) -> torch.Tensor:
        self.rates.append([(float(g["lr"]), g.get("momentum"), g.get("betas")) for g in self.optimizer.param_groups])
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.step.models["model"](batch[0]), batch[1])
        loss.backward()
        self.optimizer.step()
        if isinstance(self.scheduler, torchs.ReduceLROnPlateau):
            self.scheduler.step(loss.item())
        else:
            self.scheduler.step()
        return loss


def test_every_scheduler_of_torch_is_in_the_table() -> None:
    found = {
        name
        for name, value in vars(torchs).items()
        if inspect.isclass(value) and issubclass(value, torchs.LRScheduler) and not name.startswith("_")
    }
    assert found - {"LRScheduler"} | {"SWALR"} == SCHEDULERS.keys()


class KilledError(Exception):
    pass


def train(job: Job, directory: Path, plan: Any, stop: int | None = None) -> Checkpointer:
    """Train up to the end, or until the job dies in the middle of an iteration."""
    with (
        contextlib.suppress(KilledError),
        Checkpointer(
            job.step.models, job.step.optimizers, directory=directory, plan=plan, every=1, audit=1, on_error="raise",
            state={"scheduler": job.scheduler},
        ) as checkpointer,
    ):  # fmt: skip
        for n in checkpointer.steps(ITERATIONS):
            job.iterate(job.step.batch)
            if n == stop:
                raise KilledError
    return checkpointer


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_change_of_rate_needs_no_new_plan_and_a_resume_goes_on_as_if_uncut(name: str, tmp_path: Path) -> None:
    make = SCHEDULERS[name]
    plan = plan_by_trace(Job(make).step)
    whole = Job(make)
    assert train(whole, tmp_path / "whole", plan).report()["breaches"] == 0
    assert len({str(rates) for rates in whole.rates}) > 1  # it did change

    cut = Job(make)
    train(cut, tmp_path / "cut", plan, stop=CUT)
    again = Job(make)
    resumed = train(again, tmp_path / "cut", plan)
    assert resumed.resumed_from is not None
    assert CUT - 1 <= resumed.resumed_from <= CUT
    assert [*cut.rates[: resumed.resumed_from], *again.rates] == whole.rates
    for one, other in zip(again.optimizer.param_groups, whole.optimizer.param_groups, strict=True):
        assert {k: v for k, v in one.items() if k != "params"} == {k: v for k, v in other.items() if k != "params"}
    states = [clone_state(job.step.models, job.step.optimizers) for job in (whole, again)]
    assert states[0].keys() == states[1].keys()
    assert [name for name in states[0] if not same_bits(states[0][name], states[1][name])] == []
    assert plain(again.scheduler.state_dict()) == plain(whole.scheduler.state_dict())


def plain(value: Any) -> Any:
    """A scheduler's state without the functions in it, which compare by identity."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items() if not callable(item)}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value


@pytest.mark.parametrize("name", ["OneCycleLR", "CyclicLR", "StepLR", "ReduceLROnPlateau"])
def test_all_state_at_every_rate(name: str, tmp_path: Path) -> None:
    """Every checkpoint is the truth of its boundary; OneCycleLR also turns Adam's betas, by one plan for all."""
    options = {"cycle_momentum": False} if name == "CyclicLR" else {}
    make: Make = (lambda o: torchs.CyclicLR(o, 1e-3, 0.1, 3, **options)) if options else SCHEDULERS[name]
    job = Job(make, "adam")
    plan = plan_by_trace(job.step)
    assert job.rates == []  # the trace left the user's object as it was
    assert_every_checkpoint_is_true(job.step, plan, tmp_path, state={"scheduler": job.scheduler})
    assert len({str(rates) for rates in job.rates}) > 1


def test_a_rate_in_a_tensor_is_changed_in_place_and_comes_back(tmp_path: Path) -> None:
    make = SCHEDULERS["ExponentialLR"]

    def job() -> Job:
        return Job(make, "adam", torch.tensor(0.05))

    plan = plan_by_trace(job().step)
    whole = job()
    train(whole, tmp_path / "whole", plan)
    train(job(), tmp_path / "cut", plan, stop=CUT)
    again = job()
    rate = again.optimizer.param_groups[0]["lr"]
    assert train(again, tmp_path / "cut", plan).resumed_from
    assert again.optimizer.param_groups[0]["lr"] is rate
    assert again.rates == whole.rates[-len(again.rates) :]
    assert len({str(rates) for rates in whole.rates}) == ITERATIONS
    states = [clone_state(job.step.models, job.step.optimizers) for job in (whole, again)]
    assert [name for name in states[0] if not same_bits(states[0][name], states[1][name])] == []
