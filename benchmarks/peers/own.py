"""CheckFreq's mechanism on checkflow's own store and copies, and checkflow itself.

CheckFreq's own code needs libraries of 2019 and cannot restore what it saves. Here its three modes use what checkflow
uses (:mod:`benchmarks.ways`), so they differ from it only in when training stands still.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import checkflow
from benchmarks.peers.files import AtRest, Saved, nothing
from benchmarks.peers.job import Job
from benchmarks.ways import PLAN_SECONDS, Reporting, Staged
from checkflow.runtime.persist.writer import Durable
from checkflow.runtime.snapshot.capturer import Capture
from checkflow.runtime.state.restore import resume_from
from checkflow.runtime.store.files import parse_step
from checkflow.runtime.store.store import Store


class CheckFreq(AtRest, Staged):
    """One checkpoint is under way at a time.

    Args:
        copies_beside, commits_beside: as in :class:`benchmarks.ways.Staged`.
    """

    def __init__(self, job: Job, every: int, directory: Path, *, copies_beside: bool, commits_beside: bool) -> None:
        super().__init__(job.step, every, directory, copies_beside=copies_beside, commits_beside=commits_beside)
        self.job = job
        self.saved: list[Saved] = []
        self._begun = 0.0
        self._number = max((parse_step(path.name) or 0 for path in self._store.checkpoints()), default=0)

    def _checkpoint(self, number: int) -> None:
        self.settle()
        self._begun = time.monotonic()
        self._number += 1
        super()._checkpoint(self._number)

    def _commit(self, capture: Capture) -> Path:
        copied = time.monotonic()
        path = super()._commit(capture)
        self.saved.append(Saved(self._begun, self._store.committed_at[1], copied))
        return path

    def restore(self) -> None:
        resume_from(self._store, "must", self.job.step.models, self.job.step.optimizers, {})


class Checkflow(Reporting):
    """A Checkpointer with ``every``, which makes its own plan. It is made, and resumes, when it first trains."""

    def __init__(self, job: Job, every: int, directory: Path) -> None:
        self.job, self._every, self._directory = job, every, directory
        self.saved: list[Saved] = []
        self._checkpointer: checkflow.Checkpointer | None = None
        self._steps: Generator[int] | None = None

    @property
    def checkpointer(self) -> checkflow.Checkpointer:
        if self._checkpointer is None:
            step = self.job.step
            self._checkpointer = made = checkflow.Checkpointer(
                step.models, step.optimizers, directory=self._directory, every=self._every, on_error="raise"
            )
            self._note_commits(made._saving.writer)
        return self._checkpointer

    def _note_commits(self, writer: Any) -> None:
        """The report has times of the newest checkpoint only, and to ask for it takes training's time."""
        report, seen = writer.after_each, [writer.durable]

        def note() -> None:
            durable: Durable | None = writer.durable
            if durable is not None and durable is not seen[0]:
                seen[0] = durable
                self.saved.append(Saved(durable.begun, durable.committed, writer.recent[-1].begun))
            report()

        writer.after_each = note

    def _turn(self) -> None:
        """Begin the next turn, which marks the boundary of the last one."""
        if self._steps is None:
            steps = self.checkpointer.steps(2**31)
            assert isinstance(steps, Generator)
            self._steps = steps
        next(self._steps)

    def prepare(self) -> str:
        """Train until the job has its plan; returns what it goes by then."""
        end = time.monotonic() + PLAN_SECONDS
        while not (report := self.checkpointer.report())["plan"]:
            if report["planning"]["stage"] == "given up" or time.monotonic() > end:
                return f"no plan: {report['planning']['failure'] or 'it took too long'}"
            self.run(1)
        return f"a plan for every {report['plan']['interval']} iterations"

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """Without hooks, for training that is not checkpointed. The turn that follows begins a checkpoint."""
        while (self.checkpointer.iteration + 1) % self._every:
            self.run(1)
        self.settle()
        stream = self.checkpointer._loop.execution.stream
        stream.remove()
        yield
        stream.hang()

    def run(self, iterations: int) -> list[float]:
        seconds = []
        for _ in range(iterations):
            begun = time.perf_counter()
            self._turn()
            self.job.train()
            seconds.append(time.perf_counter() - begun)
        return seconds

    def settle(self) -> None:
        """Wait until all that was begun is durable, or failed. To ask for the report would take training's time."""
        saving, place = self.checkpointer._saving, self.checkpointer._loop.place
        while saving.captures > saving.writer.committed + saving.writer.failed + place.aborted:
            time.sleep(1e-3)

    def save(self, ready: Callable[[], None] = nothing) -> None:
        """As :meth:`benchmarks.peers.files.Files.save`, at the next boundary that is due."""
        self.run(1)
        while (self.checkpointer.iteration + 1) % self._every:
            self.run(1)
        self.settle()
        ready()
        self._turn()
        self._stop()  # as ``break`` does: no iteration follows that copies could go beside
        self.settle()

    def _stop(self) -> None:
        if self._steps is not None:
            self._steps.close()
            self._steps = None

    def restore(self) -> None:
        """What a Checkpointer's start does to restore; what else a start does, a plan's reading for one, is no part."""
        with contextlib.closing(Store(self._directory, run_id="restore")) as store:
            resume_from(store, "must", self.job.step.models, self.job.step.optimizers, {})

    def close(self) -> None:
        if self._checkpointer is not None:
            with contextlib.closing(self._checkpointer):
                self._stop()
