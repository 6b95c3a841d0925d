"""What is said to CUDA's runtime, to the system about NUMA nodes, and about locked memory: with stand-ins for both."""

from __future__ import annotations

import ctypes
import logging
import platform
from collections.abc import Callable
from ctypes import POINTER, c_int, c_size_t, c_uint, c_void_p
from pathlib import Path
from typing import Any

import pytest
import torch

from checkflow.core.errors import CheckflowError
from checkflow.runtime.memory_tier.records import RunLife
from checkflow.runtime.memory_tier.staging import StagingBuffers
from checkflow.runtime.memory_tier.tier import MemoryTier
from checkflow.runtime.system import numa
from checkflow.runtime.transfer import cudart
from checkflow.runtime.transfer.cudart import Copies, CudaRuntime, load_runtime, loaded_runtimes
from checkflow.runtime.transfer.engine import Transfer

POINTERS, SIZES = POINTER(c_void_p), POINTER(c_size_t)


class Library:
    """Functions with the C signatures of ``cuda_runtime_api.h``, called as those of a library are."""

    def __init__(self, version: int, batch_code: int = 0) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.code = 0  # of whatever is called next
        self.batch_code = batch_code
        arguments = [c_void_p, c_void_p, c_size_t, c_int, c_void_p]
        self.cudaMemcpyAsync = self._function(self._copy, *arguments)
        batch = [POINTERS, POINTERS, SIZES, c_size_t, c_void_p, SIZES, c_size_t]
        if version >= 13_000:
            self.cudaMemcpyBatchAsync = self._function(self._batch, *batch, c_void_p)
        elif version >= 12_080:
            self.cudaMemcpyBatchAsync = self._function(
                lambda *given: self._batch(*given[:7], given[8]), *batch, SIZES, c_void_p
            )
        self.message = ctypes.create_string_buffer(b"out of order")
        self.cudaGetErrorString = ctypes.CFUNCTYPE(c_void_p, c_int)(lambda code: ctypes.addressof(self.message))
        self.cudaGetLastError = self._function(lambda: self._note("taken back"))
        self.cudaRuntimeGetVersion = self._function(lambda place: self._put(place, version), POINTER(c_int))
        self.cudaHostRegister = self._function(
            lambda address, size, flags: self._note("register", address, size, flags), c_void_p, c_size_t, c_uint
        )
        self.cudaHostUnregister = self._function(lambda address: self._note("unregister", address), c_void_p)
        self.cudaHostAlloc = self._function(self._allocate, POINTERS, c_size_t, c_uint)
        self.cudaFreeHost = self._function(lambda address: self._note("free", address), c_void_p)
        self.cudaDeviceGetAttribute = self._function(
            lambda place, number, index: self._put(place, self.attributes[number]), POINTER(c_int), c_int, c_int
        )
        self.cudaStreamIsCapturing = self._function(self._is_capturing, c_void_p, POINTER(c_int))
        self.spanning_bytes = 0  # copies of this size span two allocations
        self.attributes = {88: 0, 91: 1, 99: 1}
        self.captured: dict[int, int] = {}  # by stream: the status, or the error that asking gives
        self.cudaThreadExchangeStreamCaptureMode = self._function(self._exchange, POINTER(c_int))
        self.mode = 0

    def _function(self, body: Callable[..., int], *arguments: Any) -> Any:
        return ctypes.CFUNCTYPE(c_int, *arguments)(body)

    def _note(self, *call: Any) -> int:
        self.calls.append(call)
        code, self.code = self.code, 0
        return code

    def _put(self, place: Any, value: int) -> int:
        place[0] = value
        return 0

    def _allocate(self, place: Any, size: int, flags: int) -> int:
        place[0] = 4096
        return self._note("allocate", size, flags)

    def _is_capturing(self, stream: int | None, place: Any) -> int:
        place[0] = status = self.captured.get(stream or 0, 0)
        return status if status > 2 else 0

    def _exchange(self, place: Any) -> int:
        place[0], self.mode = self.mode, place[0]
        return 0

    def _copy(self, target: int, source: int, size: int, kind: int, stream: int | None) -> int:
        assert kind == 4
        if size == self.spanning_bytes:
            return 1
        ctypes.memmove(target, source, size)
        return self._note("copy", size, stream)

    def _batch(self, *given: Any) -> int:
        targets, sources, sizes, count, attributes, first, attribute_count, stream = given
        words = (c_int * 6).from_address(attributes)
        assert (list(words)[:5], first[0], attribute_count) == ([1, 0, 0, 0, 0], 0, 1)
        self.flags = words[5]
        if self.spanning_bytes in [sizes[at] for at in range(count)]:
            return 1
        if not self.batch_code:
            for at in range(count):
                ctypes.memmove(targets[at], sources[at], sizes[at])
        self._note("batch", [sizes[at] for at in range(count)], stream)
        return self.batch_code


