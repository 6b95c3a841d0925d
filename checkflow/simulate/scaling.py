"""What failures leave of training on small and large clusters, by published rates of failures."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from checkflow.core.errors import PlanError
from checkflow.core.plan import Plan
from checkflow.core.units import format_time
from checkflow.simulate.simulation import MOST_FAILURES, MOST_IN_ALL, Failures, RunSpread, simulate_failures
from checkflow.simulate.strategies import StorageSpeed, dcp_way, restore_seconds, ways_of

# "The Llama 3 Herd of Models" (2024), section 3.3.4: unexpected interruptions of one job.
LLAMA3_FAILURES, LLAMA3_SECONDS, LLAMA3_GPUS = 419, 54 * 86400.0, 16384
GPU_SECONDS_A_FAILURE: Final = LLAMA3_SECONDS * LLAMA3_GPUS / LLAMA3_FAILURES
# "CheckFreq" (FAST 2021), section 1: between failures of a job in Microsoft's Philly cluster, early ones aside.
PHILLY_SECONDS: Final = 45 * 60.0
GPU_COUNTS: Final = tuple(2**power for power in range(15))
MTBF_SECONDS: Final = (900.0, 1800.0, PHILLY_SECONDS, 3600.0, 7200.0, 4 * 3600.0, 8 * 3600.0, 86400.0, 4 * 86400.0)
EPOCH_SECONDS: Final = 3600.0  # where the user names no distance
RUNS: Final = 100


@dataclass(frozen=True, slots=True)
class Point:
    """What is left of the time at one rate of failures."""

    mtbf_seconds: float
    useful: Mapping[str, RunSpread]  # by the way of making checkpoints
    daly: float  # of synchronous checkpoints at Young's interval, by Daly's formula


def daly_share(interval_seconds: float, stop_seconds: float, restart_seconds: float, mtbf_seconds: float) -> float:
    """Return the share of time left for training by J. T. Daly's formula (2006), for failures at random."""
    m = mtbf_seconds
    exponent = (interval_seconds + stop_seconds) / m
    if exponent + restart_seconds / m > 700:  # beyond what a float holds: nothing is left
        return 0.0
    return interval_seconds / (m * math.exp(restart_seconds / m) * math.expm1(exponent))


def check_duration(seconds: float) -> None:
    """Refuse what takes too long at the page's highest rate of failures.

    Raises:
        PlanError: so long a run has more failures than can be simulated soon.
    """
    least = min(*MTBF_SECONDS, GPU_SECONDS_A_FAILURE / max(GPU_COUNTS))
    most = least * min(MOST_FAILURES, MOST_IN_ALL // RUNS)
    if seconds > most:
        raise PlanError(
            f"the page simulates runs with a failure every {format_time(least)}, too: ask for a --duration of at most "
            f"{format_time(most)}, or leave --html out"
        )


def points(
    plan: Plan,
    storage: StorageSpeed,
    mtbfs_seconds: Sequence[float],
    *,
    restart_seconds: float,
    duration_seconds: float,
    shape: float,
    overhead: float,
    memory_limit_bytes: int | None,
    every_seconds: Sequence[float],
    seed: int,
    progress: Callable[[float], None] = lambda share: None,
) -> tuple[Point, ...]:
    """Simulate each rate of failures, each way with the interval that it would choose there.

    Raises:
        PlanError: more failures than can be simulated soon, or an iteration that takes no time.
    """
    iteration_seconds = plan.timeline.iteration_seconds
    restart_seconds += restore_seconds(plan, storage)
    found = []
    for number, mtbf in enumerate(mtbfs_seconds):
        progress(number / len(mtbfs_seconds))
        ways = ways_of(
            plan, storage, mtbf_seconds=mtbf, overhead=overhead, memory_limit_bytes=memory_limit_bytes,
            every_seconds=every_seconds,
        ).ways  # fmt: skip
        ways = (*ways, dcp_way(plan, storage, mtbf_seconds=mtbf))
        simulation = simulate_failures(
            ways, iteration_seconds, Failures(mtbf, restart_seconds, shape), duration_seconds, runs=RUNS, seed=seed
        )
        stop_seconds = next(way.stall_seconds for way in ways if way.name == "synchronous, least waste")
        young = max(iteration_seconds, math.sqrt(2 * stop_seconds * mtbf))
        found.append(
            Point(
                mtbf,
                {result.way.name: result.useful for result in simulation.results},
                daly_share(young, stop_seconds, restart_seconds, mtbf),
            )
        )
    return tuple(found)
