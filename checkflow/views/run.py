"""A job's runs as a page: where time goes, how often, how far storage lags, what failed, and the plan's promises."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Final

from checkflow.core.reports.run_comparison import compare_run
from checkflow.core.reports.run_report import AllRanks, PhaseTimes, RunReport
from checkflow.core.units import format_seconds, format_size, format_time
from checkflow.views import palette
from checkflow.views.page import Chart, Fact, Facts, Part, Table, Words, label, render
from checkflow.views.scales import log_ticks, seconds_scale

_NAMED_RESTARTS = 10  # the newest: more names would lie over each other
_PHASE_WORDS: Final = {"forward_backward": "forward and backward"}


def run_page(source: str, runs: Sequence[RunReport]) -> str:
    """Return the page of the runs of one directory, the newest last; at least one."""
    newest = runs[-1]
    of_ranks = "" if newest.ranks is None else f", {newest.ranks.count} ranks"
    lives = "1 run" if len(runs) == 1 else f"{len(runs)} runs"
    parts: list[Part] = [_facts(runs), _lives_chart(runs), _lives_table(runs), _phases(runs)]
    history = [run for run in runs if run.history]
    if history:
        parts += [_intervals(runs), _lag(runs)]
    else:
        parts.append(Words("Intervals and lag", ("An earlier version wrote this report, without a history.",)))
    if newest.held_iterations:
        parts.append(_holds(runs))
    parts.append(_promises(source, runs))
    if newest.ranks is not None and newest.ranks.each:
        parts.append(_ranks_chart(newest.ranks))
    subtitle = f"{newest.device}{of_ranks}, {lives}, {newest.iteration} iterations; {source}"
    return render(f"Runs of {newest.model}", subtitle, parts)


def number(runs: Sequence[RunReport], place: int) -> str:
    """The name of a run among the others."""
    return f"run {place + 1}" + (", the newest" if place + 1 == len(runs) > 1 else "")


def end_of(run: RunReport) -> str:
    """How a run ended, as far as its report knows."""
    return "closed" if run.closed else "no end reported"


def _date(unix_seconds: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(unix_seconds))
    except (OverflowError, OSError, ValueError):  # a report may hold any number
        return f"{unix_seconds:g} s"


def lives_rows(runs: Sequence[RunReport]) -> list[list[str]]:
    """For each run: when, from where to where, what was lost, what failed."""
    rows = []
    for place, run in enumerate(runs):
        begun = _date(run.started_unix_seconds)
        again = "-" if run.replayed_iterations is None else str(run.replayed_iterations)
        if run.replayed_iterations is not None and not run.replayed_exactly and run.resumed_from is not None:
            again = f"{again} or more"
        rows.append(
            [
                str(place + 1),
                begun,
                format_time(max(0.0, run.written_unix_seconds - run.started_unix_seconds)),
                "the start" if run.resumed_from is None else f"step {run.resumed_from}",
                str(run.iteration),
                again,
                str(run.committed),
                str(run.failed),
                end_of(run) + (f"; {run.last_failure}" if run.last_failure else ""),
            ]
        )
    return rows


LIVES_COLUMNS: Final = (
    "run", "began (UTC)", "last report after", "went on from", "up to", "repeated", "committed", "failed",
    "end",
)  # fmt: skip


def _facts(runs: Sequence[RunReport]) -> Facts:
    newest = runs[-1]
    own = sum(run.own_seconds for run in runs)
    held = sum(run.checkpoint_seconds for run in runs)
    share = f"{100 * held / own:.3g} % of training's own time" if own > 0 else "no whole iteration"
    killed = sum(not run.closed for run in runs)
    again = sum(run.replayed_iterations or 0 for run in runs)
    committed, failed = sum(run.committed for run in runs), sum(run.failed for run in runs)
    lag = newest.lag.iterations
    whole = newest.phases.iteration.median_seconds
    return Facts(
        (
            Fact("iteration", "iterations", str(newest.iteration), f"{again} done again", newest.iteration),
            Fact("runs", "runs", str(len(runs)), f"{killed} without a reported end", len(runs)),
            Fact("committed", "checkpoints", str(committed), f"committed; {failed} failed", committed),
            Fact("checkpoint_seconds", "held training", format_seconds(held), share, held),
            Fact(
                "longest_hold_seconds",
                "longest hold",
                format_seconds(max(run.longest_hold_seconds for run in runs)),
                "waits for storage aside",
                max(run.longest_hold_seconds for run in runs),
            ),
            Fact("iteration_seconds", "an iteration", "-" if whole is None else format_seconds(whole), "the median"),
            Fact(
                "lag_iterations",
                "lag of storage",
                "-" if lag is None else f"{lag} iteration{'' if lag == 1 else 's'}",
                "as the report was written",
                lag,
            ),
            Fact(
                "checkpoint_bytes",
                "a checkpoint",
                "-" if newest.checkpoint_bytes is None else format_size(newest.checkpoint_bytes),
                "on storage",
                newest.checkpoint_bytes,
            ),
        )
    )


def _lives_chart(runs: Sequence[RunReport]) -> Chart:
    """Each run from the iteration that it went on from to its last."""
    traces: list[dict[str, Any]] = []
    rows = lives_rows(runs)
    places = [place + 1 for place in range(len(runs))]
    begins = [run.resumed_from or 0 for run in runs]
    # What a run did again is drawn apart: an earlier one had done it.
    again = [min(run.replayed_iterations or 0, run.iteration - begin) for run, begin in zip(runs, begins, strict=True)]
    hover = [
        "<br>".join(f"{label(name)}: {label(cell)}" for name, cell in zip(LIVES_COLUMNS, row, strict=True))
        for row in rows
    ]
    anew = [run.iteration - begin - more for run, begin, more in zip(runs, begins, again, strict=True)]
    starts = [begin + more for begin, more in zip(begins, again, strict=True)]
    for name, colour, base, length in (
        ("done again", palette.FAILURE, begins, again),
        ("done anew", palette.FORWARD, starts, anew),
    ):
        traces.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": name,
                "base": base,
                "x": length,
                "y": places,
                "marker": {"color": colour},
                "hovertext": hover,
                "hovertemplate": "%{hovertext}<extra></extra>",
            }
        )
    ends = [place for place, run in enumerate(runs) if not run.closed]
    traces.append(
        {
            "type": "scatter",
            "mode": "markers",
            "name": "no end reported (killed, or still running)",
            "x": [runs[place].iteration for place in ends],
            "y": [place + 1 for place in ends],
            "marker": {"color": palette.FAILURE, "symbol": "x", "size": 11},
            "hovertext": [hover[place] for place in ends],
            "hovertemplate": "%{hovertext}<extra></extra>",
        }
    )
    layout = {
        "barmode": "overlay",
        "xaxis": {"title": "iteration of the job"},
        "yaxis": {"title": "run", "autorange": "reversed", "dtick": max(1, len(runs) // 8), "showgrid": False},
    }
    words = "A run goes on from the checkpoint that it restores. What an earlier run had already done is done again."
    return Chart("lives", "Starts and restarts", traces, layout, words, 190 + 22 * len(runs))


def _lives_table(runs: Sequence[RunReport]) -> Table:
    return Table("Each run", LIVES_COLUMNS, lives_rows(runs), left=(0, 1, 8), strong=(len(runs) - 1,))


def _phases(runs: Sequence[RunReport]) -> Chart:
    counted = [(place, run) for place, run in enumerate(runs) if run.phases.iterations]
    means = {
        name: [getattr(run.phases, name).total_seconds / run.phases.iterations for _, run in counted]
        for name in palette.PHASES
    }
    unit, scale = seconds_scale(max((sum(parts) for parts in zip(*means.values(), strict=True)), default=0.0))
    traces = []
    for name, colour in palette.PHASES.items():
        words = _PHASE_WORDS.get(name, name.replace("_", " "))
        hover = []
        for (_, run), mean in zip(counted, means[name], strict=True):
            times: PhaseTimes = getattr(run.phases, name)
            whole = run.phases.iteration.total_seconds
            share = f"{100 * times.total_seconds / whole:.3g} % of the time" if whole else ""
            middle, most = (
                "-" if one is None else format_seconds(one) for one in (times.median_seconds, times.p99_seconds)
            )
            hover.append(
                f"<b>{words}</b><br>mean {format_seconds(mean)}, {share}<br>median {middle}, 99th percentile {most}"
            )
        traces.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": words,
                "x": [mean / scale for mean in means[name]],
                "y": [place + 1 for place, _ in counted],
                "marker": {"color": colour},
                "hovertext": hover,
                "hovertemplate": "%{hovertext}<extra></extra>",
            }
        )
    layout = {
        "barmode": "stack",
        "xaxis": {"title": f"mean time of an iteration ({unit})"},
        "yaxis": {"title": "run", "autorange": "reversed", "dtick": max(1, len(runs) // 8), "showgrid": False},
    }
    words = "From one boundary to the next. Snapshot wait and persist wait are what checkpoints hold."
    return Chart("phases", "Where an iteration's time goes", traces, layout, words, 230 + 26 * len(counted))


def _line(
    name: str, colour: str, points: Sequence[tuple[float | None, float | None, str]], **more: Any
) -> dict[str, Any]:
    return {
        "type": "scatter",
        "name": name,
        "x": [x for x, _, _ in points],
        "y": [y for _, y, _ in points],
        "line": {"color": colour, "width": 2, **more.pop("line", {})},
        "marker": {"color": colour, "size": 6},
        "hovertext": [words for _, _, words in points],
        "hovertemplate": "%{hovertext}<extra></extra>",
        **more,
    }


def _intervals(runs: Sequence[RunReport]) -> Chart:
    """Both intervals over the iterations; a gap between runs."""
    gap = (None, None, "")
    memory: list[tuple[float | None, float | None, str]] = []
    disk: list[tuple[float | None, float | None, str]] = []
    for place, run in enumerate(runs):
        for point in run.history:
            at = f"iteration {point.iteration}, run {place + 1}"
            memory.append(
                (point.iteration, point.memory_interval, f"in host memory every {point.memory_interval}<br>{at}")
            )
            disk.append((point.iteration, point.disk_interval, f"on storage every {point.disk_interval}<br>{at}"))
        memory.append(gap)
        disk.append(gap)
    stepped = {"shape": "hv"}
    decided = [y for _, y, _ in (*memory, *disk) if y]
    ticks = log_ticks(min(decided), max(decided)) if decided else []
    traces = [
        _line("on storage", palette.STORAGE, disk, mode="lines+markers", line={**stepped, "width": 4}),
        _line("in host memory", palette.CHECKFLOW, memory, mode="lines+markers", line={**stepped, "dash": "dot"}),
    ]
    layout = {
        "xaxis": {"title": "iteration of the job"},
        "yaxis": {"title": "iterations to the next", "type": "log", "tickvals": ticks},
        **_restarts(runs),
    }
    newest = runs[-1].frequency
    words = f"The newest interval is set by: {newest.reason}. Gaps are times before an interval was decided."
    return Chart("intervals", "How often checkpoints are made", traces, layout, words)


def _lag(runs: Sequence[RunReport]) -> Chart:
    iterations: list[tuple[float | None, float | None, str]] = []
    failures: list[tuple[float | None, float | None, str]] = []
    for place, run in enumerate(runs):
        before = 0
        for point in run.history:
            words = f"{point.lag_iterations} iterations, {format_seconds(point.lag_seconds)}<br>up to iteration "
            words += f"{point.iteration}, run {place + 1}"
            words += f"<br>the longest of {point.checkpoints} checkpoints" if point.checkpoints > 1 else ""
            iterations.append((point.iteration, point.lag_iterations, words))
            if point.failed > before:
                more = point.failed - before
                failures.append((point.iteration, point.lag_iterations, f"{more} failed<br>{words}"))
            before = point.failed
        iterations.append((None, None, ""))
    traces = [_line("lag", palette.STORAGE, iterations, mode="lines+markers")]
    if failures:
        failed = _line("checkpoints failed", palette.FAILURE, failures, mode="markers")
        traces.append({**failed, "marker": {"color": palette.FAILURE, "symbol": "x", "size": 12}})
    layout = {
        "xaxis": {"title": "iteration of the job"},
        "yaxis": {"title": "iterations", "rangemode": "tozero"},
        **_restarts(runs),
    }
    words = (
        "How much training a failure of the machine would have cost at worst: from one durable checkpoint up to when "
        "the next one took its place."
    )
    return Chart("lag", "How far storage lags behind", traces, layout, words)


def _restarts(runs: Sequence[RunReport]) -> dict[str, Any]:
    """Parts of a layout that mark where each run but the first began."""
    begins = [(run.resumed_from or 0, place + 1) for place, run in enumerate(runs) if place]
    line = {"color": palette.TRAINING, "dash": "dot", "width": 1}
    place = {"yref": "paper", "yanchor": "bottom", "y": 1, "showarrow": False, "font": {"size": 11}}
    return {
        "shapes": [
            {"type": "line", "x0": x, "x1": x, "y0": 0, "y1": 1, "yref": "paper", "line": line} for x, _ in begins
        ],
        "annotations": [{"x": x, "text": f"run {run}", **place} for x, run in begins[-_NAMED_RESTARTS:]],
    }


def _holds(runs: Sequence[RunReport]) -> Chart:
    newest = runs[-1]
    ends = ["none" if not one.most_seconds else format_seconds(one.most_seconds) for one in newest.held_iterations]
    traces = []
    for name, colour, words in (
        ("snapshot_wait", palette.SNAPSHOT, "at anchors and boundaries"),
        ("persist_wait", palette.STORAGE, "for storage and buffers"),
    ):
        counts = [getattr(one, name) for one in newest.held_iterations]
        traces.append(
            {
                "type": "bar",
                "name": words,
                "x": ends,
                "y": [count or None for count in counts],  # nothing has no place on a logarithmic axis
                "marker": {"color": colour},
                "hovertemplate": f"%{{y}} iterations held up to %{{x}}<extra>{words}</extra>",
            }
        )
    layout = {
        "barmode": "group",
        "xaxis": {"title": "held up to", "type": "category"},
        "yaxis": {"title": "iterations (logarithmic)", "type": "log", "tickvals": [10**power for power in range(10)]},
    }
    words = f"{newest.phases.iterations} iterations of {number(runs, len(runs) - 1)}, by how long each was held."
    return Chart("holds", "How long iterations were held", traces, layout, words)


def _promises(source: str, runs: Sequence[RunReport]) -> Table:
    one = compare_run(source, runs, None)
    rows = [
        [
            row.what,
            row.text(row.planned),
            row.text(row.measured),
            "" if row.ratio is None else f"{100 * row.ratio:.3g} %",
            row.note,
        ]
        for row in one.rows
    ]
    words = f"{number(runs, len(runs) - 1).capitalize()}: {one.origin}."
    return Table(
        "Planned beside measured", ("figure", "planned", "measured", "of the planned", ""), rows, words, left=(0, 4)
    )


def _ranks_chart(ranks: AllRanks) -> Chart:
    each = sorted(ranks.each, key=lambda one: one.rank)
    unit, scale = seconds_scale(max(max(one.held_seconds, one.persist_seconds) for one in each))
    names = [f"rank {one.rank}" for one in each]
    traces = []
    for name, colour, values in (
        ("held training", palette.SNAPSHOT, [one.held_seconds for one in each]),
        ("wrote the newest in", palette.STORAGE, [one.persist_seconds for one in each]),
    ):
        hover = [
            f"<b>rank {one.rank}</b><br>{name} {format_seconds(value)}<br>copied {format_size(one.copied_bytes)}, "
            f"wrote {format_size(one.written_bytes)}, {one.failed} failed"
            for one, value in zip(each, values, strict=True)
        ]
        traces.append(
            {
                "type": "bar",
                "name": name,
                "x": names,
                "y": [value / scale for value in values],
                "marker": {"color": colour},
                "hovertext": hover,
                "hovertemplate": "%{hovertext}<extra></extra>",
            }
        )
    said = [f"Rank {ranks.slowest_writer} was the slowest to write."]
    if ranks.heard > len(each):
        said.append(f"Of {ranks.heard} ranks, these were held longest.")
    if ranks.heard < ranks.count:
        said.append(f"{ranks.count - ranks.heard} of {ranks.count} ranks have told nothing.")
    if ranks.silent:
        said.append(f"Ranks that do not answer: {', '.join(map(str, ranks.silent))}.")
    layout = {"barmode": "group", "xaxis": {"type": "category"}, "yaxis": {"title": f"time ({unit})"}}
    return Chart("ranks", "What checkpoints cost each rank", traces, layout, " ".join(said))
