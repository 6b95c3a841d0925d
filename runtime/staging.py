"""Host memory that checkpoints are staged in: a few equal buffers, each the image of one checkpoint's files.

Three buffers, so that one may be persisting, one complete and one filling. A buffer is filled by the training thread
and the copy engine, then handed to the writer, which gives it back.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Callable
from dataclasses import dataclass

import psutil

from checkflow.errors import StorageError
from checkflow.hardware import format_size


@dataclass(frozen=True)
class StagingBuffer:
    """One buffer: page-aligned memory at ``address``, and the same as ``view``."""

    index: int
    memory: mmap.mmap
    address: int

    @property
    def view(self) -> memoryview:
        return memoryview(self.memory)


class StagingBuffers:
    """A fixed number of buffers of one size, none until :meth:`grow` made them; ``take`` waits for a free one.

    Args:
        urge: called before all are waited for: whoever holds one back is to give it up.
    """

    def __init__(self, count: int, urge: Callable[[], None] = lambda: None) -> None:
        self.size_bytes = 0
        self._count, self._urge = count, urge
        self._all: list[StagingBuffer] = []
        self._free: list[StagingBuffer] = []
        self._changed = threading.Condition()

    def grow(self, size_bytes: int) -> None:
        """Make the buffers at least so large. Where they are smaller: waits until all are free, and makes new ones.

        Raises:
            StorageError: the memory cannot be had; there are no buffers then.
        """
        wanted_bytes = max(size_bytes, 1)
        if wanted_bytes <= self.size_bytes:
            return
        self.wait_all_free()
        self.close()
        available = psutil.virtual_memory().available
        if self._count * wanted_bytes > available:  # the kernel would grant it, and kill the job when it is touched
            raise StorageError(
                f"{self._count} staging buffers of {format_size(size_bytes)} do not fit into the "
                f"{format_size(available)} of host memory that are free: pass host_buffers=2 or 1, or free some"
            )
        self._all = [_allocate(index, wanted_bytes) for index in range(self._count)]
        self.size_bytes = wanted_bytes
        self._free.extend(self._all)

    def take(self) -> StagingBuffer:
        """A free buffer; waits until one is given back."""
        with self._changed:
            while not self._free:
                self._changed.wait()
            return self._free.pop(0)

    @property
    def free(self) -> int:
        """How many may be taken without waiting."""
        return len(self._free)

    def give_back(self, buffer: StagingBuffer) -> None:
        """The buffer's content is no longer needed."""
        with self._changed:
            self._free.append(buffer)
            self._changed.notify_all()

    def wait_all_free(self) -> None:
        """Wait until every buffer has been given back."""
        self._urge()
        with self._changed:
            while len(self._free) < len(self._all):
                self._changed.wait()

    def close(self) -> None:
        """Give the memory back to the system, as soon as nobody looks at it any more."""
        self.size_bytes = 0
        self._free.clear()
        self._all.clear()


def _allocate(index: int, size_bytes: int) -> StagingBuffer:
    try:
        memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, ValueError, OverflowError) as error:
        raise StorageError(f"no host memory for a staging buffer of {format_size(size_bytes)}: {error}") from error
    # Loader workers are forked: were the buffers theirs too, every page that is staged later would be copied first.
    if hasattr(mmap, "MADV_DONTFORK"):  # Linux
        memory.madvise(mmap.MADV_DONTFORK)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    # Touch every page now: a page fault in the middle of training costs more than the copy that meets it.
    ctypes.memset(address, 0, size_bytes)
    return StagingBuffer(index, memory, address)
