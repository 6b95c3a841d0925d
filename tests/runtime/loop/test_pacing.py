"""How often a real job is checkpointed: small ones, whose clock is the test's and goes on by what the test says."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from checkflow import api
from checkflow.api import Checkpointer
from checkflow.core import plan as plans
from checkflow.core.errors import TraceError
from checkflow.core.plan import Plan
from checkflow.planner.live.planner import LivePlanner
from checkflow.runtime.data.loader import DataLoader
from checkflow.runtime.interval.algorithm import Costs
from checkflow.runtime.interval.controller import GAP, Controller
from checkflow.runtime.interval.profile import NAME, Identity, ProfileCache
from checkflow.runtime.loop import pacing
from checkflow.runtime.loop.agreement import Agreement
from checkflow.runtime.persist.writer import Persisted, Writer
from checkflow.runtime.ranks.chair import Overview
from checkflow.runtime.ranks.member import View
from checkflow.runtime.store.discovery import find
from tests.runtime.test_checkpointer import make, make_plan
from tests.support.oracle import assert_checkpoint_is, clone_state, random_plan
from tests.support.own_plans import Beside, Job, Never
from tests.support.simulated import rest


class World:
    """The clock of a job: an iteration takes a second, and longer for each persist that ends in it."""

    def __init__(self) -> None:
        self.now = 0.0
        self.persist_seconds = 0.5  # as the writer measures it
        self.added_seconds = 0.25  # to training, by each
        self.held_seconds = 0.0  # that training waits for each capture
        self.really_held_seconds = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    """Also: random plans have no link, and storage takes as long as the world says."""
    world = World()
    rule(world, monkeypatch)
    return world


def rule(world: World, patch: pytest.MonkeyPatch) -> None:
    persist, ended = Writer._persist, pacing.Pace.ended

    def held(self: pacing.Pace, number: int, *, epoch_end: bool, held_seconds: float) -> None:
        world.really_held_seconds = held_seconds
        ended(self, number, epoch_end=epoch_end, held_seconds=self._saving.captures * world.held_seconds)

    def timed(self: Writer, capture: Any) -> Persisted:
        return dataclasses.replace(persist(self, capture), seconds=world.persist_seconds)

    patch.setattr(api, "check_plan", plans.validate)
    patch.setattr(pacing, "clock", world)
    patch.setattr(pacing.Pace, "ended", held)
    patch.setattr(Writer, "_persist", timed)


def plan_for(width: int = 16, interval: int = 1) -> Plan:
    job = Job(width)
    job.iterate()
    return random_plan(job.models, job.optimizers, 0, interval=interval)


def open_job(job: Job, directory: Path, plan: Any = None, loader: Any = None, **options: Any) -> Checkpointer:
    chosen = {"audit": 0, "keep_latest": 500, "on_error": "raise", **options}
    return Checkpointer(job.models, job.optimizers, loader, directory=directory, plan=plan or plan_for(), **chosen)


def train(
    job: Job, checkpointer: Checkpointer, world: World, until: int, before: Callable[[int], Any] = lambda n: None
) -> None:
    for n in checkpointer.steps(until):
        before(n)
        iterate(job, checkpointer, world)


def iterate(job: Job, checkpointer: Checkpointer, world: World, *batch: torch.Tensor) -> None:
    """One iteration, at the end of which storage is at rest."""
    writer = checkpointer._loop._saving.writer
    committed = writer.committed
    job.iterate(*batch)
    rest(checkpointer._loop._saving.engine, writer)
    world.now += 1.0 + (writer.committed - committed) * world.added_seconds


def steps(directory: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in find(directory))


def frequency(checkpointer: Checkpointer) -> dict[str, Any]:
    found: dict[str, Any] = checkpointer.report()["frequency"]
    return found


@pytest.mark.parametrize("costs", [Costs(1.0, 0.25, 3.0, 0.5), Costs(1.0, 0.25, 3.0, 0.5, 0.125)])
def test_a_profile_is_found_as_it_was_kept(costs: Costs, tmp_path: Path) -> None:
    identity = Identity("model", "batch", "plan", "cpu", 1, "ext4")
    cache = ProfileCache(tmp_path)
    cache.keep(identity, costs)
    assert cache.find(identity) == costs
    assert cache.find(dataclasses.replace(identity, ranks=2)) is None


def test_a_profile_of_before_hooks_were_measured(tmp_path: Path) -> None:
    test_a_profile_is_found_as_it_was_kept(Costs(1.0, 0.25, 3.0, 0.5), tmp_path)
    content = json.loads((tmp_path / NAME).read_text())
    assert content.pop("standing_seconds") == 0.0
    (tmp_path / NAME).write_text(json.dumps(content))
    assert ProfileCache(tmp_path).find(Identity(**content["identity"])) == Costs(1.0, 0.25, 3.0, 0.5)


def test_a_job_is_profiled_and_its_profile_kept(tmp_path: Path, world: World, caplog: pytest.LogCaptureFixture) -> None:
    job = Job()
    with caplog.at_level(logging.INFO, "checkflow"), open_job(job, tmp_path) as checkpointer:
        before = frequency(checkpointer)
        assert (before["reason"], before["memory_interval"], before["disk_interval"]) == ("profile", 1, None)
        train(job, checkpointer, world, 120)
        truth = clone_state(job.models, job.optimizers)
    told = frequency(checkpointer)
    # 0.25 s in each of k iterations of a second are 3.5 %: k is 7.14, or one more.
    assert (told["memory_interval"], told["disk_interval"], told["reason"]) == (1, 8, "overhead")
    assert told["baseline_seconds"] == 1.0
    assert told["persist_seconds"] == 0.5
    assert told["persist_cost_seconds"] == pytest.approx(0.25)
    assert told["capture_cost_seconds"] == 0.0
    assert told["overhead_share"] == pytest.approx(0.25 / 8)
    (change,) = told["changes"]
    assert f"from step {change['step']} on a checkpoint every 8 iterations" in caplog.text
    durable = [step for step in steps(tmp_path) if step > change["step"]]
    assert durable == [*range(durable[0], 120, 8), 120]
    assert checkpointer.report()["captures"] >= 60  # two iterations of eight are left free
    assert_checkpoint_is(find(tmp_path)[0], truth)
    assert json.loads((tmp_path / NAME).read_text())["interference_seconds"] == pytest.approx(0.25)

    again = Job()
    with open_job(again, tmp_path) as checkpointer:
        train(again, checkpointer, world, 160)
    (change,) = frequency(checkpointer)["changes"]
    assert (change["step"], change["memory"], change["disk"]) == (121, 1, 8)
    assert [step for step in steps(tmp_path) if step > 120] == [128, 136, 144, 152, 160]


def test_the_line_at_the_start_says_what_the_job_begins_with(
    tmp_path: Path, world: World, caplog: pytest.LogCaptureFixture
) -> None:
    plan = plan_for()
    plan = dataclasses.replace(plan, fingerprint=dataclasses.replace(plan.fingerprint, batch=(((6, 8), "float32"),)))
    measured = "a checkpoint every 8 iterations, and one in host memory every iteration, as measured before"
    anew = "what checkpoints cost is measured anew"
    for until, batch_size, options, often in (
        (120, 6, {}, "a checkpoint every iteration until it is measured what one costs"),
        (160, 6, {}, measured),
        (250, 6, {"mtbf": "4h"}, measured.replace("8", "85")),
        (252, 7, {}, measured),  # nobody has seen its batches yet
        (254, 6, {"every": 2}, "a checkpoint every 2 iterations"),
    ):
        job = Job()
        job.batch_size = batch_size
        caplog.clear()
        with caplog.at_level(logging.INFO, "checkflow"), open_job(job, tmp_path, plan, **options) as checkpointer:
            said = frequency(checkpointer)
            train(job, checkpointer, world, until)
        first, *others = (record.getMessage() for record in caplog.records)
        assert f"the given plan runs: {often}, predicted stall" in first
        assert any("on a checkpoint every" in line for line in others) == (until == 120)  # no news for the others
        assert any(anew in line for line in others) == (batch_size == 7)
        if until == 160:
            assert (said["memory_interval"], said["disk_interval"], said["reason"]) == (1, 8, "overhead")
            assert frequency(checkpointer)["changes"] == [{"step": 120, "memory": 1, "disk": 8, "reason": "overhead"}]
            assert [step for step in steps(tmp_path) if step > 120] == [128, 136, 144, 152, 160]
        if batch_size == 7:
            assert frequency(checkpointer)["reason"] == "profile"


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The profile of a small job, as it was kept."""
    directory = tmp_path_factory.mktemp("profiled")
    with pytest.MonkeyPatch.context() as patch:
        world = World()
        rule(world, patch)
        job = Job()
        with open_job(job, directory) as checkpointer:
            train(job, checkpointer, world, 80)
    return (directory / NAME).read_bytes()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("none", ""), ("width", ""), ("batch", ""), ("file system", ""), ("plan", ""), ("a FIFO", "it is a FIFO"),
        ("damage", "Invalid JSON"), ("nonsense", "an iteration takes none"), ("negative", "a time in it is negative"),
        ("more", "Unexpected keyword"), ("infinite", "finite"), ("no number", "finite"),
        ("endless", "more than 1e+09 s"), ("a folder", "it is a directory"),
    ],
)  # fmt: skip
def test_a_profile_of_another_job_does_not_count(
    change: str, said: str, kept: bytes, tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    job, plan, file, content = Job(), plan_for(), tmp_path / NAME, json.loads(kept)
    file.write_bytes(kept)
    if change == "width":
        job, plan = Job(32), plan_for(32)
    elif change == "batch":
        job.batch_size = 7
    elif change == "plan":
        plan = plan_for(interval=2)
    elif change == "file system":
        monkeypatch.setattr(pacing, "file_system", lambda path: ("nfs", 1))
    elif change == "damage":
        file.write_bytes(kept[:-5])
    elif change == "nonsense":
        file.write_text(json.dumps({**content, "iteration_seconds": 0.0}))
    elif change == "negative":
        file.write_text(json.dumps({**content, "persist_seconds": -1.0}))
    elif change == "infinite":
        file.write_text(json.dumps({**content, "persist_seconds": float("inf")}))
    elif change == "no number":
        file.write_text(json.dumps({**content, "iteration_seconds": float("nan")}))
    elif change == "endless":  # finite, but a number of iterations that follows from it may not be
        file.write_text(json.dumps({**content, "persist_seconds": 1e308}))
    elif change == "more":
        file.write_text(json.dumps({**content, "unknown": 1}))
    elif change == "a FIFO":
        file.unlink()
        os.mkfifo(file)
    elif change == "a folder":
        file.unlink()
        file.mkdir()
    with open_job(job, tmp_path, plan) as checkpointer:
        train(job, checkpointer, world, 3)
    told = frequency(checkpointer)
    assert (told["reason"], told["disk_interval"]) == (("overhead", 8) if change == "none" else ("profile", None))
    assert ("passing over" in caplog.text) == bool(said)
    assert said in caplog.text


def test_a_profile_that_cannot_be_kept_is_no_reason_to_fail(
    tmp_path: Path, world: World, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / NAME).mkdir()
    job = Job()
    with open_job(job, tmp_path) as checkpointer:
        train(job, checkpointer, world, 80)
    assert frequency(checkpointer)["disk_interval"] == 8
    assert "cannot keep the profile" in caplog.text


def test_what_storage_did_not_take_is_written_at_the_end(tmp_path: Path, world: World) -> None:
    """The newest capture is in host memory; an error in the loop is no reason to lose it."""
    job, truths = Job(), {}

    def failing(n: int) -> None:
        truths[n] = clone_state(job.models, job.optimizers)
        if n == 97:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), open_job(job, tmp_path) as checkpointer:
        train(job, checkpointer, world, 120, failing)
    assert frequency(checkpointer)["disk_interval"] == 8
    before, last = steps(tmp_path)[-2:]
    assert 97 - GAP <= last <= 97
    assert 97 - before < 8  # it was not yet storage's turn
    assert_checkpoint_is(find(tmp_path)[0], truths[last])


