"""What the copy engine for GPUs (:mod:`.cuda`) knows of one capture: its orders, its events, and how it ends."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from checkflow.core.errors import CheckflowError
from checkflow.runtime.transfer.device import Copies, Event, Stream
from checkflow.runtime.transfer.engine import Order, Outcome, Transfer, tell_failure

SEGMENT_BYTES = 2 * 2**20  # torch's allocator takes memory from CUDA in multiples of this, which begin at such


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A chunk's copy in the memory of the device."""

    address: int
    holder: object
    stream: Stream  # that it was allocated on


@dataclass(frozen=True, slots=True)
class Part:
    """Chunks that cross the link between two events; no copies where they are all empty."""

    chunks: tuple[int, ...]
    copies: Copies | None


@dataclass(slots=True, eq=False)
class DeviceCapture:
    """What has become of one capture so far; of parts that cross the link between two events, in order."""

    on_complete: Callable[[], None]
    on_failure: Callable[[CheckflowError], None]
    transfers: Sequence[Transfer] = ()
    part_of: list[int] = field(default_factory=list)  # the part that each chunk crosses in; -1: not ordered yet
    remaining: int = 0  # chunks that are not ordered yet
    ends: list[Event] = field(default_factory=list)  # behind each part, on the side stream
    guarded: int = 0  # so many parts are waited for by training
    arrived: int = 0  # so many parts are known to have arrived
    snapshots: dict[int, Snapshot] = field(default_factory=dict)  # by chunk
    copied: set[int] = field(default_factory=set)  # chunks that have a snapshot, or had one
    fences: list[tuple[Stream | None, Event]] = field(default_factory=list)
    behind: dict[Stream, int] = field(default_factory=dict)  # how many of the fences a stream has passed
    orders: list[Order] = field(default_factory=list)
    waited_spans: list[tuple[Event, Event]] = field(default_factory=list)
    snapshot_spans: list[tuple[Event, Event]] = field(default_factory=list)
    snapshot_bytes: int = 0
    held_bytes: int = 0
    peak_bytes: int = 0
    events: list[Event] = field(default_factory=list)  # all that were recorded
    # How it ends; the training thread and the one that waits for it agree on these under the engine's condition:
    last: Event | None = None  # behind its last chunk
    concluded: bool = False
    given_up: bool = False
    decided: bool = False  # it has arrived, or failed
    ended: bool = False  # what was to be called has been called
    outcome: Outcome | None = None  # once somebody has asked for it

    @property
    def safe(self) -> int:
        """Of so many parts the live tensors may be written: they have arrived, or training waits for them."""
        return max(self.guarded, self.arrived)


def nothing() -> DeviceCapture:
    """In the place of a capture, where none was begun: it was complete before, and nobody is told."""
    return DeviceCapture(silent, tell_failure, concluded=True, decided=True, ended=True)


def silent() -> None:
    """Called in place of ``on_complete`` where nobody waits for it."""


def merged(transfers: Iterable[Transfer]) -> list[Transfer]:
    """The same bytes in fewer pieces: those that follow each other in both memories are one, empty ones are none.

    None reaches across an address at which torch may have taken other memory from CUDA: what lies side by side there
    need not be one allocation, and CUDA refuses a copy that spans two. In host memory (a staging buffer is one range)
    there would be no need to cut, and it costs next to nothing.
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
