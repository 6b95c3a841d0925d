"""Restores what torch does in real training, where fake tensors or make_fx change it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

aten = torch.ops.aten
# Losses that compute all elements into their result and shrink it to one, but keep its storage.
_WHOLE_LOSSES = (
    aten.mse_loss.default,
    aten.smooth_l1_loss.default,
    aten.soft_margin_loss.default,
    aten.binary_cross_entropy.default,
)
# Normalisations, and which argument is their weight.
_NORMALISATIONS = {
    aten.native_batch_norm.default: 1,
    aten.native_layer_norm.default: 2,
    aten.native_group_norm.default: 1,
}


def size_as_real(func: Any, args: Sequence[Any], result: Any) -> None:
    """Give fake results the storage sizes of real ones, where fake kernels make smaller ones.

    These are the losses above, what begins with a result of its argument's size (col2im), and normalisation statistics
    of an input in reduced precision, which are as precise as their parameters.
    """
    if func in _WHOLE_LOSSES:
        elements = torch.broadcast_shapes(args[0].shape, args[1].shape).numel()  # type: ignore[no-untyped-call]
        _grow(result, elements * result.element_size())
    elif func is aten.col2im.default:
        _grow(result, args[0].numel() * result.element_size())
    elif func in _NORMALISATIONS and (weight := args[_NORMALISATIONS[func]]) is not None:
        for statistic in result[1:]:
            _grow(statistic, statistic.numel() * weight.element_size())


def _grow(tensor: torch.Tensor, size_bytes: int) -> None:
    storage = tensor.untyped_storage()
    if size_bytes > storage.nbytes():
        storage.resize_(size_bytes)


@contextlib.contextmanager
def autocast_cache(enabled: bool) -> Iterator[None]:
    """Let autocast keep its copies of weights until its region ends, if it did so before make_fx turned that off."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(enabled)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)
