"""Steps that are given a closure: run once it is a part of the iteration, run more than once there is no plan."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import _pytree as pytree

from checkflow import api
from checkflow.api import Checkpointer
from checkflow.core.errors import TraceError
from checkflow.core.graph import AnchorKey, AnchorKind
from checkflow.core.training_step import TrainingStep
from checkflow.planner.live import planner
from checkflow.planner.live.bandwidth import CopyBandwidths
from checkflow.planner.trace.trace import trace
from checkflow.runtime.snapshot.executor import Execution
from checkflow.runtime.store.discovery import find
from tests.planner.iteration.test_optimizers import LABELS, OPTIMIZERS, X, assert_works, network, training
from tests.support.oracle import Truth, assert_checkpoint_is, clone_state
from tests.support.own_plans import Beside, all_planned, check, kept
from tests.support.recording import record_step

Make = Callable[..., torch.optim.Optimizer]


class Twice(torch.optim.SGD):
    """Steps uphill first, as SAM does, and downhill by the gradient there: its closure runs so many times in a step."""

    times = 2

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = None
        for number in range(self.times):
            with torch.enable_grad():
                loss = closure()
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.data.add_(parameter.grad, alpha=-0.05 if number + 1 == self.times else 0.01)
        return loss


class Job:
    """A network, and one iteration of it inside of the optimizer's step, as Lightning does that."""

    def __init__(self, make: Make) -> None:
        self.model = network()
        self.optimizer = make(self.model.parameters())
        self.models, self.optimizers = {"model": self.model}, {"optimizer": self.optimizer}

    def closure(self) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(X + 0.1 * torch.randn_like(X)), LABELS)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    def iterate(self, *, inside: bool = True) -> None:
        if inside:
            self.optimizer.step(self.closure)
        else:
            self.closure()
            self.optimizer.step()

    def step(self, *, inside: bool = True) -> TrainingStep:
        return training(self.model, self.optimizer, lambda: self.iterate(inside=inside))

    def run(
        self, directory: Path, iterations: int, before: Callable[[int], Any] = lambda n: None, **options: Any
    ) -> tuple[dict[int, Truth], Any]:
        """Train to this iteration; the truth of each boundary, and the report."""
        truths: dict[int, Truth] = {}
        with Checkpointer(
            self.models, self.optimizers, directory=directory,
            **{"every": 1, "audit": 1, "keep_latest": 50, "on_error": "raise", **options},
        ) as checkpointer:  # fmt: skip
            for n in checkpointer.steps(iterations):
                truths[n] = clone_state(self.models, self.optimizers)
                before(n)
                self.iterate()
            truths[checkpointer.iteration] = clone_state(self.models, self.optimizers)
        return truths, checkpointer.report()


@pytest.fixture(autouse=True)
def _planner(monkeypatch: pytest.MonkeyPatch) -> None:
    Beside.recordings = 0
    monkeypatch.setattr(api, "make_planner", Beside)
    monkeypatch.setattr(planner, "_bandwidths", lambda _: CopyBandwidths(1e10, 2e10))


# Run once


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_is_traced_is_the_step_without_a_closure(name: str) -> None:
    """Apart from the loss, which the step holds until it returns."""
    inside, outside = (trace(Job(OPTIMIZERS[name]).step(inside=where), name="n") for where in (True, False))
    assert dataclasses.replace(inside, storages=()) == dataclasses.replace(outside, storages=())
    odd = [one for one, other in zip(inside.storages, outside.storages, strict=True) if one != other]
    assert [storage.name for storage in odd] == ["nll_loss_forward"]


@pytest.mark.parametrize(
    "make",
    [
        lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9),
        lambda parameters: torch.optim.Adam(parameters, foreach=True),
        torch.optim.Adagrad,
    ],
)
def test_trace_record_and_checkpoints_agree(make: Make, tmp_path: Path) -> None:
    assert_works(lambda: Job(make).step(), tmp_path)


def test_a_live_job_is_recorded_and_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fired: list[AnchorKind] = []
    reached = Execution.reached

    def noting(self: Execution, key: AnchorKey) -> None:
        fired.append(key.kind)
        reached(self, key)

    monkeypatch.setattr(Execution, "reached", noting)

    def before(n: int) -> None:
        if n > 6:  # whose anchors are the plan's: the step begins when all gradients are there
            assert fired[-1] is AnchorKind.OPTIMIZER_POST
            assert fired.index(AnchorKind.OPTIMIZER_PRE) == len(fired) - 2
            assert AnchorKind.FORWARD in fired[:-2]
        fired.clear()

    truths, report = Job(torch.optim.Adam).run(tmp_path, 12, before)
    assert report["plan"]["source"] == "recorded"
    assert report["breaches"] == report["failed"] == 0
    assert check(tmp_path, truths) == list(range(1, 13))
    assert all_planned(tmp_path, after=4)


