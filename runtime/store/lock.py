"""Locks (flock): exclusive for a directory's one writer, step (1); shared for the readers of a checkpoint.

Whoever can open a file can lock it, so the lock file is its owner's or the trusted group's alone. Who deletes takes a
checkpoint's lock exclusively or comes back later, but not for ever. Forked children close theirs first of all.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import socket
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

from checkflow.core.errors import LockedError, StorageError
from checkflow.core.small_files import IrregularError
from checkflow.runtime.system import fs

LOCK = ".lock"
MAX_HOLDER_BYTES = 4096
_RETRY_SECONDS = 0.05
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EBADF)
_NO_MANIFEST = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO, errno.EISDIR)
_held: weakref.WeakSet[DirectoryLock] = weakref.WeakSet()


class DirectoryLock:
    """Held until :meth:`release` or the end of the process. LockedError names the holder if it is known.

    Args:
        wait_seconds: how long to retry while another process holds it: a restarted job may meet its dying predecessor.
        mode, group: of the lock file, see :func:`.fs.open_lock`.
    """

    def __init__(self, directory: Path, *, wait_seconds: float = 5.0, mode: int = 0o600, group: int = -1) -> None:
        self._path, self._mode, self._group = directory / LOCK, mode, group
        self._fd: int | None = self._open(wait_seconds)
        _held.add(self)

    @property
    def held(self) -> bool:
        return self._fd is not None

    def release(self) -> None:
        """Release the lock; may be called again."""
        fd, self._fd = self._fd, None
        _held.discard(self)
        if fd is not None:
            fs.close_quietly(fd)  # nothing important was written through it

    def forget(self) -> None:
        """Drop the parent's lock in a forked child; :mod:`.system.fs` has closed the descriptor."""
        self._fd = None
        _held.discard(self)

    def renew(self) -> None:
        """Check that the lock is still held, and take it anew if its file was deleted; LockedError if another process
        did.
        """
        if self._fd is None or fs.is_at(self._fd, str(self._path)):
            return
        old, self._fd = self._fd, self._open(0.0)
        fs.close_quietly(old)

    def _open(self, wait_seconds: float) -> int:
        path = self._path
        try:
            fd = fs.open_lock(str(path), self._mode, self._group)
        except OSError as error:
            raise StorageError(f"cannot lock the checkpoint directory: {path}: {error.strerror}") from error
        try:
            _acquire(fd, path, wait_seconds)
            _sign(fd, path)
        except BaseException:
            fs.close_quietly(fd)  # the first error is the one to report
            raise
        return fd


def share(fd: int) -> None:
    """Mark an open manifest's checkpoint as being read; BlockingIOError if it is being deleted. Needs locks to have
    effect.
    """
    try:
        fs.flock_shared(fd)
    except BlockingIOError:
        raise
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise


def locked_since(directory: Path) -> float | None:
    """When the lock of a directory was taken that another process holds now; None: nobody holds it."""
    try:
        fd, _ = fs.open_regular(str(directory / LOCK))
    except OSError:
        return None  # never locked, or not ours to see
    try:
        fs.flock_shared(fd)  # a job that starts in this instant tries again
    except BlockingIOError:
        return os.fstat(fd).st_mtime  # the holder signs the file
    except OSError:
        return None  # no locks on this file system
    finally:
        fs.close_quietly(fd)
    return None


@contextlib.contextmanager
def claimed(name: str, manifest: str, *, dir_fd: int) -> Iterator[bool]:
    """Whether nobody reads the checkpoint of this name; until the block ends nobody can start to. No link is
    followed.
    """
    fd: int | None = None
    try:
        folder = fs.open_folder(name, dir_fd=dir_fd)
        try:
            fd = fs.open_claimed(manifest, dir_fd=folder)
        finally:
            fs.close_quietly(folder)
    except IrregularError:  # no job can open that as a manifest, so nobody reads the checkpoint
        pass
    except OSError as error:
        if error.errno not in _NO_MANIFEST:
            raise
    try:
        yield fd is None or _is_free(fd)  # without a manifest nobody can open it
    finally:
        if fd is not None:
            fs.close_quietly(fd)


def _is_free(fd: int) -> bool:
    try:
        fs.flock(fd)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    return True


def _acquire(fd: int, path: Path, wait_seconds: float) -> None:
    deadline = time.monotonic() + wait_seconds
    while True:
        try:
            fs.flock(fd)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise LockedError(_refusal(fd, path.parent)) from None
            time.sleep(_RETRY_SECONDS)
        except OSError as error:
            missing = error.errno in _NO_LOCKS
            reason = "its file system has no locks (flock)" if missing else error.strerror
            raise StorageError(f"cannot lock the checkpoint directory {path.parent}: {reason}") from error
        else:
            return


def _refusal(fd: int, directory: Path) -> str:
    """Why a directory cannot be locked whose lock file, open here, another process has locked."""
    if os.fstat(fd).st_nlink > 1:
        return (
            f"{directory} shares its files with another directory (cp -l makes such copies), and {_holder(fd)} writes "
            "in one of the two: stop it first, or copy without -l"
        )
    return f"{directory} is being written by {_holder(fd)}; stop it first"


def _sign(fd: int, path: Path) -> None:
    """Write the holder into the lock file. A full disk is no reason to refuse: only the label is missing."""
    record = json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode()
    try:
        fs.write_all(fd, memoryview(record), 0)
        if os.fstat(fd).st_size != len(record):  # ext4 may take 50 ms to make a file empty that was just written
            fs.truncate(fd, len(record))
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise StorageError(f"cannot write the checkpoint directory: {path}: {error.strerror}") from error
        with contextlib.suppress(OSError):
            fs.truncate(fd)  # or it would name the holder before


def _holder(fd: int) -> str:
    """The lock's holder, as the kernel says, or as the file says, which may be outdated."""
    try:
        record = json.loads(fs.read_begin(fd, MAX_HOLDER_BYTES))
        pid, host = int(record["pid"]), str(record["host"])[:255]
    except (OSError, ValueError, KeyError, TypeError):
        pid, host = 0, ""
    here, holder = socket.gethostname(), _locking_process(fd)
    if holder is None:
        if host == here and fs.user_of_process(pid) is None:
            return f"another process, which is not known (the file names process {pid}, which has ended)"
        return f"process {pid} on host {host!r}" if pid else "another process (it left no name)"
    if (user := fs.user_of_process(holder)) is None:
        return f"a process that process {holder} on host {here!r} left behind"
    return f"process {holder} on host {here!r}{'' if holder == pid else f' of {user}, who did not sign the file'}"


def _locking_process(fd: int) -> int | None:
    """The process of this machine that locked an open file; None: unknown."""
    file = os.fstat(fd)
    place = f"{os.major(file.st_dev):02x}:{os.minor(file.st_dev):02x}:{file.st_ino}"
    try:
        table = Path("/proc/locks").read_text(encoding="ascii", errors="replace")
    except OSError:  # not Linux
        return None
    found = re.search(rf"^\d+: FLOCK +\S+ +\S+ +(\d+) {place} ", table, re.MULTILINE)
    return None if found is None else int(found[1])


def _close_in_child() -> None:
    for lock in list(_held):
        lock.forget()


os.register_at_fork(after_in_child=_close_in_child)
