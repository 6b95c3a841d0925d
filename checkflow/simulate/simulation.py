"""A long training run with failures, under each way of making checkpoints (:mod:`.strategies`).

A failure ends the job, which starts anew, and goes on from the newest checkpoint that storage had. Time goes to
training, to training again, to checkpoints and to starts; all ways meet the same failures. A run ends in the middle of
training: what its last life has trained counts, durable or not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from checkflow.core.errors import PlanError
from checkflow.core.units import format_time

if TYPE_CHECKING:
    from numpy.typing import NDArray

LEAST_SHAPE, MOST_SHAPE = 0.3, 10.0
MOST_RUNS = 100_000
MOST_FAILURES = 100_000  # of one run, in the mean: they come one after the other
MOST_IN_ALL = 2_000_000


@dataclass(frozen=True, slots=True)
class Way:
    """A way of making checkpoints, as far as failures are concerned.

    Raises:
        PlanError: a number makes no sense.
    """

    name: str
    interval: int  # iterations from one checkpoint on storage to the next
    capture_interval: int  # those in between end with the process: they cost as much, and a failure takes them along
    stall_seconds: float  # by which one capture lengthens training
    durable_seconds: float  # from a checkpoint's boundary until storage has all of it

    def __post_init__(self) -> None:
        if not 1 <= self.capture_interval <= self.interval or self.interval % self.capture_interval:
            raise PlanError(
                f"{self.name}: a capture every {self.capture_interval} iterations, of {self.interval} for a checkpoint"
            )
        for seconds in (self.stall_seconds, self.durable_seconds):
            if not 0 <= seconds < math.inf:
                raise PlanError(f"{self.name}: a checkpoint that takes {seconds} s")


@dataclass(frozen=True, slots=True)
class Failures:
    """When failures come, and what one costs whatever was saved.

    Raises:
        PlanError: a number makes no sense.
    """

    mtbf_seconds: float  # mean time between failures
    restart_seconds: float  # from a failure until training goes on
    shape: float = 1.0  # of the Weibull distribution; 1: exponential, below 1: one failure is soon followed by another

    def __post_init__(self) -> None:
        if not 0 < self.mtbf_seconds < math.inf:
            raise PlanError(
                f"the mean time between failures must be more than zero, and finite, not {self.mtbf_seconds} s"
            )
        if not 0 <= self.restart_seconds < math.inf:
            raise PlanError(f"a restart must take a finite time of at least zero, not {self.restart_seconds} s")
        if not LEAST_SHAPE <= self.shape <= MOST_SHAPE:
            raise PlanError(
                f"the shape of the times between failures must be from {LEAST_SHAPE} to {MOST_SHAPE}, not {self.shape}"
            )

    @property
    def scale_seconds(self) -> float:
        """Of the Weibull distribution that has this mean."""
        return self.mtbf_seconds / math.gamma(1 + 1 / self.shape)


@dataclass(frozen=True, slots=True)
class RunSpread:
    """How a figure lies over the runs: its mean, and what one run in twenty is below, and above."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Result:
    """Where the time of the runs went: shares of all of it, which add up to one."""

    way: Way
    useful: RunSpread  # training that counts
    again: float  # training that was lost, and done again
    stalls: float
    starts: float
    lost_seconds: float  # of training, at a failure, in the mean; 0 where nothing failed
    most_lost_seconds: float  # 99 failures of 100 lose no more


@dataclass(frozen=True, slots=True)
class Simulation:
    """What was simulated, and what came of it."""

    iteration_seconds: float
    failures: Failures
    duration_seconds: float  # of one run, all that it does included
    runs: int
    seed: int
    failures_a_run: float
    results: tuple[Result, ...]


def check_size(mtbf_seconds: float, duration_seconds: float, runs: int) -> None:
    """Refuse what would take too long.

    Raises:
        PlanError: more runs, or failures, than can be simulated soon; or none.
    """
    if not 0 < duration_seconds < math.inf or not 1 <= runs <= MOST_RUNS:
        raise PlanError(
            f"cannot simulate {runs} runs of {duration_seconds} s: choose from 1 to {MOST_RUNS:,} runs, above 0 s"
        )
    expected = duration_seconds / mtbf_seconds
    if expected > MOST_FAILURES:
        raise PlanError(
            f"in {format_time(duration_seconds)} some {expected:.3g} failures come, more than the {MOST_FAILURES:,} "
            "that can be simulated soon: ask for a shorter --duration"
        )
    if expected * runs > MOST_IN_ALL:
        raise PlanError(
            f"in {runs:,} runs some {expected * runs:.3g} failures come, more than the {MOST_IN_ALL:,} that can be "
            "simulated soon: ask for fewer --runs, or for a shorter --duration"
        )


