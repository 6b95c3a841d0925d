"""Arrays of numpy and tensors of torch as the bytes of a file, and back. Imports torch only if it is in use."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np

from checkflow.core.errors import UnsupportedError
from checkflow.runtime.format.layout import STORED_TYPES, TensorRecord
from checkflow.runtime.shards.ownership import Array

Kind = Literal["numpy", "torch"]
_PART_BYTES = 8388608  # copied at a time of an array that is not row-major


def describe(name: str, array: Array) -> TensorRecord:
    """How an array is stored, without reading its values. Raises UnsupportedError if safetensors has no such type."""
    tensor = _is_tensor(array)
    if not tensor and not isinstance(array, np.ndarray):
        raise UnsupportedError(f"{name} is a {type(array).__name__}, not a numpy array or a torch tensor")
    dtype = str(array.dtype).removeprefix("torch.") if tensor else array.dtype.name
    if dtype not in STORED_TYPES or (tensor and str(array.layout) != "torch.strided"):
        what = dtype if dtype not in STORED_TYPES else f"a tensor of layout {array.layout}"
        raise UnsupportedError(f"{name} is {what}, which no safetensors file can hold")
    size = STORED_TYPES[dtype].element_bytes
    shape = tuple(int(length) for length in array.shape)
    return TensorRecord(name, dtype, shape, size * math.prod(shape), size)


def _is_tensor(array: Array) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor)


def to_bytes(array: Array) -> Iterator[memoryview]:
    """The row-major bytes of an array, little-endian, in parts; not copied if they lie so in memory."""
    if _is_tensor(array):
        if array.numel():
            yield from _tensor_bytes(array)
        return
    if not array.size:
        return
    swapped = array.dtype.newbyteorder("<")
    if array.flags.c_contiguous and array.dtype == swapped:
        yield array.reshape(-1).view(np.uint8).data
        return
    for rows in _parts(array, array.nbytes):
        yield np.ascontiguousarray(rows, swapped).reshape(-1).view(np.uint8).data


def _tensor_bytes(tensor: Any) -> Iterator[memoryview]:
    import torch

    tensor = tensor.detach()
    parts = [tensor] if tensor.is_contiguous() and tensor.device.type == "cpu" else _parts(tensor, tensor.nbytes)
    for part in parts:
        plain = part.cpu().resolve_conj().resolve_neg().contiguous()
        yield plain.reshape(-1).view(torch.uint8).numpy().data


def _parts(array: Array, size_bytes: int) -> Iterator[Array]:
    """Rows of an array, in parts of which a copy is small."""
    if not len(array.shape):
        yield array
        return
    count = max(1, _PART_BYTES * int(array.shape[0]) // size_bytes)
    for first in range(0, int(array.shape[0]), count):
        yield array[first : first + count]


def from_bytes(
    data: bytearray | np.ndarray[Any, Any], dtype: str, shape: tuple[int, ...], kind: Kind, name: str
) -> Array:
    """An array over ``data``, which is not copied. Raises UnsupportedError if numpy has no such type."""
    flat = np.frombuffer(data, np.uint8)
    if kind == "torch":
        import torch

        if not flat.size:
            return torch.empty(shape, dtype=getattr(torch, dtype), device="cpu")
        return torch.from_numpy(flat).view(getattr(torch, dtype)).reshape(shape)
    return flat.view(numpy_type(dtype, name)).reshape(shape)


def numpy_type(dtype: str, name: str) -> np.dtype[Any]:
    """numpy's type for a torch dtype's name. Raises UnsupportedError if there is none."""
    try:
        return np.dtype(dtype)
    except TypeError:
        raise UnsupportedError(f'{name} is {dtype}, which numpy does not have: pass arrays="torch"') from None
