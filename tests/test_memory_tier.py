"""Host memory outlives the process: what a killed job had captured is where the next run goes on.

Jobs run in processes of their own and are killed. Storage takes every fourth capture only, so that what is newer can
come from memory alone.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jobs
import pytest
import torch
from mounting import in_namespace
from oracle import assert_checkpoint_is, clone_state, random_plan
from waiting import wait_for

from checkflow.cli import main
from checkflow.errors import ConsistencyError, CorruptCheckpointError, LockedError, MismatchError, StorageError
from checkflow.runtime import left_memory, memory_tier, reclaiming, saving
from checkflow.runtime.checkpointer import Checkpointer
from checkflow.runtime.finding import find
from checkflow.runtime.frequency import Controller
from checkflow.runtime.memory_tier import LIFE, MARK, NOTHING, OWNER, Life, MemoryTier
from checkflow.runtime.opening import parse_step
from checkflow.runtime.persist import Writer
from checkflow.runtime.saving import Saving
from checkflow.runtime.store import Store

RARE = 4  # iterations from one durable checkpoint to the next
PER_EPOCH = jobs.BATCHES

pytestmark = pytest.mark.skipif(
    not os.access("/dev/shm", os.W_OK) or os.statvfs("/dev/shm").f_bavail * os.statvfs("/dev/shm").f_frsize < 16 << 20,
    reason="there is no shared memory to speak of",
)


@pytest.fixture
def own_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Shared memory without others' folders in it, for what gives those back."""
    folder = Path(tempfile.mkdtemp(prefix="checkflow-test-", dir=memory_tier.ROOT))
    monkeypatch.setattr(memory_tier, "ROOT", folder)
    yield folder
    shutil.rmtree(folder)


@dataclass(frozen=True)
class Death:
    """A job that dies; at the end of an iteration it waits until memory has the boundary before that."""

    job: jobs.Job
    breaks: str = ""
    stored: int | None = None  # what storage has by then
    root: Path = memory_tier.ROOT
    rare: int = RARE


def rarely(rare: int) -> None:
    """Every boundary is captured, and few are durable, for the rest of this process."""
    Controller.is_due = lambda self, number: True  # type: ignore[method-assign]
    Controller.is_durable = lambda self, number: number % rare == 0  # type: ignore[method-assign]


def die(death: Death) -> None:
    """In a process of its own."""
    rarely(death.rare)
    memory_tier.ROOT = death.root
    at = jobs.Killer.at
    checkpoints = death.job.directory / "checkpoints"

    def when_kept(self: jobs.Killer, *place: Any) -> None:
        if place == death.job.kill and place[0] == "after step":
            step = PER_EPOCH * place[1] + place[2]
            wait_for(lambda: step in kept_in(checkpoints))
            wait_for(lambda: death.stored in (None, known_to_be_stored(checkpoints)))
        at(self, *place)

    jobs.Killer.at = when_kept  # type: ignore[method-assign]
    if death.breaks:
        BREAKS[death.breaks]()
    jobs.run(death.job)


def full_disk() -> None:
    """From the sixth step on."""
    commit = Store.commit

    def fail(self: Store, step: int, *rest: Any, **more: Any) -> Path:
        if step > 5:
            raise StorageError("the disk is full")
        return commit(self, step, *rest, **more)

    Store.commit = fail  # type: ignore[method-assign]


def tear(step: int = 7) -> None:
    """What was staged is changed before the record of it is made: what a write too early would do."""
    keep = MemoryTier.keep

    def torn(self: MemoryTier, capture: Any, *rest: Any) -> None:
        if capture.step == step:
            placed = max(capture.layout.tensors.values(), key=lambda one: one.record.size_bytes)
            view = capture.buffer.view
            view[placed.staging_offset] ^= 1
        keep(self, capture, *rest)

    MemoryTier.keep = torn  # type: ignore[method-assign]


