"""Times operators on a GPU by events around each, while the host calls them one by one.

If the device was idle, that includes the operator's launch, which is measured separately and subtracted:
docs/explanation/tracing.md ("the record").
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

LAPS = 21  # per measurement of the floor; the median counts
LEAST_SECONDS = 1e-6  # least result for a longer time: a kernel's begin and end take as long
IDLE = 3  # times the gap of two bare events: the device was idle in between
Call = Callable[[Any, tuple[Any, ...], Mapping[str, Any]], Any]


@dataclass(frozen=True, slots=True)
class Floor:
    """What two events measure on an idle device."""

    nothing_seconds: float  # one right behind the other
    launch_seconds: float  # around an operator that computes next to nothing

    def own_seconds(self, seconds: float, gap_seconds: float | None) -> float:
        """Return what an operator took by itself, of ``seconds`` between its events.

        ``gap_seconds`` lie between the last event before it and the first of these; None: there was none.
        """
        if gap_seconds is not None and gap_seconds <= IDLE * self.nothing_seconds:
            return seconds
        return max(seconds - self.launch_seconds, min(seconds, LEAST_SECONDS))


class OperatorEvents:
    """Measures operators for :class:`.recorder.IterationRecorder`: an event before the kernels and one after."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pair: tuple[torch.Event, torch.Event] | None = None
        self._last: torch.Event | None = None  # behind what was measured last
        self._before: torch.Event | None = None  # the same, for the operator that is being measured
        self._kept: list[tuple[torch.Event | None, torch.Event, torch.Event]] = []
        # For kept ones that contain others: the first of those, and seconds that do not count.
        self._containing: dict[int, tuple[int, float]] = {}

    def start(self) -> None:
        self._before, self._pair = self._last, (self._event(), self._event())
        self._record(self._pair[0])

    def stop(self) -> None:
        assert self._pair is not None
        self._record(self._pair[1])
        self._last = self._pair[1]

    def keep(self) -> None:
        assert self._pair is not None
        self._kept.append((self._before, *self._pair))

    def open(self) -> object:
        before = self._event()
        self._record(before)
        return len(self._kept), before

    def keep_rest(self, span: Any, apart_seconds: float, /) -> None:
        first, before = span
        self._last = after = self._event()
        self._record(after)
        self._containing[len(self._kept)] = first, apart_seconds
        self._kept.append((None, before, after))

    def seconds(self) -> tuple[float, ...]:
        """Return each kept one's seconds; operators without their launches, as far as the device waited for these."""
        self.synchronize()
        floor = measure_floor(self._device) if self._kept else Floor(0.0, 0.0)
        own = []
        for index, (seconds, (last, before, _)) in enumerate(zip(self.read(), self._kept, strict=True)):
            if index in self._containing:  # many kernels: their launches cannot be separated
                own.append(seconds)
            else:
                own.append(floor.own_seconds(seconds, None if last is None else _between(last, before)))
        return tuple(own)

    def synchronize(self) -> None:
        for _, _, after in self._kept:
            after.synchronize()

    def read(self) -> list[float]:
        """Return what the events measured of each kept one; all must have passed."""
        seconds: list[float] = []
        for index, (_, before, after) in enumerate(self._kept):
            first, apart_seconds = self._containing.get(index, (index, 0.0))
            seconds.append(max(0.0, _between(before, after) - apart_seconds - sum(seconds[first:index])))
        return seconds

    def _event(self) -> torch.Event:
        return torch.Event(self._device, enable_timing=True)

    def _record(self, event: torch.Event) -> None:
        # By default an event goes to the current device, which may not be the job's.
        apart = self._device.type != "cpu"
        event.record(torch.accelerator.current_stream(self._device) if apart else None)


def measure_floor(device: torch.device) -> Floor:
    """Return the medians of two bare events, and of events around an operator that computes next to nothing.

    Runs both under a mode, which calls operators from Python as a record does; the job's own modes see nothing.
    """
    torch.get_device_module(device).synchronize(device)
    with _disable_current_modes(), torch.no_grad():
        scalar = torch.zeros((), device=device)
        return Floor(_laps(device, scalar, call_nothing), _laps(device, scalar, call))


def _laps(device: torch.device, scalar: torch.Tensor, do: Call) -> float:
    """Return the median of several, each on an idle device."""
    events = OperatorEvents(device)
    for _ in range(LAPS):
        with _Timed(events, do):
            scalar.fill_(1.0)
        events.keep()
        events.synchronize()
    return statistics.median(events.read())


def call(func: Any, args: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
    return func(*args, **keywords)


def call_nothing(func: Any, args: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
    """Stand in for an operator that returns what it writes."""
    return args[0]


class _Timed(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Measures each operator, or what stands in for it."""

    def __init__(self, events: OperatorEvents, do: Call) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._events, self._do = events, do

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self._events.start()
        result = self._do(func, args, kwargs or {})
        self._events.stop()
        return result


def _between(before: torch.Event, after: torch.Event) -> float:
    return before.elapsed_time(after) / 1000  # given in milliseconds
