"""The copy engine: the contract that every kind of device fulfils, and the engine for state in host memory.

One capture at a time. The training thread calls; the engine copies beside it:

``begin``     takes the transfers of one capture: nothing moves yet;
``snapshot``  on return, later writes to these chunks' live tensors do no harm: their bytes are copied on the device, in
              order before whatever the training thread enqueues next;
``offload``   these chunks may cross the link from now on, in this order;
``wait``      on return, later writes to these chunks' live tensors do no harm: they have crossed the link (on a GPU:
              the compute stream waits, the host does not);
``live``      those of the chunks whose bytes still lie in their live tensors alone;
``hasten``    every chunk that has a snapshot may cross the link now: the one method that any thread may call. It is no
              promise: an engine whose copies only the training thread can order leaves them to it;
``free``      these snapshots may be given back as soon as they have crossed the link;
``finish``    on return everything has crossed the link and every snapshot is given back;
``abort``     forgets the capture: on return the engine reads and writes no memory of it. True if the capture was
              complete before, and ``on_complete`` is or was called; otherwise it never will be.

As soon as the last chunk has arrived in host memory, ``on_complete`` is called, once, on any thread. The addresses in a
``Transfer`` stay valid until then (the caller holds the tensors and the buffer), or until ``abort`` returns. No method
allocates in proportion to the state, except ``snapshot``, by the bytes it is given.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

# What the training thread copies itself: waking another thread, and sharing the interpreter with it, costs more.
SMALL_BYTES = 32 * 1024

# _OWN: the training thread copies it now; if an interrupt ends that half-way, the next wait copies it again.
_PENDING, _QUEUED, _RUNNING, _OWN, _DONE = range(5)


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


@dataclass(frozen=True, slots=True)
class CopyStatistics:
    """What one capture cost the training thread so far."""

    waited_seconds: float  # at deadlines
    snapshot_seconds: float
    snapshot_peak_bytes: int
    helped_bytes: int  # copied by the training thread itself while it waited


class CopyEngine(Protocol):
    """See the module's text for what each method promises."""

    def begin(self, transfers: Sequence[Transfer], on_complete: Callable[[], None]) -> None: ...
    def snapshot(self, chunks: Sequence[int], anchor: str) -> None: ...
    def offload(self, chunks: Sequence[int], anchor: str) -> None: ...
    def wait(self, chunks: Sequence[int]) -> None: ...
    def live(self, chunks: Sequence[int]) -> list[int]: ...
    def hasten(self) -> None: ...
    def free(self, chunks: Sequence[int]) -> None: ...
    def finish(self) -> None: ...
    def abort(self) -> bool: ...
    def close(self) -> None: ...
    def log(self) -> tuple[CopyRecord, ...]: ...
    def statistics(self) -> CopyStatistics: ...


