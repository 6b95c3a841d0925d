"""Memory of our own that files are read into and written from: aligned to pages, as reads and writes around the page
cache demand it. And what keeps Python's own memory from being looked through meanwhile."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import mmap
import sys
from collections.abc import Iterator

import numpy as np

MADV_WIPEONFORK = 18  # of Linux; Python has no name for it
_LEAST_COPY_BYTES = 1 << 20  # less is copied before another thread could make much use of the interpreter


def scratch(size_bytes: int, *, large_pages: bool = False) -> memoryview:
    """So much memory, from the begin of a page on; it is given back when nobody holds a view of it any more.

    Children that are forked meanwhile find zeros in it: a disk may be writing to it just then, and were its pages
    shared, what it writes could be the child's.
    """
    memory = mmap.mmap(-1, max(1, size_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # a kernel before 4.14
            memory.madvise(MADV_WIPEONFORK)
        if large_pages:  # where all of it is used
            with contextlib.suppress(OSError):  # a kernel without them
                memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)[:size_bytes]


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """For code of ours that makes thousands of objects, all of which stay.

    The collector of cyclic garbage would look at them, and at all that torch has made, more than once: that takes as
    long as a restore does.
    """
    collecting = gc.isenabled()
    try:
        gc.disable()
        yield
    finally:
        if collecting:
            gc.enable()


def address_of(view: memoryview) -> int:
    """Where in memory a view begins that is not empty."""
    return int(np.frombuffer(view, np.uint8).ctypes.data)


def map_address(memory: mmap.mmap) -> int:
    """Where mapped memory begins; the map stays for as long as this is kept from the collector by a view of it."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def copy_bytes(target: memoryview, source: memoryview) -> None:
    """Copy as many bytes as both have; other threads run meanwhile where it takes long."""
    if len(source) < _LEAST_COPY_BYTES:
        target[:] = source
    else:
        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))
