"""What a job without a plan pays for one: the recorded iteration, what else holds training, and the time till then.

Models train for real on this CPU, first without checkflow, then with ``Checkpointer(plan=None)``. "ratio" is the
recorded iteration's time over the usual ones' median; the promise of at most 2 is for operators of 0.1 ms and more.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from step_time import BATCHES

import checkflow
from checkflow.core.units import format_seconds

MOST_RATIO = 2.0
WARM_UP = 2  # iterations that are not counted
PATIENCE_SECONDS = 300.0


def real_step(model: str, batch_size: int) -> checkflow.TrainingStep:
    """A shipped model with real tensors."""
    torch.manual_seed(0)
    step: checkflow.TrainingStep = importlib.import_module(f"checkflow.models.{model}").build(batch_size=batch_size)
    return step


def measure(model: str, batch_size: int, iterations: int, jobs: int) -> dict[str, Any]:
    """Train one model until its plan is there, so many times: of each figure the median, of the ratio all."""
    rows = [measure_job(model, batch_size, iterations) for _ in range(jobs)]
    typical = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
    return {"batch_size": batch_size, **typical, "ratios": sorted(row["ratio"] for row in rows)}


def measure_job(model: str, batch_size: int, iterations: int) -> dict[str, Any]:
    """Train one model until its plan is there."""
    step = real_step(model, batch_size)
    usual, recorded = [], []
    for n in range(iterations + WARM_UP):
        begun = time.perf_counter()
        step.run(step.batch)
        if n >= WARM_UP:
            usual.append(time.perf_counter() - begun)
    with tempfile.TemporaryDirectory() as directory:
        end = time.monotonic() + PATIENCE_SECONDS
        with checkflow.Checkpointer(step.models, step.optimizers, directory=directory) as checkpointer:
            for _ in checkpointer.steps(2**31):
                stage = checkpointer.report()["planning"]["stage"]
                begun = time.perf_counter()
                step.run(step.batch)
                if stage == "recording":
                    recorded.append(time.perf_counter() - begun)
                if checkpointer.report()["plan"] or checkpointer.report()["planning"]["stage"] == "given up":
                    break
                if time.monotonic() > end:
                    break
            report = checkpointer.report()
    if not report["plan"]:
        raise SystemExit(f"{model} got no plan: {report['planning']['failure'] or 'it took too long'}")
    base = statistics.median(usual)
    return {
        "usual_iteration_seconds": base,
        "usual_spread": (max(usual) - min(usual)) / base,
        "recorded_iteration_seconds": recorded[-1],
        "ratio": recorded[-1] / base,
        "recordings": len(recorded),
        "until_the_plan_seconds": report["planning"]["seconds"],
        "held_seconds": report["held_seconds"]["planning"],
        "interval": report["plan"]["interval"],
    }


def main() -> None:
    cores = os.cpu_count()
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="*", choices=list(BATCHES), default=list(BATCHES))
    parser.add_argument("--batch-size", type=int, help="of every model [small ones, by model]")
    parser.add_argument("--iterations", type=int, default=12)
    parser.add_argument("--jobs", type=int, default=3)
    results = Path(__file__).parent / "results" / f"recording-{cores}-cores.json"
    parser.add_argument("--output", type=Path, default=results)
    chosen = parser.parse_args()
    head = f"{'model':12} {'batch':>5} {'usual':>9} {'recorded':>9} {'ratio':>6}"
    print(f"{head} {'until the plan':>15} {'held':>9} interval")
    rows = {}
    for model in chosen.only:
        batch_size = chosen.batch_size or BATCHES[model]
        row = rows[model] = measure(model, batch_size, chosen.iterations, chosen.jobs)
        print(
            f"{model:12} {batch_size:5} {format_seconds(row['usual_iteration_seconds']):>9}"
            f" {format_seconds(row['recorded_iteration_seconds']):>9} {row['ratio']:6.2f}"
            f" {format_seconds(row['until_the_plan_seconds']):>15} {format_seconds(row['held_seconds']):>9}"
            f" {row['interval']:8g}",
            flush=True,
        )
    slow = [model for model, row in rows.items() if row["ratio"] > MOST_RATIO]
    content = {"cores": cores, "jobs": chosen.jobs, "most_ratio": MOST_RATIO, "models": rows}
    chosen.output.write_text(json.dumps(content, indent=2) + "\n")
    if slow:
        raise SystemExit(f"recording took more than {MOST_RATIO:g} times an iteration: {', '.join(slow)}")


if __name__ == "__main__":
    main()
