"""Captures: the state at one boundary, gathered during the iterations after it, as the plan says.

The life of a capture: ``begin`` at the boundary (extra state is encoded, host state copied, nothing else moves), then
the plan's work at each anchor of each iteration (``go_on`` at the boundaries between them), until the last chunk has
arrived in its staging buffer and the capture is *delivered* to the writer, be it before the plan's interval is over.
One is gathered at a time; it is never abandoned for a later one: it is brought to its end, early if need be. At regular
boundaries that is ``conclude``, for which the host does not wait: on a GPU the next capture begins while the last bytes
of some before are still to come. ``finish`` waits for all of them.

Tensors that the plan does not know (the job changed since its first iteration) are copied at the boundary itself, and
said so: consistent, though not free.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from checkflow.core.errors import CheckflowError, ConsistencyError
from checkflow.core.graph import BOUNDARY, AnchorKey
from checkflow.core.plan import Plan
from checkflow.core.state import TrainingState
from checkflow.runtime.format.digest import Digest, Digests
from checkflow.runtime.format.layout import Layout, make_layout
from checkflow.runtime.job import compatibility
from checkflow.runtime.memory_tier.staging import StagingBuffer, StagingBuffers
from checkflow.runtime.snapshot.chunk_map import Arrangement, arrange, planned_records
from checkflow.runtime.snapshot.program import AnchorWork, Program
from checkflow.runtime.snapshot.unwritten import SettledTensors, WrittenError
from checkflow.runtime.state.collect import StateWalk, version_of, versions_of
from checkflow.runtime.transfer.engine import (
    Concluded,
    CopyEngine,
    CopyRecord,
    CopyStatistics,
    Moved,
    Outcome,
    Transfer,
)

logger = logging.getLogger("checkflow")


@dataclass
class Capture:
    """A checkpoint on its way to the writer."""

    step: int
    buffer: StagingBuffer
    layout: Layout
    extra: bytes | Callable[[], bytes]  # or what makes them of values that nobody changes: the writer calls it
    info: Mapping[str, Any]
    ties: tuple[tuple[str, str], ...]
    absent: tuple[str, ...]
    digests: Digests | None  # of every tensor at the boundary, where this capture is audited
    settled: Mapping[str, Digest]  # of the settled tensors, known from before
    plan_digest: str  # of the plan that it was begun under, "" where there was none
    by_plan: bool  # whether copies are made when that says, and not all at the boundary
    begun: float = field(default_factory=time.monotonic)
    arrived: bool = False  # and handed on
    error: CheckflowError | None = None  # why it did not arrive


@dataclass(frozen=True)
class CaptureReport:
    """What the newest capture that came to its end did, for reports and for holding it against the plan."""

    step: int
    outcome: Outcome
    boundary_bytes: int  # copied at the boundary itself: host state, and tensors that the plan does not know
    moved: Moved

    @property
    def statistics(self) -> CopyStatistics:
        return self.outcome.statistics

    @functools.cached_property
    def log(self) -> tuple[CopyRecord, ...]:
        """Every copy that was made, in order."""
        return self.outcome.log()


@dataclass(frozen=True)
class _Leaving:
    """A capture that was concluded, and may still be on its way."""

    capture: Capture
    concluded: Concluded
    boundary_bytes: int
    chunk_bytes: int


class Capturer:
    """Gathers captures for one plan.

    Args:
        buffers: staging buffers; they are made as large as the plan foretells.
        deliver: called with each complete capture, on any thread.
        known_to_fit: whether somebody else holds the job against the plan; otherwise the first capture does.
        resumed: whether the job goes on from a checkpoint.
        at_boundary: whether everything is copied at the boundary itself, whatever the plan says.

    Raises:
        StorageError: no host memory for the staging buffers.
    """

    def __init__(
        self,
        plan: Plan,
        program: Program,
        walk: StateWalk,
        engine: CopyEngine,
        buffers: StagingBuffers,
        deliver: Callable[[Capture], None],
        *,
        known_to_fit: bool = False,
        resumed: bool = False,
        at_boundary: bool = False,
    ) -> None:
        self._plan, self._program, self._walk, self._engine = plan, program, walk, engine
        self._buffers, self._deliver = buffers, deliver
        buffers.grow(make_layout(planned_records(plan)).buffer_bytes)  # now: touching so much memory takes long
        self._arrangement: Arrangement | None = None
        self._fits = known_to_fit  # the job was held against the plan once
        self._resumed = resumed
        self._at_boundary = at_boundary  # there is no plan, or an audit failed
        self._prepared: dict[int, list[Transfer]] = {}  # by buffer: headers are in place, addresses computed
        self._capture: Capture | None = None
        self._iteration = 0  # since the boundary of the capture in flight
        self._next = 0  # index of the first work not yet done
        # What leaves from live memory, and its version counters at the boundary.
        self._tensors: dict[str, torch.Tensor] = {}
        self._versions: dict[str, int] = {}
        self._boundary_bytes = 0
        self._leaving: deque[_Leaving] = deque()  # in the order in which they come to their ends
        self._failed: list[tuple[int, CheckflowError]] = []
        self.settled = SettledTensors(plan)
        self.layout_changes = 0
        self.last_report: CaptureReport | None = None
        self.moved = Moved()

    @property
    def under_way(self) -> bool:
        """Whether bytes of a capture may be crossing the link."""
        return self._capture is not None or bool(self._leaving)

    @property
    def gathering(self) -> bool:
        """Whether a capture is in flight of which anything is left for anchors to do. It begins where no hook runs."""
        return self._capture is not None and not self._engine.idle

    @property
    def step(self) -> int | None:
        """The step of the capture in flight; those that were concluded no longer are."""
        return None if self._capture is None else self._capture.step

    def prepare(self, optimizers: Mapping[str, str]) -> bool:
        """Lay the files out for the state as it is now and make room for them; returns whether that was to be done.

        Args:
            optimizers: name to implementation, held against the plan's fingerprint at the first capture.

        Raises:
            MismatchError, StorageError: as :meth:`begin`.
        """
        state = self._walk.current()
        if self._arrangement is not None and state is self._arrangement.state:
            return False
        self.finish()  # what the one before holds is still read
        if not self._fits:
            compatibility.refuse_other_job(self._plan, state, optimizers, resumed=self._resumed)
            self._fits = True
        self._arrange(state)
        return True

    def begin(
        self,
        step: int,
        extra: bytes | Callable[[], bytes],
        info: Mapping[str, Any],
        *,
        audit: bool,
        optimizers: Mapping[str, str],
    ) -> float:
        """Start the capture of this instant; returns the seconds for which it waited for a free staging buffer.

        Args:
            optimizers: as :meth:`prepare`.

        Raises:
            MismatchError: at the first capture: the job is not the one that the plan was made for.
            StorageError: the state has grown, and there is no host memory for larger staging buffers.
        """
        audit = self.prepare(optimizers) or audit
        arrangement = self._arrangement
        assert arrangement is not None
        begun = time.perf_counter()
        self.make_room()
        buffer = self._buffers.take()
        try:  # at once: what a signal's handler raises comes between any two lines
            waited_seconds = time.perf_counter() - begun
            if buffer.index not in self._prepared:
                self._prepare(buffer, arrangement)
            self.join()
            at_once = self._copy_at_boundary(buffer, arrangement)
            digests = Digests(arrangement.state.tensors) if audit or self.settled.undecided else None
            settled = self.settled.look(self._tensors, digests)
            ties, absent = arrangement.state.ties, arrangement.absent
            self._capture = capture = Capture(
                step, buffer, arrangement.layout, extra, info, ties, absent, digests, settled, self._plan.digest,
                by_plan=not self._at_boundary,
            )  # fmt: skip
        except BaseException:
            self._capture = None
            self._buffers.give_back(buffer)
            raise
        self._iteration = self._next = 0
        self._versions = {}  # nothing has been written yet: they are looked at from the next anchor on
        self._engine.begin(
            self._prepared[buffer.index],
            lambda: self._hand_on(capture),
            at_once,
            lambda error: self._fail(capture, error),
        )
        self.reached(BOUNDARY)
        self._versions = dict(zip(self._tensors, versions_of(self._tensors.values()), strict=True))
        return waited_seconds

    def make_room(self) -> bool:
        """Wait for captures that are on their way, as long as no staging buffer is free; returns whether one is.

        Each that is delivered may take the place of one that is held back, whose buffer is free then.
        """
        while not self._buffers.free and self._leaving:
            self._leaving[0].concluded.wait()
            self._collect()
        return self._buffers.free > 0

    def join(self) -> None:
        """What is read on the current stream from now on is the state of this boundary."""
        self._engine.join()

    def note(self) -> None:
        """Training writes state where this is called."""
        self._engine.note()

    def reached(self, key: AnchorKey) -> None:
        """An anchor fired: do its work, and that of all before it that has not been done."""
        if self._capture is None:
            return
        position = self._program.position.get((self._iteration, key))
        if position is not None and position >= self._next:
            self._work_until(position + 1)

    def go_on(self) -> None:
        """A boundary that is not captured: the next iteration of the capture in flight, or its end if it was the last.

        Deadlines whose anchors did not fire end with the first iteration.
        """
        self._collect()
        if self._capture is None:
            return
        if self._iteration + 1 == self._plan.interval:
            self.conclude()
            return
        self.complete_iteration()
        self._iteration += 1
        self.reached(BOUNDARY)

    def require(self, chunks: Sequence[int]) -> None:
        """These chunks must be safe now, whatever the plan says: what follows might write their tensors.

        Raises:
            ConsistencyError: one of them was written already, as its version counter tells.
        """
        if self._capture is None:
            return
        live = self._engine.live(chunks)
        if not live:
            return
        self._refuse_written(live)
        self._engine.offload(live, "barrier")
        self._engine.wait(live)

    def require_after_step(self) -> None:
        """An optimizer has stepped: the loop may now write what no operator was seen to write, settled tensors apart.

        Raises:
            ConsistencyError: as :meth:`require`.
        """
        chunks = self._plan.chunks
        self.require([chunk for chunk in self._program.after_step if chunks[chunk].tensor not in self.settled])

    def _refuse_written(self, live: Sequence[int]) -> None:
        """A version counter may tell of a write that no anchor announced (not of one through ``.data``).

        Args:
            live: chunks whose bytes lie in their live tensors alone.
        """
        assert self._capture is not None
        for chunk in live:
            name = self._plan.chunks[chunk].tensor
            if name in self._versions and version_of(self._tensors[name]) != self._versions[name]:
                if name in self._capture.settled:
                    raise WrittenError(self._capture.step, name)
                raise ConsistencyError(f"{name} was written before its copy was made")

    def follow(self, program: Program) -> None:
        """The plan is executed at other anchors from now on. No capture may be in flight."""
        self._program = program

    def distrust(self) -> None:
        """The plan does not fit the job: from now on everything is copied at the boundary itself.

        No capture may be in flight: the memory that it reads is held no longer.
        """
        self._at_boundary = True
        self._arrangement = None

    def rearrange(self) -> None:
        """The staging buffers are others now. No capture may be in flight."""
        self._arrangement = None

    def release(self) -> None:
        """No capture follows: hold no memory of the job any longer. No capture may be in flight."""
        self._arrangement = None
        self._tensors, self._versions, self._prepared = {}, {}, {}

    def complete_iteration(self) -> None:
        """No anchor is left in this iteration: do its work that has not been done, wait for no snapshot."""
        if self._capture is not None:
            self._work_until(self._program.end_of(self._iteration))

    def conclude(self) -> None:
        """Bring the capture in flight to its end, if there is one, without waiting for what is on its way (on a GPU).

        What the plan has for later iterations goes at once, and without snapshots: on a GPU its stream waits for it
        here, on a CPU the training thread.
        """
        if self._capture is not None:
            self.complete_iteration()
            if self._next < len(self._program.works):
                chunks = range(len(self._plan.chunks))
                if self._versions:
                    self._refuse_written(self._engine.live(chunks))
                self._engine.offload(chunks, "end")
                self._next = len(self._program.works)
            concluded = self._engine.conclude()
            assert self._arrangement is not None
            leaving = _Leaving(self._capture, concluded, self._boundary_bytes, self._arrangement.chunk_bytes)
            self._leaving.append(leaving)
            self._capture = None
        self._collect()

    def finish(self) -> None:
        """As :meth:`conclude`, and wait until every capture has come to its end."""
        self.conclude()
        if self._leaving:
            self._engine.finish()
            self._collect()

    def take_failed(self) -> list[tuple[int, CheckflowError]]:
        """The steps of concluded captures that were found not to have arrived since the last call, and why."""
        failed, self._failed = self._failed, []
        return failed

    def _collect(self) -> None:
        """What those did that have come to their ends."""
        while self._leaving and (outcome := self._leaving[0].concluded.outcome()) is not None:
            one = self._leaving.popleft()
            if one.capture.error is not None:
                self._failed.append((one.capture.step, one.capture.error))
                continue
            statistics = outcome.statistics
            moved = Moved(
                one.chunk_bytes - statistics.snapshot_bytes,
                statistics.snapshot_bytes,
                one.boundary_bytes,
                statistics.offload_seconds,
                statistics.large_bytes,
                statistics.large_seconds,
            )
            self.moved += moved
            self.last_report = CaptureReport(one.capture.step, outcome, one.boundary_bytes, moved)

    def _hand_on(self, capture: Capture) -> None:
        """On the engine's thread: all of it is there."""
        capture.arrived = True
        self._deliver(capture)

    def _fail(self, capture: Capture, error: CheckflowError) -> None:
        """On the engine's thread: what was on its way did not arrive."""
        capture.error = error
        self._buffers.give_back(capture.buffer)

    def abort(self) -> bool:
        """Give up the capture in flight; returns whether one was lost (it may have been delivered already).

        Those that were concluded are waited for.
        """
        capture = self._capture
        self._engine.abort()  # of which it may never have heard
        lost = capture is not None and not capture.arrived
        if capture is not None and lost and capture.error is None:
            self._buffers.give_back(capture.buffer)
        self._capture = None
        self._collect()
        return lost

    def _work_until(self, end: int) -> None:
        if self._engine.idle:
            self._next = max(self._next, end)
        while self._next < end:
            self._do(self._program.works[self._next])
            self._next += 1  # only now: what an interrupt ends half-way is done again, and each part of it once

    def _do(self, work: AnchorWork) -> None:
        engine = self._engine
        if self._versions and (live := engine.live(work.touched)):
            self._refuse_written(live)
        if work.snapshot:
            engine.snapshot(work.snapshot, work.label)
        if work.release:
            engine.offload(work.release, work.label)
        if work.due:
            engine.wait(work.due)
        if work.free:
            engine.free(work.free)

    def _arrange(self, state: TrainingState) -> None:
        """Lay the files out for the state as it is now, and make room for them."""
        self._arrangement = None  # if what follows fails, the next capture tries again
        compatibility.refuse_other_memory(state, self._engine.source)  # optimizers make theirs late
        arrangement = arrange(self._plan, state, self._engine.source, at_boundary=self._at_boundary)
        self._tensors = {item.name: item.tensor for item in state.tensors if item.name in arrangement.planned}
        self._buffers.grow(arrangement.layout.buffer_bytes)
        self._prepared = {}
        self.settled.forget()
        self.layout_changes += 1
        self._arrangement = arrangement

    def _prepare(self, buffer: StagingBuffer, arrangement: Arrangement) -> None:
        """Write the files' headers into a buffer and compute its transfers."""
        for file in arrangement.layout.files:
            buffer.view[file.staging_offset : file.staging_offset + len(file.header)] = file.header
        self._prepared[buffer.index] = [
            Transfer(source, buffer.address + offset, length) for source, offset, length in arrangement.chunks
        ]

    def _copy_at_boundary(self, buffer: StagingBuffer, arrangement: Arrangement) -> list[Transfer]:
        """Copy what lies in host memory; returns what the engine is to copy at once."""
        self._boundary_bytes = 0
        at_once = []
        for item in arrangement.at_boundary:
            source, size_bytes = item.tensor.data_ptr(), item.tensor.nbytes
            target = buffer.address + arrangement.layout.tensors[item.name].staging_offset
            if item.tensor.device == self._engine.source:
                at_once.append(Transfer(source, target, size_bytes))
            elif size_bytes:
                ctypes.memmove(target, source, size_bytes)
            self._boundary_bytes += size_bytes
        return at_once
