"""Restores what one of M shards owns from a version that any number of shards wrote.

A process opens only files that can hold something of its own, and reads tables in verified blocks. Its memory is that
of its shard, a few copies of its ids, and some blocks.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter, ValidationError

from checkflow.core.boxes import Box
from checkflow.core.errors import CorruptCheckpointError, MismatchError, StorageError
from checkflow.core.graph import Named
from checkflow.core.paths import refuse_url
from checkflow.runtime.format import codec
from checkflow.runtime.format.layout import STORED_TYPES
from checkflow.runtime.format.manifest import BLOCK_BYTES, EXTRA, Manifest, Piece, TensorEntry
from checkflow.runtime.shards.arrays import Kind, from_bytes, numpy_type
from checkflow.runtime.shards.ownership import (
    Array,
    Ids,
    Shard,
    Table,
    TableInfo,
    Version,
    check_rank,
    may_hold,
    shard_of_name,
)
from checkflow.runtime.shards.writer import DENSE, IDS, INFO, ROWS, SLICES, TABLES
from checkflow.runtime.store.discovery import find, find_valid
from checkflow.runtime.store.files import glance, step_name
from checkflow.runtime.store.parts import narrow_to
from checkflow.runtime.store.reader import Checkpoint, open_checkpoint
from checkflow.runtime.store.trust import Trust

_FILE = re.compile(r".*-([0-9]{5,})-of-([0-9]{5,})\.safetensors", re.ASCII)
_TABLES: TypeAdapter[dict[str, tuple[int, str, str]]] = TypeAdapter(Named[str, tuple[int, str, str]])


def newest_step(directory: str | os.PathLike[str], *, trust: str | None = None) -> int | None:
    """The newest version that is whole, every byte of it verified; None if there is none.

    Call it in one process and pass the result to the others: if each searched for itself, damage might send one to an
    older version than the rest.

    Args:
        trust: whose versions it may be beside root's and this user's: "anyone", or a group's name for its members.

    Raises:
        ForeignError: another user may have written one.
        StorageError: the directory, or every version, cannot be read.
    """
    refuse_url(directory)
    found = find_valid(directory, Trust(Path(directory), trust))
    if found is None:
        return None
    with found:
        return found.step


def describe_version(directory: str | os.PathLike[str], step: int | None = None) -> Version:
    """What a version holds; reads only its manifest.

    Args:
        step: None: the newest.

    Raises:
        StorageError: there is none.
        MismatchError: it was not saved by shards.
        CorruptCheckpointError: its manifest is damaged, or a file is missing or of another size.
    """
    path = _path(directory, step)
    manifest = glance(path)
    tables = _tables(manifest, path)
    kinds = {name: (entry.dtype, entry.shape) for name, entry in manifest.tensors.items()}
    return Version(
        manifest.step,
        manifest.run_id,
        manifest.world_size,
        {name.removeprefix(f"{DENSE}/"): kind for name, kind in kinds.items() if name.startswith(f"{DENSE}/")},
        {name.removeprefix(f"{SLICES}/"): kind for name, kind in kinds.items() if name.startswith(f"{SLICES}/")},
        tables,
        {name: kinds[f"{TABLES}/{name}{IDS}"][1][0] for name in tables},
    )


def load_shard(
    directory: str | os.PathLike[str],
    rank: int,
    world_size: int,
    step: int | None = None,
    *,
    arrays: Kind = "numpy",
    trust: str | None = None,
) -> Shard:
    """What shard ``rank`` of ``world_size`` owns of a version, whatever number of shards wrote it.

    Args:
        step: None: the newest by name; where others may be writing, give all processes one step (``newest_step``).
        arrays: "torch": tensors, in host memory; bfloat16 and the like need it, as numpy does not have them.
        trust: as :func:`newest_step`.

    Raises:
        ForeignError: another user may have written it.
        StorageError: there is no such version, or it cannot be read.
        MismatchError: it was not saved by shards.
        CorruptCheckpointError: what this shard reads is damaged; the message names the file.
        UnsupportedError: numpy lacks a type.
    """
    check_rank(rank, world_size)
    path = _path(directory, step)
    trusted = Trust(path.parent, trust)
    with open_checkpoint(
        path, lambda whole: _narrow_to_shard(whole, rank, world_size, path), trust=trusted
    ) as checkpoint:
        dense = {
            name.removeprefix(f"{DENSE}/"): _read_whole(checkpoint, name, arrays)
            for name in checkpoint.tensors
            if name.startswith(f"{DENSE}/")
        }
        tables = {
            info.name: _read_table(checkpoint, info, rank, world_size, arrays)
            for info in _tables(checkpoint.manifest, path).values()
        }
        extra = codec.decode(checkpoint.extra_bytes)
        if not isinstance(extra, dict) or "state" not in extra:
            raise CorruptCheckpointError(f"{path / EXTRA} holds no state of shards")
        return Shard(checkpoint.step, rank, world_size, dense, tables, extra["state"])


def load_slices(
    directory: str | os.PathLike[str],
    ranges: Mapping[str, tuple[int, int]],
    step: int | None = None,
    *,
    arrays: Kind = "numpy",
    trust: str | None = None,
) -> dict[str, Array]:
    """Rows ``[begin, end)`` of tensors that were saved as slices, whatever boxes the ranks cut them into.

    Args:
        ranges: (begin, end) in the first dimension, by name; of a flat tensor these are elements.
        step, arrays, trust: as :func:`load_shard`.

    Raises:
        MismatchError: the version has no such slices, or not such rows.
        ForeignError, StorageError, CorruptCheckpointError, UnsupportedError: as :func:`load_shard`.
    """
    path = _path(directory, step)
    wanted = {f"{SLICES}/{name}": rows for name, rows in ranges.items()}
    trusted = Trust(path.parent, trust)
    boxes: dict[str, Box] = {}

    def narrow(whole: Manifest) -> Manifest:
        boxes.update(_row_boxes(whole, wanted, path))
        return narrow_to(whole, boxes)

    with open_checkpoint(path, narrow, trust=trusted) as checkpoint:
        found = _read_boxes(checkpoint, boxes, arrays)
        return {name: found[f"{SLICES}/{name}"] for name in ranges}


def _path(directory: str | os.PathLike[str], step: int | None) -> Path:
    refuse_url(directory)
    if step is not None:
        path = Path(directory) / step_name(step)
        if not path.is_dir():
            raise StorageError(f"{directory} holds no version of step {step}")
        return path
    if not (found := find(directory)):
        raise StorageError(f"{directory} holds no version")
    return found[0]


# ------------------------------------------------------------------------------------------------- what is of interest


def _tables(manifest: Manifest, path: Path) -> dict[str, TableInfo]:
    """The information on tables. Raises MismatchError if the version was not saved by shards."""
    if INFO not in manifest.info:
        raise MismatchError(f"{path} was not saved by shards: restore it with checkflow.Checkpointer")
    try:
        saved = _TABLES.validate_python(manifest.info[INFO])
    except ValidationError:
        raise CorruptCheckpointError(f"{path} does not say what its tables are") from None
    return {name: TableInfo(name, *values) for name, values in saved.items()}


def _refuse_contradiction(manifest: Manifest, path: Path) -> None:
    for name, info in _tables(manifest, path).items():
        ids, rows = (manifest.tensors.get(f"{TABLES}/{name}{part}") for part in (IDS, ROWS))
        fits = (
            ids is not None and rows is not None and ids.dtype == "int64" and len(ids.shape) == 1
            and (rows.dtype, rows.shape) == (info.dtype, (*ids.shape, info.dimension))
            and [(p.file, p.offsets[0], p.lengths[0]) for p in _filled(ids)]
            == [(p.file, p.offsets[0], p.lengths[0]) for p in (_filled(rows) if info.dimension else _filled(ids))]
        )  # fmt: skip
        if not fits:
            raise CorruptCheckpointError(f"{path}: ids and rows of the table {name!r} do not belong together")


def _filled(tensor: TensorEntry) -> list[Piece]:
    return [piece for piece in tensor.pieces if piece.lengths[0]]


def _narrow_to_shard(whole: Manifest, rank: int, world_size: int, path: Path) -> Manifest:
    """Drop variables of other shards, and parts of tables that cannot have a row of this shard."""
    _refuse_contradiction(whole, path)
    tensors: dict[str, TensorEntry] = {}
    for name, entry in whole.tensors.items():
        if name.startswith(f"{DENSE}/"):
            if shard_of_name(name.removeprefix(f"{DENSE}/"), world_size) == rank:
                tensors[name] = entry
        elif name.startswith(f"{TABLES}/"):
            pieces = tuple(p for p in _filled(entry) if may_hold(*_source(p.file), rank, world_size))
            if pieces:
                tensors[name] = dataclasses.replace(entry, pieces=pieces)
    return _with_files(whole, tensors)


def _row_boxes(whole: Manifest, wanted: Mapping[str, tuple[int, int]], path: Path) -> dict[str, Box]:
    """Rows of tensors as boxes. Raises MismatchError if the version does not have them."""
    found = {}
    for name, (begin, end) in wanted.items():
        entry = whole.tensors.get(name)
        if entry is None:
            raise MismatchError(f"{path} holds no {name}")
        rows = entry.shape[0] if entry.shape else 1
        if not 0 <= begin <= end <= rows:
            raise MismatchError(f"{path} holds {rows} rows of {name}, not {begin} to {end}")
        others = entry.shape[1:]
        found[name] = Box(
            entry.shape, *(((begin, *(0 for _ in others)), (end - begin, *others)) if entry.shape else ((), ()))
        )
    return found


def _with_files(whole: Manifest, tensors: dict[str, TensorEntry]) -> Manifest:
    needed = {EXTRA, *(piece.file for entry in tensors.values() for piece in entry.pieces)}
    return dataclasses.replace(
        whole, tensors=tensors, files={name: entry for name, entry in whole.files.items() if name in needed}
    )


def _source(file: str) -> tuple[int, int]:
    """The shard that wrote a file, and how many there were."""
    found = _FILE.fullmatch(file)
    if not found or not int(found[1]) < int(found[2]):
        raise CorruptCheckpointError(f"{file} is no shard's")
    return int(found[1]), int(found[2])


# ------------------------------------------------------------------------------------------------------------ reading


def _read_whole(checkpoint: Checkpoint, name: str, kind: Kind) -> Array:
    entry = checkpoint.tensors[name]
    if kind == "numpy":
        numpy_type(entry.dtype, name)
    data = bytearray(checkpoint.size_bytes(name))
    checkpoint.read_into(name, memoryview(data))
    return from_bytes(data, entry.dtype, entry.shape, kind, name)


def _read_table(checkpoint: Checkpoint, info: TableInfo, rank: int, world_size: int, kind: Kind) -> Table:
    """A shard's rows of a table by ascending id: reads the ids of all pieces, then the rows."""
    if kind == "numpy":
        numpy_type(info.dtype, f"table {info.name!r}")
    width = info.dimension * STORED_TYPES[info.dtype].element_bytes
    name = f"{TABLES}/{info.name}"
    pieces = checkpoint.tensors[f"{name}{IDS}"].pieces if f"{name}{IDS}" in checkpoint.tensors else ()
    positions, chosen = [], [np.empty(0, np.int64)]
    for piece in pieces:
        where, ids = _own_ids(checkpoint, piece, rank, world_size)
        positions.append(where)
        chosen.append(ids)
    ids = np.concatenate(chosen)
    del chosen
    order = np.argsort(ids, kind="stable")
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    rows = np.empty((len(ids), width), np.uint8)
    done = 0
    if width and pieces:
        # _refuse_contradiction has checked that pieces of ids and of rows match.
        for piece, where in zip(checkpoint.tensors[f"{name}{ROWS}"].pieces, positions, strict=True):
            _read_rows(checkpoint, piece, where, width, rows, place[done : done + len(where)])
            done += len(where)
    shape = (len(ids), info.dimension)
    return Table(ids[order], from_bytes(rows.reshape(-1), info.dtype, shape, kind, info.name), info.initializer)


