"""Attention and dropout in the kernels that a CUDA build of torch chooses, while the fake tensors are on the CPU.

There, torch would choose by what its CPU has: attention with dropout in its plain form, which keeps every weight of it
for backward, and dropout with a mask in the precision of its input. A GPU's kernels keep of attention its result and a
number for each query, and of dropout a byte for each element.

And what attention costs, in any of these kernels.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch._ops import OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensor

aten = torch.ops.aten
_REDUCED = (torch.float16, torch.bfloat16)
_FLASH_HEAD = 256  # the widest head that the flash kernel takes
_MASK_ALIGNMENT = 16  # elements, to which a mask's rows are padded for the efficient kernel


def _forward_flops(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> int:
    """Scores of each query and key, and what they make of the values."""
    return _products(query, key) * (query.shape[-1] + value.shape[-1])


def _backward_flops(
    gradient: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
) -> int:
    """The scores once more, the gradients of scores and values, and those of queries and keys."""
    return _products(query, key) * (3 * query.shape[-1] + 2 * value.shape[-1])


def _products(query: torch.Tensor, key: torch.Tensor) -> int:
    """A multiply-add for each pair of a query and a key; several heads of queries may share one of keys."""
    batch, heads, queries, _ = query.shape
    return 2 * batch * heads * queries * key.shape[-2]


#: torch's own formulas know no shared keys before its version 2.13, and nothing of the kernel that its CPU dispatch
#: chooses. A causal product counts whole, of which the kernels skip half, at less than a plain product's efficiency.
ATTENTION_FLOPS: Mapping[OpOverloadPacket, Callable[..., int]] = {
    aten._scaled_dot_product_flash_attention: _forward_flops,
    aten._scaled_dot_product_efficient_attention: _forward_flops,
    aten._scaled_dot_product_cudnn_attention: _forward_flops,
    aten._scaled_dot_product_flash_attention_for_cpu: _forward_flops,
    aten._scaled_dot_product_flash_attention_backward: _backward_flops,
    aten._scaled_dot_product_efficient_attention_backward: _backward_flops,
    aten._scaled_dot_product_cudnn_attention_backward: _backward_flops,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _backward_flops,
}


@contextlib.contextmanager
def cuda_kernels() -> Iterator[None]:
    """Have fake tensors on the CPU go through the kernels of a GPU of compute capability 8.0 or more."""
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("scaled_dot_product_attention", _attention, "AutogradCPU")
        library.impl("dropout", _dropout, "AutogradCPU")
        yield


def _as_composed(func: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """What torch itself would run."""
    return func._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)


def _dropout(input: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    if isinstance(input, FakeTensor) and train and 0 < p < 1 and input.numel():
        result: torch.Tensor = aten.native_dropout(input, p, train)[0]
    else:
        result = _as_composed(aten.dropout.default, input, p, train)
    return result


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """As torch's ``scaled_dot_product_attention`` (aten/src/ATen/native/transformers), for tensors on a GPU."""
    tensors = (query, key, value)
    result: torch.Tensor
    if not all(isinstance(tensor, FakeTensor) for tensor in tensors):
        own, options = aten.scaled_dot_product_attention.default, {"scale": scale, "enable_gqa": enable_gqa}
        result = _as_composed(own, *tensors, attn_mask, dropout_p, is_causal, **options)
    elif _fits_flash(query, key, value, attn_mask, is_causal, enable_gqa):
        width = query.shape[-1]
        padded = [F.pad(tensor, (0, -width % 8)) if width % 8 else tensor for tensor in tensors]
        flash = aten._scaled_dot_product_flash_attention.default
        scale = 1 / math.sqrt(width) if scale is None else scale  # of the width before it was padded
        result = flash(*padded, dropout_p, is_causal, scale=scale)[0][..., :width]
    elif _fits_efficient(query, key, value, enable_gqa):
        bias = None if attn_mask is None else _bias(attn_mask, query, key)
        differentiable = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
        efficient = aten._scaled_dot_product_efficient_attention.default
        result = efficient(*tensors, bias, differentiable, dropout_p, is_causal, scale=scale)[0]
    else:
        if attn_mask is not None and attn_mask.dtype is torch.bool:
            attn_mask = _as_bias(attn_mask, query.dtype)
        plain = aten._scaled_dot_product_attention_math.default
        result = plain(*tensors, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)[0]
    return result


def _fits(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """What the fused kernels ask for, all of them."""
    tensors = (query, key, value)
    return (
        all(tensor.dim() == 4 and tensor.stride(-1) == 1 and tensor.numel() > 0 for tensor in tensors)
        and query.dtype is key.dtype is value.dtype
        and query.shape[0] == key.shape[0] == value.shape[0]
        and query.shape[-1] == key.shape[-1]
    )


def _fits_flash(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, causal: bool, grouped: bool
) -> bool:
    heads = query.shape[1:2], key.shape[1:2], value.shape[1:2]
    return (
        torch._C._get_flash_sdp_enabled()
        and _fits(query, key, value)
        and query.dtype in _REDUCED
        and mask is None
        and not (causal and query.shape[-2] != key.shape[-2])
        and query.shape[-1] == value.shape[-1] <= _FLASH_HEAD
        and (grouped or heads[0] == heads[1] == heads[2])
    )


def _fits_efficient(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, grouped: bool) -> bool:
    reduced = query.dtype in _REDUCED
    alignment = 8 if reduced else 4  # of a head's width: 16 bytes
    return (
        torch._C._get_mem_efficient_sdp_enabled()
        and _fits(query, key, value)
        and (reduced or query.dtype is torch.float32)
        and not grouped
        and query.shape[1] == key.shape[1] == value.shape[1]
        and query.shape[-1] % alignment == value.shape[-1] % alignment == 0
    )


def _as_bias(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask.logical_not(), -math.inf)


def _bias(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """The mask as the efficient kernel takes it: numbers, in rows of a whole number of 16 elements, for every head."""
    bias = _as_bias(mask, query.dtype) if mask.dtype is torch.bool else mask
    length = bias.shape[-1]
    if length > 1 and length % _MASK_ALIGNMENT:
        bias = F.pad(bias, (0, -length % _MASK_ALIGNMENT))[..., :length]
    return bias.expand(*query.shape[:3], key.shape[-2])
