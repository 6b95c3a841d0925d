"""A loader's workers where a signal ends the job: busy ones do not hold up its end, nor do those that died of it."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import pickle
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torchdata.stateful_dataloader
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import _utils
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

import checkflow
from checkflow import api
from checkflow.api import Checkpointer
from checkflow.core import plan as plans
from checkflow.runtime.data.adapters.replay import SkippingLoader
from checkflow.runtime.data.adapters.resumable import resumable
from checkflow.runtime.data.loader import DataLoader
from checkflow.runtime.loop.preemption import Preemption
from tests.runtime.loop.test_preemption import newest, uninterrupted
from tests.runtime.state.test_restore import assert_same_end
from tests.runtime.test_checkpointer import make, make_plan, steps
from tests.support import jobs
from tests.support.pairing import pairs

TERM = signal.SIGTERM
LOST = "DataLoader worker (pid 1) is killed by signal: Terminated. "


@pytest.fixture(autouse=True)
def _random_plans_have_no_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "check_plan", plans.validate)


class Busy(torch.utils.data.Dataset[Any]):
    """Its first samples come; others keep their workers busy, in Python and outside of it."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        if index == 2:
            time.sleep(10_000)
        if index > 2:
            mutex, library = ctypes.create_string_buffer(64), ctypes.CDLL(None)
            for _ in range(2):  # the second time it waits for itself
                library.pthread_mutex_lock(mutex)
        return torch.randn(6, 4)


MAKERS: dict[str, Callable[..., Any]] = {
    "checkflow": DataLoader,
    "torch": lambda *of, **options: resumable(TorchDataLoader(*of, **options)),
    "skipping": lambda *of, **options: SkippingLoader(TorchDataLoader(*of, **options)),
    "torchdata": lambda *of, **options: resumable(torchdata.stateful_dataloader.StatefulDataLoader(*of, **options)),
}


@pytest.mark.parametrize(
    *pairs(
        kind=list(MAKERS), persistent={"": False, "persistent": True},
        boundary={"at a boundary": True, "where it is": False},
    )
)  # fmt: skip
def test_busy_workers_are_not_waited_for(
    kind: str, persistent: bool, boundary: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {child.pid for child in psutil.Process().children()}
    if not boundary:
        monkeypatch.setattr(Preemption, "_patience_seconds", lambda self: 0.0)
    model, optimizer, iterate = make()
    loader = MAKERS[kind](
        Busy(), batch_size=None, num_workers=2, persistent_workers=persistent, multiprocessing_context="fork"
    )  # fmt: skip
    grace = 3600.0 if boundary else 100.0

    def train() -> None:
        with Checkpointer(
            model, optimizer, loader, directory=tmp_path, plan=make_plan(), every=1, grace_seconds=grace
        ) as checkpointer:
            for _ in checkpointer.epochs(1):
                for x in checkpointer.loader:
                    # So long torch would wait for each.
                    monkeypatch.setattr(_utils, "MP_STATUS_CHECK_INTERVAL", 3600.0)
                    iterate(x)
                    signal.raise_signal(TERM)
                    while not boundary:  # a signal just before a wait without end would not end it
                        time.sleep(0.05)

    with pytest.raises(checkflow.Preempted):
        train()
    assert {child.pid for child in psutil.Process().children()} <= before
    assert steps(tmp_path) == ([1] if boundary else [])


def lose(job: jobs.Job) -> None:
    """A job that loses the first worker of its second epoch as that starts, to a signal that may be sent to it, too."""
    forks = 0

    def count() -> None:
        nonlocal forks
        forks += 1

    def die() -> None:
        if forks == job.workers + 1:
            if job.group:
                os.kill(os.getppid(), TERM)
            signal.signal(TERM, signal.SIG_DFL)
            os.kill(os.getpid(), TERM)

    _MultiProcessingDataLoaderIter._try_get_data.__defaults__ = (0.1,)  # so often torch looks
    os.register_at_fork(before=count, after_in_child=die)
    jobs.run(dataclasses.replace(job, group=False))


@pytest.mark.slow
def test_a_worker_that_a_signal_ends_as_it_starts(tmp_path: Path) -> None:
    """The boundary before it, which was none to be captured, is saved, and the job goes on bit for bit."""
    truth = uninterrupted(tmp_path / "truth")
    job = jobs.Job(tmp_path / "job", workers=2, interval=4, every=4, group=True)
    job.directory.mkdir()
    assert jobs.in_a_process(lose, job) == 75
    assert newest(job.directory) == jobs.BATCHES == len(jobs.samples(job.directory))
    assert jobs.start(dataclasses.replace(job, group=False)) == 0
    assert_same_end(job.directory, truth)


@pytest.mark.slow
def test_one_that_is_lost_without_a_signal_to_the_job_is_an_error(tmp_path: Path) -> None:
    job = jobs.Job(tmp_path / "job", workers=2)
    job.directory.mkdir()
    assert jobs.in_a_process(lose, job) == 1


@pytest.mark.parametrize("signalled", [True, False])
def test_one_that_is_lost_in_the_middle_of_an_iteration(signalled: bool, tmp_path: Path) -> None:
    """torch raises wherever the main thread is."""
    model, optimizer, iterate = make()
    checkpointer = Checkpointer(model, optimizer, directory=tmp_path, plan=make_plan(), every=1, grace_seconds=3600)
    with pytest.raises(checkflow.Preempted if signalled else RuntimeError), checkpointer:
        for n in checkpointer.steps(9):
            if n == 2:
                if signalled:
                    signal.raise_signal(TERM)
                raise RuntimeError(LOST)
            iterate()
    assert steps(tmp_path) == [1, 2]


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_loader_can_be_pickled(wrapped: bool) -> None:
    """For torch.multiprocessing.spawn, say."""
    data = torch.arange(8)
    loader: Any = resumable(TorchDataLoader(data, 2)) if wrapped else DataLoader(data, 2)  # type: ignore[arg-type]
    assert len(list(loader)) == 4
    assert type(pickle.loads(pickle.dumps(loader))) is type(loader)
