"""Writes one file of a checkpoint as fast as the disk takes it, durably; a second thread computes checksums.

Large files go around the page cache (O_DIRECT) in runs of whole pages, from the staging buffer itself if aligned.
"""

from __future__ import annotations

import contextlib
import errno
import queue
import threading
from collections.abc import Callable, Iterator

import xxhash

from checkflow.core.errors import StorageError
from checkflow.runtime.format.layout import PAGE_BYTES, FileLayout, Layout
from checkflow.runtime.format.manifest import BLOCK_BYTES, FileEntry
from checkflow.runtime.system import fs
from checkflow.runtime.system.aligned_memory import address_of, copy_bytes, scratch

RUN_BYTES = 4 * BLOCK_BYTES  # of one write: between two, the disk idles
THREAD_BYTES = BLOCK_BYTES  # of a file: for less, starting a thread takes longer than the checksums
_GATHER_BYTES = BLOCK_BYTES
Image = Callable[[FileLayout], Iterator[memoryview]]  # yields a file's bytes in order


def write_files(folder: int, layout: Layout, image: Image) -> dict[str, FileEntry]:
    """:func:`write_file` for all files of a layout. StorageError if one does not get the bytes that it should have."""
    entries = {file.name: write_file(folder, file.name, image(file)) for file in layout.files}
    for file in layout.files:
        if entries[file.name].size_bytes != file.size_bytes:
            raise StorageError(f"{file.name} got {entries[file.name].size_bytes} of {file.size_bytes} bytes")
    return entries


def write_file(folder: int, name: str, pieces: Iterator[memoryview]) -> FileEntry:
    """Write a new file of these pieces, make it durable, and return its size and checksums.

    An error of fsync or close fails the checkpoint for good: the kernel may have dropped the pages, and a second fsync
    would succeed without them. A piece must not change before the next is asked for.
    """
    fd = fs.open_new(name, dir_fd=folder)
    try:
        checksums = Checksums()
        try:
            out = _Output(fd, checksums)
            for piece in pieces:
                out.put(piece)
            out.end()
            fs.fsync(fd)
            entry = FileEntry(out.size_bytes, checksums.finish())
        finally:
            checksums.close()
    except BaseException:
        with contextlib.suppress(OSError):  # the first error is the one to report
            fs.close(fd)
        raise
    fs.close(fd)
    return entry


