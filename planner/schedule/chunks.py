"""Turns units per step into chunks: which bytes of which tensor move when."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

from checkflow.core.errors import PlanError
from checkflow.core.plan import Chunk
from checkflow.core.timeline import Timeline
from checkflow.planner.exact.problem import Flow, Problem


@dataclass(frozen=True, slots=True)
class _Move:
    """Units begin … end-1 of the string leave in one step, from a snapshot of one step or from live tensors."""

    begin: int
    end: int
    offload_step: int
    snapshot_step: int | None


def make_chunks(timeline: Timeline, problem: Problem, flow: Flow, chunk_bytes: int) -> tuple[Chunk, ...]:
    """Cut the flow into chunks of at most ``chunk_bytes``, sorted by (offload step, deadline, tensor, offset).

    In each step the next units of the string first leave live tensors, then the next are snapshotted; snapshots leave
    in the order in which they were made. So the same flow always gives the same chunks, and they respect what the flow
    does: when a step starts, everything due before it has moved, so the next unit may be read live.

    Raises PlanError unless the flow moves every unit once, and out of a snapshot only after it was made.
    """
    moved, left = sum(flow.direct) + sum(flow.made), sum(flow.direct) + sum(flow.drained)
    if not moved == left == problem.total:
        raise PlanError(f"the schedule moves {moved} and takes away {left} of {problem.total} units")
    last = len(timeline.steps)
    ordered = sorted(
        (last if group.first_write is None else group.first_write, name, size)
        for group in timeline.groups
        for name, size in group.members
    )
    ends = list(accumulate(size for _, _, size in ordered))
    chunks: list[Chunk] = []
    padding = problem.total * problem.unit_bytes - timeline.state_bytes  # the empty part of the first unit
    for move in _moves(flow):
        position = max(0, move.begin * problem.unit_bytes - padding)
        stop = move.end * problem.unit_bytes - padding
        while position < stop:
            index = bisect_right(ends, position)  # skips tensors of no bytes
            _, name, size = ordered[index]
            length = min(stop, ends[index], position + chunk_bytes) - position
            offset = position - (ends[index] - size)
            chunks.append(Chunk(name, offset, length, move.offload_step, move.snapshot_step))
            position += length
    return tuple(chunks)


def _moves(flow: Flow) -> Iterator[_Move]:
    """Place the flow's units on the string, step by step and in the order of the string within each."""
    position = 0
    stock: deque[tuple[int, int, int]] = deque()  # begin, end and step of each snapshot that has not left
    for step, (direct, made, drained) in enumerate(zip(flow.direct, flow.made, flow.drained, strict=True)):
        wanted = drained
        while wanted:
            if not stock:
                raise PlanError(f"the schedule lets a snapshot leave before it is made, at step {step}")
            begin, end, snapshot_step = stock.popleft()
            cut = min(end, begin + wanted)
            yield _Move(begin, cut, step, snapshot_step)
            wanted -= cut - begin
            if cut < end:
                stock.appendleft((cut, end, snapshot_step))
        if direct:
            yield _Move(position, position + direct, step, None)
            position += direct
        if made:
            stock.append((position, position + made, step))
            position += made
