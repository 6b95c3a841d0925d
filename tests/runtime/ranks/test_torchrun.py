"""Real processes under torchrun: the council meets in torchrun's store, and outlives ranks that die."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.waiting import wait_for

PROGRAM = Path(__file__).parents[2] / "support" / "programs" / "council_job.py"
ROOT = Path(__file__).parents[3]


@contextmanager
def job(directory: Path, mode: str, ranks: int) -> Iterator[subprocess.Popen[bytes]]:
    """A job under torchrun, all of which is ended afterwards."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}",
        str(PROGRAM), str(directory), mode,
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        yield process
    finally:
        for one in [lines["pid"] for rank in range(ranks) for lines in said(directory, rank) if "pid" in lines]:
            try:
                os.kill(one, signal.SIGKILL)
            except ProcessLookupError:
                continue
        process.kill()
        process.wait()


def said(directory: Path, rank: int) -> list[dict[str, Any]]:
    path = directory / f"log-{rank}"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def heard(directory: Path, ranks: range, what: str) -> list[dict[str, Any]]:
    """What these ranks have said first of something, when all have."""

    def all_said() -> list[dict[str, Any]]:
        found = [next((line for line in said(directory, rank) if line["what"] == what), None) for rank in ranks]
        return [line for line in found if line is not None] if None not in found else []

    return list(wait_for(all_said))


@pytest.mark.slow
def test_ranks_start_save_and_end_together(tmp_path: Path) -> None:
    with job(tmp_path, "end", 3) as process:
        assert process.wait() == 0
    started = heard(tmp_path, range(3), "starts")
    assert len({line["generation"] for line in started}) == 1
    assert [line["step"] for line in started] == [3, 3, 3]
    for rank in range(3):
        assert [line["step"] for line in said(tmp_path, rank) if line["what"] == "saved"] == [4, 7, 10, 13, 16, 19]
    ends = heard(tmp_path, range(3), "ended")
    assert len({line["step"] for line in ends}) == 1
    assert ends[0]["step"] > 30


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize("mode", ["kill", "stop"])
def test_a_rank_that_dies_is_named_by_all_others(tmp_path: Path, mode: str) -> None:
    with job(tmp_path, mode, 3):
        for line in heard(tmp_path, range(2), "fails"):
            assert (line["kind"], line["ranks"]) == ("MissingShardsError", [2])
        heard(tmp_path, range(2), "ends")


@pytest.mark.slow
def test_waits_end_where_the_store_does_not_answer(tmp_path: Path) -> None:
    with job(tmp_path, "agent", 2):
        for line in heard(tmp_path, range(2), "fails"):
            assert line["kind"] in ("MissingShardsError", "StorageError")
        heard(tmp_path, range(2), "ends")


@pytest.mark.slow
def test_a_refusal_is_raised_on_all_ranks(tmp_path: Path) -> None:
    with job(tmp_path, "refuse", 3) as process:
        process.wait()
    for rank, line in enumerate(heard(tmp_path, range(3), "fails")):
        assert line["kind"] == "LockedError"
        assert ("no rank starts: rank 1: the directory is locked" in line["message"]) == (rank != 1)
