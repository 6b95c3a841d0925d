"""Errors that a signal's handler raises while checkpointing has the word: training's own, never swallowed."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import checkflow
from checkflow import api
from checkflow.api import Checkpointer
from checkflow.core import plan as plans
from checkflow.planner.record.recorder import IterationRecorder
from checkflow.runtime.persist.writer import Writer
from checkflow.runtime.system.signals import raised_by_handler
from checkflow.runtime.transfer.host import HostCopyEngine
from tests.runtime.test_checkpointer import make, make_plan, steps
from tests.support.oracle import assert_checkpoint_is, clone_state

USR2 = signal.SIGUSR2


class LostWorkerError(Exception):
    """As torch's handler raises when a worker was killed."""


def function(number: int, frame: FrameType | None) -> None:
    raise LostWorkerError


class Handlers:
    def method(self, number: int, frame: FrameType | None) -> None:
        helper()

    def __call__(self, number: int, frame: FrameType | None) -> None:
        raise LostWorkerError


def helper() -> None:
    raise LostWorkerError


@pytest.fixture(autouse=True)
def _handler() -> Iterator[None]:
    before = signal.signal(USR2, function)
    yield
    signal.signal(USR2, before)


@pytest.fixture(autouse=True)
def _random_plans_have_no_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "check_plan", plans.validate)


@pytest.mark.parametrize("handler", [function, Handlers().method, Handlers(), lambda number, frame: helper()])
def test_what_any_kind_of_handler_raises_is_told_from_other_errors(handler: Callable[..., None]) -> None:
    signal.signal(USR2, handler)
    with pytest.raises(LostWorkerError) as raised:
        signal.raise_signal(USR2)
    assert raised_by_handler(raised.value)
    with pytest.raises(LostWorkerError) as raised:
        helper()
    assert not raised_by_handler(raised.value)


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.SIG_DFL, partial(function)])
def test_handlers_without_code_are_passed_over(handler: Any) -> None:
    signal.signal(USR2, handler)
    with pytest.raises(LostWorkerError) as raised:
        helper()
    assert not raised_by_handler(raised.value)


@pytest.mark.parametrize("at", ["begin", "offload", "snapshot", "wait", "conclude"])
def test_a_handlers_error_goes_on_to_training_and_voids_one_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    """Wherever it comes; who catches it trains on, and later checkpoints are whole."""
    original, due = getattr(HostCopyEngine, at), False

    def signalled(self: HostCopyEngine, *arguments: Any, **keywords: Any) -> Any:
        nonlocal due
        result = original(self, *arguments, **keywords)
        if due:
            due = False
            signal.raise_signal(USR2)
        return result

    plan = make_plan()
    monkeypatch.setattr(HostCopyEngine, at, signalled)
    model, optimizer, iterate = make()
    caught = 0
    with Checkpointer(model, optimizer, directory=tmp_path, plan=plan, every=1, audit=1, keep_latest=9) as checkpointer:
        for number in range(6):
            due = number == 3
            try:
                iterate()
                checkpointer.step()
            except LostWorkerError:
                caught += 1
        checkpointer.step()
        state = clone_state({"model": model}, {"optimizer": optimizer})
        last = checkpointer.iteration
    assert caught == 1
    report = checkpointer.report()
    assert report["captures"] - report["committed"] <= 1
    assert report["breaches"] == 0
    assert_checkpoint_is(tmp_path / f"step-{last:08d}", state)
    assert 2 in steps(tmp_path)


def test_a_handlers_error_while_recording_begins_goes_on_to_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is recorded later, or not at all."""
    original = IterationRecorder.begin

    def signalled(self: IterationRecorder, *arguments: Any) -> None:
        original(self, *arguments)
        signal.raise_signal(USR2)

    monkeypatch.setattr(IterationRecorder, "begin", signalled)
    model, optimizer, iterate = make()
    with checkflow.Checkpointer(model, optimizer, directory=tmp_path) as checkpointer:
        with pytest.raises(LostWorkerError):
            for _ in range(4):
                iterate()
        monkeypatch.undo()
        iterate()
        checkpointer.step()
        state = clone_state({"model": model}, {"optimizer": optimizer})
    assert_checkpoint_is(tmp_path / f"step-{checkpointer.iteration:08d}", state)


def test_a_handlers_error_at_delivery_costs_no_staging_buffer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a single buffer the next boundary would wait for it for ever."""
    original = Writer.submit
    delivered_in = set()

    def signalled(self: Writer, capture: Any) -> None:
        delivered_in.add(threading.current_thread())
        signal.raise_signal(USR2)
        original(self, capture)

    monkeypatch.setattr(Writer, "submit", signalled)
    heeded = False

    def once(number: int, frame: FrameType | None) -> None:
        """Between any two lines of training, and not between those of this test."""
        nonlocal heeded
        if heeded:
            heeded = False
            raise LostWorkerError

    signal.signal(USR2, once)
    plan = make_plan()
    model, optimizer, iterate = make()
    with Checkpointer(
        model, optimizer, directory=tmp_path, plan=plan, every=1, host_buffers=1, keep_latest=9
    ) as checkpointer:
        for _ in range(6):
            for part in (iterate, checkpointer.step):
                with contextlib.suppress(LostWorkerError):
                    heeded = True
                    part()
                    heeded = False
    assert threading.main_thread() not in delivered_in
    report = checkpointer.report()
    assert report["committed"] >= 1
