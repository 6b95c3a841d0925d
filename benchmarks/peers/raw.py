"""What memory and disk give without any format.

At rest, that is a new file written and flushed, and a file read that is not in memory, by plain ways. Beside training,
:class:`Raw` only copies and writes bytes.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.peers.files import Files, Wait
from benchmarks.peers.job import Job
from benchmarks.store_speed import BLOCK_BYTES, drop
from checkflow.runtime.system.aligned_memory import address_of, scratch
from checkflow.runtime.transfer.host import move

PAGE_BYTES, LINE_BYTES = 4096, 64
RUN_BYTES = 2 * BLOCK_BYTES  # of one write or read of Raw
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


class Raw(Files):
    """Copies the state with one thread, and writes it with one: a plain way, without names or checksums."""

    def __init__(self, job: Job, every: int, directory: Path, **options: Any) -> None:
        if job.on_gpu:
            raise SystemExit("it copies from host memory alone")
        super().__init__(job, every, directory, **options)
        begins = [0, *itertools.accumulate(-(-tensor.nbytes // LINE_BYTES) * LINE_BYTES for tensor in job.tensors())]
        self._size_bytes = -(-begins.pop() // PAGE_BYTES) * PAGE_BYTES  # O_DIRECT wants whole pages
        self._memory = scratch(self._size_bytes, large_pages=True)
        place = address_of(self._memory)
        ctypes.memset(place, 0, self._size_bytes)
        #: Of each tensor: the address of its copy, its own, and its bytes.
        self._moves = [
            (place + begin, tensor.data_ptr(), tensor.nbytes)
            for begin, tensor in zip(begins, job.tensors(), strict=True)
        ]
        self._copies_end = threading.Event()

    def begin(self, path: Path) -> Wait:
        self._copies_end.clear()
        return functools.partial(self._save, path)

    def _save(self, path: Path) -> None:
        try:
            for place, address, size_bytes in self._moves:
                move(place, address, size_bytes)
        finally:
            self._copies_end.set()
        self.note_copied()
        self._each_run(path, os.O_WRONLY | os.O_CREAT, os.pwrite)

    def before_step(self) -> None:
        if self._pending is not None:
            self._copies_end.wait()

    def load(self, path: Path) -> None:
        self._each_run(path, os.O_RDONLY, lambda file, run, offset: os.preadv(file, [run], offset))
        for place, address, size_bytes in self._moves:
            move(address, place, size_bytes)

    def _each_run(self, path: Path, flags: int, work: Callable[[int, memoryview, int], int]) -> None:
        file = os.open(path, flags | os.O_DIRECT, 0o666)
        try:
            for offset in range(0, self._size_bytes, RUN_BYTES):
                run = self._memory[offset : offset + RUN_BYTES]
                if (done := work(file, run, offset)) != len(run):
                    raise OSError(f"the disk took or gave {done} B of {len(run)} at {offset}")
        finally:
            os.close(file)
