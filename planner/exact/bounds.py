"""What a peak demands of the direct policy: the least wait, the fewest snapshots, and how early they may leave.

docs/explanation/proofs.md ("the fewest snapshots") has the constraints and the proof; names follow it: V is ``made``, G
is ``gone``.
"""

from __future__ import annotations

import numpy as np

from checkflow.planner.exact.problem import Array, Problem

_MORE_SWEEPS = 2  # than stretches: one to begin, one to see that nothing changes


def least_wait(problem: Problem, peak_bytes: int) -> int:
    """Return the units that must leave while training waits at the boundary, in every schedule of this peak.

    ``peak_bytes`` must be at least training's own peak. With this wait and any number of snapshots the peak is reached.
    """
    room = _room(problem, peak_bytes)
    short = problem.counts.late[:-1] - np.minimum(room[:-1], room[1:])
    return max(0, problem.total - problem.reached[-1], int(short.max(initial=0)))


def fewest_snapshots(problem: Problem, peak_bytes: int, wait: int) -> int | None:
    """Return the fewest snapshots of any schedule with this peak and wait at the boundary; None if there is none."""
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
    """Return how many of at most ``snapshots`` may have left when each step ends, in any schedule with this peak.

    A schedule that sends them this early keeps peak and number. None: there is no schedule.
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
    """Return the units of snapshots that a peak leaves room for in each step."""
    return (peak_bytes - problem.counts.live_bytes) // problem.unit_bytes
