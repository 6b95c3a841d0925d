"""Readers at fault, so that what ``run`` looks for can be seen to be found: ``make fuzz BREAK=name``.

Each changes the manifest's reader, or what it says, in the process that reads.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

from checkflow.core.errors import CheckflowError
from tests.faults.fuzz.feeds import Feed

Feeds = dict[str, Feed]
_LARGE_BYTES = 100 * 2**20


def another_error(data: Any) -> str:
    raise KeyError("of the reader's own")


def two_lines(data: Any) -> str:
    raise CheckflowError("one\ntwo")


def memory(data: Any) -> str:
    """Takes much for a moment, and gives it back."""
    return "valid" if b"x" * _LARGE_BYTES else ""


def address_space(data: Any) -> str:
    """Takes more than there is, and touches none of it."""
    return "valid" if bytearray(2**40) else ""


def leak(data: Any, *, kept: list[bytes] = []) -> str:  # noqa: B006 - what is kept is kept between calls
    kept.append(b"x" * (_LARGE_BYTES // 10))
    return "valid"


def abort(data: Any) -> str:
    os.abort()


def leave(data: Any) -> str:
    os._exit(0)


def hang(data: Any) -> str:
    threading.Event().wait()
    return "valid"


def unverified(feeds: Feeds) -> None:
    """A checkpoint's blocks are handed out as they are on the disk."""
    from checkflow.runtime.format import manifest
    from checkflow.runtime.store import block_reader
    from checkflow.runtime.store import files as store_files
    from checkflow.runtime.system import fs

    def read_block(file: store_files.OpenFile, block: int, memory: memoryview, direct: int | None = None) -> memoryview:
        out = memory[: store_files.block_bytes(file, block)]
        fs.read_all(file.fd, out, block * manifest.BLOCK_BYTES)
        return out

    block_reader.read_block = read_block


def _manifest(feed: Feed) -> Callable[[Feeds], None]:
    def put(feeds: Feeds) -> None:
        feeds["manifest"] = feed

    return put


BREAKS: dict[str, Callable[[Feeds], None]] = {
    feed.__name__: _manifest(feed)
    for feed in (another_error, two_lines, memory, address_space, leak, abort, leave, hang)
} | {"unverified": unverified}