def simulate_failures(
    ways: Sequence[Way],
    iteration_seconds: float,
    failures: Failures,
    duration_seconds: float,
    *,
    runs: int,
    seed: int,
    progress: Callable[[float], None] = lambda share: None,
) -> Simulation:
    """Many runs of a job, each as long as the others and with its own failures, under each way of making checkpoints.

    Args:
        iteration_seconds: of training without checkpoints.
        duration_seconds: of a run, from its first start; the job is not done by then.
        runs: how many.
        seed: of the failures' times.
        progress: called with the share of the time that is simulated.

    Raises:
        PlanError: an iteration takes no time; or as :func:`check_size`.
    """
    if not 0 < iteration_seconds < math.inf:
        raise PlanError(f"an iteration takes {iteration_seconds} s: there is nothing to simulate")
    check_size(failures.mtbf_seconds, duration_seconds, runs)
    interval, every, stall, durable = (
        np.array([[float(part)] for part in parts]).reshape(-1, 1)
        for parts in (
            [way.capture_interval * iteration_seconds for way in ways],
            [way.interval // way.capture_interval for way in ways],
            [way.stall_seconds for way in ways],
            [way.durable_seconds for way in ways],
        )
    )
    useful, again, held, starting = (np.zeros((len(ways), runs)) for _ in range(4))
    random, going, left = np.random.default_rng(seed), np.arange(runs), np.full(runs, float(duration_seconds))
    lost: list[NDArray[np.float64]] = []
    start_seconds, count = 0.0, 0  # the first start is no failure's
    while going.size:
        drawn = failures.scale_seconds * random.weibull(failures.shape, going.size)
        lived, failed = np.minimum(drawn, left), drawn < left
        up = np.maximum(0.0, lived - start_seconds)
        trained = _trained(up, interval, stall)
        kept = np.where(failed, _durable(up, interval, every, stall, durable), trained)
        useful[:, going] += kept
        again[:, going] += trained - kept
        held[:, going] += up - trained
        starting[:, going] += lived - up
        lost.append((trained - kept)[:, failed])
        count += int(failed.sum())
        going, left = going[failed], (left - lived)[failed]
        progress(1 - float(left.sum()) / (runs * duration_seconds))
        start_seconds = failures.restart_seconds
    losses = np.concatenate(lost, axis=1)
    return Simulation(
        iteration_seconds=iteration_seconds,
        failures=failures,
        duration_seconds=duration_seconds,
        runs=runs,
        seed=seed,
        failures_a_run=count / runs,
        results=tuple(
            Result(
                way=way,
                useful=_spread(useful[n] / duration_seconds),
                again=float(again[n].mean()) / duration_seconds,
                stalls=float(held[n].mean()) / duration_seconds,
                starts=float(starting[n].mean()) / duration_seconds,
                lost_seconds=float(losses[n].mean()) if count else 0.0,
                most_lost_seconds=float(np.percentile(losses[n], 99)) if count else 0.0,
            )
            for n, way in enumerate(ways)
        ),
    )


def _trained(
    up_seconds: NDArray[np.float64], interval_seconds: NDArray[np.float64], stall_seconds: NDArray[np.float64]
) -> NDArray[np.float64]:
    """How much of the time since a start was training: an interval, then a capture's stall, and so on."""
    cycle = interval_seconds + stall_seconds
    whole = np.floor(up_seconds / cycle)
    return whole * interval_seconds + np.minimum(up_seconds - whole * cycle, interval_seconds)


def _durable(
    up_seconds: NDArray[np.float64],
    interval_seconds: NDArray[np.float64],
    every: NDArray[np.float64],
    stall_seconds: NDArray[np.float64],
    durable_seconds: NDArray[np.float64],
) -> NDArray[np.float64]:
    """How much of that training storage has, which takes one of so many captures: each boundary before its stall."""
    cycle = every * (interval_seconds + stall_seconds)
    count = np.floor((up_seconds + stall_seconds - durable_seconds) / cycle)
    return np.maximum(0.0, count) * every * interval_seconds


def _spread(shares: NDArray[np.float64]) -> RunSpread:
    low, high = np.percentile(shares, [5, 95])
    return RunSpread(float(shares.mean()), float(low), float(high))
