"""Operators timed by events on a GPU: here a simulated one, which runs behind a host that takes its time to launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from checkflow.planner.record import cuda_events
from checkflow.planner.record.cuda_events import LEAST_SECONDS, Floor, OperatorEvents, measure_floor

CPU = torch.device("cpu")
EVENT, CALL, BETWEEN = 3e-6, 25e-6, 40e-6  # seconds of the host's for an event, an operator, and what lies between two
NEAR = 1.01 * EVENT  # the later event is recorded while the kernel runs, if that lasts


class Gpu:
    """Where the host is, and when the device will have done what it was given; in seconds."""

    def __init__(self) -> None:
        self.host_seconds = self.free_seconds = 0.0

    def launch(self, seconds: float) -> None:
        self.host_seconds += CALL
        self.free_seconds = max(self.host_seconds, self.free_seconds) + seconds

    def operator(self, events: OperatorEvents, seconds: float) -> None:
        self.host_seconds += BETWEEN
        events.start()
        self.launch(seconds)
        events.stop()
        events.keep()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    gpu = Gpu()

    class Event:
        def __init__(self, device: torch.device, enable_timing: bool) -> None:
            assert enable_timing

        def record(self, stream: None) -> None:
            gpu.host_seconds += EVENT
            self.at = max(gpu.host_seconds, gpu.free_seconds)

        def synchronize(self) -> None:
            gpu.host_seconds = max(gpu.host_seconds, self.at)

        def elapsed_time(self, later: Event) -> float:
            assert gpu.host_seconds >= later.at  # which has happened
            return (later.at - self.at) * 1e3

    def call(func: Any, args: tuple[Any, ...], keywords: Any) -> Any:
        gpu.launch(0.0)
        return func(*args, **keywords)

    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(cuda_events, "call", call)
    return gpu


def measured(gpu: Gpu, *kernels: float) -> list[float]:
    events = OperatorEvents(CPU)
    for seconds in kernels:
        gpu.operator(events, seconds)
    return list(events.seconds())


def test_the_floor_is_what_a_launch_takes_on_an_idle_device(gpu: Gpu) -> None:
    gpu.free_seconds = 1.0  # much is queued before
    floor = measure_floor(CPU)
    assert floor.nothing_seconds == pytest.approx(EVENT)
    assert floor.launch_seconds == pytest.approx(CALL + EVENT)


def test_short_kernels_on_an_idle_device_are_told_without_their_launches(gpu: Gpu) -> None:
    kernels = [5e-6, 2e-6, 0.0, 30e-6, 8e-6]
    found = measured(gpu, *kernels)
    assert found == pytest.approx([5e-6, 2e-6, LEAST_SECONDS, 30e-6, 8e-6], abs=NEAR)
    assert min(found) >= LEAST_SECONDS


def test_what_was_queued_behind_others_is_told_as_it_is(gpu: Gpu) -> None:
    kernels = [1e-3, 50e-6, 200e-6, 20e-6]
    assert measured(gpu, *kernels) == pytest.approx(kernels, abs=NEAR)


def test_what_contains_others_is_told_without_what_these_were_read_as(gpu: Gpu) -> None:
    """Their launches are no part of the rest."""
    events = OperatorEvents(CPU)
    gpu.operator(events, 5e-6)
    span = events.open()
    for seconds in (5e-6, 5e-6):
        gpu.operator(events, seconds)
    gpu.launch(500e-6)
    events.keep_rest(span, 10e-6)
    gpu.operator(events, 100e-6)  # behind it
    first, one, other, rest, last = events.seconds()
    assert [first, one, other] == pytest.approx([5e-6] * 3, abs=NEAR)
    read = 2 * (CALL + EVENT + 5e-6)
    lasted = 2 * (BETWEEN + EVENT + CALL + EVENT) + CALL + 500e-6  # as events are only passed then
    assert rest == pytest.approx(lasted - 10e-6 - read, abs=12e-6)
    assert last == pytest.approx(100e-6, abs=NEAR)


def test_nothing_falls_below_a_least_and_nothing_grows() -> None:
    floor = Floor(3e-6, 30e-6)
    assert floor.own_seconds(10e-6, 50e-6) == LEAST_SECONDS
    assert floor.own_seconds(0.5e-6, None) == 0.5e-6
    assert floor.own_seconds(0.0, None) == 0.0
    assert floor.own_seconds(100e-6, None) == pytest.approx(70e-6)
    assert floor.own_seconds(100e-6, 9e-6) == 100e-6


def test_a_job_s_own_modes_see_nothing_of_it(gpu: Gpu) -> None:
    seen: list[str] = []

    class Mode(cuda_events.TorchDispatchMode):
        def __torch_dispatch__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with FlopCounterMode(display=False), Mode():
        measured(gpu, 1e-6)
    assert not seen
    assert measured(gpu) == []


@pytest.mark.cuda
def test_on_a_gpu_a_launch_takes_longer_than_nothing_and_every_operator_something() -> None:
    floor = measure_floor(torch.device("cuda"))
    assert 0 < floor.nothing_seconds < floor.launch_seconds
    events, x = OperatorEvents(torch.device("cuda")), torch.ones(1000, device="cuda")
    for _ in range(20):
        events.start()
        x.add_(1.0)
        events.stop()
        events.keep()
    found = events.seconds()
    assert len(found) == 20
    assert all(0 < seconds <= read for seconds, read in zip(found, events.read(), strict=True))
