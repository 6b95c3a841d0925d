"""The contract of the copy engines, :mod:`.host` and :mod:`.cuda`, and the records that they return."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch

from checkflow.core.errors import CheckflowError

logger = logging.getLogger("checkflow")


@dataclass(frozen=True, slots=True)
class Transfer:
    """One chunk's bytes: from an address in device memory to one in host memory."""

    source: int
    target: int
    length_bytes: int


@dataclass(frozen=True, slots=True)
class CopyRecord:
    """One copy that was made; audited against the plan."""

    chunk: int
    kind: Literal["snapshot", "offload"]
    anchor: str  # where it was ordered
    length_bytes: int


class CopyOrder(NamedTuple):
    """What was ordered at one anchor; :func:`records` expands it on demand."""

    chunks: tuple[int, ...]
    kind: Literal["snapshot", "offload"]
    anchor: str
    ordered: float = 0.0  # time.perf_counter; 0: not noted


class CopySpan(NamedTuple):
    """When some chunks were copied together, by time.perf_counter."""

    kind: Literal["snapshot", "offload", "boundary"]  # the last: what was copied at once
    chunk: int  # the first one; -1: at the boundary
    chunks: int
    size_bytes: int
    begun: float
    seconds: float | None  # None: known is only when it was ordered


def records(orders: Iterable[CopyOrder], transfers: Sequence[Transfer]) -> tuple[CopyRecord, ...]:
    """Every ordered copy, in order."""
    return tuple(
        CopyRecord(chunk, order.kind, order.anchor, transfers[chunk].length_bytes)
        for order in orders
        for chunk in order.chunks
    )


def ordered_spans(orders: Iterable[CopyOrder], transfers: Sequence[Transfer]) -> list[CopySpan]:
    """When copies were ordered, by an engine that does not see when they are made."""
    return [
        CopySpan(
            order.kind, order.chunks[0], len(order.chunks),
            sum(transfers[chunk].length_bytes for chunk in order.chunks), order.ordered, None,
        )
        for order in orders if order.chunks
    ]  # fmt: skip


@dataclass(frozen=True, slots=True)
class CopyStatistics:
    """What one capture has cost training so far."""

    waited_seconds: float  # at deadlines; on a GPU: while its streams stood still
    snapshot_seconds: float  # likewise
    snapshot_bytes: int
    snapshot_peak_bytes: int  # of these, at any one time
    offload_seconds: float | None = None  # time with bytes on the link; None: not measured
    large_bytes: int = 0  # in copies so large that the cost per copy vanishes
    large_seconds: float = 0.0  # in which those did


@dataclass(frozen=True, slots=True)
class CaptureOutcome:
    """What an ended capture did."""

    statistics: CopyStatistics
    log: Callable[[], tuple[CopyRecord, ...]]  # made on demand: it is as long as the plan
    spans: Callable[[], list[CopySpan]] = list  # likewise


class Concluded(Protocol):
    """A concluded capture, as the training thread follows it."""

    def outcome(self) -> CaptureOutcome | None:
        """Its outcome, or None while it is on its way."""

    def wait(self) -> None:
        """Return when it has ended."""


@dataclass(frozen=True, slots=True)
class MovedBytes:
    """Bytes of ended captures, by the way they took."""

    direct_bytes: int = 0  # straight from the live tensor
    snapshot_bytes: int = 0  # through a copy in device memory
    boundary_bytes: int = 0  # at the boundary itself
    offload_seconds: float | None = 0.0  # time of the first two on the link; None: not measured
    large_bytes: int = 0  # of the first two, in large copies; 0 where that is not measured
    large_seconds: float = 0.0

    @property
    def total_bytes(self) -> int:
        return self.direct_bytes + self.snapshot_bytes + self.boundary_bytes

    def __add__(self, other: MovedBytes) -> MovedBytes:
        seconds = (self.offload_seconds, other.offload_seconds)
        return MovedBytes(
            self.direct_bytes + other.direct_bytes,
            self.snapshot_bytes + other.snapshot_bytes,
            self.boundary_bytes + other.boundary_bytes,
            None if seconds[0] is None or seconds[1] is None else seconds[0] + seconds[1],
            self.large_bytes + other.large_bytes,
            self.large_seconds + other.large_seconds,
        )


def log_failure(error: CheckflowError) -> None:
    """Log a failed capture, where no caller handles it."""
    logger.warning("a capture did not arrive in host memory: %s", error)


class CopyEngine(Protocol):
    """Gathers one capture at a time in host memory; the training thread calls, the engine copies beside it.

    "Safe" below means: writes that training enqueues later, on the current stream or one ordered behind it, cannot
    change the bytes of the capture. Another stream is ordered by its own first call (``live`` of nothing will do).

    When the last chunk has arrived, ``on_complete`` is called once, on any thread, for one capture after the other. If
    chunks fail to arrive, ``on_failure`` is called instead; other captures are unaffected. Until then, or until
    ``abort`` returns, the caller keeps the addresses of its transfers valid. Only ``snapshot`` allocates in proportion
    to the state. The log and the statistics are the last capture's.
    """

    @property
    def source(self) -> torch.device:
        """The device whose memory it copies from."""

    @property
    def idle(self) -> bool:
        """Whether the last begun capture needs no more calls but ``conclude``: all bytes crossed or never will."""

    def note(self) -> None:
        """Training writes state on the current stream, maybe until the next ``join``."""

    def join(self) -> None:
        """Order the current stream behind all noted streams, and those behind the boundary of the next ``begin``."""

    def begin(
        self,
        transfers: Sequence[Transfer],
        on_complete: Callable[[], None],
        at_once: Sequence[Transfer] = (),
        on_failure: Callable[[CheckflowError], None] = log_failure,
    ) -> None:
        """Start a capture, after the one before was concluded or has ended. On return ``at_once`` is safe."""

    def snapshot(self, chunks: Sequence[int], anchor: str) -> None:
        """Copy these chunks on the device; on return they are safe."""

    def offload(self, chunks: Sequence[int], anchor: str) -> None:
        """Let these chunks cross the link, in this order."""

    def wait(self, chunks: Sequence[int]) -> None:
        """Wait until these chunks have crossed; on return they are safe. On a GPU the stream waits, not the host."""

    def live(self, chunks: Sequence[int]) -> list[int]:
        """Those of the chunks whose bytes lie in their live tensors alone."""

    def hasten(self) -> None:
        """Let all snapshots cross now, if the engine can. Any thread may call this one method."""

    def free(self, chunks: Sequence[int]) -> None:
        """Free these snapshots once they have crossed."""

    def conclude(self) -> Concluded:
        """End a capture of which all was released: all is safe, snapshots are freed, the next one may begin.

        Bytes still on their way arrive behind training: on a GPU the compute stream waits for them, not the host.
        """

    def finish(self) -> None:
        """``conclude``, and wait until every capture has ended."""

    def abort(self) -> bool:
        """Drop the last begun capture if it was not concluded, and wait for the others; no memory is in use then.

        False if it was dropped: its callbacks never run. True if it had ended or was concluded: they have run.
        """

    def close(self) -> None: ...
    def log(self) -> tuple[CopyRecord, ...]: ...
    def statistics(self) -> CopyStatistics: ...
