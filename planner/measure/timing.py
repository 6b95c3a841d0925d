"""Times work by one clock for the host and one for a GPU, and summarises repeated measurements."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from checkflow.core.errors import CheckflowError

Unit = Literal["bytes_per_second", "flops_per_second", "seconds"]
Work = Callable[[], object]
LEAST_REPETITIONS = 3


class Clock(Protocol):
    """Times work."""

    def laps(self, work: Work, count: int) -> list[float]:
        """Run ``work`` ``count`` times, back to back; return the seconds of each run."""
        ...


class HostClock:
    """Times work that is done when the call returns."""

    def laps(self, work: Work, count: int) -> list[float]:
        marks = [time.perf_counter()]
        for _ in range(count):
            work()
            marks.append(time.perf_counter())
        return [after - before for before, after in itertools.pairwise(marks)]


class EventClock:
    """Times the current stream of a CUDA device by events on it; the host may run ahead within one call.

    The first run also waits for its kernel's launch: run once before, and take the median.
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
    """Return the clock that knows when work on this device is done."""
    return EventClock(device) if device.type == "cuda" else HostClock()


@dataclass(frozen=True, slots=True)
class Spread:
    """The median, quartiles and ends of several measurements of one quantity, in its owner's unit."""

    least: float
    lower: float  # a quarter of the measurements are below
    median: float
    upper: float  # a quarter are above
    most: float
    count: int

    def scaled(self, factor: float) -> Spread:
        ends = (self.least * factor, self.lower * factor, self.median * factor, self.upper * factor, self.most * factor)
        return Spread(*ends, self.count)

    def above(self, amount: float) -> Spread:
        """Return the excess of the same measurements over an amount, at least 0."""
        least, lower, median, upper, most = (
            max(0.0, end - amount) for end in (self.least, self.lower, self.median, self.upper, self.most)
        )
        return Spread(least, lower, median, upper, most, self.count)


def spread_of(samples: Sequence[float]) -> Spread:
    """Return the spread of at least one measurement, else ValueError; quartiles are interpolated."""
    if not samples:
        raise ValueError("no measurement")
    ordered = sorted(samples)
    if len(ordered) == 1:
        (only,) = ordered
        return Spread(only, only, only, only, only, 1)
    lower, median, upper = statistics.quantiles(ordered, n=4, method="inclusive")
    return Spread(ordered[0], lower, median, upper, ordered[-1], len(ordered))


@dataclass(frozen=True, slots=True)
class Effort:
    """How thoroughly to measure. Repetitions are fewer where they would take longer than ``seconds`` a figure."""

    repetitions: int
    seconds: float
    array_bytes: int  # of each array that is copied or streamed
    product_seconds: float  # products grow until one takes as long
    disk_bytes: int


@dataclass(frozen=True, slots=True)
class Figure:
    """One quantity that was measured several times."""

    name: str
    unit: Unit
    spread: Spread  # in that unit
    how: str  # for people: on how much, and by what
    matrix_units: bool = False  # of a product's


def repeat(work: Work, clock: Clock, effort: Effort) -> Spread:
    """Seconds that the work takes, after two runs that do not count."""
    second = clock.laps(work, 2)[-1]
    fitting = int(effort.seconds / second) if second > 0 else effort.repetitions
    return spread_of(clock.laps(work, max(LEAST_REPETITIONS, min(effort.repetitions, fitting))))


def rate(name: str, unit: Unit, amount: float, seconds: Spread, how: str) -> Figure:
    """A figure of so much work in these seconds: the slowest run gives the least rate.

    Raises:
        CheckflowError: a run took no time at all.
    """
    if not seconds.least > 0:
        raise CheckflowError(f"cannot probe: {name} on so little ({how}) takes less time than the clock can measure")
    per_second = Spread(
        least=amount / seconds.most,
        lower=amount / seconds.upper,
        median=amount / seconds.median,
        upper=amount / seconds.lower,
        most=amount / seconds.least,
        count=seconds.count,
    )
    return Figure(name, unit, per_second, how)
