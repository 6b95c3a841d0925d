"""How fast this machine copies state: measured in a moment, for a job that makes its own plan.

What is measured is what the runtime's copy engine does, alone on the machine: training that uses the same memory at the
same time slows it down, and is slowed down by it.
"""

from __future__ import annotations

import ctypes
import mmap
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

SIZE_BYTES = 32 * 2**20  # larger than most caches
MEASURED_SECONDS = 0.05  # for each of the two
LEAST_COPIES = 3


@dataclass(frozen=True, slots=True)
class Bandwidths:
    """Medians of a few copies."""

    link_bytes_per_second: float  # from device memory to staging memory
    memory_bytes_per_second: float  # of device memory: a copy within it reads each byte once and writes it once


def measure_bandwidths(device_type: str) -> Bandwidths:
    """Measure the copies that checkpoints will make; takes some 0.1 s.

    On the CPU both are one thread's memmove between touched pages. On a GPU the first is a copy into pinned host
    memory, the second one inside its own memory; 64 MiB of it are taken for that moment.
    """
    return _on_gpu(device_type) if device_type != "cpu" else _on_host()


def _on_host() -> Bandwidths:
    source, target = mmap.mmap(-1, SIZE_BYTES), mmap.mmap(-1, SIZE_BYTES)
    addresses = [ctypes.addressof(ctypes.c_char.from_buffer(memory)) for memory in (source, target)]
    for address in addresses:
        ctypes.memset(address, 1, SIZE_BYTES)

    def copy() -> float:
        begun = time.perf_counter()
        ctypes.memmove(addresses[1], addresses[0], SIZE_BYTES)
        return time.perf_counter() - begun

    rate = SIZE_BYTES / _median_seconds(copy)
    return Bandwidths(rate, 2 * rate)


def _on_gpu(device_type: str) -> Bandwidths:
    source, other = (torch.ones(SIZE_BYTES, dtype=torch.uint8, device=device_type) for _ in range(2))
    host = torch.ones(SIZE_BYTES, dtype=torch.uint8).pin_memory()

    def copy(target: torch.Tensor) -> float:
        before, after = (torch.Event(device_type, enable_timing=True) for _ in range(2))
        before.record()
        target.copy_(source, non_blocking=True)
        after.record()
        after.synchronize()
        return before.elapsed_time(after) / 1000  # given in milliseconds

    link, memory = (_median_seconds(lambda target=target: copy(target)) for target in (host, other))  # type: ignore[misc]
    return Bandwidths(SIZE_BYTES / link, 2 * SIZE_BYTES / memory)


def _median_seconds(copy: Callable[[], float]) -> float:
    copy()  # caches, page tables and the driver's own buffers are warm afterwards
    seconds: list[float] = []
    while len(seconds) < LEAST_COPIES or sum(seconds) < MEASURED_SECONDS:
        seconds.append(copy())
    return statistics.median(seconds)
