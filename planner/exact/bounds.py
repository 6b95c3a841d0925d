"""What a peak demands of the direct policy: the least wait, the fewest snapshots, and how early they may leave.

Let U_t units be due by the end of step t, and C_t what the link can have taken (with the wait at the boundary). At a
peak, step t has room for R_t units of snapshots. Of a schedule, let V_t units be snapshotted and G_t of them gone by
the end of step t; snapshots are made where something falls due, so V is constant from one deadline to the next. All
that a schedule must keep are bounds of one of these numbers by another and a constant:

    what leaves live state, A_t, and what leaves snapshots share the link: A_t <= C_t - G_t
    what is due has left or is snapshotted: V_t >= U_t - A_t             hence V_t     >= G_t + U_t - C_t
    there is room for what is held:                                            G_{t-1} >= V_t - R_t
    the link carries no more in a step than it can:                            G_{t-1} >= G_t - c_t
    a snapshot leaves after the step that made it:                             V_{t-1} >= G_t
    neither number falls; at the end G = V                                     (all snapshots leave)

Conversely the least V and G that keep them make a schedule: A fills what G leaves of the link, and V is never more than
what A leaves due. Such difference constraints have a least solution, which has the fewest snapshots, and for a given
number of snapshots a greatest one, in which they leave as early as possible. Both are found as longest paths are
(Bellman, 1958; Ford, 1956): by sweeps forward and backward until nothing moves. A further sweep is needed only where a
snapshot that must leave early costs another one later, which must leave early too. A longest path passes each stretch
between deadlines once: what still moves after as many sweeps goes round in a circle, and there is no schedule.
"""

from __future__ import annotations

import numpy as np

from checkflow.planner.exact.problem import Array, Problem

_MORE_SWEEPS = 2  # than stretches: one to begin, one to see that nothing moves


def least_wait(problem: Problem, peak_bytes: int) -> int:
    """Units that must leave while training waits at the boundary, in every schedule of this peak.

    At least training's own peak is needed. With as much waiting some schedule has the peak, if it may make any number
    of snapshots: no step of the direct rule (:mod:`.exact.greedy`) holds more than these bounds leave over.
    """
    room = _room(problem, peak_bytes)
    short = problem.counts.late[:-1] - np.minimum(room[:-1], room[1:])
    return max(0, problem.total - problem.reached[-1], int(short.max(initial=0)))


def fewest_snapshots(problem: Problem, peak_bytes: int, wait: int) -> int | None:
    """The fewest snapshots of any schedule with this peak and this wait at the boundary; None if there is none."""
    counts, room = problem.counts, _room(problem, peak_bytes)
    late, reached = counts.late - wait, counts.reached + wait
    if room.min() < 0 or least_wait(problem, peak_bytes) > wait:
        return None
    made, gone = np.zeros_like(late), np.zeros_like(late)
    for _ in range(len(counts.starts) + _MORE_SWEEPS):
        made = np.maximum(made, gone + late)
        made = np.maximum.accumulate(np.maximum.reduceat(made, counts.starts))[counts.stretch]
        if made[-1] > problem.total or made[0] > room[0] or (not counts.due[0] and made[0] > 0):
            return None
        must = np.maximum(gone, np.append(made[1:] - room[1:], made[-1]))
        must = np.maximum.accumulate((must - reached)[::-1])[::-1] + reached
        must = np.maximum.accumulate(np.maximum(must, 0))
        if must[0] > 0:
            return None
        if np.array_equal(must, gone):
            return int(made[-1])
        gone = must
        made[:-1] = np.maximum(made[:-1], gone[1:])
    return None


def most_gone(problem: Problem, peak_bytes: int, snapshots: int) -> list[int] | None:
    """How many of at most so many snapshots may have left when each step ends, in any schedule with this peak.

    A schedule that sends snapshots as early as that keeps the peak and the number. None: there is no schedule.
    """
    counts, room = problem.counts, _room(problem, peak_bytes)
    late, reached = counts.late, counts.reached
    if reached[-1] < problem.total or room.min() < 0:
        return None
    made, gone = np.full_like(late, snapshots), np.full_like(late, snapshots)
    gone[0] = 0
    for _ in range(len(counts.starts) + _MORE_SWEEPS):
        made[0] = min(made[0], room[0])
        made[1:] = np.minimum(made[1:], gone[:-1] + room[1:])
        made = np.minimum.reduceat(made, counts.starts)
        if not counts.due[0]:
            made[0] = 0
        made = np.minimum.accumulate(made[::-1])[::-1][counts.stretch]
        may = np.minimum(gone, made - late)
        may[1:] = np.minimum(may[1:], made[:-1])
        may = np.minimum.accumulate(may - reached) + reached
        may = np.minimum.accumulate(may[::-1])[::-1]
        if may[0] < 0:
            return None
        if np.array_equal(may, gone):
            return [int(number) for number in gone]
        gone = may
    return None


def _room(problem: Problem, peak_bytes: int) -> Array:
    """Units of snapshots that a peak leaves room for, in each step."""
    return (peak_bytes - problem.counts.live_bytes) // problem.unit_bytes
