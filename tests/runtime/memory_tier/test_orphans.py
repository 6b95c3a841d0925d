"""Whose memory it is that a dead job has left: the next run's in its directory, wherever that is, and nobody else's.

What nobody can go on from is given back.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from checkflow.cli.main import main
from checkflow.core.errors import LockedError
from checkflow.runtime.memory_tier import orphans, records, recovery
from checkflow.runtime.memory_tier.records import LIFE, MARK, MOST_BYTES, OWNER
from checkflow.runtime.system import fs
from checkflow.torture.campaign import Campaign, Torture
from tests.support.dead_jobs import (
    PER_EPOCH,
    folder_of,
    kept_in,
    killed,
    needs_memory,
    newest_on_storage,
    random_plans_and_nothing_left,
    resume,
    train,
)

pytestmark = needs_memory


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path) -> Iterator[None]:
    with random_plans_and_nothing_left(tmp_path):
        yield


@pytest.fixture
def own_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Shared memory without others' folders in it, for what gives those back."""
    folder = Path(tempfile.mkdtemp(prefix="checkflow-test-", dir=records.ROOT))
    monkeypatch.setattr(records, "ROOT", folder)
    yield folder
    shutil.rmtree(folder)


def test_a_copy_of_the_directory_takes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = killed(tmp_path)
    before = newest_on_storage(directory)
    shutil.copytree(directory, tmp_path / "copy")
    with caplog.at_level(logging.WARNING, "checkflow"), resume(tmp_path / "copy") as checkpointer:
        assert checkpointer.resumed_from == before
    assert f"is of the checkpoints in {directory}" in caplog.text
    with resume(directory) as checkpointer:
        assert checkpointer.resumed_from == 7


def test_a_copy_starts_while_the_original_runs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its mark names the memory of the original, which is in use."""
    directory, copy = tmp_path / "checkpoints", tmp_path / "copy"
    with resume(directory, every=1) as original:
        for epoch in original.epochs(2):
            train(original)
            if epoch:
                continue
            original._saving.writer.wait_until_at_most(0)
            shutil.copytree(directory, copy)
            assert (copy / MARK).exists()
            kept, caplog.records[:] = kept_in(directory), []
            with resume(copy) as checkpointer:
                assert checkpointer.resumed_from == newest_on_storage(copy)
            assert f"is of the checkpoints in {directory}, of which this directory is a copy" in caplog.text
            assert kept_in(directory) == kept
    assert newest_on_storage(directory) == 2 * PER_EPOCH


def test_a_copy_in_the_place_of_the_directory_takes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It may be older, or newer: a backup that was restored."""
    directory = killed(tmp_path)
    before, folder = newest_on_storage(directory), folder_of(directory)
    directory.rename(tmp_path / "aside")
    shutil.copytree(tmp_path / "aside", directory)
    with caplog.at_level(logging.WARNING, "checkflow"), resume(directory) as checkpointer:
        assert checkpointer.resumed_from == before
    assert f"{folder} is of another directory that was at {directory} before: where that is gone for" in caplog.text
    shutil.rmtree(directory)
    (tmp_path / "aside").rename(directory)
    with resume(directory) as checkpointer:
        assert checkpointer.resumed_from == 7


@pytest.mark.parametrize("name", ["buffer-*[0-9]", "buffer-*.json", "buffer-*.extra", "layout-*.json"])
def test_links_in_the_place_of_what_a_capture_needs_are_passed_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    directory = killed(tmp_path)
    before = newest_on_storage(directory)
    for path in folder_of(directory).glob(name):
        shutil.move(path, tmp_path / path.name)
        path.symlink_to(tmp_path / path.name)
    with caplog.at_level(logging.WARNING, "checkflow"), resume(directory) as checkpointer:
        assert checkpointer.resumed_from == before
    assert "a symbolic link" in caplog.text


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
    assert f"is open to others (mode {mode:o}): chmod 700" in caplog.text


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
    monkeypatch.setattr(orphans, "boot_id", lambda: "another")
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


