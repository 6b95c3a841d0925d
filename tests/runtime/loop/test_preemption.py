"""Signals that ask a job to end: it is saved at its next boundary, ends with 75, and goes on bit-identical."""

from __future__ import annotations

import ctypes
import dataclasses
import faulthandler
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import checkflow
from checkflow import api
from checkflow.api import Checkpointer
from checkflow.core import plan as plans
from checkflow.core.errors import StorageError
from checkflow.runtime.loop import preemption
from checkflow.runtime.loop.preemption import Preemption
from checkflow.runtime.persist.writer import Writer
from checkflow.runtime.store.discovery import find
from checkflow.runtime.store.store import Store
from checkflow.runtime.system import fs
from tests.runtime.state.test_restore import assert_same_end
from tests.runtime.test_checkpointer import make, make_plan, steps
from tests.support import jobs
from tests.support.oracle import assert_checkpoint_is, clone_state
from tests.support.waiting import wait_for, wait_until_saved

INT, TERM, USR1 = signal.SIGINT, signal.SIGTERM, signal.SIGUSR1
ROOT = Path(__file__).parents[3]
End = tuple[Any, list[list[int]]]


@pytest.fixture(autouse=True)
def _random_plans_have_no_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "check_plan", plans.validate)


@pytest.fixture(autouse=True)
def _echoes_are_echoes(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the machine takes from a signal to the next one."""
    monkeypatch.setattr(preemption, "ECHO_SECONDS", 3600.0)
    monkeypatch.setattr(preemption, "CTRL_C_ECHO_SECONDS", 3600.0)


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Every test leaves the handlers as they were."""
    before = {number: signal.getsignal(number) for number in (INT, TERM, USR1, signal.SIGUSR2)}
    yield
    after = {number: signal.getsignal(number) for number in before}
    for number, handler in before.items():
        signal.signal(number, handler)
    assert after == before


def uninterrupted(directory: Path, **options: Any) -> End:
    directory.mkdir()
    assert jobs.start(jobs.Job(directory, **options)) == 0
    return torch.load(directory / "final.pt", weights_only=True), jobs.samples(directory)


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory) -> End:
    return uninterrupted(tmp_path_factory.mktemp("truth") / "job")


def newest(directory: Path) -> int:
    return int(find(directory / "checkpoints")[0].name[5:])


JOBS: dict[str, tuple[dict[str, Any], list[tuple[tuple[str, int, int], int]]]] = {
    # Each place is reached by a run that goes on where the one before it ended; batches are counted from there.
    "every iteration": (
        {},
        [
            (("forward", 0, 0), TERM),
            (("after step", 0, 4), USR1),  # the last batch of an epoch
            (("validation", 1, 0), TERM),
            (("epoch end", 2, 0), TERM),  # the very last boundary
        ],
    ),
    "workers, all signalled": (
        {"workers": 2, "group": True},
        [(("backward", 0, 1), TERM), (("step", 1, 0), USR1), (("forward", 1, 2), INT), (("validation", 1, 0), TERM)],
    ),
    "several iterations": (
        {"interval": 4, "every": 4},
        [(("forward", 0, 2), TERM), (("backward", 1, 3), USR1), (("validation", 1, 0), TERM)],
    ),
    # Unplanned, recorded, timed, and while the plan is made.
    "without a plan": (
        {"planless": True, "every": None},
        [
            (("forward", 0, 0), TERM),
            (("backward", 0, 1), TERM),
            (("step", 0, 2), USR1),
            (("planning", 0, 0), TERM),
        ],
    ),
    "explicit boundaries": ({"explicit": True}, [(("forward", 0, 1), TERM), (("backward", 0, 3), TERM)]),
    "accumulation": (
        {"accumulate": 2, "workers": 1, "group": True, "every": 2, "interval": 2},
        [(("backward", 0, 0), TERM), (("forward", 1, 1), USR1)],
    ),
}


