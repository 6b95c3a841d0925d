"""A run over time, in bounded memory: points that stand for more and more of its checkpoints, and histograms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from checkflow.core.graph import STRICT

MOST_POINTS = 48  # of a run


@dataclass(frozen=True, slots=True)
class HistoryPoint:
    """A run as some of its checkpoints ended, committed or failed: the last of them, and the longest lag."""

    __pydantic_config__ = STRICT
    checkpoints: int  # that this point stands for; 0: the start or the end of the run
    unix_seconds: float
    iteration: int
    durable_step: int | None
    memory_interval: int | None
    disk_interval: int | None
    failed: int  # checkpoints so far
    lag_iterations: int  # since the newest durable step, right before the next one took its place
    lag_seconds: float


@dataclass(frozen=True, slots=True)
class HeldIterations:
    """A bin of the waits' histograms: how many iterations were held so long, above the end of the bin before."""

    __pydantic_config__ = STRICT
    most_seconds: float
    snapshot_wait: int
    persist_wait: int


def extended(points: Sequence[HistoryPoint], new: HistoryPoint) -> tuple[HistoryPoint, ...]:
    """Add a point. Of too many, each two neighbours become one; new ones join the last until it stands for as many."""
    enough = max((point.checkpoints for point in points[:-1]), default=1)
    joins = len(points) > 1 and points[-1].checkpoints + new.checkpoints <= enough and new.checkpoints
    found = [*points[:-1], _joined(points[-1], new)] if joins else [*points, new]
    if len(found) > MOST_POINTS:  # the first one is the start
        found = found[:1] + [
            _joined(found[index], found[index + 1]) if index + 1 < len(found) else found[index]
            for index in range(1, len(found), 2)
        ]
    return tuple(found)


def _joined(first: HistoryPoint, last: HistoryPoint) -> HistoryPoint:
    return replace(
        last,
        checkpoints=first.checkpoints + last.checkpoints,
        lag_iterations=max(first.lag_iterations, last.lag_iterations),
        lag_seconds=max(first.lag_seconds, last.lag_seconds),
    )
