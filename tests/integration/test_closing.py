"""A Checkpointer gives back all that it holds: closed, interrupted, dropped, followed by another one, or forgotten."""

from __future__ import annotations

import contextlib
import gc
import logging
import mmap
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.optim import optimizer as optimizers
from torch.utils.data import TensorDataset

from checkflow import api
from checkflow.api import Checkpointer
from checkflow.core import plan as plans
from checkflow.core.errors import LockedError, StorageError
from checkflow.runtime import resources
from checkflow.runtime.data.loader import DataLoader
from checkflow.runtime.loop.preemption import Preemption
from checkflow.runtime.loop.training_loop import TrainingLoop
from checkflow.runtime.memory_tier import records
from checkflow.runtime.memory_tier.staging import StagingBuffers
from checkflow.runtime.persist.writer import Writer
from checkflow.runtime.snapshot.executor import Execution
from checkflow.runtime.store import lock
from checkflow.runtime.store.discovery import find
from checkflow.runtime.store.store import Store
from checkflow.runtime.transfer.host import HostCopyEngine
from tests.runtime.test_checkpointer import make, make_plan, steps
from tests.support.oracle import assert_checkpoint_is, clone_state

ROOT = Path(__file__).parents[2]
Job = tuple[torch.nn.Sequential, torch.optim.Optimizer, Any]


@pytest.fixture(autouse=True)
def _random_plans_have_no_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "check_plan", plans.validate)


@pytest.fixture(autouse=True)
def _no_patience_with_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    acquire = lock._acquire
    monkeypatch.setattr(lock, "_acquire", lambda fd, path, wait_seconds: acquire(fd, path, 0.0))


@pytest.fixture(autouse=True)
def _nothing_left_of_others() -> None:
    """What an earlier test of this process left to the collector is not to go between two looks."""
    gc.collect()


def held(job: Job) -> dict[str, Any]:
    """What a process has that a Checkpointer takes: everything that can be counted."""
    model, optimizer, _ = job
    tensors = [*model.parameters()]
    return {
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "descriptors": descriptors(),
        "children": len(psutil.Process().children()),
        "handlers": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)],
        "module hooks": sum(len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules()),
        "gradient hooks": sum(len(tensor._post_accumulate_grad_hooks or ()) for tensor in tensors),
        "optimizer hooks": sum(
            map(
                len,
                (
                    optimizers._global_optimizer_pre_hooks,
                    optimizers._global_optimizer_post_hooks,
                    optimizer._optimizer_step_pre_hooks,
                    optimizer._optimizer_step_post_hooks,
                ),
            )
        ),
    }


