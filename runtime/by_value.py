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
import io
import pickle
import select
from typing import Any

import torch

_ENVELOPE_BYTES = 256  # of a message at most, beside the batch: its length, the batch's number, how to read it
#: What a batch may have as its message.
MOST_BYTES = getattr(select, "PIPE_BUF", 512) - _ENVELOPE_BYTES
_MOST_PARTS = 100  # containers, and what is in them; some tens of bytes each
_CONTAINERS, _NUMBERS = frozenset({tuple, list, dict}), frozenset({int, float, bool, type(None)})


class Message:
    """A batch as bytes. Whoever unpickles this gets the batch."""

    def __init__(self, text: bytes) -> None:
        self._text = text

    def __reduce__(self) -> tuple[Any, ...]:
        return pickle.loads, (self._text,)


def by_value(batch: Any) -> Any:
    """What to send in place of a batch: a :class:`Message`, or itself where it is large, or of other types.

    What arrives has the same values, shapes and strides, in memory of its own that is shared with nobody; tensors
    that share memory within the batch do so there too.
    """
    if not _is_small(batch):
        return batch
    out = io.BytesIO()
    _Pickler(out).dump(batch)
    return Message(out.getvalue()) if out.tell() <= MOST_BYTES else batch


def _is_small(batch: Any) -> bool:
    """Whether it may fit, and is made of nothing whose pickling torch, or its user, may have an opinion on."""
    left_bytes, left_parts, waiting = MOST_BYTES, _MOST_PARTS, [batch]
    while waiting:
        one = waiting.pop()
        kind = type(one)
        left_parts -= 1
        if kind is torch.Tensor:
            if not _is_plain(one):
                return False
            left_bytes -= one.untyped_storage().nbytes()
        elif kind in _CONTAINERS:
            if len(one) > left_parts:
                return False
            waiting += [*one.keys(), *one.values()] if kind is dict else one
        elif kind is str or kind is bytes:
            left_bytes -= len(one)
        elif kind not in _NUMBERS:
            return False
        if left_bytes < 0 or left_parts < 0:
            return False
    return True


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether its bytes, sizes and strides are all there is of it."""
    return not (
        tensor.requires_grad
        or not tensor.is_cpu
        or tensor.layout is not torch.strided
        or tensor.is_quantized
        or tensor.is_nested
        or tensor.is_conj()
        or tensor.is_neg()
    )


class _Memory:
    """A storage; it is pickled once, however many tensors have it."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._storage = storage  # stays: another one at its address would be taken for it

    def __reduce__(self) -> tuple[Any, ...]:
        storage = self._storage
        size_bytes = storage.nbytes()
        return _storage, (ctypes.string_at(storage.data_ptr(), size_bytes) if size_bytes else b"",)


class _Pickler(pickle.Pickler):
    def __init__(self, out: io.BytesIO) -> None:
        super().__init__(out, pickle.HIGHEST_PROTOCOL)
        self.dispatch_table = {torch.Tensor: self._reduce}
        self._memories: dict[int, _Memory] = {}

    def _reduce(self, tensor: torch.Tensor) -> tuple[Any, ...]:
        storage = tensor.untyped_storage()
        memory = self._memories.setdefault(storage._cdata, _Memory(storage))
        return _tensor, (memory, tensor.dtype, tensor.storage_offset(), tuple(tensor.shape), tensor.stride())


def _storage(data: bytes) -> torch.UntypedStorage:
    storage = torch.UntypedStorage(len(data), device="cpu")  # type: ignore[no-untyped-call]
    ctypes.memmove(storage.data_ptr(), data, len(data))
    return storage


def _tensor(
    storage: torch.UntypedStorage, dtype: torch.dtype, offset: int, shape: tuple[int, ...], stride: tuple[int, ...]
) -> torch.Tensor:
    return torch.empty((0,), dtype=dtype, device="cpu").set_(storage, offset, shape, stride)
