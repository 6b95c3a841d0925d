"""What is left behind, and what is met in a directory that others can write to: nothing more goes than should, nothing
comes back, nothing is followed; and nobody else gets hold of what is written."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import shutil
import socket
import stat
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from checkflow.core.errors import LockedError, StorageError
from checkflow.runtime.store.cleanup import is_leftover, temporary_name
from checkflow.runtime.store.file_writer import Image
from checkflow.runtime.store.files import step_name
from checkflow.runtime.store.reader import open_checkpoint
from checkflow.runtime.system import fs
from tests.runtime.store.test_store import CONTENT, LAYOUT, commit, new_store, newest, steps
from tests.support.faults import CUTS, Disk, Faults, Killed
from tests.support.store_tools import recover, tree
from tests.support.waiting import blocked, wait_for


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else tmp_path
    with tempfile.TemporaryDirectory(dir=memory, prefix="checkflow-test-") as folder:
        yield Path(folder) / "checkpoints"


# ------------------------------------------------------------------------------------------------- nothing comes back


@pytest.mark.parametrize(
    "failing", [("unlink", 1), ("rmdir", 1), ("open_claimed", 1), ("rename", 3)], ids=lambda f: f[0]
)
@pytest.mark.parametrize("way", ["rewound", "damaged", "retired"])
def test_what_was_exchanged_never_comes_back(directory: Path, failing: tuple[str, int], way: str) -> None:
    """It could not be removed at once; then what took its place goes."""
    call, at = failing
    with new_store(directory) as store:
        for step in (1, 2):
            commit(store, step, step)
        faults = Faults(at, errno.EIO, only=(call,))
        with faults():
            commit(store, 2, 7)
        assert faults.met
        if way == "rewound":
            store.rewind(1)
        elif way == "damaged":
            store.set_aside(directory / step_name(2))
        else:
            with Faults(1, errno.EIO, sticky=True, only=("unlink",))():
                commit(store, 3, 3)
                commit(store, 4, 4)
    new_store(directory).close()
    assert steps(directory) == ([4, 3] if way == "retired" else [1])


def test_a_power_cut_after_a_start_takes_nothing_that_it_found(directory: Path) -> None:
    """The run before was killed between rename and fsync: a job that goes on from there tells its user so."""
    disk = Disk(directory)
    with disk():
        store = new_store(directory)
        for step in (1, 2):
            commit(store, step, step)
        with pytest.raises(Killed), Faults(1, after=True, only=("rename",))():
            commit(store, 3, 3)
        store.close()
        with new_store(directory):
            assert steps(directory) == [3, 2, 1]
            for names in CUTS:
                assert newest(disk.after_power_cut(directory.with_name(f"cut-{names}"), names)) == (3, 3), names


# ------------------------------------------------------------------------------------------------ nothing is in the way


def test_a_folder_among_leftovers_keeps_nothing_else(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    left = directory / ".tmp-00000001-dead"
    (left / "a folder").mkdir(parents=True)
    (left / "a folder" / "precious").write_bytes(b"x")
    for name in ("manifest.json", "model.safetensors"):
        (left / name).write_bytes(b"y" * 100)
    with new_store(directory) as store:
        for step in range(4):
            commit(store, step, step)
    assert tree(directory / ".trash-tmp-00000001-dead") == {"a folder/precious": b"x"}
    assert caplog.text.count("cannot remove") <= 2  # by its name of then and of now, and not with each commit


def test_a_leftover_that_cannot_go_leaves_its_name(directory: Path) -> None:
    for name in (temporary_name(1, "run"), ".replaced-step-00000001"):
        (directory / name / "folder").mkdir(parents=True)
    with new_store(directory) as store:
        commit(store, 1, 1)
        commit(store, 1, 2)
        commit(store, 2, 3)
    for path in directory.glob(".trash*"):
        shutil.rmtree(path)
    assert newest(directory) == (2, 3)


# ------------------------------------------------------------------------------------- nothing is followed, or guessed


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes devices")
def test_a_leftover_whose_manifest_is_a_device_goes_without_its_being_opened(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The open alone may do something: rewind a tape, start a watchdog."""
    new_store(directory).close()
    left = directory / ".trash-step-00000003"
    left.mkdir()
    os.mknod(left / "manifest.json", 0o600 | stat.S_IFCHR, os.makedev(1, 3))
    opened, real = [], os.open

    def spy(path: Any, *rest: Any, **named: Any) -> int:
        opened.append(path)
        return real(path, *rest, **named)

    monkeypatch.setattr(os, "open", spy)
    new_store(directory).close()
    assert "manifest.json" not in opened
    assert not left.exists()


