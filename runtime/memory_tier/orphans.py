"""Finds what a dead run has left in shared memory, and its records. Changes nothing; free of torch."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import re
import stat
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

from checkflow.core.errors import CheckflowError, CorruptCheckpointError, LockedError, StorageError, first_fault
from checkflow.core.small_files import IrregularError
from checkflow.runtime.format.manifest import MAX_MANIFEST_BYTES
from checkflow.runtime.memory_tier import records
from checkflow.runtime.memory_tier.records import (
    LIFE,
    LIVES,
    MARK,
    MARKS,
    MOST_BYTES,
    OWNER,
    OWNERS,
    PREFIX,
    RANK_MARK,
    RECORDS,
    CaptureRecord,
    Mark,
    Owner,
    RunLife,
    boot_id,
    rank_mark,
)
from checkflow.runtime.store.discovery import find
from checkflow.runtime.store.files import glance, parse_step
from checkflow.runtime.system import fs

logger = logging.getLogger("checkflow")

FOLDER = re.compile(rf"{PREFIX}[0-9a-f]{{32}}", re.ASCII)
YOUNG_SECONDS = 60.0  # younger: the job may not have locked its folder yet
_T = TypeVar("_T")
_OTHERS = 0o077  # mode bits of others that a folder must not have
_RETRY_SECONDS = 0.05
_RECORD = re.compile(r"buffer-([0-9]{1,9})\.json", re.ASCII)


@dataclass(frozen=True, slots=True)
class Left:
    """A job's folder in shared memory.

    Attributes:
        directory: of the job's checkpoints; None: unknown or unreadable, then all that may be None is.
        owner: the user's name.
        own: whether this user may free it: it is his own, or he is root.
        changed_unix_seconds: when the newest capture came, or the job began.
        step: of the newest whole capture; None: there is none.
        stored_step: the newest whole step on storage in that directory; None: none.
        pid: of the job, in its own namespace.
        lives: whether the job, or a child of it, holds it; None: unknown, as in a job's first minute.
    """

    path: Path
    owner: str
    own: bool
    changed_unix_seconds: float
    directory: str | None = None
    size_bytes: int | None = None
    step: int | None = None
    stored_step: int | None = None
    pid: int | None = None
    lives: bool | None = None

    @property
    def only_copy(self) -> bool:
        """Whether storage has nothing as new as this."""
        return self.step is not None and (self.stored_step is None or self.stored_step < self.step)


def list_left() -> tuple[Left, ...]:
    """All jobs' folders in this machine's shared memory, of living and dead jobs, the oldest first."""
    try:
        names = fs.folder_names(str(records.ROOT))
    except OSError as error:
        raise StorageError(f"cannot read {records.ROOT}: {error.strerror}") from error
    found = [one for name in filter(FOLDER.fullmatch, names) if (one := _look_at(records.ROOT / name)) is not None]
    return tuple(sorted(found, key=lambda one: one.changed_unix_seconds))


def _look_at(path: Path) -> Left | None:
    """Describe a folder; None: it is gone, or not a folder."""
    try:
        found = os.stat(path, follow_symlinks=False)
        if not stat.S_ISDIR(found.st_mode):
            return None
        own = os.geteuid() in (0, found.st_uid)
        left = Left(path, fs.user_name(found.st_uid), own, found.st_mtime)
        with fs.folder(str(path)) as folder:
            sizes = [status.st_blocks for _, status in fs.entries(folder)]
            steps = [record.step for record in read_records(folder).values()]
            left = dataclasses.replace(left, size_bytes=512 * sum(sizes), step=max(steps, default=None))
            owner = understood(path / OWNER, OWNERS, read_kept(folder, OWNER, MOST_BYTES))
            # Testing the lock could make a job that is about to take it fail.
            begun = os.stat(OWNER, dir_fd=folder, follow_symlinks=False).st_mtime
            lives = None if time.time() - begun < YOUNG_SECONDS else not is_free(folder)
    except FileNotFoundError:
        return None
    except (OSError, StorageError) as error:
        logger.debug("%s: %s", path, words_of(error))
        return left
    return dataclasses.replace(
        left, directory=owner.directory, pid=owner.pid or None, lives=lives, stored_step=stored_step(owner)
    )


def stored_step(owner: Owner) -> int | None:
    """The newest whole step on storage, by names and sizes, in a dead job's directory."""
    try:
        if owner.is_of(owner.directory):
            for path in find(owner.directory):
                with contextlib.suppress(CheckflowError):
                    return glance(path).step
    except (OSError, ValueError, StorageError):  # gone, moved, unreadable, or a NUL in the path
        pass
    return None


