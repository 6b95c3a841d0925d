"""The engine for GPUs, on a simulated device: whatever order CUDA's rules permit, each capture is one boundary's state.

Random iterations of training on several streams write what was captured as soon as they may; the device does what it is
given as late, as early, and in as odd an order as it may.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import random
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import pytest
import torch

from checkflow.core.errors import CheckflowError
from checkflow.runtime.transfer import cuda, cuda_capture
from checkflow.runtime.transfer.cuda import CudaCopyEngine
from checkflow.runtime.transfer.engine import Concluded, Transfer
from tests.support.gpu.fake_device import FakeDevice, FakeStream

STREAMS = ("main", "backward", "user")


@pytest.fixture(autouse=True)
def _events_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "EVENT_BYTES", 64)


@dataclass
class Anchor:
    """One place of an iteration: the stream that is current, the engine's work, and what training writes then."""

    stream: str
    snapshot: list[int] = field(default_factory=list)
    release: list[int] = field(default_factory=list)
    due: list[int] = field(default_factory=list)
    free: list[int] = field(default_factory=list)
    written: list[int] = field(default_factory=list)
    hastened: bool = False


@dataclass(frozen=True)
class Tensor:
    offset: int
    size: int


class Job:
    """A job with random tensors on a simulated GPU, and random work at the anchors of its iterations."""

    def __init__(self, device: FakeDevice, rng: random.Random) -> None:
        self.device, self.rng = device, rng
        sizes = [rng.choice((0, 1, 8, rng.randint(1, 200))) for _ in range(rng.randint(1, 6))]
        self.size = sum(sizes)
        self.memory = ctypes.create_string_buffer(self.size + 1)
        self.tensors = [Tensor(sum(sizes[:index]), size) for index, size in enumerate(sizes)]
        self.at_once = {index for index in range(len(sizes)) if rng.random() < 0.15}
        self.chunks: list[tuple[int, int, int]] = []  # tensor, begin, length
        for index, tensor in enumerate(self.tensors):
            begin = 0
            while index not in self.at_once and begin < tensor.size:
                length = min(tensor.size - begin, rng.randint(1, 80))
                self.chunks.append((index, tensor.offset + begin, length))
                begin += length
        if rng.random() < 0.3:
            self.chunks.append((0, 0, 0))  # of a tensor that the job does not have
        self.boundary = rng.choice(STREAMS)
        self.anchors = [Anchor(self.boundary), *(Anchor(rng.choice(STREAMS)) for _ in range(rng.randint(0, 5)))]
        self._draw_work()

    def _draw_work(self) -> None:
        rng, last = self.rng, len(self.anchors) - 1
        due = {index: rng.randint(0, last) if rng.random() < 0.8 else None for index in range(len(self.tensors))}
        for index, deadline in due.items():
            if deadline is not None:
                self.anchors[rng.randint(deadline, last)].written.append(index)
        for chunk, (tensor, _, _) in enumerate(self.chunks):
            deadline = due[tensor]
            if rng.random() < 0.5:
                made = rng.randint(0, last if deadline is None else deadline)
                released = rng.randint(made, last)
                self.anchors[made].snapshot.append(chunk)
                if rng.random() < 0.7:
                    self.anchors[rng.randint(released, last)].free.append(chunk)
            else:
                released = rng.randint(0, last if deadline is None else deadline)
                if deadline is not None:
                    self.anchors[deadline].due.append(chunk)
            self.anchors[released].release.append(chunk)
        for anchor in self.anchors:
            rng.shuffle(anchor.release)
            anchor.hastened = rng.random() < 0.1

    def transfers(self, target: int) -> tuple[list[Transfer], list[Transfer]]:
        """Those of the chunks, and those of tensors that leave at once."""
        base = ctypes.addressof(self.memory)
        spans = [(self.tensors[index].offset, self.tensors[index].size) for index in sorted(self.at_once)]
        return (
            [Transfer(base + begin, target + begin, length) for _, begin, length in self.chunks],
            [Transfer(base + begin, target + begin, length) for begin, length in spans],
        )

    def write(self, tensor: Tensor, content: bytes, stream: str) -> None:
        if tensor.size:
            self.device.write(ctypes.addressof(self.memory) + tensor.offset, content, stream)

    def settle(self, engine: CudaCopyEngine, content: bytes) -> None:
        """An iteration ends: all state has its new values, or will have; on some streams, which the engine is told."""
        device, writing = self.device, self.rng.choice(([self.boundary], STREAMS))
        for stream in STREAMS:
            device.wait(self.boundary, device.record(stream))
        over = device.record(self.boundary)
        for stream in STREAMS:
            device.wait(stream, over)
        for tensor in self.tensors:
            device.on_stream(self.rng.choice(writing))
            engine.note()
            self.write(tensor, content[tensor.offset : tensor.offset + tensor.size], device.current())

    def run(self, engine: CudaCopyEngine, begin: Callable[[], None], abort_at: int | None = None) -> None:
        """One iteration with a capture under way. Training's other streams begin by waiting for the boundary's state.

        No stream is told of what the engine enqueued on another: the engine itself has to see to it.
        """
        device, ready = self.device, {self.boundary}
        for number, anchor in enumerate(self.anchors):
            device.on_stream(anchor.stream)
            if number == abort_at:
                return
            if number == 0:
                engine.join()
                begun = device.record(self.boundary)
                begin()
            engine.live([])
            for work, chunks in ((engine.snapshot, anchor.snapshot), (engine.offload, anchor.release)):
                if chunks:
                    work(chunks, str(number))
            if anchor.hastened:  # by a thread whose current stream is another one
                thread = threading.Thread(target=engine.hasten)
                thread.start()
                thread.join()
            if anchor.due:
                engine.wait(anchor.due)
            if anchor.free:
                engine.free(anchor.free)
            if anchor.stream not in ready:
                device.wait(anchor.stream, begun)
                ready.add(anchor.stream)
            for index in anchor.written:
                tensor = self.tensors[index]
                self.write(tensor, b"\xdd" * tensor.size, anchor.stream)


