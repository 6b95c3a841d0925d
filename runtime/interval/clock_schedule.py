"""Checkpoints so many seconds apart, by what iterations took: the clock decides, whatever time goes to.

All that passes from boundary to boundary counts, validation and pauses included. A boundary that is captured is the
nearest to the moment asked for; by how much it was later or earlier, the next one makes up for, so that the mean
distance is what was asked also where a few long iterations are among many short ones.
"""

from __future__ import annotations

from collections import deque

from checkflow.runtime.interval.algorithm import in_iterations, is_time, late_after
from checkflow.runtime.interval.measurements import RECENT, median

WARM_UP = 8  # iterations, the first of a run: they make state, and are recorded
WINDOW, WINDOW_INTERVALS = 20, 5  # iterations, and distances as asked, in which iterations are measured
BAND = 0.25  # by so much, in two windows in a row, iterations are longer or shorter before an interval is logged anew


class ByTime:
    """Says when a checkpoint is due, and how many iterations that comes to.

    Args:
        every_seconds: from one checkpoint's begin to the next.
    """

    def __init__(self, every_seconds: float) -> None:
        self._every_seconds = every_seconds
        self._since_seconds = 0.0  # since the last one began, or the run did
        self._late_seconds = 0.0  # by which that was later than asked
        self._recent: deque[float] = deque(maxlen=RECENT)  # seconds of iterations
        self._ended = 0  # iterations
        self._window_seconds, self._window_iterations = 0.0, 0
        self._doubted: bool | None = None  # whether iterations were longer in the window before; None: of none other
        #: Of an iteration, as last reported; None: not known yet.
        self.usual_seconds: float | None = None

    def ended(self, seconds: float) -> bool:
        """An iteration has ended; returns whether iterations take another time now than was reported."""
        self._since_seconds += seconds
        self._recent.append(seconds)
        self._ended += 1
        if self._ended <= WARM_UP:
            return False
        self._window_seconds += seconds
        self._window_iterations += 1
        # The first window is short: nothing is known yet.
        least_seconds = 0.0 if self.usual_seconds is None else WINDOW_INTERVALS * self._every_seconds
        if self._window_iterations < WINDOW or self._window_seconds <= least_seconds:  # a clock may stand still
            return False
        seconds = self._window_seconds / self._window_iterations
        self._window_seconds, self._window_iterations = 0.0, 0
        if self.usual_seconds is not None:
            before, longer = self._doubted, seconds > self.usual_seconds
            self._doubted = longer if abs(seconds - self.usual_seconds) > BAND * self.usual_seconds else None
            if self._doubted is None or before is not longer:
                return False
        self.usual_seconds, self._doubted = seconds, None
        return True

    def interval(self, unit: int) -> int | None:
        """How many iterations it comes to, a multiple of ``unit``; None: that is not known yet."""
        if self.usual_seconds is None:
            return None
        return in_iterations(unit, self.usual_seconds, self._every_seconds)

    def is_due(self, unit: int) -> bool:
        """Whether a checkpoint is due at this boundary, a multiple of ``unit``."""
        if not self._recent:
            return False
        interval_seconds = unit * median(self._recent)
        return is_time(self._since_seconds, self._late_seconds, self._every_seconds, interval_seconds)

    def captured(self, unit: int) -> None:
        """A checkpoint begins at this boundary. What comes before its time (an epoch's end) makes up for nothing."""
        due = self.is_due(unit)
        late_seconds = late_after(self._since_seconds, self._late_seconds, self._every_seconds)
        self._late_seconds = late_seconds if due else 0.0
        self._since_seconds = 0.0
