"""The least peak within a budget of standing still, and the least standing still at a peak: exactly, without a solver.

Training stands still in two ways, and both have a price for each unit of state: it waits until the link has taken the
unit (W of them), or until the unit has been copied inside device memory (Z of them).

*One wait, at the boundary, does as well as any number of waits anywhere.* Each unit that left during another wait can
leave its live tensor during one at the boundary instead: its deadline is not before that, a snapshot of it is saved,
and no other unit moves. (For the same price the plan waits as late as that serves: :func:`latest_wait`. A link that is
faster than planned then shortens it. Training's own traffic that is queued at the boundary goes first, and adds to the
price of any wait; where there is such traffic, the plan waits there.)

*Which W and Z.* At a peak P, W is at least what :func:`.bounds.least_wait` says. For each such W let
f(W) be the fewest snapshots that reach P (:func:`.bounds.fewest_snapshots`). A schedule is a flow of
units through a network: from the live state, whose stock must fall to N - U_t by the end of step t, along the link's
arc of a step (capacity c_t, and at the boundary a second arc, of W), or first through a snapshot into the store, whose
arc along step t holds what P leaves free. So W and Z are the costs of a minimum cost flow: whole numbers are optimal,
and f is convex. The cheapest W is therefore the first at which one unit more of waiting no longer saves its price in
snapshots. No unit saves more snapshots than there are deadlines, since a cycle of the residual network passes each
deadline once; where that many cost less than one unit of waiting, the least W is the cheapest, and nothing need be
searched.

Under the snapshot policy, every unit is copied once and training never waits for the link: the price is fixed.
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

_ROUNDING = 1e-12  # of a budget: the product of a share and a time is allowed its last digits


@dataclass(frozen=True)
class Prices:
    """Seconds for which training stands still, for each unit."""

    wait_seconds: float  # that leaves while training waits for the link
    snapshot_seconds: float  # that is copied inside device memory
    queue_seconds: float = 0.0  # before the first that leaves: until training's own traffic has gone

    def waiting_seconds(self, wait_units: int) -> float:
        """For the link, in one checkpoint."""
        return self.queue_seconds + wait_units * self.wait_seconds if wait_units else 0.0

    def stall_seconds(self, terms: Terms) -> float:
        """Of one checkpoint."""
        return self.waiting_seconds(terms.wait_units) + terms.snapshots * self.snapshot_seconds


@dataclass(frozen=True)
class Terms:
    """What a schedule does at most while training stands still, in units."""

    wait_units: int
    snapshots: int


@dataclass(frozen=True)
class Budget:
    """For how long training may stand still for one checkpoint."""

    seconds: float  # infinite: as long as the snapshots take
    may_wait: bool = True  # for the link, too

    def admits(self, stall_seconds: float) -> bool:
        return stall_seconds <= self.seconds * (1 + _ROUNDING)

    def most(self, price_seconds: float, spent_seconds: float = 0.0) -> float:
        """How many units of a price remain."""
        left = self.seconds * (1 + _ROUNDING) - spent_seconds
        return left / price_seconds if price_seconds else math.inf


def make_prices(unit_bytes: int, bandwidth_bytes_per_second: float, memory_bandwidth_bytes_per_second: float) -> Prices:
    """Of one unit: over the link once; inside device memory, read once and written once."""
    return Prices(unit_bytes / bandwidth_bytes_per_second, 2 * unit_bytes / memory_bandwidth_bytes_per_second)


def least_stall(
    problem: Problem, policy: Policy, peak_bytes: int, prices: Prices, *, may_wait: bool = True
) -> Terms | None:
    """The terms of the shortest standing still at a peak; None if no schedule has that peak."""
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
        if prices.stall_seconds(longer) < prices.stall_seconds(terms):  # what is queued goes first, if at all
            return longer
    return terms


def least_peak_bytes(
    problem: Problem, policy: Policy, prices: Prices, budget: Budget, most_bytes: int | None = None
) -> int | None:
    """The least peak of all schedules within the budget; None if none is within it, or under ``most_bytes``."""
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
    """Whether a schedule has this peak, or a lower one, and is within the budget."""
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
    """A schedule of the direct policy with this peak on these terms; its snapshots leave as early as they may.

    Args:
        problem: with the wait.

    Raises:
        ValueError: there is none.
    """
    allowed = bounds.most_gone(problem, peak_bytes, terms.snapshots)
    flow = None if allowed is None else greedy.direct_flow(problem, allowed)
    if flow is None:
        raise ValueError(f"no schedule has a peak of {peak_bytes} bytes on {terms}")
    return flow


def latest_wait(problem: Problem, terms: Terms, peak_bytes: int, anchors: list[int]) -> int:
    """The last of the given steps at which training can wait for the same terms and peak.

    Args:
        anchors: sorted; the first is the boundary, where a wait always serves.
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
    """From ``low`` on, the first wait at which one more unit saves less than it costs. Saving falls: f is convex."""

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
