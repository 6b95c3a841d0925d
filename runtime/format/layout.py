"""Where every state tensor lies: in the staging buffer, in its file, and under which key. Free of torch.

The staging buffer is the images of the safetensors files back to back, each aligned to 4096 bytes, so that persisting
is writing the buffer. docs/reference/files.md says how tensors are packed.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from checkflow.core.errors import UnsupportedError

PAGE_BYTES = 4096
MAX_HEADER_BYTES = 100_000_000  # safetensors' own limit
# Of a model, an optimizer or a run: it becomes part of a file's name. In a tensor's name, what precedes the first "/".
OWNER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
_METADATA = "__metadata__"


@dataclass(frozen=True, slots=True)
class StoredType:
    """How safetensors stores a torch dtype: name, and bytes of one stored item.

    ``pair``: an element is two items in an axis of its own, for complex types that safetensors lacks. ``packed``: a
    byte holds two items, counted in the last dimension.
    """

    code: str
    item_bytes: int
    pair: bool = False
    packed: bool = False

    @property
    def element_bytes(self) -> int:
        return self.item_bytes * (2 if self.pair else 1)

    def stored_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape in the file's header for a tensor of this shape."""
        if self.pair:
            return (*shape, 2)
        return (*shape[:-1], 2 * shape[-1]) if self.packed else tuple(shape)


# safetensors knows complex64 (since 0.7), but not complex128 and complex32.
STORED_TYPES: Mapping[str, StoredType] = {
    "float64": StoredType("F64", 8),
    "float32": StoredType("F32", 4),
    "float16": StoredType("F16", 2),
    "bfloat16": StoredType("BF16", 2),
    "float8_e4m3fn": StoredType("F8_E4M3", 1),
    "float8_e4m3fnuz": StoredType("F8_E4M3FNUZ", 1),
    "float8_e5m2": StoredType("F8_E5M2", 1),
    "float8_e5m2fnuz": StoredType("F8_E5M2FNUZ", 1),
    "float8_e8m0fnu": StoredType("F8_E8M0", 1),
    "float4_e2m1fn_x2": StoredType("F4", 1, packed=True),
    "int64": StoredType("I64", 8),
    "int32": StoredType("I32", 4),
    "int16": StoredType("I16", 2),
    "int8": StoredType("I8", 1),
    "uint64": StoredType("U64", 8),
    "uint32": StoredType("U32", 4),
    "uint16": StoredType("U16", 2),
    "uint8": StoredType("U8", 1),
    "bool": StoredType("BOOL", 1),
    "complex128": StoredType("F64", 8, pair=True),
    "complex64": StoredType("C64", 8),
    "complex32": StoredType("F16", 2, pair=True),
}


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """One state tensor, as the job holds it.

    Args:
        name: ``<owner>/<key>``, see :mod:`checkflow.core.state`.
        dtype: torch's name without "torch.".
        deadline: sort key: tensors that are due earlier lie earlier.
        permutation: dimensions in the order of the staged memory, outermost first; None: row-major.
        conjugated, negated: whether the values are the conjugates or negatives of what is staged.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    size_bytes: int
    element_bytes: int
    deadline: int = 0
    permutation: tuple[int, ...] | None = None
    conjugated: bool = False
    negated: bool = False

    @property
    def turned(self) -> bool:
        """Whether the file's bytes differ from memory's, in order or in sign."""
        if not self.size_bytes:
            return False
        if self.permutation is None:
            return self.conjugated or self.negated
        order = [d for d in self.permutation if self.shape[d] != 1]
        return order != sorted(order) or self.conjugated or self.negated


@dataclass(frozen=True, slots=True)
class Placed:
    """A tensor's place. Offsets are in bytes; ``staging_offset`` counts from the start of the whole buffer."""

    record: TensorRecord
    file: str
    key: str
    staging_offset: int
    file_offset: int


@dataclass(frozen=True, slots=True)
class FileLayout:
    """One safetensors file: its header, and where its image starts in the staging buffer."""

    name: str
    header: bytes
    staging_offset: int
    size_bytes: int  # of the whole file
    tensors: tuple[Placed, ...] = field(repr=False)  # in file order
    turned: tuple[Placed, ...] = field(repr=False)  # of these, those whose bytes differ in the file


@dataclass(frozen=True, slots=True)
class Layout:
    """All files of one rank's checkpoint, and all its tensors by name, in file order."""

    files: tuple[FileLayout, ...]
    tensors: Mapping[str, Placed]
    buffer_bytes: int


