"""Signals that ask a job to end, and Ctrl-C: training goes on to its next boundary, is saved there, and ends.

A handler in the main thread takes note; a watchdog thread logs, and ends training where no boundary comes in time.
docs/explanation/signals.md says how, and why so.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import queue
import signal
import threading
import time
from collections.abc import Collection
from dataclasses import dataclass
from types import FrameType
from typing import Any, NoReturn, Protocol

from checkflow.core.errors import Preempted
from checkflow.core.units import format_seconds
from checkflow.runtime.data.worker_processes import WorkerShield
from checkflow.runtime.loop import signal_wakeup

logger = logging.getLogger("checkflow")

#: What schedulers and people ask jobs to end with: Slurm, PBS and Kubernetes by SIGTERM, Slurm's --signal and Grid
#: Engine by SIGUSR1 or SIGUSR2, limits of CPU time by SIGXCPU, a terminal that is closed by SIGHUP.
KNOWN_SIGNALS = ("SIGTERM", "SIGUSR1", "SIGUSR2", "SIGHUP", "SIGXCPU", "SIGQUIT")
ECHO_SECONDS = 1.0
CTRL_C_ECHO_SECONDS = 0.2
MOMENT_SECONDS = 0.5  # from a signal to its handler, where the main thread runs Python
_LOOK_SECONDS = 0.01

_AT_BOUNDARY = "training ends at its next boundary, and is saved there"
_SAVED_FIRST = "what is in flight is saved first"
_AT_ONCE = "it acts at once, since no loop goes on"


class Training(Protocol):
    """What is asked to end. The handler asks the first, between any two bytecodes; the watchdog the others."""

    @property
    def expects_boundary(self) -> bool:
        """Whether the loop that goes on will come to one."""

    def hasten(self) -> None:
        """Let go what can go without the training thread."""

    def persist_seconds(self) -> float | None:
        """How long the last commit took."""

    def end_workers_by(self, end: float) -> None:
        """From here on no worker is waited for longer than until then, as time.monotonic() has it."""


@dataclass(frozen=True)
class _Notice:
    """A signal, as reported to the watchdog.

    Attributes:
        number: of the signal.
        begun: when it came.
        what: its handler has made of it, to be logged; None: it has not run yet, "": there is nothing to be said.
    """

    number: int
    begun: float
    what: str | None


class _Raised:
    """Reported to the watchdog: the exception has been raised."""


class Preemption:
    """The handlers and the watchdog of one Checkpointer.

    Args:
        signals: those that ask the job to end; none: Ctrl-C is not handled either.
        grace_seconds: from the signal to the end.
        shield: keeps the loader's workers alive meanwhile.
    """

    def __init__(self, signals: Collection[signal.Signals], grace_seconds: float, shield: WorkerShield | None) -> None:
        self._signals, self._grace_seconds, self._shield = tuple(signals), grace_seconds, shield
        self._training: Training | None = None
        self._handler = self._handle  # one object, by which it is recognised
        self._before: dict[int, Any] = {}  # by signal, the handler that was there
        self._first: dict[int, float] = {}  # by signal that has come, when its handler ran first
        self._begun: dict[int, float] = {}  # likewise, when it came first, as far as is known
        self._news: queue.SimpleQueue[_Notice | _Raised | None] = queue.SimpleQueue()
        self._watchdog: threading.Thread | None = None
        self._saving = self._raised = self._overdue = self._ended = self._closed = False
        self.asked = False  # training is to end at the next boundary
        self.preempted = False  # by a signal other than Ctrl-C's
        self._elsewhere = ""  # why another rank asks for the end

    def listen(self, training: Training) -> None:
        """Put the handlers in place, in the main thread; in another one, say that this cannot be done."""
        self._training = training
        if not self._signals:
            return
        if threading.current_thread() is not threading.main_thread():
            logger.warning(
                "signals are not handled: this Checkpointer was made in thread %s, and Python allows handlers only in "
                "the main thread",
                threading.current_thread().name,
            )
            return
        self._watchdog = threading.Thread(target=self._watch, name="checkflow-signals", daemon=True)
        self._watchdog.start()
        _listening.append(self)
        for number in (*self._signals, signal.SIGINT):
            before = signal.getsignal(number)
            if before in (signal.SIG_IGN, None) or (number == signal.SIGINT and before != signal.default_int_handler):
                continue
            if before == signal.SIG_DFL and _caught_outside_python(number):
                logger.warning("%s has a handler outside of Python, which stays: it ends no training", number.name)
                continue
            self._before[number] = before
            signal.signal(number, self._handler)
        if self._shield is not None:
            self._shield.raise_for(self._before)
        if self._before:
            try:
                signal_wakeup.subscribe(self._on_signal)
            except OSError as error:  # then only their handlers see signals
                logger.debug("signals are seen only while Python runs: %s", error)

    def begin_ending(self) -> bool:
        """At a boundary, or before closing: whether to end; from here on the training thread is not interrupted."""
        self._saving = self._saving or self.asked
        return self.asked

    def goes_on(self) -> None:
        """Several ranks do not end at this boundary after all, but at a later one."""
        self._saving = False

    def ask_for_others(self, reason: str) -> None:
        """All ranks end here. If no signal has come to this one, it ends as by a signal, for this reason."""
        if not self.asked:
            self._elsewhere = reason
            self.asked = self.preempted = True

    def is_asked_soon(self) -> bool:
        """Whether training is to end: what has killed another process of the job may be about to come here."""
        end = time.monotonic() + MOMENT_SECONDS
        while not self.asked and time.monotonic() < end:
            time.sleep(_LOOK_SECONDS)
        return self.asked

    def end(self, what: str) -> NoReturn:
        """Raise what ends training.

        Args:
            what: to be said of it.
        """
        logger.warning("%s: %s", self.name, what)
        self._news.put(_Raised())
        self._ended, self._saving = self.preempted, False
        raise self._exception()

    def end_late(self) -> None:
        """After closing: raise what was asked for meanwhile."""
        if self.asked and not self._raised:
            raise self._exception()

    def begin_closing(self) -> None:
        """From here on the training thread is not interrupted, and no worker outlasts a signal.

        Whatever becomes of the closing: at its exit Python waits for ever for a worker that takes no SIGTERM.
        """
        self._saving = True
        self._lower_shield()

    def close(self) -> None:
        """Give everything back; once more is harmless."""
        self._closed = True
        if self in _listening:
            _listening.remove(self)
        self._lower_shield()
        signal_wakeup.unsubscribe(self._on_signal)
        self._restore()
        self._news.put(None)
        if self._watchdog is not None and self._watchdog is not threading.current_thread():
            self._watchdog.join()

    def _lower_shield(self) -> None:
        if self._shield is not None and not any(one._shield is self._shield for one in _listening if one is not self):
            self._shield.lower()

    def _restore(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return  # the handler, being closed, does what the one before it did
        for number, before in self._before.items():
            if signal.getsignal(number) == self._handler:
                # One that was made earlier and closed meanwhile could not take its handler away from below this one.
                signal.signal(number, _below(number, before, closed_only=True))

    def forked(self) -> None:
        """In a forked child: what it does at a signal is not for us to say."""
        self._closed = True
        self._restore()

    # In the main thread, between any two of its bytecodes

    def _handle(self, number: int, frame: FrameType | None) -> None:
        before, first = self._before[number], self._first.get(number)
        if self._closed or (number == signal.SIGINT and self.preempted):
            _as_before(number, before, frame)
        elif first is None:
            self._ask(number, before, frame)
        elif self._overdue:
            self._overdue = False
            if not (self._saving or self._raised):  # a boundary may have come meanwhile
                raise self._exception()
        elif time.monotonic() - first >= _echo_seconds(number):
            if number == signal.SIGINT:  # what was asked is done with that
                raise self._exception()
            _as_before(number, before, frame)

    def _ask(self, number: int, before: Any, frame: FrameType | None) -> None:
        self._first[number] = now = time.monotonic()
        begun = self._begun.setdefault(number, now)
        self.asked = True
        self.preempted = self.preempted or number != signal.SIGINT
        overdue, self._overdue = self._overdue, False  # it has waited for the main thread to run Python again
        if self._raised or overdue:
            what = ""
        elif self._saving:
            what = _SAVED_FIRST
        else:
            what = _AT_BOUNDARY if _boundary_is_expected() else _AT_ONCE
        if not self._ended:
            self._news.put(_Notice(number, begun, what))
        if number != signal.SIGINT and callable(before):
            before(number, frame)
        if not (self._saving or self._raised or (_boundary_is_expected() and not overdue)):
            raise self._exception()

    @property
    def expects_boundary(self) -> bool:
        """Whether the loop that goes on will come to one."""
        return self._training is not None and self._training.expects_boundary

    def _exception(self) -> BaseException:
        """What ends training. A Ctrl-C is over with it: a notebook goes on with its next cell."""
        if self.preempted:
            self._raised = True
            if self._training is not None:
                self._training.end_workers_by(self._grace_begun() + self._grace_seconds)
            return Preempted(self.name)
        self._first.pop(signal.SIGINT, None)
        self._begun.pop(signal.SIGINT, None)
        self.asked = False
        self._news.put(_Raised())
        return KeyboardInterrupt()

    @property
    def name(self) -> str:
        """Of what has come first, Ctrl-C last."""
        if not self._first:
            return self._elsewhere
        came = sorted(self._first.items(), key=lambda item: (item[0] == signal.SIGINT, item[1]))
        return "Ctrl-C" if came[0][0] == signal.SIGINT else signal.Signals(came[0][0]).name

    # In the thread that receives signals

    def _on_signal(self, number: int) -> None:
        """A signal has come, whose handler may have run already, or run soon, or not."""
        if self._closed or self._ended or number not in self._before or number in self._begun:
            return
        # Ctrl-C ends nothing by force: its handler is early enough.
        if number != signal.SIGINT and signal.getsignal(number) == self._handler:
            self._begun[number] = begun = time.monotonic()
            self._news.put(_Notice(number, begun, None))

    # In the watchdog

    def _watch(self) -> None:
        while (news := self._news.get()) is not None:
            while isinstance(news, _Notice):
                news = self._attend(news)
            if news is None:
                return

    def _attend(self, notice: _Notice) -> _Notice | _Raised | None:
        """See one notice to its end; returns what comes next."""
        number = notice.number
        begun = notice.begun if number == signal.SIGINT else self._grace_begun()
        with contextlib.suppress(queue.Empty):
            if notice.what is None:  # a handler that runs will say more
                return self._wait_until(notice.begun + MOMENT_SECONDS)
        self._announce(notice)
        assert self._training is not None
        self._training.hasten()
        for seconds, act in ((self._patience_seconds(), self._interrupt), (self._grace_seconds, self._give_up)):
            try:
                return self._wait_until(begun + seconds)
            except queue.Empty:
                act(number)
        return self._news.get()

    def _wait_until(self, end: float) -> _Notice | _Raised | None:
        return self._news.get(timeout=max(0.0, end - time.monotonic()))

    def _grace_begun(self) -> float:
        """With the first signal that is no Ctrl-C: another one does not begin it anew."""
        begun = [begun for number, begun in tuple(self._begun.items()) if number != signal.SIGINT]
        return min(begun, default=time.monotonic())  # to another rank

    def _patience_seconds(self) -> float:
        """For how long a boundary is waited for: two commits must fit behind it, since one may be under way.

        At least a fifth of the grace period is left for them, and for what else ends: loader workers, the user's code.
        """
        assert self._training is not None
        commit_seconds = self._training.persist_seconds()
        reserve_seconds = max(2 * (commit_seconds or 0.0), self._grace_seconds / 5)
        return self._grace_seconds - min(reserve_seconds, self._grace_seconds / 2)

    def _announce(self, notice: _Notice) -> None:
        number, what = notice.number, notice.what
        if what == "":
            return
        if what is None:
            what = f"the main thread is outside of Python; if it comes back, {_AT_BOUNDARY}"
        if number == signal.SIGINT:
            again = "" if what == _AT_ONCE else "; press it again to stop at once"
            logger.warning("Ctrl-C: %s%s", what, again)
        else:
            within = "" if what == _AT_ONCE else f", within {format_seconds(self._grace_seconds)}"
            logger.warning("%s: %s%s", signal.Signals(number).name, what, within)

    def _interrupt(self, number: int) -> None:
        """No boundary has come: training ends where it is."""
        if self._saving or self._raised:
            return
        if signal.getsignal(number) == self._handler:
            self._overdue = True
            # To the thread itself: that wakes it from whatever call of the system it waits in.
            signal.pthread_kill(threading.main_thread().ident or 0, number)
        logger.warning("no boundary has come: training ends where it is, and what is in flight is saved")

    def _give_up(self, number: int) -> None:
        """The time is over: end the process as the signal would have done; with 75 where training itself has ended."""
        if number == signal.SIGINT:
            return  # whoever pressed it is still there
        # Of several, one that has a handler of the user's below may end nothing.
        came = [one for one, _ in sorted(self._begun.items(), key=lambda item: item[1]) if one != signal.SIGINT]
        number = next((one for one in came if _below(one, self._handler) == signal.SIG_DFL), number)
        over = f"{signal.Signals(number).name}: {format_seconds(self._grace_seconds)} are over"
        if _below(number, self._handler) != signal.SIG_DFL or signal.getsignal(number) != self._handler:
            logger.error("%s, and what is in flight is not saved yet", over)
            return
        logger.error("%s: what is not on storage yet is lost", over)
        if self._saving or self._raised:  # storage alone is slow: the job is to be tried again, as with its exception
            os._exit(Preempted.EXIT_CODE)
        # signal.signal() is the main thread's alone, and that thread does not answer.
        ctypes.pythonapi.PyOS_setsig(ctypes.c_int(number), ctypes.c_void_p(None))
        os.kill(os.getpid(), number)


def _echo_seconds(number: int) -> float:
    """For how long after a signal the same one is taken for its echo. A launcher passes a Ctrl-C on in its own time."""
    if number == signal.SIGINT and "TORCHELASTIC_RUN_ID" not in os.environ:
        return CTRL_C_ECHO_SECONDS
    return ECHO_SECONDS


def _boundary_is_expected() -> bool:
    return any(one.expects_boundary for one in _listening)


def _below(number: int, handler: Any, *, closed_only: bool = False) -> Any:
    """What is to be set in this handler's place when all of ours are gone, or those that are closed."""
    while isinstance(owner := getattr(handler, "__self__", None), Preemption) and (owner._closed or not closed_only):
        handler = owner._before[number]
    return handler


def _as_before(number: int, before: Any, frame: FrameType | None) -> None:
    """What the signal would have done without us."""
    if callable(before):
        before(number, frame)
    else:
        signal.signal(number, before)
        signal.raise_signal(number)


def _caught_outside_python(number: int) -> bool:
    """Whether the process has a handler that Python does not know of, such as faulthandler's, as far as can be seen."""
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as status:
            caught = next(line.split()[1] for line in status if line.startswith("SigCgt:"))
    except (OSError, StopIteration):  # no Linux
        return False
    return bool(int(caught, 16) >> (number - 1) & 1)


_listening: list[Preemption] = []  # those of this process that have put their handlers in place


def _forked() -> None:
    while _listening:
        _listening.pop().forked()


os.register_at_fork(after_in_child=_forked)
