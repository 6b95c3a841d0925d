"""Problem: what all formulations schedule, in whole units; Flow: how many units move when.

All state is one string of bytes, in the order in which it is first written (then by name): the bytes that must be safe
first come first, and whatever moves next is the next piece of the string. It is cut into units, so that solvers see
small whole numbers; a unit is due with its first byte. Both roundings act on running sums (of state and of link
capacity), so that all of them together lose less than one unit of state and one of link. The unit that may
be partly filled is the first: it leaves first, so it is counted whole in a peak only if the peak comes before that.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from checkflow.errors import PlanError
from checkflow.timeline import Timeline

SMALLEST_UNIT_BYTES = 512  # what CUDA allocators hand out
MOST_UNITS = 2**24  # whole numbers up to here survive every solver's text files and tolerances


@dataclass(frozen=True)
class Problem:
    """One iteration in units. Tuples have one entry a step."""

    unit_bytes: int
    total: int  # units of state
    live_bytes: tuple[int, ...]  # device memory of training itself: M_t
    capacity: tuple[int, ...]  # units that the link takes: c_t
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


@dataclass(frozen=True)
class Flow:
    """Units that move in each step: out of live tensors, into snapshots, out of snapshots.

    Which units they are follows from the order of the string (:mod:`checkflow.planner.chunks`).
    """

    direct: tuple[int, ...]
    made: tuple[int, ...]
    drained: tuple[int, ...]

    @cached_property
    def snapshots(self) -> int:
        return sum(self.made)

    def held(self) -> list[int]:
        """Units of snapshots in device memory during each step: those made in it, less those gone before it."""
        held, level, gone = [], 0, 0
        for made, drained in zip(self.made, self.drained, strict=True):
            level += made - gone
            gone = drained
            held.append(level)
        return held

    def peak_bytes(self, problem: Problem) -> int:
        """Peak of device memory, every unit counted whole."""
        return max(live + problem.unit_bytes * held for live, held in zip(problem.live_bytes, self.held(), strict=True))


def unit_for(state_bytes: int) -> int:
    """The least power of two of bytes, at least 512, of which all state is at most 2^24 units."""
    unit = SMALLEST_UNIT_BYTES
    while unit * MOST_UNITS < state_bytes:
        unit *= 2
    return unit


def make_problem(timeline: Timeline, bandwidth_bytes_per_second: float, unit_bytes: int | None = None) -> Problem:
    """The timeline in units.

    Args:
        bandwidth_bytes_per_second: of the link, from device to host.
        unit_bytes: None: as :func:`unit_for` says.

    Raises:
        PlanError: a duration or a size is negative or no number, or a first write lies outside of the timeline.
    """
    _check(timeline, bandwidth_bytes_per_second)
    unit = unit_for(timeline.state_bytes) if unit_bytes is None else unit_bytes
    steps = len(timeline.steps)
    fresh = [0] * steps
    for group in timeline.groups:
        if group.first_write is not None:
            fresh[group.first_write - 1] += group.size_bytes
    total = -(-timeline.state_bytes // unit)
    padding = total * unit - timeline.state_bytes
    return Problem(
        unit_bytes=unit,
        total=total,
        live_bytes=tuple(step.live_bytes for step in timeline.steps),
        capacity=tuple(timeline.capacities_bytes(bandwidth_bytes_per_second, unit)),
        due=tuple(-(-(due_bytes + padding) // unit) if due_bytes else 0 for due_bytes in accumulate(fresh)),
    )


def _check(timeline: Timeline, bandwidth_bytes_per_second: float) -> None:
    if not timeline.steps:
        raise PlanError("the timeline has no steps")
    if not (math.isfinite(bandwidth_bytes_per_second) and bandwidth_bytes_per_second > 0):
        raise PlanError(f"not a bandwidth: {bandwidth_bytes_per_second} bytes per second")
    for step in timeline.steps:
        if not (math.isfinite(step.duration_seconds) and step.duration_seconds >= 0):
            raise PlanError(f"step {step.label!r} lasts {step.duration_seconds} seconds")
        if step.live_bytes < 0 or step.link_bytes < 0:
            raise PlanError(f"step {step.label!r} has a negative size")
    for group in timeline.groups:
        if group.first_write is not None and not 1 <= group.first_write < len(timeline.steps):
            raise PlanError(f"state is first written at step {group.first_write} of {len(timeline.steps)}")
        if any(size < 0 for _, size in group.members):
            raise PlanError(f"state first written at step {group.first_write} has a negative size")
