"""A state as it is at one instant, whatever becomes of the objects that it consists of.

Held in memory and between a process and its workers only, where Python copies containers fastest by pickling them;
files hold it as any other extra state (:mod:`.format.codec`).
"""

from __future__ import annotations

import io
import logging
import pickle
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from checkflow.core.state import Spans, has_own_memory, memory_order, region

logger = logging.getLogger("checkflow")


class _Pickler(pickle.Pickler):
    """torch would write a file for each tensor."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.by_storage: dict[int, list[torch.Tensor]] = {}

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not torch.Tensor or value.device.type != "cpu" or value.layout is not torch.strided:
            return NotImplemented
        if value.is_quantized or value.is_conj() or value.is_neg():
            return NotImplemented
        self.by_storage.setdefault(value.untyped_storage()._cdata, []).append(value)
        order = memory_order(value) or range(value.dim())
        in_order = value.detach().permute(tuple(order))
        array = in_order.reshape(-1).contiguous().view(torch.uint8).numpy()
        return _tensor, (array, value.dtype, tuple(in_order.shape), tuple(order))


def _tensor(
    array: np.ndarray[Any, Any], dtype: torch.dtype, shape: tuple[int, ...], order: tuple[int, ...]
) -> torch.Tensor:
    found = torch.from_numpy(array).view(dtype).reshape(shape)
    return found.permute([order.index(d) for d in range(len(order))])


class Overlaps:
    """Says once that tensors of a state share memory, which copies of them do not."""

    def __init__(self) -> None:
        self._said = False

    def look(self, by_storage: Iterable[Sequence[torch.Tensor]]) -> None:
        """Look at tensors that have a storage in common."""
        for tensors in by_storage if not self._said else ():
            spans = Spans()
            for tensor in tensors if len(tensors) > 1 else ():
                if not self._said and has_own_memory(tensor) and not spans.take(region(tensor)):
                    self._said = True
                    logger.warning(
                        "state_dict() of the loader returns tensors that share memory, one of shape %s: after a resume "
                        "each has its values, and memory of its own; have load_state_dict() make views anew",
                        tuple(tensor.shape),
                    )  # fmt: skip


def freeze(state: Any, overlaps: Overlaps | None = None) -> bytes:
    """Return the state, for :func:`thaw`.

    Raises:
        pickle.PicklingError, TypeError, AttributeError: a part of it cannot be copied.
    """
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(state)
    if overlaps is not None:
        overlaps.look(pickler.by_storage.values())
    return file.getvalue()


def thaw(frozen: bytes) -> Any:
    """A copy of what was frozen in this process, or in a worker of its own."""
    return pickle.loads(frozen)
