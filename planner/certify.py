"""The best schedule, and the proof that it is: by the exact rule where that is plain, else by the ILP."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Literal

from checkflow.errors import SolverError
from checkflow.plan import Certificate, Policy
from checkflow.planner import flow as flows
from checkflow.planner import greedy, solvers
from checkflow.planner.problem import Flow, Problem

Formulation = Literal["auto", "flow", "greedy"]
_logger = logging.getLogger("checkflow")


@dataclass(frozen=True)
class SolverReport:
    """What was solved, in bytes of peak memory. Name "none": no solver was needed."""

    name: str
    version: str
    status: solvers.SolveStatus
    objective_bytes: int | None
    bound_bytes: int | None
    gap: float | None  # (objective - bound) / objective
    seconds: float
    variables: int
    constraints: int


@dataclass(frozen=True)
class Schedule:
    """The best schedule known, and the proof of it. ``flow`` is None iff there is none."""

    flow: Flow | None
    bound_bytes: int
    formulation: Literal["flow", "greedy"]  # what gave the bound
    report: SolverReport

    def certificate(self, peak_bytes: int) -> Certificate:
        """What a plan of this peak may claim. Times stay out: the same input gives the same plan."""
        status: Literal["optimal", "feasible"] = "optimal" if self.bound_bytes == peak_bytes else "feasible"
        return Certificate(
            status, self.formulation, self.report.name, self.report.version, peak_bytes, self.bound_bytes
        )  # fmt: skip


def find_schedule(
    problem: Problem,
    policy: Policy,
    most_snapshots: int | None,
    formulation: Formulation,
    solver: solvers.SolverChoice,
    time_limit_seconds: float,
) -> Schedule:
    """The exact rule's schedule, certified.

    "auto" solves the ILP where the peak is above training's own, or where a solver is named; if that proves nothing in
    time, the rule's own bound (:func:`checkflow.planner.greedy.least_peak_bytes`) is left. "flow" always solves it and
    trusts its bound alone; "greedy" never does.

    Args:
        most_snapshots: units that may be snapshotted in all (None: any number).

    Raises:
        SolverError: the solver that was asked for is missing or failed, or contradicts a schedule at hand.
    """
    flow = greedy.best_flow(problem, policy, most_snapshots)
    bound = problem.training_peak_bytes
    plain = flow is None or flow.peak_bytes(problem) == bound
    named = solver != "auto"
    if formulation == "flow" or (formulation == "auto" and (named or not plain)):
        try:
            found = _certify(problem, policy, most_snapshots, flow, solver, time_limit_seconds)
            if formulation == "flow" or found.report.status != "feasible":
                return found
            _logger.warning("%s proved nothing in %g s; the exact rule's bound is left", solver, time_limit_seconds)
        except solvers.NothingFoundError as error:
            _logger.warning("%s; the exact rule's schedule is left", error)
        except SolverError as error:
            if named or formulation == "flow":
                raise
            _logger.warning("%s; the exact rule's bound is left", error)
    if formulation != "flow":  # a proof without a solver
        bound = max(bound, greedy.least_peak_bytes(problem, policy) or 0)
    peak = None if flow is None else flow.peak_bytes(problem)
    return Schedule(flow, bound, "greedy", _report(None, peak, bound))


def _certify(
    problem: Problem,
    policy: Policy,
    most_snapshots: int | None,
    incumbent: Flow | None,
    solver: solvers.SolverChoice,
    time_limit_seconds: float,
) -> Schedule:
    """Solve the ILP. The exact rule's schedule stays, unless the ILP's is better (then the rule would be wrong)."""
    model = flows.build(problem, policy, most_snapshots)
    solve = solvers.solve(model.lp, solver, time_limit_seconds)
    if solve.bound is None:  # infeasible
        if incumbent is not None:
            raise SolverError(f"{solve.name} says that there is no schedule, and there is one: choose another solver")
        return Schedule(None, problem.training_peak_bytes, "flow", _report(solve, None, None))
    flow = flows.extract(model)
    bound = flows.peak_bound_bytes(problem, solve.bound)
    if incumbent is not None and incumbent.peak_bytes(problem) <= flow.peak_bytes(problem):
        flow = incumbent
    peak = flow.peak_bytes(problem)
    if bound > peak:
        raise SolverError(f"{solve.name} claims a bound of {bound} bytes, and a schedule reaches {peak}")
    return Schedule(flow, bound, "flow", _report(solve, peak, bound))


def _report(solve: solvers.Solve | None, peak_bytes: int | None, bound_bytes: int | None) -> SolverReport:
    """In bytes; the status is what the bound proves, not what the solver calls it."""
    status: solvers.SolveStatus = "infeasible"
    gap = None
    if peak_bytes is None or bound_bytes is None:
        bound_bytes = None
    else:
        status = "optimal" if bound_bytes == peak_bytes else "feasible"
        gap = (peak_bytes - bound_bytes) / peak_bytes if peak_bytes else 0.0
    if solve is None:
        return SolverReport("none", "", status, peak_bytes, bound_bytes, gap, 0.0, 0, 0)
    return SolverReport(
        solve.name, solve.version, status, peak_bytes, bound_bytes, gap,
        solve.seconds, solve.variables, solve.constraints,
    )  # fmt: skip
