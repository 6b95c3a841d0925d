"""The controller of the intervals: told how long each iteration took, it says which boundaries are captured.

It reads no clock and knows no thread: :mod:`.pace` tells it, at each boundary, how long the iteration took that has
ended, whether a capture was in flight in it, and whether storage was being written to. From that follow, for what
:mod:`.policy` decides by: an iteration's time with neither (*free*); what one capture adds to training, from captures
that no persist disturbed; what one persist adds, beyond the captures in it; and how long it lasts.

A job is *profiled* first (CheckFreq, section 4.4: 1 % of an epoch or 50 iterations, whichever is fewer). Under a plan
its checkpoints are made as planned meanwhile, and storage takes the newest; in the second half they stop for some
iterations, after storage has come to rest: the *control*. Where there is no plan a checkpoint holds training, so that
free iterations come first, then one checkpoint, for trial. Then intervals are chosen, and *reviewed* from there on:

- they grow at once, to what is measured, where the cost is beyond ``overhead`` by more than chance: the medians of the
  last few samples, or of more, less ``DOUBT`` standard errors and a ``BAND``, ask for a longer interval;
- they shrink slowly: by half at most, each time after ``PATIENCE`` persists whose median, and a standard error, asks
  for less by a ``BAND``;
- nothing is believed on the word of old free iterations: where none was for long (a checkpoint of every iteration
  leaves none), another control comes first. If free iterations themselves have become other ones, all is measured anew.

Medians let a pause within an iteration (validation, a slow batch) pass; :mod:`.pace` leaves out what is known as one.
"""

from __future__ import annotations

import enum
import logging
import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from checkflow.hardware import format_seconds
from checkflow.runtime.policy import Asked, Costs, Intervals, choose, in_iterations, least_multiple

logger = logging.getLogger("checkflow")

MOST_PROFILED, PROFILED_SHARE = 50, 0.01  # iterations, and share of an epoch
LEAST_PROFILED = 16  # iterations, however short the epoch
LEAST = 3  # samples to believe a median
CONTROLS = 5  # free iterations in a control
CONTROL_EVERY, CONTROL_INTERVALS = 200, 50  # iterations without a free one, or intervals, whichever is more
KEPT = 30  # samples
WINDOWS = (3, 10, 30)  # samples: few show a large change soon, many a small one
REVIEW_EVERY = 20  # iterations
DOUBT = 3.0  # standard errors before an interval grows
BAND = 0.1  # so much more of a cost, or less of an interval, is no reason to change it
PATIENCE = 5  # persists before an interval shrinks
FASTEST_GROWTH = 4  # where no interval would be long enough
RECENT = 20  # iterations, for seconds as iterations
HISTORY = 50


@dataclass(frozen=True, slots=True)
class Iteration:
    """One iteration that has ended, as seen from its two boundaries."""

    number: int  # of the boundary at its end
    seconds: float  # from boundary to boundary, what was done at the first one included
    captured: bool = False  # a capture was in flight in it, or was begun at its first boundary
    persisted: bool = False  # storage was being written to
    counts: bool = True  # whether it is an iteration like others
    persist_seconds: float | None = None  # that a persist took which ended in it


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


