"""How the processes of one version meet: by files in the store's directory, without a network.

- ``.shards.json`` is the board: rank 0 says which *attempt* to write a version is open, and how earlier ones ended.
- ``.tmp-<step>-<run id>.<attempt>/`` holds each rank's files and its record, ``.done-00001`` or ``.failed-00001``.

Attempts have random numbers, so that nothing of a dead run is taken for a part. docs/how-to/shards.md has the order.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import Field, StringConstraints, TypeAdapter, ValidationError

from checkflow.core.errors import CheckflowError, MismatchError, MissingShardsError, StorageError
from checkflow.core.graph import STRICT, Many, Named
from checkflow.runtime.format.manifest import MAX_STEP, FileEntry, FileName
from checkflow.runtime.ranks import meeting
from checkflow.runtime.ranks.file_meeting import read_sealed, write_sealed
from checkflow.runtime.ranks.records import dumps, name_ranks
from checkflow.runtime.shards.ownership import Length, TableInfo
from checkflow.runtime.store.cleanup import DRAFT, temporary_name
from checkflow.runtime.store.store import reported
from checkflow.runtime.system import fs

BOARD = ".shards.json"
_KEPT = 16  # attempts on the board; a rank is at most one behind
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Attempt:
    """An attempt to write one version. ``ended``: "" while it is open."""

    __pydantic_config__ = STRICT
    number: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{16}\z")]
    step: Annotated[int, Field(ge=0, le=MAX_STEP)]
    ended: Literal["", "committed", "failed"] = ""
    reason: str = ""
    missing: Many[int] = ()


@dataclass(frozen=True, slots=True)
class Board:
    """What rank 0 announces: its attempts, the newest last."""

    __pydantic_config__ = STRICT
    run_id: str
    world_size: int
    attempts: Many[Attempt] = ()


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor, or a box of one, in a rank's file. ``shape``, ``offsets``: of the whole, and the box's place in it."""

    __pydantic_config__ = STRICT
    file: FileName
    key: str
    dtype: str
    lengths: Many[Length]
    shape: Many[Length]
    offsets: Many[Length]


@dataclass(frozen=True, slots=True)
class Record:
    """What a rank has written; or, with ``failure``, why it has not."""

    __pydantic_config__ = STRICT
    attempt: str
    rank: int
    world_size: int
    files: Named[FileName, FileEntry]
    tensors: Named[str, Part]
    tables: Many[TableInfo]
    failure: str = ""


_BOARD: TypeAdapter[Board] = TypeAdapter(Board)
_RECORD: TypeAdapter[Record] = TypeAdapter(Record)


def folder_name(step: int, run_id: str, attempt: str) -> str:
    """Where all ranks write their parts."""
    return temporary_name(step, f"{run_id}.{attempt}")


# ------------------------------------------------------------------------------------------------------------ rank 0


def post(root: int, run_id: str, world_size: int, attempt: Attempt) -> None:
    """Put an attempt, or how it ended, on the board. Needs the directory's lock."""
    board = read_board(root)
    if board is None or (board.run_id, board.world_size) != (run_id, world_size):
        board = Board(run_id, world_size)
    others = [one for one in board.attempts if one.number != attempt.number]
    # Other open attempts are a dead process's: nobody will end them.
    others = [one for one in others if one.ended][1 - _KEPT :]
    _put(root, _BOARD, replace(board, attempts=(*others, attempt)), DRAFT, BOARD)


def collect(folder: int, attempt: str, world_size: int, wait_seconds: float, own: Record) -> tuple[Record, ...]:
    """Every rank's record, by rank. Raises MissingShardsError, or StorageError with a failed rank's message."""
    found = {0: own}

    def complete() -> bool | None:
        present = set(fs.names(folder))
        for rank in range(1, world_size):
            for name in (_note(rank, "done"), _note(rank, "failed")):
                if rank not in found and name in present and (record := _get(folder, _RECORD, name)) is not None:
                    if (record.attempt, record.rank, record.world_size) != (attempt, rank, world_size):
                        raise StorageError(f"{name} is no record of rank {rank} of {world_size} for this attempt")
                    found[rank] = record
        return True if len(found) == world_size else None

    in_time = wait_until(complete, wait_seconds)
    for rank, record in sorted(found.items()):
        if record.failure:
            raise StorageError(f"rank {rank}: {record.failure}")
    if not in_time:
        missing = tuple(rank for rank in range(world_size) if rank not in found)
        raise MissingShardsError(
            f"no record of {name_ranks(missing)} of {world_size} within {wait_seconds:g} s: did the process end, and "
            "do all see the same directory?",
            missing,
        )
    return tuple(found[rank] for rank in range(world_size))


