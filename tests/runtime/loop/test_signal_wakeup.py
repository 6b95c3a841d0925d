"""Signals that come while the main thread runs no Python; and the descriptor by which they are heard of."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import checkflow
from checkflow import api
from checkflow.core import plan as plans
from checkflow.runtime.loop import preemption, signal_wakeup
from checkflow.runtime.loop.preemption import Preemption
from tests.runtime.loop.test_preemption import WAITED_FOR, Loop, in_a_child
from tests.runtime.test_checkpointer import steps
from tests.support.waiting import wait_for, wait_until_saved

TERM, USR2 = signal.SIGTERM, signal.SIGUSR2


@pytest.fixture(autouse=True)
def _random_plans_have_no_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "check_plan", plans.validate)


@pytest.fixture
def handled() -> Iterator[list[int]]:
    """A signal with a handler, that asks nothing to end; when it ran."""
    ran: list[int] = []
    before = signal.signal(USR2, lambda number, frame: ran.append(number))
    yield ran
    signal.signal(USR2, before)


@pytest.fixture
def theirs() -> Iterator[tuple[int, int]]:
    """What an event loop sets: both ends."""
    read, write = os.pipe()
    os.set_blocking(read, False)
    os.set_blocking(write, False)
    before = signal.set_wakeup_fd(write)
    yield read, write
    assert signal.set_wakeup_fd(before) == write
    os.close(read)
    os.close(write)


def current() -> int:
    found = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(found)
    return found


@pytest.fixture(autouse=True)
def no_other_handlers() -> Iterator[None]:
    """The command line's, say, which another test has run in this process, would be called below ours."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in (TERM, signal.SIGUSR1)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


class Hung:
    """A main thread that waits in C, for ever or until another one ends that."""

    def __init__(self) -> None:
        self._mutex, self._library = ctypes.create_string_buffer(64), ctypes.CDLL(None)

    def hang(self) -> None:
        for _ in range(2):  # the second time it waits for itself
            self._library.pthread_mutex_lock(self._mutex)

    def hangs(self) -> bool:
        return self._mutex.raw[:4] == WAITED_FOR

    def end(self) -> None:
        self._library.pthread_mutex_unlock(self._mutex)

    def meanwhile(self, *acts: Callable[[], object]) -> threading.Thread:
        def run() -> None:
            wait_for(self.hangs)
            for act in acts:
                act()

        thread = threading.Thread(target=run)
        thread.start()
        return thread


def test_a_main_thread_that_hangs_when_the_signal_comes(tmp_path: Path) -> None:
    def run() -> None:
        loop, hung = Loop(tmp_path, {"grace_seconds": 0.5}), Hung()
        with loop.checkpointer as checkpointer:
            for n in checkpointer.steps(9):
                if n == 2:
                    wait_until_saved(tmp_path, 1)
                    hung.meanwhile(lambda: os.kill(os.getpid(), TERM))
                    hung.hang()
                loop.iterate()

    assert in_a_child(run) == -TERM
    assert 1 in steps(tmp_path)


