"""Whose checkpoints a job goes on from: its own and root's, and nobody else's unless it is told so."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import socket
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from checkflow.core.errors import LockedError, StorageError
from checkflow.runtime.store import lock
from checkflow.runtime.store import store as stores
from checkflow.runtime.store.discovery import find_valid
from checkflow.runtime.store.files import step_name
from checkflow.runtime.store.reader import open_checkpoint
from checkflow.runtime.store.trust import READ, ForeignError
from checkflow.runtime.system import fs
from tests.runtime.store.test_store import commit, new_store, newest, seed_in, steps
from tests.support.store_tools import recover

NOBODY = 65534
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")


def as_nobody(work: Callable[[], object]) -> None:
    """In a child that is another user."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            work()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Two checkpoints of our own."""
    for parent in (tmp_path, *tmp_path.parents):
        if parent.stat().st_uid == os.geteuid() and parent != Path("/"):
            parent.chmod(parent.stat().st_mode | 0o055)
    path = tmp_path / "checkpoints"
    with new_store(path) as store:
        commit(store, 1, 1)
        commit(store, 2, 2)
    return path


@pytest.fixture
def _trash(directory: Path) -> None:
    """What a dead run left half deleted."""
    with new_store(directory) as store:
        os.rename(commit(store, 9, 9), directory / ".trash-step-00000009")


def test_what_another_user_planted_is_refused_and_named(directory: Path) -> None:
    """A whole checkpoint, in a directory that is open to all, as /tmp is."""
    directory.chmod(0o1777)

    def plant() -> None:
        with new_store(directory.parent / "theirs", trust="anyone") as store:
            commit(store, 99, 9)
        os.rename(directory.parent / "theirs" / step_name(99), directory / step_name(99))

    (directory.parent / "theirs").mkdir()
    (directory.parent / "theirs").chmod(0o777)
    as_nobody(plant)
    with pytest.raises(
        ForeignError, match=rf"{step_name(99)} belongs to user nobody \({NOBODY}\) \(mode 755\).*trust="
    ):
        new_store(directory)
    assert issubclass(ForeignError, StorageError)
    assert steps(directory) == [99, 2, 1]  # nothing was changed
    with find_valid(directory) as seen:  # type: ignore[union-attr]
        assert seen.step == 99  # to look at it is no resume
    for trust in ("anyone", "nogroup"):
        with new_store(directory, trust=trust) as store, recover(store) as found:  # type: ignore[union-attr]
            assert found.step == 99
    with pytest.raises(ForeignError):
        new_store(directory, trust="daemon")  # nobody is no member


@pytest.mark.parametrize("name", [".", "manifest.json", "state.msgpack"])
def test_what_became_anothers_after_the_start_is_met_where_it_is_opened(directory: Path, name: str) -> None:
    with new_store(directory) as store:
        os.chown(directory / step_name(2) / name, NOBODY, NOBODY)
        with pytest.raises(ForeignError, match="belongs to user nobody"):
            recover(store)
    assert steps(directory) == [2, 1]  # neither set aside nor passed over


def test_what_another_user_plants_while_a_job_runs_pushes_out_nothing(directory: Path) -> None:
    with new_store(directory) as store:
        for step in (97, 98):
            os.chown(commit(store, step, 3), NOBODY, NOBODY)
            os.rename(directory / step_name(step), directory / f"planted-{step}")
    with new_store(directory) as store:
        for step in (97, 98):
            os.rename(directory / f"planted-{step}", directory / step_name(step))
        commit(store, 3, 3)
        commit(store, 4, 4)
        assert steps(directory) == [98, 97, 4, 3]


@pytest.mark.parametrize("name", READ)
def test_all_that_a_start_reads_must_be_its_own(directory: Path, name: str) -> None:
    (directory / name).touch()
    os.chown(directory / name, NOBODY, NOBODY)
    with pytest.raises(ForeignError, match=rf"/{re.escape(name)} belongs to"):
        new_store(directory)


