"""Commits of several ranks on threads of this process, whose councils meet in files."""

from __future__ import annotations

import errno
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from checkflow.core.boxes import whole
from checkflow.core.errors import CheckflowError, MissingShardsError, VoidCheckpointError
from checkflow.runtime.format import codec
from checkflow.runtime.format.layout import make_layout, write_headers
from checkflow.runtime.persist import rank_commit
from checkflow.runtime.persist.rank_commit import RankCommit
from checkflow.runtime.ranks.council import Council
from checkflow.runtime.ranks.file_meeting import FileMeeting
from checkflow.runtime.ranks.member import View
from checkflow.runtime.ranks.records import Attempt
from checkflow.runtime.snapshot.capturer import Capture
from checkflow.runtime.store.discovery import find
from checkflow.runtime.store.parts import Source
from checkflow.runtime.store.reader import open_checkpoint
from checkflow.runtime.store.retention import Rules
from checkflow.runtime.store.shared import SharedStore
from checkflow.runtime.store.store import Store
from tests.support.store_tools import record

WORLD = 3
Outcome = Path | CheckflowError


class Ranks:
    """All ranks of a job that does not train."""

    def __init__(self, folder: Path) -> None:
        self.directory = folder / "checkpoints"
        self.store = Store(self.directory, run_id="run")
        self.councils = [
            Council(rank, WORLD, "start.0", lambda rank=rank: FileMeeting(folder, "start.0", rank))  # type: ignore[misc]
            for rank in range(WORLD)
        ]
        others = SharedStore(self.directory, run_id="run", rules=Rules(), trust=None)
        self.commits = [RankCommit(one, others if one.rank else self.store) for one in self.councils]

    def commit(self, rank: int, step: int, *, iteration: int | None = None) -> Outcome:
        council = self.councils[rank]
        council.note_boundary(step)
        council.leave_boundary(step, captured=True)
        layout = make_layout([record("model/w", (4, 4))], shard=rank, shards=WORLD)
        staging = memoryview(bytearray(layout.buffer_bytes))
        write_headers(layout, staging)
        known = {"iteration": step if iteration is None else iteration, "epoch": 0, "position": 0, "turns": step}
        extra, buffer = codec.encode(known), types.SimpleNamespace(view=staging)
        sources = {"model/w": Source("model/w", whole((4, 4)), own=True)}
        capture = Capture(
            step, buffer, layout, extra, {}, (), (), None, {}, "", by_plan=False, sources=sources  # type: ignore[arg-type]
        )  # fmt: skip
        try:
            return self.commits[rank].commit(capture, extra, {})
        except CheckflowError as error:
            return error

    def all(self, run: Callable[[int], Outcome]) -> list[Outcome]:
        with ThreadPoolExecutor(WORLD) as pool:
            return list(pool.map(run, range(WORLD)))


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    made = Ranks(tmp_path)
    yield made
    for council in reversed(made.councils):
        council.close()
    made.store.close()


def test_no_rank_waits_long_again_for_one_that_is_gone(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 may be held by training, and never try again: then the others would not end in time."""
    ranks.councils[2].close()
    first = ranks.all(lambda rank: ranks.commit(rank, 1) if rank < 2 else ranks.directory)[:2]
    assert all("rank 2 of 3 ended or does not answer" in str(one) for one in first)
    asked: list[float] = []

    def await_attempt(step: int, wait_seconds: float, *, after: int) -> Attempt:
        asked.append(wait_seconds)
        raise MissingShardsError("none came", (0,))

    monkeypatch.setattr(ranks.councils[1], "await_attempt", await_attempt)
    assert isinstance(ranks.commit(1, 1), MissingShardsError)
    assert asked[0] <= 5


def test_no_rank_waits_for_the_folder_of_a_rank_0_that_was_killed(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = Attempt(1, 1)
    killed: Any = types.SimpleNamespace(view=View(attempts=(attempt,), silent=(0,)))
    monkeypatch.setattr(rank_commit, "wait_until", lambda happened, _: happened() or pytest.fail("it waits for rank 0"))
    with pytest.raises(MissingShardsError, match="rank 0 ended or does not answer"):
        rank_commit.write_into(killed, ranks.commits[1]._store, attempt, 30, lambda _: None)


def test_a_version_holds_what_each_rank_has_written(ranks: Ranks) -> None:
    for step in (1, 2):
        assert ranks.all(lambda rank, step=step: ranks.commit(rank, step)) == [find(ranks.directory)[0]] * WORLD  # type: ignore[misc]
    with open_checkpoint(find(ranks.directory)[0]) as checkpoint:
        checkpoint.verify()
        assert sorted(checkpoint.manifest.tensors) == ["model/w", "rank-own/1/model/w", "rank-own/2/model/w"]
        assert [codec.decode(checkpoint.rank_extra_bytes(rank) or b"")["iteration"] for rank in (1, 2)] == [2, 2]


def test_a_rank_that_cannot_write_fails_all(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    real = rank_commit.write_part

    def full(folder: int, rank: int, *rest: Any, **more: Any) -> Any:
        if rank == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(folder, rank, *rest, **more)

    monkeypatch.setattr(rank_commit, "write_part", full)
    for outcome in ranks.all(lambda rank: ranks.commit(rank, 1)):
        assert isinstance(outcome, CheckflowError)
        assert "cannot write rank 2's part of step 1" in str(outcome)
        assert "No space left on device" in str(outcome)
    monkeypatch.undo()
    assert ranks.all(lambda rank: ranks.commit(rank, 2)) == [find(ranks.directory)[0]] * WORLD


def test_ranks_at_different_iterations_make_no_version(ranks: Ranks) -> None:
    outcomes = ranks.all(lambda rank: ranks.commit(rank, 1, iteration=1 if rank < 2 else 3))
    for outcome in outcomes:
        assert isinstance(outcome, CheckflowError)
        assert "rank 2 is at another iteration, epoch or place in its data than rank 0" in str(outcome)
    assert find(ranks.directory) == ()


def test_what_rank_0_passes_over_is_passed_over_everywhere(ranks: Ranks) -> None:
    """And a rank without a capture of what rank 0 writes voids that."""

    def run(rank: int) -> Outcome:
        if rank == 1:
            passed_over = ranks.commit(rank, 1)
            assert isinstance(passed_over, VoidCheckpointError)
            assert "rank 0 saves a later step than 1" in str(passed_over)
        return ranks.commit(rank, 2)

    assert ranks.all(run) == [find(ranks.directory)[0]] * WORLD

    def skip(rank: int) -> Outcome:
        if rank == 1:
            for step in (3, 4):
                ranks.councils[rank].leave_boundary(step, captured=False)
            return find(ranks.directory)[0]
        return ranks.commit(rank, 3)

    found = ranks.all(skip)
    for rank in (0, 2):
        assert isinstance(found[rank], VoidCheckpointError)
        assert "rank 1 passed step 3 without a capture of it" in str(found[rank])
