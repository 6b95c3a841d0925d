"""Measures how fast a directory's disk takes a file, fsync included, and gives it back from the disk itself.

The written file is first dropped from the page cache (``posix_fadvise``, checked with ``RWF_NOWAIT``), else read past
it (``O_DIRECT``), else a note says that the figure may be memory's. A virtual disk may still answer from its host's
memory.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from checkflow.core.errors import StorageError
from checkflow.core.units import format_size
from checkflow.planner.measure.timing import LEAST_REPETITIONS, Clock, Effort, Figure, rate, spread_of

BLOCK_BYTES = 8 * 2**20  # per write or read: a multiple of every page and sector size
LEAST_FILE_BYTES = 2 * BLOCK_BYTES
_FREE_SHARE = 4  # the file takes at most a quarter of the free space
_PEEKS = 16  # places of the file that are checked for the page cache


def disk_figures(directory: Path, effort: Effort, clock: Clock) -> tuple[list[Figure], list[str]]:
    """Return write and read figures of the disk under a directory, and notes; StorageError if it cannot be measured."""
    with _reported(directory):
        size_bytes = _file_size_bytes(directory, effort)
        written: list[float] = []
        read: list[float] = []
        cold = not _is_memory(directory)
        # Page-aligned, as O_DIRECT requires. Not closed by hand: an error that passes here still holds views of it.
        block = mmap.mmap(-1, BLOCK_BYTES)
        block[:] = os.urandom(BLOCK_BYTES)  # incompressible
        while len(written) < LEAST_REPETITIONS or (
            len(written) < effort.repetitions and sum(written) + sum(read) < 2 * effort.seconds
        ):
            with tempfile.NamedTemporaryFile(dir=directory, prefix=".checkflow-probe-", buffering=0) as file:
                written += clock.laps(lambda: _write(file, block, size_bytes), 1)
                cold = _drop_from_memory(file.fileno(), size_bytes) and cold
                read += clock.laps(lambda: _read(file, block, size_bytes), 1)
    how = f"one file of {format_size(size_bytes)} in blocks of {BLOCK_BYTES // 2**20} MiB"
    notes = [] if cold else [f"what was read may have come from memory, not from a disk under {directory}"]
    return [
        rate("disk write", "bytes_per_second", size_bytes, spread_of(written), f"{how}, its fsync included"),
        rate("disk read", "bytes_per_second", size_bytes, spread_of(read), how + (", cold" if cold else "")),
    ], notes


@contextlib.contextmanager
def _reported(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise StorageError(f"cannot measure the disk in {directory}: {reason}; --directory chooses another") from error


def _file_size_bytes(directory: Path, effort: Effort) -> int:
    """Return the size asked for, within a quarter of what is free, in whole blocks."""
    status = os.statvfs(directory)
    free = status.f_bavail * status.f_frsize
    size = min(effort.disk_bytes, free // _FREE_SHARE) // BLOCK_BYTES * BLOCK_BYTES
    if size < LEAST_FILE_BYTES:
        needed = format_size(_FREE_SHARE * LEAST_FILE_BYTES)
        raise OSError(errno.ENOSPC, f"{format_size(free)} free, and {needed} are needed")
    return size


def _is_memory(directory: Path) -> bool:
    """Whether the directory's file system has no disk."""
    import psutil

    place = directory.resolve()
    mounts = [one for one in psutil.disk_partitions(all=True) if place.is_relative_to(one.mountpoint)]
    nearest = max(mounts, key=lambda one: len(one.mountpoint), default=None)
    return nearest is not None and nearest.fstype in ("tmpfs", "ramfs")


def _write(file: IO[bytes], block: mmap.mmap, size_bytes: int) -> None:
    for offset in range(0, size_bytes, BLOCK_BYTES):
        done = 0
        while done < BLOCK_BYTES:
            done += os.pwrite(file.fileno(), memoryview(block)[done:], offset + done)
    os.fsync(file.fileno())


def _read(file: IO[bytes], block: mmap.mmap, size_bytes: int) -> None:
    for offset in range(0, size_bytes, BLOCK_BYTES):
        done = 0
        while done < BLOCK_BYTES:
            count = os.preadv(file.fileno(), [memoryview(block)[done:]], offset + done)
            if not count:
                raise OSError(errno.EIO, "the file is shorter than what was written")
            done += count


def _drop_from_memory(fd: int, size_bytes: int) -> bool:
    """Drop the file from the page cache; return whether the next reads come from the disk."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, 0, size_bytes, os.POSIX_FADV_DONTNEED)
        if _gone(fd, size_bytes):
            os.posix_fadvise(fd, 0, size_bytes, os.POSIX_FADV_DONTNEED)  # the check may have started to read ahead
            return True
    return _around_memory(fd)


def _gone(fd: int, size_bytes: int) -> bool:
    """Whether the kernel would have to wait for the disk at each of some places; False if it cannot say."""
    if not hasattr(os, "RWF_NOWAIT"):
        return False
    byte = bytearray(1)
    for place in range(_PEEKS):
        try:
            os.preadv(fd, [byte], place * size_bytes // _PEEKS, os.RWF_NOWAIT)
        except BlockingIOError:
            continue
        except OSError:  # not supported by this file system
            return False
        return False
    return True


def _around_memory(fd: int) -> bool:
    """Read the file past the page cache from now on; return whether its file system can."""
    if not hasattr(os, "O_DIRECT"):
        return False
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)
    except OSError:
        return False
    return True
