"""``checkflow report``, and ``checkflow compare`` for run reports: tables of :mod:`.tables.run`, a page, a trace."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from checkflow.cli import options
from checkflow.cli.console import FOUND, complain, expect_page, print_json, print_parts, write_page, write_trace

if TYPE_CHECKING:
    from checkflow.core.plan import Plan


def report(
    directory: Annotated[str, typer.Argument(metavar="DIRECTORY", help="of a job's checkpoints, or a report.json")],
    plan: Annotated[
        Path | None, typer.Option("--plan", metavar="PLAN", help="hold the run against this plan [the one that ran]")
    ] = None,
    html: options.Html = None,
    perfetto: options.Perfetto = None,
    as_json: options.Json = False,
) -> int:
    """Show what a job's runs did and cost: restarts, failures, where the time goes, and the plan's promises.

    --perfetto writes the copies of the last captures, with those that the plan foresees beside them.
    """
    from checkflow.cli.tables import run as run_table
    from checkflow.core.reports import run_report

    expect_page(html)
    path = Path(directory) / run_report.FILE if Path(directory).is_dir() else Path(directory)
    runs = run_report.load(path)
    newest = run_report.latest(runs, str(path))
    if not as_json:
        print_parts([run_table.lives_table(runs)])
    compare_reports([str(path), *([] if plan is None else [str(plan)])], as_json=as_json)
    if html is not None:
        from checkflow.views.run import run_page

        write_page(run_page(directory, runs), html, said=not as_json)
    if perfetto is not None:
        write_trace(_trace_of(path.parent, newest.run_id, plan), perfetto, said=not as_json)
    return FOUND


def _trace_of(directory: Path, run_id: str, plan: Path | None) -> list[dict[str, Any]]:
    from checkflow.core.reports import capture_times
    from checkflow.views.perfetto import run_trace

    times = capture_times.load(directory / capture_times.FILE)
    if times.run_id != run_id:
        complain(f"{capture_times.FILE} is of another run than the report's newest: the trace shows that one")
    wanted = {capture.plan_digest for capture in times.captures} - {""}
    found = _plans_of(directory, plan, wanted)
    if wanted - found.keys():
        complain("the plan that ran is not in the directory: the trace has measured copies alone (--plan PLAN adds it)")
    return run_trace(times, found)


def _plans_of(directory: Path, given: Path | None, wanted: set[str]) -> dict[str, Plan]:
    """Return the plans of these digests: those that are kept in the directory, and the one that the user gives."""
    from checkflow.core import plan as plans
    from checkflow.core.errors import PlanError
    from checkflow.planner.schedule.replay import check_plan

    found = {}
    for path in (*directory.glob("plans/*.json"), *directory.glob("plans/00000-of-*/*.json")):
        try:
            read = plans.load(path)
            if read.digest in wanted:
                check_plan(read)
                found[read.digest] = read
        except PlanError as error:
            complain(str(error))
    if given is not None:
        read = plans.load(given)
        check_plan(read)
        found[read.digest] = read
    return found


def reports_of_directories(subjects: Sequence[str]) -> list[str]:
    """Replace each directory of checkpoints by the report in it."""
    from checkflow.core.reports.run_report import FILE

    return [str(inside) if (inside := Path(subject) / FILE).is_file() else subject for subject in subjects]


def any_report(subjects: Sequence[str]) -> bool:
    """Whether a subject is a run's report, or named like one."""
    from checkflow.core.reports.run_report import FILE, is_report

    return any(Path(subject).name == FILE or is_report(subject) for subject in subjects if subject.endswith(".json"))


def compare_reports(subjects: Sequence[str], *, as_json: bool) -> None:
    """Print planned against measured, by each run's own plan or by the plan file among the subjects.

    Raises:
        typer.BadParameter: a model is among the subjects, or more than one plan.
        ReportError, PlanError: a file cannot be read, or is of another kind.
    """
    from checkflow.cli.tables import run as run_table
    from checkflow.core import plan as plans
    from checkflow.core.reports import run_report
    from checkflow.core.reports.run_comparison import compare_run
    from checkflow.planner.schedule.replay import check_plan

    models = [subject for subject in subjects if not subject.endswith(".json")]
    if models:
        raise typer.BadParameter(
            f"a run's report is held against a plan file, not against a model: checkflow plan {models[0]} -o FILE first"
        )
    reports = [one for one in subjects if Path(one).name == run_report.FILE or run_report.is_report(one)]
    files = [subject for subject in subjects if subject not in reports]
    if len(files) > 1:
        raise typer.BadParameter(f"reports are held against one plan, not against {' and '.join(files)}")
    asked = None
    if files:
        plan = plans.load(files[0])
        check_plan(plan)
        asked = run_report.promises_of(plan, "given")
    rows = []
    for name in reports:
        runs = run_report.load(name)
        run_report.latest(runs, name)
        rows.append(compare_run(name, runs, asked))
    if as_json:
        print_json(run_table.runs_json(rows))
    else:
        print_parts(run_table.runs_tables(rows))
