"""The cost of checkpoints, measured from iterations.

Iterations with no checkpoint under way are *free*: their median is what training takes by itself. What others take
beyond that is summed over the iterations of one capture, or of one persist, and medians of such sums let a pause pass.
How long training was held for a capture is the least that it costs, also on a machine whose speed drifts.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from checkflow.runtime.interval.algorithm import Costs

KEPT = 30  # samples of each kind
LEAST = 3  # samples to believe a median
SHIFT = 5  # free iterations that show together that training has become faster or slower
SHIFT_ERRORS, SHIFT_SHARE = 3.0, 0.1  # by how much the last samples differ from older ones, which hold no more then
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
    def is_usable(self) -> bool:
        """Whether its time is to be looked at."""
        return self.counts and self.seconds > 0

    @property
    def own_seconds(self) -> float:
        """What is held against other iterations."""
        return self.seconds - self.evaluation_seconds


@dataclass(slots=True)
class Span:
    """Iterations that one capture, or one persist, was seen in."""

    iterations: int = 0  # usable ones
    left_out: int = 0
    excess_seconds: float = 0.0  # beyond free ones
    held_seconds: float = 0.0  # beyond what training is held in any iteration
    captures: int = 0  # begun in it
    counts: bool = True  # whether it is a capture like others
    pure: bool = True  # nothing else was seen in it

    def add(self, iteration: Iteration, excess_seconds: float, standing_seconds: float) -> None:
        self.held_seconds += iteration.held_seconds - standing_seconds
        if iteration.is_usable:
            self.iterations += 1
            self.excess_seconds += excess_seconds
        else:
            self.left_out += 1

    @property
    def cost_seconds(self) -> float:
        """Those left out are taken to be like the others."""
        return self.excess_seconds * (self.iterations + self.left_out) / self.iterations


def _kept() -> deque[float]:
    return deque(maxlen=KEPT)


def _kept_spans() -> deque[Span]:
    return deque(maxlen=KEPT)


@dataclass(slots=True)
class Checkpoints:
    """The last checkpoints under one plan."""

    captures: deque[Span] = field(default_factory=_kept_spans)  # that no persist disturbed
    held: deque[float] = field(default_factory=_kept)
    persists: deque[Span] = field(default_factory=_kept_spans)
    persist_seconds: deque[float] = field(default_factory=_kept)
    capture: Span | None = None  # under way
    persist: Span | None = None
    seen: int = 0  # with something measured
    captures_seen: int = 0
    persists_seen: int = 0

    def follow(
        self, iteration: Iteration, excess_seconds: float, standing_seconds: float, *, began: bool | None
    ) -> None:
        """An iteration has ended.

        Args:
            began: whether the capture that began with it is one like others; None: none began.
        """
        if began is not None or not iteration.captured:
            self._end_capture()
        if began is not None:
            self.capture = Span(counts=began)
        if self.capture is not None:
            self.capture.add(iteration, excess_seconds, standing_seconds)
            self.capture.pure &= not iteration.persisted
        if iteration.persisted and not iteration.persist_failed:
            self.persist = self.persist or Span()
            self.persist.add(iteration, excess_seconds, standing_seconds)
            self.persist.captures += began is not None
        if iteration.persist_seconds is not None:
            self.seen, self.persists_seen = self.seen + 1, self.persists_seen + 1
            _add(self.persist_seconds, iteration.persist_seconds)
            if self.persist is not None and self.persist.iterations:
                self.persists.append(self.persist)
                keep_last(self.persists, LEAST, [one.cost_seconds for one in self.persists])
        if iteration.persist_seconds is not None or not iteration.persisted or iteration.persist_failed:
            self.persist = None

    def _end_capture(self) -> None:
        span, self.capture = self.capture, None
        if span is None or not span.counts:
            return
        self.seen += 1
        _add(self.held, span.held_seconds)
        if span.pure and span.iterations:
            self.captures_seen += 1
            self.captures.append(span)
            keep_last(self.captures, LEAST, [one.cost_seconds for one in self.captures])


class Measurements:
    """The last samples of each kind."""

    def __init__(self) -> None:
        self._free: deque[Iteration] = deque(maxlen=KEPT)
        self._any: deque[Iteration] = deque(maxlen=RECENT)  # usable or not
        self.recent: deque[float] = deque(maxlen=RECENT)  # seconds of usable iterations, free or not
        self.free_seen = 0
        #: The median of free iterations, and their standard deviation; None: there are too few of them.
        self.baseline: tuple[float, float] | None = None
        self.checkpoints = Checkpoints()

    @property
    def standing_seconds(self) -> float:
        """For which training waits in an iteration without a checkpoint, also where such are not usable."""
        free = list(self._free)  # reports are made on other threads
        held = [one.held_seconds for one in (free if len(free) >= LEAST else list(self._any)) if one.is_free]
        return median(held) if len(held) >= LEAST else 0.0

    @property
    def last_free(self) -> int:
        """The boundary at the end of the last free iteration."""
        return self._free[-1].number if self._free else 0

    @property
    def persist_seconds(self) -> float | None:
        """How long a persist lasts."""
        seconds = list(self.checkpoints.persist_seconds)
        return median(seconds) if seconds else None

    def add(self, iteration: Iteration) -> bool:
        """An iteration has ended; returns whether training itself takes another time now.

        Then what was measured of checkpoints was held against another training's time.
        """
        if iteration.seconds > 0:
            self._any.append(iteration)
        if not iteration.is_usable:
            return False
        self.recent.append(iteration.seconds)
        if not iteration.is_free:
            return False
        self.free_seen += 1
        self._free.append(iteration)
        shifted = keep_last(self._free, SHIFT, [one.own_seconds for one in self._free])
        if shifted:
            self.checkpoints.captures.clear()
            self.checkpoints.persists.clear()
            self.checkpoints.capture = self.checkpoints.persist = None
        if len(self._free) >= LEAST:
            self.baseline = median_and_spread(one.own_seconds for one in self._free)
        return shifted

    def guess(self) -> Costs | None:
        """What little is known where no iteration can be held against another: how long training surely waited."""
        own = median(one.seconds - one.held_seconds for one in self._any) if self._any else 0.0
        held, standing = list(self.checkpoints.held), self.standing_seconds
        if own <= 0:
            return None
        return Costs(own + standing, median(held) if held else 0.0, self.persist_seconds or 0.0, 0.0, standing)

    def estimate(self, known: Costs | None, doubt: float = 0.0) -> Costs | None:
        """What checkpoints cost: medians, and ``doubt`` standard errors.

        Args:
            known: what costs are where there are too few samples; without it one sample is believed, and none is 0.

        Returns:
            None: there are no free iterations to hold the others against.
        """
        if self.baseline is None:
            return known
        least, zero = (1, Costs(0.0, 0.0, 0.0, 0.0)) if known is None else (LEAST, known)
        (free_seconds, spread), free = self.baseline, len(self._free)
        captures, persists = list(self.checkpoints.captures), list(self.checkpoints.persists)
        held, lasting = list(self.checkpoints.held), list(self.checkpoints.persist_seconds)

        def cost(spans: Sequence[Span], capture_seconds: float, doubt: float) -> float:
            values = [span.cost_seconds - span.captures * capture_seconds for span in spans]
            middle, own = median_and_spread(values)
            long = median(span.iterations for span in spans)
            own = max(own, spread * math.sqrt(long))
            return max(0.0, middle + doubt * math.hypot(own * error_of(len(values)), long * spread * error_of(free)))

        def capture_cost(doubt: float) -> float:
            capture = cost(captures, 0.0, doubt) if len(captures) >= least else zero.capture_seconds
            if len(persists) >= least and (begun := median(span.captures for span in persists)) >= 1:
                # Where storage takes every capture none is undisturbed; but one costs no more than it and its persist.
                capture = min(capture, cost(persists, 0.0, doubt) / begun)
            return max(capture, median(held)) if len(held) >= least else capture

        interference, persist = zero.interference_seconds, zero.persist_seconds
        if len(persists) >= least:  # what doubt adds to a capture is not taken from what its persist adds
            interference = cost(persists, capture_cost(0.0), doubt)
        if len(lasting) >= least:
            middle, own = median_and_spread(lasting)
            persist = max(0.0, middle + doubt * own * error_of(len(lasting)))
        return Costs(free_seconds, capture_cost(doubt), persist, interference, self.standing_seconds)


def keep_last(samples: deque[Any], count: int, values: Sequence[float]) -> bool:
    """Forget all samples but the last ``count`` if these differ from the others by more than chance."""
    old, new = values[:-count], values[-count:]
    if len(old) < count:
        return False
    usual, spread = median_and_spread(old)
    if abs(median(new) - usual) <= max(SHIFT_ERRORS * spread * error_of(count), SHIFT_SHARE * abs(usual)):
        return False
    while len(samples) > count:
        samples.popleft()
    return True


def _add(samples: deque[float], value: float) -> None:
    samples.append(value)
    keep_last(samples, LEAST, list(samples))


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
    """The standard error of a median of so many samples, in standard deviations of one as they estimate it.

    Of normal noise it is sqrt(pi / 2 n); few samples show little of their own spread, so that they count for less.
    """
    return math.sqrt(math.pi / 2 / count) * (1 + LEAST / count)
