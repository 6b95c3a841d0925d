"""The benchmark of memory, as far as it goes without a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import memory
from checkflow.planner.model_file.load import load_training_step
from checkflow.planner.trace.trace import trace

GIB, MIB = 2**30, 2**20
pytestmark = pytest.mark.slow

PEAKS = memory.Peaks(990 * MIB, GIB, 3 * GIB, 8 * MIB, 500 * MIB)
ROW = memory.Row(
    "bert", "adam", 16, 1000 * MIB, "aten.mm.default of backward in model/layers", PEAKS, None, "no plan: why"
)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: the benchmark would run")
def test_without_a_gpu_it_says_so_and_succeeds() -> None:
    script = Path(__file__).parents[2] / "benchmarks" / "memory.py"
    done = subprocess.run([sys.executable, script], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "there is no CUDA GPU here, and so nothing to measure\n"


@pytest.mark.parametrize("optimizer", memory.CHOICES)
def test_prediction_is_the_traces_eager_peak(optimizer: str) -> None:
    peak, operator = memory.predict("resnet18", 2, optimizer)
    graph = trace(load_training_step("resnet18", batch_size=2, optimizer=optimizer)[1], name="n", target="cuda")
    during = graph.live_bytes(eager=True)[0]
    assert peak == max(during)
    at_peak = [o.target for o, live in zip(graph.operators, during, strict=True) if live == peak]
    assert operator.partition(" ")[0] in at_peak


def test_the_plan_of_a_measurement_with_checkpoints() -> None:
    plan = memory.plan_for("alexnet", 2, "sgd", memory.find_device("H200"))
    assert not isinstance(plan, str)
    assert plan.plan_peak_bytes >= memory.predict("alexnet", 2, "sgd")[0]


def test_ratios_are_of_what_was_measured_to_what_was_predicted() -> None:
    assert ROW.ratio == 1024 / 1000
    assert ROW.ratio_with_checkpoints is None
    both = replace(ROW, predicted_with_checkpoints_bytes=1024 * MIB, with_checkpoints=PEAKS)
    assert both.ratio_with_checkpoints == 1.0
    refused = replace(ROW, predicted_with_checkpoints_bytes=1024 * MIB)
    assert refused.ratio_with_checkpoints is None


def test_a_row_of_the_table_and_of_the_file() -> None:
    told = " ".join(memory.line_of(ROW).split())
    assert told == "bert adam 16 1.05 GB 1.04 GB 1.07 GB 1.024 3.22 GB 8.39 MB no plan: why"
    both = replace(ROW, predicted_with_checkpoints_bytes=512 * MIB, with_checkpoints=PEAKS)
    assert memory.line_of(both).endswith("1.07 GB of 2.000 times the plan's")
    found = json.loads(json.dumps(memory.as_json("a GPU", [ROW, both])))
    assert [row["ratio_with_checkpoints"] for row in found["rows"]] == [None, 2.0]
    assert found["rows"][1]["with_checkpoints"]["reserved_bytes"] == 3 * GIB


def test_the_device_to_plan_for() -> None:
    found = memory.device_of("NVIDIA H200", None)
    assert found is not None
    assert found.name == "H200"
    assert memory.device_of("NVIDIA GeForce RTX 4090", None) is None
    asked = memory.device_of("NVIDIA GeForce RTX 4090", "V100")
    assert asked is not None
    assert asked.name == "V100"
