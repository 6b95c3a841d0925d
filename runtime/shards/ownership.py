"""Which shard owns what, by ElasticDL's rule for parameter servers: pure data and arithmetic, free of torch.

Of N shards, a dense variable belongs to the one that a hash of its name says, and row ``id`` of a table to shard ``id %
N``. So every process knows alone, for any N, what it owns.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np
import xxhash
from pydantic import Field

from checkflow.core.errors import UnsupportedError
from checkflow.core.graph import STRICT

Array = Any  # a numpy array or torch tensor of a type that safetensors has
Ids = np.ndarray[tuple[int], np.dtype[np.int64]]
Length = Annotated[int, Field(ge=0, le=2**62)]


def shard_of_name(name: str, shards: int) -> int:
    """The shard that owns a dense variable: xxh3-64 of its name's UTF-8 bytes, modulo the number of shards.

    Raises:
        UnsupportedError: the name is not valid Unicode.
    """
    try:
        return int(xxhash.xxh3_64_intdigest(name.encode()) % shards)
    except UnicodeEncodeError:
        raise UnsupportedError(f"the name {name!r} is no valid Unicode") from None


def shard_of_row(row_id: int, shards: int) -> int:
    """The shard that owns a row of an embedding table, from 0 to ``shards`` - 1, for a negative id too."""
    return row_id % shards


def owned_names(names: Iterable[str], rank: int, world_size: int) -> list[str]:
    """The dense variables that belong to a shard, in the order given."""
    check_rank(rank, world_size)
    return [name for name in names if shard_of_name(name, world_size) == rank]


def check_rank(rank: int, world_size: int) -> None:
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} of {world_size} does not exist")


def may_hold(source: int, sources: int, rank: int, world_size: int) -> bool:
    """Whether an id of shard ``source`` of ``sources`` can be shard ``rank``'s of ``world_size``: both agree modulo the
    gcd.
    """
    return (source - rank) % int(np.gcd(sources, world_size)) == 0


@dataclass(frozen=True, slots=True)
class TableInfo:
    """What all shards say alike of an embedding table.

    Args:
        dimension: numbers in a row.
        dtype: by torch's name ("float32").
        initializer: what fills a row that is first touched: any text, which is kept and returned as it is.
    """

    __pydantic_config__ = STRICT
    name: str
    dimension: Length
    dtype: str
    initializer: str


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """The part of an embedding table that one shard holds: the rows that training has touched.

    Args:
        ids: integers of one dimension, each once, in any order.
        rows: row ``i`` is that of ``ids[i]``. A shard without rows gives dimension and dtype by an array of shape (0,
            dimension).
        initializer: see :class:`TableInfo`.
    """

    ids: Array
    rows: Array
    initializer: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Slice:
    """The box of a tensor that one shard holds, as FSDP and ZeRO cut them: of rows, or of the flat tensor.

    Args:
        values: the box; it may be empty.
        shape: of the whole tensor, such as (10, 64), or (640,) for a flat one.
        offsets: the box's first index in each dimension; None: 0 in all.
    """

    values: Array
    shape: tuple[int, ...]
    offsets: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Shard:
    """What one of ``world_size`` shards owns of a version.

    Attributes:
        tables: every table of the version, even without a row for this shard; ids ascend.
        state: what rank 0 saved beside the arrays.
    """

    step: int
    rank: int
    world_size: int
    dense: Mapping[str, Array]
    tables: Mapping[str, Table]
    state: Any = None


@dataclass(frozen=True, slots=True)
class Version:
    """What a version holds, by its manifest.

    Attributes:
        shards: how many wrote it.
        dense, slices: dtype and shape of the whole, by name.
        rows: rows of each table in all shards together.
    """

    step: int
    run_id: str
    shards: int
    dense: Mapping[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    slices: Mapping[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    tables: Mapping[str, TableInfo] = field(default_factory=dict)
    rows: Mapping[str, int] = field(default_factory=dict)


def checked_ids(name: str, table: Table, rank: int, world_size: int) -> Ids:
    """The ids of a shard's part of a table, as int64; UnsupportedError if they are invalid, or another shard's."""
    given = np.asarray(table.ids)
    if not given.size:
        given = given.astype(np.int64)  # an empty list becomes floats
    if given.ndim != 1 or given.dtype.kind not in "iu":
        raise UnsupportedError(
            f"table {name!r}: ids are integers of one dimension, not {given.dtype}{list(given.shape)}"
        )
    if given.dtype == np.uint64 and given.size and int(given.max()) >= 2**63:
        raise UnsupportedError(f"table {name!r}: the id {int(given.max())} does not fit into 64 bits with a sign")
    if len(table.rows.shape) != 2 or table.rows.shape[0] != given.size:
        raise UnsupportedError(
            f"table {name!r}: {given.size} ids need rows of shape [{given.size}, dimension], not "
            f"{list(table.rows.shape)}"
        )
    ids = given.astype(np.int64, copy=False)
    foreign = ids % world_size != rank
    if foreign.any():
        first = int(ids[foreign.argmax()])
        raise UnsupportedError(
            f"table {name!r}: row {first} is not for shard {rank} of {world_size} to save, but for {first % world_size}"
        )
    if not (ids[1:] > ids[:-1]).all():
        ordered = np.sort(ids)
        twice = ordered[1:] == ordered[:-1]
        if twice.any():
            raise UnsupportedError(f"table {name!r}: row {int(ordered[1:][twice.argmax()])} is there twice")
    return ids
