"""Weights, and their optimizer's state, in folders of torch.distributed.checkpoint.

Its metadata is a pickle, which can run any code: an unpickler that knows only descriptions of tensors reads it. Its
data are files of ``torch.save``, one after the other, each with its checksums.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import math
import pathlib
import pickle
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import torch

from checkflow.core.errors import CorruptCheckpointError, MismatchError, StorageError
from checkflow.core.state import dtype_name
from checkflow.runtime.format.layout import STORED_TYPES, element
from checkflow.runtime.system import fs
from checkflow.runtime.weights.optimizers import STATE, find_optimizers, read_groups
from checkflow.runtime.weights.torch_files import (
    BROKEN,
    as_tensor,
    pick_model,
    refusal,
    refuse_claims,
    row_major,
    unused,
    verify_zip,
)
from checkflow.runtime.weights.weights import (
    DCP_METADATA,
    EXTRA_STATE,
    Described,
    SavedOptimizer,
    Weights,
    open_regular,
    plain_name,
    read_bounded,
    read_exactly,
)

_MAX_METADATA_BYTES = 1 << 30


@dataclasses.dataclass(frozen=True, slots=True)
class _Chunk:
    """A box of a tensor, and the range of a file with its torch.save."""

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    file: str
    begin: int
    size_bytes: int


def open_dcp(path: Path, key: str | None) -> Weights:
    """Open a folder of torch.distributed.checkpoint, written by any number of ranks."""
    where = str(path)
    metadata = _read_metadata(path)
    try:
        tensors, chunks, values = _take_apart(where, metadata)
        places = _places(metadata)
    except (AttributeError, TypeError, KeyError, ValueError, IndexError) as error:
        raise CorruptCheckpointError(f"{path / DCP_METADATA} contradicts itself: {error}") from None
    refuse_claims(where, tensors, sum(file.stat().st_size for file in path.iterdir() if file.is_file()))
    nested = _nest(places)
    chosen, place = pick_model(where, nested, key, lambda leaf: isinstance(leaf, str) and leaf in tensors)
    names = {name: leaf for name, leaf in chosen.items() if isinstance(leaf, str)}

    def load(leaf: str) -> Any:
        if leaf in values:
            return _load_chunk(path, values[leaf])
        data = bytearray(tensors[leaf].size_bytes)
        _join(path, tensors[leaf], chunks[leaf], memoryview(data))
        return as_tensor(tensors[leaf], data)

    def verify(leaves: Iterable[str]) -> None:
        for chunk in (chunk for leaf in leaves for chunk in chunks.get(leaf) or [values[leaf]]):
            with _opened(path, chunk) as stream:
                verify_zip(stream, str(path / chunk.file))

    extras = {name: load(names.pop(name)) for name in [*names] if name.rpartition(".")[2] == EXTRA_STATE}
    kept = {name: leaf for name, leaf in names.items() if leaf in tensors}
    others = {leaf: where_it_is for leaf, where_it_is in places.items() if leaf not in kept.values()}
    found, nameless = find_optimizers(others, kept.keys(), load)
    optimizer = None
    used = [(*place, name) for name in (*kept, *extras)]
    if len(found) == 1:
        (one,) = found
        used += [tuple(map(str, places[leaf])) for leaf in one.leaves]
        optimizer = SavedOptimizer(
            one.place or STATE,
            {of: tensors[leaf] for of, leaf in one.state.items() if leaf in tensors},
            _by_parameter({of: load(leaf) for of, leaf in one.state.items() if leaf not in tensors}),
            lambda of, buffer: _join(path, tensors[one.state[of]], chunks[one.state[of]], buffer),
            lambda: read_groups(one, load),
            lambda: verify(one.leaves),
        )
    left = [_why(name, [one.place for one in found[1:] and found], nameless) for name in unused(nested, used)]
    return Weights(
        where, "dcp", {name: tensors[leaf] for name, leaf in kept.items()},
        lambda name, buffer: _join(path, tensors[kept[name]], chunks[kept[name]], buffer),
        lambda: verify(kept.values()), {}, extras, tuple(left), optimizer,
    )  # fmt: skip


def _by_parameter(values: Mapping[tuple[str, str], Any]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for (name, key), value in values.items():
        found.setdefault(name, {})[key] = value
    return found


def _why(name: str, several: Collection[str], nameless: Collection[str]) -> str:
    """What is left out, and the reason if it is an optimizer's."""
    if name in several:
        return f"{name} (state of these weights in several optimizers)"
    return f"{name} (its parameters have numbers; get_state_dict gives names)" if name in nameless else name


