"""Training loops that are timed: one job, its phases, with and without checkpoints.

On a GPU time is what passes between events on the training stream: where the stream waits for a copy, the wait is in
the phase in which it happens, and the host, which runs ahead, is not asked. On a CPU it is the host's clock.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import itertools
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol
from unittest import mock

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils import _pytree as pytree

import checkflow
from benchmarks.gpu.figures import CHECKPOINTED, PLAIN, Row, case_name
from benchmarks.gpu.worker import scratch
from checkflow.planner.model_file.load import OPTIMIZERS
from checkflow.runtime.interval.controller import Controller
from checkflow.runtime.transfer.cuda_device import CudaDevice

#: In the order of an iteration. The batch comes to the device in the first one. The wait is what happens between
#: backward and the optimizer's own work, where most of the state is due; "boundary" is what follows the update.
PHASES = ("data", "forward and backward", "wait before the update", "update", "boundary")
BUFFERS = 4  # with three, a host that runs ahead waits for storage, which is busy all the time here
AUDITED = 3  # captures, of each plan's first ones: not to be timed


@dataclass(frozen=True)
class Case:
    """A training step to be measured. ``optimizer``: None for the model's own, else as ``--optimizer``."""

    model: str
    batch_size: int
    optimizer: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    thorough: bool = False  # with all sections, not only the main ones

    @property
    def name(self) -> str:
        return case_name(self.model, self.batch_size, self.optimizer, self.settings)


class Marks(Protocol):
    """A clock that is read later."""

    def mark(self) -> Any: ...
    def wait(self) -> None: ...  # for everything that was marked
    def seconds(self, earlier: Any, later: Any) -> float: ...


class EventMarks:
    """Events on the current stream of a CUDA device."""

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def wait(self) -> None:
        torch.cuda.synchronize()

    def seconds(self, earlier: torch.cuda.Event, later: torch.cuda.Event) -> float:
        return earlier.elapsed_time(later) / 1e3


class HostMarks:
    """The host's clock: on a CPU, work is done when the call returns."""

    def mark(self) -> float:
        return time.perf_counter()

    def wait(self) -> None:
        pass

    def seconds(self, earlier: float, later: float) -> float:
        return later - earlier


class TrainingJob:
    """One case, built on a device, with its batch waiting in host memory as a data loader leaves it."""

    def __init__(self, case: Case, device: torch.device) -> None:
        self.case, self.device = case, device
        self.marks: Marks = EventMarks() if device.type == "cuda" else HostMarks()
        torch.manual_seed(0)
        with torch.device(device):
            module = importlib.import_module(f"checkflow.models.{case.model}")
            step: checkflow.TrainingStep = module.build(batch_size=case.batch_size, **case.settings)
            if case.optimizer is not None:
                make = OPTIMIZERS[case.optimizer]
                step.optimizers = {  # of the parameters alone: a group's own lr and momentum would count
                    name: make([{"params": group["params"]} for group in other.param_groups])
                    for name, other in step.optimizers.items()
                }
        self.step = step
        here = [leaf for leaf in pytree.tree_leaves(step.batch) if isinstance(leaf, torch.Tensor)]
        apart = device.type != "cpu"
        self._batch = [(leaf, leaf.cpu().pin_memory() if apart else leaf.clone()) for leaf in here]

    def load(self) -> None:
        """The next batch comes to the device; it is written where the last one was, so that it adds no memory."""
        for leaf, waiting in self._batch:
            leaf.copy_(waiting, non_blocking=True)

    def iterate(self) -> Any:
        """A whole iteration; the loop holds what it returns, as training loops hold their loss."""
        self.load()
        return self.step.run(self.step.batch)


