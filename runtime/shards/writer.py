"""Saves one version from several processes, each its own part; see :mod:`checkflow.runtime.shards.rendezvous`."""

from __future__ import annotations

import math
import os
import secrets
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from checkflow.core.errors import CheckflowError, MismatchError, MissingShardsError, StorageError, UnsupportedError
from checkflow.runtime.format import codec, manifest
from checkflow.runtime.format.layout import OWNER, STORED_TYPES, FileLayout, TensorRecord, make_layout
from checkflow.runtime.shards.arrays import describe, to_bytes
from checkflow.runtime.shards.ownership import Array, Slice, Table, TableInfo, check_rank, checked_ids, shard_of_name
from checkflow.runtime.shards.rendezvous import (
    Attempt,
    Part,
    Record,
    clear_notes,
    collect,
    folder_name,
    follow,
    in_words,
    leave,
    post,
)
from checkflow.runtime.store.file_writer import write_file
from checkflow.runtime.store.files import step_name
from checkflow.runtime.store.store import Store, reported, sync_folder
from checkflow.runtime.system import fs

DENSE, TABLES, SLICES = "dense", "tables", "slices"  # owners: a file each for every rank that has some
IDS, ROWS = ".ids", ".rows"
INFO = "shards"  # key of the tables in the manifest's info
_LOCK_WAIT_SECONDS = 5.0
_MAX_RUN_ID = 80  # the attempt's number joins it in a file name


def save_shard(
    directory: str | os.PathLike[str],
    step: int,
    rank: int,
    world_size: int,
    *,
    run_id: str,
    dense: Mapping[str, Array] | None = None,
    tables: Mapping[str, Table] | None = None,
    slices: Mapping[str, Slice] | None = None,
    state: Any = None,
    wait_seconds: float = 600.0,
    keep_latest: int = 2,
) -> Path:
    """Save this process's part of a version. Each of ``world_size`` processes calls it, and all return together.

    When it returns, the version is complete and survives a power cut. Until then it does not exist. Arrays must not
    change meanwhile; they are written without a copy of the whole.

    Args:
        directory: the same for all, on storage that all see.
        step: the same for all.
        rank: 0 to ``world_size`` - 1. Rank 0 locks the directory and completes the version.
        run_id: the same for all, and another at each start of the job; 1 to 80 letters, digits, ``_``, ``.``, ``-``.
        dense: variables by name: those for which ``shard_of_name(name, world_size)`` is ``rank``.
        tables: parts of embedding tables by name: rows whose id modulo ``world_size`` is ``rank``.
        slices: this rank's boxes of tensors that ranks share; all ranks' together fill each tensor once.
        state: rank 0's numbers, texts, containers and arrays, as ``Checkpointer`` saves extra state.
        wait_seconds: how long to wait for other ranks.
        keep_latest: rank 0's: how many versions stay, at least 2.

    Raises:
        MissingShardsError: a rank did not come in time; ``ranks`` names it. There is no version.
        LockedError: rank 0: another process writes here.
        StorageError: it could not be written, here or by the rank that the message names.
        UnsupportedError: this rank's data cannot be stored, or is another shard's.
        MismatchError: ranks contradict each other: about their number, or about a tensor or table.
    """
    check_rank(rank, world_size)
    if not OWNER.fullmatch(run_id) or len(run_id) > _MAX_RUN_ID:
        raise ValueError(f"a run id is 1 to {_MAX_RUN_ID} letters, digits, '_', '.' and '-', not {run_id!r}")
    if not 0 <= step <= manifest.MAX_STEP:
        raise ValueError(f"a step is a number from 0 to {manifest.MAX_STEP}, not {step}")
    given = (dict(dense or {}), dict(tables or {}), dict(slices or {}))
    place = Path(directory).absolute()

    def write(root: int, attempt: Attempt) -> Record:
        folder = fs.open_folder(folder_name(attempt.step, run_id, attempt.number), dir_fd=root)
        try:
            record = _write_part(folder, attempt, rank, world_size, *given)
            if rank:
                leave(folder, record)
            return record
        finally:
            fs.close_quietly(folder)

    if rank:

        def join(root: int, attempt: Attempt) -> None:
            write(root, attempt)

        with reported(f"rank {rank} cannot write its part of step {step} to {place}"):
            follow(place, run_id, step, rank, world_size, wait_seconds, join)
        return place.resolve() / step_name(step)
    return _lead(place, step, world_size, run_id, state, wait_seconds, keep_latest, write)


