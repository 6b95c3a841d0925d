"""The least peak within a stall budget, and the shortest stall at a peak: exact, without a solver.

Training stalls while the link takes W units, and while Z units are copied inside device memory.
docs/explanation/proofs.md ("the least pause") shows that one wait at the boundary is enough, and how W and Z are
chosen.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from checkflow.core.plan import Policy
from checkflow.planner.exact import bounds, greedy
from checkflow.planner.exact.problem import Flow, Problem

_ROUNDING = 1e-12  # of a budget: a share times a time is off in its last digits


@dataclass(frozen=True)
class Prices:
    """Seconds that training stalls, for each unit."""

    wait_seconds: float  # that leaves while training waits for the link
    snapshot_seconds: float  # that is copied inside device memory
    queue_seconds: float = 0.0  # before the first that leaves: until training's own traffic has gone

    def waiting_seconds(self, wait_units: int) -> float:
        return self.queue_seconds + wait_units * self.wait_seconds if wait_units else 0.0

    def stall_seconds(self, terms: Terms) -> float:
        return self.waiting_seconds(terms.wait_units) + terms.snapshots * self.snapshot_seconds


@dataclass(frozen=True)
class Terms:
    """The most units that a schedule moves during stalls."""

    wait_units: int
    snapshots: int


@dataclass(frozen=True)
class Budget:
    """How long training may stall for one checkpoint."""

    seconds: float  # infinite: as long as the snapshots take
    may_wait: bool = True  # for the link, too

    def admits(self, stall_seconds: float) -> bool:
        return stall_seconds <= self.seconds * (1 + _ROUNDING)

    def most(self, price_seconds: float, spent_seconds: float = 0.0) -> float:
        """Return how many units of a price the rest of the budget buys."""
        left = self.seconds * (1 + _ROUNDING) - spent_seconds
        return left / price_seconds if price_seconds else math.inf


def make_prices(unit_bytes: int, bandwidth_bytes_per_second: float, memory_bandwidth_bytes_per_second: float) -> Prices:
    """Return the prices of one unit: once over the link; inside device memory, one read and one write."""
    return Prices(unit_bytes / bandwidth_bytes_per_second, 2 * unit_bytes / memory_bandwidth_bytes_per_second)


def least_stall(
    problem: Problem, policy: Policy, peak_bytes: int, prices: Prices, *, may_wait: bool = True
) -> Terms | None:
    """Return the terms of the shortest stall at a peak; None if no schedule has that peak."""
    if peak_bytes < problem.training_peak_bytes:
        return None
    if policy == "snapshot":
        return None if greedy.snapshot_flow(problem, peak_bytes) is None else Terms(0, problem.total)
    wait = bounds.least_wait(problem, peak_bytes)
    if wait and not may_wait:
        return None
    fewest = cache(lambda wait: _fewest(problem, peak_bytes, wait))
    terms = Terms(wait, fewest(wait))
    if may_wait and not _waiting_never_pays(problem, prices):
        wait = _cheapest_wait(problem, prices, wait, fewest)
        longer = Terms(wait, fewest(wait))
        if prices.stall_seconds(longer) < prices.stall_seconds(terms):  # a wait also pays for what is queued before it
            return longer
    return terms


def least_peak_bytes(
    problem: Problem, policy: Policy, prices: Prices, budget: Budget, most_bytes: int | None = None
) -> int | None:
    """Return the least peak of all schedules within the budget; None if none is within it, or under ``most_bytes``."""
    low = problem.training_peak_bytes
    high = low + problem.unit_bytes * problem.total
    if most_bytes is not None and most_bytes < high:
        high = most_bytes
    if high < low or not fits(problem, policy, high, prices, budget):
        return None
    while low < high:
        middle = (low + high) // 2
        if fits(problem, policy, middle, prices, budget):
            high = middle
        else:
            low = middle + 1
    return low


def fits(problem: Problem, policy: Policy, peak_bytes: int, prices: Prices, budget: Budget) -> bool:
    """Whether a schedule within the budget has at most this peak."""
    if peak_bytes < problem.training_peak_bytes:
        return False
    if policy == "snapshot":
        paid = budget.admits(problem.total * prices.snapshot_seconds)
        return paid and greedy.snapshot_flow(problem, peak_bytes) is not None
    wait = bounds.least_wait(problem, peak_bytes)
    if wait and not (budget.may_wait and budget.admits(prices.waiting_seconds(wait))):
        return False
    most = budget.most(prices.snapshot_seconds, prices.waiting_seconds(wait))
    if most >= problem.total or _fewest(problem, peak_bytes, wait) <= most:
        return True
    if not budget.may_wait or _waiting_never_pays(problem, prices):
        return False
    terms = least_stall(problem, policy, peak_bytes, prices)
    return terms is not None and budget.admits(prices.stall_seconds(terms))


def cheapest_flow(problem: Problem, terms: Terms, peak_bytes: int) -> Flow:
    """Return a direct schedule with this peak on these terms, or raise ValueError; snapshots leave as early as
    possible.

    ``problem`` has the wait already.
    """
    allowed = bounds.most_gone(problem, peak_bytes, terms.snapshots)
    flow = None if allowed is None else greedy.direct_flow(problem, allowed)
    if flow is None:
        raise ValueError(f"no schedule has a peak of {peak_bytes} bytes on {terms}")
    return flow


def latest_wait(problem: Problem, terms: Terms, peak_bytes: int, anchors: list[int]) -> int:
    """Return the last of the sorted ``anchors`` at which training can wait for the same terms and peak.

    The first is the boundary, where a wait always serves.
    """

    def too_late(step: int) -> bool:
        fewest = bounds.fewest_snapshots(problem.waiting(terms.wait_units, step), peak_bytes, 0)
        return fewest is None or fewest > terms.snapshots

    return anchors[bisect_left(anchors, True, lo=1, key=too_late) - 1]


def _waiting_never_pays(problem: Problem, prices: Prices) -> bool:
    """Whether all snapshots that a unit of waiting can save cost no more than the waiting."""
    deadlines = len(problem.counts.starts)  # or one less
    return deadlines * prices.snapshot_seconds <= prices.wait_seconds


def _cheapest_wait(problem: Problem, prices: Prices, low: int, fewest: Callable[[int], int]) -> int:
    """Return the first wait from ``low`` where one more unit saves less than it costs (f is convex: savings fall)."""

    def pays(wait: int) -> bool:
        return (fewest(wait) - fewest(wait + 1)) * prices.snapshot_seconds > prices.wait_seconds

    if low >= problem.total or not pays(low):
        return low
    high = problem.total  # all state leaves at the boundary: no snapshot is left to save
    while high - low > 1:
        middle = (low + high) // 2
        if pays(middle):
            low = middle
        else:
            high = middle
    return high


def _fewest(problem: Problem, peak_bytes: int, wait: int) -> int:
    fewest = bounds.fewest_snapshots(problem, peak_bytes, wait)
    if fewest is None:
        raise ValueError(f"no schedule has a peak of {peak_bytes} bytes with {wait} units of waiting")
    return fewest