@pytest.mark.parametrize("copies", ["first", "last", ""])
@pytest.mark.parametrize("hasty", [0.0, 0.5])
def test_every_capture_is_the_state_of_its_boundary(copies: str, hasty: float) -> None:
    for seed in range(120):
        rng = random.Random(seed)
        device = FakeDevice(seed, copies=copies)
        device.hasty = hasty
        engine = CudaCopyEngine(device)
        job = Job(device, rng)
        targets = [ctypes.create_string_buffer(job.size + 1) for _ in range(2)]
        prepared = [job.transfers(ctypes.addressof(target)) for target in targets]
        lazy = rng.random() < 0.8
        for number in range(4):
            content, target = rng.randbytes(job.size), targets[number % 2]
            job.settle(engine, content)
            arrived: list[bytes] = []
            if lazy:
                device.host_waits.clear()

            transfers, at_once = prepared[number % 2]
            take = functools.partial(lambda arrived, target: arrived.append(target.raw[:-1]), arrived, target)
            aborted = rng.randint(1, len(job.anchors)) if rng.random() < 0.2 else None
            job.run(engine, functools.partial(engine.begin, transfers, take, at_once), aborted)
            device.host_waits.set()
            if aborted is None:
                engine.finish()
                assert arrived == [content], (seed, number)
            else:
                complete = engine.abort()
                assert complete == bool(arrived)
                assert not device.uses(ctypes.addressof(target), job.size), (seed, number)
                assert not device.uses(ctypes.addressof(job.memory), job.size, reads_only=True), (seed, number)
                assert not engine._now.snapshots
            assert device.allocated_bytes == 0
            assert engine.statistics().snapshot_peak_bytes <= sum(length for _, _, length in job.chunks)
        engine.close()


