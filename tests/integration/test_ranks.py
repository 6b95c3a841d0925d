"""Jobs of several ranks: killed, resumed on other ranks, refused together and ended together."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from checkflow.runtime.store.discovery import find
from checkflow.runtime.store.reader import open_checkpoint
from checkflow.runtime.store.store import Store
from tests.support.rank_jobs import numbered, rank_job, run_job

KINDS = {"ddp": 2, "fsdp": 2, "tp": 2, "hsdp": 4}


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_job_ends_as_if_it_had_never_been(tmp_path: Path, kind: str) -> None:
    """All ranks are killed; the next run resumes on all, and trains to the same bits."""
    ranks, folder = KINDS[kind], numbered(tmp_path)
    whole = run_job(folder(), ranks, tmp_path / "whole", kind, 3)
    with rank_job(folder(), ranks, tmp_path / "killed", kind, 3, pause=0.02) as job:
        job.reach(4)
        job.kill_all()
        durable = max(line["durable"] or 0 for line in job.said(0, "stepped"))
    resumed = run_job(folder(), ranks, tmp_path / "killed", kind, 3)
    assert resumed.last(0, "begins")["step"] >= durable
    for rank in range(ranks):
        assert resumed.last(rank, "begins") | {"pid": 0} == resumed.last(0, "begins") | {"pid": 0}
        expected, found = whole.last(rank, "ended"), resumed.last(rank, "ended")
        assert (found["step"], found["digest"]) == (expected["step"], expected["digest"])
        assert (found["durable"], found["failed"], found["audits"]) == (found["step"], 0, found["committed"])
