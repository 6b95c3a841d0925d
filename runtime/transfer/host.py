"""The copy engine for state in host memory: one thread copies beside training. See :class:`.engine.CopyEngine`."""

from __future__ import annotations

import ctypes
import functools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from checkflow.core.errors import CheckflowError
from checkflow.runtime.transfer.engine import (
    CaptureOutcome,
    CopyOrder,
    CopyRecord,
    CopySpan,
    CopyStatistics,
    Transfer,
    log_failure,
    records,
)

logger = logging.getLogger("checkflow")

# If all chunks are smaller, the training thread copies them itself: waking another thread costs more.
SMALL_BYTES = 32 * 1024
# As soon as the thread has taken so much from the queue, it copies that. Each time costs training the GIL once, and a
# deadline may wait for one such batch that is not its own: for half a millisecond, and for one chunk.
TAKEN_BYTES, TAKEN_CHUNKS = 4 * 1024 * 1024, 64
LARGE_BYTES = 1024 * 1024  # of one copy: the cost per copy vanishes
# ctypes.memmove that keeps the GIL.
_MEMMOVE_ADDRESS = ctypes.cast(ctypes.memmove, ctypes.c_void_p).value
assert _MEMMOVE_ADDRESS is not None
_move_holding = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(_MEMMOVE_ADDRESS)

_Copied = tuple[Literal["snapshot", "offload"], Sequence[int], float, float]

# _OWN: the training thread copies it; after an interrupt the next wait copies it again.
_PENDING, _QUEUED, _RUNNING, _OWN, _DONE = range(5)


