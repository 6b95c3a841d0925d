"""Large pages for files in shared memory."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from checkflow.runtime.memory_tier.records import RunLife
from checkflow.runtime.memory_tier.tier import MemoryTier
from checkflow.runtime.system import large_pages
from checkflow.runtime.system.large_pages import LARGE_BYTES

MEMORY = Path("/dev/shm")
SWITCH = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
RELEASE = tuple(map(int, re.findall(r"\d+", os.uname().release)[:2]))

pytestmark = pytest.mark.skipif(
    RELEASE < (6, 1) or not SWITCH.exists() or "[deny]" in SWITCH.read_text(), reason="this kernel has no large pages"
)


def in_large_pages() -> int:
    """How many bytes of shared memory are, on the whole machine."""
    found = re.search(r"ShmemHugePages: *(\d+) kB", Path("/proc/meminfo").read_text())
    assert found is not None
    return 1024 * int(found[1])


@pytest.fixture
def file() -> Iterator[int]:
    path = MEMORY / f"large-pages-{os.getpid()}"
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR)
    path.unlink()
    yield fd
    os.close(fd)


@pytest.mark.parametrize("size_bytes", [0, 1, LARGE_BYTES - 1, LARGE_BYTES, LARGE_BYTES + 1, 33 * LARGE_BYTES + 4096])
def test_all_whole_large_pages_of_a_file_are_allocated_as_such(file: int, size_bytes: int) -> None:
    os.ftruncate(file, size_bytes)
    before = in_large_pages()
    large_pages.allocate(file, size_bytes)
    whole_bytes = size_bytes // LARGE_BYTES * LARGE_BYTES
    assert in_large_pages() - before == whole_bytes
    status = os.fstat(file)
    assert status.st_size == size_bytes
    assert status.st_blocks * 512 == whole_bytes
    assert os.pread(file, size_bytes, 0) == bytes(size_bytes)


def test_buffers_that_outlive_the_process_have_large_pages(tmp_path: Path) -> None:
    before, size_bytes = in_large_pages(), 3 * LARGE_BYTES + 4096
    tier = MemoryTier(tmp_path, RunLife("run"))
    memories = tier.allocate(2, size_bytes, None)
    assert memories is not None
    assert in_large_pages() - before == 2 * 3 * LARGE_BYTES
    for memory in memories:
        memory[:] = b"x" * size_bytes
    tier.close()
    assert in_large_pages() == before
