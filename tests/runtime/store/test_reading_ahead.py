"""Reading ahead: begun before it is known what blocks are for, and nothing stays of what nobody wants."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from checkflow.core.errors import CorruptCheckpointError, StorageError
from checkflow.runtime.format.layout import make_layout
from checkflow.runtime.format.manifest import BLOCK_BYTES
from checkflow.runtime.store import block_reader, reader
from checkflow.runtime.store import files as store_files
from checkflow.runtime.store.block_reader import THREADS, Ahead, Reader, read_blocks
from checkflow.runtime.store.files import OpenFile
from checkflow.runtime.store.reader import Checkpoint, open_checkpoint
from checkflow.runtime.store.store import Store
from checkflow.runtime.system import fs
from checkflow.runtime.system.aligned_memory import no_collection
from tests.support.pairing import pairs
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
from tests.support.store_tools import fill, record
from tests.support.waiting import blocked, wait_for


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    before = len(os.listdir("/proc/self/fd"))
    yield
    assert not [one.name for one in threading.enumerate() if one.name == "checkflow-reader"]
    assert len(os.listdir("/proc/self/fd")) <= before  # fewer, if an earlier test's are collected meanwhile


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("reading") / "x"
    path.write_bytes(CONTENT)
    return path


@pytest.fixture
def checkpoint(tmp_path: Path) -> Iterator[Checkpoint]:
    with Store(tmp_path / "checkpoints", run_id="run") as store:
        path = store.commit(1, LAYOUT, STAGING, b"", {})
    with open_checkpoint(path) as one:
        yield one


def test_an_interrupt_as_reading_ahead_begins_leaves_nothing_behind(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No thread that waits for ever to be told what blocks are for."""
    real, waits, read_block = threading.Thread.start, threading.Event(), block_reader.read_block

    def start(self: threading.Thread) -> None:
        real(self)
        if threading.current_thread() is threading.main_thread():
            assert waits.wait(120)
            signal.raise_signal(signal.SIGINT)

    def read(*arguments: Any) -> memoryview:
        block = read_block(*arguments)
        waits.set()
        return block

    monkeypatch.setattr(threading.Thread, "start", start)
    monkeypatch.setattr(block_reader, "read_block", read)
    with pytest.raises(KeyboardInterrupt):
        open_checkpoint(checkpoint.path, ahead=True)
    assert not [one.name for one in threading.enumerate() if one.name == "checkflow-reader"]


