"""Jobs that bring no plan: recorded, planned beside training, put in place, kept, and followed when they change."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.data import TensorDataset

from checkflow import api
from checkflow.api import Checkpointer
from checkflow.core import plan as plans
from checkflow.core.errors import PlanError, TraceError
from checkflow.core.planner_api import PlannerInput
from checkflow.planner.live import planner, process
from checkflow.planner.live.bandwidth import CopyBandwidths
from checkflow.planner.live.planner import LivePlanner
from checkflow.planner.record.recorder import IterationRecorder, RecordedIteration
from checkflow.planner.schedule.replay import check_plan
from checkflow.runtime import reporter
from checkflow.runtime.data.loader import DataLoader
from checkflow.runtime.job import compatibility
from checkflow.runtime.live_plan import planning
from checkflow.runtime.live_plan.cache import PlanCache
from checkflow.runtime.live_plan.planning import Planning
from checkflow.runtime.loop import pacing, training_loop
from checkflow.runtime.loop.phase_clock import PhaseClock
from checkflow.runtime.snapshot.share import RankShare
from checkflow.runtime.state.collect import StateWalk
from checkflow.runtime.state.meshes import RankView
from checkflow.runtime.store.discovery import find
from checkflow.runtime.store.store import Store
from tests.runtime.loop.test_phase_clock import Hand
from tests.support.oracle import assert_checkpoint_is, run_oracle, same_bits
from tests.support.own_plans import (
    Beside,
    Job,
    all_planned,
    check,
    kept,
    nothing_left,
    open_job,
    remove_checkpoints,
    train,
)
from tests.support.waiting import wait_until_saved

RECORDED_BY = 4  # iterations: one makes the state, one is recorded, two are timed; the next one waits for the plan


@pytest.fixture(autouse=True)
def _planner(monkeypatch: pytest.MonkeyPatch) -> None:
    Beside.recordings = 0
    monkeypatch.setattr(api, "check_plan", check_plan)
    monkeypatch.setattr(api, "make_planner", Beside)
    monkeypatch.setattr(planning, "RETRY_SECONDS", 0.0)
    monkeypatch.setattr(planner, "_bandwidths", lambda _: CopyBandwidths(1e10, 2e10))


# From nothing to a plan


def test_a_job_without_a_plan_gets_one_and_every_checkpoint_is_true(tmp_path: Path, caplog: Any) -> None:
    job = Job()
    with caplog.at_level(logging.INFO, "checkflow"), open_job(job, tmp_path, every=1) as checkpointer:
        truths = train(job, checkpointer, 12)
    report = checkpointer.report()
    assert check(tmp_path, truths) == list(range(1, 13))  # those before the plan too: copied at the boundary
    assert report["plan"]["source"] == "recorded"
    assert report["breaches"] == report["failed"] == 0
    assert (report["plan"]["interval"], report["planning"]["stage"], Beside.recordings) == (1, "planned", 1)
    assert report["planning"]["seconds"] > 0
    assert "there is no plan yet" in caplog.text
    assert caplog.text.count("a plan runs from here on") == 1
    (file,) = kept(tmp_path)
    plan = plans.load(file)
    assert plan.digest == report["plan"]["digest"]
    check_plan(plan)
    assert plan.fingerprint.batch == (((6, 8), "float32"),)
    assert {spec.name for spec in plan.fingerprint.state} == set(truths[12])
    # Nothing of the state that has a place in the plan is copied at the boundary any more.
    assert report["newest_capture"]["boundary_bytes"] == sum(
        spec.size_bytes for spec in plan.fingerprint.state if spec.host
    )
    assert all_planned(tmp_path, after=RECORDED_BY)
    assert nothing_left(job)


def test_the_next_start_takes_the_kept_plan(tmp_path: Path, caplog: Any) -> None:
    job = Job()
    with open_job(job, tmp_path) as checkpointer:
        train(job, checkpointer, 8)
    first = checkpointer.report()["plan"]["digest"]
    job = Job()
    Beside.recordings = 0
    with caplog.at_level(logging.INFO, "checkflow"), open_job(job, tmp_path, every=1) as checkpointer:
        assert checkpointer.resumed_from == 8
        truths = train(job, checkpointer, 14)
    report = checkpointer.report()
    assert (report["plan"]["digest"], report["plan"]["source"], Beside.recordings) == (first, "cache", 0)
    for path in find(tmp_path):
        if (step := int(path.name[5:])) > 8:
            assert_checkpoint_is(path, truths[step])
    assert report["breaches"] == report["failed"] == 0
    assert "a kept plan runs: a checkpoint every iteration" in caplog.text


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda job: job.__init__(width=24), id="another state"),
        pytest.param(lambda job: job.__init__(foreach=True), id="another implementation"),
        pytest.param(
            lambda job: job.__init__(amsgrad=True), id="further state of the optimizer, seen at its first step"
        ),
        pytest.param(None, id="other wishes"),
        pytest.param("damage", id="a damaged file"),
    ],
)
def test_a_kept_plan_that_does_not_fit_is_not_used(tmp_path: Path, change: Any, caplog: Any) -> None:
    job = Job()
    with open_job(job, tmp_path) as checkpointer:
        train(job, checkpointer, 6)
    (file,) = kept(tmp_path)
    remove_checkpoints(tmp_path)
    job, options = Job(), {}
    if callable(change):
        change(job)
    elif change == "damage":
        file.write_bytes(file.read_bytes().replace(b"optimal", b"feasible"))
    else:
        options["overhead"] = 0.5
    with open_job(job, tmp_path, every=1, **options) as checkpointer:
        truths = train(job, checkpointer, 10)
    report = checkpointer.report()
    assert (report["plan"]["source"], Beside.recordings, report["breaches"]) == ("recorded", 2, 0)
    assert check(tmp_path, truths) == list(range(1, 11))
    assert ("digest does not fit" in caplog.text) == (change == "damage")


def test_a_peak_from_before_a_plan_is_not_told_as_the_plans(tmp_path: Path, monkeypatch: Any) -> None:
    peak, told = [1000], {}
    for module in (training_loop, reporter):
        monkeypatch.setattr(module, "allocated_peak_bytes", lambda _: peak[0])
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda _: 4096)

    def before(n: int) -> None:
        peak[0] = {2: 1500, 8: 1600, 10: 700}.get(
            n, peak[0]
        )  # recording took more; then the plan; a reset of the user's
        report = checkpointer.report()
        told[n] = report["plan"] is not None, report["measured"]["peak_bytes"], report["measured"]["peak_exactly"]

    job = Job()
    with open_job(job, tmp_path, every=1) as checkpointer:
        train(job, checkpointer, 12, before)
    assert [told[n] for n in (0, 2, 7, 8, 10)] == [
        (False, 1000, False), (False, 1500, True), (True, 1500, False), (True, 1600, True), (True, 700, True),
    ]  # fmt: skip


def test_recording_changes_nothing(tmp_path: Path) -> None:
    plain, watched = Job(), Job()
    torch.manual_seed(1)
    for _ in range(9):
        plain.iterate()
    drawn = torch.get_rng_state()
    torch.manual_seed(1)
    with open_job(watched, tmp_path) as checkpointer:
        for _ in checkpointer.steps(9):
            watched.iterate()
    assert checkpointer.report()["plan"]["source"] == "recorded"
    assert torch.equal(torch.get_rng_state(), drawn)
    expected, state = plain.state(), watched.state()
    assert all(same_bits(expected[name], tensor) for name, tensor in state.items())


# Every loop shape


def by_epochs(job: Job, checkpointer: Checkpointer, count: int, note: Callable[[int], None]) -> None:
    for epoch in checkpointer.epochs(count):
        for number, (x, y) in enumerate(checkpointer.loader):
            job.iterate(x, y)
            note(epoch * 6 + number + 1)
        job.model.eval()
        job.model(torch.randn(3, 8))
        job.model.train()


def by_loader(job: Job, checkpointer: Checkpointer, count: int, note: Callable[[int], None]) -> None:
    step = 0
    for _ in range(count):
        for x, y in checkpointer.loader:
            job.iterate(x, y)
            step += 1
            note(step)


def by_accumulation(job: Job, checkpointer: Checkpointer, count: int, note: Callable[[int], None]) -> None:
    """Two batches an iteration, the boundary marked, one batch fetched ahead."""
    step = 0
    for _ in checkpointer.epochs(2 * count):
        batches = iter(checkpointer.loader)
        following = next(batches)
        for number in range(6):
            (x, y), following = following, next(batches, None)
            job.backward(x, y)
            if number % 2:
                job.optimizer.step()
                checkpointer.step(batches=2)
                step += 1
                note(step)
                job.optimizer.zero_grad()


def by_forward(job: Job, checkpointer: Checkpointer, count: int, note: Callable[[int], None]) -> None:
    """Nobody says where a boundary is: the next forward tells."""
    for step in range(6 * count):
        job.iterate()
        note(step + 1)


def by_step(job: Job, checkpointer: Checkpointer, count: int, note: Callable[[int], None]) -> None:
    for step in range(6 * count):
        job.iterate()
        checkpointer.step()
        note(step + 1)


@pytest.mark.parametrize("loop", [by_epochs, by_loader, by_accumulation, by_forward, by_step])
def test_every_shape_of_loop(tmp_path: Path, loop: Any, caplog: pytest.LogCaptureFixture) -> None:
    job, truths = Job(), {}
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(22, 8, generator=generator), torch.randint(0, 5, (22,), generator=generator))
    loader = DataLoader(data, 4, shuffle=True) if loop in (by_epochs, by_loader, by_accumulation) else None
    with open_job(job, tmp_path, every=1, loader=loader) as checkpointer:
        loop(job, checkpointer, 3, lambda step: truths.__setitem__(step, job.state()))
    report = checkpointer.report()
    assert check(tmp_path, truths) == list(range(1, 19))
    assert (report["plan"]["source"], report["breaches"], report["failed"]) == ("recorded", 0, 0)
    fingerprint = plans.load(kept(tmp_path)[0]).fingerprint
    assert fingerprint.micro_batches == (2 if loop is by_accumulation else 1)
    rows = 4 if loader is not None else 6
    assert fingerprint.batch[0] == ((rows, 8), "float32")  # not the smaller one at an epoch's end
    assert len(fingerprint.batch) == (1 if loader is None else 2)
    assert "the job carries" not in caplog.text  # a batch that was fetched ahead comes again
    assert nothing_left(job)


@pytest.mark.parametrize("what", ["validation", "a smaller batch", "nothing"])
def test_what_is_recorded_is_an_iteration_like_those_after_it(tmp_path: Path, what: str) -> None:
    job = Job()

    def before(n: int) -> None:
        job.batch_size = 3 if what == "a smaller batch" and n == 1 else 6
        if what == "validation" and n == 1:
            job.model.eval()
            job.model(torch.randn(50, 8))
            job.model.train()

    with open_job(job, tmp_path) as checkpointer:
        train(job, checkpointer, 9, before)
    (file,) = kept(tmp_path)
    assert plans.load(file).fingerprint.batch[0] == ((6, 8), "float32")
    assert Beside.recordings == (1 if what == "nothing" else 2)


def test_where_no_two_iterations_are_alike_the_first_recording_serves(tmp_path: Path) -> None:
    job = Job()
    with open_job(job, tmp_path, plan="auto") as checkpointer:
        train(job, checkpointer, 20, lambda n: setattr(job, "batch_size", n + 2))
    assert Beside.recordings == 1
    assert checkpointer.report()["planning"]["stage"] == "planned"


@pytest.mark.parametrize("iterations", range(7))
@pytest.mark.parametrize("loop", ["steps", "loader", "forward"])
def test_jobs_that_end_early_save_their_last_boundary(tmp_path: Path, loop: str, iterations: int) -> None:
    job = Job()
    data = TensorDataset(torch.randn(4 * iterations + 1, 8), torch.randint(0, 5, (4 * iterations + 1,)))
    loader = DataLoader(data, 4, drop_last=True) if loop == "loader" else None
    with open_job(job, tmp_path, loader=loader) as checkpointer:
        if loop == "steps":
            train(job, checkpointer, iterations)
        elif loop == "loader":
            for x, y in checkpointer.loader:
                job.iterate(x, y)
        else:
            for _ in range(iterations):
                job.iterate()
    steps = [int(path.name[5:]) for path in find(tmp_path)]
    if not iterations:
        assert steps == []
        return
    assert steps[0] == iterations
    assert_checkpoint_is(find(tmp_path)[0], job.state())
    assert nothing_left(job)


def test_the_ends_of_epochs_are_saved_before_there_is_a_plan(tmp_path: Path) -> None:
    job = Job()
    data = TensorDataset(torch.randn(8, 8), torch.randint(0, 5, (8,)))
    truths = {}
    with open_job(job, tmp_path, loader=DataLoader(data, 4)) as checkpointer:
        for epoch in checkpointer.epochs(2):
            if epoch:
                wait_until_saved(tmp_path, 2 * epoch)  # or a newer end of an epoch takes its place
            for x, y in checkpointer.loader:
                job.iterate(x, y)
            truths[2 * epoch + 2] = job.state()
    assert check(tmp_path, truths) == [2, 4]


@pytest.mark.slow
def test_optimizers_of_different_cadence_are_recorded_when_all_step(tmp_path: Path) -> None:
    job = Job()
    other = nn.Linear(8, 8)
    rare = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
    job.models, job.optimizers = {**job.models, "other": other}, {**job.optimizers, "rare": rare}

    def iterate(n: int) -> None:
        job.optimizer.zero_grad()
        rare.zero_grad()
        F.cross_entropy(job.model(other(torch.randn(6, 8))), torch.randint(0, 5, (6,))).backward()
        job.optimizer.step()
        if n % 4 == 2:
            rare.step()

    with open_job(job, tmp_path, every=1) as checkpointer:
        truths = run_oracle(checkpointer, iterate, job.models, job.optimizers, iterations=16)
    assert check(tmp_path, truths) == list(range(1, 17))
    anchors = {str(step.anchor) for step in plans.load(kept(tmp_path)[0]).timeline.steps if step.anchor}
    assert "optimizer_pre rare" in anchors
    assert checkpointer.report()["breaches"] == 0


# What does not go well


@pytest.fixture
def slow_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two iterations and a half for one checkpoint."""
    real = LivePlanner.planner_input

    def slow(self: LivePlanner, recorded: RecordedIteration, **asked: Any) -> PlannerInput:
        given = real(self, recorded, **asked)
        rate = given.timeline.state_bytes / given.timeline.iteration_seconds / 2.5
        return dataclasses.replace(given, bandwidth_bytes_per_second=rate)

    monkeypatch.setattr(LivePlanner, "planner_input", slow)


