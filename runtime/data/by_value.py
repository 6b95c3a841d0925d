"""How a small batch goes from a worker to the process that trains: its tensors' bytes in the message itself.

Torch sends a tensor as a name of shared memory: the worker makes that memory, and for each tensor the other process
connects to it, proves who it is, gets a file descriptor and maps what is behind that. It takes a millisecond for a
batch, however small. What fits into one write to a pipe takes a fifth of that by value; it is sent so if it is nothing
but containers, numbers, text and plain tensors.

Only so much: a pipe takes it all at once or not at all (pipe(7), ``PIPE_BUF``). A worker that is killed never leaves
half of such a message behind, for the rest of which its reader would wait.
"""

from __future__ import annotations

import ctypes
import functools
import io
import pickle
import select
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch.multiprocessing.reductions import reduce_tensor

_ENVELOPE_BYTES = 256  # of a message at most, beside the batch: its length, the batch's number, how to read it
#: What a batch may have, pickled.
MOST_BYTES = getattr(select, "PIPE_BUF", 512) - _ENVELOPE_BYTES
_MOST_PARTS = 100  # containers, and what is in them; some tens of bytes each
_CONTAINERS, _OTHERS = frozenset({tuple, list, dict}), frozenset({float, bool, type(None)})


class Pickled:
    """A batch that is pickled already. To be pickled itself, and nothing else: what is unpickled then is the batch."""

    def __init__(self, text: bytes) -> None:
        self._text = text

    def __reduce__(self) -> tuple[Any, ...]:
        return pickle.loads, (self._text,)


def by_value(batch: Any, *, shared: bool) -> Any:
    """What to send in place of a batch: :class:`Pickled`, or itself where it is large, or of other types.

    What arrives has the same values, shapes and strides, in memory of its own that is shared with nobody; tensors
    that share memory within the batch do so there too.

    Args:
        shared: tensors in shared memory are sent so, too. Not where that may be the user's, who shares it on purpose.
    """
    if not _is_small(batch, shared=shared):
        return batch
    out, memories = io.BytesIO(), dict[int, _Memory]()
    pickler = pickle.Pickler(out, pickle.HIGHEST_PROTOCOL)
    # No method of a pickler's own: that would be a cycle, and hold the batch's memory until the collector comes.
    pickler.dispatch_table = {torch.Tensor: functools.partial(_reduce, memories)}
    pickler.dump(batch)
    return Pickled(out.getvalue()) if out.tell() <= MOST_BYTES else batch


def _is_small(batch: Any, *, shared: bool) -> bool:
    """Whether it may fit, has tensors, and is made of nothing that anyone else may want to be sent in a way of its own.

    Without a tensor it is as soon there as it is, in the message as well.
    """
    left_bytes, left_parts, waiting, tensors = MOST_BYTES, _MOST_PARTS, [batch], 0
    while waiting:
        one = waiting.pop()
        kind = type(one)
        left_parts -= 1
        if kind is torch.Tensor:
            if not _is_plain(one) or (one.is_shared() and not shared):
                return False
            left_bytes -= one.untyped_storage().nbytes()
            tensors += 1
        elif kind in _CONTAINERS:
            if len(one) > left_parts:
                return False
            waiting += [*one.keys(), *one.values()] if kind is dict else one
        elif kind is str or kind is bytes:
            left_bytes -= len(one)
        elif kind is int:
            left_bytes -= one.bit_length() // 8
        elif kind not in _OTHERS:
            return False
        if left_bytes < 0 or left_parts < 0:
            return False
    return tensors > 0 and ForkingPickler._extra_reducers.get(torch.Tensor) is reduce_tensor  # type: ignore[attr-defined]


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether its bytes, sizes and strides are all that its receiver needs."""
    return not (
        tensor.requires_grad
        or not tensor.is_cpu
        or tensor.layout is not torch.strided
        or tensor.is_quantized
        or tensor.is_nested
        or tensor.is_conj()
        or tensor.is_neg()
        or tensor._is_zerotensor()
    )


class _Memory:
    """A storage; it is pickled once, however many tensors have it."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._storage = storage  # stays: another one at its address would be taken for it

    def __reduce__(self) -> tuple[Any, ...]:
        storage = self._storage
        size_bytes = storage.nbytes()
        return _storage, (ctypes.string_at(storage.data_ptr(), size_bytes) if size_bytes else b"",)


def _reduce(memories: dict[int, _Memory], tensor: torch.Tensor) -> tuple[Any, ...]:
    storage = tensor.untyped_storage()
    memory = memories.setdefault(storage._cdata, _Memory(storage))
    return _tensor, (memory, tensor.dtype, tensor.storage_offset(), tuple(tensor.shape), tensor.stride())


def _storage(data: bytes) -> torch.UntypedStorage:
    storage = torch.UntypedStorage(len(data), device="cpu")  # type: ignore[no-untyped-call]
    ctypes.memmove(storage.data_ptr(), data, len(data))
    return storage


def _tensor(
    storage: torch.UntypedStorage, dtype: torch.dtype, offset: int, shape: tuple[int, ...], stride: tuple[int, ...]
) -> torch.Tensor:
    """As torch makes it of a storage that has arrived."""
    return torch.empty((0,), dtype=dtype, device="cpu").set_(storage, offset, shape, stride)
