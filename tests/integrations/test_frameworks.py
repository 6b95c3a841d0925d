"""Other training frameworks with checkflow: killed anywhere and started again, jobs end bit for bit the same."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.programs.framework_jobs import EPOCHS, JOBS, SAMPLES

ROOT = Path(__file__).parents[2]


def run(name: str, folder: Path, kills: int) -> list[int]:
    """How each life of a job ended."""
    command = [sys.executable, "-m", "tests.support.programs.framework_jobs", name, str(folder), str(kills)]
    made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    ends = json.loads(made.stdout.splitlines()[-1])
    assert isinstance(ends, list)
    assert ends[0] == ends[-1] == 0, made.stderr
    return ends


def used(folder: Path, name: str) -> list[list[int]]:
    """The samples of each iteration; what was done again has replaced what it repeated."""
    rows: dict[int, list[int]] = {}
    for line in (folder / f"{name}.used").read_text().splitlines():
        iteration, samples = json.loads(line)
        rows[iteration] = samples
    return [rows[iteration] for iteration in sorted(rows)]


def assert_same(one: Any, other: Any, place: str = "") -> None:
    assert type(one) is type(other), place
    if isinstance(one, dict):
        assert one.keys() == other.keys(), place
        for key in one:
            assert_same(one[key], other[key], f"{place}.{key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), place
        for number, (left, right) in enumerate(zip(one, other, strict=True)):
            assert_same(left, right, f"{place}[{number}]")
    else:
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other, place


@pytest.mark.slow
@pytest.mark.parametrize("name", JOBS)
def test_killed_thirty_times_it_ends_the_same(name: str, tmp_path: Path) -> None:
    ends = run(name, tmp_path, 30)
    assert ends[1:-2] == [-signal.SIGKILL] * 30
    assert ends[-2] == 75  # asked to end
    rows = used(tmp_path, "cut")
    assert rows == used(tmp_path, "whole")
    flat = [sample for row in rows for sample in row]
    for epoch in range(EPOCHS):
        assert sorted(flat[epoch * SAMPLES : (epoch + 1) * SAMPLES]) == list(range(SAMPLES))
    assert_same(*(torch.load(tmp_path / f"{name}.final") for name in ("cut", "whole")))
