"""A state as it is at one instant, whatever becomes of the objects that it consists of.

Held in memory and between a process and its workers only, where Python copies containers fastest by pickling them;
files hold it as any other extra state (:mod:`.format.codec`).
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import numpy as np
import torch

from checkflow.core.state import memory_order


class _Pickler(pickle.Pickler):
    """torch would write a file for each tensor."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not torch.Tensor or value.device.type != "cpu" or value.layout is not torch.strided:
            return NotImplemented
        if value.is_quantized or value.is_conj() or value.is_neg():
            return NotImplemented
        order = memory_order(value) or range(value.dim())
        in_order = value.detach().permute(tuple(order))
        array = in_order.reshape(-1).contiguous().view(torch.uint8).numpy()
        return _tensor, (array, value.dtype, tuple(in_order.shape), tuple(order))


def _tensor(
    array: np.ndarray[Any, Any], dtype: torch.dtype, shape: tuple[int, ...], order: tuple[int, ...]
) -> torch.Tensor:
    found = torch.from_numpy(array).view(dtype).reshape(shape)
    return found.permute([order.index(d) for d in range(len(order))])


def freeze(state: Any) -> bytes:
    """The state, for :func:`thaw`.

    Raises:
        pickle.PicklingError, TypeError, AttributeError: a part of it cannot be copied.
    """
    file = io.BytesIO()
    _Pickler(file, pickle.HIGHEST_PROTOCOL).dump(state)
    return file.getvalue()


def thaw(frozen: bytes) -> Any:
    """A copy of what was frozen in this process, or in a worker of its own."""
    return pickle.loads(frozen)
