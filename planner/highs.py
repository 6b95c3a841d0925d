"""PuLP's problems handed to HiGHS as arrays, and the values back: PuLP's own way makes a call a row and a column.

For a million of them that takes as long as the search.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pulp


def make_model(problem: pulp.LpProblem, options: dict[str, Any]) -> Any:
    """A ``highspy.Highs`` that is ready to run; its columns are ``problem.variables()``, in that order.

    Args:
        options: HiGHS's own, by name.

    Raises:
        PulpSolverError: HiGHS does not take the model, or an option.
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
    """Put the solution that a model holds into the problem's variables."""
    for variable, found in zip(problem.variables(), list(model.getSolution().col_value), strict=True):
        variable.varValue = found
