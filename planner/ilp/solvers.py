"""One function over three solvers, through PuLP: Gurobi, HiGHS, CBC. Writes nothing to standard output.

Only a proof is called "optimal"; a schedule found when time ran out is "feasible" (PuLP reports CBC's and HiGHS's as
status 1 with sol_status 2). Callers check the values. An exception in the main thread, such as Ctrl-C, ends the search:
CBC is a process and is killed, HiGHS and Gurobi run in a thread and are cancelled.
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

_LARGEST = 1e15  # HiGHS takes no larger coefficients, and beside them rounding loses whole units
_logger = logging.getLogger("checkflow")


def solve(
    problem: pulp.LpProblem,
    solver: SolverChoice = "auto",
    time_limit_seconds: float = 60.0,
    tolerance: float | None = None,
) -> Solve:
    """Minimise a PuLP problem; its variables then hold the solution.

    Args:
        solver: "auto": Gurobi if it has a licence of the user's own, else HiGHS, else CBC. An explicit "gurobi" also
            takes the restricted licence of pip's gurobipy. If Gurobi's licence does not admit the model, HiGHS (or CBC)
            solves it, with one warning.
        time_limit_seconds: for the search; a solution found by then is returned as "feasible". Infinite: no limit.
        tolerance: how far a value may be from a whole one, and a row from its bound; None: the solver's own, some 1e-6.
            Coefficients of 1e6 and more need less: a binary a millionth short of one would hide a whole unit.

    Raises:
        SolverError: the solver is missing, failed or was killed; or the problem holds a number that is not finite, or
            that solvers cannot carry.
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
    """Refuse numbers that solvers answer wrongly, or each in its own way.

    Raises:
        SolverError: a coefficient, a bound or a right-hand side is not finite, or larger than 1e15; a variable's bounds
            cross (model files cannot say so); the objective is missing, or has a constant (some solvers ignore it).
    """
    if problem.objective is None or problem.objective.constant:
        raise SolverError("the model cannot be solved: its objective is missing, or has a constant")
    for where, value in _numbers(problem):
        if not abs(value) <= _LARGEST:  # NaN fails every comparison
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
    """Solve with Gurobi. None: no licence serves; warn if "gurobi" was asked for, or a licence of one's own fails."""
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
