"""What operators take of a GPU's memory for a moment: workspaces of cuDNN and cuBLASLt, copies that kernels need.

It is allocated and freed again within one call, so that no tensor shows it. torch's allocator counts what it has ever
freed, and keeps the most that it had given out. Both are read only: to reset the peak before each operator would tell
more, and take from the user what ``torch.cuda.max_memory_allocated`` had seen.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Allocated:
    """What torch's allocator counts of one device."""

    now_bytes: int = 0  # given out, also to what only C++ holds, such as cuBLAS's workspaces
    most_bytes: int = 0  # the same at its peak, since the user last reset that
    freed_bytes: int = 0  # all that ever was


def allocated(device: torch.device) -> Allocated:
    """Of a GPU; zeros of any other device, where nothing counts."""
    if device.type != "cuda":
        return Allocated()
    counts = torch.cuda.memory_stats_as_nested_dict(device)["allocated_bytes"]["all"]
    return Allocated(counts["current"], counts["peak"], counts["freed"])


class Transients:
    """Measures what was allocated and freed again within stretches of time, one inside of another or not.

    What was freed need not all have been there at once, as with the two workspaces of a convolution's backward. So this
    is the most that it can have been: no more than what was freed, and than lies between what is left and the peak. At
    the operator with which an iteration reaches that peak, it is exact.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._told_bytes = 0  # what was freed in stretches that have ended

    def begin(self) -> int:
        """A stretch begins; what this gives is for :meth:`end`."""
        return allocated(self._device).freed_bytes - self._told_bytes

    def end(self, mark_bytes: int) -> int:
        """It ends: bytes beyond those that are left, without what stretches within it had."""
        counted = allocated(self._device)
        freed_bytes = counted.freed_bytes - self._told_bytes - mark_bytes
        self._told_bytes += freed_bytes
        return max(0, min(freed_bytes, counted.most_bytes - counted.now_bytes))
