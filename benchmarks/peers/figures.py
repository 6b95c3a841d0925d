"""What blocks say: the figures of one round, and over all rounds the bars that checkflow is to reach."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.peers.block import Block
from benchmarks.peers.peers import OURS, RAW
from checkflow.planner.measure.timing import Spread, spread_of

Figures = Mapping[str, Any]  # of one peer: a list of one value a round for each name, or why there are none


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that this share of all does not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def figures_of(block: Block) -> dict[str, float]:
    """The figures of one block. Shares of raw are rates, turn by turn; the mean counts the wait at the end, too."""
    plain, with_it = block.plain_seconds, block.seconds
    device_memory_bytes = block.device_memory_bytes
    on_gpu = {} if device_memory_bytes is None else {"device_memory_share": device_memory_bytes / block.state_bytes}
    return {
        "iteration_seconds": statistics.median(plain),
        "inflation_mean": (sum(with_it) + block.tail_seconds) / len(with_it) / statistics.mean(plain) - 1,
        "inflation_error": _error(block),
        "inflation_median": statistics.median(with_it) / statistics.median(plain) - 1,
        "inflation_p99": percentile(with_it, 0.99) / percentile(plain, 0.99) - 1,
        "hold_seconds": block.held_seconds / block.begun,
        "durable_seconds": statistics.median(block.durable_seconds),
        "made_share": len(block.durable_seconds) / block.asked,
        "durable_share": _share(block.raw_write_seconds, block.write_seconds),
        "restore_share": _share(block.raw_read_seconds, block.restore_seconds),
        "memory_share": block.memory_bytes / block.state_bytes,
        "raw_write_bytes_per_second": block.state_bytes / statistics.median(block.raw_write_seconds),
        "raw_read_bytes_per_second": block.state_bytes / statistics.median(block.raw_read_seconds),
        **on_gpu,
    }


def _error(block: Block) -> float:
    """The standard error of the mean's inflation, from how much the turns of each kind differ among themselves."""
    every = len(block.seconds) // block.asked
    plain, with_it = (
        [sum(seconds[first : first + every]) for first in range(0, len(seconds), every)]
        for seconds in (block.plain_seconds, block.seconds)
    )
    return math.sqrt((statistics.variance(plain) + statistics.variance(with_it)) / block.asked) / statistics.mean(plain)


def _share(raw_seconds: Sequence[float], seconds: Sequence[float]) -> float:
    return statistics.median(raw / ours for raw, ours in zip(raw_seconds, seconds, strict=True))


def by_name(rounds: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    """Of each figure, its values in all rounds."""
    return {name: [one[name] for one in rounds] for name in rounds[0]}


def spread(figures: Figures, name: str) -> Spread:
    return spread_of(figures[name])


@dataclass(frozen=True)
class Bar:
    """What checkflow is to reach on two cores, by the median of all rounds."""

    figure: str
    what: str
    limit: float
    at_most: bool

    def reached(self, value: float) -> bool:
        return value <= self.limit if self.at_most else value >= self.limit


BARS = (
    Bar("inflation_mean", "inflation of the mean iteration", 0.02, at_most=True),
    Bar("durable_share", "durable write, of raw", 0.90, at_most=False),
    Bar("restore_share", "restore, of raw", 0.85, at_most=False),
    Bar("made_share", "checkpoints made, of those asked for", 1.0, at_most=False),
)


def missed(content: Mapping[str, Any]) -> list[str]:
    """A line for each bar that checkflow misses."""
    lines = []
    for state, found in content["states"].items():
        ours = found["peers"].get(OURS)
        if ours is None:
            continue
        if "failed" in ours:
            lines.append(f"{state} GB: checkflow failed: {ours['failed']}")
            continue
        raw = found["peers"].get(RAW, {})
        for bar in BARS:
            value = spread(ours, bar.figure).median
            if not bar.reached(value):
                limit = f"at {'most' if bar.at_most else 'least'} {bar.limit:.0%}"
                beside = f"; that of {RAW} is {spread(raw, bar.figure).median:.1%}" if bar.figure in raw else ""
                lines.append(f"{state} GB: {bar.what} is {value:.1%}, and was to be {limit}{beside}")
    ours = content["kills"].get("peers", {}).get(OURS)
    if ours is not None and (ours.get("failed") or ours["lost"]):
        lines.append(f"kills: {ours.get('failed') or str(ours['lost']) + ' lost the state'}")
    return lines