class Phases:
    """Marks the phases of iterations, until it is left: enter it before a Checkpointer is made.

    Its hook that ends backward is a global one, and runs before those of a Checkpointer made later; the one that begins
    the update is the optimizer's own, and runs after them.
    """

    def __init__(self, job: TrainingJob) -> None:
        self._job = job
        self._rows: list[list[Any]] = []
        self._hooks = contextlib.ExitStack()

    def __enter__(self) -> Phases:
        optimizer = next(iter(self._job.step.optimizers.values()))
        for handle in (
            register_optimizer_step_pre_hook(lambda *_: self._mark(2)),
            optimizer.register_step_pre_hook(lambda *_: self._mark(3)),
            optimizer.register_step_post_hook(lambda *_: self._mark(4)),
        ):
            self._hooks.callback(handle.remove)
        return self

    def __exit__(self, *_: object) -> None:
        self._hooks.close()

    def iterate(self) -> Any:
        """An iteration of the job."""
        self._rows.append([self._job.marks.mark()])
        self._job.load()
        self._mark(1)
        return self._job.step.run(self._job.step.batch)

    def forget(self) -> None:
        """What was marked so far does not count."""
        self._rows.clear()

    def seconds(self) -> list[list[float]]:
        """Of each iteration but the last (nothing tells its end), the seconds of each phase."""
        self._job.marks.wait()
        elapsed = self._job.marks.seconds
        rows = [[*row, after[0]] for row, after in itertools.pairwise(self._rows)]
        return [[elapsed(a, b) for a, b in itertools.pairwise(row)] for row in rows]

    def _mark(self, place: int) -> None:
        row = self._rows[-1]
        if len(row) == place:  # of several optimizers, the first one's
            row.append(self._job.marks.mark())


@dataclass(frozen=True)
class Block:
    """Iterations in a row, all of them with or all of them without checkpoints."""

    kind: str
    phases: list[list[float]]  # per iteration, seconds of each phase
    peaks: Row | None  # of device memory, in bytes, as torch's allocator counts them
    report: Row  # of the Checkpointer, over the iterations that count; empty without one
    loop_seconds: float  # of these, and one more at either end
    stored: int  # checkpoints that were committed meanwhile

    @property
    def seconds(self) -> list[float]:
        """Of each iteration."""
        return [sum(row) for row in self.phases]


def _peaks(device: torch.device) -> Row | None:
    if device.type != "cuda":
        return None
    stats = torch.cuda.memory_stats(device)
    return {f"{kind}_bytes": stats[f"{kind}_bytes.all.peak"] for kind in ("requested", "allocated", "reserved")}


def _grown(before: Mapping[str, Any], after: Mapping[str, Any]) -> Row:
    """What counts and seconds held grew by between two reports; the rest as it is now."""
    held = {phase: seconds - before["held_seconds"][phase] for phase, seconds in after["held_seconds"].items()}
    counts = {name: after[name] - before[name] for name in ("captures", "committed", "superseded", "audited")}
    kept = ("failed", "breaches", "checkpoint_bytes", "bandwidths", "newest_capture", "measured")
    return {"held_seconds": held, **counts, **{name: after[name] for name in kept}}


def what_ran(checkpointer: checkflow.Checkpointer) -> Row:
    """By what an open Checkpointer copies; ``batches``: whether many copies are one call of CUDA's runtime."""
    saving = checkpointer._saving
    buffers = saving.buffers
    memory = "allocated" if buffers._allocated else "shared" if saving.tier.survives else "anonymous"
    row: Row = {"buffers": saving.host_buffers, "buffers_locked": buffers.locked, "memory": memory}
    device = getattr(saving.engine, "_device", None)
    if isinstance(device, CudaDevice):
        runtime = device._runtime
        row |= {"numa_node": device.numa_node, "cuda_runtime": runtime.version, "batches": device.batches}
    return row