@pytest.mark.parametrize("name", [OWNER, LIFE])
def test_a_file_that_is_no_such_file_is_not_read(tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str) -> None:
    directory = killed(tmp_path)
    before = newest_on_storage(directory)
    path = folder_of(directory) / name
    path.write_text(path.read_text().ljust(MOST_BYTES + 1))
    with caplog.at_level(logging.WARNING, "checkflow"), resume(directory) as checkpointer:
        assert checkpointer.resumed_from == before
    assert f"is passed over: {name} is no file of at most 65536 bytes" in caplog.text


@pytest.mark.slow
def test_the_memory_of_a_dead_job_that_nobody_goes_on_from_is_given_back(
    tmp_path: Path, own_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = [killed(tmp_path / name) for name in ("a", "b", "c", "d", "e", "f")]
    unmarked, marked, moved, other, missing, kept = map(folder_of, left)
    ended, begun_anew, gone, replaced, away, _ = left
    (ended / MARK).unlink()
    mark = json.loads((begun_anew / MARK).read_text())
    (begun_anew / MARK).write_text(json.dumps({**mark, "token": "0" * 32}))
    new = tmp_path / "new"
    new.mkdir()  # while the old one is there: or it might get its number
    for directory in (gone, replaced, away):
        shutil.rmtree(directory)
    new.rename(replaced)
    owner = json.loads((missing / OWNER).read_text())
    (missing / OWNER).write_text(json.dumps({**owner, "device": owner["device"] + 1}))  # not mounted now
    with resume(tmp_path / "four"):
        assert unmarked.is_dir()  # it is young: its job may be just about to say whose it is
    monkeypatch.setattr(recovery, "YOUNG_SECONDS", 0.0)
    with resume(tmp_path / "four"):
        assert not unmarked.exists()
        assert not marked.exists()
        assert moved.is_dir()
        assert other.is_dir()
    monkeypatch.setattr(recovery, "_MOVED_SECONDS", 0.0)
    with resume(tmp_path / "four") as living:
        for _ in living.epochs(1):
            train(living)
        assert not moved.exists()
        assert not other.exists()
        assert missing.is_dir()
        # One that lives keeps its own, whatever becomes of its directory.
        mine = folder_of(tmp_path / "four")
        (tmp_path / "four" / MARK).unlink()
        monkeypatch.setattr(recovery, "_OLD_SECONDS", 0.0)
        with resume(tmp_path / "five"):
            assert mine.is_dir()
        assert not missing.exists()
        assert kept.is_dir()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_the_memory_of_other_users_is_theirs_to_give_back(
    tmp_path: Path, own_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recovery, "YOUNG_SECONDS", 0.0)
    theirs, ours = (killed(tmp_path / name) for name in ("theirs", "ours"))
    for directory in (theirs, ours):
        own = folder_of(directory)
        (directory / MARK).unlink()
        if directory == theirs:
            os.chown(own, 12345, 12345)
            kept = own
    with resume(tmp_path / "another"):
        assert kept.is_dir()
        assert not own.exists()


def test_a_folder_that_cannot_be_looked_into_is_anothers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for every user but root."""
    directory = killed(tmp_path)
    before, opened, folder = newest_on_storage(directory), orphans.fs.folder, folder_of(directory)

    def refuse(path: str) -> Any:
        if path == str(folder):
            raise PermissionError(errno.EACCES, "Permission denied")
        return opened(path)

    with monkeypatch.context() as patch:
        patch.setattr(orphans.fs, "folder", refuse)
        with caplog.at_level(logging.WARNING, "checkflow"), resume(directory) as checkpointer:
            assert checkpointer.resumed_from == before
    assert f"is passed over: {folder} is another user's" in caplog.text


def test_what_was_left_unmarked_goes_with_the_next_start_in_its_directory(tmp_path: Path, own_memory: Path) -> None:
    """However young: of the directory that a job holds no other is just about to start."""
    directory = killed(tmp_path)
    left = folder_of(directory)
    (directory / MARK).unlink()  # as where its disk is full
    with resume(tmp_path / "elsewhere"):
        assert left.is_dir()
    with resume(directory):
        assert not left.exists()


def test_a_directory_that_was_moved_takes_its_own_however_old(
    tmp_path: Path, own_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for limit in ("YOUNG_SECONDS", "_MOVED_SECONDS", "_OLD_SECONDS"):
        monkeypatch.setattr(recovery, limit, 0.0)
    killed(tmp_path).rename(tmp_path / "moved")
    with resume(tmp_path / "moved") as checkpointer:
        assert checkpointer.resumed_from == 7


def test_what_another_process_uses_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "_WAIT_SECONDS", 0.1)
    directory = killed(tmp_path)
    with open(folder_of(directory) / OWNER, "rb") as owner:
        fcntl.flock(owner, fcntl.LOCK_EX)
        with pytest.raises(LockedError, match=r"is in use by process \d+, or one that it left behind: stop it first"):
            resume(directory)
        fcntl.flock(owner, fcntl.LOCK_SH)  # somebody looks
        with resume(directory) as checkpointer:
            assert checkpointer.resumed_from == 7


def test_the_last_breath_of_the_run_before_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that was killed lets go of its lock a little after others see it dead."""
    directory = killed(tmp_path)
    owner = os.open(folder_of(directory) / OWNER, os.O_RDONLY)
    fcntl.flock(owner, fcntl.LOCK_EX)
    real, refused = fs.flock_shared, 0

    def flock_shared(fd: int) -> None:
        nonlocal refused
        try:
            real(fd)
        except BlockingIOError:
            refused += 1
            if refused == 2:
                os.close(owner)
            raise

    monkeypatch.setattr(fs, "flock_shared", flock_shared)
    with resume(directory) as checkpointer:
        assert checkpointer.resumed_from == 7
    assert refused == 2


def test_ls_tells_what_the_next_run_will_save(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = killed(tmp_path)
    assert main(["ls", str(directory), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["left_in_memory"] == 7
    for command in ("verify", "export"):
        assert main([command, f"{directory}@7", *(["-o", "x"] if command == "export" else [])]) == 1
        assert f"step 7 of {directory} lies in this machine's memory" in " ".join(capsys.readouterr().err.split())
    assert main(["verify", f"{directory}@99"]) == 1
    assert "holds no checkpoint of step 99" in " ".join(capsys.readouterr().err.split())
    main(["ls", str(directory)])
    assert "step 7 lies in this machine's memory" in " ".join(capsys.readouterr().out.split())
    with resume(directory):
        main(["ls", str(directory), "--json"])
        assert json.loads(capsys.readouterr().out)["left_in_memory"] is None
    main(["ls", str(directory), "--json"])
    assert json.loads(capsys.readouterr().out)["left_in_memory"] is None


def test_ls_does_not_tell_what_storage_has_too(tmp_path: Path) -> None:
    directory = killed(tmp_path, kill=("after step", 1, 2), stored=8)
    assert max(kept_in(directory)) == newest_on_storage(directory) == 8
    assert orphans.left_step(directory) is None


def test_torture_tells_what_its_last_life_left_in_memory(tmp_path: Path) -> None:
    directory = killed(tmp_path)
    torture = Torture(Campaign(("true",), directory, 1, None, 0, 1.0, 0.0, 0.0, tmp_path / "log"), directory=directory)
    torture._look_at_memory()
    (remark,) = torture.remarks
    assert f"host memory stays for the job's next start in {directory}" in remark
    assert f"delete {folder_of(directory)}" in remark
    path, size_bytes = orphans.memory_of(directory) or (None, 0)
    assert path == folder_of(directory)
    assert size_bytes >= sum(path.stat().st_size for path in path.glob("buffer-?"))
    with resume(directory):
        assert orphans.memory_of(directory) is None  # in use
    torture.remarks.clear()
    torture._look_at_memory()
    assert not torture.remarks


# ------------------------------------------------------------------------------------------------- checkflow memory


def memory(capsys: pytest.CaptureFixture[str], *arguments: object) -> list[dict[str, Any]]:
    assert main(["memory", *map(str, arguments), "--json"]) == 0
    folders: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["folders"]
    return folders


@pytest.fixture
def no_youth(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock of a young job is looked at, too: here none is about to begin."""
    monkeypatch.setattr(orphans, "YOUNG_SECONDS", 0.0)


@pytest.mark.usefixtures("no_youth")
def test_memory_lists_what_lies_there_and_frees_what_storage_has(
    tmp_path: Path, own_memory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ahead = killed(tmp_path / "ahead")  # step 7 is in memory alone
    stored = killed(tmp_path / "stored", kill=("after step", 1, 2), stored=8)
    places = {one["directory"]: one for one in memory(capsys)}
    assert set(places) == {str(ahead), str(stored)}
    one, other = places[str(ahead)], places[str(stored)]
    assert (one["step"], one["stored_step"], one["only_copy"], one["lives"]) == (
        7,
        newest_on_storage(ahead),
        True,
        False,
    )
    assert (other["step"], other["stored_step"], other["only_copy"]) == (8, 8, False)
    assert one["owner"] == orphans.fs.user_name(os.geteuid())
    assert one["size_bytes"] >= sum(path.stat().st_size for path in folder_of(ahead).glob("buffer-?"))
    assert abs(one["changed_unix_seconds"] - folder_of(ahead).stat().st_mtime) < 1
    with resume(stored) as checkpointer:
        (living,) = memory(capsys, stored, "--free", "--force")
        assert (living["lives"], living["freed"], living["pid"]) == (True, False, os.getpid())
        assert living["kept_because"] == "its job lives"
        assert folder_of(stored).is_dir()
        assert checkpointer.resumed_from == 8
    stored = killed(tmp_path / "again", kill=("after step", 1, 2), stored=8)
    freed = {one["directory"]: (one["freed"], one["kept_because"]) for one in memory(capsys, "--free")}
    assert freed == {
        str(stored): (True, None), str(ahead): (False, "step 7 is nowhere else: --force gives it up")
    }  # fmt: skip
    main(["memory", str(ahead)])
    printed = " ".join(capsys.readouterr().out.split())
    for said in ("dead", "--free frees", str(7)):
        assert said in printed
    assert [one["freed"] for one in memory(capsys, ahead, "--free", "--force")] == [True]
    assert memory(capsys) == []
    main(["memory"])
    assert "no job has left anything" in capsys.readouterr().out
    with resume(ahead) as checkpointer:  # it goes on from storage
        assert checkpointer.resumed_from == newest_on_storage(ahead)
    assert main(["memory", "--force"]) == 2


@pytest.mark.usefixtures("no_youth")
def test_memory_frees_nobody_elses_and_shows_no_control_character(
    tmp_path: Path, own_memory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = killed(tmp_path)
    folder = folder_of(directory)
    owner = json.loads((folder / OWNER).read_text())
    (folder / OWNER).write_text(json.dumps({**owner, "directory": "/x\x1b[2J"}))
    main(["memory"])
    printed = capsys.readouterr().out
    assert "\x1b" not in printed
    assert "/x\\x1b[2J" in printed
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: folder.stat().st_uid + 1)
        (row,) = memory(capsys, "--free", "--force")
        assert (row["own"], row["freed"]) == (False, False)
        assert row["kept_because"].startswith("it is of user ")
    assert folder.is_dir()
    for name in ("checkflow-" + "0" * 32, "checkflow-" + "1" * 32):  # a link, a file: neither is a job's
        path = own_memory / name
        path.symlink_to(directory) if name.endswith("0") else path.touch()
    assert len(memory(capsys)) == 1
    assert main(["memory", "--free", "--force"]) == 0
    assert not folder.exists()


def test_a_start_gives_back_what_storage_has_when_its_job_has_not_come_back_in_a_day(
    tmp_path: Path, own_memory: Path
) -> None:
    ahead = folder_of(killed(tmp_path / "ahead"))
    stored = folder_of(killed(tmp_path / "stored", kill=("after step", 1, 2), stored=8))
    for seconds, there in ((recovery._STORED_SECONDS - 3600, True), (recovery._STORED_SECONDS + 60, False)):
        for folder in (ahead, stored):
            os.utime(folder, (time.time() - seconds,) * 2)
        with resume(tmp_path / "another"):
            assert ahead.is_dir()
            assert stored.is_dir() == there
