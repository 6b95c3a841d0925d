"""Where an iteration's time goes: a clock that the events of the training loop drive.

Time between two events belongs to the phase that the first one began, so that an iteration's phases add up to its time.
docs/reference/run-report.md has the phases.
"""

from __future__ import annotations

import copy
import functools
import math
import statistics
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Final, NamedTuple

from checkflow.anchors.regions import in_backward
from checkflow.anchors.stream import Subscriber
from checkflow.core.graph import AnchorKey

PHASES: Final = ("data", "forward_backward", "update", "snapshot_wait", "persist_wait", "planning", "other")
DATA, FORWARD_BACKWARD, UPDATE, SNAPSHOT_WAIT, PERSIST_WAIT, PLANNING, OTHER = range(len(PHASES))

#: What holds training, and in which phase it is then.
_HOLDS: Final = {"anchors": SNAPSHOT_WAIT, "boundary": SNAPSHOT_WAIT, "buffers": PERSIST_WAIT, "planning": PLANNING}

ERROR_SHARE: Final = 0.01  # by which a quantile may be off
BINS_A_DECADE: Final = 4  # of a histogram
STALLS_KEPT: Final = 200  # checkpoints
SPELLS_KEPT: Final = 2000
LEAST_HOLD_SECONDS: Final = 20e-6  # shorter ones are too many to keep each
_GROWTH = (1 + ERROR_SHARE) / (1 - ERROR_SHARE)
_LOG_GROWTH = math.log(_GROWTH)


class Quantiles:
    """Quantiles of any number of durations in bounded memory, each within 1 % of the true one.

    Counts by buckets whose bounds grow by a constant factor (DDSketch: Masson, Rim, Lee, VLDB 2019): some 2,000 buckets
    span a nanosecond to a year.
    """

    def __init__(self) -> None:
        self.count = 0
        self._zeros = 0
        self._buckets: dict[int, int] = {}
        self._least, self._most = math.inf, 0.0

    def add(self, seconds: float) -> None:
        """One more duration; negative ones count as none."""
        self._least, self._most = min(self._least, max(seconds, 0.0)), max(self._most, seconds)
        if seconds < 1e-9:
            self._zeros += 1
        else:
            bucket = math.ceil(math.log(seconds) / _LOG_GROWTH)
            self._buckets[bucket] = self._buckets.get(bucket, 0) + 1
        self.count += 1  # last: another thread may look, and Ctrl-C come, between any two lines

    def at(self, share: float) -> float | None:
        """The least duration that at least this share of all do not exceed; None: there is none."""
        if not self.count:
            return None
        rank = max(1, math.ceil(share * self.count))
        reached = self._zeros
        if reached >= rank:
            return 0.0
        for bucket in sorted(self._buckets):
            reached += self._buckets[bucket]
            if reached >= rank:
                return min(max(2 * _GROWTH**bucket / (_GROWTH + 1), self._least), self._most)
        raise AssertionError("every duration is in a bucket")

    def histogram(self) -> dict[float, int]:
        """How many durations lie in each bin, by its upper end in seconds; those below a nanosecond lie in bin 0."""
        bins = {0.0: self._zeros} if self._zeros else {}
        for bucket in sorted(self._buckets):
            end = 10 ** (math.ceil(bucket * _LOG_GROWTH / math.log(10) * BINS_A_DECADE) / BINS_A_DECADE)
            bins[end] = bins.get(end, 0) + self._buckets[bucket]
        return bins

    def copy(self) -> Quantiles:
        """As it is now."""
        twin = copy.copy(self)
        twin._buckets = self._buckets.copy()
        return twin


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds over all iterations: their sum, and the median and 99th percentile of one iteration's."""

    total: float
    median: float | None  # None: there was no iteration
    p99: float | None


@dataclass(frozen=True, slots=True)
class Reading:
    """What the clock says."""

    iterations: int  # whole ones
    parts: Mapping[str, float]  # seconds of snapshot and persist waits, by what their iterations were for
    iteration: Times
    phases: Mapping[str, Times]
    histograms: Mapping[str, Mapping[float, int]]  # of both waits, as Quantiles.histogram
    # Since the plan in place was put there:
    computing_seconds: float | None  # median of forward, backward and update together; None: not seen
    stall_seconds: float | None  # median of what one checkpoint holds, persist waits and what is held anyway aside


