"""Ways of making checkpoints, on one interface, so that a benchmark can let them take turns at the same training.

Those of the CheckFreq paper (its figure 4) use the same memory, copies, files and fsyncs as checkflow, so they differ
only in when training stands still. All but "checkflow" have one checkpoint under way at a time, as CheckFreq has.
"""

from __future__ import annotations

import importlib
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch

import checkflow
from checkflow.core import plan as plans
from checkflow.planner.model_file.load import OPTIMIZERS
from checkflow.runtime.format import codec
from checkflow.runtime.format.layout import make_layout, write_headers
from checkflow.runtime.memory_tier.staging import StagingBuffers
from checkflow.runtime.persist.saver import make_engine
from checkflow.runtime.persist.writer import Writer
from checkflow.runtime.snapshot.capturer import Capture
from checkflow.runtime.snapshot.share import tensor_record
from checkflow.runtime.state.collect import StateWalk, capture_extra
from checkflow.runtime.store.store import Store
from checkflow.runtime.transfer.engine import Concluded, Transfer

CHUNK_BYTES = 8 * 2**20
MOST_UNDECIDED = 400  # iterations
PLAN_SECONDS = 120.0  # then a job that makes its own plan is taken to get none


def real_step(model: str, batch_size: int, optimizer: str | None) -> checkflow.TrainingStep:
    """A shipped model with real tensors, and with the optimizer's state: one iteration has been made."""
    torch.manual_seed(0)
    step: checkflow.TrainingStep = importlib.import_module(f"checkflow.models.{model}").build(batch_size=batch_size)
    if optimizer is not None:
        step.optimizers = {
            name: OPTIMIZERS[optimizer]([{"params": group["params"]} for group in one.param_groups])
            for name, one in step.optimizers.items()
        }
    for one in step.optimizers.values():
        for group in one.param_groups:
            group["lr"] = 1e-4  # a job that diverges computes with infinities, at another speed
    step.run(step.batch)
    return step


class Way(Protocol):
    """One job under one way of making checkpoints."""

    @property
    def held_seconds(self) -> float:
        """For which the training thread waited or copied so far."""

    @property
    def checkpoints(self) -> int:
        """Begun so far."""

    def run(self, iterations: int) -> list[float]:
        """Train; seconds of each iteration, with what checkpointing took of it."""

    def settle(self) -> None:
        """Wait until the checkpoint under way is durable."""

    def close(self) -> None: ...


class Plain:
    """Training without checkpoints."""

    held_seconds = 0.0
    checkpoints = committed = interval = 0

    def __init__(self, step: checkflow.TrainingStep) -> None:
        self._step = step

    def run(self, iterations: int) -> list[float]:
        seconds = []
        for _ in range(iterations):
            begun = time.perf_counter()
            self._step.run(self._step.batch)
            seconds.append(time.perf_counter() - begun)
        return seconds

    def settle(self) -> None:
        pass

    def close(self) -> None:
        pass


class AtBoundaries:
    """What the baselines share: a checkpoint begins at every ``every``-th boundary, the first one included."""

    def __init__(self, step: checkflow.TrainingStep, every: int) -> None:
        self._step, self._every = step, every
        self._iteration = 0
        self.held_seconds, self.checkpoints = 0.0, 0

    def run(self, iterations: int) -> list[float]:
        seconds = []
        for _ in range(iterations):
            begun = time.perf_counter()
            if self._iteration % self._every == 0:
                self._checkpoint(self._iteration)
                self.held_seconds += time.perf_counter() - begun
                self.checkpoints += 1
            self._step.run(self._step.batch)
            self._iteration += 1
            seconds.append(time.perf_counter() - begun)
        return seconds

    def _checkpoint(self, number: int) -> None:
        raise NotImplementedError

    def settle(self) -> None:
        """Nothing is under way once ``run`` has returned, unless a subclass says otherwise."""


