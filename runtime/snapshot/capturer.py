"""Captures: the state at one boundary, gathered by the plan during the iterations after it.

``begin`` copies host state and encodes extra state; anchors do the plan's work until the last chunk has arrived and the
capture is *delivered*. One is gathered at a time, and never dropped for a later one: ``conclude`` ends it early.
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

from checkflow.core.errors import CheckflowError, ConsistencyError
from checkflow.core.graph import BOUNDARY, AnchorKey
from checkflow.core.plan import Plan
from checkflow.core.reports.capture_times import KEPT_CAPTURES
from checkflow.core.state import StateTensor, TrainingState
from checkflow.runtime.format.digest import Digest, Digests
from checkflow.runtime.format.layout import Layout, make_layout, write_headers
from checkflow.runtime.job import compatibility
from checkflow.runtime.memory_tier.staging import StagingBuffer, StagingBuffers
from checkflow.runtime.snapshot.chunk_map import ChunkMap, make_chunk_map, planned_records
from checkflow.runtime.snapshot.program import AnchorWork, Program
from checkflow.runtime.snapshot.share import RankShare
from checkflow.runtime.snapshot.unwritten import SettledTensors, WrittenError
from checkflow.runtime.state.collect import StateWalk, version_of, versions_of
from checkflow.runtime.store.parts import Source
from checkflow.runtime.transfer.engine import (
    CaptureOutcome,
    Concluded,
    CopyEngine,
    CopyRecord,
    CopyStatistics,
    MovedBytes,
    Transfer,
)

logger = logging.getLogger("checkflow")

_FEW_CHANGES = 3  # of the layout, as while a job makes its state


@dataclass
class Capture:
    """A checkpoint on its way to the writer."""

    step: int
    buffer: StagingBuffer
    layout: Layout
    extra: bytes | Callable[[], bytes]  # or a function that the writer calls, whose values nobody changes
    info: Mapping[str, Any]
    ties: tuple[tuple[str, str], ...]
    absent: tuple[str, ...]
    digests: Digests | None  # of every tensor at the boundary, if this capture is audited
    settled: Mapping[str, Digest]  # of settled tensors, known from before
    plan_digest: str  # of the plan at its begin; "" for none
    by_plan: bool  # False: everything is copied at the boundary
    sources: Mapping[str, Source] = field(default_factory=dict)  # of a rank's parts
    begun: float = field(default_factory=time.monotonic)
    arrived: bool = False  # and handed on
    arrived_at: float = 0.0  # by time.monotonic
    written_at: float = 0.0  # likewise: all files are on storage, under a name that no reader looks at
    published_at: float = 0.0  # likewise: under their own name
    error: CheckflowError | None = None  # why it did not arrive


@dataclass(frozen=True)
class CaptureReport:
    """What the newest ended capture did, for reports and audits against the plan."""

    step: int
    outcome: CaptureOutcome
    boundary_bytes: int  # copied at the boundary: host state, and tensors that the plan does not know
    moved: MovedBytes
    plan: Plan | None = None  # by which it was gathered
    begun: float = 0.0  # by time.monotonic
    arrived_at: float = 0.0

    @property
    def statistics(self) -> CopyStatistics:
        return self.outcome.statistics

    @functools.cached_property
    def log(self) -> tuple[CopyRecord, ...]:
        """Every copy that was made, in order."""
        return self.outcome.log()


@dataclass(frozen=True)
class _Prepared:
    """The transfers into one buffer, which holds the files' headers already."""

    transfers: Sequence[Transfer]  # of the plan's chunks
    at_once: Sequence[Transfer]  # at the boundary, by the engine
    beside_gpu: Sequence[Transfer]  # at the boundary, from host memory that the engine does not copy from


@dataclass(frozen=True)
class _Leaving:
    """A concluded capture, which may still be on its way."""

    capture: Capture
    concluded: Concluded
    chunk_map: ChunkMap  # holds what is still read