@dataclass(slots=True)
class _Span:
    """Iterations that one capture, or one persist, was seen in."""

    iterations: int = 0  # that count
    seconds: float = 0.0  # of these
    left_out: int = 0
    captures: int = 0  # begun in it
    pure: bool = True  # nothing else was seen in it

    def add(self, iteration: Iteration) -> None:
        if iteration.counts and iteration.seconds > 0:
            self.iterations += 1
            self.seconds += iteration.seconds
        else:
            self.left_out += 1

    def added_seconds(self, free_seconds: float) -> float:
        """What it has beyond so many free iterations; those left out are taken to be like the others."""
        whole = (self.iterations + self.left_out) / self.iterations
        return (self.seconds - self.iterations * free_seconds) * whole


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
        self._free: deque[tuple[int, float]] = deque(maxlen=KEPT)
        self._recent: deque[float] = deque(maxlen=RECENT)
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
        """Another plan runs from this boundary on, or none: what captures cost is measured anew.

        Args:
            unit: the plan's interval.
            every: as the user asked, rounded to what the plan can do.
            planned: whether captures are hidden; otherwise all state is copied at the boundary.
            tiers: whether there is host memory for a capture that storage does not take.
            known: what such a job measured before: there is no profile then.
        """
        self._unit, self._every, self._planned, self._tiers = unit, every, planned, tiers and planned
        self._captures: deque[_Span] = deque(maxlen=KEPT)  # none of them disturbed
        self._persists: deque[_Span] = deque(maxlen=KEPT)
        self._persist_seconds: deque[float] = deque(maxlen=KEPT)
        self._capture: _Span | None = None
        self._persist: _Span | None = None
        self._began = self._busy = False  # a capture, at the last boundary; storage, in the last iteration
        self._observed = 0  # iterations that count, since then
        self._persisted_since = 0  # persists, since the intervals changed
        self._reviewed, self._sampled = number, False
        self._control, self._control_since, self._control_free, self._control_captures = _Control.NONE, number, 0, 0
        self._suspicious = self._controlled = False
        self._tried: int | None = None  # the boundary of a checkpoint for trial
        self._costs = known
        # What the user said needs no word in the log.
        self._intervals: Intervals | None = None if every is None else Intervals(every, every, "every")
        if every is None and self._asked.every_seconds is not None and self._recent:
            self._keep_time(number, self._asked.every_seconds)
        elif every is None and self._asked.every_seconds is None and known is not None:
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
    def changes(self) -> Sequence[Change]:
        """The last changes, oldest first."""
        return self._changes

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
        if self._control is _Control.RESTING and self._control_captures and not self._busy:
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
            counts: whether it is one like others, not an audited one, nor one that came before its time.
        """
        self._end_capture()
        self._capture = _Span(pure=counts)
        self._began = True
        self._last_memory = self._tried = number
        if durable:
            self._last_disk = number

    def ended(self, iteration: Iteration) -> None:
        """An iteration has ended; before :meth:`is_due` is asked about its boundary."""
        counts = iteration.counts and iteration.seconds > 0
        self._busy = iteration.persisted
        if counts:
            self._observed += 1
            self._recent.append(iteration.seconds)
            if not iteration.captured and not iteration.persisted:
                self._note_free(iteration)
        self._follow_capture(iteration)
        self._follow_persist(iteration)
        self._began = False
        if self._every is not None:
            return
        if self._asked.every_seconds is not None:
            if counts:
                self._keep_time(iteration.number, self._asked.every_seconds)
            return
        self._steer(iteration)
        if self._intervals is None:
            if self._is_profiled:
                self._decide(iteration.number)
        elif self._sampled and iteration.number - self._reviewed >= REVIEW_EVERY:
            self._reviewed, self._sampled = iteration.number, False
            self._review(iteration.number, self._intervals)

    @property
    def report(self) -> FrequencyReport:
        """How often, why, and what was measured."""
        now, costs = self._intervals, self._estimate(KEPT)
        share = costs.share(now.memory, now.disk) if costs is not None and now is not None else None
        seen = costs is not None and bool(self._persist_seconds or self._costs)
        return FrequencyReport(
            memory_interval=now.memory
            if now
            else self._unit
            if self._planned and not self._asked.every_seconds
            else None,
            disk_interval=now.disk if now else None,
            reason=now.reason if now else "profile" if self._asked.every_seconds is None else "every",
            iteration_seconds=_median(self._recent) if self._recent else None,
            baseline_seconds=costs.iteration_seconds if costs else None,
            capture_cost_seconds=costs.capture_seconds if costs and seen else None,
            persist_cost_seconds=costs.interference_seconds if costs and seen else None,
            persist_seconds=_median(self._persist_seconds) if self._persist_seconds else None,
            overhead_share=share,
            overhead_allowed=self._asked.overhead,
            changes=tuple(self._changes),
        )

    # Samples

    def _note_free(self, iteration: Iteration) -> None:
        self._free.append((iteration.number, iteration.seconds))
        self._control_free += self._control is _Control.FREE
        old, new = [list(self._free)[:-CONTROLS], list(self._free)[-CONTROLS:]]
        if len(old) < CONTROLS:
            return
        usual, spread = _median_and_spread(seconds for _, seconds in old)
        now = _median(seconds for _, seconds in new)
        if abs(now - usual) > max(DOUBT * spread * _error(CONTROLS), BAND * usual):
            # Training itself has become faster or slower: what was measured before was held against something else.
            self._free = deque(new, maxlen=KEPT)
            self._captures.clear()
            self._persists.clear()
            self._capture = self._persist = None

    def _follow_capture(self, iteration: Iteration) -> None:
        if self._capture is None:
            return
        if not iteration.captured:
            self._end_capture()
            return
        self._capture.add(iteration)
        self._capture.pure &= not iteration.persisted

    def _end_capture(self) -> None:
        span, self._capture = self._capture, None
        if span is not None and span.pure and span.iterations:
            self._captures.append(span)
            self._sampled = True
            if self._control is _Control.RESTING:
                self._control_captures = max(0, self._control_captures - 1)

    def _follow_persist(self, iteration: Iteration) -> None:
        if iteration.persisted:
            self._persist = self._persist or _Span()
            self._persist.add(iteration)
            self._persist.captures += self._began
        span = self._persist
        if iteration.persist_seconds is not None:
            self._persist_seconds.append(iteration.persist_seconds)
            self._persisted_since += 1
            if span is not None and span.iterations:
                self._persists.append(span)
            self._sampled, self._persist = True, None
        elif not iteration.persisted:
            self._persist = None  # it failed

    def _estimate(self, size: int, doubt: float = 0.0) -> Costs | None:
        """The medians of the last ``size`` samples of each kind, and ``doubt`` standard errors.

        None: there are no free iterations. What has too few samples is as it was when the intervals were chosen.
        """
        if not self._free or (len(self._free) < LEAST and self._costs is None):
            return None
        free_seconds, spread = _median_and_spread(seconds for _, seconds in self._free)
        free_error = spread * _error(len(self._free))

        def cost(spans: Sequence[_Span], capture_seconds: float) -> float:
            values = [span.added_seconds(free_seconds) - span.captures * capture_seconds for span in spans]
            middle, own = _median_and_spread(values)
            long = _median(span.iterations for span in spans)
            own = max(own, spread * math.sqrt(long) * (1 + LEAST / len(self._free)))
            return max(0.0, middle + doubt * math.hypot(own * _error(len(values)), long * free_error))

        known = self._costs
        captures, persists = list(self._captures)[-size:], list(self._persists)[-size:]
        times = list(self._persist_seconds)[-size:]
        least = 1 if known is None else LEAST
        capture = cost(captures, 0.0) if len(captures) >= least else known.capture_seconds if known else 0.0
        interference = (
            cost(persists, capture) if len(persists) >= least else known.interference_seconds if known else 0.0
        )
        persist = known.persist_seconds if known else 0.0
        if len(times) >= least:
            middle, own = _median_and_spread(times)
            persist = max(0.0, middle + doubt * own * _error(len(times)))
        return Costs(free_seconds, capture, persist, interference)

    # Profile and control

    def _may_try(self, number: int) -> bool:
        """Without a plan: one checkpoint for trial, after free iterations; another one if that came to nothing."""
        waited = self._tried is None or number - self._tried >= MOST_PROFILED
        return waited and self._observed >= self._profile_length // 2 and len(self._free) >= LEAST and not self._busy

    @property
    def _is_profiled(self) -> bool:
        if len(self._free) < LEAST:
            return False
        if not self._planned:
            return bool(self._persist_seconds) and not self._busy
        return self._observed >= self._profile_length and self._control is _Control.NONE and self._controlled

    def _decide(self, number: int) -> None:
        costs = self._estimate(KEPT)
        assert costs is not None
        least = self._estimate(KEPT, -DOUBT)
        assert least is not None
        chosen = (
            self._choice(costs) or self._choice(least) or self._longer(Intervals(self._unit, self._unit, "overhead"))
        )
        self._costs = costs
        self._set(number, chosen)

    def _steer(self, iteration: Iteration) -> None:
        """Begin a control where one is due, and see it through."""
        number = iteration.number
        if self._control is _Control.NONE and self._control_due(number):
            self._control, self._control_since, self._control_free = _Control.RESTING, number, 0
            one_tier = self._intervals is not None and self._intervals.memory == self._intervals.disk
            wanted = self._tiers and not self._suspicious and (self._intervals is None or one_tier)
            self._control_captures = LEAST if wanted else 0
        elif self._control is _Control.RESTING:
            if iteration.persisted:
                self._control_since = number
            elif not self._control_captures or number - self._control_since >= 4 * LEAST * self._unit:
                self._control, self._control_since = _Control.FREE, number
        elif self._control is _Control.FREE and (
            self._control_free >= CONTROLS or number - self._control_since >= 4 * CONTROLS
        ):
            self._control, self._suspicious, self._controlled = _Control.NONE, False, True

    def _control_due(self, number: int) -> bool:
        if self._intervals is None:
            enough = len(self._captures) >= LEAST or self._observed >= self._profile_length
            return self._planned and self._observed >= self._profile_length // 2 and enough and not self._controlled
        last = self._free[-1][0] if self._free else self._control_since
        stale = number - max(last, self._control_since) >= max(CONTROL_EVERY, CONTROL_INTERVALS * self._intervals.disk)
        return self._suspicious or stale

    # Review

    def _choice(self, costs: Costs) -> Intervals | None:
        asked = self._asked
        return choose(costs, self._unit, asked.overhead, mtbf_seconds=asked.mtbf_seconds, tiers=self._tiers)

    def _longer(self, now: Intervals) -> Intervals:
        """Where nothing may be lost to checkpoints, and something is: step by step."""
        return Intervals(now.memory * FASTEST_GROWTH, now.disk * FASTEST_GROWTH, "overhead")

    def _review(self, number: int, now: Intervals) -> None:
        samples = max(len(self._captures), len(self._persists), len(self._persist_seconds))
        for size in WINDOWS:
            least = self._estimate(size, -DOUBT)
            if samples < size or least is None:
                break
            wanted = self._choice(least.times(1 / (1 + BAND)))
            if wanted is not None and wanted.disk <= now.disk and wanted.memory <= now.memory:
                continue
            if number - self._free[-1][0] > max(2 * REVIEW_EVERY, 2 * now.disk):
                self._suspicious = True  # perhaps it is training itself that has become slower
                return
            costs = self._estimate(size)
            assert costs is not None
            wanted = self._choice(costs) or self._longer(now)
            memory = max(now.memory, wanted.memory)
            disk = least_multiple(memory, max(now.disk, wanted.disk))
            self._costs = costs
            self._set(number, Intervals(memory, disk, wanted.reason))
            return
        if self._persisted_since >= PATIENCE:
            self._shrink(number, now)

    def _shrink(self, number: int, now: Intervals) -> None:
        size = min(KEPT, self._persisted_since)
        most, costs = self._estimate(size, 1.0), self._estimate(size)
        wanted = most and self._choice(most)
        if wanted is None or wanted.disk > now.disk or wanted.memory > now.memory:
            return
        if min(wanted.disk / now.disk, wanted.memory / now.memory) > 1 - BAND:
            return
        disk, memory = max(wanted.disk, now.disk / 2), max(wanted.memory, now.memory / 2)
        # What would be left is too little for another change.
        disk = wanted.disk if disk <= (1 + BAND) * wanted.disk else disk
        memory = least_multiple(self._unit, wanted.memory if memory <= (1 + BAND) * wanted.memory else memory)
        self._costs = costs
        self._set(number, Intervals(memory, least_multiple(memory, disk), wanted.reason))

    def _keep_time(self, number: int, seconds: float) -> None:
        wanted = in_iterations(self._unit, _median(self._recent), seconds)
        now = self._intervals
        if now is None or abs(wanted - now.disk) > BAND * now.disk:
            self._set(number, Intervals(wanted, wanted, "every"))

    def _set(self, number: int, intervals: Intervals) -> None:
        before, self._intervals = self._intervals, intervals
        self._persisted_since = 0
        if before == intervals:
            return
        self._changes.append(Change(number, intervals.memory, intervals.disk, intervals.reason))
        captured = "" if intervals.memory == intervals.disk else f", one in memory every {intervals.memory}"
        logger.info(
            "from step %d on a checkpoint every %d iterations%s: %s",
            number, intervals.disk, captured, self._because(intervals.reason),
        )  # fmt: skip

    def _because(self, reason: str) -> str:
        costs, asked = self._costs, self._asked
        if reason == "every":
            return "as asked" if asked.every_seconds is None else f"every {format_seconds(asked.every_seconds)}"
        if costs is None or reason == "plan":
            return "as planned"
        if reason == "persist":
            return f"storage takes {format_seconds(costs.persist_seconds)} for one"
        both = format_seconds(costs.capture_seconds + costs.interference_seconds)
        seconds = format_seconds(costs.iteration_seconds)
        if reason == "mtbf":
            return f"one costs {both} of training, and failures come every {format_seconds(asked.mtbf_seconds or 0.0)}"
        return f"one costs {both} of training, and {asked.overhead:.3g} of iterations of {seconds} are allowed"


def _median(values: Iterable[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def _median_and_spread(values: Iterable[float]) -> tuple[float, float]:
    """The median, and the median distance from it, scaled to a standard deviation of normal noise."""
    listed = list(values)
    middle = _median(listed)
    return middle, 1.4826 * _median(abs(value - middle) for value in listed)


def _error(count: int) -> float:
    """The standard error of a median of so many samples, in standard deviations of one as they tell it.

    Of normal noise it is sqrt(pi / 2 n); few samples tell little of their own spread, so that they count for less.
    """
    return math.sqrt(math.pi / 2 / count) * (1 + LEAST / count)
