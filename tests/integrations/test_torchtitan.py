"""torchtitan's own trainer, over two ranks with FSDP2: killed, asked to end, and refused."""

from __future__ import annotations

import os
import random
import signal
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from checkflow.core.errors import MismatchError, Preempted, UnsupportedError
from checkflow.integrations.torchtitan import CheckpointManager, _Place
from tests.support.jobs import KILLS
from tests.support.ranks.jobs import RankJob, rank_job

PROGRAM = Path(__file__).parents[1] / "support" / "programs" / "torchtitan_job.py"


def run(folder: Path, directory: Path, manager: str, steps: int, **options: Any) -> AbstractContextManager[RankJob]:
    return rank_job(folder, 2, directory, manager, steps, program=PROGRAM, accumulate=2, **options)


def used(jobs: list[RankJob], rank: int) -> list[int]:
    """Numbers of samples by step, as the last life that made a step used them."""
    steps: dict[int, list[int]] = {}
    for job in jobs:
        for line in job.said(rank, "stepped"):
            steps = {step: numbers for step, numbers in steps.items() if step < line["step"]}
            steps[line["step"]] = line["used"]
    return [number for _, numbers in sorted(steps.items()) for number in numbers]


@pytest.mark.slow
def test_a_killed_job_ends_as_if_it_had_never_been(tmp_path: Path) -> None:
    steps, draw, jobs = 24 * KILLS, random.Random(7), []  # a slow machine kills late
    with run(tmp_path / "whole", tmp_path / "none", "none", steps) as whole:
        whole.launcher.wait()
    for number in range(KILLS):
        with run(tmp_path / f"life-{number}", tmp_path / "all", "checkflow", steps, pause=0.05) as job:
            jobs.append(job)
            job.reach(8 * number + draw.randint(1, 8))
            if number % 2:
                job.kill_all()
            else:
                os.kill(job.pids()[draw.randrange(2)], signal.SIGKILL)
                job.launcher.wait()
    with run(tmp_path / "last", tmp_path / "all", "checkflow", steps) as last:
        jobs.append(last)
        last.launcher.wait()
    for rank in (0, 1):
        assert last.last(rank, "ended") == {**whole.last(rank, "ended"), "pid": last.last(rank, "ended")["pid"]}
        assert used(jobs, rank) == list(range(rank, 8 * steps, 2))


@pytest.mark.slow
def test_a_signal_ends_all_ranks_and_no_step_is_done_again(tmp_path: Path) -> None:
    with run(tmp_path / "first", tmp_path / "all", "checkflow", 400, pause=0.05, every=1000) as job:
        job.reach(3)
        os.kill(job.pids()[1], signal.SIGTERM)
        job.launcher.wait()
        assert f"exitcode  : {Preempted.EXIT_CODE}" in job.printed()
    ended = [job.said(rank, "stepped")[-1]["step"] for rank in (0, 1)]
    assert ended[0] == ended[1]
    with run(tmp_path / "again", tmp_path / "all", "checkflow", ended[0] + 2) as again:
        again.launcher.wait()
    assert [line["step"] for line in again.said(0, "stepped")] == [ended[0] + 1, ended[0] + 2]


def manager(parts: int = 1, **settings: Any) -> CheckpointManager:
    config = CheckpointManager.Config(enable=True, **settings)
    return CheckpointManager(
        config, dataloader=None, model_parts=[nn.Linear(1, 1)] * parts, optimizers=[], lr_schedulers=None, states={}
    )


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"initial_load_path": "/weights"}, "initial_load_path is not for checkflow: run checkflow import"),
        ({"last_save_in_hf": True}, "run checkflow export"),
        ({"load_only": True}, "turn checkpoint.enable off"),
        ({"parts": 2}, "2 parts of the model on one rank"),
    ],
)
def test_what_checkflow_has_not_is_refused(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(UnsupportedError, match=says):
        manager(**settings)


def test_saving_before_loading_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="load"):
        manager().save(1)


def test_nothing_is_done_where_checkpoints_are_off(tmp_path: Path) -> None:
    config = CheckpointManager.Config(folder=str(tmp_path / "all"))
    off = CheckpointManager(config, dataloader=None, model_parts=[], optimizers=[], lr_schedulers=None, states={})
    assert not off.load()
    assert not off.save(1)
    off.close()
    assert not (tmp_path / "all").exists()


def test_data_of_other_ranks_are_refused() -> None:
    class Loader:
        def state_dict(self) -> dict[str, int]:
            return {"place": 3}

    place = _Place(Loader())
    with pytest.raises(MismatchError, match="as many ranks as before"):
        place.load_state_dict({"share": "rank 0 of 2", "state": {}})
