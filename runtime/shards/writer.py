"""Saves one version from several processes, each its own part; see :mod:`checkflow.runtime.shards.rendezvous`."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from checkflow.core.boxes import Box, lies_in, part_name
from checkflow.core.errors import CheckflowError, MismatchError, StorageError, UnsupportedError
from checkflow.core.graph import STRICT, Many
from checkflow.core.paths import refuse_url
from checkflow.runtime.format import codec, manifest
from checkflow.runtime.format.layout import OWNER, FileLayout, make_layout
from checkflow.runtime.ranks.records import Attempt, Receipt, dumps, loads
from checkflow.runtime.shards.arrays import describe, to_bytes
from checkflow.runtime.shards.ownership import Array, Slice, Table, TableInfo, check_rank, checked_ids, shard_of_name
from checkflow.runtime.shards.rendezvous import clear_notes, collect, follow, post
from checkflow.runtime.store.files import step_name
from checkflow.runtime.store.parts import Gathered, Part, Source, Written, commit_ranks, write_part
from checkflow.runtime.store.store import Store, reported
from checkflow.runtime.system import fs

DENSE, TABLES, SLICES = "dense", "tables", "slices"  # owners: a file each for every rank that has some
IDS, ROWS = ".ids", ".rows"
INFO = "shards"  # key of the tables in the manifest's info
_LOCK_WAIT_SECONDS = 5.0
_MAX_RUN_ID = 80  # the attempt's number, of at most 19 digits, joins it in a file name


@dataclass(frozen=True, slots=True)
class Share:
    """What a rank's receipt says: what it has written, and its tables."""

    __pydantic_config__ = STRICT
    written: Written
    tables: Many[TableInfo] = ()


_SHARE: TypeAdapter[Share] = TypeAdapter(Share)


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
    refuse_url(directory)
    place = Path(directory).absolute()

    def write(folder: int) -> Share:
        return _write_part(folder, rank, world_size, *given)

    blank = Receipt(rank, world_size, run_id, 0, step)
    if rank:
        with reported(f"rank {rank} cannot write its part of step {step} to {place}"):
            follow(place, blank, wait_seconds, lambda folder: dumps(_SHARE, write(folder)).decode())
        return place.resolve() / step_name(step)
    return _lead(place, blank, state, wait_seconds, keep_latest, write)


def _lead(
    place: Path, blank: Receipt, state: Any, wait_seconds: float, keep_latest: int, write: Callable[[int], Share]
) -> Path:
    """Rank 0: open the attempt, write its own part, wait for the others, and complete the version."""
    run_id, world_size, step = blank.generation, blank.world_size, blank.step
    attempt = Attempt(secrets.randbits(63), step)

    def gather(root: int, folder: int) -> Gathered:
        post(root, run_id, world_size, attempt)
        own, extra = Share(Written(0)), b""
        receipts: tuple[Receipt, ...] = ()
        failed: Exception | None = None
        try:
            extra = codec.encode({"state": state}, marks=None)
            own = write(folder)
        except (CheckflowError, OSError) as error:
            failed = error
        # Call a failed attempt off only when all others have seen it, or they would wait for it.
        try:
            receipts = collect(folder, replace(blank, attempt=attempt.number), wait_seconds)
        except (CheckflowError, OSError) as error:
            failed = failed or error
        if failed is not None:
            raise failed
        clear_notes(folder)
        shares = [own]
        for one in receipts[1:]:
            shares.append(loads(_SHARE, one.written.encode(), f"the receipt of rank {one.rank}"))
            if shares[-1].written.rank != one.rank:
                raise StorageError(
                    f"the receipt of rank {one.rank} is damaged: it has rank {shares[-1].written.rank}'s part"
                )
        info: dict[str, Any] = {
            "created": round(time.time(), 3),
            INFO: {name: [one.dimension, one.dtype, one.initializer] for name, one in _join_tables(shares).items()},
        }
        return Gathered(_stack_rows([share.written for share in shares]), extra, info)

    patience = min(_LOCK_WAIT_SECONDS, wait_seconds)
    with Store(place, run_id=run_id, keep_latest=keep_latest, lock_wait_seconds=patience) as store:
        try:
            path = commit_ranks(store, step, str(attempt.number), gather, info={})
        except BaseException as error:
            with contextlib.suppress(StorageError):  # the first error is reported
                _post_end(place, blank, attempt.concluded(error))
            raise
        _post_end(place, blank, attempt.concluded())
    return path


def _post_end(place: Path, blank: Receipt, ended: Attempt) -> None:
    with reported(f"cannot tell the other ranks how step {ended.step} ended"), fs.folder(str(place.resolve())) as root:
        post(root, blank.generation, blank.world_size, ended)


# -------------------------------------------------------------------------------------------------------- one's part


def _write_part(
    folder: int,
    rank: int,
    world_size: int,
    dense: Mapping[str, Array],
    tables: Mapping[str, Table],
    slices: Mapping[str, Slice],
) -> Share:
    """Write a rank's files, durably; their names become durable with its receipt or rank 0's manifest."""
    arrays: dict[str, Array] = {}
    sources: dict[str, Source] = {}
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
        offsets = tuple(int(first) for first in box.offsets or (0,) * len(shape))
        lengths = describe(f"{SLICES}/{name}", box.values).shape
        if not lies_in(shape, offsets, lengths):
            raise UnsupportedError(
                f"{SLICES}/{name}: a box of shape {list(lengths)} at {list(offsets)} does not lie in {list(shape)}"
            )
        part = Box(shape, offsets, lengths)
        key = part_name(f"{SLICES}/{name}", part)
        arrays[key] = box.values
        sources[key] = Source(f"{SLICES}/{name}", part)
    layout = make_layout([describe(name, array) for name, array in arrays.items()], shard=rank, shards=world_size)
    written = write_part(folder, rank, world_size, layout, lambda file: _image(file, arrays), sources)
    return Share(written, tuple(infos))


def _image(file: FileLayout, arrays: Mapping[str, Array]) -> Iterator[memoryview]:
    """A safetensors file's bytes, straight from the arrays."""
    yield memoryview(file.header)
    for placed in file.tensors:
        yield from to_bytes(arrays[placed.record.name])


# ---------------------------------------------------------------------------------------------------------- the whole


def _join_tables(shares: Sequence[Share]) -> dict[str, TableInfo]:
    found: dict[str, tuple[int, TableInfo]] = {}
    for rank, share in enumerate(shares):
        for info in share.tables:
            first, other = found.setdefault(info.name, (rank, info))
            if info != other:
                mine, theirs = (f"{i.dtype}[{i.dimension}] by {i.initializer!r}" for i in (info, other))
                raise MismatchError(f"table {info.name!r} is {theirs} on rank {first}, and {mine} on rank {rank}")
    return {name: info for name, (_, info) in sorted(found.items())}


def _stack_rows(written: Sequence[Written]) -> list[Written]:
    """What ranks have written, with the rows of tables one below the other in the order of ranks."""
    rows: dict[str, int] = {}
    for part in (part for one in written for part in one.parts if part.tensor.startswith(f"{TABLES}/")):
        rows[part.tensor] = rows.get(part.tensor, 0) + part.lengths[0]
    done = dict.fromkeys(rows, 0)

    def placed(part: Part) -> Part:
        if part.tensor not in rows:
            return part
        first, done[part.tensor] = done[part.tensor], done[part.tensor] + part.lengths[0]
        others = part.lengths[1:]
        return replace(part, shape=(rows[part.tensor], *others), offsets=(first, *(0 for _ in others)))

    return [replace(one, parts=tuple(map(placed, one.parts))) for one in written]
