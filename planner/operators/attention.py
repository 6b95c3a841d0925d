"""Traces attention and dropout on the CPU as the kernels a CUDA build would choose, and counts their flops.

A GPU keeps of attention the result and a number per query, and of dropout a byte per element; a CPU keeps more.
Kernels depend on compute capability, as in torch 2.11 to 2.13 (aten/.../transformers/cuda/sdp_utils.cpp).
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch._ops import OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensor

from checkflow.core.machine.device import ComputeCapability

aten = torch.ops.aten
_REDUCED = (torch.float16, torch.bfloat16)
_AMPERE = (8, 0)  # the first cards with all kernels; assumed if unknown
_CUDNN_FIRST = frozenset({(9, 0), (10, 0), (10, 3)})  # where torch tries cuDNN's attention before its own
_CUDNN_SINCE = 91501  # 9.15.1
_NEWEST_CUDNN = 92000  # torch 2.13.0 for CUDA requires nvidia-cudnn-cu13 9.20.0.48, by its metadata on PyPI
_CUDNN_MOST = 65535  # sequences, and heads
_FLASH_HEAD = 256  # the widest head that the flash kernel takes
_MASK_ALIGNMENT = 16  # elements, to which a mask's rows are padded for the efficient kernel


def _forward_flops(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> int:
    """The scores of each query and key, and their product with the values."""
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


#: torch's formulas know no shared keys before 2.13, and not the kernel that its CPU dispatch chooses. A causal product
#: counts whole: kernels skip half of it, at less than a plain product's efficiency.
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
def cuda_kernels(compute_capability: ComputeCapability | None = None) -> Iterator[None]:
    """Send fake tensors on the CPU through the kernels of a GPU of this compute capability (None: 8.0)."""
    capability = compute_capability or _AMPERE

    def attention(*args: Any, **keywords: Any) -> torch.Tensor:
        return _attention(capability, *args, **keywords)

    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("scaled_dot_product_attention", attention, "AutogradCPU")
        library.impl("dropout", _dropout, "AutogradCPU")
        yield


def _as_composed(func: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Call what torch itself would run."""
    return func._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)


