"""Large pages for a file in shared memory: a disk takes megabytes from them in one request.

Only a hint: if the kernel refuses, pages stay small. It does before Linux 6.1, where memory is fragmented, and where
/sys/kernel/mm/transparent_hugepage/shmem_enabled is "deny".
"""

from __future__ import annotations

import ctypes
import functools
import logging
import mmap
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

from checkflow.runtime.system.aligned_memory import MAP_NORESERVE, advise, map_address, map_at

logger = logging.getLogger("checkflow")

LARGE_BYTES = 2 << 20  # of one page, where small ones have 4 KiB
_PIECE_BYTES = 32 * LARGE_BYTES  # allocated by one call, which a signal has to wait for
_MOST_THREADS = 8  # that clear memory; enough for its bandwidth
_TRIES = 2  # a small page may just be on its way to a list of the kernel's
_MADV_COLLAPSE = 25


def allocate(file: int, size_bytes: int) -> None:
    """Allocate the beginning of a new file in large pages; the rest, and most of what the kernel refuses, stays a hole.

    Args:
        file: a descriptor of a file in shared memory that has this size.

    Raises:
        OSError: there is no room.
    """
    whole_bytes = size_bytes // LARGE_BYTES * LARGE_BYTES
    begins = range(0, whole_bytes, _PIECE_BYTES)
    if sys.platform != "linux" or not begins:
        return
    refused = threading.Event()
    piece = functools.partial(_allocate_piece, file, whole_bytes, refused)
    with ThreadPoolExecutor(min(len(begins), _MOST_THREADS, os.cpu_count() or 1)) as pool:
        for _ in pool.map(piece, begins):
            pass


def map_file(file: int, size_bytes: int) -> memoryview:
    """Map the beginning of a file, shared: if possible at a multiple of the large page, since large pages elsewhere are
    mapped as small ones.

    Args:
        file: a descriptor of a file of at least this size.

    Raises:
        OSError: it cannot be mapped.
    """
    if sys.platform != "linux":
        return memoryview(mmap.mmap(file, size_bytes))
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    try:
        room = mmap.mmap(-1, size_bytes + LARGE_BYTES, flags=flags)
    except OSError:  # a limit on addresses
        return memoryview(mmap.mmap(file, size_bytes))
    # It owns the addresses and frees them with the last view; the file takes its middle.
    begin = -map_address(room) % LARGE_BYTES
    if not map_at(map_address(room) + begin, size_bytes, flags=mmap.MAP_SHARED, file=file):
        raise OSError(ctypes.get_errno(), "the file cannot be mapped")
    return memoryview(room)[begin : begin + size_bytes]


def _allocate_piece(file: int, whole_bytes: int, refused: threading.Event, begin: int) -> None:
    """Allocate one piece, unless an earlier one was refused: in fragmented memory each try takes long."""
    if refused.is_set():
        return
    size_bytes = min(_PIECE_BYTES, whole_bytes - begin)
    for page in range(begin, begin + size_bytes, LARGE_BYTES):
        os.posix_fallocate(file, page, 1)  # the kernel joins what has a small page, and takes its NUMA node
    try:
        room = mmap.mmap(-1, _PIECE_BYTES + LARGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:  # a limit on addresses
        _note(refused, error.strerror)
        return
    # It joins them where they are mapped at a multiple of the large page. Python's mmap takes no address.
    with room:
        address = -(-map_address(room) // LARGE_BYTES) * LARGE_BYTES
        if not map_at(address, size_bytes, flags=mmap.MAP_SHARED, file=file, offset=begin):
            _note(refused, "the file cannot be mapped")
        elif not any(advise(address, size_bytes, _MADV_COLLAPSE) for _ in range(_TRIES)):
            _note(refused, os.strerror(ctypes.get_errno()))


def _note(refused: threading.Event, reason: str | None) -> None:
    refused.set()
    logger.debug("no large pages for staging memory: %s", reason)
