"""Tables of measured times: what a machine can do, and how long a training step took on it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from checkflow.core.units import format_flops, format_rate, format_seconds, format_size

if TYPE_CHECKING:
    from checkflow.planner.measure.probe import Probed
    from checkflow.planner.measure.timing import Figure, Spread
    from checkflow.planner.timeline.measured import StepTimes


def probe_json(probed: Probed) -> dict[str, Any]:
    """For ``checkflow probe --json``: the device as in its file, and each figure's spread."""
    return {
        "device": dataclasses.asdict(probed.device),
        "figures": [
            {
                "name": figure.name,
                "unit": figure.unit,
                **spread_json(figure.spread),
                "matrix_units": figure.matrix_units,
                "how": figure.how,
            }
            for figure in probed.figures
        ],
        "notes": list(probed.notes),
    }


def spread_json(spread: Spread) -> dict[str, float | int]:
    return dataclasses.asdict(spread)


def probe_tables(probed: Probed) -> Iterable[Table | Text]:
    """Every figure with its spread, and notes."""
    device = probed.device
    table = Table(
        title=f"{device.name}, {format_size(device.memory_bytes)} of memory",
        title_justify="left",
        caption="median of the repetitions; beside it the least and the most of them",
        caption_justify="left",
    )
    for column, justify in (("figure", "left"), ("median", "right"), ("least", "right"), ("most", "right")):
        table.add_column(column, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    table.add_column("times", justify="right")
    table.add_column("on what", overflow="fold")
    for figure in probed.figures:
        spread = figure.spread
        values = [_value(figure, value) for value in (spread.median, spread.least, spread.most)]
        table.add_row(figure.name, *values, str(spread.count), figure.how)
    yield table
    for note in probed.notes:
        yield Text(f"- {note}")


def _value(figure: Figure, value: float) -> str:
    if figure.unit == "seconds":
        return format_seconds(value)
    return format_rate(value) if figure.unit == "bytes_per_second" else format_flops(value)


def measured_json(times: StepTimes) -> dict[str, Any]:
    """For ``checkflow plan --device auto --json``: the training step as it ran."""
    return {
        "step_seconds": spread_json(times.step),
        "recorded_seconds": spread_json(times.recorded),
        "operator_quartile_share": times.operator_quartile_share,
        "predictions": [
            {"device": one.device, "seconds": one.seconds, "predicted_to_measured": one.ratio}
            for one in times.predictions
        ],
    }


def measured_rows(times: StepTimes) -> Iterable[tuple[str, str, str]]:
    """Rows below the iteration's: how far its time spreads, and the roofline's prediction."""
    step = times.step
    ends = f"{format_seconds(step.least)} to {format_seconds(step.most)} in {step.count} iterations"
    operators = f"operators spread by {100 * times.operator_quartile_share:.1f} % (middle half)"
    yield "measured", format_seconds(step.median), f"{ends}; {operators}"
    for one in times.predictions:
        yield (
            "roofline",
            format_seconds(one.seconds),
            f"{one.ratio:.2f} of the measured, for {one.device}",
        )
