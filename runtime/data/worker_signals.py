"""Signals in the workers of a loader, while a job that was asked to end goes on to its next boundary.

Schedulers signal every process of a job, and a terminal its whole process group. A worker that died of it at once would
take the iteration with it: torch raises an error in the main process when a worker dies. So workers outlast these
signals as long as the job trains, and no longer: torch, and Python at its exit, end workers by SIGTERM. Forked ones do
so from the fork on, but for the moment between torch's own handler of SIGTERM and theirs.
"""

from __future__ import annotations

import multiprocessing.sharedctypes
import os
import signal
import sys
from collections.abc import Callable, Iterable
from types import FrameType

import psutil
from torch.utils.data._utils.worker import ManagerWatchdog


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

    def workers_start(self) -> None:
        """In the process that trains."""
        self._trainer = os.getpid()

    def put_up(self) -> None:
        """In a worker: from now on it outlasts them."""
        self._parent = os.getppid()
        if self._training.value:
            for number in self._numbers:
                signal.signal(number, self._arrived)

    def __call__(self, worker: int) -> None:
        """In a worker, before its first sample."""
        self.put_up()  # again: torch has handlers of its own by now
        if self._then is not None:
            self._then(worker)
        # torch's worker looks from here on whether its parent has become another one than it finds then: it would wait
        # for ever if that died before.
        _watch(self._parent)
        if os.getppid() != self._trainer and has_ended(self._trainer):
            os._exit(0)

    def _arrived(self, number: int, frame: FrameType | None) -> None:
        if not self._training.value or os.getppid() != self._parent:
            os._exit(0)  # as torch's workers end: any other code would be an error in the main process


def _watch(parent: int) -> None:
    """Have torch's watch, which begins in this worker a little later, take the process of this id for its parent."""
    begin = ManagerWatchdog.__init__

    def begin_with(watch: ManagerWatchdog) -> None:
        ManagerWatchdog.__init__ = begin  # type: ignore[method-assign] # for whatever this worker may start
        begin(watch)
        watch.manager_pid = parent

    ManagerWatchdog.__init__ = begin_with  # type: ignore[method-assign, assignment] # torchdata has the class by name


def has_ended(process: int) -> bool:
    """Whether there is no such process, or no more than its exit code."""
    try:
        return bool(psutil.Process(process).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def _forked() -> None:
    """In a forked child, a worker perhaps: what multiprocessing starts is a variable of the function that forks."""
    process = sys._getframe(1).f_locals.get("process_obj")
    for argument in getattr(process, "_args", ()):
        if isinstance(argument, WorkerShield):
            argument.put_up()


# Before those of modules that import this one: what they would put back is replaced by then.
os.register_at_fork(after_in_child=_forked)
