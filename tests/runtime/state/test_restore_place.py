"""What a restore must not lose or change: shared state, other devices' memory, the loop's place, a mark, a lock."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from checkflow import Checkpointer, DataLoader, load_weights
from checkflow.core.errors import CorruptCheckpointError, LockedError, MismatchError
from checkflow.runtime.state import half_restored
from checkflow.runtime.state.collect import StateWalk, capture_extra, restore_optimizers
from checkflow.runtime.state.restore import resume_from
from checkflow.runtime.store.lock import DirectoryLock
from checkflow.runtime.store.store import Store
from checkflow.runtime.system import fs
from checkflow.runtime.weights.importer import import_weights
from checkflow.runtime.weights.source import open_weights
from tests.support.oracle import same_bits


class Shared(torch.optim.Optimizer):
    """Momentum, and one counter of steps for all parameters."""

    def __init__(self, parameters: Iterator[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        parameters = [one for group in self.param_groups for one in group["params"]]
        if not self.state:
            count = torch.zeros((), device="cpu")
            for one in parameters:
                self.state[one] = {"step": count, "momentum": torch.zeros_like(one)}
        self.state[parameters[0]]["step"] += 1
        for one in parameters:
            state = self.state[one]
            one -= 0.1 / state["step"] * state["momentum"].mul_(0.9).add_(one.grad)


class Late(Shared):
    """Its first step does nothing."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        (group,) = self.param_groups
        if group.setdefault("begun", False):
            super().step()
        group["begun"] = True


