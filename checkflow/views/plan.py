"""A plan as a page: an iteration in lanes, its memory, what binds, and what other links and intervals would cost."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final

from checkflow.core.plan import Plan
from checkflow.core.units import added, format_rate, format_seconds, format_size, format_stall, iterations
from checkflow.planner.schedule.baselines import baselines
from checkflow.planner.schedule.compare import PeakCurve, binding_interval, frontier_of, peak_curves
from checkflow.planner.schedule.replay import Replay
from checkflow.planner.schedule.words import binding_text, certificate_text, step_words
from checkflow.views import marks, palette
from checkflow.views.marks import Clock, Mark
from checkflow.views.page import Chart, Fact, Facts, Part, Words, label, render
from checkflow.views.scales import bytes_scale, log_ticks, seconds_scale

# Lane, the kinds of marks in it, and what one mark stands for.
_LANES: Final = (
    ("forward", ("forward", "forward into backward"), "segments"),
    ("backward", ("backward",), "segments"),
    ("optimizer", ("optimizer",), "segments"),
    ("other", ("other",), "segments"),
    ("operators", ("operators",), "operators"),
    ("waits for link", ("wait",), "waits"),
    ("own traffic", ("traffic",), "transfers"),
    ("link", ("direct", "from snapshot"), "chunks"),
    ("snapshots", ("kept",), "copies"),
)
_COLOURS: Final = {
    "forward": palette.FORWARD,
    "forward into backward": palette.TURN,
    "backward": palette.BACKWARD,
    "optimizer": palette.OPTIMIZER,
    "other": palette.OTHER,
    "operators": palette.BACKWARD,
    "wait": palette.FAILURE,
    "traffic": palette.TRAFFIC,
    "direct": palette.CHECKFLOW,
    "from snapshot": palette.SNAPSHOT,
    "kept": palette.SNAPSHOT,
}
_ROWS_OF_SNAPSHOTS = 6  # copies that are kept at the same time, one under the other
_OUTLINED = 400  # marks that are few enough to have an outline


def plan_page(plan: Plan, replay: Replay) -> str:
    """Return the page of a plan that was replayed."""
    made_for = plan.fingerprint
    of_ranks = f", one of {made_for.ranks} ranks" if made_for.ranks > 1 else ""
    subtitle = f"{made_for.device}{of_ranks}, {plan.policy} policy, granularity: {plan.granularity}"
    parts = [_facts(plan, replay), _reasons(plan, replay), _iteration(plan, replay), _curves(plan), *_frontier(plan)]
    return render(f"Plan of {made_for.model}", subtitle, parts)


def _facts(plan: Plan, replay: Replay) -> Facts:
    base, training = baselines(plan.timeline, plan.bandwidth_bytes_per_second), plan.timeline.training_peak_bytes
    seconds, chunks = plan.timeline.iteration_seconds, len(plan.chunks)
    stall = f"{format_stall(plan.wait.seconds)} of it waits for the link" if plan.wait else "of one checkpoint"

    def peak(name: str, title: str, size_bytes: int) -> Fact:
        return Fact(name, title, format_size(size_bytes), added(size_bytes, training), size_bytes)

    return Facts(
        (
            Fact("training_peak_bytes", "training's peak", format_size(training), "without checkpoints", training),
            peak("plan_peak_bytes", "the plan's peak", replay.peak_bytes),
            peak("checkfreq_peak_bytes", "CheckFreq's peak", base.checkfreq_peak_bytes),
            peak("checkfreq_released_peak_bytes", "CheckFreq's, released", base.checkfreq_released_peak_bytes),
            Fact("interval", "a checkpoint every", iterations(plan.interval), plan.certificate.status, plan.interval),
            Fact("stall_seconds", "stall", format_stall(replay.stall_seconds), stall, replay.stall_seconds),
            Fact("iteration_seconds", "an iteration", format_seconds(seconds), "without checkpoints", seconds),
            Fact(
                "state_bytes",
                "state to move",
                format_size(plan.timeline.state_bytes),
                f"{chunks} chunks, {format_size(plan.snapshot_bytes)} through snapshots",
                plan.timeline.state_bytes,
            ),
            Fact(
                "bandwidth_bytes_per_second",
                "link",
                format_rate(plan.bandwidth_bytes_per_second),
                "from device to host",
                plan.bandwidth_bytes_per_second,
            ),
        )
    )


def _reasons(plan: Plan, replay: Replay) -> Words:
    binding = binding_text(plan, *binding_interval(plan))
    return Words(
        "What binds",
        (
            f"{binding[0].upper()}{binding[1:]}.",
            f"The peak is reached in step {replay.peak_step} of {plan.horizon_steps}: "
            f"{step_words(plan, replay.peak_step)}. The last byte leaves in step {replay.finish_step}: "
            f"{step_words(plan, replay.finish_step)}.",
            f"Proof: {certificate_text(plan)}.",
        ),
    )


def _iteration(plan: Plan, replay: Replay) -> Chart:
    """The lanes above, the memory below, over the same time."""
    clock = marks.clock_of(plan)
    shown = {
        "segments": marks.merged(marks.compute_marks(plan, clock), clock.seconds),
        "transfers": marks.merged(marks.traffic_marks(plan, clock), clock.seconds),
        "chunks": marks.merged(marks.copy_marks(plan, clock, replay.capacity_bytes), clock.seconds),
    }
    drawn = [mark for found in shown.values() for mark in found]
    kept = marks.merged(marks.snapshot_marks(plan, clock), clock.seconds)
    unit, scale = seconds_scale(clock.seconds)
    kinds = {mark.kind for mark in (*drawn, *kept)}
    lanes = [lane for lane in _LANES if not kinds.isdisjoint(lane[1])]
    traces: list[dict[str, Any]] = []
    for place, (_, lane_kinds, what) in enumerate(reversed(lanes)):
        for kind in lane_kinds:
            found = [mark for mark in (kept if kind == "kept" else drawn) if mark.kind == kind]
            if found:
                traces.append(_bars(found, kind, what, place, scale))
    tops = [len(lanes), 10]  # in rows: lanes and memory
    split = tops[1] / sum(tops)
    names = [lane for lane, _, _ in reversed(lanes)]
    memory, memory_unit = _memory(plan, replay, clock, scale)
    layout = {
        "barmode": "overlay",
        "xaxis": {"title": f"time from the boundary ({unit})", "anchor": "y2", "range": [0, clock.seconds / scale]},
        "yaxis": {
            "domain": [split + 0.04, 1],
            "tickvals": list(range(len(names))),
            "ticktext": names,
            "range": [-0.5, len(names) - 0.5],
            "fixedrange": True,
            "showgrid": False,
            "zeroline": False,
        },
        "yaxis2": {"domain": [0, split - 0.02], "title": f"memory ({memory_unit})", "rangemode": "tozero"},
    }
    words = _how_to_read(kinds) + _merged_words(shown)
    return Chart("iteration", _over(plan), [*traces, *memory], layout, words, 300 + 34 * len(lanes) + 120)


def _over(plan: Plan) -> str:
    return "The iteration" if plan.interval == 1 else f"The {plan.interval} iterations from checkpoint to checkpoint"


def _how_to_read(kinds: Collection[str]) -> str:
    parts = ["Above: what computes and what crosses the link. Below: device memory."]
    if "forward into backward" in kinds:
        parts.append("The darker part of forward holds the loss and the begin of backward: no anchor lies between.")
    if "from snapshot" in kinds:
        parts.append("On the link, green leaves from the live tensors, and orange from copies in device memory.")
    if "traffic" in kinds:
        parts.append("Own traffic is training's: what its collectives, and copies to the host, send over the link.")
    parts.append("Point at a mark for its tensor, anchor and deadline; drag to zoom in.")
    return " ".join(parts)


def _merged_words(shown: Mapping[str, Sequence[Mark]]) -> str:
    parts = [
        f"{count} {what} are drawn as {len(found)} marks"
        for what, found in shown.items()
        if (count := sum(mark.count for mark in found)) > len(found)
    ]
    if not parts:
        return ""
    return f" {' and '.join(parts)}: neighbours within one {marks.PIXELS}th of the width are one mark."


def _bars(found: Sequence[Mark], kind: str, what: str, place: int, scale: float) -> dict[str, Any]:
    rows, offsets = [0.8] * len(found), [-0.4] * len(found)
    if kind == "kept":
        rows, offsets = _stacked(found)
    outline = {"width": 0.6, "color": "rgba(255,255,255,0.75)"} if len(found) <= _OUTLINED else {"width": 0}
    return {
        "type": "bar",
        "orientation": "h",
        "name": kind,
        "showlegend": False,
        "base": [mark.begin_seconds / scale for mark in found],
        "x": [(mark.end_seconds - mark.begin_seconds) / scale for mark in found],
        "y": [place] * len(found),
        "width": rows,
        "offset": offsets,
        "marker": {"color": _COLOURS[kind], "line": outline},
        "hovertext": [mark.words(what) for mark in found],
        "hovertemplate": "%{hovertext}<extra></extra>",
    }


def _stacked(found: Sequence[Mark]) -> tuple[list[float], list[float]]:
    """Return heights and offsets of marks of one lane that last at the same time: the first free row takes each."""
    ends: list[float] = []
    rows = []
    for mark in found:
        free = next((row for row, end in enumerate(ends) if end <= mark.begin_seconds), len(ends))
        if free == len(ends) < _ROWS_OF_SNAPSHOTS:
            ends.append(mark.end_seconds)
        else:
            free = min(free, _ROWS_OF_SNAPSHOTS - 1)
            ends[free] = max(ends[free], mark.end_seconds)
        rows.append(free)
    height = 0.8 / max(1, len(ends))
    return [0.92 * height] * len(rows), [0.4 - (row + 1) * height for row in rows]


def _memory(plan: Plan, replay: Replay, clock: Clock, scale: float) -> tuple[list[dict[str, Any]], str]:
    base = baselines(plan.timeline, plan.bandwidth_bytes_per_second)
    live = [step.live_bytes for step in plan.timeline.steps] * plan.interval
    unit, size = bytes_scale(base.checkfreq_peak_bytes)
    times, training, planned = _thinned(clock, live, replay.memory_bytes)
    times = [time / scale for time in times]

    def area(name: str, values: Iterable[int], colour: str, fill: str) -> dict[str, Any]:
        return {
            "type": "scatter",
            "mode": "lines",
            "name": name,
            "yaxis": "y2",
            "x": times,
            "y": [value / size for value in values],
            "line": {"shape": "hv", "color": colour, "width": 1.5},
            "fill": fill,
            "hovertemplate": "%{y:.4g} " + unit + "<extra>" + name + "</extra>",
        }

    def line(name: str, value: int, colour: str, dash: str) -> dict[str, Any]:
        return {
            "type": "scatter",
            "mode": "lines",
            "name": f"{name}: {format_size(value)}",
            "yaxis": "y2",
            "x": [0, clock.seconds / scale],
            "y": [value / size] * 2,
            "line": {"color": colour, "dash": dash, "width": 2},
            "hovertemplate": f"{name}: {format_size(value)}<extra></extra>",
        }

    return [
        area("training", training, palette.TRAINING, "tozeroy"),
        area("with the plan's snapshots", planned, palette.SNAPSHOT, "tonexty")
        if replay.snapshot_bytes
        else area("with the plan", planned, palette.CHECKFLOW, "none"),
        line("training's peak", plan.timeline.training_peak_bytes, palette.TRAINING, "solid"),
        line("the plan's peak", replay.peak_bytes, palette.CHECKFLOW, "dash"),
        line("CheckFreq's peak", base.checkfreq_peak_bytes, palette.CHECKFREQ, "dash"),
        line("CheckFreq's peak, released", base.checkfreq_released_peak_bytes, palette.CHECKFREQ, "dot"),
    ], unit


def _thinned(clock: Clock, live: Sequence[int], planned: Sequence[int]) -> tuple[list[float], list[int], list[int]]:
    """Return times, training's and the plan's memory; of too many steps, the highest within each pixel."""
    begins = list(clock.begins_seconds[:-1])
    training, total = list(live), list(planned)
    if len(begins) > marks.LEAST_MERGED and clock.seconds:
        highest: dict[int, tuple[float, int, int]] = {}
        for begin, one, other in zip(begins, training, total, strict=True):
            place = int(begin / clock.seconds * marks.PIXELS)
            first, low, high = highest.get(place, (begin, one, other))
            highest[place] = (first, max(low, one), max(high, other))
        begins, training, total = map(list, zip(*highest.values(), strict=True))
    return [*begins, clock.seconds], [*training, training[-1]], [*total, total[-1]]


def _curves(plan: Plan) -> Chart | Words:
    curves = peak_curves(plan)
    if not curves:
        why = "This plan has too many steps to try other links." if plan.chunks else "Nothing crosses the link."
        return Words("Other links and intervals", (why,))
    highest = max(max(curve.peaks_bytes) for curve in curves)
    unit, size = bytes_scale(max(highest, plan.plan_peak_bytes))
    # The longest first: where lines lie on each other, all are seen.
    traces = [_curve(curve, place, unit, size) for place, curve in reversed(list(enumerate(curves)))]
    base, link = baselines(plan.timeline, plan.bandwidth_bytes_per_second), plan.bandwidth_bytes_per_second
    ends = [
        min(c.bandwidths_bytes_per_second[0] for c in curves),
        max(c.bandwidths_bytes_per_second[-1] for c in curves),
    ]
    for name, value, colour in (
        ("training alone", plan.timeline.training_peak_bytes, palette.TRAINING),
        ("CheckFreq", base.checkfreq_peak_bytes, palette.CHECKFREQ),
    ):
        traces.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": name,
                "x": [end / 1e9 for end in ends],
                "y": [value / size] * 2,
                "line": {"color": colour, "dash": "dash", "width": 2},
                "hovertemplate": f"{name}: {format_size(value)}<extra></extra>",
            }
        )
    traces.append(
        {
            "type": "scatter",
            "mode": "markers",
            "name": "this plan",
            "x": [link / 1e9],
            "y": [plan.plan_peak_bytes / size],
            "marker": {
                "color": palette.CHECKFLOW,
                "size": 13,
                "symbol": "diamond",
                "line": {"width": 2, "color": "#fff"},
            },
            "hovertemplate": f"this plan: {format_size(plan.plan_peak_bytes)} over {format_rate(link)}<extra></extra>",
        }
    )
    words = (
        "The least peak memory of a checkpoint that holds up training nowhere but for its own snapshots. A line begins "
        "at the slowest link that takes all state in time."
    )
    words += " This plan waits for the link, so it may lie left of its line." if plan.wait else ""
    layout = {
        "xaxis": {"title": "link (GB/s)", "type": "log", "tickvals": log_ticks(ends[0] / 1e9, ends[1] / 1e9)},
        "yaxis": {"title": f"peak memory ({unit})"},
    }
    return Chart("links", "Other links and intervals", traces, layout, words, 400)


def _curve(curve: PeakCurve, place: int, unit: str, size: float) -> dict[str, Any]:
    name = f"every {iterations(curve.interval)}"
    return {
        "type": "scatter",
        "mode": "lines",
        "name": name,
        "x": [link / 1e9 for link in curve.bandwidths_bytes_per_second],
        "y": [peak / size for peak in curve.peaks_bytes],
        "line": {"color": palette.SHADES[place], "width": 2 + 3 * place},
        "hovertemplate": f"{name}: %{{y:.4g}} {unit} over %{{x:.3g}} GB/s<extra></extra>",
    }


def _frontier(plan: Plan) -> list[Part]:
    """Stall against extra memory, where a checkpoint costs either."""
    rows = frontier_of(plan)
    title = "What a checkpoint costs over this link, limits aside"
    if all(not row.stall_seconds and not row.extra_bytes for row in rows):
        return (
            [Words(title, ("Nothing: one every iteration adds no memory, and training never waits.",))] if rows else []
        )
    unit, scale = seconds_scale(max(row.stall_seconds for row in rows) or plan.stall_seconds)
    memory, size = bytes_scale(max(row.extra_bytes for row in rows))
    extra = plan.plan_peak_bytes - plan.timeline.training_peak_bytes
    intervals = sorted({row.interval for row in rows})
    traces: list[dict[str, Any]] = [
        {
            "type": "scatter",
            "mode": "lines+markers",
            "name": f"every {iterations(interval)}",
            "x": [row.extra_bytes / size for row in rows if row.interval == interval],
            "y": [row.stall_seconds / scale for row in rows if row.interval == interval],
            "line": {"color": palette.SHADES[min(place, len(palette.SHADES) - 1)]},
            "marker": {"size": 9, "symbol": place},
            "cliponaxis": False,
            "hovertemplate": f"%{{x:.3g}} {memory} more, %{{y:.3g}} {unit} of stall<extra>"
            f"every {iterations(interval)}</extra>",
        }
        for place, interval in enumerate(intervals)
    ]
    traces.append(
        {
            "type": "scatter",
            "mode": "markers",
            "name": label(f"this plan, every {iterations(plan.interval)}"),
            "x": [extra / size],
            "y": [plan.stall_seconds / scale],
            "marker": {
                "color": palette.CHECKFLOW,
                "size": 13,
                "symbol": "diamond",
                "line": {"width": 2, "color": "#fff"},
            },
            "hovertemplate": f"this plan: {format_size(extra)} more, {format_stall(plan.stall_seconds)}<extra></extra>",
        }
    )
    layout = {
        "xaxis": {"title": f"extra memory ({memory})", "rangemode": "tozero"},
        "yaxis": {"title": f"stall of one checkpoint ({unit})", "rangemode": "tozero"},
    }
    return [Chart("frontier", title, traces, layout, "Left and below is better. No shorter interval has less of both.")]