def descriptors() -> list[str]:
    """What is open. Not the one by which they are listed, nor those that another thread closes meanwhile."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
    return sorted(found)


def large_mappings(least_bytes: int) -> int:
    """Memory that is mapped in pieces of at least this size and belongs to no file, or to one in shared memory."""
    maps = psutil.Process().memory_maps(grouped=False)
    ours = ("[anon]", str(records.ROOT))
    return sum(entry.rss for entry in maps if entry.path.startswith(ours) and entry.rss >= least_bytes)


def buffers(checkpointer: Checkpointer) -> list[weakref.ref[Any]]:
    return [weakref.ref(buffer.memory) for buffer in checkpointer._saving.buffers._all]


def truth(job: Job) -> Any:
    return clone_state({"model": job[0]}, {"optimizer": job[1]})


def open_one(job: Job, directory: Path, loader: DataLoader | None = None, **options: Any) -> Checkpointer:
    options = {"plan": make_plan(), "every": 1, **options}
    return Checkpointer(job[0], job[1], loader, directory=directory, **options)


@pytest.mark.parametrize("planned", [True, False])
def test_closing_gives_everything_back(planned: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = make()
    loader = DataLoader(TensorDataset(torch.randn(40, 4), torch.randint(0, 3, (40,))), 4)
    before, listener = held(job), loader.listener
    checkpointer = open_one(job, tmp_path, loader, plan=make_plan() if planned else None)
    made = 0
    for _ in checkpointer.epochs(1):
        for x, y in checkpointer.loader:
            job[2](x, y)
            planning = checkpointer._loop.place.planning
            made += planning is not None and planning._making is not None
    during = held(job)
    assert all(during[what] != before[what] for what in before if what not in ("children", "gradient hooks"))
    assert planned or made  # a process that plans has been there
    memory = buffers(checkpointer)
    assert len(memory) == 3
    checkpointer.close()
    assert held(job) == before
    assert loader.listener is listener
    assert not any(mapping() for mapping in memory)
    assert checkpointer.report()["iteration"] == 10  # what it did can still be asked
    checkpointer.close()
    with open_one(job, tmp_path) as again:
        assert again.resumed_from == 10


def test_host_memory_goes_back_to_the_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(1024, 4096, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    size = model.weight.nbytes
    before = large_mappings(size)
    with Checkpointer(model, optimizer, directory=tmp_path, every=1, host_buffers=2) as checkpointer:
        for _ in checkpointer.steps(1):
            model(torch.randn(1, 1024)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        during = large_mappings(size)
    assert during >= before + 2 * size
    assert large_mappings(size) < before + size


POINTS: list[tuple[type, str]] = [
    (TrainingLoop, "close"),
    (Execution, "finish"),
    (HostCopyEngine, "finish"),
    (Writer, "wait_until_at_most"),
    (Writer, "close"),
    (HostCopyEngine, "close"),
    (Store, "close"),
    (Preemption, "close"),
]


@pytest.mark.parametrize(("owner", "name"), POINTS, ids=[f"{owner.__name__}.{name}" for owner, name in POINTS])
@pytest.mark.parametrize("after", [False, True])
def test_an_interrupted_close_can_be_repeated(
    owner: type, name: str, after: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make()
    before = held(job)
    checkpointer = open_one(job, tmp_path)
    loop = checkpointer.steps(9)
    for _ in range(2):
        next(loop)
        job[2]()
    next(loop)  # the second checkpoint is in flight
    real: Callable[..., Any] = getattr(owner, name)
    interrupted: list[bool] = []

    def interrupt(*arguments: Any) -> Any:
        if interrupted:
            return real(*arguments)
        interrupted.append(True)
        if after:
            real(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(owner, name, interrupt)
    with pytest.raises(KeyboardInterrupt):
        checkpointer.close()
    if (owner, name) != (TrainingLoop, "close") or after:
        assert held(job)["module hooks"] == before["module hooks"]  # they go first
    # What the interrupt met half-way is given up: without hooks nobody knows what is written from there on.
    given_up = owner is Execution and not after
    with (
        pytest.raises(StorageError, match="of step 2, is not on storage: step 1 is durable")
        if given_up
        else (contextlib.nullcontext())
    ):
        checkpointer.close()
    assert interrupted
    assert held(job) == before
    assert steps(tmp_path) == ([1] if given_up else [1, 2])
    with open_one(job, tmp_path):
        pass


def test_an_error_in_closing_keeps_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(self: Any) -> None:
        raise MemoryError("planted")

    for users in (None, ZeroDivisionError):
        job = make()
        before = held(job)
        with (
            monkeypatch.context() as patch,
            pytest.raises(users or MemoryError),
            open_one(job, tmp_path) as checkpointer,
        ):
            for _ in checkpointer.steps(2):
                job[2]()
            patch.setattr(HostCopyEngine, "finish", failing)
            patch.setattr(checkpointer._loop.execution, "_raising", True)
            job[2]()
            if users is not None:
                raise users
        assert held(job) == before


@pytest.mark.parametrize("same_model", [True, False])
def test_a_cell_that_is_run_again_takes_over(
    same_model: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job = make()
    before = held(job)
    first = open_one(job, tmp_path, audit=1)
    loop = first.steps(9)  # one that is left standing
    for _ in range(3):
        next(loop)
        job[2]()
    next(loop)
    expected = truth(job)
    job[0](torch.randn(6, 4))  # batch norm has written; the third checkpoint is in flight
    memory = buffers(first)
    second_job = job if same_model else make()
    second = open_one(second_job, tmp_path, audit=1)
    assert caplog.text.count(f"an earlier Checkpointer of {tmp_path} was not closed: it is closed now") == 1
    assert not any(mapping() for mapping in memory)
    assert second.resumed_from == 3
    assert_checkpoint_is(find(tmp_path)[0], expected)
    for _ in second.steps(6):
        second_job[2]()
    first.close()
    loop.close()
    end = truth(second_job)
    second.close()
    assert_checkpoint_is(find(tmp_path)[0], end)
    assert second.report()["breaches"] == 0
    assert held(job) == before


def test_another_thread_or_process_does_not_take_over(tmp_path: Path) -> None:
    job, other, plan = make(), make(), make_plan()
    caught: list[BaseException] = []

    def run() -> None:  # computes nothing: a forked child has none of the threads that torch computes with
        try:
            Checkpointer(*other[:2], directory=tmp_path, plan=plan)
        except LockedError as error:
            caught.append(error)

    with open_one(job, tmp_path):
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        assert len(caught) == 1
        child = os.fork()
        if child == 0:
            try:
                run()
            finally:
                os._exit(len(caught))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
        # What a thread that has ended left open, on the other hand, is anybody's.
    left: list[Checkpointer] = []
    thread = threading.Thread(target=lambda: left.append(open_one(make(), tmp_path)))
    thread.start()
    thread.join()
    open_one(job, tmp_path).close()
    assert left[0]._held.closed


def test_one_that_is_dropped_is_closed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    job = make()
    before = held(job)
    checkpointer = open_one(job, tmp_path)
    for _ in checkpointer.steps(2):
        job[2]()
    del checkpointer
    assert held(job) == before
    assert steps(tmp_path) == [1, 2]
    assert caplog.text.count("was dropped without close(): it is closed now") == 1
    with caplog.at_level(logging.WARNING):
        caplog.clear()
        checkpointer = open_one(job, tmp_path)
        checkpointer.close()
        del checkpointer
        assert not caplog.records


@pytest.fixture
def _nothing_is_collected() -> Iterator[None]:
    """Unless somebody asks for it."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("_nothing_is_collected")
