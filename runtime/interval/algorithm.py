"""How often checkpoints are made: arithmetic over measured times, and nothing else.

CheckFreq's Algorithm 1 (section 4.3.2) as it is written, with the parenthesis that its first line lacks, and what
checkflow adds to it. :mod:`.controller` decides when an interval is changed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

BETWEEN = 0.25  # of the overhead, for captures that storage does not take
LEAST_LEFT = 0.5  # of the overhead, for checkpoints, whatever is spent in every iteration
_MOST_UNITS = 1e15  # more than any job has
_SLACK = 1e-9  # relative: a quotient that is whole but for rounding is whole


@dataclass(frozen=True, slots=True)
class Asked:
    """What the user wants: how often at least, or what it may cost."""

    overhead: float = 0.035  # of training's time, for checkpoints of every kind
    every: int | None = None  # iterations
    every_seconds: float | None = None
    mtbf_seconds: float | None = None  # mean time between failures


@dataclass(frozen=True, slots=True)
class Choice:
    """What CheckFreq's Algorithm 1 answers."""

    interval: int | None  # k, iterations; None: checkpoints stall, and no interval is long enough for p = 0
    mode: Literal["GPU", "CPU"]  # where the snapshot is made
    stall_seconds: float  # To, of one checkpoint


def algorithm_1(
    *,
    iteration_seconds: float,
    copy_seconds: float,
    write_seconds: float,
    cpu_stall_seconds: float,
    gpu_stall_seconds: float,
    fits: bool,
    overhead: float,
) -> Choice:
    """CheckFreq's Algorithm 1, "Checkpointing frequency determination".

    The mode is GPU iff the device has room and Tog <= Toc. Then k = max(ceil((Tc + Ts - To) / Ti), ceil(To / (p Ti))),
    and 1 where both are less.

    Args:
        iteration_seconds: Ti.
        copy_seconds: Tc, of a snapshot into host memory.
        write_seconds: Ts, from host memory to storage.
        cpu_stall_seconds: Toc, what a snapshot into host memory has left at the weight update: max(0, Tc - (Ti - Tw)).
        gpu_stall_seconds: Tog = Tg, of a snapshot inside device memory.
        fits: whether the device has room for it: Mmax - M > m.
        overhead: p, the share of training's time that checkpoints may take.
    """
    on_gpu = fits and gpu_stall_seconds <= cpu_stall_seconds
    stall_seconds = gpu_stall_seconds if on_gpu else cpu_stall_seconds
    interval = join(1, iteration_seconds, copy_seconds + write_seconds - stall_seconds, stall_seconds, overhead)
    return Choice(interval, "GPU" if on_gpu else "CPU", stall_seconds)


def join(
    unit: int, iteration_seconds: float, persist_seconds: float, stall_seconds: float, overhead: float
) -> int | None:
    """The least multiple of ``unit`` that is at least max(T_persist / Ti, stall / (p Ti)): Algorithm 1, with a plan.

    One checkpoint at a time is on its way to storage (section 4.2), and what one costs training is spread over the
    interval.

    Args:
        unit: iterations from one checkpoint to the next as planned.
        stall_seconds: what one checkpoint costs training, captured and persisted.

    Returns:
        None: a checkpoint costs something, and it may cost nothing.
    """
    if stall_seconds > 0 and overhead <= 0:
        return None
    by_overhead = stall_seconds / (overhead * iteration_seconds) if stall_seconds > 0 else 0.0
    return least_multiple(unit, max(persist_seconds / iteration_seconds, by_overhead))


def least_multiple(unit: int, iterations: float) -> int:
    """The least multiple of ``unit``, itself or more, that is at least so many."""
    return unit * max(1, math.ceil(iterations / unit * (1 - _SLACK)))


@dataclass(frozen=True, slots=True)
class Costs:
    """What a job measures of itself, in seconds."""

    iteration_seconds: float  # with no checkpoint under way
    capture_seconds: float  # by which one capture lengthens training, whatever of it is a wait or shared bandwidth
    persist_seconds: float  # that storage takes for one checkpoint
    interference_seconds: float  # by which one persist lengthens training
    standing_seconds: float = 0.0  # of each iteration, a checkpoint under way or not: hooks, looks at state and plan

    @property
    def training_seconds(self) -> float:
        """Of one iteration, what would be left without any of this; half of it at least, whatever was measured."""
        return max(self.iteration_seconds - self.standing_seconds, self.iteration_seconds / 2)

    def share(self, memory: int, disk: int) -> float:
        """Of training's own time, what checkpoints at these intervals add."""
        return (self.added_seconds(memory, disk) + self.standing_seconds) / self.training_seconds

    def added_seconds(self, memory: int, disk: int) -> float:
        """By checkpoints at these intervals, to each iteration."""
        return self.capture_seconds / memory + self.interference_seconds / disk

    def allowed_seconds(self, overhead: float) -> float:
        """Of each iteration, what checkpoints may take where ``overhead`` is the share of training that may be added.

        What every iteration pays is taken from that, up to half of it (``LEAST_LEFT``): no interval makes it less.
        """
        allowed_seconds = overhead * self.training_seconds
        return max(LEAST_LEFT * allowed_seconds, allowed_seconds - self.standing_seconds)

    def times(self, factor: float) -> Costs:
        """The same, if all that checkpoints take were so many times as long."""
        return Costs(
            self.iteration_seconds,
            self.capture_seconds * factor,
            self.persist_seconds * factor,
            self.interference_seconds * factor,
            self.standing_seconds,
        )


