"""A loader's worker processes and signals: outlasting them while the job trains, ended in little time, or lost to them.

Schedulers signal every process of a job, and a terminal its whole process group. A worker that died of it at once would
take the iteration with it: torch raises an error in the main process. So workers outlast these signals as long as the
job trains, and no longer: torch, and Python at its exit, end workers by SIGTERM.
"""

from __future__ import annotations

import contextlib
import multiprocessing.sharedctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

import psutil
from torch._C import _remove_worker_pids
from torch.utils.data import DataLoader
from torch.utils.data._utils.worker import ManagerWatchdog

POLITE_SECONDS = 1.0  # between asking and killing, at most: only native code outlasts being asked
_LEAST_SECONDS = 0.001


class WorkerShield:
    """What every worker of one loader does first, and knows of the job that it works for.

    Forked ones outlast signals from the fork on, but for the moment between torch's own handler of SIGTERM and theirs.

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


def has_workers(iterator: object) -> bool:
    """Whether it is one of torch's or torchdata's that have processes."""
    return isinstance(getattr(iterator, "_workers", None), list) and hasattr(iterator, "_shutdown")


def end_persistent_workers(loader: DataLoader[Any]) -> None:
    """End the workers that torch's loader keeps between epochs; iterating starts new ones.

    Not left to the iterator's destructor: a library that wraps loaders, such as Lightning, may keep the iterator.
    """
    iterator: Any = loader._iterator
    loader._iterator = None
    if has_workers(iterator):
        iterator._shutdown_workers()


def end_at_once(iterators: Iterable[Any], end: float) -> None:
    """End the workers of these, all at a time.

    torch asks its workers to end, and waits for one after the other, up to five seconds each: longer, with some busy
    ones, than the job has. So all are asked at once, and killed if they do not end; torch's own way is not gone after
    that, since locks that it takes may have been theirs.

    Args:
        end: of the job, as time.monotonic() has it; most of what is left until then is for others.
    """
    workers = [worker for iterator in iterators for worker in _taken_from_torch(iterator)]
    for worker in workers:
        _signalled(worker.terminate)
    _wait(workers, min(POLITE_SECONDS, max(0.0, end - time.monotonic()) / 4))
    for worker in workers:
        _signalled(worker.kill)
    _wait(workers, POLITE_SECONDS)


def _taken_from_torch(iterator: Any) -> list[Any]:
    """Its workers, which torch neither waits for nor misses from here on."""
    if iterator._shutdown:
        return []
    iterator._shutdown = True
    if getattr(iterator, "_worker_pids_set", False):
        _remove_worker_pids(id(iterator))
        iterator._worker_pids_set = False
    if hasattr(iterator, "_pin_memory_thread_done_event"):
        iterator._pin_memory_thread_done_event.set()
        iterator._worker_result_queue.put((None, None))  # it may be waiting there, and must not pin at the exit
        iterator._pin_memory_thread.join(POLITE_SECONDS)
    for queue in getattr(iterator, "_index_queues", ()):
        queue.cancel_join_thread()
        queue.close()
    return list(iterator._workers)


def _signalled(act: Any) -> None:
    with contextlib.suppress(OSError, ValueError):  # it is gone, or was never started
        act()


def _wait(workers: list[Any], seconds: float) -> None:
    end = time.monotonic() + seconds
    for worker in workers:
        with contextlib.suppress(AssertionError):  # never started
            # Not 0: one that is just ending would be left, for whoever counts the job's processes.
            worker.join(max(_LEAST_SECONDS, end - time.monotonic()))


def is_lost_worker(error: BaseException | None) -> bool:
    """Whether it is torch's, for a worker that has ended though it should not have.

    One that has only begun when a signal comes to all processes of a job dies of it: nothing can be put before that.
    """
    return isinstance(error, RuntimeError) and str(error).startswith("DataLoader worker (pid")


def _forked() -> None:
    """In a forked child, a worker perhaps: what multiprocessing starts is a variable of the function that forks."""
    process = sys._getframe(1).f_locals.get("process_obj")
    for argument in getattr(process, "_args", ()):
        if isinstance(argument, WorkerShield):
            argument.put_up()


# Before those of modules that import this one: what they would put back is replaced by then.
os.register_at_fork(after_in_child=_forked)
