"""Host memory in which checkpoints are staged: three buffers, so that one may be written, one complete, one filling.

They lie in shared memory if there is room (:mod:`.tier`). For a GPU they are locked, on its NUMA node; if shared memory
cannot be locked, CUDA allocates them, and they end with the process.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import os
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol, TypeVar

from checkflow.core.errors import CheckflowError, StorageError
from checkflow.core.machine.host_memory import free_host_memory_bytes
from checkflow.core.units import format_size
from checkflow.runtime.memory_tier.records import PIECE_BYTES
from checkflow.runtime.memory_tier.tier import MemoryTier
from checkflow.runtime.system import numa
from checkflow.runtime.system.aligned_memory import MADV_WIPEONFORK, MAP_NORESERVE, advise, map_address, map_at

logger = logging.getLogger("checkflow")

_MADV_POPULATE_WRITE = 23  # Linux 5.14
_PROT_NONE = 0  # Python lacks the name
_MOST_THREADS = 8  # that touch or lock memory; enough for its bandwidth
_Item = TypeVar("_Item")


class Locking(Protocol):
    """What a device needs done to host memory that it copies to (:class:`.transfer.cuda_device.CudaDevice`)."""

    @property
    def numa_node(self) -> int | None:
        """The nearest NUMA node, if it is known."""

    def register(self, address: int, size_bytes: int) -> None:
        """Lock memory in place; raises CheckflowError if the system refuses."""

    def unregister(self, address: int) -> None:
        """Undo :meth:`register`; raises CheckflowError if it cannot."""

    def allocate_host(self, size_bytes: int) -> int:
        """Allocate locked memory and return its address; raises CheckflowError if the system refuses."""

    def free_host(self, address: int) -> None:
        """Undo :meth:`allocate_host`; raises CheckflowError if it cannot."""


@dataclass(frozen=True, eq=False)
class StagingBuffer:
    """One buffer: page-aligned memory at ``address``, also as ``view``."""

    index: int
    memory: mmap.mmap | memoryview | ctypes.Array[ctypes.c_char]
    address: int

    @property
    def view(self) -> memoryview:
        return memoryview(self.memory).cast("B")


class StagingBuffers:
    """Buffers of one size, made by :meth:`grow`; ``take`` waits for a free one.

    Args:
        locking: locks them, for a device that needs it.
        urge: called before waiting for all: a holder should give its buffer back.
        tier: their shared memory, if they should outlive the process.
    """

    def __init__(
        self,
        count: int,
        locking: Locking | None = None,
        urge: Callable[[], None] = lambda: None,
        tier: MemoryTier | None = None,
    ) -> None:
        self.size_bytes = 0
        self._count, self._locking, self._urge, self._tier = count, locking, urge, tier
        self._locked: list[int] = []  # addresses of those locked in place
        self._allocated = False  # allocated by the device, locked
        self._warned = False  # that they cannot be locked was logged
        self._all: list[StagingBuffer] = []
        self._free: list[StagingBuffer] = []
        self._mutex = threading.RLock()  # entered by itself, not by the condition: see system/signals.py
        self._changed = threading.Condition(self._mutex)

    def grow(self, size_bytes: int) -> None:
        """Make the buffers at least this large, once all are free. After a StorageError there are none."""
        wanted_bytes = max(size_bytes, 1)
        if wanted_bytes <= self.size_bytes:
            return
        self.wait_all_free()
        self.close()
        available = free_host_memory_bytes()
        if self._count * wanted_bytes > available:  # the kernel would grant it and kill the job later
            raise StorageError(
                f"{self._count} staging buffers of {format_size(size_bytes)} do not fit into the "
                f"{format_size(available)} of host memory that are free: pass host_buffers=2 or 1, or free some"
            )
        self._map(wanted_bytes)
        if (error := self._lock()) is not None and not self._allocate_locked(wanted_bytes, error):
            self._map(wanted_bytes)
            self._warn_unlocked(wanted_bytes, error)
        self.size_bytes = wanted_bytes
        self._free.extend(self._all)

    def _map(self, size_bytes: int) -> None:
        """Make all buffers, in shared memory if they should outlive the process and there is room."""
        node = None if self._locking is None else self._locking.numa_node
        shared = None if self._tier is None else self._tier.allocate(self._count, size_bytes, node)
        memories: Sequence[mmap.mmap | memoryview]
        memories = shared or [_private(size_bytes, node) for _ in range(self._count)]
        self._all = [StagingBuffer(index, memory, map_address(memory)) for index, memory in enumerate(memories)]
        if shared is not None:
            _apart.update(self._all)
        _in_threads(_touch, self._pieces())

    def _pieces(self) -> list[tuple[int, int]]:
        """Addresses and sizes of parts of all buffers."""
        return [
            (one.address + begin, min(PIECE_BYTES, len(one.memory) - begin))
            for one in self._all
            for begin in range(0, len(one.memory), PIECE_BYTES)
        ]

    def take(self) -> StagingBuffer:
        """Wait for a free buffer and take it. Its content is void from now on."""
        with self._mutex:
            while not self._free:
                self._changed.wait()
            buffer = min(self._free, key=self._worth)
            if self._tier is not None:
                self._tier.forget(buffer.index)
            self._free.remove(buffer)  # last: after a signal handler's error before this line, the buffer is free
            return buffer

    def _worth(self, buffer: StagingBuffer) -> int:
        """The step of a free buffer's capture: the newest stays for the next run as long as possible."""
        return 0 if self._tier is None else self._tier.step_of(buffer.index)

    @property
    def free(self) -> int:
        """How many can be taken without waiting."""
        return len(self._free)

    def give_back(self, buffer: StagingBuffer) -> None:
        """Return a buffer; its content is no longer needed."""
        with self._mutex:
            self._free.append(buffer)
            self._changed.notify_all()

    def wait_all_free(self) -> None:
        """Wait until every buffer has been given back."""
        self._urge()
        with self._mutex:
            while len(self._free) < len(self._all):
                self._changed.wait()

    @property
    def locked(self) -> bool:
        """Whether every buffer is locked, so that copies from a GPU run behind training."""
        return self._allocated or len(self._locked) == len(self._all)

    def _lock(self) -> CheckflowError | None:
        """Lock all in place; after a failure unlock all and return the error."""
        if (locking := self._locking) is None:
            return None

        def lock(buffer: StagingBuffer) -> None:
            locking.register(buffer.address, len(buffer.memory))
            self._locked.append(buffer.address)

        try:
            _in_threads(lock, self._all)
        except CheckflowError as error:
            self.close()
            return error
        return None

    def _allocate_locked(self, size_bytes: int, error: CheckflowError) -> bool:
        """Make all buffers in locked memory of the device's runtime, where shared memory cannot be locked (virtual
        machines).
        """
        assert self._locking is not None
        made: list[StagingBuffer] = []
        try:
            for index in range(self._count):
                made.append(_allocated(self._locking, index, size_bytes))
        except CheckflowError as refused:
            logger.debug("no locked memory for staging buffers: %s", refused)
            return False
        self._all, self._allocated = made, True
        _apart.update(made)
        _in_threads(_clear, self._pieces())
        if self._tier is not None:
            self._tier.give_up(f"shared memory cannot be locked in place: {error}")
        return True

    def _warn_unlocked(self, size_bytes: int, error: CheckflowError) -> None:
        if not self._warned:
            self._warned = True
            logger.warning(
                "staging memory (%d times %s) cannot be locked in place, so that copies from the GPU hold "
                "training: %s; raise the limit on locked memory (ulimit -l unlimited, or --ulimit memlock=-1 of a "
                "container), or pass host_buffers=2",
                self._count, format_size(size_bytes), error,
            )  # fmt: skip

    def _unlock(self) -> None:
        while self._locked and self._locking is not None:
            address = self._locked.pop()
            try:
                self._locking.unregister(address)
            except CheckflowError as error:  # the runtime ended first, with its locks
                logger.debug("staging memory is not unlocked: %s", error)

    def close(self, *, leave: bool = False) -> None:
        """Free the memory, once nobody uses it. ``leave``: complete captures stay for the next run."""
        self._unlock()
        self.size_bytes = 0
        self._free.clear()
        self._all.clear()
        self._allocated = False
        if self._tier is not None:
            self._tier.close(leave=leave)


