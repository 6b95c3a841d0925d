"""What checkpoints may cost at this moment: a bucket that training fills, and that what checkpoints add to it empties.

An interval follows from costs measured before. The budget follows what is spent: each iteration earns ``overhead`` of
what training takes by itself, less what hooks and looks at the job hold up in any iteration (half of it at least), and
one with a checkpoint under way is charged with what it took beyond that. Nothing is written to storage as long as
anything is owed, so that over any long window (``WINDOW`` iterations, or ``INTERVALS`` intervals) checkpoints cost
about ``overhead`` at most, whatever the first ones cost, and however suddenly others cost more: beyond it is what the
checkpoint costs that is under way when that happens.

- What is saved up is bounded (``SLACK`` iterations' worth, or what noise comes to in a window): a quiet hour pays for
  no burst. What is owed is bounded too, by what one window earns: no checkpoint is put off for longer.
- What free iterations take beyond their own median (a loader that stalls at every tenth batch) is training's; the same
  is not charged where a checkpoint is under way.
- An iteration that is slower by half, for which training is not known to have waited, may have had a pause that
  neither it nor a checkpoint made: it counts in full once a second one, not long after it, says the same.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from checkflow.runtime.interval.measurements import Iteration
from checkflow.runtime.interval.policy import Costs

WINDOW, INTERVALS = 100, 3  # iterations, and intervals, whichever is longer
SLACK = 10  # iterations whose earnings may be saved up
NOISE = 2.0  # standard deviations of the sum over a window
PAUSE_SHARE, PAUSE_INTERVALS = 0.5, 4  # of an iteration, and intervals' earnings: what is charged of a pause at most
NEAR, NEAR_INTERVALS = 20, 5  # iterations, and intervals, in which a second pause is no accident
FORGIVEN_EVERY = 3 * WINDOW  # iterations
FREE_KEPT = 200  # iterations
FREE_PRIOR = 10  # iterations that count as exactly usual, beside those seen


@dataclass(slots=True)
class _Doubted:
    """An iteration that may have had a pause."""

    number: int
    excess_seconds: float
    charged_seconds: float


class Budget:
    """Says whether a checkpoint may be begun.

    Args:
        overhead: the share of training's own time that checkpoints may take. With 0 nothing can be owed, and nothing
            is refused: intervals alone decide.
    """

    def __init__(self, overhead: float) -> None:
        self._overhead = overhead
        self._free_excess: deque[float] = deque(maxlen=FREE_KEPT)
        self._since_forgiven = FORGIVEN_EVERY  # iterations
        self._standing_seconds = 0.0
        self.reset()

    def reset(self) -> None:
        """Nothing is owed, and nothing saved up."""
        self.level_seconds = self._highest_seconds = 0.0  # now; since the last persist ended
        self._slack_seconds = 0.0  # that may be saved up
        self._stopped = False  # captures that storage does not take
        self._early: deque[tuple[Iteration, int]] | None = deque(maxlen=WINDOW)  # before free iterations tell
        self._doubted: list[_Doubted] = []

    def forgive(self) -> None:
        """What was charged was measured against another training's time.

        Once in some windows: training that alternates between two speeds would be forgiven all.
        """
        if self._since_forgiven < FORGIVEN_EVERY:
            return
        self._since_forgiven = 0
        self.level_seconds = self._highest_seconds = max(0.0, self.level_seconds)
        self._free_excess.clear()
        self._doubted.clear()

    def allows(self) -> bool:
        """Whether nothing is owed: storage may be written to."""
        return self.level_seconds >= 0.0

    def allows_between(self) -> bool:
        """Whether a capture may be made that storage does not take, also while a persist is being paid for.

        Such captures are to be cheap: where what is owed has grown again by more than may be saved up since the last
        persist ended, they are not, and there are none until nothing is owed.
        """
        if self.level_seconds >= 0.0:
            self._stopped = False
        elif self.level_seconds < self._highest_seconds - self._slack_seconds:
            self._stopped = True
        return not self._stopped

    def add(
        self,
        iteration: Iteration,
        free: tuple[float, float] | None,
        interval: int,
        *,
        believed_seconds: float | None = None,
        standing_seconds: float = 0.0,
    ) -> None:
        """An iteration has ended.

        Args:
            free: what one takes without checkpoints, and its standard deviation; None: not known yet.
            interval: iterations from one checkpoint to the next.
            believed_seconds: what one is believed to take as long as that is not known; it is settled anew then.
            standing_seconds: for which training waits in any, which ``overhead`` pays first.
        """
        self._standing_seconds = standing_seconds
        self._since_forgiven += 1
        if free is None:
            if self._early is not None:
                self._early.append((iteration, interval))
                if believed_seconds is not None:
                    self._settle(iteration, believed_seconds, 0.0, interval)
            return
        if self._early is not None:
            early = self._early
            self.reset()
            self._early = None
            self._free_excess.clear()
            for one, its_interval in early:
                self._settle(one, *free, its_interval)
        self._settle(iteration, *free, interval)

    def _settle(self, iteration: Iteration, free_seconds: float, spread_seconds: float, interval: int) -> None:
        earned = self._earned(free_seconds)
        most_owed = earned * max(WINDOW, INTERVALS * interval)
        # What can be held against no other earns like others, so that a debt always ends, and pays what is sure.
        charge = (
            self._charge(iteration, free_seconds, most_owed, interval)
            if iteration.tells
            else max(0.0, iteration.held_seconds - self._standing_seconds)
        )
        self._slack_seconds = max(SLACK * earned, NOISE * spread_seconds * math.sqrt(WINDOW))
        level = self.level_seconds = max(-most_owed, min(self._slack_seconds, self.level_seconds + earned - charge))
        self._highest_seconds = level if iteration.persisted else max(level, self._highest_seconds)

    def _earned(self, free_seconds: float) -> float:
        """By an iteration, for checkpoints."""
        return Costs(free_seconds, 0.0, 0.0, 0.0, self._standing_seconds).allowed_seconds(self._overhead)

    def _charge(self, iteration: Iteration, free_seconds: float, most_owed_seconds: float, interval: int) -> float:
        earned = self._earned(free_seconds)
        limit = max(PAUSE_SHARE * free_seconds, PAUSE_INTERVALS * interval * earned, iteration.held_seconds)
        excess = min(iteration.own_seconds - free_seconds, max(limit, most_owed_seconds))
        excess = self._believed(iteration.number, excess, limit, max(NEAR, NEAR_INTERVALS * interval))
        if not iteration.is_free:
            return excess - sum(self._free_excess) / (FREE_PRIOR + len(self._free_excess))
        self._free_excess.append(excess)
        return 0.0

    def _believed(self, number: int, excess_seconds: float, limit_seconds: float, near: int) -> float:
        """What is charged of this excess, and now of earlier ones that it confirms."""
        if excess_seconds <= limit_seconds:
            return excess_seconds
        earlier = [one for one in self._doubted if number - one.number <= near]
        own = min(excess_seconds, max(limit_seconds, *(one.excess_seconds for one in earlier), 0.0))
        charge = own
        for one in earlier:
            more = max(0.0, min(one.excess_seconds, excess_seconds) - one.charged_seconds)
            one.charged_seconds += more
            charge += more
        self._doubted = [*earlier, _Doubted(number, excess_seconds, own)]
        return charge
