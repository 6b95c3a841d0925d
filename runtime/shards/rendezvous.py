"""How the processes of one version meet: by files in the store's directory, without a network.

- ``.shards.json`` is the board: rank 0 says which *attempt* to write a version is open, and how earlier ones ended.
- ``.tmp-<step>-<run id>.<attempt>/`` holds each rank's files and its receipt, ``.receipt-00001``.

Board, attempts and receipts are the council's records (:mod:`checkflow.runtime.ranks.records`), with the run id as the
generation. There is no council: no process has a thread, and a dead one is only missed when the time is over. Attempts
have random numbers, so that nothing of a dead run is taken for a part. docs/how-to/shards.md has the order.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

from checkflow.core.errors import CheckflowError, MismatchError, MissingShardsError, StorageError
from checkflow.runtime.ranks import meeting, records
from checkflow.runtime.ranks.file_meeting import read_sealed, write_sealed
from checkflow.runtime.ranks.receipts import check_version
from checkflow.runtime.ranks.records import RECEIPT, Attempt, Board, Receipt, dumps, in_words, name_ranks
from checkflow.runtime.store.cleanup import DRAFT
from checkflow.runtime.store.parts import folder_name
from checkflow.runtime.store.store import reported
from checkflow.runtime.system import fs

BOARD = ".shards.json"
_T = TypeVar("_T")


# ------------------------------------------------------------------------------------------------------------ rank 0


def post(root: int, run_id: str, world_size: int, attempt: Attempt) -> None:
    """Put an attempt, or how it ended, on the board. Needs the directory's lock."""
    board = _find_board(root, run_id, world_size).with_attempt(attempt)
    write_sealed(root, dumps(records.BOARD, board), DRAFT, BOARD)


def collect(folder: int, own: Receipt, wait_seconds: float) -> tuple[Receipt, ...]:
    """Every rank's receipt, by rank. Raises MissingShardsError, or StorageError with a failed rank's message."""
    found, ranks = {0: own}, range(own.world_size)

    def complete() -> bool | None:
        present = set(fs.names(folder))
        for rank in ranks:
            name = _note(rank)
            if rank not in found and name in present and (receipt := _get(folder, RECEIPT, name)) is not None:
                found[rank] = receipt
        return True if len(found) == len(ranks) else None

    wait_until(complete, wait_seconds)
    missing = tuple(rank for rank in ranks if rank not in found)
    if missing and not any(receipt.failure for receipt in found.values()):
        raise MissingShardsError(
            f"no record of {name_ranks(missing)} of {len(ranks)} within {wait_seconds:g} s: did the process end, and "
            "do all see the same directory?",
            missing,
        )
    return check_version(found, own.generation, own.attempt, own.step, own.world_size, lambda _: None)


def clear_notes(folder: int) -> None:
    """Remove the receipts: the manifest holds what they say."""
    for name in fs.names(folder):
        if name.startswith("."):
            fs.unlink(name, dir_fd=folder)


# -------------------------------------------------------------------------------------------------- the other ranks


def follow(directory: Path, blank: Receipt, wait_seconds: float, write: Callable[[int], str]) -> None:
    """A rank other than 0: write its part when the attempt opens, and return when the version is complete.

    Args:
        blank: this rank's receipt, but for the attempt and what is written.
        write: gets a descriptor of the attempt's directory, again if rank 0 starts anew; returns what the receipt says.

    Raises:
        MissingShardsError: rank 0 did not begin or end in time, or a rank is missing.
        MismatchError: rank 0 has another number of ranks.
        StorageError: this rank or another one failed; and what ``write`` raises.
    """
    tried: set[int] = set()
    root = _wait_for_folder(directory, wait_seconds)
    try:
        current: Attempt | None = None
        while True:
            # Rank 0 starts waiting for receipts when its own part is written, which may take longer.
            patience = wait_seconds if current is None else 2 * wait_seconds
            current = wait_until(lambda: _news(root, blank, tried, current), patience)  # noqa: B023
            if current is None:
                raise _no_news(root, directory, blank, begun=bool(tried))
            if current.ended == "committed":
                return
            if current.missing:
                raise MissingShardsError(current.reason, current.missing)
            if current.ended:
                raise StorageError(f"step {blank.step} was not saved: {current.reason}")
            tried.add(current.number)
            _take_part(root, replace(blank, attempt=current.number), write)
    finally:
        fs.close_quietly(root)