def train(
    job: TrainingJob,
    checkpointer: checkflow.Checkpointer | None,
    *,
    warm_up: int,
    iterations: int,
    phases: Phases,
    at: Mapping[int, Callable[[], object]] = {},
) -> Block:
    """A loop of ``warm_up`` iterations that do not count, then those that do, and one more that ends the last one.

    Args:
        warm_up: at least one.
        at: further calls, before the iterations of these numbers.
    """
    count = warm_up + iterations + 1
    gc.collect()
    before: Row = {}
    after: Row = {}
    result = None  # held as a training loop holds its loss
    begun = ended = (0.0, 0)
    for n in range(count) if checkpointer is None else checkpointer.steps(count):
        if n == warm_up - 1:  # not where iterations begin or end to count: the device would stand still in one of them
            begun = _come_to(job, checkpointer)
        if n == warm_up:
            phases.forget()
            if job.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(job.device)
            before = {} if checkpointer is None else checkpointer.report()
        if n == warm_up + iterations:
            after = {} if checkpointer is None else checkpointer.report()
        if n in at:
            at[n]()
        result = phases.iterate()
        if n == warm_up + iterations:
            ended = _come_to(job, checkpointer)
    del result
    report = {} if checkpointer is None else {**_grown(before, after), "ran": what_ran(checkpointer)}
    kind = PLAIN if checkpointer is None else CHECKPOINTED
    return Block(kind, phases.seconds(), _peaks(job.device), report, ended[0] - begun[0], ended[1] - begun[1])


def _come_to(job: TrainingJob, checkpointer: checkflow.Checkpointer | None) -> tuple[float, int]:
    """The host's clock, and how many checkpoints are committed, once the device has done what it was given."""
    job.marks.wait()
    return time.perf_counter(), 0 if checkpointer is None else checkpointer.report()["committed"]


def every_interval() -> contextlib.AbstractContextManager[Any]:
    """Until the context is left, each multiple of the plan's interval is captured, and storage takes what it can.

    A controller would profile such a short job to its end, and leave checkpoints out to see what training takes by
    itself: it would be measured, and not the plan. ``every=`` would have training wait for storage.
    """
    return mock.patch.multiple(
        Controller,
        is_due=lambda owner, number: number % owner._unit == 0,
        is_durable=lambda owner, number: True,
    )


@contextlib.contextmanager
def checkpointing(
    job: TrainingJob, plan: checkflow.Plan, storage: Path, *, every: int | None = None
) -> Iterator[checkflow.Checkpointer]:
    """A Checkpointer on an empty directory, whose faults are raised.

    Args:
        every: iterations from one checkpoint to the next, each of which training waits to see on storage; None: as
            planned, on storage as far as that keeps up.
    """
    with (
        every_interval() if every is None else contextlib.nullcontext(),
        tempfile.TemporaryDirectory(dir=storage, prefix=scratch(), ignore_cleanup_errors=True) as directory,
        checkflow.Checkpointer(
            job.step.models, job.step.optimizers, directory=directory, plan=plan,
            every=every, audit=0, resume="never", on_error="raise", host_buffers=BUFFERS,
        ) as checkpointer,
    ):  # fmt: skip
        yield checkpointer


def warm_up_iterations(interval: int) -> int:
    """Until audits are over and every staging buffer has been used twice, a multiple of the interval."""
    return (AUDITED + 2 * BUFFERS) * interval


def block(job: TrainingJob, kind: str, plan: checkflow.Plan, storage: Path, iterations: int) -> Block:
    """One block of iterations; with checkpoints, as often as planned, into host memory and on to ``storage``."""
    warm_up = warm_up_iterations(plan.interval)
    with Phases(job) as phases:
        if kind == PLAIN:
            return train(job, None, warm_up=min(warm_up, 10), iterations=iterations, phases=phases)
        with checkpointing(job, plan, storage) as checkpointer:
            return train(job, checkpointer, warm_up=warm_up, iterations=iterations, phases=phases)


def phase_medians(blocks: Sequence[Block], kind: str) -> dict[str, float]:
    """The median of each phase over all iterations of one kind of block, in seconds."""
    rows = [row for one in blocks if one.kind == kind for row in one.phases]
    columns = zip(*rows, strict=True)
    return {name: float(torch.tensor(column).median()) for name, column in zip(PHASES, columns, strict=True)}