class HostCopyEngine:
    """Copies between two places of host memory with one thread: for training on a CPU.

    The thread copies in the order of ``offload``, small chunks excepted: those are copied at once. A training thread
    that has to wait takes the chunks it waits for out of the queue and copies them itself, so that a deadline costs at
    most one foreign chunk's time.

    Both sides copy with memmove, which releases the interpreter's lock for as long as it runs.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._queue: deque[int] = deque()
        self._transfers: Sequence[Transfer] = ()
        self._status = bytearray()
        self._snapshots: dict[int, ctypes.Array[ctypes.c_char]] = {}
        self._freeable: set[int] = set()
        self._log: list[CopyRecord] = []
        self._waited_seconds = self._snapshot_seconds = 0.0
        self._held_bytes = self._peak_bytes = self._helped_bytes = self._remaining = 0
        self._on_complete: Callable[[], None] = _nothing
        self._delivering = False
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="checkflow-copy", daemon=True)
        self._thread.start()

    def begin(self, transfers: Sequence[Transfer], on_complete: Callable[[], None]) -> None:
        with self._changed:
            if self._remaining:
                raise RuntimeError("a capture is still running")
            self._transfers, self._on_complete = transfers, on_complete
            self._status = bytearray(len(transfers))
            self._remaining = len(transfers)
            self._log = []
            self._waited_seconds = self._snapshot_seconds = 0.0
            self._peak_bytes = self._helped_bytes = 0
        if not transfers:
            on_complete()

    def snapshot(self, chunks: Sequence[int], anchor: str) -> None:
        begun = time.perf_counter()
        for chunk in chunks:
            if self._status[chunk] != _PENDING or chunk in self._snapshots:
                continue  # it was forced to leave from its live tensor already, or an interrupt came after it
            transfer = self._transfers[chunk]
            copy = (ctypes.c_char * transfer.length_bytes)()
            ctypes.memmove(copy, transfer.source, transfer.length_bytes)
            with self._changed:
                self._snapshots[chunk] = copy
                self._held_bytes += transfer.length_bytes
                self._peak_bytes = max(self._peak_bytes, self._held_bytes)
                self._log.append(CopyRecord(chunk, "snapshot", anchor, transfer.length_bytes))
        self._snapshot_seconds += time.perf_counter() - begun

    def offload(self, chunks: Sequence[int], anchor: str) -> None:
        small: list[int] = []
        with self._changed:
            for chunk in chunks:
                if self._status[chunk] != _PENDING:
                    continue
                length_bytes = self._transfers[chunk].length_bytes
                self._log.append(CopyRecord(chunk, "offload", anchor, length_bytes))
                if length_bytes <= SMALL_BYTES:
                    self._status[chunk] = _OWN
                    small.append(chunk)
                else:
                    self._status[chunk] = _QUEUED
                    self._queue.append(chunk)
            if self._queue:
                self._changed.notify_all()
        if small:
            self._copy(small)

    def wait(self, chunks: Sequence[int]) -> None:
        begun = time.perf_counter()
        for chunk in chunks:
            with self._changed:
                mine = self._status[chunk] in (_QUEUED, _OWN)
                if mine:
                    self._status[chunk] = _OWN  # the thread skips what is no longer queued
            if mine:
                self._copy((chunk,))
                self._helped_bytes += self._transfers[chunk].length_bytes
            elif self._status[chunk] == _PENDING:
                raise RuntimeError(f"chunk {chunk} is waited for before it was released")
        with self._changed:
            while any(self._status[chunk] != _DONE for chunk in chunks):
                self._changed.wait()
        self._waited_seconds += time.perf_counter() - begun

    def live(self, chunks: Sequence[int]) -> list[int]:
        with self._changed:
            return [chunk for chunk in chunks if self._status[chunk] != _DONE and chunk not in self._snapshots]

    def hasten(self) -> None:
        with self._changed:
            for chunk in self._snapshots:
                if self._status[chunk] == _PENDING:
                    self._log.append(CopyRecord(chunk, "offload", "end", self._transfers[chunk].length_bytes))
                    self._status[chunk] = _QUEUED  # small ones too: this may be another thread than the one that trains
                    self._queue.append(chunk)
            self._changed.notify_all()

    def free(self, chunks: Sequence[int]) -> None:
        with self._changed:
            for chunk in chunks:
                self._freeable.add(chunk)
                if self._status[chunk] == _DONE:
                    self._give_back(chunk)

    def finish(self) -> None:
        if _PENDING in self._status:
            raise RuntimeError(f"chunk {self._status.index(_PENDING)} was never released")
        self.wait(range(len(self._transfers)))
        with self._changed:
            while self._delivering:
                self._changed.wait()
            for chunk in list(self._snapshots):
                self._give_back(chunk)
            self._freeable.clear()

    def abort(self) -> bool:
        with self._changed:
            complete = not self._remaining
            for chunk in self._queue:
                if self._status[chunk] == _QUEUED:
                    self._status[chunk] = _PENDING
            self._queue.clear()
            self._on_complete = _nothing
            while _RUNNING in self._status or self._delivering:
                self._changed.wait()
            self._snapshots.clear()
            self._freeable.clear()
            self._held_bytes = self._remaining = 0
            self._transfers = ()
            self._status = bytearray()
            return complete

    def close(self) -> None:
        self.abort()
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def log(self) -> tuple[CopyRecord, ...]:
        with self._changed:
            return tuple(self._log)

    def statistics(self) -> CopyStatistics:
        return CopyStatistics(self._waited_seconds, self._snapshot_seconds, self._peak_bytes, self._helped_bytes)

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._queue and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
                chunk = self._queue.popleft()
                if self._status[chunk] != _QUEUED:
                    continue
                self._status[chunk] = _RUNNING
            self._copy((chunk,))

    def _copy(self, chunks: Sequence[int]) -> None:
        for chunk in chunks:
            transfer = self._transfers[chunk]
            snapshot = self._snapshots.get(chunk)
            source = transfer.source if snapshot is None else ctypes.addressof(snapshot)
            ctypes.memmove(transfer.target, source, transfer.length_bytes)
        with self._changed:
            for chunk in chunks:
                self._status[chunk] = _DONE
                if chunk in self._freeable:
                    self._give_back(chunk)
            self._remaining -= len(chunks)
            complete = not self._remaining
            callback = self._on_complete if complete else _nothing
            self._delivering = complete
            self._changed.notify_all()
        callback()
        if complete:
            with self._changed:
                self._delivering = False
                self._changed.notify_all()

    def _give_back(self, chunk: int) -> None:
        if self._snapshots.pop(chunk, None) is not None:
            self._held_bytes -= self._transfers[chunk].length_bytes


def _nothing() -> None:
    """Called in place of ``on_complete`` by a copy that is not the last one, or whose capture was aborted."""
