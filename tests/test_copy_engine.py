"""The copy engine's contract, on the engine for host memory and on the one for GPUs (on a simulated device)."""

from __future__ import annotations

import ctypes
import random
import threading
from collections.abc import Iterator

import pytest
from fake_device import FakeDevice

from checkflow.runtime.copy_engine import CopyEngine, Transfer
from checkflow.runtime.cuda_engine import CudaCopyEngine
from checkflow.runtime.host_engine import HostCopyEngine


class Memory:
    """Source and target bytes, and transfers of random chunks between them."""

    def __init__(self, size: int, seed: int = 0) -> None:
        rng = random.Random(seed)
        self.content = rng.randbytes(size)
        self.source = ctypes.create_string_buffer(self.content, size)
        self.target = ctypes.create_string_buffer(size)
        self.transfers: list[Transfer] = []
        offset = 0
        while offset < size:
            length = min(size - offset, rng.randint(1, 50_000))
            here = ctypes.addressof(self.source) + offset, ctypes.addressof(self.target) + offset
            self.transfers.append(Transfer(*here, length))
            offset += length

    def overwrite(self, chunks: list[int]) -> None:
        for chunk in chunks:
            ctypes.memset(self.transfers[chunk].source, 0xEE, self.transfers[chunk].length_bytes)

    @property
    def arrived(self) -> bool:
        return self.target.raw == self.content


@pytest.fixture(params=["host", "copies last", "copies first"])
def engine(request: pytest.FixtureRequest) -> Iterator[CopyEngine]:
    """What training writes here is written at once, as on a CPU; copies that may be late are late."""
    order = request.param.removeprefix("copies ")
    engine = HostCopyEngine() if order == "host" else CudaCopyEngine(FakeDevice(copies=order, prompt=True))
    yield engine
    engine.close()


def snapshots(engine: CopyEngine) -> object:
    """Those that it holds."""
    return engine._now.snapshots if isinstance(engine, CudaCopyEngine) else engine._snapshots


@pytest.mark.parametrize("seed", range(10))
def test_writes_after_wait_or_snapshot_do_no_harm(engine: CopyEngine, seed: int) -> None:
    memory, rng = Memory(2_000_000, seed), random.Random(seed)
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
    assert complete.wait(10)
    assert memory.arrived
    log = engine.log()
    assert sorted(r.chunk for r in log if r.kind == "offload") == sorted(chunks)
    assert {r.anchor for r in log if r.kind == "snapshot"} == {"a"}
    total = sum(memory.transfers[chunk].length_bytes for chunk in copied)
    assert engine.statistics().snapshot_peak_bytes == total
    assert not snapshots(engine)


def test_snapshots_are_given_back_when_they_left_and_are_freed(engine: CopyEngine) -> None:
    memory = Memory(100_000)
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


def test_nothing_moves_before_it_is_released(engine: CopyEngine) -> None:
    memory = Memory(10_000)
    engine.begin(memory.transfers, lambda: None)
    with pytest.raises(RuntimeError, match="never released"):
        engine.finish()
    with pytest.raises(RuntimeError, match="before it was released"):
        engine.wait([0])
    assert memory.target.raw == bytes(10_000)
    engine.abort()


def test_an_aborted_capture_is_never_complete_and_the_next_one_works(engine: CopyEngine) -> None:
    memory = Memory(4_000_000)
    called = threading.Event()
    engine.begin(memory.transfers, called.set)
    engine.offload(range(len(memory.transfers) - 1), "a")
    engine.abort()
    before = memory.target.raw
    memory.overwrite(list(range(len(memory.transfers))))
    assert memory.target.raw == before
    assert not called.is_set()
    again = Memory(1_000_000, 5)
    engine.begin(again.transfers, called.set)
    engine.offload(range(len(again.transfers)), "a")
    engine.finish()
    assert called.is_set()
    assert again.arrived


def test_one_capture_at_a_time_and_an_empty_one(engine: CopyEngine) -> None:
    called = threading.Event()
    engine.begin([], called.set)
    assert called.is_set()
    engine.finish()
    memory = Memory(100)
    engine.begin(memory.transfers, lambda: None)
    with pytest.raises(RuntimeError, match="still running"):
        engine.begin(memory.transfers, lambda: None)
    engine.abort()
