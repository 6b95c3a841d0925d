"""A device that runs behind the host, simulated over host memory: streams, events, an allocator that reuses at once.

What is enqueued is done in an order drawn from those that CUDA's rules permit, as late or as early as it can be. Freed
memory is reused at once on its stream, and filled with garbage. With ``prompt`` training's streams do their work at
once, as the CPU does, and only copies lag behind.
"""

from __future__ import annotations

import ctypes
import random
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import pytest
import torch

from checkflow.core.errors import CheckflowError
from checkflow.runtime.persist import saver
from checkflow.runtime.transfer.cuda import CudaCopyEngine
from checkflow.runtime.transfer.cuda_capture import merged
from checkflow.runtime.transfer.engine import Transfer

GARBAGE = 0xEE
STARVED_SECONDS = 300.0  # after which a test that would hang goes on, and fails


class FakeStream(str):
    """As torch's: one is equal to another if they are one stream, and any comparison with None is False."""

    __slots__ = ()

    def __ne__(self, other: object) -> bool:
        return other is not None and str.__ne__(self, other)


@dataclass(eq=False)
class Event:
    """As in CUDA: who waits for it waits for its last record so far, and it may be recorded anew meanwhile."""

    happened: threading.Event = field(default_factory=threading.Event)  # its last record was come to


@dataclass(eq=False)
class Operation:
    """One thing in a stream; what it waits for besides its predecessors is ``after``."""

    run: Callable[[], None]
    after: threading.Event | None = None
    reads: tuple[int, int] | None = None
    writes: tuple[int, int] | None = None


def simulate_gpu(monkeypatch: pytest.MonkeyPatch, seed: int = 0, copies: str = "last") -> FakeDevice:
    """Checkpointers made from now on copy as they would from a GPU, out of host memory, as late as they may."""
    device = FakeDevice(seed, copies=copies, prompt=True)
    monkeypatch.setattr(saver, "make_engine", lambda _: (CudaCopyEngine(device), None))
    return device


class Memory:
    """A block of the allocator's: dropped, it is filled with garbage by its own stream's next work."""

    def __init__(self, device: FakeDevice, stream: str, size_bytes: int) -> None:
        self._device, self._stream = device, stream
        self._bytes = ctypes.create_string_buffer(max(size_bytes, 1))
        self.address, self.size_bytes = ctypes.addressof(self._bytes), size_bytes
        device.allocated_bytes += size_bytes

    def __del__(self) -> None:
        block = self._bytes  # kept by the operation
        self._device.allocated_bytes -= self.size_bytes
        self._device.enqueue(
            self._stream, lambda: ctypes.memset(block, GARBAGE, len(block)), writes=(self.address, len(block))
        )