def _dropout(input: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    if isinstance(input, FakeTensor) and train and 0 < p < 1 and input.numel():
        result: torch.Tensor = aten.native_dropout(input, p, train)[0]
    else:
        result = _as_composed(aten.dropout.default, input, p, train)
    return result


def _attention(
    capability: ComputeCapability,
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
    if not all(isinstance(tensor, FakeTensor) for tensor in tensors):
        own, options = aten.scaled_dot_product_attention.default, {"scale": scale, "enable_gqa": enable_gqa}
        return cast(torch.Tensor, _as_composed(own, *tensors, attn_mask, dropout_p, is_causal, **options))
    bias = attn_mask
    if bias is not None and bias.dtype is torch.bool:
        bias = torch.zeros_like(bias, dtype=query.dtype).masked_fill_(bias.logical_not(), -math.inf)
    differentiable = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    result: torch.Tensor
    if _takes_cudnn(capability) and _fits_cudnn(query, key, value, bias, dropout_p, enable_gqa, capability):
        cudnn = aten._scaled_dot_product_cudnn_attention.default
        result = cudnn(*tensors, bias, differentiable, dropout_p, is_causal, scale=scale)[0]
    elif _fits_flash(query, key, value, bias, is_causal, enable_gqa, capability):
        width = query.shape[-1]
        padded = [F.pad(tensor, (0, -width % 8)) if width % 8 else tensor for tensor in tensors]
        flash = aten._scaled_dot_product_flash_attention.default
        scale = 1 / math.sqrt(width) if scale is None else scale  # of the width before padding
        result = flash(*padded, dropout_p, is_causal, scale=scale)[0][..., :width]
    elif _fits_efficient(query, key, value, enable_gqa, capability):
        bias = None if bias is None else _aligned(bias, query, key)
        efficient = aten._scaled_dot_product_efficient_attention.default
        result = efficient(*tensors, bias, differentiable, dropout_p, is_causal, scale=scale)[0]
    else:
        plain = aten._scaled_dot_product_attention_math.default
        result = plain(*tensors, bias, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)[0]
    return result


def _takes_cudnn(capability: ComputeCapability) -> bool:
    """Whether cuDNN's attention comes before torch's own kernels, or is all that the user allows."""
    enabled = torch._C._get_flash_sdp_enabled, torch._C._get_mem_efficient_sdp_enabled, torch._C._get_math_sdp_enabled
    if not any(ask() for ask in enabled):
        return True
    return (
        capability in _CUDNN_FIRST
        and (torch.backends.cudnn.version() or _NEWEST_CUDNN) >= _CUDNN_SINCE  # type: ignore[no-untyped-call]
        and os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") != "1"
    )


def _fits(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """What all fused kernels require."""
    tensors = (query, key, value)
    return (
        all(tensor.dim() == 4 and tensor.stride(-1) == 1 and tensor.numel() > 0 for tensor in tensors)
        and query.dtype is key.dtype is value.dtype
        and query.shape[0] == key.shape[0] == value.shape[0]
        and query.shape[-1] == key.shape[-1]
    )


def _fits_cudnn(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    dropout: float,
    grouped: bool,
    capability: ComputeCapability,
) -> bool:
    return (
        torch._C._get_cudnn_sdp_enabled()
        and capability >= _AMPERE
        and _fits(query, key, value)
        and query.dtype in _REDUCED
        and _fits_cudnn_heads(query, key, value, grouped, capability)
        and key.shape[-2] > 1
        # A multiple of 1/16 since torch 2.12; 2.11 takes any, and its other kernels keep as much.
        and (not dropout or (query.shape[-2] > 1 and (16 * dropout).is_integer()))
        and (bias is None or _fits_cudnn_bias(bias, query, key))
        and (torch.is_deterministic_algorithms_warn_only_enabled() or not torch.are_deterministic_algorithms_enabled())
    )


def _fits_cudnn_heads(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, grouped: bool, capability: ComputeCapability
) -> bool:
    heads, widths = query.shape[1], (query.shape[-1], value.shape[-1])
    most = 256 if capability == (9, 0) else 128
    return (
        max(query.shape[:2]) <= _CUDNN_MOST
        and all(heads == part.shape[1] or (grouped and heads % part.shape[1] == 0) for part in (key, value))
        and all(width % 8 == 0 for width in widths)
        and (max(widths) <= most or (capability[0] == 10 and widths == (192, 128)))
    )


def _fits_cudnn_bias(bias: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> bool:
    """One for all sequences and heads, or with a dimension for each; none that is learnt."""
    whole = (*query.shape[:3], key.shape[-2])
    return (
        bias.dim() in (2, 4)
        and all(size in (1, most) for size, most in zip(bias.shape, whole[-bias.dim() :], strict=True))
        and bias.stride(-1) == 1
        and not bias.requires_grad
    )


def _fits_flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    causal: bool,
    grouped: bool,
    capability: ComputeCapability,
) -> bool:
    heads = query.shape[1:2], key.shape[1:2], value.shape[1:2]
    return (
        torch._C._get_flash_sdp_enabled()
        and capability >= _AMPERE
        and _fits(query, key, value)
        and query.dtype in _REDUCED
        and bias is None
        and not (causal and query.shape[-2] != key.shape[-2])
        and query.shape[-1] == value.shape[-1] <= _FLASH_HEAD
        and (grouped or heads[0] == heads[1] == heads[2])
    )


def _fits_efficient(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, grouped: bool, capability: ComputeCapability
) -> bool:
    dtypes = (torch.float32, *_REDUCED) if capability >= _AMPERE else (torch.float32, torch.float16)
    # Matrix units need a head's width to be a multiple of 16 bytes; those before Ampere take halves only.
    on_matrix_units = capability >= _AMPERE or (capability >= (7, 0) and query.dtype is torch.float16)
    alignment = 16 // query.element_size() if on_matrix_units else 1
    return (
        torch._C._get_mem_efficient_sdp_enabled()
        and _fits(query, key, value)
        and query.dtype in dtypes
        and not grouped
        and query.shape[1] == key.shape[1] == value.shape[1]
        and query.shape[-1] % alignment == value.shape[-1] % alignment == 0
    )


def _aligned(bias: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Pad a mask's rows to a multiple of 16 elements, for every head, as the efficient kernel takes it."""
    length = bias.shape[-1]
    if length > 1 and length % _MASK_ALIGNMENT:
        bias = F.pad(bias, (0, -length % _MASK_ALIGNMENT))[..., :length]
    return bias.expand(*query.shape[:3], key.shape[-2])
