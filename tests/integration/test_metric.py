"""``checkpointer.metric``: which checkpoint a metric reaches; the best is saved, and stays, whatever is killed."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from checkflow import api
from checkflow.api import Checkpointer
from checkflow.cli.main import main
from checkflow.core import plan as plans
from checkflow.core.plan import Plan
from checkflow.runtime.inspect import choose, compare, list_directory
from checkflow.runtime.store.discovery import find
from checkflow.runtime.store.files import glance, step_name
from checkflow.runtime.store.retention import read_metrics
from checkflow.runtime.store.store import Store
from tests.support.oracle import assert_checkpoint_is, clone_state
from tests.support.programs.metric_job import BATCHES, Job, make_plan, run
from tests.support.simulated import rule_pace
from tests.support.waiting import wait_until_saved

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _random_plans_have_no_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "check_plan", plans.validate)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make_plan()


def steps(directory: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in find(directory))


def told(directory: Path, step: int) -> dict[str, float]:
    return read_metrics(glance(directory / step_name(step)).info)


def open_job(job: Job, directory: Path, plan: Plan, loader: Any = None, **options: Any) -> Checkpointer:
    chosen = {"every": 100, "audit": 1, "keep_epochs": False, "on_error": "raise", "monitor": "loss", **options}
    return Checkpointer(job.model, job.optimizer, loader, directory=directory, plan=plan, **chosen)


def truth_of(job: Job) -> dict[str, torch.Tensor]:
    return clone_state({"model": job.model}, {"optimizer": job.optimizer})


@pytest.mark.slow
def test_the_best_epoch_survives_a_kill(tmp_path: Path, plan: Plan, capsys: pytest.CaptureFixture[str]) -> None:
    """Killed in a validation; the next run finds the ranking again, and the best stays until the end."""
    losses, options = [3.0, 1.0, 2.0, 1.5, 1.0, 1.2], {"keep_best": 1}
    file, directory, whole = tmp_path / "plan.json", tmp_path / "killed", tmp_path / "whole"
    plans.save(plan, file)
    done = subprocess.run(
        [
            sys.executable, "-m", "tests.support.programs.metric_job", str(directory), str(file),
            json.dumps({"losses": losses, "die_in": 3, "options": options}),
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == -9, done.stderr
    assert steps(directory) == [8, 10, 15]
    later = run(directory, plan, losses, **options)
    assert later.resumed_from == 15
    assert later.report()["committed"] == 2  # 20 and 24: what epoch 3 came to is not the best, as this run knows too
    assert later.report()["best_step"] == 8
    run(whole, plan, losses, **options)
    for one in (directory, whole):
        assert steps(one) == [8, 20, 24]
        assert told(one, 8) == {"loss": 1.0, "epoch": 1.0}
        assert told(one, 20) == {"loss": 1.0, "epoch": 4.0}  # equal, and younger
        assert told(one, 24) == {"loss": 1.2, "epoch": 5.0}
        assert [entry.step for entry in list_directory(one) if entry.best] == [8]
    for step in (8, 24):
        assert compare(directory / step_name(step), whole / step_name(step)).tensors == ()
    assert main(["ls", str(directory)]) == 0
    assert "epoch 1, loss 1 (the best)" in " ".join(capsys.readouterr().out.split())
    assert main(["ls", str(directory), "--json"]) == 0
    entries = json.loads(capsys.readouterr().out)["entries"]
    assert [(one["step"], one["metrics"]["loss"], one["best"]) for one in entries] == [
        (24, 1.2, False), (20, 1.0, False), (8, 1.0, True),
    ]  # fmt: skip
    assert main(["export", f"{directory}@best", "-o", str(tmp_path / "best.safetensors")]) == 0
    stored = safetensors.torch.load_file(next((directory / step_name(8)).glob("model-*.safetensors")))
    exported = safetensors.torch.load_file(tmp_path / "best.safetensors")
    assert all(torch.equal(exported[name], tensor) for name, tensor in stored.items())


def test_only_what_is_best_is_saved_beyond_what_is_due(tmp_path: Path, plan: Plan) -> None:
    job, truths = Job(), {}
    losses = {3: 0.9, 4: 0.5, 5: 0.7, 6: float("nan"), 7: 0.5, 8: 0.4, 9: 0.6}
    with open_job(job, tmp_path, plan, keep_best=2) as checkpointer:
        for number in checkpointer.steps(12):
            job.iterate()
            truths[number + 1] = truth_of(job)
            if number + 1 in losses:
                job.evaluate()
                checkpointer.metric("loss", losses[number + 1])
        assert checkpointer.report()["failed"] == 0
    assert steps(tmp_path) == [4, 8, 12]  # 9 was none of the two best, nor were 5, 6 and, being younger, 7
    for path in find(tmp_path):
        assert_checkpoint_is(path, truths[int(path.name[5:])])
    assert told(tmp_path, 4) == {"loss": 0.5}
    assert told(tmp_path, 12) == {}


def test_before_the_step_it_describes_the_state_before_it(tmp_path: Path, plan: Plan) -> None:
    job = Job()
    with open_job(job, tmp_path, plan, every=1, keep_latest=9) as checkpointer:
        for number in checkpointer.steps(4):
            checkpointer.metric("before", number)
            job.iterate()
            checkpointer.metric("after", number)
            checkpointer.metric("after", number + 1)  # the newest counts
    assert [told(tmp_path, step) for step in (1, 2, 3, 4)] == [
        {"before": 1, "after": 1}, {"before": 2, "after": 2}, {"before": 3, "after": 3}, {"after": 4},
    ]  # fmt: skip


@pytest.mark.parametrize("committed", [True, False], ids=["committed", "under way"])
def test_after_an_explicit_step_it_describes_what_was_just_captured(
    committed: bool, tmp_path: Path, plan: Plan
) -> None:
    job = Job()
    with open_job(job, tmp_path, plan, every=2, keep_latest=9) as checkpointer:
        for number in range(1, 7):
            job.iterate()
            checkpointer.step()
            if committed and number % 2 == 0:
                checkpointer._loop.execution.finish()
                wait_until_saved(tmp_path, number)
            job.evaluate()
            checkpointer.metric("loss", number / 10)
        checkpointer.metric("test", 0.25)
    assert steps(tmp_path) == [2, 4, 6]
    assert [told(tmp_path, step) for step in (2, 4, 6)] == [{"loss": 0.2}, {"loss": 0.4}, {"loss": 0.6, "test": 0.25}]


def test_a_state_that_was_not_captured_is_when_it_is_told_to_be_the_best(
    tmp_path: Path, plan: Plan, caplog: pytest.LogCaptureFixture
) -> None:
    job, truths = Job(), {}
    losses = [0.9, 0.5, 0.7, 0.6, 0.3, 0.8, 0.8]
    with open_job(job, tmp_path, plan, keep_best=1) as checkpointer:
        for number, loss in enumerate(losses, 1):
            job.iterate()
            checkpointer.step()
            truths[number] = truth_of(job)
            job.evaluate()
            checkpointer.metric("loss", loss)
        with torch.no_grad():
            job.model[0].weight.zero_()
        checkpointer.metric("loss", 0.1)  # of a state that is at no boundary
    assert steps(tmp_path) == [2, 5]
    assert "step 7 is not saved: the state was changed after it" in caplog.text
    for path in find(tmp_path):
        assert_checkpoint_is(path, truths[int(path.name[5:])])
    assert (told(tmp_path, 2), told(tmp_path, 5)) == ({"loss": 0.5}, {"loss": 0.3})


def test_validation_between_the_loops_of_an_explicit_job(tmp_path: Path, plan: Plan) -> None:
    """Each epoch's last boundary is passed when it is validated; the metric of the last one comes after all saving."""
    job = Job()
    with open_job(job, tmp_path, plan, job.loader, keep_best=1, mode="max") as checkpointer:
        for epoch in checkpointer.epochs(4):
            for x, y in checkpointer.loader:
                job.iterate(x, y)
                checkpointer.step()
            job.evaluate()
            checkpointer.metric("loss", [0.1, 0.9, 0.2, 0.3][epoch])
        checkpointer._loop.execution.finish()
        wait_until_saved(tmp_path, 4 * BATCHES)
        checkpointer.metric("loss", 0.95)  # measured with more care
    assert steps(tmp_path) == [2 * BATCHES, 4 * BATCHES]
    assert told(tmp_path, 2 * BATCHES) == {"loss": 0.9}
    assert told(tmp_path, 4 * BATCHES) == {"loss": 0.95}
    assert choose(f"{tmp_path}@best").name == step_name(4 * BATCHES)
    with open_job(Job(), tmp_path, plan, keep_best=1) as checkpointer:  # told of what it was resumed from
        checkpointer.metric("loss", 0.95)
        checkpointer.metric("test", 0.5)
    assert told(tmp_path, 4 * BATCHES) == {"loss": 0.95, "test": 0.5}