def test_garbage_that_another_thread_finds_waits_for_its_own(tmp_path: Path) -> None:
    job = make()
    before = held(job)
    checkpointer = open_one(job, tmp_path)
    circle: list[Any] = [checkpointer]
    circle.append(circle)
    del checkpointer, circle
    thread = threading.Thread(target=gc.collect)
    thread.start()
    thread.join()
    assert held(job) != before
    resources._close_all()  # as at the end
    assert held(job) == before


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
def test_a_forked_child_finds_zeros_in_the_place_of_the_buffers() -> None:
    """It shares no page with its parent; and nothing of its own can come to lie there, and go with the buffers."""
    buffers = StagingBuffers(1)
    buffers.grow(3 * mmap.PAGESIZE)
    buffer = buffers.take()
    buffer.view[:] = b"x" * len(buffer.view)
    child = os.fork()
    if child == 0:
        os._exit(any(buffer.view))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert all(buffer.view)


def test_a_forked_child_gives_nothing_back(tmp_path: Path) -> None:
    job = make()
    checkpointer = open_one(job, tmp_path)
    loop = checkpointer.steps(2)
    next(loop)
    job[2]()
    next(loop)  # a checkpoint is in flight
    child = os.fork()
    if child == 0:
        signal.alarm(300)
        resources._close_all()  # would wait for threads that it does not have
        checkpointer.close()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    job[2]()
    assert not list(loop)
    checkpointer.close()
    assert steps(tmp_path) == [1, 2]


FORGETFUL = """
from tests.runtime.test_checkpointer import make, make_plan
from checkflow.core import plan as plans
from checkflow import api

api.check_plan = plans.validate
model, optimizer, iterate = make()
checkpointer = api.Checkpointer(model, optimizer, directory="checkpoints", plan=make_plan(), every=1)
loop = checkpointer.steps(9)
for n in loop:
    iterate()
    if n == 3:
        break
print("end")
"""


@pytest.mark.slow
def test_a_script_that_forgets_to_close(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORGETFUL],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "end\n")
    assert all(line.startswith("checkflow: ") for line in done.stderr.splitlines()), done.stderr
    assert steps(tmp_path / "checkpoints")[-1] == 3
    assert not list((tmp_path / "checkpoints").glob(".tmp-*"))


UNENDED = """
import multiprocessing, sys, torch, checkflow
from torch.utils.data import TensorDataset
error = {"RuntimeError": RuntimeError, "KeyboardInterrupt": KeyboardInterrupt}[sys.argv[1]]

kept = []

def train():
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.ones(8, 2))
    loader = checkflow.DataLoader(data, 2, num_workers=1, persistent_workers=True)
    def failing():  # as torch's handler does when it finds that a worker was killed
        raise error("planted")
    loader.end_workers = failing
    try:
        with checkflow.Checkpointer(model, optimizer, loader, directory="checkpoints", every=1) as checkpointer:
            kept.extend([loader, checkpointer])  # as the traceback of an error does: dropped, they would end
            for epoch in checkpointer.epochs(2):
                for (x,) in loader:
                    optimizer.zero_grad()
                    model(x).sum().backward()
                    optimizer.step()
    except error as found:
        print(found, flush=True)

job = multiprocessing.get_context("fork").Process(target=train)
job.start()
job.join()
sys.exit(job.exitcode)
"""


@pytest.mark.slow
@pytest.mark.parametrize("error", ["RuntimeError", "KeyboardInterrupt"])
def test_workers_that_could_not_be_ended_hold_up_no_exit(error: str, tmp_path: Path) -> None:
    """One of multiprocessing's asks them by SIGTERM, which they outlast while a job trains, and waits for ever."""
    done = subprocess.run(
        [sys.executable, "-c", UNENDED, error],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "planted\n"), done.stderr
    if error == "RuntimeError":  # an interrupt ends the closing where it is
        assert steps(tmp_path / "checkpoints")[-1] == 8
    Store(tmp_path / "checkpoints", run_id="next").close()


def test_an_error_in_the_block_is_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was complete is committed; what fails on the way out is logged."""
    job = make()
    before = held(job)
    with pytest.raises(ZeroDivisionError), open_one(job, tmp_path) as checkpointer:
        for n in checkpointer.steps(9):
            if n == 3:
                raise ZeroDivisionError
            job[2]()
    assert steps(tmp_path) == [2, 3]
    assert held(job) == before

    def failing(self: Any, *arguments: Any, **keywords: Any) -> Path:
        raise StorageError("planted")

    monkeypatch.setattr(Store, "commit", failing)
    with pytest.raises(ZeroDivisionError), open_one(job, tmp_path, on_error="raise") as checkpointer:
        for n in checkpointer.steps(9):
            job[2]()
            if n == 3:
                raise ZeroDivisionError
    assert held(job) == before
