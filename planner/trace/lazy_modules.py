"""Stand-ins for parameters of lazy modules (``nn.LazyLinear``), which get a shape in their first forward.

torch takes them for its own uninitialised parameters, and afterwards they are plain fake tensors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

_CPU = torch.device("cpu")


def without_shape(tensor: torch.Tensor) -> torch.Tensor:
    """Return the stand-in of an uninitialised parameter or buffer. Call it in the fake tensors' mode."""
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