@pytest.mark.usefixtures("slow_link")
def test_a_plan_of_several_iterations_and_every(tmp_path: Path, caplog: Any) -> None:
    """``every`` becomes a multiple of the interval, and says so."""
    job = Job()
    with open_job(job, tmp_path, every=5, overhead=0.5, extra_memory="1MB") as checkpointer:
        truths = train(job, checkpointer, 30)
    interval = checkpointer.report()["plan"]["interval"]
    assert 1 < interval < 5
    rounded = 5 + -5 % interval
    assert check(tmp_path, truths) == list(range(rounded, 31, rounded))
    assert f"every=5 is no multiple of the interval of this job's plan, {interval}" in caplog.text
    assert checkpointer.report()["breaches"] == 0


@pytest.mark.usefixtures("slow_link")
@pytest.mark.parametrize("at", [13, 14, 15])  # where the plan makes a checkpoint, and in the midst of one
def test_a_capture_in_flight_is_finished_before_the_job_is_recorded_again(tmp_path: Path, at: int) -> None:
    job, quiet = Job(), []

    def before(n: int) -> None:
        if n == at:
            use_foreach(job)  # no tensor is replaced: nothing else would end it
        if checkpointer._loop.place.quiet:  # nothing is copied beside an iteration that is recorded or timed
            quiet.append(n)
            assert checkpointer._loop.execution.capturer.step is None

    with open_job(job, tmp_path, plan="auto", overhead=0.5, extra_memory="1MB") as checkpointer:
        truths = train(job, checkpointer, 30, before)
    assert quiet == [1, 2, 3, at + 1, at + 2, at + 3]
    assert set(check(tmp_path, truths)) >= {30}
    assert checkpointer.report()["breaches"] == checkpointer.report()["failed"] == 0


