"""Faults below the store: calls that fail, a process that is killed, a power cut. No root, no real disk needed.

Every call of the operating system goes through ``checkflow.runtime.system.fs``; :class:`Faults` wraps these functions.
The power cut is that of a disk which keeps of a file what was synced, and of names what was synced or what is there
now, whichever is worse.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from checkflow.runtime.format.layout import PAGE_BYTES
from checkflow.runtime.store import file_writer
from checkflow.runtime.system import fs
from checkflow.runtime.system.aligned_memory import address_of

CALLS = (
    "open_folder", "make_folders", "mkdir", "open_new", "open_regular", "open_lock", "flock", "truncate", "pwrite",
    "preadv", "fsync", "close", "rename", "unlink", "rmdir", "names", "folder_names", "exists", "status",
    "link", "move", "flock_shared", "open_claimed", "is_at", "set_direct", "open_direct",
)  # fmt: skip


OPENING = ("open_folder", "open_new", "open_regular", "open_lock", "open_claimed", "open_direct")


class Killed(BaseException):
    """The process ended here: no handler below may do anything to the disk any more."""


class Faults:
    """Counts calls; from call ``at`` on (the first is 1) they go wrong.

    Args:
        at: which call; 0: none.
        error: the errno that is raised; None: the process is killed.
        after: whether the call takes effect first.
        sticky: whether all later calls fail too (a killed process makes none).
        only: calls that may fail; all are counted.
    """

    def __init__(
        self,
        at: int = 0,
        error: int | None = None,
        *,
        after: bool = False,
        sticky: bool = False,
        only: tuple[str, ...] = CALLS,
    ) -> None:
        self.at, self.error, self.after, self.sticky, self.only = at, error, after, sticky, only
        self.count = 0

    @property
    def met(self) -> bool:
        """Whether the fault happened at all."""
        return 0 < self.at <= self.count

    @contextlib.contextmanager
    def __call__(self) -> Iterator[Faults]:
        with pytest.MonkeyPatch.context() as patch:
            for name in CALLS:
                patch.setattr(fs, name, self._wrap(name, getattr(fs, name)))
            yield self

    def _wrap(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            if name in self.only:
                self.count += 1
            if self.error is None and name == "close":  # the kernel closes what a killed process had open
                return real(*args, **named)
            due = self.met and name in self.only and (self.count == self.at or self.sticky or self.error is None)
            if not due:
                return real(*args, **named)
            if (self.after and self.count == self.at) or name == "close":  # a failed close closes all the same
                result = real(*args, **named)
                if self.after and name in OPENING:
                    fd = result[0] if isinstance(result, tuple) else result
                    fs._passing.discard(fd)
                    os.close(fd)
            if self.error is None:
                raise Killed
            raise OSError(self.error, os.strerror(self.error))

        return call


@contextlib.contextmanager
def all_direct() -> Iterator[list[int]]:
    """Files of every size go around the page cache, on a disk that takes whole pages for that, and nothing else.

    Yields the sizes of these writes and reads; the file system below may be any.
    """
    direct: set[int] = set()
    sizes: list[int] = []
    real_close, real_write, real_read = fs.close, fs.pwrite, fs.preadv

    def set_direct(fd: int, on: bool) -> None:
        (direct.add if on else direct.discard)(fd)

    def open_direct(fd: int) -> int:
        direct.add(again := os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC))
        return again

    def close(fd: int) -> None:
        direct.discard(fd)
        real_close(fd)

    def check(fd: int, data: memoryview, offset: int) -> None:
        if fd in direct:
            if offset % PAGE_BYTES or len(data) % PAGE_BYTES or address_of(data) % PAGE_BYTES:
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            sizes.append(len(data))

    def pwrite(fd: int, data: memoryview, offset: int) -> int:
        check(fd, data, offset)
        return real_write(fd, data, offset)

    def preadv(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        check(fd, buffers[0], offset)
        return real_read(fd, buffers, offset)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fs, "LEAST_DIRECT_BYTES", 1)
        patch.setattr(file_writer, "THREAD_BYTES", 1)
        for function in (set_direct, open_direct, close, pwrite, preadv):
            patch.setattr(fs, function.__name__, function)
        yield sizes


CUTS = ("synced", "now", "torn")


class Disk:
    """Remembers what was synced below ``root``, and can show what a power cut leaves of it.

    Args:
        lies: which fsyncs do nothing: "file", "folder" (inside the root) or "root". For tests of the tests.
    """

    def __init__(self, root: Path, *, lies: str = "") -> None:
        self.root, self.lies = root, lies
        self._files: dict[int, bytes] = {}
        self._folders: dict[int, dict[str, int]] = {}
        self._pinned: list[int] = []  # descriptors, so that no inode number is used twice

    @contextlib.contextmanager
    def __call__(self) -> Iterator[Disk]:
        real_sync, real_new, real_mkdir = fs.fsync, fs.open_new, fs.mkdir
        one_at_a_time = threading.Lock()  # of two ranks' syncs of a folder, the older listing must not be kept last

        def fsync(fd: int) -> None:
            real_sync(fd)
            status = os.fstat(fd)
            with one_at_a_time:
                if not stat.S_ISDIR(status.st_mode):
                    if self.lies != "file":
                        self._files[status.st_ino] = Path(f"/proc/self/fd/{fd}").read_bytes()
                elif self.lies != ("root" if status.st_ino == self.root.stat().st_ino else "folder"):
                    self._folders[status.st_ino] = self._listing(f"/proc/self/fd/{fd}")

        def open_new(name: str, *, dir_fd: int, mode: int = fs.MODE) -> int:
            fd = real_new(name, dir_fd=dir_fd, mode=mode)
            self._pinned.append(os.dup(fd))
            return fd

        def mkdir(name: str, *, dir_fd: int) -> None:
            real_mkdir(name, dir_fd=dir_fd)
            self._pinned.append(os.open(name, os.O_RDONLY, dir_fd=dir_fd))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(fs, "fsync", fsync)
            patch.setattr(fs, "open_new", open_new)
            patch.setattr(fs, "mkdir", mkdir)
            yield self
        for fd in self._pinned:
            os.close(fd)

    @staticmethod
    def _listing(folder: str) -> dict[str, int]:
        return {entry.name: entry.stat(follow_symlinks=False).st_ino for entry in os.scandir(folder)}

    def after_power_cut(self, target: Path, names: str) -> Path:
        """A copy of what is left: every file as it was synced, and names as ``names`` says.

        "synced": as of each directory's last fsync. "now": all that were ever given. "torn": inside checkpoints as they
        are now, in the root as synced: what was removed is gone, and what was renamed is not.
        """
        target.mkdir(parents=True)
        present = {path.stat().st_ino: path for path in self.root.iterdir() if path.is_dir()}
        root_inode = self.root.stat().st_ino
        root = self._listing(str(self.root)) if names == "now" else self._folders.get(root_inode, {})
        for name, inode in root.items():
            if name == ".lock":
                continue
            (target / name).mkdir()
            if names == "synced":
                listing = self._folders.get(inode, {})
            else:
                listing = self._listing(str(present[inode])) if inode in present else {}
            for entry, file_inode in listing.items():
                (target / name / entry).write_bytes(self._files.get(file_inode, b""))
        return target


ERRORS = (errno.EIO, errno.ENOSPC)