class Capturer:
    """Gathers captures for one plan.

    Args:
        buffers: staging buffers; grown to what the plan expects.
        deliver: called with each complete capture, on any thread.
        known_to_fit: whether the job was compared with the plan already; otherwise the first capture does it.
        at_boundary: copy everything at the boundary, whatever the plan says.
        share: what this rank copies.
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
        share: RankShare,
    ) -> None:
        self._share = share
        self._plan, self._program, self._walk, self._engine = plan, program, walk, engine
        self._buffers, self._deliver = buffers, deliver
        buffers.grow(make_layout(planned_records(plan)).buffer_bytes)  # now: touching so much memory is slow
        self._chunk_map: ChunkMap | None = None
        self._fits = known_to_fit  # the job was compared with the plan
        self._resumed = resumed
        self._at_boundary = at_boundary  # no plan, or an audit failed
        self._prepared: dict[int, _Prepared] = {}  # by buffer
        self._capture: Capture | None = None
        self._iteration = 0  # since the current capture's boundary
        self._next = 0  # index of the next work
        # Tensors that leave from live memory, and their version counters at the boundary.
        self._tensors: dict[str, StateTensor] = {}
        self._versions: dict[str, int] = {}
        self._leaving: deque[_Leaving] = deque()  # in the order in which they will end
        self._failed: list[tuple[int, CheckflowError]] = []
        self.settled = SettledTensors(plan)
        self.layout_changes = 0
        self.reports: deque[CaptureReport] = deque(maxlen=KEPT_CAPTURES)  # of the last captures
        self.moved = MovedBytes()

    @property
    def last_report(self) -> CaptureReport | None:
        """The last capture that ended."""
        return self.reports[-1] if self.reports else None

    @property
    def under_way(self) -> bool:
        """Whether bytes of a capture may be crossing the link."""
        return self._capture is not None or bool(self._leaving)

    @property
    def gathering(self) -> bool:
        """Whether anchors still have work for the capture in flight."""
        return self._capture is not None and not self._engine.idle

    @property
    def step(self) -> int | None:
        """The step of the capture in flight, concluded ones excluded."""
        return None if self._capture is None else self._capture.step

    def prepare(self, optimizers: Mapping[str, str]) -> bool:
        """Lay out files for the state as it is now, in buffers that fit; False: nothing to do. See :meth:`begin`."""
        return self._prepare_for(self._walk.current(), optimizers)

    def _prepare_for(self, state: TrainingState, optimizers: Mapping[str, str]) -> bool:
        if self._chunk_map is not None:
            if state is self._chunk_map.state:
                return False
            if (moved := self._chunk_map.moved(self._plan, state)) is not None:
                self._use(moved[0])
                self.settled.forget(moved[1])
                return False
        self.finish()  # the previous map's memory is still being read
        if not self._fits:
            compatibility.refuse_other_job(self._plan, state.base or state, optimizers, resumed=self._resumed)
            self._fits = True
        self._map_chunks(state)
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
        """Start the capture of this instant, of the state that the walk has found last; returns the seconds waited for
        a free staging buffer.

        Raises MismatchError if the plan was made for another job, StorageError if the state outgrows host memory.
        """
        audit = self._prepare_for(self._walk.captured, optimizers) or audit
        chunk_map = self._chunk_map
        assert chunk_map is not None
        begun = time.perf_counter()
        self.make_room()
        buffer = self._buffers.take()
        try:  # right away: a signal handler may raise between any two lines
            waited_seconds = time.perf_counter() - begun
            if buffer.index not in self._prepared:
                self._prepare(buffer, chunk_map)
            self.join()
            prepared = self._prepared[buffer.index]
            for transfer in prepared.beside_gpu:
                ctypes.memmove(transfer.target, transfer.source, transfer.length_bytes)
            digests = Digests(chunk_map.items) if audit or self.settled.undecided else None
            settled = self.settled.look(self._tensors, digests)
            ties, absent = chunk_map.state.ties, chunk_map.absent
            self._capture = capture = Capture(
                step, buffer, chunk_map.layout, extra, info, ties, absent, digests, settled, self._plan.digest,
                by_plan=not self._at_boundary, sources=chunk_map.sources,
            )  # fmt: skip
        except BaseException:
            self._capture = None
            self._buffers.give_back(buffer)
            raise
        self._iteration = self._next = 0
        self._versions = {}  # nothing is written yet: checked from the next anchor on
        self._engine.begin(
            prepared.transfers,
            lambda: self._hand_on(capture),
            prepared.at_once,
            lambda error: self._fail(capture, error),
        )
        self.reached(BOUNDARY)
        self._versions = dict(zip(self._tensors, versions_of(self._tensors.values()), strict=True))
        return waited_seconds

    def make_room(self) -> bool:
        """Wait for captures until a buffer is free, maybe one that was held back; returns whether one is."""
        while not self._buffers.free and self._leaving:
            self._leaving[0].concluded.wait()
            self._collect()
        return self._buffers.free > 0

    def join(self) -> None:
        """Order the current stream's later reads behind this boundary's writes."""
        self._engine.join()

    def note(self) -> None:
        """Training writes state here."""
        self._engine.note()

    def reached(self, key: AnchorKey) -> None:
        """An anchor fired: do its work, and all earlier work that is not done."""
        if self._capture is None:
            return
        position = self._program.position.get((self._iteration, key))
        if position is not None and position >= self._next:
            self._work_until(position + 1)

    def go_on(self) -> None:
        """Pass a boundary that is not captured: start the next iteration, where no deadlines are left, or end the
        capture.
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
        """Make these chunks safe now, as they may be written next; ConsistencyError if a counter says that one was."""
        if self._capture is None:
            return
        live = self._engine.live(chunks)
        if not live:
            return
        self._refuse_written(live)
        self._engine.offload(live, "barrier")
        self._engine.wait(live)

    def require_after_step(self) -> None:
        """An optimizer has stepped: the loop may now write tensors that no operator writes, settled ones apart."""
        chunks = self._plan.chunks
        self.require([chunk for chunk in self._program.after_step if chunks[chunk].tensor not in self.settled])

    def _refuse_written(self, live: Sequence[int]) -> None:
        """Check the counters of these chunks' live tensors; writes through ``.data`` move none."""
        assert self._capture is not None
        for chunk in live:
            name = self._plan.chunks[chunk].tensor
            if name in self._versions and version_of(self._tensors[name]) != self._versions[name]:
                if name in self._capture.settled:
                    raise WrittenError(self._capture.step, name)
                raise ConsistencyError(f"{name} was written before its copy was made")

    def follow(self, program: Program) -> None:
        """Execute the plan at other anchors from now on. No capture may be in flight."""
        self._program = program

    def distrust(self) -> None:
        """Copy everything at the boundary from now on, because the plan does not fit. No capture may be in flight."""
        self._at_boundary = True
        self._chunk_map = None

    def rearrange(self) -> None:
        """The staging buffers were replaced. No capture may be in flight."""
        self._chunk_map = None

    def release(self) -> None:
        """Release the job's memory, since no capture follows. No capture may be in flight."""
        self._chunk_map = None
        self._tensors, self._versions, self._prepared = {}, {}, {}

    def complete_iteration(self) -> None:
        """Do the rest of this iteration's work, without waiting for snapshots: no anchor is left."""
        if self._capture is not None:
            self._work_until(self._program.end_of(self._iteration))

    def conclude(self) -> None:
        """End the capture in flight, if any, without waiting for bytes on their way.

        What is left of it leaves now, without snapshots: a GPU's stream or the CPU's training thread waits.
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
            assert self._chunk_map is not None
            chunk_map = self._chunk_map
            leaving = _Leaving(self._capture, concluded, chunk_map)
            self._leaving.append(leaving)
            self._capture = None
        self._collect()

    def finish(self) -> None:
        """:meth:`conclude`, and wait until every capture has ended."""
        self.conclude()
        if self._leaving:
            self._engine.finish()
            self._collect()

    def take_failed(self) -> list[tuple[int, CheckflowError]]:
        """Steps and reasons of concluded captures found to have failed since the last call."""
        failed, self._failed = self._failed, []
        return failed

    def _collect(self) -> None:
        """Account for captures that have ended."""
        while self._leaving and (outcome := self._leaving[0].concluded.outcome()) is not None:
            one = self._leaving.popleft()
            if one.capture.error is not None:
                self._failed.append((one.capture.step, one.capture.error))
                continue
            statistics = outcome.statistics
            moved = MovedBytes(
                one.chunk_map.chunk_bytes - statistics.snapshot_bytes,
                statistics.snapshot_bytes,
                one.chunk_map.boundary_bytes,
                statistics.offload_seconds,
                statistics.large_bytes,
                statistics.large_seconds,
            )
            self.moved += moved
            capture = one.capture
            self.reports.append(
                CaptureReport(
                    capture.step, outcome, one.chunk_map.boundary_bytes, moved,
                    self._plan if capture.by_plan else None, capture.begun, capture.arrived_at,
                )
            )  # fmt: skip

    def _hand_on(self, capture: Capture) -> None:
        """On the engine's thread: all of it has arrived."""
        capture.arrived, capture.arrived_at = True, time.monotonic()
        self._deliver(capture)

    def _fail(self, capture: Capture, error: CheckflowError) -> None:
        """On the engine's thread: some of it did not arrive."""
        capture.error = error
        self._buffers.give_back(capture.buffer)

    def abort(self) -> bool:
        """Drop the capture in flight and wait for concluded ones; returns whether one was lost."""
        capture = self._capture
        self._engine.abort()  # even if the engine's begin was never called
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
            self._next += 1  # only now: interrupted work is repeated, and each of its parts is done once

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

    def _map_chunks(self, state: TrainingState) -> None:
        """Lay out files for the state as it is now, with buffers that fit."""
        self._chunk_map = None  # if this fails, the next capture tries again
        compatibility.refuse_other_memory(state, self._engine.source)  # optimizers create state late
        chunk_map = make_chunk_map(
            self._plan, state, self._engine.source,
            at_boundary=self._at_boundary, share=self._share, warns=not self.layout_changes,
        )  # fmt: skip
        wanted_bytes = chunk_map.layout.buffer_bytes
        if wanted_bytes > self._buffers.size_bytes and self.layout_changes > _FEW_CHANGES:  # it grows: not each time
            wanted_bytes += wanted_bytes // 8
        self._buffers.grow(wanted_bytes)
        self.settled.forget()
        self.layout_changes += 1
        self._use(chunk_map)

    def _use(self, chunk_map: ChunkMap) -> None:
        self._tensors = {item.name: item for item in chunk_map.items if item.name in chunk_map.planned}
        self._prepared = {}
        self._chunk_map = chunk_map

    def _prepare(self, buffer: StagingBuffer, chunk_map: ChunkMap) -> None:
        """Write the files' headers into a buffer and compute its transfers."""
        write_headers(chunk_map.layout, buffer.view)
        transfers = [Transfer(source, buffer.address + offset, length) for source, offset, length in chunk_map.chunks]
        at_once: list[Transfer] = []
        beside_gpu: list[Transfer] = []
        for item in chunk_map.at_boundary:
            target = buffer.address + chunk_map.layout.tensors[item.name].staging_offset
            transfer = Transfer(item.tensor.data_ptr(), target, item.tensor.nbytes)
            (at_once if item.tensor.device == self._engine.source else beside_gpu).append(transfer)
        self._prepared[buffer.index] = _Prepared(transfers, at_once, beside_gpu)
