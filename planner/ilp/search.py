"""What all solvers share: their result, thread, files, silence, and errors in words."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import math
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from checkflow.core.errors import SolverError
from checkflow.core.units import format_time

SolverName = Literal["gurobi", "highs", "cbc"]
SolverChoice = Literal["auto", "gurobi", "highs", "cbc"]
SolveStatus = Literal["optimal", "feasible", "infeasible"]
_POLL_SECONDS = 0.05
_TELL_SECONDS = 0.2
# HiGHS and Gurobi check for cancellation between two steps of their search. Presolve may take longer than this; then
# the thread is left to end later, or with the process.
_CANCEL_SECONDS = 1.0
# What is told of a search while it goes on: by whoever runs one for a person to wait for.
_watcher: ContextVar[Callable[[str], None] | None] = ContextVar("watcher", default=None)
_one_at_a_time = threading.Lock()  # else two redirections may restore standard output in the wrong order


@contextlib.contextmanager
def watched(tell: Callable[[str], None]) -> Iterator[None]:
    """Tell in words how each search in this context stands, on any thread."""
    token = _watcher.set(tell)
    try:
        yield
    finally:
        _watcher.reset(token)


class Watch:
    """Tells how one search stands, a few times a second at most."""

    def __init__(self, solver: str, time_limit_seconds: float) -> None:
        self._tell, self._solver, self._told = _watcher.get(), solver, -math.inf
        self._limit = "" if math.isinf(time_limit_seconds) else f", at most {format_time(time_limit_seconds)}"

    @property
    def wanted(self) -> bool:
        return self._tell is not None

    def tell(self, best: float = math.inf, bound: float = -math.inf) -> None:
        """Say the best objective so far, and the bound; infinite: none yet, or the solver does not say."""
        now = time.monotonic()
        if self._tell is None or now - self._told < _TELL_SECONDS:
            return
        self._told, words = now, [f"{self._solver} searches{self._limit}"]
        if math.isfinite(bound):
            words.append(f"bound {bound:.6g}")
        if math.isfinite(best):
            words.append(f"best {best:.6g}")
        if math.isfinite(best) and math.isfinite(bound) and best:
            words.append(f"gap {100 * max(0.0, best - bound) / abs(best):.1f} %")
        self._tell(", ".join(words))


class NothingFoundError(SolverError):
    """The time ran out before any solution was found."""


@dataclass(frozen=True)
class Solve:
    """A solver's result. The values are in the problem's variables."""

    name: SolverName
    version: str
    status: SolveStatus
    objective: float | None  # of the solution found; None if infeasible
    bound: float | None  # no solution is below it (minimisation); None if infeasible
    seconds: float
    variables: int
    constraints: int

    @property
    def gap(self) -> float | None:
        """(objective - bound) / |objective|; None if infeasible, infinite if the objective is zero and not proved."""
        if self.objective is None or self.bound is None:
            return None
        distance = max(0.0, self.objective - self.bound)
        if distance == 0:
            return 0.0
        return math.inf if self.objective == 0 else distance / abs(self.objective)


@contextlib.contextmanager
def solver_files() -> Iterator[Path]:
    try:
        with tempfile.TemporaryDirectory(prefix="checkflow-") as folder:
            yield Path(folder)
    except OSError as error:
        raise SolverError(f"the solver's files cannot be written: {error.strerror or error}") from error


@contextlib.contextmanager
def nothing_printed() -> Iterator[None]:
    """Discard everything written to standard output while a solver runs.

    Solvers print before any option of theirs takes effect. Other threads' output is lost too: ``checkflow plan`` has no
    such threads, and a live job plans in a child process.
    """
    flush = ctypes.CDLL(None).fflush
    with _one_at_a_time, open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        flush(None)  # the C library's buffer holds our own output
        shown = _copy_of_standard_output()
        try:
            if shown is not None:
                os.dup2(nowhere.fileno(), 1)
            yield
        finally:
            flush(None)
            if shown is not None:
                os.dup2(shown, 1)
                os.close(shown)


def _copy_of_standard_output() -> int | None:
    """Duplicate standard output; None if it is closed."""
    try:
        return os.dup(1)
    except OSError as error:
        if error.errno != errno.EBADF:
            raise
        return None


def run_in_thread(search: Callable[[], object], cancel: Callable[[], object]) -> None:
    """Run a search to its end; cancel it if an exception is raised here meanwhile.

    Python handles signals only in Python code, so the main thread must not be inside a solver. ``Thread.join`` will not
    do: once interrupted, it takes the thread for finished (CPython 3.11).
    """
    failures: list[BaseException] = []
    done = threading.Event()

    def work() -> None:
        try:
            search()
        except BaseException as error:  # noqa: BLE001 - raised below, in the caller's thread
            failures.append(error)
        finally:
            done.set()

    threading.Thread(target=work, name="checkflow-solver", daemon=True).start()
    try:
        while not done.wait(_POLL_SECONDS):
            _keep_interrupts()
    except BaseException:
        cancel()
        done.wait(_CANCEL_SECONDS)
        raise
    if failures:
        raise failures[0]


def _keep_interrupts() -> None:
    """Restore Python's Ctrl-C handler: Gurobi's search replaces it by one that writes to standard output."""
    handler = signal.getsignal(signal.SIGINT)
    if handler is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, handler)


def found(name: SolverName, version: str, optimal: bool, objective: float, bound: float) -> Solve:
    """Return a solution; :func:`.solvers.solve` adds the time."""
    return Solve(name, version, "optimal" if optimal else "feasible", objective, bound, 0.0, 0, 0)


def infeasible(name: SolverName, version: str) -> Solve:
    return Solve(name, version, "infeasible", None, None, 0.0, 0, 0)


def nothing_found(name: str, seconds: float) -> NothingFoundError:
    return NothingFoundError(f"{name} found nothing within {seconds:g} s; give it more with --time-limit")


def threads() -> int:
    """Return the CPUs that this process may use; a job's limits count, not the machine's size."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
