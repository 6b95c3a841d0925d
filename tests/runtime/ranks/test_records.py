"""Records travel unchanged, and what is none is refused; receipts that make no version."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from checkflow.core.errors import CheckflowError, LockedError, MismatchError, MissingShardsError, StorageError
from checkflow.runtime.ranks import starting
from checkflow.runtime.ranks.receipts import check_version, wait_seconds
from checkflow.runtime.ranks.records import (
    BOARD,
    CARD,
    RECEIPT,
    Attempt,
    Board,
    Card,
    End,
    Receipt,
    Refusal,
    dumps,
    loads,
    name_ranks,
)


@pytest.mark.parametrize(("adapter", "kind"), [(CARD, Card), (BOARD, Board), (RECEIPT, Receipt)])
def test_a_record_is_read_as_it_was_written(adapter: TypeAdapter[Any], kind: type[Any]) -> None:
    @given(st.data())
    def travels(data: st.DataObject) -> None:
        names = st.text(st.characters(codec="utf-8", categories=["L", "N"]), max_size=5)
        attempt = st.builds(Attempt, st.integers(0, 99), st.integers(0, 10**18), st.just("failed"), names)
        seconds = st.floats(0, 1e6)
        values: dict[type[Any], st.SearchStrategy[Any]] = {
            Card: st.builds(
                Card, st.integers(0, 9), st.just("g.0"), st.integers(0, 99), captured=st.just((1, 2)),
                persist_seconds=seconds, plan_interval=st.integers(0, 99), left=names,
            ),
            Board: st.builds(
                Board, st.just("g.0"), st.integers(0, 99), st.integers(1, 9), attempts=st.tuples(attempt, attempt),
                end=st.builds(End, st.integers(0, 9), st.none() | st.integers(0, 9), names, seconds, st.booleans()),
            ),
            Receipt: st.builds(
                Receipt, st.integers(0, 9), st.integers(1, 9), st.just("g.0"), st.integers(0, 9), st.integers(0, 9),
                written=names, failure=names,
            ),
        }  # fmt: skip
        record = data.draw(values[kind])
        read = loads(adapter, dumps(adapter, record), "it")
        assert (read, getattr(read, "serial", 0)) == (record, getattr(record, "serial", 0))

    travels()


@pytest.mark.parametrize(
    "data", [b"", b"{}", b"[1]", b'{"rank": -1}', b"\xff", b'{"rank":0,"generation":"/","serial":0}']
)
def test_what_is_no_record_is_refused_in_one_line(data: bytes) -> None:
    with pytest.raises(StorageError, match="the card of rank 2 is damaged") as error:
        loads(CARD, data, "the card of rank 2")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ((3,), "rank 3"), ((0, 1), "ranks 0 and 1"), ((1, 2, 4), "ranks 1, 2 and 4"),
        (tuple(range(10)), "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 2 more"),
    ],
)  # fmt: skip
def test_ranks_in_words(ranks: tuple[int, ...], words: str) -> None:
    assert name_ranks(ranks) == words


# ---------------------------------------------------------------------------------------------------------- receipts


def receipt(rank: int, **other: Any) -> Receipt:
    return replace(Receipt(rank, 2, "g.0", 4, 7, f"part {rank}"), **other)


def twice(ordered: Sequence[Receipt]) -> None:
    raise MismatchError("w is covered twice")


def test_receipts_of_all_ranks_make_a_version() -> None:
    receipts = {1: receipt(1), 0: receipt(0)}
    assert check_version(receipts, "g.0", 4, 7, 2, lambda _: None) == (receipts[0], receipts[1])


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("other", "kind", "says"),
    [
        (None, StorageError, "no receipt of rank 1 for step 7"),
        (receipt(1, failure="disk full"), StorageError, "rank 1: disk full"),
        (receipt(1, generation="g.1"), StorageError, "of g.1, not of attempt 4"),
        (receipt(1, attempt=3), StorageError, "attempt 3 and step 7"),
        (receipt(1, step=8), StorageError, "attempt 4 and step 8"),
        (receipt(0), StorageError, "the receipt of rank 1 is of rank 0"),
        (receipt(1, world_size=3), MismatchError, "rank 1 counts 3 ranks, rank 0 counts 2"),
    ],
)
def test_a_version_that_does_not_exist(other: Receipt | None, kind: type[CheckflowError], says: str) -> None:
    receipts = {0: receipt(0)} | ({} if other is None else {1: other})
    with pytest.raises(kind, match=says):
        check_version(receipts, "g.0", 4, 7, 2, lambda _: None)


def test_a_failure_counts_before_a_rank_that_is_missing() -> None:
    with pytest.raises(StorageError, match="rank 1: disk full"):
        check_version({1: receipt(1, failure="disk full")}, "g.0", 4, 7, 3, lambda _: None)


def test_a_board_names_the_last_attempts_and_one_that_is_open() -> None:
    board = Board("g.0", 1, 2)
    for number in range(20):
        board = board.with_attempt(Attempt(number, 7, "failed")).with_attempt(Attempt(100 + number, 7))
    board = board.with_attempt(Attempt(119, 7).concluded())
    assert board.attempts == (*(Attempt(number, 7, "failed") for number in range(5, 20)), Attempt(119, 7, "committed"))


@pytest.mark.parametrize(
    ("error", "reason", "missing"),
    [
        (MissingShardsError("no\nrank 1", (1,)), "no rank 1", (1,)),
        (OSError(errno.EIO, "Input/output error", "x"), "Input/output error", ()),
        (KeyboardInterrupt(), "KeyboardInterrupt", ()),
    ],
)
def test_an_attempt_fails_by_an_error(error: BaseException, reason: str, missing: tuple[int, ...]) -> None:
    assert Attempt(3, 7).concluded(error) == Attempt(3, 7, "failed", reason, missing)


def test_what_is_covered_twice_is_no_version() -> None:
    with pytest.raises(MismatchError, match="covered twice"):
        check_version({0: receipt(0), 1: receipt(1)}, "g.0", 4, 7, 2, twice)


def test_patience() -> None:
    assert (wait_seconds(0), wait_seconds(7), wait_seconds(8)) == (30, 30, 32)


@pytest.mark.parametrize(
    ("refusal", "kind", "says"),
    [
        (starting.refusal_of(LockedError("held by 3"), 2), LockedError, "no rank starts: rank 2: held by 3"),
        (starting.refusal_of(ValueError(), 1), StorageError, "no rank starts: rank 1: ValueError"),
        (Refusal("MismatchError", "x differs", (0, 1)), MismatchError, "no rank starts: x differs"),
        (Refusal("TYPE_CHECKING", "x", (1,)), StorageError, "no rank starts: rank 1: x"),
    ],
)
def test_a_refusal_is_raised_by_its_class(refusal: Refusal, kind: type[CheckflowError], says: str) -> None:
    error = starting.error_of(refusal)
    assert (type(error), str(error)) == (kind, says)


def test_missing_ranks_are_named_by_the_error() -> None:
    error = starting.error_of(Refusal("MissingShardsError", "rank 3 ended", (3,)))
    assert isinstance(error, MissingShardsError)
    assert error.ranks == (3,)
