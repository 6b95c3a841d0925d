"""Ranks that make another number of steps are told which rank ended, and at which iteration."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import checkflow
from tests.support.ranks.processes import run_ranks
from tests.support.waiting import wait_for

pytestmark = pytest.mark.timeout(600)
ENDED = "training of rank 1 has ended after iteration 3, and rank 0 went on: all ranks must make the same number of"


def uneven(rank: int, world_size: int, folder: Path) -> list[str]:
    """Rank 1 has 3 batches. First rank 0 comes to its end, after 6; then it hangs in its 4th iteration, as in a
    collective, until the line is there.
    """
    lines: list[str] = []
    told, handler = folder / "told", logging.Handler()

    def emit(record: logging.LogRecord) -> None:
        lines.append(record.getMessage())
        if rank == 0 and ENDED in lines[-1]:
            told.touch()

    handler.emit = emit  # type: ignore[method-assign]
    logging.getLogger("checkflow").addHandler(handler)
    found = []
    for hangs in (False, True):
        lines.clear()
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = checkflow.resumable(lambda: iter([torch.ones(2, 4)] * (3 if rank else 6)))
        try:
            with checkflow.Checkpointer(model, optimizer, loader, directory=folder / f"{hangs}", every=1) as job:
                for _ in job.epochs(1):
                    for batch in job.loader:
                        optimizer.zero_grad()
                        model(batch).square().mean().backward()
                        if hangs and job.iteration == 3:
                            wait_for(told.exists)
                        optimizer.step()
        except checkflow.CheckflowError as error:
            lines.append(str(error))
        found.append("\n".join(lines))
        dist.barrier()
        told.unlink(missing_ok=True)
        dist.barrier()
    return found


def test_ranks_that_make_other_numbers_of_steps_are_told_so(tmp_path: Path) -> None:
    (tmp_path / "processes").mkdir()
    ranks = run_ranks(tmp_path / "processes", 2, uneven, tmp_path)
    for ends, hangs in ranks:
        assert ends.count(f"{ENDED} steps; no later one is saved") == 1
        assert hangs.count(f"{ENDED} steps; no later one is saved") == 1
    assert (
        "checkpoint of step 3 failed, training goes on: rank 1 is at another iteration, epoch or place" in ranks[0][0]
    )
    assert f"step 6 was not saved: {ENDED}" in ranks[0][0]
