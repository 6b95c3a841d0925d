"""What of a timeline can bind: long runs of steps become one step each, and nothing is lost.

**Direct policy.** Cut the horizon into blocks: each step at which state falls due is a block of its own; every other
run of steps is cut right before each step whose live memory exceeds that of all steps of the run before it. A block's
capacity is the sum of its steps', its live memory the largest of them.

*The least peak stays the same, with and without limits on snapshots and waiting.* No snapshot is made inside a run, so
what is held only falls along it: held_t = V - Y_{t-1} for V snapshots made before the run. By the cuts, a block's first
step has the largest live memory of the block, and it is also the step that holds the most. So a block's peak is that of
its first step, which is what the shrunk problem counts: V - Y after the previous block. Deadlines are met at the ends
of blocks by both; the link's limit on a block is the sum of the limits on its steps, and any amount within it can be
spread over them. Hence every schedule of the steps gives one of the blocks with the same peak, snapshots and wait, by
adding up, and every one of the blocks gives one of the steps (:func:`expand`).

Two more cuts fall away. Live memory that stays under the peak even with all state in snapshots beside it is harmless:
it never binds. After the first iteration nothing falls due, so from the step of the peak in the second one on, nothing
binds any more: the last block takes in all further iterations, and a horizon of a thousand iterations costs no more
than one of two.

**Snapshot policy.** What leaves in a step was copied one step before at the latest, so snapshots are made everywhere,
and only runs of harmless steps without deadlines that follow a harmless step become blocks. What leaves within such a
block counts as copied at the step before it: earlier than it must be, but only where nothing binds, so no other step
holds more or less than before. Back again, what leaves is spread over the steps, each part copied one step earlier.
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
    """The blocks of a horizon. Tuples have one entry a block."""

    timeline: Timeline
    policy: Policy
    interval: int  # iterations of the horizon
    unit_bytes: int
    total: int  # units of state
    ends: tuple[int, ...]  # the last step of each block, a step of the horizon
    live_bytes: tuple[int, ...]
    due: tuple[int, ...]

    def problem(self, bandwidth_bytes_per_second: float) -> Problem:
        """The blocks over a link of this bandwidth.

        Raises:
            PlanError: it is no bandwidth.
        """
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
        """The block that a step of the horizon lies in."""
        return bisect_left(self.ends, step)


def shrink(timeline: Timeline, unit_bytes: int | None = None, interval: int = 1, policy: Policy = "direct") -> Shrunk:
    """The blocks of ``interval`` iterations of a timeline.

    Raises:
        PlanError: as :func:`checkflow.planner.exact.problem.make_problem`.
    """
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
    """A schedule of blocks as one of steps: within each block as early as the link allows, snapshots first.

    Args:
        problem: the steps that the blocks were made of, with the same wait.
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
