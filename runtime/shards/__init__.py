"""Several processes that each own a part of a model save a version together, and any number of processes restore it.

The processes share nothing but a directory. docs/how-to/shards.md shows examples and the rules.
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
