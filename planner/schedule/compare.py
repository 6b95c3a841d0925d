"""Compares a plan with other ways of making checkpoints. Needs a plan file only, and no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from checkflow.core.plan import Fingerprint, Plan
from checkflow.core.timeline import Timeline
from checkflow.planner.exact.interval import FrontierRow, Question, frontier, longest_interval
from checkflow.planner.schedule.baselines import baselines
from checkflow.planner.schedule.explain import TightInterval, least_bandwidth, tight_interval
from checkflow.planner.schedule.replay import snapshot_stall_seconds

if TYPE_CHECKING:
    from checkflow.planner.timeline.measured import StepTimes


_CURVE_POINTS = 25  # of a peak over bandwidths
_CURVE_SNAPSHOT_STEPS = 5_000  # of a horizon of the snapshot policy, which is searched step by step


class Way(NamedTuple):
    """One way of making checkpoints."""

    name: str
    peak_bytes: int | None  # None: no plan keeps the limits
    stall_seconds: float | None  # of one checkpoint
    interval: int  # iterations from one checkpoint to the next


@dataclass(frozen=True, slots=True)
class Comparison:
    """One training step under each way of making checkpoints: others every iteration, checkflow as planned."""

    source: str  # what the user named: a model or a plan file
    model: str
    device: str
    batch: str
    granularity: str
    policy: str
    status: str
    bandwidth_bytes_per_second: float  # the job's part of the link, less the cost of its pieces
    link_share: float | None  # the job's part; None: unknown (not in a plan file)
    iteration_seconds: float
    state_bytes: int
    training_peak_bytes: int  # synchronous checkpoints add nothing to it
    synchronous_stall_seconds: float
    checkfreq_peak_bytes: int
    checkfreq_released_peak_bytes: int
    checkfreq_gpu_stall_seconds: float
    checkfreq_cpu_stall_seconds: float
    checkflow_peak_bytes: int | None  # None: no plan keeps the limits
    checkflow_stall_seconds: float | None  # of one checkpoint
    checkflow_interval: int | None  # iterations from one checkpoint to the next
    explanation: str
    measured: StepTimes | None = None  # None: the times are the roofline's, or a plan file's

    @property
    def ways(self) -> tuple[Way, ...]:
        """Every way, checkflow's last."""
        training, stall = self.training_peak_bytes, self.checkfreq_gpu_stall_seconds
        interval = self.checkflow_interval or 1
        return (
            Way("synchronous", training, self.synchronous_stall_seconds, 1),
            Way("CheckFreq, GPU snapshot", self.checkfreq_peak_bytes, stall, 1),
            Way("CheckFreq, released", self.checkfreq_released_peak_bytes, stall, 1),
            Way("CheckFreq, CPU snapshot", training, self.checkfreq_cpu_stall_seconds, 1),
            Way(f"checkflow, {self.status}", self.checkflow_peak_bytes, self.checkflow_stall_seconds, interval),
        )


def compare_plan(source: str, plan: Plan) -> Comparison:
    return make_comparison(
        source,
        plan.fingerprint,
        plan.timeline,
        bandwidth_bytes_per_second=plan.bandwidth_bytes_per_second,
        link_share=None,
        memory_bandwidth_bytes_per_second=plan.memory_bandwidth_bytes_per_second,
        policy=plan.policy,
        status=plan.certificate.status,
        peak_bytes=plan.plan_peak_bytes,
        stall_seconds=plan.stall_seconds,
        interval=plan.interval,
        explanation="",
    )


def make_comparison(
    source: str,
    fingerprint: Fingerprint,
    timeline: Timeline,
    *,
    bandwidth_bytes_per_second: float,
    link_share: float | None,
    memory_bandwidth_bytes_per_second: float,
    policy: str,
    status: str,
    peak_bytes: int | None,
    stall_seconds: float | None,
    interval: int | None,
    explanation: str,
    measured: StepTimes | None = None,
) -> Comparison:
    """Add the baselines to a plan's figures (peak, stall and interval are None if there is no plan)."""
    base = baselines(timeline, bandwidth_bytes_per_second)
    return Comparison(
        source=source,
        model=fingerprint.model,
        device=fingerprint.device,
        batch=_batch_text(fingerprint),
        granularity=timeline.granularity,
        policy=policy,
        status=status,
        bandwidth_bytes_per_second=bandwidth_bytes_per_second,
        link_share=link_share,
        iteration_seconds=timeline.iteration_seconds,
        state_bytes=fingerprint.state_bytes,
        training_peak_bytes=timeline.training_peak_bytes,
        synchronous_stall_seconds=base.synchronous_stall_seconds,
        checkfreq_peak_bytes=base.checkfreq_peak_bytes,
        checkfreq_released_peak_bytes=base.checkfreq_released_peak_bytes,
        checkfreq_gpu_stall_seconds=(
            snapshot_stall_seconds(timeline.state_bytes, memory_bandwidth_bytes_per_second)
            + base.checkfreq_gpu_link_stall_seconds
        ),
        checkfreq_cpu_stall_seconds=base.checkfreq_cpu_stall_seconds,
        checkflow_peak_bytes=peak_bytes,
        checkflow_stall_seconds=stall_seconds,
        checkflow_interval=interval,
        explanation=explanation,
        measured=measured,
    )


