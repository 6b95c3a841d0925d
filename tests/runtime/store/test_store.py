"""The store: what was acknowledged stays, whatever call fails and whenever the process or the power goes."""

from __future__ import annotations

import contextlib
import errno
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from checkflow.core.errors import LockedError, StorageError, UnsupportedError
from checkflow.runtime.format import manifest
from checkflow.runtime.format.layout import make_layout
from checkflow.runtime.store.discovery import find, find_valid
from checkflow.runtime.store.files import parse_step, step_name
from checkflow.runtime.store.reader import Checkpoint, open_checkpoint
from checkflow.runtime.store.store import Store
from checkflow.runtime.system import fs
from tests.faults.mounting import need_mount
from tests.support.faults import CALLS, CUTS, ERRORS, Disk, Faults, Killed, all_direct
from tests.support.pairing import pairs
from tests.support.store_tools import fill, read_all, record, recover, small_layout, tree

ROOT = Path(__file__).parents[3]
LAYOUT = small_layout()
CONTENT = {seed: fill(LAYOUT, seed) for seed in range(12)}


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    """In memory where there is /dev/shm: thousands of fsyncs cost nothing there."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else tmp_path
    with tempfile.TemporaryDirectory(dir=memory, prefix="checkflow-test-") as folder:
        yield Path(folder) / "checkpoints"


@pytest.fixture(params=["buffered", "direct"])
def each_way(request: pytest.FixtureRequest) -> Iterator[None]:
    """Through the page cache, as such small files go, and around it, as large ones do."""
    with all_direct() if request.param == "direct" else contextlib.nullcontext([4096]) as sizes:
        yield
    assert sizes


def new_store(directory: Path, run_id: str = "run", **options: int | str | None) -> Store:
    return Store(directory, run_id=run_id, lock_wait_seconds=0, **options)  # type: ignore[arg-type]


def commit(store: Store, step: int, seed: int, **info: object) -> Path:
    return store.commit(step, LAYOUT, CONTENT[seed][0], f"extra {seed}".encode(), {"seed": seed, **info})


def try_commit(store: Store, step: int, seed: int) -> str | None:
    """What the store says when it fails."""
    try:
        commit(store, step, seed)
    except StorageError as error:
        return str(error)
    return None


def seed_in(checkpoint: Checkpoint) -> int:
    """Which content a checkpoint has, after a look at all of it."""
    seed = int(checkpoint.info["seed"])
    assert read_all(checkpoint) == CONTENT[seed][1]
    assert checkpoint.extra_bytes == f"extra {seed}".encode()
    return seed


def newest(directory: Path, *, every: bool = True) -> tuple[int, int] | None:
    """(step, seed) of what a new process recovers. Nothing may be damaged, nothing left lying about.

    Not ``every``: older ones are not looked at.
    """
    with new_store(directory, "later") as store:
        for path in find(directory) if every else ():
            with open_checkpoint(path) as one:
                seed_in(one)
        checkpoint = recover(store)
        assert [name for name in os.listdir(directory) if name.startswith(".")] == [".lock"]
        if checkpoint is None:
            return None
        with checkpoint:
            return checkpoint.step, seed_in(checkpoint)


def steps(directory: Path) -> list[int]:
    return [step for path in find(directory) if (step := parse_step(path.name)) is not None]


# ------------------------------------------------------------------------------------------------ without any fault


@pytest.mark.usefixtures("each_way")
def test_a_checkpoint_comes_back(directory: Path) -> None:
    with new_store(directory) as store:
        assert recover(store) is None
        path = store.commit(
            7, LAYOUT, CONTENT[1][0], b"extra 1", {"seed": 1, "epoch": 2}, ties=[("model/tied", "model/conv.weight")],
            absent=["optimizer/x"], plan_digest="abc",
        )  # fmt: skip
        assert path == directory / "step-00000007"
        checkpoint = recover(store)
        assert checkpoint is not None
        with checkpoint:
            assert (checkpoint.step, seed_in(checkpoint), checkpoint.info["epoch"]) == (7, 1, 2)
            assert checkpoint.ties == (("model/tied", "model/conv.weight"),)
            assert checkpoint.manifest.absent == ("optimizer/x",)
            assert (checkpoint.manifest.plan_digest, checkpoint.manifest.run_id) == ("abc", "run")
            assert checkpoint.tensors["model/conv.weight"].permutation == (0, 2, 3, 1)
            data = bytearray(checkpoint.size_bytes("model/tied"))
            checkpoint.read_into("model/tied", memoryview(data))
            assert bytes(data) == CONTENT[1][1]["model/conv.weight"]
    assert newest(directory) == (7, 1)


def test_the_manifest_is_json_and_names_every_file(directory: Path) -> None:
    with new_store(directory) as store:
        path = commit(store, 1, 1)
    found = json.loads((path / "manifest.json").read_bytes())
    assert {*found["files"], "manifest.json"} == {entry.name for entry in path.iterdir()}
    for name, entry in found["files"].items():
        assert (path / name).stat().st_size == entry["size_bytes"]


def test_each_layout_has_its_own_tensors_in_the_manifest(directory: Path) -> None:
    """They are written once for a layout, and put where the manifest has none: at no text that looks like it."""
    odd = '"tensors":{}'
    layouts = [LAYOUT, make_layout([]), make_layout([record(f"model/{odd}", (2,))]), LAYOUT]
    with new_store(directory) as store:
        for step, layout in enumerate(layouts):
            path = store.commit(step, layout, fill(layout, 1)[0], b"", {odd: {}, "tensors": {}}, plan_digest=odd)
            data = (path / "manifest.json").read_bytes()
            found = manifest.loads(data, "it")
            assert manifest.dumps(found) == data
            assert {*found.tensors} == {*layout.tensors}
            assert (found.plan_digest, found.info) == (odd, {odd: {}, "tensors": {}})


def test_nothing_to_save_is_saved(directory: Path) -> None:
    with new_store(directory) as store:
        path = store.commit(0, make_layout([]), memoryview(b""), b"", {})
    with open_checkpoint(path) as checkpoint:
        checkpoint.verify()
        assert (dict(checkpoint.tensors), checkpoint.extra_bytes) == ({}, b"")


def test_large_files_have_a_checksum_for_each_block(directory: Path) -> None:
    layout = make_layout(
        [
            record("model/a", (1000, 2500)),
            record("model/b", (64, 100, 9, 60), order=(0, 2, 3, 1)),
            record("model/c", (3,)),
        ]
    )
    staging, expected = fill(layout, 0)
    with new_store(directory) as store:
        path = store.commit(0, layout, staging, b"", {})
    with open_checkpoint(path) as checkpoint:
        assert len(checkpoint.manifest.files[layout.files[0].name].blocks) == 3
        checkpoint.verify()
        assert read_all(checkpoint) == expected


def test_old_checkpoints_go_and_epochs_stay(directory: Path) -> None:
    with new_store(directory, keep_latest=3, keep_epochs=True) as store:
        for step in range(9):
            commit(store, step, step, epoch_end=step % 4 == 1)
            assert (
                steps(directory)
                == sorted({*range(max(0, step - 2), step + 1), *(s for s in (1, 5) if s <= step)})[::-1]
            )
    with new_store(directory, keep_epochs=False) as store:
        commit(store, 9, 9)
    assert steps(directory) == [9, 8]


def test_what_a_dead_run_did_not_delete_goes_before_the_next_commit(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It died between rename and retention: with the one being written there would be one too many on the disk."""
    with new_store(directory, keep_latest=3) as store:
        for step in (1, 2, 3):
            commit(store, step, step)
    present: list[list[int]] = []
    with new_store(directory) as store:
        with Faults(1, errno.ENOSPC, sticky=True, only=("pwrite",))():
            assert try_commit(store, 4, 4)
        assert steps(directory) == [3, 2, 1]  # nobody has looked whether the newest is whole
        checkpoint = recover(store)
        assert checkpoint is not None
        checkpoint.close()
        store.went_on_from(checkpoint.step)
        assert steps(directory) == [3, 2, 1]  # nor has the job begun
        real = fs.pwrite
        monkeypatch.setattr(
            fs, "pwrite", lambda *given: (present.append(steps(directory)), real(*given))[1]
        )  # fmt: skip
        commit(store, 4, 4)
    assert all(one == [3, 2] for one in present)
    assert steps(directory) == [4, 3]


