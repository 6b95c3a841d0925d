"""Intervals where storage gets a busy neighbour for some time: longer beside it, and back again afterwards.

A job is imitated iteration by iteration, with noise, so that nothing here depends on a clock.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from checkflow.runtime.interval.algorithm import Asked
from checkflow.runtime.interval.controller import Controller
from checkflow.runtime.interval.measurements import Iteration

ITERATION_SECONDS, CAPTURE_SECONDS = 0.1, 0.003
NOISE, SLOW_SHARE, SLOWER = 0.03, 0.02, 1.3  # some iterations in fifty are a third longer


@dataclass
class Storage:
    """How long one persist lasts, and the share of that time by which training becomes longer."""

    seconds: float
    share: float


class Job:
    """Training, with one checkpoint at a time on its way to storage, and the newest one waiting."""

    def __init__(self, overhead: float, seed: int) -> None:
        self._random = random.Random(seed)
        self.controller = Controller(Asked(overhead))
        self.number = 0
        self._captured = self._durable = self._waiting = False
        self._lasts = self._left = 0.0

    def train(self, iterations: int, storage: Storage) -> None:
        for _ in range(iterations):
            seconds = ITERATION_SECONDS * (1 + self._random.gauss(0, NOISE))
            seconds *= SLOWER if self._random.random() < SLOW_SHARE else 1.0
            seconds += CAPTURE_SECONDS * self._captured
            persisting, ended = self._left > 0, None
            if persisting:
                seconds += storage.share * min(self._left, seconds)
                self._left -= seconds
                if self._left <= 0:
                    ended = self._lasts
                    self._lasts = self._left = storage.seconds if self._waiting else 0.0
                    self._waiting = False
            if self._captured and self._durable:
                self._waiting = self._left > 0
                if not self._waiting:
                    self._lasts = self._left = storage.seconds
            self.number += 1
            self.controller.ended(
                Iteration(self.number, seconds, captured=self._captured, persisted=persisting, persist_seconds=ended)
            )
            self._captured = self.controller.is_due(self.number)
            if self._captured:
                self._durable = self.controller.is_durable(self.number)
                self.controller.captured(self.number, durable=self._durable)

    @property
    def interval(self) -> int:
        now = self.controller.intervals
        assert now is not None
        return now.disk


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("overhead", "usual", "disturbed"),
    [
        (0.035, Storage(0.05, 0.1), Storage(0.4, 0.1)),
        (0.035, Storage(0.05, 0.3), Storage(0.4, 0.3)),
        (0.1, Storage(0.2, 0.1), Storage(2.0, 0.1)),
    ],
)
def test_intervals_come_back(overhead: float, usual: Storage, disturbed: Storage, seed: int) -> None:
    """However long it was disturbed: most of what was seen since the last change may be of that time."""
    job = Job(overhead, seed)
    job.train(200, usual)
    before = job.interval
    job.train(600, disturbed)
    beside = job.interval
    assert beside >= 2 * before
    job.train(14 * beside + 200, usual)  # halved each time, after five persists and up to a review's distance
    assert job.interval <= before + 3
