"""The whole way from a model's name to a plan, and from a plan back to the model that it was made for."""

from __future__ import annotations

import contextlib
import gc
import re
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from checkflow.core.errors import CheckflowError, MismatchError, ModelError, TraceError, UnsupportedError
from checkflow.core.graph import TrainingGraph
from checkflow.core.machine.cluster import Cluster, cluster_of
from checkflow.core.machine.device import ComputeCapability, Device, find_device, usable_bytes
from checkflow.core.plan import Fingerprint, Plan, describe_mismatch
from checkflow.core.timeline import Granularity, Step, Timeline
from checkflow.core.training_step import TrainingStep
from checkflow.planner.iteration.optimizers import Target
from checkflow.planner.measure.machine import this_machine
from checkflow.planner.measure.torch_settings import torch_settings_kept
from checkflow.planner.model_file.load import load_training_step
from checkflow.planner.model_file.several_ranks import Ranks, parallelize, process_group
from checkflow.planner.schedule.baselines import Baselines, baselines
from checkflow.planner.schedule.compare import Comparison, make_comparison
from checkflow.planner.schedule.scheduler import Outcome, PlanRequest, fingerprint_of, make_plan
from checkflow.planner.timeline.collectives import Communication, communication, on_cluster, overlapped
from checkflow.planner.timeline.measured import (
    MeasuredStep,
    Progress,
    check_room,
    failures_reported,
    measure_step,
    move,
    rooflines,
    with_predictions,
)
from checkflow.planner.timeline.roofline import durations_seconds
from checkflow.planner.timeline.shares import global_bytes, last_share, replicas_of
from checkflow.planner.timeline.steps import make_timeline
from checkflow.planner.trace.trace import trace

_NUMBER = re.compile(r"_\d+\b")


@dataclass(frozen=True)
class Subject:
    """A training step to plan, as a user names it (:func:`.load.load_training_step`)."""

    target: str
    batch_size: int | None
    settings: Mapping[str, str]
    optimizer: str | None


@dataclass(frozen=True)
class Planned:
    """Everything known of a training step on a device once it is planned."""

    subject: Subject
    device: Device
    request: PlanRequest
    graph: TrainingGraph
    timeline: Timeline
    fingerprint: Fingerprint
    baselines: Baselines
    outcome: Outcome
    graph_peak_bytes: int
    trace_seconds: float  # building the model and tracing it, or running it
    plan_seconds: float
    measured: MeasuredStep | None = None  # None: durations are the roofline's
    several: SeveralRanks | None = None  # None: a plan for one process


@dataclass(frozen=True)
class SeveralRanks:
    """What is known of all ranks together, where a plan is for one of several."""

    ranks: Ranks
    cluster: Cluster
    communication: Communication
    global_state_bytes: int  # each replica once
    replicas: Mapping[int, int]  # the rank's state on the device, in bytes, by how many ranks hold the same


def default_memory_limit_bytes(device: Device) -> int:
    """Return what a job may use of a device's memory."""
    return usable_bytes(device.memory_bytes)


def plan_model(
    subject: Subject, device: Device, request: PlanRequest, granularity: Granularity, ranks: Ranks | None = None
) -> Planned:
    """Trace a training step and make the best plan for it; raises as loading, :func:`trace` and :func:`make_plan`.

    Args:
        ranks: plan for the first of several ranks, on the cluster that the device usually stands in.
    """
    begun = time.perf_counter()
    cluster = None if ranks is None else cluster_of(device.name, ranks.count)
    with torch_settings_kept(), process_group(ranks):
        graph = _trace(subject, device.kind, device.compute_capability, ranks)
        durations = durations_seconds(graph, device)  # while the model file's precision settings hold
    if ranks is None or cluster is None:
        timeline = make_timeline(graph, durations, granularity)
        return _planned(subject, device, request, graph, timeline, None, time.perf_counter() - begun)
    moved = [operator.collective for operator in graph.operators if operator.collective is not None]
    if any(one.kind in ("send", "receive") for one in moved):
        raise UnsupportedError(
            f"{graph.model} sends between two ranks: pipeline parallelism is not planned, as its stages differ"
        )
    if not any(one.ranks > 1 for one in moved):
        raise ModelError(
            f"{graph.model} has no collective, so its {ranks.count} ranks would not train one model: choose --parallel "
            "ddp or fsdp, or wrap the model in its file"
        )
    timeline = make_timeline(on_cluster(graph, cluster), overlapped(graph, durations, cluster), granularity)
    several = SeveralRanks(
        ranks,
        cluster,
        communication(graph, durations, cluster),
        global_bytes(graph.state, ranks.count),
        replicas_of(graph.state),
    )
    return _planned(subject, device, request, graph, timeline, None, time.perf_counter() - begun, several)


