"""The exact rules against exhaustive search, and against each other."""

from __future__ import annotations

import random
from itertools import accumulate, pairwise

import pytest
from hypothesis import given, settings, strategies

from checkflow.planner.exact import bounds, greedy, optimum
from checkflow.planner.exact.problem import Flow, Problem, make_problem, unit_for
from tests.support.timelines import Best, best_flow, make_timeline, random_timeline, search, timelines

SEEDS = range(600)


def problem_of(steps, groups, link_bytes=None) -> Problem:
    return make_problem(make_timeline(steps, groups, link_bytes), 1.0, 1)


def objectives(flow: Flow | None, problem: Problem) -> Best | None:
    return None if flow is None else Best(flow.peak_bytes(problem), flow.snapshots, sum(flow.held()))


def test_direct_policy_is_the_best_of_all_schedules() -> None:
    infeasible = late = 0
    for seed in SEEDS:
        timeline = random_timeline(random.Random(seed))
        problem = make_problem(timeline, 1.0, 1)
        best = search(timeline, "direct")
        flow = best_flow(problem, "direct")
        assert (flow and flow.peak_bytes(problem)) == (best and best.peak_bytes), seed
        assert objectives(cheapest(problem), problem) == best, seed
        assert greedy.least_peak_bytes(problem, "direct") == (best and best.peak_bytes), seed
        infeasible += best is None
        late += best is not None and best.snapshot_bytes > 0
    assert infeasible > 50  # both kinds were seen
    assert late > 100


def test_snapshot_policy_has_the_least_peak_of_all_schedules() -> None:
    above = 0
    for seed in SEEDS:
        timeline = random_timeline(random.Random(seed))
        problem = make_problem(timeline, 1.0, 1)
        best = search(timeline, "snapshot")
        flow = best_flow(problem, "snapshot")
        assert (flow and flow.peak_bytes(problem)) == (best and best.peak_bytes), seed
        direct = greedy.least_peak_bytes(problem, "direct")
        if flow is not None:
            assert direct is not None
            assert direct <= flow.peak_bytes(problem)
            above += direct < flow.peak_bytes(problem)
    assert above > 100  # copies in device memory do cost something


def cheapest(problem: Problem) -> Flow | None:
    """Of the schedules of the least peak one with the fewest snapshots."""
    peak = greedy.least_peak_bytes(problem, "direct")
    if peak is None:
        return None
    fewest = bounds.fewest_snapshots(problem, peak, 0)
    assert fewest is not None
    return optimum.cheapest_flow(problem, optimum.Terms(0, fewest), peak)


def test_every_step_holds_the_least() -> None:
    """The claim under the least peak: no step holds more than what the link cannot have taken by then."""
    for seed in SEEDS:
        problem = make_problem(random_timeline(random.Random(seed)), 1.0, 1)
        flow = greedy.direct_flow(problem)
        if flow is not None:
            late = [max(0, due - reached) for due, reached in zip(problem.due, problem.reached, strict=True)]
            assert flow.held() == [max(before, now) for before, now in pairwise([0, *late])], seed


@pytest.mark.parametrize(
    ("steps", "groups", "expected"),
    [
        ([(0, 5)], [], Best(5, 0, 0)),  # nothing to move
        ([(0, 5), (1, 7)], [(1, [0])], Best(7, 0, 0)),  # a tensor of no bytes
        ([(0, 5), (3, 5)], [(1, [3])], Best(8, 3, 6)),  # due at the boundary: all of it is snapshotted
        ([(0, 5), (3, 5)], [(None, [3])], Best(5, 0, 0)),  # never written, exactly the link's capacity
        ([(0, 5), (3, 5)], [(None, [4])], None),  # one byte over
        ([(0, 5), (2, 5), (0, 5), (2, 1)], [(3, [2])], Best(5, 0, 0)),  # exactly full at the deadline
        ([(0, 5), (2, 5), (0, 5), (2, 1)], [(3, [3])], Best(6, 1, 2)),  # one byte too late
        ([(0, 5), (0, 6), (0, 7)], [(2, [1])], None),  # no step takes any time
        ([(0, 0), (1, 0), (0, 0), (1, 0)], [(1, [1]), (3, [1])], Best(1, 1, 4)),  # see below
    ],
)
def test_edges(steps, groups, expected) -> None:
    # The last row: the snapshot could leave first, and make room for another. One snapshot, kept longer, stalls less.
    problem = problem_of(steps, groups)
    assert objectives(cheapest(problem), problem) == expected
    assert search(make_timeline(steps, groups), "direct") == expected


def test_traffic_of_training_is_not_used() -> None:
    steps, groups = [(0, 1), (3, 1)], [(None, [3])]
    assert best_flow(problem_of(steps, groups), "direct") is not None
    assert best_flow(problem_of(steps, groups, {1: 1}), "direct") is None


def test_many_steps_keep_the_closed_form() -> None:
    """Far beyond exhaustive search: the schedule reaches the bound that is computed without it."""
    rng = random.Random(5)
    steps = 20_000
    fresh = [rng.choice([0, 0, 0, 400]) for _ in range(steps - 1)] + [0]
    problem = Problem(
        unit_bytes=512,
        total=sum(fresh) + 1000,
        live_bytes=tuple(rng.randrange(10**9) for _ in range(steps)),
        capacity=tuple(rng.choice([0, rng.randrange(450)]) for _ in range(steps)),
        due=tuple(accumulate(fresh)),
    )
    flow = best_flow(problem, "direct")
    assert flow is not None
    assert flow.snapshots > 0
    assert flow.peak_bytes(problem) == greedy.least_peak_bytes(problem, "direct")
    assert sum(flow.direct) + sum(flow.drained) == problem.total
    assert all(d + y <= c for d, y, c in zip(flow.direct, flow.drained, problem.capacity, strict=True))


@pytest.mark.parametrize(
    ("state_bytes", "unit"), [(0, 512), (2**33, 512), (2**33 + 1, 1024), (5 * 2**40, 2**19), (2**43 + 1, 2**20)]
)
def test_unit(state_bytes: int, unit: int) -> None:
    assert unit_for(state_bytes) == unit


@given(timelines, strategies.integers(1, 4))
@settings(max_examples=100, deadline=None)
def test_rounding_loses_less_than_a_unit(timeline, unit: int) -> None:
    problem = make_problem(timeline, 1.0, unit)
    assert 0 <= problem.total * unit - timeline.state_bytes < unit
    exact, rounded = make_problem(timeline, 1.0, 1), 0
    for due, due_bytes in zip(problem.due, exact.due, strict=True):
        assert due_bytes <= due * unit < due_bytes + 2 * unit
    for capacity, units, capacity_bytes in zip(
        problem.capacity, timeline.capacities_bytes(1.0, unit), timeline.capacities_bytes(1.0), strict=True
    ):
        assert capacity == min(units, problem.total)
        rounded += units * unit - capacity_bytes
        assert -unit < rounded <= 0
