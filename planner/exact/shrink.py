"""Joins the steps of a timeline that cannot bind into blocks, without losing a schedule.

docs/explanation/proofs.md ("shrinking a timeline") has the cuts and why the least peak stays the same.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from checkflow.core.plan import Policy
from checkflow.core.timeline import Timeline, check_timeline, whole_units
from checkflow.planner.exact import greedy
from checkflow.planner.exact.problem import Flow, Problem, check_bandwidth, count_units, due_units, unit_for

_Block = tuple[int, int, int]  # last step, live bytes, units due


@dataclass(frozen=True)
class Shrunk:
    """The blocks of a horizon. Tuples have one entry per block."""

    timeline: Timeline
    policy: Policy
    interval: int  # iterations of the horizon
    unit_bytes: int
    total: int  # units of state
    ends: tuple[int, ...]  # the last step of each block, a step of the horizon
    live_bytes: tuple[int, ...]
    due: tuple[int, ...]

    def problem(self, bandwidth_bytes_per_second: float) -> Problem:
        """Return the blocks over a link of this bandwidth."""
        check_bandwidth(bandwidth_bytes_per_second)
        count = len(self.timeline.steps)
        available = self.timeline.available_bytes(bandwidth_bytes_per_second)
        reached = []
        for end in self.ends:
            iteration, step = divmod(end, count)
            reached.append(whole_units(iteration * available[-1] + available[step], self.unit_bytes))
        capacity = tuple(min(self.total, now - before) for before, now in pairwise((0, *reached)))
        return Problem(self.unit_bytes, self.total, self.live_bytes, capacity, self.due)

    def block_of(self, step: int) -> int:
        return bisect_left(self.ends, step)


def shrink(timeline: Timeline, unit_bytes: int | None = None, interval: int = 1, policy: Policy = "direct") -> Shrunk:
    """Return the blocks of ``interval`` iterations of a timeline; PlanError as :func:`.problem.make_problem`."""
    check_timeline(timeline)
    unit = unit_for(timeline.state_bytes) if unit_bytes is None else unit_bytes
    total = count_units(timeline, unit, interval)
    due = due_units(timeline, unit)
    live = [step.live_bytes for step in timeline.steps]
    harmless = max(live) - unit * total  # beside this much live memory, all state at once would fit
    blocks = (_direct_blocks if policy == "direct" else _snapshot_blocks)(live, due, harmless, interval)
    ends, lives, dues = (tuple(column) for column in zip(*blocks, strict=True))
    return Shrunk(timeline, policy, interval, unit, total, ends, lives, dues)


def _direct_blocks(live: Sequence[int], due: Sequence[int], harmless: int, interval: int) -> list[_Block]:
    blocks: list[_Block] = []
    open_block, record, before = False, harmless, 0
    for step in range(len(live) * min(interval, 2)):
        now, falls_due = live[step % len(live)], due[min(step, len(live) - 1)]
        if falls_due > before:
            blocks.append((step, now, falls_due))
            open_block, record, before = False, harmless, falls_due
        elif open_block and now <= record:
            blocks[-1] = (step, max(blocks[-1][1], now), before)
        else:
            blocks.append((step, now, before))
            open_block, record = True, max(harmless, now)
    if interval > 2:
        blocks[-1] = (interval * len(live) - 1, *blocks[-1][1:])
    return blocks


def _snapshot_blocks(live: Sequence[int], due: Sequence[int], harmless: int, interval: int) -> list[_Block]:
    blocks: list[_Block] = []
    open_block = before_harmless = False
    before = 0
    for step in range(len(live) * interval):
        now, falls_due = live[step % len(live)], due[min(step, len(live) - 1)]
        mergeable = now <= harmless and falls_due == before
        if mergeable and open_block:
            blocks[-1] = (step, max(blocks[-1][1], now), before)
        else:
            blocks.append((step, now, falls_due))
            open_block = mergeable and before_harmless
        before_harmless, before = now <= harmless, falls_due
    return blocks


def expand(shrunk: Shrunk, flow: Flow, problem: Problem) -> Flow:
    """Turn a schedule of blocks into one of steps: within each block as early as the link allows, snapshots first.

    ``problem`` has the steps that the blocks were made of, with the same wait.
    """
    if shrunk.policy == "snapshot":
        left, begin = [0] * problem.steps, 0
        gone = before = 0
        for end, leaves in zip(shrunk.ends, flow.drained, strict=True):
            gone += leaves
            for step in range(begin, end + 1):
                before = min(gone, before + problem.capacity[step])
                left[step] = before
            begin = end + 1
        return greedy.flow_leaving(problem, left)
    direct, made, drained = [0] * problem.steps, [0] * problem.steps, [0] * problem.steps
    begin = 0
    for block, end in enumerate(shrunk.ends):
        made[end] = flow.made[block]
        from_snapshots, from_live = flow.drained[block], flow.direct[block]
        for step in range(begin, end + 1):
            drained[step] = min(problem.capacity[step], from_snapshots)
            direct[step] = min(problem.capacity[step] - drained[step], from_live)
            from_snapshots -= drained[step]
            from_live -= direct[step]
        begin = end + 1
    return Flow(tuple(direct), tuple(made), tuple(drained))