class _Stall(NamedTuple):
    """What training was held in iterations that one checkpoint was begun, or under way, in; and how many they are."""

    seconds: float
    iterations: int


def _usual_stall(stalls: Sequence[_Stall], standing_seconds: float) -> float | None:
    """The median of what one checkpoint holds, less what an iteration without any is held for, too."""
    if not stalls:
        return None
    return statistics.median(max(0.0, one.seconds - one.iterations * standing_seconds) for one in stalls)


class PhaseClock:
    """The clock of one job. The training thread drives it; any thread may read it.

    Args:
        now: seconds since some moment.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._since = self._phase_since = self._iteration_since = now()
        #: The last iterations, phases and holds: what, since when, until when.
        self.spells: deque[tuple[str, float, float]] = deque(maxlen=SPELLS_KEPT)
        self._started = False  # what comes before the first event that is training's belongs to no iteration
        self._phase = OTHER
        self._stepping = 0  # steps of optimizers that began and have not ended
        self._holds: list[_Holding] = []
        self._seconds = [0.0] * len(PHASES)  # of the iteration that goes on
        self._lock = threading.Lock()
        self._iterations, self._totals = 0, [0.0] * len(PHASES)
        self._parts: defaultdict[str, float] = defaultdict(float)
        self._quantiles = [Quantiles() for _ in (*PHASES, "iteration")]
        self.held_seconds = dict.fromkeys(_HOLDS, 0.0)
        self.longest_hold_seconds = 0.0
        self._forget_plan()

    def _forget_plan(self) -> None:
        self._computing, self._standing = Quantiles(), Quantiles()  # the latter: snapshot waits without a capture
        self._stalls: deque[_Stall] = deque(maxlen=STALLS_KEPT)
        self._stall: _Stall | None = None  # since the last boundary that was captured; None: there is none yet
        self._capturing = False  # in the iteration that goes on

    def enter(self, phase: int) -> None:
        """Training does this from now on; while it is held, as soon as it goes on."""
        if phase == self._phase and self._started:
            return
        self._charge()
        self._pass_to(phase)
        if not self._started and phase != OTHER:
            self._started = True
            self._seconds = [0.0] * len(PHASES)

    def _pass_to(self, phase: int) -> None:
        """Leave the present phase, as of the last event."""
        self.spells.append((PHASES[self._phase], self._phase_since, self._since))
        self._phase, self._phase_since = phase, self._since

    def subscriber(self, *, optimizers: bool) -> Subscriber:
        """Return the functions by which the clock follows a job's anchors.

        Args:
            optimizers: whether there are any: then an evaluation is a part of the iteration until they step.
        """
        return Subscriber(
            gradient=lambda _key: self.enter(FORWARD_BACKWARD), step_begins=self.step_begins, step_ends=self.step_ends,
            training=functools.partial(self.enter, FORWARD_BACKWARD),
            evaluation=None if optimizers else functools.partial(self.enter, OTHER),
        )  # fmt: skip

    def step_begins(self, _key: AnchorKey) -> None:
        """An optimizer steps. One whose class calls its parent's step may say so twice."""
        self._stepping += 1
        self.enter(UPDATE)

    def step_ends(self, _key: AnchorKey) -> None:
        """An optimizer has stepped; if that was within backward, backward goes on."""
        self._stepping = max(0, self._stepping - 1)
        if not self._stepping:
            self.enter(FORWARD_BACKWARD if in_backward() else OTHER)

    def holding(self, what: str) -> _Holding:
        """A context in which training is held: at "anchors", at a "boundary", by "planning"."""
        return _Holding(self, what)

    def shift(self, seconds: float) -> None:
        """So much of what holds training now is a wait for storage or buffers."""
        self._charge()
        held = self._holds[-1]
        held.excluded += seconds
        for what, more in ((held.what, -seconds), ("buffers", seconds)):
            self.held_seconds[what] += more
            self._seconds[_HOLDS[what]] += more

    def end_iteration(self, *, captured: bool, under_way: bool = False, part: str = "") -> None:
        """A boundary, and all that was to be done there: the next iteration begins.

        Args:
            captured: whether a checkpoint was begun here.
            under_way: whether the capture of an earlier boundary goes on.
            part: what this iteration's waits are counted to.
        """
        self._charge()
        seconds, self._seconds = self._seconds, [0.0] * len(PHASES)
        self._pass_to(OTHER)
        self.spells.append(("iteration", self._iteration_since, self._since))
        self._iteration_since = self._since
        self._stepping = 0  # a step that raised has said nothing of its end
        capturing, self._capturing = self._capturing or captured, captured or under_way
        if not self._started:  # where it began was not seen
            self._started = True
            return
        computing = seconds[FORWARD_BACKWARD] + seconds[UPDATE]
        with self._lock:
            self._iterations += 1
            self._parts[part] += seconds[SNAPSHOT_WAIT] + seconds[PERSIST_WAIT]
            for index, (one, quantiles) in enumerate(zip(seconds, self._quantiles, strict=False)):
                self._totals[index] += one
                quantiles.add(one)
            self._quantiles[-1].add(sum(seconds))
            if computing:
                self._computing.add(computing)
            if not capturing:
                self._standing.add(seconds[SNAPSHOT_WAIT])
            elif self._stall is not None:
                self._stall = _Stall(self._stall.seconds + seconds[SNAPSHOT_WAIT], self._stall.iterations + 1)
            if captured:
                if self._stall is not None:
                    self._stalls.append(self._stall)
                self._stall = _Stall(0.0, 0)

    def new_plan(self) -> None:
        """Another plan runs from here on: what is held against a plan's promises begins anew."""
        with self._lock:
            self._forget_plan()

    def read(self) -> Reading:
        """What is known of the iterations so far."""
        with self._lock:  # the training thread may be waiting for it
            iterations, totals, parts = self._iterations, self._totals.copy(), dict(self._parts)
            *phases, iteration, computing, standing = (
                quantiles.copy() for quantiles in (*self._quantiles, self._computing, self._standing)
            )
            stalls = list(self._stalls)
        return Reading(
            iterations,
            parts,
            Times(sum(totals), iteration.at(0.5), iteration.at(0.99)),
            {
                name: Times(max(total, 0.0), quantiles.at(0.5), quantiles.at(0.99))
                for name, total, quantiles in zip(PHASES, totals, phases, strict=True)
            },
            {PHASES[wait]: phases[wait].histogram() for wait in (SNAPSHOT_WAIT, PERSIST_WAIT)},
            computing.at(0.5),
            _usual_stall(stalls, standing.at(0.5) or 0.0),
        )

    def _charge(self) -> float:
        """What has passed since the last event goes to what training was doing, or was held by."""
        now = self._now()
        elapsed, self._since = now - self._since, now
        if self._holds:
            what = self._holds[-1].what
            self.held_seconds[what] += elapsed
            self._seconds[_HOLDS[what]] += elapsed
        else:
            self._seconds[self._phase] += elapsed
        return now


class _Holding:
    """See :meth:`PhaseClock.holding`."""

    __slots__ = ("_begun", "_clock", "excluded", "what")

    def __init__(self, clock: PhaseClock, what: str) -> None:
        self._clock, self.what = clock, what
        self.excluded = 0.0  # seconds in which something else held training

    def __enter__(self) -> None:
        self._begun = self._clock._charge()
        self._clock._holds.append(self)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        clock = self._clock
        now = clock._charge()
        whole = now - self._begun
        if whole >= LEAST_HOLD_SECONDS:
            clock.spells.append((self.what, self._begun, now))
        clock._holds.pop()
        clock.longest_hold_seconds = max(clock.longest_hold_seconds, whole - self.excluded)
        if clock._holds:
            clock._holds[-1].excluded += whole
