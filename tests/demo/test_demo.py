"""The demo: a short one as a real process, and proof that its checks see what they claim to see."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from checkflow.demo import kills
from checkflow.torture.journal import Journal, JournalReader

ROOT = Path(__file__).parents[2]
Lines = list[dict[str, Any]]
PLACES = ["training", "validation", "training"]
REPORT = {
    "failed": 0,
    "breaches": 0,
    "committed": 5,
    "captures": 6,
    "held_seconds": {"anchors": 0.3},
    "checkpoint_bytes": 100,
}


def run_demo(folder: Path) -> dict[str, Any]:
    """What it says. Where its watch was held up, so that a kill came elsewhere, or too late, it is run once more."""
    for seed in range(1, 6):
        done = subprocess.run(
            [sys.executable, "-m", "checkflow", "demo", "--epochs", "3", "--seed", str(seed), "--json"],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
        )
        if "the training ended with exit code 0" in done.stderr:
            continue
        assert done.returncode == 0, done.stdout + done.stderr
        said: dict[str, Any] = json.loads(done.stdout)
        if [kill["place"] for kill in said["kills"]] == PLACES:
            break
    return said


@pytest.mark.slow
def test_a_short_demo_passes_all_its_checks(tmp_path: Path) -> None:
    said = run_demo(tmp_path)
    assert said["passed"] is True
    assert len(said["checks"]) == 4
    assert [kill["place"] for kill in said["kills"]] == PLACES
    assert said["iterations"] == 3 * 45
    assert said["plan"]["model"] == "resnet18"
    assert list(tmp_path.iterdir()) == []  # everything went to a temporary folder


# Journals of four iterations in two epochs of two samples, one sample a batch


def step(iteration: int, sample: int) -> dict[str, Any]:
    return {
        "event": "step",
        "iteration": iteration,
        "epoch": iteration // 2,
        "samples": [sample],
        "at_seconds": iteration / 2,
    }


def note(event: str, **values: Any) -> dict[str, Any]:
    return {"event": event, **values}


TRUTH: Lines = [step(0, 1), step(1, 0), step(2, 0), step(3, 1)]
REFERENCE: Lines = [
    note("start", iteration=0),
    *TRUTH[:2],
    note("validation", epoch=0),
    note("validated", epoch=0, accuracy=0.5),
    *TRUTH[2:],
    note("validation", epoch=1),
    note("validated", epoch=1, accuracy=0.9),
    note("end"),
]
KILLED: Lines = [
    note("start", iteration=0),
    *TRUTH[:2],
    note("start", iteration=1),  # killed after two steps, one of them was lost
    TRUTH[1],
    note("validation", epoch=0),
    note("start", iteration=1),  # killed inside validation
    TRUTH[1],
    note("validation", epoch=0),
    note("validated", epoch=0, accuracy=0.5),
    *TRUTH[2:],
    note("start", iteration=3),
    TRUTH[3],
    note("validation", epoch=1),
    note("validated", epoch=1, accuracy=0.9),
    note("end", report=REPORT),
]


def compare(folder: Path, lines: Lines, *, weights: torch.Tensor | None = None) -> kills.DemoResult:
    runs = []
    slower = [{**line, "at_seconds": 2 * line["at_seconds"]} if line["event"] == "step" else line for line in REFERENCE]
    for name, journal, value in (("before", REFERENCE, None), ("killed", lines, weights), ("after", slower, None)):
        run = kills.Run(folder, name, 2, 0, None)
        run.journal.write_text("".join(json.dumps(line) + "\n" for line in journal))
        save_file({"weights": torch.ones(3) if value is None else value}, run.result)
        runs.append(run)
    return kills.compare(*runs, epochs=2)


def held(result: kills.DemoResult) -> list[bool]:
    return [check.holds for check in result.checks]


def test_what_is_right_passes(tmp_path: Path) -> None:
    result = compare(tmp_path, KILLED)
    assert held(result) == [True, True, True, True]
    assert result.passed
    assert [kill.replayed for kill in result.kills] == [1, 1, 1]
    assert [kill.place for kill in result.kills] == ["training", "validation", "training"]
    assert (result.seconds_without, result.seconds_with, result.accuracy) == (0.75, 0.5, 0.9)
    assert result.held_seconds == pytest.approx(0.05)


@pytest.mark.parametrize(
    "weights",
    [
        torch.tensor([1.0, 1.0, 1.0000001]),
        torch.ones(3, dtype=torch.float64),
        torch.ones(4),
    ],
)
def test_other_weights_are_seen(tmp_path: Path, weights: torch.Tensor) -> None:
    assert held(compare(tmp_path, KILLED, weights=weights)) == [False, True, True, True]


def test_a_sign_of_zero_is_seen(tmp_path: Path) -> None:
    zeros = tmp_path / "zeros.safetensors"
    other = tmp_path / "other.safetensors"
    save_file({"w": torch.zeros(2)}, zeros)
    save_file({"w": -torch.zeros(2)}, other)
    assert kills._check_weights([zeros], zeros).holds
    assert not kills._check_weights([zeros, other], zeros).holds


def lose(lines: Lines) -> None:
    del lines[lines.index(TRUTH[2])]


def double(lines: Lines) -> None:
    lines.insert(lines.index(TRUTH[2]), TRUTH[2])


def swap(lines: Lines) -> None:
    first = lines.index(TRUTH[2])
    lines[first] = {**TRUTH[2], "samples": [1]}
    lines[first + 1] = {**TRUTH[3], "samples": [0]}
    lines[lines.index(TRUTH[3])] = {**TRUTH[3], "samples": [0]}


@pytest.mark.parametrize("change", [lose, double, swap])
def test_lost_doubled_and_misplaced_samples_are_seen(tmp_path: Path, change: Any) -> None:
    lines = copy.deepcopy(KILLED)
    change(lines)
    assert held(compare(tmp_path, lines)) == [True, False, True, True]


def test_a_kill_that_lost_everything_is_seen(tmp_path: Path) -> None:
    lines = copy.deepcopy(KILLED)
    lines[3:4] = [note("start", iteration=0), TRUTH[0]]
    assert held(compare(tmp_path, lines)) == [True, True, False, True]


def test_a_missing_kill_is_seen(tmp_path: Path) -> None:
    assert held(compare(tmp_path, [*REFERENCE[:-1], note("end", report=REPORT)])) == [True, True, False, True]


@pytest.mark.parametrize("report", [{"failed": 1}, {"breaches": 1}, {"committed": 0}])
def test_a_failed_checkpoint_is_seen(tmp_path: Path, report: dict[str, int]) -> None:
    lines = [*KILLED[:-1], note("end", report={**REPORT, **report})]
    assert held(compare(tmp_path, lines)) == [True, True, True, False]


def test_a_line_cut_by_a_kill_is_no_line(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_text('{"event": "start", "iteration": 0}\n{"event": "st')
    journal = JournalReader(path)
    journal.look()
    assert [line["event"] for line in journal.lines] == ["start"]
    Journal(path).write("start", iteration=0)  # as the next process goes on
    journal.look()
    assert [line["event"] for line in journal.lines] == ["start", "start"]


@pytest.mark.parametrize(("epochs", "steps"), [(3, 5), (3, 45), (5, 45)])
def test_points_come_in_order_and_leave_training_before_and_after(epochs: int, steps: int) -> None:
    for seed in range(20):
        early, validation, late = kills.choose_points(seed, epochs, steps, 0.02)
        assert (early.event, validation.event, late.event) == ("step", "validation", "step")
        end_of_validated_epoch = (validation.number + 1) * steps
        assert 0 < early.number < end_of_validated_epoch < late.number < epochs * steps - 1
        assert kills.choose_points(seed, epochs, steps, 0.02) == [early, validation, late]
