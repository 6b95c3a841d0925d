"""Councils of several ranks on threads of this process, which meet in a dictionary or in files."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from checkflow.core.errors import CheckflowError, LockedError, MismatchError, MissingShardsError, StorageError
from checkflow.runtime.ranks import chair
from checkflow.runtime.ranks import council as councils
from checkflow.runtime.ranks.council import Council
from checkflow.runtime.ranks.file_meeting import FileMeeting, remove_earlier
from checkflow.runtime.ranks.joining import Alone
from checkflow.runtime.ranks.records import Attempt, Receipt, StartReport
from tests.support.shard_tools import together
from tests.support.waiting import wait_for

WORLD = 3
Seats = Callable[..., list[Council]]


class Dictionary:
    """A meeting place in memory."""

    def __init__(self, values: dict[str, bytes]) -> None:
        self._values = values

    def put(self, key: str, value: bytes) -> None:
        self._values[key] = value

    def get(self, keys: Sequence[str]) -> dict[str, bytes]:
        return {key: self._values[key] for key in keys if key in self._values}

    def drop(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._values.pop(key, None)

    def close(self, *, last: bool = False) -> None:
        """Nothing is open."""


@pytest.fixture(params=["memory", "files"])
def seats(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Seats]:
    """Makes the councils of ``WORLD`` ranks, or of some of them."""
    monkeypatch.setattr(councils, "_CLOSE_SECONDS", 0.3)
    values: dict[str, bytes] = {}
    made: list[Council] = []

    def place(rank: int) -> Any:
        return FileMeeting(tmp_path, "start.0", rank) if request.param == "files" else Dictionary(values)

    def make(ranks: Sequence[int] = range(WORLD), **seconds: float) -> list[Council]:
        new = [Council(rank, WORLD, "start.0", lambda rank=rank: place(rank), **seconds) for rank in ranks]  # type: ignore[misc]
        made.extend(new)
        return new

    yield make
    for council in reversed(made):
        council.close()
    wait_for(lambda: not any(council.running for council in made))


def start(
    council: Council, *, replica: str = "same", step: int | None = 7, job: Mapping[str, str] | None = None
) -> int | None:
    found = council.agree_start(
        StartReport(dict(job or {"every": "1"})), lambda reports: step, "run of rank 0" if not council.rank else ""
    )
    assert found.run_id == "run of rank 0"
    council.agree_restored(StartReport(restored=True, replicas={"weights": replica}), 30)
    return found.step


def receipt(council: Council, attempt: Attempt, /, **other: Any) -> Receipt:
    values = {"generation": council.generation, "attempt": attempt.number, "step": attempt.step}
    values |= other
    return Receipt(council.rank, WORLD, **values)


def covered(receipts: Sequence[Receipt]) -> None:
    """All is covered."""


def commit(council: Council, step: int, /, **other: Any) -> int | None:
    """Save a version, as the writers do; the number of receipts on rank 0."""
    if council.rank:
        attempt = council.await_attempt(step, 30)
        council.post_receipt(receipt(council, attempt, **other))
        council.await_verdict(attempt, 30)
        return None
    attempt = council.open_attempt(step)
    council.post_receipt(receipt(council, attempt))
    try:
        found = council.collect(attempt, covered)
    except CheckflowError as error:
        council.conclude(attempt, error)
        raise
    council.conclude(attempt)
    return len(found)


def all_of(councils: list[Council], does: Callable[[Council], Any]) -> list[Any]:
    return together(len(councils), lambda index: does(councils[index]))


def pass_boundary(council: Council, step: int, *, captured: bool = True) -> None:
    council.note_boundary(step)
    council.leave_boundary(step, captured=captured)


def test_all_ranks_start_from_the_step_that_rank_0_chooses(seats: Seats) -> None:
    assert all_of(seats(), start) == [7, 7, 7]


@pytest.mark.every_case
@pytest.mark.parametrize("culprit", [0, 2])
def test_a_refusal_of_one_rank_is_raised_on_all(seats: Seats, culprit: int) -> None:
    def begin(council: Council) -> None:
        if council.rank == culprit:
            error = LockedError("ckpt is locked by process 12")
            council.refuse(error)
            raise error
        try:
            start(council)
        finally:
            council.close()

    for rank, error in enumerate(all_of(seats(), begin)):
        assert isinstance(error, LockedError)
        assert ("no rank starts" in str(error)) == (rank != culprit)


def test_what_differs_between_ranks_is_named_on_all(seats: Seats) -> None:
    """What only some ranks say, or only some mean alike, may differ. Rank 0 does not choose a step."""
    said = [
        {"every": "1", "the order of tensors#a": "#1", "the names of tensors": "#7", "samples": "6"},
        {"every": "2", "the order of tensors#b": "#2", "the names of tensors": "#8", "the lr": "0.1"},
        {"every": "1", "the order of tensors#b": "#2", "the names of tensors": "#8", "samples": "6"},
    ]
    chosen: list[Any] = []

    def begin(council: Council) -> None:
        council.agree_start(StartReport(said[council.rank]), chosen.append)

    for error in all_of(seats(), begin):
        assert isinstance(error, MismatchError)
        assert str(error) == (
            "no rank starts: the ranks differ: every is 1 on ranks 0 and 2, 2 on rank 1; other names of tensors on "
            "ranks 1 and 2 than on rank 0; make them alike"
        )
    assert chosen == []


def test_replicas_that_differ_after_the_restore_are_refused_on_all(seats: Seats) -> None:
    errors = all_of(seats(), lambda council: start(council, replica=str(council.rank == 2)))
    assert all(isinstance(error, MismatchError) and "between rank 0 and rank 2" in str(error) for error in errors)


def test_a_rank_that_does_not_come_is_named(seats: Seats) -> None:
    errors = all_of(seats([0, 1], start_seconds=0.3), start)
    assert all(isinstance(error, MissingShardsError) and error.ranks == (2,) for error in errors)


def test_a_version_needs_a_receipt_of_each_rank(seats: Seats) -> None:
    ranks = seats()
    assert all_of(ranks, lambda council: commit(council, 4)) == [WORLD, None, None]
    assert all_of(ranks, lambda council: commit(council, 5)) == [WORLD, None, None]


def test_a_rank_that_cannot_write_fails_the_version_on_all(seats: Seats) -> None:
    ranks = seats()
    errors = all_of(ranks, lambda council: commit(council, 4, failure="disk full" if council.rank == 2 else ""))
    assert all(isinstance(error, StorageError) and "rank 2: disk full" in str(error) for error in errors)
    assert all_of(ranks, lambda council: commit(council, 5)) == [WORLD, None, None]


def test_receipts_of_another_start_or_step_are_none(seats: Seats, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(councils.receipts, "LEAST_WAIT_SECONDS", 0.3)
    ranks = seats()
    wrong: dict[int, dict[str, Any]] = {1: {"generation": "start.9"}, 2: {"step": 9}}
    for culprit in (1, 2):
        values = {culprit: wrong[culprit]}
        errors = all_of(ranks, lambda council: commit(council, culprit, **values.get(council.rank, {})))  # noqa: B023
        assert all(isinstance(error, StorageError) for error in errors), errors


def test_a_rank_that_skipped_a_boundary_voids_the_version_at_once(seats: Seats) -> None:
    ranks = seats()
    for council in ranks:
        pass_boundary(council, 4, captured=council.rank != 1)
        pass_boundary(council, 5, captured=False)
    attempt = ranks[0].open_attempt(4)
    ranks[0].post_receipt(receipt(ranks[0], attempt))
    with pytest.raises(MissingShardsError, match="rank 1 passed step 4 without a capture"):
        ranks[0].collect(attempt, covered)


def test_a_rank_may_capture_the_last_boundary_later(seats: Seats, monkeypatch: pytest.MonkeyPatch) -> None:
    """A metric that is recorded after it has made it one of the best."""
    monkeypatch.setattr(chair, "_DOUBT_SECONDS", 0.0)
    ranks = seats()
    for council in ranks:
        pass_boundary(council, 4, captured=council.rank != 1)
    attempt = ranks[0].open_attempt(4)
    for council in (ranks[0], ranks[2]):
        council.post_receipt(receipt(council, attempt))
    wait_for(lambda: len(ranks[0]._rounds.chair._receipts) == 2)  # type: ignore[union-attr]
    ranks[1].leave_boundary(4, captured=True)
    ranks[1].post_receipt(receipt(ranks[1], attempt))
    assert len(ranks[0].collect(attempt, covered)) == WORLD


def test_a_dropped_capture_voids_the_version(seats: Seats) -> None:
    ranks = seats()
    for council in ranks:
        pass_boundary(council, 4)
        pass_boundary(council, 5, captured=False)
    ranks[2].note_dropped(4)
    with pytest.raises(MissingShardsError, match="rank 2 passed step 4 without"):
        attempt = ranks[0].open_attempt(4)
        ranks[0].post_receipt(receipt(ranks[0], attempt))
        ranks[0].collect(attempt, covered)


def test_a_rank_that_left_fails_versions_and_the_end(seats: Seats) -> None:
    ranks = seats()
    ranks[1].note_boundary(1)
    ranks[1].close("error")
    attempt = ranks[0].open_attempt(1)
    ranks[0].post_receipt(receipt(ranks[0], attempt))
    with pytest.raises(MissingShardsError) as error:
        ranks[0].collect(attempt, covered)
    assert error.value.ranks == (1,)
    ranks[2].request_end("SIGTERM", 60)
    wait_for(lambda: ranks[2].view.end_now and ranks[0].view.end_now)


ENDED = (
    "training of rank 1 has ended after iteration 4, and rank {} went on: all ranks must make the same number of steps"
)


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [line.getMessage() for line in caplog.records if "has ended after iteration" in line.getMessage()]


def test_a_rank_that_ends_before_the_others_is_named(seats: Seats, caplog: pytest.LogCaptureFixture) -> None:
    ranks = seats()
    for council in ranks:
        pass_boundary(council, 4)
    ranks[1].note_over(4)
    wait_for(lambda: ranks[0].view.uneven is not None)
    assert told(caplog) == []  # until another one goes on
    pass_boundary(ranks[2], 5)
    wait_for(lambda: len(told(caplog)) == 2)  # rank 0, and the one that ended
    assert all(line.startswith(ENDED.format("2")) for line in told(caplog))
    with pytest.raises(
        MissingShardsError, match=r"did not begin to save step 4 .*: training of rank 1 has ended after"
    ):
        ranks[1].await_attempt(4, 0.1)
    attempt = ranks[0].open_attempt(5)
    ranks[0].post_receipt(receipt(ranks[0], attempt))
    ranks[1].close()
    with pytest.raises(MissingShardsError, match=ENDED.format("2")) as error:
        ranks[0].collect(attempt, covered)
    assert error.value.ranks == (1,)


def test_an_iteration_that_hangs_shows_that_another_rank_has_ended(
    seats: Seats, caplog: pytest.LogCaptureFixture
) -> None:
    """It comes to no boundary; and a rank that is on its way to the last one is no such rank, nor one that ends."""
    ranks = seats()
    begun = [False] * WORLD
    for council in ranks:
        council.under_way = lambda rank=council.rank: begun[rank]  # type: ignore[misc]
        pass_boundary(council, 3)
    for rank in (1, 0):
        pass_boundary(ranks[rank], 4)
    begun[2] = True  # in iteration 4
    ranks[1].note_over(4)
    wait_for(lambda: all(council.view.uneven is not None for council in ranks))
    begun[2] = False
    pass_boundary(ranks[2], 4)
    ranks[2].note_over(4)
    wait_for(lambda: len(ranks[0].view.uneven.ended) == 2)  # type: ignore[union-attr]
    begun[2] = True  # after its loop
    wait_for(lambda: ranks[2].view.uneven == ranks[0].view.uneven)
    assert told(caplog) == []
    begun[0] = True
    wait_for(lambda: len(told(caplog)) == 3)
    assert all(" rank 0 went on" in line for line in told(caplog))


def test_later_steps_of_rank_0_end_the_wait_for_an_attempt(seats: Seats) -> None:
    ranks = seats()
    ranks[0].open_attempt(9)
    with pytest.raises(StorageError, match="rank 0 saves a later step than 4"):
        ranks[1].await_attempt(4, 30)
    with pytest.raises(MissingShardsError, match="rank 0 did not begin to save step 10"):
        ranks[1].await_attempt(10, 0.1)


def test_waits_end_where_the_place_never_answers() -> None:
    """As torch's store, whose client waits for a stopped launcher without end."""
    answers = threading.Event()

    class Stuck(Dictionary):
        def get(self, keys: Sequence[str]) -> dict[str, bytes]:
            answers.wait()
            return super().get(keys)

    council = Council(1, WORLD, "start.0", lambda: Stuck({}), silent_seconds=0.2)
    try:
        for wait in (
            lambda: council.agree_start(StartReport()),
            lambda: council.await_attempt(1, 3600),
            lambda: council.await_verdict(Attempt(1, 1), 3600),
        ):
            with pytest.raises(StorageError, match="does not answer"):
                wait()
        assert council.await_end(1, captured=True, wait_seconds=3600)
    finally:
        answers.set()
        council.close()