@pytest.mark.parametrize("copies", ["first", "last", ""])
@pytest.mark.parametrize("hasty", [0.0, 0.5])
def test_captures_that_are_concluded_queue_and_each_is_the_state_of_its_boundary(copies: str, hasty: float) -> None:
    """Right behind each, every stream that took part writes what was captured, and is given its snapshots' memory."""
    for seed in range(80):
        rng = random.Random(seed)
        device = FakeDevice(seed, copies=copies)
        device.hasty = hasty
        engine = CudaCopyEngine(device)
        job = Job(device, rng)
        targets = [ctypes.create_string_buffer(job.size + 1) for _ in range(5)]
        expected: list[bytes] = []
        arrived: list[bytes] = []
        lazy = rng.random() < 0.8
        for target in targets:
            content = rng.randbytes(job.size)
            job.settle(engine, content)
            if lazy:
                device.host_waits.clear()
            transfers, at_once = job.transfers(ctypes.addressof(target))
            take = functools.partial(lambda arrived, target: arrived.append(target.raw[:-1]), arrived, target)
            aborted = rng.randint(1, len(job.anchors)) if rng.random() < 0.15 else None
            job.run(engine, functools.partial(engine.begin, transfers, take, at_once), aborted)
            if aborted is not None:
                device.host_waits.set()
                if engine.abort():  # of no bytes at all, or released to the last
                    expected.append(content)
                assert arrived == expected, seed
                assert not any(device.uses(ctypes.addressof(one), job.size) for one in targets), seed
                assert not device.uses(ctypes.addressof(job.memory), job.size, reads_only=True), seed
            else:
                expected.append(content)
                synchronized = device.synchronized
                device.on_stream(rng.choice(STREAMS))
                engine.conclude()
                assert device.synchronized == synchronized
                for stream in {device.current(), *(anchor.stream for anchor in job.anchors)}:
                    for tensor in job.tensors:
                        job.write(tensor, b"\xbb" * tensor.size, stream)
            assert device.allocated_bytes == 0
        device.host_waits.set()
        engine.finish()
        assert arrived == expected, seed
        assert not device.starved
        engine.close()


class Buffers:
    """Chunks of 48 bytes that follow each other, on a device where everything comes late."""

    def __init__(self, count: int) -> None:
        self.device = FakeDevice(copies="last")
        self.engine = CudaCopyEngine(self.device)
        self.content = bytes(range(1, count + 1)) * 48
        self.source = ctypes.create_string_buffer(self.content, len(self.content))
        self.target = ctypes.create_string_buffer(len(self.content))
        base, there = ctypes.addressof(self.source), ctypes.addressof(self.target)
        self.transfers = [Transfer(base + 48 * n, there + 48 * n, 48) for n in range(count)]
        self.arrived = threading.Event()

    def begin(self) -> None:
        self.arrived.clear()
        self.engine.begin(self.transfers, self.arrived.set)

    def overwrite(self, chunk: int) -> None:
        self.device.write(self.transfers[chunk].source, b"\xdd" * 48)


@pytest.fixture
def buffers() -> Iterator[Buffers]:
    buffers = Buffers(4)
    yield buffers
    buffers.device.failure = ""
    buffers.device.host_waits.set()
    buffers.engine.close()


def test_what_is_still_to_be_read_from_live_memory(buffers: Buffers) -> None:
    engine, device = buffers.engine, buffers.device
    assert engine.live([]) == []
    device.host_waits.clear()
    buffers.begin()
    assert engine.live(range(4)) == [0, 1, 2, 3]
    engine.snapshot([3], "a")
    engine.offload([0, 1, 3], "a")
    assert engine.live(range(4)) == [0, 1, 2]  # ordered, and nobody knows when it comes
    engine.wait([0])
    assert engine.live(range(4)) == [2]  # the event behind the first chunk is behind the second one as well
    engine.free([3])
    assert engine.live(range(4)) == [2]
    engine.offload([2], "b")
    assert engine.live([2]) == [2]
    device.drain()
    assert engine.live([2]) == []
    device.host_waits.set()
    engine.finish()
    assert engine.live(range(4)) == []
    assert buffers.target.raw == buffers.content


