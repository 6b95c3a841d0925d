"""``checkflow simulate``: a long training run with failures, under each way of making checkpoints.

A failure ends the job. It starts anew, which takes a while, and goes on from the newest checkpoint that storage had;
what was trained since that one's boundary is trained again. So time goes to training, to training again, to
checkpoints, and to starting, and to nothing else. All ways meet the same failures.

Times between failures are drawn from a Weibull distribution; with shape 1, the default, it is the exponential one, of
failures that come at random. (Shapes of 0.7 to 0.8 are what B. Schroeder and G. A. Gibson found in the records of
clusters, "A large-scale study of failures in high-performance computing systems", 2006: one failure is soon followed by
the next.)

How often checkpoints are made is what :mod:`checkflow.runtime.policy` makes of it, as in a live job.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np

from checkflow.errors import PlanError
from checkflow.hardware import MOST_BYTES
from checkflow.planner.compare import compare_plan
from checkflow.planner.replay import simulate as replay_of
from checkflow.planner.replay import snapshot_stall_seconds
from checkflow.runtime.policy import Costs, choose, in_iterations, join, least_waste

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from checkflow.plan import Plan

LEAST_SHAPE, MOST_SHAPE = 0.3, 10.0
MOST_FAILURES = 100_000  # of one run, in the mean: they come one after the other
MOST_IN_ALL = 2_000_000


@dataclass(frozen=True, slots=True)
class Way:
    """A way of making checkpoints, as far as failures are concerned."""

    name: str
    interval: int  # iterations from one checkpoint to the next
    stall_seconds: float  # by which one checkpoint lengthens training
    durable_seconds: float  # from a checkpoint's boundary until storage has all of it


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
            raise PlanError(f"the mean time between failures is more than none, and finite, not {self.mtbf_seconds} s")
        if not 0 <= self.restart_seconds < math.inf:
            raise PlanError(f"a start takes some time, or none, not {self.restart_seconds} s")
        if not LEAST_SHAPE <= self.shape <= MOST_SHAPE:
            raise PlanError(
                f"the shape of the times between failures is from {LEAST_SHAPE} to {MOST_SHAPE}, not {self.shape}"
            )

    @property
    def scale_seconds(self) -> float:
        """Of the Weibull distribution that has this mean."""
        return self.mtbf_seconds / math.gamma(1 + 1 / self.shape)


@dataclass(frozen=True, slots=True)
class Span:
    """How a figure lies over the runs: its mean, and what one run in twenty is below, and above."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Result:
    """Where the time of the runs went: shares of all of it, which add up to one."""

    way: Way
    useful: Span  # training that counts
    again: float  # training that was lost, and done again
    checkpoints: float
    restarts: float
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


def simulate(
    ways: Sequence[Way], iteration_seconds: float, failures: Failures, duration_seconds: float, *, runs: int, seed: int
) -> Simulation:
    """Many runs of a job, each as long as the others and with its own failures, under each way of making checkpoints.

    Args:
        iteration_seconds: of training without checkpoints.
        duration_seconds: of a run, from its first start; the job is not done by then.
        runs: how many, one or more.
        seed: of the failures' times.

    Raises:
        PlanError: an iteration takes no time, there is nothing to simulate, or too much.
    """
    if not 0 < iteration_seconds < math.inf:
        raise PlanError(f"an iteration takes {iteration_seconds} s: there is nothing to simulate")
    if not 0 < duration_seconds < math.inf or runs < 1:
        raise PlanError(f"{runs} runs of {duration_seconds} s are nothing to simulate")
    expected = duration_seconds / failures.mtbf_seconds
    if expected > MOST_FAILURES or expected * runs > MOST_IN_ALL:
        raise PlanError(
            f"{runs} runs with {expected:,.0f} failures each are more than can be simulated soon: at most "
            f"{MOST_FAILURES:,} a run and {MOST_IN_ALL:,} in all; ask for a shorter duration, or for fewer runs"
        )
    interval = np.array([way.interval for way in ways])[:, None] * iteration_seconds
    stall = np.array([way.stall_seconds for way in ways])[:, None]
    durable = np.array([way.durable_seconds for way in ways])[:, None]
    useful, again, held, starting = (np.zeros((len(ways), runs)) for _ in range(4))
    random, left = np.random.default_rng(seed), np.full(runs, float(duration_seconds))
    lost: list[NDArray[np.float64]] = []
    start_seconds, count = 0.0, 0  # the first start is no failure's
    while left.size and (left > 0).any():
        drawn = failures.scale_seconds * random.weibull(failures.shape, runs)
        lived, failed = np.minimum(drawn, left), drawn < left
        up = np.maximum(0.0, lived - start_seconds)
        trained = _trained(up, interval, stall)
        kept = np.where(failed, _durable(up, interval, stall, durable), trained)
        useful += kept
        again += trained - kept
        held += up - trained
        starting += lived - up
        lost.append((trained - kept)[:, failed])
        count += int(failed.sum())
        left -= lived
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
                useful=_span(useful[n] / duration_seconds),
                again=float(again[n].mean()) / duration_seconds,
                checkpoints=float(held[n].mean()) / duration_seconds,
                restarts=float(starting[n].mean()) / duration_seconds,
                lost_seconds=float(losses[n].mean()) if count else 0.0,
                most_lost_seconds=float(np.percentile(losses[n], 99)) if count else 0.0,
            )
            for n, way in enumerate(ways)
        ),
    )


