"""The least peak of either policy, by one pass over the timeline.

docs/explanation/proofs.md has the rules and why no schedule beats them. Time is linear in the number of steps, but for
one bisection under the snapshot policy.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from checkflow.core.plan import Policy
from checkflow.planner.exact.problem import Flow, Problem


def least_peak_bytes(problem: Problem, policy: Policy) -> int | None:
    """Return the peak that no schedule of a policy can beat; None if there is no schedule. Makes no schedule."""
    if policy == "snapshot":
        return _least_snapshot_peak(problem)
    if problem.reached[-1] < problem.total:
        return None
    peak, overdue = 0, 0
    for live, due, reached in zip(problem.live_bytes, problem.due, problem.reached, strict=True):
        late = max(0, due - reached)
        peak = max(peak, live + problem.unit_bytes * max(overdue, late))
        overdue = late
    return peak


def must_leave(problem: Problem, policy: Policy, peak_bytes: int) -> list[int]:
    """Return the units that must have left when each step ends, in every schedule of this peak; all by the last step.

    Direct policy: the units due by a step, less the snapshots that fit in it and in the next, since they leave one step
    later at the earliest. Snapshot policy: the units due by the next step, less the room in that.
    """
    unit = problem.unit_bytes
    room = [(peak_bytes - live) // unit for live in problem.live_bytes]
    if policy == "snapshot":
        needs = [due - following for due, following in zip(problem.due[1:], room[1:], strict=True)]
    else:
        needs = [due - min(pair) for due, pair in zip(problem.due, pairwise(room), strict=False)]
    return [*needs, problem.total]


def direct_flow(problem: Problem, allowed: Sequence[int] | None = None) -> Flow | None:
    """Schedule by the rule of the direct policy; None if the link is too small.

    ``allowed``: how many snapshots may have left when each step ends (None: all). With :func:`.bounds.most_gone`'s
    numbers the schedule keeps that peak and number of snapshots.
    """
    if problem.reached[-1] < problem.total:
        return None
    direct, made, drained = [0] * problem.steps, [0] * problem.steps, [0] * problem.steps
    moved = held = gone = 0  # units taken from live tensors; snapshots held; snapshots gone
    for step, (room, due) in enumerate(zip(problem.capacity, problem.due, strict=True)):
        urgent = min(room, max(0, due - moved))
        drain = min(held, room - urgent)
        if allowed is not None:
            drain = max(0, min(drain, allowed[step] - gone))
        direct[step] = urgent + min(room - urgent - drain, problem.total - moved - urgent)
        drained[step] = drain
        moved += direct[step]
        made[step] = max(0, due - moved)
        moved += made[step]
        held += made[step] - drain
        gone += drain
    return Flow(tuple(direct), tuple(made), tuple(drained))


def snapshot_flow(problem: Problem, peak_bytes: int) -> Flow | None:
    """Schedule by the rule of the snapshot policy; None if the peak or the link is too small."""
    left = _largest_departures(problem, peak_bytes)
    return None if left is None or left[-1] < problem.total else flow_leaving(problem, left)


def deadlines_hold(problem: Problem, peak_bytes: int) -> bool:
    """Whether some schedule of the snapshot policy meets all deadlines at a peak, given enough time afterwards."""
    return _largest_departures(problem, peak_bytes) is not None


def _largest_departures(problem: Problem, peak_bytes: int) -> list[int] | None:
    """Return W, the most units that can have left when each step ends; None if the peak breaks a deadline."""
    room = [(peak_bytes - live) // problem.unit_bytes for live in problem.live_bytes]
    if min(room) < 0:
        return None
    left = [0] * problem.steps  # W_t; nothing can leave in the first step
    before = 0
    for step in range(problem.steps):
        last = left[step - 1] if step else 0
        if problem.due[step] - last > room[step]:
            return None
        if step:
            most = min(last + min(problem.capacity[step], room[step]), before + room[step - 1], problem.total)
            left[step] = most
        before = last
    return left


def flow_leaving(problem: Problem, left: Sequence[int]) -> Flow:
    """Return the snapshot policy's schedule in which ``left`` units, in the end all, have left by each step.

    Everything is snapshotted as late as possible.
    """
    taken = [max(due, following) for due, following in zip(problem.due, [*left[1:], problem.total], strict=True)]
    drained = tuple(now - last for now, last in zip(left, [0, *left], strict=False))
    made = tuple(now - last for now, last in zip(taken, [0, *taken], strict=False))
    return Flow((0,) * problem.steps, made, drained)


def _least_snapshot_peak(problem: Problem) -> int | None:
    low = problem.training_peak_bytes
    high = low + problem.unit_bytes * problem.total
    if snapshot_flow(problem, low) is not None:
        return low  # true of most models, so tried first
    if snapshot_flow(problem, high) is None:
        return None
    low += 1
    while low < high:
        middle = (low + high) // 2
        if snapshot_flow(problem, middle) is None:
            low = middle + 1
        else:
            high = middle
    return low