def _refuse_collectives(graph: TrainingGraph) -> None:
    """Refuse to plan one of several ranks as if it were alone."""
    for operator in graph.operators:
        if operator.collective is not None and operator.collective.ranks > 1:
            raise UnsupportedError(
                f"{graph.model} is one of {operator.collective.ranks} ranks ({operator.target}): --ranks plans several "
                "ranks, in a process group that checkflow plan makes itself"
            )


def plan_measured_model(
    subject: Subject,
    device: Device,
    request: PlanRequest,
    granularity: Granularity,
    *,
    progress: Progress = lambda part: None,
) -> Planned:
    """Build a training step for real, run it on this machine, and plan for what was measured.

    ``device`` is this machine's, as probed; ``progress`` is called with the name of each next part. Raises as
    :func:`measure_model` and :func:`make_plan`.
    """
    begun = time.perf_counter()
    with torch_settings_kept():
        measured = measure_model(subject, device, progress=progress)
    timeline = make_timeline(measured.graph, measured.durations_seconds, granularity)
    return _planned(subject, device, request, measured.graph, timeline, measured, time.perf_counter() - begun)


def measure_model(subject: Subject, device: Device, *, progress: Progress = lambda part: None) -> MeasuredStep:
    """Run a training step on this machine, and compare it with the device's roofline.

    The caller restores torch's settings (:func:`checkflow.planner.measure.torch_settings.torch_settings_kept`).

    Raises:
        ModelError, TraceError: the step cannot be built, or fails.
        CheckflowError: it is too large for this machine.
    """
    here = this_machine().device
    gc.collect()  # frees what an earlier step holds in cycles
    progress("looking whether it fits")
    needed_bytes = _needed_bytes(subject, device)
    check_room(subject.target, needed_bytes, here)
    with contextlib.redirect_stdout(sys.stderr):
        progress("building")
        with failures_reported(subject.target, here):
            name, step = _load(subject, here)
            move(step, here)
        measured = measure_step(step, name=name, progress=progress)
        return with_predictions(measured, rooflines(device))


def _needed_bytes(subject: Subject, device: Device) -> int:
    """Trace the device memory that training takes; 0 if the step cannot be traced, since it may still run."""
    try:
        graph = _trace(subject, device.kind, device.compute_capability)
    except TraceError:
        return 0
    return max(max(part, default=0) for part in graph.live_bytes(eager=True))


def _planned(
    subject: Subject,
    device: Device,
    request: PlanRequest,
    graph: TrainingGraph,
    timeline: Timeline,
    measured: MeasuredStep | None,
    trace_seconds: float,
    several: SeveralRanks | None = None,
) -> Planned:
    begun = time.perf_counter()
    whole, copied = timeline, graph
    if several is not None:
        copied, timeline = last_share(graph, timeline)
    fingerprint = fingerprint_of(copied, device)
    if several is not None:
        fingerprint = replace(fingerprint, ranks=several.ranks.count)
    graph_peak = max(max(part, default=0) for part in graph.live_bytes(eager=False))
    outcome = make_plan(timeline, fingerprint, request, graph_peak_bytes=graph_peak)
    return Planned(
        subject=subject,
        device=device,
        request=request,
        graph=graph,
        timeline=timeline,
        fingerprint=fingerprint,
        baselines=baselines(whole, outcome.piece_bandwidth_bytes_per_second),
        outcome=outcome,
        graph_peak_bytes=graph_peak,
        trace_seconds=trace_seconds,
        plan_seconds=time.perf_counter() - begun,
        measured=measured,
        several=several,
    )


def _trace(
    subject: Subject, target: Target, compute_capability: ComputeCapability | None, ranks: Ranks | None = None
) -> TrainingGraph:
    with contextlib.redirect_stdout(sys.stderr):  # the model's own prints are not our output
        name, step = _load(subject)
        if ranks is not None:
            step = parallelize(step, ranks, name)
        graph = trace(step, name=name, target=target, compute_capability=compute_capability)
    if ranks is None:
        _refuse_collectives(graph)
    return graph


def _load(subject: Subject, device: torch.device | None = None) -> tuple[str, TrainingStep]:
    return load_training_step(
        subject.target,
        batch_size=subject.batch_size,
        settings=subject.settings,
        optimizer=subject.optimizer,
        device=device,
    )


