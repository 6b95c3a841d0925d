"""Weights in files of ``torch.save`` and torch.distributed.checkpoint. Both are pickles, which can run any code.

So torch.save's are loaded with ``weights_only=True``, and DCP's metadata by an unpickler that knows only descriptions.
"""

from __future__ import annotations

import dataclasses
import io
import math
import pathlib
import pickle
import re
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from checkflow.core.errors import CorruptCheckpointError, MismatchError, StorageError
from checkflow.core.state import Region, dtype_name, region
from checkflow.runtime.format.layout import STORED_TYPES, element
from checkflow.runtime.system import fs
from checkflow.runtime.weights.weights import (
    DCP_METADATA,
    EXTRA_STATE,
    Described,
    Weights,
    open_regular,
    plain_name,
    read_bounded,
    read_exactly,
)

_USUAL = ("model", "state_dict", "model_state_dict", "module")  # preferred keys of the weights
_MAX_METADATA_BYTES = 1 << 30
_MAX_DEPTH = 4
_MOST_VIEWS = 4  # tensors may have this many times a file's bytes: several may be views of one memory
_FREE_BYTES = 1 << 24  # beyond that, such as an expanded mask
# What parsers may raise for a damaged or foreign file.
_BROKEN = (
    pickle.UnpicklingError, zipfile.BadZipFile, zlib.error, EOFError, OSError, RuntimeError, ValueError, KeyError,
    IndexError, TypeError, AttributeError, ImportError, AssertionError, OverflowError, MemoryError, RecursionError,
    NotImplementedError,
)  # fmt: skip


def as_tensor(described: Described, data: bytearray) -> torch.Tensor:
    """A tensor over these row-major bytes."""
    dtype = getattr(torch, described.dtype)
    if not data:
        return torch.empty(described.shape, dtype=dtype, device="cpu")
    return torch.frombuffer(data, dtype=torch.uint8).view(dtype).reshape(described.shape)


def copy_bytes(tensor: torch.Tensor, out: memoryview) -> None:
    """Fill a buffer with the row-major bytes of a tensor's values."""
    if tensor.numel():
        plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
        np.frombuffer(out, np.uint8)[:] = plain.view(torch.uint8).numpy()


def _describe(where: str, name: str, tensor: torch.Tensor) -> Described:
    dtype = dtype_name(tensor.dtype)
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta or dtype not in STORED_TYPES:
        kind = "a tensor without values" if tensor.is_meta else f"{dtype}, {tensor.layout}"
        raise MismatchError(f"{where}: {name!r} is {kind}, which a checkpoint's files cannot hold")
    return Described(dtype, tuple(tensor.shape))


def _refuse_claims(where: str, tensors: Mapping[str, Described], held_bytes: int) -> None:
    """A few bytes can describe a tensor of any size: refuse that before memory is allocated."""
    claimed_bytes = sum(described.size_bytes for described in tensors.values())
    if claimed_bytes > _MOST_VIEWS * held_bytes + _FREE_BYTES:
        raise CorruptCheckpointError(f"{where} claims tensors of {claimed_bytes} bytes, and has {held_bytes}")


# -------------------------------------------------------------------------------------------- which part is a model


def _pick(where: str, found: Any, key: str | None, is_tensor: Callable[[Any], bool]) -> tuple[Mapping[str, Any], str]:
    """The model's mapping of names to tensors, and its place in the file ("": the whole)."""
    if not isinstance(found, Mapping):
        raise MismatchError(f"{where} holds {_article(found)}, no state dict")
    candidates = dict(_state_dicts(found, "", 0, is_tensor))
    if key is not None:
        if key not in candidates:
            raise MismatchError(f"{where} has no weights under {key!r}, but under {_listed(candidates)}")
        return candidates[key], key
    if not candidates:
        raise MismatchError(f"{where} holds no state dict of a model")
    chosen = list(candidates)
    if len(chosen) > 1:
        usual = [place for place in chosen if place.rpartition(".")[2] in _USUAL]
        chosen = usual or chosen
    if len(chosen) > 1:
        raise MismatchError(f"{where} has weights under {_listed(candidates)}: say which with a key")
    return candidates[chosen[0]], chosen[0]


