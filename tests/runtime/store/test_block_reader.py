"""Reading blocks with several threads: what is damaged is never used, and every error is told once all have ended."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gc
import os
import queue
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from checkflow.core.errors import CorruptCheckpointError, StorageError
from checkflow.runtime.format.layout import PAGE_BYTES
from checkflow.runtime.format.manifest import BLOCK_BYTES
from checkflow.runtime.store.block_reader import THREADS, Ahead, Reader, read_blocks, read_one
from checkflow.runtime.store.files import OpenFile
from checkflow.runtime.store.reader import Checkpoint, open_checkpoint
from checkflow.runtime.store.store import Store
from checkflow.runtime.system import fs
from checkflow.runtime.system.aligned_memory import no_collection
from tests.support.faults import all_direct
from tests.support.reading_tools import (
    BLOCKS,
    CONTENT,
    EXPECTED,
    LAYOUT,
    SIZE_BYTES,
    STAGING,
    interrupt_before,
    opened,
    targets,
)
from tests.support.store_tools import read_all
from tests.support.waiting import blocked, wait_for


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    gc.collect()  # what earlier tests left
    before = len(os.listdir("/proc/self/fd"))
    yield
    assert not [one.name for one in threading.enumerate() if one.name == "checkflow-reader"]
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("reading") / "x"
    path.write_bytes(CONTENT)
    return path


def read(file: OpenFile) -> bytes:
    """All of a file; each block is used once."""
    out = bytearray(file.entry.size_bytes)
    used: list[int] = []

    def use(number: int, data: memoryview) -> None:
        used.append(number)
        out[number * BLOCK_BYTES : number * BLOCK_BYTES + len(data)] = data

    read_blocks([(file, block) for block in range(len(file.entry.blocks))], use)
    assert sorted(used) == list(range(len(file.entry.blocks)))
    return bytes(out)


def refuse(*_: object) -> int:
    raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))


# ----------------------------------------------------------------------------------------------------- all that is good


def test_large_files_are_read_around_the_page_cache(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    real = fs.preadv

    def preadv(fd: int, buffers: Any, offset: int) -> int:
        seen.append(bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT))
        return real(fd, buffers, offset)

    monkeypatch.setattr(fs, "preadv", preadv)
    with opened(written) as file:
        try:
            os.close(fs.open_direct(file.fd))
        except OSError:
            pytest.skip("this file system has no O_DIRECT")
        assert read(file) == CONTENT
        assert bytes(read_one(file, BLOCKS - 1)) == CONTENT[(BLOCKS - 1) * BLOCK_BYTES :]
    assert len(seen) >= BLOCKS + 1
    assert all(seen)


def test_small_files_are_read_through_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x").write_bytes(CONTENT[:5000])
    monkeypatch.setattr(fs, "open_direct", None)
    with opened(tmp_path / "x", CONTENT[:5000]) as file:
        assert read(file) == CONTENT[:5000]


@pytest.mark.parametrize("size_bytes", [1, PAGE_BYTES - 1, PAGE_BYTES, PAGE_BYTES + 1, BLOCK_BYTES, BLOCK_BYTES + 1])
def test_files_of_every_length_around_the_page_cache(tmp_path: Path, size_bytes: int) -> None:
    (tmp_path / "x").write_bytes(CONTENT[:size_bytes])
    with all_direct() as sizes, opened(tmp_path / "x", CONTENT[:size_bytes]) as file:
        assert read(file) == CONTENT[:size_bytes]
    assert sizes
    assert sum(sizes) == -(-size_bytes // PAGE_BYTES) * PAGE_BYTES


@pytest.mark.parametrize("count", [1, 1000, PAGE_BYTES, 3 * PAGE_BYTES, 3 * PAGE_BYTES + 1])
def test_short_reads_go_on(written: Path, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """The first read of each block gives so many bytes."""
    seen: set[int] = set()
    real = fs.preadv

    def preadv(fd: int, buffers: Any, offset: int) -> int:
        if offset % BLOCK_BYTES or offset in seen:
            return real(fd, buffers, offset)
        seen.add(offset)
        return os.preadv(through_cache, [buffers[0][:count]], offset)

    with opened(written) as file:
        through_cache = file.fd
        monkeypatch.setattr(fs, "preadv", preadv)
        assert read(file) == CONTENT


@pytest.mark.parametrize("late", [False, True])
def test_a_file_system_that_refuses_is_read_through_the_cache(
    written: Path, monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    real, refused = fs.preadv, []

    def preadv(fd: int, buffers: Any, offset: int) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            refused.append(offset)
            refuse()
        return real(fd, buffers, offset)

    monkeypatch.setattr(fs, "preadv", preadv)
    if not late:
        monkeypatch.setattr(fs, "open_direct", refuse)
    with opened(written) as file:
        assert read(file) == CONTENT
    assert late or not refused


def test_a_file_system_in_memory() -> None:
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("there is no /dev/shm")
    path = Path(f"/dev/shm/checkflow-test-{os.getpid()}")
    try:
        path.write_bytes(CONTENT)
        with opened(path) as file:
            assert read(file) == CONTENT
    finally:
        path.unlink()


def test_without_threads_it_is_read_all_the_same(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    with opened(written) as file:
        assert read(file) == CONTENT


def test_so_many_threads_and_no_more_have_a_block_at_once(written: Path) -> None:
    """All of them do: each waits in its first block until every other is in one."""
    meeting = threading.Barrier(THREADS)
    places: set[int] = set()

    def use(number: int, data: memoryview) -> None:
        places.add(threading.get_ident())
        if number < THREADS:
            meeting.wait(120)

    with opened(written) as file:
        read_blocks([(file, block) for block in range(BLOCKS)], use)
    assert len(places) == THREADS


# --------------------------------------------------------------------------------------------------------------- damage


@pytest.mark.parametrize("block", range(BLOCKS))
@pytest.mark.parametrize("byte", [0, -1])
def test_damage_in_any_block_is_told_and_not_used(tmp_path: Path, block: int, byte: int) -> None:
    changed = bytearray(CONTENT)
    end = min(len(changed), (block + 1) * BLOCK_BYTES)
    changed[block * BLOCK_BYTES if byte == 0 else end - 1] ^= 16
    (tmp_path / "x").write_bytes(changed)
    used: list[int] = []
    expected = pytest.raises(CorruptCheckpointError, match=f"bytes {block * BLOCK_BYTES} to {end} do not match")
    with opened(tmp_path / "x") as file, expected:
        read_blocks([(file, one) for one in range(BLOCKS)], lambda number, _: used.append(number))
    assert block not in used


def test_of_several_damaged_blocks_the_first_is_told(tmp_path: Path) -> None:
    changed = bytearray(CONTENT)
    for block in (1, 2, 4):
        changed[block * BLOCK_BYTES + 9] ^= 1
    (tmp_path / "x").write_bytes(changed)
    for _ in range(5):
        with opened(tmp_path / "x") as file, pytest.raises(CorruptCheckpointError, match=f"bytes {BLOCK_BYTES} to"):
            read(file)


@pytest.mark.parametrize("left", [0, 1, 3 * PAGE_BYTES, BLOCK_BYTES, 4 * BLOCK_BYTES + 5, SIZE_BYTES - 1])
def test_a_file_that_shrinks_while_it_is_open(tmp_path: Path, left: int) -> None:
    (tmp_path / "x").write_bytes(CONTENT)
    with opened(tmp_path / "x") as file:
        os.truncate(tmp_path / "x", left)
        with pytest.raises(CorruptCheckpointError, match=f"truncated at byte {left}$"):
            read(file)


@pytest.mark.parametrize("block", [0, 3, BLOCKS - 1])
def test_a_read_error_is_no_damage(written: Path, monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    real = fs.preadv

    def preadv(fd: int, buffers: Any, offset: int) -> int:
        if offset == block * BLOCK_BYTES:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(fd, buffers, offset)

    monkeypatch.setattr(fs, "preadv", preadv)
    with opened(written) as file, pytest.raises(StorageError, match="Input/output error") as caught:
        read(file)
    assert not isinstance(caught.value, CorruptCheckpointError)


@pytest.mark.parametrize("error", [ValueError("odd"), KeyboardInterrupt()], ids=repr)
def test_what_the_user_of_a_block_raises_is_raised(written: Path, error: BaseException) -> None:
    """In any thread; all have ended by then."""
    meeting = threading.Barrier(THREADS)

    def use(number: int, data: memoryview) -> None:
        meeting.wait(120)
        if number == THREADS - 1:
            raise error

    with opened(written) as file, pytest.raises(type(error)) as caught:
        read_blocks([(file, block) for block in range(THREADS)], use)
    assert caught.value is error


def test_an_interrupt_while_threads_are_awaited_waits_for_them_all_the_same(
    written: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would go on writing into memory, and reading files, that are others' by then."""
    meeting, go_on = threading.Barrier(THREADS), threading.Event()
    real, used = Reader.wait, []

    def wait(self: Reader) -> None:
        if not go_on.is_set():
            go_on.set()
            signal.raise_signal(signal.SIGINT)
        real(self)

    def use(number: int, data: memoryview) -> None:
        meeting.wait(120)
        if threading.current_thread() is not threading.main_thread():
            go_on.wait(120)
        used.append(number)

    monkeypatch.setattr(Reader, "wait", wait)
    with opened(written) as file, pytest.raises(KeyboardInterrupt):
        read_blocks([(file, block) for block in range(THREADS)], use)
    assert sorted(used) == [*range(THREADS)]
    assert not [one.name for one in threading.enumerate() if one.name == "checkflow-reader"]


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("ahead", [False, True])
def test_signals_that_arrive_while_threads_are_awaited_are_raised_when_all_have_ended(
    written: Path, monkeypatch: pytest.MonkeyPatch, ahead: bool, times: int
) -> None:
    """Real ones, while the main thread is held in the wait: ``Thread.join`` would call a running thread ended."""
    meeting, signals = threading.Barrier(2), queue.SimpleQueue()
    used, arrived = [], []
    signals.put(times)

    def handler(*_: object) -> None:
        arrived.append(len(arrived))
        raise KeyboardInterrupt

    real, waits = Reader.wait, threading.Event()

    def wait(self: Reader) -> None:
        if threading.current_thread() is threading.main_thread():
            waits.set()
        real(self)

    def use(number: int, data: memoryview) -> None:
        meeting.wait(120)
        told = 0
        if threading.current_thread() is not threading.main_thread():
            with contextlib.suppress(queue.Empty):
                told = signals.get_nowait()
        if told:
            assert waits.wait(120)
            for sent in range(told):
                wait_for(blocked(threading.main_thread()))  # held in the wait, and again
                os.kill(os.getpid(), signal.SIGINT)
                wait_for(lambda sent=sent: len(arrived) > sent)
            wait_for(blocked(threading.main_thread()))  # an error that does not wait would be out
        used.append(number)

    monkeypatch.setattr(Reader, "wait", wait)
    before = signal.signal(signal.SIGINT, handler)
    try:
        with opened(written) as file, pytest.raises(KeyboardInterrupt):
            blocks = [(file, 0), (file, 1)]
            if ahead:
                reader = Ahead(blocks)
                reader.begin()
                reader.finish(use)
            else:
                read_blocks(blocks, use)
        assert sorted(used) == [0, 1]
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(arrived) == times


