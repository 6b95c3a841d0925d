"""Large pages for a file in shared memory: a disk takes megabytes from them in one request.

Only a hint: if the kernel refuses, pages stay small. It does before Linux 6.1, where memory is fragmented, and where
/sys/kernel/mm/transparent_hugepage/shmem_enabled is "deny".
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import sys

from checkflow.runtime.system.aligned_memory import map_address

logger = logging.getLogger("checkflow")

LARGE_BYTES = 2 << 20  # of one page, on x86-64 and with small pages of 4 KiB on arm64
_PIECE_BYTES = 32 * LARGE_BYTES  # allocated by one call, which a signal has to wait for
_MADV_COLLAPSE, _MAP_FIXED = 25, 0x10


def allocate(file: int, size_bytes: int) -> None:
    """Allocate the beginning of a new file in large pages; the rest, and what the kernel refuses, stays a hole.

    Args:
        file: a descriptor of a file in shared memory that has this size.

    Raises:
        OSError: there is no room.
    """
    whole_bytes = size_bytes // LARGE_BYTES * LARGE_BYTES
    if sys.platform != "linux" or not whole_bytes:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (
        ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_longlong,
    )  # fmt: skip
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    readable = mmap.PROT_READ | mmap.PROT_WRITE
    # The kernel joins small pages where they are mapped at a multiple of the large page. Python's mmap takes no
    # address, so pieces of the file are mapped over memory that has one.
    with mmap.mmap(-1, _PIECE_BYTES + LARGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as room:
        address = -(-map_address(room) // LARGE_BYTES) * LARGE_BYTES
        for begin in range(0, whole_bytes, _PIECE_BYTES):
            piece_bytes = min(_PIECE_BYTES, whole_bytes - begin)
            for page in range(begin, begin + piece_bytes, LARGE_BYTES):
                os.posix_fallocate(file, page, 1)  # one small page is enough, and little to copy; it has the NUMA node
            mapped = libc.mmap(address, piece_bytes, readable, mmap.MAP_SHARED | _MAP_FIXED, file, begin)
            if mapped != address or libc.madvise(address, piece_bytes, _MADV_COLLAPSE):
                logger.debug("no large pages for staging memory: %s", os.strerror(ctypes.get_errno()))
                return
