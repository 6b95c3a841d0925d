"""What torch says of CUDA's errors, told as ours, by the device that the copy engine for GPUs speaks to."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch

from checkflow.core.errors import CheckflowError
from checkflow.runtime.transfer.cuda_device import CudaDevice
from checkflow.runtime.transfer.cudart import HOST_POINTERS, CudaRuntime
from checkflow.runtime.transfer.engine import Transfer
from tests.runtime.transfer.test_cudart import Library

FAULT = "CUDA error: an illegal memory access was encountered\nCompile with TORCH_USE_CUDA_DSA"


def fail(*_: object, **__: object) -> NoReturn:
    raise RuntimeError(FAULT)


class Current:
    """A stand-in for torch's current device, which is another one than the engine's until that is made current."""

    index = 0

    def __init__(self, index: int) -> None:
        self._index = index

    def __enter__(self) -> None:
        self._before, Current.index = Current.index, self._index

    def __exit__(self, *_: object) -> None:
        Current.index = self._before


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> CudaDevice:
    """Without a GPU: only what speaks to torch and the runtime alone can be asked of it."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: Current.index)
    monkeypatch.setattr(torch.cuda, "device", Current)
    device = object.__new__(CudaDevice)
    device.memory, device._index, device._runtime = torch.device("cuda:3"), 3, CudaRuntime(Library(13_000))
    device._free_events = ([], [])
    return device


def event(**calls: Callable[..., Any]) -> Any:
    return SimpleNamespace(event=SimpleNamespace(**calls), timed=True)


def test_a_device_that_has_failed_is_told_of_in_a_line(device: CudaDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    there = event(query=lambda: True, elapsed_time=fail, record=fail, wait=fail)
    device._free_events[1].append(there)
    calls: list[Callable[[], object]] = [
        lambda: device.done(event(query=fail)),
        lambda: device.seconds_between(there, there),
        lambda: device.seconds_between(there, event(query=fail)),
        lambda: device.record("stream", timed=True),
        lambda: device.wait("stream", there),
        lambda: device.allocate(1),
    ]
    monkeypatch.setattr(torch, "UntypedStorage", fail)
    monkeypatch.setattr(torch.cuda, "current_stream", fail)
    calls.append(device.current)
    for call in calls:
        with pytest.raises(CheckflowError, match=r"^CUDA: CUDA error: an illegal memory access was encountered$"):
            call()


def test_an_event_is_asked_without_invalidating_the_graph_that_another_thread_captures(device: CudaDevice) -> None:
    """cudaEventQuery is "potentially unsafe" during a capture in another thread, unless this one's mode is relaxed."""
    library = device._runtime._library
    modes: list[int] = []

    def asked(*_: object) -> float:
        modes.append(library.mode)
        return 1.0

    there = event(query=asked, synchronize=asked, elapsed_time=asked)
    device.done(there)
    device.synchronize(there)
    device.seconds_between(there, there)
    assert (modes, library.mode) == ([2] * 4, 0)


def test_the_time_between_events_is_in_seconds_and_none_before_the_later_one(device: CudaDevice) -> None:
    before = event(elapsed_time=lambda after: 250.0)
    assert device.seconds_between(before, event(query=lambda: True)) == 0.25
    assert device.seconds_between(before, event(query=lambda: False)) == 0.0


class Host:
    """Twelve bytes at each end, and a device over a stand-in for the runtime."""

    def __init__(self, device: CudaDevice, library: Library) -> None:
        device._runtime, device._locked, device._merges = CudaRuntime(library), {}, True
        device.side = STREAM
        device._batched = device._runtime.attribute(HOST_POINTERS, 0) == 1
        self.source = ctypes.create_string_buffer(b"abcdefghijkl", 12)
        self.target = ctypes.create_string_buffer(12)
        self.address = ctypes.addressof(self.target)
        there = ctypes.addressof(self.source)
        self.transfers = [
            Transfer(there + at, self.address + at, size) for at, size in ((0, 4), (4, 4), (8, 0), (8, 4))
        ]
        self.apart = [self.transfers[0], self.transfers[3]]


STREAM: Any = SimpleNamespace(cuda_stream=77)


def test_a_stream_that_is_captured_takes_no_copies(device: CudaDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device's own, be another one current."""
    library = Library(13_000)
    Host(device, library)
    seen, ask = [], CudaRuntime.is_capturing
    monkeypatch.setattr(CudaRuntime, "is_capturing", lambda *given: (seen.append(Current.index), ask(*given))[1])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", fail)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: STREAM if index == 3 else None)
    library.captured = {77: 1}
    with pytest.raises(CheckflowError, match="captured into a CUDA graph"):
        device.current()
    library.captured = {78: 1}
    assert device.current() is STREAM
    library.captured = {0: 1}
    assert device.capturing(SimpleNamespace(cuda_stream=0))
    assert seen == [0, 0, 3], "of the legacy stream, the current device's is asked"


@pytest.mark.parametrize(
    ("locked_bytes", "inside", "host_pointers", "batched"),
    [(12, False, 1, True), (11, False, 1, False), (0, False, 1, False), (0, True, 1, True), (12, False, 0, False)],
)
def test_batches_go_to_locked_memory_whose_address_the_device_takes(
    device: CudaDevice,
    locked_bytes: int,
    inside: bool,
    host_pointers: int,
    batched: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    library = Library(13_000)
    library.attributes[91] = host_pointers
    host = Host(device, library)
    if locked_bytes:
        device._locked[host.address] = locked_bytes
    seen, copy = [], CudaRuntime.copy
    monkeypatch.setattr(CudaRuntime, "copy", lambda *a, **b: (seen.append(Current.index), copy(*a, **b))[1])
    device.copy(device.prepare(host.apart, inside=inside), STREAM)
    assert seen == [3]
    assert [call[0] for call in library.calls] == (["batch"] if batched else ["copy"] * 2)
    assert host.target.raw == b"abcd\0\0\0\0ijkl"
    assert device.batches == (host_pointers == 1)


def test_what_is_unlocked_or_given_back_takes_no_batch(device: CudaDevice) -> None:
    host = Host(device, Library(13_000))
    device.register(host.address, 12)
    assert device.prepare(host.apart).copies.batches
    device.unregister(host.address)
    assert not device.prepare(host.apart).copies.batches
    address = device.allocate_host(12)
    assert device.prepare([Transfer(1, address, 4), Transfer(9, address + 8, 4)]).copies.batches
    device.free_host(address)
    assert not device.prepare([Transfer(1, address, 4), Transfer(9, address + 8, 4)]).copies.batches


def test_neighbours_in_two_allocations_are_copied_one_by_one(device: CudaDevice) -> None:
    """As with a pluggable allocator, cudaMallocAsync, or caching off: the runtime refuses a copy that spans two."""
    library = Library(13_000)
    library.spanning_bytes = 8
    host = Host(device, library)
    device._locked[host.address] = 12
    pieces = [host.transfers[3], *host.transfers[:3]]
    earlier = device.prepare(pieces)
    device.copy(device.prepare(pieces), STREAM)
    assert host.target.raw == host.source.raw
    assert library.calls[-1] == ("batch", [4, 4, 4], 77)
    assert device.batches
    library.calls.clear()
    device.copy(earlier, STREAM)
    assert library.calls == [("batch", [4, 4, 4], 77)], "what was prepared before is not tried as it was"
    library.spanning_bytes = 4
    with pytest.raises(CheckflowError, match="error 1"):
        device.copy(device.prepare(host.transfers[:1]), STREAM)
