"""One capture as the GPU copy engine sees it: its orders, its events, and how it ends."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from checkflow.core.errors import CheckflowError
from checkflow.runtime.transfer.device import Copies, Event, Stream
from checkflow.runtime.transfer.engine import CaptureOutcome, CopyOrder, Transfer, log_failure

SEGMENT_BYTES = 2 * 2**20  # unit and alignment of torch's allocations from CUDA


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A chunk's copy in the memory of the device."""

    address: int
    holder: object
    stream: Stream  # that it was allocated on


@dataclass(frozen=True, slots=True)
class LinkPart:
    """Chunks that cross the link between two events; without copies if all are empty."""

    chunks: tuple[int, ...]
    copies: Copies | None


@dataclass(slots=True, eq=False)
class DeviceCapture:
    """The state of one capture. Its parts cross the link in order, each between two events."""

    on_complete: Callable[[], None]
    on_failure: Callable[[CheckflowError], None]
    transfers: Sequence[Transfer] = ()
    part_of: list[int] = field(default_factory=list)  # part of each chunk; -1: not ordered yet
    remaining: int = 0  # chunks that are not ordered yet
    ends: list[Event] = field(default_factory=list)  # behind each part, on the side stream
    guarded: int = 0  # leading parts that training's streams wait for
    arrived: int = 0  # leading parts known to have arrived
    snapshots: dict[int, Snapshot] = field(default_factory=dict)  # by chunk
    copied: set[int] = field(default_factory=set)  # chunks that have a snapshot, or had one
    fences: list[tuple[Stream | None, Event]] = field(default_factory=list)
    behind: dict[Stream, int] = field(default_factory=dict)  # fences that each stream has passed
    orders: list[CopyOrder] = field(default_factory=list)
    waited_spans: list[tuple[Event, Event]] = field(default_factory=list)
    snapshot_spans: list[tuple[Event, Event]] = field(default_factory=list)
    snapshot_bytes: int = 0
    held_bytes: int = 0
    peak_bytes: int = 0
    events: list[Event] = field(default_factory=list)  # all that were recorded
    # How it ends: shared with the waiting thread, under the engine's condition.
    last: Event | None = None  # behind its last chunk
    concluded: bool = False
    given_up: bool = False
    decided: bool = False  # it has arrived, or failed
    ended: bool = False  # its callback has run
    outcome: CaptureOutcome | None = None  # once asked for

    @property
    def safe(self) -> int:
        """How many leading parts may be overwritten: their copies have landed, or training's streams wait for them."""
        return max(self.guarded, self.arrived)


def nothing() -> DeviceCapture:
    """A capture that stands for "none begun": it is complete and calls nobody."""
    return DeviceCapture(silent, log_failure, concluded=True, decided=True, ended=True)


def silent() -> None:
    """An ``on_complete`` that does nothing."""


def merged(transfers: Iterable[Transfer]) -> list[Transfer]:
    """The same bytes in fewer copies: neighbours in both memories are joined, empty ones dropped.

    No copy crosses an address at which torch may have taken new memory: CUDA refuses one that spans two allocations.
    """
    merged: list[Transfer] = []
    for transfer in transfers:
        if not transfer.length_bytes:
            continue
        last = merged[-1] if merged else None
        if (
            last is not None
            and last.source + last.length_bytes == transfer.source
            and last.target + last.length_bytes == transfer.target
            and transfer.source % SEGMENT_BYTES
            and transfer.target % SEGMENT_BYTES
        ):
            merged[-1] = Transfer(last.source, last.target, last.length_bytes + transfer.length_bytes)
        else:
            merged.append(transfer)
    return merged
