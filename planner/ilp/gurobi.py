"""Gurobi, with a licence of the user's own or the restricted one that comes with pip's gurobipy."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from checkflow.core.errors import SolverError
from checkflow.planner.ilp.search import (
    Solve,
    Watch,
    found,
    infeasible,
    nothing_found,
    one_line,
    run_in_thread,
    solver_files,
    threads,
)

if TYPE_CHECKING:
    import pulp

# Gurobi's licence errors: none is valid, the model is too large for it (the restricted one ends at 2,000 variables or
# constraints), or a licence server or cloud refuses us.
_LICENCE = frozenset({10009, 10010, 10022, 10023, 10028, 10030})


class LicenceError(SolverError):
    """There is no valid Gurobi licence, or it does not admit the model."""


@contextlib.contextmanager
def environment() -> Iterator[tuple[Any, bool]]:
    """Yield a silent Gurobi environment, and whether its licence is the restricted one (only Gurobi's log says so)."""
    try:
        import gurobipy
    except ImportError:
        raise SolverError("Gurobi is not installed: pip install gurobipy, or choose --solver highs") from None
    with solver_files() as folder, contextlib.ExitStack() as stack:
        log = folder / "gurobi.log"
        try:
            opened = stack.enter_context(gurobipy.Env(empty=True))
            opened.setParam("LogToConsole", 0)
            opened.setParam("LogFile", str(log))
            opened.start()
        except gurobipy.GurobiError as error:
            raise _error("Gurobi does not start", error) from error
        restricted = _is_restricted(log.read_text(errors="replace"))
        opened.setParam("OutputFlag", 0)
        yield opened, restricted


def _is_restricted(log: str) -> bool:
    return "restricted license" in log.lower()


def search(problem: pulp.LpProblem, environment: Any, seconds: float, tolerance: float | None) -> Solve:
    """Minimise, as :func:`.solvers.solve`, in an environment made by :func:`environment`; may raise LicenceError."""
    import gurobipy
    import pulp

    codes = gurobipy.GRB
    options = {"MIPGap": 0.0, "MIPGapAbs": 0.0, "Threads": threads(), "Seed": 0}
    if tolerance is not None:
        options |= {"IntFeasTol": tolerance, "FeasibilityTol": tolerance}
    solver = pulp.GUROBI(msg=False, env=environment, timeLimit=seconds, **options)
    try:
        try:
            solver.buildSolverModel(problem)
            model = problem.solverModel
            watch = Watch("Gurobi", seconds)
            watch.tell()

            def look(model: Any, where: int) -> None:
                if where == codes.Callback.MIP:
                    watch.tell(model.cbGet(codes.Callback.MIP_OBJBST), model.cbGet(codes.Callback.MIP_OBJBND))

            run_in_thread((lambda: model.optimize(look)) if watch.wanted else model.optimize, model.terminate)
            if model.Status == codes.INF_OR_UNBD:  # only a solve without these reductions shows which
                model.setParam("DualReductions", 0)
                run_in_thread(model.optimize, model.terminate)
            solver.findSolutionValues(problem)
        except gurobipy.GurobiError as error:
            raise _error("Gurobi failed", error) from error
        if model.Status == codes.INTERRUPTED:  # by Ctrl-C before the handler was back
            raise KeyboardInterrupt
        version = ".".join(str(part) for part in gurobipy.gurobi.version())
        if model.Status == codes.INFEASIBLE:
            return infeasible("gurobi", version)
        if model.Status not in (codes.OPTIMAL, codes.TIME_LIMIT):
            raise SolverError(f"Gurobi failed: status {model.Status}")
        if model.SolCount == 0:
            raise nothing_found("Gurobi", seconds)
        return found("gurobi", version, model.Status == codes.OPTIMAL, model.ObjVal, model.ObjBound)
    finally:
        solver.close()
        problem.solverModel = None
        for variable in problem.variables():  # else PuLP takes them for the next model's
            vars(variable).pop("solverVar", None)


def _error(what: str, error: Any) -> SolverError:
    kind = LicenceError if error.errno in _LICENCE else SolverError
    return kind(f"{what}: {one_line(error)}")