def test_links_among_leftovers_go_and_what_they_lead_to_stays(directory: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    with new_store(outside) as store:
        there = commit(store, 1, 1)
    before = tree(outside)
    directory.mkdir()
    left = directory / ".tmp-00000003-dead"
    left.mkdir()
    for number, target in enumerate((there, there / "manifest.json", outside, tmp_path / "nowhere")):
        (left / f"link{number}").symlink_to(target)
    (left / "manifest.json").symlink_to(there / "manifest.json")
    os.mkfifo(left / "fifo")
    (left / "name \udcff").write_bytes(b"")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(left / "socket"))
    os.mkfifo(directory / ".tmp-00000004-dead")
    for name in (".tmp-00000001-run", ".trash-step-00000005", ".trash-tmp-00000001-run.1", ".replaced-step-00000007"):
        (directory / name).symlink_to(there)
    (directory / step_name(7)).mkdir()
    # Somebody reads what the links lead to: that is no business of theirs, and they do not stay for it.
    with open_checkpoint(there), new_store(directory) as store:
        assert sorted(os.listdir(directory)) == [".lock", step_name(7)]
        commit(store, 1, 2)
    assert tree(outside) == before


@pytest.mark.parametrize(
    "name",
    [".tmp-notes", ".tmp-1-run", ".tmp-00000001-", ".tmp-00000001-.run", ".tmp-shards2", ".trash-", ".trash-old",
     ".trash-step-1", ".trash-broken-step-00000001", ".replaced-step-1", ".replaced-x", ".tmp-٠٠٠٠٠٠٠١-run",
     ".tmp-00000001-\udcff", ".tmp-00000001-run\n"],
)  # fmt: skip
def test_what_no_store_has_named_is_left_alone(directory: Path, name: str) -> None:
    (directory / name).mkdir(parents=True)
    (directory / name / "precious").write_bytes(b"x")
    with new_store(directory) as store:
        for step in range(4):
            commit(store, step, step)
    assert not is_leftover(name)
    assert (directory / name / "precious").read_bytes() == b"x"


@pytest.mark.parametrize(
    "name",
    [temporary_name(0, "run"), temporary_name(10**18, "r.0123456789abcdef"), ".tmp-shards", ".trash-step-00000001",
     ".trash-step-00000001.12", ".trash-tmp-00000001-run", ".trash-replaced-step-00000001.1", ".trash-tmp-shards",
     ".replaced-step-00000001"],
)  # fmt: skip
def test_what_stores_have_named_is_known(name: str) -> None:
    assert is_leftover(name)


