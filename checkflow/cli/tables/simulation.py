"""What ``checkflow simulate`` prints."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from checkflow.core.units import format_rate, format_seconds, format_size, format_time

if TYPE_CHECKING:
    from checkflow.core.plan import Plan
    from checkflow.planner.pipeline import Planned
    from checkflow.simulate.simulation import Simulation, Way
    from checkflow.simulate.strategies import StorageSpeed


@dataclass(frozen=True, slots=True)
class Given:
    """What was simulated, besides the failures."""

    plan: Plan
    storage: StorageSpeed
    overhead: float
    memory_limit_bytes: int | None  # None: unknown, assumed to be enough for any way
    left_out: tuple[str, ...]


def simulation_json(given: Given, found: Simulation) -> dict[str, Any]:
    """For ``checkflow simulate --json``; shares are of all the time."""
    plan, failures = given.plan, found.failures
    return {
        "model": plan.fingerprint.model,
        "device": plan.fingerprint.device,
        "explanation": "",
        "state_bytes": plan.fingerprint.state_bytes,
        "iteration_seconds": found.iteration_seconds,
        "bandwidth_bytes_per_second": plan.bandwidth_bytes_per_second,
        "memory_limit_bytes": given.memory_limit_bytes,
        "overhead": given.overhead,
        "storage_write_bytes_per_second": given.storage.write_bytes_per_second,
        "storage_read_bytes_per_second": given.storage.read_bytes_per_second,
        "mtbf_seconds": failures.mtbf_seconds,
        "shape": failures.shape,
        "restart_seconds": failures.restart_seconds,
        "duration_seconds": found.duration_seconds,
        "runs": found.runs,
        "seed": found.seed,
        "failures_a_run": found.failures_a_run,
        "results": [
            {
                **asdict(result.way),
                "useful_share": asdict(result.useful),
                "again_share": result.again,
                "stalls_share": result.stalls,
                "starts_share": result.starts,
                "lost_seconds": result.lost_seconds,
                "lost_iterations": result.lost_seconds / found.iteration_seconds,
                "most_lost_seconds": result.most_lost_seconds,
            }
            for result in found.results
        ],
        "left_out": list(given.left_out),
    }


def no_simulation_json(planned: Planned) -> dict[str, Any]:
    """The same without a plan, and so without a simulation."""
    fingerprint, explanation = planned.fingerprint, planned.outcome.explanation
    return {"model": fingerprint.model, "device": fingerprint.device, "explanation": explanation, "results": []}


def simulation_tables(given: Given, found: Simulation) -> Iterable[Table | Text]:
    """Where the time goes, by the way of making checkpoints."""
    failures, plan = found.failures, given.plan
    table = Table(
        title=Text(
            f"{plan.fingerprint.model} on {plan.fingerprint.device}: {format_time(found.duration_seconds)} with a "
            f"failure every {format_time(failures.mtbf_seconds)}",
            style="table.title",
        ),
        title_justify="left",
    )
    table.add_column("way", no_wrap=True)
    for column in ("every", "training", "9 runs of 10", "again", "stalls", "lost", "99 of 100"):
        table.add_column(column, justify="right", no_wrap=True)
    for result in found.results:
        useful = result.useful
        lost = [format_time(seconds) for seconds in (result.lost_seconds, result.most_lost_seconds)]
        table.add_row(
            result.way.name,
            format_time(result.way.interval * found.iteration_seconds),
            _percent(useful.mean),
            f"{_number(useful.low)} to {_percent(useful.high)}",
            _percent(result.again),
            _percent(result.stalls),
            *(lost if found.failures_a_run else "--"),
            style="bold" if result.way.name.startswith("checkflow") else "",
        )
    yield table
    for line in _notes(given, found):
        yield Text(f"- {line}")


def _notes(given: Given, found: Simulation) -> Iterable[str]:
    failures = found.failures
    count = f"{found.failures_a_run:,.0f}" if found.failures_a_run >= 100 else f"{found.failures_a_run:.3g}"
    yield (
        f"shares of the time of {found.runs:,} runs (seed {found.seed}), {count} failures in each in the mean, "
        f"the same for all ways; the rest is starts, {_percent(found.results[0].starts)}"
    )
    yield "lost: training that a failure undoes, in the mean, and what 99 failures of 100 do not exceed"
    yield (
        f"an iteration takes {format_seconds(found.iteration_seconds)}; storage takes "
        f"{format_size(given.plan.fingerprint.state_bytes)} at {format_rate(given.storage.write_bytes_per_second)}; "
        f"a start takes {format_time(failures.restart_seconds)}"
    )
    yield from (_way_line(result.way) for result in found.results)
    yield from (f"left out: {reason}" for reason in given.left_out)
    if given.memory_limit_bytes is None:
        yield "the device's memory is not known, and taken to be enough for CheckFreq's snapshots (--memory-limit)"
    if failures.shape != 1:
        yield "the intervals are those that waste least where failures come at random (--shape 1)"


def _way_line(way: Way) -> str:
    every = "each iteration" if way.interval == 1 else f"every {way.interval:,} iterations"
    if way.capture_interval < way.interval:
        every += f", and one in host memory every {way.capture_interval:,}"
    held = f"holds training for {format_seconds(way.stall_seconds)}" if way.stall_seconds else "holds nothing up"
    return f"{way.name}: {every}; a checkpoint {held}, and is durable after {format_time(way.durable_seconds)}"


def _percent(share: float) -> str:
    return f"{_number(share)} %"


def _number(share: float) -> str:
    return f"{100 * share:.2f}" if share >= 0.0095 else f"{100 * share:.2g}"
