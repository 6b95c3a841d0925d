"""A loader's worker that hangs in its fork, as under CPython 3.11 before 3.11.10 it may, is forked anew."""

from __future__ import annotations

import contextlib
import gc
import logging
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torchdata.stateful_dataloader
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from checkflow.runtime.data import fork_guard
from checkflow.runtime.data.adapters.replay import SkippingLoader
from checkflow.runtime.data.adapters.resumable import resumable
from checkflow.runtime.data.fork_guard import start_safely
from checkflow.runtime.data.loader import DataLoader
from checkflow.runtime.data.worker_processes import has_ended

DATA = list(range(12))
in_fork: list[Callable[[], None]] = []  # what a forked child does before anything else


def _forked() -> None:
    for what in in_fork:
        what()


os.register_at_fork(after_in_child=_forked)


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch) -> Iterable[None]:
    monkeypatch.setattr(fork_guard, "MAY_HANG", True)  # in later versions, too
    monkeypatch.setattr(fork_guard, "PATIENCE_SECONDS", 0.05)
    yield
    in_fork.clear()


def times(directory: Path, count: int, what: Callable[[], None]) -> Callable[[], None]:
    """Only in the first forks."""
    for number in range(count):
        (directory / str(number)).touch()

    def maybe() -> None:
        for number in range(count):
            try:
                (directory / str(number)).unlink()
            except FileNotFoundError:
                continue
            what()
            return

    return maybe


def hang() -> None:
    time.sleep(10_000)


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def processes() -> set[int]:
    return {child.pid for child in psutil.Process().children()}


MAKERS: list[Callable[..., Any]] = [
    DataLoader,
    lambda *of, **options: resumable(TorchDataLoader(*of, **options)),
    lambda *of, **options: SkippingLoader(TorchDataLoader(*of, **options)),
    lambda *of, **options: resumable(torchdata.stateful_dataloader.StatefulDataLoader(*of, **options)),
]
FORKED = {"num_workers": 2, "multiprocessing_context": "fork"}


@pytest.mark.parametrize("make", MAKERS, ids=["checkflow", "torch", "skipping", "torchdata"])
@pytest.mark.parametrize("hanging", [0, 1, 2])
def test_a_worker_that_hangs_in_its_fork_is_started_anew(
    make: Callable[..., Any], hanging: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = processes()
    in_fork.append(times(tmp_path, hanging, hang))
    with caplog.at_level(logging.WARNING, "checkflow"):
        batches = [batch.tolist() for batch in make(DATA, batch_size=3, **FORKED)]
    assert batches == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]
    assert all("did not get through its fork" in record.message for record in caplog.records)
    assert len(caplog.records) >= hanging  # a busy machine may be that slow by itself
    assert not list(tmp_path.iterdir())
    assert processes() == before


def test_a_machine_that_is_slow_gets_more_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice as much for each further try of a worker's."""
    wait, given = fork_guard._wait, []

    def waited(readable: int, seconds: float) -> bool:
        given.append(seconds)
        return wait(readable, seconds)

    monkeypatch.setattr(fork_guard, "_wait", waited)
    in_fork.append(times(tmp_path, 2, hang))
    assert [int(batch) for batch in DataLoader(DATA, **FORKED)] == DATA
    assert [seconds for seconds in given if seconds][:3] == [0.05, 0.1, 0.2]


def too_late(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What happens in a fork happens just after its time is over; how many processes stand still at the look."""
    wait, standing = fork_guard._wait, []

    def waited(readable: int, seconds: float) -> bool:
        found = wait(readable, 60 if seconds else 0)
        if seconds:
            return False
        standing.append(sum(child.status() == psutil.STATUS_STOPPED for child in psutil.Process().children()))
        return found

    monkeypatch.setattr(fork_guard, "_wait", waited)
    return standing


def test_a_worker_that_begins_at_the_last_moment_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    standing = too_late(monkeypatch)
    assert [int(batch) for batch in DataLoader(DATA, **FORKED)] == DATA
    assert standing == [1, 1]  # it could begin between the look and the end otherwise
    assert not caplog.records


@pytest.mark.slow
@pytest.mark.parametrize("late", [False, True])
def test_a_worker_that_dies_in_its_fork_is_torchs_error(
    late: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = processes()
    if late:
        too_late(monkeypatch)
    in_fork.append(times(tmp_path, 1, lambda: os._exit(3)))
    monkeypatch.setattr(_MultiProcessingDataLoaderIter._try_get_data, "__defaults__", (0.1,))  # so often torch looks
    with pytest.raises(RuntimeError, match="exited unexpectedly"):
        list(DataLoader(DATA, **FORKED))
    assert processes() == before


def test_one_that_dies_in_its_fork_is_nobodys_to_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where children are reaped by themselves."""
    in_fork.append(lambda: os._exit(3))
    standing = too_late(monkeypatch)
    handler = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        worker = fork_guard._LookedAfter().Process(target=lambda: None)
        worker.start()
    finally:
        signal.signal(signal.SIGCHLD, handler)
    assert has_ended(worker.pid)
    assert standing == []
    forget(worker)


def forget(worker: Any) -> None:
    """Nobody can wait for it any more, which multiprocessing does not know."""
    worker._popen.returncode = 0
    worker.close()


def reaper(options: int) -> Callable[..., None]:
    def reap(*_: object) -> None:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, options)[0]:
                pass

    return reap