def test_the_device_s_streams_compare_as_torch_s_do() -> None:
    """Of torch's, every comparison with None is False: whoever asks ``!=`` is told that None is this stream."""
    kinds = [
        [torch.Stream(stream_id=number, device_index=0, device_type=1) for number in (1, 1, 2)],
        [FakeStream(name) for name in ("main", "main", "user")],
    ]
    nothing = None
    told = [
        (nothing == one, nothing != one, one != nothing, one == same, one != same, one == other, one != other)
        for one, same, other in kinds
    ]
    assert told[0] == told[1] == (False, False, False, True, False, False, True)
    assert all(hash(one) == hash(same) for one, same, _ in kinds)


def test_what_one_stream_waited_for_holds_another_that_is_in_no_order_to_it(buffers: Buffers) -> None:
    engine, device = buffers.engine, buffers.device
    device.host_waits.clear()
    buffers.begin()
    engine.offload(range(4), "a")
    engine.wait(range(4))
    device.on_stream("backward")
    assert engine.live(range(4)) == []
    for chunk in range(4):
        buffers.overwrite(chunk)
    while device._run_one("backward"):  # as soon as it may
        pass
    device.host_waits.set()
    engine.finish()
    assert buffers.target.raw == buffers.content


def test_a_chunk_that_left_from_live_memory_is_waited_for_where_its_snapshot_was_to_be_made(buffers: Buffers) -> None:
    engine = buffers.engine
    buffers.device.host_waits.clear()
    buffers.begin()
    engine.offload(range(4), "forced")
    engine.snapshot([1, 2], "planned")
    buffers.overwrite(1)
    buffers.overwrite(2)
    buffers.device.host_waits.set()
    engine.finish()
    assert buffers.target.raw == buffers.content
    assert {record.kind for record in engine.log()} == {"offload"}