def left_step(directory: str | os.PathLike[str]) -> int | None:
    """The newest step that the next run in a directory would find; None: none, or unreadable."""
    root = Path(directory)
    there: dict[tuple[str, int, int], set[int]] = {}  # by run, its ranks and step: of which ranks
    try:
        for name in filter(may_be_here, mark_names(root)):
            path = find_left(root, name=name)
            with fs.folder(str(path)) as folder:
                life = read_life(path, folder)
                for record in read_records(folder).values():
                    there.setdefault((life.run_id, life.ranks, record.step), set()).add(life.rank)
        steps = [step for (_, ranks, step), found in there.items() if len(found) == ranks]
        newest = max((one for path in find(root) if (one := parse_step(path.name)) is not None), default=-1)
    except (OSError, StorageError):  # the next run will say what is wrong
        return None
    return max((step for step in steps if step > newest), default=None)


def memory_of(directory: str | os.PathLike[str]) -> tuple[Path, int] | None:
    """The folder that the previous run left for a directory, and its bytes; None: nothing for the next run."""
    try:
        path = find_left(Path(directory))
        with fs.folder(str(path)) as folder:
            sizes = [os.stat(name, dir_fd=folder, follow_symlinks=False).st_blocks for name in fs.names(folder)]
    except (OSError, StorageError):
        return None
    return path, 512 * sum(sizes)


def find_left(directory: Path, wait_seconds: float = 0.0, name: str = MARK) -> Path:
    """The previous run's folder, or that of one of its ranks, found from its checkpoints by a mark's ``name``, after
    waiting ``wait_seconds`` for a dying job.

    Raises:
        FileNotFoundError: it ended by itself, or with the machine.
        LockedError: another process uses it.
        StorageError: it is not this directory's or this user's, or it is damaged.
        OSError: it cannot be read now.
    """
    mark = read_mark(directory, name)
    if mark.boot != boot_id():
        raise FileNotFoundError("the memory of an earlier start of the machine is gone")
    path = records.ROOT / f"{PREFIX}{mark.token}"
    try:
        with fs.folder(str(path)) as folder:
            if (reason := distrust_of(folder)) is not None:
                raise StorageError(f"{path} {reason}")
            owner = understood(path / OWNER, OWNERS, read_kept(folder, OWNER, MOST_BYTES))
            if not owner.is_of(directory):  # first: this may be a copy of a directory whose job lives
                if os.path.realpath(directory) != owner.directory:
                    raise StorageError(
                        f"{path} is of the checkpoints in {owner.directory}, of which this directory is a copy"
                    )
                raise StorageError(
                    f"{path} is of another directory that was at {directory} before: where that is gone for good, "
                    f"delete {path}, or a later job will"
                )
            end = time.monotonic() + wait_seconds
            while not is_free(folder):
                if time.monotonic() >= end:
                    raise LockedError(f"{path} is in use by {_user_of(owner.pid)}: stop it first")
                time.sleep(_RETRY_SECONDS)
    except PermissionError:
        raise StorageError(f"{path} is another user's") from None
    return path


def mark_names(directory: Path) -> tuple[str, ...]:
    """The marks beside the checkpoints: one process's, and those of ranks. Raises OSError."""
    return tuple(name for name in fs.folder_names(str(directory)) if name == MARK or RANK_MARK.fullmatch(name))


def may_be_here(mark: str) -> bool:
    """Whether this machine may have what a mark of this name stands for. Ranks have too many marks to read them all."""
    token = RANK_MARK.fullmatch(mark)
    return token is None or (records.ROOT / f"{PREFIX}{token[1]}").exists()