def test_the_best_waits_for_slow_storage(tmp_path: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """Newer captures take the place of older ones that wait, and not of the best."""
    rule_pace(monkeypatch, rests=False)
    gate, job, real = threading.Event(), Job(), Store.commit

    def late(store: Store, *given: Any, **named: Any) -> Path:
        gate.wait()
        return real(store, *given, **named)

    monkeypatch.setattr(Store, "commit", late)
    with open_job(
        job, tmp_path, plan, job.loader, every=None, keep_best=1, host_buffers=6, keep_latest=9, signals=()
    ) as checkpointer:
        for epoch in checkpointer.epochs(5):
            for x, y in checkpointer.loader:
                job.iterate(x, y)
            checkpointer.metric("loss", [0.5, 0.1, 0.5, 0.6, 0.7][epoch])
        gate.set()
    assert 2 * BATCHES in steps(tmp_path)
    assert checkpointer.report()["superseded"] > 0
    assert told(tmp_path, 2 * BATCHES) == {"loss": 0.1}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("", 1.0), (3, 1.0), ("a" * 201, 1.0), ("a\n", 1.0), ("x", "0.3"), ("x", True), ("x", None), ("x", 1j),
        ("x", torch.zeros(2)), ("x", [1.0]), ("x", 10**400),
    ],
)  # fmt: skip
def test_what_is_no_metric_is_refused_in_one_line(tmp_path: Path, plan: Plan, name: Any, value: Any) -> None:
    job = Job()
    with open_job(job, tmp_path, plan) as checkpointer:
        with pytest.raises(ValueError, match=r"name must be|must be one real number") as caught:
            checkpointer.metric(name, value)
        assert "\n" not in str(caught.value)