class Three:
    """Three copies, and whether they were made."""

    def __init__(self) -> None:
        self.source = ctypes.create_string_buffer(b"abcdefghijkl", 12)
        self.target = ctypes.create_string_buffer(12)
        one, other = ctypes.addressof(self.source), ctypes.addressof(self.target)
        self.transfers = [Transfer(one + at, other + at, 4) for at in (8, 0, 4)]
        self.copies = Copies(self.transfers, asynchronous=True, batched=True)

    @property
    def made(self) -> bool:
        return self.target.raw == self.source.raw


@pytest.mark.parametrize("version", [12_080, 12_090, 13_000, 13_010])
def test_copies_are_one_call_where_the_runtime_has_it(version: int) -> None:
    library, three = Library(version), Three()
    runtime = CudaRuntime(library)
    runtime.copy(three.copies, 77)
    assert three.made
    assert library.calls == [("batch", [4, 4, 4], 77)]
    assert library.flags == 0
    runtime.copy(three.copies, 77, beside=True)
    assert library.flags == 1


def test_one_by_one_where_it_has_it_not_and_on_the_legacy_stream() -> None:
    for version, stream in ((12_060, 77), (13_000, 0), (13_000, 1)):
        library, three = Library(version), Three()
        CudaRuntime(library).copy(three.copies, stream)
        assert three.made
        assert library.calls == [("copy", 4, stream or None)] * 3


def test_a_call_takes_no_more_than_drivers_bear(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cudart, "MOST_TOGETHER", 2)
    for count, sizes in ((2, [[4, 4]]), (3, [[4, 4], [4]])):
        library, three = Library(13_000), Three()
        CudaRuntime(library).copy(Copies(three.transfers[:count], asynchronous=True, batched=True), 77)
        assert library.calls == [("batch", part, 77) for part in sizes]
    library, three = Library(13_000), Three()
    CudaRuntime(library).copy(Copies(three.transfers[:1], asynchronous=True, batched=True), 77)
    assert library.calls == [("copy", 4, 77)], "one by itself is no batch"


def test_no_batch_where_it_may_fault_or_is_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    three, library = Three(), Library(13_000)
    for asynchronous, batched in ((False, True), (True, False)):
        CudaRuntime(library).copy(Copies(three.transfers, asynchronous=asynchronous, batched=batched), 77)
    monkeypatch.setenv("CHECKFLOW_BATCH_COPIES", "0")
    CudaRuntime(library).copy(three.copies, 77)
    assert library.calls == [("copy", 4, 77)] * 9
    monkeypatch.setenv("CHECKFLOW_BATCH_COPIES", "1")
    assert CudaRuntime(library).batches


def test_other_threads_run_only_during_copies_that_may_last() -> None:
    letting_go, holding, three = Library(12_060), Library(12_060), Three()
    runtime = CudaRuntime(letting_go, holding)
    runtime.copy(three.copies, 77)
    assert (len(letting_go.calls), len(holding.calls)) == (0, 3)
    runtime.copy(Copies(three.transfers, asynchronous=False, batched=True), 77)
    assert (len(letting_go.calls), len(holding.calls)) == (3, 3)


def test_what_a_device_can_and_whether_a_stream_is_captured() -> None:
    library = Library(13_000)
    runtime = CudaRuntime(library)
    library.attributes[91] = 0
    assert [runtime.attribute(number, 0) for number in (88, 91, 99)] == [0, 0, 1]
    library.captured = {5: 1, 6: 2, 0: 906}
    assert [runtime.is_capturing(stream) for stream in (5, 6, 7, 0)] == [True, True, False, True]
    assert library.calls == [("taken back",)]
    library.captured = {5: 700}
    with pytest.raises(CheckflowError, match="error 700"):
        runtime.is_capturing(5)


def test_a_driver_that_has_it_not_is_asked_once() -> None:
    for code in (36, 801, 1):
        library, three = Library(13_000, code), Three()
        runtime = CudaRuntime(library)
        for _ in range(2):
            runtime.copy(three.copies, 77)
        assert three.made
        kinds = [call[0] for call in library.calls]
        assert kinds == ["batch", "taken back", "copy", "copy", "copy", "copy", "copy", "copy"]


