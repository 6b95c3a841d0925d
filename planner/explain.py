"""Why a plan does not fit, and what would make it fit: never a bare "infeasible"."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import accumulate

from checkflow.hardware import format_seconds, format_size
from checkflow.plan import Policy
from checkflow.planner import greedy
from checkflow.planner.problem import Problem, make_problem
from checkflow.timeline import Timeline

_FASTEST_BYTES_PER_SECOND = 1e24  # no clock resolves the steps that would need more
_LAST = "the next boundary"


@dataclass(frozen=True)
class Limits:
    """What a schedule must keep, besides the link."""

    policy: Policy
    peak_bytes: int | None = None  # of device memory
    most_snapshots: int | None = None  # units, where the stall is limited


@dataclass(frozen=True)
class Interval:
    """From the boundary to ``end`` at least ``leave_bytes`` must cross the link."""

    end: str
    leave_bytes: int
    seconds: float
    own_bytes: int  # what training itself moves over the link in that time

    @property
    def bytes_per_second(self) -> float:
        return (self.leave_bytes + self.own_bytes) / self.seconds if self.seconds else math.inf


def fits(problem: Problem, limits: Limits) -> bool:
    """Whether any schedule keeps the limits; by the exact rules of :mod:`checkflow.planner.greedy`."""
    most = problem.total if limits.most_snapshots is None else limits.most_snapshots
    highest = problem.training_peak_bytes + problem.unit_bytes * problem.total
    limit = highest if limits.peak_bytes is None else min(highest, limits.peak_bytes)
    if limits.policy == "snapshot":
        return most >= problem.total and greedy.snapshot_flow(problem, limit) is not None
    if most >= problem.total:  # no schedule needed
        peak = greedy.least_peak_bytes(problem, "direct")
    else:
        flow = greedy.direct_flow(problem, most)
        peak = None if flow is None else flow.peak_bytes(problem)
    return peak is not None and peak <= limit


def least_bandwidth(timeline: Timeline, limits: Limits, unit_bytes: int) -> int | None:
    """The least whole number of bytes per second at which a schedule keeps the limits; None if none does.

    Found by bisection: a schedule exists at the answer and none at one byte per second less.
    """
    if not timeline.state_bytes or not timeline.iteration_seconds:
        return 0 if fits(make_problem(timeline, 1.0, unit_bytes), limits) else None
    low, high = 0, _fastest(timeline, unit_bytes)
    if not fits(make_problem(timeline, high, unit_bytes), limits):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        if fits(make_problem(timeline, middle, unit_bytes), limits):
            high = middle
        else:
            low = middle
    return high


def _fastest(timeline: Timeline, unit_bytes: int) -> int:
    """Bytes per second at which every step of any length carries everything: a faster link changes nothing."""
    shortest = min((step.duration_seconds for step in timeline.steps if step.duration_seconds > 0), default=math.inf)
    most = timeline.state_bytes + unit_bytes + max(step.link_bytes for step in timeline.steps)
    return max(1, math.ceil(min(2 * most / shortest, _FASTEST_BYTES_PER_SECOND)))


def tight_interval(timeline: Timeline, problem: Problem, limits: Limits) -> Interval | None:
    """Of the intervals in which the link cannot carry what must leave, the one that needs the fastest link.

    None where there is none: then it is the memory that makes the link idle (snapshot policy), or several limits
    together.
    """
    elapsed = list(accumulate(step.duration_seconds for step in timeline.steps))
    own = list(accumulate(step.link_bytes for step in timeline.steps))
    tight: Interval | None = None
    for step, need in enumerate(_must_leave(problem, limits)):
        if need <= problem.reached[step]:
            continue
        leave = min(need * problem.unit_bytes, timeline.state_bytes)
        interval = Interval(_moment(timeline, step), leave, elapsed[step], own[step])
        if tight is None or interval.bytes_per_second > tight.bytes_per_second:
            tight = interval
    return tight


def explain(timeline: Timeline, bandwidth_bytes_per_second: float, problem: Problem, limits: Limits) -> str:
    """One line: what makes it impossible, and what would make it possible."""
    if limits.peak_bytes is not None and limits.peak_bytes < problem.training_peak_bytes:
        return (
            f"training alone needs {_exactly(problem.training_peak_bytes, limits.peak_bytes)} of device memory;"
            f" the limit is {_exactly(limits.peak_bytes, problem.training_peak_bytes)}"
        )
    least = least_bandwidth(timeline, limits, problem.unit_bytes)
    if least is None:  # then the link is not the reason: look at it as if it were fast
        problem = make_problem(timeline, _fastest(timeline, problem.unit_bytes), problem.unit_bytes)
    reason = _reason(timeline, bandwidth_bytes_per_second, problem, limits)
    more = _more_memory(problem, limits)
    if least is None:
        rescue = f"no link is fast enough{f': it takes at least {more} more device memory' if more else ''}"
    else:
        rescue = f"it fits from {_rate(_up(least))} on{f', or in {more} more device memory' if more else ''}"
    return f"{reason}; {rescue}"


def _reason(timeline: Timeline, bandwidth: float, problem: Problem, limits: Limits) -> str:
    tight = tight_interval(timeline, problem, limits)
    for alone in (replace(limits, most_snapshots=None), replace(limits, peak_bytes=None)):
        if tight is not None and tight_interval(timeline, problem, alone) == tight:
            limits = alone  # the other limit does not matter here: leave it unsaid
    if tight is not None and tight.seconds > 0:
        needed, given = _rate(tight.bytes_per_second), _rate(bandwidth)
        if needed == given:
            needed, given = f"{math.ceil(tight.bytes_per_second)} B/s", f"{bandwidth:.0f} B/s"
        uses = f", of which training itself uses {format_size(tight.own_bytes)}" if tight.own_bytes else ""
        held = "" if tight.end == _LAST else f", and {_scarce(limits)} no room for more snapshots"
        return (
            f"from the boundary to {tight.end} {format_size(tight.leave_bytes)} must leave in"
            f" {format_seconds(tight.seconds)}: {needed}; the link gives {given}{uses}{held}"
        )
    if tight is not None and not timeline.iteration_seconds:
        return f"{format_size(timeline.state_bytes)} must leave in an iteration that takes no time"
    if tight is not None:
        return (
            f"{format_size(tight.leave_bytes)} would have to leave before {tight.end}, in no time:"
            f" {_scarce(limits)} too little room for snapshots"
        )
    if limits.policy == "snapshot" and limits.most_snapshots is not None and limits.most_snapshots < problem.total:
        return (
            f"the snapshot policy copies all {format_size(timeline.state_bytes)} inside device memory,"
            " which stalls training for longer than the overhead allows"
        )
    return f"{_scarce(limits)} too little room for snapshots to keep the link busy"


def _more_memory(problem: Problem, limits: Limits) -> str:
    """What the memory limit is short of, for the link as it is; "" if memory alone cannot help."""
    best = greedy.best_flow(problem, limits.policy, limits.most_snapshots)
    if limits.peak_bytes is None or best is None or best.peak_bytes(problem) <= limits.peak_bytes:
        return ""
    more = best.peak_bytes(problem) - limits.peak_bytes
    return f"{format_size(more)} ({more} bytes)" if more >= 1000 else format_size(more)


def _must_leave(problem: Problem, limits: Limits) -> list[int]:
    """Units that must have left when each step ends, whatever the schedule.

    Direct policy: what is due by a step, less the snapshots that may be held in it and, since they leave one step
    later at the earliest, in the next. Snapshot policy: what is due by the next step, less the room in that.
    """
    most = problem.total if limits.most_snapshots is None else limits.most_snapshots
    room = [most] * problem.steps
    if limits.peak_bytes is not None:
        room = [min(most, (limits.peak_bytes - live) // problem.unit_bytes) for live in problem.live_bytes]
    last = problem.steps - 1
    if limits.policy == "snapshot":
        needs = [problem.due[step + 1] - room[step + 1] for step in range(last)]
    else:
        needs = [problem.due[step] - min(room[step], room[step + 1]) for step in range(last)]
    return [*needs, problem.total]


def _moment(timeline: Timeline, step: int) -> str:
    """The end of a step, in words."""
    steps = timeline.steps
    if step == len(steps) - 1:
        return _LAST
    if step == 0:
        return "the end of the boundary"
    if steps[step].duration_seconds == 0:
        return steps[step].label
    if steps[step + 1].duration_seconds == 0:
        return steps[step + 1].label
    return f"the end of {steps[step].label}"


def _scarce(limits: Limits) -> str:
    names = []
    if limits.peak_bytes is not None:
        names.append(f"the memory limit of {format_size(limits.peak_bytes)}")
    if limits.most_snapshots is not None:
        names.append("the overhead allowed")
    return f"{' and '.join(names) or 'device memory'} {'leave' if len(names) > 1 else 'leaves'}"


def _rate(bytes_per_second: float) -> str:
    return f"{format_size(bytes_per_second)}/s"


def _up(bytes_per_second: int) -> float:
    """Rounded up to the three digits that people are shown, so that what they read is enough."""
    step: int = 10 ** max(0, len(str(bytes_per_second)) - 3)
    return float(-(-bytes_per_second // step) * step)


def _exactly(size_bytes: int, other_bytes: int) -> str:
    """A size for people, in bytes where rounding would hide the difference."""
    text = format_size(size_bytes)
    return text if text != format_size(other_bytes) else f"{size_bytes} bytes"
