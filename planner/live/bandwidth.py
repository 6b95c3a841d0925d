"""Measures quickly how fast this machine copies state, for a job that makes its own plan.

Measures the runtime's copy engine alone (:mod:`.measure.probe`); training on the same memory would slow it down.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

from checkflow.planner.measure.probe import (
    LEAD_BYTES,
    array_size_bytes,
    host_link_figures,
    link_piece_figure,
    staging_memory,
)
from checkflow.planner.measure.timing import Effort, clock_of, repeat

_BYTES = 32 * 2**20  # larger than most CPU caches, and long enough for a link
_GPU_BYTES = 256 * 2**20  # an H100's cache is 50 MB
MOMENT = Effort(repetitions=7, seconds=0.05, array_bytes=_BYTES, product_seconds=0.0, disk_bytes=0)
GPU_MOMENT = dataclasses.replace(MOMENT, array_bytes=_GPU_BYTES)


@dataclass(frozen=True, slots=True)
class CopyBandwidths:
    """Medians of a few copies."""

    link_bytes_per_second: float  # from device memory to staging memory
    memory_bytes_per_second: float  # a copy within device memory reads and writes each byte once
    copy_seconds: float = 0.0  # what each piece costs the link besides its bytes


def measure_bandwidths(device: torch.device) -> CopyBandwidths:
    """Measure the copies that checkpoints will make, in some 0.1 s; CheckflowError if too little memory is free.

    On a CPU all are one thread's memmove. On a GPU the link's go to memory like staging buffers, and the memory's take
    up to 512 MiB of the device for a moment, which torch's peaks (``max_memory_allocated``) count.
    """
    if device.type != "cuda":
        link, piece = host_link_figures(clock_of(device), MOMENT, array_size_bytes(MOMENT, device))
        return CopyBandwidths(link.spread.median, 2 * link.spread.median, piece.spread.median)
    with torch.cuda.device(device):  # a pool belongs to the current device
        pool = torch.cuda.MemPool()  # gives its memory back to CUDA when freed, after the arrays in it
        with torch.cuda.use_mem_pool(pool):
            return _measure_gpu(device)


def _measure_gpu(device: torch.device) -> CopyBandwidths:
    clock, size_bytes = clock_of(device), array_size_bytes(GPU_MOMENT, device)
    source, other = (torch.ones(size_bytes, dtype=torch.uint8, device=device) for _ in range(2))
    memory = repeat(lambda: other.copy_(source), clock, GPU_MOMENT).median
    link_bytes = min(size_bytes, LEAD_BYTES)
    with staging_memory(link_bytes, device) as here:
        part = source[:link_bytes]
        link = repeat(lambda: here.copy_(part, non_blocking=True), clock, MOMENT).median
        piece = link_piece_figure(here, part, clock, MOMENT)
    return CopyBandwidths(link_bytes / link, 2 * size_bytes / memory, piece.spread.median)
