"""The benchmark of memory, as far as it goes without a GPU."""

from __future__ import annotations

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


def test_prediction_is_the_traces_eager_peak_and_a_plans_is_not_below_it() -> None:
    peak, operator = memory.predict("alexnet", 2, "adam")
    graph = trace(load_training_step("alexnet", batch_size=2, optimizer="adam")[1], name="n", target="cuda")
    during = graph.live_bytes(eager=True)[0]
    assert peak == max(during)
    at_peak = [o.target for o, live in zip(graph.operators, during, strict=True) if live == peak]
    assert operator.partition(" ")[0] in at_peak
    plan = memory.plan_for("alexnet", 2, "adam", memory.find_device("H200"))
    assert not isinstance(plan, str)
    assert plan.plan_peak_bytes >= peak


def test_ratios_are_of_what_was_measured_to_what_was_predicted() -> None:
    assert ROW.ratio == 1024 / 1000
    assert ROW.ratio_with_checkpoints is None
    both = replace(ROW, predicted_with_checkpoints_bytes=1024 * MIB, with_checkpoints=PEAKS)
    assert both.ratio_with_checkpoints == 1.0
    refused = replace(ROW, predicted_with_checkpoints_bytes=1024 * MIB)
    assert refused.ratio_with_checkpoints is None
