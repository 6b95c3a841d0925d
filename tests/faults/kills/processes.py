"""Processes that are forked from one that has imported everything, and what is left of them."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import json
import multiprocessing
import os
import signal
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

hang_seconds = 30.0  # after so many silent ones a process hangs; a busy machine is given more
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_FORK = multiprocessing.get_context("fork")


def adopt_orphans() -> None:
    """Whoever loses his parent below this process becomes its child: nobody is lost sight of."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


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


def fork(work: Callable[..., Any], *arguments: Any, log: Path, temporary: Path) -> Any:
    process = _FORK.Process(target=_call, args=(work, arguments, log, temporary))
    process.start()
    return process


def run(work: Callable[..., Any], *arguments: Any, log: Path, temporary: Path) -> None:
    """In a process of its own, to its end.

    Raises:
        RuntimeError: it failed, or hangs.
    """
    process = fork(work, *arguments, log=log, temporary=temporary)
    process.join(2 * hang_seconds)
    if process.exitcode is None:
        abort(process)
    if process.exitcode:
        raise RuntimeError(f"it ended with {process.exitcode}: {tail(log)}")


def run_for(work: Callable[..., Any], *arguments: Any, file: Path, log: Path, temporary: Path) -> Any:
    """As :func:`run`, for an answer that JSON can hold; it goes through a file."""
    run(_answer, work, arguments, file, log=log, temporary=temporary)
    return json.loads(file.read_text())


def _answer(work: Callable[..., Any], arguments: tuple[Any, ...], file: Path) -> None:
    file.write_text(json.dumps(work(*arguments)))


def abort(process: Any) -> None:
    """End what hangs; a traceback goes to its log."""
    os.kill(process.pid, signal.SIGABRT)
    process.join()


def tail(log: Path) -> str:
    return " / ".join(log.read_text(errors="replace").splitlines()[-12:])


def children(pid: int) -> list[tuple[int, list[str]]]:
    """Of a process, if it lives: id and command line."""
    found = []
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process(pid).children():
            with contextlib.suppress(psutil.Error):
                found.append((child.pid, child.cmdline()))
    return found


def descendants() -> dict[int, str]:
    """Every process below this one that lives, adopted orphans included: id to command line."""
    found = {}
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                found[process.pid] = " ".join(process.cmdline())
    return found


def bury() -> None:
    """Orphans come to this process, which alone can take their remains away."""
    own = {process.pid for process in multiprocessing.active_children()}
    for process in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess, ChildProcessError):
            if process.pid not in own and process.status() == psutil.STATUS_ZOMBIE:
                os.waitpid(process.pid, os.WNOHANG)
