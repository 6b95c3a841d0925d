"""Killed anywhere, started again: the end is bit-identical, every sample is used once an epoch, little is replayed."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from checkflow.runtime.store.discovery import find
from checkflow.runtime.store.reader import open_checkpoint
from tests.support import jobs
from tests.support.oracle import same_bits
from tests.support.waiting import wait_for


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, list[list[int]]]:
    directory = tmp_path_factory.mktemp("uninterrupted")
    assert jobs.start(jobs.Job(directory)) == 0
    return torch.load(directory / "final.pt", weights_only=True), jobs.samples(directory)


def assert_same_end(directory: Path, expected: tuple[Any, list[list[int]]]) -> None:
    final, order = torch.load(directory / "final.pt", weights_only=True), jobs.samples(directory)
    want, want_order = expected
    assert order == want_order
    assert final["scheduler"] == want["scheduler"]
    assert same_bits(final["rng"], want["rng"])
    assert final["state"].keys() == want["state"].keys()
    for name, tensor in want["state"].items():
        assert same_bits(final["state"][name], tensor), name


def test_every_sample_once_an_epoch(uninterrupted: tuple[Any, list[list[int]]]) -> None:
    _, order = uninterrupted
    assert len(order) == jobs.EPOCHS * jobs.BATCHES
    for epoch in range(jobs.EPOCHS):
        used = [index for row in order if row[0] == epoch for index in row[1:]]
        assert sorted(used) == list(range(jobs.SAMPLES))


@pytest.mark.parametrize("place", jobs.PLACES)
@pytest.mark.parametrize("explicit", [False, True])
def test_killed_at(place: str, explicit: bool, tmp_path: Path, uninterrupted: tuple[Any, list[list[int]]]) -> None:
    job = jobs.Job(tmp_path, explicit=explicit)
    batch = 0 if place in ("validation", "epoch end") else 2
    assert jobs.start(dataclasses.replace(job, kill=(place, 1, batch))) == -9
    reached = len((tmp_path / "samples").read_text().splitlines())
    restorable = int(find(tmp_path / "checkpoints")[0].name[5:])
    assert reached - 3 <= restorable <= reached  # under way, being gathered, being committed
    assert jobs.start(job) == 0
    assert_same_end(tmp_path, uninterrupted)


@pytest.mark.parametrize(
    ("interval", "every", "place", "explicit"),
    [
        (3, 3, "forward", False),
        (3, 3, "epoch end", False),
        (4, None, "after step", False),
        (4, None, "validation", False),
        (4, 4, "step", True),
        (4, None, "backward", True),
    ],
)
def test_killed_within_an_interval(
    interval: int,
    every: int | None,
    place: str,
    explicit: bool,
    tmp_path: Path,
    uninterrupted: tuple[Any, list[list[int]]],
) -> None:
    """Plans over several iterations; with an interval of 4 the ends of epochs come in the middle of one."""
    job = jobs.Job(tmp_path, interval=interval, every=every, explicit=explicit)
    batch = 0 if place in ("validation", "epoch end") else 4
    assert jobs.start(dataclasses.replace(job, kill=(place, 1, batch))) == -9
    reached = len((tmp_path / "samples").read_text().splitlines())
    restorable = [int(path.name[5:]) for path in find(tmp_path / "checkpoints")]
    assert all(step % interval == 0 or (every is None and step % jobs.BATCHES == 0) for step in restorable)
    if every is not None:  # otherwise storage may lag
        assert reached - 3 * interval <= max(restorable, default=0) <= reached
    assert jobs.start(job) == 0
    assert_same_end(tmp_path, uninterrupted)
    if every is None:  # the end of training is saved, a multiple of the interval or not
        assert find(tmp_path / "checkpoints")[0].name == f"step-{jobs.EPOCHS * jobs.BATCHES:08d}"


@pytest.mark.slow
def test_killed_again_and_again_with_workers(tmp_path: Path, uninterrupted: tuple[Any, list[list[int]]]) -> None:
    job = jobs.Job(tmp_path, workers=2)
    for kill in (("forward", 0, 0), ("after step", 0, 4), ("validation", 0, 0), ("backward", 2, 1)):
        assert jobs.start(dataclasses.replace(job, kill=kill)) == -9
    assert jobs.start(job) == 0
    assert_same_end(tmp_path, uninterrupted)


@pytest.mark.slow
def test_a_finished_job_has_nothing_left_to_do(tmp_path: Path, uninterrupted: tuple[Any, list[list[int]]]) -> None:
    assert jobs.start(jobs.Job(tmp_path)) == 0
    (tmp_path / "final.pt").unlink()
    assert jobs.start(jobs.Job(tmp_path)) == 0
    assert_same_end(tmp_path, uninterrupted)


@pytest.mark.slow
def test_killed_while_a_plan_is_made(tmp_path: Path, uninterrupted: tuple[Any, list[list[int]]]) -> None:
    """In the recorded iteration, in one that is timed, while the plan is made, and under it."""
    job = jobs.Job(tmp_path, planless=True)
    for kill in (("backward", 0, 1), ("step", 0, 3), ("planning", 0, 0), ("after step", 2, 5)):
        assert jobs.start(dataclasses.replace(job, kill=kill)) == -9
        assert bool(list(tmp_path.glob("checkpoints/plans/*.json"))) == (kill[0] == "after step")
        if kill[0] == "planning":  # it was stopped, and ends with the job all the same
            number = int((tmp_path / "planning process").read_text())
            wait_for(lambda number=number: not psutil.pid_exists(number))
    assert jobs.start(job) == 0
    assert_same_end(tmp_path, uninterrupted)
    with open_checkpoint(find(tmp_path / "checkpoints")[0]) as checkpoint:
        assert checkpoint.manifest.plan_digest
    assert len(list(tmp_path.glob("checkpoints/plans/*"))) == 1