def tear_the_audited() -> None:
    """The first capture is audited, and torn; those that follow are neither looked at."""
    saving.FIRST_AUDITS = 1
    tear(1)


BREAKS: dict[str, Callable[[], None]] = {"full": full_disk, "torn": tear, "audited": tear_the_audited}


def folders() -> set[Path]:
    return {path for path in memory_tier.ROOT.glob("checkflow-*") if reclaiming._FOLDER.fullmatch(path.name)}


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path) -> Iterator[None]:
    """Other tests run at the same time, and have folders of their own."""
    yield
    for path in folders():
        try:
            owner = json.loads((path / OWNER).read_text())["directory"]
        except FileNotFoundError:
            continue
        if Path(owner).is_relative_to(tmp_path):
            shutil.rmtree(path)


def folder_of(directory: Path) -> Path:
    return memory_tier.ROOT / f"checkflow-{json.loads((directory / MARK).read_text())['token']}"


def newest_on_storage(directory: Path) -> int | None:
    return max((step for path in find(directory) if (step := parse_step(path.name)) is not None), default=None)


def kept_in(directory: Path) -> list[int]:
    """The steps that memory has a record of."""
    return [json.loads(path.read_text())["step"] for path in folder_of(directory).glob("buffer-*.json")]


def known_to_be_stored(directory: Path) -> int:
    durable: int = json.loads((folder_of(directory) / LIFE).read_text())["durable"]
    return durable


def killed(
    tmp_path: Path,
    *,
    kill: tuple[str, int, int] = ("after step", 1, 1),
    breaks: str = "",
    stored: int | None = None,
    rare: int = RARE,
    **job: Any,
) -> Path:
    """The directory of the checkpoints of a job that died: with seven iterations finished, and the eighth stepped."""
    one = jobs.Job(tmp_path, kill=kill, every=None, **job)
    assert jobs.in_a_process(die, Death(one, breaks, stored, memory_tier.ROOT, rare)) == -signal.SIGKILL
    return tmp_path / "checkpoints"


def resume(directory: Path, **options: Any) -> Checkpointer:
    model, optimizer, scheduler = jobs.make()
    loader = jobs.DataLoader(jobs.data(1), jobs.BATCH, shuffle=True, seed=3)
    plan = jobs.make_plan()
    return Checkpointer(
        model, optimizer, loader, directory=directory, plan=plan, state={"scheduler": scheduler}, **options
    )  # fmt: skip


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


def test_a_clean_end_leaves_nothing(tmp_path: Path) -> None:
    with resume(tmp_path) as checkpointer:
        for _ in checkpointer.epochs(1):
            train(checkpointer)
        assert checkpointer.report()["memory_outlives_process"]
        folder = folder_of(tmp_path)
        assert folder.stat().st_mode & 0o777 == 0o700
        assert (folder / "buffer-0").stat().st_mode & 0o777 == 0o600
    assert not folder.exists()
    assert not (tmp_path / MARK).exists()


def train(checkpointer: Checkpointer) -> None:
    job = checkpointer._job
    (model,), (optimizer,) = job.models.values(), job.optimizers.values()
    for _, x, y in checkpointer.loader:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


def test_a_record_is_gone_before_its_buffer_is_filled_again(tmp_path: Path) -> None:
    """At each capture's begin: whichever buffer it takes has no record, and the others' are of complete ones."""
    seen = []
    with resume(tmp_path, every=1) as checkpointer:
        capturer = checkpointer._boundaries.execution.capturer
        begin = capturer._copy_at_boundary

        def look(buffer: Any, arrangement: Any) -> Any:
            seen.append((folder_of(tmp_path) / f"buffer-{buffer.index}.json").exists())
            return begin(buffer, arrangement)

        capturer._copy_at_boundary = look  # type: ignore[method-assign]
        for _ in checkpointer.epochs(2):
            train(checkpointer)
    assert len(seen) == 2 * PER_EPOCH
    assert not any(seen)