def _lead(
    place: Path, step: int, world_size: int, run_id: str, state: Any, wait_seconds: float, keep_latest: int, write: Any
) -> Path:
    """Rank 0: open the attempt, write its own part, wait for the others, and complete the version."""
    attempt = Attempt(secrets.token_hex(8), step)
    patience = min(_LOCK_WAIT_SECONDS, wait_seconds)
    with Store(
        place, run_id=f"{run_id}.{attempt.number}", keep_latest=keep_latest, lock_wait_seconds=patience
    ) as store:

        def complete(root: int, temporary: str) -> None:
            fs.mkdir(temporary, dir_fd=root)  # (2)
            post(root, run_id, world_size, attempt)
            own, extra = Record(attempt.number, 0, world_size, {}, {}, ()), b""
            failed: Exception | None = None
            try:
                extra = codec.encode({"state": state})
                own = write(root, attempt)  # (3)
            except (CheckflowError, OSError) as error:
                failed = error
            folder = fs.open_folder(temporary, dir_fd=root)
            try:
                # Call a failed attempt off only when all others have seen it, or they would wait for it.
                try:
                    records = collect(folder, attempt.number, world_size, wait_seconds, own)
                except (CheckflowError, OSError) as error:
                    failed = failed or error
                if failed is not None:
                    raise failed
                clear_notes(folder)
                _write_manifest(folder, step, run_id, extra, records)  # (4)
                sync_folder(folder)  # (5)
            finally:
                fs.close_quietly(folder)

        try:
            path = store.commit_written(step, complete, info={})
        except BaseException as error:
            missing = error.ranks if isinstance(error, MissingShardsError) else ()
            ended = Attempt(attempt.number, step, "failed", in_words(error), missing)
            _post_end(place, run_id, world_size, ended, quietly=True)
            raise
        _post_end(place, run_id, world_size, Attempt(attempt.number, step, "committed"))
    return path


def _post_end(place: Path, run_id: str, world_size: int, ended: Attempt, *, quietly: bool = False) -> None:
    """Post how an attempt ended. ``quietly``: drop an error, since an earlier one is reported."""
    try:
        with reported(f"cannot tell the other ranks how step {ended.step} ended"):
            root = fs.open_folder(str(place.resolve()))
            try:
                post(root, run_id, world_size, ended)
            finally:
                fs.close_quietly(root)
    except StorageError:
        if not quietly:
            raise


# -------------------------------------------------------------------------------------------------------- one's part


def _write_part(
    folder: int,
    attempt: Attempt,
    rank: int,
    world_size: int,
    dense: Mapping[str, Array],
    tables: Mapping[str, Table],
    slices: Mapping[str, Slice],
) -> Record:
    """Write a rank's files, durably; their names become durable with its record or rank 0's manifest."""
    arrays: dict[str, Array] = {}
    boxes: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {}
    infos: list[TableInfo] = []
    for name, array in dense.items():
        if (owner := shard_of_name(name, world_size)) != rank:
            raise UnsupportedError(
                f"variable {name!r} is not for shard {rank} of {world_size} to save, but for {owner}"
            )
        arrays[f"{DENSE}/{name}"] = np.asarray(array) if isinstance(array, np.generic) else array
    for name, table in tables.items():
        described = describe(f"table {name!r}", table.rows)
        arrays[f"{TABLES}/{name}{IDS}"] = checked_ids(name, table, rank, world_size)
        arrays[f"{TABLES}/{name}{ROWS}"] = table.rows
        infos.append(TableInfo(name, described.shape[1], described.dtype, table.initializer))
    for name, box in slices.items():
        shape = tuple(int(length) for length in box.shape)
        arrays[f"{SLICES}/{name}"] = box.values
        boxes[f"{SLICES}/{name}"] = (shape, tuple(box.offsets or (0,) * len(shape)))
    layout = make_layout([describe(name, array) for name, array in arrays.items()], shard=rank, shards=world_size)
    for name, (shape, offsets) in boxes.items():
        _refuse_outside(name, layout.tensors[name].record, shape, offsets)
    entries = {file.name: write_file(folder, file.name, _image(file, arrays)) for file in layout.files}
    tensors = {}
    for name, placed in layout.tensors.items():
        lengths = placed.record.shape
        shape, offsets = boxes.get(name, (lengths, (0,) * len(lengths)))
        tensors[name] = Part(placed.file, placed.key, placed.record.dtype, lengths, shape, offsets)
    return Record(attempt.number, rank, world_size, entries, tensors, tuple(infos))


