"""What the tests of shards share: a job's tables and variables, and several ranks of it at once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from checkflow import shards

Outcome = Any


def together(world_size: int, save: Callable[[int], Outcome]) -> list[Outcome]:
    """What each rank's call gives, or raises, all at the same time."""
    outcomes: list[Outcome] = [None] * world_size

    def run(rank: int) -> None:
        try:
            outcomes[rank] = save(rank)
        except BaseException as error:  # noqa: BLE001
            outcomes[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), name=f"rank {rank}") for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


class World:
    """All that a job holds: two tables, one of them filled in part, and dense variables."""

    def __init__(self, seed: int = 0, rows: int = 40) -> None:
        source = np.random.default_rng(seed)
        ids = source.choice(1000, rows, replace=False) - 300
        self.users = {int(i): source.random(3, np.float32) for i in ids}
        self.users |= {2**31 + 5: np.ones(3, np.float32), 2**62 + 1: np.zeros(3, np.float32)} if rows else {}
        self.items = {7: np.full(2, 0.5, np.float16)}
        self.dense = {f"layer{i}.weight": source.random((i, 4)) for i in range(9)} | {"steps": np.array(3)}

    def part(self, rank: int, world_size: int) -> dict[str, Any]:
        users = [i for i in self.users if i % world_size == rank]
        items = [i for i in self.items if i % world_size == rank]
        tables = {
            "users": shards.Table(
                np.array(users, np.int64), np.array([self.users[i] for i in users], np.float32).reshape(-1, 3), "normal"
            )
        }
        if items:  # only the shard that has touched it knows it
            tables["items"] = shards.Table(items, np.array([self.items[i] for i in items]), "zeros")
        return {
            "dense": {name: self.dense[name] for name in shards.owned_names(self.dense, rank, world_size)},
            "tables": tables,
            "state": {"seen": 12} if rank == 0 else None,
        }

    def save(self, directory: Path, step: int, world_size: int, run_id: str = "run", **options: Any) -> None:
        outcomes = together(
            world_size,
            lambda rank: shards.save_shard(
                directory, step, rank, world_size, run_id=run_id, **self.part(rank, world_size), **options
            ),
        )
        assert outcomes == [directory / f"step-{step:08d}"] * world_size, outcomes

    def check(self, directory: Path, world_size: int, step: int | None = None) -> None:
        """Every shard has exactly what is its own, and all have everything."""
        users: dict[int, bytes] = {}
        items: dict[int, bytes] = {}
        dense: dict[str, bytes] = {}
        for rank in range(world_size):
            shard = shards.load_shard(directory, rank, world_size, step)
            assert (shard.rank, shard.world_size, shard.state) == (rank, world_size, {"seen": 12})
            for found, table, initializer in ((users, "users", "normal"), (items, "items", "zeros")):
                part = shard.tables[table]
                assert part.initializer == initializer
                assert all(shards.shard_of_row(i, world_size) == rank for i in part.ids.tolist())
                assert (np.diff(part.ids) > 0).all()
                found |= {i: row.tobytes() for i, row in zip(part.ids.tolist(), part.rows, strict=True)}
            assert shard.tables["users"].rows.shape[1] == 3
            assert (shard.tables["items"].rows.dtype, shard.tables["items"].rows.shape[1]) == (np.float16, 2)
            assert set(shard.dense) == set(shards.owned_names(self.dense, rank, world_size))
            for name, array in shard.dense.items():
                assert (array.dtype, array.shape) == (self.dense[name].dtype, self.dense[name].shape)
                dense[name] = array.tobytes()
        assert users == {i: row.tobytes() for i, row in self.users.items()}
        assert items == {i: row.tobytes() for i, row in self.items.items()}
        assert dense == {name: array.tobytes() for name, array in self.dense.items()}
