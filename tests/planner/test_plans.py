"""The shipped models that a card holds, batch 1 and 32, SGD and Adam, each pair of these, for an RTX 3090.

They are planned, certified, replayed and reproducible; for larger models see test_large_models.py.
"""

from __future__ import annotations

import functools
import importlib
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import paper_document, paper_tables
from checkflow.core import plan as plans
from checkflow.core.machine.device import find_device
from checkflow.core.training_step import TrainingStep
from checkflow.core.units import parse_bandwidth
from checkflow.planner.model_file.load import load_training_step
from checkflow.planner.operators.attention import cuda_kernels
from checkflow.planner.pipeline import Planned, Subject, default_memory_limit_bytes, plan_model
from checkflow.planner.schedule.replay import check_plan
from checkflow.planner.schedule.scheduler import PlanRequest, make_plan
from checkflow.planner.trace.trace import trace
from tests.support.memory_tracking import on_fake_memory
from tests.support.steps.training_steps import flop_counter

MODELS = ("alexnet", "mnasnet", "resnet18", "vgg11", "vit", "resnet3d", "transformer", "bert")
RTX_3090 = find_device("RTX 3090")
LINKS = ("63GB/s", "40GB/s", "20GB/s")  # the paper's


def plan(model: str, batch_size: int, optimizer: str | None = None) -> Planned:
    request = PlanRequest(
        bandwidth_bytes_per_second=RTX_3090.link_bandwidth_bytes_per_second,
        memory_bandwidth_bytes_per_second=RTX_3090.memory_bandwidth_bytes_per_second,
        memory_limit_bytes=default_memory_limit_bytes(RTX_3090),
    )
    return plan_model(Subject(model, batch_size, {}, optimizer), RTX_3090, request, "segment")


def assert_documented(planned: Planned, model: str, batch_size: int, optimizer: str) -> None:
    """docs/development/paper-tables.md is made from this step: if not, run python -m benchmarks.paper_tables."""
    figures = json.loads(paper_tables.RESULTS.read_text())
    if figures["inputs"] == paper_tables.inputs():  # another torch may trace other operators
        entry = paper_document.subject(figures, model, batch_size, optimizer)
        assert planned.timeline.iteration_seconds == pytest.approx(entry["iteration_seconds"], abs=1e-11)
        assert planned.timeline.training_peak_bytes == entry["training_peak_bytes"]
        assert planned.graph.state_bytes == entry["state_bytes"]


@pytest.mark.parametrize(
    ("model", "batch_size", "optimizer"),
    [
        (model, batch_size, (None, "adam")[(number + place) % 2])
        for number, model in enumerate(MODELS)
        for place, batch_size in enumerate((1, 32))
    ],
)
def test_planned_as_often_as_the_link_allows(model: str, batch_size: int, optimizer: str | None) -> None:
    planned = plan(model, batch_size, optimizer)
    outcome = planned.outcome
    least = outcome.least_bandwidth_bytes_per_second
    assert least is not None
    assert outcome.plan is not None
    assert outcome.status == "optimal"
    assert (outcome.interval == 1) == (least <= RTX_3090.link_bandwidth_bytes_per_second)
    assert (outcome.interval == 1) == (outcome.explanation == "")
    replay = check_plan(outcome.plan)
    assert replay.peak_bytes == outcome.plan.plan_peak_bytes
    assert outcome.plan.certificate.bound_bytes == outcome.plan.certificate.objective_bytes
    assert_documented(planned, model, batch_size, optimizer or "sgd")
    data = plans.dumps(outcome.plan)
    assert plans.loads(data) == outcome.plan.sealed()
    if batch_size == 1:  # each model once
        again = plan(model, batch_size, optimizer).outcome
        assert again.plan is not None
        assert again.explanation == outcome.explanation
        assert plans.dumps(again.plan) == data


@pytest.mark.parametrize(
    ("model", "batch_size", "bandwidths"),
    [("alexnet", 32, ("63GB/s",)), ("alexnet", 1024, LINKS), ("bert", 32, LINKS)],
)
def test_the_feasible_cells_of_the_papers_table(model: str, batch_size: int, bandwidths: tuple[str, ...]) -> None:
    """The Checkflow paper, table I: these fit, and at batch 32 without raising the peak (its section IV-B)."""
    planned = plan(model, batch_size)
    for bandwidth in bandwidths:
        request = replace(planned.request, bandwidth_bytes_per_second=parse_bandwidth(bandwidth))
        outcome = make_plan(
            planned.timeline, planned.fingerprint, request, graph_peak_bytes=planned.graph_peak_bytes
        )  # fmt: skip
        assert (outcome.interval, outcome.status) == (1, "optimal"), bandwidth
        assert outcome.plan is not None
        if batch_size == 32:
            assert outcome.plan.plan_peak_bytes == planned.timeline.training_peak_bytes, bandwidth


@pytest.mark.slow
def test_another_process_with_another_hash_seed_writes_the_same_bytes(tmp_path: Path) -> None:
    written = []
    for seed in ("1", "2"):
        path = tmp_path / f"{seed}.json"
        command = [
            sys.executable,
            "-m",
            "checkflow",
            "plan",
            "resnet18",
            "--optimizer",
            "adam",
            "--json",
            "-o",
            str(path),
        ]
        done = subprocess.run(command, env={"PYTHONHASHSEED": seed, "PATH": ""}, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["status"] == "optimal"
        written.append(path.read_bytes())
    assert written[0] == written[1]


@pytest.mark.parametrize("model", MODELS)
def test_flops_and_state_are_what_torch_says(model: str) -> None:
    """Against torch's own counter, and the sizes of the state dicts after a step, on the same model untraced."""
    with torch.device("meta"):
        built: TrainingStep = importlib.import_module(f"checkflow.models.{model}").build(batch_size=1)
    foreach = functools.partial(torch.optim.Adam, foreach=True)
    with on_fake_memory(built, foreach) as step, cuda_kernels(), flop_counter() as counter:
        step.run(step.batch)
        module, optimizer = step.models["model"], step.optimizers["optimizer"]
        sizes = [tensor.nbytes for tensor in module.state_dict().values()]
        sizes += [value.nbytes for table in optimizer.state.values() for value in table.values()]
    name, traced = load_training_step(model, batch_size=1, settings={}, optimizer="adam")
    graph = trace(traced, name=name, target="cuda", compute_capability=RTX_3090.compute_capability)
    assert graph.flops == counter.get_total_flops()
    assert graph.state_bytes == sum(sizes)
    assert graph.parameters == sum(parameter.numel() for parameter in module.parameters())
