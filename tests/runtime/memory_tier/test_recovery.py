"""Host memory outlives the process: what a killed job had captured is where the next run goes on."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import logging
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from checkflow.api import Checkpointer
from checkflow.core.errors import CorruptCheckpointError, MismatchError, StorageError
from checkflow.runtime.memory_tier import recovery
from checkflow.runtime.memory_tier.records import LIFE, MARK, NOTHING, RunLife
from checkflow.runtime.ranks.joining import Alone
from checkflow.runtime.start.memory import reclaim_alone
from checkflow.runtime.store.discovery import find
from checkflow.runtime.store.files import glance, parse_step
from checkflow.runtime.store.retention import METRICS, read_metrics, write_metrics
from checkflow.runtime.store.store import Store
from tests.support import jobs
from tests.support.dead_jobs import (
    PER_EPOCH,
    Death,
    die,
    die_tied,
    folder_of,
    kept_in,
    killed,
    known_to_be_stored,
    needs_memory,
    newest_on_storage,
    random_plans_and_nothing_left,
    resume,
    tied,
    tied_plan,
    train,
    train_tied,
)
from tests.support.oracle import assert_checkpoint_is, clone_state, random_plan
from tests.support.store_tools import fill, small_layout

pytestmark = needs_memory


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path) -> Iterator[None]:
    with random_plans_and_nothing_left(tmp_path):
        yield


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], list[list[int]]]:
    directory = tmp_path_factory.mktemp("whole")
    jobs.run(jobs.Job(directory))
    return torch.load(directory / "final.pt", weights_only=True), jobs.samples(directory)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("place", ["forward", "backward", "step", "after step", "validation"])
def test_a_killed_job_goes_on_from_host_memory(
    tmp_path: Path, uninterrupted: tuple[dict[str, Any], list[list[int]]], place: str, workers: int
) -> None:
    number = 0 if place == "validation" else 1
    directory = killed(tmp_path, kill=(place, 1, number), workers=workers)
    finished = PER_EPOCH * (2 if place == "validation" else 1) + number
    before = newest_on_storage(directory)
    assert folder_of(directory).is_dir()
    with resume(directory) as checkpointer:
        resumed = checkpointer.resumed_from
        assert resumed is not None
        assert (before or 0) <= resumed <= finished
        assert resumed >= finished - 2  # the boundary before, or, if its bytes had not all come, the one before that
        if place == "after step":
            assert resumed == finished
            assert checkpointer.report()["reclaimed_step"] == (None if before == resumed else resumed)
    jobs.run(jobs.Job(tmp_path, workers=workers))
    final, samples = uninterrupted
    ended = torch.load(tmp_path / "final.pt", weights_only=True)
    assert ended["state"].keys() == final["state"].keys()
    assert all(ended["state"][name].equal(tensor) for name, tensor in final["state"].items())
    assert ended["rng"].equal(final["rng"])
    assert ended["scheduler"] == final["scheduler"]
    assert jobs.samples(tmp_path) == samples
    assert not (directory / MARK).exists()


def test_what_is_put_on_storage_is_a_checkpoint_like_others(tmp_path: Path) -> None:
    directory = killed(tmp_path)
    with resume(directory) as checkpointer:
        job = checkpointer._job
        truth = clone_state(job.models, job.optimizers)
        assert find(directory)[0].name == "step-00000007"
        assert_checkpoint_is(find(directory)[0], truth)


@pytest.mark.slow
def test_what_is_put_on_storage_has_all_that_its_job_would_have_written(tmp_path: Path) -> None:
    """Ties, state that is absent, metrics, the plan; and each file to the byte."""
    dead, whole = tmp_path / "dead", tmp_path / "whole"
    assert jobs.in_a_process(die_tied, dead, 3) == -signal.SIGKILL
    assert jobs.in_a_process(train_tied, whole, 3) == 0
    assert not find(dead)
    owner_run = json.loads((folder_of(dead) / LIFE).read_text())["run_id"]
    model, optimizer = tied()
    with Checkpointer(model, optimizer, directory=dead, plan=tied_plan()) as checkpointer:
        assert checkpointer.resumed_from == 3
    reclaimed, written = (glance(directory / "step-00000003") for directory in (dead, whole))
    assert reclaimed.ties
    assert reclaimed.absent
    assert read_metrics(reclaimed.info) == {"loss": 2 / 8}
    assert reclaimed.run_id == owner_run
    info = {**reclaimed.info, "created": written.info["created"]}
    assert dataclasses.replace(reclaimed, run_id=written.run_id, info=info) == written


def test_torn_bytes_are_passed_over_for_the_next_older(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """All captures of this job are audited: the record has the digests of the boundary."""
    directory = killed(tmp_path, breaks="torn")
    with caplog.at_level(logging.WARNING, "checkflow"), resume(directory) as checkpointer:
        assert checkpointer.resumed_from == 6
    assert "step 7 in host memory is passed over: it is torn" in caplog.text


def test_a_plan_that_an_audit_refutes_is_trusted_with_no_other_capture(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = killed(
        tmp_path, kill=("after step", 0, 3), breaks="audited", options={"host_buffers": 5, "audit": 0}
    )  # fmt: skip
    assert {1, 2, 3} <= set(kept_in(directory))
    with caplog.at_level(logging.WARNING, "checkflow"), resume(directory) as checkpointer:
        assert checkpointer.resumed_from is None
    assert "step 3 in host memory is passed over: it was captured by a plan that does not fit its job" in caplog.text
    assert "step 1 in host memory is passed over: it is torn" in caplog.text


@pytest.mark.parametrize(("at_boundary", "resumed"), [(2, 2), (1, 3)])
def test_an_audit_speaks_against_what_its_plan_copied_and_nothing_else(
    tmp_path: Path, at_boundary: int, resumed: int
) -> None:
    """Of three captures under one plan, the first of them torn, one was copied at the boundary."""
    directory = killed(
        tmp_path, kill=("after step", 0, 3), breaks="audited", options={"host_buffers": 5, "audit": 0}
    )  # fmt: skip
    for path in folder_of(directory).glob("buffer-*.json"):
        record = json.loads(path.read_text())
        path.write_text(json.dumps({**record, "by_plan": record["step"] != at_boundary}))
    with resume(directory) as checkpointer:
        assert checkpointer.resumed_from == resumed


@pytest.mark.slow
def test_a_run_that_died_before_it_saved_anything_is_known_by_what_it_went_on_from(tmp_path: Path) -> None:
    directory = killed(tmp_path, stored=6)
    with resume(directory) as checkpointer:
        assert checkpointer.resumed_from == 7
    jobs.in_a_process(die, Death(jobs.Job(tmp_path, kill=("after step", 1, 2), every=None), rare=1000))
    assert newest_on_storage(directory) == 7
    assert known_to_be_stored(directory) == NOTHING
    with resume(directory) as checkpointer:
        assert checkpointer.resumed_from in (8, 9)  # the third iteration of that life had stepped


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("buffer-{}.json", lambda path: path.write_bytes(path.read_bytes().replace(b'"step":7', b'"step":-7'))),
        ("buffer-{}.json", lambda path: path.write_bytes(path.read_bytes()[:-1])),
        ("buffer-{}.extra", lambda path: path.write_bytes(path.read_bytes()[:-1])),
        ("buffer-{}", lambda path: os.truncate(path, 4096)),
        ("buffer-{}", lambda path: os.truncate(path, path.stat().st_size - 1)),
        ("buffer-{}", lambda path: path.unlink()),
    ],
)
def test_a_damaged_capture_is_passed_over_for_the_next_older(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, damage: Callable[[Path], object]
) -> None:
    directory = killed(tmp_path)
    folder = folder_of(directory)
    (newest,) = (path for path in folder.glob("buffer-*.json") if json.loads(path.read_text())["step"] == 7)
    damage(folder / name.format(newest.stem.removeprefix("buffer-")))
    with caplog.at_level(logging.WARNING, "checkflow"), resume(directory) as checkpointer:
        assert checkpointer.resumed_from == 6
    assert "in host memory is passed over" in caplog.text
    assert not folder.exists()


def test_a_layout_that_is_damaged_leaves_what_storage_has(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = killed(tmp_path)
    before = newest_on_storage(directory)
    (layout,) = folder_of(directory).glob("layout-*.json")
    layout.write_bytes(layout.read_bytes().replace(b"float32", b"float64"))
    with caplog.at_level(logging.WARNING, "checkflow"), resume(directory) as checkpointer:
        assert checkpointer.resumed_from == before
    assert "its layout or its extra state is damaged" in caplog.text


def test_a_full_disk_keeps_what_memory_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = killed(tmp_path, stored=6)
    folder = folder_of(directory)
    with monkeypatch.context() as patched:
        commit = Store.commit

        def fail(self: Store, *rest: Any, **more: Any) -> Path:
            raise StorageError("no space left")

        patched.setattr(Store, "commit", fail)
        with pytest.raises(StorageError, match=f"step 7 lies in host memory.*no space left.*delete {folder}"):
            resume(directory)
        assert Store.commit is not commit
    assert folder.is_dir()
    with resume(directory) as checkpointer:
        assert checkpointer.resumed_from == 7


def test_what_was_saved_of_it_does_not_keep_the_rest_from_being_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The start that saved one of two captures died then: the next one takes the other, too."""
    directory = killed(tmp_path, stored=6, rare=100, options={"host_buffers": 5})
    committed: list[int] = []
    commit = Store.commit

    def once(self: Store, step: int, *rest: Any, **more: Any) -> Path:
        if committed:
            raise KeyboardInterrupt
        committed.append(step)
        return commit(self, step, *rest, **more)

    with monkeypatch.context() as patched:
        patched.setattr(Store, "commit", once)
        with pytest.raises(KeyboardInterrupt):
            resume(directory, resume=5)
    assert committed == [5]
    with resume(directory) as checkpointer:
        assert checkpointer.resumed_from == 7


