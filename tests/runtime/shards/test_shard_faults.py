"""Ranks that meet on the file system: whichever dies or fails at whichever call, a version is whole or not there."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from checkflow import shards
from checkflow.core.errors import CheckflowError, MismatchError, MissingShardsError
from checkflow.runtime.ranks import meeting
from checkflow.runtime.shards import rendezvous
from checkflow.runtime.store.discovery import find
from checkflow.runtime.store.files import glance
from checkflow.runtime.store.store import Store
from tests.support.faults import CALLS, CUTS, Disk, Faults, Killed
from tests.support.shard_tools import World, together
from tests.support.waiting import wait_for


@pytest.fixture
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="checkflow-test-") as folder:
        yield Path(folder) / "versions"


# ----------------------------------------------------------------------------------------------------------- meeting


def time_is_over(patch: pytest.MonkeyPatch, over: Callable[[str], bool]) -> None:
    """A rank, by its thread's name, has waited for long enough when this is so, and no sooner."""
    jumps = itertools.count()

    def monotonic() -> float:
        return time.monotonic() + (1e6 * next(jumps) if over(threading.current_thread().name) else 0)

    patch.setattr(meeting, "_monotonic", monotonic)


def test_a_rank_that_does_not_come_is_named(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    world.save(directory, 1, 2)
    with monkeypatch.context() as patch:
        time_is_over(patch, lambda name: name == "rank 0" and any(directory.glob(".tmp-*/.receipt-00003")))
        outcomes = together(4, lambda rank: rank in (1, 2) or shards.save_shard(directory, 2, rank, 4, run_id="r"))
    for outcome in (outcomes[0], outcomes[3]):
        assert isinstance(outcome, MissingShardsError), outcome
        assert set(outcome.ranks) >= {1, 2}
    with pytest.raises(MissingShardsError, match="rank 0") as alone:
        shards.save_shard(directory, 3, 1, 4, run_id="r", wait_seconds=0)
    assert alone.value.ranks == (0,)
    with pytest.raises(MissingShardsError, match="no directory"):
        shards.save_shard(directory / "other", 3, 1, 2, run_id="r", wait_seconds=0)
    world.check(directory, 3)
    assert [path.name for path in find(directory)] == ["step-00000001"]


def test_ranks_that_count_differently(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()

    def save(rank: int) -> Path:
        try:
            return shards.save_shard(directory, 2, rank, 2 + rank, run_id="r")
        finally:
            ended.set()

    # Rank 1 waits until rank 0 has said how many it counts, and rank 0 until rank 1 has given up.
    time_is_over(
        monkeypatch, lambda name: ended.is_set() or (name == "rank 1" and (directory / ".shards.json").exists())
    )
    outcomes = together(2, save)
    assert isinstance(outcomes[0], MissingShardsError)
    with pytest.raises(MismatchError, match="rank 1 counts 3 ranks, rank 0 counts 2"):
        raise outcomes[1]


@pytest.mark.parametrize("run_id", ["other", "run"])
def test_what_a_dead_run_left_never_completes_a_version(
    directory: Path, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 of a run whose rank 0 died left files and record; the next run, of the same run id even, has its own."""
    dead, alive = World(1), World(2)
    dead.save(directory, 1, 2, run_id)

    class Died(BaseException):
        pass

    died = threading.Event()

    def die(*arguments: Any) -> Any:
        folder = arguments[0]
        wait_for(lambda: any(name.startswith(".receipt") for name in rendezvous.fs.names(folder)))
        died.set()
        raise Died

    with monkeypatch.context() as patch:
        time_is_over(patch, lambda _: died.is_set())
        patch.setattr("checkflow.runtime.shards.writer.collect", die)
        patch.setattr("checkflow.runtime.shards.writer._post_end", lambda *_, **__: None)
        patch.setattr(Store, "_remove_quietly", lambda *_: None)
        assert isinstance(
            together(
                2,
                lambda rank: shards.save_shard(directory, 2, rank, 2, run_id=run_id, **dead.part(rank, 2)),
            )[0],
            Died,
        )
    assert [name for name in rendezvous.fs.folder_names(str(directory)) if name.startswith(".tmp-00000002")]
    # Rank 1 of the new run comes first, and may take what lies there for the attempt; it writes again.
    late = threading.Event()

    def save(rank: int) -> Path:
        if rank == 0:
            late.wait()
        return shards.save_shard(directory, 2, rank, 2, run_id="run", **alive.part(rank, 2))

    real = meeting._sleep

    def sleep(seconds: float) -> None:
        late.set()  # rank 1 found nothing to do but to wait
        real(seconds)

    monkeypatch.setattr(meeting, "_sleep", sleep)
    assert together(2, save) == [directory / "step-00000002"] * 2
    alive.check(directory, 3, 2)
    dead.check(directory, 2, 1)
    assert glance(directory / "step-00000002").run_id == "run"
    assert not [name for name in rendezvous.fs.folder_names(str(directory)) if name.startswith(".tmp-")]


def test_versions_are_retained_as_checkpoints_are(directory: Path) -> None:
    for step in range(5):
        World(step).save(directory, step, 2, keep_latest=3)
    assert [path.name for path in find(directory)] == [f"step-{step:08d}" for step in (4, 3, 2)]
    World(9).save(directory, 4, 3)
    World(9).check(directory, 2)


# ------------------------------------------------------------------------------------------------------------- faults

WRITES = ("mkdir", "make_folders", "open_new", "open_lock", "pwrite", "fsync", "rename", "unlink", "rmdir", "truncate")
OFTEN = tuple(call for call in CALLS if call not in ("preadv", "exists"))  # those follow these


class FaultsOfOne(Faults):
    """Of the rank whose thread has this name."""

    victim = ""

    def _wrap(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        faulty = super()._wrap(name, real)
        return lambda *given, **named: (faulty if threading.current_thread().name == self.victim else real)(
            *given, **named
        )


def save_with(faults: FaultsOfOne, victim: int, world: World, directory: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Two ranks save step 2; when the faulty one has ended, the time of the other is over."""
    faults.victim, ended = f"rank {victim}", threading.Event()
    with monkeypatch.context() as patch:
        time_is_over(patch, lambda _: ended.is_set())

        def save(rank: int) -> Path:
            try:
                return shards.save_shard(directory, 2, rank, 2, run_id="run", **world.part(rank, 2))
            finally:
                if rank == victim:
                    ended.set()

        with faults():
            return together(2, save)


def go_on(directory: Path, outcomes: list[Any], before: World, after: World) -> None:
    """What was acknowledged is there; what is there is whole; the next run works, and leaves nothing lying about."""
    newest = shards.newest_step(directory)
    assert newest in (1, 2)
    if any(isinstance(outcome, Path) for outcome in outcomes):
        assert newest == 2
    (after if newest == 2 else before).check(directory, 3, newest)
    World(3, rows=4).save(directory, 3, 2, "later")
    names = {name for name in os.listdir(directory) if name.startswith(".")}
    assert names == {".lock", ".shards.json"}
    World(3, rows=4).check(directory, 1)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_killed_at_any_call(directory: Path, victim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    before, after, saved = World(1, rows=4), World(2, rows=4), directory / "before"
    before.save(saved, 1, 2)
    seen = set()
    for at in itertools.count(1):
        place = shutil.copytree(saved, directory / str(at))
        faults = FaultsOfOne(at, only=WRITES)
        outcomes = save_with(faults, victim, after, place, monkeypatch)
        if not faults.met:
            assert outcomes == [place / "step-00000002"] * 2
            break
        assert isinstance(outcomes[victim], Killed)
        other = outcomes[1 - victim]
        assert isinstance(other, Path | CheckflowError), other
        if isinstance(other, MissingShardsError):
            assert other.ranks == (victim,)
        seen.add(isinstance(other, Path))
        go_on(place, outcomes, before, after)
    assert at > 10
    assert seen == {True, False}  # killed too early for the version, and late enough


@pytest.mark.slow
@pytest.mark.parametrize(("victim", "sticky"), [(0, False), (1, False), (0, True), (1, True)])
def test_a_call_of_a_rank_that_fails(
    directory: Path, victim: int, sticky: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, after, saved = World(1, rows=4), World(2, rows=4), directory / "before"
    before.save(saved, 1, 2)
    for at in itertools.count(1):
        place = shutil.copytree(saved, directory / str(at))
        faults = FaultsOfOne(at, errno.EIO, sticky=sticky, only=WRITES if sticky else OFTEN)
        outcomes = save_with(faults, victim, after, place, monkeypatch)
        assert all(isinstance(outcome, Path | CheckflowError) for outcome in outcomes), outcomes
        if not faults.met:
            break
        go_on(place, outcomes, before, after)
    assert at > 10


def after_a_power_cut(directory: Path, lies: str, cut: str) -> int | None:
    """The version that is left of two after the power went; it is whole."""
    place, worlds = directory / "disk", (World(1, rows=4), World(2, rows=4))
    place.mkdir(parents=True)
    disk = Disk(place, lies=lies)
    with disk():
        for step, world in enumerate(worlds, 1):
            world.save(place, step, 2)
        left = disk.after_power_cut(directory / "left", cut)
    if newest := shards.newest_step(left):
        worlds[newest - 1].check(left, 3)
    return newest


@pytest.mark.parametrize("cut", CUTS)
def test_what_was_acknowledged_survives_a_power_cut(directory: Path, cut: str) -> None:
    assert after_a_power_cut(directory, "", cut) == 2


@pytest.mark.parametrize(("lies", "cut"), [("file", "now"), ("folder", "synced"), ("root", "synced")])
def test_a_disk_that_does_not_sync_loses_it(directory: Path, lies: str, cut: str) -> None:
    """Or the test above could not fail."""
    assert after_a_power_cut(directory, lies, cut) != 2
