"""Lays Llama out over ranks: each layer over ``tensor`` of them (sequence parallel), then FSDP2 over the others."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from checkflow.core.errors import ModelError


def shard(model: nn.Module, layers: nn.ModuleList, tensor: int, heads: int) -> None:
    """Shard a model in place, whose parts are named as Llama's.

    Raises:
        ModelError: there are not several ranks, or these do not divide into groups of ``tensor``, or the heads do not.
    """
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    if ranks == 1 or ranks % tensor or heads % tensor:
        raise ModelError(
            f"tensor={tensor} needs several ranks (--ranks) that divide by it, and so must the {heads} heads of keys; "
            f"there are {ranks} ranks"
        )
    mesh = init_device_mesh("cuda", (ranks // tensor, tensor), mesh_dim_names=("shard", "tensor"))
    ends = {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(model, mesh["tensor"], ends)
    for layer in layers:
        parts = {
            "attention_norm": SequenceParallel(),
            "attention": PrepareModuleInput(input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)),
            **{f"attention.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")},
            "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
            "ffn_norm": SequenceParallel(),
            "feed_forward": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
            "feed_forward.w1": ColwiseParallel(),
            "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
            "feed_forward.w3": ColwiseParallel(),
        }
        parallelize_module(layer, mesh["tensor"], parts)
        fully_shard(layer, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