@pytest.mark.parametrize("name", ["plans/0.json", "plans/00000-of-00002/0.json", f".replaced-{step_name(5)}"])
def test_what_would_be_read_later_must_be_its_own(directory: Path, name: str) -> None:
    path = directory / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir()
    os.chown(path, NOBODY, NOBODY)
    with pytest.raises(ForeignError, match="belongs to"):
        new_store(directory)


def test_other_files_concern_nobody(directory: Path) -> None:
    for name in ("notes.txt", "step-latest", ".tmp-00000009-run"):
        (directory / name).touch()
        os.chown(directory / name, NOBODY, NOBODY)
    assert newest(directory) == (2, 2)


@pytest.mark.parametrize(
    ("name", "mode", "refused"),
    [
        (".", 0o777, False), (".", 0o2775, False), (step_name(2), 0o777, False), (step_name(2), 0o775, False),
        (f"{step_name(2)}/manifest.json", 0o664, False), (f"{step_name(2)}/manifest.json", 0o646, True),
        (f"{step_name(2)}/state.msgpack", 0o666, True), (".lock", 0o666, False),
        ("plans", 0o777, False), ("report.json", 0o666, True),
    ],
)  # fmt: skip
def test_files_that_everyone_may_write_to_are_refused_and_open_folders_are_not(
    directory: Path, name: str, mode: int, refused: bool
) -> None:
    (directory / "plans").mkdir()
    (directory / "report.json").touch()
    (directory / name).chmod(mode)
    if not refused:
        assert newest(directory) == (2, 2)
        return
    with pytest.raises(ForeignError, match=f"of user root .* may be written by everyone .mode {mode:o}"):
        newest(directory)


def test_no_umask_makes_files_that_the_next_start_refuses(directory: Path) -> None:
    before = os.umask(0)
    try:
        with new_store(directory) as store:
            commit(store, 3, 3)
    finally:
        os.umask(before)
    assert newest(directory) == (3, 3)


@pytest.mark.parametrize(("job", "owner", "refused"), [(0, 1001, False), (1001, 0, False), (1001, 1002, True)])
def test_the_directory_itself_is_anothers_for_root_alone(
    directory: Path, monkeypatch: pytest.MonkeyPatch, job: int, owner: int, refused: bool
) -> None:
    """As containers have it, whose user is root and whose volume is not."""
    os.chown(directory, owner, owner)
    monkeypatch.setattr(os, "geteuid", lambda: job)
    if refused:
        with pytest.raises(ForeignError, match=f"checkpoints belongs to user {owner} "):
            new_store(directory)
    else:
        new_store(directory).close()