class TorchSave(AtBoundaries):
    """``torch.save`` into a new file, fsynced, its name too; the last two files stay."""

    def __init__(self, step: checkflow.TrainingStep, every: int, directory: Path) -> None:
        super().__init__(step, every)
        self._directory = directory
        directory.mkdir()
        self._files: list[Path] = []

    def _checkpoint(self, number: int) -> None:
        self.save(number)

    def save(self, number: int) -> None:
        """Make one checkpoint."""
        path = self._directory / f"{number}.pt"
        content = {
            "models": {name: model.state_dict() for name, model in self._step.models.items()},
            "optimizers": {name: optimizer.state_dict() for name, optimizer in self._step.optimizers.items()},
        }
        with open(path, "wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        folder = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
        self._files.append(path)
        while len(self._files) > 2:
            self._files.pop(0).unlink()

    def close(self) -> None:
        """Its files go with the directory that they lie in."""


class Staged(AtBoundaries):
    """State is copied into staging memory, and committed by checkflow's store.

    Args:
        copies, commits: whether training goes on ("beside") or stands still ("held") while the state is copied, and
            while it is committed. Copies beside training need commits beside it.
    """

    def __init__(
        self, step: checkflow.TrainingStep, every: int, directory: Path, *, copies_beside: bool, commits_beside: bool
    ) -> None:
        super().__init__(step, every)
        self._copies_beside, self._commits_beside = copies_beside, commits_beside
        self._walk = StateWalk(step.models, step.optimizers)
        self._state = state = self._walk.current()
        self._layout = make_layout([tensor_record(item) for item in state.tensors])
        self._engine, locking = make_engine(state.tensors[0].tensor.device)
        self._buffers = StagingBuffers(1, locking)
        self._buffers.grow(self._layout.buffer_bytes)
        self._buffer = self._buffers.take()
        write_headers(self._layout, self._buffer.view)
        self._transfers: list[Transfer] = []
        early: list[int] = []  # chunks of what forward writes
        for item in state.tensors:
            source = item.tensor.data_ptr()
            target = self._buffer.address + self._layout.tensors[item.name].staging_offset
            for offset in range(0, item.tensor.nbytes, CHUNK_BYTES):
                if item.kind == "buffer":
                    early.append(len(self._transfers))
                length_bytes = min(CHUNK_BYTES, item.tensor.nbytes - offset)
                self._transfers.append(Transfer(source + offset, target + offset, length_bytes))
        everything = range(len(self._transfers))
        self._early = early if copies_beside else everything
        self._late = sorted(set(everything) - set(early)) if copies_beside else []
        self._in_flight = False
        self._under_way: Concluded | None = None
        self._store = Store(directory, run_id="baseline")
        self._writer = Writer(self._commit, lambda capture: None, supersede=False)
        self._hooks = [one.register_step_pre_hook(self._before_step) for one in step.optimizers.values()]

    @property
    def state_bytes(self) -> int:
        return sum(item.tensor.nbytes for item in self._state.tensors)

    def _commit(self, capture: Capture) -> Path:
        assert isinstance(capture.extra, bytes)
        return self._store.commit(
            capture.step, capture.layout, capture.buffer.view, capture.extra, capture.info, ties=capture.ties
        )

    def _checkpoint(self, number: int) -> None:
        self._wait_for_writer()
        if self._walk.current() is not self._state:
            raise RuntimeError("a state tensor was replaced, which these baselines do not follow")
        extra = codec.encode({"iteration": number, **capture_extra(self._walk, self._step.optimizers, {})})
        capture = Capture(
            number, self._buffer, self._layout, extra, {}, self._state.ties, (), None, {}, "", by_plan=False
        )
        self._engine.begin(self._transfers, lambda: self._writer.submit(capture))
        self._engine.offload([*self._early, *self._late], "boundary")
        self._engine.wait(self._early)
        self._in_flight = bool(self._late)
        if not self._in_flight:
            self._engine.finish()
        if not self._commits_beside:
            self._writer.wait_until_at_most(0)

    def _before_step(self, *_: Any) -> None:
        begun = time.perf_counter()
        self._end_copies()
        self.held_seconds += time.perf_counter() - begun

    def _end_copies(self) -> None:
        if self._in_flight:
            self._engine.wait(self._late)
            self._under_way = self._engine.conclude()  # a GPU waits by itself, and the host goes on
            self._in_flight = False

    def _wait_for_writer(self) -> None:
        self._end_copies()
        if self._under_way is not None:
            self._under_way.wait()
        self._writer.wait_until_at_most(0)

    def settle(self) -> None:
        self._wait_for_writer()
        error = self._writer.take_error()
        if error is not None:
            raise error

    def measure_copy(self, *, helped: bool) -> float:
        """Seconds to copy all state, by the copying thread alone (T_c) or with the training thread's help (T_g)."""
        done = threading.Event()
        begun = time.perf_counter()
        self._engine.begin(self._transfers, done.set)
        self._engine.offload(range(len(self._transfers)), "boundary")
        if helped:
            self._engine.finish()
        done.wait()
        seconds = time.perf_counter() - begun
        self._engine.finish()
        return seconds

    def _capture(self, number: int, extra: bytes) -> Capture:
        ties = self._state.ties
        return Capture(number, self._buffer, self._layout, extra, {}, ties, (), None, {}, "", by_plan=False)

    def measure_commit(self, number: int) -> float:
        """Seconds that the store takes to commit what was copied last (CheckFreq's T_s)."""
        capture = Capture(
            number, self._buffer, self._layout, b"", {}, self._state.ties, (), None, {}, "", by_plan=False
        )
        begun = time.perf_counter()
        self._commit(capture)
        return time.perf_counter() - begun

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._writer.close()
        self._engine.close()
        self._store.close()
        self._buffers.close()


class Reporting:
    """What checkflow reports of itself."""

    checkpointer: checkflow.Checkpointer

    @property
    def held_seconds(self) -> float:
        seconds: float = sum(self.checkpointer.report()["held_seconds"].values())
        return seconds

    @property
    def checkpoints(self) -> int:
        captures: int = self.checkpointer.report()["captures"]
        return captures


class Planned(Reporting):
    """checkflow's Checkpointer on a job of its own.

    Args:
        options: of the Checkpointer; ``audit=0`` is set: audits are no part of what a checkpoint costs in the long run.
    """

    def __init__(self, step: checkflow.TrainingStep, directory: Path, **options: Any) -> None:
        self._step = step
        self.checkpointer = checkflow.Checkpointer(
            step.models, step.optimizers, directory=directory, audit=0, on_error="raise", **options
        )
        self._steps: Iterator[int] = self.checkpointer.steps(2**31)

    @property
    def committed(self) -> int:
        """Checkpoints that are durable."""
        count: int = self.checkpointer.report()["committed"]
        return count

    def run(self, iterations: int) -> list[float]:
        seconds = []
        for _ in range(iterations):
            begun = time.perf_counter()
            next(self._steps)
            self._step.run(self._step.batch)
            seconds.append(time.perf_counter() - begun)
        return seconds

    def settle(self) -> None:
        """Only where ``every`` is given: otherwise some checkpoints stay in host memory."""
        while not self._settled(self.checkpointer.report()):
            time.sleep(1e-3)

    def _settled(self, report: dict[str, Any]) -> bool:
        return bool(report["captures"] <= report["committed"] + report["failed"] + report["superseded"])

    @property
    def interval(self) -> int:
        """Iterations from one durable checkpoint to the next; 0: the policy has chosen none yet."""
        return self.checkpointer.report()["frequency"]["disk_interval"] or 0

    def decide(self, most_seconds: float = math.inf) -> bool:
        """Train until the policy has chosen an interval; returns whether it has, in that time.

        Raises:
            SystemExit: it never does.
        """
        end = time.monotonic() + most_seconds
        for _ in range(MOST_UNDECIDED):
            if self.interval:
                return True
            if time.monotonic() > end:
                return False
            self.run(1)
        raise SystemExit(f"the policy has chosen no interval in {MOST_UNDECIDED} iterations")

    def close(self) -> None:
        self._steps = iter(())  # drops the loop, which ends it as ``break`` does
        self.checkpointer.close()


def own_plan(step: checkflow.TrainingStep, directory: Path, overhead: float) -> checkflow.Plan:
    """The plan that a job makes of itself while it trains.

    Raises:
        SystemExit: it makes none.
    """
    with checkflow.Checkpointer(step.models, step.optimizers, directory=directory, overhead=overhead) as checkpointer:
        end = time.monotonic() + PLAN_SECONDS
        for _ in checkpointer.steps(2**31):
            step.run(step.batch)
            report = checkpointer.report()
            if report["plan"] or report["planning"] == "given up" or time.monotonic() > end:
                break
    if not report["plan"]:
        raise SystemExit(f"the job got no plan: {report['planning_failure'] or 'it took too long'}")
    (file,) = (directory / "plans").glob("*.json")
    return plans.load(file)


Make = Callable[[checkflow.TrainingStep, int, Path], Way]

# By the name under which tables know them; what they stand for is in the module's text.
BASELINES: dict[str, Make] = {
    "torch.save": TorchSave,
    "store": lambda step, every, directory: Staged(step, every, directory, copies_beside=False, commits_beside=False),
    "persist": lambda step, every, directory: Staged(step, every, directory, copies_beside=False, commits_beside=True),
    "CheckFreq": lambda step, every, directory: Staged(step, every, directory, copies_beside=True, commits_beside=True),
}
