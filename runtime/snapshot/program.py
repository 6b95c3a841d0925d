"""Compiles a plan into the work of each anchor. docs/explanation/boundaries.md, "What an anchor does", has the
order.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from checkflow.core.errors import PlanError
from checkflow.core.graph import AnchorKey, AnchorKind
from checkflow.core.plan import Plan

#: What the link takes within this time is released at once. On a GPU, an anchor that releases takes up to 90 us of the
#: host. Ten milliseconds are short beside an iteration whose state takes the link longer.
RELEASE_SECONDS = 10e-3


@dataclass(frozen=True, slots=True)
class AnchorWork:
    """Chunks to handle when one anchor fires in one iteration of a capture, as indices into ``Plan.chunks``."""

    iteration: int  # from 0, since the capture's boundary
    key: AnchorKey
    snapshot: tuple[int, ...]
    release: tuple[int, ...]
    due: tuple[int, ...]
    free: tuple[int, ...]
    touched: tuple[int, ...] = field(init=False)  # all but ``free``, each once

    def __post_init__(self) -> None:
        object.__setattr__(self, "touched", tuple(dict.fromkeys((*self.snapshot, *self.release, *self.due))))

    @property
    def label(self) -> str:
        return f"{self.key} of iteration {self.iteration + 1}" if self.iteration else str(self.key)


@dataclass(frozen=True)
class Program:
    """The work of every anchor that has any, in plan order, and what remains after the last one."""

    works: tuple[AnchorWork, ...]
    # (iteration, anchor) to index into ``works``; every deadline has a work, maybe empty
    position: Mapping[tuple[int, AnchorKey], int]
    # Chunks that no operator up to an optimizer's step writes: due when any optimizer has stepped, since the loop
    # (EMA, clamps) may write them then. Settled tensors are excepted.
    after_step: tuple[int, ...]

    def end_of(self, iteration: int) -> int:
        """How many of ``works`` lie in this iteration of a capture or an earlier one."""
        return bisect.bisect_right(self.works, iteration, key=lambda work: work.iteration)


def compile_plan(
    plan: Plan,
    silent: Collection[tuple[AnchorKind, str]] = (),
    *,
    blind: bool = False,
    undated_at_boundary: bool = False,
) -> Program:
    """Turn the steps of a plan into the work of anchors; PlanError for a plan of operator granularity.

    Args:
        silent: anchors that do not fire; their work moves to the last firing one before them that has work (a hook).
        blind: no anchor shows when optimizers step: everything is due at the boundary.
        undated_at_boundary: tensors that no operator writes are due at the boundary, too.
    """
    if plan.granularity != "segment":
        raise PlanError(f"a plan of {plan.granularity} granularity cannot be executed: plan with --granularity segment")
    steps = len(plan.timeline.steps)
    planned = {index: step.anchor for index, step in enumerate(plan.timeline.steps) if step.anchor is not None}
    hooked = {key for _, key in compile_plan(plan).position} if silent else set(planned.values())
    anchors = {
        index: key
        for index, key in planned.items()
        if not index or not (blind or (key.kind, key.name) in silent or key not in hooked)
    }
    # A gradient may not come: what is due at it moves to an earlier anchor of another kind.
    sure = _last_at_or_before({i: key for i, key in anchors.items() if key.kind is not AnchorKind.GRADIENT}, steps)
    before = _last_at_or_before(anchors, steps)
    after = _first_at_or_after(anchors, steps)
    tables: dict[int, dict[str, list[int]]] = {}

    def note(step: int, what: str, chunk: int) -> None:
        tables.setdefault(step, _empty_table())[what].append(chunk)

    def in_time(due: int) -> int:
        return due if due in anchors else sure[due]

    for due in plan.deadlines.values():
        if due is not None:
            if due not in planned:
                raise PlanError(f"a deadline (step {due}) is no anchor of eager training")
            # Work of earlier anchors that did not fire is done here.
            tables.setdefault(in_time(due), _empty_table())
    after_step: list[int] = []
    places = _release_places(plan, before)
    for index, chunk in enumerate(plan.chunks):
        iteration, step = divmod(chunk.offload_step, steps)
        released = places[index]
        deadline = plan.deadlines[chunk.tensor]
        if deadline is None or planned[deadline].kind is AnchorKind.OPTIMIZER_POST:
            after_step.append(index)
        if chunk.snapshot_step is None:
            if blind or undated_at_boundary or deadline is not None:
                due = 0 if blind or deadline is None else in_time(deadline)
                note(due, "due", index)
                released = min(released, due)
        else:
            made_in, made_at = divmod(chunk.snapshot_step, steps)
            if made_at not in planned:
                raise PlanError(f"the snapshot of {chunk.tensor} (step {chunk.snapshot_step}) is made at no anchor")
            made = 0 if blind else made_in * steps + in_time(made_at)
            note(made, "snapshot", index)
            released = max(released, made)
            if (gone := iteration * steps + after[step]) < plan.horizon_steps:
                note(gone, "free", index)
        note(released, "release", index)
    for table in tables.values():  # snapshots after live tensors: nothing waits for them
        table["release"].sort(key=lambda index: (plan.chunks[index].offload_step, _is_snapshot(plan, index)))
    works = tuple(
        AnchorWork(
            step // steps,
            anchors[step % steps],
            *(tuple(table[what]) for what in ("snapshot", "release", "due", "free")),
        )
        for step, table in sorted(tables.items())
    )
    position = {(work.iteration, work.key): index for index, work in enumerate(works)}
    return Program(works, position, tuple(after_step))


def _release_places(plan: Plan, before: Sequence[int]) -> list[int]:
    """Where each chunk is released: at the last anchor before its planned step, or together with chunks before it.

    A snapshot would be held up by what is released early, so that a plan with snapshots releases each chunk in its own
    segment.
    """
    steps = len(before)
    places = [chunk.offload_step // steps * steps + before[chunk.offload_step % steps] for chunk in plan.chunks]
    if any(chunk.snapshot_step is not None for chunk in plan.chunks):
        return places
    most_bytes = plan.bandwidth_bytes_per_second * RELEASE_SECONDS
    place, gathered_bytes = 0, math.inf
    for index in sorted(range(len(places)), key=lambda index: plan.chunks[index].offload_step):
        length_bytes = plan.chunks[index].length_bytes
        if gathered_bytes + length_bytes > most_bytes:
            place, gathered_bytes = places[index], 0
        gathered_bytes += length_bytes
        places[index] = place
    return places


def _is_snapshot(plan: Plan, chunk: int) -> bool:
    return plan.chunks[chunk].snapshot_step is not None


def _empty_table() -> dict[str, list[int]]:
    return {"snapshot": [], "release": [], "due": [], "free": []}


def _last_at_or_before(anchors: Mapping[int, AnchorKey], steps: int) -> list[int]:
    """For each step the latest anchor step that is not after it (step 0 is the boundary)."""
    found, result = 0, []
    for step in range(steps):
        found = step if step in anchors else found
        result.append(found)
    return result


def _first_at_or_after(anchors: Mapping[int, AnchorKey], steps: int) -> list[int]:
    """For each step the earliest anchor step that is not before it; ``steps``, the next boundary, after the last."""
    found, result = steps, []
    for step in reversed(range(steps)):
        found = step if step in anchors else found
        result.append(found)
    return result[::-1]
