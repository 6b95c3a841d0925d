"""How often a checkpoint is possible and what it costs, for a timeline on a device within limits.

A checkpoint every k iterations spreads over k of them. State is due in the first; the others add time on the link and
raise the stall budget, which is a share of all k. So what fits k fits k + 1, and bisection finds the smallest k.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise

from checkflow.core.plan import MOST_STEPS, Policy
from checkflow.core.timeline import MOST_SECONDS, Timeline
from checkflow.planner.exact import greedy, optimum
from checkflow.planner.exact.optimum import Budget, Prices, Terms
from checkflow.planner.exact.problem import Problem, make_problem
from checkflow.planner.exact.shrink import Shrunk, shrink

_MOST_SNAPSHOT_STEPS = 2**20  # of a horizon under the snapshot policy, which is searched step by step
MOST_INTERVAL = 1000  # iterations, by default
_FRONTIER_INTERVALS = 6
_FRONTIER_SNAPSHOT_STEPS = 50_000  # beyond these, horizons of the snapshot policy are left out of the frontier
_FRONTIER_HALVINGS = 2  # between the ends of one interval's frontier: up to 2**n - 1 rows
_BENT = 1e-3  # of the stall: a row closer than this to the line between its neighbours adds nothing


@dataclass(frozen=True)
class FrontierRow:
    """A trade-off, limits aside: a checkpoint every ``interval`` iterations. No shorter one has less of both prices."""

    interval: int
    stall_seconds: float
    extra_bytes: int


@dataclass(frozen=True)
class Question:
    """A timeline on a device, and the limits that a checkpoint must keep."""

    timeline: Timeline
    unit_bytes: int
    policy: Policy
    bandwidth_bytes_per_second: float
    memory_bandwidth_bytes_per_second: float
    overhead: float | None  # share of training's time; None: any snapshots, no waiting for the link
    peak_limit_bytes: int | None = None
    # By interval, of this timeline, policy and unit; made on first use and shared with copies of this object.
    blocks: dict[int, Shrunk] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def prices(self) -> Prices:
        prices = optimum.make_prices(
            self.unit_bytes, self.bandwidth_bytes_per_second, self.memory_bandwidth_bytes_per_second
        )
        queued = self.timeline.queued_bytes(self.bandwidth_bytes_per_second)[0] if self.timeline.steps else 0.0
        return replace(prices, queue_seconds=queued / self.bandwidth_bytes_per_second)

    @property
    def may_wait(self) -> bool:
        """Whether training may wait for the link: not where its own traffic always fills it."""
        return self.overhead is not None and self.policy == "direct" and math.isfinite(self.prices.queue_seconds)

    def budget(self, interval: int) -> Budget:
        if self.overhead is None:
            return Budget(math.inf, may_wait=False)
        seconds = min(self.overhead * interval * self.timeline.iteration_seconds, MOST_SECONDS)
        return Budget(seconds, may_wait=self.may_wait)

    def shrunk(self, interval: int) -> Shrunk:
        if interval not in self.blocks:
            self.blocks[interval] = shrink(self.timeline, self.unit_bytes, interval, self.policy)
        return self.blocks[interval]

    def problem(self, interval: int) -> Problem:
        """Return what is searched for one interval: its blocks."""
        return self.shrunk(interval).problem(self.bandwidth_bytes_per_second)

    def every_step(self, interval: int) -> Problem:
        """Return what is scheduled for one interval: all of its steps."""
        return make_problem(self.timeline, self.bandwidth_bytes_per_second, self.unit_bytes, interval)

    def peak_limit(self, problem: Problem) -> int:
        """Return the limit or, without one, a peak that holds all state at once."""
        enough = problem.training_peak_bytes + problem.unit_bytes * problem.total
        return enough if self.peak_limit_bytes is None else min(enough, self.peak_limit_bytes)

    def fits(self, interval: int) -> bool:
        problem = self.problem(interval)
        return optimum.fits(problem, self.policy, self.peak_limit(problem), self.prices, self.budget(interval))

    def deadlines_hold(self) -> bool:
        """Whether the first iteration's deadlines can be met under the snapshot policy, within the limit."""
        problem = self.problem(1)
        return greedy.deadlines_hold(problem, self.peak_limit(problem))

    def least_peak_bytes(self, interval: int) -> int | None:
        """Return the least peak of this interval within the budget, whatever the memory limit; None if none is."""
        return optimum.least_peak_bytes(self.problem(interval), self.policy, self.prices, self.budget(interval))

    def least_stall(self, interval: int, peak_bytes: int) -> Terms | None:
        """Return the terms of the shortest stall of this interval at a peak, whatever the budget."""
        problem = self.problem(interval)
        return optimum.least_stall(problem, self.policy, peak_bytes, self.prices, may_wait=self.may_wait)