@pytest.mark.parametrize(
    "reap",
    [signal.SIG_IGN, reaper(os.WNOHANG), reaper(os.WNOHANG | os.WUNTRACED)],
    ids=["ignored", "reaped", "and told of stops"],
)
def test_a_job_that_reaps_its_children_itself_gets_its_worker(reap: Any, tmp_path: Path) -> None:
    """Nobody is there to wait for then."""
    in_fork.append(times(tmp_path, 1, hang))
    gc.collect()
    before, handler = open_files(), signal.signal(signal.SIGCHLD, reap)
    try:
        worker = fork_guard._LookedAfter().Process(target=lambda: None)
        worker.start()
        while not has_ended(worker.pid):
            time.sleep(0.01)
    finally:
        signal.signal(signal.SIGCHLD, handler)
    assert not list(tmp_path.iterdir())
    forget(worker)
    assert open_files() <= before  # what other tests left may have been closed meanwhile


def test_ctrl_c_in_the_wait_leaves_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(readable: int, seconds: float) -> bool:
        raise KeyboardInterrupt

    before = processes()
    in_fork.append(hang)
    monkeypatch.setattr(fork_guard, "_wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        list(DataLoader(DATA, num_workers=1, multiprocessing_context="fork"))
    assert processes() == before


def test_what_is_waited_with_hears_of_an_end() -> None:
    """A child that dies without a word closes the pipe."""
    reading, writing = os.pipe()
    assert not fork_guard._wait(reading, 0.01)
    os.close(writing)
    assert fork_guard._wait(reading, 0)
    os.close(reading)


class Own(multiprocessing.context.ForkContext):
    pass


@pytest.mark.parametrize(
    ("options", "guarded"),
    [
        ({"num_workers": 1, "multiprocessing_context": "fork"}, True),
        ({"num_workers": 1}, multiprocessing.get_start_method() == "fork"),
        ({"num_workers": 1, "multiprocessing_context": "spawn"}, False),
        ({"num_workers": 1, "multiprocessing_context": Own()}, False),
        ({"num_workers": 0}, False),
    ],
)
def test_only_forks_of_pythons_own_are_looked_after(options: dict[str, Any], guarded: bool) -> None:
    loader = TorchDataLoader(DATA, **options)
    before = loader.multiprocessing_context
    start_safely(loader)
    assert isinstance(loader.multiprocessing_context, fork_guard._LookedAfter) == guarded
    assert guarded or loader.multiprocessing_context is before


def test_pythons_without_the_fault_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_guard, "MAY_HANG", False)
    loader = TorchDataLoader(DATA, **FORKED)
    context = loader.multiprocessing_context
    start_safely(loader)
    assert loader.multiprocessing_context is context


@pytest.mark.parametrize("hanging", [0, 1])
def test_the_pipe_is_closed_on_both_sides(hanging: int, tmp_path: Path) -> None:
    """A child, and its parent, have as many files open as with Python's own."""

    def started_by(context: multiprocessing.context.ForkContext) -> tuple[int, int]:
        reading, writing = multiprocessing.Pipe(duplex=False)
        with reading, writing:
            child = context.Process(target=lambda: writing.send(open_files()))
            child.start()
            seen = reading.recv(), open_files()
            child.join()
            child.close()
        return seen

    expected = started_by(multiprocessing.get_context("fork"))
    in_fork.append(times(tmp_path, hanging, hang))
    assert started_by(fork_guard._LookedAfter()) == expected
    assert not list(tmp_path.iterdir())
