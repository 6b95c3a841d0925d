"""Several processes that each own a part of a model: save a version together, restore it onto any number of them.

On each of N processes, which share nothing but a directory::

    from checkflow import shards

    mine = shards.owned_names(variables, rank, N)              # by a hash of the name
    shards.save_shard("checkpoints", step, rank, N, run_id=run_id,
                      dense={name: variables[name] for name in mine},
                      tables={"users": shards.Table(ids, rows, initializer="normal(0, 0.01)")})   # ids % N == rank

and later on each of M::

    part = shards.load_shard("checkpoints", rank, M, step)     # dense, tables, state: what is this process's of M
    users = dict(zip(part.tables["users"].ids.tolist(), part.tables["users"].rows))

Slices of tensors, as FSDP and ZeRO have them: ``slices={name: Slice(values, shape, offsets)}`` and ``load_slices``.
docs/how-to/shards.md has the rules.
"""

from __future__ import annotations

from checkflow.runtime.shards.ownership import (
    Shard,
    Slice,
    Table,
    TableInfo,
    Version,
    owned_names,
    shard_of_name,
    shard_of_row,
)
from checkflow.runtime.shards.reader import describe_version, load_shard, load_slices, newest_step
from checkflow.runtime.shards.writer import save_shard

__all__ = [
    "Shard",
    "Slice",
    "Table",
    "TableInfo",
    "Version",
    "describe_version",
    "load_shard",
    "load_slices",
    "newest_step",
    "owned_names",
    "save_shard",
    "shard_of_name",
    "shard_of_row",
]
