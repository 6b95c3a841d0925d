"""Device: what a GPU and its link can do.

Numbers are the makers' own; efficiency factors turn them into what training sees.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from checkflow.errors import CheckflowError
from checkflow.graph import STRICT

_SIZE = re.compile(r"^\s*([0-9]+(?:\.[0-9]+)?(?:[eE][0-9]+)?)\s*([kKMGTP]?)(i?)B?\s*$")
_PREFIX = {"": 0, "k": 1, "K": 1, "M": 2, "G": 3, "T": 4, "P": 5}


def parse_size(text: str) -> int:
    """Bytes of "24GB", "8MiB", "512", "1.5 GiB": B, kB, MB … count in thousands, KiB, MiB … in 1024s.

    Raises:
        CheckflowError: the text is no size.
    """
    match = _SIZE.match(text)
    if not match:
        raise CheckflowError(f"not a size: {text!r} (write it like 24GB or 8MiB)")
    number, prefix, binary = match.groups()
    scale: int = (1024 if binary else 1000) ** _PREFIX[prefix]
    return round(float(number) * scale)


def parse_bandwidth(text: str) -> float:
    """Bytes per second of "63GB/s" (the "/s" may be left out).

    Raises:
        CheckflowError: the text is no bandwidth, or it is zero.
    """
    try:
        value = float(parse_size(text.strip().removesuffix("/s")))
    except CheckflowError:
        raise CheckflowError(f"not a bandwidth: {text!r} (write it like 63GB/s)") from None
    if value <= 0:
        raise CheckflowError("a bandwidth must be more than zero")
    return value


def format_size(size_bytes: float) -> str:
    """A size for people: "1.23 GB", in thousands, three digits."""
    value, units = float(size_bytes), ["B", "kB", "MB", "GB", "TB", "PB"]
    while abs(value) >= 999.5 and len(units) > 1:
        value /= 1000
        units.pop(0)
    digits = 0 if units[0] == "B" else max(0, 3 - len(str(int(abs(value)))))
    return f"{value:.{digits}f} {units[0]}"


def format_seconds(seconds: float) -> str:
    """A duration for people: "1.23 ms", three digits."""
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if abs(seconds) >= scale * 0.9995 or unit == "µs":
            value = seconds / scale
            return f"{value:.{max(0, 3 - len(str(int(abs(value)))))}f} {unit}"
    raise AssertionError("unreachable")


@dataclass(frozen=True)
class Device:
    """A device to plan for."""

    __pydantic_config__ = STRICT
    name: str
    memory_bytes: int
    memory_bandwidth_bytes_per_second: float
    link_bandwidth_bytes_per_second: (
        float  # device to host, one way, as measured on such links (not the headline number)
    )
    plain_flops_per_second: Mapping[str, float]  # by dtype, general units
    matrix_flops_per_second: Mapping[str, float]  # by dtype, matrix units ("tensor cores"), dense
    compute_efficiency: float  # share of the peak that large matrix products and convolutions reach
    memory_efficiency: float  # share of the peak that element-wise operators reach
    launch_seconds: float  # the least time between two operators
    source: str  # where the numbers come from