def test_what_was_captured_by_a_refuted_plan_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither what the audit spoke of, nor what the same plan captured before and after; then all is copied at once."""
    kept: list[tuple[int, bool]] = []
    left: list[tuple[int, bool]] = []
    voided: list[int] = []
    audit, keep, void = Writer._audit, MemoryTier.keep, Saving._void

    def refute(self: Writer, capture: Any) -> None:
        if capture.by_plan and capture.step > 5:
            self.breached_plans.add(capture.plan_digest)
            raise ConsistencyError("torn")
        audit(self, capture)

    def note(self: MemoryTier, capture: Any, *rest: Any) -> None:
        kept.append((capture.step, capture.by_plan))
        keep(self, capture, *rest)

    def look(self: Saving, capture: Any) -> None:
        voided.append(capture.step)
        void(self, capture)
        left.extend((one.step, one.by_plan) for one in list(self.tier._kept.values()))

    monkeypatch.setattr(Writer, "_audit", refute)
    monkeypatch.setattr(MemoryTier, "keep", note)
    monkeypatch.setattr(Saving, "_void", look)
    with resume(tmp_path, every=1) as checkpointer:
        for _ in checkpointer.epochs(3):
            train(checkpointer)
    assert [step for step, by_plan in kept if by_plan][:6] == [1, 2, 3, 4, 5, 6]
    assert voided[0] == 6
    assert [step for step, by_plan in left if by_plan] == []
    assert newest_on_storage(tmp_path) == kept[-1][0] == 3 * PER_EPOCH
    assert not kept[-1][1]


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


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("buffer-{}.json", lambda path: path.write_bytes(path.read_bytes().replace(b'"step":7', b'"step":-7'))),
        ("buffer-{}.json", lambda path: path.write_bytes(path.read_bytes()[:-1])),
        ("buffer-{}.extra", lambda path: path.write_bytes(path.read_bytes()[:-1])),
        ("buffer-{}", lambda path: os.truncate(path, 4096)),
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


def test_storage_that_is_away_at_the_end_gives_nothing_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a disk that fails, or that is no longer mounted: neither checkpoints nor the mark can be reached."""
    monkeypatch.setattr(Store, "commit", Store.commit)
    read = memory_tier.read_regular

    def away(path: Path, most_bytes: int) -> bytes:
        raise OSError(errno.EIO, "Input/output error")

    full_disk()
    with caplog.at_level(logging.WARNING, "checkflow"), resume(tmp_path, every=1) as checkpointer:
        for _ in checkpointer.epochs(2):
            train(checkpointer)
        monkeypatch.setattr(memory_tier, "read_regular", away)
    assert "stays in this machine's memory" in caplog.text
    monkeypatch.undo()
    assert memory_tier.read_regular is read
    with resume(tmp_path) as checkpointer:
        assert checkpointer.resumed_from == 2 * PER_EPOCH


