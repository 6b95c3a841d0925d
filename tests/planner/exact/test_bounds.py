"""The fewest snapshots of a peak, and how early they may leave, against the ILP on timelines of some length."""

from __future__ import annotations

import random

import pytest

from checkflow.planner.exact import bounds, optimum
from checkflow.planner.exact.optimum import Budget, Prices, Terms
from checkflow.planner.exact.problem import Problem, make_problem
from checkflow.planner.ilp import flow, solvers
from tests.planner.ilp.test_flow import assert_is_schedule
from tests.support.timelines import make_timeline, random_timeline

PRICES = Prices(wait_seconds=1.0, snapshot_seconds=1.0)


def crowded_problem(seed: int) -> Problem:
    """Many deadlines, a link that is nearly full, and live memory that leaves little room."""
    rng = random.Random(seed)
    count = rng.randint(10, 25)
    steps = [(0, 0)] + [(rng.choice([0, 1, 2, 3]), rng.randint(0, 6)) for _ in range(count)]
    total = max(1, round(sum(lasts for lasts, _ in steps) * rng.uniform(0.7, 1.0)))
    groups: dict[int, list[int]] = {}
    while total:
        size = rng.randint(1, min(total, 4))
        groups.setdefault(rng.randint(1, count), []).append(size)
        total -= size
    return make_problem(make_timeline(steps, sorted(groups.items())), 1.0, 1)


def ilp_fewest(problem: Problem, peak: int, wait: int) -> int | None:
    """The least limit on snapshots at which the ILP finds the peak."""
    waiting = problem.waiting(wait)
    low, high = 0, problem.total + 1
    while low < high:
        middle = (low + high) // 2
        model = flow.build(waiting, "direct", PRICES, Budget(float(middle), may_wait=False))
        found = solvers.solve(model.lp, "highs")
        if found.bound is not None and flow.peak_bound_bytes(waiting, found.bound) <= peak:
            high = middle
        else:
            low = middle + 1
    return None if low > problem.total else low


@pytest.mark.slow
def test_fewest_snapshots_are_the_ilp_s() -> None:
    none = some = 0
    for seed in range(120):
        problem = crowded_problem(seed)
        peak = problem.training_peak_bytes + seed % 5
        least = bounds.least_wait(problem, peak)
        for wait in {0, least, least + 2}:
            fewest = bounds.fewest_snapshots(problem, peak, wait)
            assert (fewest is None) == (wait < least), seed
            assert fewest == ilp_fewest(problem, peak, wait), (seed, wait)
            none += fewest is None
            some += bool(fewest)
    assert none > 20
    assert some > 100


def test_what_may_leave_makes_the_schedule() -> None:
    """A schedule that sends snapshots as early as they may keeps the peak and the number; one fewer is impossible."""
    thrifty = 0
    for seed in range(400):
        problem = crowded_problem(seed)
        peak = problem.training_peak_bytes + seed % 5
        wait = bounds.least_wait(problem, peak)
        waiting = problem.waiting(wait)
        fewest = bounds.fewest_snapshots(problem, peak, wait)
        assert fewest is not None
        for snapshots in {fewest, fewest + 1, problem.total}:
            schedule = optimum.cheapest_flow(waiting, Terms(wait, snapshots), peak)
            assert_is_schedule(schedule, waiting, "direct")
            assert schedule.peak_bytes(waiting) <= peak
            assert schedule.snapshots <= snapshots
        if fewest:
            assert bounds.most_gone(waiting, peak, fewest - 1) is None
        unlimited = optimum.cheapest_flow(waiting, Terms(wait, problem.total), peak)
        thrifty += fewest < unlimited.snapshots
    assert thrifty > 20  # to send all snapshots as early as possible would have made more of them


@pytest.mark.parametrize(
    ("steps", "groups", "peak", "wait", "expected"),
    [
        ([(0, 5)], [], 5, 0, 0),  # nothing to move
        ([(0, 5), (3, 5)], [(1, [3])], 8, 0, 3),  # due at the boundary, exactly the room
        ([(0, 5), (3, 5)], [(1, [3])], 7, 0, None),  # one byte of room too few
        ([(0, 5), (3, 5)], [(1, [3])], 7, 1, 2),  # one of them leaves while training waits
        ([(0, 5), (3, 5)], [(1, [3])], 5, 3, 0),  # all of them
        ([(0, 5), (3, 5)], [(None, [3])], 5, 0, 0),  # exactly what the link takes
        ([(0, 5), (3, 5)], [(None, [4])], 5, 0, None),  # one byte more
        ([(0, 5), (3, 5)], [(None, [3])], 4, 0, None),  # training alone needs more
    ],
)
def test_edges(steps, groups, peak: int, wait: int, expected: int | None) -> None:
    problem = make_problem(make_timeline(steps, groups), 1.0, 1)
    assert bounds.fewest_snapshots(problem, peak, wait) == expected
    gone = bounds.most_gone(problem.waiting(wait), peak, problem.total)
    assert (gone is None) == (expected is None)


def test_random_timelines_of_every_kind() -> None:
    for seed in range(200):
        problem = make_problem(random_timeline(random.Random(seed), most_steps=12, most_bytes=20), 1.0, 1)
        peak = problem.training_peak_bytes + seed % 4
        assert bounds.fewest_snapshots(problem, peak, 0) == ilp_fewest(problem, peak, 0), seed
