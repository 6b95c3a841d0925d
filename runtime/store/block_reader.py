"""Reading the blocks of open files: as fast as the disk gives them, each held against its checksum before it is used.

Several threads read whole blocks into memory of our own, around the page cache where the file is large and its file
system allows that: while one waits for the disk the others make checksums and copy. Only a block that fits its checksum
is handed on. Memory is that of one block for each thread, whatever is read.
"""

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
from checkflow.runtime.store.files import OpenFile, memory_bytes, read_block
from checkflow.runtime.system import fs
from checkflow.runtime.system.aligned_memory import scratch
from checkflow.runtime.system.signals import raised_by_handler

#: So many threads read, each with memory for a block, where nothing else is said. More do not read faster from disks
#: of some GB/s.
THREADS = 6
_BUSY = 2  # so many of them keep a disk busy until the others get the interpreter
Block = tuple[OpenFile, int]  # an open file, and the number of a block of it
Use = Callable[[int, memoryview], None]


class Watcher:
    """What is told how a reading by threads goes on. This one does not listen."""

    #: Whether each thread that is started takes a block, be there an error by then or not.
    each_reads = False

    def started(self, threads: int) -> None:
        """No more than these are started."""

    def reads(self) -> None:
        """A thread is about to read, or has ended: none ends without having said so."""

    def failed(self, number: int) -> None:
        """This block cannot be read, or is damaged, or could not be used."""


def read_blocks(blocks: Sequence[Block], use: Use, *, threads: int = THREADS, watcher: Watcher | None = None) -> None:
    """Read blocks, verified.

    Args:
        use: called with the number of each in ``blocks`` and its bytes, which are others after that; by several
            threads, in no order. What it raises is raised here.
        threads: at most.

    Raises:
        CorruptCheckpointError: of the blocks that were read, the first in order that is damaged. Others may have been
            used by then.
        StorageError: one cannot be read.
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
    """A block, verified, in memory that is the caller's.

    Raises:
        CorruptCheckpointError, StorageError: as :func:`read_blocks`.
    """
    with _around_the_cache([(file, block)]) as direct:
        size = memory_bytes(file, block)
        return read_block(file, block, scratch(size, large_pages=size == BLOCK_BYTES), direct.get(file.fd))


class Ahead(Watcher):
    """:func:`read_blocks`, begun before it is known what blocks are used for: each thread reads one, and waits.

    Made first, and then begun: to be closed, whatever comes between, the begin's own errors too.

    Args:
        threads: at most.
        looks: for so many of the first blocks, what ``look`` makes of their bytes can be asked for meanwhile.
        look: called by the thread that has such a block.
    """

    each_reads = True  # or who waits for what is to be had of a block might do so in vain

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
        # No lock of Python's own: see system/signals.py.
        self._uses: queue.SimpleQueue[Use | None] = queue.SimpleQueue()
        self._news: queue.SimpleQueue[int] = queue.SimpleQueue()  # how many threads; 0: one reads, or has ended
        # By block: what was made of it, or None where that failed. None at the end.
        self._looked: queue.SimpleQueue[tuple[int, bytes | None] | None] = queue.SimpleQueue()
        self._seen: dict[int, bytes | None] = {}
        self._reading = 0  # threads, each with one of the first blocks
        self._ended = False
        self._error: BaseException | None = None
        self._thread: Reader | None = None

    def begin(self) -> None:
        """Have each thread read a block; returns when all have started and some are about to read.

        Not before that: what comes next keeps the interpreter busy, and a thread that only wants to begin would wait
        for it several times, longer than a read takes. Not much later either: those that read take the processors from
        the others as long as the kernel makes pages for them.
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
        """What ``look`` made of a block; None where none of the threads that there are has it.

        Raises:
            CorruptCheckpointError, StorageError: as :func:`read_blocks`; nothing was used, and this is to be closed.
        """
        if number >= min(self._looks, self._reading) or not self._is_here:
            return None
        while number not in self._seen:
            if (news := self._looked.get()) is None:
                self._looked.put(None)  # for the next time
                break
            self._seen.setdefault(*news)
        if (found := self._seen.get(number)) is None:
            self.finish(lambda number, data: None)  # which raises what failed
            raise StorageError("the checkpoint was closed while it was read")
        return found

    def finish(self, use: Use) -> None:
        """Go on, to the end; raises as :func:`read_blocks`."""
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
            del error  # it knows of this frame: the memory would stay

    @property
    def _is_here(self) -> bool:
        """Whether there are threads, in this process: a forked child has neither them nor what they read."""
        return self._thread is not None and self._thread.process == os.getpid()

    def close(self) -> None:
        """End the threads; what they have read is forgotten. Once more is harmless."""
        self._end()

    def started(self, threads: int) -> None:
        self._news.put(threads)

    def reads(self) -> None:
        self._news.put(0)

    def failed(self, number: int) -> None:
        if number < self._looks:
            self._looked.put((number, None))

    def _end(self) -> BaseException | None:
        """What the threads ended with; it is forgotten here."""
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
            for _ in range(self._threads):  # nobody waits for those that never ran
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
    """Further descriptors of the files that are large, by those they have: reads of them go around the page cache."""
    found: dict[int, int] = {}
    try:
        for file in {file.fd: file for file, _ in blocks}.values():
            if file.entry.size_bytes >= fs.LEAST_DIRECT_BYTES:
                with contextlib.suppress(OSError):  # refused: through the cache, then, which tells what is wrong
                    found[file.fd] = fs.open_direct(file.fd)
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
    """Do ``work`` for all numbers below ``count``, each thread with memory of its own; this thread is one of them."""
    memory = scratch(threads * memory_bytes, large_pages=memory_bytes == BLOCK_BYTES)
    parts = [memory[i * memory_bytes : (i + 1) * memory_bytes] for i in range(threads)]
    numbers = itertools.count()
    errors: dict[int, BaseException] = {}
    # No locks: an error of a signal's handler must not leave one taken (system/signals.py).
    ended = False
    all_started: queue.SimpleQueue[None] = queue.SimpleQueue()

    def go() -> None:
        all_started.put(None)

    def run(part: memoryview) -> None:
        nonlocal ended
        # A thread that reads holds up the start of others: the kernel makes pages for its memory meanwhile.
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
                if not _start(started[-1]):  # fewer do it
                    started.pop()
                    break
        except BaseException:  # no memory for a thread
            watcher.started(max(1, sum(thread.ident is not None for thread in started)))
            raise
        watcher.started(1 + len(started))
        go()
        run(parts[0])
    finally:
        ended = True  # what was begun is done, all of it unless something was raised
        await_end(started, go)
    try:
        if errors:
            raise errors[min(errors, key=lambda number: (isinstance(errors[number], Exception), number))]
    finally:
        errors.clear()  # it knows of this frame, and the frame of it: the memory would stay