class HostCopyEngine:
    """Copies between two places of host memory with one thread: for training on a CPU.

    The thread copies in the order of ``offload``, or the caller, if all chunks are small. A training thread that has to
    wait takes its chunks out of the queue and copies them itself, so a deadline costs at most what the thread took
    last: less than ``TAKEN_BYTES`` and one chunk.

    Large copies release the GIL. Most chunks are done long before their anchor, which is checked without a lock.
    """

    source = torch.device("cpu")

    def __init__(self) -> None:
        self._mutex = threading.RLock()  # entered by itself, not by the condition: see system/signals.py
        self._changed = threading.Condition(self._mutex)
        self._queue: deque[int] = deque()
        self._transfers: Sequence[Transfer] = ()
        self._status = bytearray()
        self._snapshots: dict[int, ctypes.Array[ctypes.c_char]] = {}
        self._freeable: set[int] = set()
        self._orders: list[CopyOrder] = []
        # Lists of their own for each capture, whose outcome keeps them; the first: kind, chunks, begin, seconds.
        self._copied: list[_Copied] = []
        self._boundary: list[CopySpan] = []
        self._waited_seconds = self._snapshot_seconds = self._offload_seconds = self._large_seconds = 0.0
        self._held_bytes = self._snapshot_bytes = self._peak_bytes = self._remaining = 0
        self._large_bytes = 0
        self._on_complete: Callable[[], None] = _nothing
        # The callback of a complete capture. The thread calls it, because no signal handler interrupts there.
        self._delivery: Callable[[], None] | None = None
        self._delivered = True
        self._begun = False  # ``at_once`` was copied
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="checkflow-copy", daemon=True)
        self._thread.start()

    def note(self) -> None:
        """Nothing to do: host writes are done when they return."""

    def join(self) -> None:
        """As :meth:`note`."""

    def begin(
        self,
        transfers: Sequence[Transfer],
        on_complete: Callable[[], None],
        at_once: Sequence[Transfer] = (),
        on_failure: Callable[[CheckflowError], None] = log_failure,  # memmove does not fail
    ) -> None:
        with self._mutex:
            if self._remaining or self._delivery is not None:
                raise RuntimeError("a capture is still running")
            self._transfers, self._on_complete, self._delivered = transfers, on_complete, False
            self._begun = False
            self._status = bytearray(len(transfers))
            self._remaining = len(transfers) + 1  # ``at_once`` counts as one
            self._orders, self._copied, self._boundary = [], [], []
            self._waited_seconds = self._snapshot_seconds = self._offload_seconds = self._large_seconds = 0.0
            self._snapshot_bytes = self._peak_bytes = self._large_bytes = 0
        begun = time.perf_counter()
        for transfer in at_once:
            move(transfer.target, transfer.source, transfer.length_bytes)
        if at_once:
            size_bytes = sum(one.length_bytes for one in at_once)
            self._boundary = [CopySpan("boundary", -1, len(at_once), size_bytes, begun, time.perf_counter() - begun)]
        with self._mutex:
            self._begun = True
            self._count(1)

    def snapshot(self, chunks: Sequence[int], anchor: str) -> None:
        begun = before = time.perf_counter()
        for chunk in chunks:
            if self._status[chunk] != _PENDING or chunk in self._snapshots:
                continue  # it left its live tensor already, or an interrupt came after this
            transfer = self._transfers[chunk]
            copy = (ctypes.c_char * transfer.length_bytes)()
            move(ctypes.addressof(copy), transfer.source, transfer.length_bytes)
            with self._mutex:
                self._snapshots[chunk] = copy
                self._held_bytes += transfer.length_bytes
                self._snapshot_bytes += transfer.length_bytes
                self._peak_bytes = max(self._peak_bytes, self._held_bytes)
                self._orders.append(CopyOrder((chunk,), "snapshot", anchor))
                now = time.perf_counter()
                self._copied.append(("snapshot", (chunk,), before, now - before))
                before = now
        self._snapshot_seconds += time.perf_counter() - begun

    def offload(self, chunks: Sequence[int], anchor: str) -> None:
        with self._mutex:
            status, transfers = self._status, self._transfers
            chosen = tuple([chunk for chunk in chunks if status[chunk] == _PENDING])
            if not chosen:
                return
            self._orders.append(CopyOrder(chosen, "offload", anchor))
            small = max([transfers[chunk].length_bytes for chunk in chosen]) <= SMALL_BYTES
            for chunk in chosen:
                status[chunk] = _OWN if small else _QUEUED
            if not small:
                self._queue.extend(chosen)
                self._changed.notify_all()
        if small:
            self._copy(chosen)

    def wait(self, chunks: Sequence[int]) -> None:
        status = self._status  # "done" is final within a capture, so no lock
        chunks = [chunk for chunk in chunks if status[chunk] != _DONE]
        if not chunks:
            return
        begun = time.perf_counter()
        for chunk in chunks:
            with self._mutex:
                mine = self._status[chunk] in (_QUEUED, _OWN)
                if mine:
                    self._status[chunk] = _OWN  # the thread skips what is no longer queued
            if mine:
                self._copy((chunk,))
            elif self._status[chunk] == _PENDING:
                raise RuntimeError(f"chunk {chunk} is waited for before it was released")
        with self._mutex:
            while [chunk for chunk in chunks if self._status[chunk] != _DONE]:
                self._changed.wait()
        self._waited_seconds += time.perf_counter() - begun

    def live(self, chunks: Sequence[int]) -> list[int]:
        # No lock: snapshots are looked up first, and freed only after their chunk is done.
        snapshots, status = self._snapshots, self._status
        return [chunk for chunk in chunks if chunk not in snapshots and status[chunk] != _DONE]

    @property
    def idle(self) -> bool:
        return not (self._remaining or self._snapshots)

    def hasten(self) -> None:
        with self._mutex:
            chosen = tuple([chunk for chunk in self._snapshots if self._status[chunk] == _PENDING])
            self._orders.append(CopyOrder(chosen, "offload", "end"))
            for chunk in chosen:
                self._status[chunk] = _QUEUED  # small ones too: this may not be the training thread
                self._queue.append(chunk)
            self._changed.notify_all()

    def free(self, chunks: Sequence[int]) -> None:
        with self._mutex:
            for chunk in chunks:
                self._freeable.add(chunk)
                if self._status[chunk] == _DONE:
                    self._give_back(chunk)

    def conclude(self) -> _Ended:
        self.finish()  # copying the rest here is fastest
        log = functools.partial(records, self._orders, self._transfers)
        spans = functools.partial(_spans, self._boundary, self._copied, self._transfers)
        return _Ended(CaptureOutcome(self.statistics(), log, spans))

    def finish(self) -> None:
        if _PENDING in self._status:
            raise RuntimeError(f"chunk {self._status.index(_PENDING)} was never released")
        if self._remaining:
            self.wait(range(len(self._transfers)))
        with self._mutex:
            if self._begun and not self._delivered and self._delivery is None:
                # All has arrived, but an interrupt came before the last chunk was counted.
                self._remaining, self._delivery = 0, self._on_complete
            self._changed.notify_all()
            while self._delivery is not None:
                self._changed.wait()
            for chunk in list(self._snapshots):
                self._give_back(chunk)
            self._freeable.clear()

    def abort(self) -> bool:
        with self._mutex:
            for chunk in self._queue:
                if self._status[chunk] == _QUEUED:
                    self._status[chunk] = _PENDING
            self._queue.clear()
            self._on_complete, self._begun = _nothing, False
            self._changed.notify_all()
            while _RUNNING in self._status or self._delivery is not None:
                self._changed.wait()
            self._snapshots.clear()
            self._freeable.clear()
            self._held_bytes = self._remaining = 0
            self._transfers = ()
            self._status = bytearray()
            return self._delivered

    def close(self) -> None:
        self.abort()
        with self._mutex:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def log(self) -> tuple[CopyRecord, ...]:
        with self._mutex:
            return records(self._orders, self._transfers)

    def statistics(self) -> CopyStatistics:
        return CopyStatistics(
            self._waited_seconds, self._snapshot_seconds, self._snapshot_bytes, self._peak_bytes,
            self._offload_seconds, self._large_bytes, self._large_seconds,
        )  # fmt: skip

    def _run(self) -> None:
        while True:
            with self._mutex:
                while not self._queue and self._delivery is None and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
                call, taken = self._delivery, self._take()
            if call is not None:
                self._deliver(call)
            if taken:
                self._copy(taken)

    def _take(self) -> list[int]:
        """The thread's next chunks; those that the training thread took are skipped."""
        taken: list[int] = []
        size_bytes = 0
        while self._queue and size_bytes < TAKEN_BYTES and len(taken) < TAKEN_CHUNKS:
            chunk = self._queue.popleft()
            if self._status[chunk] == _QUEUED:
                self._status[chunk] = _RUNNING
                taken.append(chunk)
                size_bytes += self._transfers[chunk].length_bytes
        return taken

    def _copy(self, chunks: Sequence[int]) -> None:
        begun = time.perf_counter()
        large_bytes, large_seconds = 0, 0.0
        for chunk in chunks:
            transfer = self._transfers[chunk]
            snapshot = self._snapshots.get(chunk)
            source = transfer.source if snapshot is None else ctypes.addressof(snapshot)
            before = time.perf_counter()
            move(transfer.target, source, transfer.length_bytes)
            if transfer.length_bytes >= LARGE_BYTES:
                large_bytes += transfer.length_bytes
                large_seconds += time.perf_counter() - before
        seconds = time.perf_counter() - begun
        with self._mutex:
            self._copied.append(("offload", chunks, begun, seconds))
            self._offload_seconds += seconds
            self._large_bytes += large_bytes
            self._large_seconds += large_seconds
            for chunk in chunks:
                self._status[chunk] = _DONE
                if chunk in self._freeable:
                    self._give_back(chunk)
            self._count(len(chunks))
            self._changed.notify_all()

    def _count(self, arrived: int) -> None:
        """Count arrived chunks; the caller holds the lock."""
        self._remaining -= arrived
        if not self._remaining:
            self._delivery = self._on_complete
            self._changed.notify_all()

    def _deliver(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception:
            # A bug must not end the thread that others wait for.
            logger.exception("a capture that has arrived could not be handed on")
        with self._mutex:
            self._delivery, self._delivered = None, call is not _nothing
            self._changed.notify_all()

    def _give_back(self, chunk: int) -> None:
        if self._snapshots.pop(chunk, None) is not None:
            self._held_bytes -= self._transfers[chunk].length_bytes


def move(target: int, source: int, length_bytes: int) -> None:
    """Copy; a small chunk without giving the GIL away, which would take longer."""
    (_move_holding if length_bytes <= SMALL_BYTES else ctypes.memmove)(target, source, length_bytes)


def _spans(boundary: Iterable[CopySpan], copied: Iterable[_Copied], transfers: Sequence[Transfer]) -> list[CopySpan]:
    """When copies were made."""
    made = [
        CopySpan(kind, chunks[0], len(chunks), sum(transfers[chunk].length_bytes for chunk in chunks), begun, seconds)
        for kind, chunks, begun, seconds in copied
    ]
    return [*boundary, *made]


@dataclass(frozen=True, slots=True)
class _Ended:
    """A capture that had ended when it was concluded."""

    _outcome: CaptureOutcome

    def outcome(self) -> CaptureOutcome:
        return self._outcome

    def wait(self) -> None:
        pass


def _nothing() -> None:
    """An ``on_complete`` for copies that are not the last, or of an aborted capture."""
