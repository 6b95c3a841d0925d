"""The blocks of a horizon against all of its steps: the same optimum, and schedules that can be spread again."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies

from checkflow.core.plan import Policy
from checkflow.core.timeline import Timeline
from checkflow.planner.exact import bounds, greedy, optimum
from checkflow.planner.exact.optimum import Budget
from checkflow.planner.exact.problem import make_problem
from checkflow.planner.exact.shrink import expand, shrink
from checkflow.planner.ilp import flow, solvers
from tests.planner.ilp.test_flow import assert_is_schedule
from tests.support.timelines import best_flow, make_timeline, random_timeline


def longer_timeline(seed: int) -> Timeline:
    return random_timeline(random.Random(seed), most_steps=30, most_bytes=40)


@given(strategies.integers(0, 2**32).map(longer_timeline), strategies.integers(1, 5), strategies.integers(0, 12))
@settings(max_examples=300, deadline=None)
def test_no_rule_tells_blocks_from_steps(timeline: Timeline, interval: int, number: int) -> None:
    whole, blocks = make_problem(timeline, 1.0, 1, interval), shrink(timeline, 1, interval).problem(1.0)
    assert blocks.training_peak_bytes == whole.training_peak_bytes
    assert min(blocks.reached[-1], whole.total) == min(whole.reached[-1], whole.total)
    assert blocks.due[-1] == whole.due[-1]
    peak = whole.training_peak_bytes + number
    assert bounds.least_wait(blocks, peak) == bounds.least_wait(whole, peak)
    assert bounds.fewest_snapshots(blocks, peak, number) == bounds.fewest_snapshots(whole, peak, number)
    one, other = (greedy.direct_flow(problem.waiting(number)) for problem in (whole, blocks))
    assert (one and one.peak_bytes(whole)) == (other and other.peak_bytes(blocks))
    prices = optimum.make_prices(1, 1.0, 3.0)
    for budget in (Budget(number / 2), Budget(float("inf"), may_wait=False)):
        least = [optimum.least_peak_bytes(problem, "direct", prices, budget) for problem in (whole, blocks)]
        assert least[0] == least[1]


@given(strategies.integers(0, 2**32).map(longer_timeline), strategies.integers(1, 4), strategies.integers(0, 6))
@settings(max_examples=150, deadline=None)
def test_schedules_of_blocks_become_schedules_of_steps(timeline: Timeline, interval: int, wait: int) -> None:
    shrunk, whole = shrink(timeline, 1, interval), make_problem(timeline, 1.0, 1, interval).waiting(wait)
    blocks = shrunk.problem(1.0).waiting(wait)
    schedule = best_flow(blocks, "direct")
    if schedule is not None:
        spread = expand(shrunk, schedule, whole)
        assert_is_schedule(spread, whole, "direct")
        assert spread.peak_bytes(whole) == schedule.peak_bytes(blocks)
        assert spread.snapshots == schedule.snapshots


def sparse_timeline(seed: int) -> Timeline:
    """Few steps in which memory is short, and long runs in which it is not."""
    rng = random.Random(seed)
    timeline = random_timeline(rng, most_steps=40, most_bytes=12)
    high = max(step.live_bytes for step in timeline.steps) + timeline.state_bytes
    steps = tuple(
        replace(step, live_bytes=max(0, high - rng.randint(0, 3)) if rng.random() < 0.15 else step.live_bytes)
        for step in timeline.steps
    )
    return replace(timeline, steps=steps)


@given(strategies.integers(0, 2**32).map(sparse_timeline), strategies.integers(1, 4))
@settings(max_examples=300, deadline=None)
def test_snapshot_policy_on_blocks_is_that_on_steps(timeline: Timeline, interval: int) -> None:
    shrunk, whole = shrink(timeline, 1, interval, "snapshot"), make_problem(timeline, 1.0, 1, interval)
    blocks = shrunk.problem(1.0)
    assert greedy.least_peak_bytes(blocks, "snapshot") == greedy.least_peak_bytes(whole, "snapshot")
    schedule = best_flow(blocks, "snapshot")
    if schedule is not None:
        spread = expand(shrunk, schedule, whole)
        assert_is_schedule(spread, whole, "snapshot")
        assert spread.peak_bytes(whole) == schedule.peak_bytes(blocks)


def test_snapshot_policy_saves_blocks_where_memory_is_not_short() -> None:
    steps = blocks = above = 0
    for seed in range(100):
        timeline = sparse_timeline(seed)
        shrunk = shrink(timeline, 1, 2, "snapshot")
        steps += 2 * len(timeline.steps)
        blocks += len(shrunk.ends)
        peak = greedy.least_peak_bytes(shrunk.problem(1.0), "snapshot")
        above += peak is not None and peak > timeline.training_peak_bytes
    assert blocks < 0.7 * steps
    assert above > 10  # memory is short somewhere


@pytest.mark.parametrize("policy", ["direct", "snapshot"])
def test_ilp_finds_the_same_on_blocks_and_on_steps(policy: Policy) -> None:
    smaller = 0
    for seed in range(60):
        timeline, interval = (longer_timeline if policy == "direct" else sparse_timeline)(seed), 1 + seed % 3
        peaks = []
        for problem in (make_problem(timeline, 1.0, 1, interval), shrink(timeline, 1, interval, policy).problem(1.0)):
            found = solvers.solve(flow.build(problem, policy).lp, "highs")
            peaks.append(None if found.bound is None else flow.peak_bound_bytes(problem, found.bound))
            smaller -= problem.steps * (-1) ** len(peaks)
        assert peaks[0] == peaks[1], seed
    assert smaller > 500  # steps saved


@pytest.mark.parametrize("interval", [1, 2, 3, 1000])
def test_a_thousand_iterations_are_no_more_than_two(interval: int) -> None:
    timeline = make_timeline([(0, 5), (2, 9), (0, 4), (3, 7), (1, 6)], [(2, [30]), (None, [5])])
    shrunk = shrink(timeline, 1, interval)
    assert len(shrunk.ends) <= 2 * len(timeline.steps)
    assert shrunk.ends[-1] == interval * len(timeline.steps) - 1
    assert shrunk.problem(1.0).reached[-1] >= min(6 * interval, shrunk.total)
    with_wait = shrunk.problem(1.0).waiting(35)
    assert bounds.fewest_snapshots(with_wait, 9, 0) == 0


def test_what_cannot_bind_is_one_block() -> None:
    """Live memory that leaves room for all state at once, and what comes after a higher step, never bind."""
    low = make_timeline([(0, 1), (1, 2), (1, 3), (1, 100), (1, 50), (1, 60), (0, 2), (1, 3), (1, 100)], [(7, [4])])
    assert shrink(low, 1).ends == (2, 5, 6, 7, 8)
    high = replace(low, steps=tuple(replace(step, live_bytes=100) for step in low.steps))
    assert shrink(high, 1).ends == (5, 6, 8)
    assert shrink(make_timeline([(0, 1)], []), 512).ends == (0,)