@dataclass(frozen=True, slots=True)
class Intervals:
    """Iterations from one checkpoint to the next."""

    memory: int  # captured in host memory: a multiple of the plan's interval
    disk: int  # written to storage: a multiple of ``memory``
    reason: str  # what keeps ``disk`` from being shorter: "plan", "persist", "overhead" or "mtbf"


def choose(
    costs: Costs, unit: int, overhead: float, *, mtbf_seconds: float | None = None, tiers: bool = True
) -> Intervals | None:
    """The shortest intervals at which checkpoints cost no more than ``overhead`` of training's time leaves them
    (:meth:`Costs.allowed_seconds`).

    Storage comes first, since it is what survives: :func:`join`, over what a capture and its persist cost together, or
    the interval that wastes least, if that is longer. Captures in between take what of ``overhead`` that leaves, or a
    quarter (``BETWEEN``), for which storage then waits a little longer; where it would have to wait for longer than a
    third more, every capture is written.

    Args:
        unit: the plan's interval.
        mtbf_seconds: mean time between failures, if the user knows one.
        tiers: whether a capture may be made that storage does not take.

    Returns:
        None: as :func:`join`.
    """
    seconds, capture, interference = costs.iteration_seconds, costs.capture_seconds, costs.interference_seconds
    allowed_seconds = costs.allowed_seconds(overhead)
    disk = join(unit, seconds, costs.persist_seconds, capture + interference, allowed_seconds / seconds)
    if disk is None:
        return None
    reason = "plan"
    if disk > unit:
        reason = "persist" if least_multiple(unit, costs.persist_seconds / seconds) == disk else "overhead"
    if mtbf_seconds is not None and (best := least_waste(unit, seconds, capture + interference, mtbf_seconds)) > disk:
        disk, reason = best, "mtbf"
    if tiers and capture > 0:
        memory = least_multiple(unit, capture / max(allowed_seconds - interference / disk, BETWEEN * allowed_seconds))
        left_seconds = allowed_seconds - capture / memory  # rounding may leave nothing: then every capture is written
        by_overhead = 0.0 if interference <= 0 else interference / left_seconds if left_seconds > 0 else math.inf
        later = least_multiple(memory, max(disk, by_overhead)) if by_overhead * (1 - BETWEEN) <= disk else None
        if later is not None and later * (1 - BETWEEN) <= disk:
            return Intervals(memory, later, "overhead" if later >= disk + unit and reason != "mtbf" else reason)
        return Intervals(disk, disk, reason)
    return Intervals(unit if tiers else disk, disk, reason)


def least_waste(unit: int, iteration_seconds: float, stall_seconds: float, mtbf_seconds: float) -> int:
    """The multiple k of ``unit`` at which failures and checkpoints together waste least.

    With failures at random, M seconds apart in the mean, and c seconds for a checkpoint, a job needs
    M e^(R/M) (e^((w + c)/M) - 1) / w seconds for each second of training, w = k Ti of which lie between two checkpoints
    (J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", 2006; the root for
    c << M is J. W. Young's sqrt(2 c M), 1974). R is all that a failure costs whatever the interval: the restart, and
    the iterations between a checkpoint's boundary and the moment at which storage has it, since one in flight is lost
    with the job. So the replay of half an interval is what k decides, and R drops out.
    """
    least = unit * iteration_seconds
    m, c = mtbf_seconds, max(0.0, stall_seconds)

    def slope(w: float) -> float:  # of the waste, with the sign of w / M - 1 + e^(-(w + c) / M): rising in w
        return w / m + math.expm1(-(w + c) / m)

    low, high = 0.0, m
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (low, middle) if slope(middle) > 0 else (middle, high)
    below = unit * max(1, math.floor(low / least))

    def waste(k: int) -> float:  # its logarithm: of hopeless jobs it is no number
        w = k * iteration_seconds
        return (w + c) / m + math.log(-math.expm1(-(w + c) / m)) - math.log(w)

    return min(below, below + unit, key=waste)


def in_iterations(unit: int, iteration_seconds: float, seconds: float) -> int:
    """The multiple of ``unit``, itself or more, that comes nearest to so many seconds of training."""
    return unit * max(1, round(min(seconds / (unit * iteration_seconds), _MOST_UNITS)))


def is_time(since_seconds: float, late_seconds: float, every_seconds: float, interval_seconds: float) -> bool:
    """Whether this boundary is the nearest to the moment at which a checkpoint is asked for, as far as is known.

    Args:
        since_seconds: since the last one began.
        late_seconds: by which that was later than asked; earlier: negative.
        interval_seconds: from this boundary to the next at which one could be made.
    """
    return since_seconds + late_seconds >= every_seconds - min(interval_seconds, every_seconds) / 2


def late_after(since_seconds: float, late_seconds: float, every_seconds: float) -> float:
    """By which a checkpoint that begins now is later than asked, as far as the next one is to make up for it: by half
    of what was asked at most, so that no long pause is followed by many."""
    return max(-every_seconds / 2, min(every_seconds / 2, since_seconds + late_seconds - every_seconds))
