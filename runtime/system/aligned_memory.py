"""Page-aligned memory for direct I/O, and what keeps the garbage collector away meanwhile."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import mmap
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

MADV_WIPEONFORK = 18  # Linux; Python lacks the name
MAP_NORESERVE, _MAP_FIXED = 0x4000, 0x10  # likewise
_LEAST_COPY_BYTES = 1 << 20  # for less, releasing the GIL does not pay


def scratch(size_bytes: int, *, large_pages: bool = False) -> memoryview:
    """Allocate page-aligned memory, freed with the last view of it.

    A forked child finds zeros: were the pages shared, what a disk is just writing there could end up in the child.
    """
    memory = mmap.mmap(-1, max(1, size_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # a kernel before 4.14
            memory.madvise(MADV_WIPEONFORK)
        if large_pages:  # only if all of it is used
            with contextlib.suppress(OSError):  # a kernel without huge pages
                memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)[:size_bytes]


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Pause garbage collection while we make thousands of lasting objects: its passes take as long as a restore."""
    collecting = gc.isenabled()
    try:
        gc.disable()
        yield
    finally:
        if collecting:
            gc.enable()


def address_of(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data)


def map_address(memory: mmap.mmap | memoryview) -> int:
    """The address of mapped memory. Hold a view of the map for as long as the address is used."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def map_at(
    address: int,
    size_bytes: int,
    *,
    flags: int,
    protection: int = mmap.PROT_READ | mmap.PROT_WRITE,
    file: int = -1,
    offset: int = 0,
) -> bool:
    """Replace what is mapped at an address, on Linux; returns whether the system agrees."""
    found = _map(address, size_bytes, protection, flags | _MAP_FIXED, file, offset)
    return bool(found == address)


def advise(address: int, size_bytes: int, advice: int) -> bool:
    """As mmap.madvise, which keeps the GIL and raises; returns whether the system agrees, which only Linux does."""
    return _madvise is not None and not _madvise(address, size_bytes, advice)


def copy_bytes(target: memoryview, source: memoryview) -> None:
    """Copy as many bytes as both have; a large copy releases the GIL."""
    if len(source) < _LEAST_COPY_BYTES:
        target[:] = source
    else:
        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


_map: Any = None
_madvise: Any = None
if sys.platform == "linux":
    _libc = ctypes.CDLL(None, use_errno=True)
    _map, _madvise = _libc.mmap, _libc.madvise
    _madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    _map.restype = ctypes.c_void_p
    _map.argtypes = (
        ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_longlong,
    )  # fmt: skip
