"""DistributedDataParallel in a trace against a real one: its buckets, its all-reduces, its memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from checkflow.core.graph import AnchorKind, TrainingGraph
from checkflow.core.training_step import TrainingStep
from checkflow.planner.model_file.several_ranks import Ranks, parallelize, process_group
from checkflow.planner.trace.trace import trace

# Parameters of many sizes, one of them unused, and buffers.
MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(300, 300, bias=i % 2 == 0) for i in range(6))
        self.norm = nn.BatchNorm1d(300)
        self.frozen = nn.Linear(300, 300).requires_grad_(False)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).relu()
        return self.norm(self.frozen(x)).sum()
"""
REAL = (
    MODEL
    + """
import json, sys
import torch.distributed as dist
rank, store, options = int(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
torch.set_num_threads(1)
model = nn.parallel.DistributedDataParallel(Net(), **options)
for _ in range(5):
    model.zero_grad()
    model(torch.randn(4, 300)).backward()
if rank == 0:
    data = model._get_ddp_logging_data()
    rebuilt = data.get("rebuilt_bucket_sizes")
    print(json.dumps([rebuilt or data["bucket_sizes"], bool(rebuilt)]))
dist.destroy_process_group()
"""
)


def net() -> nn.Module:
    found: dict[str, Any] = {}
    exec(MODEL, found)
    made = found["Net"]()
    assert isinstance(made, nn.Module)
    return made


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    with process_group(Ranks(8)):
        yield


def wrapped(**options: Any) -> TrainingStep:
    with torch.device("meta"):
        model = DistributedDataParallel(net(), **options)
        batch = torch.randn(4, 300)
    return TrainingStep(model, torch.optim.Adam(model.parameters()), loss=lambda model, x: model(x), batch=batch)


def reduced(graph: TrainingGraph) -> list[int]:
    found = [operator.collective for operator in graph.operators if operator.collective is not None]
    assert {collective.ranks for collective in found} == {8}
    return [collective.size_bytes for collective in found if collective.kind == "all-reduce"]


def real_buckets(folder: Path, options: dict[str, Any]) -> tuple[list[int], bool]:
    script = folder / "real.py"
    script.write_text(REAL)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, str(script)]
    arguments = [str(folder / "store"), json.dumps(options)]
    ranks = [
        subprocess.Popen([*command, str(rank), *arguments], stdout=subprocess.PIPE, text=True, env=environment)
        for rank in range(2)
    ]
    answers = [rank.communicate()[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    sizes, rebuilt = json.loads(answers[0])
    return [int(size) for size in sizes.split(",")], bool(rebuilt)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{}, {"bucket_cap_mb": 1}, {"find_unused_parameters": True, "bucket_cap_mb": 1}, {"static_graph": True}],
    ids=str,
)
def test_buckets_are_those_of_two_real_ranks(tmp_path: Path, options: dict[str, Any]) -> None:
    sizes, rebuilt = real_buckets(tmp_path, options)
    assert rebuilt == ("find_unused_parameters" not in options)
    assert len(sizes) > 1
    assert reduced(trace(wrapped(**options), name="n")) == sizes


def test_a_bucket_is_reduced_after_its_last_gradient() -> None:
    graph = trace(wrapped(bucket_cap_mb=1), name="n")
    gradients = [anchor.position for anchor in graph.anchors if anchor.key.kind is AnchorKind.GRADIENT]
    places = [index for index, one in enumerate(graph.operators) if one.target == "c10d.allreduce_.default"]
    assert {graph.operators[place].phase for place in places} == {"backward"}
    assert all(any(place - 2 <= position <= place for position in gradients) for place in places)
    assert max(places) >= max(gradients)


def test_buckets_take_memory_unless_gradients_are_their_views() -> None:
    alone = wrapped()
    (model,) = alone.models.values()
    plain = TrainingStep(model.module, alone.optimizers, loss=lambda model, x: model(x), batch=alone.batch)
    gradients = sum(4 * parameter.numel() for parameter in model.parameters() if parameter.requires_grad)

    def peak(step: TrainingStep) -> int:
        return max(max(part) for part in trace(step, name="n").live_bytes(eager=True))

    # Optimizer steps hold the peak here: all gradients and one temporary.
    assert peak(wrapped()) - peak(plain) == gradients
    assert abs(peak(wrapped(gradient_as_bucket_view=True)) - peak(plain)) < 0.02 * gradients


def test_buffers_are_broadcast_and_so_written_before_forward() -> None:
    graph = trace(wrapped(), name="n")
    kinds = [one.collective.kind for one in graph.operators if one.collective is not None]
    assert kinds[:2] == ["broadcast", "broadcast"]  # floats, and the counter of batches
    (mean,) = [entry for entry in graph.state if entry.name.endswith("norm.running_mean")]
    first = next(index for index, one in enumerate(graph.operators) if one.target == "aten.addmm.default")
    assert mean.first_write is not None
    assert mean.first_write < first
    assert (mean.ranks, mean.replicas) == (8, 8)
    silent = trace(wrapped(broadcast_buffers=False), name="n")
    assert all(one.collective is None or one.collective.kind == "all-reduce" for one in silent.operators)
    own = {entry.name: entry.replicas for entry in silent.state}
    assert own["model/norm.running_mean"] == 1
    assert own["model/layers.0.weight"] == own["optimizer/layers.0.weight.exp_avg"] == 8


def test_no_sync_reduces_only_the_last_micro_batch() -> None:
    short = wrapped()
    (model,), (optimizer,) = short.models.values(), short.optimizers.values()

    def step(batch: torch.Tensor) -> None:
        optimizer.zero_grad()
        with model.no_sync():
            model(batch).backward()
        model(batch).backward()
        optimizer.step()

    general = TrainingStep(step=step, models={"m": model}, optimizers={"o": optimizer}, batch=short.batch)
    assert reduced(trace(general, name="n")) == reduced(trace(short, name="n"))


def test_a_step_that_calls_the_model_inside_is_reduced_all_the_same() -> None:
    short = wrapped()
    (outer,), (optimizer,) = short.models.values(), short.optimizers.values()
    model = outer.module

    def step(batch: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(batch).backward()
        optimizer.step()

    general = TrainingStep(step=step, models={"m": model}, optimizers={"o": optimizer}, batch=short.batch)
    planned = trace(parallelize(general, Ranks(8, parallel="ddp"), "n"), name="n")
    expected = [one.collective for one in trace(short, name="n").operators if one.collective is not None]
    assert [one.collective for one in planned.operators if one.collective is not None] == expected
