"""The Checkpointer's manners: boundaries, failures that training survives, refusals, and giving everything back."""

from __future__ import annotations

import contextlib
import copy
import errno
import itertools
import logging
import multiprocessing
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import checkflow
from checkflow import api
from checkflow.api import Checkpointer
from checkflow.core import plan as plans
from checkflow.core.errors import MismatchError, PlanError, StorageError, UnsupportedError
from checkflow.core.plan import Plan
from checkflow.runtime.data.loader import DataLoader
from checkflow.runtime.format import codec
from checkflow.runtime.persist import writer
from checkflow.runtime.state import restore as restores
from checkflow.runtime.store.discovery import find
from checkflow.runtime.store.reader import open_checkpoint
from checkflow.runtime.store.store import Store
from checkflow.runtime.system import fs
from tests.support.oracle import assert_checkpoint_is, clone_state, random_plan, same_bits
from tests.support.simulated import rule_pace
from tests.support.waiting import wait_for

Job = tuple[nn.Sequential, torch.optim.Optimizer, Any]


@pytest.fixture(autouse=True)
def _random_plans_have_no_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "check_plan", plans.validate)


def make(width: int = 16) -> Job:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def iterate(x: torch.Tensor | None = None, y: torch.Tensor | None = None) -> None:
        x = torch.randn(6, 4) if x is None else x
        y = torch.randint(0, 3, (len(x),)) if y is None else y
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    return model, optimizer, iterate


def make_plan(width: int = 16) -> Plan:
    model, optimizer, iterate = make(width)
    iterate()
    return random_plan({"model": model}, {"optimizer": optimizer}, 0)


def steps(directory: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in find(directory))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB."""
    mount = tmp_path / "disk"
    mount.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(mount)], capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"mounting a small file system is not allowed here: {done.stderr.strip()}")
    yield mount
    subprocess.run(["umount", str(mount)], check=True)


def fill(ballast: Path) -> None:
    """Write until nothing more fits."""
    with open(ballast, "wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(4096)):
            pass


def test_a_full_disk_stops_checkpoints_and_not_training(small_disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    plan = make_plan()
    model, optimizer, iterate = make()
    ballast = small_disk / "ballast"
    with Checkpointer(model, optimizer, directory=small_disk / "checkpoints", plan=plan, every=1) as checkpointer:
        for n in checkpointer.steps(9):
            iterate()
            if n == 3:
                # Until old ones have gone: what they leave would be room for the next one.
                wait_for(lambda: steps(small_disk / "checkpoints") == [2, 3])
                fill(ballast)
            if n == 6:
                ballast.unlink()
    report = checkpointer.report()
    assert checkpointer.iteration == 9
    assert report["failed"] >= 1
    assert report["committed"] == 9 - report["failed"]
    assert steps(small_disk / "checkpoints")[-1] == 9
    assert "No space left" in caplog.text
    truth = clone_state({"model": model}, {"optimizer": optimizer})
    assert_checkpoint_is(find(small_disk / "checkpoints")[0], truth)


def test_a_full_disk_raises_if_asked(small_disk: Path) -> None:
    plan = make_plan()
    model, optimizer, iterate = make()
    with (
        pytest.raises(StorageError, match="No space left"),
        Checkpointer(
            model, optimizer, directory=small_disk / "checkpoints", plan=plan, every=1, on_error="raise"
        ) as checkpointer,
    ):
        fill(small_disk / "ballast")
        for _ in checkpointer.steps(20):
            iterate()


def test_each_reason_for_failing_is_told_once_then_now_and_then_and_that_it_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Steps 2 to 8 meet a full disk, with a message each of their own; 9 and 10 another fault."""
    plan = make_plan()
    model, optimizer, iterate = make()
    commit, clock = Store.commit, [0.0]

    def failing(self: Store, number: int, *rest: Any, **more: Any) -> Path:
        clock[0] = 60.0 if number >= 7 else 0.0
        if 2 <= number <= 8:
            raise StorageError(f"cannot write step-{number}: full") from OSError(errno.ENOSPC, "full")
        if number in (9, 10):
            raise StorageError("worn out") from OSError(errno.EIO, "worn out")
        return commit(self, number, *rest, **more)

    monkeypatch.setattr(Store, "commit", failing)
    monkeypatch.setattr(writer, "time", SimpleNamespace(monotonic=lambda: clock[0], perf_counter=time.perf_counter))
    with (
        caplog.at_level(logging.INFO, "checkflow.runtime"), caplog.at_level(logging.INFO, "checkflow"),
        Checkpointer(model, optimizer, directory=tmp_path, plan=plan, every=1) as checkpointer,
    ):  # fmt: skip
        for _ in checkpointer.steps(12):
            iterate()
    said = [one.getMessage() for one in caplog.records if one.getMessage().startswith("checkpoint of")]
    assert said == [
        "checkpoint of step 2 failed, training goes on: cannot write step-2: full",
        "checkpoint of step 7 failed, training goes on: cannot write step-7: full (so did 4 before it)",
        "checkpoint of step 9 failed, training goes on: worn out",
        "checkpoint of step 11 is saved: checkpoints succeed again",
    ]
    assert checkpointer.report()["failed"] == 9


