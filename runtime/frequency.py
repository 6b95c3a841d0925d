"""The controller of the intervals: told how long each iteration took, it says which boundaries are captured.

It reads no clock and knows no thread: :mod:`.pace` tells it, at each boundary, how long the iteration took that has
ended, whether a capture was in flight in it, and whether storage was being written to. :mod:`.samples` makes of that
what a checkpoint costs, :mod:`.policy` what interval follows.

A job is *profiled* first (CheckFreq, section 4.4: 1 % of an epoch or 50 iterations, whichever is fewer). Under a plan
its checkpoints are made as planned meanwhile, and storage takes the newest; in the second half they stop for some
iterations, after storage has come to rest: the *control*. Where there is no plan a checkpoint holds training, so that
free iterations come first, then one checkpoint, for trial. Then intervals are chosen, and *reviewed* from there on:

- they grow at once, to what is measured, where the cost is beyond ``overhead`` by more than chance: the medians of the
  last few samples, or of more, less ``DOUBT`` standard errors and a ``BAND``, ask for a longer interval;
- they shrink slowly: by half at most, each time after ``PATIENCE`` persists whose median, and a standard error, asks
  for less by a ``BAND``; or, if costs have fallen since the last change, once the last ``PATIENCE`` ask for less beyond
  ``DOUBT``, and what came before them is forgotten;
- nothing is believed on the word of old free iterations: where none was for long (a checkpoint of every iteration
  leaves none), another control comes first. If free iterations themselves have become other ones, all is measured anew.
"""

from __future__ import annotations

import enum
import logging
import math
from collections import deque
from dataclasses import dataclass

from checkflow.hardware import format_seconds
from checkflow.runtime.policy import Asked, Costs, Intervals, choose, in_iterations, least_multiple
from checkflow.runtime.samples import KEPT, LEAST, Iteration, Samples, median

logger = logging.getLogger("checkflow")

MOST_PROFILED, PROFILED_SHARE = 50, 0.01  # iterations, and share of an epoch
LEAST_PROFILED = 16  # iterations, however short the epoch
CONTROLS = 5  # free iterations in a control
CONTROL_EVERY, CONTROL_INTERVALS = 200, 50  # iterations without a free one, or intervals, whichever is more
WINDOWS = (3, 10, KEPT)  # samples: few show a large change soon, many a small one
REVIEW_EVERY, REVIEW_SECONDS = 20, 0.2  # iterations, and seconds of them: a review takes most of a millisecond
DOUBT = 3.0  # standard errors before an interval grows
BAND = 0.1  # so much more of a cost, or less of an interval, is no reason to change it
PATIENCE = 5  # persists before an interval shrinks
FASTEST_GROWTH = 4  # where no interval would be long enough
HISTORY = 50


@dataclass(frozen=True, slots=True)
class Change:
    """The intervals became these at a boundary."""

    step: int
    memory: int
    disk: int
    reason: str


@dataclass(frozen=True, slots=True)
class FrequencyReport:
    """How often checkpoints are made, and why. Intervals in iterations; None: not decided, or not known."""

    memory_interval: int | None
    disk_interval: int | None
    reason: str  # "profile" (as planned, until it is over), "plan", "persist", "overhead", "mtbf" or "every"
    iteration_seconds: float | None  # of late
    baseline_seconds: float | None  # of iterations without checkpoints
    capture_cost_seconds: float | None  # what one capture adds to training
    persist_cost_seconds: float | None  # what one persist adds
    persist_seconds: float | None  # how long one lasts
    overhead_share: float | None  # measured: what both add, at these intervals
    overhead_allowed: float
    changes: tuple[Change, ...]  # the last ones


class _Control(enum.Enum):
    NONE = enum.auto()
    RESTING = enum.auto()  # storage gets nothing new
    FREE = enum.auto()  # nothing is captured


