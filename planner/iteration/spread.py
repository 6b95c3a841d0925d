"""Over which ranks each state tensor is spread: sharded, replicated, or the rank's own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from checkflow.core.state import StateTensor, is_distributed, optimizer_parameters


@dataclass(frozen=True, slots=True)
class Spread:
    """The ranks that hold a tensor between them."""

    whole_shape: tuple[int, ...] | None = None  # None: that of the part
    ranks: int = 1  # that hold all of it together
    replicas: int = 1  # that hold the same part


OWN = Spread()


def spreads(
    items: Iterable[StateTensor], models: Mapping[str, nn.Module], optimizers: Mapping[str, torch.optim.Optimizer]
) -> dict[str, Spread]:
    """Return the spread of state tensors by name, without those that are the rank's own.

    A DTensor says it itself. DistributedDataParallel replicates parameters and what optimizers keep for them, and the
    buffers that it broadcasts.
    """
    reduced: dict[int, int] = {}  # ranks by the id of a parameter
    broadcast: dict[int, int] = {}  # by that of a buffer
    for wrapper in _wrappers(models):
        ranks = wrapper.process_group.size()
        reduced.update((id(parameter), ranks) for parameter in wrapper.module.parameters())
        if wrapper.broadcast_buffers:
            broadcast.update((id(buffer), ranks) for buffer in wrapper.module.buffers())
    updated = {
        f"{owner}/{name}": reduced[id(parameter)]
        for owner, optimizer in (optimizers.items() if reduced else ())
        for name, parameter in optimizer_parameters(models, optimizer)
        if id(parameter) in reduced
    }
    found: dict[str, Spread] = {}
    for item in items:
        held = item.held
        spread = _of_sharded(held) if is_distributed(held) else OWN
        ranks = reduced.get(id(held)) or broadcast.get(id(held))
        if item.kind == "optimizer":
            of = item.name.rpartition(".")[0]
            while item.inside and of and of not in updated:  # a list's: layer.weight.Q.0
                of = of.rpartition(".")[0]
            ranks = updated.get(of)
        if ranks:
            spread = Spread(spread.whole_shape, spread.ranks * ranks, spread.replicas * ranks)
        if spread != OWN:
            found[item.name] = spread
    return found


def _of_sharded(tensor: Any) -> Spread:
    mesh, replicas = tensor.device_mesh, 1
    for dimension, placement in enumerate(tensor.placements):
        replicas *= mesh.size(dimension) if placement.is_replicate() else 1
    return Spread(tuple(tensor.shape), mesh.size(), replicas)


def _wrappers(models: Mapping[str, nn.Module]) -> list[Any]:
    return [
        module for model in models.values() for module in model.modules() if isinstance(module, DistributedDataParallel)
    ]
