"""Text charts of the link and the memory over one iteration."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_EIGHTHS = " ▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class TimelineProfile:
    """What happens in each step of a timeline; all sequences have one entry per step."""

    durations_seconds: Sequence[float]
    capacities_bytes: Sequence[int]  # what the link can take
    sent_bytes: Sequence[int]  # what the plan sends
    live_bytes: Sequence[int]  # training itself
    snapshot_bytes: Sequence[int]  # copies that the plan keeps, on top of it

    @property
    def seconds(self) -> float:
        return sum(self.durations_seconds)

    @property
    def peak_step(self) -> int:
        """The first step in which memory is highest."""
        totals = [live + kept for live, kept in zip(self.live_bytes, self.snapshot_bytes, strict=True)]
        return max(range(len(totals)), key=totals.__getitem__)


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a chart: the used share of the link, and the highest memory."""

    link_share: float
    live_bytes: int
    total_bytes: int


def columns(profile: TimelineProfile, width: int) -> list[Column]:
    """Cut an iteration into ``width`` equal spans of time; a step without duration counts in the span it falls into."""
    total = profile.seconds or 1.0
    sent, capacity = [0.0] * width, [0.0] * width
    live, high = [0] * width, [0] * width
    for step, first, shares in _spans(profile.durations_seconds, total, width):
        for column, share in enumerate(shares, first):
            if share == 0.0:  # the step ends where this column begins
                continue
            sent[column] += profile.sent_bytes[step] * share
            capacity[column] += profile.capacities_bytes[step] * share
            live[column] = max(live[column], profile.live_bytes[step])
            high[column] = max(high[column], profile.live_bytes[step] + profile.snapshot_bytes[step])
    return [Column(min(1.0, sent[i] / capacity[i]) if capacity[i] else 0.0, live[i], high[i]) for i in range(width)]


def _spans(durations_seconds: Sequence[float], total: float, width: int) -> Iterator[tuple[int, int, list[float]]]:
    """Yield each step's index, its first column, and its share in that column and the following ones."""
    begin = 0.0
    for step, duration in enumerate(durations_seconds):
        left, right = begin / total * width, (begin + duration) / total * width
        first, last = min(width - 1, int(left)), min(width - 1, int(right))
        if first == last or right <= left:
            yield step, first, [1.0]
        else:
            edges = [left, *range(first + 1, last + 1), right]
            lengths = [max(0.0, b - a) for a, b in itertools.pairwise(edges)]
            yield step, first, [length / (right - left) for length in lengths]
        begin += duration


def bars(shares: Sequence[float], height: int) -> list[str]:
    """Draw vertical bars, top row first; a share of 1 is ``height`` rows. Anything above zero is visible."""
    rows = []
    for row in reversed(range(height)):
        line = ""
        for share in shares:
            least = 1.0 if row == 0 and share > 0 else 0.0
            line += _EIGHTHS[round(min(8.0, max(least, share * height * 8 - row * 8)))]
        rows.append(line)
    return rows