def clear_notes(folder: int) -> None:
    """Remove the records: the manifest holds what they say."""
    for name in fs.names(folder):
        if name.startswith("."):
            fs.unlink(name, dir_fd=folder)


# -------------------------------------------------------------------------------------------------- the other ranks


def leave(folder: int, record: Record) -> None:
    """Leave a rank's record, durably: from then on rank 0 relies on its files."""
    name = _note(record.rank, "failed" if record.failure else "done")
    _put(folder, _RECORD, record, f".draft{name}", name)


def follow(
    directory: Path, run_id: str, step: int, rank: int, world_size: int, wait_seconds: float,
    write: Callable[[int, Attempt], None],
) -> None:  # fmt: skip
    """A rank other than 0: write its part when the attempt opens, and return when the version is complete.

    ``write`` gets a descriptor of the directory, again if rank 0 starts anew.

    Raises:
        MissingShardsError: rank 0 did not begin or end in time, or a rank is missing.
        MismatchError: rank 0 has another number of ranks.
        StorageError: this rank or another one failed; and what ``write`` raises.
    """
    tried: set[str] = set()
    root = _wait_for_folder(directory, wait_seconds)
    try:
        current: Attempt | None = None
        while True:
            # Rank 0 starts waiting for records when its own part is written, which may take longer.
            patience = wait_seconds if current is None else 2 * wait_seconds
            current = wait_until(lambda: _news(root, run_id, step, world_size, tried, current), patience)  # noqa: B023
            if current is None:
                raise _no_news(root, directory, run_id, step, rank, world_size, begun=bool(tried))
            if current.ended == "committed":
                return
            if current.missing:
                raise MissingShardsError(current.reason, current.missing)
            if current.ended:
                raise StorageError(f"step {step} was not saved: {current.reason}")
            tried.add(current.number)
            _take_part(root, current, run_id, rank, world_size, write)
    finally:
        fs.close_quietly(root)


def _news(
    root: int, run_id: str, step: int, world_size: int, tried: set[str], current: Attempt | None
) -> Attempt | None:
    """How this rank's attempt ended; or another open attempt to take part in."""
    board = read_board(root)
    if board is None or (board.run_id, board.world_size) != (run_id, world_size):
        return None
    for one in reversed(board.attempts):
        if one.ended and current is not None and one.number == current.number:
            return one
        if not one.ended and one.step == step and one.number not in tried:
            return one
    return None


def _no_news(
    root: int, directory: Path, run_id: str, step: int, rank: int, world_size: int, *, begun: bool
) -> CheckflowError:
    board = read_board(root)
    if board is not None and board.run_id == run_id and board.world_size != world_size:
        return MismatchError(f"rank {rank} counts {world_size} ranks, rank 0 counts {board.world_size}")
    return MissingShardsError(
        f"rank 0 did not {'complete' if begun else 'begin'} step {step} of run {run_id!r} in {directory} within the "
        "time: did the process end, and do all see the same directory, run id and step?",
        (0,),
    )


def _take_part(
    root: int, attempt: Attempt, run_id: str, rank: int, world_size: int, write: Callable[[int, Attempt], None]
) -> None:
    try:
        write(root, attempt)
    except (FileNotFoundError, FileExistsError):
        # The directory is gone, or this rank has written there: the attempt was called off, or is a dead
        # predecessor's. The board will say.
        return
    except BaseException as error:
        failure = Record(attempt.number, rank, world_size, {}, {}, (), failure=in_words(error))
        with contextlib.suppress(OSError):  # report the first error; rank 0 will miss this rank
            folder = fs.open_folder(folder_name(attempt.step, run_id, attempt.number), dir_fd=root)
            try:
                leave(folder, failure)
            finally:
                fs.close_quietly(folder)
        raise


def in_words(error: BaseException) -> str:
    """An error in one line, never empty."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join(text.split()) or type(error).__name__


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
    return _get(root, _BOARD, BOARD)


def _get(folder: int, adapter: TypeAdapter[_T], name: str) -> _T | None:
    """Read a small file; None if it is missing, its digest is wrong, or it holds something else."""
    body = read_sealed(folder, name)
    try:
        return None if body is None else adapter.validate_json(body)
    except ValidationError:
        return None


def _put(folder: int, adapter: TypeAdapter[_T], value: _T, draft: str, name: str) -> None:
    """Replace a small file, durably and atomically."""
    write_sealed(folder, dumps(adapter, value), draft, name)


def _note(rank: int, kind: str) -> str:
    return f".{kind}-{rank:05d}"


def wait_until(happened: Callable[[], _T | None], wait_seconds: float) -> _T | None:
    """:func:`meeting.wait_until`, whose errors of the operating system say what could not be done."""
    with reported("cannot meet the other ranks"):
        return meeting.wait_until(happened, wait_seconds)
