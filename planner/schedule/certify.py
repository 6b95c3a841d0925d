"""Finds the best schedule of an interval and proves it, by the exact rules and by the ILP as a second opinion."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from checkflow.core.errors import SolverError
from checkflow.core.plan import Certificate, Chunk
from checkflow.planner.exact import greedy, optimum
from checkflow.planner.exact.interval import Question
from checkflow.planner.exact.optimum import Terms
from checkflow.planner.exact.problem import Flow, Problem
from checkflow.planner.exact.shrink import expand
from checkflow.planner.ilp import flow as flows
from checkflow.planner.ilp import per_tensor, solvers

Formulation = Literal["auto", "flow", "per-tensor", "greedy"]
SECOND_OPINION_STEPS = 2_000  # "auto" also asks a solver up to this many; beyond, the exact rules' proof must do
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
    """The best known schedule of an interval and its proof: a flow or chunks; neither if there is no schedule."""

    problem: Problem  # every step of the horizon, with the wait
    flow: Flow | None
    wait_step: int
    wait_units: int
    bound_bytes: int
    formulation: Literal["flow", "per-tensor", "greedy"]  # what gave the bound
    report: SolverReport
    chunks: tuple[Chunk, ...] | None = None  # of the per-tensor formulation

    def certificate(self) -> Certificate:
        """What a plan of this schedule may claim. It holds no times: the same input gives the same plan."""
        peak_bytes = self.report.objective_bytes
        assert peak_bytes is not None
        status: Literal["optimal", "feasible"] = "optimal" if self.bound_bytes == peak_bytes else "feasible"
        return Certificate(
            status, self.formulation, self.report.name, self.report.version, peak_bytes, self.bound_bytes
        )  # fmt: skip


def find_schedule(
    question: Question, interval: int, formulation: Formulation, solver: solvers.SolverChoice, time_limit_seconds: float
) -> Schedule:
    """Find the exact rules' schedule of an interval within the budget, whatever the memory limit, and certify it.

    "auto" also solves the ILP if a solver is named, or if the peak is above training's own and the model is not too
    large; if that proves nothing in time, the rules' own proof counts. "flow" always solves it and trusts only its
    bound; "greedy" never does. Raises SolverError if a solver that was asked for fails, or contradicts a schedule.
    """
    problem = question.problem(interval)
    found = _by_rule(question, interval, problem)
    peak = None if found.flow is None else found.flow.peak_bytes(found.problem)
    plain = peak is None or peak == problem.training_peak_bytes or problem.steps > SECOND_OPINION_STEPS
    named = solver != "auto"
    if formulation == "greedy" or (formulation == "auto" and plain and not named):
        return found
    try:
        certified = _by_solver(question, interval, problem, found, solver, time_limit_seconds)
        if formulation == "flow" or certified.report.status != "feasible":
            return certified
        _logger.warning("%s proved nothing in %g s; the exact rule's proof is left", solver, time_limit_seconds)
    except solvers.NothingFoundError as error:
        if formulation == "flow":
            if found.flow is None:
                raise
            _logger.warning("%s; the exact rule's schedule is left, without a bound", error)
            bound = problem.training_peak_bytes
            return _replaced(found, bound, _report(None, peak, bound))
        _logger.warning("%s; the exact rule's proof is left", error)
    except SolverError as error:
        if named or formulation == "flow":
            raise
        _logger.warning("%s; the exact rule's proof is left", error)
    return found


def no_schedule() -> SolverReport:
    """Report that the exact rules have shown that no schedule keeps the limits."""
    return _report(None, None, None)


def find_per_tensor(
    question: Question, interval: int, chunk_bytes: int, solver: solvers.SolverChoice, time_limit_seconds: float
) -> Schedule:
    """Solve the paper's own ILP (snapshot policy) for an interval whose units have a schedule within the limits.

    "Optimal" then means the least peak among schedules of chunks of that size.

    Raises:
        SolverError: the solver failed, or found nothing in time; the model is too large; or tensors that are not whole
            units need finer chunks than the unit.
    """
    problem = question.every_step(interval)
    found = per_tensor.find_chunks(
        question.timeline,
        problem,
        chunk_bytes,
        peak_limit_bytes=question.peak_limit_bytes,
        solver=solver,
        time_limit_seconds=time_limit_seconds,
    )
    if found.chunks is None:
        raise SolverError(
            f"the per-tensor formulation has no schedule in chunks of {found.chunk_bytes} bytes, and finer ones have:"
            " take smaller chunks, or --formulation flow"
        )
    peak = per_tensor.peak_bytes(problem, found.chunks)
    if found.bound_bytes > peak:
        raise SolverError(f"{found.solve.name} claims a bound of {found.bound_bytes} bytes, and a schedule has {peak}")
    report = _report(found.solve, peak, found.bound_bytes)
    return Schedule(problem, None, 0, 0, found.bound_bytes, "per-tensor", report, found.chunks)


def _by_rule(question: Question, interval: int, problem: Problem) -> Schedule:
    """Schedule for the least peak, then the least stall; snapshots leave as early as these allow. Its own proof."""
    full = question.every_step(interval)
    peak = question.least_peak_bytes(interval)
    if peak is None:
        return Schedule(full, None, 0, 0, problem.training_peak_bytes, "greedy", _report(None, None, None))
    report = _report(None, peak, peak)
    if question.policy == "snapshot":
        return Schedule(full, greedy.snapshot_flow(full, peak), 0, 0, peak, "greedy", report)
    terms = question.least_stall(interval, peak)
    assert terms is not None  # the least peak is the peak of a schedule
    step = _wait_step(question, interval, problem, terms, peak)
    shrunk, full = question.shrunk(interval), full.waiting(terms.wait_units, step)
    waiting = problem.waiting(terms.wait_units, shrunk.block_of(step))
    flow = expand(shrunk, optimum.cheapest_flow(waiting, terms, peak), full)
    return Schedule(full, flow, step, terms.wait_units, peak, "greedy", report)


def _wait_step(question: Question, interval: int, problem: Problem, terms: Terms, peak_bytes: int) -> int:
    """Return where training waits: at the last deadline's anchor that serves, or at the boundary."""
    if not terms.wait_units or question.prices.queue_seconds:
        return 0  # the queue at the boundary sets the price
    blocks = question.shrunk(interval)
    steps = question.timeline.steps
    queued = question.timeline.queued_bytes(question.bandwidth_bytes_per_second)
    deadlines = [
        block
        for block, (before, due) in enumerate(pairwise((0, *problem.due)))
        if due > before and block and steps[blocks.ends[block]].kind == "anchor" and not queued[blocks.ends[block]]
    ]
    block = optimum.latest_wait(problem, terms, peak_bytes, [0, *deadlines])
    return blocks.ends[block] if block else 0