def waiting_capture(step: int) -> Any:
    layout = types.SimpleNamespace(buffer_bytes=0, files=())
    return types.SimpleNamespace(
        step=step, settled={}, digests=None, layout=layout, begun=0.0, by_plan=False, written_at=0.0, published_at=0.0
    )


class GatedStorage:
    """Commits nothing before it is let, and then notes the steps."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.written: list[int] = []

    def __call__(self, capture: Any) -> Path:
        self.gate.wait()
        self.written.append(capture.step)
        return Path()


def test_what_takes_the_place_of_a_waiting_capture_is_written() -> None:
    """Storage is due, and gets the newest; with nothing due, what is held back gives way unwritten."""
    commit, capture = GatedStorage(), waiting_capture
    gate, written = commit.gate, commit.written
    writer = Writer(commit, lambda capture: None, supersede=True)
    writer.submit(capture(1))
    with writer._changed:
        while not writer._busy:
            writer._changed.wait(0.01)
    writer.submit(capture(2))
    writer.hold(capture(3))
    assert writer.outstanding == 2
    writer.hold(capture(4))
    gate.set()
    with writer._changed:
        while writer._waiting or writer._busy:
            writer._changed.wait()
    writer.hold(capture(5))
    writer.hold(capture(6))
    assert (written, writer.outstanding) == ([1, 4], 0)
    writer.close()
    assert written == [1, 4, 6]
    assert writer.superseded == 3


def test_an_end_of_an_epoch_gives_way_to_a_newer_one_alone() -> None:
    """Retention keeps it; and where epochs are shorter than one commit, training is not held by them."""
    commit, capture = GatedStorage(), waiting_capture
    gate, written = commit.gate, commit.written
    dropped: list[int] = []
    writer = Writer(
        commit, lambda one: dropped.append(one.step), supersede=True,
        gives_way=lambda waiting, newer: waiting.step % 10 != 0 or newer.step % 10 == 0,
    )  # fmt: skip
    writer.submit(capture(1))
    with writer._changed:
        while not writer._busy:
            writer._changed.wait(0.01)
    for step in (10, 11, 20, 21, 22):
        writer.submit(capture(step))
    assert dropped == [10, 11, 21]
    gate.set()
    writer.close()
    assert written == [1, 20, 22]


def test_a_rank_spares_what_rank_0_may_still_ask_for() -> None:
    """The newest that waits is not replaced: rank 0 may have begun to write it when the next one comes."""
    commit, capture = GatedStorage(), waiting_capture
    dropped: list[int] = []
    writer = Writer(commit, lambda one: dropped.append(one.step), supersede=True, spared=1)
    writer.submit(capture(1))
    with writer._changed:
        while not writer._busy:
            writer._changed.wait(0.01)
    for step in (2, 3, 4, 5):
        writer.submit(capture(step))
    assert dropped == [2, 3]
    commit.gate.set()
    writer.close()
    assert commit.written == [1, 4, 5]


@pytest.mark.usefixtures("world")  # whose plans have no link
def test_each_capture_is_held_back_for_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU one may still be on its way when the next one begins."""
    (model, optimizer, _), took = make(), []
    with Checkpointer(model, optimizer, directory=tmp_path, plan=make_plan()) as checkpointer:
        saving, writer = checkpointer._saving, checkpointer._saving.writer
        execution: Any = types.SimpleNamespace(captures=9, begin=lambda *_, **__: 0.0)
        monkeypatch.setattr(saving, "_outlive", lambda capture: None)  # these hold nothing
        saving.writer = types.SimpleNamespace(
            hold=lambda one: took.append(("held", one.step)),
            submit=lambda one: took.append(("written", one.step)),
            forget_lost=lambda: None,
            close=writer.close,
        )  # type: ignore[assignment]
        for step, durable in ((1, False), (2, False), (3, True)):
            saving.begin(execution, step, b"", {}, durable=durable)
        for step in (1, 2, 3):
            saving.submit(types.SimpleNamespace(step=step))  # type: ignore[arg-type]
        saving.writer, saving.newest = writer, None
    assert took == [("held", 1), ("held", 2), ("written", 3)]


