"""Lives that are forked from a process that has imported everything, as jobs that torture's parts take."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import multiprocessing
import os
import signal
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import psutil

from checkflow.torture.processes import JobProcess, Process, tail

hang_seconds = 30.0  # after so many silent ones a process hangs; a busy machine is given more
_PR_SET_PDEATHSIG = 1


class Forked(ForkProcess):
    """Polled as ``subprocess.Popen`` is."""

    def poll(self) -> int | None:
        return self.exitcode

    returncode = property(poll)


def _call(work: Callable[..., Any], arguments: tuple[Any, ...], log: Path, temporary: Path) -> None:
    """In the forked process: die with the one that forked it, and say what went wrong."""
    temporary.mkdir(parents=True, exist_ok=True)
    tempfile.tempdir = os.environ["TMPDIR"] = str(temporary)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    with open(log, "ab", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    faulthandler.enable()
    try:
        work(*arguments)
    except Exception:  # noqa: BLE001
        traceback.print_exc()
        raise SystemExit(1) from None


def fork(work: Callable[..., Any], *arguments: Any, log: Path, temporary: Path) -> JobProcess:
    begin = log.stat().st_size if log.exists() else 0
    process = Forked(target=_call, args=(work, arguments, log, temporary))
    process.start()
    return JobProcess(process, log, begin, frozenset())


def run(work: Callable[..., Any], *arguments: Any, log: Path, temporary: Path) -> Any:
    """Call it in a process of its own; returns what it returns.

    Raises:
        RuntimeError: it failed, or hangs.
    """
    answer, there = multiprocessing.Pipe(duplex=False)
    job = fork(lambda: there.send(work(*arguments)), log=log, temporary=temporary)
    process: Any = job.process
    process.join(2 * hang_seconds)
    if process.exitcode is None:
        abort(job)
    if process.exitcode:
        raise RuntimeError(f"it ended with {process.exitcode}: {tail(job, lines=12)}")
    return answer.recv()


def abort(job: JobProcess) -> None:
    """End what hangs; a traceback goes to its log."""
    process: Any = job.process
    os.kill(process.pid, signal.SIGABRT)
    process.join()


def children(pid: int) -> list[tuple[Process, list[str]]]:
    """Of a process, if it lives: each, and its command line."""
    found = []
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process(pid).children():
            with contextlib.suppress(psutil.Error):
                found.append((child, child.cmdline()))
    return found
