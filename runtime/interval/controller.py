"""Decides which boundaries are captured, from how long each iteration took. It reads no clock and knows no thread.

A checkpoint is made when its interval has passed (the shortest that measured costs allow: :mod:`.measurements`,
:mod:`.algorithm`) and nothing is owed (:mod:`.token_bucket`). Both need free iterations; a *control* makes some where
there are none: nothing is captured until enough were seen.
"""

from __future__ import annotations

import logging
import math
from collections import deque

from checkflow.core.reports.run_report import Frequency, FrequencyChange
from checkflow.core.units import format_seconds, format_time
from checkflow.runtime.interval.algorithm import Asked, Costs, Intervals, choose
from checkflow.runtime.interval.clock_schedule import ByTime
from checkflow.runtime.interval.measurements import LEAST, Checkpoints, Iteration, Measurements, median
from checkflow.runtime.interval.token_bucket import Bucket

logger = logging.getLogger("checkflow")

LEAST_TRIED, TRIED = 5, 16  # iterations with checkpoints before the first control, and as many as are enough
TRY_AGAIN, LONGEST_PROFILE = 50, 200  # iterations
LEAST_FREE, MOST_FREE = 5, 12  # iterations of a control
ERROR_SHARE = 0.15  # of the overhead: as exact as they have to be
LONGEST_CONTROL = 20  # iterations: then it ends, whatever was seen
EVERY, CAPTURES = 200, 50  # iterations without a free one, or captures, whichever is more: then a control comes
STALE, STALE_INTERVALS = 40, 2  # iterations or intervals without a free one: then one comes before intervals change
GAP, GAP_FROM = 2, 8  # iterations left free before storage is due, where that comes after at least so many captures
REVIEW_SECONDS = 1.0  # of training: a review takes most of a millisecond
DOUBT, BAND = 2.0, 0.1  # standard errors of what is measured, and a share of an interval, that do not move it
FASTEST_GROWTH = 4  # where no interval would be long enough
SHORT = 2  # times as many iterations as a commit is seen in: an epoch of no more leaves too few of its own free
LOGGED_SHARE = 0.001  # of an iteration: what hooks and checks of the job take is logged where it is more
HISTORY = 50