def test_a_last_checkpoint_that_failed_stays_in_memory(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert jobs.in_a_process(die, Death(jobs.Job(tmp_path, every=None), "full")) == 0
    directory = tmp_path / "checkpoints"
    assert newest_on_storage(directory) in (None, 4, 5)
    with resume(directory) as checkpointer:
        assert checkpointer.resumed_from == jobs.EPOCHS * PER_EPOCH


def test_the_end_says_that_it_stays(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Store, "commit", Store.commit)
    full_disk()
    with caplog.at_level(logging.WARNING, "checkflow"), resume(tmp_path, every=1) as checkpointer:
        for _ in checkpointer.epochs(2):
            train(checkpointer)
    assert f"step {2 * PER_EPOCH} is not on storage, and stays in this machine's memory" in caplog.text
    monkeypatch.undo()
    with resume(tmp_path) as checkpointer:
        assert checkpointer.resumed_from == 2 * PER_EPOCH


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
    assert committed == [5, 7]
    assert (directory / ".superseded-step-00000007").is_dir()


def test_must_is_content_with_memory(tmp_path: Path) -> None:
    directory = killed(tmp_path, kill=("after step", 0, 3))
    assert newest_on_storage(directory) is None
    with resume(directory, resume="must") as checkpointer:
        assert checkpointer.resumed_from == 3


def test_a_copy_of_the_directory_takes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = killed(tmp_path)
    before = newest_on_storage(directory)
    shutil.copytree(directory, tmp_path / "copy")
    with caplog.at_level(logging.WARNING, "checkflow"), resume(tmp_path / "copy") as checkpointer:
        assert checkpointer.resumed_from == before
    assert f"is of the checkpoints in {directory}" in caplog.text
    with resume(directory) as checkpointer:
        assert checkpointer.resumed_from == 7


def test_a_directory_that_was_moved_takes_its_own(tmp_path: Path) -> None:
    killed(tmp_path).rename(tmp_path / "moved")
    with resume(tmp_path / "moved") as checkpointer:
        assert checkpointer.resumed_from == 7


@pytest.mark.parametrize("mode", [0o755, 0o770])
def test_a_folder_that_others_may_write_to_is_passed_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int
) -> None:
    directory = killed(tmp_path)
    before = newest_on_storage(directory)
    folder_of(directory).chmod(mode)
    with caplog.at_level(logging.WARNING, "checkflow"), resume(directory) as checkpointer:
        assert checkpointer.resumed_from == before
    assert "is another user's" in caplog.text


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_another_users_folder_is_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = killed(tmp_path)
    before = newest_on_storage(directory)
    os.chown(folder_of(directory), 12345, 12345)
    with caplog.at_level(logging.WARNING, "checkflow"), resume(directory) as checkpointer:
        assert checkpointer.resumed_from == before
    assert "is another user's" in caplog.text


def test_after_a_restart_of_the_machine_storage_is_what_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    directory = killed(tmp_path)
    before = newest_on_storage(directory)
    monkeypatch.setattr(left_memory, "boot_id", lambda: "another")
    with caplog.at_level(logging.WARNING, "checkflow"), resume(directory) as checkpointer:
        assert checkpointer.resumed_from == before
    assert not caplog.text


@pytest.mark.parametrize("content", [b"", b"{}", b'{"token":"../../etc"}', b"\xff", b"[" * 9999])
def test_a_damaged_mark_is_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes) -> None:
    directory = killed(tmp_path)
    before = newest_on_storage(directory)
    (directory / MARK).write_bytes(content)
    with caplog.at_level(logging.WARNING, "checkflow"), resume(directory) as checkpointer:
        assert checkpointer.resumed_from == before
    assert "what the run before had in host memory is passed over" in caplog.text


def test_the_memory_of_a_dead_job_that_nobody_goes_on_from_is_given_back(
    tmp_path: Path, own_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun_anew, gone, waiting = (killed(tmp_path / name) for name in ("one", "two", "three"))
    unmarked, missing, kept = folder_of(begun_anew), folder_of(gone), folder_of(waiting)
    (begun_anew / MARK).unlink()
    shutil.rmtree(gone)
    with resume(tmp_path / "four"):
        assert unmarked.is_dir()  # it is young: its job may be just about to say whose it is
    monkeypatch.setattr(reclaiming, "_YOUNG_SECONDS", 0.0)
    with resume(tmp_path / "four") as living:
        for _ in living.epochs(1):
            train(living)
        assert not unmarked.exists()
        assert missing.is_dir()  # its checkpoints may lie on a disk that is not mounted now
        # One that lives keeps its own, whatever becomes of its directory.
        mine = folder_of(tmp_path / "four")
        (tmp_path / "four" / MARK).unlink()
        monkeypatch.setattr(reclaiming, "_OLD_SECONDS", 0.0)
        with resume(tmp_path / "five"):
            assert mine.is_dir()
        assert not missing.exists()
        assert kept.is_dir()


def test_a_directory_that_was_moved_takes_its_own_however_old(
    tmp_path: Path, own_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reclaiming, "_YOUNG_SECONDS", 0.0)
    monkeypatch.setattr(reclaiming, "_OLD_SECONDS", 0.0)
    killed(tmp_path).rename(tmp_path / "moved")
    with resume(tmp_path / "moved") as checkpointer:
        assert checkpointer.resumed_from == 7


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
        (4, NOTHING, 5, "another", False),  # as another one has since
        (4, 6, 6, "its", True),
        (4, 6, 7, "another", False),
        (NOTHING, NOTHING, 3, "another", False),  # imported weights, say
    ],
)
def test_whose_storage_it_is(base: int, durable: int, step: int, run: str, taken: bool) -> None:
    with contextlib.nullcontext() if taken else pytest.raises(CorruptCheckpointError):
        life = Life("its", base, "" if base == NOTHING else "another", durable)
        reclaiming._refuse_other_life(life, reclaiming._Storage(step, run))