def test_a_last_checkpoint_that_failed_stays_in_memory(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert jobs.in_a_process(die, Death(jobs.Job(tmp_path, every=None), "full")) == 1
    directory = tmp_path / "checkpoints"
    assert newest_on_storage(directory) in (None, 4, 5)
    with resume(directory) as checkpointer:
        assert checkpointer.resumed_from == jobs.EPOCHS * PER_EPOCH


def test_a_job_that_is_to_begin_anew_is_told(tmp_path: Path) -> None:
    directory = killed(tmp_path, kill=("after step", 0, 3))
    with pytest.raises(StorageError, match=r'resume="never", but the run before left step 3 of'):
        resume(directory, resume="never")


def test_going_back_to_a_step_that_memory_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = killed(tmp_path, stored=6, rare=100, options={"host_buffers": 5})
    assert {5, 7} <= set(kept_in(directory))
    committed: list[int] = []
    commit = Store.commit

    def note(self: Store, step: int, *rest: Any, **more: Any) -> Path:
        committed.append(step)
        return commit(self, step, *rest, **more)

    monkeypatch.setattr(Store, "commit", note)
    with resume(directory, resume=5) as checkpointer:
        assert checkpointer.resumed_from == 5
        report = checkpointer.report()
        assert (report["reclaimed_step"], report["replayed_iterations"], report["replayed_exactly"]) == (7, 2, False)
    assert committed == [5, 7]
    assert (directory / ".superseded-step-00000007").is_dir()


def test_the_newest_is_saved_first_then_what_retention_would_keep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where room is for one, it is for the newest; what else is lost is told, and keeps no job from going on."""
    keep = {"keep_every": 3}
    directory = killed(tmp_path, kill=("after step", 0, 5), rare=100, options={"host_buffers": 6, **keep})
    assert {2, 3, 4, 5} <= set(kept_in(directory))
    committed: list[int] = []
    commit = Store.commit

    def note(self: Store, step: int, *rest: Any, **more: Any) -> Path:
        committed.append(step)
        if len(committed) == 2:
            raise StorageError("no space left")
        return commit(self, step, *rest, **more)

    monkeypatch.setattr(Store, "commit", note)
    with caplog.at_level(logging.WARNING, "checkflow"), resume(directory, **keep) as checkpointer:
        assert checkpointer.resumed_from == 5
        assert committed == [5, 3]
        assert checkpointer.report()["reclaimed_step"] == 5
    assert "step 3 lies in host memory" in caplog.text


@pytest.mark.parametrize("damaged", [False, True])
def test_old_checkpoints_make_room_for_what_memory_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damaged: bool
) -> None:
    """Those that the dead run did not live to delete; not before a newer one on storage has proved whole."""
    with resume(tmp_path / "checkpoints", every=1, keep_latest=9) as checkpointer:
        for _ in checkpointer.epochs(1):
            train(checkpointer)
    directory = killed(tmp_path, rare=1000, options={"keep_latest": 9})
    stored = sorted(parse_step(path.name) or 0 for path in find(directory))
    assert stored == [1, 2, 3, 4, 5, 6]
    if damaged:
        (file,) = (directory / "step-00000006").glob("model-*.safetensors")
        file.write_bytes(file.read_bytes()[:-1] + b"\xff")
    present: list[list[int | None]] = []
    write = Store._write_files

    def look(self: Store, *rest: Any) -> None:
        present.append(sorted(parse_step(path.name) or 0 for path in find(directory)))
        write(self, *rest)

    monkeypatch.setattr(Store, "_write_files", look)
    with resume(directory, keep_latest=2, keep_epochs=False) as checkpointer:
        assert checkpointer.resumed_from == 7
    assert present == [stored if damaged else stored[-2:]]


def test_a_job_that_died_before_its_first_capture_may_begin_anew(tmp_path: Path) -> None:
    directory = killed(tmp_path, kill=("after step", 0, 3))
    for path in folder_of(directory).glob("buffer-*.json"):
        path.unlink()
    with resume(directory, resume="never") as checkpointer:
        assert checkpointer.resumed_from is None


def test_must_is_content_with_memory(tmp_path: Path) -> None:
    directory = killed(tmp_path, kill=("after step", 0, 3))
    assert newest_on_storage(directory) is None
    with resume(directory, resume="must") as checkpointer:
        assert checkpointer.resumed_from == 3


@pytest.mark.parametrize("left", ["nothing", "less"])
def test_storage_that_was_set_back_counts(tmp_path: Path, caplog: pytest.LogCaptureFixture, left: str) -> None:
    """Emptied to begin anew, or up to where a bad stretch began."""
    directory = killed(tmp_path, stored=6)  # an epoch's end, which nothing replaces
    for path in find(directory)[: None if left == "nothing" else 1]:
        shutil.rmtree(path)
    expected = newest_on_storage(directory)
    assert expected is None or left == "less"
    with caplog.at_level(logging.WARNING, "checkflow"), resume(directory) as checkpointer:
        assert checkpointer.resumed_from == expected
    assert "step 7 in host memory is passed over: storage is not what its run left there" in caplog.text


@pytest.mark.parametrize(
    ("base", "durable", "step", "run", "taken"),  # the base was another one's
    [
        (NOTHING, NOTHING, NOTHING, "", True),  # it died before its first checkpoint
        (NOTHING, NOTHING, 4, "its", True),  # or just behind it
        (NOTHING, 4, 4, "its", True),
        (NOTHING, 4, 5, "its", True),
        (NOTHING, 4, 4, "", True),  # it cannot be read: that is for the restore to tell
        (NOTHING, 4, NOTHING, "", False),  # emptied
        (NOTHING, 8, 4, "its", False),  # set back
        (4, NOTHING, 4, "another", True),  # it went on from there
        (4, NOTHING, 4, "a third", False),  # which put its own there
        (NOTHING, 4, 4, "another", False),
        (4, NOTHING, 3, "another", False),
        (4, NOTHING, NOTHING, "", False),
        (4, NOTHING, 3, "its", False),
        (4, NOTHING, 5, "another", False),  # as another one has since
        (4, 6, 6, "its", True),
        (4, 6, 7, "another", False),
        (NOTHING, NOTHING, 3, "another", False),  # imported weights, say
    ],
)
def test_whose_storage_it_is(base: int, durable: int, step: int, run: str, taken: bool) -> None:
    with contextlib.nullcontext() if taken else pytest.raises(CorruptCheckpointError):
        life = RunLife("its", base, "" if base == NOTHING else "another", durable)
        recovery.refuse_other_life(life, recovery.NewestStored(step, run))


def test_what_cannot_be_read_now_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = killed(tmp_path)
    folder = folder_of(directory)
    with monkeypatch.context() as patched:

        def fail(*_: Any, **__: Any) -> None:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")

        patched.setattr(recovery, "_map", fail)
        with pytest.raises(StorageError, match=f"cannot be read now: Cannot allocate memory; .*delete {folder}"):
            resume(directory)
    with resume(directory) as checkpointer:
        assert checkpointer.resumed_from == 7


def test_what_storage_has_of_the_best_counts_among_them(tmp_path: Path) -> None:
    layout = small_layout()

    def told(step: int, loss: float) -> tuple[int, dict[str, Any]]:
        return step, {METRICS: write_metrics({"loss": loss})}

    records = [told(2, 0.5), told(3, 0.25), told(4, 0.75)]
    with Store(tmp_path, run_id="run", keep_best=1, monitor="loss") as store:
        assert recovery.worth_keeping(store, records) & {2, 3, 4} == {3}
        store.commit(1, layout, fill(layout, 1)[0], b"", told(1, 0.125)[1])
        assert not recovery.worth_keeping(store, records) & {2, 3, 4}


def test_a_restore_that_fails_leaves_what_memory_has(tmp_path: Path) -> None:
    directory = killed(tmp_path)
    folder = folder_of(directory)
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters())
    plan = random_plan({"model": model}, {"optimizer": optimizer}, 0)
    with pytest.raises(MismatchError):
        Checkpointer(model, optimizer, directory=directory, plan=plan)
    assert folder.is_dir()
    with resume(directory) as checkpointer:
        assert checkpointer.resumed_from == 7
    assert not folder.exists()


def test_another_layout_is_noticed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A release that lays files out in another way reads other bytes."""
    directory = killed(tmp_path)
    for buffer in folder_of(directory).glob("buffer-?"):
        with open(buffer, "r+b") as file:
            file.write(b"\x01")
    before = newest_on_storage(directory)
    with caplog.at_level(logging.WARNING, "checkflow"), resume(directory) as checkpointer:
        assert checkpointer.resumed_from == before
    assert "its buffer is not laid out as model-00000-of-00001.safetensors is" in caplog.text


def test_the_next_run_says_where_it_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = killed(tmp_path)
    with caplog.at_level(logging.INFO, "checkflow"), resume(directory):
        pass
    assert "step 7 was complete in host memory when the run before ended: it is being saved" in caplog.text
    assert "resumed from step 7" in caplog.text
    assert "which the run before had in host memory" in caplog.text


def test_what_storage_has_already_is_not_saved_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = killed(tmp_path, kill=("after step", 1, 2), stored=8)
    assert max(kept_in(directory)) == newest_on_storage(directory) == 8
    monkeypatch.setattr(Store, "commit", None)
    with Store(directory, run_id="next") as store:
        newest, give_back = reclaim_alone(store, "auto", Alone())
        assert newest is None
        give_back()
    assert not (directory / MARK).exists()