@pytest.mark.parametrize("name", JOBS)
def test_saved_at_the_boundary_it_goes_on_bit_identical(name: str, tmp_path: Path, truth: End) -> None:
    options, signals = JOBS[name]
    job = jobs.Job(tmp_path / "job", **options)
    job.directory.mkdir()
    for place, number in signals:
        code = jobs.start(dataclasses.replace(job, kill=place, number=number))
        assert code == (1 if number == INT else 75), place  # a process of multiprocessing ends with 1 there
        assert newest(job.directory) == len(jobs.samples(job.directory)), place
        assert not (job.directory / "final.pt").exists()
    assert jobs.start(job) == 0
    expected = truth if job.accumulate == 1 else uninterrupted(tmp_path / "truth", accumulate=job.accumulate)
    assert_same_end(job.directory, expected)


SCRIPT = """
import os, signal, torch, checkflow

torch.manual_seed(0)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
try:
    with checkflow.Checkpointer(model, optimizer, directory="checkpoints", every=5) as checkpointer:
        for n in checkpointer.steps(9):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            if n == 2:
                os.kill(os.getpid(), signal.SIGTERM)
                print("preempted", checkpointer.preempted)
            optimizer.step()
        print("after the loop")
    print("after the block")
finally:
    print("finally")
"""