@pytest.mark.slow
def test_no_plan_satisfies_what_was_asked(tmp_path: Path, monkeypatch: Any, caplog: Any) -> None:
    monkeypatch.setattr(planner, "_memory_bytes", lambda _: 1000)
    job = Job()
    with open_job(job, tmp_path, every=2, on_error="warn") as checkpointer:
        truths = train(job, checkpointer, 12)
    assert check(tmp_path, truths) == [2, 4, 6, 8, 10, 12]
    assert caplog.text.count("this job gets no plan") == 1
    assert Beside.recordings == 1
    report = checkpointer.report()
    assert (report["planning"]["stage"], report["plan"]) == ("given up", None)
    assert "training alone" in report["planning"]["failure"]
    assert "--" not in report["planning"]["failure"]  # nobody typed a command
    job = Job()
    with pytest.raises(PlanError, match="gets no plan"), open_job(job, tmp_path / "raising") as checkpointer:
        train(job, checkpointer, 12)


@pytest.mark.parametrize("when", ["begin", "end", "operator"])
def test_a_fault_of_the_recorder_ends_recording_and_not_training(
    tmp_path: Path, monkeypatch: Any, caplog: Any, when: str
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("planted")

    if when == "operator":
        monkeypatch.setattr("checkflow.planner.record.recorder._LiveMode._note", fail)
    else:
        monkeypatch.setattr(IterationRecorder, when, fail)
    plain, job = Job(), Job()
    torch.manual_seed(1)
    for _ in range(8):
        plain.iterate()
    torch.manual_seed(1)
    with open_job(job, tmp_path, every=2, on_error="warn") as checkpointer:
        train(job, checkpointer, 8)
    expected = plain.state()
    assert all(same_bits(expected[name], tensor) for name, tensor in job.state().items())
    assert "ZeroDivisionError: planted" in caplog.text
    assert [int(path.name[5:]) for path in find(tmp_path)] == [8, 6, 4, 2]
    assert nothing_left(job)


@pytest.mark.slow
def test_iterations_that_cannot_be_recorded_are_tried_a_few_times(
    tmp_path: Path, monkeypatch: Any, caplog: Any
) -> None:
    def refuse(self: IterationRecorder, **_: Any) -> None:
        self.abandon()
        raise TraceError("no steady state")

    monkeypatch.setattr(IterationRecorder, "end", refuse)
    job = Job()
    with open_job(job, tmp_path, on_error="warn") as checkpointer:
        truths = train(job, checkpointer, 20)
    assert Beside.recordings == planning.MOST_RECORDINGS
    assert caplog.text.count("no steady state") == 1
    assert check(tmp_path, truths)[0] == pacing.UNDISTURBED


def test_an_interrupt_in_the_recorded_iteration_gives_everything_back(tmp_path: Path) -> None:
    job = Job()

    def before(n: int) -> None:
        if n == 1:
            job.model(torch.randn(6, 8))
            assert _get_current_dispatch_mode_stack()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), open_job(job, tmp_path, every=1) as checkpointer:
        train(job, checkpointer, 9, before)
    assert nothing_left(job)
    assert [int(path.name[5:]) for path in find(tmp_path)] == [1]


