"""A job in pure arithmetic: iterations, captures and persists that take what they are told to, and a controller.

And a real job whose pace follows from such numbers (:func:`rule_pace`).
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from dataclasses import dataclass, field
from typing import Any

import pytest

from checkflow.runtime.interval.algorithm import Asked
from checkflow.runtime.interval.controller import Controller
from checkflow.runtime.interval.measurements import Iteration
from checkflow.runtime.loop import pacing
from checkflow.runtime.persist.writer import Persisted, Writer
from checkflow.runtime.transfer.host import HostCopyEngine


@dataclass
class SimulatedJob:
    """Its costs may be changed between two runs.

    A capture lengthens the first iteration after its boundary by ``capture_seconds``. A persist lasts
    ``persist_seconds`` of the job's time, and each second of it lengthens training by ``slowdown``. One is under way;
    the newest capture waits, as with :class:`checkflow.runtime.persist.writer.Writer`.
    """

    asked: Asked = field(default_factory=Asked)
    iteration_seconds: float = 1.0
    capture_seconds: float = 0.0
    persist_seconds: float = 3.0
    slowdown: float = 0.0
    noise: float = 0.0  # standard deviation of an iteration, as a share of it
    pauses: dict[int, float] = field(default_factory=dict)  # seconds, by iteration
    unit: int = 1
    epoch: int | None = None  # iterations
    saves_epochs: bool = False  # their ends are captured, whatever the controller says
    seed: int = 0
    fails: bool = False  # storage does not take anything
    counts: bool = True  # whether its iterations may be compared with each other
    held_seconds: float = 0.0  # of a capture's first iteration, without lengthening what is not said above
    standing_seconds: float = 0.0  # that hooks add to every iteration, and hold it up
    place: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.controller = Controller(self.asked, epoch_iterations=self.epoch)
        self.controller.place(0, self.unit, **self.place)
        self.number = 0
        self.captures: list[int] = []
        self.durable: list[int] = []  # that storage was to take; of those that wait for it, it gets the newest
        self.written = 0  # that it has taken
        self.times: list[tuple[float, float]] = []  # of each iteration: with checkpoints, and what it takes by itself
        self._left_seconds = 0.0  # of the persist under way
        self._waiting = self._begun = False
        self._flying = 0

    def run(self, iterations: int) -> float:
        """So many iterations; returns by what share they took longer than without checkpoints and pauses."""
        seconds = free_seconds = 0.0
        for _ in range(iterations):
            self.number += 1
            own = self.iteration_seconds * max(0.1, self.random.gauss(1, self.noise))
            taken = own + self.standing_seconds + (self.capture_seconds if self._begun else 0.0)
            persisting, ended = self._left_seconds > 0, False
            if persisting:
                part = min(self._left_seconds, taken)
                taken += part * self.slowdown
                self._left_seconds -= part
                ended = self._left_seconds < 1e-9
            seconds, free_seconds = seconds + taken, free_seconds + own
            self.times.append((taken, own))
            self.controller.ended(
                Iteration(
                    self.number, taken + self.pauses.get(self.number, 0.0), captured=self._flying > 0,
                    persisted=persisting, persist_seconds=self.persist_seconds if ended and not self.fails else None,
                    held_seconds=self.standing_seconds + (self.held_seconds if self._begun else 0.0),
                    counts=self.counts,
                )
            )  # fmt: skip
            self._at_boundary(ended)
        return seconds / free_seconds - 1 if free_seconds else 0.0

    def _at_boundary(self, ended: bool) -> None:
        if ended:
            self.written += 1
            self._left_seconds = self.persist_seconds if self._waiting else 0.0
            self._waiting = False
        self._begun, self._flying = False, max(0, self._flying - 1)
        regular, extra = self.controller.is_due(self.number), False
        if self.saves_epochs and self.epoch is not None and self.number % self.epoch == 0:
            extra = not self.controller.leaves_out_epochs
        if not (regular or extra):
            return
        durable = extra or self.controller.is_durable(self.number)
        self.controller.captured(self.number, durable=durable, counts=regular)
        self.captures.append(self.number)
        self._begun, self._flying = True, self.unit
        if durable:
            self.durable.append(self.number)
            self._waiting = self._left_seconds > 0
            self._left_seconds = self._left_seconds or self.persist_seconds

    @property
    def intervals(self) -> tuple[int, int] | None:
        """Of captures in memory, and of those on storage."""
        now = self.controller.intervals
        return None if now is None else (now.memory, now.disk)

    def overhead(self, first: int = 0, last: int | None = None) -> float:
        """The share by which the iterations after ``first``, up to ``last``, took longer."""
        with_them, without = (sum(column) for column in zip(*self.times[first:last], strict=True))
        return with_them / without - 1

    def worst_overhead(self, window: int, first: int = 0, last: int | None = None) -> float:
        """The most that any ``window`` iterations in a row took longer."""
        last = len(self.times) if last is None else last
        return max(self.overhead(begin, begin + window) for begin in range(first, max(first + 1, last - window)))


def rest(engine: Any, writer: Writer) -> None:
    """Wait until what has arrived is handed on, and storage has all that it is to take."""
    assert isinstance(engine, HostCopyEngine)
    with engine._mutex:
        while engine._delivery is not None:
            engine._changed.wait()
    with writer._changed:  # what is held back is not waited for
        while writer._waiting or writer._busy:
            writer._changed.wait()


def rule_pace(patch: pytest.MonkeyPatch, *, rests: bool) -> None:
    """Real jobs decide how often by this: an iteration takes a second, a persist half of one, and nothing waits.

    Args:
        rests: storage is at rest at each boundary; otherwise it may lag, and how far follows from the machine.
    """
    seconds, persist, ended = itertools.count(), Writer._persist, pacing.Pace.ended

    def timed(self: Writer, capture: Any) -> Persisted:
        return dataclasses.replace(persist(self, capture), seconds=0.5)

    def ruled(self: pacing.Pace, number: int, *, epoch_end: bool, held_seconds: float) -> None:
        if rests:
            rest(self._saving.engine, self._saving.writer)
        ended(self, number, epoch_end=epoch_end, held_seconds=0.0)

    patch.setattr(pacing, "clock", lambda: float(next(seconds)))
    patch.setattr(Writer, "_persist", timed)
    patch.setattr(pacing.Pace, "ended", ruled)
