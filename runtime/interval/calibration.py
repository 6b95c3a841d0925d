"""Iterations without checkpoints, where intervals leave none: they alone tell what training takes by itself.

First storage comes to rest: it gets nothing new. Captures that it does not take may go on meanwhile, a few of them
where there are none otherwise, to know what they cost. Then nothing is captured until so many iterations were free as
tell, for the noise in them, what training takes.
"""

from __future__ import annotations

import enum
import math

from checkflow.runtime.interval.measurements import LEAST, Iteration, Samples

LEAST_FREE, MOST_FREE = 5, 12  # iterations
ERROR_SHARE = 0.25  # of the overhead: so well they are to tell
EVERY, CAPTURES = 200, 50  # iterations without a free one, or captures, whichever is more
LONGEST_REST, LONGEST_FREE = 4 * LEAST, 4 * LEAST_FREE  # captures, and iterations: then it ends, whatever was seen


class _Stage(enum.Enum):
    NONE = enum.auto()
    RESTING = enum.auto()  # storage gets nothing new
    FREE = enum.auto()  # nothing is captured


class Control:
    """When checkpoints are left out, and why.

    Args:
        number: of the boundary from which on a plan runs.
        unit: its interval.
    """

    def __init__(self, samples: Samples, overhead: float, *, number: int, unit: int) -> None:
        self._samples, self._overhead, self._unit = samples, overhead, unit
        self._stage, self._since, self._wanted = _Stage.NONE, number, 0
        self.needed = False  # something asks for one, as soon as may be
        self.made = 0

    @property
    def resting(self) -> bool:
        """Whether storage is to get nothing new."""
        return self._stage is _Stage.RESTING

    @property
    def free(self) -> bool:
        """Whether nothing is captured."""
        return self._stage is _Stage.FREE

    @property
    def wants_captures(self) -> bool:
        """Whether it waits for captures that storage does not take."""
        return self.resting and self._samples.captures_seen < self._wanted

    def is_stale(self, number: int, memory: int) -> bool:
        """Whether the last free iteration was long ago.

        Args:
            memory: iterations from one capture to the next.
        """
        return number - max(self._samples.last_free or 0, self._since) >= max(EVERY, CAPTURES * memory)

    def follow(self, iteration: Iteration, *, due: bool, captures: int) -> None:
        """An iteration has ended: begin a control where one is due, and see it through.

        Args:
            captures: how many that storage does not take are wanted.
        """
        number, samples = iteration.number, self._samples
        if self._stage is _Stage.NONE:
            if due or self.needed:
                self._stage, self._since = _Stage.RESTING, number
                self._wanted = samples.captures_seen + captures
        elif self._stage is _Stage.RESTING:
            if iteration.persisted:
                self._since = number
            elif not self.wants_captures or number - self._since >= LONGEST_REST * self._unit:
                self._stage, self._since = _Stage.FREE, number
                self._wanted = samples.free_seen
        elif samples.free_seen - self._wanted >= self._enough or number - self._since >= LONGEST_FREE:
            self._stage, self.needed = _Stage.NONE, False
            self.made += 1

    @property
    def _enough(self) -> int:
        """How many free iterations tell what training takes: the more, the more they vary."""
        if self._samples.baseline is None or not self._overhead:
            return LEAST_FREE
        seconds, spread_seconds = self._samples.baseline
        wanted = (spread_seconds / (ERROR_SHARE * self._overhead * seconds)) ** 2
        return max(LEAST_FREE, math.ceil(min(MOST_FREE, wanted)))