@pytest.mark.slow
def test_the_plan_cannot_be_put_in_place_for_lack_of_memory(tmp_path: Path, monkeypatch: Any, caplog: Any) -> None:
    """Staging buffers for it are refused twice; checkpoints go on without it, and it is made again."""
    from checkflow.core.errors import StorageError
    from checkflow.runtime.memory_tier.staging import StagingBuffers

    grow, refused = StagingBuffers.grow, []

    def refuse(self: StagingBuffers, size_bytes: int) -> None:
        if checkpointer.report()["planning"]["stage"] == "making the plan" and len(refused) < 2:
            refused.append(size_bytes)
            self.wait_all_free()
            self.close()
            raise StorageError("no host memory")
        grow(self, size_bytes)

    job = Job()
    with open_job(job, tmp_path, every=1, on_error="warn") as checkpointer:
        monkeypatch.setattr(StagingBuffers, "grow", refuse)
        truths = train(job, checkpointer, 24)
    assert len(refused) == 2
    assert check(tmp_path, truths) == list(range(1, 25))
    assert checkpointer.report()["plan"]["source"] == "recorded"
    assert "no host memory" in caplog.text


@pytest.mark.slow
def test_the_folder_of_plans_is_nothing_to_the_store(tmp_path: Path) -> None:
    job = Job()
    with open_job(job, tmp_path) as checkpointer:
        train(job, checkpointer, 7)
    (file,) = kept(tmp_path)
    left = file.with_name(f".{file.name}.123.tmp")
    left.write_text("half of a plan")
    (file.parent / "notes.txt").write_text("the user's own")
    with Store(tmp_path, run_id="other") as store:
        assert [path.name for path in store.checkpoints()] == [path.name for path in find(tmp_path)]
    job = Job(width=32)
    with open_job(job, tmp_path / "x") as checkpointer:
        train(job, checkpointer, 7)
    os.rename(kept(tmp_path / "x")[0], file.parent / kept(tmp_path / "x")[0].name)
    remove_checkpoints(tmp_path)
    job = Job(width=40)
    with open_job(job, tmp_path) as checkpointer:
        train(job, checkpointer, 7)
    assert len(kept(tmp_path)) == 4  # three plans, and what is not ours
    assert not left.exists()


