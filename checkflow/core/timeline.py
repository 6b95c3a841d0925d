"""Timeline: what the planner's mathematics sees of one iteration. Pure data.

Steps count from 0; step ``i`` is the papers' ``t = i + 1``. At segment granularity they alternate anchor (no duration)
and segment; at operator granularity each operator is a step, after a zero-length one if it first writes state. Step 0
is the boundary, so nothing is written in it.
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass
from typing import Literal

from checkflow.core.errors import PlanError
from checkflow.core.graph import STRICT, AnchorKey, Many
from checkflow.core.units import MOST_BYTES

StepKind = Literal["anchor", "segment", "operator"]
Granularity = Literal["segment", "operator"]
# Relative, and absolute in units: more than doubles lose over a timeline, far less than a unit.
_ROUNDING = 1e-10
MOST_SECONDS = 1e9  # of an iteration, and of a wait


@dataclass(frozen=True, slots=True)
class Step:
    """One slot of the timeline."""

    __pydantic_config__ = STRICT

    kind: StepKind
    label: str  # for people: the anchor's text, the operator's name, or "<first operator> … <last operator>"
    duration_seconds: float
    live_bytes: int  # device memory of training alone; the largest within a segment
    link_bytes: int = 0  # training's own traffic from device to host in this step
    anchor: AnchorKey | None = None  # set iff kind == "anchor" and eager training has a hook there

    @property
    def words(self) -> str:
        """The step in a sentence."""
        return self.label if self.anchor is None else self.anchor.words


@dataclass(frozen=True, slots=True)
class StateGroup:
    """State tensors with one deadline: their bytes are interchangeable to the planner.

    ``first_write`` is the first step that writes them (None: never). Snapshots are made at step ``first_write - 1``;
    direct copies may use the link up to and including that step.
    """

    __pydantic_config__ = STRICT

    first_write: int | None
    members: Many[tuple[str, int]]  # (state tensor, size in bytes), sorted by name

    @property
    def size_bytes(self) -> int:
        return sum(size for _, size in self.members)


@dataclass(frozen=True)
class Timeline:
    """One iteration as steps, and the state to move within it. Groups are sorted by deadline, never-written last."""

    __pydantic_config__ = STRICT

    granularity: Granularity
    steps: Many[Step]
    groups: Many[StateGroup]

    @functools.cached_property
    def iteration_seconds(self) -> float:
        return sum(step.duration_seconds for step in self.steps)

    @functools.cached_property
    def training_peak_bytes(self) -> int:
        return max((step.live_bytes for step in self.steps), default=0)

    @functools.cached_property
    def state_bytes(self) -> int:
        """Device bytes to move; host entries are not part of a timeline."""
        return sum(group.size_bytes for group in self.groups)

    def available_bytes(self, bandwidth_bytes_per_second: float) -> list[float]:
        """Return the bytes that the link leaves for checkpoints by the end of each step, from the boundary.

        Training's own traffic goes first; what does not fit its step is carried over, also into the next iteration: the
        steady state of a queue (Lindley, 1952). Nothing is left if training alone exceeds the link.
        """
        moved = [step.duration_seconds * bandwidth_bytes_per_second for step in self.steps]
        queued = self.queued_bytes(bandwidth_bytes_per_second)
        return list(itertools.accumulate(max(0.0, takes - before) for takes, before in zip(moved, queued, strict=True)))

    def queued_bytes(self, bandwidth_bytes_per_second: float) -> list[float]:
        """Training's own traffic queued or issued in each step, in the steady state; infinite if beyond the link."""
        moved = [step.duration_seconds * bandwidth_bytes_per_second for step in self.steps]
        own = [step.link_bytes for step in self.steps]
        if not any(own):
            return [0.0] * len(self.steps)
        if sum(own) >= math.fsum(moved):
            return [math.inf] * len(self.steps)
        left, queued = 0.0, [0.0] * len(self.steps)
        for _ in range(2):  # the queue after the first iteration is that after all others
            for index, (now, takes) in enumerate(zip(own, moved, strict=True)):
                queued[index] = left + now
                left = max(0.0, queued[index] - takes)
        return queued

    def capacities_bytes(
        self,
        bandwidth_bytes_per_second: float,
        unit_bytes: int = 1,
        iterations: int = 1,
        wait: tuple[int, float] | None = None,
    ) -> list[int]:
        """Return the whole bytes (or units of ``unit_bytes``) that the link takes in each step, less training's own
        traffic.

        Rounded on the running sum, so that short steps lose nothing. ``wait``: a step and the seconds that training
        waits in it while the link goes on, with training's own queue first.
        """
        available = self.available_bytes(bandwidth_bytes_per_second)
        capacities, given = [], 0
        for iteration in range(iterations):
            before = iteration * available[-1] if available else 0.0
            for part in available:
                whole = whole_units(before + part, unit_bytes)
                capacities.append(whole - given)
                given = whole
        if wait is not None:
            step, seconds = wait
            queued = self.queued_bytes(bandwidth_bytes_per_second)[step % len(self.steps)]
            capacities[step] += whole_units(max(0.0, seconds * bandwidth_bytes_per_second - queued), unit_bytes)
        return capacities


def whole_units(amount_bytes: float, unit_bytes: int) -> int:
    """Return the whole units in a floating-point sum, whose rounding must not cost a unit."""
    units = amount_bytes / unit_bytes
    return int(units + units * _ROUNDING + _ROUNDING)


def check_timeline(timeline: Timeline) -> None:
    """Refuse invalid numbers.

    Raises:
        PlanError: a duration is negative, not a number, or beyond any training; a size is negative, fractional, or
            beyond any memory; or a first write lies outside of the timeline.
    """
    if not timeline.steps:
        raise PlanError("the timeline has no steps")
    for step in timeline.steps:
        if not (math.isfinite(step.duration_seconds) and step.duration_seconds >= 0):
            raise PlanError(f"step {step.label!r} lasts {step.duration_seconds} seconds")
        _check_bytes(f"step {step.label!r} has live memory", step.live_bytes)
        _check_bytes(f"step {step.label!r} has link traffic", step.link_bytes)
    if timeline.iteration_seconds > MOST_SECONDS:
        raise PlanError(
            f"an iteration lasts {timeline.iteration_seconds:g} seconds; at most {MOST_SECONDS:g} are planned"
        )
    for group in timeline.groups:
        if group.first_write is not None and not 1 <= group.first_write < len(timeline.steps):
            raise PlanError(f"state is first written at step {group.first_write} of {len(timeline.steps)}")
        for name, size in group.members:
            _check_bytes(f"state tensor {name} has a size", size)
    if timeline.training_peak_bytes + timeline.state_bytes >= MOST_BYTES:
        raise PlanError("training's peak and a copy of its state are more bytes than any memory has")


def _check_bytes(what: str, size_bytes: int) -> None:
    # A float would pass the range check, yet hold no odd number above 2**53.
    if not isinstance(size_bytes, int) or not 0 <= size_bytes < MOST_BYTES:
        raise PlanError(f"{what} of {size_bytes} bytes: not a whole number from 0 to 2**63 - 1")