class FakeDevice:
    """See the module's text.

    Args:
        seed: of the order that is drawn.
        copies: whether those to host memory go "first" whenever they may, "last" whenever anything else may, or as it
            happens ("").
        prompt: whether the streams of training run at once.
    """

    side = FakeStream("side")
    memory = torch.device("cpu")

    def __init__(self, seed: int = 0, *, copies: str = "", prompt: bool = False) -> None:
        self._random = random.Random(seed)
        self._copies, self._prompt = copies, prompt
        self._recycled: list[Event] = []
        self._streams: dict[str, deque[Operation]] = {}
        self._lock = threading.RLock()
        self._current = threading.local()
        self.allocated_bytes = 0
        self.captured: set[str] = set()  # streams whose work goes into a graph: an event there may not be waited for
        self.failure = ""  # what every call reports from now on
        self.fails_at = -1  # after so many more copies
        self.hasty = 0.0  # how likely the device does something at each call
        # The thread that waits for the ends of captures draws nothing before the training thread waits too.
        self.host_waits = threading.Event()
        self.host_waits.set()
        self.synchronized = 0  # so often training was held on the host, by the device
        self.starved = 0  # so often it was, by the thread that was not to draw anything

    # What the engine asks (checkflow.runtime.transfer.device.StreamDevice)

    def current(self) -> FakeStream:
        stream = FakeStream(getattr(self._current, "stream", "main"))  # another object each time
        if stream in self.captured:
            raise CheckflowError("training is being captured into a CUDA graph")
        return stream

    def allocate(self, size_bytes: int) -> tuple[int, object]:
        memory = Memory(self, self.current(), size_bytes)
        return memory.address, memory

    def capturing(self, stream: str) -> bool:
        return stream in self.captured

    def prepare(self, transfers: Sequence[Transfer], *, inside: bool = False) -> tuple[Transfer, ...]:
        return tuple(merged(transfers))

    def copy(self, copies: tuple[Transfer, ...], stream: str) -> None:
        self._fail_if_asked()
        if self.fails_at >= 0:
            self.fails_at -= 1
            if self.fails_at < 0:
                raise CheckflowError("CUDA: invalid argument")
        shuffled = list(copies)
        self._random.shuffle(shuffled)
        for copy in shuffled:
            self._copy(copy, stream)

    def _copy(self, copy: Transfer, stream: str) -> None:
        self.enqueue(
            stream,
            lambda: ctypes.memmove(copy.target, copy.source, copy.length_bytes),
            reads=(copy.source, copy.length_bytes),
            writes=(copy.target, copy.length_bytes),
        )

    def record(self, stream: str, *, timed: bool = False) -> Event:
        assert stream not in self.captured, "an event that nobody may wait for"
        event = self._recycled.pop() if self._recycled else Event()
        event.happened = threading.Event()
        self.enqueue(stream, event.happened.set)
        return event

    def wait(self, stream: str, event: Event) -> None:
        assert stream not in self.captured, "a graph that waits for what lies outside of it is void"
        self.enqueue(stream, lambda: None, after=event.happened)

    def done(self, event: Event) -> bool:
        self._fail_if_asked()
        self._dawdle()
        return event.happened.is_set()

    def synchronize(self, event: Event) -> None:
        if threading.current_thread().name == "checkflow-copy":
            if not self.host_waits.wait(STARVED_SECONDS):
                self.starved += 1
                self.host_waits.set()
        else:
            self.synchronized += 1
        happened = event.happened
        while not happened.is_set():
            self._fail_if_asked()
            assert self.step() or happened.is_set(), "the device waits for what nobody has enqueued"

    def seconds_between(self, before: Event, after: Event) -> float:
        self._fail_if_asked()
        return 0.0

    def recycle(self, events: Iterable[Event]) -> None:
        self._recycled += events

    def enter_thread(self) -> None:
        pass

    # What tests, and training, do

    def on_stream(self, name: str) -> None:
        """What this thread enqueues from now on goes there."""
        self._current.stream = name

    def enqueue(
        self,
        stream: str,
        run: Callable[[], object],
        *,
        after: threading.Event | None = None,
        reads: tuple[int, int] | None = None,
        writes: tuple[int, int] | None = None,
    ) -> None:
        with self._lock:
            operation = Operation(lambda: (run(), None)[1], after, reads, writes)
            self._streams.setdefault(stream, deque()).append(operation)
            while self._prompt and stream != self.side and self._streams[stream]:
                assert self._run_one(stream) or self.step()
        self._dawdle()

    def write(self, address: int, content: bytes, stream: str | None = None) -> None:
        """Training writes."""
        self.enqueue(
            stream or self.current(),
            lambda: ctypes.memmove(address, content, len(content)),
            writes=(address, len(content)),
        )

    def step(self) -> bool:
        """Do one thing that may be done now; whether there was any."""
        with self._lock:
            streams = list(self._streams)
            self._random.shuffle(streams)
            if self._copies:
                streams.sort(key=lambda name: (name == self.side) == (self._copies == "last"))
            return any(self._run_one(stream) for stream in streams)

    def drain(self) -> None:
        """Do everything."""
        while self.step():
            pass

    def uses(self, address: int, size_bytes: int, *, reads_only: bool = False) -> bool:
        """Whether anything that is still to be done reads or writes there."""
        with self._lock:
            return any(
                span is not None and span[0] < address + size_bytes and address < span[0] + span[1]
                for operations in self._streams.values()
                for operation in operations
                for span in (operation.reads, None if reads_only else operation.writes)
            )

    def _run_one(self, stream: str) -> bool:
        operations = self._streams[stream]
        if not operations or (operations[0].after is not None and not operations[0].after.is_set()):
            return False
        operations.popleft().run()
        return True

    def _dawdle(self) -> None:
        while self.hasty and self._random.random() < self.hasty:
            self.step()

    def _fail_if_asked(self) -> None:
        if self.failure:
            raise CheckflowError(self.failure)