class Controller:
    """Decides at which boundaries a checkpoint is captured, and which of them storage takes.

    Args:
        start: iterations that are finished already; what was resumed from is on storage.
        epoch_iterations: of one epoch, if there are epochs.
    """

    def __init__(self, asked: Asked, *, start: int = 0, epoch_iterations: int | None = None) -> None:
        self._asked = asked
        self._epoch_iterations = epoch_iterations
        self._measured, self._planned = Measurements(), True
        self._changes: deque[FrequencyChange] = deque(maxlen=HISTORY)
        self._time = None if asked.every_seconds is None else ByTime(asked.every_seconds)
        self._number = self._last_memory = self._last_disk = start
        self.place(start, 1)

    def place(
        self,
        number: int,
        unit: int,
        *,
        every: int | None = None,
        planned: bool = True,
        tiers: bool = True,
        known: Costs | None = None,
        quiet: bool = False,
    ) -> None:
        """Another plan runs from this boundary on, or none: what checkpoints cost is measured anew.

        Args:
            unit: the plan's interval.
            every: as the user asked, rounded to what the plan can do.
            planned: whether captures are hidden; otherwise all state is copied at the boundary.
            tiers: whether there is host memory for a capture that storage does not take.
            known: what such a job measured before: there is no profile then.
            quiet: the intervals that follow from it are not logged.
        """
        if planned and not self._planned:
            self._measured = Measurements()  # iterations beside which a plan was made
        self._unit, self._every, self._planned, self._tiers = unit, every, planned, tiers and planned
        self._measured.checkpoints = Checkpoints()
        self._bucket = Bucket()
        #: What is held against training's own time as soon as that is known.
        self._early: list[tuple[Iteration, bool | None, int]] | None = []
        self._began: bool | None = None  # a capture, at the last boundary: whether it is one like others
        self._busy = False  # storage, in the last iteration
        self._observed = self._passed = 0  # iterations since then: usable ones, and of any kind
        self._unreviewed_seconds, self._reviewed, self._persists_before = 0.0, 0, 0
        self._free_before: int | None = None  # free iterations seen when the control began; None: there is none
        self._controlled, self._since = False, number  # the last control; or the plan
        self._captures_wanted, self._captures_until = 0, number  # that storage does not take
        self._tried: int | None = None  # the boundary of a checkpoint for trial
        self._costs, self._guessed = known, False
        # What the user said needs no word in the log.
        self._intervals: Intervals | None = None if every is None else Intervals(every, every, "every")
        if self._time is not None and (interval := self._time.interval(unit)) is not None:
            self._intervals = Intervals(interval, interval, "every")
        elif every is None and self._time is None and known is not None:
            self._set(number, self._choice(known) or self._longer(), quiet=quiet)

    # Queries

    @property
    def intervals(self) -> Intervals | None:
        """The ones now; None as long as nothing is decided."""
        return self._intervals

    @property
    def costs(self) -> Costs | None:
        """What was measured, by which the intervals were last chosen."""
        return None if self._guessed else self._costs

    @property
    def changes(self) -> tuple[FrequencyChange, ...]:
        """The last changes, oldest first."""
        return tuple(self._changes)

    @property
    def report(self) -> Frequency:
        """How often, why, and what was measured."""
        asked, measured, now = self._asked, self._measured, self._intervals
        costs = measured.estimate(self._costs)
        seen = costs is not None and (measured.checkpoints.seen > 0 or self._costs is not None)
        as_planned = now is None and self._planned and self._time is None
        memory = self._unit if as_planned else None if now is None else now.memory
        reason = "profile" if now is None else now.reason
        return Frequency(
            memory_interval=memory,
            disk_interval=None if now is None else now.disk,
            reason=reason if self._time is None else "every",
            iteration_seconds=median(measured.recent) if measured.recent else None,
            baseline_seconds=costs.iteration_seconds if costs else None,
            capture_cost_seconds=costs.capture_seconds if costs and seen else None,
            persist_cost_seconds=costs.interference_seconds if costs and seen else None,
            persist_seconds=measured.persist_seconds,
            overhead_share=costs.share(now.memory, now.disk) if costs and seen and now else None,
            overhead_allowed=asked.overhead,
            changes=self.changes,
        )

    def is_due(self, number: int) -> bool:
        """Whether this boundary is captured."""
        if self._every is not None:
            return number % self._every == 0
        if number % self._unit or self._free_before is not None:
            return False
        if self._time is not None:
            return self._time.is_due(self._unit)
        if self._wants_captures(number):
            return not self._busy
        now = self._intervals
        if not self._planned and (now is None or self._tried is None):
            # One for trial, at once; another one if that came to nothing.
            return not self._busy and (self._tried is None or number - self._tried >= TRY_AGAIN)
        if now is None or self._is_storage_due(number):
            return self._bucket.allows_writing()
        if now.memory == now.disk or number - self._last_memory < now.memory:
            return False
        gap = max(GAP, self._unit) if now.memory == self._unit and now.disk >= GAP_FROM * self._unit else 0
        return (number - self._last_disk) % now.disk < now.disk - gap and self._bucket.allows_between()

    def is_durable(self, number: int) -> bool:
        """Whether storage takes the capture of this boundary as soon as it can."""
        if self._every is not None or self._time is not None or not self._planned:
            return True
        if self._free_before is not None or self._wants_captures(number):
            return False
        return self._intervals is None or (self._is_storage_due(number) and self._bucket.allows_writing())

    @property
    def leaves_out_epochs(self) -> bool:
        """Whether the end of an epoch is not captured now.

        Where epochs are about as short as one commit, their ends keep storage busy all the time, and no free
        iteration shows what training takes: a control leaves them out, too.
        """
        lasting, recent = self._measured.persist_seconds, self._measured.recent
        if self._epoch_iterations is None or lasting is None or not recent:
            return False
        if self._free_before is None and not self._wants_captures(self._number):
            return False
        return self._epoch_iterations <= SHORT * (1 + lasting / median(recent))

    # Events

    def captured(self, number: int, *, durable: bool, counts: bool = True) -> None:
        """A capture of this boundary has begun.

        Args:
            durable: whether storage takes it.
            counts: whether it is one like others, not an audited one, nor one that came before its time.
        """
        self._began = counts
        if self._time is not None:
            self._time.captured(self._unit)
        self._last_memory = self._tried = number
        if durable:
            self._last_disk = number

    def ended(self, iteration: Iteration) -> None:
        """An iteration has ended; before :meth:`is_due` is asked about its boundary."""
        number, began, self._began = iteration.number, self._began, None
        self._number = number
        self._busy = iteration.persisted
        self._observed += iteration.is_usable
        self._passed += iteration.seconds > 0
        self._unreviewed_seconds += iteration.seconds
        if self._measured.add(iteration) and (costs := self._costs) is not None:
            self._bucket.forgive(costs.capture_seconds + costs.interference_seconds)
        self._account(iteration, began)
        if self._every is not None:
            return
        if self._time is not None:
            if self._time.ended(iteration.seconds) and (interval := self._time.interval(self._unit)) is not None:
                self._set(number, Intervals(interval, interval, "every"))
            return
        self._steer(iteration)
        if self._intervals is None:
            if self._is_profiled(number):
                self._choose_first(number, self._measured.estimate(None))
            elif self._cannot_profile and (guess := self._measured.guess()) is not None:
                self._guessed = True
                self._choose_first(number, guess)
        elif self._is_review_due(iteration):
            self._review(number, self._intervals)

    # Costs, controls and reviews

    def _account(self, iteration: Iteration, began: bool | None) -> None:
        """Hold it against training's own time: what is known of that, and then, once more, what is measured."""
        interval = 1 if self._intervals is None else self._intervals.disk
        baseline = self._measured.baseline
        todo = [(iteration, began, interval)]
        if self._early is not None:
            self._early.append(todo[0])
            if baseline is not None:
                todo, self._early = self._early, None
                self._bucket, self._measured.checkpoints = Bucket(), Checkpoints()
            elif len(self._early) > LONGEST_PROFILE:
                del self._early[0]
        costs = self._costs
        if baseline is None and costs is not None:
            baseline = costs.iteration_seconds, 0.0
        standing = self._measured.standing_seconds
        for one, its_began, its_interval in todo:
            excess = 0.0 if baseline is None else one.own_seconds - baseline[0]
            self._measured.checkpoints.follow(one, excess, standing, began=its_began)
            if baseline is not None:
                earned_seconds = Costs(baseline[0], 0.0, 0.0, 0.0, standing).allowed_seconds(self._asked.overhead)
                self._bucket.add(
                    one, baseline, earned_seconds=earned_seconds, standing_seconds=standing, interval=its_interval
                )

    @property
    def _cannot_profile(self) -> bool:
        """Whether no iteration can be held against another, so that no profile is to be had."""
        long = self._passed >= (LONGEST_PROFILE if self._observed else TRIED)
        tried = self._planned or (self._measured.persist_seconds is not None and not self._busy)
        return long and tried and self._measured.baseline is None

    def _is_profiled(self, number: int) -> bool:
        if self._measured.baseline is None:
            return False
        if not self._planned:
            return self._measured.persist_seconds is not None and not self._busy
        return self._controlled and self._free_before is None and not self._wants_captures(number)

    def _wants_captures(self, number: int) -> bool:
        """Whether captures that storage does not take are to show what they cost, as none did before."""
        return number < self._captures_until and self._measured.checkpoints.captures_seen < self._captures_wanted

    def _want_captures(self, number: int) -> None:
        self._captures_wanted = self._measured.checkpoints.captures_seen + LEAST
        self._captures_until = number + 4 * LEAST * self._unit

    def _steer(self, iteration: Iteration) -> None:
        """Begin a control where one is due, and see it through."""
        number, measured, now = iteration.number, self._measured, self._intervals
        if self._free_before is None:
            if now is None:
                tried = measured.checkpoints.persists_seen >= LEAST or self._observed >= TRIED
                due = self._planned and not self._controlled and tried and self._observed >= LEAST_TRIED
            else:
                longest = max(EVERY, CAPTURES * now.memory)
                if measured.baseline is None and self._observed >= LEAST_TRIED:
                    longest = STALE  # what is known of before, or guessed, may be wrong
                due = number - max(measured.last_free, self._since) >= longest
            if due:
                self._begin_control(number)
            return
        if iteration.persisted:
            self._since = number  # storage comes to rest first
        if measured.free_seen - self._free_before >= self._enough_free or number - self._since >= LONGEST_CONTROL:
            self._free_before, self._controlled, self._since = None, True, number
            if now is None and self._tiers:
                self._want_captures(number)

    def _begin_control(self, number: int) -> None:
        self._free_before, self._since = self._measured.free_seen, number

    @property
    def _enough_free(self) -> int:
        """How many free iterations show what training takes: the more, the more they vary."""
        if self._measured.baseline is None or not self._asked.overhead:
            return LEAST_FREE
        seconds, spread_seconds = self._measured.baseline
        wanted = (spread_seconds / (ERROR_SHARE * self._asked.overhead * seconds)) ** 2
        return max(LEAST_FREE, math.ceil(min(MOST_FREE, wanted)))

    def _is_storage_due(self, number: int) -> bool:
        return self._intervals is not None and number - self._last_disk >= self._intervals.disk

    def _choice(self, costs: Costs) -> Intervals | None:
        """The shortest intervals that these costs allow; None: they allow none."""
        asked = self._asked
        return choose(costs, self._unit, asked.overhead, mtbf_seconds=asked.mtbf_seconds, tiers=self._tiers)

    def _longer(self) -> Intervals:
        """Where nothing may be lost to checkpoints, and something is: step by step."""
        now = self._intervals or Intervals(self._unit, self._unit, "overhead")
        return Intervals(now.memory * FASTEST_GROWTH, now.disk * FASTEST_GROWTH, "overhead")

    def _choose_first(self, number: int, costs: Costs | None) -> None:
        if costs is not None:
            self._costs = costs
            self._set(number, self._choice(costs) or self._longer())

    def _is_review_due(self, iteration: Iteration) -> bool:
        seen = self._measured.checkpoints.seen
        if seen == self._reviewed or self._unreviewed_seconds < REVIEW_SECONDS or self._measured.baseline is None:
            return False
        self._reviewed, self._unreviewed_seconds = seen, 0.0
        return True

    def _review(self, number: int, now: Intervals) -> None:
        """Other intervals, if what is measured asks for them, and not by chance."""
        costs, least, most = (self._measured.estimate(self._costs, doubt) for doubt in (0.0, -DOUBT, DOUBT))
        assert costs is not None
        assert least is not None
        assert most is not None
        wanted, low, high = self._choice(costs), self._choice(least), self._choice(most)
        if wanted is None and low is not None:
            wanted = low
        # Where storage takes all, captures in between cannot show what they cost: they are tried on the medians' word.
        tried = wanted is not None and now.memory == now.disk and wanted.memory < wanted.disk
        if wanted is not None and low is not None and not tried and _is_within(now, low, high):
            return
        if number - self._measured.last_free > max(STALE, STALE_INTERVALS * now.disk):
            self._begin_control(number)  # perhaps it is training itself that has become slower
            return
        if wanted is None:
            if self._measured.checkpoints.persists_seen - self._persists_before < LEAST:
                return  # nothing says how much longer: first see what this one costs
            wanted = self._longer()
        self._costs, self._guessed = costs, False
        self._set(number, wanted)

    def _set(self, number: int, intervals: Intervals, *, quiet: bool = False) -> None:
        before, self._intervals = self._intervals, intervals
        self._persists_before = self._measured.checkpoints.persists_seen
        if before is not None and (before.memory, before.disk) == (intervals.memory, intervals.disk):
            return
        if before is not None and intervals.disk <= before.disk / 2:
            self._measured.checkpoints.captures.clear()  # these were dear, too
            if self._tiers and intervals.memory == intervals.disk:
                self._want_captures(number)
        self._changes.append(FrequencyChange(number, intervals.memory, intervals.disk, intervals.reason))
        as_planned = intervals.reason == "plan" and intervals.memory == intervals.disk == self._unit
        if quiet or (before is None and as_planned and self._planned):
            return  # what was measured has changed nothing
        captured = "" if intervals.memory == intervals.disk else f", and one in host memory {_often(intervals.memory)}"
        logger.info(
            "from step %d on a checkpoint %s%s: %s",
            number, _often(intervals.disk), captured, self._because(intervals.reason),
        )  # fmt: skip

    def _because(self, reason: str) -> str:
        costs, asked = self._costs, self._asked
        if self._time is not None:
            usual = format_seconds(self._time.usual_seconds or 0.0)
            return f"every {format_seconds(asked.every_seconds or 0.0)}, of {usual} each"
        if costs is None or reason == "plan":
            return "as planned"
        if reason == "persist":
            return f"storage takes {format_seconds(costs.persist_seconds)} for one"
        both = format_seconds(costs.capture_seconds + costs.interference_seconds)
        if reason == "mtbf":
            return f"one costs {both} of training, and failures come every {format_time(asked.mtbf_seconds or 0.0)}"
        seconds = format_seconds(costs.iteration_seconds)
        share = 100 * costs.allowed_seconds(asked.overhead) / costs.iteration_seconds
        standing = format_seconds(costs.standing_seconds)
        beside = (
            f", of which hooks and checks take {standing}"
            if costs.standing_seconds > LOGGED_SHARE * costs.iteration_seconds
            else ""
        )
        return f"one costs {both} of training, and may cost {share:.3g} % of iterations of {seconds}{beside}"


def _is_within(now: Intervals, low: Intervals, high: Intervals | None) -> bool:
    """Whether intervals lie between these, or hardly beyond where these differ."""
    high = high or Intervals(now.memory, now.disk, "overhead")
    if low == high:
        return (now.memory, now.disk) == (low.memory, low.disk)
    memory = min(low.memory, high.memory) / 2 <= now.memory <= 2 * max(low.memory, high.memory)
    return memory and (1 - BAND) * low.disk <= now.disk <= (1 + BAND) * high.disk


def _often(interval: int) -> str:
    return "every iteration" if interval == 1 else f"every {interval} iterations"
