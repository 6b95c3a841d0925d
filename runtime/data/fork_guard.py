"""Starts loader workers by fork, and forks anew any that hangs at its start. Delete when requires-python >= 3.11.10.

Before 3.11.10 a forked child may wait for ever for a lock that another thread held at the fork, before it has run a
line of Python (python/cpython#112275). Such a child has touched nothing: it is ended and forked anew. A slow child may
be ended, too, but never once it is a worker.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import select
import signal
import sys
import time
from multiprocessing.context import ForkContext, ForkProcess
from multiprocessing.popen_fork import Popen
from typing import Any

import psutil
from torch.utils.data import DataLoader

logger = logging.getLogger("checkflow")

#: Whether this Python has the fault.
MAY_HANG = sys.version_info < (3, 11, 10)

#: After so long a child that has not begun is forked anew; it takes some milliseconds, and more under load.
PATIENCE_SECONDS = 5.0

_LOOK_SECONDS = 0.001  # from one look whether a child stands still to the next


def start_safely(loader: DataLoader[Any]) -> None:
    """Have this loader's workers, where they are forked, looked after as they start."""
    if not MAY_HANG or not loader.num_workers:
        return
    context = loader.multiprocessing_context or multiprocessing.get_context()
    if type(context) is ForkContext:
        loader.multiprocessing_context = _LookedAfter()


class _Start(Popen):
    """A fork that is made again until the child has begun."""

    def __init__(self, process_obj: LoaderWorker) -> None:
        self._patience_seconds = PATIENCE_SECONDS
        super().__init__(process_obj)

    def _launch(self, process_obj: LoaderWorker) -> None:
        while not self._fork(process_obj):
            logger.warning(
                "a loader's worker did not get through its fork, and is started anew: this Python may hang there "
                "(python/cpython#112275), 3.11.10 and later do not"
            )
            self._patience_seconds *= 2  # a machine may be that slow

    def _fork(self, process_obj: LoaderWorker) -> bool:
        """Whether the child has begun, or has ended by itself; another is to be made."""
        self.returncode = None
        begun, writes = process_obj.pipe = os.pipe()
        try:
            try:
                super()._launch(process_obj)  # type: ignore[misc] # typeshed does not know it
            finally:
                os.close(writes)
            try:
                if _wait(begun, self._patience_seconds) or self._is_alive_at_last(begun):
                    return True
            except BaseException:  # Ctrl-C: nobody would know of this child
                self._end()
                raise
            self._end()
            return False
        finally:
            os.close(begun)

    def _is_alive_at_last(self, begun: int) -> bool:
        """Whether it has begun, or ended, after all; if not it stands still until it is ended."""
        try:
            self._stop()
        except (
            ProcessLookupError,
            ChildProcessError,
            psutil.NoSuchProcess,
        ):  # it has ended, and a handler of the user's knows how
            return True
        if self.returncode is not None:
            return True
        if _wait(begun, 0):
            os.kill(self.pid, signal.SIGCONT)
            return True
        return False

    def _stop(self) -> None:
        """Until it stands still or has ended; a scheduler's SIGCONT would undo a stop that was asked for once."""
        while True:
            os.kill(self.pid, signal.SIGSTOP)
            changed, status = os.waitpid(self.pid, os.WUNTRACED | os.WNOHANG)
            if changed and not os.WIFSTOPPED(status):
                self.returncode = os.waitstatus_to_exitcode(status)
            # A handler of the user's may have reaped the stop, which is reported once only.
            if changed or psutil.Process(self.pid).status() == psutil.STATUS_STOPPED:
                return
            time.sleep(_LOOK_SECONDS)

    def _end(self) -> None:
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):  # a handler of the user's reaps children
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
            self.returncode = -signal.SIGKILL
        assert self.finalizer is not None
        self.finalizer()


class LoaderWorker(ForkProcess):
    """A worker that says when it has begun."""

    pipe: tuple[int, int]

    @staticmethod
    def _Popen(process_obj: Any) -> Popen:  # noqa: N802 - multiprocessing's name
        return _Start(process_obj)

    def _bootstrap(self, parent_sentinel: int | None = None) -> int:
        """In the child, first of all."""
        with contextlib.suppress(OSError):  # closed already by what runs in every child: that shows it, too
            os.write(self.pipe[1], b"+")
            for end in self.pipe:
                os.close(end)
        return super()._bootstrap(parent_sentinel)  # type: ignore[misc, no-any-return]


class _LookedAfter(ForkContext):
    Process = LoaderWorker


def _wait(readable: int, seconds: float) -> bool:
    look = select.poll()
    look.register(readable, select.POLLIN)
    return bool(look.poll(seconds * 1000))
