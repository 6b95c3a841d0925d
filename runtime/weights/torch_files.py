"""Weights in files of ``torch.save``: pickles, which can run any code, so ``weights_only=True`` loads them."""

from __future__ import annotations

import pickle
import re
import warnings
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

from checkflow.core.errors import CorruptCheckpointError, MismatchError, StorageError
from checkflow.core.state import Region, dtype_name, region
from checkflow.runtime.format.layout import STORED_TYPES
from checkflow.runtime.system import fs
from checkflow.runtime.weights.optimizers import of_optimizer, only_of_optimizer
from checkflow.runtime.weights.weights import EXTRA_STATE, Described, Weights, open_regular

_USUAL = ("model", "state_dict", "model_state_dict", "module")  # preferred keys of the weights
_MAX_DEPTH = 4
_MOST_VIEWS = 4  # tensors may have this many times a file's bytes: several may be views of one memory
_FREE_BYTES = 1 << 24  # beyond that, such as an expanded mask
# What parsers may raise for a damaged or foreign file.
BROKEN = (
    pickle.UnpicklingError, zipfile.BadZipFile, zlib.error, EOFError, OSError, RuntimeError, ValueError, KeyError,
    IndexError, TypeError, AttributeError, ImportError, AssertionError, OverflowError, MemoryError, RecursionError,
    NotImplementedError,
)  # fmt: skip
Names = Mapping[str, Any]
Place = tuple[str, ...]


def as_tensor(described: Described, data: bytearray) -> torch.Tensor:
    """A tensor over these row-major bytes."""
    dtype = getattr(torch, described.dtype)
    if not data:
        return torch.empty(described.shape, dtype=dtype, device="cpu")
    return torch.frombuffer(data, dtype=torch.uint8).view(dtype).reshape(described.shape)


def row_major(tensor: torch.Tensor) -> Any:
    """The bytes of a tensor's values, as an array; a view of its memory if they lie there like that."""
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return plain.view(torch.uint8).numpy()


def copy_bytes(tensor: torch.Tensor, out: memoryview) -> None:
    """Fill a buffer with the row-major bytes of a tensor's values."""
    if tensor.numel():
        np.frombuffer(out, np.uint8)[:] = row_major(tensor)


def _describe(where: str, name: str, tensor: torch.Tensor) -> Described:
    dtype = dtype_name(tensor.dtype)
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta or dtype not in STORED_TYPES:
        kind = "a tensor without values" if tensor.is_meta else f"{dtype}, {tensor.layout}"
        raise MismatchError(f"{where}: {name!r} is {kind}, which a checkpoint's files cannot hold")
    return Described(dtype, tuple(tensor.shape))


def refuse_claims(where: str, tensors: Mapping[str, Described], held_bytes: int) -> None:
    """A few bytes can describe a tensor of any size: refuse that before memory is allocated."""
    claimed_bytes = sum(described.size_bytes for described in tensors.values())
    if claimed_bytes > _MOST_VIEWS * held_bytes + _FREE_BYTES:
        raise CorruptCheckpointError(f"{where} claims tensors of {claimed_bytes} bytes, and has {held_bytes}")


# -------------------------------------------------------------------------------------------- which part is a model


def pick_model(where: str, found: Any, key: str | None, is_tensor: Callable[[Any], bool]) -> tuple[Names, Place]:
    """The model's mapping of names to tensors, without an optimizer's state in it, and its place in the file."""
    if not isinstance(found, Mapping):
        raise MismatchError(f"{where} holds {_article(found)}, no state dict")
    candidates = {".".join(place): (names, place) for names, place in _state_dicts(found, (), is_tensor)}
    if key is not None:
        if key not in candidates:
            raise MismatchError(f"{where} has no weights under {key!r}, but under {_listed(candidates)}")
        return candidates[key]
    if not candidates:
        raise MismatchError(f"{where} holds no state dict of a model")
    chosen = list(candidates)
    if len(chosen) > 1:
        usual = [place for place in chosen if place.rpartition(".")[2] in _USUAL]
        chosen = usual or chosen
    if len(chosen) > 1:
        raise MismatchError(f"{where} has weights under {_listed(candidates)}: say which with a key")
    return candidates[chosen[0]]


def _state_dicts(
    found: Mapping[Any, Any], place: Place, is_tensor: Callable[[Any], bool]
) -> Iterator[tuple[Names, Place]]:
    """Every mapping from names to tensors, with its place; not those of optimizers."""
    if "param_groups" in found or not all(isinstance(name, str) for name in found) or only_of_optimizer(found):
        return
    tensors = {name for name, value in found.items() if is_tensor(value)}
    own = {name: value for name, value in found.items() if not of_optimizer(name, tensors)}
    if not tensors.isdisjoint(own):
        yield own, place
    if len(place) < _MAX_DEPTH:
        for name, value in found.items():
            if isinstance(value, Mapping):
                yield from _state_dicts(value, (*place, name), is_tensor)


def _listed(candidates: Mapping[str, Any]) -> str:
    return ", ".join(place or "the whole" for place in candidates) or "nothing"


def _article(value: object) -> str:
    name = type(value).__name__
    return f"an {name}" if name[0] in "aeiouAEIOU" else f"a {name}"


def unused(found: Mapping[Any, Any], used: Collection[Place]) -> tuple[str, ...]:
    """What a file holds beside these places, a part of which nothing is used as one."""
    within = {place[:end] for place in used for end in range(len(place))}

    def walk(inner: Mapping[Any, Any], place: Place) -> Iterator[str]:
        for name, value in inner.items():
            here = (*place, str(name))
            if here in within and isinstance(value, Mapping):
                yield from walk(value, here)
            elif here not in taken:
                yield ".".join(here)

    taken = set(used)
    return tuple(walk(found, ()))


# --------------------------------------------------------------------------------------------------------- torch.save


def open_torch(path: Path, key: str | None) -> Weights:
    """Open a file of ``torch.save``; mapped, not read, if its format allows (since torch 1.6)."""
    zipped, found, held_bytes = _load(path)
    where = str(path)
    chosen, place = pick_model(where, found, key, lambda value: isinstance(value, torch.Tensor))
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

    refuse_claims(where, tensors, held_bytes)

    def verify() -> None:
        if zipped:
            verify_zip(path)

    left = unused(found, [(*place, name) for name in (*tensors, *ties, *extras)])
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
    except BROKEN as error:
        raise refusal(str(path), error) from None


def refusal(where: str, error: BaseException) -> StorageError | MismatchError:
    text = " ".join(str(error).split())
    if isinstance(error, pickle.UnpicklingError) and (named := re.search(r"GLOBAL (\S+)", text)):
        return MismatchError(f"{where} holds {named[1]}: only tensors, numbers and containers are loaded, never code")
    if isinstance(error, OSError) and error.strerror:
        return StorageError(f"cannot read {where}: {error.strerror}")
    return CorruptCheckpointError(f"{where} is damaged, or no file of torch.save: {text[:120] or type(error).__name__}")


def verify_zip(file: Path | IO[bytes], where: str = "") -> None:
    """Verify the checksums that torch.save writes and torch.load ignores."""
    where = where or str(file)
    try:
        with zipfile.ZipFile(file) as archive:
            damaged = archive.testzip()
    except BROKEN as error:
        raise CorruptCheckpointError(f"{where} is damaged: {' '.join(str(error).split())}") from None
    if damaged is not None:
        raise CorruptCheckpointError(f"{where} is damaged: {damaged} does not match its checksum")
