"""The Checkflow paper's evaluation, planned anew: Table I, Figure 2 and the analysis of storage, beside its figures.

``python -m benchmarks.paper_tables`` writes ``benchmarks/results/paper-tables.json`` and, from that alone,
``docs/development/paper-tables.md``; ``--render`` only the second. Plans are for an RTX 3090 and need no GPU. No timing
goes into either file: the same versions give the same figures on any machine.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

import checkflow
from benchmarks.paper_document import render
from checkflow.core.graph import TrainingGraph
from checkflow.core.machine.device import Device, find_device
from checkflow.core.plan import Policy
from checkflow.core.timeline import Granularity, Timeline
from checkflow.planner.model_file.load import load_training_step
from checkflow.planner.pipeline import default_memory_limit_bytes
from checkflow.planner.schedule.baselines import baselines
from checkflow.planner.schedule.scheduler import Outcome, PlanRequest, fingerprint_of, make_plan
from checkflow.planner.timeline.roofline import WINOGRAD_GAIN, durations_seconds
from checkflow.planner.timeline.steps import make_timeline
from checkflow.planner.trace.trace import trace

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "paper-tables.json"
DOCUMENT = ROOT / "docs" / "development" / "paper-tables.md"

DEVICE = "RTX 3090"
LINKS_BYTES_PER_SECOND = (63e9, 40e9, 20e9)  # the paper's; the first is its default
OVERHEAD = 0.035  # `checkflow plan`'s default
MODELS = ("alexnet", "bert", "mnasnet", "resnet18", "resnet3d", "transformer", "vgg11", "vit")
FEASIBILITY = (("alexnet", 32), ("alexnet", 1024), ("bert", 32))  # the rows of Table I
POLICIES: tuple[Policy, ...] = ("direct", "snapshot")
GRANULARITIES: tuple[Granularity, ...] = ("segment", "operator")
# Seconds are kept to the picosecond: the last digits of a long sum differ between versions of Python.
_DIGITS = 12


def subjects() -> Iterable[tuple[str, int, str]]:
    """(model, batch size, optimizer) of everything that is planned."""
    yield from itertools.product(MODELS, (1, 32), ("sgd", "adam"))
    yield "alexnet", 1024, "sgd"


def links(model: str, batch_size: int, optimizer: str) -> tuple[float, ...]:
    """The links that a subject is planned for."""
    return LINKS_BYTES_PER_SECOND if optimizer == "sgd" and (model, batch_size) in FEASIBILITY else (63e9,)


def inputs() -> dict[str, Any]:
    """What the figures follow from, besides this repository."""
    device = find_device(DEVICE)
    return {
        "checkflow": checkflow.__version__,
        "torch": torch.__version__.partition("+")[0],
        "device": device.name,
        "device_source": device.source,
        "memory_bandwidth_bytes_per_second": device.memory_bandwidth_bytes_per_second,
        "memory_limit_bytes": default_memory_limit_bytes(device),
        "compute_efficiency": device.compute_efficiency,
        "matrix_efficiency": device.matrix_efficiency,
        "winograd_gain": WINOGRAD_GAIN,
        "memory_efficiency": device.memory_efficiency,
        "launch_seconds": device.launch_seconds,
        "links_bytes_per_second": list(LINKS_BYTES_PER_SECOND),
        "overhead": OVERHEAD,
    }


def measure(model: str, batch_size: int, optimizer: str) -> dict[str, Any]:
    """A training step under both policies at both granularities."""
    device = find_device(DEVICE)
    name, step = load_training_step(model, batch_size=batch_size, settings={}, optimizer=optimizer)
    graph = trace(step, name=name, target="cuda")
    durations = durations_seconds(graph, device)
    timelines = {granularity: make_timeline(graph, durations, granularity) for granularity in GRANULARITIES}
    timeline = timelines["segment"]
    return {
        "model": model,
        "batch_size": batch_size,
        "optimizer": optimizer,
        "batch": graph.batch,
        "operators": len(graph.operators),
        "state_tensors": len(graph.state),
        "state_bytes": graph.state_bytes,  # what storage takes
        "device_state_bytes": timeline.state_bytes,  # what crosses the link
        "iteration_seconds": round(timeline.iteration_seconds, _DIGITS),
        "training_peak_bytes": timeline.training_peak_bytes,
        "cases": [
            _case(graph, timelines[granularity], device, policy, link)
            for link in links(model, batch_size, optimizer)
            for policy in POLICIES
            for granularity in GRANULARITIES
        ],
    }


def _case(graph: TrainingGraph, timeline: Timeline, device: Device, policy: Policy, link: float) -> dict[str, Any]:
    """A checkpoint of every iteration without any wait, as in the paper; and what is planned within the overhead."""
    paper = _plan(graph, timeline, device, policy, link, overhead=None, max_interval=1)
    others = baselines(timeline, link)
    case = {
        "granularity": timeline.granularity,
        "policy": policy,
        "link_bytes_per_second": link,
        "least_bandwidth_bytes_per_second": paper.least_bandwidth_bytes_per_second,
        "checkfreq_extra_bytes": others.checkfreq_peak_bytes - timeline.training_peak_bytes,
        "checkfreq_released_extra_bytes": others.checkfreq_released_peak_bytes - timeline.training_peak_bytes,
        "every_iteration": _facts(paper, timeline),
    }
    if paper.plan is None or (policy == "direct" and timeline.granularity == "segment"):
        case["within_overhead"] = _facts(
            _plan(graph, timeline, device, policy, link, overhead=OVERHEAD, max_interval=None), timeline
        )
    return case


def _plan(
    graph: TrainingGraph,
    timeline: Timeline,
    device: Device,
    policy: Policy,
    link: float,
    *,
    overhead: float | None,
    max_interval: int | None,
) -> Outcome:
    request = PlanRequest(
        bandwidth_bytes_per_second=link,
        memory_bandwidth_bytes_per_second=device.memory_bandwidth_bytes_per_second,
        memory_limit_bytes=default_memory_limit_bytes(device),
        policy=policy,
        overhead=overhead,
        max_interval=max_interval,
    )
    return make_plan(timeline, fingerprint_of(graph, device), request, graph_peak_bytes=0)


def _facts(outcome: Outcome, timeline: Timeline) -> dict[str, Any]:
    """What is known of a plan; null where there is none."""
    plan = outcome.plan
    return {
        "status": outcome.status,
        "interval": outcome.interval,
        "stall_seconds": None if plan is None else round(plan.stall_seconds, _DIGITS),
        "wait_seconds": None if plan is None else round(plan.wait.seconds if plan.wait else 0.0, _DIGITS),
        "snapshot_bytes": None if plan is None else plan.snapshot_bytes,
        "extra_bytes": None if plan is None else plan.plan_peak_bytes - timeline.training_peak_bytes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--render", action="store_true", help="make the document from the figures that are there")
    if not parser.parse_args().render:
        measured = []
        for subject in subjects():
            print(*subject, flush=True)
            measured.append(measure(*subject))
        RESULTS.write_text(json.dumps({"inputs": inputs(), "subjects": measured}, indent=1) + "\n")
    DOCUMENT.write_text(render(json.loads(RESULTS.read_text())))


if __name__ == "__main__":
    main()