def test_the_schedule_and_plans_come_over(seats: Seats) -> None:
    """Rank 0 hears of the longest interval, and of none as long as a rank has no plan."""
    ranks = seats()
    ranks[0].schedule((3, 5))
    for rank, council in enumerate(ranks):
        council.note_plan(rank + 1)
    wait_for(lambda: all(council.view.scheduled == (3, 5) for council in ranks))
    wait_for(lambda: ranks[0].overview.plan_interval == len(ranks))
    ranks[1].note_plan(0)
    wait_for(lambda: ranks[0].overview.plan_interval == 0)


def test_all_ranks_end_at_one_boundary(seats: Seats) -> None:
    ranks = seats()
    barrier = threading.Barrier(WORLD, timeout=60)

    def train(council: Council) -> int:
        for step in range(1, 100_000):
            barrier.wait()  # as a collective does
            if step == 20 and council.rank == 1:
                council.request_end("SIGTERM", 60)
            if council.note_boundary(step).stops_at(step):
                if council.await_end(step, captured=True, wait_seconds=60):
                    return step
            else:
                council.leave_boundary(step, captured=True)
        raise AssertionError("it does not end")

    ends = all_of(ranks, train)
    assert len(set(ends)) == 1
    assert ends[0] > 20


def test_the_council_of_one_process_starts_no_thread_and_keeps_nothing() -> None:
    threads = threading.enumerate()
    council = Alone()
    council.note_plan(3)
    assert not council.note_boundary(1).stops_at(1)
    council.leave_boundary(1, captured=True)
    council.request_end("SIGTERM", 10.0)
    assert not council.note_boundary(2).stops_at(2)  # the process ends by itself, and at once
    assert council.await_end(2, captured=True, wait_seconds=0.0)
    council.note_over(2)
    council.note_costs(1.0, 2, 3, 0)
    error = StorageError("no space")
    assert council.refuse(error) is error
    council.close()
    assert (council.overview.costs, council.overview.plan_interval, council.view.silent) == ((), None, ())
    assert threading.enumerate() == threads


def test_folders_of_earlier_starts_are_removed(tmp_path: Path) -> None:
    FileMeeting(tmp_path, "before.0", 0).put("card/1", b"x")
    place = FileMeeting(tmp_path, "now.0", 0)
    place.put("board", b"y")
    (tmp_path / "step-00000001").mkdir()
    remove_earlier(tmp_path, "now.0")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".council-now.0", "step-00000001"]
    assert FileMeeting(tmp_path, "now.0", 1).get(["board", "card/1"]) == {"board": b"y"}
    (tmp_path / ".council-now.0" / "board").write_bytes(b"torn")
    assert place.get(["board"]) == {}
