"""Llama 3 8B as torchtitan's published FSDP2 runs train it: float32 parameters, bfloat16 in use, selective checkpoints.

``checkflow plan benchmarks/sharded_llama.py --ranks 64 --device "A100 80GB"``. ``checkpointing``: "layer" recomputes
every second layer, "op" every second matrix product outside of attention (torchtitan's default).
"""

from __future__ import annotations

import functools
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from checkflow.core.errors import ModelError
from checkflow.core.machine.device import find_device, usable_bytes
from checkflow.core.training_step import TrainingStep
from checkflow.models import llama
from checkflow.planner.model_file.several_ranks import Ranks
from checkflow.planner.pipeline import Subject, plan_model
from checkflow.planner.schedule.scheduler import PlanRequest

SEQUENCE = 8192
aten = torch.ops.aten
_KEPT = frozenset(
    (
        aten.mm.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
        torch.ops._c10d_functional.reduce_scatter_tensor.default,
    )
)


def _selective() -> Any:
    """Keep what is dear to compute, and of matrix products every second one."""
    counts = {True: 0, False: 0}

    def policy(context: Any, func: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        if func == aten.mm.default:
            counts[context.is_recompute] += 1
        kept = func in _KEPT and not (func == aten.mm.default and counts[context.is_recompute] % 2 == 0)
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def _recomputed(forward: Any, **options: Any) -> Any:
    @functools.wraps(forward)
    def called(*arguments: Any) -> Any:
        return checkpoint(forward, *arguments, use_reentrant=False, **options)

    return called


def build(batch_size: int = 1, checkpointing: str = "op", layers: int | None = None) -> TrainingStep:
    if checkpointing not in ("op", "layer"):
        raise ModelError(f"checkpointing is op or layer, not {checkpointing!r}")
    step = llama.build(batch_size, SEQUENCE, layers=layers)
    (model,) = step.models.values()
    assert isinstance(model, llama.Llama)
    model.to(torch.float32)  # the complex rotations stay
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for number, layer in enumerate(model.layers):
        if checkpointing == "op":
            layer.forward = _recomputed(layer.forward, context_fn=_selective)
        elif number % 2 == 0:
            layer.forward = _recomputed(layer.forward)
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    fully_shard(model, mesh=mesh, mp_policy=precision)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    return TrainingStep(model, optimizer, loss=step.loss, batch=step.batch)


@dataclass(frozen=True)
class PublishedRun:
    """A training run of Llama 3 8B over several GPUs, with sequences of 8,192 tokens, eager."""

    card: str
    ranks: int
    batch_size: int  # of each GPU
    checkpointing: str
    tokens_per_second: float  # of each GPU
    source: str


_A100 = "pytorch/torchtitan, docs/performance.md of 2024, Llama 3, 64 A100 (80GB), 1D parallelism (FSDP2)"
_H100 = "pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, table {}, FSDP (H100 of 96 GB and 2.4 TB/s)"
PUBLISHED_RUNS = (
    PublishedRun("A100 80GB", 64, 1, "layer", 2904, _A100),
    PublishedRun("A100 80GB", 64, 1, "op", 2973, _A100),
    PublishedRun("H100", 8, 2, "op", 5762, _H100.format(1)),
    PublishedRun("H100", 128, 2, "op", 5605, _H100.format(3)),
)


def measure(row: PublishedRun, layers: int | None = None) -> dict[str, Any]:
    """The run and what is predicted of it, communication included.

    Args:
        layers: of a smaller model, whose prediction changes with that of the whole one.
    """
    device = find_device(row.card)
    settings = {"checkpointing": row.checkpointing} | ({} if layers is None else {"layers": str(layers)})
    subject = Subject(__file__, row.batch_size, settings, None)
    request = PlanRequest(
        bandwidth_bytes_per_second=device.link_bandwidth_bytes_per_second,
        memory_bandwidth_bytes_per_second=device.memory_bandwidth_bytes_per_second,
        relax_memory=True,
        memory_limit_bytes=usable_bytes(device.memory_bytes),
    )
    planned = plan_model(subject, device, request, "segment", Ranks(row.ranks))
    assert planned.several is not None
    exposed = planned.several.communication.exposed_seconds
    seconds = planned.timeline.iteration_seconds + exposed
    return {
        **asdict(row),
        "predicted": round(row.batch_size * SEQUENCE / seconds, 6),
        "exposed_seconds": round(exposed, 9),
        "cluster": asdict(planned.several.cluster),
    }
