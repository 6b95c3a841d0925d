"""The copy engine for state in the memory of a CUDA GPU, which runs behind the host.

:class:`.engine.CopyEngine` says what each method promises; docs/explanation/boundaries.md, "On a GPU", how streams and
events keep those promises. The host blocks in ``finish``, ``abort`` and ``Concluded.wait`` alone.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from checkflow.core.errors import CheckflowError
from checkflow.runtime.transfer.cuda_capture import DeviceCapture, LinkPart, Snapshot, nothing, silent
from checkflow.runtime.transfer.device import Event, Stream, StreamDevice
from checkflow.runtime.transfer.engine import (
    CaptureOutcome,
    CopyOrder,
    CopyRecord,
    CopyStatistics,
    Transfer,
    log_failure,
    ordered_spans,
    records,
)

logger = logging.getLogger("checkflow")

# Bytes between two events: a wait may last for as many more than it needs. At 50 GB/s these
# are 0.7 ms, while an event costs the training thread some microseconds.
EVENT_BYTES = 32 * 2**20
MOST_PREPARED = 8  # lists of transfers: one for each staging buffer, and some of a layout before


class CudaCopyEngine:
    """Copies from a GPU to host memory on a stream of its own. The host never waits at an anchor.

    Neighbours in both memories are one copy, and lists of copies are prepared once for each staging buffer.
    """

    def __init__(self, device: StreamDevice) -> None:
        self._device = device
        self.source = device.memory
        self._now = nothing()  # the capture that was begun last
        self._noted: set[Stream] = set()  # streams that wrote state since the last ``join``
        self._joined: set[Stream] = set()  # streams that the next capture's boundary waits for
        self._ordering = threading.RLock()  # guards what ``hasten`` uses, on any thread
        self._prepared: dict[int, tuple[Sequence[Transfer], dict[tuple[int, ...], list[LinkPart]]]] = {}
        # Between the training thread and the one that waits for the ends of captures:
        self._mutex = threading.RLock()  # entered by itself, not by the condition: see system/signals.py
        self._changed = threading.Condition(self._mutex)
        # Captures with all copies ordered, until their callbacks have run.
        self._sealed: deque[DeviceCapture] = deque()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="checkflow-copy", daemon=True)
        self._thread.start()

    def note(self) -> None:
        # While a graph is captured nothing is written; a device that has failed says so again in ``begin``.
        with contextlib.suppress(CheckflowError):
            self._noted.add(self._device.current())

    def join(self) -> None:
        device, here = self._device, self._device.current()
        noted, self._noted = self._noted, set()  # first: a stream that is gone must not be asked again
        for stream in noted - {here}:
            self._refuse_captured(stream)
            event = device.record(stream)
            device.wait(here, event)
            device.recycle([event])
        self._joined |= noted

    def begin(
        self,
        transfers: Sequence[Transfer],
        on_complete: Callable[[], None],
        at_once: Sequence[Transfer] = (),
        on_failure: Callable[[CheckflowError], None] = log_failure,
    ) -> None:
        if not (self._now.decided or self._now.concluded):
            raise RuntimeError("a capture is still running")
        self._forget()
        device = self._device
        stream = device.current()
        self._now = DeviceCapture(on_complete, on_failure, transfers, [-1] * len(transfers), len(transfers))
        if at_once:
            device.copy(device.prepare(at_once), stream)
        boundary = self._event(stream)
        self._fence(stream, boundary)
        device.wait(device.side, boundary)
        joined, self._joined = self._joined, set()
        for other in joined - {stream}:  # they may write next, without an anchor
            self._refuse_captured(other)
            device.wait(other, boundary)
            self._now.behind[other] = len(self._now.fences)
        if not transfers:
            self._seal()

    def snapshot(self, chunks: Sequence[int], anchor: str) -> None:
        stream = self._enter()
        now = self._now
        if forced := [chunk for chunk in chunks if now.part_of[chunk] >= 0 and chunk not in now.copied]:
            self.wait(forced)  # they already had to leave their live tensors
        made: dict[int, Snapshot] = {}
        pieces = []
        for chunk in chunks:
            if now.part_of[chunk] >= 0 or chunk in now.copied:
                continue
            transfer = now.transfers[chunk]
            address, holder = self._device.allocate(transfer.length_bytes)
            made[chunk] = Snapshot(address, holder, stream)
            pieces.append(Transfer(transfer.source, address, transfer.length_bytes))
        if not made:
            return
        before = self._event(stream, timed=True)
        self._device.copy(self._device.prepare(pieces, inside=True), stream)
        after = self._event(stream, timed=True)
        self._fence(stream, after)
        # Only now: after an interrupt before this line, the snapshot is made again.
        with self._ordering:
            now.snapshots |= made
            now.copied |= made.keys()
        now.snapshot_spans.append((before, after))
        size_bytes = sum(piece.length_bytes for piece in pieces)
        now.snapshot_bytes += size_bytes
        now.held_bytes += size_bytes
        now.peak_bytes = max(now.peak_bytes, now.held_bytes)
        now.orders.append(CopyOrder(tuple(made), "snapshot", anchor, time.perf_counter()))

    def offload(self, chunks: Sequence[int], anchor: str) -> None:
        with self._ordering:
            stream = self._enter()
            part_of = self._now.part_of
            if chosen := tuple([chunk for chunk in chunks if part_of[chunk] < 0]):
                self._device.wait(self._device.side, self._event(stream))
                self._order(chosen, anchor)

    def wait(self, chunks: Sequence[int]) -> None:
        stream = self._enter()
        now = self._now
        parts = [now.part_of[chunk] for chunk in chunks]
        if -1 in parts:
            raise RuntimeError(f"chunk {chunks[parts.index(-1)]} is waited for before it was released")
        last = max(parts, default=-1)
        if last >= now.guarded and not self._arrived(last):
            self._hold(stream, last)
            self._fence(None, now.ends[last])
            now.behind[stream] = len(now.fences)
            now.guarded = last + 1

    def live(self, chunks: Sequence[int]) -> list[int]:
        now = self._now
        if now.decided or now.concluded:
            return []
        self._enter()
        part_of, safe = now.part_of, now.safe
        found = [chunk for chunk in chunks if not 0 <= part_of[chunk] < safe and chunk not in now.copied]
        if found and self._advance():
            safe = now.safe
            found = [chunk for chunk in found if not 0 <= part_of[chunk] < safe]
        return found

    @property
    def idle(self) -> bool:
        return self._now.decided and not self._now.snapshots

    def hasten(self) -> None:
        with self._ordering:
            now = self._now
            if chosen := tuple(chunk for chunk in now.snapshots if now.part_of[chunk] < 0):
                # Any thread may call this, so its current stream says nothing: wait for all fences.
                for _, event in now.fences:
                    self._device.wait(self._device.side, event)
                self._order(chosen, "end")

    def free(self, chunks: Sequence[int]) -> None:
        self._enter()
        latest: dict[Stream, int] = {}
        gone = []
        for chunk in chunks:
            snapshot, part = self._now.snapshots.get(chunk), self._now.part_of[chunk]
            if snapshot is None or part < 0:
                continue  # freed already, or not released yet and freed at the end
            gone.append(chunk)
            latest[snapshot.stream] = max(part, latest.get(snapshot.stream, -1))
        for stream, part in latest.items():
            if not self._arrived(part):
                self._refuse_captured(stream)
                self._hold(stream, part)
        with self._ordering:
            for chunk in gone:
                del self._now.snapshots[chunk]
                self._now.held_bytes -= self._now.transfers[chunk].length_bytes

    def conclude(self) -> _Concluded:
        now = self._now
        if now.given_up:  # an interrupt came before that was finished
            raise RuntimeError("the capture was given up")
        if -1 in now.part_of:
            raise RuntimeError(f"chunk {now.part_of.index(-1)} was never released")
        if not now.concluded:
            self._seal()
            here = self._enter()
            if now.ends and not self._arrived(len(now.ends) - 1):
                for stream in now.behind:
                    if stream != here:
                        self._refuse_captured(stream)
                        self._device.wait(stream, now.ends[-1])
                self._hold(here, len(now.ends) - 1)
            # Among these is every stream that a snapshot was allocated on.
            with self._ordering:
                now.snapshots.clear()
                now.held_bytes = 0
            now.concluded = True
        return _Concluded(self, now)

    def finish(self) -> None:
        self.conclude()
        with self._mutex:
            while self._sealed:
                self._seal()  # unless it was sealed when the last chunk was ordered
                self._changed.wait()

    def abort(self) -> bool:
        now = self._now
        with self._ordering:  # nothing is hastened from here on
            with self._mutex:
                now.given_up = now.given_up or not (now.decided or now.concluded)
            try:
                # Work given to a stream before it was captured into a graph lies before its fences.
                events = [event for _, event in now.fences]
                streams = (self._device.side, *now.behind)
                events += [self._event(stream) for stream in streams if not self._device.capturing(stream)]
                for event in events:
                    self._device.synchronize(event)
            except CheckflowError as error:  # a failed device writes nothing any more
                logger.warning("%s", error)
            with self._mutex:
                self._changed.notify_all()  # an interrupt may have come before that of ``_seal``
                while self._sealed:
                    self._changed.wait()
            self._forget()
        return not now.given_up

    def close(self) -> None:
        self.abort()
        with self._mutex:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def log(self) -> tuple[CopyRecord, ...]:
        return records(self._now.orders, self._now.transfers)

    def statistics(self) -> CopyStatistics:
        return self._statistics(self._now)

    def _statistics(self, capture: DeviceCapture) -> CopyStatistics:
        if capture.outcome is not None:
            return capture.outcome.statistics
        try:
            waited_seconds = self._seconds(capture.waited_spans)
            snapshot_seconds = self._seconds(capture.snapshot_spans)
        except CheckflowError as error:  # a failed device has no times
            logger.debug("what a capture cost is not known: %s", error)
            waited_seconds = snapshot_seconds = 0.0
        return CopyStatistics(waited_seconds, snapshot_seconds, capture.snapshot_bytes, capture.peak_bytes)

    def _seconds(self, spans: Iterable[tuple[Event, Event]]) -> float:
        return sum((self._device.seconds_between(before, after) for before, after in spans), 0.0)

    def _order(self, chunks: tuple[int, ...], anchor: str) -> None:
        """Enqueue these chunks on the side stream."""
        device, now = self._device, self._now
        for part in self._parts(chunks):
            if part.copies is not None:
                device.copy(part.copies, device.side)
            number = len(now.ends)
            now.ends.append(self._event(device.side))
            for chunk in part.chunks:
                now.part_of[chunk] = number
            now.remaining -= len(part.chunks)
            now.orders.append(CopyOrder(part.chunks, "offload", anchor, time.perf_counter()))
        if now.remaining <= 0:
            self._seal()

    # Events and fences

    def _event(self, stream: Stream, *, timed: bool = False) -> Event:
        event = self._device.record(stream, timed=timed)
        self._now.events.append(event)
        return event

    def _refuse_captured(self, stream: Stream) -> None:
        """Refuse a stream under graph capture: an event or wait there would enter the user's graph or invalidate it."""
        if self._device.capturing(stream):
            raise CheckflowError("a stream of training is being captured into a CUDA graph, and another one goes on")

    def _fence(self, stream: Stream | None, event: Event) -> None:
        """Have every other stream of training wait for this event at its next call."""
        self._now.fences.append((stream, event))
        if stream is not None:
            self._now.behind[stream] = len(self._now.fences)

    def _enter(self) -> Stream:
        """Return the current stream, after having it wait for all fences."""
        now, stream = self._now, self._device.current()
        passed = now.behind.get(stream, 0)
        if passed < len(now.fences):
            for other, event in now.fences[passed:]:
                # None first: torch's streams answer False to any comparison with None, != too.
                if other is None or other != stream:
                    self._device.wait(stream, event)
            now.behind[stream] = len(now.fences)
        return stream

    def _hold(self, stream: Stream, part: int) -> None:
        """Have a stream of training wait until a part has arrived, and time the wait."""
        before = self._event(stream, timed=True)
        self._device.wait(stream, self._now.ends[part])
        self._now.waited_spans.append((before, self._event(stream, timed=True)))

    def _advance(self) -> bool:
        """Update which parts have arrived; return whether there are more than before."""
        now, before = self._now, self._now.arrived
        while now.arrived < len(now.ends) and self._device.done(now.ends[now.arrived]):
            now.arrived += 1
        return now.arrived > before

    def _arrived(self, part: int) -> bool:
        now = self._now
        if part >= now.arrived and self._device.done(now.ends[part]):
            now.arrived = part + 1  # the side stream works in order
        return part < now.arrived

    # Parts

    def _parts(self, chunks: tuple[int, ...]) -> list[LinkPart]:
        """Cut chunks into parts where an event is due; kept for each list of transfers without snapshots."""
        now = self._now
        if now.copied and not now.copied.isdisjoint(chunks):
            return self._cut(chunks)
        # Keep the list too: as long as it lives, no other list has its id().
        _, known = self._prepared.setdefault(id(now.transfers), (now.transfers, {}))
        while len(self._prepared) > MOST_PREPARED:
            del self._prepared[next(iter(self._prepared))]
        parts = known.get(chunks)
        if parts is None:
            parts = known[chunks] = self._cut(chunks)
        return parts

    def _cut(self, chunks: tuple[int, ...]) -> list[LinkPart]:
        parts, begin, size_bytes = [], 0, 0
        for end, chunk in enumerate(chunks, 1):
            size_bytes += self._now.transfers[chunk].length_bytes
            if size_bytes >= EVENT_BYTES or end == len(chunks):
                parts.append(self._part(chunks[begin:end]))
                begin, size_bytes = end, 0
        return parts

    def _part(self, chunks: tuple[int, ...]) -> LinkPart:
        pieces = []
        for chunk in chunks:
            transfer, snapshot = self._now.transfers[chunk], self._now.snapshots.get(chunk)
            source = transfer.source if snapshot is None else snapshot.address
            if transfer.length_bytes:
                pieces.append(Transfer(source, transfer.target, transfer.length_bytes))
        return LinkPart(chunks, self._device.prepare(pieces) if pieces else None)

    # The end of a capture

    def _seal(self) -> None:
        """Hand the capture to the thread that waits for its end: everything has been ordered."""
        now = self._now
        with self._mutex:
            if not (now.decided or now.given_up or now in self._sealed):
                now.last = self._event(self._device.side)
                self._sealed.append(now)
            self._changed.notify_all()

    def _run(self) -> None:
        self._device.enter_thread()
        while (capture := self._next_sealed()) is not None:
            error = self._wait_for(capture)
            with self._mutex:
                reported = not capture.given_up
                capture.decided = True
            try:
                if reported and error is None:
                    capture.on_complete()
                elif reported and error is not None:
                    capture.on_failure(error)
            except Exception:
                # A bug must not end the thread that others wait for.
                logger.exception("a capture that has ended could not be handed on")
            finally:
                with self._mutex:
                    capture.ended = True
                    capture.on_complete, capture.on_failure = silent, log_failure  # they hold the buffer
                    self._sealed.popleft()
                    self._changed.notify_all()

    def _next_sealed(self) -> DeviceCapture | None:
        """Return the first sealed capture, leaving it in the queue; None when the engine is closed."""
        with self._mutex:
            while not self._sealed and not self._closed:
                self._changed.wait()
            return self._sealed[0] if self._sealed else None

    def _wait_for(self, capture: DeviceCapture) -> CheckflowError | None:
        try:
            self._device.synchronize(capture.last)
        except CheckflowError as error:  # passed to ``on_failure``
            return error
        return None

    def wait_for_end(self, capture: DeviceCapture) -> None:
        """Return when the capture has ended."""
        with self._mutex:
            while not capture.ended:
                self._changed.wait()

    def outcome_of(self, capture: DeviceCapture) -> CaptureOutcome | None:
        """Return the outcome of an ended capture, else None. Its events are reused from then on."""
        if capture.outcome is None and capture.ended:
            done = capture.orders, capture.transfers
            capture.outcome = CaptureOutcome(
                self._statistics(capture), functools.partial(records, *done), functools.partial(ordered_spans, *done)
            )
            self._device.recycle(capture.events)
        return capture.outcome

    def _forget(self) -> None:
        """Make no capture current. A concluded one is still followed to its end."""
        with self._ordering:
            if not self._now.concluded:
                self._now.snapshots.clear()
                self._device.recycle(self._now.events)
            self._now = nothing()


@dataclass(frozen=True, slots=True)
class _Concluded:
    """See :class:`.engine.Concluded`."""

    engine: CudaCopyEngine
    capture: DeviceCapture

    def outcome(self) -> CaptureOutcome | None:
        return self.engine.outcome_of(self.capture)

    def wait(self) -> None:
        self.engine.wait_for_end(self.capture)
