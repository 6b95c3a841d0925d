"""Writing a file: the same bytes and checksums on every way to the disk, and no error that is not told."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from checkflow.runtime.format.layout import PAGE_BYTES
from checkflow.runtime.format.manifest import BLOCK_BYTES, FileEntry
from checkflow.runtime.store import file_writer
from checkflow.runtime.store.file_writer import write_file
from checkflow.runtime.system import aligned_memory, fs
from checkflow.runtime.system.aligned_memory import scratch
from tests.support.faults import all_direct
from tests.support.pairing import pairs
from tests.support.waiting import PATIENCE_SECONDS

SEED = np.random.default_rng(5)
RANDOM = SEED.integers(0, 256, 3 * BLOCK_BYTES, np.uint8).tobytes()


@pytest.fixture(autouse=True)
def no_thread_stays() -> Iterator[None]:
    yield
    assert not [one.name for one in threading.enumerate() if one.name == "checkflow-checksums"]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path, os.O_RDONLY)
    yield fd
    os.close(fd)


@pytest.fixture
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks and runs of a few pages."""
    monkeypatch.setattr(file_writer, "BLOCK_BYTES", 4 * PAGE_BYTES)
    monkeypatch.setattr(file_writer, "RUN_BYTES", 8 * PAGE_BYTES)
    monkeypatch.setattr(file_writer, "_GATHER_BYTES", 4 * PAGE_BYTES)
    monkeypatch.setattr(file_writer, "THREAD_BYTES", 1)


def aligned(data: bytes, shift: int = 0) -> memoryview:
    """A copy of it, so many bytes behind the begin of a page."""
    view = scratch(shift + len(data))[shift:]
    view[:] = data
    return view


def assert_written(tmp_path: Path, entry: FileEntry, data: bytes, block_bytes: int = BLOCK_BYTES) -> None:
    assert (tmp_path / "x").read_bytes() == data
    blocks = [xxhash.xxh3_64_hexdigest(data[i : i + block_bytes]) for i in range(0, len(data), block_bytes)]
    assert entry == FileEntry(len(data), tuple(blocks))


def write_anew(folder: int, pieces: list[memoryview]) -> FileEntry:
    if fs.exists("x", dir_fd=folder):
        fs.unlink("x", dir_fd=folder)
    return write_file(folder, "x", iter(pieces))


# ------------------------------------------------------------------------------------------------------- every length


BORDERS = [pages * PAGE_BYTES + odd for pages in (0, 1, 2, 4, 8, 9, 17) for odd in (-1, 0, 1, 7)]
LENGTHS = st.sampled_from([length for length in BORDERS if length > 0]) | st.integers(0, 20 * PAGE_BYTES)
PIECES = st.lists(st.tuples(LENGTHS, st.sampled_from([0, 0, 1, 512, PAGE_BYTES - 1])), max_size=6)


@pytest.mark.parametrize("disk", ["strict", "real", "none"])
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)  # the files are written anew
@given(pieces=PIECES, least=st.sampled_from([1, PAGE_BYTES, 5 * PAGE_BYTES]), continued=st.booleans())
def test_pieces_of_any_length_anywhere_in_memory(
    tmp_path: Path, folder: int, small_units: None, disk: str, pieces: list[tuple[int, int]], least: int,
    continued: bool,
) -> None:  # fmt: skip
    """Each begins ``shift`` bytes behind a page; or all lie as in a staging buffer, each where the last one ended."""
    views, done = [], 0
    for length, shift in pieces:
        views.append(aligned(RANDOM[done : done + length], done % PAGE_BYTES if continued else shift))
        done += length
    with all_direct() if disk == "strict" else contextlib.nullcontext(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(fs, "LEAST_DIRECT_BYTES", least)
        if disk == "none":
            patch.setattr(fs, "set_direct", refuse)
        entry = write_anew(folder, views)
    assert_written(tmp_path, entry, RANDOM[:done], 4 * PAGE_BYTES)


def refuse(*_: object) -> int:
    raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))


