"""Reads blocks of open files with several threads, around the page cache; each block is verified before it is used."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import queue
import threading
from collections.abc import Callable, Iterator, Sequence

from checkflow.core.errors import StorageError
from checkflow.runtime.format.manifest import BLOCK_BYTES
from checkflow.runtime.store.files import NOT_HELD, OpenFile, memory_bytes, read_block
from checkflow.runtime.system import fs
from checkflow.runtime.system.aligned_memory import scratch
from checkflow.runtime.system.signals import raised_by_handler

#: So many threads read, each with memory for a block, where nothing else is said. More do not read faster from disks
#: of some GB/s; on two cores four read 5 to 20 % faster than six.
THREADS = min(6, len(os.sched_getaffinity(0)) + 2)
_BUSY = 2  # readers that keep a disk busy until the others get the GIL
Block = tuple[OpenFile, int]  # a file and a block's number
Use = Callable[[int, memoryview], None]


class Watcher:
    """Is notified of how reading by threads goes on. This base class ignores it."""

    #: Whether each thread that is started takes a block, be there an error by then or not.
    each_reads = False

    def started(self, threads: int) -> None:
        """At most this many threads will run."""

    def reads(self) -> None:
        """A thread is about to read, or has ended; each thread calls this before it ends."""

    def failed(self, number: int) -> None:
        """This block is unreadable or damaged, or its use failed."""


def read_blocks(blocks: Sequence[Block], use: Use, *, threads: int = THREADS, watcher: Watcher | None = None) -> None:
    """Read and verify blocks. Raises CorruptCheckpointError for the first damaged one read, or StorageError; others may
    have been used. ``use`` is called by several threads, in no order, with each block's number and its bytes, which are
    valid during the call only. What it raises is raised here.
    """
    if not blocks:
        return
    with _around_the_cache(blocks) as direct:
        _share(
            len(blocks),
            max(memory_bytes(*block) for block in blocks),
            lambda number, memory: use(number, read_block(*blocks[number], memory, direct.get(blocks[number][0].fd))),
            min(threads, len(blocks)),
            watcher or Watcher(),
        )


def read_one(file: OpenFile, block: int) -> memoryview:
    """Read and verify a block into memory of its own."""
    with _around_the_cache([(file, block)]) as direct:
        size = memory_bytes(file, block)
        return read_block(file, block, scratch(size, large_pages=size == BLOCK_BYTES), direct.get(file.fd))


class Ahead(Watcher):
    """:func:`read_blocks`, started before it is known what the blocks are for: each thread reads one and waits.

    Close it, whatever comes between. Of the first ``looks`` blocks, a thread makes what :meth:`looked` returns by
    ``look``.
    """

    each_reads = True  # or a caller of ``looked`` might wait for ever

    def __init__(
        self,
        blocks: Sequence[Block],
        threads: int = THREADS,
        *,
        looks: int = 0,
        look: Callable[[memoryview], bytes] = bytes,
    ) -> None:
        self.blocks = blocks
        self._threads = threads
        self._looks, self._look = looks, look
        # Queues, not locks: see system/signals.py.
        self._uses: queue.SimpleQueue[Use | None] = queue.SimpleQueue()
        self._news: queue.SimpleQueue[int] = queue.SimpleQueue()  # number of threads; 0: one reads, or has ended
        # Block and result, None if it failed; a bare None at the end.
        self._looked: queue.SimpleQueue[tuple[int, bytes | None] | None] = queue.SimpleQueue()
        self._seen: dict[int, bytes | None] = {}
        self._reading = 0  # threads, each with one of the first blocks
        self._ended = False
        self._error: BaseException | None = None
        self._thread: Reader | None = None

    def begin(self) -> None:
        """Start the threads; returns when all have started and some are about to read.

        Not before: starting would wait for the GIL longer than a read takes. Not much later: reads take processors.
        """
        self._thread = Reader(self._run)
        if not _start(self._thread):
            self._thread = None
            return
        reads, threads = 0, None
        while threads is None or reads < min(threads, _BUSY):
            if news := self._news.get():
                threads = news
            else:
                reads += 1
        self._reading = threads

    def looked(self, number: int) -> bytes | None:
        """The result of ``look`` for a block; None if no thread has it."""
        if number >= min(self._looks, self._reading) or not self._is_here:
            return None
        while number not in self._seen:
            if (news := self._looked.get()) is None:
                self._looked.put(None)  # for the next call
                break
            self._seen.setdefault(*news)
        if (found := self._seen.get(number)) is None:
            self.finish(lambda number, data: None)  # raises what failed
            raise StorageError("the checkpoint was closed while it was read")
        return found

    def finish(self, use: Use) -> None:
        """Use all blocks, to the end; raises as :func:`read_blocks`."""
        if self._ended:
            raise StorageError("the checkpoint was closed while it was read")
        if self._thread is None or not self._is_here:
            read_blocks(self.blocks, use, threads=self._threads)
            return
        self._uses.put(use)
        error: BaseException | None = None
        try:
            try:
                self._thread.wait()
            finally:
                error = self._end()
            if error is not None:
                raise error
        finally:
            del error  # its frame would keep the memory

    @property
    def _is_here(self) -> bool:
        """Whether the threads are in this process: a forked child has neither them nor what they read."""
        return self._thread is not None and self._thread.process == os.getpid()

    def close(self) -> None:
        """End the threads and drop what they read; may be called again."""
        self._end()

    def started(self, threads: int) -> None:
        self._news.put(threads)

    def reads(self) -> None:
        self._news.put(0)

    def failed(self, number: int) -> None:
        if number < self._looks:
            self._looked.put((number, None))

    def _end(self) -> BaseException | None:
        """Return and forget the error that ended the threads."""
        self._ended = True
        self._uses.put(None)
        if self._thread is not None:
            await_end([self._thread])
        error, self._error = self._error, None
        return error

    def _run(self) -> None:
        try:
            if not self._ended:
                read_blocks(self.blocks, self._use, threads=self._threads, watcher=self)
        except BaseException as error:  # noqa: BLE001 - finish() raises it
            self._error = error
        finally:
            self._looked.put(None)
            self._news.put(self._threads)
            for _ in range(self._threads):  # so nobody waits for threads that never ran
                self._news.put(0)

    def _use(self, number: int, data: memoryview) -> None:
        if number < self._looks:
            self._looked.put((number, self._look(data)))
        use = self._uses.get()
        self._uses.put(use)  # for the others
        if use is None or self._ended:
            raise StorageError("the checkpoint was closed while it was read")
        use(number, data)


@contextlib.contextmanager
def _around_the_cache(blocks: Sequence[Block]) -> Iterator[dict[int, int]]:
    """Open large files that are held again for direct reads: the new descriptor by the old one."""
    found: dict[int, int] = {}
    try:
        for file in {file.fd: file for file, _ in blocks}.values():
            if file.fd != NOT_HELD and (fd := fs.open_direct_if_large(file.fd, file.entry.size_bytes)) is not None:
                found[file.fd] = fd
        yield found
    finally:
        for fd in found.values():
            with contextlib.suppress(OSError):  # nothing was written through it
                fs.close(fd)


def _share(
    count: int,
    memory_bytes: int,
    work: Callable[[int, memoryview], None],
    threads: int,
    watcher: Watcher,
) -> None:
    """Do ``work`` for all numbers below ``count`` in several threads, this one included, each with its own memory."""
    memory = scratch(threads * memory_bytes, large_pages=memory_bytes == BLOCK_BYTES)
    parts = [memory[i * memory_bytes : (i + 1) * memory_bytes] for i in range(threads)]
    numbers = itertools.count()
    errors: dict[int, BaseException] = {}
    # No locks: a signal handler's error must not leave one taken (system/signals.py).
    ended = False
    all_started: queue.SimpleQueue[None] = queue.SimpleQueue()

    def go() -> None:
        all_started.put(None)

    def run(part: memoryview) -> None:
        nonlocal ended
        # A reading thread delays the start of others: the kernel makes pages for its memory.
        all_started.get()
        all_started.put(None)  # for the next thread
        first = watcher.each_reads
        while (first or not ended) and (number := next(numbers)) < count:
            first = False
            try:
                watcher.reads()
                work(number, part)
            except BaseException as error:  # noqa: BLE001 - the caller raises the first of all threads
                errors[number] = error
                ended = True
                watcher.failed(number)
        watcher.reads()

    started: list[Reader] = []
    try:
        try:
            for part in parts[1:]:
                started.append(Reader(functools.partial(run, part)))
                if not _start(started[-1]):  # no thread: fewer share the work
                    started.pop()
                    break
        except BaseException:  # no memory for a thread
            watcher.started(max(1, sum(thread.ident is not None for thread in started)))
            raise
        watcher.started(1 + len(started))
        go()
        run(parts[0])
    finally:
        ended = True  # nothing runs any more
        await_end(started, go)
    try:
        if errors:
            raise errors[min(errors, key=lambda number: (isinstance(errors[number], Exception), number))]
    finally:
        errors.clear()  # a cycle with this frame would keep the memory


class Reader(threading.Thread):
    """A thread that can be awaited despite a signal handler's error, after which ``Thread.join`` may return early
    (3.11).
    """

    def __init__(self, work: Callable[[], None]) -> None:
        super().__init__(name="checkflow-reader", daemon=True)
        self._work: Callable[[], None] | None = work
        self._over, self.process = False, os.getpid()  # the one that started it
        self._end: queue.SimpleQueue[None] = queue.SimpleQueue()

    def run(self) -> None:
        try:
            if self._work is not None:
                self._work()
        finally:
            self._work = None  # it holds the memory
            self._over = True
            self._end.put(None)

    def wait(self) -> None:
        """Wait for its end; call again after a handler's error. Returns at once in a forked child."""
        if self.ident is None or self.process != os.getpid():
            return
        while not self._over:
            self._end.get()
        self._end.put(None)  # for other waiters
        self.join()


def _start(thread: Reader) -> bool:
    """Start a thread; False if the process cannot have one."""
    try:
        thread.start()
    except RuntimeError as error:
        if raised_by_handler(error):  # the thread may run
            raise
        return False
    return True


def await_end(threads: Sequence[Reader], go: Callable[[], None] = lambda: None) -> None:
    """Wait for threads that use the caller's memory and files; a signal handler's error is raised only after that.

    ``go`` lets waiting threads continue, maybe repeatedly.
    """
    raised: BaseException | None = None
    while True:
        try:
            while True:  # a second handler may run right behind the inner ``except``
                try:
                    go()
                    for thread in threads:
                        thread.wait()
                    break
                except BaseException as error:  # noqa: BLE001 - raised below
                    raised = raised or error
            break
        except BaseException as error:  # noqa: BLE001 - raised below
            raised = raised or error
    if raised is not None:
        raise raised
