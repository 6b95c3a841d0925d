"""Small files, read without trust in what stands at their path, or in them."""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Sized

MOST_MEMBERS = 64  # of an object that has fields of its own: the largest has some forty


_KINDS = {
    stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a directory", stat.S_IFLNK: "a symbolic link",
}  # fmt: skip


# What a terminal obeys, and what turns the direction of writing: all but tabs and line breaks; and half characters.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def visible(text: str) -> str:
    """Text that may have come from a file, for a terminal: control characters are written as ``\\x1b``."""
    return _CONTROL.sub(lambda found: repr(found[0])[1:-1], text)


class IrregularError(OSError):
    """What has a file's name is no regular file."""


def refuse_irregular(mode: int, advice: str = "") -> None:
    """Raises:
    IrregularError: a file of this mode (``st_mode``) is no regular one; its ``strerror`` says what it is.
    """
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "something else")
        raise IrregularError(errno.EINVAL, f"it is {kind}, no regular file{advice}")


def read_regular(path: str | os.PathLike[str], most_bytes: int) -> bytes:
    """The beginning of a regular file, ``most_bytes`` of it at most.

    Devices have no end, and the open of a FIFO would wait for ever: neither is opened.

    Raises:
        IrregularError: it is no regular file.
        OSError: it cannot be read.
    """
    try:
        refuse_irregular(os.stat(path).st_mode)
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except ValueError as error:  # a NUL in the path
        raise OSError(errno.EINVAL, str(error)) from None
    try:
        found = os.fstat(fd)  # what has that name by now
        refuse_irregular(found.st_mode)
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
