"""One function over three solvers, through PuLP: Gurobi, HiGHS, CBC.

What a solver calls itself, and what PuLP makes of it, is not trusted: "optimal" is said only of a proof, a schedule
found when time ran out is "feasible" (PuLP reports CBC's and HiGHS's as status 1 with sol_status 2), and the caller
checks the values themselves. Nothing is written to standard output.

Whatever stops the main thread (Ctrl-C, or another signal whose handler raises) ends the search too: CBC is a process of
its own and is killed; HiGHS and Gurobi run in a thread, since no handler of Python's runs while the main thread is in
their code, and are told to stop.
"""

from __future__ import annotations

import importlib
import logging
import math
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from checkflow.core.errors import SolverError
from checkflow.planner.ilp import cbc, gurobi, highs
from checkflow.planner.ilp.search import (
    NothingFoundError,
    Solve,
    SolverChoice,
    SolverName,
    SolveStatus,
    nothing_printed,
    one_line,
)

if TYPE_CHECKING:
    import pulp

__all__ = ["NothingFoundError", "Solve", "SolveStatus", "SolverChoice", "SolverName", "check_numbers", "solve"]

_LARGEST = 1e15  # HiGHS takes no larger coefficients, and beside such numbers a whole one is lost in rounding
_logger = logging.getLogger("checkflow")


def solve(
    problem: pulp.LpProblem,
    solver: SolverChoice = "auto",
    time_limit_seconds: float = 60.0,
    tolerance: float | None = None,
) -> Solve:
    """Minimise a PuLP problem; the variables hold the solution afterwards.

    Args:
        solver: "auto": Gurobi if it has a licence of the user's own, else HiGHS, else CBC. An explicit "gurobi" takes
            the restricted licence that comes with pip's gurobipy too. Where Gurobi's licence does not admit the model,
            HiGHS (or CBC) solves it, and one warning says so.
        time_limit_seconds: for the search; what was found until then is returned as "feasible". Infinite: no limit.
        tolerance: how far a value may be from a whole one, and a row from its bound; None: the solver's own, some 1e-6.
            Coefficients of 1e6 and more need less: a binary that is a millionth short of one would hide a whole unit.

    Raises:
        SolverError: the solver is missing, failed or was killed; or the problem holds a number that is not finite, or
            one that solvers cannot carry.
        NothingFoundError: it found nothing within the time.
    """
    import pulp

    if not time_limit_seconds > 0:
        raise SolverError(f"the time limit must be more than zero, not {time_limit_seconds} s")
    check_numbers(problem)
    with nothing_printed():
        started = time.perf_counter()
        try:
            found = _dispatch(problem, solver, time_limit_seconds, tolerance)
        except pulp.PulpSolverError as error:
            raise SolverError(f"the solver failed: {one_line(error)}") from error
        seconds = time.perf_counter() - started
    if found.status != "infeasible":
        for variable in problem.variables():
            if variable.varValue is None or not math.isfinite(variable.varValue):
                raise SolverError(f"{found.name} failed: it gives {variable.name} the value {variable.varValue}")
    return replace(
        found,
        seconds=seconds,
        variables=len(problem.variables()),
        constraints=problem.numConstraints(),
    )


def check_numbers(problem: pulp.LpProblem) -> None:
    """Refuse what solvers answer wrongly, or each in its own way.

    Raises:
        SolverError: a coefficient, a bound or a right-hand side is not finite, or larger than 1e15; a variable's bounds
            cross (model files cannot say so); the objective is missing, or has a constant (not all of them count it).
    """
    if problem.objective is None or problem.objective.constant:
        raise SolverError("the model cannot be solved: its objective is missing, or has a constant")
    for where, value in _numbers(problem):
        if not abs(value) <= _LARGEST:  # no number compares with NaN
            raise SolverError(f"the model cannot be solved: {where} is {value:g}; solvers carry numbers up to 1e15")
    for variable in problem.variables():
        if None not in (variable.lowBound, variable.upBound) and variable.lowBound > variable.upBound:
            raise SolverError(f"the model cannot be solved: the bounds of {variable.name} cross")


def _numbers(problem: pulp.LpProblem) -> Iterator[tuple[str, float]]:
    for variable in problem.variables():
        for bound in (variable.lowBound, variable.upBound):
            if bound is not None:
                yield f"a bound of {variable.name}", bound
    for variable, coefficient in problem.objective.items():
        yield f"the objective's coefficient of {variable.name}", coefficient
    for row in problem.constraints():
        yield f"the right-hand side of row {row.name}", row.constant
        for variable, coefficient in row.items():
            yield f"the coefficient of {variable.name} in row {row.name}", coefficient


def _dispatch(problem: pulp.LpProblem, solver: SolverChoice, seconds: float, tolerance: float | None) -> Solve:
    if solver == "cbc":
        return cbc.search(problem, seconds, tolerance)
    if solver != "highs":
        found = _licensed_gurobi(problem, solver, seconds, tolerance)
        if found is not None:
            return found
    if solver != "highs" and not _installed("highspy"):
        return cbc.search(problem, seconds, tolerance)
    return highs.search(problem, seconds, tolerance)


def _installed(module: str) -> bool:
    try:
        importlib.import_module(module)
    except ImportError:
        return False
    return True


def _licensed_gurobi(
    problem: pulp.LpProblem, solver: SolverChoice, seconds: float, tolerance: float | None
) -> Solve | None:
    """None: another solver has to do it. That is told where Gurobi was asked for, or a licence of one's own fails."""
    if solver == "auto" and not _installed("gurobipy"):
        return None
    try:
        with gurobi.environment() as (environment, restricted):
            if not restricted:
                return gurobi.search(problem, environment, seconds, tolerance)
            if solver == "auto":
                return None
            found = gurobi.search(problem, environment, seconds, tolerance)
            _logger.warning("Gurobi ran with its restricted licence, which is for non-production use only")
            return found
    except gurobi.LicenceError as error:
        _logger.warning("%s; solving with %s instead", error, "HiGHS" if _installed("highspy") else "CBC")
        return None
