"""Traces of sharded models against torch's own counts: collectives, their bytes, and the peak of memory."""

from __future__ import annotations

import collections
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed._tools.fake_collectives import CollectiveOp, collective_ops, sync_ops
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from checkflow.core.errors import UnsupportedError
from checkflow.core.training_step import TrainingStep
from checkflow.planner.model_file.several_ranks import Ranks, process_group
from checkflow.planner.record.recorder import IterationRecorder
from checkflow.planner.trace.trace import trace

RANKS, WIDTH, LAYERS = 8, 60, 3  # 60 rows do not divide into 8


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    with process_group(Ranks(RANKS)):
        yield


class Block(nn.Module):
    def __init__(self, *, recompute: bool = False) -> None:
        super().__init__()
        self.up, self.down, self.recompute = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH), recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.recompute:
            return x + checkpoint(self._inside, x, use_reentrant=False)
        return x + self._inside(x)

    def _inside(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())


CASES = ("fsdp", "hsdp", "tp", "fsdp x tp", "recompute", "kept", "mixed", "mixed hsdp")


def build(case: str, device: str = "cpu") -> TrainingStep:
    torch.manual_seed(0)
    with torch.device(device):
        blocks = nn.ModuleList(Block(recompute=case == "recompute") for _ in range(LAYERS))
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), *blocks)
        x = torch.randn(16, WIDTH)
    names = ("replicate", "shard") if "hsdp" in case else ("shard", "tensor")
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=names)
    if "tp" in case:
        for block in blocks:
            parallelize_module(block, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    if case != "tp":
        where = mesh if "hsdp" in case else mesh["shard"] if "tp" in case else init_device_mesh("cpu", (RANKS,))
        options: dict[str, Any] = {"mesh": where}
        if "mixed" in case:
            options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        if case == "kept":
            options["reshard_after_forward"] = False
        for block in blocks:
            fully_shard(block, **options)
        fully_shard(model, **options)
    optimizer = torch.optim.Adam(model.parameters(), foreach=case != "tp")  # torch mixes no plain tensors with DTensors

    def step(batch: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(batch).float().pow(2).mean()
        loss.backward()
        optimizer.step()
        return loss

    return TrainingStep(step=step, models={"model": model}, optimizers={"adam": optimizer}, batch=x)


def settled(case: str) -> tuple[TrainingStep, Any]:
    """A step that has run twice for real, as far as one rank can alone."""
    step = build(case)
    result = None
    for _ in range(2):
        result = step.run(step.batch)
    return step, result


class Sizes(TorchDispatchMode):
    """Counts collectives by torch's own sizes for them."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: collections.Counter[tuple[str, int, int]] = collections.Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind is DTensor for kind in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        if func in collective_ops - sync_ops:
            size = CollectiveOp.get_comm_tensor_size(func, result, args, kwargs)
            self.seen[str(func), size, CollectiveOp.get_process_group(func, args).size()] += 1
        return result


@pytest.mark.parametrize("case", CASES)
def test_collectives_are_those_of_a_real_step(case: str) -> None:
    graph = trace(build(case), name=case, target="cpu")
    step, _ = settled(case)
    with CommDebugMode() as counts:
        step.run(step.batch)
    with Sizes() as sizes:
        step.run(step.batch)
    traced = [operator for operator in graph.operators if operator.collective is not None]
    assert counts.get_total_counts() == len(traced) > 0
    found = collections.Counter(
        (operator.target, operator.collective.size_bytes, operator.collective.ranks)
        for operator in traced
        if operator.collective is not None
    )
    assert found == sizes.seen


@pytest.mark.parametrize("case", [case for case in CASES if case != "tp"])
def test_the_eager_peak_is_the_tracker_s(case: str) -> None:
    graph = trace(build(case), name=case, target="cpu")
    step, held = settled(case)
    (model,), (optimizer,) = step.models.values(), step.optimizers.values()
    tracker = FSDPMemTracker(model, optimizer)
    tracker.track_inputs((step.batch,))
    with tracker:
        held = step.run(step.batch)
    (peak,) = [snapshot["Total"] for snapshot in tracker.get_tracker_snapshot("peak").values()]
    assert held is not None
    # The tracker counts step counters, which lie in host memory, as the device's.
    counters = sum(entry.size_bytes for entry in graph.state if entry.placement == "host")
    assert counters == 4 * sum(1 for _ in model.parameters())
    assert max(max(part) for part in graph.live_bytes(eager=True)) == pytest.approx(peak - counters, rel=1e-3)


@pytest.mark.parametrize("case", ["mixed hsdp", "fsdp x tp", "recompute"])
def test_a_record_of_a_live_iteration_is_the_trace(case: str) -> None:
    graph = trace(build(case), name=case, target="cpu")
    step, held = settled(case)
    recorder = IterationRecorder(step.models, step.optimizers, name=case)
    recorder.begin(step.batch, held=held)
    held = step.run(step.batch)
    recorded = recorder.end(batch=step.batch).graph
    assert held is not None
    assert [one.collective for one in recorded.operators if one.collective] == [
        one.collective for one in graph.operators if one.collective
    ]
    assert recorded.state_bytes == graph.state_bytes
    assert [(e.name, e.whole_shape, e.replicas) for e in recorded.state] == [
        (e.name, e.whole_shape, e.replicas) for e in graph.state
    ]
    traced, seen = (max(max(part) for part in found.live_bytes(eager=True)) for found in (graph, recorded))
    assert seen == pytest.approx(traced, rel=1e-3)


def test_state_has_the_names_and_shapes_of_the_whole() -> None:
    graph = trace(build("fsdp x tp"), name="n")
    entries = {entry.name: entry for entry in graph.state}
    up, bias, first = (entries[f"model/{name}"] for name in ("1.up.weight", "1.down.bias", "0.weight"))
    assert (up.shape, up.whole_shape, up.ranks, up.replicas) == ((30, WIDTH), (4 * WIDTH, WIDTH), 8, 1)
    assert (bias.shape, bias.whole_shape, bias.ranks, bias.replicas) == ((30,), (WIDTH,), 8, 4)
    assert (first.shape, first.whole_shape, first.ranks, first.replicas) == ((30, WIDTH), (WIDTH, WIDTH), 2, 1)
    assert up.size_bytes * 8 == up.whole_bytes == 4 * 4 * WIDTH * WIDTH
    momentum = entries["adam/1.up.weight.exp_avg"]
    assert (momentum.whole_shape, momentum.ranks) == (up.whole_shape, 8)
    assert entries["adam/1.up.weight.step"].placement == "host"


def test_replicas_and_uneven_parts() -> None:
    graph = trace(build("hsdp"), name="n")
    entries = {entry.name: entry for entry in graph.state}
    assert {entry.replicas for entry in graph.state if entry.placement == "device"} == {2}
    assert entries["model/0.weight"].shape == (15, WIDTH)
    uneven = {entry.name: entry for entry in trace(build("fsdp"), name="n").state}["model/0.weight"]
    assert (uneven.shape, uneven.whole_bytes) == ((8, WIDTH), 4 * WIDTH * WIDTH)


def state_of(step: TrainingStep) -> list[torch.Tensor]:
    (model,) = step.models.values()
    return [parameter.to_local().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("case", ["fsdp", "fsdp x tp"])
def test_a_trace_leaves_sharded_models_as_they_were(case: str) -> None:
    step = build(case)
    (model,) = step.models.values()
    parameters = list(model.parameters())
    values = state_of(step)
    first, again = (trace(step, name="n") for _ in range(2))
    assert first == again
    assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))
    assert model._get_fsdp_state()._is_root is None  # not initialized by a forward
    assert all(map(torch.equal, state_of(step), values))
    step.run(step.batch)
    assert model._get_fsdp_state()._is_root


@pytest.mark.slow
def test_meta_and_cpu_give_the_same_graph() -> None:
    assert trace(build("mixed"), name="n") == trace(build("mixed", "meta"), name="n")


def test_a_partial_sum_is_no_state() -> None:
    mesh = init_device_mesh("cpu", (RANKS,))
    model = nn.Linear(2, 2)
    model.register_buffer("odd", DTensor.from_local(torch.zeros(2), mesh, [Partial()]))
    optimizer = torch.optim.SGD(model.parameters())
    step = TrainingStep(model, optimizer, loss=lambda model, x: model(x).sum(), batch=torch.zeros(1, 2))
    with pytest.raises(UnsupportedError, match=r"model/odd is a DTensor with Partial\(sum\): its value is a sum"):
        trace(step, name="n")
