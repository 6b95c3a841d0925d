"""A loader's workers where a signal ends the job: ended in little time, or lost to the signal themselves.

torch asks its workers to end, and then waits for one after the other, up to five seconds each: longer, with some busy
ones, than the job has. What they were working on is of no use to anybody. So they are told at once, and killed if they
do not hear; torch's own way is not gone after that, since locks that it takes may have been theirs.

A worker that has only begun when a signal comes to all processes of a job dies of it: nothing can be put before it by
then. torch raises an error for it in the main process.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from typing import Any

from torch._C import _remove_worker_pids

POLITE_SECONDS = 1.0  # between asking and killing, at most: only native code outlasts being asked
_LEAST_SECONDS = 0.001


def has_workers(iterator: object) -> bool:
    """Whether it is one of torch's or torchdata's that have processes."""
    return isinstance(getattr(iterator, "_workers", None), list) and hasattr(iterator, "_shutdown")


def end_at_once(iterators: Iterable[Any], end: float) -> None:
    """End the workers of these, all at a time.

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


def tells_of_lost_worker(error: BaseException | None) -> bool:
    """Whether it is torch's, for a worker that has ended though it should not have."""
    return isinstance(error, RuntimeError) and str(error).startswith("DataLoader worker (pid")
