"""(1) One writer per checkpoint directory: an advisory lock (flock) on a file in it, which names its holder.

Whoever can open a file can lock it: the lock's file is its owner's alone, or his group's where that is trusted.

And readers of one checkpoint: they share a lock on its manifest for as long as they have it open, and what deletes
checkpoints takes the same lock for itself first, or leaves it for a later time, but not for ever: who may read can
lock, too. Neither ever waits for the other.

The kernel drops the lock when the holder dies, however it dies. Forked children (loader workers) would keep it alive
after the trainer's death; they close it as their first act.
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
    """Held from construction to :meth:`release`, or the end of the process.

    Args:
        wait_seconds: how long to try again while another process holds it: a job that was started anew at once may meet
            the last breath of its predecessor.
        mode, group: of the lock's file, as :func:`.fs.open_lock` has them.

    Raises:
        LockedError: another process holds the lock; the message names it, or says that it is not known.
        StorageError: the lock file cannot be made, or the file system has no locks.
    """

    def __init__(self, directory: Path, *, wait_seconds: float = 5.0, mode: int = 0o600, group: int = -1) -> None:
        self._path, self._mode, self._group = directory / LOCK, mode, group
        self._fd: int | None = self._open(wait_seconds)
        _held.add(self)

    @property
    def held(self) -> bool:
        return self._fd is not None

    def release(self) -> None:
        """Give the lock up; once more is harmless."""
        fd, self._fd = self._fd, None
        _held.discard(self)
        if fd is not None:
            fs.close_quietly(fd)  # nothing that matters was written through it

    def forget(self) -> None:
        """In a forked child: it is the parent's, and :mod:`.system.fs` has closed what this process had of it."""
        self._fd = None
        _held.discard(self)

    def renew(self) -> None:
        """Make sure of the lock that is held: somebody may have deleted its file, which looks like a dead job's.

        Raises:
            LockedError: another process has locked the directory since then.
            StorageError: as at the start.
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
    """Say that the open manifest's checkpoint is being read, until the descriptor is closed.

    On a file system without locks nothing is said: there open descriptors have to do.

    Raises:
        BlockingIOError: it is just being deleted.
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
    """Whether nobody reads the checkpoint of this name; nobody begins to before the block ends.

    Args:
        manifest: its file's name. Neither of the two is followed if it is a link.
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
        yield fd is None or _is_free(fd)  # what has none cannot be opened
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
                raise LockedError(f"{path.parent} is being written by {_holder(fd)}; stop it first") from None
            time.sleep(_RETRY_SECONDS)
        except OSError as error:
            missing = error.errno in _NO_LOCKS
            reason = "its file system has no locks (flock)" if missing else error.strerror
            raise StorageError(f"cannot lock the checkpoint directory {path.parent}: {reason}") from error
        else:
            return


def _sign(fd: int, path: Path) -> None:
    """Say who holds the lock. A full disk is no reason to refuse: the lock holds, only its label is missing."""
    record = json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode()
    try:
        fs.truncate(fd)
        fs.write_all(fd, memoryview(record), 0)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise StorageError(f"cannot write the checkpoint directory: {path}: {error.strerror}") from error


def _holder(fd: int) -> str:
    """Who holds the lock: by the kernel, where that tells, or by what the file says, which may be an earlier holder."""
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
    """Which process of this machine has locked an open file; None: that is not known."""
    file = os.fstat(fd)
    place = f"{os.major(file.st_dev):02x}:{os.minor(file.st_dev):02x}:{file.st_ino}"
    try:
        table = Path("/proc/locks").read_text(encoding="ascii", errors="replace")
    except OSError:  # no Linux
        return None
    found = re.search(rf"^\d+: FLOCK +\S+ +\S+ +(\d+) {place} ", table, re.MULTILINE)
    return None if found is None else int(found[1])


def _close_in_child() -> None:
    for lock in list(_held):
        lock.forget()


os.register_at_fork(after_in_child=_close_in_child)
