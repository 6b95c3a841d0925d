"""Host memory that outlives the process: staging buffers as files in shared memory (:mod:`.records`).

A record is removed before the next capture enters its buffer, and appears by a rename once all has arrived. So whenever
the process dies, a buffer with a record is whole.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import secrets
import threading
from collections.abc import Mapping
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
    CaptureRecord,
    KeptDigest,
    Mark,
    Owner,
    RunLife,
    StagedCheckpoint,
    boot_id,
    dump_layout,
    give_pages_back,
    rank_mark,
    remove,
)
from checkflow.runtime.store.parts import Source
from checkflow.runtime.store.store import sync_folder
from checkflow.runtime.system import fs, large_pages, mounts, numa
from checkflow.runtime.system.aligned_memory import map_address

logger = logging.getLogger("checkflow")

SHARE = 0.5  # of free shared memory, at most
_SMALL_BYTES = 1 << 20  # extra state up to this size is not checked for room
_NEW = os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True)
class _Kept:
    """A record that exists or is about to."""

    step: int
    plan_digest: str
    by_plan: bool


class MemoryTier:
    """The staging buffers of one job, or of one rank of a job, in shared memory. The job holds the lock of
    ``directory``.
    """

    def __init__(self, directory: Path, life: RunLife) -> None:
        self._directory, self._life = directory, life
        self._pid = os.getpid()
        self.survives = False  # captures outlive the process; stays as it was after close
        self._unmarked = False  # the folder exists, without a mark beside the checkpoints
        self._token = ""
        self._path: Path | None = None  # the folder's
        self._folder: int | None = None
        self._lock: int | None = None
        self._warned = False  # that memory ends with the process was logged
        self._mutex = threading.RLock()  # guards records: several threads make and remove them
        self._memories: list[memoryview] = []
        self._layouts: dict[int, tuple[Layout, str]] = {}  # by id(): layout, and digest of its file
        self._kept: dict[int, _Kept] = {}  # by buffer

    def allocate(self, count: int, size_bytes: int, node: int | None) -> list[memoryview] | None:
        """Allocate buffers with all their pages, on a NUMA node if that matters; None: no room in shared memory."""
        if os.getpid() != self._pid:  # a forked child: the mark is its parent's
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
            self._warn(f"{records.ROOT}: {error.strerror}" if isinstance(error, OSError) else error)
            return None
        except BaseException:
            self.close()
            raise
        self._unmarked, self.survives = True, False
        self.mark()
        return list(self._memories)

    def give_up(self, reason: str) -> None:
        """Buffers lie elsewhere from now on and end with the process."""
        self.close()
        self.survives = False
        self._warn(reason)

    def mark(self) -> bool:
        """Write beside the checkpoints where the memory is, once and durably; returns whether it is written.

        The next run is told to find the memory even where the file system of the checkpoints fails.
        """
        if self._is_mine and self._unmarked:
            try:
                with fs.folder(str(self._directory)) as beside:
                    data = MARKS.dump_json(Mark(self._token, boot_id()))
                    _publish(beside, self._mark, data, synced=True)
                    sync_folder(beside)
            except OSError as error:
                self._warn(f"{self._directory / self._mark} cannot be written: {error.strerror}")
                return False
            self._unmarked, self.survives = False, True
            if self._warned:
                self._warned = False
                logger.info("captures in host memory outlive the process from now on")
        return self.survives

    def _warn(self, reason: object) -> None:
        if not self._warned:
            self._warned = True
            logger.warning("captures in host memory end with the process, and only storage outlives it: %s", reason)

    def forget(self, index: int) -> None:
        """Void a buffer's record before the buffer is overwritten, which a StorageError forbids."""
        if not self._is_mine:
            return
        with self._mutex:
            try:
                with contextlib.suppress(FileNotFoundError):  # no record, or the system removed the folder
                    fs.unlink(f"buffer-{index}.json", dir_fd=self._open_folder)
            except OSError as error:
                raise StorageError(f"cannot remove a record from {self._path}: {error.strerror}") from error
            self._kept.pop(index, None)

    def stored(self, step: int) -> None:
        """Storage has this step, and must still have it when the next run takes a later one."""
        if not self._is_mine:
            return
        self._life = dataclasses.replace(self._life, durable=step)
        try:
            self._publish(LIFE, LIVES.dump_json(self._life))
        except OSError as error:  # the old content stays true
            logger.debug("cannot note step %d in %s: %s", step, self._path, error)

    def keep(self, capture: StagedCheckpoint, extra: bytes, info: dict[str, Any]) -> None:
        """Record a complete capture. If that fails, it only ends with the process; storage reports errors."""
        if not self._is_mine:
            return
        index = capture.buffer.index
        audited = {} if capture.digests is None else capture.digests.take()
        try:
            layout = self._keep_layout(capture.layout, capture.sources)
            record = CaptureRecord(
                capture.step, layout, xxhash.xxh3_128_hexdigest(extra), capture.plan_digest,
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
        """Void captures of a plan that an audit refuted."""
        with self._mutex:
            for index, kept in list(self._kept.items()):
                if kept.by_plan and kept.plan_digest == plan_digest:
                    self.forget(index)

    def step_of(self, index: int) -> int:
        """The step of the complete capture in this buffer, or ``NOTHING``."""
        kept = self._kept.get(index)
        return NOTHING if kept is None else kept.step

    def newest(self) -> int | None:
        """The step of the newest capture that the next run would find."""
        return max((kept.step for kept in list(self._kept.values())), default=None)

    def close(self, *, leave: bool = False) -> None:
        """Free the memory; may be called again, also after an interrupt. ``leave``: the newest capture for the next
        run, or all of a rank's, since others may lack the newest.
        """
        if os.getpid() != self._pid:  # a forked child frees nothing
            return
        with self._mutex:
            marked = self._marked() if self._path is not None else None
            if leave and self._path is not None and marked in (None, self._token):  # None: storage may be unreachable
                newest = self.newest()
                for index, memory in enumerate(self._memories):
                    step = self.step_of(index)
                    if step == NOTHING or (step != newest and self._life.ranks == 1):
                        self.forget(index)
                        give_pages_back(memory)
            elif self._path is not None:
                if marked == self._token:  # else it is another directory by now
                    with contextlib.suppress(OSError):
                        os.unlink(self._directory / self._mark)
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
    def _mark(self) -> str:
        return MARK if self._life.ranks == 1 else rank_mark(self._token)

    @property
    def _open_folder(self) -> int:
        assert self._folder is not None
        return self._folder

    def _marked(self) -> str | None:
        """The token beside the checkpoints; None: unreadable."""
        try:
            with fs.folder(str(self._directory)) as beside:
                return MARKS.validate_json(fs.read_small(self._mark, MOST_BYTES, dir_fd=beside)).token
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

    def _map(self, index: int, size_bytes: int, node: int | None) -> memoryview:
        fd = os.open(f"buffer-{index}", os.O_RDWR | _NEW, 0o600, dir_fd=self._open_folder)
        try:
            os.ftruncate(fd, size_bytes)
            memory = large_pages.map_file(fd, size_bytes)
            if node is not None:  # before pages are allocated
                numa.prefer_node(map_address(memory), size_bytes, node)
            large_pages.allocate(fd, size_bytes)
            for begin in range(0, size_bytes, PIECE_BYTES):  # or a later page fault could be a SIGBUS
                os.posix_fallocate(fd, begin, min(PIECE_BYTES, size_bytes - begin))
        finally:
            os.close(fd)
        return memory

    def _keep_layout(self, layout: Layout, sources: Mapping[str, Source]) -> str:
        """Write a layout's file, once for each layout; returns its digest."""
        if id(layout) not in self._layouts:
            data = dump_layout(layout, sources)
            digest = xxhash.xxh3_128_hexdigest(data)
            self._publish(f"layout-{digest}.json", data)
            self._layouts[id(layout)] = layout, digest
        return self._layouts[id(layout)][1]

    def _publish(self, name: str, data: bytes) -> None:
        _publish(self._open_folder, name, data)


def _refuse_too_much(size_bytes: int) -> None:
    """Leave others their part of shared memory. Raises StorageError if this is more than half of what is free."""
    room = os.statvfs(records.ROOT)
    if (kind := mounts.file_system(records.ROOT)[0]) not in (None, "tmpfs"):
        raise StorageError(f"{records.ROOT} is no shared memory, but {kind}")
    free_bytes = room.f_bavail * room.f_frsize
    if size_bytes > SHARE * free_bytes:
        raise StorageError(
            f"{format_size(size_bytes)} are more than half of the {format_size(free_bytes)} that are free in "
            f"{records.ROOT} (--shm-size gives a container more)"
        )


def _publish(folder: int, name: str, data: bytes, *, synced: bool = False) -> None:
    fs.publish(name, data, dir_fd=folder, mode=0o600, synced=synced)