@pytest.mark.parametrize("odd", [-PAGE_BYTES, -1, 0, 1, PAGE_BYTES, 12345])
@pytest.mark.parametrize("blocks", [1, 2])
def test_files_of_whole_blocks_and_a_little_more_or_less(tmp_path: Path, folder: int, blocks: int, odd: int) -> None:
    data = RANDOM[: blocks * BLOCK_BYTES + odd]
    header, rest = data[:PAGE_BYTES], aligned(data[PAGE_BYTES:])
    assert_written(tmp_path, write_file(folder, "x", iter([memoryview(header), rest])), data)


def test_pieces_may_be_made_in_one_place(tmp_path: Path, folder: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a piece showed may change when the next one is asked for: checksums are of what was written.

    Each checksum is made as late as it can be: when it is waited for, or else when the next piece is there.
    """
    view = scratch(file_writer.THREAD_BYTES)
    asked = threading.Semaphore(0)
    real, real_wait = file_writer.Checksums._update, file_writer.Checksums.wait

    def update(self: file_writer.Checksums, data: memoryview) -> None:
        assert asked.acquire(timeout=PATIENCE_SECONDS)
        real(self, data)

    def wait(self: file_writer.Checksums) -> None:
        if self._outstanding:
            asked.release(self._outstanding)
        real_wait(self)

    def pieces() -> Iterator[memoryview]:
        for number in range(4):
            view[:] = bytes([number]) * len(view)
            if number:
                asked.release()
            yield view
        yield memoryview(b"end")

    monkeypatch.setattr(file_writer.Checksums, "_update", update)
    monkeypatch.setattr(file_writer.Checksums, "wait", wait)
    entry = write_file(folder, "x", pieces())
    assert_written(tmp_path, entry, b"".join(bytes([n]) * len(view) for n in range(4)) + b"end")


@pytest.mark.parametrize("direct", [True, False])
def test_what_was_written_is_held_by_nothing(folder: int, monkeypatch: pytest.MonkeyPatch, direct: bool) -> None:
    """Not even by the thread for checksums, which gets nothing of the pieces that are gathered next."""
    if not direct:
        monkeypatch.setattr(fs, "set_direct", refuse)
    large = np.frombuffer(aligned(RANDOM[: file_writer.THREAD_BYTES]), np.uint8)
    gone = weakref.ref(large)

    def pieces() -> Iterator[memoryview]:
        nonlocal large
        yield memoryview(large)
        del large
        yield memoryview(b"small")
        assert gone() is None
        yield memoryview(b"end")

    write_file(folder, "x", pieces())
    assert gone() is None


@pytest.mark.parametrize(
    ("sizes", "threads"),
    [
        ([file_writer.THREAD_BYTES], 1),
        ([file_writer.THREAD_BYTES - 1], 0),
        ([file_writer.THREAD_BYTES - 1, 1], 0),  # what is left is small
        ([fs.LEAST_DIRECT_BYTES] * (file_writer.THREAD_BYTES // fs.LEAST_DIRECT_BYTES), 1),
        ([fs.LEAST_DIRECT_BYTES] * (file_writer.THREAD_BYTES // fs.LEAST_DIRECT_BYTES - 1), 0),
        ([fs.LEAST_DIRECT_BYTES - 1] * 20, 0),
    ],
)
def test_a_file_is_large_before_it_gets_a_thread(
    monkeypatch: pytest.MonkeyPatch, sizes: list[int], threads: int
) -> None:
    begun = []
    start = file_writer.Checksums._start
    monkeypatch.setattr(file_writer.Checksums, "_start", lambda self: (begun.append(1), start(self)))
    checksums, done = file_writer.Checksums(), 0
    for size in sizes:
        checksums.add(memoryview(RANDOM)[done : done + size])
        done += size
    found = checksums.finish()
    checksums.close()
    assert len(begun) == threads
    assert found == tuple(
        xxhash.xxh3_64_hexdigest(RANDOM[begin : min(begin + BLOCK_BYTES, done)])
        for begin in range(0, done, BLOCK_BYTES)
    )


# ---------------------------------------------------------------------------------------- around the page cache, or not


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, int]]:
    """Of each write whether it went around the page cache, and its size."""
    found: list[tuple[bool, int]] = []
    real = fs.pwrite

    def pwrite(fd: int, data: memoryview, offset: int) -> int:
        found.append((bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT), len(data)))
        return real(fd, data, offset)

    monkeypatch.setattr(fs, "pwrite", pwrite)
    return found


def can_direct(folder: int) -> bool:
    fd = os.open("probe", os.O_WRONLY | os.O_CREAT, dir_fd=folder)
    try:
        fs.set_direct(fd, True)
        os.pwrite(fd, scratch(PAGE_BYTES), 0)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def test_large_files_go_around_the_page_cache(tmp_path: Path, folder: int, seen: list[tuple[bool, int]]) -> None:
    if not can_direct(folder):
        pytest.skip("this file system has no O_DIRECT")
    data = RANDOM[: 2 * BLOCK_BYTES + 100]
    entry = write_file(folder, "x", iter([memoryview(data[:PAGE_BYTES]), aligned(data[PAGE_BYTES:])]))
    assert seen == [(True, PAGE_BYTES), (True, 2 * BLOCK_BYTES - PAGE_BYTES), (False, 100)]
    assert_written(tmp_path, entry, data)
    assert (tmp_path / "x").stat().st_blocks * 512 >= len(data)


def test_small_files_go_through_it_in_one_write(folder: int, seen: list[tuple[bool, int]]) -> None:
    write_file(folder, "x", iter([memoryview(RANDOM)[:5000], memoryview(RANDOM)[:70000]]))
    assert seen == [(False, 75000)]


def test_memory_that_is_not_aligned_is_gathered(folder: int, seen: list[tuple[bool, int]]) -> None:
    if not can_direct(folder):
        pytest.skip("this file system has no O_DIRECT")
    write_file(folder, "x", iter([aligned(RANDOM, 1)]))
    assert seen == 3 * [(True, BLOCK_BYTES)]


@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_file_system_that_refuses_late_is_written_through_the_cache(
    tmp_path: Path, folder: int, at: int, small_units: None
) -> None:
    """At the open, at the first write, and at a later one."""
    with all_direct() as sizes, pytest.MonkeyPatch.context() as patch:
        real = fs.pwrite

        def pwrite(fd: int, data: memoryview, offset: int) -> int:
            before = len(sizes)
            count = real(fd, data, offset)
            if len(sizes) > before and len(sizes) >= at:
                refuse()
            return count

        patch.setattr(fs, "pwrite", pwrite)
        if not at:
            patch.setattr(fs, "set_direct", refuse)
        data = RANDOM[: 20 * PAGE_BYTES + 3]
        entry = write_file(folder, "x", iter([aligned(data)]))
    assert len(sizes) == at
    assert_written(tmp_path, entry, data, 4 * PAGE_BYTES)


def test_a_file_system_in_memory(tmp_path: Path) -> None:
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("there is no /dev/shm")
    shm = os.open("/dev/shm", os.O_RDONLY)
    name = f"checkflow-test-{os.getpid()}"
    try:
        write_file(shm, name, iter([aligned(RANDOM)]))
        assert Path("/dev/shm", name).read_bytes() == RANDOM
    finally:
        os.unlink(name, dir_fd=shm)
        os.close(shm)


@pytest.mark.parametrize(
    "cut", [lambda size: 1, lambda size: size // 3, lambda size: PAGE_BYTES, lambda size: size - 1]
)
@pytest.mark.parametrize("direct", [True, False])
def test_short_writes_go_on(tmp_path: Path, folder: int, cut: Callable[[int], int], direct: bool) -> None:
    data = RANDOM[: 4 * PAGE_BYTES + 5]
    with all_direct(), pytest.MonkeyPatch.context() as patch:
        if not direct:
            patch.setattr(fs, "set_direct", refuse)
        real = fs.pwrite

        def pwrite(fd: int, view: memoryview, offset: int) -> int:
            count = max(1, min(len(view), cut(len(view))))
            if count < len(view) and not len(view) % PAGE_BYTES:  # it was asked for whole pages, and stopped within one
                return os.pwrite(fd, view[:count], offset)
            return real(fd, view[:count], offset)

        patch.setattr(fs, "pwrite", pwrite)
        entry = write_file(folder, "x", iter([aligned(data)]))
    assert_written(tmp_path, entry, data)


def test_a_direct_write_without_progress_is_an_error(folder: int) -> None:
    with all_direct(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(fs, "pwrite", lambda fd, data, offset: 0)
        with pytest.raises(OSError, match="no progress"):
            write_file(folder, "x", iter([aligned(RANDOM)]))


# ------------------------------------------------------------------------------------------------------------- errors


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


class Odd(BaseException):
    """Such as a signal's handler raises, or the end of the process."""


def raising(error: BaseException, at: int, real: Callable[..., Any]) -> Callable[..., Any]:
    """A function that raises at its ``at``-th call."""
    calls = iter(range(1, 1000))

    def call(*given: Any) -> Any:
        if next(calls) == at:
            raise error
        return real(*given)

    return call


@pytest.mark.parametrize(
    *pairs(
        where=["pwrite", "fsync", "set_direct", "hash", "pieces"], at=[1, 2, 3],
        error=[OSError(errno.ENOSPC, "full"), KeyboardInterrupt(), Odd()],
    )
)  # fmt: skip
def test_an_error_of_either_thread_is_raised(
    folder: int, monkeypatch: pytest.MonkeyPatch, where: str, at: int, error: BaseException
) -> None:
    """And no thread, no descriptor stays. Each is met: a file of three runs and a tail has that many calls."""
    met = min(at, {"fsync": 1, "set_direct": 2 if can_direct(folder) else 1}.get(where, 3))
    before = descriptors()
    monkeypatch.setattr(file_writer, "RUN_BYTES", BLOCK_BYTES)
    if where == "hash":
        monkeypatch.setattr(file_writer.Checksums, "_update", raising(error, met, file_writer.Checksums._update))
    elif where != "pieces":
        monkeypatch.setattr(fs, where, raising(error, met, getattr(fs, where)))

    def pieces() -> Iterator[memoryview]:
        yield aligned(RANDOM)
        if where == "pieces":
            raise error
        yield memoryview(b"tail")

    with pytest.raises(type(error)) as caught:
        write_file(folder, "x", pieces())
    assert caught.value is error
    assert descriptors() == before


def test_without_threads_it_is_written_all_the_same(
    tmp_path: Path, folder: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    assert_written(tmp_path, write_file(folder, "x", iter([aligned(RANDOM)])), RANDOM)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_child_forked_while_a_file_is_written_can_write(
    tmp_path: Path, folder: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no thread for checksums, and starts one of its own."""
    real = fs.pwrite
    children: list[int] = []

    def pwrite(fd: int, data: memoryview, offset: int) -> int:
        if not children:
            children.append(0)
            child = os.fork()
            if not child:
                try:
                    entry = write_file(folder, "child", iter([aligned(RANDOM)]))
                    os._exit(0 if entry.size_bytes == len(RANDOM) else 1)
                finally:
                    os._exit(2)
            children.append(child)
        return real(fd, data, offset)

    monkeypatch.setattr(fs, "pwrite", pwrite)
    entry = write_file(folder, "x", iter([aligned(RANDOM)]))
    assert os.waitpid(children[1], 0)[1] == 0
    assert_written(tmp_path, entry, RANDOM)
    assert (tmp_path / "child").read_bytes() == RANDOM


def test_memory_of_our_own_begins_at_a_page() -> None:
    for size in (1, 5, PAGE_BYTES, 3 * PAGE_BYTES + 1):
        view = scratch(size)
        assert (len(view), aligned_memory.address_of(view) % PAGE_BYTES) == (size, 0)
    assert len(scratch(0)) == 0