def test_an_error_is_raised_with_its_message_and_taken_back() -> None:
    library, three = Library(12_060), Three()
    runtime = CudaRuntime(library)
    library.code = 700
    with pytest.raises(CheckflowError, match=r"CUDA: out of order \(error 700\)"):
        runtime.copy(three.copies, 77)
    assert library.calls == [("copy", 4, 77), ("taken back",)]
    failing = Library(13_000, 700)
    runtime = CudaRuntime(failing)
    failing.cudaMemcpyAsync = failing._function(lambda *_: 700, c_void_p, c_void_p, c_size_t, c_int, c_void_p)
    with pytest.raises(CheckflowError, match="error 700"):
        runtime.copy(three.copies, 77)


def test_a_stream_of_one_s_own() -> None:
    library = Library(13_000)
    library.cudaStreamCreateWithFlags = library._function(
        lambda place, flags: library._put(place, 4711) if flags == 1 else 1, POINTERS, c_uint
    )
    assert CudaRuntime(library).make_stream() == 4711


def test_memory_is_registered_for_every_context_and_a_thread_s_mode_restored() -> None:
    library = Library(13_000)
    runtime = CudaRuntime(library)
    runtime.register(4096, 8192)
    runtime.unregister(4096)
    assert library.calls == [("register", 4096, 8192, 1), ("unregister", 4096)]
    library.code = 2
    with pytest.raises(CheckflowError, match="error 2"):
        runtime.register(4096, 8192)
    library.calls.clear()
    assert runtime.allocate_host(8192) == 4096
    runtime.free_host(4096)
    assert library.calls == [("allocate", 8192, 1), ("free", 4096)]
    library.code = 2
    with pytest.raises(CheckflowError, match="error 2"):
        runtime.allocate_host(8192)
    mode = runtime.exempt_thread()
    assert (mode, library.mode) == (0, 2)
    runtime.restore_thread(mode)
    assert library.mode == 0


def test_the_runtime_in_use_is_found_among_what_is_mapped() -> None:
    maps = """\
7f00-7f10 r--p 00000000 00:1d 4711 /usr/lib/nvidia/cuda_runtime/lib/libcudart.so.12
7f10-7f20 r-xp 00010000 00:1d 4711 /usr/lib/nvidia/cuda_runtime/lib/libcudart.so.12
7f20-7f30 r-xp 00000000 00:1d 4712 /usr/lib/my libs/libcudart-abc.so.12.8.57
7f30-7f40 r-xp 00000000 00:1d 4713 /usr/lib/libcudart_not.txt.d/libother.so
7f40-7f50 rw-p 00000000 00:00 0
7f50-7f60 rw-p 00000000 00:00 0 [heap]
"""
    assert loaded_runtimes(maps) == [
        "/usr/lib/nvidia/cuda_runtime/lib/libcudart.so.12",
        "/usr/lib/my libs/libcudart-abc.so.12.8.57",
    ]
    assert loaded_runtimes("") == []


def test_a_runtime_that_cannot_be_found_or_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(CheckflowError, match="not built for CUDA"):
        load_runtime.__wrapped__()
    monkeypatch.setattr(torch.version, "cuda", "99.1")
    monkeypatch.setattr("checkflow.runtime.transfer.cudart._maps", lambda: "")
    with pytest.raises(CheckflowError, match=r"cannot find CUDA's runtime library, libcudart\.so\.99") as caught:
        load_runtime.__wrapped__()
    assert "\n" not in str(caught.value)


# NUMA nodes


def test_the_node_of_a_pci_device(tmp_path: Path) -> None:
    for name, text in (("0000:3b:00.0", "1\n"), ("0000:3c:00.0", "-1\n"), ("0000:3d:00.0", "?")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "numa_node").write_text(text)
    assert numa.node_of_pci("0000:3B:00.0", tmp_path) == 1
    assert [numa.node_of_pci(f"0000:{bus}:00.0", tmp_path) for bus in ("3c", "3d", "3e")] == [None] * 3