def test_a_directory_whose_name_is_no_text(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # What is logged names it, and pytest's processes tell each other of logs in UTF-8.
    monkeypatch.setattr(logging.getLogger("checkflow"), "propagate", False)
    strange = directory / os.fsdecode(b"run \xff")
    with new_store(strange) as store:
        with pytest.raises(LockedError, match="process"):
            new_store(strange)
        for step in (1, 2, 3):
            commit(store, step, step)
        store.annotate(3, {"loss": 0.5})
        store.set_aside(strange / step_name(2))
    with new_store(strange) as store:
        checkpoint = recover(store)
        assert checkpoint is not None
        with checkpoint:
            assert checkpoint.step == 3
            checkpoint.verify()


# ------------------------------------------------------------------------------------- the directory is still this one


@pytest.mark.parametrize("instead", [None, "an empty one"])
def test_nothing_is_acknowledged_in_a_directory_that_was_moved(directory: Path, instead: str | None) -> None:
    """A restore would look for it where it was."""
    moved = directory.with_name("moved")
    with new_store(directory) as store:
        commit(store, 1, 1)
        directory.rename(moved)
        if instead is not None:
            directory.mkdir()
        for act in (
            lambda: commit(store, 2, 2), lambda: store.annotate(1, {"loss": 0.1}), lambda: store.rewind(0),
            lambda: store.set_aside(directory / step_name(1)),
        ):  # fmt: skip
            where = f"moved or replaced since this job began: it is {moved}, moved there from {directory}$"
            with pytest.raises(StorageError, match=where):
                act()
        assert steps(moved) == [1]
        if instead is not None:
            assert os.listdir(directory) == []
            directory.rmdir()
        moved.rename(directory)
        commit(store, 2, 2)
    assert newest(directory) == (2, 2)


def test_a_lock_file_that_was_deleted_is_made_anew(directory: Path) -> None:
    """It looks like a dead job's. The job that holds it holds the directory from its next checkpoint on."""
    with new_store(directory) as store:
        commit(store, 1, 1)
        (directory / ".lock").unlink()
        commit(store, 2, 2)
        with pytest.raises(LockedError, match=f"process {os.getpid()} on host"):
            new_store(directory, "other")
    new_store(directory, "other").close()


def test_a_copy_with_hard_links_is_refused_as_such(directory: Path) -> None:
    """It has the original's lock file, and its checkpoints' files."""
    copies = {how: directory.with_name(how.__name__) for how in (os.link, shutil.copy2)}
    with new_store(directory) as store:
        commit(store, 1, 1)
        for how, copy in copies.items():
            shutil.copytree(directory, copy, copy_function=how)
        with pytest.raises(LockedError) as caught:
            new_store(copies[os.link], "copy")
        assert f"{copies[os.link]} shares its files with another directory (cp -l makes such copies)" in str(
            caught.value
        )
        assert str(caught.value).endswith("stop it first, or copy without -l")
        with new_store(copies[shutil.copy2], "copy") as other:
            commit(other, 2, 2)
    with new_store(copies[os.link], "copy") as other:
        commit(other, 2, 3)
    assert [newest(one) for one in (directory, *copies.values())] == [(1, 1), (2, 3), (2, 2)]


def test_who_lost_the_lock_to_another_touches_nothing_of_it(directory: Path) -> None:
    with new_store(directory) as first:
        commit(first, 1, 1)
        (directory / ".lock").unlink()
        refused: list[BaseException] = []

        def image(file: Any) -> Iterator[memoryview]:
            with pytest.raises(LockedError, match="is being written by process") as caught:
                commit(first, 2, 2)
            refused.append(caught.value)
            yield from whole(file)

        whole = image_of(3)
        with new_store(directory, "second") as second:
            second.commit(3, LAYOUT, image, b"extra 3", {"seed": 3})
        assert refused
        commit(first, 4, 4)  # the other one has ended
        with pytest.raises(LockedError):
            new_store(directory, "third")
    assert newest(directory) == (4, 4)
    assert steps(directory) == [4, 3]


# ------------------------------------------------------------------------------------------------- children and threads


def image_of(seed: int) -> Image:
    from checkflow.runtime.format.layout import file_image

    return lambda file: file_image(file, CONTENT[seed][0], 1 << 20)


def open_below(directory: Path) -> list[str]:
    """Files of a directory that this process has open."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            path = os.readlink(f"/proc/self/fd/{fd}")
            if path.startswith(str(directory)) and not os.path.isdir(f"/proc/self/fd/{fd}"):
                found.append(path.removeprefix(str(directory)))
    return found


def in_child(work: Any) -> Any:
    """What it returns in a forked child, as JSON has it."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.write(writing, json.dumps(work()).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, "rb") as answer:
        data = answer.read()
    os.waitpid(child, 0)
    return json.loads(data)


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_child_forked_at_any_moment_of_a_commit_has_nothing_open(directory: Path) -> None:
    """Loader workers outlive what is written: it could not be deleted, or its room not be had again."""
    seen: list[str] = []
    had: set[str] = set()

    def forking(real: Any) -> Any:
        def call(*args: Any, **named: Any) -> Any:
            had.update(open_below(directory))
            seen.extend(in_child(lambda: open_below(directory)))
            return real(*args, **named)

        return call

    with new_store(directory) as store:
        for step in (1, 2):
            commit(store, step, step)
        with pytest.MonkeyPatch.context() as patch:
            for name in ("pwrite", "fsync", "rename", "preadv", "unlink"):
                patch.setattr(fs, name, forking(getattr(fs, name)))
            store.annotate(2, {"loss": 0.5})
            commit(store, 3, 3)
    assert {"/.lock", "/step-00000002/manifest.json", "/.tmp-00000003-run/state.msgpack"} <= had
    assert seen == []


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_child_forked_during_a_commit_does_not_wait_for_it(directory: Path) -> None:
    """The thread that commits is not there, and gives no lock of the child's back."""
    writing, forked = threading.Event(), threading.Event()

    def image(file: Any) -> Iterator[memoryview]:
        writing.set()
        forked.wait()
        yield from image_of(1)(file)

    with new_store(directory) as store:
        thread = threading.Thread(target=lambda: store.commit(1, LAYOUT, image, b"extra 1", {"seed": 1}))
        thread.start()
        writing.wait()
        child = os.fork()
        if not child:
            refused = 0
            for act in (
                lambda: commit(store, 2, 2), lambda: store.annotate(1, {}), lambda: store.rewind(0),
                lambda: store.set_aside(directory / step_name(1)),
            ):  # fmt: skip
                try:
                    act()
                except StorageError as error:
                    refused += "closed in this process" in str(error)
            store.close()
            os._exit(refused)
        try:
            _, status = wait_for(lambda: (found := os.waitpid(child, os.WNOHANG))[0] and found)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, 9)
            forked.set()
            thread.join()
        assert os.waitstatus_to_exitcode(status) == 4
    assert newest(directory) == (1, 1)


