"""What must have happened by which anchor: a plan, compiled for execution.

An anchor's work, in the order in which it is done:

1. *snapshot*: copy chunks inside device memory; their live tensors may be written from here on;
2. *release*: hand chunks to the copy engine (straight from the live tensor, or from a snapshot made here or earlier);
3. *due*: wait until the chunks that leave straight from live tensors with this deadline have left;
4. *free*: give back the memory of snapshots that the plan says are gone by now.

Anchors have a total order, the plan's. When an anchor fires, the work of every earlier one that has not been done is
done first: an event may come early or late against the clock, never after the write that it guards.

A plan whose interval is more than one iteration has work at the anchors of all of them. Deadlines lie in the first one
alone; when it ends, whatever is written in an iteration has left or lies in a snapshot. The later ones release
snapshots, release and snapshot what is never written, and free.

A plan's *wait* is no work of its own: it foretells for how long training will be held at that anchor or at the next
deadline, and the link makes it so. What leaves during the wait is released at its anchor; what is due there is waited
for, and no longer than it takes: it goes ahead of whatever else leaves in that step. Snapshots that leave during the
wait are freed at the same anchor, after it.
"""

from __future__ import annotations

import bisect
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from checkflow.core.errors import PlanError
from checkflow.core.graph import AnchorKey, AnchorKind
from checkflow.core.plan import Plan


@dataclass(frozen=True, slots=True)
class AnchorWork:
    """Indices into ``Plan.chunks`` to be treated when one anchor fires in one iteration of a capture."""

    iteration: int  # since the capture's boundary, from 0
    key: AnchorKey
    snapshot: tuple[int, ...]
    release: tuple[int, ...]
    due: tuple[int, ...]
    free: tuple[int, ...]
    touched: tuple[int, ...] = field(init=False)  # all but what is freed, each once

    def __post_init__(self) -> None:
        object.__setattr__(self, "touched", tuple(dict.fromkeys((*self.snapshot, *self.release, *self.due))))

    @property
    def label(self) -> str:
        return f"{self.key} of iteration {self.iteration + 1}" if self.iteration else str(self.key)


@dataclass(frozen=True)
class Program:
    """The work of every anchor that has any, in plan order, and what remains after the last one."""

    works: tuple[AnchorWork, ...]
    # (iteration, anchor) to index into ``works``; every deadline has a work, be it empty
    position: Mapping[tuple[int, AnchorKey], int]
    # Chunks that no operator up to an optimizer's step was seen to write: due when any optimizer has stepped, since
    # what the loop does then (EMA, clamps) may write them, whichever optimizer it was. Excepted: settled tensors.
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
    """Turn the steps of a plan into the work of anchors.

    Args:
        silent: anchors that do not fire; their work is done at the last one before them that does, and that has work
            of its own: no other has a hook.
        blind: no anchor tells when the optimizers step: everything is due at the boundary.
        undated_at_boundary: so is what no operator was seen to write.

    Raises:
        PlanError: the plan was made at operator granularity, which eager training cannot act on.
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
    # A gradient may fail to come: what is due at an anchor that does not fire goes to one before it of another kind.
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
            # Work that was planned earlier, at an anchor that did not fire, is caught up with here.
            tables.setdefault(in_time(due), _empty_table())
    after_step: list[int] = []
    for index, chunk in enumerate(plan.chunks):
        iteration, step = divmod(chunk.offload_step, steps)
        released = iteration * steps + before[step]
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
    for table in tables.values():  # nothing waits for a snapshot: it goes after the live tensors of its step
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


def _is_snapshot(plan: Plan, chunk: int) -> bool:
    return plan.chunks[chunk].snapshot_step is not None


def _empty_table() -> dict[str, list[int]]:
    return {"snapshot": [], "release": [], "due": [], "free": []}


def _last_at_or_before(anchors: Mapping[int, AnchorKey], steps: int) -> list[int]:
    """For each step the latest anchor step that is not after it (step 0 is the boundary, an anchor)."""
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