@pytest.mark.slow
def test_a_script_without_any_code_for_it(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (75, "preempted True\nfinally\n")
    assert steps(tmp_path / "checkpoints") == [3]
    assert "SIGTERM: training ends at its next boundary" in done.stderr
    assert "Traceback" not in done.stderr


@dataclasses.dataclass
class Loop:
    """A loop in this process, whose signals are real."""

    directory: Path
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        plan = make_plan()
        self.model, self.optimizer, self.iterate = make()
        self.checkpointer = Checkpointer(
            self.model, self.optimizer, directory=self.directory, plan=plan, every=1, audit=1,
            **{"grace_seconds": jobs.GRACE_SECONDS, **self.options},
        )  # fmt: skip

    def state(self) -> Any:
        return clone_state({"model": self.model}, {"optimizer": self.optimizer})

    def run(self, saved: int, *signals: int) -> None:
        """Train until so many iterations are saved; in the next one these signals come."""
        with self.checkpointer as checkpointer:
            for n in checkpointer.steps(9):
                self.iterate()
                if n == saved:
                    wait_until_saved(self.directory, saved)
                    for number in signals:
                        signal.raise_signal(number)


def test_the_loop_can_read_it_and_handlers_before_are_called(tmp_path: Path) -> None:
    seen: list[int] = []

    def mine(number: int, frame: Any) -> None:
        seen.append(number)

    before = signal.signal(USR1, mine)
    loop = Loop(tmp_path)
    try:
        with pytest.raises(checkflow.Preempted) as ended, loop.checkpointer as checkpointer:
            for n in checkpointer.steps(9):
                assert not checkpointer.preempted
                loop.iterate()
                if n == 3:
                    signal.raise_signal(USR1)
                    signal.raise_signal(USR1)  # an echo
                    assert checkpointer.preempted
                    truth = loop.state()
        assert (ended.value.code, ended.value.signal_name) == (75, "SIGUSR1")
        assert isinstance(ended.value, SystemExit)
        assert seen == [USR1]
        assert loop.checkpointer.preempted
        assert signal.getsignal(USR1) is mine
        assert_checkpoint_is(find(tmp_path)[0], truth)
        assert steps(tmp_path)[-1] == 4
    finally:
        signal.signal(USR1, before)


def test_ctrl_c_waits_for_the_boundary_and_twice_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(tmp_path)
    with pytest.raises(KeyboardInterrupt), loop.checkpointer as checkpointer:
        for _ in checkpointer.steps(9):
            signal.raise_signal(INT)
            loop.iterate()  # goes on
            assert not checkpointer.preempted
    assert steps(tmp_path) == [1]
    monkeypatch.setattr(preemption, "CTRL_C_ECHO_SECONDS", 0.0)
    loop = Loop(tmp_path)
    with loop.checkpointer as checkpointer:
        for n in checkpointer.steps(4):
            loop.iterate()
            if n == 1:
                signal.raise_signal(INT)
                with pytest.raises(KeyboardInterrupt):
                    signal.raise_signal(INT)
                assert not checkpointer._preemption.asked  # it is over with that, as in a notebook's next cell
    assert steps(tmp_path)[-1] == 4


def test_a_notebook_goes_on_after_ctrl_c(tmp_path: Path) -> None:
    """The same Checkpointer in the next cell: a Ctrl-C is over with the exception that it raised."""
    loop = Loop(tmp_path)
    for last in (2, 4):
        with pytest.raises(KeyboardInterrupt):
            for n in loop.checkpointer.steps(9):
                loop.iterate()
                if n + 1 == last:
                    signal.raise_signal(INT)
        assert loop.checkpointer.iteration == last
    for _ in loop.checkpointer.steps(6):
        loop.iterate()
    with pytest.raises(KeyboardInterrupt):  # no loop goes on, so that no boundary will come
        signal.raise_signal(INT)
    loop.checkpointer.close()
    assert steps(tmp_path)[-1] == 6


def test_handlers_of_others_for_ctrl_c_stay(tmp_path: Path) -> None:
    for theirs in (signal.SIG_IGN, signal.SIG_DFL, lambda number, frame: None):
        before = signal.signal(INT, theirs)
        try:
            with Loop(tmp_path).checkpointer:
                assert signal.getsignal(INT) is theirs
            assert signal.getsignal(INT) is theirs
        finally:
            signal.signal(INT, before)


def test_what_is_ignored_stays_ignored(tmp_path: Path) -> None:
    before = signal.signal(TERM, signal.SIG_IGN)
    try:
        with Loop(tmp_path).checkpointer:
            assert signal.getsignal(TERM) is signal.SIG_IGN
    finally:
        signal.signal(TERM, before)


def test_a_handler_outside_of_python_stays(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with open(tmp_path / "stacks", "w") as stacks:
        faulthandler.register(USR1, file=stacks, all_threads=False)
        try:
            with Loop(tmp_path / "checkpoints").checkpointer as checkpointer:
                signal.raise_signal(USR1)
                assert not checkpointer.preempted
        finally:
            faulthandler.unregister(USR1)
    assert "SIGUSR1 has a handler outside of Python" in caplog.text
    assert "test_a_handler_outside_of_python_stays" in (tmp_path / "stacks").read_text()


def test_only_ours_are_put_back(tmp_path: Path) -> None:
    before = signal.getsignal(TERM)
    loop = Loop(tmp_path)

    def later(number: int, frame: Any) -> None:
        pass

    try:
        signal.signal(TERM, later)
        loop.checkpointer.close()
        assert signal.getsignal(TERM) is later
    finally:
        signal.signal(TERM, before)


def test_in_another_thread_there_are_no_handlers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    before = signal.getsignal(TERM)

    def run() -> None:
        loop = Loop(tmp_path)
        with loop.checkpointer as checkpointer:
            assert signal.getsignal(TERM) is before
            for _ in checkpointer.steps(2):
                loop.iterate()

    thread = threading.Thread(target=run, name="trainer")
    thread.start()
    thread.join()
    assert steps(tmp_path) == [1, 2]
    assert caplog.text.count("signals are not handled: this Checkpointer was made in thread trainer") == 1


def test_none_are_heeded_if_none_are_asked_for(tmp_path: Path) -> None:
    before = [signal.getsignal(number) for number in (INT, TERM, USR1)]
    with Loop(tmp_path, {"signals": ()}).checkpointer:
        assert [signal.getsignal(number) for number in (INT, TERM, USR1)] == before


def test_outside_of_a_loop_it_ends_at_once(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    with pytest.raises(checkflow.Preempted), loop.checkpointer as checkpointer:
        signal.raise_signal(TERM)  # before the first loop
    assert checkpointer.preempted
    loop = Loop(tmp_path)
    with pytest.raises(checkflow.Preempted), loop.checkpointer as checkpointer:
        for _ in checkpointer.steps(2):
            loop.iterate()
        signal.raise_signal(TERM)  # in the final evaluation
    assert steps(tmp_path) == [1, 2]


def test_a_signal_while_it_closes_waits_for_the_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    close = Writer.close

    def signalled(self: Writer) -> None:
        signal.raise_signal(TERM)
        close(self)

    monkeypatch.setattr(Writer, "close", signalled)
    loop = Loop(tmp_path)
    with pytest.raises(checkflow.Preempted), loop.checkpointer as checkpointer:
        for _ in checkpointer.steps(3):
            loop.iterate()
    assert steps(tmp_path) == [2, 3]
    loop = Loop(tmp_path)
    with pytest.raises(ZeroDivisionError), loop.checkpointer:  # the user's own is not masked
        raise ZeroDivisionError


def test_a_checkpoint_that_fails_at_the_end_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    from checkflow.runtime.store.store import Store

    def failing(self: Store, *arguments: Any, **keywords: Any) -> Path:
        raise checkflow.StorageError("planted")

    monkeypatch.setattr(Store, "commit", failing)
    loop = Loop(tmp_path)
    with pytest.raises(checkflow.Preempted), loop.checkpointer as checkpointer:
        for _ in checkpointer.steps(3):
            loop.iterate()
            signal.raise_signal(TERM)
    assert "training ends at step 1, which is not saved" in caplog.text
    loop = Loop(tmp_path / "another", {"on_error": "raise"})
    with pytest.raises(checkflow.StorageError, match="planted"), loop.checkpointer as checkpointer:
        for _ in checkpointer.steps(3):
            loop.iterate()
            signal.raise_signal(TERM)


def test_two_at_a_time_are_both_heeded(tmp_path: Path) -> None:
    """One that has no loop does not end the other's iteration; closed in any order, all is as before."""
    before = signal.getsignal(TERM)
    idle, loop = Loop(tmp_path / "idle"), Loop(tmp_path / "loop")
    with pytest.raises(checkflow.Preempted):
        for _ in loop.checkpointer.steps(9):
            signal.raise_signal(TERM)
            loop.iterate()
    assert idle.checkpointer.preempted
    with pytest.raises(checkflow.Preempted):
        idle.checkpointer.close()
    assert signal.getsignal(TERM) != before
    loop.checkpointer.close()
    assert signal.getsignal(TERM) == before
    assert steps(tmp_path / "loop") == [1]


def test_forked_children_have_the_handlers_of_before(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    with loop.checkpointer as checkpointer:
        child = os.fork()
        if child == 0:
            signal.raise_signal(TERM)
            os._exit(0)  # had it been heeded
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -TERM
        assert not checkpointer.preempted
        for _ in checkpointer.steps(1):
            loop.iterate()


def in_a_child(run: Any) -> int:
    """Run this in a forked process; returns its exit code."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            # No handlers of other tests, or of what runs them, are below ours; and it ends in any case.
            for number in (TERM, USR1, signal.SIGALRM):
                signal.signal(number, signal.SIG_DFL)
            signal.alarm(200)
            run()
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 1
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_storage_that_is_too_slow_for_the_grace_period_ends_it_with_75(tmp_path: Path) -> None:
    """Training has ended in time: a script that starts the job again on 75 does so. A hung disk never answers."""

    def run() -> None:
        loop, sync = Loop(tmp_path, {"grace_seconds": 1.0}), fs.fsync

        def stuck(fd: int) -> None:
            if loop.checkpointer.preempted:
                threading.Event().wait()
            sync(fd)

        fs.fsync = stuck
        for act in ("_interrupt", "_give_up"):  # however long the machine takes to the boundary
            acts_when(Preemption, act, lambda: loop.checkpointer._preemption._saving)
        loop.run(2, TERM)

    assert in_a_child(run) == 75
    assert steps(tmp_path) == [1, 2]


def test_what_storage_does_not_take_at_the_end_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit, tries = Store.commit, []

    def failing(self: Store, step: int, *arguments: Any, **keywords: Any) -> Path:
        tries.append(step)
        if step == 3 and tries.count(3) == 1:
            raise StorageError("planted")
        return commit(self, step, *arguments, **keywords)

    monkeypatch.setattr(Store, "commit", failing)
    loop = Loop(tmp_path)
    with pytest.raises(checkflow.Preempted), loop.checkpointer as checkpointer:
        for n in checkpointer.steps(9):
            loop.iterate()
            if n == 2:
                signal.raise_signal(TERM)
                truth = loop.state()
    assert tries.count(3) == 2
    assert_checkpoint_is(find(tmp_path)[0], truth)


def test_a_second_signal_acts_at_once(tmp_path: Path) -> None:
    def run() -> None:
        preemption.ECHO_SECONDS = 0.0
        Loop(tmp_path).run(1, TERM, TERM)

    assert in_a_child(run) == -TERM
    assert steps(tmp_path) == [1]


def test_no_boundary_within_the_grace_period(tmp_path: Path) -> None:
    """An iteration that waits for ever: it ends where it is, and what was in flight is saved."""

    def run() -> None:
        Preemption._patience_seconds = lambda self: 0.2  # type: ignore[method-assign]
        loop = Loop(tmp_path)
        never = os.pipe()[0]
        with loop.checkpointer as checkpointer:
            for n in checkpointer.steps(9):
                if n == 2:
                    loop.model(torch.randn(6, 4))  # batch norm has written; some of the state is not copied yet
                    signal.raise_signal(TERM)
                    os.read(never, 1)
                loop.iterate()

    assert in_a_child(run) == 75
    assert steps(tmp_path) == [1, 2]


def late_plan(*, snapshots: bool) -> plans.Plan:
    """Everything leaves as late as it may: live, or through snapshots made at the boundary."""
    plan = make_plan()
    last = plan.horizon_steps - 1
    chunks = tuple(
        dataclasses.replace(
            chunk,
            snapshot_step=0 if snapshots else None,
            offload_step=last if snapshots else plan.deadlines[chunk.tensor] or 0,
        )
        for chunk in plan.chunks
    )
    return dataclasses.replace(plan, chunks=chunks).sealed()


WAITED_FOR = (2).to_bytes(4, sys.byteorder)  # a mutex that is held, and for which a thread waits in the kernel


def acts_when(owner: type, name: str, ready: Callable[[], bool]) -> None:
    """Let a method wait until this is so, and then do what it does."""
    act = getattr(owner, name)

    def patient(*arguments: Any) -> None:
        try:
            wait_for(ready)
        finally:
            act(*arguments)

    setattr(owner, name, patient)


@pytest.mark.parametrize(
    ("snapshots", "last", "saved"),
    [
        pytest.param(True, "", [1, 2], id="snapshots leave without it"),
        pytest.param(False, "anchor", [1, 2], id="live tensors leave at its next anchor"),
        pytest.param(False, "evaluation", [1, 2], id="live tensors leave as an evaluation begins"),
        pytest.param(False, "", [1], id="live tensors are left alone"),
    ],
)
def test_a_main_thread_that_does_not_answer(snapshots: bool, last: str, saved: list[int], tmp_path: Path) -> None:
    """It hangs outside of Python, so that no exception can be raised there: in the end the signal acts."""
    plan = late_plan(snapshots=snapshots)

    def run() -> None:
        model, optimizer, iterate = make()
        mutex, library = ctypes.create_string_buffer(64), ctypes.CDLL(None)
        # How long it takes until it hangs, and until storage has what leaves by itself, is the machine's affair.
        acts_when(Preemption, "_interrupt", lambda: mutex.raw[:4] == WAITED_FOR)
        acts_when(Preemption, "_give_up", lambda: steps(tmp_path) == saved)

        def hang(*_: Any) -> None:
            for _ in range(2):  # the second time it waits for itself
                library.pthread_mutex_lock(mutex)

        with Checkpointer(
            model, optimizer, directory=tmp_path, plan=plan, every=1, audit=1, grace_seconds=0.5
        ) as checkpointer:
            for n in checkpointer.steps(9):
                if n == 2:
                    wait_until_saved(tmp_path, 1)
                    signal.raise_signal(TERM)
                    if last == "anchor":
                        model[1](torch.randn(6, 16))
                    elif last == "evaluation":
                        model.register_forward_pre_hook(hang)
                        model.eval()(torch.randn(6, 4))
                    hang()
                iterate()

    assert in_a_child(run) == -TERM
    assert steps(tmp_path) == saved


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("signals", "SIGTERM"),
        ("signals", ("SIGKILL",)),
        ("signals", ("SIGINT",)),
        ("signals", (15,)),
        ("signals", None),
        ("grace_seconds", 0),
        ("grace_seconds", -1),
        ("grace_seconds", float("nan")),
        ("grace_seconds", float("inf")),
        ("grace_seconds", True),
        ("grace_seconds", "25"),
        ("grace_seconds", 1e300),  # more than a thread can wait for
        pytest.param("grace_seconds", 10**400, id="grace_seconds-huge"),
        pytest.param("overhead", 10**400, id="overhead-huge"),
    ],
)
def test_bad_arguments(name: str, bad: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=name):
        Loop(tmp_path, {name: bad})
    assert not list(tmp_path.iterdir())


def test_slurm(tmp_path: Path) -> None:
    """The example's script, with a scheduler that only writes down what it is asked."""
    script = ROOT / "examples" / "slurm.sbatch"
    for name, body in (("srun", "exit $CODE"), ("scontrol", f'echo "$@" >> {tmp_path}/asked')):
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)

    def run(code: int, restarts: int) -> tuple[int, str]:
        (tmp_path / "asked").write_text("")
        done = subprocess.run(
            ["bash", str(script)], check=False, capture_output=True,
            env={"PATH": f"{tmp_path}:{os.environ['PATH']}", "CODE": str(code), "SLURM_JOB_ID": "7",
                 "SLURM_RESTART_COUNT": str(restarts)},
        )  # fmt: skip
        return done.returncode, (tmp_path / "asked").read_text()

    assert run(0, 0) == (0, "")
    assert run(1, 0) == (1, "")
    assert run(75, 0) == (75, "requeue 7\n")
    assert run(138, 3) == (138, "requeue 7\n")  # killed by SIGUSR1: no boundary came
    assert run(75, 100) == (75, "")


@pytest.mark.parametrize("number", [INT, TERM])
def test_the_log_says_what_a_signal_does_outside_of_a_loop(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    name, kind = ("Ctrl-C", KeyboardInterrupt) if number == INT else ("SIGTERM", checkflow.Preempted)
    for turns in (0, 2):
        caplog.clear()
        loop = Loop(tmp_path / str(turns))
        with pytest.raises(kind), loop.checkpointer as checkpointer:
            for _ in checkpointer.steps(turns):
                loop.iterate()
            signal.raise_signal(number)
        assert caplog.text.count(f"{name}: it acts at once, since no loop goes on\n") == 1
        assert "next boundary" not in caplog.text
    close = Writer.close

    def signalled(self: Writer) -> None:
        signal.raise_signal(number)
        close(self)

    monkeypatch.setattr(Writer, "close", signalled)
    caplog.clear()
    with pytest.raises(kind), Loop(tmp_path / "closing").checkpointer:
        pass
    assert caplog.text.count(f"{name}: what is in flight is saved first") == 1
    assert "next boundary" not in caplog.text


def test_the_log_does_not_repeat_itself(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    loop = Loop(tmp_path)
    with caplog.at_level(logging.INFO), pytest.raises(checkflow.Preempted), loop.checkpointer as checkpointer:
        for _ in checkpointer.steps(3):
            loop.iterate()
            signal.raise_signal(TERM)
            signal.raise_signal(TERM)
    assert caplog.text.count("SIGTERM: training ends at its next boundary, and is saved there, within 3600 s") == 1
    assert caplog.text.count("SIGTERM: training ends at step 1, which is saved") == 1
