"""A page in one file, which works without any network: text, tables and plotly's charts."""

from __future__ import annotations

import functools
import html
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from checkflow.core.errors import ViewError
from checkflow.core.small_files import visible

# What a page may load: nothing.
_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #59636e; --paper: #fff; --card: #f5f6f8; --line: #d5d9de }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e8eaed; --soft: #a7b0ba; --paper: #14171b; --card: #1f2329; --line: #3a4048 }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 0 auto;
  max-width: 1200px; padding: 1.5rem 1rem 3rem; overflow-wrap: anywhere }
h1 { font-size: 1.55rem; margin: 0 } h2 { font-size: 1.15rem; margin: 2.2rem 0 .3rem } p { margin: .3rem 0; }
.soft, footer { color: var(--soft) } footer { margin-top: 3rem; font-size: .85rem }
.facts { display: grid; grid-template-columns: repeat(auto-fill, minmax(165px, 1fr)); gap: .6rem; margin: 1.1rem 0 }
.facts div { background: var(--card); border-radius: 6px; padding: .55rem .75rem }
.facts b { display: block; font-size: 1.25rem; font-weight: 600 } .facts small { color: var(--soft); display: block }
.scroll { overflow-x: auto } table { border-collapse: collapse; font-variant-numeric: tabular-nums; min-width: 45% }
th, td { text-align: left; padding: .28rem .8rem .28rem 0; border-bottom: 1px solid var(--line); overflow-wrap: normal }
th { color: var(--soft); font-weight: 500 } td.number, th.number { text-align: right; white-space: nowrap }
tr.strong td { font-weight: 650 } .chart { width: 100%; margin-top: .4rem }
"""
_SCRIPT = """
const charts = JSON.parse(document.getElementById("charts").textContent);
const ink = () => getComputedStyle(document.body).color;
const options = { responsive: true, displaylogo: false, modeBarButtonsToRemove: ["select2d", "lasso2d"] };
for (const chart of charts) {
  chart.layout.font.color = ink();
  Plotly.newPlot(chart.name, chart.data, chart.layout, options);
}
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  for (const chart of charts) Plotly.relayout(chart.name, { "font.color": ink() });
});
"""
_GRID = "rgba(128, 128, 128, 0.22)"


@dataclass(frozen=True, slots=True)
class Fact:
    """A figure in large letters. ``value`` is the exact one, for programs."""

    name: str
    title: str
    text: str
    more: str = ""
    value: float | str | None = None


@dataclass(frozen=True, slots=True)
class Facts:
    facts: Sequence[Fact]


@dataclass(frozen=True, slots=True)
class Table:
    """Texts in rows; all columns but the first and those in ``left`` are numbers."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: str = ""
    left: Sequence[int] = (0,)
    strong: Sequence[int] = ()  # rows in bold letters


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart of plotly: traces and layout as its documentation has them. ``name`` is its element's id."""

    name: str
    title: str
    data: Sequence[Mapping[str, Any]]
    layout: Mapping[str, Any] = field(default_factory=dict)
    words: str = ""
    height: int = 380


@dataclass(frozen=True, slots=True)
class Words:
    """A heading and sentences, a paragraph each."""

    title: str
    sentences: Sequence[str]


Part = Facts | Table | Chart | Words


def render(title: str, subtitle: str, parts: Sequence[Part]) -> str:
    """Return the page.

    Raises:
        ViewError: plotly is not installed.
    """
    charts = [
        {"name": part.name, "data": part.data, "layout": _layout(part)} for part in parts if isinstance(part, Chart)
    ]
    # Within a script no sign of HTML may occur, whatever names hold.
    data = json.dumps(charts, allow_nan=False, separators=(",", ":"))
    data = re.sub("[<>&]", lambda found: f"\\u{ord(found[0]):04x}", data)
    body = "\n".join(_part(part) for part in parts)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<link rel="icon" href="data:,">
