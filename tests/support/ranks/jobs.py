"""Jobs of several ranks under torchrun: started, watched, signalled and killed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from checkflow.runtime.memory_tier.records import LIFE, PREFIX
from checkflow.runtime.memory_tier.records import ROOT as ROOT_OF_MEMORY
from tests.support.ranks.torchrun import Torchrun
from tests.support.waiting import wait_for

ROOT = Path(__file__).parents[3]
PROGRAM = Path(__file__).parents[1] / "programs" / "ranks_job.py"


class RankJob:
    """One run of ``ranks_job.py``; its logs lie in ``folder``, which is the run's own.

    Args:
        program: another one that is called and logs alike.
        restarts: how often torchrun starts all ranks again, after one has failed.
    """

    def __init__(
        self, folder: Path, ranks: int, directory: Path, kind: str, epochs: int, *, restarts: int = 0,
        program: Path = PROGRAM, **options: Any,
    ) -> None:  # fmt: skip
        folder.mkdir(parents=True)
        self.folder, self.ranks = folder, ranks
        arguments = [
            "--standalone", f"--nproc-per-node={ranks}", f"--max-restarts={restarts}", "--monitor-interval=0.1",
            str(program), str(directory), kind, str(epochs), *(f"{name}={value}" for name, value in options.items()),
        ]  # fmt: skip
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        (folder / "output").touch()
        self.launcher = Torchrun(folder, "output", arguments, environment)

    def said(self, rank: int, what: str | None = None) -> list[dict[str, Any]]:
        path = self.folder / f"log-{rank}"
        lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [line for line in lines if what in (None, line["what"])]

    def last(self, rank: int, what: str) -> dict[str, Any]:
        """What a rank said last of something; fails with the job's output if it did not."""
        lines = self.said(rank, what)
        assert lines, f"rank {rank} did not say {what!r}: {self.said(rank)[-1:]} {self.printed()[-3000:]}"
        return lines[-1]

    def printed(self) -> str:
        return (self.folder / "output").read_text(errors="replace")

    def pids(self) -> list[int]:
        return [self.last(rank, "starts")["pid"] for rank in range(self.ranks)]

    def reach(self, step: int) -> None:
        """Wait until rank 0 has trained so many iterations, or the job is over."""
        wait_for(lambda: self.launcher.poll() is not None or any(x["step"] >= step for x in self.said(0, "stepped")))
        self.last(0, "stepped")

    def alive(self) -> list[int]:
        found = []
        for rank in range(self.ranks):
            for line in self.said(rank, "starts"):
                with contextlib.suppress(OSError):
                    state = Path(f"/proc/{line['pid']}/stat").read_text().rpartition(")")[2].split()[0]
                    if state not in "ZX":
                        found.append(line["pid"])
        return found

    def kill_all(self) -> None:
        """SIGKILL for the launcher first, so that it starts nothing and asks nobody to end."""
        self.launcher.kill()
        self.launcher.wait()
        for pid in self.alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        wait_for(lambda: not self.alive())


def kept_by_ranks(directory: Path) -> dict[int, set[int]]:
    """By rank, the steps that host memory has; of a job that may be at work on it."""
    found: dict[int, set[int]] = {}
    for mark in directory.glob(".memory-*.json"):
        with contextlib.suppress(FileNotFoundError):
            folder = folder_of_rank(mark)
            records = [json.loads(path.read_text())["step"] for path in folder.glob("buffer-*.json")]
            found[json.loads((folder / LIFE).read_text())["rank"]] = set(records)
    return found


def folder_of_rank(mark: Path) -> Path:
    token: str = json.loads(mark.read_text())["token"]
    return ROOT_OF_MEMORY / f"{PREFIX}{token}"


def is_kept(directory: Path, step: int, ranks: int) -> bool:
    """Whether host memory of all ranks has this step."""
    found = kept_by_ranks(directory)
    return len(found) == ranks and all(step in steps for steps in found.values())


@contextlib.contextmanager
def rank_job(folder: Path, ranks: int, directory: Path, kind: str, epochs: int, **options: Any) -> Iterator[RankJob]:
    """A job, all of which is ended afterwards."""
    job = RankJob(folder, ranks, directory, kind, epochs, **options)
    try:
        yield job
    finally:
        job.kill_all()


def run_job(folder: Path, ranks: int, directory: Path, kind: str, epochs: int, **options: Any) -> RankJob:
    """Run a job to its end; returns it for what it said."""
    with rank_job(folder, ranks, directory, kind, epochs, **options) as job:
        job.launcher.wait()
    return job


def numbered(folder: Path) -> Callable[[], Path]:
    """Folders for one run after the other."""
    counter = iter(range(1000))
    return lambda: folder / f"run-{next(counter)}"
