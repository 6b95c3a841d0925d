"""Whatever call of the store fails or is the last one: retention, starts among leftovers, plans, two in a row."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.call_faults import (
    SCENARIOS,
    try_every_call,
    try_every_call_of_a_plan,
    try_every_short_write,
    try_many_two_faults,
)

FURTHER = ("retention", "a start among leftovers", "a rewind")  # test_store.py has the others


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else tmp_path
    with tempfile.TemporaryDirectory(dir=memory, prefix="checkflow-test-") as folder:
        yield Path(folder) / "checkpoints"


@pytest.mark.parametrize("name", FURTHER)
@pytest.mark.parametrize(
    ("error", "after", "sticky"),
    [
        pytest.param(None, True, False, id="a kill"),
        pytest.param(errno.EIO, False, False, id="EIO"),
        pytest.param(errno.ENOSPC, False, True, id="ENOSPC from then on"),
    ],
)
def test_any_call(directory: Path, name: str, error: int | None, after: bool, sticky: bool) -> None:
    try_every_call(SCENARIOS[name], directory, error, after=after, sticky=sticky)


@pytest.mark.parametrize("name", SCENARIOS)
def test_any_short_write(directory: Path, name: str) -> None:
    try_every_short_write(SCENARIOS[name], directory)


@pytest.mark.parametrize("error", [None, errno.EIO], ids=["a kill", "EIO"])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_any_call_of_what_keeps_plans(directory: Path, error: int | None, after: bool) -> None:
    try_every_call_of_a_plan(directory, error, after=after, sticky=error is not None and after)


@pytest.mark.slow
def test_two_faults_in_a_row(directory: Path) -> None:
    assert try_many_two_faults(directory, seed=1, count=60) > 20
