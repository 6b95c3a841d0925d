"""What a Checkpointer holds of its process, until it is given back: by ``close()``, by its successor, or at the end.

A successor is another Checkpointer of the same directory and thread. One that is dropped is closed in its own thread.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
from dataclasses import dataclass, field
from pathlib import Path

from checkflow.core.errors import CheckflowError, StorageError
from checkflow.runtime.data.base import ResumableLoader
from checkflow.runtime.loop.preemption import Preemption
from checkflow.runtime.loop.training_loop import TrainingLoop
from checkflow.runtime.persist.saver import Saving
from checkflow.runtime.reporter import Reporter, end_line
from checkflow.runtime.store.store import Store

logger = logging.getLogger("checkflow")


@dataclass(eq=False)
class Holdings:
    """All that one Checkpointer has to give back."""

    loader: ResumableLoader | None
    loop: TrainingLoop
    saving: Saving
    store: Store
    preemption: Preemption
    reporter: Reporter
    thread: threading.Thread = field(default_factory=threading.current_thread)
    closed: bool = False
    lost: StorageError | None = None  # what of the last checkpoint is not durable, once this is closed

    def __post_init__(self) -> None:
        _held[self.store.directory] = self

    def close(self) -> Exception | None:
        """Finish and commit what is in flight, and give everything back; returns what went wrong on the way.

        An interrupt ends this where it is; the next call does the rest.
        """
        if self.closed:
            return None
        error: Exception | None = None
        self.preemption.begin_closing()
        if self.loader is not None and self.loader.listener is self.loop:
            self.loader.listener = None
            self.loader.epochs_counted_elsewhere = False
            try:
                self.loader.end_workers()
            except Exception as reason:  # noqa: BLE001 - as below; torch's handler raises here that a worker was killed
                error = reason
        try:
            self.loop.close()
        except Exception as reason:  # noqa: BLE001 - the caller says it: what else there is must be given back first
            error = error or reason
        self.lost = self.saving.close() or self.lost
        if self.store.locked:  # otherwise this was done already, and the directory may be somebody else's
            self.reporter.write(closed=True)
            where = self.store.where
            self.store.close()
            logger.info("%s", end_line(self.reporter.make(closed=True), self.store.directory, where))
        self.preemption.close()
        if _held.get(self.store.directory) is self:
            del _held[self.store.directory]
        self.closed = True
        return error or self.lost


_held: dict[Path, Holdings] = {}  # those of this process that are not closed


def take_over(directory: str | os.PathLike[str]) -> None:
    """Close the predecessor: a Checkpointer of this thread, or of one that has ended, that holds the directory."""
    held = _held.get(Path(directory).absolute().resolve())
    if held is None or (held.thread is not threading.current_thread() and held.thread.is_alive()):
        return
    logger.warning("an earlier Checkpointer of %s was not closed: it is closed now", held.store.directory)
    log_error(held.close())


def warn_displaced(loader: ResumableLoader) -> None:
    """Another Checkpointer is about to follow this loader: one that follows it now finds no boundary any more."""
    for held in _held.values():
        if held.loader is loader and loader.listener is held.loop:
            logger.warning(
                "the loader was followed by the Checkpointer of %s, which is not closed, and finds no boundary in it "
                "from here on; close() that one first, or give each a loader of its own",
                held.store.directory,
            )  # fmt: skip


def dropped(held: Holdings) -> None:
    """Nobody refers to the Checkpointer any more."""
    # The garbage of one thread may be found by another: its hooks may be running there.
    if not held.closed and held in _held.values() and held.thread is threading.current_thread():
        logger.warning("a Checkpointer of %s was dropped without close(): it is closed now", held.store.directory)
        log_error(held.close())


def log_error(error: Exception | None) -> None:
    """Log what went wrong in closing, where it is not to be raised."""
    if error is not None:
        logger.warning("%s", error, exc_info=None if isinstance(error, CheckflowError) else error)


def _close_all() -> None:
    for held in list(_held.values()):
        log_error(held.close())


def _forget() -> None:
    """In a forked child: what is held is the parent's, and its threads are not here."""
    while _held:
        _held.popitem()[1].closed = True


atexit.register(_close_all)
os.register_at_fork(after_in_child=_forget)