def test_damaged_checkpoints_do_not_count_as_kept(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    with new_store(directory) as store:
        commit(store, 1, 1)
        commit(store, 2, 2)
    (directory / "step-00000002" / "manifest.json").unlink()
    with new_store(directory) as store:
        commit(store, 3, 3)
        assert steps(directory) == [3, 2, 1]
        commit(store, 4, 4)
        assert steps(directory) == [4, 3, 2]
    assert caplog.text.count("leaving") == 1


def test_the_same_step_again_replaces_it(directory: Path) -> None:
    with new_store(directory) as store:
        commit(store, 1, 1)
        commit(store, 2, 2)
        commit(store, 2, 3)
    assert newest(directory) == (2, 3)
    assert steps(directory) == [2, 1]


def test_rewind_hides_what_came_after(directory: Path) -> None:
    with new_store(directory, keep_latest=5) as store:
        for step in range(4):
            commit(store, step, step)
        assert [path.name for path in store.rewind(1)] == [
            ".superseded-step-00000003", ".superseded-step-00000002",
        ]  # fmt: skip
        commit(store, 2, 7)
        checkpoint = recover(store)
        assert checkpoint is not None
        assert (checkpoint.step, seed_in(checkpoint)) == (2, 7)
        checkpoint.close()
        assert [path.name for path in store.rewind(-1)] == [
            ".superseded-step-00000002.1", ".superseded-step-00000001", ".superseded-step-00000000",
        ]  # fmt: skip
        assert recover(store) is None


def test_a_newer_abandoned_checkpoint_never_pushes_out_the_one_just_written(directory: Path) -> None:
    with new_store(directory) as store:
        for step in (5, 6, 1):
            commit(store, step, step)
        assert steps(directory) == [6, 5, 1]


def test_steps_have_one_name_each(directory: Path) -> None:
    for step in (0, 1, 12345678, 123456789, 10**18):
        assert parse_step(step_name(step)) == step
    for name in (
        "step-1",
        "step-000000001",
        "step-0000000x",
        "step-00000001\n",
        "step-٠٠٠٠٠٠٠١",
        "step-" + "9" * 20,
        "",
    ):
        assert parse_step(name) is None
    with new_store(directory) as store:
        commit(store, 10**18, 1)
        for name in ("step-1", "step-000000009", "other", ".tmp2", "best"):
            (directory / name).mkdir()
        assert [path.name for path in store.checkpoints()] == ["step-1000000000000000000"]


@pytest.mark.parametrize("bad", [-1, 10**18 + 1])
def test_impossible_arguments_are_refused(directory: Path, bad: int) -> None:
    with new_store(directory) as store:
        with pytest.raises(ValueError, match="a step is"):
            commit(store, bad, 1)
        with pytest.raises(ValueError, match="staging"):
            store.commit(1, LAYOUT, CONTENT[1][0][:-1], b"", {})
        for info in ({"x": float("nan")}, {"x": object()}, {"x": b""}):
            with pytest.raises(UnsupportedError, match="JSON"):
                store.commit(1, LAYOUT, CONTENT[1][0], b"", info)
        assert find(directory) == ()
    with pytest.raises(ValueError, match="at least 2"):
        new_store(directory, keep_latest=1)
    for run_id in ("", "../x", "a/b", ".x", "x" * 101):
        with pytest.raises(ValueError, match="run id"):
            new_store(directory, run_id)


# -------------------------------------------------------------------------------------------------- one writer only


def test_a_second_writer_is_told_who_is_first(directory: Path) -> None:
    directory.mkdir(exist_ok=True)
    (directory / ".lock").write_text("a longer text" * 100)
    with new_store(directory) as store:
        assert json.loads((directory / ".lock").read_text())["pid"] == os.getpid()
        with pytest.raises(LockedError, match=f"process {os.getpid()} on host"):
            new_store(directory, "other")
        commit(store, 1, 1)
    new_store(directory, "other").close()


def test_on_a_full_disk_nobody_is_taken_for_the_holder(directory: Path) -> None:
    new_store(directory).close()
    with Faults(1, errno.ENOSPC, sticky=True, only=("pwrite",))():
        store = new_store(directory)
    with store:
        assert (directory / ".lock").read_bytes() == b""


def test_a_writer_waits_for_the_end_of_another(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, real, refused = new_store(directory), fs.flock, 0

    def flock(fd: int) -> None:
        nonlocal refused
        try:
            real(fd)
        except BlockingIOError:
            refused += 1
            if refused == 2:
                store.close()
            raise

    monkeypatch.setattr(fs, "flock", flock)
    Store(directory, run_id="other", lock_wait_seconds=600).close()
    assert refused == 2


def _commit_in_child(store: Store, answers: multiprocessing.SimpleQueue[str]) -> None:
    try:
        commit(store, 2, 2)
    except StorageError as error:
        answers.put(str(error))
    else:
        answers.put("committed")


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_cannot_write(directory: Path) -> None:
    fork = multiprocessing.get_context("fork")
    answers: multiprocessing.SimpleQueue[str] = fork.SimpleQueue()
    with new_store(directory) as store:
        child = fork.Process(target=_commit_in_child, args=(store, answers))
        child.start()
        assert "closed in this process" in answers.get()
        child.join()
        commit(store, 1, 1)
    with pytest.raises(StorageError, match="closed in this process"):
        commit(store, 1, 1)


@pytest.mark.slow
def test_killed_writers_lose_nothing(directory: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "tests.faults.kill_writer", str(directory), "40", "1"],
        capture_output=True, text=True, check=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    answer = json.loads(result.stdout)
    assert answer["problems"] == []
    assert answer["last"] is not None
    assert answer["commits"] > 40


def test_a_reader_beside_a_writer_always_finds_a_whole_one(directory: Path) -> None:
    found: list[int] = []
    with new_store(directory) as store:
        commit(store, 0, 0)
        writing = threading.Event()

        def write() -> None:
            for step in range(1, 120):
                commit(store, step, step % 12)
            writing.set()

        writer = threading.Thread(target=write)
        writer.start()
        while not writing.is_set():
            checkpoint = find_valid(directory)
            assert checkpoint is not None
            with checkpoint:
                seed_in(checkpoint)
                found.append(checkpoint.step)
        writer.join()
    assert found == sorted(found)
    assert not [name for name in os.listdir(directory) if name.startswith(".broken")]


# ------------------------------------------------------------------------------------- every call fails, or kills


def prepare(directory: Path, count: int = 2) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    with new_store(directory) as store:
        for step in range(1, count + 1):
            commit(store, step, step)


CASES = {"new-step": 3, "same-step-again": 2}


@pytest.mark.parametrize(
    *pairs(
        step=CASES, sticky={"once": False, "sticky": True}, after={"before": False, "after": True},
        error={errno.errorcode[error]: error for error in ERRORS},
    )
)  # fmt: skip
def test_any_call_may_fail(directory: Path, step: int, sticky: bool, after: bool, error: int) -> None:
    fail_at_every_call(directory, step, sticky, after, error)


@pytest.mark.slow
@pytest.mark.parametrize("sticky", [False, True], ids=["once", "sticky"])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_any_call_may_fail_around_the_page_cache(directory: Path, sticky: bool, after: bool) -> None:
    with all_direct() as sizes:
        fail_at_every_call(directory, 3, sticky, after, errno.EIO)
    assert sizes


def fail_at_every_call(directory: Path, step: int, sticky: bool, after: bool, error: int) -> None:
    """Whatever call of a commit fails: what was acknowledged is there, and the next commit works."""
    refused, at = 0, 0
    while True:
        at += 1
        prepare(directory)
        faults = Faults(at, error, after=after, sticky=sticky)
        with new_store(directory) as store:
            with faults():
                failed = try_commit(store, step, 7)
            acknowledged = failed is None
            refused += not acknowledged
            assert failed is None or os.strerror(error) in failed
            copy = directory.with_name(directory.name + "-copy")
            shutil.copytree(directory, copy)
            try:
                left = newest(copy)
            finally:
                shutil.rmtree(copy)
            if acknowledged:
                assert left == (step, 7)
            elif sticky:  # it could not be taken back; then it is whole
                assert left in ((2, 2), (step, 7))
            else:
                assert left == (2, 2)
            commit(store, 4, 8)
        assert newest(directory) == (4, 8)
        assert len(find(directory)) <= 3
        if not faults.met:
            break
    assert refused > 15


@pytest.mark.parametrize("step", CASES.values(), ids=CASES)
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.usefixtures("each_way")
def test_a_kill_at_any_call(directory: Path, step: int, after: bool) -> None:
    at, kills = 0, 0
    while True:
        at += 1
        prepare(directory)
        faults = Faults(at, after=after)
        store = new_store(directory)
        with faults():
            try:
                commit(store, step, 7)
                acknowledged = True
            except Killed:
                acknowledged = False
                kills += 1
        store.close()
        left = newest(directory)
        assert left == (step, 7) if acknowledged else left in ((2, 2), (step, 7))
        with new_store(directory) as store:
            commit(store, 4, 8)
        assert newest(directory) == (4, 8)
        if not faults.met:
            break
    assert kills > 25


def test_a_second_fault_during_recovery(directory: Path) -> None:
    """Killed while a step is exchanged; then each call of the next start fails or kills; then a good start."""
    for at in range(1, 200):
        prepare(directory)
        first = Faults(at, after=True, only=("rename",))
        store = new_store(directory)
        with pytest.raises(Killed), first():
            commit(store, 2, 7)
        store.close()
        again = 0
        while True:
            again += 1
            copy = directory.with_name(directory.name + "-copy")
            shutil.copytree(directory, copy)
            second = Faults(again, (None, errno.EIO)[again % 2])
            try:
                with second():
                    store = new_store(copy)
                    checkpoint = recover(store)
                    if checkpoint:
                        checkpoint.close()
                    store.close()
            except (Killed, StorageError):
                pass
            store.close()
            assert newest(copy) in ((2, 2), (2, 7))
            shutil.rmtree(copy)
            if not second.met:
                break
        if at == 2:  # the old one steps aside, the new one takes its place
            break


@pytest.mark.usefixtures("each_way")
def test_what_was_written_of_a_failed_checkpoint_goes_at_once(directory: Path) -> None:
    """A full disk would stay full."""
    prepare(directory)
    with new_store(directory) as store:
        for call in ("pwrite", "fsync", "open_new", "rename"):
            with Faults(1, errno.ENOSPC, only=(call,))(), pytest.raises(StorageError, match="No space"):
                commit(store, 3, 3)
            assert sorted(os.listdir(directory)) == [".lock", "step-00000001", "step-00000002"]


@pytest.mark.parametrize("name", [*(file.name for file in LAYOUT.files), "state.msgpack", "manifest.json"])
@pytest.mark.parametrize("planted", ["link", "dangling", "file"])
@pytest.mark.usefixtures("each_way")
def test_nothing_planted_is_written_to(
    directory: Path, tmp_path: Path, name: str, planted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, precious = fs.mkdir, tmp_path / "precious"
    precious.write_bytes(b"x")

    def mkdir(folder: str, *, dir_fd: int) -> None:
        real(folder, dir_fd=dir_fd)
        target = directory / folder / name
        if planted == "file":
            target.write_bytes(b"y")
        else:
            target.symlink_to(precious if planted == "link" else tmp_path / "new")

    with new_store(directory) as store:
        commit(store, 1, 1)
        monkeypatch.setattr(fs, "mkdir", mkdir)
        with pytest.raises(StorageError, match="File exists"):
            commit(store, 2, 2)
        monkeypatch.undo()
        commit(store, 2, 2)
    assert precious.read_bytes() == b"x"
    assert not (tmp_path / "new").exists()
    assert newest(directory) == (2, 2)


def test_short_writes_go_on(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = fs.pwrite
    monkeypatch.setattr(fs, "pwrite", lambda fd, data, offset: real(fd, data[: max(1, len(data) // 3)], offset))
    with new_store(directory) as store:
        commit(store, 1, 1)
    monkeypatch.undo()
    assert newest(directory) == (1, 1)


@pytest.mark.usefixtures("each_way")
def test_a_write_without_progress_is_an_error(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with new_store(directory) as store:
        commit(store, 1, 1)
        monkeypatch.setattr(fs, "pwrite", lambda fd, data, offset: 0)
        with pytest.raises(StorageError, match="no progress"):
            commit(store, 2, 2)
        monkeypatch.undo()
        commit(store, 3, 3)
    assert newest(directory) == (3, 3)


def test_directories_that_cannot_be_synced_are_told_once(
    directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = fs.fsync

    def fsync(fd: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{fd}"):
            raise OSError(errno.EINVAL, "no")
        real(fd)

    monkeypatch.setattr(fs, "fsync", fsync)
    with new_store(directory) as store:
        for step in range(4):
            commit(store, step, step)
    assert caplog.text.count("cannot sync directories") == 1
    assert newest(directory) == (3, 3)


# ------------------------------------------------------------------------------------------------- the power is cut


def left_by_power_cut(disk: Disk) -> list[tuple[int, int] | None]:
    """What a new process finds, for each way in which the disk may treat names."""
    left = []
    for names in CUTS:
        copy = disk.root.with_name(disk.root.name + "-cut")
        try:
            # Torn names may be of what retention was just deleting.
            left.append(newest(disk.after_power_cut(copy, names), every=names != "torn"))
        finally:
            shutil.rmtree(copy)
    return left


def power_cut(directory: Path, step: int, at: int, *, lies: str = "") -> bool:
    """Cut the power at a call of a commit; whether the commit had that many calls. Asserts that nothing is lost."""
    shutil.rmtree(directory, ignore_errors=True)
    disk, faults = Disk(directory, lies=lies), Faults(at)
    with disk():
        store = new_store(directory)
        commit(store, 1, 1)
        commit(store, 2, 2)
        acknowledged = False
        try:
            with faults():
                commit(store, step, 7)
                acknowledged = True
        except Killed:
            pass
        left = left_by_power_cut(disk)
        store.close()
    expected = ((step, 7),) if acknowledged else ((2, 2), (step, 7))
    assert all(found in expected for found in left), left
    return faults.met


@pytest.mark.parametrize("step", CASES.values(), ids=CASES)
@pytest.mark.usefixtures("each_way")
def test_a_power_cut_at_any_call(directory: Path, step: int) -> None:
    at = 1
    while power_cut(directory, step, at):
        at += 1
    assert at > 25


@pytest.mark.parametrize("lies", ["file", "folder", "root"])
def test_without_any_one_sync_the_power_cut_is_noticed(directory: Path, lies: str) -> None:
    """The test above is worth something: on a disk where one kind of fsync does nothing, it fails."""
    with pytest.raises((AssertionError, StorageError)):
        power_cut(directory, 3, 10_000, lies=lies)


def test_a_power_cut_after_a_rewind_brings_nothing_back(directory: Path) -> None:
    disk = Disk(directory)
    with disk(), new_store(directory, keep_latest=5) as store:
        for step in (1, 2, 3):
            commit(store, step, step)
        store.rewind(1)
        for names in CUTS:
            copy = disk.after_power_cut(directory.with_name(f"cut-{names}"), names)
            assert steps(copy) == [1], names


@pytest.mark.slow
def test_a_power_cut_while_a_killed_exchange_is_settled(directory: Path) -> None:
    for renames in (1, 2):
        at = 0
        while True:
            at += 1
            shutil.rmtree(directory, ignore_errors=True)
            disk, faults = Disk(directory), Faults(at)
            with disk():
                store = new_store(directory)
                commit(store, 1, 1)
                commit(store, 2, 2)
                with pytest.raises(Killed), Faults(renames, after=True, only=("rename",))():
                    commit(store, 2, 7)
                store.close()
                with contextlib.suppress(Killed), faults():
                    new_store(directory).close()
                left = left_by_power_cut(disk)
            assert all(found in ((2, 2), (2, 7)) for found in left), left
            if not faults.met:
                break


def test_a_new_directory_is_made_durable_with_its_parents(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    real = fs.fsync

    def fsync(fd: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))
        real(fd)

    monkeypatch.setattr(fs, "fsync", fsync)
    new_store(directory / "a" / "b").close()
    assert {str(directory.parent), str(directory), str(directory / "a"), str(directory / "a" / "b")} <= set(synced)


# -------------------------------------------------------------------------------------------- disks and directories


def remount(target: Path, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", str(target)], check=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    target = tmp_path / "disk"
    target.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(target)], capture_output=True, text=True, check=False
    )
    need_mount(f"mounting is not allowed here: {done.stderr.strip()}" if done.returncode else None)
    yield target
    subprocess.run(["umount", "-l", str(target)], check=True)


def test_a_full_disk_of_every_size(small_disk: Path) -> None:
    """Some commits fail, none is half there, and with room again the next one works."""
    outcomes = set()
    for size_kib in range(4, 150, 4):
        directory = small_disk / "checkpoints"
        shutil.rmtree(directory, ignore_errors=True)
        remount(small_disk, f"size={size_kib}k")
        acknowledged = None
        with new_store(directory) as store:
            for step in range(1, 5):
                if (failed := try_commit(store, step, step)) is None:
                    acknowledged = (step, step)
                assert failed is None or "No space left" in failed
        assert newest(directory) == acknowledged
        outcomes.add(acknowledged)
        remount(small_disk, "size=1m")
        with new_store(directory) as store:
            commit(store, 9, 9)
        assert newest(directory) == (9, 9)
    assert {None, (1, 1), (4, 4)} <= outcomes


def test_a_disk_that_becomes_read_only(small_disk: Path) -> None:
    with new_store(small_disk) as store:
        commit(store, 1, 1)
        changes = ("mkdir", "open_new", "pwrite", "fsync", "rename", "unlink", "rmdir", "truncate")
        with pytest.raises(StorageError, match="Read-only"), Faults(5, errno.EROFS, sticky=True, only=changes)():
            commit(store, 2, 2)
    remount(small_disk, "ro")
    with pytest.raises(StorageError, match="Read-only"):
        new_store(small_disk)
    found = find_valid(small_disk)
    assert found is not None
    found.close()
    remount(small_disk, "rw")
    with new_store(small_disk) as store:
        commit(store, 2, 2)
    assert newest(small_disk) == (2, 2)


def test_volatile_file_systems_are_told(small_disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    new_store(small_disk).close()
    assert caplog.text.count("lies on tmpfs") == 1


def test_a_file_size_limit(directory: Path) -> None:
    import resource

    with new_store(directory) as store:
        commit(store, 1, 1)
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4200, before[1]))
        try:
            with pytest.raises(StorageError, match="too large"):
                commit(store, 2, 2)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        commit(store, 3, 3)
    assert newest(directory) == (3, 3)


def test_directories_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StorageError, match="file"):
        new_store(tmp_path / "file")
    with pytest.raises(StorageError, match="file is a file, not a directory"):
        new_store(tmp_path / "file" / "below")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    with pytest.raises(StorageError, match="dangling"):
        new_store(tmp_path / "dangling")
    (tmp_path / "locked").mkdir()
    (tmp_path / "locked" / ".lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StorageError, match="cannot lock"):
        new_store(tmp_path / "locked")
    assert not (tmp_path / "elsewhere").exists()
    with pytest.raises(StorageError, match="/proc"):
        new_store(Path("/proc/checkpoints"))


def test_a_linked_root_is_followed_and_nothing_below_it(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_bytes(b"x")
    for name in (".tmp-00000001-run", ".trash-step-00000005", ".replaced-step-00000007"):
        (tmp_path / "real" / name).symlink_to(outside)
    (tmp_path / "real" / ".tmp-00000002-old").mkdir()
    (tmp_path / "real" / ".tmp-00000002-old" / "x").symlink_to(outside / "precious")
    with new_store(tmp_path / "link") as store:
        path = commit(store, 1, 1)
    assert path.parent == tmp_path / "real"
    assert tree(outside) == {"precious": b"x"}
    assert not list((tmp_path / "real").glob(".t*"))


def test_leftovers_of_dead_runs_go(directory: Path) -> None:
    with new_store(directory) as store:
        commit(store, 1, 1)
        commit(store, 2, 2)
    shutil.copytree(directory / "step-00000002", directory / ".tmp-00000003-dead")
    shutil.copytree(directory / "step-00000002", directory / ".trash-step-00000000")
    shutil.copytree(directory / "step-00000001", directory / ".replaced-step-00000001")
    (directory / "step-00000002").rename(directory / ".replaced-step-00000002")
    (directory / "notes.txt").write_text("the user's own")
    new_store(directory).close()
    assert sorted(os.listdir(directory)) == [".lock", "notes.txt", "step-00000001", "step-00000002"]
    assert newest(directory) == (2, 2)


def test_a_leftover_that_cannot_go_does_not_stop_the_next_commit(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (directory / ".tmp-00000001-dead" / "folder").mkdir(parents=True)
    with new_store(directory) as store:
        commit(store, 1, 1)
        commit(store, 2, 2)
    assert "cannot remove" in caplog.text
    shutil.rmtree(directory / ".trash-tmp-00000001-dead")
    assert newest(directory) == (2, 2)


def test_the_store_needs_no_torch() -> None:
    program = (
        "import sys, checkflow.runtime.store.store, checkflow.runtime.store.discovery, "
        "checkflow.runtime.format.layout\n"
        "print([name for name in ('torch', 'pulp', 'networkx') if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert found.stdout == "[]\n"


def test_every_wrapped_call_exists() -> None:
    assert all(callable(getattr(fs, name)) for name in CALLS)
