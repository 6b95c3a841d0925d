"""What ``checkflow torture`` prints."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.table import Table
from rich.text import Text

from checkflow.core.units import format_seconds, format_size

if TYPE_CHECKING:
    from checkflow.torture.campaign import Kill, Torture


def torture_json(torture: Torture) -> dict[str, Any]:
    campaign = torture.campaign
    return {
        "command": list(campaign.command),
        "directory": None if torture.directory is None else str(torture.directory),
        "verdict": torture.verdict,
        "problems": [asdict(one) for one in torture.problems],
        "untried": torture.untried,
        "remarks": torture.remarks,
        "seed": campaign.seed,
        "kills_asked": campaign.kills,
        "kills": [asdict(one) for one in torture.kills],
        "lives": torture.lives,
        "checkpoints_seen": torture.checkpoints,
        "acknowledged_step": torture.acknowledged,
        "restorable_step": torture.found.restorable,
        "most_replayed_iterations": _most_replayed(torture),
        "most_directory_bytes": torture.most_bytes,
        "seconds": round(torture.seconds, 3),
    }


def torture_tables(torture: Torture) -> Iterable[Table | Text]:
    """The kills, notes, and the verdict. The job's own words are not markup."""
    if torture.kills:
        table = Table(title=escape(f"kills of {shlex.join(torture.campaign.command)}"), title_justify="left")
        table.add_column("", justify="right", no_wrap=True)
        for column, whole in (("signal", True), ("to", False), ("while", True)):  # a narrow terminal must not cut words
            table.add_column(column, overflow="fold", no_wrap=whole)
        for column in ("after", "newest before", "whole after", "went on from", "replayed at least"):
            table.add_column(column, justify="right")
        for number, kill in enumerate(torture.kills, 1):
            table.add_row(str(number), *_row(kill))
        yield table
    yield from (Text(f"- {remark}") for remark in torture.remarks)
    yield Text(_sum(torture))


def _row(kill: Kill) -> tuple[str, ...]:
    replayed = "-" if kill.replayed is None else str(kill.replayed)
    resumed = "-" if not kill.told else "begin" if kill.resumed_from is None else str(kill.resumed_from)
    return (
        kill.signal, escape(kill.victim), kill.moment, format_seconds(kill.seconds), _step(kill.acknowledged),
        _step(kill.restorable), resumed, replayed,
    )  # fmt: skip


def _step(step: int | None) -> str:
    return "none" if step is None else str(step)


def _most_replayed(torture: Torture) -> int | None:
    return max((kill.replayed for kill in torture.kills if kill.replayed is not None), default=None)


def _sum(torture: Torture) -> str:
    words = {
        "nothing lost": "nothing lost",
        "lost": "LOST",
        "not tried": "not tried as asked",
        "interrupted": "interrupted",
    }
    most = _most_replayed(torture)
    replayed = "" if most is None else f", at most {most} iterations repeated, by the reports"
    where = "" if torture.directory is None else f" in {torture.directory}, {format_size(torture.most_bytes)} at most"
    kills = len(torture.kills)
    return (
        f"{words[torture.verdict]}: {kills} kill{'' if kills == 1 else 's'} in {format_seconds(torture.seconds)}, "
        f"{torture.checkpoints} checkpoints seen{where}{replayed}; seed {torture.campaign.seed}"
    )
