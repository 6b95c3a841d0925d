"""How fast this machine copies state, measured in a moment: for a job that makes its own plan (see
:mod:`.measure.probe`).

What is measured is what the runtime's copy engine does, alone on the machine: training that uses the same memory at the
same time slows it down, and is slowed down by it.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

from checkflow.planner.measure.probe import Effort, array_size_bytes, host_link_figure, repeat
from checkflow.planner.measure.timing import clock_of

_BYTES = 32 * 2**20  # larger than most caches of a CPU, and long enough for a link
_GPU_BYTES = 256 * 2**20  # an H100's cache is 50 MB
MOMENT = Effort(repetitions=7, seconds=0.05, array_bytes=_BYTES, product_seconds=0.0, disk_bytes=0)
GPU_MOMENT = dataclasses.replace(MOMENT, array_bytes=_GPU_BYTES)


@dataclass(frozen=True, slots=True)
class Bandwidths:
    """Medians of a few copies."""

    link_bytes_per_second: float  # from device memory to staging memory
    memory_bytes_per_second: float  # of device memory: a copy within it reads each byte once and writes it once


def measure_bandwidths(device: torch.device) -> Bandwidths:
    """Measure the copies that checkpoints will make; takes some 0.1 s.

    On the CPU both are one thread's memmove. On a GPU the first is a copy into pinned host memory, the second one
    inside its own memory, of which 512 MiB are taken for that moment, or less where little is free.

    Raises:
        CheckflowError: so little memory is free that nothing can be measured.
    """
    clock = clock_of(device)
    if device.type != "cuda":
        rate = host_link_figure(clock, MOMENT, array_size_bytes(MOMENT, device)).spread.median
        return Bandwidths(rate, 2 * rate)
    size_bytes = array_size_bytes(GPU_MOMENT, device)
    link_bytes = min(size_bytes, _BYTES)  # torch keeps what it pins
    source, other = (torch.ones(size_bytes, dtype=torch.uint8, device=device) for _ in range(2))
    here, part = torch.ones(link_bytes, dtype=torch.uint8, device="cpu", pin_memory=True), source[:link_bytes]
    link = repeat(lambda: here.copy_(part, non_blocking=True), clock, MOMENT).median
    memory = repeat(lambda: other.copy_(source), clock, GPU_MOMENT).median
    return Bandwidths(link_bytes / link, 2 * size_bytes / memory)
