"""From a timeline to a plan: the paper's Algorithm 1, as far as a checkpoint of every iteration goes.

1. the exact rule gives a schedule (:mod:`checkflow.planner.greedy`), or shows that there is none;
2. if its peak is training's own, nothing can beat it; else the ILP certifies it (:mod:`checkflow.planner.certify`);
3. the limits are held against it; one that fails is explained (:mod:`checkflow.planner.explain`), or relaxed if asked;
4. the schedule becomes chunks, no larger than asked; what remains of the paper's loop over chunk sizes, since units are
   small enough for every step;
5. replay checks the plan (:mod:`checkflow.planner.replay`).
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from typing import Literal

from checkflow.errors import PlanError
from checkflow.graph import TrainingGraph
from checkflow.hardware import Device, format_size
from checkflow.plan import Certificate, Fingerprint, Plan, Policy, StateSpec
from checkflow.planner import greedy
from checkflow.planner.certify import Formulation, SolverReport, find_schedule
from checkflow.planner.chunks import make_chunks
from checkflow.planner.explain import Limits, explain, least_bandwidth
from checkflow.planner.problem import Flow, Problem, make_problem
from checkflow.planner.replay import check_plan, simulate
from checkflow.planner.solvers import SolverChoice, SolveStatus
from checkflow.timeline import Timeline


@dataclass(frozen=True)
class Request:
    """What is asked of a plan.

    Raises:
        PlanError: a number makes no sense.
    """

    bandwidth_bytes_per_second: float  # of the link, from device to host
    memory_bandwidth_bytes_per_second: float  # of the device's own memory: prices snapshots
    memory_limit_bytes: int | None = None  # of the whole peak
    extra_memory_bytes: int | None = None  # of the peak, above training's own
    relax_memory: bool = False  # raise these two as little as possible where nothing fits
    policy: Policy = "direct"
    formulation: Formulation = "auto"
    solver: SolverChoice = "auto"
    time_limit_seconds: float = 60.0
    chunk_bytes: int = 8 * 1024**2
    overhead: float | None = None  # stall allowed, as a share of the iteration; None: any
    unit_bytes: int | None = None  # None: chosen by the size of the state

    def __post_init__(self) -> None:
        for name in ("bandwidth_bytes_per_second", "memory_bandwidth_bytes_per_second", "time_limit_seconds"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise PlanError(f"{name} must be a number above zero, not {value}")
        for name in ("chunk_bytes", "unit_bytes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise PlanError(f"{name} must be at least one byte, not {value}")
        for name in ("memory_limit_bytes", "extra_memory_bytes", "overhead"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise PlanError(f"{name} must not be negative, and is {value}")


@dataclass(frozen=True)
class FrontierRow:
    """A trade-off that the link allows, limits aside: a checkpoint every ``interval`` iterations for this price."""

    interval: int
    stall_seconds: float
    extra_bytes: int


@dataclass(frozen=True)
class Outcome:
    """What came of a request. ``plan`` is None iff the status is "infeasible"; then ``explanation`` says why."""

    status: SolveStatus
    plan: Plan | None
    formulation: Literal["flow", "greedy"]
    policy: Policy
    solver: SolverReport
    least_bandwidth_bytes_per_second: int | None  # that keeps the same limits; None: no bandwidth does
    explanation: str  # also says to what a limit was relaxed; "" where there is nothing to say
    frontier: tuple[FrontierRow, ...]  # least extra memory first
    training_peak_bytes: int
    durable_bytes_per_second: float  # that the storage must take for a checkpoint of every iteration
    plan_seconds: float

    @property
    def chunks(self) -> int:
        return 0 if self.plan is None else len(self.plan.chunks)

    @property
    def interval(self) -> int | None:
        return None if self.plan is None else self.plan.interval

    @property
    def stall_seconds(self) -> float | None:
        return None if self.plan is None else self.plan.stall_seconds

    @property
    def plan_peak_bytes(self) -> int | None:
        return None if self.plan is None else self.plan.plan_peak_bytes


def fingerprint_of(graph: TrainingGraph, device: Device) -> Fingerprint:
    """What a plan for this graph on this device is made for."""
    return Fingerprint(
        model=graph.model,
        state=tuple(
            StateSpec(entry.name, entry.shape, entry.dtype, entry.size_bytes, entry.placement == "host")
            for entry in graph.state
        ),
        ties=graph.ties,
        batch=graph.batch,
        micro_batches=graph.micro_batches,
        autocast=graph.autocast,
        optimizers=graph.optimizers,
        device=device.name,
    )


def make_plan(timeline: Timeline, fingerprint: Fingerprint, request: Request, *, graph_peak_bytes: int) -> Outcome:
    """The best plan that satisfies a request, or why there is none.

    "Optimal" is said of the peak, among schedules that move whole units, and only with a bound that meets it; no
    schedule of single bytes is better by two units (of state and of link, rounded once each) or more. A plan's true
    peak (``plan_peak_bytes``) is the certificate's objective, less the empty part of the first unit where that lies in
    a snapshot at the peak.
    Under the direct policy the plan is also the one with the fewest snapshot bytes at that peak, then the least
    bytes x time held, then the earliest end; under the snapshot policy the one that ends first. The same input gives
    the same plan, whichever solver certified it.

    Args:
        graph_peak_bytes: training's peak if everything were freed after its last use; reported in the plan.

    Raises:
        PlanError: the timeline makes no sense, or the result fails its replay.
        SolverError: the solver asked for is missing or failed.
    """
    started = time.perf_counter()
    problem = make_problem(timeline, request.bandwidth_bytes_per_second, request.unit_bytes)
    most_snapshots = _most_snapshots(timeline, problem, request)
    schedule = find_schedule(
        problem, request.policy, most_snapshots, request.formulation, request.solver, request.time_limit_seconds
    )
    limit = _peak_limit(problem, request)
    fitting, plan, explanation = schedule.flow, None, ""
    if fitting is not None and limit is not None and fitting.peak_bytes(problem) > limit:
        if request.relax_memory:
            explanation = _relaxed(fitting.peak_bytes(problem), limit)
        else:
            fitting = None
    limits = Limits(request.policy, None if request.relax_memory else limit, most_snapshots)
    if fitting is None:
        explanation = explain(timeline, request.bandwidth_bytes_per_second, problem, limits)
    else:
        proof = schedule.certificate(fitting.peak_bytes(problem))
        plan = _draft(timeline, fingerprint, request, problem, fitting, proof)
        plan = replace(plan, graph_peak_bytes=graph_peak_bytes)
        check_plan(plan)
        plan = plan.sealed()
    seconds = timeline.iteration_seconds
    return Outcome(
        status="infeasible" if plan is None else plan.certificate.status,
        plan=plan,
        formulation=schedule.formulation,
        policy=request.policy,
        solver=schedule.report,
        least_bandwidth_bytes_per_second=least_bandwidth(timeline, limits, problem.unit_bytes),
        explanation=explanation,
        frontier=_frontier(timeline, fingerprint, request, problem),
        training_peak_bytes=problem.training_peak_bytes,
        durable_bytes_per_second=sum(spec.size_bytes for spec in fingerprint.state) / seconds if seconds else 0.0,
        plan_seconds=time.perf_counter() - started,
    )


def _most_snapshots(timeline: Timeline, problem: Problem, request: Request) -> int | None:
    """Units that may be snapshotted: each is read once and written once while training waits."""
    if request.overhead is None:
        return None
    stall_bytes = request.overhead * timeline.iteration_seconds * request.memory_bandwidth_bytes_per_second / 2
    return min(problem.total, int(stall_bytes / problem.unit_bytes))


def _peak_limit(problem: Problem, request: Request) -> int | None:
    limits = [] if request.memory_limit_bytes is None else [request.memory_limit_bytes]
    if request.extra_memory_bytes is not None:
        limits.append(problem.training_peak_bytes + request.extra_memory_bytes)
    return min(limits, default=None)


def _relaxed(peak_bytes: int, limit_bytes: int) -> str:
    more = peak_bytes - limit_bytes
    return (
        f"no schedule fits the memory limit of {format_size(limit_bytes)}:"
        f" it was raised by {format_size(more)} ({more} bytes), as little as possible"
    )


def _draft(
    timeline: Timeline, fingerprint: Fingerprint, request: Request, problem: Problem, flow: Flow, proof: Certificate
) -> Plan:
    """The plan of a flow, with the peak and the stall that its chunks have, in bytes."""
    plan = Plan(
        fingerprint=fingerprint,
        policy=request.policy,
        bandwidth_bytes_per_second=float(request.bandwidth_bytes_per_second),
        unit_bytes=problem.unit_bytes,
        timeline=timeline,
        chunks=make_chunks(timeline, problem, flow, request.chunk_bytes),
        graph_peak_bytes=0,
        plan_peak_bytes=0,
        stall_seconds=0.0,
        interval=1,
        certificate=proof,
        memory_bandwidth_bytes_per_second=float(request.memory_bandwidth_bytes_per_second),
    )
    replay = simulate(plan)
    return replace(plan, plan_peak_bytes=replay.peak_bytes, stall_seconds=replay.stall_seconds)


def _frontier(
    timeline: Timeline, fingerprint: Fingerprint, request: Request, problem: Problem
) -> tuple[FrontierRow, ...]:
    """Both ends of what a checkpoint of every iteration can cost: the least memory, and the shortest stall."""
    ends = [greedy.best_flow(problem, request.policy)]
    if request.policy == "direct":
        ends.append(greedy.direct_flow(problem, greedy.fewest_snapshots(problem)))
    rows = []
    for flow in ends:
        if flow is not None:
            peak = flow.peak_bytes(problem)
            proof = Certificate("feasible", "greedy", "none", "", peak, problem.training_peak_bytes)
            plan = _draft(timeline, fingerprint, request, problem, flow, proof)
            rows.append(FrontierRow(1, plan.stall_seconds, plan.plan_peak_bytes - problem.training_peak_bytes))
    return tuple(dict.fromkeys(rows))
