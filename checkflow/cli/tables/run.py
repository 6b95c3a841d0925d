"""What ``checkflow compare`` prints for a run's report: its plan's promises beside the measurements."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from rich.table import Table

from checkflow.core.run_report import AllRanks, PlanInForce, RunReport
from checkflow.core.units import format_rate, format_seconds, format_size

Unit = Literal["seconds", "bytes", "bytes_per_second", "iterations"]


@dataclass(frozen=True, slots=True)
class Row:
    """One figure; None: there is no plan, or no measurement, as the note says."""

    what: str
    unit: Unit
    planned: float | None
    measured: float | None
    note: str

    @property
    def ratio(self) -> float | None:
        return self.measured / self.planned if self.planned and self.measured is not None else None


@dataclass(frozen=True, slots=True)
class RunComparison:
    """A run beside a plan."""

    source: str  # the report's file
    number: int  # of the run in the file, from 1
    runs: int
    run: RunReport
    plan: PlanInForce | None  # the one that ran last, or that the user named
    rows: tuple[Row, ...]

    @property
    def ran(self) -> bool:
        return self.plan == self.run.plan or (
            self.plan is not None and self.run.plan is not None and self.plan.digest == self.run.plan.digest
        )


def compare_run(source: str, runs: Sequence[RunReport], plan: PlanInForce | None) -> RunComparison:
    """Compare the newest of at least one run, the last, with a plan; None: its own."""
    run = runs[-1]
    chosen = run.plan if plan is None else plan
    return RunComparison(source, len(runs), len(runs), run, chosen, tuple(_rows(run, chosen)))


def _rows(run: RunReport, plan: PlanInForce | None) -> Iterable[Row]:
    measured, bandwidths, phases = run.measured, run.bandwidths, run.phases

    def planned(name: str) -> float | None:
        return None if plan is None else getattr(plan, name)

    yield Row(
        "iteration", "seconds", planned("iteration_seconds"), measured.iteration_seconds,
        "forward, backward and update: the median",
    )  # fmt: skip
    yield Row(
        "stall", "seconds", planned("stall_seconds"), measured.stall_seconds,
        "held at anchors and boundaries: the median",
    )  # fmt: skip
    reserved = "" if measured.peak_reserved_bytes is None else f"; {format_size(measured.peak_reserved_bytes)} reserved"
    given = (
        "allocated on the device" if measured.peak_exactly else "allocated before this plan: its own is at most that"
    )
    note = f"{given}{reserved}" if measured.peak_bytes is not None else f"not measured on {run.device}"
    yield Row("peak", "bytes", planned("peak_bytes"), measured.peak_bytes, note)
    note = "while it copied" if bandwidths.offload_bytes_per_second is not None else "not measured"
    if bandwidths.large_offload_bytes_per_second is not None:
        note += f"; {format_rate(bandwidths.large_offload_bytes_per_second)} in large copies"
    yield Row(
        "link", "bytes_per_second", planned("bandwidth_bytes_per_second"), bandwidths.offload_bytes_per_second, note
    )
    yield Row(
        "storage", "bytes_per_second", None if plan is None else _durable_rate(plan),
        bandwidths.persist_bytes_per_second, "planned: needed for the plan's interval",
    )  # fmt: skip
    done = phases.iterations
    waits = f"waited for storage and buffers: {format_seconds(phases.persist_wait.total_seconds)}"
    yield Row(
        "interval", "iterations", planned("interval"), done / run.captures if run.captures else None,
        f"{run.captures} captures in {done} iterations",
    )  # fmt: skip
    yield Row(
        "interval on storage", "iterations", run.frequency.disk_interval, done / run.committed if run.committed else
        None, f"{run.committed} committed; {waits}",
    )  # fmt: skip


def _durable_rate(plan: PlanInForce) -> float | None:
    seconds = plan.interval * plan.iteration_seconds + plan.stall_seconds
    return plan.state_bytes / seconds if seconds else None


def runs_json(comparisons: Sequence[RunComparison]) -> dict[str, Any]:
    """For ``checkflow compare --json`` with reports."""
    return {
        "reports": [
            {
                "source": one.source,
                "run": one.number,
                "runs": one.runs,
                "run_id": one.run.run_id,
                "model": one.run.model,
                "device": one.run.device,
                "clock": one.run.phases.clock,
                "iterations": one.run.phases.iterations,
                "plan_digest": None if one.plan is None else one.plan.digest,
                "plan_ran": one.plan is not None and one.ran,
                "rows": [{**asdict(row), "ratio": row.ratio} for row in one.rows],
                "phases": asdict(one.run.phases),
                "ranks": None if one.run.ranks is None else asdict(one.run.ranks),
            }
            for one in comparisons
        ]
    }


def runs_tables(comparisons: Sequence[RunComparison]) -> Iterable[Table]:
    """For each report two tables: planned against measured, and where the time went."""
    for one in comparisons:
        run = one.run
        table = Table(
            title=f"{run.model} on {run.device}, run {one.number} of {one.runs}: "
            f"{run.phases.iterations} iterations up to {run.iteration}",
            title_justify="left",
            caption=_caption(one),
            caption_justify="left",
        )
        table.add_column("figure", no_wrap=True)
        for column in ("planned", "measured", "of the planned"):
            table.add_column(column, justify="right", no_wrap=True)
        table.add_column("", overflow="fold")
        for row in one.rows:
            share = "" if row.ratio is None else f"{100 * row.ratio:.3g} %"
            table.add_row(row.what, _text(row, row.planned), _text(row, row.measured), share, row.note)
        yield table
        yield _phases_table(run)
        if run.ranks is not None:
            yield _ranks_table(run.ranks)


def _caption(one: RunComparison) -> str:
    if one.plan is None:
        return "no plan ran"
    if one.ran:
        origin = {
            "given": "given by the job",
            "cache": "kept from an earlier run",
            "recorded": "recorded from this job",
        }
        return f"the plan that ran, {origin[(one.run.plan or one.plan).source]}"
    return "this plan is not the one that ran"


def _text(row: Row, value: float | None) -> str:
    if value is None:
        return "-"
    if row.unit == "seconds":
        return format_seconds(value) if value else "none"
    if row.unit == "iterations":
        number = str(int(value)) if value == int(value) else f"{value:.3g}"
        return f"{number} iteration{'' if value == 1 else 's'}"
    return format_size(value) if row.unit == "bytes" else format_rate(value)


def _ranks_table(ranks: AllRanks) -> Table:
    said = [f"rank {ranks.slowest_writer} was the slowest to write"]
    if ranks.heard > len(ranks.each):
        said.append(f"of {ranks.heard} ranks, these were held longest")
    if ranks.heard < ranks.count:
        said.append(f"{ranks.count - ranks.heard} of {ranks.count} ranks have told nothing")
    if ranks.silent:
        said.append(f"ranks that do not answer: {', '.join(map(str, ranks.silent))}")
    table = Table(
        title="what checkpoints cost each rank",
        title_justify="left",
        caption="; ".join(said),
        caption_justify="left",
    )
    for column in ("rank", "held training", "wrote the newest in", "copied", "written", "failed"):
        table.add_column(column, justify="right", no_wrap=True)
    for one in ranks.each:
        sizes = (format_size(size) for size in (one.copied_bytes, one.written_bytes))
        seconds = (format_seconds(time) for time in (one.held_seconds, one.persist_seconds))
        table.add_row(str(one.rank), *seconds, *sizes, str(one.failed))
    table.add_section()
    table.add_row("all", "", "", format_size(ranks.copied_bytes), format_size(ranks.written_bytes), "")
    return table


def _phases_table(run: RunReport) -> Table:
    phases, whole = run.phases, run.phases.iteration.total_seconds
    table = Table(
        title="where an iteration's time goes",
        title_justify="left",
        caption="an iteration here is all from one boundary to the next; above, and in plans, "
        "its forward, backward and update alone",
        caption_justify="left",
    )
    table.add_column("phase", no_wrap=True)
    for column in ("median", "99th percentile", "in all", "of the time"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, value in asdict(phases).items():
        if name in ("clock", "iterations"):
            continue
        median, p99, total = value["median_seconds"], value["p99_seconds"], value["total_seconds"]
        table.add_row(
            name.replace("_", " ") if name != "forward_backward" else "forward and backward",
            *("-" if one is None else format_seconds(one) for one in (median, p99)),
            format_seconds(total),
            f"{100 * total / whole:.3g} %" if whole else "-",
            style="bold" if name == "iteration" else "",
        )
    return table
