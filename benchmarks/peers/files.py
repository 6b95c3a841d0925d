"""What peers share that write files of their own: when they save, and what makes a save durable.

Each version gets a new path; the last two stay. A version counts when its files, their folders and their names are
flushed. Where the library saves beside training, this is done beside training, too, on a thread that waits for it.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers.job import Job
from benchmarks.ways import AtBoundaries

KEPT = 2  # versions
Wait = Callable[[], object]  # returns when the library says that the save is complete


@dataclass(frozen=True)
class Saved:
    """One durable checkpoint, by time.monotonic.

    Args:
        copied: when the state had been copied into host memory; None: no such copy is known, or made.
    """

    begun: float
    durable: float
    copied: float | None = None

    @property
    def seconds(self) -> float:
        return self.durable - self.begun

    @property
    def write_seconds(self) -> float:
        return self.durable - (self.begun if self.copied is None else self.copied)


def nothing() -> None:
    """Do nothing."""


def flush(path: Path) -> None:
    """Make what one file, or the names in one folder, hold durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def flush_all(path: Path) -> None:
    """Make a file, or a folder with all that it holds, durable, and its name."""
    for one in [path, *path.rglob("*"), path.parent]:
        flush(one)


def remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


class AtRest:
    """Saves while training stands still."""

    job: Job
    settle: Callable[[], None]
    _checkpoint: Callable[[int], None]

    def save(self, ready: Callable[[], None] = nothing) -> None:
        """Train once, call ``ready``, and save while training stands still; returns when it is durable."""
        self.job.train()
        self.settle()
        ready()
        self._checkpoint(0)
        self.settle()


class Files(AtRest, AtBoundaries):
    """A job whose library saves to a path.

    Args:
        again: save to the same path each time, over what is there.
    """

    def __init__(self, job: Job, every: int, directory: Path, *, again: bool = False) -> None:
        super().__init__(job.step, every)
        self.job, self._directory, self._again = job, directory, again
        directory.mkdir(parents=True, exist_ok=True)
        self._number = max(self._numbers(), default=0)
        self.saved: list[Saved] = []
        self._copied: float | None = None  # by the save under way, when its copy is complete
        self._thread = ThreadPoolExecutor(1)
        self._pending: Future[None] | None = None
        self._hooks = [
            job.optimizer.register_step_pre_hook(self._before_step),
            job.optimizer.register_step_post_hook(lambda *_: self.after_step()),
        ]

    # What a library defines

    def begin(self, path: Path) -> Wait | None:
        """Begin a save; None: it is complete."""
        raise NotImplementedError

    def load(self, path: Path) -> None:
        """Restore the job in place."""
        raise NotImplementedError

    def before_step(self) -> None:
        """Called before the optimizer changes the state."""

    def after_step(self) -> None:
        """Called after that."""

    def stop(self) -> None:
        """Release what the library holds."""

    # The same for all

    def note_copied(self, *_: object) -> None:
        """The state is in host memory: what follows is the write."""
        self._copied = time.monotonic()

    def _numbers(self) -> Iterator[int]:
        for path in self._directory.glob("step-*"):
            if path.name.removeprefix("step-").isdecimal():
                yield int(path.name.removeprefix("step-"))

    def _path(self, number: int) -> Path:
        return self._directory / f"step-{number}"

    def _checkpoint(self, number: int) -> None:
        self.settle()  # one is under way at a time
        begun, self._copied = time.monotonic(), None
        if not (self._again and self._number):
            self._number += 1
        path = self._path(self._number)
        wait = self.begin(path)
        if wait is None:
            self._complete(path, nothing, begun)
        else:
            self._pending = self._thread.submit(self._complete, path, wait, begun)

    def _complete(self, path: Path, wait: Wait, begun: float) -> None:
        wait()
        flush_all(path)
        self.saved.append(Saved(begun, time.monotonic(), self._copied))
        for number in sorted(self._numbers())[:-KEPT]:
            remove(self._path(number))

    def _before_step(self, *_: Any) -> None:
        begun = time.perf_counter()
        self.before_step()
        self.held_seconds += time.perf_counter() - begun

    def settle(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def restore(self) -> None:
        """Bring the newest version back."""
        newest = max(self._numbers(), default=None)
        if newest is None:
            raise FileNotFoundError(f"{self._directory} holds no version")
        self.load(self._path(newest))

    def close(self) -> None:
        self.settle()
        for hook in self._hooks:
            hook.remove()
        self._thread.shutdown()
        self.stop()
