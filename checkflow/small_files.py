"""Small files of a user's, read without trust in what stands at their path."""

from __future__ import annotations

import errno
import os
import stat


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
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "it is no regular file")
        with open(fd, "rb", closefd=False) as file:
            return file.read(most_bytes)
    finally:
        os.close(fd)
