"""An independent simulator: it walks a plan step by step and counts, knowing nothing of how the plan was made.

Needs only the plan, no solver and no graph, so that a training job can check what it is about to run.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from checkflow.core.errors import PlanError
from checkflow.core.plan import Chunk, Plan, validate
from checkflow.core.units import format_size


@dataclass(frozen=True)
class Replay:
    """What a plan does, in whole bytes. Tuples have one entry for each step of the horizon."""

    peak_bytes: int
    peak_step: int  # the first step that reaches the peak
    memory_bytes: tuple[int, ...]  # training's own and snapshots
    link_bytes: tuple[int, ...]  # sent in the step
    capacity_bytes: tuple[int, ...]  # the most that could be sent
    snapshot_bytes: int
    stall_seconds: float  # of one checkpoint: the wait for the link, and the copies inside device memory
    finish_step: int  # the last step in which something leaves; 0 if nothing does


def check_plan(plan: Plan) -> Replay:
    """Replay a plan; PlanError at the first broken rule, or claim (peak, stall, certificate) that does not hold.

    Every byte of every state tensor leaves exactly once: directly by the tensor's deadline, or from a snapshot made by
    then in an earlier step than it leaves. No step exceeds the link's capacity, counted in the plan's units. A snapshot
    occupies memory from the step that makes it through the step in which it leaves.
    """
    validate(plan)
    _check_order(plan)
    replay = simulate(plan)
    for step, (used, capacity) in enumerate(zip(replay.link_bytes, replay.capacity_bytes, strict=True)):
        if used > capacity:
            raise PlanError(f"the plan moves {used} bytes in {_where(plan, step)}, whose link takes {capacity}")
    _check_claims(plan, replay)
    return replay


def simulate(plan: Plan) -> Replay:
    """Count what a plan does, without judging it."""
    unit = plan.unit_bytes
    if unit < 1:
        raise PlanError(f"the plan counts in units of {unit} bytes")
    units = plan.capacities_bytes(unit)
    link, change = [0] * plan.horizon_steps, [0] * (plan.horizon_steps + 1)
    for chunk in plan.chunks:
        link[chunk.offload_step] += chunk.length_bytes
        if chunk.snapshot_step is not None:
            change[chunk.snapshot_step] += chunk.length_bytes
            change[chunk.offload_step + 1] -= chunk.length_bytes
    live = [step.live_bytes for step in plan.timeline.steps]
    memory = [now + held for now, held in zip(live * plan.interval, accumulate(change), strict=False)]
    peak = max(memory)
    return Replay(
        peak_bytes=peak,
        peak_step=memory.index(peak),
        memory_bytes=tuple(memory),
        link_bytes=tuple(link),
        capacity_bytes=tuple(capacity * unit for capacity in units),
        snapshot_bytes=plan.snapshot_bytes,
        stall_seconds=snapshot_stall_seconds(plan.snapshot_bytes, plan.memory_bandwidth_bytes_per_second)
        + (0.0 if plan.wait is None else plan.wait.seconds),
        finish_step=max((chunk.offload_step for chunk in plan.chunks), default=0),
    )


def snapshot_stall_seconds(snapshot_bytes: int, memory_bandwidth_bytes_per_second: float) -> float:
    """Return how long training waits for copies inside device memory: each byte is read once and written once.

    Raises PlanError for snapshots without a known bandwidth.
    """
    if not snapshot_bytes:
        return 0.0
    if not memory_bandwidth_bytes_per_second > 0:
        raise PlanError("the plan makes snapshots and does not say how fast the device's memory is")
    return 2 * snapshot_bytes / memory_bandwidth_bytes_per_second


def _check_order(plan: Plan) -> None:
    """Refuse a plan that mixes policies, or whose chunks are not in canonical order."""

    def place(chunk: Chunk) -> tuple[int, int, str, int]:
        deadline = plan.deadlines[chunk.tensor]
        return (
            chunk.offload_step,
            plan.horizon_steps if deadline is None else deadline,
            chunk.tensor,
            chunk.offset_bytes,
        )

    if list(plan.chunks) != sorted(plan.chunks, key=place):
        raise PlanError("the plan's chunks are not in order (step, deadline, tensor, offset)")
    if plan.policy == "snapshot" and any(chunk.snapshot_step is None for chunk in plan.chunks):
        raise PlanError("the plan's policy is to snapshot, and a chunk leaves the live tensor")


def _check_claims(plan: Plan, replay: Replay) -> None:
    if plan.plan_peak_bytes != replay.peak_bytes:
        raise PlanError(
            f"the plan claims a peak of {plan.plan_peak_bytes} bytes ({format_size(plan.plan_peak_bytes)}),"
            f" and reaches {replay.peak_bytes} in {_where(plan, replay.peak_step)}"
        )
    if plan.stall_seconds != replay.stall_seconds:
        raise PlanError(f"the plan claims a stall of {plan.stall_seconds} s, and has {replay.stall_seconds} s")
    certificate = plan.certificate
    rounding = certificate.objective_bytes - replay.peak_bytes
    if not 0 <= rounding < plan.unit_bytes:
        raise PlanError(
            f"the plan's certificate is for a peak of {certificate.objective_bytes} bytes,"
            f" and the plan reaches {replay.peak_bytes}"
        )
    if certificate.status == "optimal" and certificate.bound_bytes < certificate.objective_bytes:
        raise PlanError("the plan's certificate says optimal, and its bound does not meet its objective")


def _where(plan: Plan, step: int) -> str:
    """A step of the horizon, in words."""
    iteration, index = divmod(step, len(plan.timeline.steps))
    later = f" of iteration {iteration + 1}" if iteration else ""
    return f"step {plan.timeline.steps[index].label!r}{later}"
