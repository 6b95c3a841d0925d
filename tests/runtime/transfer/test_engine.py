"""The copy engine's contract, on the engine for host memory and on the one for GPUs: simulated ones, and a real one."""

from __future__ import annotations

import contextlib
import random
import sys
import threading
import traceback
from collections.abc import Iterator
from types import FrameType

import pytest
import torch

from checkflow.runtime.persist.saver import make_engine
from checkflow.runtime.transfer import cuda, host
from checkflow.runtime.transfer.cuda import CudaCopyEngine
from checkflow.runtime.transfer.engine import CopyEngine, Transfer
from tests.support.gpu import fake_device
from tests.support.gpu.fake_device import FakeDevice
from tests.support.gpu.locked_memory import LockedMemory, device_of
from tests.support.waiting import PATIENCE_SECONDS

TARGETS: list[LockedMemory] = []  # of the test that runs


class Memory:
    """Source and target bytes, and transfers of random chunks between them."""

    def __init__(self, engine: CopyEngine, size: int, seed: int = 0) -> None:
        rng = random.Random(seed)
        self.content = rng.randbytes(size)
        self.source = torch.frombuffer(bytearray(self.content), dtype=torch.uint8).to(engine.source)
        self.target = LockedMemory(engine, size)
        TARGETS.append(self.target)
        self.transfers: list[Transfer] = []
        offset = 0
        while offset < size:
            length = min(size - offset, rng.randint(1, 50_000))
            here = self.source.data_ptr() + offset, self.target.address + offset
            self.transfers.append(Transfer(*here, length))
            offset += length

    def overwrite(self, chunks: list[int]) -> None:
        for chunk in chunks:
            offset = self.transfers[chunk].source - self.source.data_ptr()
            self.source[offset : offset + self.transfers[chunk].length_bytes] = 0xEE

    @property
    def arrived(self) -> bool:
        return self.target.raw == self.content


@pytest.fixture(params=["host", "first", "last", pytest.param("GPU", marks=pytest.mark.cuda)])
def engine(request: pytest.FixtureRequest) -> Iterator[CopyEngine]:
    """Of simulated GPUs, training writes at once, as on a CPU; copies come as early as they may, or as late."""
    if request.param in ("host", "GPU"):
        engine, _ = make_engine(torch.device("cpu" if request.param == "host" else "cuda:0"))
    else:
        engine = CudaCopyEngine(FakeDevice(copies=request.param, prompt=True))
    device = device_of(engine)
    in_batches = device is not None and device._runtime.batches
    yield engine
    engine.close()
    for target in TARGETS:
        target.unlock()
    TARGETS.clear()
    assert in_batches == (device is not None and device._runtime.batches)


def snapshots(engine: CopyEngine) -> object:
    """Those that it holds."""
    return engine._now.snapshots if isinstance(engine, CudaCopyEngine) else engine._snapshots


@pytest.mark.parametrize("seed", range(10))
def test_writes_after_wait_or_snapshot_do_no_harm(engine: CopyEngine, seed: int) -> None:
    memory, rng = Memory(engine, 2_000_000, seed), random.Random(seed)
    complete = threading.Event()
    engine.begin(memory.transfers, complete.set)
    chunks = list(range(len(memory.transfers)))
    rng.shuffle(chunks)
    direct, copied = chunks[::2], chunks[1::2]
    engine.snapshot(copied, "a")
    memory.overwrite(copied)
    engine.offload(direct, "b")
    engine.wait(direct)
    memory.overwrite(direct)
    assert not complete.is_set()
    engine.offload(copied, "c")
    engine.free(copied)
    engine.finish()
    assert complete.wait(PATIENCE_SECONDS)
    assert memory.arrived
    log = engine.log()
    assert sorted(r.chunk for r in log if r.kind == "offload") == sorted(chunks)
    assert {r.anchor for r in log if r.kind == "snapshot"} == {"a"}
    total = sum(memory.transfers[chunk].length_bytes for chunk in copied)
    assert engine.statistics().snapshot_peak_bytes == total
    assert not snapshots(engine)