class Controller:
    """Decides at which boundaries a checkpoint is captured, and which of them storage takes.

    Args:
        start: iterations that are finished already; what was resumed from is on storage.
        epoch_iterations: of one epoch, if there are epochs.
    """

    def __init__(self, asked: Asked, *, start: int = 0, epoch_iterations: int | None = None) -> None:
        self._asked = asked
        share = MOST_PROFILED if epoch_iterations is None else math.ceil(PROFILED_SHARE * epoch_iterations)
        self._profile_length = max(LEAST_PROFILED, min(MOST_PROFILED, share))
        self._samples = Samples()
        self._changes: deque[Change] = deque(maxlen=HISTORY)
        self._last_memory = self._last_disk = start
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
    ) -> None:
        """Another plan runs from this boundary on, or none: what checkpoints cost is measured anew.

        Args:
            unit: the plan's interval.
            every: as the user asked, rounded to what the plan can do.
            planned: whether captures are hidden; otherwise all state is copied at the boundary.
            tiers: whether there is host memory for a capture that storage does not take.
            known: what such a job measured before: there is no profile then.
        """
        self._unit, self._every, self._planned, self._tiers = unit, every, planned, tiers and planned
        self._samples.forget_checkpoints()
        self._busy = False  # storage, in the last iteration
        self._observed = 0  # iterations that tell, since then
        self._reviewed, self._reviewed_samples, self._unreviewed_seconds = number, 0, 0.0
        self._control, self._control_since, self._control_seen = _Control.NONE, number, 0
        self._suspicious = self._controlled = self._unsure = False
        self._tried: int | None = None  # the boundary of a checkpoint for trial
        self._costs = known
        # What the user said needs no word in the log.
        self._intervals: Intervals | None = None if every is None else Intervals(every, every, "every")
        self._persists_before = self._samples.persists_seen  # when the intervals changed
        if every is not None:
            return
        if self._asked.every_seconds is not None:
            if self._samples.recent:
                self._keep_time(number, self._asked.every_seconds)
        elif known is not None:
            self._set(number, self._choice(known) or self._longer(Intervals(unit, unit, "overhead")))

    # What the job asks

    @property
    def intervals(self) -> Intervals | None:
        """The ones now; None as long as nothing is decided."""
        return self._intervals

    @property
    def costs(self) -> Costs | None:
        """What the intervals were last chosen by."""
        return self._costs

    @property
    def changes(self) -> tuple[Change, ...]:
        """The last changes, oldest first."""
        return tuple(self._changes)

    @property
    def report(self) -> FrequencyReport:
        """How often, why, and what was measured."""
        asked, samples, now = self._asked, self._samples, self._intervals
        costs = samples.estimate(known=self._costs)
        seen = costs is not None and (samples.largest > 0 or self._costs is not None)
        as_planned = now is None and self._planned and asked.every_seconds is None
        memory = self._unit if as_planned else None if now is None else now.memory
        reason = "profile" if now is None else now.reason
        return FrequencyReport(
            memory_interval=memory,
            disk_interval=None if now is None else now.disk,
            reason=reason if asked.every_seconds is None else "every",
            iteration_seconds=median(samples.recent) if samples.recent else None,
            baseline_seconds=costs.iteration_seconds if costs else None,
            capture_cost_seconds=costs.capture_seconds if costs and seen else None,
            persist_cost_seconds=costs.interference_seconds if costs and seen else None,
            persist_seconds=samples.persist_seconds,
            overhead_share=costs.share(now.memory, now.disk) if costs and seen and now else None,
            overhead_allowed=asked.overhead,
            changes=self.changes,
        )

    def is_due(self, number: int) -> bool:
        """Whether this boundary is captured."""
        if self._every is not None:
            return number % self._every == 0
        if number % self._unit or self._control is _Control.FREE:
            return False
        if self._control is _Control.RESTING and not self._tiers:
            return False
        if self._intervals is None:
            return self._asked.every_seconds is None and (self._planned or self._may_try(number))
        if self._control is _Control.RESTING and self._samples.captures_seen < self._control_seen and not self._busy:
            return True
        return number - self._last_memory >= self._intervals.memory

    def is_durable(self, number: int) -> bool:
        """Whether storage takes the capture of this boundary as soon as it can."""
        if self._every is not None or self._asked.every_seconds is not None:
            return True
        if self._control is _Control.RESTING:
            return False
        now = self._intervals
        return now is None or now.memory == now.disk or number - self._last_disk >= now.disk

    # What the job tells

    def captured(self, number: int, *, durable: bool, counts: bool = True) -> None:
        """A capture of this boundary has begun.

        Args:
            durable: whether storage takes it.
            counts: whether it is one like others, not an audited one, nor one that came before its time.
        """
        self._samples.begin_capture(counts=counts)
        self._last_memory = self._tried = number
        if durable:
            self._last_disk = number

    def ended(self, iteration: Iteration) -> None:
        """An iteration has ended; before :meth:`is_due` is asked about its boundary."""
        self._busy = iteration.persisted
        self._observed += iteration.tells
        self._unreviewed_seconds += iteration.seconds
        self._samples.add(iteration)
        if self._every is not None:
            return
        if self._asked.every_seconds is not None:
            if iteration.tells:
                self._keep_time(iteration.number, self._asked.every_seconds)
            return
        self._steer(iteration)
        if self._intervals is None:
            if self._is_profiled:
                self._decide(iteration.number)
        elif iteration.number - self._reviewed >= REVIEW_EVERY and self._unreviewed_seconds >= REVIEW_SECONDS:
            samples = self._samples.captures_seen + self._samples.persists_seen
            if samples != self._reviewed_samples:
                self._reviewed, self._reviewed_samples, self._unreviewed_seconds = iteration.number, samples, 0.0
                self._review(iteration.number, self._intervals)

    # Profile and control

    def _may_try(self, number: int) -> bool:
        """Without a plan: one checkpoint for trial, after free iterations; another one if that came to nothing."""
        waited = self._tried is None or number - self._tried >= MOST_PROFILED
        return waited and self._observed >= self._profile_length // 2 and self._samples.free >= LEAST and not self._busy

    @property
    def _is_profiled(self) -> bool:
        if self._samples.free < LEAST:
            return False
        if not self._planned:
            return self._samples.persist_seconds is not None and not self._busy
        return self._controlled and self._observed >= self._profile_length

    def _decide(self, number: int) -> None:
        costs, least = self._samples.estimate(), self._samples.estimate(doubt=-DOUBT)
        assert costs is not None
        assert least is not None
        one = Intervals(self._unit, self._unit, "overhead")
        self._costs = costs
        self._set(number, self._choice(costs) or self._choice(least) or self._longer(one))

    def _steer(self, iteration: Iteration) -> None:
        """Begin a control where one is due, and see it through."""
        number = iteration.number
        if self._control is _Control.NONE and self._control_due(number):
            self._control, self._control_since, self._unsure = _Control.RESTING, number, False
            # Captures that storage does not take are rare where it takes all: a few of them, to know what they cost.
            rare = self._intervals is None or self._intervals.memory == self._intervals.disk
            wanted = LEAST if self._tiers and rare and not self._suspicious else 0
            self._control_seen = self._samples.captures_seen + wanted
        elif self._control is _Control.RESTING:
            if iteration.persisted:
                self._control_since = number
                return
            enough = self._samples.captures_seen >= self._control_seen
            if enough or number - self._control_since >= 4 * LEAST * self._unit:
                self._control, self._control_since = _Control.FREE, number
                self._control_seen = self._samples.free_seen + CONTROLS
        elif self._control is _Control.FREE and (
            self._samples.free_seen >= self._control_seen or number - self._control_since >= 4 * CONTROLS
        ):
            self._control, self._suspicious, self._controlled = _Control.NONE, False, True

    def _control_due(self, number: int) -> bool:
        if self._intervals is None:
            enough = self._samples.captures >= LEAST or self._observed >= self._profile_length
            return self._planned and not self._controlled and enough and self._observed >= self._profile_length // 2
        last = max(self._samples.last_free or 0, self._control_since)
        stale = number - last >= max(CONTROL_EVERY, CONTROL_INTERVALS * self._intervals.disk)
        return self._suspicious or self._unsure or stale

    # Review

    def _choice(self, costs: Costs) -> Intervals | None:
        asked = self._asked
        return choose(costs, self._unit, asked.overhead, mtbf_seconds=asked.mtbf_seconds, tiers=self._tiers)

    def _longer(self, now: Intervals) -> Intervals:
        """Where nothing may be lost to checkpoints, and something is: step by step."""
        return Intervals(now.memory * FASTEST_GROWTH, now.disk * FASTEST_GROWTH, "overhead")

    def _suffices(self, now: Intervals, costs: Costs) -> bool:
        """Whether intervals are long enough for these costs."""
        wanted = self._choice(costs)
        if wanted is None or wanted.disk > now.disk:
            return False
        # Where storage can be written to more often, captures in between become rarer, and may have been cheap enough.
        paid = _is_much_less(wanted.disk, now.disk) and costs.share(now.memory, now.disk) <= self._asked.overhead
        return paid or wanted.memory <= now.memory

    def _review(self, number: int, now: Intervals) -> None:
        samples, known = self._samples, self._costs
        last = samples.estimate(LEAST, known=known)
        if last is not None and self._suffices(now, last):
            self._shrink(number, now)  # whatever was before that
            return
        for size in WINDOWS:
            least = samples.estimate(size, -DOUBT, known)
            if samples.largest < size or least is None:
                break
            if self._suffices(now, least.times(1 / (1 + BAND))):
                continue
            if number - (samples.last_free or 0) > max(2 * REVIEW_EVERY, 2 * now.disk):
                self._suspicious = True  # perhaps it is training itself that has become slower
                return
            costs = samples.estimate(size, known=known)
            assert costs is not None
            wanted = self._choice(costs)
            if wanted is None and samples.persists_seen - self._persists_before < LEAST:
                return  # nothing says how much longer: first see what this one costs
            wanted = wanted or self._longer(now)
            memory = max(now.memory, wanted.memory)
            self._costs = costs
            self._set(number, Intervals(memory, least_multiple(memory, max(now.disk, wanted.disk)), wanted.reason))
            return

    def _shrink(self, number: int, now: Intervals) -> None:
        """By what all persists since the last change tell, or by the last few if costs have clearly fallen since."""
        samples, known = self._samples, self._costs
        since = min(KEPT, samples.persists_seen - self._persists_before)
        if since < PATIENCE:
            return
        wanted, size = self._asked_for(since, 1.0), since
        if wanted is None or not _is_shorter(wanted, now) or wanted.memory > now.memory:
            wanted, size = self._asked_for(PATIENCE, DOUBT), PATIENCE
            if wanted is None or not _is_much_less(wanted.disk, now.disk):
                return
            samples.keep_last(PATIENCE)  # what was before would make the intervals grow again
            self._unsure = True
        disk, memory = max(wanted.disk, now.disk / 2), max(wanted.memory, now.memory / 2)
        # What would be left is too little for another change.
        disk = wanted.disk if disk <= (1 + BAND) * wanted.disk else disk
        memory = least_multiple(self._unit, wanted.memory if memory <= (1 + BAND) * wanted.memory else memory)
        self._costs = samples.estimate(size, known=known)
        self._set(number, Intervals(memory, least_multiple(memory, disk), wanted.reason))
        self._unsure &= memory >= disk  # of what captures in between would cost now

    def _asked_for(self, size: int, doubt: float) -> Intervals | None:
        """The intervals that the last samples ask for, at most."""
        most = self._samples.estimate(size, doubt, self._costs)
        return None if most is None else self._choice(most)

    def _keep_time(self, number: int, seconds: float) -> None:
        wanted = in_iterations(self._unit, median(self._samples.recent), seconds)
        now = self._intervals
        if now is None or abs(wanted - now.disk) > BAND * now.disk:
            self._set(number, Intervals(wanted, wanted, "every"))

    def _set(self, number: int, intervals: Intervals) -> None:
        before, self._intervals = self._intervals, intervals
        self._persists_before = self._samples.persists_seen
        if before is not None and (before.memory, before.disk) == (intervals.memory, intervals.disk):
            return
        self._changes.append(Change(number, intervals.memory, intervals.disk, intervals.reason))
        captured = "" if intervals.memory == intervals.disk else f", and one in host memory every {intervals.memory}"
        logger.info(
            "from step %d on a checkpoint every %d iterations%s: %s",
            number, intervals.disk, captured, self._because(intervals.reason),
        )  # fmt: skip

    def _because(self, reason: str) -> str:
        costs, asked = self._costs, self._asked
        if asked.every_seconds is not None:
            return (
                f"every {format_seconds(asked.every_seconds)}, of {format_seconds(median(self._samples.recent))} each"
            )
        if costs is None or reason == "plan":
            return "as planned"
        if reason == "persist":
            return f"storage takes {format_seconds(costs.persist_seconds)} for one"
        both = format_seconds(costs.capture_seconds + costs.interference_seconds)
        if reason == "mtbf":
            return f"one costs {both} of training, and failures come every {format_seconds(asked.mtbf_seconds or 0.0)}"
        seconds = format_seconds(costs.iteration_seconds)
        return f"one costs {both} of training, and may cost {100 * asked.overhead:.3g} % of iterations of {seconds}"


def _is_much_less(interval: int, than: int) -> bool:
    """Whether the difference is a reason to change anything."""
    return interval <= (1 - BAND) * than


def _is_shorter(intervals: Intervals, than: Intervals) -> bool:
    """Whether one of them is much less, and storage is not written to less often."""
    less = _is_much_less(intervals.disk, than.disk) or _is_much_less(intervals.memory, than.memory)
    return less and intervals.disk <= than.disk
