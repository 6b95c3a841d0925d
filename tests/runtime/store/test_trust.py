"""Whose checkpoints a job goes on from: its own and root's, and nobody else's unless it is told so."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from checkflow.core.errors import StorageError
from checkflow.runtime.store.discovery import find_valid, recover
from checkflow.runtime.store.files import step_name
from checkflow.runtime.store.trust import READ, ForeignError
from checkflow.runtime.system import fs
from tests.runtime.store.test_store import commit, new_store, newest, steps

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


@pytest.mark.parametrize("name", ["plans/0.json", f".replaced-{step_name(5)}"])
def test_what_would_be_read_later_must_be_its_own(directory: Path, name: str) -> None:
    path = directory / name
    path.parent.mkdir(exist_ok=True)
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
        (f"{step_name(2)}/state.msgpack", 0o666, True), (".lock", 0o666, True),
    ],
)  # fmt: skip
def test_files_that_everyone_may_write_to_are_refused_and_open_folders_are_not(
    directory: Path, name: str, mode: int, refused: bool
) -> None:
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