def _batch_text(fingerprint: Fingerprint) -> str:
    """Return the first tensor of the batch, for people: "32x3x224x224"."""
    return "x".join(str(size) for size in fingerprint.batch[0][0]) if fingerprint.batch else ""


def binding_interval(plan: Plan) -> tuple[int | None, TightInterval | None]:
    """Find what a slower link would break first, at the plan's interval, peak and, if training waits, stall.

    Returns the least bandwidth (bytes per second) that keeps them, and the interval that forbids any less. Either is
    None if no link, or no single interval, binds.
    """
    question = replace(
        _without_limits(plan, overhead=None if plan.wait is None else _stall_share(plan)),
        peak_limit_bytes=plan.certificate.objective_bytes,
    )
    least = least_bandwidth(question, plan.interval)
    if not least or least == 1:
        return least, None
    return least, tight_interval(replace(question, bandwidth_bytes_per_second=least - 1), plan.interval)


def _stall_share(plan: Plan) -> float:
    """Return the stall as a share of training's time, with the empty part of a unit that the plan's stall omits."""
    unit_seconds = 2 * plan.unit_bytes / plan.memory_bandwidth_bytes_per_second if plan.snapshot_bytes else 0.0
    return (plan.stall_seconds + unit_seconds) / (plan.interval * plan.timeline.iteration_seconds)


@dataclass(frozen=True, slots=True)
class PeakCurve:
    """The least peak of a checkpoint every ``interval`` iterations that holds up training nowhere, by the link."""

    interval: int
    bandwidths_bytes_per_second: tuple[float, ...]  # rising; on a slower link than the first there is no such plan
    peaks_bytes: tuple[int, ...]


def peak_curves(plan: Plan) -> tuple[PeakCurve, ...]:
    """Return what other links would change, for intervals around the plan's."""
    question, curves = _without_limits(plan, overhead=None), []
    for interval in sorted({1, 2, 4, plan.interval, 2 * plan.interval}):
        if plan.policy == "snapshot" and interval * len(plan.timeline.steps) > _CURVE_SNAPSHOT_STEPS:
            break  # it would take long
        least = least_bandwidth(question, interval)
        if not least:
            continue
        # From the least link, where there is most to see, to beyond the plan's.
        ends = least, max(2.0 * plan.bandwidth_bytes_per_second, 4.0 * least)
        ratio = (ends[1] / ends[0]) ** (1 / (_CURVE_POINTS - 1))
        links = [ends[0] * ratio**index for index in range(_CURVE_POINTS)]
        if ends[0] <= plan.bandwidth_bytes_per_second:
            links = sorted({*links, plan.bandwidth_bytes_per_second})
        peaks = [replace(question, bandwidth_bytes_per_second=link).least_peak_bytes(interval) for link in links]
        found = [(link, peak) for link, peak in zip(links, peaks, strict=True) if peak is not None]
        curves.append(PeakCurve(interval, tuple(link for link, _ in found), tuple(peak for _, peak in found)))
    return tuple(curves)


def frontier_of(plan: Plan) -> tuple[FrontierRow, ...]:
    """Return what checkpoints of this training step cost over the plan's link, limits aside."""
    return frontier(_without_limits(plan, overhead=0.0), longest_interval(plan.timeline, plan.policy, None))


def _without_limits(plan: Plan, overhead: float | None) -> Question:
    return Question(
        timeline=plan.timeline,
        unit_bytes=plan.unit_bytes,
        policy=plan.policy,
        bandwidth_bytes_per_second=plan.bandwidth_bytes_per_second,
        memory_bandwidth_bytes_per_second=plan.memory_bandwidth_bytes_per_second or math.inf,
        overhead=overhead,
    )
