"""A small job in pipeline stages: each rank holds some layers of one model, under the names that the whole has."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

WIDTH, LAYERS, ROWS, MICRO_BATCHES = 8, 4, 8, 2


class Layers(nn.Module):
    """Some layers of the whole; numbers of the others are not there, as where a script deletes them."""

    def __init__(self, numbers: range, *, renumbered: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleDict()
        for number in numbers:
            torch.manual_seed(number)
            layer = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh())
            self.layers[str(number - numbers.start if renumbered else number)] = layer

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values():
            rows = layer(rows)
        return rows


def layers_of(stage: int, stages: int) -> range:
    return range(LAYERS * stage // stages, LAYERS * (stage + 1) // stages)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    named = list(model.named_parameters())
    groups = [
        {"params": [one for name, one in named if name.endswith("weight")], "weight_decay": 0.1},
        {"params": [one for name, one in named if name.endswith("bias")], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=0.01, foreach=False)


class Job:
    """One rank's stage: of ``stages``, each on ``world_size // stages`` ranks, which shard it by FSDP2."""

    def __init__(self, world_size: int, stages: int, *, renumbered: bool = False, first: int = 0) -> None:
        mesh = init_device_mesh("cpu", (stages, world_size // stages), mesh_dim_names=("pp", "dp"))
        self.stage, self.stages = mesh["pp"].get_local_rank(), stages
        numbers = layers_of(self.stage, stages)
        self.model = Layers(range(max(first, numbers.start), numbers.stop), renumbered=renumbered)
        if world_size > stages:
            fully_shard(self.model, mesh=mesh["dp"])
        self.optimizer = optimizer_of(self.model)
        # Otherwise torch runs the stage on rows without values first.
        rows = torch.empty(ROWS // MICRO_BATCHES, WIDTH, requires_grad=self.stage > 0)
        made = torch.empty(ROWS // MICRO_BATCHES, WIDTH, requires_grad=True)
        stage = PipelineStage(
            self.model, self.stage, stages, torch.device("cpu"), rows, made, group=mesh["pp"].get_group()
        )
        self._schedule = ScheduleGPipe(stage, MICRO_BATCHES, F.mse_loss)

    def train(self, step: int) -> None:
        """A step; each rank of a stage has the same rows."""
        rows = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(100 + step))
        self.optimizer.zero_grad()
        inputs = (rows,) if self.stage == 0 else ()
        self._schedule.step(*inputs, target=rows.sin() if self.stage == self.stages - 1 else None)
        self.optimizer.step()

    def everything(self) -> dict[str, torch.Tensor]:
        """Every tensor of this stage, whole."""
        found = dict(self.model.state_dict())
        for name, parameter in self.model.named_parameters():
            found |= {f"{name}.{key}": value for key, value in self.optimizer.state[parameter].items()}
        return {
            name: (value.full_tensor() if isinstance(value, dist.tensor.DTensor) else value).detach().clone()
            for name, value in found.items()
        }
