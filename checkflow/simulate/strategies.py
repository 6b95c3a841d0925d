"""The ways of making checkpoints that ``checkflow simulate`` compares, for the training step of a plan.

What each does, docs/how-to/simulate.md says. What writing takes from training beside the stalls is counted for none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from checkflow.core.errors import PlanError
from checkflow.core.plan import Plan
from checkflow.core.timeline import Timeline
from checkflow.core.units import MOST_BYTES, format_time
from checkflow.planner.schedule.compare import Comparison, compare_plan
from checkflow.planner.schedule.replay import simulate as replay_of
from checkflow.planner.schedule.replay import snapshot_stall_seconds
from checkflow.runtime.interval.algorithm import Costs, algorithm_1, choose, in_iterations, least_waste
from checkflow.simulate.simulation import Way

LEAST_ITERATION_SECONDS = 1e-9


@dataclass(frozen=True, slots=True)
class StorageSpeed:
    """What checkpoints are written to, and read from when a job starts again.

    Raises:
        PlanError: less than a byte per second, or more than any storage.
    """

    write_bytes_per_second: float
    read_bytes_per_second: float

    def __post_init__(self) -> None:
        for rate in (self.write_bytes_per_second, self.read_bytes_per_second):
            if not 1 <= rate < MOST_BYTES:
                raise PlanError(f"storage that takes or gives {rate} bytes per second")


@dataclass(frozen=True, slots=True)
class Ways:
    """The ways that there are for a plan, and in words why others are not among them."""

    ways: tuple[Way, ...]
    left_out: tuple[str, ...]


def ways_of(
    plan: Plan,
    storage: StorageSpeed,
    *,
    mtbf_seconds: float,
    overhead: float,
    memory_limit_bytes: int | None = None,
    every_seconds: Sequence[float] = (),
) -> Ways:
    """Each way of making checkpoints of a plan's training step.

    Args:
        overhead: of training's time, that CheckFreq's and checkflow's checkpoints may take.
        memory_limit_bytes: of the device, for CheckFreq's snapshots; None: enough for them.
        every_seconds: further rows: synchronous checkpoints so far apart.

    Raises:
        PlanError: an iteration takes no time.
    """
    known = compare_plan("", plan)
    iteration_seconds = known.iteration_seconds
    if not iteration_seconds >= LEAST_ITERATION_SECONDS:
        raise PlanError(f"an iteration of this plan takes {iteration_seconds} s: there is nothing to simulate")
    write_seconds = known.state_bytes / storage.write_bytes_per_second
    stop_seconds = known.synchronous_stall_seconds + write_seconds
    best = least_waste(1, iteration_seconds, stop_seconds, mtbf_seconds)
    ways = [
        _way(
            f"synchronous, every {format_time(seconds)}",
            in_iterations(1, iteration_seconds, seconds),
            stop_seconds,
            stop_seconds,
        )
        for seconds in every_seconds
    ]
    ways.append(_way("synchronous, least waste", best, stop_seconds, stop_seconds))
    checkfreq, why_not = _checkfreq(plan, known, write_seconds, overhead, memory_limit_bytes, mtbf_seconds)
    ways += checkfreq
    left_out = [f"CheckFreq: {why_not}"] if why_not else []
    costs = Costs(iteration_seconds, plan.stall_seconds, write_seconds, 0.0)
    durable_seconds = _finish_seconds(plan) + write_seconds
    for name, tiers in (("checkflow, host_buffers=1", False), ("checkflow", True)):
        chosen = choose(costs, plan.interval, overhead, mtbf_seconds=mtbf_seconds, tiers=tiers)
        if chosen is None:
            left_out.append(f"{name}: a checkpoint costs something, and may cost nothing")
        elif tiers or plan.stall_seconds:
            ways.append(Way(name, chosen.disk, chosen.memory, plan.stall_seconds, durable_seconds))
    return Ways(tuple(ways), tuple(left_out))


def _way(name: str, interval: int, stall_seconds: float, durable_seconds: float) -> Way:
    """All that is captured goes to storage."""
    return Way(name, interval, interval, stall_seconds, durable_seconds)


def dcp_way(plan: Plan, storage: StorageSpeed, *, mtbf_seconds: float) -> Way:
    """torch.distributed.checkpoint's async_save at its best: training waits for the copy of all state over the link;
    one save is under way at a time, at the interval that wastes least.
    """
    seconds = plan.timeline.iteration_seconds
    stall_seconds = plan.timeline.state_bytes / plan.bandwidth_bytes_per_second
    write_seconds = plan.fingerprint.state_bytes / storage.write_bytes_per_second
    interval = max(
        least_waste(1, seconds, stall_seconds, mtbf_seconds), math.ceil(max(0.0, write_seconds) / seconds), 1
    )
    return _way("DCP async_save, least waste", interval, stall_seconds, stall_seconds + write_seconds)


def restore_seconds(plan: Plan, storage: StorageSpeed) -> float:
    """What a job that starts again takes to read its checkpoint."""
    return plan.fingerprint.state_bytes / storage.read_bytes_per_second


def _checkfreq(
    plan: Plan,
    known: Comparison,
    write_seconds: float,
    overhead: float,
    memory_limit_bytes: int | None,
    mtbf_seconds: float,
) -> tuple[list[Way], str]:
    """CheckFreq as its Algorithm 1 says, and as wastes least; or why there is none."""
    timeline, seconds = plan.timeline, known.iteration_seconds
    copy_seconds = _copied_seconds(timeline, plan.bandwidth_bytes_per_second)
    if copy_seconds is None:
        return [], "training itself keeps the link busy all the time"
    on_cpu_seconds = _late_seconds(timeline, plan.bandwidth_bytes_per_second)
    on_gpu_seconds = snapshot_stall_seconds(timeline.state_bytes, plan.memory_bandwidth_bytes_per_second)
    fits = memory_limit_bytes is None or memory_limit_bytes - known.training_peak_bytes > timeline.state_bytes
    chosen = algorithm_1(
        iteration_seconds=seconds, copy_seconds=copy_seconds, write_seconds=write_seconds,
        cpu_stall_seconds=on_cpu_seconds, gpu_stall_seconds=on_gpu_seconds, fits=fits, overhead=overhead,
    )  # fmt: skip
    if chosen.interval is None:
        return [], "a checkpoint costs something, and may cost nothing"
    durable_seconds = copy_seconds + write_seconds + (chosen.stall_seconds if chosen.mode == "GPU" else 0.0)
    best = max(chosen.interval, least_waste(1, seconds, chosen.stall_seconds, mtbf_seconds))
    return [
        _way(f"CheckFreq, {chosen.mode} snapshot", chosen.interval, chosen.stall_seconds, durable_seconds),
        _way("CheckFreq, least waste", best, chosen.stall_seconds, durable_seconds),
    ], ""


def _late_seconds(timeline: Timeline, bandwidth_bytes_per_second: float) -> float:
    """What a CPU snapshot waits for: state that the link has not taken by its own first write."""
    reached = list(accumulate(timeline.capacities_bytes(bandwidth_bytes_per_second)))
    due, late = 0, 0
    for group in timeline.groups:  # sorted by deadline, what is never written last
        if group.first_write is not None:
            due += group.size_bytes
            late = max(late, due - reached[group.first_write - 1])
    return late / bandwidth_bytes_per_second


def _copied_seconds(timeline: Timeline, bandwidth_bytes_per_second: float) -> float | None:
    """Until what training leaves of the link has taken all state; None: it leaves nothing."""
    available = [0.0, *timeline.available_bytes(bandwidth_bytes_per_second)]
    ends = [0.0, *accumulate(step.duration_seconds for step in timeline.steps)]
    if not timeline.state_bytes:
        return 0.0
    if not available[-1] > 0:
        return None
    whole = math.ceil(timeline.state_bytes / available[-1]) - 1
    left_bytes = min(timeline.state_bytes - whole * available[-1], available[-1])
    if left_bytes <= 0:  # but for rounding it was a whole number of iterations
        return whole * ends[-1]
    after = next(n for n, reached in enumerate(available) if reached >= left_bytes)
    part = (left_bytes - available[after - 1]) / (available[after] - available[after - 1])
    return whole * ends[-1] + ends[after - 1] + part * (ends[after] - ends[after - 1])


def _finish_seconds(plan: Plan) -> float:
    """From a checkpoint's boundary until host memory has all of it, its stall included."""
    if not plan.chunks:
        return 0.0
    ends = list(accumulate(step.duration_seconds for step in plan.timeline.steps))
    iterations, step = divmod(replay_of(plan).finish_step, len(ends))
    return iterations * ends[-1] + ends[step] + plan.stall_seconds
