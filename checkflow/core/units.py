"""Sizes, times and rates as text: what users write, parsed, and what they read, formatted."""

from __future__ import annotations

import math
import re

from checkflow.core.errors import CheckflowError

MOST_BYTES = 2**63  # sizes stay below: files and memory count no further
_SIZE = re.compile(r"^\s*([0-9]+(?:\.[0-9]+)?(?:[eE][0-9]+)?)\s*([kKMGTP]?)(i?)B?\s*$")
_PREFIX = {"": 0, "k": 1, "K": 1, "M": 2, "G": 3, "T": 4, "P": 5}
_TIME = re.compile(r"^\s*([0-9]+(?:\.[0-9]+)?(?:[eE][0-9]+)?)\s*(ms|s|min|h|d)\s*$", re.ASCII)
_SECONDS = {"ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


def parse_size(text: str) -> int:
    """Bytes of "24GB", "8MiB", "512", "1.5 GiB": B, kB, MB … count in thousands, KiB, MiB … in 1024s.

    Raises:
        CheckflowError: the text is no size, or more than any memory has (2**63 bytes).
    """
    match = _SIZE.match(text)
    if not match:
        raise CheckflowError(f"not a size: {text!r} (write it like 24GB or 8MiB)")
    number, prefix, binary = match.groups()
    scale: int = (1024 if binary else 1000) ** _PREFIX[prefix]
    size_bytes = float(number) * scale
    if not size_bytes < MOST_BYTES:
        raise CheckflowError(f"{text!r} is more than any memory or link has")
    return round(size_bytes)


def parse_bandwidth(text: str) -> float:
    """Bytes per second of "63GB/s" (the "/s" may be left out).

    Raises:
        CheckflowError: the text is no bandwidth, it is zero, or it is more than any link has.
    """
    size = text.strip().removesuffix("/s")
    if not _SIZE.match(size):
        raise CheckflowError(f"not a bandwidth: {text!r} (write it like 63GB/s)")
    value = float(parse_size(size))
    if value <= 0:
        raise CheckflowError("a bandwidth must be more than zero")
    return value


def parse_seconds(text: str) -> float:
    """Seconds of "30s", "10min", "4h", "1.5 d", "250ms".

    Raises:
        CheckflowError: the text is no time, or no more than none.
    """
    match = _TIME.match(text)
    if not match:
        raise CheckflowError(f"not a time: {text!r} (write it like 30s, 10min or 4h)")
    number, unit = match.groups()
    seconds = float(number) * _SECONDS[unit]
    if not 0 < seconds < math.inf:
        raise CheckflowError(f"{text!r} is no duration: it must be more than zero, and finite")
    return seconds


def round_up(number: int) -> int:
    """To the next number of three digits and zeros: where a size is needed, what people are shown is enough."""
    step: int = 10 ** max(0, len(str(number)) - 3)
    return -(-number // step) * step


def format_size(size_bytes: float) -> str:
    """A size for people: "1.23 GB", in thousands, three digits."""
    value, units = float(size_bytes), ["B", "kB", "MB", "GB", "TB", "PB"]
    while abs(value) >= 999.5 and len(units) > 1:
        value /= 1000
        units.pop(0)
    digits = 0 if units[0] == "B" else max(0, 3 - len(str(int(abs(value)))))
    return f"{value:.{digits}f} {units[0]}"


def format_rate(bytes_per_second: float) -> str:
    """A bandwidth for people."""
    return f"{format_size(bytes_per_second)}/s"


def format_flops(flops_per_second: float) -> str:
    """A rate of operations for people: "1.23 TFLOP/s", three digits."""
    return format_size(flops_per_second).removesuffix("B") + "FLOP/s"


def format_seconds(seconds: float) -> str:
    """A duration for people: "1.23 ms", three digits."""
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if abs(seconds) >= scale * 0.9995 or unit == "µs":
            value = seconds / scale
            return f"{value:.{max(0, 3 - len(str(int(abs(value)))))}f} {unit}"
    raise AssertionError("unreachable")


def format_time(seconds: float) -> str:
    """A time that may be long, for people: "2.5 h", "10 min", as in :func:`parse_seconds`; three digits."""
    for unit in ("d", "h", "min"):
        if seconds >= _SECONDS[unit] * 0.9995:
            value = seconds / _SECONDS[unit]
            return f"{value:,.0f} {unit}" if value >= 999.5 else f"{value:.3g} {unit}"
    return format_seconds(seconds)


def format_stall(seconds: float) -> str:
    """A stall for people."""
    return format_seconds(seconds) if seconds else "none"


def added(peak_bytes: int, training_bytes: int) -> str:
    """What a way of making checkpoints adds to training's peak, for people."""
    more = peak_bytes - training_bytes
    return f"+{format_size(more)} ({100 * more / training_bytes:.3g} %)" if training_bytes and more else "nothing added"


def iterations(interval: int) -> str:
    """The words after "every"."""
    return "iteration" if interval == 1 else f"{interval} iterations"
