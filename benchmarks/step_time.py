"""Predicted against measured: the time of an iteration of each shipped model on this machine, beside the roofline's.

Each model runs as ``checkflow plan --device auto`` runs it, and is predicted by an earlier probe and by the catalogue.
Let nothing else run meanwhile.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import os
import platform
import re
from pathlib import Path
from typing import Any

import torch

from checkflow.core.machine.device import Device
from checkflow.core.units import format_seconds
from checkflow.planner.measure.probe import FULL, QUICK, probe
from checkflow.planner.measure.torch_settings import torch_settings_kept
from checkflow.planner.pipeline import Subject, measure_model
from checkflow.planner.timeline.measured import MeasuredStep

BATCHES = {
    "alexnet": 8,
    "mnasnet": 8,
    "resnet18": 8,
    "vgg11": 2,
    "vit": 2,
    "resnet3d": 8,
    "transformer": 32,
    "bert": 1,
}
RESULTS = Path(__file__).parent / "results"


def machine_name(device: Device) -> str:
    """The GPU's name, or "2 cores": what else a CPU is called says little."""
    return device.name if device.kind == "cuda" else f"{os.cpu_count()} cores"


def measure(model: str, batch_size: int, device: Device) -> MeasuredStep:
    with torch_settings_kept():
        measured = measure_model(Subject(model, batch_size, {}, None), device)
    gc.collect()
    if device.kind == "cuda":
        torch.cuda.empty_cache()
    return measured


def row_of(model: str, batch_size: int, measured: MeasuredStep, probed: Device) -> dict[str, Any]:
    times = measured.times
    return {
        "model": model,
        "batch_size": batch_size,
        "operators": len(measured.graph.operators),
        "flops": measured.graph.flops,
        "step_seconds": dataclasses.asdict(times.step),
        "recorded_seconds": dataclasses.asdict(times.recorded),
        "operator_quartile_share": times.operator_quartile_share,
        "predictions": [
            {
                "by": "probe" if one.device == probed.name else f"catalogue, {one.device}",
                "seconds": one.seconds,
                "predicted_to_measured": one.ratio,
            }
            for one in times.predictions
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="*", choices=list(BATCHES), default=list(BATCHES))
    parser.add_argument("--batch-size", type=int, help="of every model [small ones, by model]")
    parser.add_argument("--quick", action="store_true", help="probe quickly")
    parser.add_argument("--output", type=Path, help="the file for the figures")
    asked = parser.parse_args()
    probed = probe(None, QUICK if asked.quick else FULL)
    device = probed.device
    rows = []
    print(
        f"{'model':12} {'batch':>5} {'measured':>9} {'least to most':>21} {'operators':>9}  predicted (of the measured)"
    )
    for model in asked.only:
        batch_size = asked.batch_size or BATCHES[model]
        row = row_of(model, batch_size, measure(model, batch_size, device), device)
        rows.append(row)
        step = row["step_seconds"]
        ends = f"{format_seconds(step['least'])} to {format_seconds(step['most'])}"
        spread = f"{100 * row['operator_quartile_share']:.0f} %"
        said = ", ".join(
            f"{format_seconds(one['seconds'])} ({one['predicted_to_measured']:.2f}) by the {one['by']}"
            for one in row["predictions"]
        )
        print(
            f"{model:12} {batch_size:5} {format_seconds(step['median']):>9} {ends:>21} {spread:>9}  {said}", flush=True
        )
    name = machine_name(device)
    figures = {figure.name: dataclasses.asdict(figure.spread) for figure in probed.figures}
    where: dict[str, Any] = {"machine": name, "torch": torch.__version__, "python": platform.python_version()}
    where |= {"threads": torch.get_num_threads()} if device.kind == "cpu" else {}
    short = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    file = asked.output or RESULTS / f"step-time-{short}.json"
    file.write_text(json.dumps({**where, "probe": figures, "rows": rows}, indent=1) + "\n")
    print(f"written to {file}")


if __name__ == "__main__":
    main()