def make_layout(records: Sequence[TensorRecord], *, shard: int = 0, shards: int = 1) -> Layout:
    """Place every tensor, whatever the order of the records; file names have this rank's number and that of all ranks.

    Raises UnsupportedError for a dtype, header or name that safetensors or a file system cannot hold.
    """
    owners: dict[str, list[tuple[str, TensorRecord]]] = {}
    seen: set[str] = set()
    for record in records:
        owner, slash, key = record.name.partition("/")
        if not OWNER.fullmatch(owner) or not slash or not key or key == _METADATA:
            raise UnsupportedError(
                f"state tensor {record.name!r} cannot be stored: models and optimizers need names of letters, digits, "
                "'_', '.' and '-', and tensors a name of their own"
            )
        if record.name in seen:
            raise UnsupportedError(f"two state tensors are named {record.name}")
        seen.add(record.name)
        _check(record)
        owners.setdefault(owner, []).append((key, record))
    files: list[FileLayout] = []
    begin = 0
    for owner in sorted(owners):
        ordered = sorted(owners[owner], key=lambda item: (-item[1].element_bytes, item[1].deadline, item[1].name))
        file = _place(f"{owner}-{shard:05d}-of-{shards:05d}.safetensors", ordered, begin)
        files.append(file)
        begin += -(-file.size_bytes // PAGE_BYTES) * PAGE_BYTES
    tensors = {placed.record.name: placed for file in files for placed in file.tensors}
    return Layout(tuple(files), tensors, begin)


def _check(record: TensorRecord) -> None:
    stored = STORED_TYPES.get(record.dtype)
    if stored is None:
        raise UnsupportedError(f"state tensor {record.name} is {record.dtype}, which no safetensors file can hold")
    if record.element_bytes != stored.element_bytes or record.size_bytes != stored.element_bytes * math.prod(
        record.shape
    ):
        raise UnsupportedError(
            f"state tensor {record.name}: {record.size_bytes} bytes in elements of {record.element_bytes} are no "
            f"{record.dtype} of shape {list(record.shape)}"
        )
    if stored.packed and not record.shape:
        raise UnsupportedError(f"state tensor {record.name}: a {record.dtype} needs at least one dimension")
    if record.permutation is not None and sorted(record.permutation) != list(range(len(record.shape))):
        raise UnsupportedError(f"state tensor {record.name}: {record.permutation} is no order of its dimensions")


def _place(name: str, ordered: Sequence[tuple[str, TensorRecord]], begin: int) -> FileLayout:
    entries: dict[str, Any] = {_METADATA: _metadata(ordered)}
    offsets: list[int] = []
    end = 0
    for key, record in ordered:
        stored = STORED_TYPES[record.dtype]
        offsets.append(end)
        end += record.size_bytes
        entries[key] = {
            "dtype": stored.code,
            "shape": stored.stored_shape(record.shape),
            "data_offsets": [offsets[-1], end],
        }
    try:
        text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise UnsupportedError(f"{name}: a tensor's name is no valid Unicode: {error.object[error.start]!r}") from None
    padded = -(-(8 + len(text)) // PAGE_BYTES) * PAGE_BYTES
    if padded - 8 > MAX_HEADER_BYTES:
        raise UnsupportedError(f"{name}: the names of {len(ordered)} tensors do not fit into a safetensors header")
    header = (padded - 8).to_bytes(8, "little") + text.ljust(padded - 8)
    placed = tuple(
        Placed(record, name, key, begin + padded + offset, padded + offset)
        for (key, record), offset in zip(ordered, offsets, strict=True)
    )
    turned = tuple(one for one in placed if one.record.turned)
    return FileLayout(name, header, begin, padded + end, placed, turned)


def _metadata(ordered: Sequence[tuple[str, TensorRecord]]) -> dict[str, str]:
    """What other readers of safetensors expect, and which tensors are stored as pairs of real numbers."""
    pairs = {f"dtype {key}": record.dtype for key, record in ordered if STORED_TYPES[record.dtype].pair}
    return {"format": "pt", **pairs}


def write_headers(layout: Layout, staging: memoryview) -> None:
    """Write the files' headers into a staging buffer, once; tensors are copied to their ``staging_offset`` later."""
    for file in layout.files:
        staging[file.staging_offset : file.staging_offset + len(file.header)] = file.header


def file_image(file: FileLayout, staging: memoryview, limit_bytes: int) -> Iterator[memoryview]:
    """The bytes of a file in order, in pieces of any size.

    Row-major tensors are not copied. Others are converted piece by piece, with ``limit_bytes`` of memory at most.
    """
    yield memoryview(file.header)
    shift = file.staging_offset
    done = len(file.header)
    for placed in file.turned:
        yield staging[shift + done : placed.staging_offset]
        yield from _turn(placed, staging, limit_bytes)
        done = placed.file_offset + placed.record.size_bytes
    yield staging[shift + done : shift + file.size_bytes]


def _turn(placed: Placed, staging: memoryview, limit_bytes: int) -> Iterator[memoryview]:
    """The row-major bytes of a tensor that is staged in its memory order."""
    record = placed.record
    order = record.permutation or tuple(range(len(record.shape)))
    flat = np.frombuffer(staging, np.uint8, record.size_bytes, placed.staging_offset).view(element(record.dtype))
    logical = np.atleast_1d(flat.reshape([record.shape[d] for d in order]).transpose(np.argsort(order)))
    for rows in _rows(logical, limit_bytes):
        yield _resolved(record, rows) if record.conjugated or record.negated else rows


def _resolved(record: TensorRecord, rows: memoryview) -> memoryview:
    """Resolve lazy signs: flip the sign bit of conjugated imaginary parts, and of all negated parts."""
    bits = 8 * record.element_bytes // (2 if record.dtype.startswith("complex") else 1)
    parts = np.frombuffer(rows, f"u{bits // 8}").copy()
    if record.negated:
        parts ^= parts.dtype.type(1 << (bits - 1))
    if record.conjugated:
        parts[1::2] ^= parts.dtype.type(1 << (bits - 1))
    return parts.view(np.uint8).data


def _rows(array: np.ndarray[Any, Any], limit_bytes: int) -> Iterator[memoryview]:
    row_bytes = array.nbytes // len(array)
    if row_bytes > limit_bytes and array.ndim > 1:
        for row in array:
            yield from _rows(row, limit_bytes)
        return
    count = max(1, limit_bytes // row_bytes)
    for first in range(0, len(array), count):
        yield np.ascontiguousarray(array[first : first + count]).reshape(-1).view(np.uint8).data


def element(dtype: str) -> np.dtype[Any]:
    """A numpy type that moves whole elements of a torch dtype, whatever they mean."""
    size = STORED_TYPES[dtype].element_bytes
    return np.dtype(np.complex128) if size == 16 else np.dtype(f"u{size}")
