"""What all formulations schedule, in whole units (:class:`Problem`), and how many units move when (:class:`Flow`).

All state is one string of bytes, ordered by first write, then name; whatever moves next is its next piece. A unit is
due with its first byte. Rounding acts on running sums of state and of link capacity, so it loses less than two units of
state and one of link in all. Only the first unit may be partly filled; it leaves first.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

import numpy as np

from checkflow.core.errors import PlanError
from checkflow.core.timeline import Timeline, check_timeline
from checkflow.core.units import MOST_BYTES

SMALLEST_UNIT_BYTES = 512  # what CUDA allocators hand out
MOST_UNITS = 2**24  # whole numbers up to here survive every solver's text files and tolerances


Array = np.ndarray[tuple[int], np.dtype[np.int64]]


@dataclass(frozen=True)
class Counts:
    """A problem's numbers, one entry per step, and the stretches from deadline to deadline."""

    live_bytes: Array
    due: Array
    reached: Array
    starts: Array  # the first step of each stretch; the first is step 0
    stretch: Array  # the stretch that each step lies in

    @property
    def late(self) -> Array:
        """The least that cannot have left live state by the end of each step."""
        return self.due - self.reached


@dataclass(frozen=True)
class Problem:
    """One or more iterations in units. Tuples have one entry per step; all deadlines lie in the first iteration."""

    unit_bytes: int
    total: int  # units of state
    live_bytes: tuple[int, ...]  # device memory of training itself: M_t
    capacity: tuple[int, ...]  # units that the link takes, at most all: c_t
    due: tuple[int, ...]  # units that must have left, or lie in a snapshot, when the step ends

    @property
    def steps(self) -> int:
        return len(self.live_bytes)

    @cached_property
    def training_peak_bytes(self) -> int:
        return max(self.live_bytes)

    @cached_property
    def reached(self) -> tuple[int, ...]:
        """Units that the link can have taken when each step ends."""
        return tuple(accumulate(self.capacity))

    @cached_property
    def counts(self) -> Counts:
        due = np.array(self.due, dtype=np.int64)
        starts = np.flatnonzero(np.diff(due, prepend=0))
        begins = np.zeros_like(due)
        begins[starts] = 1
        begins[0] = 0
        return Counts(
            live_bytes=np.array(self.live_bytes, dtype=np.int64),
            due=due,
            reached=np.array(self.reached, dtype=np.int64),
            starts=np.append(0, starts[starts > 0]),
            stretch=np.cumsum(begins),
        )

    def waiting(self, units: int, step: int = 0) -> Problem:
        """Return the problem in which training waits in a step until the link has taken ``units`` more."""
        if not units:
            return self
        capacity = self.capacity
        return replace(self, capacity=(*capacity[:step], capacity[step] + units, *capacity[step + 1 :]))


@dataclass(frozen=True)
class Flow:
    """Units that move in each step; the string's order decides which (:mod:`checkflow.planner.schedule.chunks`)."""

    direct: tuple[int, ...]
    made: tuple[int, ...]
    drained: tuple[int, ...]

    @cached_property
    def snapshots(self) -> int:
        return sum(self.made)

    def held(self) -> list[int]:
        """Return the units of snapshots held during each step: made by its end, less those gone before it."""
        held, level, gone = [], 0, 0
        for made, drained in zip(self.made, self.drained, strict=True):
            level += made - gone
            gone = drained
            held.append(level)
        return held

    def peak_bytes(self, problem: Problem) -> int:
        return max(live + problem.unit_bytes * held for live, held in zip(problem.live_bytes, self.held(), strict=True))


def unit_for(state_bytes: int) -> int:
    """Return the least power of two of bytes, at least 512, of which all state is at most 2^24 units."""
    unit = SMALLEST_UNIT_BYTES
    while unit * MOST_UNITS < state_bytes:
        unit *= 2
    return unit


def make_problem(
    timeline: Timeline,
    bandwidth_bytes_per_second: float,
    unit_bytes: int | None = None,
    iterations: int = 1,
) -> Problem:
    """Convert the timeline, repeated for a number of iterations, to units (None: as :func:`unit_for` chooses).

    Raises:
        PlanError: a duration or size is negative or not a number, or a first write lies outside the timeline.
    """
    check_timeline(timeline)
    check_bandwidth(bandwidth_bytes_per_second)
    unit = unit_for(timeline.state_bytes) if unit_bytes is None else unit_bytes
    total = count_units(timeline, unit, iterations)
    due = due_units(timeline, unit)
    live = tuple(step.live_bytes for step in timeline.steps)
    capacity = timeline.capacities_bytes(bandwidth_bytes_per_second, unit, iterations)
    return Problem(
        unit_bytes=unit,
        total=total,
        live_bytes=live * iterations,
        capacity=tuple(min(total, units) for units in capacity),
        due=due + due[-1:] * (len(live) * (iterations - 1)),
    )


def count_units(timeline: Timeline, unit_bytes: int, iterations: int) -> int:
    """Return the units of all state, the last one counted whole; PlanError if too large to count with."""
    total = -(-timeline.state_bytes // unit_bytes)
    if timeline.training_peak_bytes + total * unit_bytes >= MOST_BYTES:
        raise PlanError("training's peak and a copy of its state are more bytes than any memory has")
    if total * iterations * len(timeline.steps) >= MOST_BYTES:
        raise PlanError(f"the state is {total} units of {unit_bytes} bytes, too many to count with: take larger units")
    return total


def due_units(timeline: Timeline, unit_bytes: int) -> tuple[int, ...]:
    """Return for each step of one iteration the units that must have left, or lie in a snapshot, when it ends."""
    fresh = [0] * len(timeline.steps)
    for group in timeline.groups:
        if group.first_write is not None:
            fresh[group.first_write - 1] += group.size_bytes
    padding = -timeline.state_bytes % unit_bytes
    return tuple(-(-(due_bytes + padding) // unit_bytes) if due_bytes else 0 for due_bytes in accumulate(fresh))


def check_bandwidth(bytes_per_second: float) -> None:
    """Refuse with PlanError what is not above zero, or above 2**63 bytes per second."""
    if not 0 < bytes_per_second < MOST_BYTES:  # refuses NaN, too
        raise PlanError(f"not a bandwidth: {bytes_per_second} bytes per second")
