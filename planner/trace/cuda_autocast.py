"""Opens the autocast regions of a step traced for a GPU on the CPU, where the fake tensors are, with CUDA's rules.

A CPU's autocast keeps layer norms and softmaxes, which CUDA computes in float32, in the lower precision: half the
bytes.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch._C import DispatchKey, DispatchKeySet, _ExcludeDispatchKeyGuard
from torch._ops import OpOverload

aten = torch.ops.aten
_LOWER = (torch.float16, torch.bfloat16)

# What CUDA's autocast computes in float32 and the CPU's does not (torch, ATen/autocast_mode.h: AT_FORALL_FP32), among
# operators that run on tensors as large as activations.
FLOAT32: tuple[OpOverload, ...] = (
    aten.layer_norm.default,
    aten.native_layer_norm.default,
    aten.rms_norm.default,
    aten.group_norm.default,
    aten.cosine_similarity.default,
    aten.exp.default,
    aten.expm1.default,
    aten.log.default,
    aten.log1p.default,
    aten.pow.Tensor_Scalar,
    aten.pow.Tensor_Tensor,
    aten.reciprocal.default,
    aten.rsqrt.default,
    aten.softplus.default,
    aten.logsumexp.default,
    aten.upsample_nearest2d.default,
    aten.upsample_nearest3d.default,
    aten.upsample_bilinear2d.default,
    aten.upsample_trilinear3d.default,
    aten.upsample_bicubic2d.default,
)
# The same, but these take the dtype to compute in (AT_FORALL_FP32_SET_OPT_DTYPE).
FLOAT32_BY_ARGUMENT: tuple[OpOverload, ...] = (aten.sum.default, aten.sum.dim_IntList, aten.cumsum.default)
SOFTMAXES: Mapping[OpOverload, OpOverload] = {
    aten.softmax.int: aten._softmax.default,
    aten.log_softmax.int: aten._log_softmax.default,
}


@contextlib.contextmanager
def autocast_on_cpu() -> Iterator[None]:
    """Make an autocast region that the step opens for its own device take effect on the CPU."""
    original = torch.autocast.__init__

    @functools.wraps(original)
    def opened(
        self: torch.autocast, device_type: str, dtype: torch.dtype | None = None, *rest: Any, **more: Any
    ) -> None:
        original(self, "cpu", dtype or torch.get_autocast_dtype(device_type), *rest, **more)

    torch.autocast.__init__ = opened  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.autocast.__init__ = original  # type: ignore[method-assign]


@contextlib.contextmanager
def autocast_as_cuda() -> Iterator[None]:
    """The same, with CUDA's rules."""
    with torch.library._scoped_library("aten", "IMPL") as library, autocast_on_cpu():
        for func in FLOAT32:
            library.impl(func, _with_float32(func), "AutocastCPU")
        for func in FLOAT32_BY_ARGUMENT:
            library.impl(func, _into_float32(func), "AutocastCPU")
        for func, reads_float16 in SOFTMAXES.items():
            library.impl(func, _softmax_into_float32(func, reads_float16), "AutocastCPU")
        yield


def _with_float32(func: OpOverload) -> Callable[..., Any]:
    """Run the operator on float32 copies of arguments in lower precision."""

    def called(*args: Any, **kwargs: Any) -> Any:
        with _ExcludeDispatchKeyGuard(DispatchKeySet(DispatchKey.AutocastCPU)):
            widened = [value.float() if _is_lower(value) else value for value in args]
            return func(
                *widened, **{key: value.float() if _is_lower(value) else value for key, value in kwargs.items()}
            )

    return called


def _into_float32(func: OpOverload) -> Callable[..., Any]:
    """Make the operator compute in float32 unless another dtype is given: it casts as it reads."""

    def called(*args: Any, **kwargs: Any) -> Any:
        names = [argument.name for argument in func._schema.arguments]
        given = dict(zip(names, args, strict=False)) | kwargs
        if _is_lower(args[0]) and given.get("dtype") is None:
            given["dtype"] = torch.float32
        with _ExcludeDispatchKeyGuard(DispatchKeySet(DispatchKey.AutocastCPU)):
            positional = [given.pop(a.name) for a in func._schema.arguments if not a.kwarg_only and a.name in given]
            return func(*positional, **given)

    return called


def _softmax_into_float32(func: OpOverload, reads_float16: OpOverload) -> Callable[..., Any]:
    """Run a softmax in float32; GPUs have a kernel of it that reads float16."""
    otherwise = _into_float32(func)

    def called(x: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> Any:
        if x.dtype is not torch.float16 or dtype not in (None, torch.float32):
            return otherwise(x, dim, dtype)
        with _ExcludeDispatchKeyGuard(DispatchKeySet(DispatchKey.AutocastCPU)):
            return reads_float16(x, dim, True)

    return called


def _is_lower(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in _LOWER