def test_snapshots_are_given_back_when_they_left_and_are_freed(engine: CopyEngine) -> None:
    memory = Memory(engine, 100_000)
    engine.begin(memory.transfers, lambda: None)
    half = len(memory.transfers) // 2
    first, second = list(range(half)), list(range(half, len(memory.transfers)))
    for chunks in (first, second):
        engine.snapshot(chunks, "a")
        engine.offload(chunks, "a")
        engine.wait(chunks)
        engine.free(chunks)
        assert not snapshots(engine)
    engine.finish()
    largest = max(sum(memory.transfers[c].length_bytes for c in chunks) for chunks in (first, second))
    assert engine.statistics().snapshot_peak_bytes == largest


@pytest.mark.parametrize("helped", [False, True])
def test_large_copies_are_timed_apart(helped: bool) -> None:
    """Whether the thread makes them, or the training thread that waits for them."""
    sizes = [10, 2**20 - 1, 2**20, 5, 3 * 2**20]
    source, target = (torch.ones(sum(sizes), dtype=torch.uint8) for _ in range(2))
    starts = [sum(sizes[:n]) for n in range(len(sizes))]
    at = source.data_ptr(), target.data_ptr()
    engine = host.HostCopyEngine()
    engine.begin([Transfer(at[0] + n, at[1] + n, size) for n, size in zip(starts, sizes, strict=True)], lambda: None)
    engine.offload(range(len(sizes)), "a")
    if helped:
        engine.wait(range(len(sizes)))
    engine.finish()
    found = engine.statistics()
    engine.close()
    assert found.large_bytes == 4 * 2**20
    assert found.offload_seconds is not None
    assert 0 < found.large_seconds < found.offload_seconds


@pytest.mark.every_case
def test_nothing_moves_before_it_is_released(engine: CopyEngine) -> None:
    memory = Memory(engine, 10_000)
    engine.begin(memory.transfers, lambda: None)
    with pytest.raises(RuntimeError, match="never released"):
        engine.finish()
    with pytest.raises(RuntimeError, match="before it was released"):
        engine.wait([0])
    assert memory.target.raw == bytes(10_000)
    engine.abort()


@pytest.mark.every_case
def test_an_aborted_capture_is_never_complete_and_the_next_one_works(engine: CopyEngine) -> None:
    memory = Memory(engine, 4_000_000)
    called = threading.Event()
    engine.begin(memory.transfers, called.set)
    engine.offload(range(len(memory.transfers) - 1), "a")
    engine.abort()
    before = memory.target.raw
    memory.overwrite(list(range(len(memory.transfers))))
    assert memory.target.raw == before
    assert not called.is_set()
    again = Memory(engine, 1_000_000, 5)
    engine.begin(again.transfers, called.set)
    engine.offload(range(len(again.transfers)), "a")
    engine.finish()
    assert called.is_set()
    assert again.arrived


def test_one_capture_at_a_time_and_an_empty_one(engine: CopyEngine) -> None:
    called = threading.Event()
    engine.begin([], called.set)
    engine.finish()
    assert called.is_set()
    memory = Memory(engine, 100)
    engine.begin(memory.transfers, lambda: None)
    with pytest.raises(RuntimeError, match="still running"):
        engine.begin(memory.transfers, lambda: None)
    engine.abort()


def test_any_thread_may_let_snapshots_leave(engine: CopyEngine) -> None:
    """They leave while the training thread goes on; what is live alone is not touched."""
    memory = Memory(engine, 1_000_000)
    complete = threading.Event()
    engine.begin(memory.transfers, complete.set)
    chunks = list(range(len(memory.transfers)))
    copied, live = chunks[::2], chunks[1::2]
    engine.snapshot(copied[:-1], "a")
    thread = threading.Thread(target=engine.hasten)
    thread.start()
    engine.snapshot(copied[-1:], "b")
    thread.join()
    engine.hasten()
    memory.overwrite(copied)
    engine.wait(copied)
    assert [record.chunk for record in engine.log() if record.kind == "offload"] == copied
    assert engine.live(chunks) == live
    engine.offload(chunks, "c")  # as planned: what has left is passed over
    engine.finish()
    assert complete.wait(PATIENCE_SECONDS)
    assert memory.arrived
    engine.hasten()  # nothing is left


