"""Sparse gradients (``nn.EmbeddingBag(sparse=True)``, ``nn.Embedding(sparse=True)``) in a trace.

A sparse COO tensor's memory is that of its indices and values, one row for each index that the batch looks up.
:func:`run` corrects fake tensors that do not follow real ones here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from checkflow.core.state import dense_parts, is_composite

aten = torch.ops.aten
_OFFSET2BAG, _SPARSE, _PADDING = 3, 9, 11  # arguments of aten._embedding_bag_backward


@dataclass(frozen=True, slots=True)
class Call:
    """An operator that ran on fake tensors, and the call that it stands for."""

    ran: Any  # the operator
    func: Any
    args: tuple[Any, ...]
    result: Any


def is_sparse(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.sparse_coo


def parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the tensors whose storages hold a tensor: itself, or a sparse one's indices and values."""
    return tuple(part for _, part in dense_parts(tensor)) if is_composite(tensor) else (tensor,)


def run(func: Any, args: tuple[Any, ...], keywords: Mapping[str, Any]) -> Call:
    """Call ``func(*args, **keywords)``, so that fake sparse tensors come out like real ones."""
    ran, given = func, args
    if func is aten._embedding_bag_backward.default and args[_SPARSE]:
        given = _with_rows(args)
    elif func is aten.index.Tensor and _differentiates("Embedding"):
        # Padding rows are not in the gradient; their number depends on data, so count none.
        mask = args[1][0]
        ran, given = aten.clone.default, (args[0].reshape(-1, *args[0].shape[mask.dim() :]),)
    elif func is aten.clone.default and is_sparse(args[0]) and _differentiates("AccumulateGrad"):
        # Autograd takes over a new sparse gradient without a copy only if it holds the sole reference; the wrappers of
        # fake tensors are references, too.
        ran = aten.detach.default
    elif func is aten.add_.Tensor and is_sparse(args[1]):
        if is_sparse(args[0]):
            return _append_rows(func, args, keywords)
        ran, given = aten.add_.Scalar, (args[0], 0)  # in place, too; torch has no fake of it
    return Call(ran, func, args, ran(*given, **keywords))


def _with_rows(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Change the arguments of aten._embedding_bag_backward so that the fake gradient has a row for each index.

    A CPU's forward leaves finding the bag of each index to backward, so the fake backward would see no rows. A real
    gradient omits padding rows, whose number depends on data.
    """
    given = list(args)
    if not args[_OFFSET2BAG].numel():
        given[_OFFSET2BAG] = torch.empty_like(args[1])
    if len(args) > _PADDING:
        given[_PADDING] = -1
    return tuple(given)


def _append_rows(func: Any, args: tuple[Any, ...], keywords: Mapping[str, Any]) -> Call:
    """Add sparse gradients (micro-batches) by appending the rows of one to those of the other."""
    (indices, values), (more_indices, more_values) = (parts(tensor) for tensor in args[:2])
    result = func(*args, **keywords)  # the fake one keeps its rows
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        rows = torch.cat([indices, more_indices], dim=1), torch.cat([values, more_values])
        result.data = torch.sparse_coo_tensor(*rows, result.shape, check_invariants=False)
    return Call(func, aten.cat.default, ([indices, more_indices, values, more_values],), result)


def _differentiates(name: str) -> bool:
    node = torch._C._current_autograd_node()
    return node is not None and name in node.name()
