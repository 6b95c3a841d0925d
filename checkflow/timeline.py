"""Timeline: what the planner's mathematics sees of one iteration. Pure data.

Steps are numbered from 0 in code; step ``i`` is the papers' ``t = i + 1``. At segment granularity the steps alternate
anchor (no duration), segment, anchor, …; at operator granularity there is one step an operator, and a zero-length
step before each operator that first writes state. Step 0 is always the boundary, so nothing is written in step 0.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal

from checkflow.graph import STRICT, AnchorKey

StepKind = Literal["anchor", "segment", "operator"]
Granularity = Literal["segment", "operator"]


@dataclass(frozen=True, slots=True)
class Step:
    """One slot of the timeline."""

    __pydantic_config__ = STRICT

    kind: StepKind
    label: str  # for people: the anchor's text, the operator's name, or "<first operator> … <last operator>"
    duration_seconds: float
    live_bytes: int  # device memory of training itself, checkpointing excluded; the largest within a segment
    link_bytes: int = 0  # bytes that training itself moves from device to host during this step
    anchor: AnchorKey | None = None  # set iff kind == "anchor" and eager training has a hook there


@dataclass(frozen=True, slots=True)
class StateGroup:
    """State tensors with one deadline: their bytes are interchangeable to the planner.

    ``first_write`` is the index of the first step that writes them (None: never written in an iteration). Snapshots
    are made at step ``first_write - 1``; direct copies may use the link up to and including that step.
    """

    __pydantic_config__ = STRICT

    first_write: int | None
    members: tuple[tuple[str, int], ...]  # (state tensor, size in bytes), sorted by name

    @property
    def size_bytes(self) -> int:
        return sum(size for _, size in self.members)


@dataclass(frozen=True)
class Timeline:
    """One iteration as steps, and the state to move within it. Groups are sorted by deadline, never-written last."""

    __pydantic_config__ = STRICT

    granularity: Granularity
    steps: tuple[Step, ...]
    groups: tuple[StateGroup, ...]

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

    def capacities_bytes(self, bandwidth_bytes_per_second: float, unit_bytes: int = 1) -> list[int]:
        """Whole bytes (or units of ``unit_bytes``) that each step's link can take, less training's own traffic.

        Rounded on the running sum, so that short steps do not lose their share. Traffic of training that
        does not fit its own step delays nothing else: what exceeds the step is dropped, never borrowed.
        """
        capacities, exact, given = [], 0.0, 0
        for step in self.steps:
            exact += max(0.0, step.duration_seconds * bandwidth_bytes_per_second - step.link_bytes) / unit_bytes
            whole = int(exact + 1e-9)
            capacities.append(whole - given)
            given = whole
        return capacities
