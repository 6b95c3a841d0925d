"""``checkflow report``, and ``checkflow compare`` for run reports: the tables of :mod:`.tables.run`, or a page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from checkflow.cli import options
from checkflow.cli.console import FOUND, print_json, print_parts, write_page


def report(
    directory: Annotated[str, typer.Argument(metavar="DIRECTORY", help="of a job's checkpoints, or a report.json")],
    html: options.Html = None,
) -> int:
    """Show what a job's runs did and cost: restarts, failures, where the time goes, and the plan's promises."""
    from checkflow.cli.tables import run as run_table
    from checkflow.core import run_report
    from checkflow.core.run_comparison import compare_run

    path = Path(directory) / run_report.FILE if Path(directory).is_dir() else Path(directory)
    runs = run_report.load(path)
    run_report.latest(runs, str(path))
    if html is not None:
        from checkflow.views.run import run_page

        write_page(run_page(directory, runs), html, said=True)
        return FOUND
    print_parts([run_table.lives_table(runs), *run_table.runs_tables([compare_run(str(path), runs, None)])])
    return FOUND


def reports_of_directories(subjects: Sequence[str]) -> list[str]:
    """Replace each directory of checkpoints by the report in it."""
    from checkflow.core.run_report import FILE

    return [str(inside) if (inside := Path(subject) / FILE).is_file() else subject for subject in subjects]


def any_report(subjects: Sequence[str]) -> bool:
    """Whether a subject is a run's report, or named like one."""
    from checkflow.core.run_report import FILE, is_report

    return any(Path(subject).name == FILE or is_report(subject) for subject in subjects if subject.endswith(".json"))


def compare_reports(subjects: Sequence[str], *, as_json: bool) -> None:
    """Print planned against measured, by each run's own plan or by the plan file among the subjects.

    Raises:
        typer.BadParameter: a model is among the subjects, or more than one plan.
        ReportError, PlanError: a file cannot be read, or is of another kind.
    """
    from checkflow.cli.tables import run as run_table
    from checkflow.core import plan as plans
    from checkflow.core import run_report
    from checkflow.core.run_comparison import compare_run
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