# Jobs that become others


def grow_layer(job: Job) -> None:
    layer = nn.Linear(5, 5)
    job.model.append(layer)
    job.optimizer.add_param_group({"params": list(layer.parameters())})


def unfreeze(job: Job) -> None:
    job.model[0].requires_grad_(True)


def wider_batches(job: Job) -> None:
    job.batch_size = 9


def use_foreach(job: Job) -> None:
    job.optimizer.param_groups[0]["foreach"] = True


def accumulate(job: Job) -> None:
    job.micro_batches = 2


def under_autocast(job: Job) -> None:
    plain = job.backward

    def backward(x: Any = None, y: Any = None) -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            plain(x, y)

    job.backward = backward  # type: ignore[method-assign]


CHANGES = [grow_layer, unfreeze, wider_batches, use_foreach, accumulate, under_autocast]


def changing(change: Callable[[Job], None]) -> Job:
    job = Job()
    if change is unfreeze:
        job.model[0].requires_grad_(False)
    return job


@pytest.mark.parametrize("change", CHANGES)
def test_auto_follows_a_job_that_becomes_another_one(tmp_path: Path, change: Callable[[Job], None]) -> None:
    job = changing(change)

    def before(n: int) -> None:
        if n == 10:
            change(job)
        if checkpointer._loop.place.quiet:  # nothing is copied beside an iteration that is recorded or timed
            assert checkpointer._loop.execution.capturer.step is None

    with open_job(job, tmp_path, every=1, plan="auto") as checkpointer:
        truths = train(job, checkpointer, 30, before)
    report = checkpointer.report()
    assert check(tmp_path, truths) == list(range(1, 31))
    assert (report["breaches"], report["failed"], report["plan"]["source"], Beside.recordings) == (0, 0, "recorded", 2)
    assert len(kept(tmp_path)) == 2
    plan = plans.load(next(path for path in kept(tmp_path) if plans.load(path).digest == report["plan"]["digest"]))
    assert {spec.name for spec in plan.fingerprint.state} == set(truths[30])
    assert report["newest_capture"]["boundary_bytes"] == sum(
        spec.size_bytes for spec in plan.fingerprint.state if spec.host
    )


