"""What a Checkpointer holds of its process: hooks, threads, host memory, the lock, signal handlers, a planning process.

``close()`` releases it. Without ``close()`` it is released when another Checkpointer is made for the same directory in
the same thread (a notebook's cell is run again), when nothing refers to it any more, or when the interpreter exits.
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
from checkflow.runtime.ranks.council import Council
from checkflow.runtime.reporter import Reporter, end_line
from checkflow.runtime.store.shared import SharedStore
from checkflow.runtime.store.store import Store

logger = logging.getLogger("checkflow")


@dataclass(eq=False)
class Resources:
    """All that one Checkpointer must release."""

    loader: ResumableLoader | None
    loop: TrainingLoop
    saving: Saving
    store: Store | SharedStore
    preemption: Preemption
    reporter: Reporter
    council: Council
    thread: threading.Thread = field(default_factory=threading.current_thread)
    closed: bool = False
    lost: StorageError | None = None  # why the last checkpoint is not durable, once closed

    def __post_init__(self) -> None:
        _held[self.store.directory] = self

    def close(self) -> Exception | None:
        """Commit what is in flight and release everything; returns what went wrong. Call again after an interrupt."""
        if self.closed:
            return None
        error: Exception | None = None
        self.preemption.begin_closing()
        if self.loader is not None and self.loader.listener is self.loop:
            self.loader.listener = None
            self.loader.epochs_counted_elsewhere = False
            try:
                self.loader.end_workers()
            except Exception as reason:  # noqa: BLE001 - as below; torch's handler may raise for a killed worker
                error = reason
        try:
            self.loop.close()
        except Exception as reason:  # noqa: BLE001 - the caller says it: what else there is must be given back first
            error = error or reason
        self.lost = self.saving.close() or self.lost
        self.reporter.tell_ranks()
        self.council.close()
        ends = self.store.locked
        if ends:  # else this was done already, and another process may own the directory
            self.reporter.write(closed=True)
            where = self.store.where
            self.store.close()
            if self.reporter.speaks:
                logger.info("%s", end_line(self.reporter.make(closed=True), self.store.directory, where))
        self.preemption.close()
        if _held.get(self.store.directory) is self:
            del _held[self.store.directory]
        self.closed = True
        if ends:
            self.reporter.call_back(closed=True)  # last: what exits there leaves nothing open
        return error or self.lost


_held: dict[Path, Resources] = {}  # those of this process that are open


def take_over(directory: str | os.PathLike[str]) -> None:
    """Close the predecessor: a Checkpointer of this thread, or of one that has ended, that holds the directory."""
    held = _held.get(Path(directory).absolute().resolve())
    if held is None or (held.thread is not threading.current_thread() and held.thread.is_alive()):
        return
    logger.warning("an earlier Checkpointer of %s was not closed: it is closed now", held.store.directory)
    log_error(held.close())


def warn_displaced(loader: ResumableLoader) -> None:
    """Warn that another Checkpointer is about to follow this loader: the present one will find no boundary any more."""
    for held in _held.values():
        if held.loader is loader and loader.listener is held.loop:
            logger.warning(
                "the loader belonged to the Checkpointer of %s, which is not closed and sees no boundary from here on; "
                "close() that one first, or give each a loader of its own",
                held.store.directory,
            )  # fmt: skip


def dropped(held: Resources) -> None:
    """Nothing refers to the Checkpointer any more."""
    # Another thread may collect it, while its hooks run in its own.
    if not held.closed and held in _held.values() and held.thread is threading.current_thread():
        logger.warning("a Checkpointer of %s was dropped without close(): it is closed now", held.store.directory)
        log_error(held.close())


def log_error(error: Exception | None) -> None:
    if error is not None:
        logger.warning("%s", error, exc_info=None if isinstance(error, CheckflowError) else error)


def _close_all() -> None:
    for held in list(_held.values()):
        log_error(held.close())


def _forget() -> None:
    """In a forked child: the parent holds everything, and its threads are not here."""
    while _held:
        _held.popitem()[1].closed = True


atexit.register(_close_all)
os.register_at_fork(after_in_child=_forget)
