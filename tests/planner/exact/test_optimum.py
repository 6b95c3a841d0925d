"""The least stall at a peak and the least peak within a budget, against exhaustive search and against the ILP."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings, strategies

from checkflow.core.plan import Policy
from checkflow.planner.exact import optimum
from checkflow.planner.exact.optimum import Budget, Prices, Terms
from checkflow.planner.exact.problem import Problem, make_problem
from checkflow.planner.exact.shrink import shrink
from checkflow.planner.ilp import flow, solvers
from tests.planner.ilp.test_flow import assert_is_schedule
from tests.support.timelines import make_timeline, random_timeline, search, timelines

INFINITE = 10**6


def cheapest(timeline, prices: Prices, iterations: int) -> dict[int, float]:
    """By exhaustive search, with a wait of any length at any step: for each peak the least stall."""
    found: dict[int, float] = {}
    for wait in range(timeline.state_bytes + 1):
        for step in range(iterations * len(timeline.steps) if wait else 1):
            for most in range(timeline.state_bytes + 1):
                best = search(timeline, "direct", most_snapshots=most, iterations=iterations, waits={step: wait})
                if best is not None:
                    stall = prices.stall_seconds(Terms(wait, best.snapshot_bytes))
                    found[best.peak_bytes] = min(found.get(best.peak_bytes, math.inf), stall)
    return found


def ilp_peak(problem: Problem, policy: Policy, prices: Prices, budget: Budget) -> int | None:
    found = solvers.solve(flow.build(problem, policy, prices, budget).lp, "highs")
    return None if found.bound is None else flow.peak_bound_bytes(problem, found.bound)


@pytest.mark.parametrize(("iterations", "seeds", "most_bytes"), [(1, 90, 4), (2, 90, 3)])
def test_direct_policy_against_every_wait_and_every_schedule(iterations: int, seeds: int, most_bytes: int) -> None:
    mixed = waited = 0
    for seed in range(seeds):
        rng = random.Random(seed)
        timeline = random_timeline(rng, most_steps=5, most_bytes=most_bytes)
        prices = optimum.make_prices(1, 1.0, rng.choice([0.5, 1.0, 2.0, 3.0, 8.0, 100.0]))
        truth = cheapest(timeline, prices, iterations)
        problems = (make_problem(timeline, 1.0, 1, iterations), shrink(timeline, 1, iterations).problem(1.0))
        for problem in problems:
            for peak in range(timeline.training_peak_bytes + timeline.state_bytes + 1):
                expected = min((stall for reached, stall in truth.items() if reached <= peak), default=None)
                terms = optimum.least_stall(problem, "direct", peak, prices)
                stall = None if terms is None else prices.stall_seconds(terms)
                assert stall == (expected if expected is None else pytest.approx(expected)), (seed, peak)
                waited += terms is not None and terms.wait_units > 0
                mixed += terms is not None and terms.wait_units > 0 and terms.snapshots > 0
            for seconds in (0.0, 0.5, 1.0, 1.7, 2.0, 3.0):
                least = min((reached for reached, stall in truth.items() if stall <= seconds + 1e-9), default=None)
                assert optimum.least_peak_bytes(problem, "direct", prices, Budget(seconds)) == least, (seed, seconds)
    assert waited > seeds // 2
    assert mixed > 0  # both at once: the search over the wait is not idle


def test_ilp_agrees_within_every_budget() -> None:
    bound = 0
    for seed in range(500):
        rng = random.Random(seed)
        timeline = random_timeline(rng, most_steps=8, most_bytes=9)
        prices = optimum.make_prices(1, 1.0, rng.choice([0.5, 2.0, 30.0]))
        budget = Budget(rng.choice([0.0, 0.7, 1.5, 3.0, 5.0]), may_wait=rng.random() < 0.8)
        problem = shrink(timeline, 1, rng.choice([1, 1, 2, 3])).problem(1.0)
        rule = optimum.least_peak_bytes(problem, "direct", prices, budget)
        assert rule == ilp_peak(problem, "direct", prices, budget), seed
        bound += rule is not None and rule > problem.training_peak_bytes
    assert bound > 15


@pytest.mark.slow
def test_snapshot_policy_pays_for_every_unit_and_never_waits() -> None:
    paid = 0
    for seed in range(150):
        timeline = random_timeline(random.Random(seed))
        iterations = 1 + seed % 2
        problem, best = make_problem(timeline, 1.0, 1, iterations), search(timeline, "snapshot", iterations=iterations)
        prices = optimum.make_prices(1, 1.0, 2.0)
        for seconds in (0.0, 2.0, math.inf):
            affordable = best is not None and timeline.state_bytes <= seconds
            expected = best.peak_bytes if best is not None and affordable else None
            budget = Budget(seconds, may_wait=False)
            assert optimum.least_peak_bytes(problem, "snapshot", prices, budget) == expected, seed
            paid += affordable
    assert paid > 50


def test_training_never_waits_where_it_may_not() -> None:
    """Without waiting: what is left is the best of the schedules that do not wait, for any number of snapshots."""
    for seed in range(200):
        timeline = random_timeline(random.Random(seed))
        problem, best = make_problem(timeline, 1.0, 1), search(timeline, "direct")
        budget = Budget(math.inf, may_wait=False)
        prices = optimum.make_prices(1, 1.0, 2.0)
        assert optimum.least_peak_bytes(problem, "direct", prices, budget) == (best and best.peak_bytes), seed


@given(timelines, strategies.integers(0, 9), strategies.integers(1, 4))
@settings(max_examples=150, deadline=None)
def test_the_wait_comes_as_late_as_it_serves(timeline, more: int, interval: int) -> None:
    problem = make_problem(timeline, 1.0, 1, interval)
    prices = optimum.make_prices(1, 1.0, 2.0)
    peak = problem.training_peak_bytes + more
    terms = optimum.least_stall(problem, "direct", peak, prices)
    assert terms is not None  # to stop and copy everything always serves
    steps = list(range(problem.steps))
    chosen = optimum.latest_wait(problem, terms, peak, steps)
    for step in steps:
        waiting = problem.waiting(terms.wait_units, step)
        if step <= chosen:
            schedule = optimum.cheapest_flow(waiting, terms, peak)
            assert_is_schedule(schedule, waiting, "direct")
            assert schedule.peak_bytes(problem) <= peak
            assert schedule.snapshots <= terms.snapshots
        else:
            with pytest.raises(ValueError, match="no schedule"):
                optimum.cheapest_flow(waiting, terms, peak)


def test_waiting_pays_where_a_unit_saves_several_snapshots() -> None:
    """Room is short after each of three deadlines: what is held must leave first, and the next unit comes too late."""
    steps = [(0, 2), (1, 2), (0, 3), (1, 2), (0, 3), (1, 2), (0, 3), (1, 2)]
    groups = [(1, [1]), (3, [1]), (5, [1]), (7, [1])]
    problem = make_problem(make_timeline(steps, groups), 1.0, 1)
    cheap = optimum.make_prices(1, 1.0, 2 / 0.3)  # a snapshot for 0.3 s, a unit of waiting for 1 s
    terms = optimum.least_stall(problem, "direct", 3, cheap)
    truth = cheapest(make_timeline(steps, groups), cheap, 1)
    assert terms is not None
    assert cheap.stall_seconds(terms) == pytest.approx(min(stall for peak, stall in truth.items() if peak <= 3))
    dear = optimum.make_prices(1, 1.0, 2 / 5.0)  # for 5 s: rather wait
    assert optimum.least_stall(problem, "direct", 3, dear) == Terms(1, 0)


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (0.0, None),  # nothing may be paid
        (2.999, None),
        (3.0, 5),  # exactly the wait for the three bytes that are missing
        (math.inf, 5),
    ],
)
def test_edges_of_a_budget(seconds: float, expected: int | None) -> None:
    problem = make_problem(make_timeline([(0, 5), (2, 5)], [(None, [5])]), 1.0, 1)
    prices = optimum.make_prices(1, 1.0, 2.0)
    assert optimum.least_peak_bytes(problem, "direct", prices, Budget(seconds)) == expected
    assert optimum.least_peak_bytes(problem, "direct", prices, Budget(seconds), most_bytes=4) is None
    assert optimum.least_stall(problem, "direct", 4, prices) is None  # training alone needs more
    assert optimum.least_stall(problem, "direct", 5, prices) == Terms(3, 0)
    assert optimum.least_stall(problem, "direct", 5, prices, may_wait=False) is None


def test_nothing_to_move_costs_nothing() -> None:
    problem = make_problem(make_timeline([(0, 5), (0, 6)], []), 1.0, 1)
    prices = optimum.make_prices(1, 1.0, 2.0)
    assert optimum.least_peak_bytes(problem, "direct", prices, Budget(0.0)) == 6
    assert optimum.least_stall(problem, "direct", 6, prices) == Terms(0, 0)
