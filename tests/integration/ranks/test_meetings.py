"""Ranks without a TCP store meet in folders beside the checkpoints, which do not stay there."""

from __future__ import annotations

import logging
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import distributed as dist

import checkflow
from checkflow.core.errors import CheckflowError
from tests.support.programs import mesh_jobs
from tests.support.ranks.processes import run_ranks
from tests.support.waiting import wait_for

pytestmark = pytest.mark.timeout(600)
RANKS, STEPS = 2, 3


def meetings(directory: Path) -> set[str]:
    return {path.name for path in directory.glob(".council-*")}


def train(rank: int, ranks: int, directory: Path, steps: int, what: str) -> set[str]:
    """Train so many steps; returns the folders that are there meanwhile. ``what``: at the last one "dies"; or "waits"
    there until another job of the same directory was refused.
    """
    model, optimizer = mesh_jobs.build("ddp", ranks)
    seen: set[str] = set()
    with checkflow.Checkpointer(model, optimizer, directory=directory, every=1) as checkpointer:
        for step in checkpointer.steps(steps):
            mesh_jobs.train(model, optimizer, rank, 1, first=step)
            if step == steps - 1:
                seen = meetings(directory)
                dist.barrier()
                if what == "dies":
                    os.kill(os.getpid(), signal.SIGKILL)
                if what == "waits":
                    (directory.parent / f"trains-{rank}").touch()
                    wait_for((directory.parent / "refused").exists)
    assert checkpointer.durable_step == steps
    return seen


def start(folder: Path, steps: int, what: str = "", exit_code: int = 0) -> list[set[str]]:
    rendezvous = folder / f"{steps} steps"
    rendezvous.mkdir()
    return run_ranks(rendezvous, RANKS, train, folder / "checkpoints", steps, what, exit_code=exit_code)


def test_nothing_is_left_of_a_meeting(tmp_path: Path) -> None:
    directory = tmp_path / "checkpoints"
    start(tmp_path, STEPS)
    assert not meetings(directory)
    start(tmp_path, STEPS + 1, "dies", -signal.SIGKILL)
    dead = meetings(directory)
    assert len(dead) == 1
    for seen in start(tmp_path, STEPS + 2):
        assert len(seen) == 1  # its own alone
        assert not seen & dead
    assert not meetings(directory)


def test_a_job_alone_removes_what_ranks_have_left(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = tmp_path / "checkpoints"
    (directory / ".council-0123456789abcdef" / "card.1").mkdir(parents=True)  # of no rank: it cannot be removed
    (directory / ".council-starts--0").mkdir()
    (directory / ".council-starts--0" / "answer").write_bytes(b"")
    model = torch.nn.Linear(2, 2)
    with caplog.at_level(logging.WARNING, "checkflow"):
        checkflow.Checkpointer(model, torch.optim.SGD(model.parameters()), directory=directory).close()
    assert meetings(directory) == {".council-0123456789abcdef"}
    assert "cannot remove what ranks that met in" in caplog.text


def refused(rank: int, ranks: int, directory: Path) -> str:
    """Another job of a directory in use: by what it is refused."""
    model, optimizer = mesh_jobs.build("ddp", ranks)
    with pytest.raises(CheckflowError) as error:
        checkflow.Checkpointer(model, optimizer, directory=directory)
    return type(error.value).__name__


def test_a_second_job_takes_nothing_from_the_first(tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as first:
        trained = first.submit(start, tmp_path, STEPS, "waits")
        wait_for(lambda: len(list(tmp_path.glob("trains-*"))) == RANKS or trained.done())
        (tmp_path / "second").mkdir()
        try:
            found = run_ranks(tmp_path / "second", RANKS, refused, tmp_path / "checkpoints")
            left = meetings(tmp_path / "checkpoints")
        finally:
            (tmp_path / "refused").touch()
        assert found == ["LockedError"] * RANKS
        assert [left] * RANKS == trained.result()
    assert not meetings(tmp_path / "checkpoints")