def test_what_cannot_be_read_now_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = killed(tmp_path)
    folder = folder_of(directory)
    with monkeypatch.context() as patched:

        def fail(*_: Any, **__: Any) -> None:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")

        patched.setattr(reclaiming, "_map", fail)
        with pytest.raises(StorageError, match=f"cannot be read now: Cannot allocate memory; .*delete {folder}"):
            resume(directory)
    with resume(directory) as checkpointer:
        assert checkpointer.resumed_from == 7


def test_what_another_process_uses_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reclaiming, "_WAIT_SECONDS", 0.1)
    directory = killed(tmp_path)
    with open(folder_of(directory) / OWNER, "rb") as owner:
        fcntl.flock(owner, fcntl.LOCK_EX)
        with pytest.raises(LockedError, match="is in use by another process"):
            resume(directory)
        fcntl.flock(owner, fcntl.LOCK_SH)  # somebody looks
        with resume(directory) as checkpointer:
            assert checkpointer.resumed_from == 7


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


def test_a_record_that_is_just_being_made_is_removed_when_its_plan_is_refuted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One thread keeps a capture while another one refutes its plan, and a third takes the buffer: in any order no
    record is left of a buffer that is written to."""
    publish, inside, go_on = memory_tier._publish, threading.Event(), threading.Event()

    def slowly(folder: int, name: str, data: bytes) -> None:
        if name == "buffer-0.json":
            inside.set()
            go_on.wait(10)
        publish(folder, name, data)

    with resume(tmp_path, every=1, host_buffers=2) as checkpointer:
        for _ in checkpointer.epochs(1):
            train(checkpointer)
        writer, tier, folder = checkpointer._saving.writer, checkpointer._saving.tier, folder_of(tmp_path)
        writer.wait_until_at_most(0)
        kept: list[Any] = []
        keep = MemoryTier.keep
        monkeypatch.setattr(MemoryTier, "keep", lambda self, *rest: (kept.append(rest), keep(self, *rest)))
        for _ in checkpointer.epochs(2):
            train(checkpointer)
        writer.wait_until_at_most(0)
        capture = next(one for one in kept if one[0].buffer.index == 0)
        monkeypatch.setattr(memory_tier, "_publish", slowly)
        keeper = threading.Thread(target=keep, args=(tier, *capture))
        keeper.start()
        assert inside.wait(10)
        other = threading.Thread(target=tier.distrust, args=(capture[0].plan_digest,))
        other.start()
        other.join(0.3)
        assert other.is_alive()  # it waits for the record to be there, and removes it then
        go_on.set()
        keeper.join()
        other.join()
        assert not (folder / "buffer-0.json").exists()


def test_a_forked_child_writes_elsewhere(tmp_path: Path) -> None:
    """It may train on under the hooks that it inherited."""
    with resume(tmp_path, every=1) as checkpointer:
        for _ in checkpointer.epochs(1):
            train(checkpointer)
        before = [bytes(buffer.view) for buffer in checkpointer._saving.buffers._all]
        child = os.fork()
        if not child:
            views = [buffer.view for buffer in checkpointer._saving.buffers._all]
            blank = not any(any(view) for view in views)
            for view in views:
                view[:] = b"x" * len(view)
            os._exit(0 if blank else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert [bytes(buffer.view) for buffer in checkpointer._saving.buffers._all] == before


def test_memory_goes_back_though_a_child_lives(tmp_path: Path) -> None:
    tier = MemoryTier(tmp_path, Life("run"))
    memories = tier.allocate(2, 32 << 20, None)
    assert memories is not None
    folder = folder_of(tmp_path)
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.close(write)
        os.read(read, 1)
        os._exit(0)
    os.close(read)
    with open(folder / "buffer-0", "rb") as first, open(folder / "buffer-1", "rb") as second:
        assert all(os.fstat(one.fileno()).st_blocks * 512 >= 32 << 20 for one in (first, second))
        tier.close()
        assert not any(os.fstat(one.fileno()).st_blocks for one in (first, second))
    os.close(write)
    os.waitpid(child, 0)


def test_one_buffer_is_no_tier(tmp_path: Path) -> None:
    with resume(tmp_path, every=1, host_buffers=1) as checkpointer:
        for _ in checkpointer.epochs(1):
            train(checkpointer)
        assert not checkpointer.report()["memory_outlives_process"]
        assert not (tmp_path / MARK).exists()


def test_a_directory_that_was_exchanged_keeps_its_own_mark(tmp_path: Path) -> None:
    tier = MemoryTier(tmp_path, Life("run"))
    assert tier.allocate(1, 4096, None) is not None
    (tmp_path / MARK).write_bytes(memory_tier.MARKS.dump_json(memory_tier.Mark("0" * 32, "boot")))
    tier.close()
    assert (tmp_path / MARK).exists()


def test_a_forked_child_gives_nothing_back(tmp_path: Path) -> None:
    with resume(tmp_path, every=1) as checkpointer:
        for _ in checkpointer.epochs(1):
            train(checkpointer)
        child = os.fork()
        if not child:
            try:
                checkpointer._saving.buffers.close()
                checkpointer._saving.tier.close()
            finally:
                os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert len(list(folder_of(tmp_path).glob("buffer-*.json"))) > 0
        assert (tmp_path / MARK).exists()


def test_memory_that_the_system_took_away_harms_nothing(tmp_path: Path) -> None:
    """As systemd does with a user's shared memory when the last session ends."""
    with resume(tmp_path, every=1) as checkpointer:
        for epoch in checkpointer.epochs(3):
            if epoch == 1:
                shutil.rmtree(folder_of(tmp_path))
            train(checkpointer)
        report = checkpointer.report()
    assert report["failed"] == 0
    assert newest_on_storage(tmp_path) == 3 * PER_EPOCH


