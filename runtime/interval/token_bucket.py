"""What checkpoints may cost at this moment: a token bucket that training fills and checkpoints empty.

Each iteration earns ``overhead`` of training's own time; one with a checkpoint under way spends what it took beyond a
free one. A checkpoint may begin while nothing is owed. So whatever the first ones cost, and however suddenly others
cost more, beyond ``overhead`` is only the checkpoint under way when that happens.
"""

from __future__ import annotations

import math
from collections import deque

from checkflow.runtime.interval.measurements import Iteration

WINDOW, INTERVALS = 100, 3  # iterations, or intervals, whichever is longer, that pay for all that may be owed
SLACK = 10  # iterations whose earnings may be saved up
NOISE = 2.0  # standard deviations of the sum over a window, that may be saved up as well
PAUSE_SHARE, PAUSE_INTERVALS = 0.5, 4  # of an iteration, and intervals' earnings: more is a pause of the machine's
FREE_KEPT = 200  # iterations
FREE_PRIOR = 10  # iterations that count as exactly usual, beside those seen


class Bucket:
    """Says whether a checkpoint may begin. With overhead 0 the bucket never blocks."""

    def __init__(self) -> None:
        self.level_seconds = self._highest_seconds = 0.0  # now; since the last persist ended
        self._slack_seconds = 0.0
        self._stopped = False  # captures that storage does not take
        # What free iterations take beyond their median (a loader that stalls now and then) is no checkpoint's cost.
        self._free_excess: deque[float] = deque(maxlen=FREE_KEPT)

    def add(
        self,
        iteration: Iteration,
        baseline: tuple[float, float],
        *,
        earned_seconds: float,
        standing_seconds: float,
        interval: int,
    ) -> None:
        """An iteration has ended.

        Args:
            baseline: seconds of one without checkpoints, and their standard deviation.
            earned_seconds: seconds that checkpoints may take of it.
            standing_seconds: seconds for which training waits in any iteration, which ``earned_seconds`` leaves out.
            interval: iterations from one checkpoint to the next.
        """
        free_seconds, spread = baseline
        most_owed_seconds = earned_seconds * max(WINDOW, INTERVALS * interval)
        # What is sure is paid also where nothing else is known.
        charge = max(0.0, iteration.held_seconds - standing_seconds)
        if iteration.is_usable:
            limit = max(PAUSE_SHARE * free_seconds, PAUSE_INTERVALS * interval * earned_seconds, iteration.held_seconds)
            excess = min(iteration.own_seconds - free_seconds, limit)
            if iteration.is_free:
                self._free_excess.append(excess)
                charge = 0.0
            else:
                charge = excess - sum(self._free_excess) / (FREE_PRIOR + len(self._free_excess))
        self._slack_seconds = max(SLACK * earned_seconds, NOISE * spread * math.sqrt(WINDOW))
        level = self.level_seconds = max(
            -most_owed_seconds, min(self._slack_seconds, self.level_seconds + earned_seconds - charge)
        )
        self._highest_seconds = level if iteration.persisted else max(level, self._highest_seconds)

    def forgive(self, most_owed_seconds: float) -> None:
        """What was charged was measured against another training's time: more than this is not owed."""
        self.level_seconds = self._highest_seconds = max(-most_owed_seconds, self.level_seconds)
        self._free_excess.clear()

    def allows_writing(self) -> bool:
        """Whether nothing is owed: storage may be written to."""
        return self.level_seconds >= 0.0

    def allows_between(self) -> bool:
        """Whether a capture may be made that storage does not take, also while a persist is being paid for.

        If more is owed than when that persist ended such captures are not cheap: there are none until all is paid.
        """
        if self.level_seconds >= 0.0:
            self._stopped = False
        elif self.level_seconds < self._highest_seconds - self._slack_seconds:
            self._stopped = True
        return not self._stopped