class _Unpickler(pickle.Unpickler):
    """Makes descriptions of tensors and their places, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        from torch.distributed.checkpoint import filesystem, metadata

        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        known = {
            metadata.__name__: (
                "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "TensorProperties", "MetadataIndex",
                "ChunkStorageMetadata", "StorageMeta", "_MEM_FORMAT_ENCODING",
            ),
            filesystem.__name__: ("_StorageInfo",),
            "torch.distributed._shard.sharded_tensor.metadata": ("TensorProperties", "MEM_FORMAT_ENCODING"),
            "torch.serialization": ("_get_layout",),
            "torch": ("Size",),
            "collections": ("OrderedDict",),
        }  # fmt: skip
        if name in known.get(module, ()):
            return super().find_class(module, name)
        if module.startswith("pathlib") and name.endswith("Path"):
            return pathlib.PurePosixPath  # nothing uses the path
        raise pickle.UnpicklingError(f"GLOBAL {module}.{name} does not describe tensors")


def _read_metadata(path: Path) -> Any:
    file = path / DCP_METADATA
    data = read_bounded(file, _MAX_METADATA_BYTES)
    try:
        return _Unpickler(io.BytesIO(data)).load()
    except BROKEN as error:
        text = " ".join(str(error).split())
        raise CorruptCheckpointError(
            f"{file} is no metadata of torch.distributed.checkpoint: {text[:120] or type(error).__name__}"
        ) from None


def _take_apart(where: str, metadata: Any) -> tuple[dict[str, Described], dict[str, list[_Chunk]], dict[str, _Chunk]]:
    """Tensors by the names under which they are stored, in chunks; other values."""
    tensors: dict[str, Described] = {}
    boxes: dict[str, dict[tuple[int, ...], tuple[int, ...]]] = {}
    for name, entry in metadata.state_dict_metadata.items():
        if not hasattr(entry, "chunks"):
            continue
        described = Described(dtype_name(entry.properties.dtype), tuple(map(int, entry.size)))
        if described.dtype not in STORED_TYPES:
            raise MismatchError(f"{where}: {name!r} is {described.dtype}, which a checkpoint's files cannot hold")
        boxes[name] = {tuple(map(int, one.offsets)): tuple(map(int, one.sizes)) for one in entry.chunks}
        _refuse_boxes(name, described, boxes[name])
        tensors[name] = described
    chunks: dict[str, list[_Chunk]] = {name: [] for name in tensors}
    values: dict[str, _Chunk] = {}
    for index, info in metadata.storage_data.items():
        if not isinstance(info.relative_path, str) or not plain_name(info.relative_path):
            raise ValueError(f"{index.fqn!r} lies in {info.relative_path!r}, no file of this folder")
        if info.transform_descriptors:
            raise MismatchError(
                f"{where}: {index.fqn!r} was saved through an extension (compressed, say): save without"
            )
        offsets = None if index.offset is None else tuple(map(int, index.offset))
        lengths = () if offsets is None else boxes[index.fqn][offsets]
        chunk = _Chunk(offsets or (), lengths, info.relative_path, int(info.offset), int(info.length))
        if chunk.begin < 0 or chunk.size_bytes < 0:
            raise ValueError(f"{index.fqn!r} has a range that no file has")
        if offsets is None:
            values[index.fqn] = chunk
        else:
            chunks[index.fqn].append(chunk)
    for name, found in chunks.items():
        if len(found) != len(boxes[name]):
            raise ValueError(f"{name!r} is described in {len(boxes[name])} parts and stored in {len(found)}")
    return tensors, chunks, values


def _refuse_boxes(name: str, described: Described, boxes: Mapping[tuple[int, ...], tuple[int, ...]]) -> None:
    inside = all(
        len(offsets) == len(lengths) == len(described.shape)
        and all(o >= 0 and n >= 0 and o + n <= length
                for o, n, length in zip(offsets, lengths, described.shape, strict=True))
        for offsets, lengths in boxes.items()
    )  # fmt: skip
    if not inside or sum(map(math.prod, boxes.values())) != math.prod(described.shape):
        raise ValueError(f"{name!r} of shape {list(described.shape)} is not the sum of its parts")


def _places(metadata: Any) -> dict[str, tuple[Any, ...]]:
    """What was saved under a name: keys of nested dictionaries, and numbers in lists."""
    known = metadata.planner_data if isinstance(metadata.planner_data, Mapping) else {}
    return {name: tuple(known.get(name) or (name,)) for name in metadata.state_dict_metadata}


def _nest(places: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
    """The nested dictionaries that were saved; each leaf is the name under which it is stored."""
    nested: dict[str, Any] = {}
    for name, place in places.items():
        inner = nested
        for part in place[:-1]:
            inner = inner.setdefault(part, {})
        inner[place[-1]] = name
    return nested


class _Section(io.RawIOBase):
    """A range of a file, as a file: nothing of it is held in memory."""

    def __init__(self, file: Path, fd: int, chunk: _Chunk) -> None:
        self._file, self._fd, self._begin, self._size, self._at = file, fd, chunk.begin, chunk.size_bytes, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = max(0, offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence])
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        count = max(0, min(len(view), self._size - self._at))
        read_exactly(self._file, self._fd, self._begin + self._at, view[:count])
        self._at += count
        return count


@contextlib.contextmanager
def _opened(path: Path, chunk: _Chunk) -> Iterator[IO[bytes]]:
    """The torch.save in a range of a file."""
    file = path / chunk.file
    fd, size = open_regular(file)
    try:
        if chunk.begin + chunk.size_bytes > size:
            raise CorruptCheckpointError(f"{file} is truncated: it has {size} bytes")
        with io.BufferedReader(_Section(file, fd, chunk)) as stream:
            yield cast(IO[bytes], stream)
    finally:
        fs.close(fd)


def _load_chunk(path: Path, chunk: _Chunk) -> Any:
    with _opened(path, chunk) as stream:
        try:
            return torch.load(stream, map_location="cpu", weights_only=True)
        except StorageError:
            raise
        except BROKEN as error:
            raise refusal(str(path / chunk.file), error) from None


def _join(path: Path, described: Described, chunks: list[_Chunk], out: memoryview) -> None:
    if not described.size_bytes:
        return
    kind = element(described.dtype)
    whole = np.frombuffer(out, kind).reshape(described.shape)
    for chunk in chunks:
        tensor = _load_chunk(path, chunk)
        if not isinstance(tensor, torch.Tensor) or tuple(tensor.shape) != chunk.lengths:
            raise CorruptCheckpointError(f"{path / chunk.file} holds something else than {DCP_METADATA} says")
        if dtype_name(tensor.dtype) != described.dtype:
            raise CorruptCheckpointError(f"{path / chunk.file} holds {tensor.dtype} instead of {described.dtype}")
        if tensor.numel():
            box = tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.lengths, strict=True))
            whole[box] = row_major(tensor).view(kind).reshape(chunk.lengths)