def test_a_store_is_closed_when_what_it_writes_is_written(directory: Path) -> None:
    """The descriptor of its directory may be another's a moment later."""
    store = new_store(directory)
    closing = threading.Thread(target=store.close)

    def image(file: Any) -> Iterator[memoryview]:
        if not closing.ident:
            closing.start()
            wait_for(blocked(closing))  # by this thread
        yield from image_of(1)(file)

    store.commit(1, LAYOUT, image, b"extra 1", {"seed": 1})
    closing.join()
    assert not store.locked
    assert newest(directory) == (1, 1)


# ------------------------------------------------------------------------------------------------- errors on the way


def test_a_late_metric_of_a_checkpoint_that_failed_is_none(directory: Path) -> None:
    """It may have its name still, if that could not be taken back at once."""
    at = met = 0
    while True:
        at += 1
        shutil.rmtree(directory, ignore_errors=True)
        with new_store(directory) as store:
            commit(store, 1, 1)
            faults = Faults(at, errno.EIO, sticky=True)
            failed = False
            with faults():
                try:
                    commit(store, 2, 2)
                except StorageError:
                    failed = True
            met += failed
            store.annotate(2, {"loss": 0.5})
            assert steps(directory) == ([1] if failed else [2, 1])
        if not faults.met:
            break
    assert met > 15


@pytest.mark.parametrize("what", ["commit", "annotate"])
def test_the_first_error_is_the_one_that_is_told(directory: Path, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real_close = fs.close

    def close(fd: int) -> None:
        real_close(fd)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with new_store(directory) as store:
        commit(store, 1, 1)
        with Faults(1, errno.ENOSPC, sticky=True, only=("pwrite",))(), monkeypatch.context() as patch:
            patch.setattr(fs, "close", close)
            with pytest.raises(StorageError, match="No space left"):
                commit(store, 2, 2) if what == "commit" else store.annotate(1, {"loss": 0.5})
    assert newest(directory) == (1, 1)