def _blocks(count: int, width: int) -> Iterator[tuple[int, int]]:
    """(first, number) of rows that are read at once."""
    at_once = max(1, BLOCK_BYTES // width)
    for first in range(0, count, at_once):
        yield first, min(at_once, count - first)


def _own_ids(checkpoint: Checkpoint, piece: Piece, rank: int, world_size: int) -> tuple[Ids, Ids]:
    """Where in a piece this shard's ids are, and the ids."""
    source, sources = _source(piece.file)
    where, chosen = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    buffer = np.empty(min(piece.lengths[0], BLOCK_BYTES // 8), np.int64)
    for first, count in _blocks(piece.lengths[0], 8):
        ids = buffer[:count]
        checkpoint.read_rows_into(piece, first, ids.data)
        if (ids % sources != source).any():
            raise CorruptCheckpointError(f"{checkpoint.path / piece.file} holds rows of other shards in {piece.key!r}")
        own = np.flatnonzero(ids % world_size == rank)
        where.append(own + first)
        chosen.append(ids[own])
    return np.concatenate(where), np.concatenate(chosen)


def _read_rows(
    checkpoint: Checkpoint, piece: Piece, where: Ids, width: int, rows: np.ndarray[Any, Any], place: Ids
) -> None:
    """Copy rows ``where`` of a piece to ``place`` of the result; blocks without any are not read."""
    buffer = np.empty((min(piece.lengths[0], max(1, BLOCK_BYTES // width)), width), np.uint8)
    for first, count in _blocks(piece.lengths[0], width):
        low, high = np.searchsorted(where, (first, first + count))
        if low == high:
            continue
        begin, end = int(where[low]), int(where[high - 1]) + 1
        part = buffer[: end - begin]
        checkpoint.read_rows_into(piece, begin, part.reshape(-1).data)
        rows[place[low:high]] = part[where[low:high] - begin]


def _read_boxes(checkpoint: Checkpoint, boxes: Mapping[str, Box], kind: Kind) -> dict[str, Array]:
    """Boxes of tensors by name, each block read once."""
    data: dict[str, np.ndarray[Any, Any]] = {}
    for name, box in boxes.items():
        dtype = checkpoint.tensors[name].dtype
        if kind == "numpy":
            numpy_type(dtype, name)
        data[name] = np.empty(box.volume * STORED_TYPES[dtype].element_bytes, np.uint8)
    checkpoint.read_boxes_into([(name, box, data[name].data) for name, box in boxes.items()])
    return {
        name: from_bytes(data[name], checkpoint.tensors[name].dtype, box.lengths, kind, name)
        for name, box in boxes.items()
    }