def slowest(blocks: Sequence[Block], kind: str, count: int = 5) -> list[Row]:
    """The slowest iterations of one kind of block, with their places: what a 99th percentile is made of."""
    found = [
        (sum(row), number, place, row)
        for number, one in enumerate(blocks)
        if one.kind == kind
        for place, row in enumerate(one.phases)
    ]
    return [
        {"seconds": seconds, "block": number, "iteration": place, "phase_seconds": dict(zip(PHASES, row, strict=True))}
        for seconds, number, place, row in sorted(found, reverse=True)[:count]
    ]


LARGE_BYTES = 2**20  # of a copy, in the mean of a call


class SideCopies:
    """Times what crosses the link on the copy engine's own stream, by events around each call that copies there.

    Raises:
        AttributeError: the engine is none that copies on a stream of its own.
    """

    def __init__(self, checkpointer: checkflow.Checkpointer) -> None:
        self._device = checkpointer._saving.engine._device  # type: ignore[attr-defined]
        # Events around each call, its bytes, and in how many copies.
        self._spans: list[tuple[torch.cuda.Event, torch.cuda.Event, int, int]] = []

    def start(self) -> None:
        """Time from now on."""
        copy, side = self._device.copy, self._device.side

        def timed(copies: Any, stream: Any) -> None:
            if stream is not side:  # a snapshot
                copy(copies, stream)
                return
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before.record(stream)
            copy(copies, stream)
            after.record(stream)
            size_bytes = sum(one.length_bytes for one in copies.transfers)
            self._spans.append((before, after, size_bytes, len(copies.copies.singly)))

        self._device.copy = timed

    def stop(self) -> None:
        """Time no more."""
        del self._device.copy

    def row(self) -> Row:
        """Bytes, in how many copies and calls, the seconds in which they crossed, and what that makes.

        Calls of large copies are told apart, where the price of a copy is next to nothing; None: there were none.
        """
        torch.cuda.synchronize()
        timed = [(size, count, before.elapsed_time(after) / 1e3) for before, after, size, count in self._spans]
        size_bytes, seconds = sum(size for size, _, _ in timed), sum(seconds for _, _, seconds in timed)
        large = [(size, seconds) for size, count, seconds in timed if size >= LARGE_BYTES * count]
        counts = {"bytes": size_bytes, "copies": sum(count for _, count, _ in timed), "calls": len(timed)}
        return {
            **counts,
            "busy_seconds": seconds,
            "bytes_per_second": size_bytes / seconds if seconds else 0.0,
            "large_bytes_per_second": sum(size for size, _ in large) / sum(lasting for _, lasting in large)
            if large else None,
        }  # fmt: skip


@dataclass
class Stays:
    """How long the hooks of a Checkpointer last at each anchor: on the training stream, and on the host."""

    marks: Marks
    found: list[tuple[str, Any, Any, float]] = field(default_factory=list)
    stopped: bool = False

    def stop(self) -> None:
        """What follows does not count."""
        self.stopped = True

    def watch(self, of: type, method: str, label: Callable[[Any], str]) -> contextlib.AbstractContextManager[Any]:
        """Until the context is left, every call of this method of a class is timed."""
        original = getattr(of, method)

        def timed(owner: Any, *given: Any, **named: Any) -> Any:
            before, begun = self.marks.mark(), time.perf_counter()
            try:
                return original(owner, *given, **named)
            finally:
                if not self.stopped:
                    self.found.append((label(given), before, self.marks.mark(), time.perf_counter() - begun))

        return mock.patch.object(of, method, timed)

    def rows(self, iterations: int) -> list[Row]:
        """Per anchor, seconds an iteration, the longest on the stream first."""
        self.marks.wait()
        sums: dict[str, list[float]] = {}
        for label, before, after, host in self.found:
            row = sums.setdefault(label, [0.0, 0.0, 0])
            row[0] += self.marks.seconds(before, after)
            row[1] += host
            row[2] += 1
        found = [
            {
                "anchor": label,
                "stream_seconds": stream / iterations,
                "host_seconds": host / iterations,
                "calls": calls,
            }
            for label, (stream, host, calls) in sums.items()
        ]
        return sorted(found, key=lambda row: -row["stream_seconds"])
