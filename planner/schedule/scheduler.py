"""From a timeline to a plan: the paper's Algorithm 1 and, beyond it, the interval.

Finds the smallest interval (:mod:`.exact.interval`), else explains why none fits or relaxes the memory limit; then the
schedule of least peak and stall, certified (:mod:`.schedule.certify`); cuts it into chunks and replays the plan
(:mod:`.schedule.replay`).
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from typing import Literal

from checkflow.core.errors import PlanError
from checkflow.core.graph import TrainingGraph
from checkflow.core.machine.device import Device, DeviceKind
from checkflow.core.plan import Fingerprint, Plan, Policy, StateSpec, Wait
from checkflow.core.timeline import Timeline, check_timeline
from checkflow.core.units import MOST_BYTES, format_rate, format_size
from checkflow.planner.exact.interval import FrontierRow, Question, frontier, longest_interval, smallest_interval
from checkflow.planner.exact.problem import check_bandwidth, unit_for
from checkflow.planner.ilp.solvers import SolverChoice, SolveStatus
from checkflow.planner.schedule.certify import (
    Formulation,
    Schedule,
    SolverReport,
    find_per_tensor,
    find_schedule,
    no_schedule,
)
from checkflow.planner.schedule.chunks import make_chunks
from checkflow.planner.schedule.explain import explain, least_bandwidth
from checkflow.planner.schedule.replay import check_plan, simulate

_LAST_DIGITS = 1e-9


@dataclass(frozen=True)
class PlanRequest:
    """What is asked of a plan; PlanError if a number is out of range."""

    bandwidth_bytes_per_second: float  # of the link, from device to host: what this job may use of it
    memory_bandwidth_bytes_per_second: float  # of the device's own memory: prices snapshots
    memory_limit_bytes: int | None = None  # of the whole peak
    extra_memory_bytes: int | None = None  # of the peak, above training's own
    relax_memory: bool = False  # raise these two as little as possible if nothing fits
    policy: Policy = "direct"
    formulation: Formulation = "auto"  # "per-tensor" plans the snapshot policy, whatever the policy says
    solver: SolverChoice = "auto"
    time_limit_seconds: float = 60.0
    chunk_bytes: int = 8 * 1024**2
    # Stall allowed, as a share of training's time; None: as long as snapshots take, but no waiting for the link.
    overhead: float | None = None
    max_interval: int | None = None  # iterations from one checkpoint to the next; None: some 1,000
    unit_bytes: int | None = None  # None: chosen by the size of the state
    # The part of the whole link; ``bandwidth_bytes_per_second`` already includes it.
    link_share: float = 1.0
    copy_seconds: float = 0.0  # what each piece of state costs the whole link besides its bytes

    def __post_init__(self) -> None:
        for name in ("bandwidth_bytes_per_second", "memory_bandwidth_bytes_per_second"):
            value = getattr(self, name)
            if not 0 < value < MOST_BYTES:  # refuses NaN, too
                raise PlanError(f"{name} must be a number above zero and below 2**63, not {value}")
        if not self.time_limit_seconds > 0:  # infinite: none
            raise PlanError(f"time_limit_seconds must be a number above zero, not {self.time_limit_seconds}")
        for name in ("memory_limit_bytes", "extra_memory_bytes", "chunk_bytes", "unit_bytes"):
            value = getattr(self, name)
            if (isinstance(value, int) and value >= MOST_BYTES) or (isinstance(value, float) and value % 1):
                raise PlanError(f"{name} must be a whole number of bytes below 2**63, not {value}")
        for name in ("chunk_bytes", "unit_bytes", "max_interval"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, int) and value >= 1):
                raise PlanError(f"{name} must be a whole number, at least 1, not {value}")
        if not 0 < self.link_share <= 1:
            raise PlanError(f"link_share must be above 0 and at most 1, not {self.link_share}")
        for name in ("memory_limit_bytes", "extra_memory_bytes", "overhead", "copy_seconds"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise PlanError(f"{name} must not be negative, and is {value}")


@dataclass(frozen=True)
class Outcome:
    """The result of a request. ``plan`` is None iff the status is "infeasible"; then ``explanation`` says why."""

    status: SolveStatus
    plan: Plan | None
    formulation: Literal["flow", "per-tensor", "greedy"]
    policy: Policy
    solver: SolverReport
    least_bandwidth_bytes_per_second: int | None  # keeps the limits at every iteration; None: none does
    pieces: int  # in which the state crosses the link
    piece_bandwidth_bytes_per_second: float  # the link's for these (:func:`bandwidth_in_pieces`)
    explanation: str  # also why not every iteration, and how far a limit was relaxed
    frontier: tuple[FrontierRow, ...]  # shortest interval first, then least extra memory
    training_peak_bytes: int
    durable_bytes_per_second: float  # that storage must take for a checkpoint every iteration
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
    def wait_seconds(self) -> float | None:
        """The part of the stall in which training waits for the link."""
        if self.plan is None:
            return None
        return 0.0 if self.plan.wait is None else self.plan.wait.seconds

    @property
    def plan_peak_bytes(self) -> int | None:
        return None if self.plan is None else self.plan.plan_peak_bytes


def fingerprint_of(graph: TrainingGraph, device: Device) -> Fingerprint:
    return fingerprint_for(graph, device.name, device.kind)


def fingerprint_for(graph: TrainingGraph, device_name: str, device_kind: DeviceKind) -> Fingerprint:
    """Return the same for a device of which only name and kind are known."""
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
        device=device_name,
        device_kind=device_kind,
        compiled=graph.compiled,
    )


def pieces_of(timeline: Timeline, chunk_bytes: int) -> int:
    """Return the fewest copies that a timeline's state takes: each tensor in chunks of ``chunk_bytes``."""
    return sum(-(-size // chunk_bytes) for group in timeline.groups for _, size in group.members)


def bandwidth_in_pieces(timeline: Timeline, request: PlanRequest) -> float:
    """Return the bytes per second that the link gives to this state, if each piece also costs ``copy_seconds``.

    S bytes in n pieces (:func:`pieces_of`) take S / B + n · c seconds, so the link gives S / (S / B + n · c) instead of
    B bytes per second; with a share of the link, c counts as c / share. All bytes, training's own too, are slowed down
    alike. Not counted are tensors that the end of a step cuts once more, and neighbours that are copied as one.
    """
    seconds = pieces_of(timeline, request.chunk_bytes) * request.copy_seconds / request.link_share
    if not seconds:
        return request.bandwidth_bytes_per_second
    return timeline.state_bytes / (timeline.state_bytes / request.bandwidth_bytes_per_second + seconds)


def _of_whole_link(least: int | None, timeline: Timeline, request: PlanRequest) -> int | None:
    """Return the link that gives this bandwidth to the state in pieces; None: any link spends the time on pieces."""
    seconds = pieces_of(timeline, request.chunk_bytes) * request.copy_seconds / request.link_share
    if not least or not seconds:
        return least
    left_seconds = timeline.state_bytes / least - seconds
    whole = timeline.state_bytes / left_seconds if left_seconds > 0 else math.inf
    return math.ceil(whole) if whole < MOST_BYTES else None


def make_plan(timeline: Timeline, fingerprint: Fingerprint, request: PlanRequest, *, graph_peak_bytes: int) -> Outcome:
    """Make the best plan that satisfies a request, or explain why there is none.

    The order: the smallest interval within the limits on memory and stall; the least peak; under the direct policy the
    shortest stall at that peak, and snapshots that leave as early as these allow; under the snapshot policy the
    earliest end. The same input gives the same schedule, whichever solver certified it.

    "Optimal" is said of the peak among schedules that move whole units, and only with a bound that meets it. No
    schedule of single bytes is better by three units or more (state is rounded twice, the link once), and a stall
    budget is rounded by one more. A plan's true peak (``plan_peak_bytes``) is the certificate's objective, less the
    empty part of the first unit if that lies in a snapshot at the peak.

    Args:
        graph_peak_bytes: training's peak if everything were freed after its last use; reported in the plan.

    Raises:
        PlanError: the timeline is invalid, or the result fails its replay.
        SolverError: the solver asked for is missing or failed.
    """
    started = time.perf_counter()
    check_timeline(timeline)
    asked, bandwidth = request, bandwidth_in_pieces(timeline, request)
    check_bandwidth(bandwidth)
    request = replace(request, bandwidth_bytes_per_second=bandwidth, copy_seconds=0.0)
    per_tensor = request.formulation == "per-tensor"
    if per_tensor:
        request = replace(request, policy="snapshot")
    question = _question(timeline, request)
    longest = longest_interval(timeline, request.policy, request.max_interval)
    interval, relaxed = smallest_interval(question, longest), ""
    if interval is None and request.relax_memory:
        question, relaxed = _relaxed(question, longest)
        interval = smallest_interval(question, longest)
    plan, schedule, explanations = None, None, [relaxed] if relaxed else []
    if interval is None:  # the exact rules proved that none fits
        explanations.append(_why_not(question, longest))
    else:
        solver, limit_seconds = request.solver, request.time_limit_seconds
        if per_tensor:
            schedule = find_per_tensor(question, interval, request.chunk_bytes, solver, limit_seconds)
        else:
            schedule = find_schedule(question, interval, request.formulation, solver, limit_seconds)
        plan = _draft(question, fingerprint, request, schedule, interval)
        plan = replace(plan, graph_peak_bytes=graph_peak_bytes)
        check_plan(plan)
        plan = plan.sealed()
        if interval > 1:
            explanations.append(
                f"a checkpoint every {interval} iterations; for one every iteration: {explain(question)}"
            )
    pieces, seconds = pieces_of(timeline, request.chunk_bytes), timeline.iteration_seconds
    if explanations and bandwidth != asked.bandwidth_bytes_per_second:
        whole = format_rate(asked.bandwidth_bytes_per_second)
        explanations.append(f"in {pieces} pieces the link's {whole} are {format_rate(bandwidth)}")
    return Outcome(
        status="infeasible" if plan is None else plan.certificate.status,
        plan=plan,
        formulation="greedy" if schedule is None else schedule.formulation,
        policy=request.policy,
        solver=no_schedule() if schedule is None else schedule.report,
        least_bandwidth_bytes_per_second=_of_whole_link(least_bandwidth(question), timeline, asked),
        pieces=pieces,
        piece_bandwidth_bytes_per_second=bandwidth,
        explanation="; ".join(explanations),
        frontier=frontier(question, longest),
        training_peak_bytes=timeline.training_peak_bytes,
        durable_bytes_per_second=sum(spec.size_bytes for spec in fingerprint.state) / seconds if seconds else 0.0,
        plan_seconds=time.perf_counter() - started,
    )


def _question(timeline: Timeline, request: PlanRequest) -> Question:
    limits = [] if request.memory_limit_bytes is None else [request.memory_limit_bytes]
    if request.extra_memory_bytes is not None:
        limits.append(timeline.training_peak_bytes + request.extra_memory_bytes)
    return Question(
        timeline=timeline,
        unit_bytes=unit_for(timeline.state_bytes) if request.unit_bytes is None else request.unit_bytes,
        policy=request.policy,
        bandwidth_bytes_per_second=float(request.bandwidth_bytes_per_second),
        memory_bandwidth_bytes_per_second=float(request.memory_bandwidth_bytes_per_second),
        overhead=request.overhead,
        peak_limit_bytes=min(limits, default=None),
    )


def _why_not(question: Question, longest: int) -> str:
    if question.timeline.training_peak_bytes > question.peak_limit(question.problem(1)):
        return explain(question)
    if question.policy == "snapshot" and not question.deadlines_hold():
        return explain(question)  # no interval changes that
    reason = explain(question, longest)
    return reason if longest == 1 else f"even every {longest} iterations: {reason}"


def _relaxed(question: Question, longest: int) -> tuple[Question, str]:
    """Raise the memory limit as little as any interval needs; return the question and a line that says so."""
    limit, peak = question.peak_limit_bytes, question.least_peak_bytes(longest)
    if limit is None or peak is None:
        return replace(question, peak_limit_bytes=None), ""  # memory is not the limit
    return replace(question, peak_limit_bytes=peak), (
        f"no schedule fits the memory limit of {format_size(limit)}:"
        f" it was raised by {format_size(peak - limit)} ({peak - limit} bytes), as little as possible"
    )


def _draft(
    question: Question, fingerprint: Fingerprint, request: PlanRequest, schedule: Schedule, interval: int
) -> Plan:
    """Return the plan of a schedule, with the peak and stall of its chunks, in bytes."""
    chunks, wait = schedule.chunks, None
    if chunks is None:
        assert schedule.flow is not None
        chunks = make_chunks(question.timeline, schedule.problem, schedule.flow, request.chunk_bytes)
    if schedule.wait_units:
        # Replay subtracts the queue again: its last digits must not cost a unit.
        more = 1 + _LAST_DIGITS if question.prices.queue_seconds else 1
        wait = Wait(schedule.wait_step, question.prices.waiting_seconds(schedule.wait_units) * more)
    plan = Plan(
        fingerprint=fingerprint,
        policy=request.policy,
        bandwidth_bytes_per_second=question.bandwidth_bytes_per_second,
        unit_bytes=question.unit_bytes,
        timeline=question.timeline,
        chunks=chunks,
        graph_peak_bytes=0,
        plan_peak_bytes=0,
        stall_seconds=0.0,
        interval=interval,
        certificate=schedule.certificate(),
        memory_bandwidth_bytes_per_second=question.memory_bandwidth_bytes_per_second,
        wait=wait,
    )
    replay = simulate(plan)
    return replace(plan, plan_peak_bytes=replay.peak_bytes, stall_seconds=replay.stall_seconds)