def test_one_that_comes_back_is_saved_at_its_boundary(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    loop, hung = Loop(tmp_path), Hung()
    with pytest.raises(checkflow.Preempted), loop.checkpointer as checkpointer:
        for n in checkpointer.steps(9):
            loop.iterate()
            if n == 2:
                other = hung.meanwhile(
                    lambda: os.kill(os.getpid(), TERM),
                    lambda: wait_for(lambda: "the main thread is outside of Python" in caplog.text),
                    hung.end,
                )
                hung.hang()
                other.join()
    assert steps(tmp_path)[-1] == 3
    assert caplog.text.count("training ends at step 3, which is saved") == 1


def test_one_that_comes_back_too_late_ends_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The handler has not run when no boundary is waited for any more, and runs as soon as there is Python again."""
    monkeypatch.setattr(preemption, "MOMENT_SECONDS", 0.0)
    monkeypatch.setattr(Preemption, "_patience_seconds", lambda self: 0.0)
    loop, hung = Loop(tmp_path), Hung()
    with pytest.raises(checkflow.Preempted) as ended, loop.checkpointer as checkpointer:
        for n in checkpointer.steps(9):
            if n == 2:
                hung.meanwhile(
                    lambda: os.kill(os.getpid(), TERM), lambda: wait_for(lambda: checkpointer._preemption._overdue),
                    hung.end,
                )  # fmt: skip
                hung.hang()
                pytest.fail("it went on")
            loop.iterate()
    assert ended.value.signal_name == "SIGTERM"
    assert steps(tmp_path) == [1, 2]


def test_what_was_set_before_hears_it_too_and_is_put_back(
    tmp_path: Path, theirs: tuple[int, int], handled: list[int]
) -> None:
    read, write = theirs
    for number in (1, 2):  # one after the other
        with Loop(tmp_path / str(number)).checkpointer:
            assert current() != write
            signal.raise_signal(USR2)
            wait_for(lambda: poll(read) == bytes([USR2]))
        assert current() == write
    assert handled == [USR2, USR2]


def poll(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 10)
    except BlockingIOError:
        return b""


def test_what_was_set_before_may_be_closed_meanwhile(tmp_path: Path, handled: list[int]) -> None:
    read, write = os.pipe()
    os.set_blocking(write, False)
    before = signal.set_wakeup_fd(write)
    try:
        with Loop(tmp_path / "job").checkpointer:
            os.close(write)
            file = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT | os.O_NONBLOCK)
            if file != write:
                os.dup2(file, write)
            signal.raise_signal(USR2)
            assert os.read(read, 10) == bytes([USR2])  # by the time that this is there, it would be in the file
        assert os.stat(tmp_path / "file").st_size == 0
        assert current() == -1
        for descriptor in {read, write, file}:
            os.close(descriptor)
    finally:
        signal.set_wakeup_fd(before)


def test_whoever_sets_another_one_has_it(tmp_path: Path, handled: list[int]) -> None:
    loop = Loop(tmp_path)
    ours = current()
    read, write = os.pipe()
    os.set_blocking(write, False)
    assert signal.set_wakeup_fd(write) == ours
    with pytest.raises(checkflow.Preempted), loop.checkpointer as checkpointer:
        for _ in checkpointer.steps(9):
            loop.iterate()
            signal.raise_signal(TERM)
    assert os.read(read, 10) == bytes([TERM])
    assert signal.set_wakeup_fd(ours) == write  # as those do who put back what they found: it is no other file yet
    signal.raise_signal(USR2)
    assert handled == [USR2]
    assert signal.set_wakeup_fd(-1) == ours
    os.close(read)
    os.close(write)


def test_forked_children_write_nothing_to_their_parent(tmp_path: Path, handled: list[int]) -> None:
    heard: list[int] = []
    with Loop(tmp_path).checkpointer as checkpointer:
        signal_wakeup.subscribe(heard.append)
        # A child of C's fork that is asked to yield to another thread waits for ever, since it has no other thread.
        switch_seconds = sys.getswitchinterval()
        sys.setswitchinterval(1000.0)
        time.sleep(0.1)  # requests made before
        # As Python forks; and as C does, where nobody sees to the child: it writes where its parent listens.
        for fork, found in ((os.fork, -1), (ctypes.PyDLL(None).fork, current())):
            child = fork()
            if child == 0:
                code = 1
                try:
                    code = int(current() != found)
                    signal.raise_signal(TERM)
                finally:
                    os._exit(code)
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            assert status == (-TERM if fork is os.fork else 0)
        sys.setswitchinterval(switch_seconds)
        signal.raise_signal(USR2)  # heard of after what a child wrote
        wait_for(lambda: USR2 in heard)
        signal_wakeup.unsubscribe(heard.append)
        assert [number for number in heard if number != signal.SIGCHLD] == [USR2]  # torch's loader may handle that
        assert not checkpointer._preemption._begun


def test_what_was_taken_away_is_not_put_back(tmp_path: Path) -> None:
    """An event loop takes its own away, puts none in its place, and closes it: the number may be a file's then."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    before = signal.set_wakeup_fd(write)
    try:
        checkpointer = Loop(tmp_path).checkpointer
        signal.set_wakeup_fd(-1)
        checkpointer.close()
        assert current() == -1
    finally:
        signal.set_wakeup_fd(before)
        os.close(read)
        os.close(write)


def test_a_handler_may_close_it(tmp_path: Path) -> None:
    loop: list[Loop] = []
    before = signal.signal(TERM, lambda number, frame: loop[0].checkpointer.close())
    descriptor = current()
    try:
        loop.append(Loop(tmp_path))
        with pytest.raises(checkflow.Preempted):
            for _ in loop[0].checkpointer.steps(9):
                loop[0].iterate()
                signal.raise_signal(TERM)
        loop[0].checkpointer.close()
        assert current() == descriptor
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("checkflow-")]
    finally:
        signal.signal(TERM, before)
