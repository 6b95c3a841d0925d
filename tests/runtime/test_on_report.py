"""``on_report``: what the user's function gets, on which thread, and that its faults stay its own."""

from __future__ import annotations

import logging
import re
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from checkflow.api import Checkpointer
from checkflow.core.reports import run_report
from checkflow.runtime import reporter
from tests.support import wandb_stand_in
from tests.support.horizons import make_step
from tests.support.pages import reader

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "report.md"


def train(directory: Path, on_report: Any, *, silent: bool = False) -> Checkpointer:
    step = make_step()
    with Checkpointer(step.models, step.optimizers, directory=directory, every=1, on_report=on_report) as checkpointer:
        checkpointer._reporter.speaks = not silent
        for _ in checkpointer.steps(6):
            step.run(step.batch)
    return checkpointer


def place_of(report: dict[str, Any], name: str) -> Any:
    for part in name.split("/"):
        report = report[part]
    return report


def test_it_gets_plain_numbers_beside_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reporter, "REPORT_EVERY_SECONDS", 0.0)
    monkeypatch.setattr(reporter, "MOST_SHARE", float("inf"))
    calls: list[tuple[str, dict[str, float]]] = []
    checkpointer = train(tmp_path, lambda scalars: calls.append((threading.current_thread().name, scalars)))
    assert [thread for thread, _ in calls] == ["checkflow-writer"] * 6 + [threading.current_thread().name]
    assert [scalars["committed"] for _, scalars in calls] == [1, 2, 3, 4, 5, 6, 6]
    last, report = calls[-1][1], checkpointer.report()
    assert last["iteration"] == 6
    assert {type(value) for value in last.values()} == {int, float}
    moving = {"written_unix_seconds", "lag/since_durable_seconds"}
    assert {name: last[name] for name in last if name not in moving} == {
        name: place_of(report, name) for name in last if name not in moving
    }
    assert {"held_seconds/anchors", "bytes/persisted_bytes", "lag/durable_step"} <= last.keys()


def test_many_checkpoints_are_not_many_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reporter, "REPORT_EVERY_SECONDS", 1e9)
    calls: list[dict[str, float]] = []
    train(tmp_path, calls.append)
    assert [scalars["committed"] for scalars in calls] == [1, 6]  # the first checkpoint, and the end


def test_a_fault_in_it_is_logged_once_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(reporter, "REPORT_EVERY_SECONDS", 0.0)
    monkeypatch.setattr(reporter, "MOST_SHARE", float("inf"))
    calls = []

    def fail(scalars: dict[str, float]) -> None:
        calls.append(scalars)
        raise OSError("no network")

    with caplog.at_level(logging.WARNING, "checkflow"):
        checkpointer = train(tmp_path, fail)
    assert len(calls) == 7
    assert checkpointer.report()["committed"] == 6
    assert [record.getMessage() for record in caplog.records] == [
        "on_report has raised OSError: no network; training goes on, and it is called again"
    ]


def test_an_exit_in_it_ends_neither_writer_nor_training_but_the_close(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(reporter, "REPORT_EVERY_SECONDS", 0.0)
    monkeypatch.setattr(reporter, "MOST_SHARE", float("inf"))
    calls = []

    def leave(scalars: dict[str, float]) -> None:
        calls.append(scalars)
        sys.exit(3)

    with caplog.at_level(logging.WARNING, "checkflow"), pytest.raises(SystemExit):
        train(tmp_path, leave)
    assert [scalars["committed"] for scalars in calls] == [1, 2, 3, 4, 5, 6, 6]
    assert [record.getMessage() for record in caplog.records] == [
        "on_report has raised SystemExit: 3; training goes on, and it is called again"
    ]
    (run,) = run_report.load(tmp_path / "report.json")
    assert run.closed
    train(tmp_path, None)  # nothing holds the directory


def test_of_several_ranks_the_one_that_speaks_calls_it(tmp_path: Path) -> None:
    calls: list[dict[str, float]] = []
    train(tmp_path, calls.append, silent=True)
    assert calls == []


def test_what_is_no_function_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="on_report must be a function that takes a dictionary, or None, not 'log'"):
        train(tmp_path, "log")


def block_with(text: str) -> str:
    (found,) = (block for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL) if text in block)
    return str(found)


def test_the_pages_example_for_tensorboard_shows_curves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(block_with("SummaryWriter"), reader())
    events = EventAccumulator("runs")
    events.Reload()
    assert "checkflow/lag/iterations" in events.Tags()["scalars"]
    last = events.Scalars("checkflow/committed")[-1]
    assert last.value >= 1
    assert last.step == 100


def test_the_pages_example_for_wandb_logs_by_iteration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "wandb", wandb_stand_in)
    monkeypatch.setattr(wandb_stand_in, "calls", calls := [])  # type: ignore[var-annotated]
    exec(block_with("wandb"), reader())
    assert [name for name, _, _ in calls][:2] == ["init", "define_metric"]
    assert calls[1][1:] == (("checkflow/*",), {"step_metric": "checkflow/iteration"})
    name, (scalars,), _ = calls[-1]
    assert name == "log"
    assert scalars["checkflow/iteration"] == 100
