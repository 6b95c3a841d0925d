"""The roofline against the world: public training throughputs of the catalogue's cards, beside the predicted ones.

``python -m benchmarks.throughputs`` prints the table, writes ``benchmarks/results/throughputs.json`` and, from that
alone, ``docs/development/throughputs.md``; ``--render`` only the last. Nothing runs on a card: steps are traced. No
timing goes into either file: the same versions give the same figures on any machine.
"""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks import sharded_llama
from benchmarks.paper_document import table
from benchmarks.published import PUBLISHED, Published
from benchmarks.throughput_models import TASKS, Layout, Precision, training_step
from checkflow.core.graph import TrainingGraph
from checkflow.core.machine.device import CATALOGUE, find_device
from checkflow.planner.timeline.roofline import WINOGRAD_GAIN, Float32Precision, durations_seconds
from checkflow.planner.trace.trace import trace

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "throughputs.json"
DOCUMENT = ROOT / "docs" / "development" / "throughputs.md"
TEMPLATE = Path(__file__).with_name("throughputs_template.md")

WITHIN = 1.5  # the factor by which a prediction may be off, either way
_GIVEN = ("card", "task", "precision", "layout", "batch_size", "micro_batches", "source")


def inputs() -> dict[str, Any]:
    """What the predictions follow from, besides the models."""
    return {
        "torch": torch.__version__.partition("+")[0],
        "winograd_gain": WINOGRAD_GAIN,
        "devices": {name: asdict(device) for name, device in CATALOGUE.items() if device.kind == "cuda"},
    }


@functools.lru_cache(maxsize=4)  # rows with the same graph follow each other where cards share them; graphs are large
def _graph(task: str, precision: Precision, batch_size: int, micro_batches: int, layout: Layout) -> TrainingGraph:
    return trace(training_step(task, precision, batch_size, micro_batches, layout), name=task)


def predicted_per_second(row: Published) -> float:
    """What the catalogue's card would train in a second: images, sequences or tokens, as the row counts."""
    tf32 = row.precision == "tf32"
    traced: Precision = "float32" if tf32 else row.precision
    graph = _graph(row.task, traced, row.batch_size, row.micro_batches, row.layout)
    seconds = sum(durations_seconds(graph, find_device(row.card), Float32Precision(tf32, tf32)))
    task = TASKS[row.task]
    counted = row.batch_size * row.micro_batches * (task.length if task.unit == "tokens" else 1)
    return counted / seconds


def measure(row: Published) -> dict[str, Any]:
    given = {name: getattr(row, name) for name in _GIVEN}
    return {**given, "published": row.per_second, "predicted": round(predicted_per_second(row), 6)}


def two_layers() -> list[dict[str, Any]]:
    """Runs of several ranks, one a card and a way of checkpointing, with a small model: a test makes these anew."""
    return [sharded_llama.measure(run, layers=2) for run in sharded_llama.PUBLISHED_RUNS[::3]]


def render(data: dict[str, Any]) -> str:
    """The whole document."""
    rows = data["rows"]
    ratios = sorted(row["predicted"] / row["published"] for row in rows)
    return TEMPLATE.read_text().format(
        torch=data["inputs"]["torch"],
        within=WITHIN,
        rows=len(rows),
        cards=len({row["card"] for row in rows}),
        least=f"{ratios[0]:.2f}",
        most=f"{ratios[-1]:.2f}",
        near=sum(1 / 1.25 <= ratio <= 1.25 for ratio in ratios),
        winograd_gain=data["inputs"]["winograd_gain"],
        efficiencies=_efficiencies(data["inputs"]["devices"]),
        runs=_runs(data["several_ranks"]),
        tables="\n\n".join(_section(card, rows) for card in dict.fromkeys(row["card"] for row in rows)),
    )


def _efficiencies(devices: dict[str, dict[str, Any]]) -> str:
    header = ["card", "general units", "matrix units", "memory"]
    lines = []
    for name, device in devices.items():
        matrix = "none" if not device["matrix_flops_per_second"] else f"{device['matrix_efficiency']:g}"
        lines.append([name, f"{device['compute_efficiency']:g}", matrix, f"{device['memory_efficiency']:g}"])
    return table(header, lines)


def _runs(rows: Iterable[dict[str, Any]]) -> str:
    header = ["GPUs", "batch, checkpointing", "published", "predicted", "ratio", "communication waited for", "source"]
    lines = []
    for row in rows:
        published, predicted = row["tokens_per_second"], row["predicted"]
        what = f"{row['batch_size']}, selective by {row['checkpointing']}"
        waits = f"{1000 * row['exposed_seconds']:.3g} ms"
        figures = [f"{published:,.5g}", f"{predicted:,.5g}", f"{predicted / published:.2f}", waits]
        lines.append([f"{row['ranks']} {row['card']}", what, *figures, row["source"]])
    return table(header, lines)


def _section(card: str, rows: Iterable[dict[str, Any]]) -> str:
    header = ["model, precision, batch", "published", "predicted", "ratio", "source"]
    lines = []
    for row in rows:
        if row["card"] == card:
            published, predicted = row["published"], row["predicted"]
            ratio = f"{predicted / published:.2f}"
            lines.append([_what(row), f"{published:,.5g}", f"{predicted:,.5g}", ratio, row["source"]])
    return f"### {card}\n\n" + table(header, lines)


def _what(row: dict[str, Any]) -> str:
    times = f" × {row['micro_batches']}" if row["micro_batches"] > 1 else ""
    images = f", {row['layout']}" if TASKS[row["task"]].unit == "images" else ""
    return f"{row['task']}, {row['precision']}, {row['batch_size']}{times}{images}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--jobs", type=int, default=1, help="processes that trace at once")
    parser.add_argument("--render", action="store_true", help="make the document from the figures that are there")
    chosen = parser.parse_args()
    if not chosen.render:
        measured = []
        with ProcessPoolExecutor(chosen.jobs) as pool:
            for found in pool.map(measure, PUBLISHED):
                ratio = found["predicted"] / found["published"]
                figures = f"{found['published']:10,.5g} {found['predicted']:10,.5g} {ratio:5.2f}"
                print(f"{found['card']:12} {_what(found):50} {figures}", flush=True)
                measured.append(found)
        several = [sharded_llama.measure(run) for run in sharded_llama.PUBLISHED_RUNS]
        figures = {"inputs": inputs(), "rows": measured, "several_ranks": several, "two_layers": two_layers()}
        RESULTS.write_text(json.dumps(figures, indent=1) + "\n")
    DOCUMENT.write_text(render(json.loads(RESULTS.read_text())))


if __name__ == "__main__":
    main()