@pytest.mark.parametrize("share", [memory_tier.SHARE, 1000.0])
def test_too_little_shared_memory_is_said_and_does_without(tmp_path: Path, share: float) -> None:
    """A container's own, smaller than the buffers: no SIGBUS, and no room taken from what loaders need."""
    mount = "mount -t tmpfs -o size=32k tmpfs /dev/shm"
    if subprocess.run(in_namespace("sh", "-c", mount), capture_output=True, check=False).returncode:
        pytest.skip("mounting is not allowed")
    script = f"""
import sys
sys.path[:0] = {[str(Path(__file__).parent)]!r}
import logging, pathlib, test_memory_tier as t
from checkflow.runtime import memory_tier
memory_tier.SHARE = {share}
logging.basicConfig()
with t.resume(pathlib.Path({str(tmp_path / "checkpoints")!r})) as checkpointer:
    for _ in checkpointer.epochs(2):
        t.train(checkpointer)
    report = checkpointer.report()
assert report["memory_outlives_process"] is False
assert report["failed"] == 0
print("step", report["lag"]["captured_step"])
"""
    done = subprocess.run(
        in_namespace("sh", "-c", f'{mount} && exec "$0" -c "$1"', sys.executable, script),
        capture_output=True, text=True, check=False, cwd=Path(__file__).parent.parent,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "captures in host memory end with the process" in done.stderr
    reason = "more than half of the" if share < 1 else "No space left on device"
    assert reason in done.stderr
    assert newest_on_storage(tmp_path / "checkpoints") == 2 * PER_EPOCH


def test_shared_memory_that_fills_up_later_costs_records_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, calls = memory_tier._write, []

    def full(folder: int, name: str, data: bytes) -> None:
        if name.endswith(".extra") and len(calls) > 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        calls.append(name)
        write(folder, name, data)

    monkeypatch.setattr(memory_tier, "_write", full)
    with resume(tmp_path, every=1) as checkpointer:
        for _ in checkpointer.epochs(2):
            train(checkpointer)
        assert checkpointer.report()["failed"] == 0
    assert newest_on_storage(tmp_path) == 2 * PER_EPOCH


def test_large_extra_state_leaves_others_their_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay buffer among the user's objects, say: its captures are storage's alone."""

    class Replay:
        def state_dict(self) -> dict[str, Any]:
            return {"data": torch.zeros(2 << 20, dtype=torch.uint8)}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            pass

    model, optimizer, _ = jobs.make()
    options = {"directory": tmp_path, "plan": jobs.make_plan(), "every": 1, "state": {"replay": Replay()}}
    with Checkpointer(model, optimizer, **options) as checkpointer:
        for number in checkpointer.steps(12):
            if number == 6:
                assert list(folder_of(tmp_path).glob("buffer-*.extra"))
                monkeypatch.setattr(memory_tier, "SHARE", 1e-9)
            model(torch.randn(4, 8)).sum().backward()
            optimizer.step()
        checkpointer._saving.writer.wait_until_at_most(0)
        assert max(kept_in(tmp_path), default=0) <= 7
        assert checkpointer.report()["failed"] == 0
    assert newest_on_storage(tmp_path) == 12


def test_larger_state_gets_larger_buffers_and_leaves_no_old_ones(tmp_path: Path) -> None:
    tier = MemoryTier(tmp_path, Life("run"))
    first = tier.allocate(2, 4096, None)
    one = folder_of(tmp_path)
    second = tier.allocate(3, 8193, None)
    two = folder_of(tmp_path)
    assert first is not None
    assert second is not None
    assert [len(memory) for memory in second] == [8193] * 3
    assert not one.exists()
    assert sorted(path.stat().st_size for path in two.glob("buffer-*")) == [8193] * 3
    tier.close()
    tier.close()
    assert not two.exists()


def test_the_next_run_says_where_it_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = killed(tmp_path)
    with caplog.at_level(logging.INFO, "checkflow"), resume(directory):
        pass
    assert "step 7 was complete in host memory when the run before died: it is saved now" in caplog.text
    assert "resumed from step 7" in caplog.text
    assert "which the run before had in host memory" in caplog.text


def test_what_storage_has_already_is_not_saved_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = killed(tmp_path, kill=("after step", 1, 2), stored=8)
    assert max(kept_in(directory)) == newest_on_storage(directory) == 8
    monkeypatch.setattr(Store, "commit", None)
    with Store(directory, run_id="next") as store:
        found = reclaiming.reclaim(store, "auto")
        assert found.steps == ()
        found.give_back(directory)
    assert not (directory / MARK).exists()


def test_ls_tells_what_the_next_run_will_save(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = killed(tmp_path)
    assert main(["ls", str(directory), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["left_in_memory"] == 7
    main(["ls", str(directory)])
    assert "step 7 lies in this machine's memory" in " ".join(capsys.readouterr().out.split())
    with resume(directory):
        main(["ls", str(directory), "--json"])
        assert json.loads(capsys.readouterr().out)["left_in_memory"] is None
    main(["ls", str(directory), "--json"])
    assert json.loads(capsys.readouterr().out)["left_in_memory"] is None
