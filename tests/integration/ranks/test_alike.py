"""Ranks that differ where they must be alike do not start, and are told in what; others may differ, and start."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import checkflow
from checkflow.core.errors import CheckflowError
from tests.support.ranks.processes import run_ranks

pytestmark = pytest.mark.timeout(600)


def layers(*names: str, width: int = 4) -> nn.Module:
    model = nn.Module()
    for name in names:
        model.add_module(name, nn.Linear(width, width))
    return model


def sharded(model: nn.Module) -> nn.Module:
    return fully_shard(model)


def data(size: int) -> Any:
    return torch.utils.data.TensorDataset(torch.zeros(size, 4))


def job(rank: int, **other: Any) -> dict[str, Any]:
    """A job that starts, but for ``other``."""
    model = other.pop("model", None) or DistributedDataParallel(layers("a", "b"))
    parameters = other.pop("parameters", list(model.parameters()))
    optimizer = torch.optim.SGD(parameters, lr=other.pop("lr", 0.1))
    return {"model": model, "optimizer": optimizer, "loader": None, "every": 1, **other}


def renamed(made: dict[str, Any], name: str) -> dict[str, Any]:
    return made | {"optimizer": {name: made["optimizer"]}}


# By what is said of it, a job whose rank 1 is another. Of stages neither the names nor what follows from them count.
DIFFER: dict[str, Callable[[int], dict[str, Any]]] = {
    "other names of model's tensors on ranks 0 and 1 on rank 1 than on rank 0": lambda rank: job(
        rank, model=sharded(layers(f"layer{rank}", "out"))
    ),
    "other order of model's tensors on ranks 0 and 1 on rank 1 than on rank 0": lambda rank: job(
        rank, model=sharded(layers(*("ab", "ba")[rank]))
    ),
    "other shapes of model's tensors on ranks 0 and 1 on rank 1": lambda rank: job(
        rank, model=sharded(layers("a", width=4 + 2 * rank))
    ),
    "other dtypes of model's tensors on ranks 0 and 1 on rank 1": lambda rank: job(
        rank, model=sharded(layers("a").to((torch.float32, torch.bfloat16)[rank]))
    ),
    "other order of model's tensors on rank 1 than on rank 0; make": lambda rank: job(
        rank, model=layers(*("ab", "ba")[rank])
    ),
    "lr of optimizer is 0.1 on rank 0, 0.2 on rank 1": lambda rank: job(rank, lr=0.1 * (1 + rank)),
    "the loader's number of samples is 16 on rank 0, 15 on rank 1": lambda rank: job(
        rank, loader=checkflow.DataLoader(data(16 - rank), batch_size=2, seed=1)
    ),
    "the loader's batch_size is 2 on rank 0, 3 on rank 1; the loader's seed is 5 on rank 0, 6 on rank 1": lambda rank: (
        job(rank, loader=checkflow.DataLoader(data(16), batch_size=2 + rank, shuffle=True, seed=5 + rank))
    ),
    "the argument every is 1 on rank 0, 3 on rank 1": lambda rank: job(rank, every=1 + 2 * rank),
    "the optimizers is [('optimizer', 'SGD')] on rank 0": lambda rank: renamed(job(rank), ("optimizer", "other")[rank]),
}


def deal(rank: int) -> Any:
    return checkflow.resumable(lambda: iter(range(5 + rank)))


MAY_DIFFER: dict[str, Callable[[int], dict[str, Any]]] = {
    "stages": lambda rank: job(rank, model=layers(f"layer{rank}"), lr=0.1 * (1 + rank)),
    "ranks that train alone": lambda rank: job(rank, model=layers("a", width=4 + rank), lr=0.1 * (1 + rank)),
    "loaders that deal": lambda rank: job(rank, loader=deal(rank)),
    "dealt before": lambda rank: job(
        rank, loader=checkflow.DataLoader(data(16 - rank), batch_size=2, shuffle=True, seed=rank, rank=0, world_size=1)
    ),
    "a loader on one rank": lambda rank: job(rank, loader=None if rank else checkflow.DataLoader(data(4))),
    "a report on one rank": lambda rank: job(rank, on_report=None if rank else print),
    "parameters by rank": lambda rank: job(rank, parameters=list(layers("a").parameters())[rank:]),
}


def start_all(rank: int, world_size: int, folder: Path) -> dict[str, str]:
    """How each job starts; "" for those that do."""
    found = {}
    for number, (what, make) in enumerate((DIFFER | MAY_DIFFER).items()):
        torch.manual_seed(rank)
        try:
            checkflow.Checkpointer(**make(rank), directory=folder / str(number), accept=("loader", "ranks")).close()
            found[what] = ""
        except CheckflowError as error:
            found[what] = f"{type(error).__name__}: {error}"
        torch.distributed.barrier()
    return found


def test_ranks_that_differ_do_not_start_and_are_told_in_what(tmp_path: Path) -> None:
    processes = tmp_path / "processes"
    processes.mkdir()
    for found in run_ranks(processes, 2, start_all, tmp_path):
        for what in DIFFER:
            assert found[what].startswith("MismatchError: no rank starts: the ranks differ: "), found[what]
            assert what in found[what]
        assert {what: found[what] for what in MAY_DIFFER} == dict.fromkeys(MAY_DIFFER, "")
    assert not list(tmp_path.glob("*/step-*"))
