"""Reads and verifies what dead runs had in host memory, and frees what nobody can resume from.

docs/explanation/memory-tier.md has the rules. By these, :mod:`.start.memory` decides what is put on storage.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import mmap
import os
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash
from pydantic import ValidationError

from checkflow.core.errors import CorruptCheckpointError, LockedError, StorageError, UnsupportedError
from checkflow.runtime.format.digest import Digest, digest_memory
from checkflow.runtime.format.layout import Layout, make_layout
from checkflow.runtime.format.manifest import MAX_EXTRA_BYTES, MAX_MANIFEST_BYTES, MAX_STEP
from checkflow.runtime.memory_tier import records
from checkflow.runtime.memory_tier.orphans import (
    FOLDER,
    YOUNG_SECONDS,
    Left,
    distrust_of,
    find_left,
    is_free,
    is_marked,
    open_kept,
    read_kept,
    read_life,
    read_records,
    stored_step,
    words_of,
)
from checkflow.runtime.memory_tier.records import (
    LAYOUTS,
    MARK,
    MOST_BYTES,
    NOTHING,
    OWNER,
    OWNERS,
    CaptureRecord,
    Owner,
    RunLife,
    remove,
)
from checkflow.runtime.store import retention
from checkflow.runtime.store.discovery import open_verified
from checkflow.runtime.store.files import parse_step, run_of
from checkflow.runtime.store.parts import Source
from checkflow.runtime.store.store import Store
from checkflow.runtime.system import fs
from checkflow.runtime.system.aligned_memory import address_of

logger = logging.getLogger("checkflow")

VOID = "it was captured by a plan that does not fit its job"
_MOVED_SECONDS = 3600.0  # its checkpoints are gone, most often deleted
_STORED_SECONDS = 86400.0  # storage has a version as new, and its job did not come back
_OLD_SECONDS = 7 * 86400.0  # its checkpoints may be on an unmounted disk
_WAIT_SECONDS = 5.0  # for a dying run


class _TornError(CorruptCheckpointError):
    """The bytes are not the boundary's: the plan that captured them does not fit the job."""


@dataclass(frozen=True)
class NewestStored:
    """Step and run of the newest checkpoint on storage."""

    step: int = NOTHING
    run_id: str = ""


@dataclass(frozen=True)
class Found:
    """A found capture is one that a dead run, or one of its ranks, has left on this machine.

    Attributes:
        index: of its buffer.
        void: an audit has refuted the plan that made it, and it has no audit of its own that says more.
    """

    path: Path
    index: int
    life: RunLife
    record: CaptureRecord
    void: bool = False


def folder_of(directory: Path, mark: str = MARK) -> Path | None:
    """Return the previous run's folder by its mark; None if it ended by itself, or this job may not take it.

    Raises:
        LockedError: another process uses it.
        StorageError: it cannot be looked for now.
    """
    try:
        return find_left(directory, _WAIT_SECONDS, mark)
    except FileNotFoundError:
        return None
    except LockedError:
        raise
    except StorageError as error:
        logger.warning("what the run before had in host memory is passed over: %s", error)
        return None
    except OSError as error:
        raise StorageError(f"cannot look for what the run before had in host memory: {error.strerror}") from error


def captures_in(path: Path) -> list[Found]:
    """Return the captures in a dead run's folder. Raises CorruptCheckpointError, OSError."""
    with fs.folder(str(path)) as folder:
        life = read_life(path, folder)
        found = [Found(path, index, life, one) for index, one in read_records(folder).items()]
    doubtful = {one.record.plan_digest for one in found if _rests_on_plan(one.record)}
    refuted = {one.record.plan_digest for one in found if one.record.plan_digest in doubtful and _refutes_plan(one)}
    return [
        dataclasses.replace(one, void=_rests_on_plan(one.record) and one.record.plan_digest in refuted) for one in found
    ]


def _rests_on_plan(record: CaptureRecord) -> bool:
    return record.by_plan and not record.audited


def _refutes_plan(one: Found) -> bool:
    """Return whether an audit refutes a capture, and the plan that made it."""
    if not (one.record.by_plan and one.record.audited):
        return False
    try:
        load(one)
    except (CorruptCheckpointError, UnsupportedError, ValidationError) as error:  # logged when it is taken
        return isinstance(error, _TornError)
    return False


def newest_stored(store: Store) -> NewestStored:
    """A run's captures must be newer than this checkpoint."""
    newest = next(iter(store.checkpoints()), None)
    step = None if newest is None else parse_step(newest.name)
    return NewestStored() if newest is None or step is None else NewestStored(step, run_of(newest))


def refuse_other_life(life: RunLife, storage: NewestStored) -> None:
    """Check that storage has all that the run knew it to have, and nothing of another run since."""
    whole = storage.step >= max(life.durable, life.base)
    its_own = storage.run_id in ("", life.run_id)  # the restore explains unreadable ones
    if not (whole and (its_own or (storage.step, storage.run_id) == (life.base, life.base_run))):
        raise CorruptCheckpointError("storage is not what its run left there")


def worth_keeping(store: Store, left: Iterable[tuple[int, Mapping[str, Any]]]) -> frozenset[int]:
    """Return the steps that stay for another reason than being new. ``left``: captures, by step and ``info``."""
    known = [*store.look(), *(retention.known(step, info) for step, info in left)]
    later = [retention.Known(MAX_STEP - number) for number in range(store.rules.keep_latest)]
    return retention.kept(store.rules, [*known, *later], MAX_STEP)


