"""Small jobs under DDP, FSDP2, HSDP and tensor parallelism, with shapes that do not divide evenly."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

ROWS = 6  # of a batch


class Small(nn.Module):
    """Layers whose rows and columns are 10, 7 and 5; a norm with buffers; a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(7, 10), nn.Linear(10, 5), nn.BatchNorm1d(5)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.norm(self.down(torch.relu(self.up(rows)))) * self.scale  # type: ignore[no-any-return]


def build(kind: str, world_size: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and its optimizer; "fsdp", "ddp", "tp", "hsdp", "fsdp-tp" or "plain". All ranks begin alike."""
    torch.manual_seed(3)
    model: Any = Small()
    if kind == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    if kind == "fsdp":
        model = fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    if kind == "hsdp":
        model = fully_shard(model, mesh=init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("dp", "shard")))
    if kind in ("tp", "fsdp-tp"):
        replicas = 1 if kind == "tp" else 2
        mesh = init_device_mesh("cpu", (replicas, world_size // replicas), mesh_dim_names=("dp", "tp"))
        parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        if kind == "fsdp-tp":
            fully_shard(model, mesh=mesh["dp"])
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: int, *, first: int = 0) -> None:
    """Steps whose batch depends on the step, and on the rank where ranks are to have batches of their own."""
    for step in range(first, first + steps):
        rows = torch.randn(ROWS, 7, generator=torch.Generator().manual_seed(100 * step + rank))
        model(rows).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
