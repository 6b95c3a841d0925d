"""Small files, read without trust in what stands at their path, or in them."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Sized

MOST_MEMBERS = 64  # of an object that has fields of its own: the largest has some forty


def read_regular(path: str | os.PathLike[str], most_bytes: int) -> bytes:
    """The beginning of a regular file, ``most_bytes`` of it at most.

    Devices have no end, and the open of a FIFO would wait for ever: neither is read.

    Raises:
        OSError: it cannot be read, or is no regular file.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except ValueError as error:  # a NUL in the path
        raise OSError(errno.EINVAL, str(error)) from None
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "it is no regular file")
        with open(fd, "rb", closefd=False) as file:
            return file.read(min(found.st_size, most_bytes))
    finally:
        os.close(fd)


def check_members(found: Sized) -> None:
    """For an object of JSON that has fields of its own, before pydantic reads it.

    It would keep every member that is unknown with its place and reason, and a hostile file may hold a million.

    Raises:
        ValueError: there are more members than any such object has.
    """
    if len(found) > MOST_MEMBERS:
        raise ValueError(f"an object of it has {len(found)} members")