@pytest.mark.parametrize("host_buffers", [1, 2, 3])
def test_few_buffers(host_buffers: int, tmp_path: Path, world: World) -> None:
    """Where the layout grows, a capture that is held back gives its buffer up."""
    job = Job()

    def before(n: int) -> None:
        if n == 90:
            job.model.register_buffer("late", torch.zeros(200_000))

    with open_job(job, tmp_path, host_buffers=host_buffers) as checkpointer:
        train(job, checkpointer, world, 130, before)
        truth = clone_state(job.models, job.optimizers)
    told = frequency(checkpointer)
    assert (told["memory_interval"], told["disk_interval"]) == (8 if host_buffers == 1 else 1, 8)
    report = checkpointer.report()
    assert report["failed"] == 0
    assert report["committed"] + report["superseded"] == report["captures"]
    assert steps(tmp_path)[-1] == 130
    assert_checkpoint_is(find(tmp_path)[0], truth)


@pytest.mark.slow
def test_a_slow_disk_and_one_that_recovers(tmp_path: Path, world: World) -> None:
    job = Job()
    with open_job(job, tmp_path) as checkpointer:
        train(job, checkpointer, world, 100)
        world.persist_seconds, world.added_seconds = 20.0, 0.0
        train(job, checkpointer, world, 200)
        slow = frequency(checkpointer)
        assert (slow["disk_interval"], slow["reason"]) == (20, "persist")
        world.persist_seconds, world.added_seconds = 0.5, 0.25
        train(job, checkpointer, world, 420)
    assert frequency(checkpointer)["disk_interval"] == 8
    assert [change["disk"] for change in frequency(checkpointer)["changes"]] == [8, 20, 8]