def _trained(
    up_seconds: NDArray[np.float64], interval_seconds: NDArray[np.float64], stall_seconds: NDArray[np.float64]
) -> NDArray[np.float64]:
    """How much of the time since a start was training: an interval, then a checkpoint's stall, and so on."""
    cycle = interval_seconds + stall_seconds
    whole = np.floor(up_seconds / cycle)
    return whole * interval_seconds + np.minimum(up_seconds - whole * cycle, interval_seconds)


def _durable(
    up_seconds: NDArray[np.float64],
    interval_seconds: NDArray[np.float64],
    stall_seconds: NDArray[np.float64],
    durable_seconds: NDArray[np.float64],
) -> NDArray[np.float64]:
    """How much of that training storage has: the j-th checkpoint's boundary comes before its own stall."""
    count = np.floor((up_seconds + stall_seconds - durable_seconds) / (interval_seconds + stall_seconds))
    return np.maximum(0.0, count) * interval_seconds


def _span(shares: NDArray[np.float64]) -> Span:
    low, high = np.percentile(shares, [5, 95])
    return Span(float(shares.mean()), float(low), float(high))


@dataclass(frozen=True, slots=True)
class Storage:
    """What checkpoints are written to, and read from when a job starts again."""

    write_bytes_per_second: float
    read_bytes_per_second: float


def ways_of(
    plan: Plan,
    storage: Storage,
    *,
    mtbf_seconds: float,
    overhead: float,
    memory_bytes: int | None = None,
    every_seconds: Sequence[float] = (),
) -> tuple[Way, ...]:
    """Synchronous checkpoints, CheckFreq's and checkflow's of a plan's training step, each as often as is best for it.

    Synchronous ones stop training until storage has them, and come as often as wastes least (:func:`least_waste`), or
    as the user says. CheckFreq's come as its Algorithm 1 says, with its stalls at their best (:mod:`.baselines`);
    checkflow's as its controller chooses where it is told the time between failures. What writing to storage takes from
    training beside that is not counted, for none of them.

    Args:
        overhead: of training's time, that CheckFreq's and checkflow's checkpoints may take.
        memory_bytes: of the device, for CheckFreq's snapshots; None: enough.
        every_seconds: further rows: synchronous checkpoints so far apart.

    Raises:
        PlanError: an iteration takes no time.
    """
    known = compare_plan("", plan)
    iteration_seconds, state_bytes = known.iteration_seconds, known.state_bytes
    if not iteration_seconds > 0:
        raise PlanError("an iteration of this plan takes no time: there is nothing to simulate")
    write_seconds = state_bytes / storage.write_bytes_per_second
    stop_seconds = known.synchronous_stall_seconds + write_seconds
    best = least_waste(1, iteration_seconds, stop_seconds, mtbf_seconds)
    ways = [
        *(
            Way("synchronous", in_iterations(1, iteration_seconds, seconds), stop_seconds, stop_seconds)
            for seconds in every_seconds
        ),
        Way("synchronous, least waste", best, stop_seconds, stop_seconds),
    ]
    checkfreq = _checkfreq(plan, memory_bytes or MOST_BYTES, write_seconds, overhead)
    finish_seconds = _finish_seconds(plan)
    chosen = choose(
        Costs(iteration_seconds, plan.stall_seconds, write_seconds, 0.0),
        plan.interval,
        overhead,
        mtbf_seconds=mtbf_seconds,
    )
    ways += [] if checkfreq is None else [checkfreq]
    if chosen is not None:
        ways.append(Way("checkflow", chosen.disk, plan.stall_seconds, finish_seconds + write_seconds))
    return tuple(ways)


def _checkfreq(plan: Plan, memory_bytes: int, write_seconds: float, overhead: float) -> Way | None:
    """CheckFreq's Algorithm 1; None where no interval is long enough for this overhead."""
    known = compare_plan("", plan)
    copy_seconds = known.state_bytes / plan.bandwidth_bytes_per_second
    on_gpu_seconds = snapshot_stall_seconds(plan.timeline.state_bytes, plan.memory_bandwidth_bytes_per_second)
    fits = memory_bytes - known.training_peak_bytes > plan.timeline.state_bytes
    on_gpu = fits and on_gpu_seconds <= known.checkfreq_cpu_stall_seconds
    stall_seconds = on_gpu_seconds if on_gpu else known.checkfreq_cpu_stall_seconds
    under_way_seconds = copy_seconds + write_seconds - stall_seconds
    interval = join(1, known.iteration_seconds, under_way_seconds, stall_seconds, overhead)
    if interval is None:
        return None
    copied_seconds = stall_seconds + copy_seconds if on_gpu else max(stall_seconds, copy_seconds)
    durable_seconds = copied_seconds + write_seconds
    return Way(f"CheckFreq, {'GPU' if on_gpu else 'CPU'} snapshot", interval, stall_seconds, durable_seconds)


def _finish_seconds(plan: Plan) -> float:
    """From a checkpoint's boundary until host memory has all of it, its stall included."""
    ends = list(accumulate(step.duration_seconds for step in plan.timeline.steps))
    iterations, step = divmod(replay_of(plan).finish_step, len(ends))
    return iterations * ends[-1] + ends[step] + plan.stall_seconds if plan.chunks else 0.0


def restore_seconds(plan: Plan, storage: Storage) -> float:
    """What a job that starts again takes to read its checkpoint."""
    return sum(spec.size_bytes for spec in plan.fingerprint.state) / storage.read_bytes_per_second
