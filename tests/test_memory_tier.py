"""Host memory outlives the process: what a killed job had captured is where the next run goes on.

Jobs run in processes of their own and are killed. Storage takes every fourth capture only, so that what is newer can
come from memory alone.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jobs
import pytest
import torch
from mounting import in_namespace
from oracle import assert_checkpoint_is, clone_state
from waiting import wait_for

from checkflow.cli import main
from checkflow.errors import ConsistencyError, StorageError
from checkflow.runtime import left_memory, memory_tier, reclaiming
from checkflow.runtime.checkpointer import Checkpointer
from checkflow.runtime.finding import find
from checkflow.runtime.frequency import Controller
from checkflow.runtime.memory_tier import MARK, OWNER, MemoryTier
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


@dataclass(frozen=True)
class Death:
    """A job that dies; at the end of an iteration it waits until memory has the boundary before that."""

    job: jobs.Job
    breaks: str = ""
    stored: bool = False  # or storage


def rarely() -> None:
    """Every boundary is captured, and few are durable, for the rest of this process."""
    Controller.is_due = lambda self, number: True  # type: ignore[method-assign]
    Controller.is_durable = lambda self, number: number % RARE == 0  # type: ignore[method-assign]


def die(death: Death) -> None:
    """In a process of its own."""
    rarely()
    at = jobs.Killer.at
    checkpoints = death.job.directory / "checkpoints"

    def when_kept(self: jobs.Killer, *place: Any) -> None:
        if place == death.job.kill and place[0] == "after step":
            step = PER_EPOCH * place[1] + place[2]
            wait_for(lambda: newest_on_storage(checkpoints) == step if death.stored else step in kept_in(checkpoints))
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


def tear() -> None:
    """What was staged is changed before the record of it is made: what a write too early would do."""
    keep = MemoryTier.keep

    def torn(self: MemoryTier, capture: Any, *rest: Any) -> None:
        if capture.step == 7:
            placed = max(capture.layout.tensors.values(), key=lambda one: one.record.size_bytes)
            view = capture.buffer.view
            view[placed.staging_offset] ^= 1
        keep(self, capture, *rest)

    MemoryTier.keep = torn  # type: ignore[method-assign]


BREAKS: dict[str, Callable[[], None]] = {"full": full_disk, "torn": tear}


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


def killed(
    tmp_path: Path,
    *,
    kill: tuple[str, int, int] = ("after step", 1, 1),
    breaks: str = "",
    stored: bool = False,
    **job: Any,
) -> Path:
    """The directory of the checkpoints of a job that died: with seven iterations finished, and the eighth stepped."""
    one = jobs.Job(tmp_path, kill=kill, every=None, **job)
    assert jobs.in_a_process(die, Death(one, breaks, stored)) == -signal.SIGKILL
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
    directory = killed(tmp_path)
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


def test_a_last_checkpoint_that_failed_stays_in_memory(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert jobs.in_a_process(die, Death(jobs.Job(tmp_path, every=None), "full")) == 0
    directory = tmp_path / "checkpoints"
    assert newest_on_storage(directory) in (None, 4)
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
    with pytest.raises(StorageError, match=r'resume="never", but .* holds step-00000003'):
        resume(directory, resume="never")


def test_going_back_to_a_step_that_memory_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = killed(tmp_path, options={"host_buffers": 5})
    assert {5, 7} <= set(kept_in(directory))
    committed: list[int] = []
    commit = Store.commit

    def note(self: Store, step: int, *rest: Any, **more: Any) -> Path:
        committed.append(step)
        return commit(self, step, *rest, **more)

    monkeypatch.setattr(Store, "commit", note)
    with resume(directory, resume=5) as checkpointer:
        assert checkpointer.resumed_from == 5
    assert committed == [7, 5]
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
    assert "is another user's or another job's" in caplog.text


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_another_users_folder_is_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = killed(tmp_path)
    before = newest_on_storage(directory)
    os.chown(folder_of(directory), 12345, 12345)
    with caplog.at_level(logging.WARNING, "checkflow"), resume(directory) as checkpointer:
        assert checkpointer.resumed_from == before
    assert "is another user's or another job's" in caplog.text


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


def test_the_memory_of_a_dead_job_whose_checkpoints_are_gone_is_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = killed(tmp_path / "one")
    folder = folder_of(directory)
    other = killed(tmp_path / "two")
    shutil.rmtree(directory)
    with resume(tmp_path / "third"):
        assert folder.is_dir()  # it is young: its job may be just about to lock it
    monkeypatch.setattr(reclaiming, "_YOUNG_SECONDS", 0.0)
    with resume(tmp_path / "third") as living:
        for _ in living.epochs(1):
            train(living)
        assert not folder.exists()
        assert folder_of(other).is_dir()
        # One that lives keeps its own, whatever becomes of its directory.
        mine = folder_of(tmp_path / "third")
        (tmp_path / "third" / MARK).unlink()
        with resume(tmp_path / "fourth"):
            assert mine.is_dir()


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
        wait_for(lambda: not list(folder_of(tmp_path).glob("buffer-*.json")))
        assert checkpointer.report()["failed"] == 0
    assert newest_on_storage(tmp_path) == 12


def test_larger_state_gets_larger_buffers_and_leaves_no_old_ones(tmp_path: Path) -> None:
    tier = MemoryTier(tmp_path)
    first = tier.allocate(2, 4096, None)
    one = folder_of(tmp_path)
    second = tier.allocate(3, 8193, None)
    two = folder_of(tmp_path)
    assert first is not None
    assert second is not None
    assert [len(memory) for memory in second] == [8193] * 3
    assert not one.exists()
    assert sorted(path.stat().st_size for path in two.glob("buffer-*")) == [8193] * 3
    first[0][:4] = b"here"  # it is in use for as long as anybody looks at it
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
    directory = killed(tmp_path, kill=("after step", 1, 2), stored=True)
    assert max(kept_in(directory)) == newest_on_storage(directory) == 8
    (directory / "step-00000008").rename(directory / "step-00000009")  # what is older than storage's, likewise
    with monkeypatch.context() as patched:
        patched.setattr(Store, "commit", None)
        with Store(directory, run_id="next") as store:
            assert reclaiming.reclaim(store, "auto") is None
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