def test_auto_sees_another_job_where_no_boundary_is_captured(tmp_path: Path, caplog: Any) -> None:
    """A plain loop, whose forward passes show where iterations end, and hardly a checkpoint."""
    job, told = changing(unfreeze), []
    with caplog.at_level(logging.INFO, "checkflow"), open_job(job, tmp_path, every=1000, plan="auto") as checkpointer:
        for n in range(20):
            if n == 10:
                assert checkpointer.report()["planning"]["stage"] == "planned"
                unfreeze(job)
            job.iterate()
            told.append("the job differs from the one that its plan was made for" in caplog.text)
    assert told.index(True) == 12  # planning reads the look of the boundary before, which has the new moments
    report = checkpointer.report()
    assert (report["plan"]["source"], report["planning"]["stage"], Beside.recordings) == ("recorded", "planned", 2)


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES)
def test_without_auto_a_job_keeps_its_plan_and_is_told_once(
    tmp_path: Path, change: Callable[[Job], None], caplog: Any
) -> None:
    job = changing(change)
    with open_job(job, tmp_path, every=1, on_error="warn") as checkpointer:
        truths = train(job, checkpointer, 24, lambda n: change(job) if n == 10 else None)
    assert check(tmp_path, truths) == list(range(1, 25))
    assert Beside.recordings == 1
    assert caplog.text.count('plan="auto" makes a new one') == 1
    assert checkpointer.report()["breaches"] == 0