class Reader(threading.Thread):
    """A thread that can be awaited whatever a signal's handler raises meanwhile.

    ``Thread.join``, interrupted, takes a thread that still runs for one that has ended, in Python 3.11 for one.
    """

    def __init__(self, work: Callable[[], None]) -> None:
        super().__init__(name="checkflow-reader", daemon=True)
        self._work: Callable[[], None] | None = work
        self._over, self.process = False, os.getpid()  # that which started it
        self._end: queue.SimpleQueue[None] = queue.SimpleQueue()

    def run(self) -> None:
        try:
            if self._work is not None:
                self._work()
        finally:
            self._work = None  # it knows of the memory
            self._over = True
            self._end.put(None)

    def wait(self) -> None:
        """Until it has ended; again, where a handler raised. One that was interrupted in its very start is passed, and
        in a forked child there is none."""
        if self.ident is None or self.process != os.getpid():
            return
        while not self._over:
            self._end.get()
        self._end.put(None)  # for whoever else waits
        self.join()


def _start(thread: Reader) -> bool:
    """Whether there was a thread to be had for this process."""
    try:
        thread.start()
    except RuntimeError as error:
        if raised_by_handler(error):  # and the thread may run
            raise
        return False
    return True


def await_end(threads: Sequence[Reader], go: Callable[[], None] = lambda: None) -> None:
    """Wait for threads that are about to end, whatever a signal's handler raises meanwhile: that is raised then.

    They read into memory of the caller's, and files that it closes.

    Args:
        go: has threads go on that wait for something; once more is harmless.
    """
    raised: BaseException | None = None
    while True:
        try:
            while True:  # of two handlers that are due at once the second has its turn behind the inner ``except``
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
