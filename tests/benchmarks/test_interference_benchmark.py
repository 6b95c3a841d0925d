"""The benchmark of interference: a short run, what its figures mean, and a neighbour that does not work in secret."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import cpu_overhead, interference
from benchmarks.frequency import Case
from benchmarks.interference import PHASES, Run, mean_of, overheads
from benchmarks.neighbour import Neighbour

ROOT = Path(__file__).resolve().parents[2]
PLAIN = Run(((1.0,) * 4, (2.0,) * 4, (1.0,) * 4), ((0,) * 2,) * 3, 0, (0, 0, 0), {})
# k goes from 1 to 4 within the second phase, and comes back to 2.
CHECKPOINTED = Run(
    ((1.1,) * 4, (4.0, 3.0, 2.0, 2.2), (1.0, 1.0, 1.0, 1.2)),
    ((1, 1), (1, 4), (4, 2)),  # after each of two windows
    1,
    (4, 2, 0),
    {"kind": "disk", "bytes_per_second": 1e9},
)


def test_overheads_are_against_the_same_phase_without_checkpoints() -> None:
    found = overheads(CHECKPOINTED, PLAIN)
    assert list(found) == [name for phase in PHASES for name in (phase, f"{phase}, settled")]
    assert found["alone"] == pytest.approx(0.1)
    assert found["disturbed"] == pytest.approx(11.2 / 8 - 1)
    assert found["disturbed, settled"] == pytest.approx(0.05)
    assert found["alone again"] == pytest.approx(0.05)
    # Training without checkpoints is the mean of the runs before and after.
    other = Run(((3.0,) * 4, (2.0, 4.0, 2.0, 2.0), (1.0,) * 4), ((0,) * 2,) * 3, 0, (0, 0, 0), {})
    assert mean_of(PLAIN, other).seconds == ((2.0,) * 4, (2.0, 3.0, 2.0, 2.0), (1.0,) * 4)


def test_k_came_back_within_half_as_much_again_or_one_iteration() -> None:
    for first, last, back in ((1, 1, True), (1, 2, True), (1, 3, False), (8, 12, True), (8, 13, False), (8, 2, True)):
        assert interference._came_back({"alone": first, "disturbed": 99, "alone again": last}) is back


def test_a_neighbour_that_fails_says_so(tmp_path: Path) -> None:
    with (
        pytest.raises(RuntimeError, match="the neighbour failed"),
        Neighbour("disk", tmp_path / "none", 1) as neighbour,
    ):
        neighbour.begin()


def test_a_neighbour_ends_with_whoever_started_it(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.neighbour", "disk", str(tmp_path)]
    begin = f"subprocess.Popen({command!r}, stdin=subprocess.PIPE, cwd={str(ROOT)!r})"
    parent = f"import os, subprocess; {begin}; os._exit(1)"
    # The pipe of its output is at its end only when the neighbour, too, has gone.
    done = subprocess.run([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True)
    ready, _, told = done.stdout.partition("\n")
    assert ready == "ready"
    assert json.loads(told)["bytes_per_second"] == 0


@pytest.mark.slow
def test_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here depends on how long anything takes."""
    monkeypatch.setattr(interference, "own_plan", lambda step, directory, overhead: cpu_overhead.plan_for("digits"))
    monkeypatch.setitem(interference.CASES, "digits", Case("digits", 2, None, 1_437))
    monkeypatch.setattr(interference, "QUICK", interference.Effort(1, (6, 6, 6)))
    output, threads = tmp_path / "found.json", torch.get_num_threads()
    try:
        assert interference.main(["--quick", "--directory", str(tmp_path), "--output", str(output)]) == 0
    finally:
        torch.set_num_threads(threads)
    (one,) = json.loads(output.read_text())["rounds"]
    assert one["k"]["static"] == dict.fromkeys(PHASES, one["k"]["adaptive"]["alone"])
    assert [line["until"] for line in one["trace"]["static"]] == [6, 12, 18]
    assert all(neighbour["bytes_per_second"] > 0 for neighbour in one["neighbours"])
    assert [path.name for path in tmp_path.iterdir()] == ["found.json"]