def test_a_rank_follows_more_state_without_auto(tmp_path: Path) -> None:
    """What it copies moves with it, so that nearly nothing is where the plan has it."""
    job = changing(unfreeze)
    with open_job(job, tmp_path, every=1) as checkpointer:
        planning = checkpointer._loop.place.planning
        assert planning is not None
        planning._share = RankShare(RankView(0, 1), job.models, job.optimizers)
        truths = train(job, checkpointer, 30, lambda n: unfreeze(job) if n == 10 else None)
    assert check(tmp_path, truths) == list(range(1, 31))
    assert (checkpointer.report()["plan"]["source"], Beside.recordings) == ("recorded", 2)


@pytest.mark.slow
def test_auto_comes_back_to_a_plan_that_was_kept(tmp_path: Path) -> None:
    job = Job()

    def before(n: int) -> None:
        job.batch_size = 9 if 10 <= n < 25 else 6

    with open_job(job, tmp_path, plan="auto") as checkpointer:
        train(job, checkpointer, 40, before)
    assert Beside.recordings == 2
    assert checkpointer.report()["plan"]["source"] == "cache"


@pytest.mark.slow
def test_of_several_kept_plans_a_job_comes_to_its_own(tmp_path: Path, caplog: Any) -> None:
    plans_of = {}
    for batch_size, iterations in ((6, 8), (9, 20), (6, 32)):  # the plan for 9 is the newer one
        job = Job()
        job.batch_size = batch_size
        with open_job(job, tmp_path, plan="auto" if batch_size == 9 else None) as checkpointer:
            train(job, checkpointer, iterations)
        report = checkpointer.report()
        assert report["plan"]["digest"] == plans_of.setdefault(batch_size, report["plan"]["digest"])
    assert report["plan"]["source"] == "cache"
    assert len(set(plans_of.values())) == Beside.recordings == 2
    assert "follows it" not in caplog.text


def test_holding_a_job_against_its_plan_is_cheap(tmp_path: Path, monkeypatch: Any) -> None:
    """Nothing has changed: the look that each boundary has at all state is the only one."""
    job = Job()
    looked: list[str] = []
    looks: dict[int, list[str]] = {}

    def before(n: int) -> None:
        looks[n] = looked.copy()  # at the boundary before
        looked.clear()
        if n == 12:
            job.optimizer.param_groups[0]["foreach"] = True

    with open_job(job, tmp_path, every=100) as checkpointer:
        train(job, checkpointer, 8)
        for owner, name in ((StateWalk, "current"), (compatibility, "implementations"), (compatibility, "differences")):
            real = getattr(owner, name)
            noting = lambda *given, name=name, real=real, **how: looked.append(name) or real(*given, **how)  # noqa: E731
            monkeypatch.setattr(owner, name, noting)
        train(job, checkpointer, 16, before)
    assert looks[10] == looks[11] == looks[12] == looks[15] == ["current"]
    assert {"implementations", "differences"} <= set(looks[13])


@pytest.mark.slow
def test_what_planning_takes_of_every_iteration_is_part_of_the_cost(tmp_path: Path, monkeypatch: Any) -> None:
    """By a clock set by hand: looks at the job count, and what is done once for a plan does not."""
    hand = Hand()
    held: list[float] = []
    monkeypatch.setattr(training_loop, "PhaseClock", lambda: PhaseClock(hand))
    ended, look, begin, find_kept = pacing.Pace.ended, Planning._hold_against, IterationRecorder.begin, PlanCache.find

    def told(self: pacing.Pace, number: int, *, epoch_end: bool, held_seconds: float) -> None:
        held.append(held_seconds)
        ended(self, number, epoch_end=epoch_end, held_seconds=held_seconds)

    def slow(real: Any, seconds: float) -> Any:
        return lambda *given: (hand.wait(seconds), real(*given))[1]

    monkeypatch.setattr(pacing.Pace, "ended", told)
    monkeypatch.setattr(Planning, "_hold_against", slow(look, 7))
    monkeypatch.setattr(IterationRecorder, "begin", slow(begin, 1000))
    monkeypatch.setattr(PlanCache, "find", slow(find_kept, 100_000))
    job = Job()

    def before(n: int) -> None:
        job.batch_size = 6 if n < 12 else 9

    with open_job(job, tmp_path, plan="auto") as checkpointer:
        train(job, checkpointer, 24, before)
    assert Beside.recordings == 2
    added = [after - earlier for earlier, after in itertools.pairwise([0.0, *held])]
    # What is done at a boundary is the next iteration's. The first plan is in place from the fifth boundary on; the
    # other batches are believed at the seventeenth, where no plan is found for them; the next one comes four later.
    looks = [*range(7, 18), *range(23, 25)]
    assert added == [7 if step in looks else 0 for step in range(1, 25)]