def _news(root: int, blank: Receipt, tried: set[int], current: Attempt | None) -> Attempt | None:
    """How this rank's attempt ended; or another open attempt to take part in."""
    for one in reversed(_find_board(root, blank.generation, blank.world_size).attempts):
        if one.ended and current is not None and one.number == current.number:
            return one
        if not one.ended and one.step == blank.step and one.number not in tried:
            return one
    return None


def _no_news(root: int, directory: Path, blank: Receipt, *, begun: bool) -> CheckflowError:
    board, run_id = read_board(root), blank.generation
    if board is not None and board.generation == run_id and board.world_size != blank.world_size:
        return MismatchError(f"rank {blank.rank} counts {blank.world_size} ranks, rank 0 counts {board.world_size}")
    return MissingShardsError(
        f"rank 0 did not {'complete' if begun else 'begin'} step {blank.step} of run {run_id!r} in {directory} within "
        "the time: did the process end, and do all see the same directory, run id and step?",
        (0,),
    )


def _take_part(root: int, receipt: Receipt, write: Callable[[int], str]) -> None:
    """Write this rank's part, and leave its receipt, durably: from then on rank 0 relies on its files."""

    def leave(folder: int, left: Receipt) -> None:
        name = _note(left.rank)
        write_sealed(folder, dumps(RECEIPT, left), f".draft{name}", name)

    place = folder_name(receipt.step, receipt.generation, str(receipt.attempt))
    try:
        with fs.folder(place, dir_fd=root) as folder:
            leave(folder, replace(receipt, written=write(folder)))
    except (FileNotFoundError, FileExistsError):
        # The directory is gone, or this rank has written there: the attempt was called off, or is a dead
        # predecessor's. The board will say.
        return
    except BaseException as error:
        # Report the first error; rank 0 will miss this rank.
        with contextlib.suppress(OSError), fs.folder(place, dir_fd=root) as folder:
            leave(folder, replace(receipt, failure=in_words(error)))
        raise


def _wait_for_folder(directory: Path, wait_seconds: float) -> int:
    def there() -> int | None:
        try:
            return fs.open_folder(str(directory.resolve()))
        except FileNotFoundError:
            return None

    if (root := wait_until(there, wait_seconds)) is None:
        raise MissingShardsError(f"there is no directory {directory}, which rank 0 makes: does it run?", (0,))
    return root


# --------------------------------------------------------------------------------------------------------- the files


def read_board(root: int) -> Board | None:
    return _get(root, records.BOARD, BOARD)


def _find_board(root: int, run_id: str, world_size: int) -> Board:
    """This run's board; without an attempt if there is none yet."""
    board = read_board(root)
    ours = board is not None and (board.generation, board.world_size) == (run_id, world_size)
    return board if board is not None and ours else Board(run_id, 0, world_size)


def _get(folder: int, adapter: TypeAdapter[_T], name: str) -> _T | None:
    """Read a small file; None if it is missing, its digest is wrong, or it holds something else."""
    body = read_sealed(folder, name)
    try:
        return None if body is None else adapter.validate_json(body)
    except ValidationError:
        return None


def _note(rank: int) -> str:
    return f".receipt-{rank:05d}"


def wait_until(happened: Callable[[], _T | None], wait_seconds: float) -> _T | None:
    """:func:`meeting.wait_until`, whose errors of the operating system say what could not be done."""
    with reported("cannot meet the other ranks"):
        return meeting.wait_until(happened, wait_seconds)
