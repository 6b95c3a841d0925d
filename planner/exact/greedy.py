"""The exact rules: the least peak of either policy by one pass over the timeline, and bounds that nothing can beat.

**Direct policy.** In every step the link takes, in this order, what is due when the step ends; snapshots; other bytes
in the order of their deadlines. At each deadline whatever is missing is snapshotted.

*Feasible* iff the link's total capacity is the state's size: in every step each byte that has not left can leave, from
its live tensor or, once its deadline has passed, from its snapshot; so the link idles only when all has left.

*Least peak.* Let C_t be the link's capacity up to and including step t, and U_t the units due by the end of step t. The
snapshots held during step t are those units due by then that are not gone: at least U_{t-1} - C_{t-1}, since what was
due before t can only have left before t to be out of memory, and at least U_t - C_t, since what falls due in t itself
can also leave directly within t. The rule attains the larger of the two in every step at once, whatever the memory:
by moving earliest deadlines first without idling it has moved min(U_k, C_t) of the first U_k units after step t, for
every k > t (within step t, units due at its end go before snapshots: both belong to every prefix k > t, so the swap
costs nothing later, and saves a snapshot now). Hence no schedule has a lower peak on any memory profile.

*Fewer snapshots.* The rule does not make the fewest: a snapshot that leaves early takes the link from a unit that then
needs a snapshot too. Where that matters (each is paid for with a stall), :mod:`.exact.bounds` says how many
snapshots a peak demands and how early they may leave for that; the rule then sends none earlier.

**Snapshot policy.** Let V_t units be snapshotted and W_t have left after step t. For a peak P with room R_t = P - M_t:
W_t - W_{t-1} <= c_t, W_t <= V_{t-1}, V_t >= U_t, V_t - W_{t-1} <= R_t. Snapshots made as late as possible need least:
V_t = max(U_t, W_{t+1}). What remains bounds W from above by its own past (c_t; W_{t+1} <= W_{t-1} + R_t) and from below
by constants (W_{t-1} >= U_t - R_t), so sending all that is allowed, step by step, gives the largest W everywhere, and P
is feasible iff that W passes. Room grows with P: bisection finds the least P. Among the schedules of that peak this one
finishes first; every byte is snapshotted, so the stall is the same in all of them.

All of it is counted in whole units; one bisection aside, time grows linearly with the number of steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from checkflow.core.plan import Policy
from checkflow.planner.exact.problem import Flow, Problem


def best_flow(problem: Problem, policy: Policy) -> Flow | None:
    """A schedule of the least peak under a policy, with any number of snapshots; None where there is none."""
    if policy == "direct":
        return direct_flow(problem)
    peak = _least_snapshot_peak(problem)
    return None if peak is None else snapshot_flow(problem, peak)


def least_peak_bytes(problem: Problem, policy: Policy) -> int | None:
    """The peak that no schedule of a policy can beat, or None where there is none. Computed without a schedule."""
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
    """Units that must have left when each step ends, in every schedule of this peak.

    Direct policy: what is due by a step, less the snapshots that may be held in it and, since they leave one step later
    at the earliest, in the next. Snapshot policy: what is due by the next step, less the room in that. By the last step
    everything.
    """
    unit = problem.unit_bytes
    room = [(peak_bytes - live) // unit for live in problem.live_bytes]
    if policy == "snapshot":
        needs = [due - following for due, following in zip(problem.due[1:], room[1:], strict=True)]
    else:
        needs = [due - min(pair) for due, pair in zip(problem.due, pairwise(room), strict=False)]
    return [*needs, problem.total]


def direct_flow(problem: Problem, allowed: Sequence[int] | None = None) -> Flow | None:
    """The rule of the direct policy; None if the link is too small.

    Args:
        allowed: how many snapshots may have left when each step ends (None: all). Given as
            :func:`.bounds.most_gone` says, the schedule keeps that peak and number of snapshots. Take
            a step t, and the last deadline s before it that was not met without a snapshot, or just met by direct
            copies: V_t = U_s - A_s. If ``allowed`` held snapshots back at some step from s to t - 1, then since the
            last such step the link was all theirs; ``allowed`` grows no faster than the link, so that all of it has
            left by t - 1, which leaves no more than there is room for. If all that was made had left by some such
            step, nothing is held since. Else the link carried snapshots alone from s on, and what is held is
            U_s - C_{t-1} at the most, for which every peak that can be reached has room.
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
    """The rule of the snapshot policy at a given peak; None where that peak is too small or the link does not do."""
    left = _largest_departures(problem, peak_bytes)
    return None if left is None or left[-1] < problem.total else flow_leaving(problem, left)


def deadlines_hold(problem: Problem, peak_bytes: int) -> bool:
    """Whether some schedule of the snapshot policy meets all deadlines at a peak, if the link had time afterwards."""
    return _largest_departures(problem, peak_bytes) is not None


def _largest_departures(problem: Problem, peak_bytes: int) -> list[int] | None:
    """W: units that have left when each step ends, as many as can; None where a deadline cannot be met at the peak."""
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
    """The schedule of the snapshot policy in which so many units have left by each step, snapshotted as late as can be.

    Args:
        left: in the end all of them.
    """
    taken = [max(due, following) for due, following in zip(problem.due, [*left[1:], problem.total], strict=True)]
    drained = tuple(now - last for now, last in zip(left, [0, *left], strict=False))
    made = tuple(now - last for now, last in zip(taken, [0, *taken], strict=False))
    return Flow((0,) * problem.steps, made, drained)


def _least_snapshot_peak(problem: Problem) -> int | None:
    low = problem.training_peak_bytes
    high = low + problem.unit_bytes * problem.total
    if snapshot_flow(problem, low) is not None:
        return low  # as in most models: tried first
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