def _refuse_outside(name: str, record: TensorRecord, shape: tuple[int, ...], offsets: tuple[int, ...]) -> None:
    fits = len(shape) == len(offsets) == len(record.shape) and all(
        o >= 0 and o + n <= size for o, n, size in zip(offsets, record.shape, shape, strict=True)
    )
    if not fits:
        raise UnsupportedError(
            f"{name}: a box of shape {list(record.shape)} at {list(offsets)} does not lie in {list(shape)}"
        )


def _image(file: FileLayout, arrays: Mapping[str, Array]) -> Iterator[memoryview]:
    """A safetensors file's bytes, straight from the arrays."""
    yield memoryview(file.header)
    for placed in file.tensors:
        yield from to_bytes(arrays[placed.record.name])


# ---------------------------------------------------------------------------------------------------------- the whole


def _write_manifest(folder: int, step: int, run_id: str, extra: bytes, records: tuple[Record, ...]) -> None:
    entries: dict[str, manifest.FileEntry] = {}
    for record in records:
        for name, entry in record.files.items():
            _refuse_size(folder, name, entry)
        entries |= record.files
    entries[manifest.EXTRA] = write_file(folder, manifest.EXTRA, iter([memoryview(extra)]))
    tables = _join_tables(records)
    info: dict[str, Any] = {
        "created": round(time.time(), 3),
        INFO: {name: [one.dimension, one.dtype, one.initializer] for name, one in tables.items()},
    }
    whole = manifest.Manifest(step, run_id, "", len(records), entries, _join_tensors(records), info=info)
    for name, tensor in whole.tensors.items():
        if problem := manifest.tensor_problem(tensor, entries):
            raise MismatchError(f"what the ranks saved of {name} {problem}")
    write_file(folder, manifest.MANIFEST, iter([memoryview(manifest.dumps(whole))]))


def _refuse_size(folder: int, name: str, entry: manifest.FileEntry) -> None:
    """That the file of a record is here, as long as it says."""
    fd, size = fs.open_regular(name, dir_fd=folder)
    fs.close_quietly(fd)
    if size != entry.size_bytes:
        raise StorageError(
            f"{name} has {size} bytes, and {entry.size_bytes} by its record: do all ranks see one directory?"
        )


def _join_tables(records: tuple[Record, ...]) -> dict[str, TableInfo]:
    found: dict[str, tuple[int, TableInfo]] = {}
    for record in records:
        for info in record.tables:
            first, other = found.setdefault(info.name, (record.rank, info))
            if info != other:
                mine, theirs = (f"{i.dtype}[{i.dimension}] by {i.initializer!r}" for i in (info, other))
                raise MismatchError(
                    f"table {info.name!r} is {theirs} on rank {first}, and {mine} on rank {record.rank}"
                )
    return {name: info for name, (_, info) in sorted(found.items())}


def _join_tensors(records: tuple[Record, ...]) -> dict[str, manifest.TensorEntry]:
    """Tensors of all ranks' parts; rows of tables follow each other in the order of ranks."""
    found: dict[str, list[Part]] = {}
    for record in records:
        for name, part in record.tensors.items():
            parts = found.setdefault(name, [])
            if name.startswith(f"{TABLES}/"):
                parts.append(part)
                continue
            if name.startswith(f"{DENSE}/") and parts:
                raise MismatchError(f"{name} was saved by several ranks, by {record.rank} the last")
            if parts and (part.dtype, part.shape) != (parts[0].dtype, parts[0].shape):
                raise MismatchError(
                    f"{name} is {parts[0].dtype}{list(parts[0].shape)}, and on rank {record.rank} it is "
                    f"{part.dtype}{list(part.shape)}"
                )
            parts.append(part)
    return {name: _entry(name, parts) for name, parts in found.items()}


def _entry(name: str, parts: list[Part]) -> manifest.TensorEntry:
    shape, pieces, rows = parts[0].shape, [], 0
    for part in parts:
        offsets = part.offsets
        if name.startswith(f"{TABLES}/"):
            offsets = (rows, *(0 for _ in part.lengths[1:]))
            rows += part.lengths[0]
        pieces.append(manifest.Piece(part.file, part.key, offsets, part.lengths))
    if name.startswith(f"{TABLES}/"):
        shape = (rows, *parts[0].lengths[1:])
    if math.prod(shape):  # ignore empty boxes of a tensor that has elements
        pieces = [piece for piece in pieces if math.prod(piece.lengths)]
    tags = ("pair",) if STORED_TYPES[parts[0].dtype].pair else ()
    return manifest.TensorEntry(shape, parts[0].dtype, tuple(pieces), None, tags)
