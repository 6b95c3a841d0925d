"""At a job's start: what the run before had in host memory when it died is put on storage (:mod:`.memory_tier`).

From there it is resumed like any checkpoint, every byte verified. Only what is newer than all that storage has is
taken, and only by the job of the same directory, the same user and the same start of the machine.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import re
import time
from dataclasses import asdict
from pathlib import Path

import xxhash
from pydantic import ValidationError

from checkflow.errors import CheckflowError, CorruptCheckpointError, StorageError
from checkflow.runtime import files, memory_tier
from checkflow.runtime.digest import Digest, digest_memory
from checkflow.runtime.layout import Layout, TensorRecord, make_layout
from checkflow.runtime.left_memory import (
    MOST_BYTES,
    find_left,
    is_free,
    is_ours,
    read_kept,
    read_records,
    words_of,
)
from checkflow.runtime.manifest import MAX_EXTRA_BYTES, MAX_MANIFEST_BYTES
from checkflow.runtime.memory import map_address
from checkflow.runtime.memory_tier import (
    LAYOUTS,
    MARK,
    MARKS,
    OWNER,
    OWNERS,
    PREFIX,
    Record,
    mounts,
    remove,
)
from checkflow.runtime.opening import parse_step
from checkflow.runtime.store import Store
from checkflow.small_files import read_regular

logger = logging.getLogger("checkflow")

_FOLDER = re.compile(rf"{PREFIX}[0-9a-f]{{32}}", re.ASCII)
_YOUNG_SECONDS = 60.0  # a folder whose job may not have come to lock it


def reclaim(store: Store, mode: str | int) -> int | None:
    """Put the newest capture of the run before on storage; its step, or None where storage had all of it.

    Args:
        mode: how the job is to be resumed: where that is by a step, its capture is put there, too. What the job then
            does not go on from is set aside like other checkpoints, or keeps it from beginning anew.

    Raises:
        StorageError: a capture cannot be written. It stays where it is.
    """
    _tidy()
    path = _folder_of(store.directory)
    if path is None:
        return None
    step = _save(store, path, mode if isinstance(mode, int) else None)
    with contextlib.suppress(OSError):
        os.unlink(store.directory / MARK)
    remove(path)
    return step


def _folder_of(directory: Path) -> Path | None:
    """The folder of the run before; None where it ended by itself, or what it left is not this job's to take."""
    try:
        return find_left(directory)
    except FileNotFoundError:
        return None
    except (OSError, StorageError, ValidationError) as error:
        logger.warning("what the run before had in host memory is passed over: %s", words_of(error))
        return None


def _save(store: Store, path: Path, wanted: int | None) -> int | None:
    """Commit the newest capture that is newer than all checkpoints, and the one that is wanted."""
    steps = {step for one in store.checkpoints() if (step := parse_step(one.name)) is not None}
    beyond, newest = max(steps, default=-1), None
    loaded: list[tuple[Record, Layout, bytes, mmap.mmap]] = []
    with files.folder(str(path)) as folder:
        for index, record in sorted(read_records(folder).items(), key=lambda item: -item[1].step):
            if record.step in steps or not (record.step == wanted or (newest is None and record.step > beyond)):
                continue
            try:
                loaded.append((record, *_load(folder, index, record)))
            except (OSError, CheckflowError, ValidationError) as error:
                logger.warning("step %d in host memory is passed over: %s", record.step, words_of(error))
            else:
                newest = record.step if newest is None else newest
    for one in loaded:  # the one that is wanted last: retention lets it stay
        _commit(store, path, *one)
    return newest


def _load(folder: int, index: int, record: Record) -> tuple[Layout, bytes, mmap.mmap]:
    """A capture's layout, extra state and bytes.

    Raises:
        CorruptCheckpointError: they are not what its record says.
    """
    data = read_kept(folder, f"layout-{record.layout}.json", MAX_MANIFEST_BYTES)
    extra = read_kept(folder, f"buffer-{index}.extra", MAX_EXTRA_BYTES)
    if (xxhash.xxh3_128_hexdigest(data), xxhash.xxh3_128_hexdigest(extra)) != (record.layout, record.extra):
        raise CorruptCheckpointError("its layout or its extra state is damaged")
    layout = make_layout([TensorRecord(**asdict(one)) for one in LAYOUTS.validate_json(data)])
    fd = files.open_read(f"buffer-{index}", dir_fd=folder)
    try:
        size_bytes = files.regular_size(fd)
        if size_bytes is None or size_bytes < max(1, layout.buffer_bytes):
            raise CorruptCheckpointError("its buffer is too small")
        memory = mmap.mmap(fd, size_bytes, prot=mmap.PROT_READ | mmap.PROT_WRITE, flags=mmap.MAP_PRIVATE)
    finally:
        files.close_quietly(fd)
    address = map_address(memory)
    for name, kept in record.digests.items():
        placed = layout.tensors.get(name)
        if placed is None or Digest(kept.rule, int(kept.value, 16)) != digest_memory(
            kept.rule, address + placed.staging_offset, placed.record.size_bytes
        ):
            raise CorruptCheckpointError(f"it is torn: {name} was written before its copy was made")
    return layout, extra, memory


def _commit(store: Store, path: Path, record: Record, layout: Layout, extra: bytes, memory: mmap.mmap) -> None:
    try:
        store.commit(
            record.step, layout, memoryview(memory), extra, record.info,
            ties=record.ties, absent=record.absent, plan_digest=record.plan_digest,
        )  # fmt: skip
    except StorageError as error:
        raise StorageError(
            f"step {record.step} lies in host memory, where the run before left it, and cannot be saved: {error}; "
            f"mend that, or delete {path} to give it up"
        ) from error
    logger.info("step %d was complete in host memory when the run before died: it is saved now", record.step)


def _tidy() -> None:
    """Give back the memory of jobs that are dead, and whose checkpoints are gone."""
    try:
        names = files.folder_names(str(memory_tier.ROOT))
    except OSError:  # there is no shared memory
        return
    for name in filter(_FOLDER.fullmatch, names):
        path = memory_tier.ROOT / name
        try:
            if _is_orphan(path):
                remove(path)
        except (OSError, StorageError, ValidationError) as error:
            logger.debug("%s is left alone: %s", path, words_of(error))


def _is_orphan(path: Path) -> bool:
    with files.folder(str(path)) as folder:
        age_seconds = time.time() - os.fstat(folder).st_mtime
        if not is_ours(folder) or age_seconds < _YOUNG_SECONDS or not is_free(folder):
            return False
        if not files.exists(OWNER, dir_fd=folder):
            return True
        owner = OWNERS.validate_json(read_kept(folder, OWNER, MOST_BYTES))
    if owner.mounts != mounts():
        return False  # the directory may be there for others
    try:
        mark = MARKS.validate_json(read_regular(Path(owner.directory) / MARK, MOST_BYTES))
    except (FileNotFoundError, NotADirectoryError):
        return True
    return path.name != f"{PREFIX}{mark.token}"
