"""What ``checkflow compare`` prints for a run's report: its plan's promises beside the measurements."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table

from checkflow.core.reports.run_comparison import RunComparison
from checkflow.core.reports.run_report import AllRanks, RunReport
from checkflow.core.units import format_seconds, format_size
from checkflow.views.run import LIVES_COLUMNS, lives_rows


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


def lives_table(runs: Sequence[RunReport]) -> Table:
    """Each run of a job: when it was, what it did again, and how it ended."""
    table = Table(title="runs of this job", title_justify="left")
    for column in LIVES_COLUMNS:
        last = column == LIVES_COLUMNS[-1]
        table.add_column(column, justify="left" if last else "right", no_wrap=not last, overflow="fold")
    for row in lives_rows(runs):
        table.add_row(*row)
    return table


def runs_tables(comparisons: Sequence[RunComparison]) -> Iterable[Table]:
    """For each report two tables: planned against measured, and where the time went."""
    for one in comparisons:
        run, source = one.run, f"{one.source}: " if len(comparisons) > 1 else ""
        table = Table(
            title=f"{source}{run.model} on {run.device}, run {one.number} of {one.runs}: "
            f"{run.phases.iterations} iterations up to {run.iteration}",
            title_justify="left",
            caption=one.origin,
            caption_justify="left",
        )
        table.add_column("figure", no_wrap=True)
        for column in ("planned", "measured", "of the planned"):
            table.add_column(column, justify="right", no_wrap=True)
        table.add_column("", overflow="fold")
        for row in one.rows:
            share = "" if row.ratio is None else f"{100 * row.ratio:.3g} %"
            table.add_row(row.what, row.text(row.planned), row.text(row.measured), share, row.note)
        yield table
        yield _phases_table(run)
        if run.ranks is not None:
            yield _ranks_table(run.ranks)


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
