"""The process that plans beside training: what it answers, how it ends, and what becomes of a job where it fails."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from checkflow import api
from checkflow.api import Checkpointer
from checkflow.core import plan as plans
from checkflow.core.errors import PlanError
from checkflow.core.planner_api import PlanLimits, PlannerInput, PlanResponse
from checkflow.planner.live import planner
from checkflow.planner.live.bandwidth import CopyBandwidths, measure_bandwidths
from checkflow.planner.live.planner import LivePlanner, PlanProcess
from checkflow.planner.schedule.replay import check_plan
from checkflow.planner.schedule.scheduler import PlanRequest, bandwidth_in_pieces
from checkflow.runtime.live_plan import planning
from tests.support.own_plans import Beside, Job, all_planned, check, kept, open_job, train
from tests.support.timelines import make_fingerprint, make_timeline
from tests.support.waiting import wait_for

PATIENCE_SECONDS = 600.0  # for what must come
CHILD = [sys.executable, "-P", "-m", "checkflow.planner.live.process"]


@pytest.fixture(autouse=True)
def _planner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "check_plan", check_plan)
    monkeypatch.setattr(api, "make_planner", LivePlanner)
    monkeypatch.setattr(planning, "RETRY_SECONDS", 0.0)


def planner_input(path: Path) -> PlannerInput:
    timeline = make_timeline([(0, 4), (2, 6), (1, 4)], [(2, [2])])
    return PlannerInput(timeline, make_fingerprint(timeline), 6, 1e6, 1e6, 100, PlanLimits(), str(path))


def test_it_plans_behind_training_and_is_deaf_to_the_terminal(tmp_path: Path) -> None:
    making = PlanProcess(planner_input(tmp_path / "plan.json"))
    process = psutil.Process(making.pid)
    assert os.getpgid(making.pid) != os.getpgid(0)  # where a terminal's Ctrl-C goes
    wait_for(lambda: process.nice() == 19 or process.status() == psutil.STATUS_ZOMBIE)
    os.kill(making.pid, signal.SIGINT)
    answer = wait_for(making.poll)
    assert answer == PlanResponse(str(tmp_path / "plan.json"), seconds=answer.seconds)
    assert answer.seconds > 0
    check_plan(plans.load(tmp_path / "plan.json"))
    assert not process.is_running()
    making.close()


def test_it_imports_no_torch() -> None:
    code = "import sys, checkflow.planner.live.process; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE_SECONDS)


def test_it_serves_nobody_else() -> None:
    """Its parent has ended before it began: it ends too, whatever there would be to read."""
    done = subprocess.run([*CHILD, "1"], stdin=subprocess.DEVNULL, capture_output=True, timeout=PATIENCE_SECONDS)
    assert (done.returncode, done.stdout, done.stderr) == (1, b"", b"")


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("/bin/false", "the process that plans failed with exit code 1: it gave no reason"),
        ("/bin/true", "the process that plans gave no answer"),
        ("nowhere", "cannot start a process that plans: No such file or directory"),
        ("time", "the process that plans had not ended after 0 s"),
        ("signal", "the process that plans was ended by SIGKILL"),
        ("folder", "cannot write the plan to"),
        ("input", "the process that plans failed with exit code 1: "),
        ("memory", "training alone needs 6 B of device memory; the limit is 5 B"),
    ],
)
def test_what_goes_wrong_is_said_in_one_line(tmp_path: Path, monkeypatch: Any, fault: str, reason: str) -> None:
    asked = planner_input(tmp_path / "plan.json")
    if fault in ("/bin/false", "/bin/true", "nowhere"):
        monkeypatch.setattr(sys, "executable", fault)
    elif fault == "time":
        monkeypatch.setattr(planner, "CHILD_SECONDS", 0.0)
    elif fault == "folder":
        asked = planner_input(tmp_path / "missing" / "plan.json")
    elif fault == "input":
        asked = dataclasses.replace(asked, graph_peak_bytes=1.5)  # type: ignore[arg-type]
    elif fault == "memory":
        asked = dataclasses.replace(asked, memory_limit_bytes=5)
    if fault == "nowhere":
        with pytest.raises(PlanError, match=reason):
            PlanProcess(asked)
        return
    making = PlanProcess(asked)
    if fault == "signal":
        os.kill(making.pid, signal.SIGKILL)
    answer = wait_for(making.poll)
    assert answer.path is None
    assert answer.reason.startswith(reason)
    assert "\n" not in answer.reason
    assert answer.final == (fault == "memory")
    assert not psutil.pid_exists(making.pid)
    assert list(tmp_path.iterdir()) == []


def process_of(checkpointer: Checkpointer) -> PlanProcess | None:
    place = checkpointer._loop.place.planning
    assert place is not None
    assert place._making is None or isinstance(place._making, PlanProcess)
    return place._making


@pytest.mark.slow
def test_a_job_whose_planning_is_killed_is_planned_later(tmp_path: Path, caplog: Any) -> None:
    job, killed = Job(), []

    def before(_: int) -> None:
        making = process_of(checkpointer)
        if making is not None:
            if not killed:
                killed.append(making.pid)
                os.kill(making.pid, signal.SIGKILL)
            making._process.wait()

    with open_job(job, tmp_path, every=1, on_error="warn") as checkpointer:
        truths = train(job, checkpointer, 16, before)
    assert check(tmp_path, truths) == list(range(1, 17))
    assert caplog.text.count("was ended by SIGKILL") == 1
    assert checkpointer.report()["plan"]["source"] == "recorded"
    assert len(kept(tmp_path)) == 1
    assert all_planned(tmp_path, after=9)  # four to the first try, two that see it fail, three more


@pytest.mark.parametrize("when", ["before the start", "while it is made", "as the job ends"])
def test_what_a_killed_planner_left_half_written_is_removed(tmp_path: Path, when: str) -> None:
    """A job may end before it is planned again."""
    job, half = Job(), tmp_path / "plans" / f".{'0123456789abcdef' * 2}.json.4711.tmp"

    def leave() -> None:
        half.parent.mkdir(exist_ok=True)
        half.write_text("{")

    def before(_: int) -> None:
        making = process_of(checkpointer)
        if making is not None and when == "while it is made":
            if not killed:
                killed.append(making.pid)
                leave()
                os.kill(making.pid, signal.SIGKILL)
            making._process.wait()

    killed: list[int] = []
    if when == "before the start":
        leave()
    with open_job(job, tmp_path, every=1, on_error="warn") as checkpointer:
        assert not half.exists()
        train(job, checkpointer, 6, before)
        if when == "as the job ends":
            making = process_of(checkpointer)
            assert making is not None
            making._process.kill()
            leave()
    assert bool(killed) == (when == "while it is made")
    assert list(half.parent.glob(".*")) == []


@pytest.mark.slow
def test_a_job_that_cannot_be_planned_goes_on_and_says_why(tmp_path: Path, monkeypatch: Any, caplog: Any) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")

    def before(_: int) -> None:
        making = process_of(checkpointer)
        if making is not None:
            making._process.wait()

    job = Job()
    with open_job(job, tmp_path, every=3, on_error="warn") as checkpointer:
        truths = train(job, checkpointer, 16, before)
    assert check(tmp_path, truths) == [3, 6, 9, 12, 15, 16]
    assert caplog.text.count("no plan could be made of this job") == caplog.text.count("exit code 1") == 3
    assert (
        checkpointer.report()["planning"]["failure"]
        == "the process that plans failed with exit code 1: it gave no reason"
    )
    job = Job()
    with pytest.raises(PlanError, match="exit code 1"), open_job(job, tmp_path / "raising") as checkpointer:
        train(job, checkpointer, 16, before)


@pytest.mark.parametrize("end", ["the end", "an interrupt"])
def test_a_job_that_ends_ends_its_planning(tmp_path: Path, end: str) -> None:
    job, seen = Job(), []

    def before(n: int) -> None:
        making = process_of(checkpointer)
        if making is not None and not seen:
            seen.append(making.pid)
            os.kill(making.pid, signal.SIGSTOP)
        if n == 6 and end == "an interrupt":
            raise KeyboardInterrupt

    checkpointer = open_job(job, tmp_path)
    try:
        with checkpointer:
            train(job, checkpointer, 8, before)
    except KeyboardInterrupt:
        assert end == "an interrupt"
    assert seen
    assert not psutil.pid_exists(seen[0])
    assert kept(tmp_path) == []


def test_the_link_is_measured() -> None:
    found = measure_bandwidths(torch.device("cpu"))
    assert 1e8 < found.link_bytes_per_second < 1e13
    assert found.memory_bytes_per_second == 2 * found.link_bytes_per_second
    assert 0 <= found.copy_seconds < 1.0


def test_what_pieces_cost_is_planned_with(tmp_path: Path, monkeypatch: Any) -> None:
    """From the measurement, through what the process that plans is told, into the plan."""
    monkeypatch.setattr(api, "make_planner", Beside)
    monkeypatch.setattr(planner, "_bandwidths", lambda _: CopyBandwidths(1e10, 2e10, 1e-6))
    job = Job()
    with open_job(job, tmp_path, every=1) as checkpointer:
        train(job, checkpointer, 6)
    (file,) = kept(tmp_path)
    plan = plans.load(file)
    expected = bandwidth_in_pieces(plan.timeline, PlanRequest(1e10, 2e10, copy_seconds=1e-6))
    assert plan.bandwidth_bytes_per_second == expected < 0.9e10
    assert plan.memory_bandwidth_bytes_per_second == 2e10
