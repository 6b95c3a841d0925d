"""What tests of reading share: a file of several blocks, a checkpoint of many tensors, interrupts as they are due."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from checkflow.runtime.format.layout import PAGE_BYTES, make_layout
from checkflow.runtime.format.manifest import BLOCK_BYTES, FileEntry
from checkflow.runtime.store.block_reader import THREADS
from checkflow.runtime.store.files import OpenFile
from checkflow.runtime.store.reader import Checkpoint
from tests.support.store_tools import fill, record

BLOCKS = THREADS + 3  # more than are in memory at once
SIZE_BYTES = (BLOCKS - 1) * BLOCK_BYTES + 5 * PAGE_BYTES + 77
CONTENT = np.random.default_rng(3).integers(0, 256, SIZE_BYTES, np.uint8).tobytes()
LAYOUT = make_layout([record(f"model/{i:04d}", (5_000 + 7 * i,)) for i in range(1000)])
STAGING, EXPECTED = fill(LAYOUT, 4)


@contextlib.contextmanager
def opened(path: Path, content: bytes = CONTENT) -> Iterator[OpenFile]:
    blocks = [xxhash.xxh3_64_hexdigest(content[i : i + BLOCK_BYTES]) for i in range(0, len(content), BLOCK_BYTES)]
    fd = os.open(path, os.O_RDONLY)
    try:
        yield OpenFile(path, fd, FileEntry(len(content), tuple(blocks)))
    finally:
        os.close(fd)


def targets(checkpoint: Checkpoint) -> dict[str, memoryview]:
    return {name: memoryview(bytearray(checkpoint.size_bytes(name))) for name in checkpoint.tensors}


def interrupt_before(
    name: str, times: int, monkeypatch: pytest.MonkeyPatch, kind: type[threading.Thread] = threading.Thread
) -> list[str]:
    """So many calls by the main thread are interrupted: a start when it is done, others before they do anything."""
    real: Callable[..., None] = getattr(kind, name)
    calls: list[str] = []

    def method(self: threading.Thread, *arguments: Any) -> None:
        here = threading.current_thread() is threading.main_thread()
        if here:
            calls.append(name)
        if name == "start":
            real(self)
        if here and len(calls) <= times:
            signal.raise_signal(signal.SIGINT)
        if name != "start":
            real(self, *arguments)

    monkeypatch.setattr(kind, name, method)
    return calls