def longest_interval(timeline: Timeline, policy: Policy, most: int | None) -> int:
    """Return the longest interval to search: ``most``, as far as a horizon can be walked through."""
    steps = MOST_STEPS if policy == "direct" else _MOST_SNAPSHOT_STEPS
    return max(1, min(MOST_INTERVAL if most is None else most, steps // max(1, len(timeline.steps))))


def smallest_interval(question: Question, most: int) -> int | None:
    """Return the fewest iterations, up to ``most``, in which a checkpoint keeps the limits; None if none does."""
    if question.policy == "snapshot" and not question.deadlines_hold():
        return None  # they lie in the first iteration: no further one helps
    high = 1
    while not question.fits(high):
        if high >= most:
            return None
        high = min(2 * high, most)
    low = high // 2 if high > 1 else 0
    while high - low > 1:
        middle = (low + high) // 2
        if question.fits(middle):
            high = middle
        else:
            low = middle
    return high


def frontier(question: Question, most: int) -> tuple[FrontierRow, ...]:
    """Return what checkpoints cost, limits aside: for each interval from the least memory to the shortest stall.

    Leaves out rows as dear as a shorter interval's, and intervals beyond the first whose link takes all state.
    """
    rows: list[FrontierRow] = []
    for interval in _intervals(question, most):
        for row in _trade_offs(question, interval):
            if not any(
                other.stall_seconds <= row.stall_seconds and other.extra_bytes <= row.extra_bytes for other in rows
            ):
                rows.append(row)
    return tuple(rows)


def _intervals(question: Question, most: int) -> list[int]:
    """Return 1, 2, 4, …, and the first interval whose link takes all state."""
    state, taken = question.timeline.state_bytes, 0.0
    if question.timeline.steps:
        taken = question.timeline.available_bytes(question.bandwidth_bytes_per_second)[-1]
    last = math.ceil(state / taken) if taken > 0 and state / taken < most else most
    last = max(1, last) if state else 1
    if question.policy == "snapshot":
        last = max(1, min(last, _FRONTIER_SNAPSHOT_STEPS // len(question.timeline.steps)))
    doubled = [2**power for power in range(_FRONTIER_INTERVALS - 1) if 2**power < last]
    return [*doubled, last]


def _trade_offs(question: Question, interval: int) -> list[FrontierRow]:
    """Return the ends of an interval's frontier and the bends between them (stall is convex in the peak)."""
    problem = question.problem(interval)
    ends = [_trade_off(question, interval, problem, problem.training_peak_bytes)]
    ends.append(_trade_off(question, interval, problem, _everything(problem)))
    if question.policy == "snapshot":
        peak = optimum.least_peak_bytes(problem, "snapshot", question.prices, Budget(math.inf))
        ends = [None if peak is None else _trade_off(question, interval, problem, peak)]
    elif ends[0] is None and ends[1] is not None:  # training may not wait: the least memory is above training's own
        peak = optimum.least_peak_bytes(problem, "direct", question.prices, Budget(math.inf, may_wait=False))
        ends[0] = None if peak is None else _trade_off(question, interval, problem, peak)
    rows = [row for row in ends if row is not None]
    for _ in range(_FRONTIER_HALVINGS):
        rows = _halved(question, interval, problem, rows)
    return list(dict.fromkeys(rows))


def _halved(question: Question, interval: int, problem: Problem, rows: list[FrontierRow]) -> list[FrontierRow]:
    """Add to the rows, between each two of them, one that is off their straight line, if there is one."""
    result = rows[:1]
    for left, right in pairwise(rows):
        middle_bytes = (left.extra_bytes + right.extra_bytes) // 2
        row = _trade_off(question, interval, problem, problem.training_peak_bytes + middle_bytes)
        if row is not None and left.extra_bytes < row.extra_bytes < right.extra_bytes:
            share = (row.extra_bytes - left.extra_bytes) / (right.extra_bytes - left.extra_bytes)
            line = left.stall_seconds + share * (right.stall_seconds - left.stall_seconds)
            if line - row.stall_seconds > _BENT * line:
                result.append(row)
        result.append(right)
    return result


def _trade_off(question: Question, interval: int, problem: Problem, peak_bytes: int) -> FrontierRow | None:
    """Return the shortest stall at a peak, and how much of the peak it needs."""
    may_wait = question.may_wait
    terms = optimum.least_stall(problem, question.policy, peak_bytes, question.prices, may_wait=may_wait)
    if terms is None:
        return None
    stall = question.prices.stall_seconds(terms)
    if question.policy == "direct":
        budget = Budget(stall, may_wait)
        least = optimum.least_peak_bytes(problem, "direct", question.prices, budget, most_bytes=peak_bytes)
        assert least is not None  # least_stall saw a schedule
        peak_bytes = least
    return FrontierRow(interval, stall, peak_bytes - problem.training_peak_bytes)


def _everything(problem: Problem) -> int:
    return problem.training_peak_bytes + problem.unit_bytes * problem.total
