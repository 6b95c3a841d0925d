"""Finds the checkpoints of a directory, and the newest whole one. Only a check of every byte proves that one
is whole.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from checkflow.core.errors import CorruptCheckpointError, StorageError
from checkflow.runtime.store.files import parse_step
from checkflow.runtime.store.reader import Checkpoint, open_checkpoint
from checkflow.runtime.store.trust import ForeignError, Trust
from checkflow.runtime.system import fs

if TYPE_CHECKING:
    from checkflow.runtime.store.store import Store

logger = logging.getLogger("checkflow")


def find(directory: str | os.PathLike[str]) -> tuple[Path, ...]:
    """Paths of the checkpoints in a directory, newest (highest step) first. Reads names only."""
    root = Path(directory)
    try:
        found = [(step, name) for name in fs.folder_names(str(root)) if (step := parse_step(name)) is not None]
    except OSError as error:
        raise StorageError(f"cannot read the checkpoint directory {root}: {error.strerror}") from error
    return tuple(root / name for _, name in sorted(found, reverse=True))


def open_verified(path: Path, trust: Trust | None = None) -> Checkpoint:
    """Open a checkpoint after verifying every byte."""
    checkpoint = open_checkpoint(path, trust=trust)
    try:
        checkpoint.verify()
    except BaseException:
        checkpoint.close()
        raise
    return checkpoint


def find_valid(directory: str | os.PathLike[str]) -> Checkpoint | None:
    """The newest whole checkpoint of a directory, all bytes verified; nothing is renamed.

    Those that a running job deletes meanwhile are skipped. Raises StorageError if every candidate is unreadable.
    """
    passed: list[Path] = []

    def pass_over(path: Path, error: StorageError) -> None:
        logger.warning("passing over %s: %s", path.name, error)
        passed.append(path)

    paths = find(directory)
    while True:
        passed.clear()
        found, failed = None, None
        try:
            found = _newest_valid(paths, pass_over)
        except StorageError as error:
            failed = error
        if found is not None and not passed:
            return found
        try:
            before, paths = paths, find(directory)
        except BaseException:
            if found is not None:
                found.close()
            raise
        # A running job may have made newer ones meanwhile, and deleted those that were skipped.
        if found is not None:
            if not any((parse_step(path.name) or 0) > found.step for path in paths if path not in before):
                return found
            found.close()
        elif paths == before:
            if failed is not None:
                raise failed
            return None


def recover(store: Store) -> Checkpoint | None:
    """The newest whole checkpoint for a job to resume from; None if there is none. It is step (10) of the commit
    protocol.

    A damaged one is set aside and an unreadable one skipped, in favour of the next older one. Raises StorageError if
    checkpoints exist but none can be read: starting from scratch would be wrong.
    """
    return _newest_valid(store.checkpoints(), lambda path, error: refuse(store, path, error), store.trust)


def refuse(store: Store, path: Path, error: StorageError) -> None:
    """Set a checkpoint aside if this error proves damage, and log it."""
    if not isinstance(error, CorruptCheckpointError):
        logger.error("cannot read the checkpoint %s, trying an older one: %s", path, error)
        return
    try:
        moved = store.set_aside(path)
    except StorageError as failed:
        logger.error("the checkpoint %s is damaged (%s) and stays: %s", path, error, failed)
    else:
        logger.error("the checkpoint %s is damaged (%s); set aside as %s", path, error, moved.name)


def _newest_valid(
    paths: tuple[Path, ...], refused: Callable[[Path, StorageError], None], trust: Trust | None = None
) -> Checkpoint | None:
    unreadable: StorageError | None = None
    for path in paths:
        try:
            return open_verified(path, trust)
        except ForeignError:
            raise
        except StorageError as error:
            refused(path, error)
            if not isinstance(error, CorruptCheckpointError):
                unreadable = unreadable or error
    if unreadable is not None:
        raise unreadable
    return None
