"""Measures what operators allocate on a GPU within one call, such as workspaces of cuDNN, from the allocator's
counters.

It only reads them: resetting the peak would take from the user what ``torch.cuda.max_memory_allocated`` has seen.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Allocated:
    """What torch's allocator counts on one device."""

    now_bytes: int = 0  # allocated, also by C++ alone, such as cuBLAS's workspaces
    most_bytes: int = 0  # its peak since the user last reset it
    freed_bytes: int = 0  # all frees so far


def allocated(device: torch.device) -> Allocated:
    """Read a GPU's counters; zeros for other devices, which have none."""
    if device.type != "cuda":
        return Allocated()
    counts = torch.cuda.memory_stats_as_nested_dict(device)["allocated_bytes"]["all"]
    return Allocated(counts["current"], counts["peak"], counts["freed"])


class Transients:
    """Measures what was allocated and freed again within stretches of time, nested or not.

    It is an upper bound: at most what was freed, and at most the peak less what is left. It is exact for the operator
    that reaches the iteration's peak.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._counted_bytes = 0  # freed in stretches that have ended

    def begin(self) -> int:
        """Begin a stretch; pass the result to :meth:`end`."""
        return allocated(self._device).freed_bytes - self._counted_bytes

    def end(self, mark_bytes: int) -> int:
        """Return the bytes beyond those that are left, without those of stretches within this one."""
        counted = allocated(self._device)
        freed_bytes = counted.freed_bytes - self._counted_bytes - mark_bytes
        self._counted_bytes += freed_bytes
        return max(0, min(freed_bytes, counted.most_bytes - counted.now_bytes))
