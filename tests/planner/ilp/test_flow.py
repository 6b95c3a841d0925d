"""The aggregate ILP against the exact rules and exhaustive search; its parts: build, extract, bound."""

from __future__ import annotations

import math
import random

import pytest

from checkflow.core.errors import SolverError
from checkflow.core.plan import Policy
from checkflow.planner.exact import greedy
from checkflow.planner.exact.optimum import Budget, Prices
from checkflow.planner.exact.problem import Flow, Problem, make_problem
from checkflow.planner.ilp import flow, solvers
from tests.support.timelines import best_flow, make_timeline, random_timeline, search

PRICES = Prices(wait_seconds=1.0, snapshot_seconds=1.0)


def solve(
    problem: Problem, policy: Policy, most: int | None = None, solver: solvers.SolverChoice = "highs"
) -> tuple[Flow, int] | None:
    """The ILP's schedule and the bound on its peak, with at most so many snapshots (None: any number)."""
    budget = Budget(math.inf if most is None else float(most), may_wait=False)
    model = flow.build(problem, policy, PRICES, budget)
    found = solvers.solve(model.lp, solver)
    if found.bound is None:
        assert found.status == "infeasible"
        return None
    assert found.status == "optimal"
    return flow.extract(model), flow.peak_bound_bytes(problem, found.bound)


def assert_is_schedule(found: Flow, problem: Problem, policy: Policy) -> None:
    """The rules of the policies, summed over all bytes."""
    taken = left = made = gone = 0
    for step, (direct, fresh, drained) in enumerate(zip(found.direct, found.made, found.drained, strict=True)):
        assert min(direct, fresh, drained) >= 0
        assert direct + drained <= problem.capacity[step]
        assert policy == "direct" or not direct
        gone += drained
        assert gone <= made  # made in an earlier step
        taken += direct + fresh
        made += fresh
        left += direct + drained
        assert taken >= problem.due[step]
    assert (taken, left) == (problem.total, problem.total)


@pytest.mark.parametrize("policy", ["direct", "snapshot"])
def test_flow_is_greedy_is_exhaustive_search(policy: Policy) -> None:
    infeasible = above = 0
    for seed in range(520):
        timeline = random_timeline(random.Random(seed))
        problem = make_problem(timeline, 1.0, 1)
        best, found, rule = search(timeline, policy), solve(problem, policy), best_flow(problem, policy)
        if best is None:
            assert found is None, seed
            assert rule is None, seed
            infeasible += 1
            continue
        assert found is not None, seed
        assert rule is not None, seed
        assert_is_schedule(found[0], problem, policy)
        assert_is_schedule(rule, problem, policy)
        assert best.peak_bytes == found[0].peak_bytes(problem) == found[1] == rule.peak_bytes(problem), seed
        above += best.peak_bytes > problem.training_peak_bytes
    assert infeasible > 50
    assert above > 50


def test_limit_on_snapshots_is_a_row() -> None:
    tighter = 0
    for seed in range(200):
        timeline = random_timeline(random.Random(seed))
        problem = make_problem(timeline, 1.0, 1)
        best, found = search(timeline, "direct", most_snapshots=1), solve(problem, "direct", 1)
        assert (best and best.peak_bytes) == (found and found[1]), seed
        tighter += best != search(timeline, "direct")
    assert tighter > 10


@pytest.mark.parametrize("solver", ["cbc", "gurobi"])
def test_solvers_agree(solver: solvers.SolverChoice) -> None:
    for seed in range(60):
        problem = make_problem(random_timeline(random.Random(seed)), 1.0, 1)
        for policy in ("direct", "snapshot"):
            one, other = solve(problem, policy), solve(problem, policy, solver=solver)
            assert (one and one[1]) == (other and other[1]), (seed, policy)


def test_units_of_many_bytes() -> None:
    """Memory is counted in bytes although state moves in units: peaks are no multiples of the unit."""
    timeline = make_timeline(
        [(0, 10_001), (2, 17_003), (0, 11_007), (6000, 9_009), (0, 30_000)],
        [(2, [700, 1300]), (3, [3000]), (None, [1])],
    )
    problem = make_problem(timeline, 1.0, 512)
    for policy in ("direct", "snapshot"):
        found = solve(problem, policy)
        assert found is not None
        assert found[1] == found[0].peak_bytes(problem) == greedy.least_peak_bytes(problem, policy)


def test_bound_is_lifted_to_the_next_possible_peak() -> None:
    problem = make_problem(make_timeline([(0, 1000), (9000, 700)], [(1, [5120])]), 1.0, 512)
    assert flow.peak_bound_bytes(problem, -math.inf) == 1000
    assert flow.peak_bound_bytes(problem, 0.0) == 1000
    assert flow.peak_bound_bytes(problem, 2.0) == 2024
    assert flow.peak_bound_bytes(problem, 2.0 + 1e-7) == 2024  # a solver's tolerance
    assert flow.peak_bound_bytes(problem, 2.0 - 1e-7) == 2024
    assert flow.peak_bound_bytes(problem, 2.1) == 700 + 3 * 512


def test_no_schedule_is_read_from_broken_values() -> None:
    problem = make_problem(make_timeline([(0, 1), (2, 1), (2, 1)], [(None, [3])]), 1.0, 1)
    model = flow.build(problem, "direct")
    with pytest.raises(SolverError, match="not a whole number"):
        flow.extract(model)  # not solved
    solvers.solve(model.lp, "highs")
    assert sum(flow.extract(model).direct) == 3
    model.through[1].varValue += 0.4
    with pytest.raises(SolverError, match="not a whole number"):
        flow.extract(model)
    model.through[1].varValue = 9.0
    with pytest.raises(SolverError, match="returns"):
        flow.extract(model)


def test_idle_link_needs_no_variables() -> None:
    problem = make_problem(make_timeline([(0, 1)] * 50 + [(3, 1)], [(None, [3])]), 1.0, 1)
    assert len(flow.build(problem, "direct").lp.variables()) == 3  # D, Y and the objective