def test_of_several_ranks_storage_takes_all_that_was_agreed(tmp_path: Path, world: World) -> None:
    """No control that has begun meanwhile holds it back; and the longest of all ranks' plans counts."""
    agreed: set[int] = set()
    plans_told: list[int] = []
    council: Any = types.SimpleNamespace(
        rank=0, world_size=2, alone=False, view=View(), overview=Overview(lead=2, plan_interval=3),
        note_plan=plans_told.append, schedule=agreed.update,
    )  # fmt: skip
    job = Job()
    with open_job(job, tmp_path) as checkpointer:
        checkpointer._loop.pace._agreement = Agreement(
            council, checkpointer._preemption, by_number=False, grace_seconds=1.0
        )
        train(job, checkpointer, world, 300)
    assert len(agreed) > 20
    assert {step for step in agreed if step <= 300} <= set(steps(tmp_path))
    assert {step % 3 for step in agreed} == {0}
    assert plans_told == [1]


def test_what_training_waited_is_part_of_the_cost(tmp_path: Path, world: World) -> None:
    job, world.held_seconds = Job(), 0.14
    with open_job(job, tmp_path) as checkpointer:
        train(job, checkpointer, world, 80)
    told = frequency(checkpointer)
    assert (told["memory_interval"], told["disk_interval"]) == (8, 8)  # 0.25 s, of which it waited 0.14
    held = checkpointer.report()["held_seconds"]
    assert 0 < world.really_held_seconds <= sum(held.values())


