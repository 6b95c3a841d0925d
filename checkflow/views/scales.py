"""Units for the axes of charts: a name, and what one of it is in bytes or seconds."""

from __future__ import annotations

import math


def bytes_scale(most_bytes: float) -> tuple[str, float]:
    """As in texts, in thousands."""
    for name, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if most_bytes >= size:
            return name, size
    return "B", 1.0


def seconds_scale(most_seconds: float) -> tuple[str, float]:
    for name, seconds in (("h", 3600.0), ("min", 60.0), ("s", 1.0), ("ms", 1e-3)):
        if most_seconds >= seconds * (3 if seconds >= 60 else 1):
            return name, seconds
    return "µs", 1e-6


def log_ticks(least: float, most: float) -> list[float]:
    """1, 2, 5, 10 … around a positive range; of a wide one only powers of ten."""
    first, last = math.floor(math.log10(least)), math.ceil(math.log10(most))
    steps = (1, 2, 5) if last - first <= 3 else (1,)
    return [step * 10.0**power for power in range(first, last + 1) for step in steps]