def test_kept_plans_are_searched_once_for_each_change(tmp_path: Path, monkeypatch: Any) -> None:
    """Not at every boundary of a job whose batches are none that a plan was kept for: all plans are read for it."""
    job = Job()
    with open_job(job, tmp_path) as checkpointer:
        train(job, checkpointer, 8)
    searched: list[int] = []
    find_kept = PlanCache.find
    job = Job()
    job.batch_size = 9
    with open_job(job, tmp_path) as checkpointer:
        monkeypatch.setattr(
            PlanCache, "find", lambda *given: searched.append(checkpointer.iteration) or find_kept(*given)
        )

        def before(n: int) -> None:
            job.batch_size = 9 if n < 30 or n >= 50 else 12

        train(job, checkpointer, 70, before)
    report = checkpointer.report()
    assert (report["plan"]["source"], Beside.recordings) == ("cache", 1)
    assert len(searched) == 2  # for batches of 9 and of 12, and for those of 9 again it is known
    assert searched[0] < 30 < searched[1]


def test_a_smaller_batch_now_and_then_is_no_other_job(tmp_path: Path) -> None:
    job = Job()
    data = TensorDataset(torch.randn(10, 8), torch.randint(0, 5, (10,)))
    with open_job(job, tmp_path, loader=DataLoader(data, 4), plan="auto") as checkpointer:
        for _ in checkpointer.epochs(12):
            for x, y in checkpointer.loader:
                job.iterate(x, y)
    assert len(kept(tmp_path)) == 1
    assert checkpointer.report()["planning"]["stage"] == "planned"


@pytest.mark.slow
def test_auto_finds_another_job_in_its_directory(tmp_path: Path, caplog: Any) -> None:
    """The kept plan fits the state and not the batch: it runs until that is sure, then the job is recorded."""
    job = Job()
    with open_job(job, tmp_path) as checkpointer:
        train(job, checkpointer, 6)
    job = Job()
    job.batch_size = 9
    Beside.recordings = 0
    with open_job(job, tmp_path, plan="auto", every=1) as checkpointer:
        truths = train(job, checkpointer, 24)
    assert Beside.recordings == 1
    assert len(kept(tmp_path)) == 2
    for path in find(tmp_path):
        if (step := int(path.name[5:])) > 6:
            assert_checkpoint_is(path, truths[step])


def test_arguments(tmp_path: Path) -> None:
    job = Job()
    for options, message in [
        ({"overhead": -1}, "overhead"),
        ({"overhead": float("nan")}, "overhead"),
        ({"extra_memory": "many"}, "extra_memory"),
        ({"extra_memory": -1}, "extra_memory"),
        ({"extra_memory": 1.5}, "extra_memory"),
    ]:
        with pytest.raises(ValueError, match=message):
            open_job(job, tmp_path, **options)  # type: ignore[arg-type]


def test_wishes_reach_the_plan(tmp_path: Path, monkeypatch: Any) -> None:
    asked: list[Any] = []
    answer = process.respond
    monkeypatch.setattr(process, "respond", lambda given: asked.append(given.limits) or answer(given))
    job = Job()
    with open_job(job, tmp_path, overhead=0.01, extra_memory="2MB") as checkpointer:
        train(job, checkpointer, 6)
    (limits,) = asked
    assert (limits.overhead, limits.extra_memory_bytes) == (0.01, 2_000_000)
    assert checkpointer.report()["plan"]
