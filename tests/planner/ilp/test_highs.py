"""Models as HiGHS gets them, and what a solver's digits and tolerance leave of a bound."""

from __future__ import annotations

import math
import random

import pulp
import pytest

from checkflow.planner.ilp import highs, solvers


def random_problem(rng: random.Random) -> pulp.LpProblem:
    """Every sense of row, every kind of bound; some infeasible, none unbounded."""
    problem = pulp.LpProblem("random", pulp.LpMinimize)
    bounds: list[tuple[float | None, float | None]] = [
        (None, None),
        (None, 4.5),
        (-2, None),
        (0, 3),
        (1, 4.5),
        (-3.5, 3),
    ]
    variables = [
        pulp.LpVariable(f"v{i}", *rng.choice(bounds), rng.choice([pulp.LpInteger, pulp.LpContinuous]))
        for i in range(rng.randint(1, 5))
    ]
    problem += pulp.lpSum(rng.randint(1, 3) * variable for variable in variables)
    for variable in variables:
        problem += variable >= -7
        problem += variable <= 9
    for _ in range(rng.randint(0, 4)):
        left = pulp.lpSum(rng.randint(-3, 3) * variable for variable in variables) + 0 * variables[0]
        right = rng.randint(-6, 9)
        problem += rng.choice([left <= right, left >= right, left == right])
    return problem


def test_highs_solves_what_gurobi_solves() -> None:
    infeasible = optimal = 0
    for seed in range(60):
        problem = random_problem(random.Random(seed))
        one, other = (solvers.solve(problem, name) for name in ("gurobi", "highs"))
        assert one.status == other.status, seed
        if other.objective is None:
            infeasible += 1
            continue
        assert other.objective == pytest.approx(one.objective, abs=1e-4), seed  # Gurobi's tolerance
        assert problem.valid(1e-6), seed  # the values are HiGHS's
        assert pulp.value(problem.objective) == pytest.approx(other.objective), seed
        optimal += 1
    assert infeasible > 5
    assert optimal > 20


def test_options_and_models_that_highs_refuses() -> None:
    problem = random_problem(random.Random(0))
    with pytest.raises(pulp.PulpSolverError, match="does not take"):
        highs.make_model(problem, {"no such option": 1})
    problem += pulp.LpConstraint(
        pulp.LpAffineExpression({pulp.LpVariable("x", 0): math.inf}), pulp.LpConstraintLE, rhs=1
    )
    with pytest.raises(pulp.PulpSolverError, match="does not take"):
        highs.make_model(problem, {})


def test_a_problem_without_rows() -> None:
    problem = pulp.LpProblem("empty", pulp.LpMinimize)
    problem += pulp.LpVariable("x", 3, None)
    found = solvers.solve(problem, "highs")
    assert (found.status, found.objective, found.constraints) == ("optimal", 3.0, 0)


def precise() -> pulp.LpProblem:
    """The optimum has more digits than CBC writes into its solution file."""
    problem = pulp.LpProblem("precise", pulp.LpMinimize)
    extra = pulp.LpVariable("extra", 0)
    chosen = pulp.LpVariable("chosen", 0, 1, pulp.LpInteger)
    problem += extra
    problem += extra >= 12345678.37890625 * chosen
    problem += chosen >= 1
    return problem


@pytest.mark.every_case
@pytest.mark.parametrize("solver", ["cbc", "highs", "gurobi"])
def test_objective_has_all_digits(solver: solvers.SolverChoice) -> None:
    """A bound of 12345678.5 would be above the truth."""
    found = solvers.solve(precise(), solver)
    assert found.objective == pytest.approx(12345678.37890625, abs=1e-4)
    assert found.bound == pytest.approx(12345678.37890625, abs=1e-4)


@pytest.mark.every_case
@pytest.mark.parametrize("solver", ["cbc", "highs", "gurobi"])
def test_infeasible_for_whole_numbers_alone(solver: solvers.SolverChoice) -> None:
    problem = pulp.LpProblem("odd", pulp.LpMinimize)
    variable = pulp.LpVariable("x", 0, 9, pulp.LpInteger)
    problem += variable
    problem += 2 * variable == 7
    assert solvers.solve(problem, solver).status == "infeasible"


@pytest.mark.parametrize("solver", ["cbc", "highs", "gurobi"])
def test_a_tolerance_may_be_asked_for(solver: solvers.SolverChoice) -> None:
    assert solvers.solve(precise(), solver, tolerance=1e-9).status == "optimal"
