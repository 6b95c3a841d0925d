"""Reads a model's weights from safetensors, files of torch, or a checkpoint, all in one way.

Nothing is trusted: sizes are compared with headers before memory is allocated, file names stay in their folder, and no
pickle makes anything but tensors, numbers and containers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from checkflow.core.errors import CorruptCheckpointError, MismatchError, StorageError
from checkflow.core.paths import refuse_url
from checkflow.core.state import is_beside
from checkflow.runtime.format import codec
from checkflow.runtime.format.layout import MAX_HEADER_BYTES, STORED_TYPES
from checkflow.runtime.format.manifest import MANIFEST
from checkflow.runtime.state.gathering import make_tensor, put_back, stored_in
from checkflow.runtime.state.stages import job_of_all
from checkflow.runtime.store.discovery import find
from checkflow.runtime.store.files import StoredTensor, parse_header, parse_step, read_header
from checkflow.runtime.store.filling import fill_all
from checkflow.runtime.store.reader import Checkpoint, open_checkpoint
from checkflow.runtime.system import fs
from checkflow.runtime.weights.weights import (
    DCP_METADATA,
    EXTRA_STATE,
    Described,
    Form,
    Weights,
    open_regular,
    plain_name,
    read_bounded,
    read_exactly,
)

INDEX = ".safetensors.index.json"
_SUFFIXES: Mapping[str, Form] = {
    ".safetensors": "safetensors", ".pt": "torch", ".pth": "torch", ".bin": "torch", ".ckpt": "torch",
}  # fmt: skip
_DTYPES = {stored.code: name for name, stored in STORED_TYPES.items() if not stored.pair}

logger = logging.getLogger("checkflow")


@contextlib.contextmanager
def open_weights(
    source: str | os.PathLike[str], form: Form | None = None, *, key: str | None = None
) -> Iterator[Weights]:
    """Open one model's weights, under the source's names.

    Args:
        source: a safetensors file, or one in shards (its ``….safetensors.index.json``, or the folder of both); a folder
            of torch.distributed.checkpoint; a file of ``torch.save``; a checkpoint, a directory of checkpoints (the
            newest whole one) or ``DIRECTORY@STEP``.
        form: None: detected.
        key: which part, if a source holds more than one model: "model", "app.model"; of a checkpoint, the model's name.
            None: the only possible one.

    Raises:
        CorruptCheckpointError: it is damaged, or not what its name says.
        MismatchError: it holds no weights, several models, or tensors of a type that no checkpoint has.
        StorageError: it cannot be read.
    """
    refuse_url(source)
    path = Path(source)
    chosen = form_of(path) if form is None else form
    with contextlib.ExitStack() as closing:
        if chosen == "safetensors":
            _refuse_key(path, key)
            weights = _open_safetensors(path, closing)
        elif chosen == "checkflow":
            weights = _open_checkpoint(path, key, closing)
        else:
            from checkflow.runtime.weights import dcp_files, torch_files

            opener = dcp_files.open_dcp if chosen == "dcp" else torch_files.open_torch
            weights = opener(path, key)
        if not weights.tensors:
            raise MismatchError(f"{path} holds no tensor")
        yield weights


def _refuse_key(path: Path, key: str | None) -> None:
    if key is not None:
        raise MismatchError(f"{path} has no parts to choose {key!r} from: a safetensors file holds one model")


def form_of(path: Path) -> Form:
    """What a source is, by its name and content. Raises StorageError if that is unclear."""
    if path.is_dir():
        if (path / DCP_METADATA).is_file():
            return "dcp"
        if (path / MANIFEST).exists() or parse_step(path.name) is not None or find(path):
            return "checkflow"
        if _in_folder(path):
            return "safetensors"
        raise StorageError(f"{path} holds no weights: no safetensors file, no {DCP_METADATA}, no checkpoint")
    if not path.exists():
        if "@" in path.name:
            return "checkflow"
        raise StorageError(f"there is no {path}")
    found: Form | None = "safetensors" if path.name.endswith(INDEX) else _SUFFIXES.get(path.suffix)
    if found is None:
        raise StorageError(f"{path} does not say what it is: give its format (--format)")
    return found


def _in_folder(folder: Path) -> Path | None:
    """The index of a folder's shards, or its only safetensors file."""
    names = sorted(name for name in os.listdir(folder) if not name.startswith("."))
    indices = [name for name in names if name.endswith(INDEX)]
    singles = [name for name in names if name.endswith(".safetensors")]
    for wanted, found in ((f"model{INDEX}", indices), ("model.safetensors", singles)):
        if wanted in found:
            return folder / wanted
    chosen = indices or singles
    return folder / chosen[0] if len(chosen) == 1 else None


# ------------------------------------------------------------------------------------------------------ safetensors