# Run more than once


def lbfgs(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(parameters, lr=0.1, max_iter=3, history_size=40)


def test_lbfgs_is_saved_at_boundaries_and_goes_on_exactly(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(1)
    whole = Job(lbfgs)
    truths, _ = whole.run(tmp_path / "whole", 11)
    torch.manual_seed(1)
    with caplog.at_level(logging.INFO, "checkflow"):
        Job(lbfgs).run(tmp_path / "cut", 6)
        torch.manual_seed(7)  # what is saved decides
        again = Job(lbfgs)
        _, report = again.run(tmp_path / "cut", 11)
    assert (report["breaches"], report["failed"], Beside.recordings) == (0, 0, 0)
    assert report["planning"]["stage"] == "given up"
    assert caplog.text.count("no plan, since optimizer optimizer does not run its closure just once") == 2
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
    for directory in ("whole", "cut"):
        assert check(tmp_path / directory, truths) == list(range(1, 12))
    assert_same(*(dict(sorted(*map(dict.items, job.optimizer.state.values()))) for job in (again, whole)))


def assert_same(one: Any, other: Any) -> None:
    """Types and values, of what lies in lists too."""
    leaves = [pytree.tree_flatten(each) for each in (one, other)]
    assert leaves[0][1] == leaves[1][1]
    assert None in leaves[0][0]
    for have, want in zip(leaves[0][0], leaves[1][0], strict=True):
        assert type(have) is type(want)
        assert torch.equal(have, want) if torch.is_tensor(have) else have == want


@pytest.mark.parametrize("times", [0, 2])
@pytest.mark.parametrize("planned", [False, True])
def test_a_closure_that_is_not_run_just_once_is_found_out(
    planned: bool, times: int, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With no plan yet, or with one in place: it is dropped, and what was captured by it meanwhile is void."""
    from_step = 8 if planned else 0
    job = Job(lambda parameters: Twice(parameters, 0.1))

    def before(n: int) -> None:
        Twice.times = times if n >= from_step else 1
        if planned and n == from_step:
            assert len(kept(tmp_path)) == 1

    monkeypatch.setattr(Twice, "times", 1)
    truths, report = job.run(tmp_path, 14, before)
    assert report["breaches"] == 0
    assert report["planning"]["stage"] == "given up"
    assert report["plan"] is None
    assert caplog.text.count("there is no plan for it: from now on all state is copied at each boundary") == 1
    assert kept(tmp_path) == []
    steps = check(tmp_path, truths)
    assert set(range(1, 15)) - set(steps) <= ({from_step} if planned else set())
    assert report["failed"] == 14 - len(steps)
    assert Beside.recordings == planned


def test_a_capture_is_void_when_the_closure_runs_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a plan that has bytes leave after the step: an audit would find them written, and there is none here."""
    monkeypatch.setattr("checkflow.runtime.snapshot.capturer.Capturer.require_after_step", lambda self: None)
    job = Job(lambda parameters: Twice(parameters, 0.1))

    def before(n: int) -> None:
        Twice.times = 2 if n >= 8 else 1

    monkeypatch.setattr(Twice, "times", 1)
    truths, _ = job.run(tmp_path, 12, before, audit=0)
    assert set(range(1, 13)) - set(check(tmp_path, truths)) <= {8}


def test_no_graph_is_made_of_a_closure_that_runs_again() -> None:
    job = Job(lambda parameters: Twice(parameters, 0.1))
    for make in (trace, record_step):
        with pytest.raises(TraceError, match="Twice runs its closure more than once"):
            make(job.step(), name="n")  # type: ignore[operator]


def test_a_step_that_fails_in_its_closure_leaves_nothing_behind(tmp_path: Path) -> None:
    job = Job(torch.optim.Adam)
    with Checkpointer(job.models, job.optimizers, directory=tmp_path, every=1, on_error="raise") as checkpointer:
        for n in checkpointer.steps(9):
            if n == 6:
                with pytest.raises(ZeroDivisionError):
                    job.optimizer.step(lambda: 1 / 0)
            job.iterate()
    assert checkpointer.report()["failed"] == 0
    assert_checkpoint_is(find(tmp_path)[0], clone_state(job.models, job.optimizers))
    assert not any(isinstance(module, nn.Module) and module._forward_pre_hooks for module in job.model.modules())