def test_ends_of_epochs_are_saved_and_count_for_nothing(
    tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Validation follows each epoch and takes a minute; it is neither training's time nor a checkpoint's."""
    ended, told_of = Controller.ended, []
    monkeypatch.setattr(Controller, "ended", lambda self, one: (told_of.append(one), ended(self, one)))
    job = Job()
    loader = DataLoader(TensorDataset(torch.randn(240, 8), torch.randint(0, 5, (240,))), 6)
    with open_job(job, tmp_path, loader=loader) as checkpointer:
        for _ in checkpointer.epochs(4):
            for x, y in checkpointer.loader:
                iterate(job, checkpointer, world, x, y)
            world.now += 60.0
    told = frequency(checkpointer)
    assert told["baseline_seconds"] == 1.0
    assert told["disk_interval"] == 8
    assert {40, 80, 120, 160} <= set(steps(tmp_path))
    assert [one.number for one in told_of if not one.counts] == [1, 2, 40, 41, 80, 81, 120, 121, 160]
    assert max(one.seconds for one in told_of if one.counts) < 2


@pytest.mark.parametrize("epochs", [60, 3])
def test_epochs_of_one_batch(epochs: int, tmp_path: Path, world: World) -> None:
    """The end of an epoch is saved, whatever it costs, but for some in a row: without them no cost would be known."""
    job = Job()
    loader = DataLoader(TensorDataset(torch.randn(6, 8), torch.randint(0, 5, (6,))), 6)
    with open_job(job, tmp_path, loader=loader) as checkpointer:
        for _ in checkpointer.epochs(epochs):
            for x, y in checkpointer.loader:
                iterate(job, checkpointer, world, x, y)
    left_out = sorted({*range(1, epochs + 1)} - {*steps(tmp_path)})
    assert frequency(checkpointer)["disk_interval"] == (8 if epochs == 60 else None)
    assert len(left_out) in (range(5, 25) if epochs == 60 else [0])
    assert left_out == list(range(left_out[0], left_out[-1] + 1)) if left_out else epochs == 3


class _Refusing(Beside):
    def recorder(self, *arguments: Any, **keywords: Any) -> Any:
        raise TraceError("this job cannot be recorded")


def test_a_job_that_gets_no_plan_has_a_period(
    tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(api, "make_planner", _Refusing)
    job = Job()
    world.added_seconds = 0.5
    with Checkpointer(job.models, job.optimizers, directory=tmp_path, keep_latest=50) as checkpointer:
        train(job, checkpointer, world, 150)
        truth = clone_state(job.models, job.optimizers)
    told = frequency(checkpointer)
    assert (told["memory_interval"], told["disk_interval"], told["reason"]) == (15, 15, "overhead")
    saved = steps(tmp_path)
    assert saved[0] == pacing.UNDISTURBED  # for trial
    assert saved == [*range(saved[0], 150, 15), 150]
    assert_checkpoint_is(find(tmp_path)[0], truth)
    assert "as often as overhead= and every= allow" in caplog.text


@pytest.mark.parametrize(
    ("extra_seconds", "options", "saved"),
    [
        (0.0, {}, [4, 40]),
        (4.0, {}, [2, 31, 40]),  # 5 s, of 0.035 of iterations of 5 s
        (9.0, {}, [1, 16, 31, 40]),
        (0.0, {"host_buffers": 1}, [4, 40]),
        (0.0, {"mtbf": "4h"}, [4, 40]),
        (9.0, {"every": 30}, [30, 40]),
        (0.0, {"every": "30s"}, [30, 40]),
    ],
)
def test_before_the_plan_is_there_the_first_checkpoint_comes_early(
    extra_seconds: float, options: dict[str, Any], saved: list[int],
    tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """After the iterations that are recorded and timed, or ten seconds; the next one when this is paid for."""
    monkeypatch.setattr(LivePlanner, "start", lambda self, recorded, **asked: Never())
    monkeypatch.setattr(api, "make_planner", LivePlanner)
    world.added_seconds = world.held_seconds = 5.0
    job = Job()

    def longer(n: int) -> None:
        world.now += extra_seconds
        if n == 1:  # room was made at the first boundary, so that this is no checkpoint's cost
            assert checkpointer._loop.execution.capturer.layout_changes == 1

    with Checkpointer(job.models, job.optimizers, directory=tmp_path, keep_latest=50, **options) as checkpointer:
        train(job, checkpointer, world, 40, longer)
        truth = clone_state(job.models, job.optimizers)
    assert steps(tmp_path) == saved
    assert_checkpoint_is(find(tmp_path)[0], truth)


def evaluating(job: Job, world: World, every: int = 2) -> Callable[[int], None]:
    """A teacher or an adversary runs in every so-manieth iteration, for half a second."""

    def before(n: int) -> None:
        if n % every == 0:
            job.model.eval()
            with torch.no_grad():
                job.model(torch.zeros(2, 8))
            job.model.train()
            world.now += 0.5

    return before


@pytest.mark.slow
def test_a_job_that_evaluates_in_every_second_iteration_is_measured(tmp_path: Path, world: World) -> None:
    job = Job()
    with open_job(job, tmp_path) as checkpointer:
        train(job, checkpointer, world, 200, evaluating(job, world))
        told = frequency(checkpointer)
        assert told["baseline_seconds"] == 1.0
        assert told["disk_interval"] == 8
        train(job, checkpointer, world, 400, evaluating(job, world))
    assert told["changes"][-1]["step"] <= 120
    durable = [step for step in steps(tmp_path) if 300 < step < 400]
    assert len(durable) == pytest.approx(100 / 8, abs=1)
    assert json.loads((tmp_path / NAME).read_text())["interference_seconds"] == pytest.approx(0.25)


def test_a_job_that_evaluates_in_every_second_iteration_is_saved_by_time(tmp_path: Path, world: World) -> None:
    job = Job()
    with open_job(job, tmp_path, every="5s") as checkpointer:
        train(job, checkpointer, world, 16, evaluating(job, world))
    assert steps(tmp_path) == [4, 7, 11, 15, 16]  # of 1 s and 1.5 s, and 0.25 s more for each that is written


@pytest.mark.parametrize("interval", [1, 4])
def test_every_so_many_seconds(interval: int, tmp_path: Path, world: World) -> None:
    job = Job()
    with open_job(job, tmp_path, plan_for(interval=interval), every="30s") as checkpointer:
        train(job, checkpointer, world, 70)
    assert steps(tmp_path) == ([30, 60, 70] if interval == 1 else [28, 60, 70])
    assert frequency(checkpointer)["disk_interval"] == (30 if interval == 1 else 32)
    assert not (tmp_path / NAME).exists()


def test_failures_known_to_be_rare_make_checkpoints_rare(tmp_path: Path, world: World) -> None:
    job = Job()
    with open_job(job, tmp_path, mtbf="4h") as checkpointer:
        train(job, checkpointer, world, 120)
    told = frequency(checkpointer)
    assert told["reason"] == "mtbf"
    assert told["disk_interval"] == 85  # Young's sqrt(2 * 0.25 * 14400) is 84.9
    assert told["memory_interval"] == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"every": "often"}, r"every: not a time: 'often' \(write it like 30s, 10min or 4h\)"),
        ({"every": "0s"}, "every: '0s' is no duration"),
        ({"every": 0}, "every must be a whole number of iterations, at least 1, text"),
        ({"every": True}, "every must be"),
        ({"every": 1.5}, "every must be"),
        ({"mtbf": 0}, "mtbf must be seconds, more than 0"),
        ({"mtbf": float("inf")}, "mtbf must be"),
        pytest.param({"mtbf": 10**400}, "mtbf must be", id="mtbf huge"),
        ({"mtbf": "4 hours"}, "mtbf: not a time"),
        ({"mtbf": 3600, "every": 5}, "every says how often already: pass every or mtbf"),
        ({"mtbf": "1h", "every": "30s"}, "every says how often already: pass every or mtbf"),
        ({"overhead": -0.1}, "overhead must be"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], said: str, tmp_path: Path) -> None:
    job = Job()
    with pytest.raises(ValueError, match=f"^{said}") as caught:
        Checkpointer(job.models, job.optimizers, directory=tmp_path / "checkpoints", **arguments)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "checkpoints").exists()
