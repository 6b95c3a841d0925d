"""Host memory that outlives the process: what a killed job had captured, and storage did not have yet.

Staging buffers are files in shared memory, in a folder of their job (:mod:`.records`). A record is removed before
the first byte of the next capture comes into its buffer, and gets its name by a rename when the last one has arrived:
at whatever instant the process dies, a buffer with a record is whole. Where the capture is to be audited, the record
has what its bytes are held against. The next run takes a capture (:mod:`.recovery`) only where storage is still what
its run has left.

Where there is no shared memory, or too little, buffers are the process's alone. Loaders pass batches through the same
file system, and die where it is full: at most half of what is free in it is taken.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import mmap
import os
import secrets
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash
from pydantic import ValidationError

from checkflow.core.errors import CheckflowError, StorageError
from checkflow.core.units import format_size
from checkflow.runtime.format.layout import Layout
from checkflow.runtime.format.manifest import to_info
from checkflow.runtime.memory_tier import records
from checkflow.runtime.memory_tier.records import (
    LIFE,
    LIVES,
    MARK,
    MARKS,
    MOST_BYTES,
    NOTHING,
    OWNER,
    OWNERS,
    PIECE_BYTES,
    PREFIX,
    RECORDS,
    KeptDigest,
    Life,
    Mark,
    Owner,
    Record,
    StagedCheckpoint,
    boot_id,
    dump_layout,
    give_pages_back,
    remove,
)
from checkflow.runtime.system import fs, numa
from checkflow.runtime.system.aligned_memory import map_address

logger = logging.getLogger("checkflow")

SHARE = 0.5  # of what is free in shared memory, at most
_SMALL_BYTES = 1 << 20  # of extra state: no more than what is always there
_NEW = os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True)
class _Kept:
    """A record that is there, or just about to be."""

    step: int
    plan_digest: str
    by_plan: bool


class MemoryTier:
    """The staging buffers of one job in shared memory.

    Args:
        directory: of the checkpoints; exists, and is locked by this process.
        life: the run.
    """

    def __init__(self, directory: Path, life: Life) -> None:
        self._directory, self._life = directory, life
        self._pid = os.getpid()
        self.survives = False  # captures outlive the process, or did until this was closed
        self._unmarked = False  # the folder is there, and nothing beside the checkpoints says which one it is
        self._token = ""
        self._path: Path | None = None  # of the folder
        self._folder: int | None = None
        self._lock: int | None = None
        self._told = False  # that memory ends with the process
        self._mutex = threading.RLock()  # around records, which several threads make and remove
        self._memories: list[mmap.mmap] = []
        self._layouts: dict[int, tuple[Layout, str]] = {}  # by identity; and the digests of their files
        self._kept: dict[int, _Kept] = {}  # by buffer

    def allocate(self, count: int, size_bytes: int, node: int | None) -> list[mmap.mmap] | None:
        """So many buffers of so many bytes, whose pages are there; None: there is no room in shared memory.

        Args:
            node: the NUMA node that they are to lie on, if that matters.
        """
        if os.getpid() != self._pid:  # a forked child: what is beside the checkpoints is its parent's
            return None
        self.close()
        try:
            _refuse_too_much(count * size_bytes)
            self._open()
            for index in range(count):
                self._memories.append(self._map(index, size_bytes, node))
        except (OSError, ValueError, CheckflowError) as error:
            self.close()
            self.survives = False
            self._tell(f"{records.ROOT}: {error.strerror}" if isinstance(error, OSError) else error)
            return None
        except BaseException:
            self.close()
            raise
        self._unmarked, self.survives = True, False
        self.mark()
        return list(self._memories)

    def give_up(self, reason: str) -> None:
        """Buffers lie elsewhere from now on, and end with the process."""
        self.close()
        self.survives = False
        self._tell(reason)

    def mark(self) -> bool:
        """Say beside the checkpoints where the memory is, unless that was said; returns whether it is."""
        if self._is_mine and self._unmarked:
            try:
                with fs.folder(str(self._directory)) as beside:
                    _publish(beside, MARK, MARKS.dump_json(Mark(self._token, boot_id())))
            except OSError as error:
                self._tell(f"{self._directory / MARK} cannot be written: {error.strerror}")
                return False
            self._unmarked, self.survives = False, True
            if self._told:
                self._told = False
                logger.info("captures in host memory outlive the process from now on")
        return self.survives

    def _tell(self, reason: object) -> None:
        if not self._told:
            self._told = True
            logger.warning("captures in host memory end with the process, and storage is what is left then: %s", reason)

    def forget(self, index: int) -> None:
        """What a buffer holds is void, or about to be written over.

        Raises:
            StorageError: the record stays, so that nothing may be written there.
        """
        if not self._is_mine:
            return
        with self._mutex:
            try:
                with contextlib.suppress(FileNotFoundError):  # it has no record, or the system took the folder away
                    fs.unlink(f"buffer-{index}.json", dir_fd=self._open_folder)
            except OSError as error:
                raise StorageError(f"cannot remove a record from {self._path}: {error.strerror}") from error
            self._kept.pop(index, None)

    def stored(self, step: int) -> None:
        """Storage has this step: it must still have it when the next run takes what is later."""
        if not self._is_mine:
            return
        self._life = dataclasses.replace(self._life, durable=step)
        try:
            self._publish(LIFE, LIVES.dump_json(self._life))
        except OSError as error:  # what it says is true, if not all
            logger.debug("cannot note step %d in %s: %s", step, self._path, error)

    def keep(self, capture: StagedCheckpoint, extra: bytes, info: dict[str, Any]) -> None:
        """A capture is complete. Without a record it ends with the process, and no more is lost: errors of the system,
        and what cannot be written down, are storage's to tell.

        Args:
            extra: its extra state.
            info: for its manifest.
        """
        if not self._is_mine:
            return
        index = capture.buffer.index
        audited = {} if capture.digests is None else capture.digests.take()
        try:
            record = Record(
                capture.step, self._keep_layout(capture.layout), xxhash.xxh3_128_hexdigest(extra), capture.plan_digest,
                capture.by_plan, capture.digests is not None, capture.ties, capture.absent,
                {name: KeptDigest(one.rule, f"{one.value:x}") for name, one in {**audited, **capture.settled}.items()},
                to_info(info),
            )  # fmt: skip
            if len(extra) > _SMALL_BYTES:
                _refuse_too_much(len(extra))
            _publish(self._open_folder, f"buffer-{index}.extra", extra)
            data = RECORDS.dump_json(record)
            with self._mutex:
                self._kept[index] = _Kept(capture.step, capture.plan_digest, capture.by_plan)
                self._publish(f"buffer-{index}.json", data)
        except (OSError, ValueError, CheckflowError) as error:
            self.forget(index)
            logger.debug("the capture of step %d ends with the process: %s", capture.step, error)

    def distrust(self, plan_digest: str) -> None:
        """An audit refuted this plan: what was captured by it may be torn."""
        with self._mutex:
            for index, kept in list(self._kept.items()):
                if kept.by_plan and kept.plan_digest == plan_digest:
                    self.forget(index)

    def step_of(self, index: int) -> int:
        """The step of a complete capture in this buffer, or ``NOTHING``."""
        kept = self._kept.get(index)
        return NOTHING if kept is None else kept.step

    def newest(self) -> int | None:
        """The step of the newest capture that the next run would find."""
        return max((kept.step for kept in list(self._kept.values())), default=None)

    def close(self, *, leave: bool = False) -> None:
        """Give the memory back. Interrupted, it can be called again, and once more is harmless.

        Args:
            leave: whether the next run is to find the newest capture.
        """
        if os.getpid() != self._pid:  # a forked child, which may give nothing back
            return
        with self._mutex:
            marked = self._marked() if self._path is not None else None
            if leave and self._path is not None and marked in (None, self._token):  # None: storage may be away
                newest = self.newest()
                for index, memory in enumerate(self._memories):
                    if self.step_of(index) != newest:
                        self.forget(index)
                        give_pages_back(memory)
            elif self._path is not None:
                if marked == self._token:  # otherwise the directory is another one by now
                    with contextlib.suppress(OSError):
                        os.unlink(self._directory / MARK)
                for memory in self._memories:
                    give_pages_back(memory)
                remove(self._path)
            self._path = None
            self._memories.clear()
            self._kept.clear()
            self._layouts.clear()
            if self._lock is not None:
                fs.close_quietly(self._lock)
                self._lock = None
            if self._folder is not None:
                fs.close_quietly(self._folder)
                self._folder = None

    @property
    def _is_mine(self) -> bool:
        return self._folder is not None and os.getpid() == self._pid

    @property
    def _open_folder(self) -> int:
        assert self._folder is not None
        return self._folder

    def _marked(self) -> str | None:
        """The token beside the checkpoints; None: it cannot be read."""
        try:
            with fs.folder(str(self._directory)) as beside:
                return MARKS.validate_json(fs.read_small(MARK, MOST_BYTES, dir_fd=beside)).token
        except (OSError, ValidationError):
            return None

    def _open(self) -> None:
        """Make the folder."""
        self._token = secrets.token_hex(16)
        path = records.ROOT / f"{PREFIX}{self._token}"
        os.mkdir(path, 0o700)
        self._path = path
        self._folder = fs.pass_by(fs.open_folder(str(path)))
        with fs.folder(str(self._directory)) as beside:
            status = os.fstat(beside)
        owner = Owner(str(self._directory), status.st_dev, status.st_ino, self._pid)
        self._publish(OWNER, OWNERS.dump_json(owner))
        self._publish(LIFE, LIVES.dump_json(self._life))
        self._lock = fs.open_claimed(OWNER, dir_fd=self._folder)
        fs.flock(self._lock)

    def _map(self, index: int, size_bytes: int, node: int | None) -> mmap.mmap:
        fd = os.open(f"buffer-{index}", os.O_RDWR | _NEW, 0o600, dir_fd=self._open_folder)
        try:
            os.ftruncate(fd, size_bytes)
            memory = mmap.mmap(fd, size_bytes)
            if node is not None:  # before there are pages
                numa.prefer_node(map_address(memory), size_bytes, node)
            for begin in range(0, size_bytes, PIECE_BYTES):  # or a page fault where memory is short would be SIGBUS
                os.posix_fallocate(fd, begin, min(PIECE_BYTES, size_bytes - begin))
        finally:
            os.close(fd)
        return memory

    def _keep_layout(self, layout: Layout) -> str:
        """The digest of the file that says a layout: one for each arrangement of the job's state."""
        if id(layout) not in self._layouts:
            data = dump_layout(layout)
            digest = xxhash.xxh3_128_hexdigest(data)
            self._publish(f"layout-{digest}.json", data)
            self._layouts[id(layout)] = layout, digest
        return self._layouts[id(layout)][1]

    def _publish(self, name: str, data: bytes) -> None:
        _publish(self._open_folder, name, data)


def _refuse_too_much(size_bytes: int) -> None:
    """Leave others their part of shared memory.

    Raises:
        StorageError: it would be more than half of what is free, or the system has no shared memory there.
        OSError: nor anything else.
    """
    room = os.statvfs(records.ROOT)
    if (kind := fs.file_system(records.ROOT)[0]) not in (None, "tmpfs"):
        raise StorageError(f"{records.ROOT} is no shared memory, but {kind}")
    free_bytes = room.f_bavail * room.f_frsize
    if size_bytes > SHARE * free_bytes:
        raise StorageError(
            f"{format_size(size_bytes)} are more than half of the {format_size(free_bytes)} that are free in "
            f"{records.ROOT} (--shm-size gives a container more)"
        )


def _publish(folder: int, name: str, data: bytes) -> None:
    fs.publish(name, data, dir_fd=folder, mode=0o600)
