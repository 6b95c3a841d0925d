"""Small files, read without trust in what stands at their path, or in them."""

from __future__ import annotations

import dataclasses
import errno
import functools
import os
import re
import stat
import types
import typing
from collections.abc import Callable, Sized
from typing import Any

MOST_MEMBERS = 64  # of an object that has fields of its own: the largest has some forty
MOST_TIMES = 40  # its own size, that reading a hostile file takes of memory; `make fuzz` holds every reader to it
# An element of JSON (a comma, a colon, a bracket) has some 70 bytes in memory. Real files have one in 5 bytes or more,
# for which the smallest have their way.
_LEAST_BYTES = 4
_FREE_ELEMENTS = 1 << 16


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


def open_regular(
    path: str | os.PathLike[str], flags: int = os.O_RDONLY, *, dir_fd: int | None = None, advice: str = ""
) -> tuple[int, int]:
    """Open a regular file that anyone may have put there; its descriptor and its size.

    Devices have no end, and the open of a FIFO would wait for ever: neither is opened.

    Args:
        flags: of the open; with ``O_NOFOLLOW`` a symbolic link is no regular file.
        advice: added to the message of an IrregularError.

    Raises:
        IrregularError: it is no regular file.
        OSError: it cannot be opened.
    """
    try:
        refuse_irregular(os.stat(path, dir_fd=dir_fd, follow_symlinks=not flags & os.O_NOFOLLOW).st_mode, advice)
        fd = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=dir_fd)
    except ValueError as error:  # a NUL in the path
        raise OSError(errno.EINVAL, str(error)) from None
    try:
        found = os.fstat(fd)  # what has that name by now
        refuse_irregular(found.st_mode, advice)
    except BaseException:
        os.close(fd)
        raise
    return fd, found.st_size


def read_regular(path: str | os.PathLike[str], most_bytes: int) -> bytes:
    """The beginning of a regular file, ``most_bytes`` of it at most; links are followed.

    Raises:
        IrregularError: it is no regular file.
        OSError: it cannot be read.
    """
    fd, size_bytes = open_regular(path)
    with open(fd, "rb") as file:
        return file.read(min(size_bytes, most_bytes))


def check_members(found: Sized) -> None:
    """For an object of JSON that has fields of its own, before pydantic reads it.

    It would keep every member that is unknown with its place and reason, and a hostile file may hold a million.

    Raises:
        ValueError: there are more members than any such object has.
    """
    if len(found) > MOST_MEMBERS:
        raise ValueError(f"an object of it has {len(found)} members")


def read_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """For ``json.loads``, as its ``object_pairs_hook``: :func:`check_members`, and each key once.

    Raises:
        ValueError: there are too many members, or a key occurs twice.
    """
    check_members(pairs)
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key occurs twice")
    return found


def check_density(data: bytes) -> None:
    """For JSON of any origin, before anything is made of it: millions of empty lists take many times their own bytes.

    Raises:
        ValueError: it has more elements than any real file of its size.
    """
    elements = sum(map(data.count, (b",", b":", b"[", b"{")))
    if elements > _FREE_ELEMENTS + len(data) // _LEAST_BYTES:
        raise ValueError(f"it has {elements} elements in {len(data)} bytes")


def check_fields(plain: Any, kind: type) -> None:
    """For an object of JSON that stands for a dataclass, before pydantic reads it.

    It would keep all that an object holds once for each field that the object lacks.

    Args:
        plain: the object, its own objects included.

    Raises:
        ValueError: a field that has no default is missing, here or in an object inside.
    """
    check = _check_of(kind)
    if check is not None and (missing := check(plain)) is not None:
        raise ValueError(f"{missing}: Field required")


_Check = Callable[[Any], str | None]  # gives the place of a field that is missing


@functools.cache
def _check_of(kind: Any) -> _Check | None:
    """None: a type without fields."""
    if not dataclasses.is_dataclass(kind):
        inside = [check for part in typing.get_args(kind) if (check := _check_of(part)) is not None]
        if not inside:
            return None
        (within,) = inside
        return (
            within if typing.get_origin(kind) in (typing.Union, types.UnionType) else functools.partial(_first, within)
        )
    hints = typing.get_type_hints(kind)
    none = dataclasses.MISSING
    needed = {one.name for one in dataclasses.fields(kind) if one.default is none and one.default_factory is none}
    checks = {name: check for name, hint in hints.items() if (check := _check_of(hint)) is not None}

    def missing(plain: Any) -> str | None:
        if not isinstance(plain, dict):
            return None
        if not needed <= plain.keys():
            return min(needed - plain.keys())
        for name, check in checks.items():
            if (place := check(plain.get(name))) is not None:
                return f"{name}.{place}"
        return None

    return missing


def _first(within: _Check, plain: Any) -> str | None:
    """The first that an item of a collection lacks."""
    items = plain.items() if isinstance(plain, dict) else enumerate(plain) if isinstance(plain, list) else ()
    return next((f"{name}.{place}" for name, one in items if (place := within(one)) is not None), None)