def _private(size_bytes: int, node: int | None) -> mmap.mmap:
    """Memory of this process alone."""
    try:
        memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, ValueError, OverflowError) as error:
        raise StorageError(f"no host memory for a staging buffer of {format_size(size_bytes)}: {error}") from error
    # Forked loader workers would share the pages, and each write to a page would copy it first. So they get zeros.
    # Not MADV_DONTFORK: freeing the inherited object would unmap what a worker maps into the hole.
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # a kernel before 4.14: shared
            memory.madvise(MADV_WIPEONFORK)
    if node is not None:
        numa.prefer_node(map_address(memory), size_bytes, node)
    if hasattr(mmap, "MADV_HUGEPAGE"):  # Linux: few large pages are faster to touch, lock and copy to
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _allocated(locking: Locking, index: int, size_bytes: int) -> StagingBuffer:
    """Memory that the device's runtime allocates, and frees with the last view of it."""
    address = locking.allocate_host(size_bytes)
    memory = (ctypes.c_char * size_bytes).from_address(address)
    weakref.finalize(memory, _free, locking, address).atexit = False  # the runtime ends first and frees it
    return StagingBuffer(index, memory, address)


def _free(locking: Locking, address: int) -> None:
    try:
        locking.free_host(address)
    except CheckflowError as error:
        logger.debug("staging memory is not given back: %s", error)


def _in_threads(work: Callable[[_Item], None], items: Sequence[_Item]) -> None:
    """Map over threads: the kernel clears and locks pages on as many cores as ask for it."""
    with ThreadPoolExecutor(min(len(items), _MOST_THREADS, os.cpu_count() or 1)) as pool:
        for _ in pool.map(work, items):
            pass


def _touch(piece: tuple[int, int]) -> None:
    """Fault in every page for writing: a page fault during training costs more than the copy."""
    if not advise(*piece, _MADV_POPULATE_WRITE):  # an older kernel or another system
        _clear(piece)


def _clear(piece: tuple[int, int]) -> None:
    address, size_bytes = piece
    ctypes.memset(address, 0, size_bytes)


_apart: weakref.WeakSet[StagingBuffer] = weakref.WeakSet()  # shared buffers of this process


def _part() -> None:
    """In a forked child, replace shared buffers by zeros: it may train on, and must not write where its parent does."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    for buffer in list(_apart):
        size_bytes = len(buffer.memory)
        if not map_at(buffer.address, size_bytes, flags=flags):
            # No memory to promise (overcommit is off): make it inaccessible.
            map_at(buffer.address, size_bytes, flags=flags, protection=_PROT_NONE)


if sys.platform == "linux":  # no such shared memory elsewhere
    os.register_at_fork(after_in_child=_part)
