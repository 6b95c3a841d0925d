"""Stand-ins for what lazy modules (``nn.LazyLinear``) have not given a shape yet; their first forward does.

They are fake tensors that torch's lazy modules take for their own uninitialised ones, and plain fake tensors after it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

_CPU = torch.device("cpu")


def without_shape(tensor: torch.Tensor) -> torch.Tensor:
    """The stand-in of an uninitialised parameter or buffer. Call it in the fake tensors' mode."""
    fake = torch.empty(0, dtype=tensor.dtype, device=_CPU)
    parameter = isinstance(tensor, nn.Parameter)
    if parameter:
        fake = nn.Parameter(fake, requires_grad=tensor.requires_grad)
    fake.__class__ = _FakeLazyParameter if parameter else _FakeLazyBuffer
    return fake


class _FakeLazyParameter(UninitializedParameter, FakeTensor):
    """A fake parameter that waits for its shape."""

    def materialize(self, shape: Any, device: Any = None, dtype: torch.dtype | None = None) -> None:
        _give_shape(self, shape, dtype)


class _FakeLazyBuffer(UninitializedBuffer, FakeTensor):
    """A fake buffer that waits for its shape."""

    def materialize(self, shape: Any, device: Any = None, dtype: torch.dtype | None = None) -> None:
        _give_shape(self, shape, dtype)


def _give_shape(fake: torch.Tensor, shape: Any, dtype: torch.dtype | None) -> None:
    with torch._C.DisableTorchFunction():
        fake.data = torch.empty(shape, device=_CPU, dtype=dtype or fake.dtype)
    fake.__class__ = FakeTensor