def _open_safetensors(path: Path, closing: contextlib.ExitStack) -> Weights:
    file = _in_folder(path) if path.is_dir() else path
    if file is None:
        raise MismatchError(f"{path} holds several safetensors files: name one")
    shards: dict[Path, set[str] | None] = _shards(file) if file.suffix == ".json" else {file: None}
    places: dict[str, tuple[Path, int, int]] = {}  # name to file, descriptor, first byte
    tensors: dict[str, Described] = {}
    for shard, expected in shards.items():
        fd, size = open_regular(shard)
        closing.callback(fs.close, fd)
        text = read_header(shard, size, functools.partial(read_exactly, shard, fd))
        found, metadata = parse_header(shard, text, size)
        pairs = metadata if isinstance(metadata, dict) else {}
        if expected is not None:
            if missing := sorted(expected - found.keys()):
                raise CorruptCheckpointError(f"{shard} lacks {missing[0]!r}, which {file.name} places there")
            if further := sorted(found.keys() - expected):
                logger.warning("%s: %d tensors that are not in %s are left out", shard, len(further), file.name)
        for name in found if expected is None else sorted(expected):
            tensors[name] = _describe(shard, name, found[name], pairs.get(f"dtype {name}"))
            places[name] = shard, fd, found[name].begin

    def read_into(name: str, buffer: memoryview) -> None:
        shard, fd, begin = places[name]
        read_exactly(shard, fd, begin, buffer)

    extras = {name: tensors.pop(name) for name in list(tensors) if name.rpartition(".")[2] == EXTRA_STATE}
    weights = Weights(str(path), "safetensors", tensors, read_into, lambda: None)
    if not extras:
        return weights
    from checkflow.runtime.weights.torch_files import as_tensor

    values = {}
    for name, described in extras.items():
        data = bytearray(described.size_bytes)
        read_into(name, memoryview(data))
        values[name] = as_tensor(described, data)
    return dataclasses.replace(weights, extras=values)


def _shards(index: Path) -> dict[Path, set[str] | None]:
    """The files that an index names, each with its tensors."""
    data = read_bounded(index, MAX_HEADER_BYTES)
    try:
        places = json.loads(data)["weight_map"]
        found: dict[Path, set[str] | None] = {}
        for name, file in places.items():
            if not isinstance(file, str) or not plain_name(file):
                raise ValueError(f"{name!r} lies in {file!r}, no file beside the index")
            names = found.setdefault(index.parent / file, set())
            assert names is not None
            names.add(name)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CorruptCheckpointError(f"{index} is no index of safetensors files: {error}") from None
    return found


def _describe(path: Path, name: str, stored: StoredTensor, pair: object) -> Described:
    """torch's dtype and shape of an entry; ``pair``: the complex type that its last dimension of two forms."""
    dtype, shape = _DTYPES.get(stored.code), stored.shape
    if dtype is None:
        raise MismatchError(f"{path}: {name!r} is {stored.code}, which torch has no type for")
    kind = STORED_TYPES.get(pair) if isinstance(pair, str) else None
    if kind is not None and kind.pair and kind.code == stored.code and shape[-1:] == (2,):
        assert isinstance(pair, str)
        dtype, shape = pair, shape[:-1]
    elif STORED_TYPES[dtype].packed:
        if not shape or shape[-1] % 2:
            raise MismatchError(f"{path}: {name!r} is {stored.code}{list(shape)}, torch has pairs of these only")
        shape = (*shape[:-1], shape[-1] // 2)
    described = Described(dtype, shape)
    if any(length < 0 for length in shape) or described.size_bytes != stored.end - stored.begin:
        raise CorruptCheckpointError(
            f"{path} has {name!r} as {stored.code}{list(stored.shape)} in {stored.end - stored.begin} bytes"
        )
    return described


# ------------------------------------------------------------------------------------------------------ checkpoints


def _open_checkpoint(path: Path, key: str | None, closing: contextlib.ExitStack) -> Weights:
    from checkflow.runtime.inspect import choose

    checkpoint = closing.enter_context(open_checkpoint(choose(path)))
    job = job_of_all(checkpoint, codec.decode(checkpoint.extra_bytes)["job"])
    owners = dict.fromkeys(name.partition("/")[0] for name in checkpoint.tensors if not is_beside(name))
    models = sorted(owner for owner in owners if owner not in job["optimizers"])
    if key is None and len(models) != 1:
        raise MismatchError(f"{checkpoint.path} has the models {', '.join(models)}: say which")
    owner = models[0] if key is None else key
    if owner not in models:
        raise MismatchError(f"{checkpoint.path} has no model {owner!r}, but {', '.join(models)}")
    return _of_checkpoint(checkpoint, owner, job, [name for name in owners if name != owner])


def _of_checkpoint(checkpoint: Checkpoint, owner: str, job: Mapping[str, Any], others: list[str]) -> Weights:
    prefix = f"{owner}/"
    tensors = {
        name.removeprefix(prefix): Described(entry.dtype, tuple(entry.shape))
        for name, entry in checkpoint.tensors.items()
        if name.startswith(prefix)
    }
    ties: dict[str, str] = {}
    firsts: dict[str, str] = {}  # for tensors shared with another model, which names them
    for further, name in checkpoint.ties:
        if further.startswith(prefix):
            root = name.removeprefix(prefix) if name.startswith(prefix) else firsts.get(name)
            key = further.removeprefix(prefix)
            if root is None:
                firsts[name] = key
                entry = checkpoint.tensors[name]
                tensors[key] = Described(entry.dtype, tuple(entry.shape))
            else:
                ties[key] = root
    modules = {path: value for path, value in job["modules"].items() if path.startswith(prefix)}
    cpu = torch.device("cpu")
    beside = {name: make_tensor(checkpoint.tensors[name], cpu) for name in stored_in(modules)}
    fill_all(checkpoint, [(name, tensor, None) for name, tensor in beside.items()])
    extras = {
        f"{module}.{EXTRA_STATE}" if (module := path.removeprefix(prefix)) else EXTRA_STATE: value
        for path, value in put_back(modules, beside.__getitem__).items()
    }
    return Weights(
        str(checkpoint.path), "checkflow", tensors,
        lambda name, buffer: checkpoint.read_into(prefix + name, buffer),
        checkpoint.verify, ties, extras, (*others, *(f"state {name}" for name in job["objects"])),
    )  # fmt: skip
