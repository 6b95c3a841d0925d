"""What ``checkflow check`` and ``checkflow show`` print of a plan file."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from rich.text import Text

from checkflow.cli.tables import chart
from checkflow.core.units import added, format_rate, format_seconds, format_size, format_stall, iterations
from checkflow.planner.schedule.words import binding_text, certificate_text, later, step_words

if TYPE_CHECKING:
    from checkflow.core.plan import Plan
    from checkflow.planner.schedule.explain import TightInterval
    from checkflow.planner.schedule.replay import Replay

CHART_COLUMNS = 96
LINK_ROWS, MEMORY_ROWS = 2, 5


def check_json(plan: Plan, replay: Replay) -> dict[str, Any]:
    """For ``checkflow check --json``, of a plan that holds."""
    return {
        "holds": True,
        "model": plan.fingerprint.model,
        "device": plan.fingerprint.device,
        "policy": plan.policy,
        "granularity": plan.granularity,
        "chunks": len(plan.chunks),
        "training_peak_bytes": plan.timeline.training_peak_bytes,
        "plan_peak_bytes": replay.peak_bytes,
        "snapshot_bytes": replay.snapshot_bytes,
        "stall_seconds": replay.stall_seconds,
        "interval": plan.interval,
        "wait_seconds": 0.0 if plan.wait is None else plan.wait.seconds,
    }


def check_line(plan: Plan, replay: Replay) -> str:
    return (
        f"the plan holds: {len(plan.chunks)} chunks, peak {format_size(replay.peak_bytes)} "
        f"({added(replay.peak_bytes, plan.timeline.training_peak_bytes)}), "
        f"stall {format_stall(replay.stall_seconds)}, a checkpoint every {iterations(plan.interval)}"
    )


def show_json(
    plan: Plan, replay: Replay, least_bandwidth: int | None, interval: TightInterval | None
) -> dict[str, Any]:
    """For ``checkflow show --json``: what the screen shows, step by step."""
    steps = plan.timeline.steps * plan.interval

    def named(step: int) -> dict[str, Any]:
        return {"step": step, "label": _label(plan, step)}

    wait = plan.wait
    return {
        "model": plan.fingerprint.model,
        "device": plan.fingerprint.device,
        "policy": plan.policy,
        "granularity": plan.granularity,
        "certificate": dataclasses.asdict(plan.certificate),
        "interval": plan.interval,
        "wait": None if wait is None else {**named(wait.step), "seconds": wait.seconds},
        "iteration_seconds": plan.timeline.iteration_seconds,
        "bandwidth_bytes_per_second": plan.bandwidth_bytes_per_second,
        "needed_bandwidth_bytes_per_second": least_bandwidth,
        "binding": None if interval is None else _interval_json(interval),
        "training_peak_bytes": plan.timeline.training_peak_bytes,
        "plan_peak_bytes": replay.peak_bytes,
        "peak_at": named(replay.peak_step),
        "state_bytes": plan.timeline.state_bytes,
        "chunks": len(plan.chunks),
        "snapshot_bytes": replay.snapshot_bytes,
        "stall_seconds": replay.stall_seconds,
        "ends_at": named(replay.finish_step),
        "steps": [
            {
                "label": step.label,
                "duration_seconds": step.duration_seconds,
                "capacity_bytes": capacity,
                "sent_bytes": sent,
                "live_bytes": step.live_bytes,
                "snapshot_bytes": memory - step.live_bytes,
            }
            for step, capacity, sent, memory in zip(
                steps, replay.capacity_bytes, replay.link_bytes, replay.memory_bytes, strict=True
            )
        ],
    }


def _interval_json(interval: TightInterval) -> dict[str, Any]:
    needed = interval.bytes_per_second
    return {**dataclasses.asdict(interval), "bytes_per_second": needed if math.isfinite(needed) else None}


def _label(plan: Plan, step: int) -> str:
    """A step of the horizon, by its name."""
    iteration, index = divmod(step, len(plan.timeline.steps))
    return plan.timeline.steps[index].label + later(iteration)


def show_lines(
    plan: Plan, replay: Replay, least_bandwidth: int | None, interval: TightInterval | None
) -> Iterable[Text]:
    """A plan on one screen: the link and the memory from checkpoint to checkpoint, the peak, and what binds."""
    steps = plan.timeline.steps * plan.interval
    durations_seconds = [step.duration_seconds for step in steps]
    if plan.wait is not None:
        durations_seconds[plan.wait.step] += plan.wait.seconds
    profile = chart.TimelineProfile(
        durations_seconds=durations_seconds,
        capacities_bytes=replay.capacity_bytes,
        sent_bytes=replay.link_bytes,
        live_bytes=[step.live_bytes for step in steps],
        snapshot_bytes=[memory - step.live_bytes for memory, step in zip(replay.memory_bytes, steps, strict=True)],
    )
    made_for = plan.fingerprint
    of_ranks = f", one of {made_for.ranks} ranks" if made_for.ranks > 1 else ""
    yield Text(
        f"{made_for.model} on {made_for.device}{of_ranks}, {plan.policy} policy, granularity: {plan.granularity}",
        "bold",
    )
    yield Text(certificate_text(plan))
    columns = chart.columns(profile, CHART_COLUMNS)
    yield Text(f"\nlink, of {format_rate(plan.bandwidth_bytes_per_second)}", "bold")
    yield from _charted([column.link_share for column in columns], LINK_ROWS)
    top = max(1, replay.peak_bytes)
    yield Text(f"memory, of {format_size(top)}", "bold")
    yield from _charted([column.total_bytes / top for column in columns], MEMORY_ROWS)
    kept = [column.total_bytes - column.live_bytes for column in columns]
    if any(kept):
        yield Text(f"of it snapshots, of {format_size(max(kept))}", "bold")
        yield from _charted([size / max(kept) for size in kept], LINK_ROWS)
    yield Text(f"0{format_seconds(profile.seconds):>{CHART_COLUMNS - 1}}\n")
    yield Text(
        f"every    {iterations(plan.interval)}"
        + (f", waiting {format_stall(plan.wait.seconds)} at {step_words(plan, plan.wait.step)}" if plan.wait else "")
    )
    yield Text(
        f"peak     {format_size(replay.peak_bytes)}, training alone {format_size(plan.timeline.training_peak_bytes)}, "
        f"in step {replay.peak_step} of {len(steps)}: {step_words(plan, replay.peak_step)}"
    )
    yield Text(
        f"moved    {format_size(plan.timeline.state_bytes)} in {len(plan.chunks)} chunks, "
        f"{format_size(plan.snapshot_bytes)} through snapshots (stall: {format_stall(plan.stall_seconds)})"
    )
    yield Text(f"ends     in step {replay.finish_step}: {step_words(plan, replay.finish_step)}")
    yield Text("binding  " + binding_text(plan, least_bandwidth, interval))


def _charted(shares: Sequence[float], rows: int) -> Iterable[Text]:
    for line in chart.bars(shares, rows):
        yield Text(line, no_wrap=True)
