"""What ``checkflow plan``, ``compare`` and ``demo`` print."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from checkflow.cli.tables.measurement import measured_json, measured_rows
from checkflow.core.units import added, format_rate, format_seconds, format_size, format_stall, iterations, round_up

if TYPE_CHECKING:
    from checkflow.demo.kills import DemoResult
    from checkflow.planner.pipeline import Planned, SeveralRanks
    from checkflow.planner.schedule.certify import SolverReport
    from checkflow.planner.schedule.compare import Comparison


CHECKFREQ = "CheckFreq: an earlier system (FAST 2021), which copies all state at once"  # for those who do not know it


def plan_json(planned: Planned) -> dict[str, Any]:
    """For ``checkflow plan --json``; units are in the names, null means absent."""
    outcome, graph, base = planned.outcome, planned.graph, planned.baselines
    return {
        "model": planned.fingerprint.model,
        "status": outcome.status,
        "formulation": outcome.formulation,
        "policy": outcome.policy,
        "granularity": planned.timeline.granularity,
        "solver": dataclasses.asdict(outcome.solver),
        "operators": len(graph.operators),
        "steps": len(planned.timeline.steps),
        "state_tensors": len(graph.state),
        "state_bytes": graph.state_bytes,
        "parameters": graph.parameters,
        "flops": graph.flops,
        "chunks": outcome.chunks,
        "iteration_seconds": planned.timeline.iteration_seconds,
        "measured": None if planned.measured is None else measured_json(planned.measured.times),
        "bandwidth_bytes_per_second": planned.request.bandwidth_bytes_per_second,
        "link_share": planned.request.link_share,
        "pieces": outcome.pieces,
        "piece_bandwidth_bytes_per_second": outcome.piece_bandwidth_bytes_per_second,
        "least_bandwidth_bytes_per_second": outcome.least_bandwidth_bytes_per_second,
        "graph_peak_bytes": planned.graph_peak_bytes,
        "training_peak_bytes": planned.timeline.training_peak_bytes,
        "plan_peak_bytes": outcome.plan_peak_bytes,
        "checkfreq_peak_bytes": base.checkfreq_peak_bytes,
        "checkfreq_released_peak_bytes": base.checkfreq_released_peak_bytes,
        "synchronous_stall_seconds": base.synchronous_stall_seconds,
        "interval": outcome.interval,
        "stall_seconds": outcome.stall_seconds,
        "wait_seconds": outcome.wait_seconds,
        "durable_bytes_per_second": outcome.durable_bytes_per_second,
        "frontier": [dataclasses.asdict(row) for row in outcome.frontier],
        "explanation": outcome.explanation,
        "ranks": None if planned.several is None else _ranks_json(planned, planned.several),
        "trace_seconds": planned.trace_seconds,
        "plan_seconds": planned.plan_seconds,
    }


def _ranks_json(planned: Planned, several: SeveralRanks) -> dict[str, Any]:
    shared = planned.outcome.plan
    return {
        "count": several.ranks.count,
        "mesh": dict(several.ranks.mesh),
        "parallel": several.ranks.parallel,
        "cluster": several.cluster.name,
        "global_state_bytes": several.global_state_bytes,
        "bytes_by_replicas": {str(replicas): size for replicas, size in sorted(several.replicas.items())},
        "share_bytes": planned.fingerprint.state_bytes if shared is None else shared.fingerprint.state_bytes,
        "collectives": sum(operator.collective is not None for operator in planned.graph.operators),
        "collective_seconds": several.communication.seconds,
        "exposed_seconds": several.communication.exposed_seconds,
        "iteration_seconds": several.communication.iteration_seconds,
        "storage_bytes_per_second": storage_rate(planned, several),
    }


def storage_rate(planned: Planned, several: SeveralRanks) -> float:
    """The bytes per second that storage must take from all ranks together, by the plan or for every iteration."""
    outcome = planned.outcome
    interval, stall = outcome.interval or 1, outcome.stall_seconds or 0.0
    seconds = interval * several.communication.iteration_seconds + stall
    return several.global_state_bytes / seconds if seconds else 0.0


def plan_tables(planned: Planned) -> Iterable[Table]:
    """A plan, or what is known without one; and the alternatives, if a checkpoint costs something."""
    yield plan_table(planned)
    outcome = planned.outcome
    rows = [(row.interval, row.stall_seconds, row.extra_bytes, "") for row in outcome.frontier]
    if outcome.interval == 1 and not outcome.stall_seconds:
        return
    if outcome.plan is not None:
        extra = outcome.plan.plan_peak_bytes - outcome.training_peak_bytes
        rows.append((outcome.plan.interval, outcome.plan.stall_seconds, extra, "bold"))
    table = Table(
        title="What checkpoints cost, limits aside",
        title_justify="left",
        caption=None if outcome.plan is None else "the last row is the plan",
        caption_justify="left",
    )
    for column in ("every", "stall", "of the time", "extra memory"):
        table.add_column(column, justify="right", no_wrap=True)
    for interval, stall_seconds, extra_bytes, style in rows:
        share = _share_up(stall_seconds, interval * planned.timeline.iteration_seconds)
        extra_text = format_size(extra_bytes) if extra_bytes else "none"
        table.add_row(iterations(interval), format_stall(stall_seconds), share, extra_text, style=style)
    if rows:
        yield table


def plan_table(planned: Planned) -> Table:
    outcome, timeline, graph, base = planned.outcome, planned.timeline, planned.graph, planned.baselines
    training = timeline.training_peak_bytes
    table = _facts(f"{planned.fingerprint.model} on {planned.device.name}, granularity: {timeline.granularity}")
    table.caption, table.caption_justify = CHECKFREQ, "left"
    seconds = timeline.iteration_seconds
    table.add_row("status", outcome.status, f"{outcome.policy} policy, {certificate_line(outcome.solver)}")
    table.add_row(
        "iteration", format_seconds(seconds), f"{len(graph.operators)} operators in {len(timeline.steps)} steps"
    )
    for row in [] if planned.measured is None else measured_rows(planned.measured.times):
        table.add_row(*row)
    table.add_row(
        "state", format_size(graph.state_bytes), f"{len(graph.state)} tensors, {graph.parameters:,} parameters"
    )
    for row in [] if planned.several is None else _ranks_rows(planned, planned.several):
        table.add_row(*row)
    request = planned.request
    of_link = _of_link(request.bandwidth_bytes_per_second, request.link_share)
    if request.copy_seconds:
        of_link += f"{format_rate(outcome.piece_bandwidth_bytes_per_second)} in {outcome.pieces} pieces; "
    table.add_row("link", format_rate(request.bandwidth_bytes_per_second), f"{of_link}{_least_bandwidth_text(planned)}")
    table.add_section()
    table.add_row("training peak", format_size(training), "eager PyTorch, without checkpoints")
    if (peak := outcome.plan_peak_bytes) is not None:
        every = f"a checkpoint every {iterations(outcome.interval or 1)}"
        table.add_row("plan peak", format_size(peak), f"{added(peak, training)}, {every}", style="bold")
        table.add_row("plan stall", format_stall(outcome.stall_seconds or 0.0), _stall_text(planned))
    released = base.checkfreq_released_peak_bytes
    table.add_row("CheckFreq peak", format_size(base.checkfreq_peak_bytes), added(base.checkfreq_peak_bytes, training))
    table.add_row(
        "CheckFreq peak, released", format_size(released), f"{added(released, training)}, freed as the bytes leave"
    )
    waits = base.synchronous_stall_seconds
    table.add_row("synchronous stall", format_stall(waits), f"{_share(waits, seconds)} of the iteration")
    table.add_section()
    durable, interval = outcome.durable_bytes_per_second, outcome.interval or 1
    faster = f"; {format_rate(durable)} for every iteration" if interval > 1 else ""
    needed = f"storage must take, for every {iterations(interval)}{faster}"
    seconds = interval * timeline.iteration_seconds
    slower = seconds / (seconds + (outcome.stall_seconds or 0.0)) if seconds else 1.0
    table.add_row("durable rate", format_rate(durable / interval * slower), needed)
    if graph.compiled:
        table.add_row("compiled", "", f"{', '.join(graph.compiled)}: planned with eager time and memory")
    if outcome.plan is not None and outcome.explanation:
        table.add_row("note", "", outcome.explanation)
    return table


def _ranks_rows(planned: Planned, several: SeveralRanks) -> Iterable[tuple[str, str, str]]:
    layout = (
        " x ".join(f"{size} {name}" for name, size in several.ranks.mesh) or several.ranks.parallel or "by the file"
    )
    yield "ranks", str(several.ranks.count), f"{layout}, on {several.cluster.name}; the plan is one rank's"
    shared = ", ".join(
        f"{format_size(size)} on {'one rank' if replicas == 1 else f'{replicas} ranks'}"
        for replicas, size in sorted(several.replicas.items())
    )
    yield "state of all ranks", format_size(several.global_state_bytes), f"each replica once; of this rank: {shared}"
    yield "share", format_size(planned.fingerprint.state_bytes), "what this rank copies and writes; replicas share"
    parts, count = several.communication, sum(operator.collective is not None for operator in planned.graph.operators)
    yield (
        "collectives",
        format_seconds(parts.seconds),
        f"{count} of them; training waits {format_seconds(parts.exposed_seconds)}, which no deadline counts on: "
        f"{format_seconds(parts.iteration_seconds)} an iteration",
    )
    yield "storage rate", format_rate(storage_rate(planned, several)), "of all ranks together, as the plan saves"


def _stall_text(planned: Planned) -> str:
    outcome, plan = planned.outcome, planned.outcome.plan
    parts = [f"{outcome.chunks} chunks"]
    if plan is not None and plan.stall_seconds:
        share = _share(plan.stall_seconds, plan.interval * planned.timeline.iteration_seconds)
        parts.insert(0, f"a checkpoint, {share} of training's time")
        if plan.wait is not None:
            step = planned.timeline.steps[plan.wait.step % len(planned.timeline.steps)].words
            parts.append(f"{format_stall(plan.wait.seconds)} of it waits for the link at {step}")
    return ", ".join(parts)


def certificate_line(solver: SolverReport) -> str:
    """Who proved what: "HiGHS 1.15.1: bound 782 MB, gap 0 %"."""
    who = "exact rule" if solver.name == "none" else f"{solver.name} {solver.version}"
    if solver.objective_bytes is None or solver.bound_bytes is None:
        return f"{who}: no schedule"
    gap = f"{100 * (solver.gap or 0.0):.2g} %"
    return f"{who}: bound {format_size(solver.bound_bytes)}, gap {gap}"


def _of_link(bandwidth_bytes_per_second: float, share: float | None) -> str:
    """The part of the link that a job may use, if not all of it: "half of 25.0 GB/s; "."""
    if share is None or share == 1:
        return ""
    part = "half" if share == 0.5 else f"{100 * share:.3g} %"
    return f"{part} of {format_rate(bandwidth_bytes_per_second / share)}; "


def _least_bandwidth_text(planned: Planned) -> str:
    least = planned.outcome.least_bandwidth_bytes_per_second
    return "least bandwidth: none is enough" if least is None else f"least bandwidth: {format_rate(round_up(least))}"


def _facts(title: str) -> Table:
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column("what", no_wrap=True)
    table.add_column("how much", justify="right", no_wrap=True)
    table.add_column("more", overflow="fold")
    return table


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.3g} %" if whole else "no time"


def _share_up(part: float, whole: float) -> str:
    """Rounded up, so that an overhead as printed is enough."""
    if not whole or not part:
        return _share(part, whole)
    percent = 100 * part / whole
    digits = max(0, 2 - math.floor(math.log10(percent)))
    return f"{math.ceil(percent * 10**digits - 1e-6) / 10**digits:,.{digits}f} %"


def comparison_json(rows: Sequence[Comparison]) -> dict[str, Any]:
    return {
        "rows": [
            {**dataclasses.asdict(row), "measured": None if row.measured is None else measured_json(row.measured)}
            for row in rows
        ]
    }


def comparison_tables(rows: Sequence[Comparison]) -> Iterable[Table | Text]:
    """Peak and stall of each way to make checkpoints: one table per subject."""
    for row in rows:
        table = Table(
            title=f"{row.model}, {row.batch}, {row.device}, {_link_text(row)}, {row.granularity}",
            title_justify="left",
            caption=f"{_comparison_caption(row.checkflow_interval or 1)}\n{CHECKFREQ}",
            caption_justify="left",
        )
        table.add_column("way", no_wrap=True)
        for column in ("peak", "added to training", "stall", "of the time"):
            table.add_column(column, justify="right", no_wrap=True)
        for way, peak, seconds, interval in row.ways:
            style = "bold" if way.startswith("checkflow") else ""
            if peak is None or seconds is None:
                table.add_row(way, "no plan", style=style)
                continue
            share = _share(seconds, interval * row.iteration_seconds)
            more = added(peak, row.training_peak_bytes)
            table.add_row(way, format_size(peak), more, format_stall(seconds), share, style=style)
        yield table
        for what, how_much, text in [] if row.measured is None else measured_rows(row.measured):
            yield Text(f"{what}: {how_much}, {text}")


def _link_text(row: Comparison) -> str:
    of_link = _of_link(row.bandwidth_bytes_per_second, row.link_share).removesuffix("; ")
    return format_rate(row.bandwidth_bytes_per_second) + (f" ({of_link})" if of_link else "")


def _comparison_caption(interval: int) -> str:
    if interval == 1:
        return "each makes a checkpoint every iteration"
    return f"checkflow makes a checkpoint every {iterations(interval)}, the others every iteration"


def demo_json(planned: Planned, result: DemoResult) -> dict[str, Any]:
    return {
        "passed": result.passed,
        "plan": plan_json(planned),
        **dataclasses.asdict(result),
        "kills": [{**dataclasses.asdict(kill), "replayed": kill.replayed} for kill in result.kills],
    }


def demo_tables(result: DemoResult) -> Iterable[Table]:
    """What the kills cost, what checkpointing cost, and whether the checks hold."""
    kills = Table(title="the kills", title_justify="left")
    for column in ("killed in", "iterations done", "resumed from", "replayed"):
        kills.add_column(column, justify="left" if column == "killed in" else "right")
    for kill in result.kills:
        kills.add_row(kill.place, str(kill.iteration), str(kill.resumed_from), str(kill.replayed))
    yield kills
    cost = Table(title="time of an iteration (median)", title_justify="left")
    for column in ("without checkpoints", "with one every iteration", "of it held by checkpointing", "checkpoint"):
        cost.add_column(column, justify="right")
    more = 100 * (result.seconds_with / result.seconds_without - 1)
    cost.add_row(
        format_seconds(result.seconds_without),
        f"{format_seconds(result.seconds_with)} ({more:+.0f} %)",
        format_seconds(result.held_seconds),
        format_size(result.checkpoint_bytes),
    )
    yield cost
    checks = Table(title="checks", title_justify="left")
    for column in ("", "claim", "seen"):
        checks.add_column(column, overflow="fold")
    for check in result.checks:
        mark = Text("holds", "green") if check.holds else Text("FAILS", "bold red")
        checks.add_row(mark, check.claim, check.seen)
    yield checks
