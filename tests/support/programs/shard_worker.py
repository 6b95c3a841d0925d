"""One of several processes that train models/dlrm.py, each the owner of a part of its tables: test_shard_training.py.

A process has the rows ``id % N == rank`` that training has touched, and nothing else of the tables: those that a batch
needs are brought together, all processes compute the same step, and each takes back its own. So the rows after a step
do not depend on how many processes there are.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from checkflow import shards

INITIALIZER = "uniform(-0.1, 0.1) by table and id"
ROWS, WIDTH, BATCH_SIZE = 40, 4, 6


def fresh_row(table: int, row_id: int) -> np.ndarray[Any, Any]:
    """What the initializer gives, wherever a row is first touched."""
    return np.random.default_rng([table, row_id]).uniform(-0.1, 0.1, WIDTH).astype(np.float32)


class Worker:
    def __init__(self, rank: int, world_size: int, rendezvous: Path) -> None:
        from checkflow.models import dlrm

        self.rank, self.world_size = rank, world_size
        torch.set_num_threads(1)
        if world_size > 1:
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"
            torch.distributed.init_process_group(
                "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size
            )
        torch.manual_seed(1)
        self.job = dlrm.build(batch_size=BATCH_SIZE, width=WIDTH, rows=ROWS)
        self.model: Any = self.job.models["model"]
        self.weights = [table.weight for table in self.model.embeddings.tables]
        self.networks = {
            name: value for name, value in self.model.state_dict().items() if not name.startswith("embeddings.")
        }
        self.own: list[dict[int, np.ndarray[Any, Any]]] = [{} for _ in self.weights]

    def batch(self, step: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        source = torch.Generator().manual_seed(step)
        indices = [torch.randint(len(w), (BATCH_SIZE, 1), generator=source) for w in self.weights]
        dense = torch.rand(BATCH_SIZE, 13, generator=source)
        return dense, torch.stack(indices), torch.randint(2, (BATCH_SIZE,), generator=source).float()

    def train(self, step: int) -> None:
        batch = self.batch(step)
        touched = [torch.unique(indices).tolist() for indices in batch[1]]
        for number, (weight, ids) in enumerate(zip(self.weights, touched, strict=True)):
            rows = torch.zeros(len(ids), WIDTH)
            for place, row_id in enumerate(ids):
                if shards.shard_of_row(row_id, self.world_size) == self.rank:
                    own = self.own[number]
                    rows[place] = torch.from_numpy(own.setdefault(row_id, fresh_row(number, row_id)))
            if self.world_size > 1:
                torch.distributed.all_reduce(rows)  # all but the owner add zero
            with torch.no_grad():
                weight.fill_(float("nan"))  # nothing but what was brought together is there to be used
                weight[ids] = rows
        self.job.run(batch)
        for own, weight, ids in zip(self.own, self.weights, touched, strict=True):
            for row_id in ids:
                if row_id in own:
                    own[row_id] = weight.detach()[row_id].numpy().copy()

    def save(self, directory: Path, step: int, run_id: str) -> None:
        mine = shards.owned_names(self.networks, self.rank, self.world_size)
        tables = {
            f"table{number}": shards.Table(
                list(own), np.array(list(own.values()), np.float32).reshape(-1, WIDTH), INITIALIZER
            )
            for number, own in enumerate(self.own)
        }
        shards.save_shard(
            directory, step, self.rank, self.world_size, run_id=run_id,
            dense={name: self.networks[name] for name in mine}, tables=tables,
            state={"step": step} if self.rank == 0 else None,
        )  # fmt: skip

    def load(self, directory: Path, step: int) -> None:
        shard = shards.load_shard(directory, self.rank, self.world_size, step)
        for number in range(len(self.weights)):
            table = shard.tables[f"table{number}"]
            assert table.initializer == INITIALIZER
            self.own[number] = dict(zip(table.ids.tolist(), table.rows, strict=True))
        assert set(shard.dense) == set(shards.owned_names(self.networks, self.rank, self.world_size))
        with torch.no_grad():
            for name, value in sorted(self.networks.items()):
                value.copy_(torch.from_numpy(shard.dense[name])) if name in shard.dense else value.fill_(float("nan"))
                if self.world_size > 1:
                    torch.distributed.broadcast(value, shards.shard_of_name(name, self.world_size))


def work(rank: int, world_size: int, directory: Path, notes: Path, first: int, last: int, dies: bool) -> None:
    """Train steps ``first`` to ``last``, from the version of ``first`` - 1, and save; ``dies``: or wait to be killed.

    Then every rank but the last one is in the middle of saving when it is killed, and the last one never begins.
    """
    run_id = f"from-{first}-by-{world_size}"
    worker = Worker(rank, world_size, notes / run_id)
    if first:
        worker.load(directory, first - 1)
    for step in range(first, last + 1):
        worker.train(step)
    worker.save(directory, last, run_id)
    if dies:
        worker.train(last + 1)
        (notes / f"{run_id}-{rank}").touch()
        if rank == world_size - 1:
            time.sleep(3600)
        worker.save(directory, last + 1, run_id)