def test_every_kind_of_number(tmp_path: Path, plan: Plan, caplog: pytest.LogCaptureFixture) -> None:
    job = Job()
    given = {
        "int": 3, "numpy": np.float32(0.5), "tensor": torch.tensor(0.25), "one": torch.tensor([2]), "low": -1e300,
        "loss": float("nan"), "inf": float("inf"),
    }  # fmt: skip
    with open_job(job, tmp_path, plan, keep_best=1) as checkpointer:
        job.iterate()
        for name, value in given.items():
            checkpointer.metric(name, value)
    found = told(tmp_path, 1)
    assert str(found) == str({name: float(value) for name, value in sorted(given.items())})
    assert caplog.text.count("the metric loss of step 1 is nan: such a state has no rank") == 1
    checkpointer.metric("loss", 0.1)
    assert "this Checkpointer is closed" in caplog.text


def test_what_is_monitored_and_never_told_is_said(tmp_path: Path, plan: Plan, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    job = Job()
    with open_job(job, tmp_path, plan, keep_best=1) as checkpointer:
        for _ in checkpointer.steps(2):
            job.iterate()
            checkpointer.metric("val-loss", 0.1)
    assert "keep_best=1: no metric loss was recorded, but val-loss" in caplog.text


def test_every_nth_stays(tmp_path: Path, plan: Plan) -> None:
    job = Job()
    for stop in (9, 17):  # two runs
        with open_job(job, tmp_path, plan, every=2, keep_every=6) as checkpointer:
            for _ in checkpointer.steps(stop):
                job.iterate()
    assert steps(tmp_path) == [6, 12, 16, 17]


def test_bad_rules_are_refused_before_anything_is_made(tmp_path: Path, plan: Plan) -> None:
    for bad in ({"keep_best": 1, "monitor": None}, {"mode": "lowest"}, {"keep_every": 0}, {"keep_latest": 1}):
        with pytest.raises(ValueError, match=r"keep_best|mode|keep_every|keep_latest"):
            open_job(Job(), tmp_path / "checkpoints", plan, **bad)
    assert not (tmp_path / "checkpoints").exists()
