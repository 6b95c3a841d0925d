"""``checkflow torture``: tests the promise on a user's own job and file system."""

from __future__ import annotations

import os
import random
import shlex
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from checkflow.cli import options
from checkflow.cli.console import complain, print_json, print_parts
from checkflow.cli.progress import working

if TYPE_CHECKING:
    from checkflow.torture.campaign import Torture

LOST, UNTRIED = 3, 4


def _number(text: str | float, what: str) -> float:
    try:
        return float(text)  # the default comes here too, as a number
    except ValueError:
        raise typer.BadParameter(f"not a {what}") from None


def _share(text: str | float) -> float:
    share = _number(text, f"share: {text!r} (write it like 0.2)")
    if not 0 <= share <= 1:
        raise typer.BadParameter(f"a share of the kills is from 0 to 1, not {text}")
    return share


def _seconds(text: str | float) -> float:
    seconds = _number(text, f"number of seconds: {text!r}")
    if not 0 < seconds < float("inf"):  # NaN neither
        raise typer.BadParameter(f"a number of seconds above 0, not {text}")
    return seconds


def torture(
    command: Annotated[list[str], typer.Argument(metavar="COMMAND", help="the command that starts the job, after --")],
    directory: Annotated[
        Path | None,
        typer.Option("--directory", metavar="DIR", help="the job's checkpoints [the directory that it locks]"),
    ] = None,
    kills: Annotated[int, typer.Option("--kills", metavar="N", min=1, help="number of kills")] = 20,
    seconds: Annotated[
        float | None,
        typer.Option("--seconds", metavar="S", parser=_seconds, help="stop killing after this time [no limit]"),
    ] = None,
    seed: Annotated[
        int | None, typer.Option("--seed", metavar="N", help="seed of all random choices [a new one, printed]")
    ] = None,
    patience: Annotated[
        float,
        typer.Option(
            "--patience",
            metavar="S",
            parser=_seconds,
            show_default="120",
            help="the job hangs if it neither ends nor makes a checkpoint for this many seconds",
        ),
    ] = 120.0,
    children: Annotated[
        float,
        typer.Option(
            "--children",
            metavar="SHARE",
            parser=_share,
            show_default="0.2",
            help="the share of kills aimed at one child process, such as a loader worker, or at another rank",
        ),
    ] = 0.2,
    terms: Annotated[
        float,
        typer.Option(
            "--terms",
            metavar="SHARE",
            parser=_share,
            show_default="0",
            help="the share of kills that are SIGTERM, as in a preemption",
        ),
    ] = 0.0,
    log: Annotated[
        Path | None, typer.Option("--log", metavar="FILE", help="append the job's output to this file [discarded]")
    ] = None,
    as_json: options.Json = False,
) -> int:
    """Kill a training job at random moments, restart it each time, and check that nothing is lost.

    For jobs that resume by themselves when they are restarted. torture only reads their checkpoints; the job itself
    continues to train in them. Exit codes: 0 nothing lost, 3 something was lost or damaged, 4 the job could not be
    tested, or not as often as asked.
    """
    if shutil.which(command[0]) is None:
        there = command[0] and os.path.lexists(command[0])
        fault = f"{command[0]} is no program that can be run" if there else f"no command {shlex.quote(command[0])}"
        raise typer.BadParameter(fault, param_hint="COMMAND")
    if directory is not None and directory.exists() and not directory.is_dir():
        raise typer.BadParameter(f"{directory} is no directory", param_hint="--directory")
    from checkflow.torture.campaign import Campaign, Torture

    home = None if directory is None else Path(os.path.abspath(directory))
    chosen = random.SystemRandom().randrange(2**32) if seed is None else seed
    with tempfile.TemporaryDirectory(prefix="checkflow-torture-") as folder:
        said = Path(folder) / "log" if log is None else log
        tried = Torture(Campaign(tuple(command), home, kills, seconds, chosen, patience, terms, children, said))
        return _try(tried, as_json=as_json)


def _try(torture: Torture, *, as_json: bool) -> int:
    try:
        with working("torturing") as torture.say:
            torture.run()
    except BaseException:  # Ctrl-C, or an error here: report what was tested so far
        if torture.lives or as_json:
            _print_result(torture, as_json=as_json)
        raise
    _print_result(torture, as_json=as_json)
    for problem in torture.problems:
        complain(f"{problem.promise}: {problem.text}")
    if torture.untried is not None:
        complain(torture.untried)
    return LOST if torture.problems else UNTRIED if torture.untried is not None else 0


def _print_result(torture: Torture, *, as_json: bool) -> None:
    from checkflow.cli.tables import torture as torture_table

    if as_json:
        print_json(torture_table.torture_json(torture))
    else:
        print_parts(torture_table.torture_tables(torture))
