"""The controller of the intervals: told how long each iteration took, it says which boundaries are captured.

It reads no clock and knows no thread: :mod:`.loop.pacing` tells it, at each boundary, how long the iteration took that
has ended, whether a capture was in flight in it, and whether storage was being written to. :mod:`.measurements` makes
of that what a checkpoint costs, :mod:`.policy` what interval follows.

A job is *profiled* first (CheckFreq, section 4.4: 1 % of an epoch or 50 iterations, whichever is fewer). Under a plan
its first checkpoints are made as planned; then they stop for some iterations (:mod:`.calibration`), and go on as far as
the budget allows. Where there is no plan a checkpoint holds training: one is made at once, for trial, whatever is known
of its cost, and free iterations come after it. Then intervals are chosen, and reviewed from there on
(:mod:`.adjustment`).

Two things keep within ``overhead``. The intervals do in the long run, by costs measured before. The budget
(:mod:`.overhead_budget`) does at once: as soon as free iterations tell what training takes, whatever was spent beyond
is owed, the profile's checkpoints included, and a checkpoint that is due waits until nothing is. So the first
checkpoint that costs ten times as much puts off the next one, and the interval follows with the review that this brings
about. After one that was cheap for its interval the next comes sooner, after a ``PROBE``-th of it, which the budget
then pays: so that it is soon known whether the interval may shrink.

Where captures in host memory follow each other without a gap, the last ones before storage is due are left out, so that
some iterations stay free, which costs no durable checkpoint. If free iterations themselves have become other ones, all
is measured anew, and nothing is owed.
"""

from __future__ import annotations

import logging
import math
from collections import deque

from checkflow.core.run_report import Frequency, FrequencyChange
from checkflow.core.units import format_seconds, format_time
from checkflow.runtime.interval.adjustment import BOLD, Review, Verdict, longer
from checkflow.runtime.interval.calibration import Control
from checkflow.runtime.interval.clock_schedule import ByTime
from checkflow.runtime.interval.measurements import LEAST, SHIFT, Iteration, Samples, median
from checkflow.runtime.interval.overhead_budget import Budget
from checkflow.runtime.interval.policy import Asked, Costs, Intervals, least_multiple

logger = logging.getLogger("checkflow")