def failing_commits(monkeypatch: pytest.MonkeyPatch, step: int, times: int) -> list[bool]:
    """Commits of this step fail, so many times; what is returned grows with each try: whether that ended an epoch."""
    commit, tries = Store.commit, []

    def failing(self: Store, number: int, layout: Any, staging: Any, extra: Any, info: Any, **keywords: Any) -> Path:
        if number == step:
            tries.append(info["epoch_end"])
            if len(tries) <= times:
                raise StorageError("planted")
        return commit(self, number, layout, staging, extra, info, **keywords)

    monkeypatch.setattr(Store, "commit", failing)
    return tries


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("on_error", ["warn", "raise"])
def test_the_end_of_training_is_tried_twice_and_saved_as_it_was(
    on_error: Any, times: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Any other checkpoint that fails is made up for by the next one."""
    plan = make_plan()
    model, optimizer, iterate = make()
    tries = failing_commits(monkeypatch, 5, times)
    raised = pytest.raises(StorageError) if times == 2 else contextlib.nullcontext()
    with (
        raised,
        Checkpointer(
            model, optimizer, directory=tmp_path, plan=plan, every=1, audit=1, keep_latest=9, on_error=on_error
        ) as checkpointer,
    ):
        for _ in checkpointer.steps(5):
            iterate()
        truth = clone_state({"model": model}, {"optimizer": optimizer})
        numbers = torch.get_rng_state()
        wait_for(lambda: checkpointer.report()["failed"])
        for parameter in model.parameters():
            parameter.data.zero_()  # another average's weights: no version counter moves
        optimizer.param_groups[0]["lr"] = 123.0
        torch.rand(3)
    assert len(tries) == 2
    assert steps(tmp_path) == [1, 2, 3, 4, 5][: 6 - times]
    assert checkpointer.report()["failed"] == times
    assert caplog.text.count("checkpoint of step 5 failed, training goes on: planted") == times  # the last word, too
    if times == 1:
        assert_checkpoint_is(find(tmp_path)[0], truth)
        torch.manual_seed(5)
        model, optimizer, _ = make()
        with Checkpointer(model, optimizer, directory=tmp_path, plan=plan, every=1) as checkpointer:
            for _ in checkpointer.steps(5):
                pytest.fail("nothing is left")
            assert torch.equal(torch.get_rng_state(), numbers)
        assert optimizer.param_groups[0]["lr"] == 0.01


def test_a_lost_end_of_an_epoch_is_saved_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan()
    model, optimizer, iterate = make()
    tries = failing_commits(monkeypatch, 4, 1)
    data = TensorDataset(torch.randn(12, 4), torch.randint(0, 3, (12,)))
    with Checkpointer(model, optimizer, DataLoader(data, 6), directory=tmp_path, plan=plan, every=1) as checkpointer:
        for _ in checkpointer.epochs(2):
            for x, y in checkpointer.loader:
                iterate(x, y)
    assert tries == [True, True]
    assert open_checkpoint(find(tmp_path)[0]).manifest.info["epoch_end"] is True


def test_a_lost_checkpoint_in_training_is_left_to_the_next_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan()
    model, optimizer, iterate = make()
    tries = failing_commits(monkeypatch, 2, 9)
    with Checkpointer(
        model, optimizer, directory=tmp_path, plan=plan, every=1, keep_latest=9, host_buffers=1
    ) as checkpointer:
        for _ in checkpointer.steps(4):
            iterate()
    assert len(tries) == 1
    assert steps(tmp_path) == [1, 3, 4]


def test_state_made_in_inference_mode_is_saved(tmp_path: Path) -> None:
    """It has no version counters."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    with torch.inference_mode():
        model.register_buffer("scale", torch.ones(3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with checkflow.Checkpointer(model, optimizer, directory=tmp_path, every=2, audit=1) as checkpointer:
        for _ in checkpointer.steps(5):
            optimizer.zero_grad()
            model(torch.randn(2, 4)).sum().backward()
            optimizer.step()
        truth = clone_state({"model": model}, {"optimizer": optimizer})
    assert steps(tmp_path) == [4, 5]
    assert_checkpoint_is(find(tmp_path)[0], truth)


def test_a_fault_inside_a_hook_gives_up_that_checkpoint_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from checkflow.runtime.transfer.host import HostCopyEngine

    plan = make_plan()
    model, optimizer, iterate = make()
    snapshot = HostCopyEngine.snapshot

    def failing(self: HostCopyEngine, chunks: Any, anchor: str) -> None:
        if checkpointer.iteration == 2:
            raise MemoryError("no memory for a snapshot")
        snapshot(self, chunks, anchor)

    with Checkpointer(model, optimizer, directory=tmp_path, plan=plan, every=1, audit=1, keep_latest=9) as checkpointer:
        monkeypatch.setattr(HostCopyEngine, "snapshot", failing)
        for _ in checkpointer.steps(5):
            iterate()
    assert steps(tmp_path) == [1, 3, 4, 5]
    assert checkpointer.report()["failed"] == 1


def test_a_fault_after_the_last_copy_voids_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from checkflow.runtime.snapshot.capturer import Capturer

    plan = make_plan()
    model, optimizer, iterate = make()
    with Checkpointer(model, optimizer, directory=tmp_path, plan=plan, every=1, audit=1, keep_latest=9) as checkpointer:
        require = Capturer.require

        def failing(self: Capturer, chunks: Any) -> None:
            self.finish()
            raise RuntimeError("planted")

        for n in checkpointer.steps(6):
            monkeypatch.setattr(Capturer, "require", failing if n == 3 else require)
            iterate()
    assert steps(tmp_path) == [1, 2, 3, 4, 5, 6]
    assert checkpointer.report()["committed"] == 6


def test_what_follows_the_step_belongs_to_the_iteration(tmp_path: Path) -> None:
    """EMA, clamps and schedulers after optimizer.step() are part of the checkpoint, with or without a loader."""
    plan = make_plan()
    for use_loader in (True, False):
        model, optimizer, iterate = make()
        directory = tmp_path / str(use_loader)
        data = TensorDataset(torch.randn(10, 4), torch.randint(0, 3, (10,)))
        loader = DataLoader(data, 2) if use_loader else None
        truths: dict[int, Any] = {}
        with Checkpointer(model, optimizer, loader, directory=directory, plan=plan, every=1, keep_latest=9) as job:
            batches = job.loader if use_loader else [(x.unsqueeze(0).expand(2, 4), None) for x in torch.randn(5, 4)]
            for n, (x, y) in enumerate(batches, 1):
                iterate(x, y)
                with torch.no_grad():
                    model[0].weight.clamp_(-0.1, 0.1)
                optimizer.param_groups[0]["lr"] *= 0.5
                truths[n] = clone_state({"model": model}, {"optimizer": optimizer})
        assert steps(directory) == [1, 2, 3, 4, 5]
        for path in find(directory):
            assert_checkpoint_is(path, truths[int(path.name[5:])])
        fresh, other, _ = make()
        with Checkpointer(fresh, other, directory=directory, plan=plan) as job:
            assert job.resumed_from == 5
            assert other.param_groups[0]["lr"] == 0.01 * 0.5**5


def test_going_back_to_an_older_step(tmp_path: Path) -> None:
    plan = make_plan()
    model, optimizer, iterate = make()
    truths: dict[int, Any] = {}
    with Checkpointer(model, optimizer, directory=tmp_path, plan=plan, every=1, keep_latest=9) as checkpointer:
        for _ in checkpointer.steps(5):
            iterate()
            truths[checkpointer.iteration + 1] = clone_state({"model": model}, {"optimizer": optimizer})
    with pytest.raises(StorageError, match="no checkpoint of that step"):
        Checkpointer(model, optimizer, directory=tmp_path, plan=plan, resume=7)
    with Checkpointer(model, optimizer, directory=tmp_path, plan=plan, every=1, resume=2) as checkpointer:
        assert checkpointer.iteration == 2
        state = clone_state({"model": model}, {"optimizer": optimizer})
        assert all(same_bits(state[name], tensor) for name, tensor in truths[2].items())
        for _ in checkpointer.steps(3):
            iterate()
    assert steps(tmp_path) == [2, 3]  # the abandoned later ones are out of the way, not deleted
    assert len(list(tmp_path.glob(".superseded-*"))) == 3


def test_every_nth_iteration_and_retention(tmp_path: Path) -> None:
    plan = make_plan()
    model, optimizer, iterate = make()
    with Checkpointer(model, optimizer, directory=tmp_path, plan=plan, every=3, keep_latest=2) as checkpointer:
        for _ in checkpointer.steps(14):
            iterate()
            assert checkpointer.report()["captures"] == (checkpointer.iteration) // 3
    assert steps(tmp_path) == [12, 14]  # the end of training is saved, whatever its number is


def test_a_close_outside_of_a_with_block_takes_nothing_for_an_iteration(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of several optimizers one may not have stepped; an exception may have come from anywhere."""
    plan, (model, optimizer, iterate) = make_plan(), make()
    job = Checkpointer(model, optimizer, directory=tmp_path, plan=plan, every=1, keep_latest=9)
    for _ in range(3):
        iterate()
    job.close()
    assert steps(tmp_path) == [1, 2]
    assert caplog.text.count("what was trained after step 2 is not saved; train in a with block") == 1
    model, optimizer, iterate = make()
    job = Checkpointer(model, optimizer, directory=tmp_path, plan=plan, every=100, keep_latest=9)
    with pytest.raises(ZeroDivisionError):
        try:
            iterate()
            job.step()
            raise ZeroDivisionError
        finally:
            job.close()
    assert steps(tmp_path) == [1, 2]


@pytest.mark.parametrize("way", ["steps", "step()", "epochs", "break", "close"])
def test_the_end_of_training_is_saved_beside_every_nth_iteration(way: str, tmp_path: Path) -> None:
    """Once, and no end of an epoch besides."""
    plan, (model, optimizer, iterate) = make_plan(), make()
    data = TensorDataset(torch.randn(14, 4), torch.randint(0, 3, (14,)))
    loader = DataLoader(data, 2) if way == "epochs" else None
    job = Checkpointer(model, optimizer, loader, directory=tmp_path, plan=plan, every=5, keep_latest=9)
    truths = {}

    def note() -> None:
        truths[job.iteration + 1] = clone_state({"model": model}, {"optimizer": optimizer})

    if way == "close":
        for _ in range(7):
            iterate()
            note()
            job.step()
        job.close()
        assert steps(tmp_path) == [5, 7]
        assert_checkpoint_is(find(tmp_path)[0], truths[7])
        return
    with job:
        if way == "epochs":
            for _ in job.epochs(2):
                for x, y in job.loader:
                    iterate(x, y)
                    note()
            assert job.report()["captures"] == 3  # before what follows the loop
        elif way == "step()":
            for _ in range(14):
                iterate()
                note()
                job.step()
        else:
            for n in job.steps(14 if way == "steps" else 99):
                iterate()
                note()
                if n == 13:
                    break
    assert steps(tmp_path) == [5, 10, 14]
    assert_checkpoint_is(find(tmp_path)[0], truths[14])


def test_storage_takes_the_newest_if_it_is_slower(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from checkflow.runtime.store.store import Store

    rule_pace(monkeypatch, rests=False)
    plan, taken, gate = make_plan(), threading.Event(), threading.Event()
    commit = Store.commit

    def slow(self: Store, *arguments: Any, **keywords: Any) -> Path:
        taken.set()
        gate.wait()
        return commit(self, *arguments, **keywords)

    monkeypatch.setattr(Store, "commit", slow)
    model, optimizer, iterate = make()
    with Checkpointer(model, optimizer, directory=tmp_path, plan=plan, keep_latest=9) as checkpointer:
        for n in checkpointer.steps(8):
            iterate()
            taken.wait() if n == 1 else None  # the first one is delivered by now
            if n == 6:
                gate.set()
    report = checkpointer.report()
    assert report["captures"] == 8
    assert report["superseded"] >= 3
    assert report["committed"] + report["superseded"] == 8
    assert steps(tmp_path)[0] == 1
    assert steps(tmp_path)[-1] == 8


def test_exceptions_leave_a_whole_checkpoint_behind(tmp_path: Path) -> None:
    plan = make_plan()
    model, optimizer, iterate = make()
    truth = {}
    with (
        pytest.raises(KeyboardInterrupt),
        Checkpointer(model, optimizer, directory=tmp_path, plan=plan, every=1, audit=1) as checkpointer,
    ):
        for n in checkpointer.steps(9):
            if n == 4:
                truth = clone_state({"model": model}, {"optimizer": optimizer})
                model(torch.randn(6, 4))  # batch norm has written; the step has not been made
                raise KeyboardInterrupt
            iterate()
    assert steps(tmp_path)[-1] == 4
    assert_checkpoint_is(find(tmp_path)[0], truth)


def test_closing_ends_workers_that_persist(tmp_path: Path) -> None:
    """They are told to end, and hear of it: nobody has to terminate them."""
    plan = make_plan()
    model, optimizer, iterate = make()
    data = TensorDataset(torch.randn(8, 4), torch.randint(0, 3, (8,)))
    loader = DataLoader(data, 4, num_workers=2, persistent_workers=True, multiprocessing_context="fork")
    with Checkpointer(model, optimizer, loader, directory=tmp_path, plan=plan) as checkpointer:
        for _ in checkpointer.epochs(2):
            for x, y in checkpointer.loader:
                iterate(x, y)
        workers = multiprocessing.active_children()
        assert len(workers) == 2
        assert [worker.exitcode for worker in workers] == [None, None]
    assert [worker.exitcode for worker in workers] == [0, 0]
    assert multiprocessing.active_children() == []
    loader.set_epoch(5)
    assert [len(x) for x, _ in loader] == [4, 4]  # and can be used again
    loader.end_workers()


def test_only_parameters_that_processes_share_are_refused(tmp_path: Path) -> None:
    """Not a counter in shared memory, nor a copy of a model that came from another process."""
    shared = make()[0].share_memory()
    with pytest.raises(UnsupportedError, match=r"parameter model/\S+ lies in memory that processes share"):
        checkflow.Checkpointer(shared, torch.optim.SGD(shared.parameters(), 0.1), directory=tmp_path)
    assert not any(tmp_path.iterdir())
    model = copy.deepcopy(shared)
    model.register_buffer("seen", torch.zeros(3).share_memory_())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with checkflow.Checkpointer(model, optimizer, directory=tmp_path, every=1, on_error="raise") as checkpointer:
        for _ in checkpointer.steps(2):
            model(torch.randn(6, 4)).sum().backward()
            optimizer.step()
    assert len(find(tmp_path)) == 2


def test_state_that_the_plan_does_not_know_is_copied_at_the_boundary(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plan = make_plan()
    model, optimizer, iterate = make()
    truth = {}
    with Checkpointer(model, optimizer, directory=tmp_path, plan=plan, every=1, audit=1) as checkpointer:
        for n in checkpointer.steps(5):
            if n == 2:
                model.register_buffer("late", torch.arange(5.0))
            iterate()
        truth = clone_state({"model": model}, {"optimizer": optimizer})
    assert "model/late" in truth
    assert "not in the plan" in caplog.text
    assert checkpointer.report()["breaches"] == 0
    assert_checkpoint_is(find(tmp_path)[0], truth)


def test_replaced_tensors_are_followed(tmp_path: Path) -> None:
    """``.data`` reassigned in the middle of an iteration: the boundary's bytes are what is saved."""
    plan = make_plan()
    model, optimizer, iterate = make()
    truths = {}
    with Checkpointer(
        model, optimizer, directory=tmp_path, plan=plan, every=1, audit=1, keep_latest=9, on_error="raise"
    ) as checkpointer:
        for n in checkpointer.steps(6):
            if n:
                truths[n] = clone_state({"model": model}, {"optimizer": optimizer})
            model[0].weight.data = model[0].weight.data * 1.5
            iterate()
            model[3].weight.data = model[3].weight.data.clone()
    for path in find(tmp_path):
        if (step := int(path.name[5:])) in truths:
            assert_checkpoint_is(path, truths[step])


def test_ties_and_absent_state_are_in_the_manifest(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    plan = random_plan({"model": model}, {"optimizer": optimizer}, 0)
    optimizer.state.clear()
    with Checkpointer(model, optimizer, directory=tmp_path, plan=plan, every=1) as checkpointer:
        for n in checkpointer.steps(2):
            optimizer.zero_grad()
            model[:2](torch.randn(3, 4)).sum().backward()  # the last layer gets no gradient, and so no momentum
            optimizer.step()
            if n == 1:
                truth = clone_state({"model": model}, {"optimizer": optimizer})
    with open_checkpoint(find(tmp_path)[0]) as checkpoint:
        assert checkpoint.ties == (("model/1.weight", "model/0.weight"),)
        assert set(checkpoint.manifest.absent) == {
            "optimizer/2.weight.momentum_buffer",
            "optimizer/2.bias.momentum_buffer",
        }
    assert_checkpoint_is(find(tmp_path)[0], truth)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter]["momentum_buffer"] = torch.ones_like(parameter)
    with Checkpointer(model, optimizer, directory=tmp_path, plan=plan):
        assert model[2].weight not in optimizer.state  # what was absent is taken away again


def by_epochs(checkpointer: Checkpointer) -> Iterator[Any]:
    for _ in checkpointer.epochs(3):
        yield from checkpointer.loader


def by_loader(checkpointer: Checkpointer) -> Iterator[Any]:
    while checkpointer.iteration < 8:  # the ninth batch is being trained on then
        yield from checkpointer.loader


def ahead(checkpointer: Checkpointer) -> Iterator[Any]:
    """Batches are fetched one before they are used, over the ends of epochs too."""
    batches = itertools.chain.from_iterable(checkpointer.loader for _ in itertools.count())
    following = next(batches)
    while checkpointer.iteration < 9:
        batch, following = following, next(batches)
        yield batch
        checkpointer.step()


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("loop", [by_epochs, by_loader, ahead])
def test_an_order_that_is_drawn_goes_on_where_it_stopped(tmp_path: Path, loop: Any, shuffle: bool) -> None:
    plan = make_plan()
    data = TensorDataset(torch.arange(6), torch.randn(6, 4), torch.randint(0, 3, (6,)))

    def train(directory: Path, seed: int, stop: int) -> list[tuple[list[int], float]]:
        """What each iteration used, and a number drawn in it."""
        model, optimizer, iterate = make()
        torch.manual_seed(seed)
        used = []
        with (
            contextlib.suppress(KeyboardInterrupt),
            Checkpointer(
                model, optimizer, DataLoader(data, 2, shuffle), directory=directory, plan=plan, every=1
            ) as checkpointer,
        ):
            for indices, x, y in loop(checkpointer):
                iterate(x, y)
                used.append((indices.tolist(), torch.rand(()).item()))
                if len(used) == stop:
                    raise KeyboardInterrupt
        return used

    truth = train(tmp_path / "truth", 0, 99)
    assert len(truth) == 9
    assert len({str(used) for used, _ in truth}) > 3 or not shuffle
    for stop in (1, 3, 4, 8):  # the fourth is the first of the second epoch
        first = train(tmp_path / str(stop), 0, stop)
        done = find(tmp_path / str(stop))
        begin = int(done[0].name[5:]) if done else 0
        assert begin >= stop - 1
        # Another seed: nothing but the checkpoint says how to go on.
        assert first[:begin] + train(tmp_path / str(stop), 1 if begin else 0, 99) == truth


@pytest.mark.parametrize("numbers", [(3,), (1, 4), (-2, 1), (2, 2), (0,)])
def test_epochs_and_steps_are_counted_as_by_range(tmp_path: Path, numbers: tuple[int, ...]) -> None:
    plan = make_plan()
    data = TensorDataset(torch.randn(2, 4), torch.randint(0, 3, (2,)))

    def run(way: str, stop: int) -> list[int]:
        model, optimizer, iterate = make()
        seen = []
        loader = DataLoader(data, 2) if way == "epochs" else None
        with Checkpointer(model, optimizer, loader, directory=tmp_path / way, plan=plan, every=1) as checkpointer:
            for number in getattr(checkpointer, way)(*numbers):
                seen.append(number)
                for batch in checkpointer.loader if loader is not None else [()]:
                    iterate(*batch)
                if len(seen) == stop:
                    break
        return seen

    for way in ("epochs", "steps"):
        assert run(way, 2) + run(way, 99) == list(range(*numbers))
        assert run(way, 99) == []


@pytest.mark.slow
def test_closed_by_nobody_it_closes_as_the_process_ends(tmp_path: Path) -> None:
    """An error ends a script that has no ``with`` block: what was captured is committed, and nothing hangs."""
    code = """
import torch, checkflow
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
checkpointer = checkflow.Checkpointer(model, optimizer, directory="checkpoints", every=1)
for number in checkpointer.steps(9):
    if number == 5:
        raise SystemExit("planted")
    optimizer.zero_grad()
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    said = [line for line in done.stderr.splitlines() if not line.startswith("checkflow: ")]
    assert said == ["planted"]
    assert steps(tmp_path / "checkpoints")[-1] == 5


def test_bad_arguments(tmp_path: Path) -> None:
    plan = make_plan()
    model, optimizer, _ = make()
    for name, bad in [
        ("every", 0),
        ("every", 1.5),
        ("host_buffers", 0),
        ("resume", "maybe"),
        ("on_error", "x"),
        ("audit", -1),
    ]:
        with pytest.raises(ValueError, match=name):
            Checkpointer(model, optimizer, directory=tmp_path, plan=plan, **{name: bad})
    with pytest.raises(UnsupportedError, match=r"checkflow\.DataLoader"):
        Checkpointer(model, optimizer, [1, 2], directory=tmp_path, plan=plan)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="cannot read"):
        Checkpointer(model, optimizer, directory=tmp_path, plan=tmp_path / "missing.json")
    with pytest.raises(StorageError, match="must"):
        Checkpointer(model, optimizer, directory=tmp_path, plan=plan, resume="must")
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError):
        Checkpointer(model, optimizer, directory=tmp_path / "file" / "checkpoints", plan=plan)
    with Checkpointer(model, optimizer, directory=tmp_path, plan=plan) as checkpointer:
        with pytest.raises(UnsupportedError, match="without a loader"):
            next(checkpointer.epochs(2))
        optimizer.zero_grad()
        model(torch.randn(6, 4)).sum().backward()
        optimizer.step()
    with pytest.raises(StorageError, match="never"):
        Checkpointer(model, optimizer, directory=tmp_path, plan=plan, resume="never")
    other, its_optimizer, _ = make(17)
    with pytest.raises(MismatchError):
        Checkpointer(other, its_optimizer, directory=tmp_path, plan=make_plan(17))
    assert torch.equal(other[0].weight, make(17)[0][0].weight)  # refused before anything was written


def test_the_log_speaks_of_a_resume(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plan = make_plan()
    model, optimizer, iterate = make()
    with Checkpointer(model, optimizer, directory=tmp_path, plan=plan) as checkpointer:
        for _ in checkpointer.steps(3):
            iterate()
    with caplog.at_level(logging.INFO, "checkflow"), Checkpointer(model, optimizer, directory=tmp_path, plan=plan):
        assert "resumed from step 3" in caplog.text


def test_a_second_loop_that_does_nothing_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer, iterate = make()
    with Checkpointer(model, optimizer, directory=tmp_path, plan=make_plan()) as checkpointer:
        for _ in checkpointer.steps(4):
            iterate()
        assert "nothing left" not in caplog.text
        assert list(checkpointer.steps(4, 8)) == []
    assert "steps(4, 8) has nothing left to do: 4 are done, counted over the whole job" in caplog.text
    caplog.clear()
    with Checkpointer(model, optimizer, directory=tmp_path, plan=make_plan()) as checkpointer:
        assert list(checkpointer.steps(4)) == []  # a job that was finished already
    assert "nothing left" not in caplog.text


def shadow(model: nn.Module) -> None:
    """As an average of the weights takes their place for evaluation: no version counter tells."""
    for parameter in model.parameters():
        parameter.data = torch.zeros_like(parameter.data)


@pytest.mark.parametrize("way", ["steps", "epochs"])
def test_what_follows_the_loop_is_not_the_end_of_training(tmp_path: Path, way: str) -> None:
    plan, (model, optimizer, iterate) = make_plan(), make()
    loader = DataLoader(TensorDataset(torch.randn(30, 4), torch.randint(0, 3, (30,))), 6, seed=0)
    with Checkpointer(
        model, optimizer, loader if way == "epochs" else None, directory=tmp_path, plan=plan, every=4
    ) as checkpointer:
        if way == "epochs":
            for _ in checkpointer.epochs(2):
                for x, y in checkpointer.loader:
                    iterate(x, y)
        else:
            for _ in checkpointer.steps(10):
                iterate()
        state, generators = clone_state({"model": model}, {"optimizer": optimizer}), torch.get_rng_state()
        shadow(model)
        torch.rand(5)
    assert_checkpoint_is(tmp_path / "step-00000010", state)
    with open_checkpoint(tmp_path / "step-00000010") as checkpoint:
        assert torch.equal(codec.decode(checkpoint.extra_bytes)["generators"]["torch"], generators)


def test_memory_that_was_changed_after_an_explicit_last_step_is_not_saved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plan, (model, optimizer, iterate) = make_plan(), make()
    with Checkpointer(model, optimizer, directory=tmp_path, plan=plan, every=4) as checkpointer:
        for _ in range(6):
            iterate()
            checkpointer.step()
        shadow(model)
    assert steps(tmp_path) == [4]
    assert "step 6 is not saved: the state was changed after it" in caplog.text


def test_memory_that_is_replaced_in_each_iteration_is_saved_at_the_last_step(tmp_path: Path) -> None:
    plan, (model, optimizer, iterate) = make_plan(), make()
    with Checkpointer(model, optimizer, directory=tmp_path, plan=plan, every=4) as checkpointer:
        for _ in range(6):
            iterate()
            for parameter in model.parameters():
                parameter.data = parameter.data.clamp(-1, 1)
            checkpointer.step()
        state = clone_state({"model": model}, {"optimizer": optimizer})
    assert steps(tmp_path) == [4, 6]
    assert_checkpoint_is(tmp_path / "step-00000006", state)


@pytest.mark.parametrize("gone", [False, True])
def test_the_log_names_a_directory_where_it_is(tmp_path: Path, caplog: pytest.LogCaptureFixture, gone: bool) -> None:
    """Moved while the job runs, or deleted: nothing is where it was."""
    model, optimizer, iterate = make()
    directory, moved = tmp_path / "ckpt", tmp_path / "moved"
    where = f"no longer at {directory}" if gone else f"{moved}, moved there from {directory}"
    with caplog.at_level(logging.INFO, "checkflow"):
        with (
            pytest.raises(StorageError, match=f"durable in {where}"),
            Checkpointer(model, optimizer, directory=directory, plan=make_plan(), every=1) as checkpointer,
        ):
            for step in checkpointer.steps(4):
                iterate()
                if step == 2:
                    wait_for(lambda: checkpointer.durable_step == 2)
                    directory.rename(moved)
                    if gone:
                        shutil.rmtree(moved)
        end = caplog.messages[-1]
    assert end.endswith(f"; the directory is {where}")
    assert f"{directory}/report.json" not in end


def test_many_stray_folders_cost_a_start_one_look_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each was looked at once for every newer one, and synced by itself."""
    looks: list[Path] = []
    syncs: list[int] = []

    def looked(path: Path, real: Any = restores.has_manifest) -> bool:
        looks.append(path)
        return bool(real(path))

    def synced(fd: int, real: Any = fs.fsync) -> None:
        syncs.append(fd)
        real(fd)

    monkeypatch.setattr(restores, "has_manifest", looked)
    monkeypatch.setattr(fs, "fsync", synced)
    counts = []
    for strays, whole in ((30, False), (60, False), (60, True)):
        directory = tmp_path / f"{strays} {whole}"
        if whole:
            model, optimizer, iterate = make()
            with Checkpointer(model, optimizer, directory=directory, plan=make_plan(), every=1) as checkpointer:
                for _ in checkpointer.steps(2):
                    iterate()
        for number in range(strays):
            (directory / f"step-{number + 100:08d}").mkdir(parents=True)
        looks.clear()
        syncs.clear()
        model, optimizer, _ = make()
        with Checkpointer(model, optimizer, directory=directory, plan=make_plan(), every=1) as checkpointer:
            counts.append(len(syncs))
            assert checkpointer.resumed_from == (2 if whole else None)
        assert len(looks) <= strays + 2
        assert len(set(looks)) == len(looks)
        assert len(list(directory.glob(".broken-*"))) == strays
    assert counts[0] == counts[1]
    assert caplog.text.count("is damaged") == 150