<title>{text(title)}</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>{text(title)}</h1>
<p class="soft">{text(subtitle)}</p>
{body}
<footer>Made by checkflow. This file needs no network.</footer>
<script>{_plotly()}</script>
<script type="application/json" id="charts">{data}</script>
<script>{_SCRIPT}</script>
</body>
</html>
"""


def need_plotly() -> None:
    """Raise ViewError if plotly is not installed."""
    _plotly()


def write(page: str, path: str | os.PathLike[str]) -> None:
    """Write a page's file.

    Raises:
        ViewError: it cannot be written.
    """
    try:
        Path(path).write_text(page, encoding="utf-8")
    except OSError as error:
        raise ViewError(f"cannot write the page to {path}: {error.strerror or error}") from error


def text(words: str) -> str:
    """Text for HTML; control characters are shown."""
    return html.escape(visible(words))


def label(words: str, most: int = 90) -> str:
    """Text for a chart, whose library reads some tags. Of too long a text both ends stay."""
    shown = words if len(words) <= most else f"{words[: most // 2]} … {words[-most // 2 :]}"
    return html.escape(visible(shown), quote=False)


@functools.cache
def _plotly() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise ViewError("pages need plotly, which is not installed: pip install 'checkflow[html]'") from None
    script: str = get_plotlyjs()
    if "</script" in script.lower():
        raise ViewError("this version of plotly cannot be put into a page: its script holds the end of a script")
    return script


def _layout(chart: Chart) -> dict[str, Any]:
    layout: dict[str, Any] = {
        "height": chart.height,
        "margin": {"l": 60, "r": 16, "t": 34, "b": 48},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": "system-ui, sans-serif", "size": 13},
        "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": "rgba(128,128,128,0.7)", "activecolor": "rgba(128,128,128,1)"},
        "hoverlabel": {"align": "left", "namelength": -1},
        "legend": {
            "orientation": "h",
            "yref": "container",
            "yanchor": "bottom",
            "y": 0,
            "x": 0,
            "traceorder": "normal",
        },
        "bargap": 0.25,
        **chart.layout,
    }
    for name in ("xaxis", "yaxis", *(name for name in chart.layout if name.startswith(("xaxis", "yaxis")))):
        axis = {"gridcolor": _GRID, "zerolinecolor": _GRID, "automargin": True, **layout.get(name, {})}
        if isinstance(axis.get("title"), str):
            axis["title"] = {"text": axis["title"], "standoff": 8}
        layout[name] = axis
    return layout


def _part(part: Part) -> str:
    if isinstance(part, Facts):
        return f'<div class="facts">{"".join(map(_fact, part.facts))}</div>'
    heading = f"<h2>{text(part.title)}</h2>"
    if isinstance(part, Words):
        return heading + "".join(f"<p>{text(sentence)}</p>" for sentence in part.sentences)
    words = f'<p class="soft">{text(part.words)}</p>' if part.words else ""
    if isinstance(part, Chart):
        return f'{heading}{words}<div class="chart" id="{part.name}" style="min-height:{part.height}px"></div>'
    kinds = ["" if column in part.left else ' class="number"' for column in range(len(part.columns))]
    head = "".join(f"<th{kind}>{text(name)}</th>" for name, kind in zip(part.columns, kinds, strict=True))
    rows = "".join(
        f"<tr{' class=strong' if number in part.strong else ''}>"
        + "".join(f"<td{kind}>{text(cell)}</td>" for cell, kind in zip(row, kinds, strict=True))
        + "</tr>"
        for number, row in enumerate(part.rows)
    )
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
    return f'{heading}{words}<div class="scroll">{table}</div>'


def _fact(fact: Fact) -> str:
    value = "" if fact.value is None else f' data-value="{text(str(fact.value))}"'
    more = f"<small>{text(fact.more)}</small>" if fact.more else ""
    return f'<div data-fact="{fact.name}"{value}><small>{text(fact.title)}</small><b>{text(fact.text)}</b>{more}</div>'