def test_lists_of_copies_are_made_once_and_neighbours_are_one(
    buffers: Buffers, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    prepare = buffers.device.prepare
    monkeypatch.setattr(cuda, "EVENT_BYTES", 96)

    def count(pieces: Sequence[Transfer]) -> tuple[Transfer, ...]:
        prepared = prepare(pieces)
        made.append(len(prepared))
        return prepared

    monkeypatch.setattr(buffers.device, "prepare", count)
    for _ in range(3):
        buffers.begin()
        buffers.engine.offload([0, 1, 2], "a")
        buffers.engine.offload([3], "b")
        buffers.engine.finish()
    assert made == [1, 1, 1]  # of 96, 48 and 48 bytes
    buffers.begin()
    buffers.engine.offload([0, 2, 3, 1], "a")
    buffers.engine.finish()
    assert made[3:] == [2, 2]
    assert buffers.target.raw == buffers.content


def test_no_copy_reaches_from_one_of_cudas_allocations_into_the_next() -> None:
    """Be it the source that goes on in the next one, or the target; what is not at its begin is joined."""
    segment = cuda_capture.SEGMENT_BYTES
    near, far = 7 * segment, 100 * segment + 512
    cases = {
        (near - 512, far): [512, 512],  # an offload, or a snapshot's source
        (far, near - 512): [512, 512],  # a snapshot's target
        (near, far): [1024],
        (near - 1024, far): [1024],
        (near - 256, far): [1024],  # the next tensor begins where this segment goes on
    }
    for (source, target), sizes in cases.items():
        pieces = [Transfer(source + at, target + at, 512) for at in (0, 512)]
        assert [piece.length_bytes for piece in cuda_capture.merged(pieces)] == sizes, (source, target)


def test_nothing_ends_that_was_not_released(buffers: Buffers) -> None:
    buffers.begin()
    buffers.engine.offload([0, 1, 3], "a")
    for end in (buffers.engine.conclude, buffers.engine.finish):
        with pytest.raises(RuntimeError, match="chunk 2 was never released"):
            end()
    with pytest.raises(RuntimeError, match="chunk 2 is waited for before it was released"):
        buffers.engine.wait([1, 2])
    with pytest.raises(RuntimeError, match="still running"):
        buffers.begin()
    assert not buffers.engine.abort()


def test_other_lists_of_transfers_than_before(buffers: Buffers) -> None:
    for number in range(2 * cuda.MOST_PREPARED):
        buffers.transfers = buffers.transfers[::-1]
        buffers.target.raw = bytes(len(buffers.content))
        buffers.begin()
        buffers.engine.offload([0, 1, 2, 3], str(number))
        buffers.engine.finish()
        assert buffers.target.raw == buffers.content
    assert len(buffers.engine._prepared) <= cuda.MOST_PREPARED


def test_a_snapshot_is_given_back_where_it_is_freed_be_the_capture_complete(buffers: Buffers) -> None:
    buffers.begin()
    buffers.engine.snapshot([0, 1], "a")
    buffers.engine.offload(range(4), "a")
    assert buffers.arrived.wait(600)
    assert buffers.device.allocated_bytes == 96
    buffers.engine.free([0])
    assert buffers.device.allocated_bytes == 48
    buffers.engine.finish()
    assert buffers.device.allocated_bytes == 0


def test_a_call_that_the_device_refuses_is_raised_and_the_next_capture_works(buffers: Buffers) -> None:
    for fails_at in range(3):
        buffers.begin()
        buffers.device.fails_at = fails_at
        with pytest.raises(CheckflowError, match="invalid argument"):
            for chunk in range(4):
                buffers.engine.snapshot([chunk], "a")
                buffers.engine.offload([chunk], "a")
        assert not buffers.engine.abort()
        assert not buffers.arrived.is_set()
        assert buffers.device.allocated_bytes == 0
    buffers.begin()
    buffers.engine.offload(range(4), "a")
    buffers.engine.finish()
    assert buffers.target.raw == buffers.content


def test_a_device_that_fails_while_it_copies_is_told_of_at_the_end(
    buffers: Buffers, caplog: pytest.LogCaptureFixture
) -> None:
    buffers.device.host_waits.clear()
    buffers.begin()
    buffers.engine.offload(range(4), "a")
    buffers.device.failure = "CUDA: an illegal memory access was encountered"
    buffers.device.host_waits.set()
    with pytest.raises(CheckflowError, match="illegal memory access"):
        buffers.engine.finish()
    with caplog.at_level(logging.WARNING, "checkflow"):
        buffers.engine.abort()
    assert "illegal memory access" in caplog.text
    buffers.device.failure = ""
    assert not buffers.arrived.is_set()
    buffers.begin()
    buffers.engine.offload(range(4), "a")
    buffers.engine.finish()
    assert buffers.arrived.is_set()


class Queue:
    """Captures of the same chunks, concluded one behind the other, each to a buffer of its own."""

    def __init__(self, buffers: Buffers, count: int) -> None:
        self.buffers = buffers
        self.told: list[str] = []
        self.targets = [ctypes.create_string_buffer(len(buffers.content)) for _ in range(count)]
        self.concluded: list[Concluded] = []
        buffers.device.host_waits.clear()
        for number in range(count):
            self.begin(number)
            buffers.engine.snapshot([number % 4], "a")
            buffers.engine.offload(range(4), "a")
            self.concluded.append(buffers.engine.conclude())

    def begin(self, number: int) -> None:
        there = ctypes.addressof(self.targets[number])
        transfers = [Transfer(one.source, there + 48 * n, 48) for n, one in enumerate(self.buffers.transfers)]
        self.buffers.engine.begin(
            transfers,
            lambda: self.told.append(f"{number} is complete"),
            on_failure=lambda error: self.failed(number, error),
        )

    def failed(self, number: int, error: CheckflowError) -> None:
        self.told.append(f"{number}: {error}")
        self.buffers.device.failure = ""

    def arrived(self, number: int) -> bool:
        return self.targets[number].raw == self.buffers.content


def test_what_a_concluded_capture_did_is_known_when_it_has_arrived(buffers: Buffers) -> None:
    queue = Queue(buffers, 3)
    assert [one.outcome() for one in queue.concluded] == [None, None, None]
    assert buffers.device.allocated_bytes == 0
    assert buffers.engine.live(range(4)) == []
    assert not queue.told
    buffers.device.host_waits.set()
    queue.concluded[1].wait()
    assert queue.told[:2] == ["0 is complete", "1 is complete"]
    buffers.engine.finish()
    for number, one in enumerate(queue.concluded):
        outcome = one.outcome()
        assert outcome is not None
        assert queue.arrived(number)
        assert [record.chunk for record in outcome.log() if record.kind == "offload"] == [0, 1, 2, 3]
        assert [record.chunk for record in outcome.log() if record.kind == "snapshot"] == [number]
        assert (outcome.statistics.snapshot_bytes, outcome.statistics.snapshot_peak_bytes) == (48, 48)
        assert one.outcome() is outcome
    assert buffers.device.synchronized == buffers.device.starved == 0


def test_a_copy_that_fails_after_its_capture_was_concluded_voids_no_other(buffers: Buffers) -> None:
    queue = Queue(buffers, 4)
    buffers.device.failure = "CUDA: unspecified launch failure"
    buffers.device.host_waits.set()
    queue.concluded[-1].wait()
    assert queue.told == [
        "0: CUDA: unspecified launch failure", "1 is complete", "2 is complete", "3 is complete"
    ]  # fmt: skip
    assert all(queue.arrived(number) for number in (1, 2, 3))
    buffers.device.failure = "CUDA: unspecified launch failure"  # from then on, in truth: it tells no times
    outcome = queue.concluded[0].outcome()
    assert outcome is not None
    assert outcome.statistics.waited_seconds == 0.0


@pytest.mark.parametrize("gathering", [True, False])
@pytest.mark.parametrize("how", ["abort", "close", "finish"])
def test_whatever_waits_waits_for_all_that_were_concluded(buffers: Buffers, how: str, gathering: bool) -> None:
    queue = Queue(buffers, 4)
    if gathering:
        queue.targets.append(ctypes.create_string_buffer(len(buffers.content)))
        queue.begin(4)
        buffers.engine.offload(range(4) if how == "finish" else [0, 1], "a")
    buffers.device.host_waits.set()
    assert getattr(buffers.engine, how)() in (None, not gathering)
    assert queue.told == [f"{number} is complete" for number in range(4 + (gathering and how == "finish"))]
    assert all(queue.arrived(number) for number in range(4))
    assert not any(buffers.device.uses(ctypes.addressof(one), 192) for one in queue.targets)


def test_a_capture_of_nothing_behind_others_is_complete_after_them(buffers: Buffers) -> None:
    queue = Queue(buffers, 1)
    buffers.engine.begin([], lambda: queue.told.append("nothing"))
    assert not queue.told
    buffers.device.host_waits.set()
    buffers.engine.finish()
    assert queue.told == ["0 is complete", "nothing"]


def test_what_leaves_at_once_has_left_for_the_stream_that_it_is_concluded_on(buffers: Buffers) -> None:
    buffers.device.host_waits.clear()
    buffers.engine.begin([], buffers.arrived.set, buffers.transfers)
    buffers.device.on_stream("user")
    buffers.engine.conclude()
    for chunk in range(4):
        buffers.overwrite(chunk)
    while buffers.device._run_one("user"):  # as soon as it may
        pass
    buffers.device.host_waits.set()
    buffers.engine.finish()
    assert buffers.target.raw == buffers.content


def test_a_capture_that_has_ended_holds_nobody_s_memory(buffers: Buffers) -> None:
    class Held:
        def take(self) -> None:
            pass

    held = Held()
    gone = weakref.ref(held)
    buffers.engine.begin(buffers.transfers, held.take)
    buffers.engine.offload(range(4), "a")
    buffers.engine.finish()
    del held
    assert gone() is None


def test_a_capture_of_what_leaves_at_once_alone(buffers: Buffers) -> None:
    buffers.engine.begin([], buffers.arrived.set, buffers.transfers)
    for chunk in range(4):
        buffers.overwrite(chunk)
    buffers.engine.finish()
    assert buffers.arrived.is_set()
    assert buffers.target.raw == buffers.content
    assert buffers.engine.log() == ()
    assert buffers.engine.abort()  # it was complete


def test_what_has_a_snapshot_may_leave_early_and_nothing_else(buffers: Buffers) -> None:
    engine = buffers.engine
    engine.hasten()
    buffers.begin()
    engine.snapshot([1, 2], "a")
    thread = threading.Thread(target=engine.hasten)
    thread.start()
    thread.join()
    buffers.overwrite(1)
    buffers.overwrite(2)
    assert [(r.chunk, r.anchor) for r in engine.log() if r.kind == "offload"] == [(1, "end"), (2, "end")]
    engine.offload([0, 1, 2, 3], "planned")
    engine.finish()
    engine.hasten()
    assert buffers.target.raw == buffers.content
    assert [r.chunk for r in engine.log() if r.kind == "offload"] == [1, 2, 0, 3]


def test_an_interrupt_while_a_capture_is_given_up(buffers: Buffers, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(event: object) -> None:
        raise KeyboardInterrupt

    buffers.device.host_waits.clear()
    buffers.begin()
    buffers.engine.offload(range(4), "a")
    with monkeypatch.context() as patch:
        patch.setattr(buffers.device, "synchronize", interrupt)
        with pytest.raises(KeyboardInterrupt):
            buffers.engine.abort()
    for end in (buffers.engine.conclude, buffers.engine.finish):
        with pytest.raises(RuntimeError, match="was given up"):
            end()
    buffers.device.host_waits.set()
    with buffers.engine._changed:
        while buffers.engine._sealed:  # its copies are made meanwhile
            buffers.engine._changed.wait()
    assert not buffers.engine.abort()
    assert not buffers.arrived.is_set()
    buffers.begin()
    buffers.engine.offload(range(4), "a")
    buffers.engine.finish()
    assert buffers.arrived.is_set()


def test_a_graph_that_is_captured_meanwhile_is_left_alone(buffers: Buffers) -> None:
    """The simulated device refuses an event or a wait on a captured stream, which would void the graph."""
    engine, device = buffers.engine, buffers.device
    device._copies = "first"  # and what training's streams were given as late as it may be done
    for offloaded in (False, True):
        device.on_stream("user")
        buffers.begin()
        engine.snapshot([0], "a")
        device.on_stream("main")
        if offloaded:
            engine.offload(range(4), "a")
            device.captured = {"user"}
            with pytest.raises(CheckflowError, match="being captured into a CUDA graph"):
                engine.conclude()
        device.captured = {"user"}
        engine.abort()
        assert not device.uses(ctypes.addressof(buffers.source), len(buffers.content))
        device.captured = set()
    device.captured = {"main"}
    with pytest.raises(CheckflowError, match="being captured"):
        buffers.begin()
    device.captured = set()
    device.on_stream("user")
    engine.note()
    device.on_stream("main")
    device.captured = {"user"}
    with pytest.raises(CheckflowError, match="being captured into a CUDA graph"):
        engine.join()
    device.captured = set()
    buffers.begin()
    engine.offload(range(4), "a")
    engine.finish()
    assert buffers.target.raw == buffers.content


def test_closing_ends_a_capture_that_is_under_way() -> None:
    buffers = Buffers(4)
    buffers.begin()
    buffers.engine.offload([0, 1], "a")
    buffers.engine.close()
    assert not buffers.arrived.is_set()
    assert not buffers.device.uses(ctypes.addressof(buffers.source), 1)
    assert not buffers.engine._thread.is_alive()