def load(found: Found) -> tuple[dict[str, Source], Layout, bytes, mmap.mmap]:
    """Return what a capture's tensors are parts of, its layout, extra state and bytes.

    Raises CorruptCheckpointError, UnsupportedError or ValidationError if they do not match its record, or it is void;
    OSError if they are unreadable now.
    """
    if found.void:
        raise CorruptCheckpointError(VOID)
    record = found.record
    with fs.folder(str(found.path)) as folder:
        data = read_kept(folder, f"layout-{record.layout}.json", MAX_MANIFEST_BYTES)
        extra = read_kept(folder, f"buffer-{found.index}.extra", MAX_EXTRA_BYTES)
        if (xxhash.xxh3_128_hexdigest(data), xxhash.xxh3_128_hexdigest(extra)) != (record.layout, record.extra):
            raise CorruptCheckpointError("its layout or its extra state is damaged")
        tensors = LAYOUTS.validate_json(data)
        layout = make_layout([one.record() for one in tensors], shard=found.life.rank, shards=found.life.ranks)
        memory = _map(folder, f"buffer-{found.index}", layout.buffer_bytes)
    view = memoryview(memory)
    for file in layout.files:  # another release may lay out files differently
        if view[file.staging_offset : file.staging_offset + len(file.header)] != file.header:
            raise CorruptCheckpointError(f"its buffer is not laid out as {file.name} is")
    for name, kept in record.digests.items():
        placed = layout.tensors.get(name)
        if placed is None or Digest(kept.rule, int(kept.value, 16)) != digest_memory(
            kept.rule, address_of(view) + placed.staging_offset, placed.record.size_bytes
        ):
            raise _TornError(f"it is torn: {name} was written before its copy was made")
    return {one.name: one.source.source() for one in tensors if one.source is not None}, layout, extra, memory


def _map(folder: int, name: str, least_bytes: int) -> mmap.mmap:
    fd, size_bytes = open_kept(folder, name)
    try:
        if size_bytes < max(1, least_bytes):
            raise CorruptCheckpointError("its buffer is too small")
        return mmap.mmap(fd, size_bytes, access=mmap.ACCESS_READ)
    finally:
        fs.close_quietly(fd)


def delete_old(store: Store) -> None:
    """Once the newest checkpoint proves whole, delete old ones that a dead run left, to make room."""
    complete, newest = store.look(), next(iter(store.checkpoints()), None)
    step = None if newest is None else parse_step(newest.name)
    if (
        newest is None
        or step is None
        or all(one.step in retention.kept(store.rules, complete, step) for one in complete)
    ):
        return
    try:
        with open_verified(newest, store.trust):
            store.went_on_from(step)
    except StorageError as error:  # logged when it is restored
        logger.debug("old checkpoints stay for now: %s", error)


def tidy(own: Collection[Path], held: Path | None) -> None:
    """Free the memory of other dead jobs from which nobody can resume.

    Args:
        own: folders that this job is to take.
        held: the directory whose lock this process holds, so that no other job starts there.
    """
    try:
        names = fs.folder_names(str(records.ROOT))
    except OSError:  # no shared memory
        return
    for name in filter(FOLDER.fullmatch, names):
        path = records.ROOT / name
        try:
            if path not in own and _is_orphan(path, held):
                remove(path)
        except (OSError, StorageError, ValidationError) as error:
            logger.debug("%s is left alone: %s", path, words_of(error))


def _is_orphan(path: Path, held: Path | None) -> bool:
    with fs.folder(str(path)) as folder:
        age_seconds = time.time() - os.fstat(folder).st_mtime
        if distrust_of(folder) is not None:
            return False
        young, known = age_seconds < YOUNG_SECONDS, fs.exists(OWNER, dir_fd=folder)
        owner = OWNERS.validate_json(read_kept(folder, OWNER, MOST_BYTES)) if known else None
        if young and (owner is None or held is None or not owner.is_of(held)):
            return False  # do not even test its lock, which its job may be about to take
        if not is_free(folder):
            return False
        if owner is None:
            return True
        left = read_records(folder).values() if age_seconds > _STORED_SECONDS else ()
    try:
        there = owner.is_of(owner.directory)
    except (FileNotFoundError, NotADirectoryError):
        there = False
    if not there:
        return age_seconds > (_MOVED_SECONDS if _is_mounted(owner) else _OLD_SECONDS)
    if not is_marked(path, Path(owner.directory)):
        return True
    if age_seconds <= _STORED_SECONDS:
        return False
    stored = stored_step(owner)
    return max((record.step for record in left), default=NOTHING) <= (NOTHING if stored is None else stored)


def free(left: Left, *, force: bool = False) -> str | None:
    """Free a dead job's folder; returns why it stays, or None. ``force``: even what storage does not have."""
    if not left.own:
        return f"it is of {left.owner}"
    if left.only_copy and not force:
        return f"step {left.step} is nowhere else: --force gives it up"
    try:
        with fs.folder(str(left.path)) as folder, contextlib.ExitStack() as held:
            if time.time() - os.fstat(folder).st_mtime < YOUNG_SECONDS and left.lives is None:
                return "its job may be about to begin"
            with contextlib.suppress(FileNotFoundError):  # killed before it wrote the owner
                lock = fs.open_claimed(OWNER, dir_fd=folder)
                held.callback(fs.close_quietly, lock)
                fs.flock(lock)
            remove(left.path)
    except BlockingIOError:
        return "its job lives"
    except FileNotFoundError:
        return None
    except OSError as error:
        return error.strerror or str(error)
    return "it cannot be removed" if os.path.lexists(left.path) else None


def _is_mounted(owner: Owner) -> bool:
    """Return whether the file system of the checkpoints is mounted where it was."""
    directory = Path(owner.directory)
    for path in (directory, *directory.parents):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            return os.stat(path).st_dev == owner.device
    return False