@pytest.mark.parametrize("times", [1, 2, 3])
def test_interrupts_as_reading_ahead_ends_leave_nothing_behind(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    found, real, calls = targets(checkpoint), Ahead._run, []

    def run(self: Ahead) -> None:
        """Not over before it has been awaited so often."""
        real(self)
        wait_for(lambda: len(calls) > times)

    monkeypatch.setattr(Ahead, "_run", run)
    with open_checkpoint(checkpoint.path, ahead=True) as one:
        calls = interrupt_before("wait", times, monkeypatch, Reader)
        with pytest.raises(KeyboardInterrupt):
            one.read_many_into(found.items())
        assert len(calls) > times
        assert not [one.name for one in threading.enumerate() if one.name == "checkflow-reader"]
        again = targets(checkpoint)  # nothing that was read for another call is taken for this one's
        one.read_many_into(again.items())
        assert {name: bytes(data) for name, data in again.items()} == EXPECTED


def test_blocks_are_read_before_their_use_is_known(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One for each thread, and no more."""
    read_so_far: set[int] = set()
    all_wait = threading.Event()
    real = fs.preadv

    def preadv(fd: int, buffers: Any, offset: int) -> int:
        count = real(fd, buffers, offset)
        read_so_far.add(offset)
        if len(read_so_far) == THREADS:
            all_wait.set()
        return count

    monkeypatch.setattr(fs, "preadv", preadv)
    out = bytearray(SIZE_BYTES)
    with opened(written) as file:
        ahead = Ahead([(file, block) for block in range(BLOCKS)])
        ahead.begin()
        assert all_wait.wait(120)
        assert len(read_so_far) == THREADS

        def use(number: int, data: memoryview) -> None:
            out[number * BLOCK_BYTES : number * BLOCK_BYTES + len(data)] = data

        ahead.finish(use)
        ahead.close()
    assert bytes(out) == CONTENT


def test_what_is_read_ahead_and_not_wanted_is_forgotten(written: Path) -> None:
    with opened(written) as file:
        for blocks in ([(file, block) for block in range(BLOCKS)], []):
            ahead = Ahead(blocks)
            ahead.begin()
            ahead.close()
            ahead.close()
            with pytest.raises(StorageError, match="closed while it was read"):
                ahead.finish(lambda number, data: None)
        Ahead([]).close()


@pytest.mark.parametrize("threads", range(1, THREADS + 1))
def test_reading_ahead_has_begun_when_all_threads_that_there_are_have_started_and_some_read(
    written: Path, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    """And no thread reads before that: it would hold up the start of the others."""
    real_start, real_read = block_reader._start, block_reader.read_block
    started: list[threading.Thread] = []
    reads: queue.SimpleQueue[int] = queue.SimpleQueue()
    may_start, may_read, used = threading.Event(), threading.Event(), list[int]()

    def start(thread: threading.Thread) -> bool:
        """As where the system has so many threads to give; the last one after a while."""
        if len(started) == threads:
            return False
        started.append(thread)
        assert len(started) < threads or threads == 1 or may_start.wait(120)
        return real_start(thread)

    def read_block(file: OpenFile, block: int, *rest: Any) -> memoryview:
        reads.put(block)
        assert may_read.wait(120)
        return real_read(file, block, *rest)

    monkeypatch.setattr(block_reader, "_start", start)
    monkeypatch.setattr(block_reader, "read_block", read_block)
    with opened(written) as file:
        ahead = Ahead([(file, block) for block in range(BLOCKS)])
        beginning = threading.Thread(target=ahead.begin)
        beginning.start()
        if threads > 1:
            wait_for(lambda: len(started) == threads)
            for one in (*started[:-1], beginning):
                wait_for(blocked(one))
            assert reads.empty()
        may_start.set()
        beginning.join(120)  # whatever those do that read
        assert not beginning.is_alive()
        may_read.set()
        ahead.finish(lambda number, _: used.append(number))
    assert sorted(used) == list(range(BLOCKS))


@pytest.mark.parametrize("threads", range(1, THREADS + 1))
def test_reading_ahead_has_begun_when_some_are_about_to_read(
    written: Path, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    """Two, or the only one; not one fewer, and whatever the others do."""
    real, tickets = Ahead.reads, threading.Semaphore(0)
    few_threads(monkeypatch, threads)

    def reads(self: Ahead) -> None:
        assert tickets.acquire(timeout=120)
        real(self)

    monkeypatch.setattr(Ahead, "reads", reads)
    with opened(written) as file:
        ahead = Ahead([(file, block) for block in range(BLOCKS)])
        beginning = threading.Thread(target=ahead.begin)
        beginning.start()
        for _ in range(min(threads, 2)):
            wait_for(blocked(beginning))
            tickets.release()
        beginning.join(120)
        assert not beginning.is_alive()
        tickets.release(3 * BLOCKS)
        ahead.close()


@pytest.mark.parametrize("times", [1, 3])
def test_what_cannot_be_looked_at_is_told_each_time(written: Path, monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise StorageError("no memory")

    monkeypatch.setattr(block_reader, "scratch", fail)
    with opened(written) as file:
        ahead = Ahead([(file, 0)], looks=1)
        ahead.begin()
        for _ in range(times):
            with pytest.raises(StorageError):
                ahead.looked(0)


@pytest.mark.parametrize("where", ["read_block", "scratch"])
def test_reading_ahead_that_fails_at_once_has_begun_too(
    written: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """The first thread may have ended before another one starts."""

    def fail(*_: Any, **__: Any) -> None:
        raise StorageError("the disk is gone")

    monkeypatch.setattr(block_reader, where, fail)
    with opened(written) as file:
        ahead = Ahead([(file, block) for block in range(BLOCKS)])
        ahead.begin()
        with pytest.raises(StorageError, match="the disk is gone"):
            ahead.finish(lambda number, data: None)


@pytest.mark.parametrize("others", [0, 1, 3])
def test_reading_ahead_without_memory_for_a_further_thread(
    written: Path, monkeypatch: pytest.MonkeyPatch, others: int
) -> None:
    real, started = block_reader._start, []

    def start(thread: threading.Thread) -> bool:
        started.append(thread)
        if len(started) == others + 2:
            raise MemoryError("no stack for another thread")
        return real(thread)

    monkeypatch.setattr(block_reader, "_start", start)
    with opened(written) as file:
        ahead = Ahead([(file, block) for block in range(BLOCKS)], threads=6)
        ahead.begin()
        with pytest.raises(MemoryError, match="no stack"):
            ahead.finish(lambda number, data: None)


def read_ahead(blocks: list[Any], use: Any) -> None:
    ahead = Ahead(blocks)
    ahead.begin()
    ahead.finish(use)


def unread(blocks: list[Any], use: Any) -> None:
    ahead = Ahead(blocks)
    ahead.begin()
    ahead.close()


def unseen(blocks: list[Any], use: Any) -> None:
    def look(data: memoryview) -> bytes:
        raise StorageError("no look")

    ahead = Ahead(blocks, looks=1, look=look)
    ahead.begin()
    ahead.looked(0)


@pytest.mark.parametrize("attempt", [read_blocks, read_ahead, unread, unseen])
def test_what_failed_keeps_no_memory(written: Path, monkeypatch: pytest.MonkeyPatch, attempt: Any) -> None:
    """Without the help of the collector, which may be off."""
    scratches: list[weakref.ref[Any]] = []
    real = block_reader.scratch

    def scratch(size_bytes: int, **options: Any) -> memoryview:
        view = real(size_bytes, **options)
        scratches.append(weakref.ref(view))
        return view

    def use(number: int, data: memoryview) -> None:
        raise StorageError("no use")

    monkeypatch.setattr(block_reader, "scratch", scratch)
    with opened(written) as file, no_collection():
        blocks = [(file, block) for block in range(BLOCKS)]
        with contextlib.suppress(StorageError):
            attempt(blocks, use)
        assert len(scratches) == 1
        assert scratches.pop()() is None


@pytest.mark.parametrize("block", [0, BLOCKS - 1])
def test_damage_met_ahead_is_told_when_it_is_wanted(tmp_path: Path, block: int) -> None:
    changed = bytearray(CONTENT)
    changed[block * BLOCK_BYTES] ^= 1
    (tmp_path / "x").write_bytes(changed)
    used: list[int] = []
    with opened(tmp_path / "x") as file:
        ahead = Ahead([(file, one) for one in range(BLOCKS)])
        ahead.begin()
        with pytest.raises(CorruptCheckpointError, match=f"bytes {block * BLOCK_BYTES} to"):
            ahead.finish(lambda number, _: used.append(number))
    assert block not in used


def test_a_checkpoint_is_read_ahead(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    for wanted in (EXPECTED, ["model/0500"], []):
        with open_checkpoint(checkpoint.path, ahead=True) as one:
            found = {name: memoryview(bytearray(one.size_bytes(name))) for name in wanted}
            one.read_many_into(found.items())
            assert {name: bytes(data) for name, data in found.items()} == {name: EXPECTED[name] for name in wanted}
    with open_checkpoint(checkpoint.path, ahead=True) as one:
        one.verify()

    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    with open_checkpoint(checkpoint.path, ahead=True) as one:
        one.read_many_into((found := targets(one)).items())
    assert {name: bytes(data) for name, data in found.items()} == EXPECTED


# What is looked at of the first blocks


def few_threads(monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    """As where the system has so many to give."""
    real, started = block_reader._start, []

    def start(thread: Reader) -> bool:
        if len(started) == threads:
            return False
        started.append(thread)
        return real(thread)

    monkeypatch.setattr(block_reader, "_start", start)


def test_of_the_first_blocks_it_is_known_early_what_they_begin_with(written: Path) -> None:
    used: list[int] = []
    with opened(written) as file:
        ahead = Ahead([(file, block) for block in range(BLOCKS)], looks=3, look=lambda data: bytes(data[:9]))
        ahead.begin()
        for block in (2, 0, 1, 2):
            assert ahead.looked(block) == CONTENT[block * BLOCK_BYTES :][:9]
        assert ahead.looked(3) is None  # it was not to be looked at
        assert used == []
        ahead.finish(lambda number, data: used.append(number))
    assert sorted(used) == list(range(BLOCKS))


@pytest.mark.parametrize("block", range(THREADS))
def test_damage_of_a_first_block_is_told_to_whom_it_concerns(tmp_path: Path, block: int) -> None:
    changed = bytearray(CONTENT)
    changed[block * BLOCK_BYTES] ^= 1
    (tmp_path / "x").write_bytes(changed)
    used: list[int] = []
    with opened(tmp_path / "x") as file:
        ahead = Ahead([(file, one) for one in range(BLOCKS)], looks=THREADS, look=lambda data: bytes(data[:9]))
        ahead.begin()
        for one in range(THREADS):
            if one != block:
                assert ahead.looked(one) == CONTENT[one * BLOCK_BYTES :][:9]
        with pytest.raises(CorruptCheckpointError, match=f"bytes {block * BLOCK_BYTES} to"):
            ahead.looked(block)
        with pytest.raises(StorageError, match="closed while it was read"):
            ahead.finish(lambda number, data: used.append(number))
    assert used == []


def test_what_was_looked_at_is_known_when_it_is_closed(written: Path) -> None:
    with opened(written) as file:
        ahead = Ahead([(file, block) for block in range(BLOCKS)], looks=2, look=lambda data: bytes(data[:9]))
        ahead.begin()
        ahead.close()
        assert ahead.looked(1) == CONTENT[BLOCK_BYTES:][:9]


@pytest.mark.parametrize("where", ["loads", "parse_header"])
def test_an_interrupt_while_others_read_leaves_nothing_behind(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    def interrupted(*_: Any) -> None:
        assert [one.name for one in threading.enumerate() if one.name == "checkflow-reader"]
        raise KeyboardInterrupt

    monkeypatch.setattr(store_files if where == "loads" else reader, where, interrupted)
    with pytest.raises(KeyboardInterrupt):
        open_checkpoint(checkpoint.path, ahead=True)


@pytest.mark.parametrize("files_", [1, 2, THREADS + 1, THREADS + 2, 3 * THREADS])
@pytest.mark.parametrize("threads", [0, 1, 2, THREADS, THREADS + 1])
def test_checkpoints_of_many_files_are_read_ahead_with_any_number_of_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files_: int, threads: int
) -> None:
    layout = make_layout([record(f"m{i:02d}/w{j}", (3, 5)) for i in range(files_) for j in range(2)])
    assert len(layout.files) == files_
    staging, expected = fill(layout, 1)
    with Store(tmp_path / "checkpoints", run_id="run") as store:
        path = store.commit(1, layout, staging, b"", {})
    few_threads(monkeypatch, threads)
    with open_checkpoint(path, ahead=True) as one:
        one.read_many_into((found := targets(one)).items())
    assert {name: bytes(data) for name, data in found.items()} == expected


@pytest.mark.parametrize("letters", [1, 400_000])
def test_checkpoints_with_headers_of_any_length_are_read(tmp_path: Path, letters: int) -> None:
    """The longer one fills the first block, and has its end in the next one: ahead is read only where it need not be.

    In a forked child, too, for which nothing is there of what its parent read.
    """
    layout = make_layout([record(f"model/{'w' * letters}{i}", (3, 5)) for i in range(30)])
    staging, expected = fill(layout, 1)
    with Store(tmp_path / "checkpoints", run_id="run") as store:
        path = store.commit(1, layout, staging, b"", {})
    assert ((path / layout.files[0].name).stat().st_size > BLOCK_BYTES) == (letters > 1)
    for ahead in (True, False):
        with open_checkpoint(path, ahead=ahead) as one:
            assert (one._ahead is not None) == (ahead and letters == 1)
            code = in_a_child(lambda one=one: same_as(expected, one))  # type: ignore[misc]
            assert code == 0
            assert same_as(expected, one)


def same_as(expected: dict[str, bytes], checkpoint: Checkpoint) -> bool:
    checkpoint.read_many_into((found := targets(checkpoint)).items())
    return {name: bytes(data) for name, data in found.items()} == expected


def in_a_child(work: Callable[[], bool]) -> int:
    """The exit code of a forked child: 0 where it is true there."""
    if (child := os.fork()) == 0:
        code = 1
        signal.alarm(300)
        try:
            code = 0 if work() else 2
        except BaseException:  # noqa: BLE001 - what becomes of a child is told by its exit code
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitpid(child, 0)[1]


# Headers, which are looked at before their blocks are verified


SAME = make_layout([record(f"model/{name}", (1_500_000,)) for name in "abcd"])  # 24 MB: several blocks
SAME_STAGING, SAME_EXPECTED = fill(SAME, 6)


@pytest.fixture
def same(tmp_path: Path) -> Path:
    with Store(tmp_path / "same", run_id="run") as store:
        return store.commit(1, SAME, SAME_STAGING, b"", {})


def read_many(checkpoint: Checkpoint, found: dict[str, memoryview]) -> None:
    checkpoint.read_many_into(found.items())


def read_single(checkpoint: Checkpoint, found: dict[str, memoryview]) -> None:
    for name, buffer in found.items():
        checkpoint.read_into(name, buffer)


def read_rows(checkpoint: Checkpoint, found: dict[str, memoryview]) -> None:
    for name, buffer in found.items():
        checkpoint.read_rows_into(checkpoint.tensors[name].pieces[0], 0, buffer)


WAYS = [read_many, read_single, read_rows]


@pytest.mark.parametrize(
    *pairs(threads=[0, 1, THREADS + 1], way=WAYS, change=[(b"     ", b"\t    "), (b'"a"', b'"c"'), (b'{"', b'["')])
)
def test_a_damaged_header_is_told_by_its_checksum_and_nothing_is_used(
    same: Path, monkeypatch: pytest.MonkeyPatch, threads: int, way: Any, change: tuple[bytes, bytes]
) -> None:
    """Whether it still is a header, or none that fits."""
    old, new = change
    path = same / SAME.files[0].name
    data = path.read_bytes()
    assert old in data[8:4096]
    at = data.index(old, 8)
    path.write_bytes(data[:at] + new + data[at + len(old) :])
    few_threads(monkeypatch, threads)
    found = {name: memoryview(bytearray(len(content))) for name, content in SAME_EXPECTED.items()}
    expected = pytest.raises(CorruptCheckpointError, match=r"bytes 0 to \d+ do not match their checksum")
    with expected, open_checkpoint(same, ahead=True) as one:
        way(one, found)
    assert not any(any(buffer) for buffer in found.values())


@pytest.mark.parametrize("threads", [0, 1, THREADS + 1])
@pytest.mark.parametrize("way", WAYS)
def test_a_header_that_was_read_wrongly_is_no_damage_and_nothing_is_used(
    same: Path, monkeypatch: pytest.MonkeyPatch, threads: int, way: Any
) -> None:
    """It says the same as the manifest, but has two tensors in each other's place: only its block tells."""
    real = reader._glimpse

    def glimpse(file: OpenFile) -> bytes | None:
        text = real(file)
        assert text is not None
        return text.replace(b'"a"', b'"x"').replace(b'"c"', b'"a"').replace(b'"x"', b'"c"')

    monkeypatch.setattr(reader, "_glimpse", glimpse)
    few_threads(monkeypatch, threads)
    found = {name: memoryview(bytearray(len(content))) for name, content in SAME_EXPECTED.items()}
    with open_checkpoint(same, ahead=True) as one:
        for _ in range(2):
            with pytest.raises(StorageError, match="reads otherwise each time") as caught:
                way(one, found)
            assert not isinstance(caught.value, CorruptCheckpointError)
    assert not any(any(buffer) for buffer in found.values())


def test_what_could_not_be_read_ahead_is_read_when_it_is_wanted(same: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, failed = block_reader.scratch, []

    def scratch(size_bytes: int, **options: Any) -> memoryview:
        if not failed:
            failed.append(size_bytes)
            raise MemoryError("no room")
        return real(size_bytes, **options)

    monkeypatch.setattr(block_reader, "scratch", scratch)
    found = {name: memoryview(bytearray(len(content))) for name, content in SAME_EXPECTED.items()}
    with open_checkpoint(same, ahead=True) as one:
        with pytest.raises(MemoryError, match="no room"):
            one.read_many_into(found.items())
        one.read_many_into(found.items())
    assert {name: bytes(data) for name, data in found.items()} == SAME_EXPECTED


@pytest.mark.parametrize("where", ["loads", "parse_header"])
def test_a_second_interrupt_leaves_nothing_behind_either(
    same: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(store_files if where == "loads" else reader, where, interrupted)
    calls = interrupt_before("wait", 1, monkeypatch, Reader)
    with pytest.raises(KeyboardInterrupt):
        open_checkpoint(same, ahead=True)
    assert len(calls) > 1


@pytest.mark.parametrize("reads", [False, True])
def test_a_forked_child_does_not_wait_for_threads_that_it_has_not(same: Path, reads: bool) -> None:
    """And what its parent reads ahead is not there."""
    with open_checkpoint(same, ahead=True) as one:

        def work() -> bool:
            good = same_as(SAME_EXPECTED, one) if reads else True
            one.close()
            return good

        assert in_a_child(work) == 0
        assert same_as(SAME_EXPECTED, one)


def test_several_may_wait_for_the_same_thread() -> None:
    goes_on = threading.Event()
    thread = Reader(goes_on.wait)
    thread.start()
    waiting = [threading.Thread(target=thread.wait) for _ in range(3)]
    for one in waiting:
        one.start()
    goes_on.set()
    for one in waiting:
        one.join(120)
        assert not one.is_alive()
