"""Jobs that are killed again and again before there is a plan: each life goes on from the one before."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from checkflow import api
from checkflow.runtime.store.discovery import find
from checkflow.runtime.store.files import parse_step
from tests.support.oracle import same_bits
from tests.support.programs.cut_job import FINAL, PLANNERS, TOTAL, outcome, run

ROOT = Path(__file__).parents[2]
LIFE = 6  # iterations


def live(loop: str, planner: str, directory: Path) -> int:
    """One life of the job; returns its exit code."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.programs.cut_job", loop, planner, str(directory), str(LIFE)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    return done.returncode


@pytest.mark.slow
@pytest.mark.parametrize(("loop", "planner"), [("loader", "slow"), ("step", "slow"), ("steps", "refusing")])
def test_a_job_that_is_killed_again_and_again_comes_to_its_end(
    loop: str, planner: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without epochs, and with no plan ever; what it ends with is what it would have without a kill, bit for bit."""
    cut, saved = tmp_path / "cut", 0
    while live(loop, planner, cut):
        newest = max(parse_step(path.name) or 0 for path in find(cut))
        assert newest > saved
        saved = newest
    assert 0 < saved < TOTAL
    monkeypatch.setattr(api, "make_planner", PLANNERS[planner])
    with caplog.at_level(logging.INFO, "checkflow"):
        whole = outcome(run(loop, tmp_path / "whole", TOTAL + 1))
    final = torch.load(cut / FINAL, weights_only=True)
    assert final.keys() == whole.keys()
    assert [name for name in final if not same_bits(final[name], whole[name])] == []
    assert caplog.text.count("a kill loses all that was trained so far") == 1
    assert caplog.text.count("is on storage: a kill loses at most what was trained after it") == 1
