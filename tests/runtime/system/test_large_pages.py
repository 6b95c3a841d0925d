"""Large pages for files in shared memory: whether their physical pages lie in a row, as root can see."""

from __future__ import annotations

import array
import mmap
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from checkflow.runtime.memory_tier.records import ROOT, RunLife
from checkflow.runtime.memory_tier.tier import MemoryTier
from checkflow.runtime.system import large_pages
from checkflow.runtime.system.aligned_memory import map_address
from checkflow.runtime.system.large_pages import LARGE_BYTES

PAGES = LARGE_BYTES // mmap.PAGESIZE  # small ones in a large one
SETTINGS = Path("/sys/kernel/mm/transparent_hugepage")
ROOM_BYTES = 512 * 2**20


def given_here() -> bool:
    """Whether this machine gives shared memory in large pages, and says so."""
    release = tuple(map(int, re.findall(r"\d+", os.uname().release)[:2]))
    if release < (6, 1) or os.geteuid() or not (SETTINGS / "hpage_pmd_size").exists():
        return False
    given_bytes = int((SETTINGS / "hpage_pmd_size").read_text())
    denied = "[deny]" in (SETTINGS / "shmem_enabled").read_text()
    return given_bytes == LARGE_BYTES and not denied and shutil.disk_usage(ROOT).free > ROOM_BYTES


pytestmark = pytest.mark.skipif(not given_here(), reason="no large pages here, or only root sees them")


@pytest.fixture
def file() -> Iterator[int]:
    path = ROOT / f"large-pages-{os.getpid()}"
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR)
    path.unlink()
    yield fd
    os.close(fd)


def mapped_large_bytes(memory: memoryview) -> int:
    """How much of this memory is mapped in large pages."""
    text = Path("/proc/self/smaps").read_text().partition(f"\n{map_address(memory):x}-")[2]
    found = re.search(r"ShmemPmdMapped: +(\d+) kB", text)
    assert found is not None
    return 1024 * int(found[1])


def large_bytes(memory: mmap.mmap | memoryview) -> int:
    """How much of this memory, all of which was touched, is in large pages."""
    frames = array.array("Q")
    with open("/proc/self/pagemap", "rb") as pagemap:
        pagemap.seek(map_address(memory) // mmap.PAGESIZE * frames.itemsize)
        frames.frombytes(pagemap.read(-(-len(memory) // mmap.PAGESIZE) * frames.itemsize))
    numbers = [frame & ((1 << 55) - 1) for frame in frames]
    firsts = range(0, len(numbers), PAGES)
    return LARGE_BYTES * sum(
        not numbers[first] % PAGES
        and numbers[first : first + PAGES] == list(range(numbers[first], numbers[first] + PAGES))
        for first in firsts
    )


@pytest.mark.parametrize("size_bytes", [0, 1, LARGE_BYTES - 1, LARGE_BYTES, LARGE_BYTES + 1, 33 * LARGE_BYTES + 4096])
def test_a_file_gets_as_many_large_pages_as_fit(file: int, size_bytes: int) -> None:
    os.ftruncate(file, size_bytes)
    large_pages.allocate(file, size_bytes)
    whole_bytes = size_bytes // LARGE_BYTES * LARGE_BYTES
    status = os.fstat(file)
    assert (status.st_size, 512 * status.st_blocks) == (size_bytes, whole_bytes)
    assert os.pread(file, size_bytes, 0) == bytes(size_bytes)
    if size_bytes:
        with mmap.mmap(file, size_bytes) as memory:
            memory[:] = b"x" * size_bytes
            assert large_bytes(memory) == whole_bytes


def test_buffers_that_outlive_the_process_have_large_pages(tmp_path: Path) -> None:
    size_bytes = 3 * LARGE_BYTES + 4096
    tier = MemoryTier(tmp_path, RunLife("run"))
    memories = tier.allocate(2, size_bytes, None)
    assert memories is not None
    for memory in memories:
        memory[:] = b"x" * size_bytes
        assert large_bytes(memory) == mapped_large_bytes(memory) == 3 * LARGE_BYTES
    tier.close()


def test_a_refusal_leaves_small_pages(file: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the first piece as of all later ones, which are not tried."""
    tried = []
    monkeypatch.setattr(large_pages, "advise", lambda *arguments: tried.append(arguments))
    monkeypatch.setattr(large_pages, "_MOST_THREADS", 1)
    size_bytes = 65 * LARGE_BYTES
    os.ftruncate(file, size_bytes)
    large_pages.allocate(file, size_bytes)
    assert len(tried) == 2
    os.posix_fallocate(file, 0, size_bytes)
    with mmap.mmap(file, size_bytes) as memory:
        memory[:] = b"x" * size_bytes
        assert large_bytes(memory) < size_bytes
