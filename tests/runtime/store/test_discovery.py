"""Finding checkpoints: the newest that is whole, whatever happened to the newer ones, and what becomes of those."""

from __future__ import annotations

import errno
import gc
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from checkflow.core.errors import StorageError
from checkflow.runtime.store import discovery
from checkflow.runtime.store.discovery import find, find_valid
from checkflow.runtime.store.reader import Checkpoint
from checkflow.runtime.store.store import Store
from tests.runtime.store.test_reader import LAYOUT, MODEL, OPTIMIZER, write
from tests.support.faults import Faults
from tests.support.store_tools import fill, read_all, recover, tree


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Two checkpoints."""
    write(tmp_path / "checkpoints", 1, 2)
    return tmp_path / "checkpoints"


def recover_step(directory: Path) -> int | None:
    with Store(directory, run_id="later") as store:
        checkpoint = recover(store)
        if checkpoint is None:
            return None
        with checkpoint:
            assert read_all(checkpoint) == fill(LAYOUT, checkpoint.info["seed"])[1]
            return checkpoint.step


def flip(path: Path, position: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 4
    path.write_bytes(data)


def test_a_damaged_checkpoint_is_set_aside_loudly(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    flip(directory / "step-00000002" / "state.msgpack")
    assert recover_step(directory) == 1
    assert sorted(os.listdir(directory)) == [".broken-step-00000002", ".lock", "step-00000001"]
    assert "step-00000002 is damaged" in caplog.text
    assert "state.msgpack" in caplog.text
    assert [entry.levelname for entry in caplog.records if "damaged" in entry.message] == ["ERROR"]


def test_looking_renames_nothing(directory: Path) -> None:
    flip(directory / "step-00000002" / "state.msgpack")
    before = tree(directory)
    found = find_valid(directory)
    assert found is not None
    with found:
        assert found.step == 1
    flip(directory / "step-00000001" / MODEL)
    assert find_valid(directory) is None
    flip(directory / "step-00000001" / MODEL)
    assert tree(directory) == before
    with pytest.raises(StorageError, match="cannot read"):
        find_valid(directory / "none")


def test_what_a_running_job_made_while_one_was_deleted_under_the_reader_is_found(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the one before it, which another reader may hold."""
    real = discovery.open_checkpoint

    def opened(path: Path, **rest: Any) -> Checkpoint:
        if path.name == "step-00000002" and len(list(path.iterdir())) > 1:
            with Store(directory, run_id="run", keep_latest=10) as store:
                store.commit(3, LAYOUT, fill(LAYOUT, 3)[0], b"extra", {})
            shutil.rmtree(path)
        return real(path, **rest)

    monkeypatch.setattr(discovery, "open_checkpoint", opened)
    found = find_valid(directory)
    assert found is not None
    with found:
        assert found.step == 3
    shutil.rmtree(directory / "step-00000003")
    (directory / "step-00000002").mkdir()
    found = find_valid(directory)  # nothing newer has come
    assert found is not None
    with found:
        assert found.step == 1


def test_broken_ones_with_the_same_name_are_kept_apart(directory: Path) -> None:
    for count in range(3):
        flip(directory / "step-00000002" / "manifest.json")
        assert recover_step(directory) == 1
        write_again = fill(LAYOUT, 5)
        with Store(directory, run_id="again", keep_latest=10) as store:
            store.commit(2, LAYOUT, write_again[0], b"", {"seed": 5})
        assert len(list(directory.glob(".broken-step-00000002*"))) == count + 1
    assert recover_step(directory) == 2


def test_everything_damaged_is_nothing_found(directory: Path) -> None:
    for path in find(directory):
        flip(path / OPTIMIZER)
    assert recover_step(directory) is None
    assert find(directory) == ()


@pytest.mark.parametrize("call", ["preadv", "open_regular", "open_folder"])
def test_a_read_error_sets_nothing_aside(
    directory: Path, call: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with Store(directory, run_id="later") as store:
        before = sorted(os.listdir(directory))
        with Faults(1, errno.EIO, only=(call,))():
            checkpoint = recover(store)
        assert checkpoint is not None
        checkpoint.close()
        assert checkpoint.step == 1
        assert "cannot read the checkpoint" in caplog.text
        with Faults(1, errno.EIO, sticky=True, only=(call,))(), pytest.raises(StorageError, match="Input/output"):
            recover(store)
        with Faults(1, errno.EIO, sticky=True, only=(call,))(), pytest.raises(StorageError, match="Input/output"):
            find_valid(directory)
        assert sorted(os.listdir(directory)) == before
    assert recover_step(directory) == 2


def test_a_checkpoint_that_cannot_be_renamed_is_passed_over(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    flip(directory / "step-00000002" / MODEL)
    with Store(directory, run_id="later") as store, Faults(1, errno.EROFS, sticky=True, only=("rename",))():
        checkpoint = recover(store)
    assert checkpoint is not None
    checkpoint.close()
    assert checkpoint.step == 1
    assert "and stays" in caplog.text


def test_only_own_checkpoints_can_be_set_aside(directory: Path, tmp_path: Path) -> None:
    (tmp_path / "step-00000001").mkdir()
    with Store(directory, run_id="later") as store:
        for path in (tmp_path / "step-00000001", directory / "notes", directory / ".." / "step-00000001"):
            with pytest.raises(ValueError, match="is no checkpoint of"):
                store.set_aside(path)


def test_no_descriptor_of_a_refused_checkpoint_stays_open(directory: Path) -> None:
    gc.collect()  # what earlier tests left
    before = len(os.listdir("/proc/self/fd"))
    flip(directory / "step-00000002" / MODEL)
    assert recover_step(directory) == 1
    assert len(os.listdir("/proc/self/fd")) == before
