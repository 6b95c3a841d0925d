"""What the disk gives without any format: a new file written and flushed, and a file read that is not in memory."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.store_speed import BLOCK_BYTES, drop

PAGE_BYTES = 4096
WAYS = ((0, 1), (os.O_DIRECT, 1), (os.O_DIRECT, 4))  # flags and threads; the fastest is the limit


def _blocks(size_bytes: int) -> Iterator[tuple[int, int]]:
    """Offset and length of each block; O_DIRECT wants whole pages."""
    whole = -(-size_bytes // PAGE_BYTES) * PAGE_BYTES
    return ((offset, min(BLOCK_BYTES, whole - offset)) for offset in range(0, whole, BLOCK_BYTES))


def _each(size_bytes: int, threads: int, work: Callable[[memoryview, int], int]) -> None:
    """Do ``work`` on every block, each thread from or into memory of its own."""
    blocks = list(_blocks(size_bytes))

    def run(first: int) -> None:
        with mmap.mmap(-1, BLOCK_BYTES) as memory, memoryview(memory) as view:
            view[:] = os.urandom(PAGE_BYTES) * (BLOCK_BYTES // PAGE_BYTES)
            for offset, length in blocks[first::threads]:
                with view[:length] as block:
                    if (done := work(block, offset)) != length:
                        raise OSError(f"the disk took or gave {done} B of {length} at {offset}")

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(run, range(threads)))


def _write(path: Path, size_bytes: int, flags: int, threads: int) -> float:
    begun = time.perf_counter()
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | flags, 0o666)
    try:
        _each(size_bytes, threads, lambda block, offset: os.pwrite(file, block, offset))
        os.fsync(file)
    finally:
        os.close(file)
    return time.perf_counter() - begun


def _read(path: Path, size_bytes: int, flags: int, threads: int) -> float:
    drop(path)
    begun = time.perf_counter()
    file = os.open(path, os.O_RDONLY | flags)
    try:
        _each(size_bytes, threads, lambda block, offset: os.preadv(file, [block], offset))
    finally:
        os.close(file)
    return time.perf_counter() - begun


def write_seconds(directory: Path, size_bytes: int) -> float:
    """The fastest durable write of as many bytes, now."""
    path = directory / "raw"
    found = []
    for way in WAYS:
        found.append(_write(path, size_bytes, *way))
        path.unlink()
    return min(found)


def read_seconds(directory: Path, size_bytes: int) -> float:
    """The fastest read of as many bytes, now."""
    path = directory / "raw"
    _write(path, size_bytes, *WAYS[0])
    try:
        return min(_read(path, size_bytes, *way) for way in WAYS)
    finally:
        path.unlink()
