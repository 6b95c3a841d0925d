"""How work is timed, and what repeated measurements of one thing say.

One clock for the host and one for a GPU, which runs behind the host: there, time is what passes between two events on
the device's own stream, read once everything before them is done.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

Work = Callable[[], object]


class Clock(Protocol):
    """What can time work."""

    def laps(self, work: Work, count: int) -> list[float]:
        """Run ``work`` so often, back to back; seconds that each run took."""
        ...


class HostClock:
    """Times what is done when the call returns."""

    def laps(self, work: Work, count: int) -> list[float]:
        marks = [time.perf_counter()]
        for _ in range(count):
            work()
            marks.append(time.perf_counter())
        return [after - before for before, after in itertools.pairwise(marks)]


class EventClock:
    """Times what the current stream of a CUDA device does, by events on it; the host may run ahead within one call.

    A run ends when the device has reached the event behind it. So the first run also waits for its first kernel to be
    launched: run it once before, and take the median.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def laps(self, work: Work, count: int) -> list[float]:
        with torch.cuda.device(self._device):
            marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()
            marks[0].record()
            for mark in marks[1:]:
                work()
                mark.record()
            torch.cuda.synchronize()
        return [before.elapsed_time(after) / 1e3 for before, after in itertools.pairwise(marks)]


def clock_of(device: torch.device) -> Clock:
    """The clock that tells when work on this device is done."""
    return EventClock(device) if device.type == "cuda" else HostClock()


@dataclass(frozen=True, slots=True)
class Spread:
    """Several measurements of one quantity: the median, quartiles around it, and the ends. Its unit is its owner's."""

    least: float
    lower: float  # a quarter of the measurements are below
    median: float
    upper: float  # a quarter are above
    most: float
    count: int

    def scaled(self, factor: float) -> Spread:
        """The same measurements in another unit."""
        ends = (self.least * factor, self.lower * factor, self.median * factor, self.upper * factor, self.most * factor)
        return Spread(*ends, self.count)

    def above(self, amount: float) -> Spread:
        """What the same measurements are more than an amount; 0 where they are less."""
        least, lower, median, upper, most = (
            max(0.0, end - amount) for end in (self.least, self.lower, self.median, self.upper, self.most)
        )
        return Spread(least, lower, median, upper, most, self.count)


def spread_of(samples: Sequence[float]) -> Spread:
    """The spread of at least one measurement; quartiles are interpolated.

    Raises:
        ValueError: there is no measurement.
    """
    if not samples:
        raise ValueError("no measurement")
    ordered = sorted(samples)
    if len(ordered) == 1:
        (only,) = ordered
        return Spread(only, only, only, only, only, 1)
    lower, median, upper = statistics.quantiles(ordered, n=4, method="inclusive")
    return Spread(ordered[0], lower, median, upper, ordered[-1], len(ordered))
