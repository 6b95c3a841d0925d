"""Signals in the workers of a loader, while a job that was asked to end goes on to its next boundary.

Schedulers signal every process of a job, and a terminal its whole process group. A worker that died of it at once would
take the iteration with it: torch raises an error in the main process when a worker dies. So workers outlast these
signals as long as the job trains, and no longer: torch, and Python at its exit, end workers by SIGTERM. Forked ones are
born with them blocked, until they have come to say what is to become of them.
"""

from __future__ import annotations

import contextlib
import multiprocessing.sharedctypes
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from types import FrameType

import psutil


class WorkerShield:
    """What every worker of one loader does first, and knows of the job that it works for.

    Args:
        then: the user's own ``worker_init_fn``.
    """

    def __init__(self, then: Callable[[int], None] | None) -> None:
        self._then = then
        self._numbers: tuple[int, ...] = ()
        # In memory that workers share, however they are started: whether the job goes on.
        self._training = multiprocessing.sharedctypes.RawValue("b", 0)
        self._trainer = self._parent = 0  # the process that trains; that which started the worker, perhaps another

    def raise_for(self, numbers: Iterable[int]) -> None:
        """Workers that start from now on outlast these signals."""
        self._numbers = tuple(numbers)
        self._training.value = 1

    def lower(self) -> None:
        """The job has ended: whatever is signalled from now on ends a worker."""
        self._training.value = 0

    @contextlib.contextmanager
    def workers_start(self) -> Iterator[None]:
        """Around their start, in the process that trains."""
        self._trainer = os.getpid()
        _forking.blocked = self._numbers if self._training.value else ()
        try:
            yield
        finally:
            _forking.blocked = ()

    def __call__(self, worker: int) -> None:
        """In a worker, before its first sample."""
        self._parent = os.getppid()
        if self._training.value:
            for number in self._numbers:
                signal.signal(number, self._arrived)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self._numbers)
        if self._then is not None:
            self._then(worker)
        # torch's worker looks from here on whether its parent has become another one: it would wait for ever if that
        # died before.
        if self._parent != self._trainer and has_ended(self._trainer):
            os._exit(0)

    def _arrived(self, number: int, frame: FrameType | None) -> None:
        if not self._training.value or os.getppid() != self._parent:
            os._exit(0)  # as torch's workers end: any other code would be an error in the main process


def has_ended(process: int) -> bool:
    """Whether there is no such process, or no more than its exit code."""
    try:
        return bool(psutil.Process(process).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


class _Forking(threading.local):
    """What the thread that forks has at that moment."""

    blocked: tuple[int, ...] = ()  # signals, for as long as it takes, and in the child until that unblocks them
    before: set[int | signal.Signals] | None = None  # what was blocked anyway; None: nothing is to be put back


_forking = _Forking()


def _about_to_fork() -> None:
    if _forking.blocked:
        _forking.before = signal.pthread_sigmask(signal.SIG_BLOCK, ())  # apart: a handler may raise in the next call
        signal.pthread_sigmask(signal.SIG_BLOCK, _forking.blocked)


def _has_forked() -> None:
    before, _forking.before = _forking.before, None
    if before is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


os.register_at_fork(before=_about_to_fork, after_in_parent=_has_forked)
