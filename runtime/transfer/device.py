"""A device that runs behind the host, in the handful of calls by which the copy engine for GPUs speaks to it.

:mod:`.cuda_device` is the real one; the tests have one that does what it is given in any order that CUDA permits.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any, Protocol

import torch

from checkflow.runtime.transfer.engine import Transfer

Stream = Hashable  # equal if the device knows them as one; a comparison of it with None tells nothing
Event = Any
Copies = Any


class StreamDevice(Protocol):
    """What the engine asks of a device. All calls but ``synchronize`` enqueue, or ask, and return at once.

    Raises:
        CheckflowError: the device refuses a call, or has failed; with its reason.
    """

    side: Stream  # the engine's own
    memory: torch.device  # whose memory it is

    def current(self) -> Stream:
        """The stream on which the calling thread enqueues what it does; it is not captured."""

    def allocate(self, size_bytes: int) -> tuple[int, object]:
        """Memory for the current stream: its address, and what holds it.

        Once that is dropped, it may be handed out again at once, to whatever is enqueued on this stream later.
        """

    def capturing(self, stream: Stream) -> bool:
        """Whether what the stream is given goes into a graph, to be done later and again."""

    def prepare(self, transfers: Sequence[Transfer], *, inside: bool = False) -> Copies:
        """Copies that are to be made together, in no order among themselves, once or again and again.

        Args:
            inside: both ends lie in the memory of the device; otherwise the targets lie in host memory.
        """

    def copy(self, copies: Copies, stream: Stream) -> None:
        """Make these copies, in order behind what the stream has been given."""

    def record(self, stream: Stream, *, timed: bool = False) -> Event:
        """An event that happens when the device has come so far in this stream."""

    def wait(self, stream: Stream, event: Event) -> None:
        """What the stream is given from now on comes after the event."""

    def done(self, event: Event) -> bool:
        """Whether it has happened."""

    def synchronize(self, event: Event) -> None:
        """Return once it has happened; others of this process's threads go on."""

    def seconds_between(self, before: Event, after: Event) -> float:
        """Between two timed events; 0 if the later one has not happened yet."""

    def recycle(self, events: Iterable[Event]) -> None:
        """These may be recorded anew: nobody asks for them any more."""

    def enter_thread(self) -> None:
        """Called once on a thread that will call ``synchronize``."""
