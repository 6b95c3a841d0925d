"""What iterations tell of the cost of checkpoints: samples of three kinds, and medians of them.

- *Free* iterations, with no capture in flight and storage at rest: how long training itself takes.
- Captures that no persist disturbed: the iterations of one, and how much longer they took than free ones. Of every
  capture, how long training was held for it, which is the least that it costs: that needs no other iteration to be held
  against, on a machine whose speed drifts.
- Persists: the iterations of one, how much longer they took than free ones and the captures among them, and how long
  the persist itself lasted.

Sums over the iterations of one capture or persist are compared, not single iterations, since a checkpoint's cost is no
iteration's usual one; medians over several such sums let a pause pass that was in one of them.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from checkflow.runtime.interval.policy import Costs

KEPT = 30  # samples
LEAST = 3  # samples to believe a median
SHIFT = 5  # free iterations that tell together that training has become faster or slower
SHIFT_ERRORS, SHIFT_SHARE = 3.0, 0.1  # by how much, at least
RECENT = 20  # iterations


@dataclass(frozen=True, slots=True)
class Iteration:
    """One iteration that has ended, as seen from its two boundaries."""

    number: int  # of the boundary at its end
    seconds: float  # from boundary to boundary, what was done at the first one included
    captured: bool = False  # a capture was in flight in it, or was begun at its first boundary
    persisted: bool = False  # storage was being written to
    counts: bool = True  # whether it is an iteration like others
    persist_seconds: float | None = None  # that a persist took which ended in it
    persist_failed: bool = False  # one ended in it, in vain
    held_seconds: float = 0.0  # of its time, in which training surely waited for checkpointing
    evaluation_seconds: float = 0.0  # of its time, by which evaluation usually lengthens one

    @property
    def is_free(self) -> bool:
        """Whether no checkpoint was under way."""
        return not self.captured and not self.persisted

    @property
    def tells(self) -> bool:
        """Whether its time is to be looked at."""
        return self.counts and self.seconds > 0

    @property
    def own_seconds(self) -> float:
        """What is held against other iterations."""
        return self.seconds - self.evaluation_seconds


@dataclass(slots=True)
class Span:
    """Iterations that one capture, or one persist, was seen in."""

    iterations: int = 0  # that tell
    seconds: float = 0.0  # of these
    held_seconds: float = 0.0  # of these
    left_out: int = 0
    left_out_held_seconds: float = 0.0
    captures: int = 0  # begun in it
    counts: bool = True  # whether it is a capture like others
    pure: bool = True  # nothing else was seen in it

    def add(self, iteration: Iteration) -> None:
        if iteration.tells:
            self.iterations += 1
            self.seconds += iteration.own_seconds
            self.held_seconds += iteration.held_seconds
        else:
            self.left_out += 1
            self.left_out_held_seconds += iteration.held_seconds

    def whole(self, seconds: float) -> float:
        """What is true of the iterations that tell, for all of them: those left out are taken to be like the others."""
        return seconds * (self.iterations + self.left_out) / self.iterations

    def added_seconds(self, free_seconds: float) -> float:
        """What it has beyond so many free iterations."""
        return self.whole(self.seconds - self.iterations * free_seconds)


class Samples:
    """The last samples of each kind; how many there ever were is counted beside them."""

    def __init__(self) -> None:
        self._free: deque[Iteration] = deque(maxlen=KEPT)
        self.recent: deque[float] = deque(maxlen=RECENT)  # seconds of iterations that tell, free or not
        self._any: deque[Iteration] = deque(maxlen=RECENT)  # whether they tell or not
        self.free_seen = self.captures_seen = self.persists_seen = self.shifts = 0
        self._baseline: tuple[float, float] | None = None
        self.forget_checkpoints()

    def forget_checkpoints(self) -> None:
        """What captures and persists cost is to be measured anew."""
        self._captures: deque[Span] = deque(maxlen=KEPT)
        self._held: deque[tuple[float, int]] = deque(maxlen=KEPT)  # seconds held in a capture's iterations, and these
        self._persists: deque[Span] = deque(maxlen=KEPT)
        self._persist_seconds: deque[float] = deque(maxlen=KEPT)
        self._capture: Span | None = None  # under way
        self._persist: Span | None = None
        self._began = False  # a capture, at the last boundary

    def keep_last(self, size: int) -> None:
        """Forget what older checkpoints cost: it holds no more."""
        for samples in (self._captures, self._held, self._persists, self._persist_seconds):
            while len(samples) > size:
                samples.popleft()

    @property
    def baseline(self) -> tuple[float, float] | None:
        """The median of free iterations, and their standard deviation; None: there are too few of them."""
        return self._baseline

    @property
    def standing_seconds(self) -> float:
        """For which training waits in an iteration without a checkpoint, also where such tell nothing."""
        held = [one.held_seconds for one in list(self._free)]
        if len(held) < LEAST:
            held = [one.held_seconds for one in list(self._any) if one.is_free]
        return median(held) if len(held) >= LEAST else 0.0

    @property
    def fallback(self) -> Costs | None:
        """What little is known where no iteration can be held against another: how long training surely waited."""
        if len(self._any) < LEAST:
            return None
        own = median(one.seconds - one.held_seconds for one in list(self._any))
        standing = self.standing_seconds
        held = median(seconds - count * standing for seconds, count in list(self._held)) if self._held else 0.0
        return Costs(own + standing, max(0.0, held), self.persist_seconds or 0.0, 0.0, standing) if own > 0 else None

    @property
    def free(self) -> int:
        """How many free iterations are remembered."""
        return len(self._free)

    @property
    def last_free(self) -> int | None:
        """The boundary at the end of the last free iteration."""
        return self._free[-1].number if self._free else None

    @property
    def captures(self) -> int:
        """How many captures are remembered."""
        return len(self._captures)

    @property
    def largest(self) -> int:
        """How many samples of a checkpoint's cost there are, of the kind that has most."""
        return max(len(self._captures), len(self._held), len(self._persists), len(self._persist_seconds))

    @property
    def last_persist_cost(self) -> float | None:
        """Seconds by which the last persist, and the captures begun in it, lengthened training; None: not known."""
        if not self._persists or self._baseline is None:
            return None
        return self._persists[-1].added_seconds(self._baseline[0])

    @property
    def persist_seconds(self) -> float | None:
        """How long a persist lasts."""
        seconds = list(self._persist_seconds)
        return median(seconds) if seconds else None

    def begin_capture(self, *, counts: bool) -> None:
        """A capture begins at this boundary, one like others or not."""
        self._end_capture()
        self._capture, self._began = Span(counts=counts), True

    def add(self, iteration: Iteration) -> None:
        """An iteration has ended."""
        if iteration.seconds > 0:
            self._any.append(iteration)
        if iteration.tells:
            self.recent.append(iteration.seconds)
            if iteration.is_free:
                self._add_free(iteration)
                if len(self._free) >= LEAST:
                    self._baseline = median_and_spread(one.own_seconds for one in self._free)
        self._follow_capture(iteration)
        self._follow_persist(iteration)
        self._began = False

    def estimate(self, size: int = KEPT, doubt: float = 0.0, known: Costs | None = None) -> Costs | None:
        """The medians of the last ``size`` samples of each kind of checkpoint's costs, and ``doubt`` standard errors.

        Args:
            known: what costs are where there are too few samples; without it one sample is believed, and none is 0.

        Returns:
            None: there are no free iterations to hold the others against.
        """
        if not self._free or (len(self._free) < LEAST and known is None):
            return None
        least, zero = (1, Costs(0.0, 0.0, 0.0, 0.0)) if known is None else (LEAST, known)
        free = list(self._free)  # reports are made on other threads
        free_seconds, spread = median_and_spread(one.own_seconds for one in free)
        standing = self.standing_seconds if len(free) >= LEAST else zero.standing_seconds

        def cost(spans: Sequence[Span], capture_seconds: float, doubt: float) -> float:
            values = [span.added_seconds(free_seconds) - span.captures * capture_seconds for span in spans]
            middle, own = median_and_spread(values)
            long = median(span.iterations for span in spans)
            own = max(own, spread * math.sqrt(long) * (1 + LEAST / len(self._free)))
            error = math.hypot(own * error_of(len(values)), long * spread * error_of(len(self._free)))
            return max(0.0, middle + doubt * error)

        captures, persists = list(self._captures)[-size:], list(self._persists)[-size:]
        lasting = list(self._persist_seconds)[-size:]

        def capture_cost(doubt: float) -> float:
            capture = cost(captures, 0.0, doubt) if len(captures) >= least else zero.capture_seconds
            if len(persists) >= least and (begun := median(span.captures for span in persists)) >= 1:
                # Where storage takes every capture none is undisturbed; but one costs no more than it and its persist.
                capture = min(capture, cost(persists, 0.0, doubt) / begun)
            if len(self._held) >= least:  # what free iterations have of it, too, is no capture's
                held = median(seconds - count * standing for seconds, count in list(self._held)[-size:])
                capture = max(capture, held)
            return capture

        interference = zero.interference_seconds
        if len(persists) >= least:  # what doubt adds to a capture is not taken from what its persist adds
            interference = cost(persists, capture_cost(0.0), doubt)
        persist = zero.persist_seconds
        if len(lasting) >= least:
            middle, own = median_and_spread(lasting)
            persist = max(0.0, middle + doubt * own * error_of(len(lasting)))
        return Costs(free_seconds, capture_cost(doubt), persist, interference, standing)

    def _add_free(self, iteration: Iteration) -> None:
        self.free_seen += 1
        self._free.append(iteration)
        old, new = list(self._free)[:-SHIFT], list(self._free)[-SHIFT:]
        if len(old) < SHIFT:
            return
        usual, spread = median_and_spread(one.own_seconds for one in old)
        now = median(one.own_seconds for one in new)
        if abs(now - usual) > max(SHIFT_ERRORS * spread * error_of(SHIFT), SHIFT_SHARE * usual):
            # What was measured before was held against another training's time.
            self._free = deque(new, maxlen=KEPT)
            self.shifts += 1
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
        if span is None or not span.counts or not span.iterations + span.left_out:
            return
        held_seconds = span.whole(span.held_seconds) if span.iterations else span.left_out_held_seconds
        self._held.append((held_seconds, span.iterations + span.left_out))
        if span.pure and span.iterations:
            self._captures.append(span)
            self.captures_seen += 1

    def _follow_persist(self, iteration: Iteration) -> None:
        if iteration.persist_failed:
            self._persist = None
            return
        if iteration.persisted:
            self._persist = self._persist or Span()
            self._persist.add(iteration)
            self._persist.captures += self._began
        span = self._persist
        if iteration.persist_seconds is not None:
            self._persist_seconds.append(iteration.persist_seconds)
            self.persists_seen += 1
            if span is not None and span.iterations:
                self._persists.append(span)
            self._persist = None
        elif not iteration.persisted:
            self._persist = None


def median(values: Iterable[float]) -> float:
    """Of at least one value."""
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def median_and_spread(values: Iterable[float]) -> tuple[float, float]:
    """The median, and the median distance from it, scaled to the standard deviation of normal noise."""
    listed = list(values)
    middle = median(listed)
    return middle, 1.4826 * median(abs(value - middle) for value in listed)


def error_of(count: int) -> float:
    """The standard error of a median of so many samples, in standard deviations of one as they tell it.

    Of normal noise it is sqrt(pi / 2 n); few samples tell little of their own spread, so that they count for less.
    """
    return math.sqrt(math.pi / 2 / count) * (1 + LEAST / count)