class _Output:
    """A file that is written from start to end; small pieces are gathered into large writes."""

    def __init__(self, fd: int, checksums: Checksums) -> None:
        self._fd, self._checksums = fd, checksums
        self._direct: bool | None = None  # direct I/O; None: not tried yet
        self._written = 0
        self._gathered: memoryview | None = None
        self._held = 0  # bytes in it

    @property
    def size_bytes(self) -> int:
        return self._written + self._held

    def put(self, piece: memoryview) -> None:
        rest = piece
        while len(rest) >= fs.LEAST_DIRECT_BYTES:
            self._try_direct()
            begin, end = self._straight(rest)
            if end - begin < fs.LEAST_DIRECT_BYTES:
                break
            self._gather(rest[:begin])
            self._flush()
            self._write(rest[begin:end])
            rest = rest[end:]
        self._gather(rest)
        self._checksums.wait()

    def end(self) -> None:
        self._flush()

    def _straight(self, data: memoryview) -> tuple[int, int]:
        """Where in ``data`` one aligned run can be written from its own memory."""
        if not self._direct:
            return 0, min(len(data), RUN_BYTES)
        begin = -self.size_bytes % PAGE_BYTES
        if begin >= len(data) or (address_of(data) + begin) % PAGE_BYTES:
            return 0, 0
        return begin, begin + min(RUN_BYTES, (len(data) - begin) // PAGE_BYTES * PAGE_BYTES)

    def _gather(self, data: memoryview) -> None:
        rest = data
        while rest:
            if self._gathered is None:
                self._gathered = scratch(_GATHER_BYTES)
            part = rest[: _GATHER_BYTES - self._held]
            copy_bytes(self._gathered[self._held : self._held + len(part)], part)
            self._held += len(part)
            rest = rest[len(part) :]
            if self._held == _GATHER_BYTES:
                self._flush()

    def _flush(self) -> None:
        """Write what was gathered and free its memory."""
        if self._gathered is None or not self._held:
            return
        if self._held >= fs.LEAST_DIRECT_BYTES:
            self._try_direct()
        data, self._held = self._gathered[: self._held], 0
        self._write(data)
        self._checksums.wait()

    def _write(self, data: memoryview) -> None:
        self._checksums.add(data)
        done = self._write_directly(data) if self._direct else 0
        fs.write_all(self._fd, data[done:], self._written + done)
        self._written += len(data)

    def _try_direct(self) -> None:
        if self._direct is None:
            self._direct = self._switch(True)

    def _switch(self, direct: bool) -> bool:
        """Switch direct I/O; returns whether it is on."""
        try:
            fs.set_direct(self._fd, direct)
        except OSError as error:
            if not direct or error.errno not in fs.NOT_DIRECT:
                raise
            return False
        return direct

    def _write_directly(self, data: memoryview) -> int:
        """Write the whole pages of aligned ``data``; returns how many bytes.

        After a short write (the end, within a page, a late refusal) the rest of the file goes through the page cache.
        """
        whole, done = len(data) // PAGE_BYTES * PAGE_BYTES, 0
        while done < whole and not done % PAGE_BYTES:
            try:
                count = fs.pwrite(self._fd, data[done:whole], self._written + done)
            except OSError as error:
                if error.errno not in fs.NOT_DIRECT:
                    raise
                break
            if count <= 0:
                raise OSError(errno.EIO, "a write made no progress")
            done += count
        if done < len(data):
            self._direct = self._switch(False)
        return done


class Checksums:
    """The checksum of each block of a file, on a thread of its own once the file turns out to be large.

    No locks: a signal handler's error must not leave one taken (:mod:`.system.signals`).
    """

    def __init__(self) -> None:
        self._digest, self._filled = xxhash.xxh3_64(), 0
        self._blocks: list[str] = []
        self._parts: queue.SimpleQueue[memoryview | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._outstanding = 0
        self._thread: threading.Thread | None = None
        self._alone = False  # no thread could be started
        self._given_bytes = 0

    def add(self, data: memoryview) -> None:
        """Add the next bytes of the file; they must not change before :meth:`wait` or :meth:`finish`."""
        self._given_bytes += len(data)
        large = len(data) >= fs.LEAST_DIRECT_BYTES and self._given_bytes >= THREAD_BYTES
        if self._thread is None and large and not self._alone:
            self._start()
        if self._thread is None:
            self._update(data)
            return
        self._outstanding += 1
        self._parts.put(data)

    def wait(self) -> None:
        """Wait until nothing that was added is needed any more; raises what went wrong."""
        while self._outstanding:
            error = self._done.get()
            self._outstanding -= 1
            if error is not None:
                raise error

    def finish(self) -> tuple[str, ...]:
        self.wait()
        if self._filled:
            self._end_block()
        return tuple(self._blocks)

    def close(self) -> None:
        """End the thread."""
        if self._thread is not None:
            self._parts.put(None)
            with contextlib.suppress(RuntimeError):  # a signal handler raised during its start: it ends by itself
                self._thread.join()

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="checkflow-checksums", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # no more threads, or the interpreter is ending
            self._thread, self._alone = None, True

    def _run(self) -> None:
        while (data := self._parts.get()) is not None:
            error: BaseException | None = None
            try:
                self._update(data)
            except BaseException as reason:  # noqa: BLE001 - the thread that writes raises it
                error = reason
            data = None  # or it would stay in memory until there is more
            self._done.put(error)

    def _update(self, data: memoryview) -> None:
        rest = data
        while rest:
            part = rest[: BLOCK_BYTES - self._filled]
            self._digest.update(part)
            self._filled += len(part)
            rest = rest[len(part) :]
            if self._filled == BLOCK_BYTES:
                self._end_block()

    def _end_block(self) -> None:
        self._blocks.append(self._digest.hexdigest())
        self._digest.reset()
        self._filled = 0
