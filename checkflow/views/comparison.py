"""Ways of making checkpoints side by side, for several models, batch sizes, devices or plans, as a page to send."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from checkflow.core.machine.device import CATALOGUE
from checkflow.core.units import added, format_rate, format_seconds, format_size, format_stall, iterations
from checkflow.planner.schedule.compare import Comparison, Way
from checkflow.views import palette
from checkflow.views.page import Chart, Part, Table, Words, label, render
from checkflow.views.scales import bytes_scale

# By a way's name up to its first comma or to its end: colour and pattern.
_LOOKS: Final = {
    "synchronous": (palette.TRAINING, ""),
    "CheckFreq, GPU snapshot": (palette.CHECKFREQ, ""),
    "CheckFreq, released": (palette.CHECKFREQ, "/"),
    "CheckFreq, CPU snapshot": (palette.CHECKFREQ, "."),
    "checkflow": (palette.CHECKFLOW, ""),
}


def comparison_page(rows: Sequence[Comparison]) -> str:
    """Return the page of at least one comparison."""
    names = names_of(rows)
    models = ", ".join(dict.fromkeys(row.model for row in rows))
    parts: list[Part] = [*_peaks(rows, names), _stalls(rows, names)]
    missing = [f"{name}: {row.explanation}" for name, row in zip(names, rows, strict=True) if row.explanation]
    if missing:
        parts.append(Words("What could not be had", missing))
    parts += [_table(row, name) for row, name in zip(rows, names, strict=True)]
    title = f"Checkpoints of {models}" if len(models) < 70 else f"Checkpoints of {len(rows)} training steps"
    return render(title, "Peak memory and stall of each way to make them", parts)


def names_of(rows: Sequence[Comparison]) -> list[str]:
    """A name for each: the model, and what differs among the others of it; never the same twice."""
    found: list[str] = []
    for row in rows:
        parts = [row.model]
        for part, values in (
            (row.batch, {one.batch for one in rows if one.model == row.model}),
            (row.device, {one.device for one in rows}),
            (format_rate(row.bandwidth_bytes_per_second), {one.bandwidth_bytes_per_second for one in rows}),
            (row.granularity, {one.granularity for one in rows}),
            (f"{row.policy} policy", {one.policy for one in rows}),
        ):
            if len(values) > 1:
                parts.append(part)
        found.append(", ".join(parts))
    return [f"{name} ({place + 1})" if found.count(name) > 1 else name for place, name in enumerate(found)]


def _kind(way: Way) -> str:
    return "checkflow" if way.name.startswith("checkflow") else way.name


def _bars(kind: str, values: Sequence[float | None], hover: Sequence[str]) -> dict[str, Any]:
    colour, pattern = _LOOKS[kind]
    return {
        "type": "bar",
        "name": kind,
        "x": list(range(len(values))),
        "y": list(values),
        "marker": {
            "color": colour,
            "pattern": {"shape": pattern, "fillmode": "overlay", "fgcolor": "#ffffff", "fgopacity": 0.75, "size": 7},
        },
        "hovertext": list(hover),
        "hovertemplate": "%{hovertext}<extra></extra>",
    }


def _ways(rows: Sequence[Comparison]) -> list[tuple[str, list[Way]]]:
    """Each kind of way, for all rows."""
    return [(kind, [next(way for way in row.ways if _kind(way) == kind) for row in rows]) for kind in _LOOKS]


def _peaks(rows: Sequence[Comparison], names: Sequence[str]) -> list[Chart]:
    """The peaks in bytes, and what they add to training's own as a share of it: models differ in size."""
    unit, size = bytes_scale(max(way.peak_bytes or 0 for row in rows for way in row.ways))
    peaks, shares = [], []
    for kind, ways in _ways(rows):
        hover = [_peak_words(name, row, way) for name, row, way in zip(names, rows, ways, strict=True)]
        values = [None if way.peak_bytes is None else way.peak_bytes / size for way in ways]
        more = [
            None if way.peak_bytes is None or not row.training_peak_bytes
            else 100 * (way.peak_bytes / row.training_peak_bytes - 1)
            for row, way in zip(rows, ways, strict=True)
        ]  # fmt: skip
        peaks.append(_bars(kind, values, hover))
        shares.append(_bars(kind, more, hover))
    words = "Synchronous checkpoints add nothing to training's own peak. CheckFreq: an earlier system (FAST 2021)."
    return [
        Chart("peaks", "Peak memory", peaks, _grouped(f"peak memory ({unit})", names), words),
        Chart("added", "What checkpoints add to it", shares, _grouped("% of training's peak", names)),
    ]


