"""What collectives of torch.distributed do: what they write, how many bytes they carry, and between which ranks.

The schemas of ``c10d`` operators say of no argument that it is written; those of ``_c10d_functional`` are right.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._ops import OpOverload

from checkflow.core.graph import Collective, CollectiveKind

# For each operator its kind, the argument that it writes, and the argument (or the "result") with the bytes it moves.
_C10D: Mapping[str, tuple[CollectiveKind, str, str]] = {
    "_allgather_base_": ("all-gather", "output_tensor", "output_tensor"),
    "allgather_": ("all-gather", "output_tensors", "output_tensors"),
    "allgather_coalesced_": ("all-gather", "output_lists", "output_lists"),
    "allgather_into_tensor_coalesced_": ("all-gather", "outputs", "outputs"),
    "_reduce_scatter_base_": ("reduce-scatter", "output_tensor", "input_tensor"),
    "reduce_scatter_": ("reduce-scatter", "output_tensors", "input_tensors"),
    "reduce_scatter_tensor_coalesced_": ("reduce-scatter", "outputs", "inputs"),
    "allreduce_": ("all-reduce", "tensors", "tensors"),
    "allreduce_coalesced_": ("all-reduce", "tensors", "tensors"),
    "alltoall_": ("all-to-all", "output_tensors", "input_tensors"),
    "alltoall_base_": ("all-to-all", "output", "input"),
    "broadcast_": ("broadcast", "tensors", "tensors"),
    "reduce_": ("reduce", "tensors", "tensors"),
    "gather_": ("gather", "output_tensors", "input_tensors"),
    "scatter_": ("scatter", "output_tensors", "input_tensors"),
    "send": ("send", "", "tensors"),
    "recv_": ("receive", "tensors", "tensors"),
    "recv_any_source_": ("receive", "tensors", "tensors"),
}
_FUNCTIONAL: Mapping[str, tuple[CollectiveKind, str]] = {
    "all_gather_into_tensor": ("all-gather", "result"),
    "all_gather_into_tensor_out": ("all-gather", "result"),
    "all_gather_into_tensor_coalesced": ("all-gather", "result"),
    "reduce_scatter_tensor": ("reduce-scatter", "input"),
    "reduce_scatter_tensor_out": ("reduce-scatter", "input"),
    "reduce_scatter_tensor_coalesced": ("reduce-scatter", "inputs"),
    "all_reduce": ("all-reduce", "input"),
    "all_reduce_": ("all-reduce", "input"),
    "all_reduce_coalesced": ("all-reduce", "inputs"),
    "all_reduce_coalesced_": ("all-reduce", "inputs"),
    "all_to_all_single": ("all-to-all", "input"),
    "broadcast": ("broadcast", "input"),
    "broadcast_": ("broadcast", "input"),
    "isend": ("send", "tensor"),
    "irecv": ("receive", "tensor"),
}
_KINDS: Mapping[str, tuple[CollectiveKind, str]] = {
    **{f"c10d::{name}": (kind, carried) for name, (kind, _, carried) in _C10D.items()},
    **{f"_c10d_functional::{name}": found for name, found in _FUNCTIONAL.items()},
    "_dtensor::shard_dim_alltoall": ("all-to-all", "input"),
}
COPY_IN = "fsdp::all_gather_copy_in"  # FSDP2 puts a rank's own part into the tensor to gather
# The written arguments that schemas do not name.
WRITTEN: Mapping[str, tuple[str, ...]] = {
    **{f"c10d::{name}": (written,) for name, (_, written, _) in _C10D.items() if written},
    COPY_IN: ("all_gather_output",),
}
# Of these, what is written is read before. The others overwrite.
READ_TOO = frozenset(f"c10d::{name}" for name in ("allreduce_", "allreduce_coalesced_", "broadcast_", "reduce_"))
_GROUPS = ("process_group", "group_name")


def is_collective(func: OpOverload) -> bool:
    return func._schema.name in _KINDS


def waits_only(func: Any) -> bool:
    """Whether an operator returns its argument once that has arrived; torch's fake of it returns new memory."""
    return func is torch.ops._c10d_functional.wait_tensor.default


def collective(func: OpOverload, args: Sequence[Any], keywords: Mapping[str, Any], result: Any) -> Collective | None:
    """Return what a call moves between ranks; None if it is no collective."""
    found = _KINDS.get(func._schema.name)
    if found is None:
        return None
    kind, carried = found
    bound = {**dict(zip((a.name for a in func._schema.arguments), args, strict=False)), **keywords}
    moved = result if carried == "result" else bound[carried]
    size_bytes = sum(tensor.numel() * tensor.element_size() for tensor in _tensors(moved))
    if kind == "gather":  # each rank gives one part of the whole
        size_bytes *= _ranks(bound)[0]
    return Collective(kind, size_bytes, *_ranks(bound))


def _ranks(bound: Mapping[str, Any]) -> tuple[int, int]:
    """Return the size of a call's group, and the largest distance from one of its ranks to the next."""
    group = next(bound[name] for name in _GROUPS if name in bound)
    if isinstance(group, str):
        group = dist.distributed_c10d._resolve_process_group(group)  # type: ignore[attr-defined, arg-type]
    return _of_group(group if isinstance(group, dist.ProcessGroup) else dist.ProcessGroup.unbox(group))


def _of_group(group: dist.ProcessGroup) -> tuple[int, int]:
    ranks = sorted(dist.get_process_group_ranks(group))
    return len(ranks), max((later - rank for rank, later in itertools.pairwise(ranks)), default=1)


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        yield values
    else:
        for value in values:
            yield from _tensors(value)