def _by_solver(
    question: Question,
    interval: int,
    problem: Problem,
    found: Schedule,
    solver: solvers.SolverChoice,
    time_limit_seconds: float,
) -> Schedule:
    """Solve the ILP. The exact rules' schedule stays unless the ILP's is better (then the rules would be wrong)."""
    model = flows.build(problem, question.policy, question.prices, question.budget(interval))
    solve = solvers.solve(model.lp, solver, time_limit_seconds)
    if solve.bound is None:  # infeasible
        if found.flow is not None:
            raise SolverError(f"{solve.name} says that there is no schedule, and there is one: choose another solver")
        return _replaced(found, found.bound_bytes, _report(solve, None, None))
    flow, wait = flows.extract(model), flows.extract_wait(model)
    peak, bound = flow.peak_bytes(problem), flows.peak_bound_bytes(problem, solve.bound)
    if found.flow is not None and found.flow.peak_bytes(found.problem) <= peak:
        peak = found.flow.peak_bytes(found.problem)
    else:
        full = question.every_step(interval).waiting(wait)
        flow = expand(question.shrunk(interval), flow, full)
        found = Schedule(full, flow, 0, wait, bound, "flow", found.report)
    if bound > peak:
        raise SolverError(f"{solve.name} claims a bound of {bound} bytes, and a schedule reaches {peak}")
    return _replaced(found, bound, _report(solve, peak, bound))


def _replaced(found: Schedule, bound_bytes: int, report: SolverReport) -> Schedule:
    """Return the same schedule with what the ILP proves about it."""
    return replace(found, bound_bytes=bound_bytes, formulation="flow", report=report)


def _report(solve: solvers.Solve | None, peak_bytes: int | None, bound_bytes: int | None) -> SolverReport:
    """Report in bytes; the status is what the bound proves, not what the solver claims."""
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
