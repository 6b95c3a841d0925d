"""Whatever valid plan runs: every committed checkpoint is the state at one boundary, bit for bit."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from checkflow.api import Checkpointer
from checkflow.core.errors import ConsistencyError, MismatchError
from checkflow.core.plan import Plan
from checkflow.runtime.store.discovery import find
from tests.support.gpu.fake_device import simulate_gpu
from tests.support.oracle import assert_checkpoint_is, clone_state, random_plan, run_oracle, same_bits


class ConvNet(nn.Module):
    """Batch norm, dropout, a tied and a frozen tensor, and channels_last weights."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(16)
        self.conv2 = nn.Conv2d(16, 16, 3, padding=1)
        self.bn2 = nn.BatchNorm2d(16)
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(16, 16, bias=False)
        self.tail = nn.Linear(16, 16, bias=False)
        self.tail.weight = self.head.weight
        self.frozen = nn.Parameter(torch.randn(16), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        x = F.relu(self.bn2(self.conv2(x))) + x
        return self.tail(self.head(self.drop(x.mean((2, 3))))) * self.frozen


def optimizers() -> dict[str, Any]:
    return {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
        "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        "adam for-loop": lambda p: torch.optim.Adam(p, foreach=False),
        "adam foreach": lambda p: torch.optim.Adam(p, foreach=True),
        "adam fused": lambda p: torch.optim.Adam(p, fused=True),
    }


def make_job(optimizer: str) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(0)
    model = ConvNet().to(memory_format=torch.channels_last)
    chosen = optimizers()[optimizer]([p for p in model.parameters() if p.requires_grad])

    def iterate(_iteration: int) -> None:
        x, y = torch.randn(4, 3, 8, 8), torch.randint(0, 16, (4,))
        chosen.zero_grad()
        F.cross_entropy(model(x), y).backward()
        chosen.step()

    return model, chosen, iterate


def warmed_plan(optimizer: str, seed: int) -> Plan:
    """A random plan for the job after its first iteration."""
    model, chosen, iterate = make_job(optimizer)
    iterate(0)
    return random_plan({"model": model}, {"optimizer": chosen}, seed)


@pytest.fixture(autouse=True)
def _random_plans_have_no_link(monkeypatch: pytest.MonkeyPatch) -> None:
    from checkflow import api
    from checkflow.core import plan as plans

    monkeypatch.setattr(api, "check_plan", plans.validate)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


@pytest.fixture
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine for the CPU, or the one for GPUs on a simulated device."""
    if request.param == "GPU":
        simulate_gpu(monkeypatch)


@pytest.mark.parametrize("optimizer", list(optimizers()))
@pytest.mark.parametrize(
    ("engine", "seed"), [*(("CPU", n) for n in range(4)), ("GPU", 0), ("GPU", 1)], indirect=["engine"]
)
@pytest.mark.usefixtures("engine")
def test_every_checkpoint_is_one_boundary(optimizer: str, seed: int, directory: Path) -> None:
    plan = warmed_plan(optimizer, seed)
    model, chosen, iterate = make_job(optimizer)
    models, chosens = {"model": model}, {"optimizer": chosen}
    with Checkpointer(
        model, chosen, directory=directory, plan=plan, every=1, audit=1, keep_latest=100, on_error="raise"
    ) as checkpointer:
        truths = run_oracle(checkpointer, iterate, models, chosens, iterations=12)
    report = checkpointer.report()
    assert report["committed"] == report["audited"] == 12
    assert report["breaches"] == report["failed"] == 0
    paths = find(directory)
    assert [path.name for path in paths] == [f"step-{n:08d}" for n in range(12, 0, -1)]
    for path in paths:
        assert_checkpoint_is(path, truths[int(path.name[5:])])


def test_resumed_job_equals_the_uninterrupted_one(directory: Path) -> None:
    plan = warmed_plan("adam for-loop", 1)
    model, chosen, iterate = make_job("adam for-loop")
    for n in range(9):
        iterate(n)
    truth = clone_state({"model": model}, {"optimizer": chosen})

    for upto in (4, 9):
        model, chosen, iterate = make_job("adam for-loop")
        torch.manual_seed(123 + upto)  # a resumed process starts with other generators
        if upto == 4:
            torch.manual_seed(0)
            model, chosen, iterate = make_job("adam for-loop")
        with Checkpointer(model, chosen, directory=directory, plan=plan, every=1) as checkpointer:
            assert checkpointer.resumed_from == (4 if upto == 9 else None)
            for n in checkpointer.steps(upto):
                iterate(n)
    state = clone_state({"model": model}, {"optimizer": chosen})
    assert state.keys() == truth.keys()
    for name, tensor in truth.items():
        assert same_bits(state[name], tensor), name


def test_a_deadline_ignored_is_caught(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault: chunks are not waited for, and the copy thread is kept from being quick by luck."""
    import threading

    from checkflow.runtime.transfer import host

    gate = threading.Event()
    copy = host.HostCopyEngine._copy

    def slow_copy(self: host.HostCopyEngine, chunks: Sequence[int]) -> None:
        gate.wait()
        copy(self, chunks)

    monkeypatch.setattr(host, "SMALL_BYTES", 0)
    monkeypatch.setattr(host.HostCopyEngine, "_copy", slow_copy)
    wait = host.HostCopyEngine.wait
    monkeypatch.setattr(host.HostCopyEngine, "wait", lambda self, chunks: None)
    plan = warmed_plan("adam for-loop", 2)
    plan = dataclasses.replace(
        plan, chunks=tuple(dataclasses.replace(c, offload_step=0, snapshot_step=None) for c in plan.chunks)
    ).sealed()
    model, chosen, iterate = make_job("adam for-loop")
    checkpointer = Checkpointer(model, chosen, directory=directory, plan=plan, every=1, audit=1, on_error="raise")
    run = checkpointer.steps(2)
    next(run)
    iterate(0)
    next(run)  # the boundary of step 1: its capture begins
    iterate(1)  # and is written over, because nobody waits
    monkeypatch.setattr(host.HostCopyEngine, "wait", wait)
    gate.set()
    with pytest.raises(ConsistencyError, match="torn"):
        checkpointer.close()
    assert find(directory) == ()


def test_the_plan_of_another_model_is_refused(directory: Path) -> None:
    plan = warmed_plan("adam for-loop", 0)
    model, _, _ = make_job("adam for-loop")
    with pytest.raises(MismatchError, match="another job"):
        Checkpointer(nn.Linear(3, 3), torch.optim.Adam(nn.Linear(3, 3).parameters()), directory=directory, plan=plan)
    with pytest.raises(MismatchError, match="Adam for-loop"):
        Checkpointer(model, torch.optim.Adam(model.parameters(), foreach=True), directory=directory, plan=plan)


@pytest.mark.parametrize(
    ("engine", "seed"), [*(("CPU", n) for n in range(3)), ("GPU", 0), ("GPU", 1)], indirect=["engine"]
)
@pytest.mark.usefixtures("engine")
def test_the_plan_is_what_runs(seed: int, directory: Path) -> None:
    plan = warmed_plan("momentum", seed)
    model, chosen, iterate = make_job("momentum")
    anchors = [step.anchor for step in plan.timeline.steps]
    with Checkpointer(model, chosen, directory=directory, plan=plan, every=1) as checkpointer:
        for n in checkpointer.steps(3):
            iterate(n)
    report = checkpointer.last_capture
    assert report is not None
    done = {(record.chunk, record.kind): (record.anchor, record.length_bytes) for record in report.log}
    assert len(done) == len(report.log)
    for index, chunk in enumerate(plan.chunks):
        step = chunk.offload_step
        while anchors[step] is None:
            step -= 1
        released = max(step, chunk.snapshot_step or 0)
        assert done.pop((index, "offload")) == (str(anchors[released]), chunk.length_bytes)
        if chunk.snapshot_step is not None:
            assert done.pop((index, "snapshot")) == (str(anchors[chunk.snapshot_step]), chunk.length_bytes)
    assert not done
    assert report.boundary_bytes == 0  # SGD with momentum keeps nothing in host memory: nothing moves at the boundary
