"""What ranks of a killed job had in host memory is where the next start goes on, on any ranks that see all of it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from checkflow.runtime.memory_tier import orphans
from tests.support.dead_jobs import folders_below, give_back, needs_memory, newest_on_storage
from tests.support.ranks.jobs import RankJob, is_kept, numbered, rank_job, run_job
from tests.support.waiting import wait_for

pytestmark = needs_memory
STORED, KEPT = 3, 5  # the newest steps on storage and in memory of a job whose storage hangs after the first


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path) -> Iterator[None]:
    yield
    give_back(tmp_path)


def killed(folder: Path, ranks: int, directory: Path, kind: str = "ddp", **options: Any) -> None:
    """A job of which all ranks are killed while a commit waits for storage, and memory has two steps more."""
    with rank_job(folder, ranks, directory, kind, 3, storage=f"hangs:{STORED}", **options) as job:
        wait_for(lambda: is_kept(directory, KEPT, ranks) or job.launcher.poll() is not None)
        job.kill_all()
    assert newest_on_storage(directory) == STORED


def ended_as_if_never_killed(job: RankJob, tmp_path: Path, ranks: int, kind: str) -> None:
    whole = run_job(tmp_path / "never killed", ranks, tmp_path / "whole", kind, 3)
    for rank in range(ranks):
        expected, found = whole.last(rank, "ended"), job.last(rank, "ended")
        assert (found["step"], found["digest"]) == (expected["step"], expected["digest"])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fsdp", "ddp"])
def test_killed_ranks_go_on_from_host_memory(tmp_path: Path, kind: str) -> None:
    folder, directory = numbered(tmp_path), tmp_path / "all"
    killed(folder(), 2, directory, kind)
    wait_for(lambda: orphans.left_step(directory) == KEPT)  # what a job has left behind ends a moment later
    left = [one for one in orphans.list_left() if one.directory == str(directory)]
    assert [(one.step, one.stored_step, one.only_copy) for one in left] == [(KEPT, STORED, True)] * 2
    resumed = run_job(folder(), 2, directory, kind, 3)
    assert [resumed.last(rank, "begins")["step"] for rank in range(2)] == [KEPT] * 2
    assert "which the run before had in host memory" in resumed.printed()
    ended_as_if_never_killed(resumed, tmp_path, 2, kind)
    assert folders_below(tmp_path) == []
    assert list(directory.glob(".memory*")) == []


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 3])
def test_other_ranks_go_on_from_host_memory(tmp_path: Path, ranks: int) -> None:
    folder, directory = numbered(tmp_path), tmp_path / "all"
    killed(folder(), 2, directory, "fsdp")
    resumed = run_job(folder(), ranks, directory, "fsdp" if ranks > 1 else "ddp", 1)
    assert [resumed.last(rank, "begins")["step"] for rank in range(ranks)] == [KEPT] * ranks
    assert folders_below(tmp_path) == []


@pytest.mark.slow
def test_ranks_that_torchrun_restarts_go_on_from_host_memory(tmp_path: Path) -> None:
    """One rank is killed while storage takes nothing, and torchrun ends the others."""
    job = run_job(tmp_path / "run", 2, tmp_path / "all", "ddp", 3, restarts=1, storage="fails:1", dies="1:6")
    for rank in range(2):
        assert [line["step"] for line in job.said(rank, "begins")] == [None, 6], job.printed()[-3000:]
    ended_as_if_never_killed(job, tmp_path, 2, "ddp")
    assert folders_below(tmp_path) == []


@pytest.mark.slow
def test_memory_that_a_user_frees_leaves_what_storage_has(tmp_path: Path) -> None:
    folder, directory = numbered(tmp_path), tmp_path / "all"
    killed(folder(), 2, directory)
    for path in folders_below(tmp_path):
        os.utime(path, (0, 0))  # a younger job may be about to begin
    subprocess.run([sys.executable, "-m", "checkflow", "memory", "--free", "--force", str(directory)], check=True)
    assert folders_below(tmp_path) == []
    resumed = run_job(folder(), 2, directory, "ddp", 1)
    assert [resumed.last(rank, "begins")["step"] for rank in range(2)] == [STORED] * 2
    assert list(directory.glob(".memory*")) == []
