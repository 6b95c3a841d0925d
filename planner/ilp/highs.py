"""HiGHS: hands over PuLP's problems as arrays, runs the search, and puts the values back.

PuLP's own interface makes one call per row and column, which for a million of them takes as long as the search.
"""

from __future__ import annotations

import math
from array import array
from typing import TYPE_CHECKING, Any

from checkflow.core.errors import SolverError
from checkflow.planner.ilp.search import Solve, Watch, found, infeasible, nothing_found, run_in_thread, threads

if TYPE_CHECKING:
    import pulp

# In smaller models the search for a first solution takes a third of the time, and the root relaxation gives one anyway.
_SMALL_VARIABLES = 10_000


def search(problem: pulp.LpProblem, seconds: float, tolerance: float | None) -> Solve:
    """Minimise, as :func:`.solvers.solve`."""
    try:
        import highspy
    except ImportError:
        raise SolverError("HiGHS is not installed: pip install highspy, or choose --solver cbc") from None
    import pulp

    options = {"mip_rel_gap": 0.0, "mip_abs_gap": 0.0, "time_limit": seconds, "threads": threads(), "random_seed": 0}
    if problem.numVariables() <= _SMALL_VARIABLES:
        options["mip_heuristic_run_feasibility_jump"] = False
    if tolerance is not None:
        options |= {"mip_feasibility_tolerance": tolerance, "primal_feasibility_tolerance": tolerance}
    model = make_model(problem, options)
    model.HandleUserInterrupt = True  # else it cannot be cancelled
    watch = Watch("HiGHS", seconds)
    watch.tell()
    if watch.wanted:
        model.cbMipInterrupt += lambda event: watch.tell(event.data_out.mip_primal_bound, event.data_out.mip_dual_bound)
    run_in_thread(model.run, model.cancelSolve)
    status, info, version = model.getModelStatus(), model.getInfo(), str(model.version())
    if status == highspy.HighsModelStatus.kInfeasible:
        return infeasible("highs", version)
    if status not in (highspy.HighsModelStatus.kOptimal, highspy.HighsModelStatus.kTimeLimit):
        raise SolverError(f"HiGHS failed: {model.modelStatusToString(status).lower()}")
    if info.primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
        raise nothing_found("HiGHS", seconds)
    assign_values(problem, model)
    optimal = status == highspy.HighsModelStatus.kOptimal
    integer = any(variable.cat == pulp.LpInteger for variable in problem.variables())
    # HiGHS keeps a dual bound for integer models only.
    bound = info.mip_dual_bound if integer else info.objective_function_value if optimal else -math.inf
    return found("highs", version, optimal, info.objective_function_value, bound)


def make_model(problem: pulp.LpProblem, options: dict[str, Any]) -> Any:
    """Return a ``highspy.Highs`` ready to run, with the columns of ``problem.variables()``; PulpSolverError if
    rejected.

    ``options`` are HiGHS's own, by name.
    """
    import highspy
    import numpy as np
    import pulp

    inf = highspy.kHighsInf
    variables, rows = problem.variables(), problem.constraints()
    place = {id(variable): index for index, variable in enumerate(variables)}
    start, index, value = array("i", [0]), array("i"), array("d")
    for row in rows:
        index.extend([place[id(variable)] for variable in row])
        value.extend(row.values())
        start.append(len(index))
    objective = {id(variable): cost for variable, cost in problem.objective.items()}
    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = len(variables), len(rows)
    lp.col_cost_ = np.array([objective.get(id(variable), 0.0) for variable in variables], dtype=float)
    lp.col_lower_ = np.array([-inf if variable.lowBound is None else variable.lowBound for variable in variables])
    lp.col_upper_ = np.array([inf if variable.upBound is None else variable.upBound for variable in variables])
    lp.integrality_ = [
        highspy.HighsVarType.kInteger if variable.cat == pulp.LpInteger else highspy.HighsVarType.kContinuous
        for variable in variables
    ]
    lp.row_lower_ = np.array([-inf if row.sense == pulp.LpConstraintLE else -row.constant for row in rows])
    lp.row_upper_ = np.array([inf if row.sense == pulp.LpConstraintGE else -row.constant for row in rows])
    lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    lp.a_matrix_.start_ = np.frombuffer(start, dtype=np.int32)
    lp.a_matrix_.index_ = np.frombuffer(index, dtype=np.int32)
    lp.a_matrix_.value_ = np.frombuffer(value, dtype=float)
    new: Any = highspy.Highs  # untyped
    model = new()
    model.setOptionValue("output_flag", False)
    done = [model.setOptionValue(name, option) for name, option in options.items()]
    if highspy.HighsStatus.kError in (*done, model.passModel(lp)):
        raise pulp.PulpSolverError("HiGHS does not take the model")
    return model


def assign_values(problem: pulp.LpProblem, model: Any) -> None:
    for variable, value in zip(problem.variables(), list(model.getSolution().col_value), strict=True):
        variable.varValue = value
