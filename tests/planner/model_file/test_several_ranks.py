"""The ranks of a plan: what --ranks, --mesh and --parallel accept, and what is left of the process group."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from checkflow.core.errors import CheckflowError, ModelError
from checkflow.core.training_step import TrainingStep
from checkflow.planner.model_file.several_ranks import Ranks, blocks, parallelize, process_group
from checkflow.planner.trace.trace import trace

HSDP = (("replicate", 2), ("shard", 4))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"count": 1}, "for 2 to 1048576 ranks, not 1"),
        ({"count": 8, "mesh": HSDP}, "--mesh goes with --parallel"),
        (
            {"count": 16, "mesh": HSDP, "parallel": "fsdp"},
            "--mesh replicate=2,shard=4 has 8 ranks, and --ranks says 16",
        ),
        (
            {"count": 8, "mesh": HSDP, "parallel": "ddp"},
            "--parallel ddp takes --mesh replicate=N, not replicate=2,shard=4",
        ),
        ({"count": 8, "mesh": (("tensor", 8),), "parallel": "fsdp"}, "takes --mesh shard=N or replicate=N,shard=N"),
        ({"count": 8, "parallel": "zero"}, "--parallel is one of ddp, fsdp, not zero"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_does_not_fit_together_is_one_line(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckflowError) as caught:
        Ranks(**arguments)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_process_group_goes_away_with_all_that_was_changed_for_it() -> None:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.nn.parallel import distributed

    before = DeviceMesh.__init__, distributed._sync_module_states
    with pytest.raises(ZeroDivisionError), process_group(Ranks(4096)):
        assert (dist.get_rank(), dist.get_world_size()) == (0, 4096)
        assert DeviceMesh("cuda", range(4096)).device_type == "cpu"
        raise ZeroDivisionError
    assert not dist.is_initialized()
    assert (DeviceMesh.__init__, distributed._sync_module_states) == before
    with process_group(None):
        assert not dist.is_initialized()


def test_a_process_in_a_group_is_refused() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(CheckflowError, match="in a process group already"), process_group(Ranks(2)):
            pass
    finally:
        dist.destroy_process_group()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 8)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.head(x)
        for layer in self.layers:
            x = layer(x)
        return x


def step_of(model: nn.Module, optimizer: Any = torch.optim.SGD) -> TrainingStep:
    made = optimizer(model.parameters())
    return TrainingStep(model, made, loss=lambda model, x: model(x).sum(), batch=torch.zeros(2, 8))


def test_blocks_are_the_outermost_items_that_train() -> None:
    model = Model()
    assert blocks(model) == list(model.layers)
    model.layers[0].requires_grad_(False)
    assert blocks(model) == list(model.layers)[1:]
    assert blocks(nn.Linear(2, 2)) == []


def test_fsdp_wraps_the_model_and_the_optimizer_follows() -> None:
    with process_group(Ranks(8)):
        step = step_of(Model())
        made = parallelize(step, Ranks(8, HSDP, "fsdp"), "n")
        (model,), (optimizer,) = made.models.values(), made.optimizers.values()
        wrapped = [module for module in model.modules() if isinstance(module, FSDPModule)]
        assert wrapped == [model, *model.layers]
        (group,) = optimizer.param_groups
        assert {id(one) for one in group["params"]} == {id(one) for one in model.parameters()}
        assert {one.device_mesh.shape for one in group["params"]} == {(2, 4)}


def test_what_cannot_be_wrapped_is_one_line() -> None:
    with process_group(Ranks(8)):
        with pytest.raises(ModelError, match="optimizer has state before its first step"):
            parallelize(step_of(Model(), torch.optim.Adagrad), Ranks(8, parallel="fsdp"), "n")
        with pytest.raises(ModelError, match=r"n wraps its model in FSDP\w+ itself: leave out --parallel, --mesh"):
            parallelize(step_of(fully_shard(Model())), Ranks(8, parallel="ddp"), "n")


@pytest.mark.parametrize("count", [2, 64, 1024])
def test_any_number_of_ranks_is_traced(count: int) -> None:
    ranks = Ranks(count, parallel="fsdp")
    with process_group(ranks):
        graph = trace(parallelize(step_of(Model()), ranks, "n"), name="n")
    moved = [one.collective for one in graph.operators if one.collective is not None]
    assert {(one.ranks, one.stride) for one in moved} == {(count, 1)}
    padded = 4 * (8 + 1) * 8 if count == 2 else 4 * (8 + 1) * count  # eight rows, and a bias of eight
    assert {one.size_bytes for one in moved} == {padded}
    assert [one.kind for one in moved].count("reduce-scatter") == 4  # the layers and the rest
    weight = next(entry for entry in graph.state if entry.name == "model/head.weight")
    assert (weight.shape, weight.whole_shape) == ((max(1, 8 // count), 8), (8, 8))
