"""The benchmark of interference: what it makes of its runs, and the neighbour."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import cpu_overhead, interference
from benchmarks.frequency import Case
from benchmarks.interference import PHASES, Run, lines_of, mean_of, overheads, trace_of
from benchmarks.neighbour import Kind, Neighbour

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


def test_training_without_checkpoints_is_the_mean_of_two_runs() -> None:
    other = Run(((3.0,) * 4, (2.0, 4.0, 2.0, 2.0), (1.0,) * 4), ((0,) * 2,) * 3, 0, (0, 0, 0), {})
    assert mean_of(PLAIN, other).seconds == ((2.0,) * 4, (2.0, 3.0, 2.0, 2.0), (1.0,) * 4)


def test_a_trace_has_every_iteration_and_no_window_over_two_phases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interference, "WINDOW", 3)
    lines = trace_of(CHECKPOINTED, PLAIN)
    assert [line["until"] for line in lines] == [3, 4, 7, 8, 11, 12]
    assert [line["phase"] for line in lines] == [phase for phase in PHASES for _ in range(2)]
    assert [line["k"] for line in lines] == [1, 1, 1, 4, 4, 2]
    assert lines[2]["overhead"] == pytest.approx(0.5)
    assert lines[3]["overhead"] == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("first", "last", "back"), [(1, 1, True), (1, 2, True), (1, 3, False), (8, 12, True), (8, 13, False), (8, 2, True)]
)
def test_whether_k_came_back(first: int, last: int, back: bool) -> None:
    assert interference._came_back({"alone": first, "disturbed": 99, "alone again": last}) is back


def test_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interference, "WINDOW", 3)
    trace = trace_of(CHECKPOINTED, PLAIN)
    found = overheads(CHECKPOINTED, PLAIN)
    durable = dict(zip(PHASES, (1.0, 2.0, None), strict=True))
    one = {
        "k": {"adaptive": dict(zip(PHASES, (1, 4, 2), strict=True)), "static": dict.fromkeys(PHASES, 1)},
        "overhead": {"adaptive": found, "static": found},
        "drift": dict.fromkeys(PHASES, -0.02),
        "iterations_per_durable": {"adaptive": durable, "static": durable},
        "trace": {"adaptive": trace, "static": trace},
    }
    lines = [" ".join(line.split()) for line in lines_of([one, one], 0.06)]
    assert lines[0] == "overhead, of all rounds static adaptive (6.0% allowed)"
    assert lines[2] == "alone, settled 10.0% (10.0% to 10.0%) 10.0% (10.0% to 10.0%)"
    assert "disturbed 1, 1; 2.0, 2.0 4, 4; 2.0, 2.0" in lines
    assert "alone again 1, 1; none, none 2, 2; none, none" in lines
    assert "disturbed -2.0%, -2.0%" in lines
    said = "adaptive: within 6.0% over all iterations beside the neighbour in 0 of 2 rounds; k is back afterwards in 2"
    assert said in lines
    assert lines[-1] == "to 12, alone again 20.0% (2) 20.0% (2)"


@pytest.mark.parametrize(("kind", "unit"), [("disk", "bytes_per_second"), ("cpu", "products_per_second")])
def test_a_neighbour_works_until_it_is_told_to_end(kind: Kind, unit: str, tmp_path: Path) -> None:
    with Neighbour(kind, tmp_path, 2) as neighbour:
        assert list(tmp_path.iterdir()) == []
        neighbour.begin()
        neighbour.end()
    assert neighbour.outcome["kind"] == kind
    assert neighbour.outcome[unit] > 0
    assert list(tmp_path.iterdir()) == []


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
