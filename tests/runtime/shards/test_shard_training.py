"""A real job of three processes that own parts of DLRM's tables is killed, and goes on as two, and then as five."""

from __future__ import annotations

import multiprocessing
import os
import signal
from pathlib import Path

import numpy as np
import pytest

from checkflow import shards
from checkflow.runtime.store.discovery import find
from tests.support.programs.shard_worker import INITIALIZER, WIDTH, fresh_row, work
from tests.support.waiting import wait_for

pytestmark = pytest.mark.timeout(3600)  # eleven processes import torch, one after the other where there is one core
TABLES = 26
Rows = dict[tuple[int, int], bytes]


def run(world_size: int, directory: Path, first: int, last: int, *, dies: bool) -> None:
    """The processes to their end, or until all are where none can get further: then SIGKILL for each."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["torch", "torch._dynamo", "checkflow.runtime.shards"]
    )  # once for all; no computing before the fork
    notes = directory.parent
    processes = [
        context.Process(target=work, args=(rank, world_size, directory, notes, first, last, dies))
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    try:
        if dies:
            records = [f".receipt-{rank:05d}" for rank in range(1, world_size - 1)]

            def held_up() -> bool:
                assert all(process.is_alive() for process in processes)
                there = all((notes / f"from-{first}-by-{world_size}-{rank}").exists() for rank in range(world_size))
                found = {path.name for path in directory.glob(f".tmp-{last + 1:08d}-*/*")}
                return there and bool(found) and found.issuperset(records)

            wait_for(held_up)
            for process in processes:
                assert process.pid is not None
                os.kill(process.pid, signal.SIGKILL)
        for process in processes:
            process.join()
        assert [process.exitcode for process in processes] == [-signal.SIGKILL if dies else 0] * world_size
    finally:
        for process in processes:
            process.kill()
            process.join()


def everything(directory: Path, world_size: int, step: int) -> tuple[Rows, dict[str, bytes]]:
    """All rows by (table, id), and all variables, of all shards."""
    rows: Rows = {}
    dense: dict[str, bytes] = {}
    for rank in range(world_size):
        shard = shards.load_shard(directory, rank, world_size, step)
        assert shard.state == {"step": step}
        assert len(shard.tables) == TABLES
        for number in range(TABLES):
            table = shard.tables[f"table{number}"]
            assert (table.initializer, table.rows.shape[1]) == (INITIALIZER, WIDTH)
            assert (table.ids % world_size == rank).all()
            rows |= {(number, i): row.tobytes() for i, row in zip(table.ids.tolist(), table.rows, strict=True)}
        dense |= {name: array.tobytes() for name, array in shard.dense.items()}
    return rows, dense


@pytest.mark.slow
def test_three_processes_then_two_then_five(tmp_path: Path) -> None:
    directory, whole = tmp_path / "job" / "versions", tmp_path / "whole" / "versions"
    (tmp_path / "job").mkdir()
    (tmp_path / "whole").mkdir()
    run(3, directory, 0, 1, dies=True)
    assert [path.name for path in find(directory)] == ["step-00000001"]  # step 2 was never complete
    run(2, directory, 2, 3, dies=True)
    assert shards.newest_step(directory) == 3
    run(5, directory, 4, 5, dies=False)
    run(1, whole, 0, 5, dies=False)
    for step, world_sizes in ((3, (2, 5)), (5, (5, 1))):
        states = [everything(directory, world_size, step) for world_size in world_sizes]
        assert states[0] == states[1]
    assert states[0] == everything(whole, 1, 5)
    rows, dense = states[0]
    counts = [len({i for table, i in rows if table == number}) for number in range(TABLES)]
    assert all(0 < count <= 36 for count in counts)  # of 40: none but those that six batches of six touched
    assert sum(fresh_row(*key).tobytes() != row for key, row in rows.items()) == len(rows)  # and all were trained
    assert len(dense) == 14
    assert np.isfinite(np.frombuffer(b"".join(dense.values()), np.float32)).all()