class Job:
    """A convolution in channels_last, whose state cannot be read into as it lies, and a layer that can."""

    def __init__(self, kind: Any = torch.optim.Adam) -> None:
        torch.manual_seed(3)
        self.model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 2))
        self.model.to(memory_format=torch.channels_last)
        self.optimizer = kind(self.model.parameters())

    def step(self, inputs: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        self.model(inputs).square().mean().backward()
        self.optimizer.step()

    def run(self, directory: Path, steps: int, **options: Any) -> int | None:
        """Train up to so many steps; returns the step that it went on from."""
        with Checkpointer(
            self.model, self.optimizer, directory=directory, every=1, audit=1, keep_latest=9, **options
        ) as checkpointer:
            for number in checkpointer.steps(steps):
                self.step(torch.linspace(0.0, 1.0 + number, 96, device="cpu").view(2, 3, 4, 4))
            return checkpointer.resumed_from

    def state(self) -> dict[str, torch.Tensor]:
        found = dict(self.model.state_dict())
        for name, parameter in self.model.named_parameters():
            found |= {f"{name} {key}": value for key, value in self.optimizer.state.get(parameter, {}).items()}
        return {name: value.clone() for name, value in found.items()}


def assert_same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert same_bits(value, second[name]), name


@pytest.mark.slow
def test_a_jobs_default_device_is_for_the_jobs_own_tensors(tmp_path: Path) -> None:
    whole, job = Job(), Job()
    whole.run(tmp_path / "whole", 5)
    Job().run(tmp_path / "cut", 3)
    other = Job()
    with torch.device("meta"):
        assert job.run(tmp_path / "cut", 5) == 3
        assert load_weights(other.model, tmp_path / "cut").complete
    assert_same(job.state(), whole.state())
    assert_same(dict(other.model.state_dict()), dict(job.model.state_dict()))


def test_the_loaders_order_does_not_follow_the_default_device() -> None:
    data = TensorDataset(torch.arange(20))
    before = [batch[0].tolist() for batch in DataLoader(data, 4, shuffle=True, seed=5)]
    with torch.device("meta"):
        assert [batch[0].tolist() for batch in DataLoader(data, 4, shuffle=True, seed=5)] == before


@pytest.mark.slow
def test_state_that_parameters_share_is_shared_again(tmp_path: Path) -> None:
    whole, job = Job(Shared), Job(Shared)
    whole.run(tmp_path / "whole", 5)
    Job(Shared).run(tmp_path / "cut", 3)
    assert job.run(tmp_path / "cut", 5) == 3
    assert_same(job.state(), whole.state())
    assert len({id(table["step"]) for table in job.optimizer.state.values()}) == 1


def test_state_that_parameters_share_goes_from_all_of_them(tmp_path: Path) -> None:
    """At the checkpoint there was none yet."""
    Job(Late).run(tmp_path, 1)
    job = Job(Late)
    for _ in range(2):
        job.step(torch.ones(2, 3, 4, 4))
    assert job.optimizer.state
    with Store(tmp_path, run_id="later") as store:
        resumed = resume_from(store, "must", {"model": job.model}, {"optimizer": job.optimizer}, {})
    assert resumed is not None
    assert not job.optimizer.state


@pytest.mark.parametrize("imported", [False, True])
@pytest.mark.parametrize("alike", [False, True])
def test_two_tensors_do_not_become_one_unless_they_are_alike(tmp_path: Path, imported: bool, alike: bool) -> None:
    """One of the two would be lost without a word."""

    def make(tied: bool) -> nn.ModuleDict:
        torch.manual_seed(5)
        model = nn.ModuleDict({"first": nn.Linear(2, 2), "head": nn.Linear(2, 2)})
        if tied:
            model["head"].weight = model["first"].weight
        elif alike:
            model["head"].weight.data.copy_(model["first"].weight)
        return model

    def run(model: nn.ModuleDict, steps: int) -> None:
        optimizer = torch.optim.SGD([model["first"].bias, model["head"].bias], lr=0.1)
        with Checkpointer(model, optimizer, directory=tmp_path / "checkpoints", every=1) as checkpointer:
            for _ in checkpointer.steps(steps):
                model["head"](model["first"](torch.ones(2, 2))).sum().backward()
                optimizer.step()

    saved = make(tied=False)
    if imported:
        torch.save(saved.state_dict(), tmp_path / "weights.pt")
        with open_weights(tmp_path / "weights.pt") as weights:
            import_weights(weights, tmp_path / "checkpoints")
    else:
        run(saved, 1)
    job = make(tied=True)
    with torch.no_grad():
        job["first"].weight.zero_()
    if alike:
        run(job, 1)
        assert same_bits(job["head"].weight, saved["head"].weight)
    else:
        with pytest.raises(MismatchError, match=r"different values for .*first.weight and .*head.weight"):
            run(job, 1)
        assert not job["first"].weight.any()


def test_a_loader_that_does_not_fit_is_refused_before_anything_changes(tmp_path: Path) -> None:
    def loader(samples: int) -> DataLoader:
        return DataLoader(TensorDataset(torch.randn(samples, 3, 4, 4)), 2, shuffle=True, seed=1)

    def open_job(job: Job, samples: int, resume: str | int) -> Checkpointer:
        return Checkpointer(
            job.model, job.optimizer, loader(samples), directory=tmp_path, every=1, resume=resume, keep_latest=9
        )

    job = Job()
    with open_job(job, 8, "auto") as checkpointer:
        for _ in checkpointer.epochs(1):
            for (batch,) in checkpointer.loader:
                job.step(batch)
    names = sorted(path.name for path in tmp_path.glob("step-*"))
    assert len(names) == 4
    for resume in ("auto", 2):
        other = Job()
        before = other.state()
        with pytest.raises(MismatchError, match="run the job as it was, or pass another directory"):
            open_job(other, 10, resume)
        assert_same(other.state(), before)
        assert sorted(path.name for path in tmp_path.glob("*step-*")) == names
        other.step(torch.ones(2, 3, 4, 4))
    again = Job()
    with open_job(again, 8, "must") as checkpointer:
        assert checkpointer.resumed_from == 4
    assert_same(again.state(), job.state())


def test_an_interrupted_attempt_to_make_a_job_good_leaves_its_mark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, real = Job(), half_restored.lift
    parts: Any = {"model": job.model}, {"optimizer": job.optimizer}
    half_restored.mark(*parts)

    def lift(*arguments: Any) -> None:
        real(*arguments)
        monkeypatch.undo()
        raise KeyboardInterrupt

    with Store(tmp_path, run_id="run") as store:
        monkeypatch.setattr(half_restored, "lift", lift)
        with pytest.raises(KeyboardInterrupt):
            resume_from(store, "auto", *parts, {})
    with pytest.raises(CorruptCheckpointError, match="half restored"):
        job.step(torch.ones(2, 3, 4, 4))


def test_a_child_that_is_forked_while_a_lock_is_awaited_does_not_hold_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting, real, found = threading.Event(), fs.flock, []

    def flock(fd: int) -> None:
        try:
            real(fd)
        except BlockingIOError:
            waiting.set()
            raise

    first = DirectoryLock(tmp_path)
    monkeypatch.setattr(fs, "flock", flock)
    thread = threading.Thread(target=lambda: found.append(DirectoryLock(tmp_path, wait_seconds=300.0)))
    thread.start()
    assert waiting.wait(120)
    begun, end = os.pipe(), os.pipe()
    if (child := os.fork()) == 0:
        os.close(end[1])
        os.write(begun[1], b"x")
        os.read(end[0], 1)
        os._exit(0)
    try:
        assert os.read(begun[0], 1) == b"x"
        first.release()
        thread.join()
        with pytest.raises(LockedError):
            DirectoryLock(tmp_path, wait_seconds=0.0)
        found[0].release()
        DirectoryLock(tmp_path, wait_seconds=0.0).release()
    finally:
        for fd in (*begun, *end):
            os.close(fd)
        os.waitpid(child, 0)


def test_what_an_optimizer_keeps_for_all_parameters_returns_where_it_lay() -> None:
    """A checkpoint's tensors are read into host memory. The other device is "meta" here."""
    model = nn.Sequential(nn.Embedding(2, 2), nn.Linear(2, 2, device="meta"))  # its table stays in host memory
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state["all"] = {"sum": torch.zeros(3, device="meta"), "seen": [torch.arange(2), 5]}  # type: ignore[index]
    optimizer.state[model[1].bias]["al"] = [torch.zeros(2, device="meta"), None]  # as LBFGS
    optimizer.state[model[0].weight]["sum"] = torch.zeros(2, 2)  # tensors alone: nothing lies beside the state
    walk = StateWalk({"model": model}, {"optimizer": optimizer})
    walk.current()
    extra = capture_extra(walk, {"optimizer": optimizer}, {})["job"]
    saved = extra["optimizers"]["optimizer"]
    assert saved["values"].keys() == {"1.bias"}
    saved["others"] = {"all": {"sum": torch.ones(3), "seen": [torch.arange(2), 5]}}
    saved["values"]["1.bias"]["al"] = [torch.ones(2), None]
    optimizer.state.clear()
    restore_optimizers(extra, {"model": model}, {"optimizer": optimizer})
    restored = optimizer.state["all"]  # type: ignore[index]
    assert (restored["sum"].device.type, restored["seen"][0].device.type) == ("meta", "cpu")
    assert restored["seen"][1] == 5
    first, second = optimizer.state[model[1].bias]["al"]
    assert (first.device.type, second) == ("meta", None)
    del saved["others_apart"]  # of an earlier release
    restore_optimizers(extra, {"model": model}, {"optimizer": optimizer})
    assert optimizer.state["all"]["sum"].device.type == "cpu"  # type: ignore[index]


class SGD(torch.optim.SGD):
    """It keeps the first rows of each momentum, as one of several ranks might."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for state in self.state.values():
            state["momentum_buffer"] = state["momentum_buffer"][:2].clone()


def test_state_that_does_not_fit_its_parameter_is_refused_by_name(tmp_path: Path) -> None:
    """The optimizer makes it only at its first step, so that nothing of the job has its shape."""
    model = nn.Linear(3, 4)
    with Checkpointer(model, SGD(model.parameters(), momentum=0.9), directory=tmp_path) as checkpointer:
        optimizer = checkpointer._job.optimizers["optimizer"]
        for _ in checkpointer.steps(1):
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
    other = nn.Linear(3, 4)
    before = [parameter.detach().clone() for parameter in other.parameters()]
    with pytest.raises(MismatchError, match=r"optimizer/(weight|bias)\.momentum_buffer is \[2.*SGD makes it in the"):
        Checkpointer(other, torch.optim.SGD(other.parameters(), momentum=0.9), directory=tmp_path)
    assert all(map(torch.equal, before, other.parameters()))
