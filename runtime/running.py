"""What a job that writes to a checkpoint directory at this moment says of itself: the tier that storage does not show.

It tells by its report. What one that died has left is in :mod:`.memory_tier.orphans`.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from dataclasses import dataclass
from pathlib import Path

from checkflow.core import run_report
from checkflow.core.errors import ReportError
from checkflow.runtime.store.lock import LOCK

_CLOCK_SECONDS = 2.0  # between a file system's clock and a host's


@dataclass(frozen=True, slots=True)
class Running:
    """A job that runs, as of its newest report.

    Attributes:
        memory_step: the newest checkpoint that is whole in its host memory; None: there was none yet.
    """

    run_id: str
    memory_step: int | None
    written_unix_seconds: float


def running_job(directory: str | os.PathLike[str]) -> Running | None:
    """The job that holds the directory's lock; None if there is none, or it has not reported yet."""
    root = Path(directory)
    locked_since = _locked_since(root / LOCK)
    if locked_since is None:
        return None
    try:
        runs = run_report.load(root / run_report.FILE)
    except ReportError:  # written a moment after the lock was taken; of a damaged one nothing is known
        return None
    newest = runs[-1] if runs else None
    if newest is None or newest.closed or newest.started_unix_seconds < locked_since - _CLOCK_SECONDS:
        return None  # the report is an earlier run's
    return Running(newest.run_id, newest.lag.captured_step, newest.written_unix_seconds)


def _locked_since(path: Path) -> float | None:
    """When the lock was taken that another process holds now; None: nobody holds it."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None  # never locked, or not ours to see
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)  # a job that starts in this instant tries again
    except BlockingIOError:
        return os.fstat(fd).st_mtime  # the holder signs the file
    except OSError:
        return None  # no locks on this file system
    finally:
        with contextlib.suppress(OSError):
            os.close(fd)
    return None