def test_memory_is_asked_for_on_a_node() -> None:
    import mmap

    memory = mmap.mmap(-1, 3 * mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    granted = numa.prefer_node(address, len(memory), 0)
    ctypes.memset(address, 1, len(memory))
    maps = Path("/proc/self/numa_maps")
    if granted and maps.exists():
        assert f"{address:x} prefer" in maps.read_text()
    assert not numa.prefer_node(address, len(memory), 900), "a node that no machine has"


def test_a_system_without_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    assert not numa.prefer_node(0, 4096, 0)


# Staging memory that is locked in place


class Locks:
    """What a device does to host memory: up to so many buffers are locked, and so many allocated."""

    def __init__(self, most: int, node: int | None = None, allocated: int = 0) -> None:
        self.most, self.numa_node, self.most_allocated = most, node, allocated
        self.held: dict[int, int] = {}
        self.allocated: dict[int, ctypes.Array[ctypes.c_char]] = {}
        self.gone = False

    def allocate_host(self, size_bytes: int) -> int:
        if len(self.allocated) >= self.most_allocated:
            raise CheckflowError("CUDA: out of memory (error 2)")
        memory = ctypes.create_string_buffer(b"\xaa" * size_bytes, size_bytes)
        self.allocated[ctypes.addressof(memory)] = memory
        return ctypes.addressof(memory)

    def free_host(self, address: int) -> None:
        del self.allocated[address]

    def register(self, address: int, size_bytes: int) -> None:
        if len(self.held) >= self.most:
            raise CheckflowError("CUDA: out of memory (error 2)")
        self.held[address] = size_bytes

    def unregister(self, address: int) -> None:
        del self.held[address]
        if self.gone:
            raise CheckflowError("CUDA: driver shutting down (error 4)")


@pytest.mark.parametrize("node", [None, 0])
def test_every_buffer_is_locked_as_long_as_it_is_there(node: int | None) -> None:
    locks = Locks(9, node)
    buffers = StagingBuffers(3, locks)
    buffers.grow(5000)
    taken = [buffers.take() for _ in range(3)]
    assert buffers.locked
    assert locks.held == {buffer.address: 5000 for buffer in taken}
    assert all(bytes(buffer.view) == bytes(5000) for buffer in taken)
    for buffer in taken:
        buffers.give_back(buffer)
    buffers.grow(4000)
    assert set(locks.held.values()) == {5000}
    buffers.grow(9000)
    assert sorted(locks.held.values()) == [9000] * 3
    buffers.close()
    assert not locks.held


def test_where_memory_cannot_be_locked_it_is_said_once_and_none_is(caplog: pytest.LogCaptureFixture) -> None:
    locks = Locks(2)
    buffers = StagingBuffers(3, locks)
    with caplog.at_level(logging.WARNING, "checkflow"):
        buffers.grow(100)
        buffers.grow(200)
    assert not buffers.locked
    assert not locks.held
    (record,) = caplog.records
    assert "copies from the GPU hold training: CUDA: out of memory (error 2)" in record.getMessage()
    buffers.give_back(buffers.take())
    buffers.close()


@pytest.mark.parametrize("locked", [0, 2])
def test_where_shared_memory_cannot_be_locked_cuda_allocates(
    locked: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of all buffers or of none; views of one outlast the buffers."""
    locks, tier = Locks(locked, allocated=3), MemoryTier(tmp_path, RunLife("run"))
    buffers = StagingBuffers(3, locks, tier=tier)
    with caplog.at_level(logging.WARNING, "checkflow"):
        buffers.grow(5000)
    (record,) = caplog.records
    assert "captures in host memory end with the process" in record.getMessage()
    assert "cannot be locked in place: CUDA: out of memory (error 2)" in record.getMessage()
    assert (buffers.locked, tier.survives, locks.held) == (True, False, {})
    taken = [buffers.take() for _ in range(3)]
    assert set(locks.allocated) == {buffer.address for buffer in taken}
    assert all(bytes(buffer.view) == bytes(5000) for buffer in taken)
    taken[0].view[7] = 1
    for buffer in taken:
        buffers.give_back(buffer)
    view = taken[0].view
    del taken, buffer
    buffers.close()
    assert (len(locks.allocated), view[7]) == (1, 1)
    del view
    assert not locks.allocated


def test_where_nothing_can_be_locked_captures_outlive_the_process(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    locks, tier = Locks(0, allocated=2), MemoryTier(tmp_path, RunLife("run"))
    buffers = StagingBuffers(3, locks, tier=tier)
    with caplog.at_level(logging.WARNING, "checkflow"):
        buffers.grow(5000)
    assert (buffers.locked, tier.survives, locks.allocated) == (False, True, {})
    (record,) = caplog.records
    assert "copies from the GPU hold training" in record.getMessage()
    buffers.close()


def test_a_runtime_that_is_gone_first_does_not_stop_a_job_s_end() -> None:
    locks = Locks(9)
    buffers = StagingBuffers(2, locks)
    buffers.grow(100)
    locks.gone = True
    buffers.close()
    assert not locks.held