def compare_model(planned: Planned) -> Comparison:
    outcome, request = planned.outcome, planned.request
    return make_comparison(
        planned.subject.target,
        planned.fingerprint,
        planned.timeline,
        bandwidth_bytes_per_second=outcome.piece_bandwidth_bytes_per_second,
        link_share=request.link_share,
        memory_bandwidth_bytes_per_second=request.memory_bandwidth_bytes_per_second,
        policy=request.policy,
        status=outcome.status,
        peak_bytes=outcome.plan_peak_bytes,
        stall_seconds=outcome.stall_seconds,
        interval=outcome.interval,
        explanation=outcome.explanation,
        measured=None if planned.measured is None else planned.measured.times,
    )


def check_model(plan: Plan, subject: Subject) -> None:
    """Trace a training step anew and compare it with the plan.

    Raises:
        MismatchError: the plan was made for another training step; the message says what differs.
        ModelError, TraceError: the step cannot be built or traced.
    """
    with torch_settings_kept():
        planned = plan.fingerprint
        graph = _trace(subject, planned.device_kind, _compute_capability(planned.device))
    state = {entry.name: (entry.shape, entry.dtype) for entry in graph.state}
    lines = describe_mismatch(plan, state, dict(graph.optimizers))
    lines += _other_settings(plan.fingerprint, graph)
    if not lines:
        lines = _other_steps(plan.timeline, make_timeline(graph, [0.0] * len(graph.operators), plan.granularity))
    if lines:
        more = f" (and {len(lines) - 1} more differences)" if len(lines) > 1 else ""
        raise MismatchError(f"the plan was made for another training step: {lines[0]}{more}")


def _compute_capability(name: str) -> ComputeCapability | None:
    here = this_machine()
    if name == here.name:
        return here.compute_capability
    try:
        return find_device(name).compute_capability
    except CheckflowError:
        return None


def _other_settings(planned: Fingerprint, graph: TrainingGraph) -> list[str]:
    pairs = {
        "batch": (_batch_text(planned.batch), _batch_text(graph.batch)),
        "micro-batches": (str(planned.micro_batches), str(graph.micro_batches)),
        "autocast": (planned.autocast or "off", graph.autocast or "off"),
        "optimizers": (_pairs_text(planned.optimizers, ": "), _pairs_text(graph.optimizers, ": ")),
        "tied tensors": (_pairs_text(planned.ties, " = "), _pairs_text(graph.ties, " = ")),
        "compiled": (", ".join(planned.compiled) or "nothing", ", ".join(graph.compiled) or "nothing"),
    }
    return [f"{name}: {have} in the model, {want} in the plan" for name, (want, have) in pairs.items() if have != want]


def _batch_text(batch: tuple[tuple[tuple[int, ...], str], ...]) -> str:
    """Format as "float32 32×3×224×224, int64 32"."""
    return ", ".join(f"{dtype} {'×'.join(map(str, shape)) or 'scalar'}" for shape, dtype in batch) or "no tensor"


def _pairs_text(pairs: tuple[tuple[str, str], ...], between: str) -> str:
    return ", ".join(between.join(pair) for pair in pairs) or "none"


def _other_steps(planned: Timeline, found: Timeline) -> list[str]:
    """List where operators, memory or deadlines differ although the state is the same; durations are the device's."""
    if len(planned.steps) != len(found.steps):
        return [f"{len(found.steps)} steps in the model, {len(planned.steps)} in the plan"]
    lines = [
        f"step {want.label!r} with {want.live_bytes} bytes live is {have.label!r} with {have.live_bytes} in the model"
        for want, have in zip(planned.steps, found.steps, strict=True)
        if _kind(want) != _kind(have)
    ]
    due, now = _first_writes(planned), _first_writes(found)
    return lines + [
        f"{name} is first written in {_step_text(found, now.get(name))} in the model, in"
        f" {_step_text(planned, step)} in the plan"
        for name, step in due.items()
        if name not in now or now[name] != step
    ]


def _kind(step: Step) -> tuple[str, int, int]:
    """What identifies a step, without the numbers of equal operators: a trace and a record count those differently."""
    return _NUMBER.sub("", step.label), step.live_bytes, step.link_bytes


def _first_writes(timeline: Timeline) -> dict[str, int | None]:
    return {name: group.first_write for group in timeline.groups for name, _ in group.members}


def _step_text(timeline: Timeline, step: int | None) -> str:
    return "no step" if step is None else f"step {timeline.steps[step].label!r}"
