"""What ``checkflow torture`` finds in a directory that nobody writes to, and what it holds against a job."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from checkflow.core.errors import LockedError
from checkflow.runtime.store.reader import open_checkpoint
from checkflow.torture.checks import Found, check_found, check_leftovers, examine, look, refuse_locked, vanished
from tests.support.programs.tortured_job import flip_a_byte
from tests.support.store_tools import tree
from tests.torture.test_campaign import commit, make_store


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Checkpoints of steps 1 to 3."""
    with make_store(tmp_path / "ckpt") as store:
        commit(store, 1, 2, 3)
    return tmp_path / "ckpt"


def test_nothing_is_changed_by_looking(directory: Path) -> None:
    flip_a_byte(directory / "step-00000003")
    before = tree(directory)
    found = examine(directory, Found())
    assert tree(directory) == before
    assert (found.restorable, [name for name, _ in found.damaged]) == (2, ["step-00000003"])


def test_every_file_is_read(directory: Path) -> None:
    file = directory / "step-00000003" / "state.msgpack"
    file.write_bytes(file.read_bytes()[::-1])
    ((name, fault),) = examine(directory, Found()).damaged
    assert (name, fault.startswith("state.msgpack is damaged")) == ("step-00000003", True)


def test_one_killed_in_the_middle_of_its_exchange_counts(directory: Path) -> None:
    (directory / "step-00000003").rename(directory / ".replaced-step-00000003")
    found = examine(directory, Found())
    assert (found.restorable, found.damaged) == (3, ())
    assert max(look(directory).published) == 3
    assert check_found(3, found) == []


def test_older_ones_are_read_again_when_they_were_written_to(directory: Path) -> None:
    found = examine(directory, Found())
    assert (found.restorable, found.damaged, len(found.whole)) == (3, (), 3)
    flip_a_byte(directory / "step-00000001")
    again = examine(directory, found)
    assert (again.restorable, [name for name, _ in again.damaged]) == (3, ["step-00000001"])


def test_the_newest_is_read_each_time(directory: Path) -> None:
    """A disk changes bytes without a new time of change."""
    found = examine(directory, Found())
    flip_a_byte(directory / "step-00000003")
    whole = {**found.whole, "step-00000003": examine(directory, Found()).whole.get("step-00000003", ())}
    assert [name for name, _ in examine(directory, dataclasses.replace(found, whole=whole)).damaged]


def test_what_was_there_and_is_gone_is_lost(directory: Path) -> None:
    found = examine(directory, Found())
    assert check_found(3, found) == []
    assert check_found(None, Found()) == []
    (problem,) = check_found(4, found)
    assert problem.promise == "L1"
    (problem,) = check_found(0, Found())
    assert (problem.promise, "none can be restored" in problem.text) == ("L1", True)


def test_half_done_work_must_not_pile_up(directory: Path) -> None:
    (directory / ".tmp-00000004-one").mkdir()
    first = examine(directory, Found())
    assert check_leftovers(Found(), first, saved=True) == []
    assert check_leftovers(first, examine(directory, first), saved=False) == []
    (problem,) = check_leftovers(first, examine(directory, first), saved=True)
    assert (problem.promise, ".tmp-00000004-one" in problem.text) == ("L5", True)
    (directory / ".tmp-00000005-two").mkdir()
    (problem,) = check_leftovers(first, examine(directory, first), saved=False)
    assert "pile up" in problem.text
    with make_store(directory) as store:
        commit(store, 4)
    assert check_leftovers(first, examine(directory, first), saved=True) == []


def test_what_is_being_read_is_not_left_behind(directory: Path) -> None:
    """An evaluation, say, that has a checkpoint open while the job wants to delete it."""
    with open_checkpoint(directory / "step-00000003"):
        (directory / "step-00000003").rename(directory / ".trash-step-00000003")
        first = examine(directory, Found())
        with make_store(directory) as store:
            commit(store, 4)
        again = examine(directory, first)
        assert [name for name, _, _ in again.leftovers] == []
        assert check_leftovers(first, again, saved=True) == []
    assert [name for name, _, _ in examine(directory, again).leftovers] == [".trash-step-00000003"]


def test_what_ranks_tell_each_other_is_no_checkpoint(directory: Path) -> None:
    """A job of several processes, killed in the middle of that."""
    (directory / ".tmp-00000004-one").mkdir()
    (directory / ".tmp-shards").touch()
    assert check_leftovers(Found(), examine(directory, Found()), saved=True) == []
    (directory / ".tmp-00000004-one").rmdir()
    assert not look(directory).writing


def test_a_file_system_that_does_not_answer_has_lost_nothing(directory: Path) -> None:
    assert vanished(directory, 4)
    assert not vanished(directory, 3)
    loop = directory / "loop"
    loop.symlink_to("loop")
    assert not vanished(loop, 3)  # an error other than that it is not there


def test_a_lock_that_is_held_is_seen(directory: Path) -> None:
    refuse_locked(directory, "nobody")
    with make_store(directory), pytest.raises(LockedError, match="is being written by somebody"):
        refuse_locked(directory, "somebody")
