"""The copy engine's contract, which every kind of device fulfils: :mod:`.host`, :mod:`.cuda`.

One capture is gathered at a time. The training thread calls; the engine copies beside it:

``note``      training writes state on the stream that is current here, it may be until the next ``join``;
``join``      what is enqueued on the current stream from now on comes behind all that noted streams have been given, as
              what they are given after the next ``begin`` comes behind the boundary;
``begin``     takes the transfers of one capture: nothing moves yet, except what is to leave ``at_once``: on return,
              later writes to its memory do no harm. The capture before has been concluded, or has come to its end;
``snapshot``  on return, later writes to these chunks' live tensors do no harm: their bytes are copied on the device, in
              order before whatever the training thread enqueues next;
``offload``   these chunks may cross the link from now on, in this order;
``wait``      on return, later writes to these chunks' live tensors do no harm: they have crossed the link (on a GPU:
              the compute stream waits, the host does not);
``live``      those of the chunks whose bytes still lie in their live tensors alone;
``hasten``    every chunk that has a snapshot may cross the link now: the one method that any thread may call. It
              promises nothing: an engine whose copies only the training thread can order leaves them to it;
``idle``      of the capture that was begun last every byte has crossed the link (or some never will), and no snapshot
              is held: until it is concluded, none of the methods above has anything to do, on any stream;
``free``      these snapshots may be given back as soon as they have crossed the link;
``conclude``  everything has been released: on return, later writes to all that was captured do no harm, every
              snapshot is given back, and the next capture may begin. What is still on its way arrives behind training
              (on a GPU: the compute stream waits for it, the host does not);
``finish``    ``conclude``, and waits: on return every capture has come to its end;
``abort``     forgets the capture that was begun last, unless it has been concluded, and waits for those that have: on
              return the engine reads and writes no memory of any. False if it was forgotten: nothing of it is called
              any more. True if it had been concluded, or had come to its end: what is to be called has been called.

Where a device runs behind the host, "later" means enqueued later: on the stream that is current at the call, or on one
that training orders behind it. Any other stream of training comes to be so at its own first call of the engine, be it
``live`` of nothing.

As soon as the last chunk has arrived in host memory, a capture has come to its end: ``on_complete`` is called, once, on
any thread, for one capture after the other as they were begun. If chunks that were on their way do not arrive,
``on_failure`` is called in its place, with the reason; other captures do not suffer by it. The addresses in a
``Transfer`` stay valid until then (the caller holds the tensors and the buffer), or until ``abort`` returns. No method
allocates in proportion to the state, except ``snapshot``, by the bytes it is given.
"""

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
    """One copy that was really made: the log of these is held against the plan."""

    chunk: int
    kind: Literal["snapshot", "offload"]
    anchor: str  # the anchor at which it was ordered
    length_bytes: int


class Order(NamedTuple):
    """What was ordered at one anchor: a log is of these, and made into records when somebody asks."""

    chunks: tuple[int, ...]
    kind: Literal["snapshot", "offload"]
    anchor: str


def records(orders: Iterable[Order], transfers: Sequence[Transfer]) -> tuple[CopyRecord, ...]:
    """Every copy that was ordered, in order."""
    return tuple(
        CopyRecord(chunk, order.kind, order.anchor, transfers[chunk].length_bytes)
        for order in orders
        for chunk in order.chunks
    )


@dataclass(frozen=True, slots=True)
class CopyStatistics:
    """What one capture cost training so far."""

    waited_seconds: float  # at deadlines; on a GPU, for which its streams stood still
    snapshot_seconds: float  # likewise
    snapshot_bytes: int
    snapshot_peak_bytes: int  # of these, at any one time
    offload_seconds: float | None = None  # in which bytes crossed the link; None: not measured
    large_bytes: int = 0  # of these, what crossed in copies so large that a copy's own price is nothing
    large_seconds: float = 0.0  # in which those did


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a capture did that has come to its end."""

    statistics: CopyStatistics
    log: Callable[[], tuple[CopyRecord, ...]]  # made when somebody asks: it is as long as the plan


class Concluded(Protocol):
    """A capture that was concluded, as the training thread follows it."""

    def outcome(self) -> Outcome | None:
        """None as long as it is on its way."""

    def wait(self) -> None:
        """Return when it has come to its end."""


@dataclass(frozen=True, slots=True)
class Moved:
    """Bytes of captures that ended, by the way they took."""

    direct_bytes: int = 0  # straight from the live tensor
    snapshot_bytes: int = 0  # through a copy in device memory
    boundary_bytes: int = 0  # at the boundary itself
    offload_seconds: float | None = 0.0  # in which the first two crossed the link; None: not measured
    large_bytes: int = 0  # of the first two, in large copies; 0 where that is not measured
    large_seconds: float = 0.0

    @property
    def total_bytes(self) -> int:
        return self.direct_bytes + self.snapshot_bytes + self.boundary_bytes

    def __add__(self, other: Moved) -> Moved:
        seconds = (self.offload_seconds, other.offload_seconds)
        return Moved(
            self.direct_bytes + other.direct_bytes,
            self.snapshot_bytes + other.snapshot_bytes,
            self.boundary_bytes + other.boundary_bytes,
            None if seconds[0] is None or seconds[1] is None else seconds[0] + seconds[1],
            self.large_bytes + other.large_bytes,
            self.large_seconds + other.large_seconds,
        )


def tell_failure(error: CheckflowError) -> None:
    """Where nobody else is told that a capture did not arrive."""
    logger.warning("a capture did not arrive in host memory: %s", error)


class CopyEngine(Protocol):
    """See the module's text for what each method promises. The log and the statistics are the last capture's."""

    @property
    def source(self) -> torch.device:
        """The device whose memory it copies from."""

    @property
    def idle(self) -> bool: ...

    def note(self) -> None: ...
    def join(self) -> None: ...
    def begin(
        self,
        transfers: Sequence[Transfer],
        on_complete: Callable[[], None],
        at_once: Sequence[Transfer] = (),
        on_failure: Callable[[CheckflowError], None] = tell_failure,
    ) -> None: ...
    def snapshot(self, chunks: Sequence[int], anchor: str) -> None: ...
    def offload(self, chunks: Sequence[int], anchor: str) -> None: ...
    def wait(self, chunks: Sequence[int]) -> None: ...
    def live(self, chunks: Sequence[int]) -> list[int]: ...
    def hasten(self) -> None: ...
    def free(self, chunks: Sequence[int]) -> None: ...
    def conclude(self) -> Concluded: ...
    def finish(self) -> None: ...
    def abort(self) -> bool: ...
    def close(self) -> None: ...
    def log(self) -> tuple[CopyRecord, ...]: ...
    def statistics(self) -> CopyStatistics: ...