def _grouped(title: str, names: Sequence[str]) -> dict[str, Any]:
    """The layout of bars side by side, by row: the labels of two long names may be equal."""
    return {
        "barmode": "group",
        "xaxis": {
            "type": "category",
            "tickvals": list(range(len(names))),
            "ticktext": [label(name, 60) for name in names],
        },
        "yaxis": {"title": title, "rangemode": "tozero"},
    }


def _peak_words(name: str, row: Comparison, way: Way) -> str:
    if way.peak_bytes is None:
        return f"<b>{label(name)}</b><br>{label(way.name)}: no plan"
    more = added(way.peak_bytes, row.training_peak_bytes)
    return f"<b>{label(name)}</b><br>{label(way.name)}: {format_size(way.peak_bytes)}, {more}"


def _stalls(rows: Sequence[Comparison], names: Sequence[str]) -> Chart:
    traces = []
    for kind, ways in _ways(rows):
        values, hover = [], []
        for name, row, way in zip(names, rows, ways, strict=True):
            seconds = way.interval * row.iteration_seconds
            share = None if way.stall_seconds is None or not seconds else 100 * way.stall_seconds / seconds
            values.append(share)
            stall = "no plan" if way.stall_seconds is None else f"{format_stall(way.stall_seconds)} a checkpoint"
            more = "" if share is None else f", {share:.3g} % of training's time"
            hover.append(
                f"<b>{label(name)}</b><br>{label(way.name)}: {stall}{more}<br>every {iterations(way.interval)}"
            )
        traces.append(_bars(kind, values, hover))
    layout = _grouped("stall (% of training's time)", names)
    slower = [
        f"{name} every {iterations(row.checkflow_interval)}"
        for name, row in zip(names, rows, strict=True)
        if row.checkflow_interval is not None and row.checkflow_interval > 1
    ]
    words = "All make a checkpoint every iteration"
    words += f", except checkflow for {'; '.join(slower)}." if slower else "."
    return Chart("stalls", "How long training is held", traces, layout, words, 400)


def _table(row: Comparison, name: str) -> Table:
    body = []
    for way in row.ways:
        if way.peak_bytes is None or way.stall_seconds is None:
            body.append([way.name, "no plan", "", "", "", ""])
            continue
        whole = way.interval * row.iteration_seconds
        body.append(
            [
                way.name,
                format_size(way.peak_bytes),
                added(way.peak_bytes, row.training_peak_bytes),
                format_stall(way.stall_seconds),
                f"{100 * way.stall_seconds / whole:.3g} %" if whole else "no time",
                iterations(way.interval),
            ]
        )
    memory = {device.name: f" with {format_size(device.memory_bytes)}" for device in CATALOGUE.values()}
    link, seconds = format_rate(row.bandwidth_bytes_per_second), format_seconds(row.iteration_seconds)
    words = (
        f"{row.device}{memory.get(row.device, '')}, link {link}, batch {row.batch or 'none'}, {row.granularity}, "
        f"{row.policy} policy; an iteration takes {seconds}, the state has {format_size(row.state_bytes)}."
    )
    columns = ("way", "peak", "added to training", "stall", "of the time", "a checkpoint every")
    return Table(name, columns, body, words, strong=(len(body) - 1,))