def _state_dicts(
    found: Mapping[Any, Any], place: str, depth: int, is_tensor: Callable[[Any], bool]
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Every mapping from names to tensors, by its place; not those of optimizers."""
    if "param_groups" in found or not all(isinstance(name, str) for name in found):
        return
    if any(is_tensor(value) for value in found.values()):
        yield place, found
    if depth < _MAX_DEPTH:
        for name, value in found.items():
            if isinstance(value, Mapping):
                yield from _state_dicts(value, f"{place}.{name}" if place else name, depth + 1, is_tensor)


def _listed(candidates: Mapping[str, Any]) -> str:
    return ", ".join(place or "the whole" for place in candidates) or "nothing"


def _article(value: object) -> str:
    name = type(value).__name__
    return f"an {name}" if name[0] in "aeiouAEIOU" else f"a {name}"


def _left_out(found: Mapping[Any, Any], chosen: Mapping[str, Any], place: str, names: set[str]) -> tuple[str, ...]:
    """What lies beside the chosen part, and what in it is not a tensor."""
    beside = [] if not place else [str(name) for name in found if str(name) != place.partition(".")[0]]
    return (*beside, *(name for name in chosen if name not in names))


# --------------------------------------------------------------------------------------------------------- torch.save


def open_torch(path: Path, key: str | None) -> Weights:
    """Open a file of ``torch.save``; mapped, not read, if its format allows (since torch 1.6)."""
    zipped, found, held_bytes = _load(path)
    where = str(path)
    chosen, place = _pick(where, found, key, lambda value: isinstance(value, torch.Tensor))
    tensors: dict[str, Described] = {}
    live: dict[str, torch.Tensor] = {}
    ties: dict[str, str] = {}
    extras: dict[str, Any] = {}
    first: dict[Region, str] = {}
    for name, value in chosen.items():
        if name.rpartition(".")[2] == EXTRA_STATE:
            extras[name] = value
        elif isinstance(value, torch.Tensor):
            described = _describe(where, name, value)
            here = region(value)
            if value.numel() and here in first:
                ties[name] = first[here]
            else:
                first[here] = name
                tensors[name], live[name] = described, value

    _refuse_claims(where, tensors, held_bytes)

    def verify() -> None:
        if zipped:
            _verify_zip(path)

    left = _left_out(found, chosen, place, {*tensors, *ties, *extras})
    return Weights(
        where, "torch", tensors, lambda name, buffer: copy_bytes(live[name], buffer), verify, ties, extras, left
    )


def _load(path: Path) -> tuple[bool, Any, int]:
    """Whether a file is an archive, its content, and its size."""
    fd, size = open_regular(path)
    fs.close(fd)
    try:
        zipped = zipfile.is_zipfile(path)
        if zipped:
            with zipfile.ZipFile(path) as archive:  # torch.save does not compress: content and file are of one size
                unpacked_bytes = sum(record.file_size for record in archive.infolist())
            if unpacked_bytes > size:
                raise CorruptCheckpointError(f"{path} claims records of {unpacked_bytes} bytes, and has {size}")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about old storage types
            return zipped, torch.load(path, map_location="cpu", weights_only=True, mmap=zipped), size
    except _BROKEN as error:
        raise _refusal(str(path), error) from None


def _refusal(where: str, error: BaseException) -> StorageError | MismatchError:
    text = " ".join(str(error).split())
    if isinstance(error, pickle.UnpicklingError) and (named := re.search(r"GLOBAL (\S+)", text)):
        return MismatchError(f"{where} holds {named[1]}: only tensors, numbers and containers are loaded, never code")
    if isinstance(error, OSError) and error.strerror:
        return StorageError(f"cannot read {where}: {error.strerror}")
    return CorruptCheckpointError(f"{where} is damaged, or no file of torch.save: {text[:120] or type(error).__name__}")


def _verify_zip(file: Path | io.BytesIO, where: str = "") -> None:
    """Verify the checksums that torch.save writes and torch.load ignores."""
    where = where or str(file)
    try:
        with zipfile.ZipFile(file) as archive:
            damaged = archive.testzip()
    except _BROKEN as error:
        raise CorruptCheckpointError(f"{where} is damaged: {' '.join(str(error).split())}") from None
    if damaged is not None:
        raise CorruptCheckpointError(f"{where} is damaged: {damaged} does not match its checksum")


# ---------------------------------------------------------------------------------------- torch.distributed.checkpoint


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
        nested, tensors, chunks, values = _take_apart(where, metadata)
    except (AttributeError, TypeError, KeyError, ValueError, IndexError) as error:
        raise CorruptCheckpointError(f"{path / DCP_METADATA} contradicts itself: {error}") from None
    _refuse_claims(where, tensors, sum(file.stat().st_size for file in path.iterdir() if file.is_file()))
    chosen, place = _pick(where, nested, key, lambda leaf: leaf in tensors if isinstance(leaf, str) else False)
    names = {name: leaf for name, leaf in chosen.items() if isinstance(leaf, str)}
    extras: dict[str, Any] = {}
    for name in [name for name in names if name.rpartition(".")[2] == EXTRA_STATE]:
        leaf = names.pop(name)
        if leaf in values:
            extras[name] = _load_chunk(path, values[leaf])
        else:
            data = bytearray(tensors[leaf].size_bytes)
            _join(path, tensors[leaf], chunks[leaf], memoryview(data))
            extras[name] = as_tensor(tensors[leaf], data)
    kept = {name: leaf for name, leaf in names.items() if leaf in tensors}

    def read_into(name: str, buffer: memoryview) -> None:
        _join(path, tensors[kept[name]], chunks[kept[name]], buffer)

    def verify() -> None:
        for leaf in kept.values():
            for chunk in chunks[leaf]:
                _verify_zip(io.BytesIO(_read_chunk(path, chunk)), str(path / chunk.file))

    described = {name: tensors[leaf] for name, leaf in kept.items()}
    left = _left_out(nested, chosen, place, {*kept, *extras})
    return Weights(where, "dcp", described, read_into, verify, {}, extras, left)


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
    except _BROKEN as error:
        text = " ".join(str(error).split())
        raise CorruptCheckpointError(
            f"{file} is no metadata of torch.distributed.checkpoint: {text[:120] or type(error).__name__}"
        ) from None


def _take_apart(
    where: str, metadata: Any
) -> tuple[dict[str, Any], dict[str, Described], dict[str, list[_Chunk]], dict[str, _Chunk]]:
    """What was saved, nested, with names for leaves; tensors by these names, in chunks; other values."""
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
    return _nest(metadata), tensors, chunks, values


def _refuse_boxes(name: str, described: Described, boxes: Mapping[tuple[int, ...], tuple[int, ...]]) -> None:
    inside = all(
        len(offsets) == len(lengths) == len(described.shape)
        and all(o >= 0 and n >= 0 and o + n <= length
                for o, n, length in zip(offsets, lengths, described.shape, strict=True))
        for offsets, lengths in boxes.items()
    )  # fmt: skip
    if not inside or sum(map(math.prod, boxes.values())) != math.prod(described.shape):
        raise ValueError(f"{name!r} of shape {list(described.shape)} is not the sum of its parts")


def _nest(metadata: Any) -> dict[str, Any]:
    """The nested dictionaries that were saved; each leaf is the name under which it is stored."""
    places = metadata.planner_data if isinstance(metadata.planner_data, Mapping) else {}
    nested: dict[str, Any] = {}
    for name in metadata.state_dict_metadata:
        place = places.get(name, (name,))
        inner = nested
        for part in place[:-1]:
            inner = inner.setdefault(part, {})
        inner[place[-1]] = name
    return nested


def _read_chunk(path: Path, chunk: _Chunk) -> bytearray:
    file = path / chunk.file
    fd, size = open_regular(file)
    try:
        if chunk.begin + chunk.size_bytes > size:
            raise CorruptCheckpointError(f"{file} is truncated: it has {size} bytes")
        data = bytearray(chunk.size_bytes)
        read_exactly(file, fd, chunk.begin, memoryview(data))
    finally:
        fs.close(fd)
    return data


def _load_chunk(path: Path, chunk: _Chunk) -> Any:
    try:
        return torch.load(io.BytesIO(_read_chunk(path, chunk)), map_location="cpu", weights_only=True)
    except StorageError:
        raise
    except _BROKEN as error:
        raise _refusal(str(path / chunk.file), error) from None


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
        data = bytearray(math.prod(chunk.lengths) * STORED_TYPES[described.dtype].element_bytes)
        copy_bytes(tensor, memoryview(data))
        box = tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.lengths, strict=True))
        whole[box] = np.frombuffer(data, kind).reshape(chunk.lengths)
