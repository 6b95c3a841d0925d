"""The few calls by which the GPU copy engine speaks to a device: :mod:`.cuda_device`, or the tests' simulated one."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any, Protocol

import torch

from checkflow.runtime.transfer.engine import Transfer

Stream = Hashable  # equal if one stream for the device; never compare it with None
Event = Any
Copies = Any


class StreamDevice(Protocol):
    """What the engine asks of a device. Every call but ``synchronize`` returns at once, or raises CheckflowError."""

    side: Stream  # the engine's own
    memory: torch.device  # whose memory it is

    def current(self) -> Stream:
        """The calling thread's current stream, which is not under graph capture."""

    def allocate(self, size_bytes: int) -> tuple[int, object]:
        """Allocate memory for the current stream: its address, and the object that holds it.

        Once the object is dropped, the memory may be given to later work on the same stream.
        """

    def capturing(self, stream: Stream) -> bool:
        """Whether the stream is being captured into a graph."""

    def prepare(self, transfers: Sequence[Transfer], *, inside: bool = False) -> Copies:
        """Prepare copies that are made together, in no order, once or repeatedly; ``inside`` device memory or to the
        host.
        """

    def copy(self, copies: Copies, stream: Stream) -> None:
        """Enqueue these copies."""

    def record(self, stream: Stream, *, timed: bool = False) -> Event:
        """Record an event on the stream."""

    def wait(self, stream: Stream, event: Event) -> None:
        """Have the stream's later work wait for the event."""

    def done(self, event: Event) -> bool:
        """Whether it has happened."""

    def synchronize(self, event: Event) -> None:
        """Block until the event has happened; other threads of the process go on."""

    def seconds_between(self, before: Event, after: Event) -> float:
        """Time between two timed events; 0 if the later one has not happened yet."""

    def recycle(self, events: Iterable[Event]) -> None:
        """Take events back for reuse."""

    def enter_thread(self) -> None:
        """Prepare a thread that will call ``synchronize``; called once on it."""
