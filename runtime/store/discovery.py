"""Finds the checkpoints of a directory, and the newest whole one. Only a check of every byte proves that one
is whole.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from checkflow.core.errors import CorruptCheckpointError, StorageError
from checkflow.runtime.store.files import parse_step
from checkflow.runtime.store.reader import Checkpoint, open_checkpoint
from checkflow.runtime.store.trust import ForeignError, Trust
from checkflow.runtime.system import fs

logger = logging.getLogger("checkflow")
_T = TypeVar("_T")


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


def find_valid(directory: str | os.PathLike[str], trust: Trust | None = None) -> Checkpoint | None:
    """The newest checkpoint of a directory that is whole, byte for byte; nothing is renamed.

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
            found = _newest(paths, lambda path: open_verified(path, trust), pass_over)
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


def recover(paths: tuple[Path, ...], take: Callable[[Path], _T], set_aside: Callable[[Path], Path]) -> _T | None:
    """What ``take`` makes of the newest checkpoint that it can read, for a training job to go on from; None if there is
    none.

    A damaged one is set aside and an unreadable one skipped, in favour of the next older one. Raises StorageError if
    checkpoints exist but none can be read: starting from scratch would be wrong.
    """
    return _newest(paths, take, lambda path, error: refuse(path, error, set_aside))


def refuse(path: Path, error: StorageError, set_aside: Callable[[Path], Path]) -> None:
    """Set a checkpoint of which this error speaks aside, if it is proved damaged; say what is done."""
    if not isinstance(error, CorruptCheckpointError):
        logger.error("cannot read the checkpoint %s, trying an older one: %s", path, error)
        return
    try:
        moved = set_aside(path)
    except StorageError as failed:
        logger.error("the checkpoint %s is damaged (%s) and stays: %s", path, error, failed)
    else:
        logger.error("the checkpoint %s is damaged (%s); set aside as %s", path, error, moved.name)


def _newest(
    paths: tuple[Path, ...], take: Callable[[Path], _T], refused: Callable[[Path, StorageError], None]
) -> _T | None:
    unreadable: StorageError | None = None
    for path in paths:
        try:
            return take(path)
        except ForeignError:  # only the user may choose an older one instead
            raise
        except StorageError as error:
            refused(path, error)
            if not isinstance(error, CorruptCheckpointError):
                unreadable = unreadable or error
    if unreadable is not None:
        raise unreadable
    return None
