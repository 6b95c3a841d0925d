"""The page of ``checkflow simulate --html``: the useful share of time on clusters of every size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import log10
from typing import Any

from checkflow.core.plan import Plan
from checkflow.core.units import format_rate, format_seconds, format_size, format_time
from checkflow.simulate import scaling
from checkflow.simulate.scaling import Point
from checkflow.simulate.strategies import StorageSpeed
from checkflow.views import palette
from checkflow.views.page import Chart, Words, label, render

_COLOURS = {
    "checkflow": palette.CHECKFLOW,
    "checkflow, host_buffers=1": palette.SHADES[3],
    "CheckFreq, least waste": palette.CHECKFREQ,
    "DCP async_save, least waste": palette.TRAFFIC,
    "synchronous, least waste": palette.STORAGE,
}
_OTHERS = (palette.BACKWARD, palette.SNAPSHOT, palette.DATA, palette.TRAINING)
_HEIGHT = 470
_LOOKS = {"hovermode": "x unified"}
_DALY = "synchronous, by Young and Daly's formulas"


def simulation_page(
    by_gpus: Sequence[Point],
    by_time: Sequence[Point],
    plan: Plan,
    storage: StorageSpeed,
    *,
    restart_seconds: float,
    duration_seconds: float,
    shape: float,
) -> str:
    """Return a page of two charts: over the number of GPUs, and over the time between failures.

    Raises:
        ViewError: plotly is not installed.
    """
    assumed = (
        f"Computed: {scaling.RUNS} simulated runs of {format_time(duration_seconds)} for each point, with the same "
        "failures for all ways; each way at the interval that it would choose there.",
        f"From the plan: an iteration takes {format_seconds(plan.timeline.iteration_seconds)}, the state is "
        f"{format_size(plan.fingerprint.state_bytes)} a GPU, the link moves "
        f"{format_rate(plan.bandwidth_bytes_per_second)}. These figures are measured if the plan is one of a job, or "
        "made with --device auto or a probed device; otherwise they are the planner's estimates.",
        f"Assumed: storage takes {format_rate(storage.write_bytes_per_second)} from each GPU, however many there are; "
        f"a restart takes {format_time(restart_seconds)} before the checkpoint is read; failures have shape {shape:g}. "
        "Iterations do not become longer with the number of GPUs. What writing takes from training is counted for no "
        "way. DCP's async_save and CheckFreq are at their best: they copy at the link's full bandwidth. A "
        '"synchronous, every …" row stands for checkpoints at the ends of epochs of that length.',
    )
    rate = (
        f"Published: {scaling.LLAMA3_FAILURES} unexpected interruptions in 54 days of a job on "
        f"{scaling.LLAMA3_GPUS:,} GPUs (The Llama 3 Herd of Models, 2024): one every "
        f"{format_time(scaling.GPU_SECONDS_A_FAILURE)} of one GPU. Assumed: failures "
        "grow with the number of GPUs."
    )
    counts = [round(scaling.GPU_SECONDS_A_FAILURE / point.mtbf_seconds) for point in by_gpus]
    hours = [point.mtbf_seconds / 3600 for point in by_time]
    philly = (
        f"Published: {format_time(scaling.PHILLY_SECONDS)} between failures of a job in Microsoft's Philly cluster "
        "(CheckFreq, FAST 2021), and "
        f"{format_time(scaling.LLAMA3_SECONDS / scaling.LLAMA3_FAILURES)} in the job of Llama 3: the dotted lines."
    )
    marks = [
        _mark(scaling.PHILLY_SECONDS / 3600, "Philly"),
        _mark(scaling.LLAMA3_SECONDS / scaling.LLAMA3_FAILURES / 3600, "Llama 3"),
    ]
    axis = {"title": {"text": "share of time left for training, %"}, "rangemode": "normal"}
    charts = (
        Chart(
            "gpus",
            "Useful time on 1 to 16,384 GPUs, at Llama 3's rate of failures",
            list(_lines(by_gpus, counts)),
            {
                "xaxis": {"title": {"text": "GPUs"}, "type": "log", "tickvals": counts[::2],
                          "ticktext": [f"{count:,}" for count in counts[::2]]},
                "yaxis": axis, **_LOOKS,
            },
            rate,
            _HEIGHT,
        ),
        Chart(
            "failures",
            "Useful time, by the time between failures of the job",
            list(_lines(by_time, hours)),
            {
                "xaxis": {"title": {"text": "time between failures"}, "type": "log", "tickvals": hours[::2],
                          "ticktext": [format_time(3600 * hour) for hour in hours[::2]]},
                "yaxis": axis, **_LOOKS,
                "shapes": [shape_ for shape_, _ in marks],
                "annotations": [note for _, note in marks],
            },
            philly,
            _HEIGHT,
        ),
    )  # fmt: skip
    made_for = plan.fingerprint
    return render(
        f"What failures leave of training {made_for.model} on {made_for.device}",
        "The share of time that is left for training, simulated for several ways to make checkpoints.",
        [*charts, Words("What is computed, planned and assumed", assumed)],
    )


def _mark(hours: float, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    line = {"type": "line", "x0": hours, "x1": hours, "yref": "paper", "y0": 0, "y1": 1,
            "line": {"dash": "dot", "width": 1, "color": palette.TRAINING}}  # fmt: skip
    return line, {"x": log10(hours), "y": 0, "yref": "paper", "yanchor": "bottom", "xanchor": "left", "text": name,
                  "showarrow": False}  # fmt: skip


def _lines(points: Sequence[Point], places: Sequence[float]) -> Iterator[dict[str, Any]]:
    names = list(dict.fromkeys(name for point in points for name in point.useful))
    others = iter(_OTHERS * len(names))
    for name in sorted(names, key=lambda name: (name == "checkflow", name in _COLOURS, name)):  # the last lies on top
        spreads = [point.useful.get(name) for point in points]
        yield {
            "type": "scatter", "mode": "lines+markers", "name": label(name), "x": places,
            "y": [None if one is None else 100 * one.mean for one in spreads],
            "customdata": [None if one is None else [100 * one.low, 100 * one.high] for one in spreads],
            "hovertemplate": "%{y:.2f} %, 9 runs of 10: %{customdata[0]:.2f} to %{customdata[1]:.2f} %",
            "line": {"color": _COLOURS.get(name) or next(others), "width": 3 if name == "checkflow" else 1.5},
        }  # fmt: skip
    yield {
        "type": "scatter", "mode": "lines", "name": _DALY, "x": places, "y": [100 * point.daly for point in points],
        "hovertemplate": "%{y:.2f} %", "line": {"color": _COLOURS["synchronous, least waste"], "dash": "dash"},
    }  # fmt: skip