MOST_PROFILED, PROFILED_SHARE = 50, 0.01  # iterations, and share of an epoch
LEAST_PROFILED = 16  # iterations, however short the epoch
LEAST_TRIED = 5  # iterations with checkpoints, before the first ones without
GAP, GAP_FROM = 2, 8  # iterations left free before storage is due, where that comes after at least so many captures
REVIEW_EVERY, REVIEW_SECONDS = 20, 0.2  # iterations, and seconds of them: a review takes most of a millisecond
PROBE = 4  # so many times sooner the next checkpoint follows one that was cheap
SHORT = 2  # times as many iterations as a commit is seen in: an epoch of no more leaves too few of its own free
MOST_AFTER_GUESS = 3  # controls, one of which comes with the guess
LONGEST_PROFILE = 200  # iterations of any kind: then intervals are chosen by what little is known
SAID = 0.001  # of an iteration: what hooks and looks at the job take is said where it is more
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
        share = MOST_PROFILED if epoch_iterations is None else math.ceil(PROFILED_SHARE * epoch_iterations)
        self._profile_length = max(LEAST_PROFILED, min(MOST_PROFILED, share))
        self._samples, self._planned = Samples(), True
        self._budget = Budget(asked.overhead)
        self._changes: deque[FrequencyChange] = deque(maxlen=HISTORY)
        self._time = None if asked.every_seconds is None else ByTime(asked.every_seconds)
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
        told: bool = False,
    ) -> None:
        """Another plan runs from this boundary on, or none: what checkpoints cost is measured anew.

        Args:
            unit: the plan's interval.
            every: as the user asked, rounded to what the plan can do.
            planned: whether captures are hidden; otherwise all state is copied at the boundary.
            tiers: whether there is host memory for a capture that storage does not take.
            known: what such a job measured before: there is no profile then.
            told: whether the intervals that follow from it are no news.
        """
        if planned and not self._planned:
            self._samples = Samples()  # iterations beside which a plan was made
        self._unit, self._every, self._planned, self._tiers = unit, every, planned, tiers and planned
        self._samples.forget_checkpoints()
        self._budget.reset()
        self._refused_at: int | None = None  # free iterations seen when the budget refused a checkpoint
        self._busy = False  # storage, in the last iteration
        self._observed = self._passed = 0  # iterations since then: that tell, and of any kind
        self._reviewed, self._reviewed_samples, self._unreviewed_seconds = number, 0, 0.0
        self._control = Control(self._samples, self._asked.overhead, number=number, unit=unit)
        self._rests_only = False  # a control that is needed is about training's own time alone
        self._tried: int | None = None  # the boundary of a checkpoint for trial
        self._costs, self._guessed = known, False  # whether they are a fallback's
        # What the user said needs no word in the log.
        self._intervals: Intervals | None = None if every is None else Intervals(every, every, "every")
        self._reviewing = Review(self._asked, self._samples, unit=unit, tiers=self._tiers)
        self._cheap = False  # the last checkpoint
        if self._time is not None and (interval := self._time.interval(unit)) is not None:
            self._intervals = Intervals(interval, interval, "every")
        elif every is None and self._time is None and known is not None:
            self._set(number, self._reviewing.choice(known) or longer(Intervals(unit, unit, "overhead")), told=told)

    # What the job asks

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
        asked, samples, now = self._asked, self._samples, self._intervals
        costs = samples.estimate(known=self._costs)
        seen = costs is not None and (samples.largest > 0 or self._costs is not None)
        as_planned = now is None and self._planned and self._time is None
        memory = self._unit if as_planned else None if now is None else now.memory
        reason = "profile" if now is None else now.reason
        return Frequency(
            memory_interval=memory,
            disk_interval=None if now is None else now.disk,
            reason=reason if self._time is None else "every",
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
        if number % self._unit or self._control.free or (self._control.resting and not self._tiers):
            return False
        if self._time is not None:
            return self._time.is_due(self._unit)
        if not self._planned and (self._intervals is None or self._tried is None):
            return self._may_try(number)
        if self._intervals is None:
            return self._may_spend()
        if self._control.wants_captures and not self._busy:
            return True
        now, since_durable = self._intervals, number - self._last_disk
        if since_durable >= self._disk_interval(now) and self._may_spend():
            return True
        if now.memory == now.disk or number - self._last_memory < now.memory:
            return False
        gap = max(GAP, self._unit) if now.memory == self._unit and now.disk >= GAP_FROM * self._unit else 0
        return since_durable % now.disk < now.disk - gap and self._budget.allows_between()

    def is_durable(self, number: int) -> bool:
        """Whether storage takes the capture of this boundary as soon as it can."""
        if self._every is not None or self._time is not None or not self._planned:
            return True
        if self._control.resting:
            return False
        now = self._intervals
        return now is None or (number - self._last_disk >= self._disk_interval(now) and self._may_spend())

    @property
    def leaves_out_epochs(self) -> bool:
        """Whether the end of an epoch is not captured now.

        Where epochs are about as short as one commit, their ends keep storage busy all the time, and nothing would
        tell what training takes: a control leaves them out, too.
        """
        lasting, recent = self._samples.persist_seconds, self._samples.recent
        if self._epoch_iterations is None or lasting is None or not (self._control.resting or self._control.free):
            return False
        if not recent:  # a control may be due before any iteration has told anything
            return False
        return self._epoch_iterations <= SHORT * (1 + lasting / median(recent))

    # What the job tells

    def captured(self, number: int, *, durable: bool, counts: bool = True) -> None:
        """A capture of this boundary has begun.

        Args:
            durable: whether storage takes it.
            counts: whether it is one like others, not an audited one, nor one that came before its time.
        """
        self._samples.begin_capture(counts=counts)
        if self._time is not None:
            self._time.captured(self._unit)
        self._last_memory = self._tried = number
        if durable:
            self._last_disk = number

    def ended(self, iteration: Iteration) -> None:
        """An iteration has ended; before :meth:`is_due` is asked about its boundary."""
        self._busy = iteration.persisted
        self._observed += iteration.tells
        self._passed += iteration.seconds > 0
        self._unreviewed_seconds += iteration.seconds
        shifts = self._samples.shifts
        self._samples.add(iteration)
        self._budget.add(
            iteration,
            self._samples.baseline,
            1 if self._intervals is None else self._intervals.disk,
            believed_seconds=None if self._costs is None else self._costs.iteration_seconds,
            standing_seconds=self._samples.standing_seconds,
        )
        if self._samples.shifts != shifts:
            self._budget.forgive()
        if self._every is not None:
            return
        if self._time is not None:
            if self._time.ended(iteration.seconds) and (interval := self._time.interval(self._unit)) is not None:
                self._set(iteration.number, Intervals(interval, interval, "every"))
            return
        self._steer(iteration)
        if iteration.persist_seconds is not None:
            self._cheap = self._was_cheap()
        if self._intervals is None:
            first = self._reviewing.first() if self._is_profiled else self._fallback()
            if first is not None:
                self._take(iteration.number, first)
        elif self._review_due(iteration.number):
            verdict = self._reviewing.again(iteration.number, self._intervals, self._costs)
            if verdict is not None:
                self._guessed &= verdict.intervals is None
                self._take(iteration.number, verdict)

    # Budget, profile and control

    def _may_spend(self) -> bool:
        """Whether the budget has room for a checkpoint."""
        allowed = self._budget.allows()
        if not allowed and self._refused_at is None:
            self._refused_at = self._samples.free_seen
        return allowed

    def _may_try(self, number: int) -> bool:
        """Without a plan: one checkpoint for trial, at once; another one if that came to nothing."""
        return not self._busy and (self._tried is None or number - self._tried >= MOST_PROFILED)

    @property
    def _tells_nothing(self) -> bool:
        """Whether so far no iteration could be held against another, or as good as none."""
        if self._passed >= LEAST_PROFILED and not self._observed:
            return True
        few = self._passed >= MOST_PROFILED and self._observed < LEAST_TRIED
        return few or (self._passed >= LONGEST_PROFILE and self._samples.free < LEAST)

    def _fallback(self) -> Verdict | None:
        """Where no profile is to be had: intervals by how long training surely waited, until more is known."""
        if not self._tells_nothing or (not self._planned and (self._samples.persist_seconds is None or self._busy)):
            return None
        costs = self._samples.fallback
        if costs is None:
            return None
        chosen = self._reviewing.choice(costs) or longer(Intervals(self._unit, self._unit, "overhead"))
        self._guessed = True
        return Verdict(chosen, costs, unsure=True)

    @property
    def _is_profiled(self) -> bool:
        if self._samples.free < LEAST:
            return False
        if not self._planned:
            return self._samples.persist_seconds is not None and not self._busy
        long = self._observed >= self._profile_length or self._passed >= LONGEST_PROFILE
        return self._control.made > 0 and long

    def _steer(self, iteration: Iteration) -> None:
        """Begin a control where one is due, and see it through."""
        now = self._intervals
        if now is None:
            tried = max(self._samples.captures, self._reviewing.persists) >= LEAST or self._observed >= LEAST_PROFILED
            due = self._planned and not self._control.made and tried and self._observed >= LEAST_TRIED
        else:
            due = self._control.is_stale(iteration.number, now.memory)
            if self._guessed and self._observed >= LEAST_TRIED and self._samples.free < LEAST:
                due |= self._control.made < MOST_AFTER_GUESS  # something tells at last
        # Captures that storage does not take are rare where it takes all.
        rare = self._tiers and not self._rests_only and (now is None or now.memory == now.disk)
        self._control.follow(iteration, due=due, captures=LEAST if rare else 0)

    # Review

    def _was_cheap(self) -> bool:
        """Whether the last persist, and the captures in it, cost much less than their interval is long for."""
        now, costs, paid = self._intervals, self._costs, self._samples.last_persist_cost
        if now is None or costs is None or paid is None or now.reason != "overhead":
            return False
        return paid <= BOLD * costs.allowed_seconds(self._asked.overhead) * now.disk

    def _disk_interval(self, now: Intervals) -> int:
        """When storage is due: sooner after a checkpoint that was cheap, to see soon whether others are, too."""
        step = now.memory if now.memory < now.disk else self._unit
        return least_multiple(step, now.disk / PROBE) if self._cheap else now.disk

    def _review_due(self, number: int) -> bool:
        """Whether there is something new to look at: now and then, and soon where the budget has refused a checkpoint.

        Then training goes on without, and shows first whether it has become another one itself.
        """
        if self._unreviewed_seconds < REVIEW_SECONDS:
            return False
        refused = self._refused_at is not None and self._samples.free_seen - self._refused_at >= SHIFT
        samples = self._samples.captures_seen + self._samples.persists_seen
        if samples == self._reviewed_samples or not (refused or number - self._reviewed >= REVIEW_EVERY):
            return False
        self._reviewed, self._reviewed_samples, self._unreviewed_seconds = number, samples, 0.0
        self._refused_at = None
        return True

    def _take(self, number: int, verdict: Verdict) -> None:
        if verdict.intervals is None or verdict.unsure:
            self._control.needed, self._rests_only = True, verdict.intervals is None or self._guessed
        if verdict.intervals is not None:
            self._costs = verdict.costs
            self._set(number, verdict.intervals)

    def _set(self, number: int, intervals: Intervals, *, told: bool = False) -> None:
        before, self._intervals = self._intervals, intervals
        self._reviewing.changed()
        if before is not None and (before.memory, before.disk) == (intervals.memory, intervals.disk):
            return
        self._changes.append(FrequencyChange(number, intervals.memory, intervals.disk, intervals.reason))
        as_planned = intervals.reason == "plan" and intervals.memory == intervals.disk == self._unit
        if told or (before is None and as_planned and self._planned):
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
            f", of which hooks and looks take {standing}"
            if costs.standing_seconds > SAID * costs.iteration_seconds
            else ""
        )
        return f"one costs {both} of training, and may cost {share:.3g} % of iterations of {seconds}{beside}"


def _often(interval: int) -> str:
    return "every iteration" if interval == 1 else f"every {interval} iterations"