def test_a_handlers_error_in_a_threads_start_is_raised_and_the_thread_ends(
    written: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not taken for a process that has no threads left. PyTorch's handler raises this type."""

    def handler(*_: object) -> None:
        raise RuntimeError("a worker was killed")

    before = signal.signal(signal.SIGINT, handler)
    try:
        interrupt_before("start", 1, monkeypatch)
        with opened(written) as file, pytest.raises(RuntimeError, match="a worker was killed"):
            read(file)
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_forked_child_does_not_keep_what_is_read_around_the_page_cache(written: Path) -> None:
    with opened(written) as file:
        try:
            direct = fs.open_direct(file.fd)
        except OSError:
            pytest.skip("this file system has no O_DIRECT")
        if (child := os.fork()) == 0:
            try:
                os.fstat(direct)
            except OSError:
                os._exit(0)
            os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
        fs.close(direct)


def test_an_interrupt_is_told_before_damage(written: Path) -> None:
    meeting = threading.Barrier(2)

    def use(number: int, data: memoryview) -> None:
        meeting.wait(120)
        raise ValueError if number == 0 else KeyboardInterrupt

    with opened(written) as file, pytest.raises(KeyboardInterrupt):
        read_blocks([(file, 0), (file, 1)], use)


# ----------------------------------------------------------------------------------------------- tensors of checkpoints


@pytest.fixture
def checkpoint(tmp_path: Path) -> Iterator[Checkpoint]:
    with Store(tmp_path / "checkpoints", run_id="run") as store:
        path = store.commit(1, LAYOUT, STAGING, b"", {})
    with open_checkpoint(path) as one:
        yield one


def test_many_tensors_are_read_at_once_and_each_block_once(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    begins: list[int] = []
    real: Callable[..., int] = fs.preadv

    def preadv(fd: int, buffers: Any, offset: int) -> int:
        begins.append(offset)
        return real(fd, buffers, offset)

    monkeypatch.setattr(fs, "preadv", preadv)
    found = targets(checkpoint)
    checkpoint.read_many_into(found.items())
    assert {name: bytes(data) for name, data in found.items()} == EXPECTED
    assert len(begins) == len(set(begins))
    # One tensor may be wanted in two places, and the order is anyone's.
    again = [(name, memoryview(bytearray(len(EXPECTED[name])))) for name in ("model/0999", "model/0001", "model/0999")]
    checkpoint.read_many_into(again)
    assert [bytes(data) for _, data in again] == [EXPECTED[name] for name, _ in again]
    checkpoint.read_many_into([])
    assert read_all(checkpoint) == EXPECTED


def test_a_buffer_of_another_size_is_refused(checkpoint: Checkpoint) -> None:
    with pytest.raises(ValueError, match="bytes, the buffer 3"):
        checkpoint.read_many_into([("model/0000", memoryview(bytearray(3)))])
    with pytest.raises(KeyError):
        checkpoint.read_many_into([("model/none", memoryview(bytearray(3)))])


def test_of_many_tensors_none_gets_anything_of_a_damaged_block(checkpoint: Checkpoint) -> None:
    (file,) = checkpoint.path.glob("*.safetensors")
    blocks = -(-file.stat().st_size // BLOCK_BYTES)
    assert blocks >= 3
    for block in range(1, blocks):  # the first was read when it was opened
        with file.open("r+b", buffering=0) as raw:
            before = os.pread(raw.fileno(), 1, block * BLOCK_BYTES + 500)
            os.pwrite(raw.fileno(), bytes([before[0] ^ 2]), block * BLOCK_BYTES + 500)
            found = targets(checkpoint)
            with pytest.raises(CorruptCheckpointError, match=f"bytes {block * BLOCK_BYTES} to"):
                checkpoint.read_many_into(found.items())
            for name, placed in LAYOUT.tensors.items():
                begin = max(placed.file_offset, block * BLOCK_BYTES)
                end = min(placed.file_offset + placed.record.size_bytes, (block + 1) * BLOCK_BYTES)
                assert not any(found[name][begin - placed.file_offset : max(begin, end) - placed.file_offset])
            os.pwrite(raw.fileno(), before, block * BLOCK_BYTES + 500)
    checkpoint.read_many_into(targets(checkpoint).items())


@pytest.mark.parametrize("collecting", [True, False])
@pytest.mark.parametrize("error", [None, ValueError()])
def test_the_collector_is_what_it_was(collecting: bool, error: Exception | None) -> None:
    try:
        (gc.enable if collecting else gc.disable)()
        with contextlib.suppress(ValueError), no_collection():
            assert not gc.isenabled()
            if error is not None:
                raise error
        assert gc.isenabled() == collecting
    finally:
        gc.enable()