def test_where_a_server_gives_files_to_another_user_those_are_our_own(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS turns root into nobody; and some disks give every file one owner, and all rights."""
    for path in (directory, *directory.rglob("*")):
        os.chown(path, NOBODY, NOBODY)
        path.chmod(0o777)
    with pytest.raises(ForeignError):
        new_store(directory)
    real = fs.open_new

    def squashed(name: str, *, dir_fd: int, mode: int = fs.MODE) -> int:
        fd = real(name, dir_fd=dir_fd, mode=mode)
        os.fchown(fd, NOBODY, NOBODY)
        os.fchmod(fd, 0o777)
        return fd

    monkeypatch.setattr(fs, "open_new", squashed)
    assert newest(directory) == (2, 2)
    assert not [name for name in os.listdir(directory) if "probe" in name]


# ------------------------------------------------------------------------------------------ locks of those who may read


def hold(directory: Path, name: str, how: int) -> tuple[int, int]:
    """Another user holds a lock on what he may read; gives his process, and what ends it."""
    ready, done = os.pipe(), os.pipe()

    def lock() -> None:
        with contextlib.suppress(PermissionError):
            fcntl.flock(os.open(directory / name, os.O_RDONLY), how | fcntl.LOCK_NB)
        os.close(done[1])
        os.write(ready[1], b"x")
        os.read(done[0], 1)

    child = os.fork()
    if child == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        lock()
        os._exit(0)
    os.read(ready[0], 1)
    os.close(done[0])
    for fd in ready:
        os.close(fd)
    return child, done[1]


@pytest.fixture
def held(request: pytest.FixtureRequest, directory: Path) -> Iterator[int]:
    if request.param[0].startswith(".trash"):
        request.getfixturevalue("_trash")
    if request.param[0] == ".lock":
        (directory / ".lock").chmod(0o644)  # as earlier releases made it
        new_store(directory).close()
    child, end = hold(directory, *request.param)
    yield child
    os.close(end)
    os.waitpid(child, 0)


@pytest.mark.parametrize("held", [(".lock", how) for how in (fcntl.LOCK_SH, fcntl.LOCK_EX)], indirect=True)
def test_who_may_only_read_locks_no_job_out(directory: Path, held: int) -> None:
    assert held
    assert newest(directory) == (2, 2)


@pytest.mark.parametrize(
    ("trust", "mode", "group"), [(None, 0o600, 0), ("nogroup", 0o660, NOBODY), ("anyone", 0o666, 0)]
)
def test_the_lock_is_for_those_who_are_trusted(directory: Path, trust: str | None, mode: int, group: int) -> None:
    new_store(directory, trust=trust).close()
    found = (directory / ".lock").stat()
    assert (found.st_mode & 0o7777, found.st_gid) == (mode, group)
    new_store(directory).close()
    assert (directory / ".lock").stat().st_mode & 0o7777 == 0o600


def test_who_holds_a_lock_that_he_did_not_sign_is_named(directory: Path) -> None:
    """The file names the process that held it last, which has ended."""
    (directory / ".lock").chmod(0o644)
    (directory / ".lock").write_text(json.dumps({"pid": 2**22 + 5, "host": socket.gethostname()}))
    child, end = hold(directory, ".lock", fcntl.LOCK_EX)
    if not Path("/proc/locks").read_text():
        pytest.skip("this system does not tell who holds locks")
    try:
        with pytest.raises(LockedError, match=rf"process {child} on host '.*' of user nobody \({NOBODY}\)"):
            new_store(directory)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(lock, "_locking_process", lambda _: None)
            with pytest.raises(LockedError, match=f"not known .the file names process {2**22 + 5}, which has ended"):
                new_store(directory)
    finally:
        os.close(end)
        os.waitpid(child, 0)


@pytest.mark.parametrize("held", [(f"{step_name(1)}/manifest.json", fcntl.LOCK_SH)], indirect=True)
def test_a_reader_delays_what_is_deleted_by_a_bounded_time(
    directory: Path, held: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted from when it was first to go; and who has it open reads it still."""
    assert held
    clock = 5000.0
    monkeypatch.setattr(stores, "time", types.SimpleNamespace(monotonic=lambda: clock))
    with new_store(directory) as store, open_checkpoint(directory / step_name(1)) as reader:
        for number, later in enumerate((0.0, stores.READER_SECONDS - 1), 3):
            clock += later
            commit(store, number, number)
            assert steps(directory) == [number, number - 1, 1]
        clock += 1
        commit(store, 5, 5)
        assert steps(directory) == [5, 4]
        assert seed_in(reader) == 1


@pytest.mark.parametrize("held", [(".trash-step-00000009/manifest.json", fcntl.LOCK_SH)], indirect=True)
def test_a_reader_delays_leftovers_likewise(directory: Path, held: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert held
    with new_store(directory) as store:
        commit(store, 3, 3)
        assert (directory / ".trash-step-00000009").exists()
        monkeypatch.setattr(stores, "READER_SECONDS", 0.0)
        commit(store, 4, 4)
        assert not (directory / ".trash-step-00000009").exists()


@pytest.mark.slow
@pytest.mark.parametrize("held", [(f"{step_name(2)}/manifest.json", fcntl.LOCK_EX)], indirect=True)
def test_a_lock_of_anothers_keeps_nobody_from_reading(directory: Path, held: int) -> None:
    """Neither a job that goes on from there, nor who looks at it."""
    assert held
    assert newest(directory) == (2, 2)
    with find_valid(directory) as found:  # type: ignore[union-attr]
        assert found.step == 2
