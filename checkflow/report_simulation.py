"""What ``checkflow simulate`` prints."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from checkflow.hardware import format_rate, format_seconds, format_size, format_stall

if TYPE_CHECKING:
    from checkflow.plan import Plan
    from checkflow.simulating import Simulation, Storage, Way

_LONGER = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"))


def simulation_json(plan: Plan, storage: Storage, found: Simulation) -> dict[str, Any]:
    """The object that ``checkflow simulate --json`` prints; shares are of all the time."""
    return {
        "model": plan.fingerprint.model,
        "device": plan.fingerprint.device,
        "state_bytes": _state_bytes(plan),
        "storage_write_bytes_per_second": storage.write_bytes_per_second,
        "storage_read_bytes_per_second": storage.read_bytes_per_second,
        **dataclasses.asdict(found),
        "results": [
            {
                "way": result.way.name,
                "interval": result.way.interval,
                "stall_seconds": result.way.stall_seconds,
                "durable_seconds": result.way.durable_seconds,
                "useful_share": dataclasses.asdict(result.useful),
                "again_share": result.again,
                "checkpoints_share": result.checkpoints,
                "restarts_share": result.restarts,
                "lost_seconds": result.lost_seconds,
                "lost_iterations": result.lost_seconds / found.iteration_seconds,
                "most_lost_seconds": result.most_lost_seconds,
            }
            for result in found.results
        ],
    }


def simulation_tables(plan: Plan, storage: Storage, found: Simulation) -> Iterable[Table | Text]:
    """Where the time goes, by the way in which checkpoints are made."""
    failures = found.failures
    table = Table(
        title=f"{plan.fingerprint.model} on {plan.fingerprint.device}: {_time(found.duration_seconds)} with a failure "
        f"every {_time(failures.mtbf_seconds)}",
        title_justify="left",
    )
    table.add_column("way", no_wrap=True)
    for column in ("every", "training", "9 runs of 10", "again", "stalls", "lost", "99 of 100"):
        table.add_column(column, justify="right", no_wrap=True)
    for result in found.results:
        useful = result.useful
        table.add_row(
            result.way.name,
            _time(result.way.interval * found.iteration_seconds),
            _percent(useful.mean),
            f"{_number(useful.low)} to {_percent(useful.high)}",
            _percent(result.again),
            _percent(result.checkpoints),
            *((_time(result.lost_seconds), _time(result.most_lost_seconds)) if found.failures_a_run else ("-", "-")),
            style="bold" if result.way.name == "checkflow" else "",
        )
    yield table
    starting = f"; starting takes {_percent(found.results[0].restarts)}" if found.results else ""
    for line in (
        f"shares of the time of {found.runs:,} runs (seed {found.seed}), {found.failures_a_run:,.3g} failures in each, "
        f"the same for all ways{starting}",
        "lost: training that a failure undoes, in the mean, and what 99 failures of 100 do not exceed",
        f"an iteration takes {format_seconds(found.iteration_seconds)}; storage gets {format_size(_state_bytes(plan))} "
        f"at {format_rate(storage.write_bytes_per_second)}; a start takes {_time(failures.restart_seconds)}",
        *(_way_line(result.way) for result in found.results),
    ):
        yield Text(f"- {line}")


def _way_line(way: Way) -> str:
    every = "each iteration" if way.interval == 1 else f"every {way.interval:,} iterations"
    held = f"holds training for {format_stall(way.stall_seconds)}" if way.stall_seconds else "holds nothing up"
    return f"{way.name}: {every}; a checkpoint {held}, and is durable after {_time(way.durable_seconds)}"


def _state_bytes(plan: Plan) -> int:
    return sum(spec.size_bytes for spec in plan.fingerprint.state)


def _percent(share: float) -> str:
    return f"{_number(share)} %"


def _number(share: float) -> str:
    """Of a hundred; near all of it, what is missing is what tells."""
    return f"{100 * share:.2f}" if share >= 0.1 else f"{100 * share:.2g}"


def _time(seconds: float) -> str:
    """A time for people, of days too."""
    for scale, unit in _LONGER:
        if seconds >= scale * 0.9995:
            return f"{seconds / scale:.3g} {unit}"
    return format_stall(seconds)