@pytest.mark.every_case
def test_it_is_idle_when_all_has_arrived_and_no_snapshot_is_held(engine: CopyEngine) -> None:
    memory = Memory(engine, 1_000_000)
    chunks = list(range(len(memory.transfers)))
    complete = threading.Event()
    engine.begin(memory.transfers, complete.set)
    assert not engine.idle
    engine.snapshot(chunks[:3], "a")
    engine.offload(chunks[:-1], "a")
    engine.wait(chunks[:-1])
    engine.free(chunks[:2])
    assert not engine.idle
    engine.offload(chunks[-1:], "b")
    assert complete.wait(PATIENCE_SECONDS)
    assert not engine.idle  # one snapshot is held
    engine.free(chunks[2:3])
    assert engine.idle
    memory.overwrite(chunks)
    engine.finish()
    assert memory.arrived


class HandlerError(Exception):
    """What a signal's handler raises."""


@contextlib.contextmanager
def interrupted_at(number: int) -> Iterator[list[str]]:
    """In this thread: raise at that entry or exit of a function of the engine, or of what it waits by.

    Yields where it was raised, nowhere yet.
    """
    raised: list[str] = []
    files = {module.__file__ for module in (threading, host, cuda)}
    left = number

    def trace(frame: FrameType, event: str, _: object) -> object:
        nonlocal left
        if frame.f_code.co_filename not in files:
            return None
        if any(outer.f_code.co_filename == fake_device.__file__ for outer, _ in traceback.walk_stack(frame)):
            return None
        if event in ("call", "return"):
            left -= 1
            if left == -1:
                raised.append(f"{event} of {frame.f_code.co_name}")
                raise HandlerError
        return trace

    sys.settrace(trace)  # type: ignore[arg-type]
    try:
        yield raised
    finally:
        sys.settrace(None)


def test_an_error_of_a_signal_handler_anywhere_leaves_no_lock_behind(engine: CopyEngine) -> None:
    """Python runs handlers between any two steps: at each entry and exit of a function in turn, here."""
    memory = Memory(engine, 200_000)
    chunks = list(range(len(memory.transfers)))
    places: set[str] = set()
    wanted = {"call of wait", "return of wait", "call of offload", "return of offload"}
    sweeps = 0
    number = -1
    while True:  # the two threads take turns differently each time: a sweep may pass a place by
        number += 1
        with contextlib.suppress(HandlerError), interrupted_at(number) as raised:
            engine.begin(memory.transfers, lambda: None)
            engine.snapshot(chunks[::2], "a")
            engine.offload(chunks, "b")
            engine.free(chunks[::2])
            engine.wait(chunks[1::2])
            engine.finish()
        other = threading.Thread(target=engine.hasten, daemon=True)  # it takes every lock
        other.start()
        other.join(PATIENCE_SECONDS)
        assert not other.is_alive(), raised
        engine.abort()
        places |= set(raised)
        if not raised:
            assert memory.arrived
            sweeps, number = sweeps + 1, -1
            if wanted <= places:
                break
            assert sweeps < 20, wanted - places


def test_a_fault_in_handing_a_capture_on_holds_nobody_up(engine: CopyEngine, caplog: pytest.LogCaptureFixture) -> None:
    """It is said, and the next capture goes its way."""
    memory = Memory(engine, 2_000_000)
    chunks = list(range(len(memory.transfers)))

    def planted() -> None:
        raise ZeroDivisionError("planted")

    engine.begin(memory.transfers, planted)
    engine.offload(chunks, "a")
    with contextlib.suppress(ZeroDivisionError):  # it may have been the training thread that copied the last chunk
        engine.finish()
        assert "could not be handed on" in caplog.text
    engine.finish()
    complete = threading.Event()
    engine.begin(memory.transfers, complete.set)
    engine.offload(chunks, "a")
    engine.finish()
    assert complete.is_set()
    assert memory.arrived