def read_mark(directory: Path, name: str = MARK) -> Mark:
    """A mark beside the checkpoints. Raises CorruptCheckpointError, or OSError if it is missing or unreadable now."""
    path = directory / name
    try:
        with fs.folder(str(directory.resolve())) as beside:
            return understood(path, MARKS, fs.read_small(name, MOST_BYTES, dir_fd=beside))
    except IrregularError as error:
        raise CorruptCheckpointError(f"{path}: {error.strerror}") from None


def is_marked(path: Path, directory: Path) -> bool:
    """Whether a mark in a directory of checkpoints names this folder. Raises as :func:`read_mark`."""
    if os.path.lexists(directory / rank_mark(path.name.removeprefix(PREFIX))):
        return True
    try:
        return path.name == f"{PREFIX}{read_mark(directory).token}"
    except FileNotFoundError:
        return False


def read_life(path: Path, folder: int) -> RunLife:
    """Whose captures a folder holds. Raises CorruptCheckpointError, OSError."""
    return understood(path / LIFE, LIVES, read_kept(folder, LIFE, MOST_BYTES))


def read_records(folder: int) -> dict[int, CaptureRecord]:
    """The whole records, by buffer. Raises OSError if one is unreadable now."""
    found = {}
    for name in fs.names(folder):
        if (match := _RECORD.fullmatch(name)) is not None:
            try:
                found[int(match[1])] = RECORDS.validate_json(read_kept(folder, name, MAX_MANIFEST_BYTES))
            except (CorruptCheckpointError, ValidationError) as error:
                logger.warning("a capture in host memory is passed over: %s: %s", name, words_of(error))
    return found


def read_kept(folder: int, name: str, most_bytes: int) -> bytes:
    """A file of such a folder. CorruptCheckpointError if it is missing or of another size, OSError if
    unreadable now.
    """
    fd, size_bytes = open_kept(folder, name)
    try:
        if size_bytes > most_bytes:
            raise CorruptCheckpointError(f"{name} is no file of at most {most_bytes} bytes")
        return fs.read_begin(fd, size_bytes)
    finally:
        fs.close_quietly(fd)


def open_kept(folder: int, name: str) -> tuple[int, int]:
    """A file of such a folder, open, and its size.

    Raises:
        CorruptCheckpointError: it is not there, or no regular file.
        OSError: it cannot be opened now.
    """
    try:
        return fs.open_regular(name, dir_fd=folder)
    except FileNotFoundError:
        raise CorruptCheckpointError(f"{name} is missing") from None
    except IrregularError as error:
        raise CorruptCheckpointError(f"{name}: {error.strerror}") from None


def distrust_of(folder: int) -> str | None:
    """Why another user may have written there; None: nobody can have."""
    status = os.fstat(folder)
    if status.st_uid != os.geteuid():
        return "is another user's"
    if (mode := stat.S_IMODE(status.st_mode)) & _OTHERS:
        return f"is open to others (mode {mode:o}): chmod 700 it if nobody else wrote there"
    return None


def _user_of(pid: int) -> str:
    """Who uses a folder, for messages; 0: unknown."""
    return f"process {pid}, or one that it left behind" if pid else "another process"


def understood(path: Path, adapter: TypeAdapter[_T], data: bytes) -> _T:
    """Parse a file's content. Raises CorruptCheckpointError."""
    try:
        return adapter.validate_json(data)
    except ValidationError as error:
        raise CorruptCheckpointError(f"{path} is damaged: {first_fault(error)}") from error


def is_free(folder: int) -> bool:
    """Whether the folder's job has ended. Looking takes no lock that keeps others out."""
    try:
        fd = fs.open_claimed(OWNER, dir_fd=folder)
    except FileNotFoundError:  # killed before it wrote the file
        return True
    try:
        fs.flock_shared(fd)
    except BlockingIOError:
        return False
    finally:
        fs.close_quietly(fd)
    return True


def words_of(error: Exception) -> str:
    """A one-line reason for skipping something."""
    if isinstance(error, ValidationError):
        return first_fault(error)
    return (isinstance(error, OSError) and error.strerror) or " ".join(str(error).split())
