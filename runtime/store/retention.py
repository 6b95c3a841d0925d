"""Which checkpoints stay: a pure function of what their manifests say, so that every start decides the same. On mounts
that store late it also asks when they were written.

docs/how-to/retention.md describes the rules. Only complete checkpoints count; damaged ones are never deleted.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from checkflow.runtime.format.manifest import MANIFEST
from checkflow.runtime.system import fs

Mode = Literal["min", "max"]
MIN_COMPLETE = 2  # so that one damaged checkpoint is no disaster
MAX_NAME = 200  # characters of a metric's name
EPOCH_END, METRICS, MONITOR = "epoch_end", "metrics", "monitor"  # in a manifest's ``info``
#: On a mount that stores late, one checkpoint stays that was committed so long before the newest that the mount has
#: stored it by then. Tests lower it.
SETTLE_SECONDS = 60.0
_UNRANKED = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}  # JSON has no numbers for them


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules of one run. Raises ValueError, in one line, if one is out of its range."""

    keep_latest: int = MIN_COMPLETE
    keep_epochs: bool | int = 1
    keep_every: int | None = None  # steps
    keep_best: int = 0
    monitor: str | None = None
    mode: Mode = "min"

    def __post_init__(self) -> None:
        if not _is_count(self.keep_latest, 0):
            raise ValueError(f"keep_latest must be a whole number of at least {MIN_COMPLETE}, not {self.keep_latest!r}")
        if self.keep_latest < MIN_COMPLETE:
            raise ValueError(f"keep_latest is {self.keep_latest}: at least {MIN_COMPLETE} checkpoints must stay")
        if not isinstance(self.keep_epochs, bool) and not _is_count(self.keep_epochs, 0):
            raise ValueError(f"keep_epochs must be a whole number of epochs, or True for all, not {self.keep_epochs!r}")
        if self.keep_every is not None and not _is_count(self.keep_every, 1):
            raise ValueError(
                f"keep_every must be a whole number of steps, at least 1, or None, not {self.keep_every!r}"
            )
        if not _is_count(self.keep_best, 0):
            raise ValueError(f"keep_best must be a whole number of at least 0, not {self.keep_best!r}")
        if self.mode not in get_args(Mode):
            raise ValueError(f'mode must be "min" or "max", not {self.mode!r}')
        if self.monitor is not None:
            check_name("monitor", self.monitor)
        elif self.keep_best:
            raise ValueError(f"keep_best={self.keep_best} needs monitor, the name of the metric that ranks checkpoints")


@dataclass(frozen=True, slots=True)
class Known:
    """What retention knows of a complete checkpoint. ``committed_seconds``: see :func:`commit_time`."""

    step: int
    epoch_end: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)
    committed_seconds: float = 0.0


def known(step: int, info: Mapping[str, Any], committed_seconds: float = 0.0) -> Known:
    """Read a manifest's ``info``; invalid metrics are skipped."""
    return Known(step, info.get(EPOCH_END) is True, read_metrics(info), committed_seconds)


def kept(rules: Rules, complete: Iterable[Known], newest: int, settle_seconds: float | None = None) -> frozenset[int]:
    """The steps of the checkpoints that stay, of all complete ones.

    ``newest``, just committed or resumed from, counts as one of the newest even if an abandoned run left later ones.
    ``settle_seconds``: on a mount that stores late, what :func:`settling` finds stays, too.
    """
    found = sorted(complete, key=lambda one: one.step, reverse=True)
    stay: set[int] = set()
    for one in found:
        if len(stay) < rules.keep_latest or one.step == newest:
            stay.add(one.step)
    ends = [one.step for one in found if one.epoch_end]
    stay.update(ends if rules.keep_epochs is True else ends[: rules.keep_epochs])
    stay.update(first for first in _firsts(rules, found).values())
    stay.update(best(rules, found)[: rules.keep_best])
    if settle_seconds is not None:
        stay.update(one.step for one in settling(found, settle_seconds) if one is not None)
    return frozenset(stay)


def settling(complete: Iterable[Known], settle_seconds: float) -> tuple[Known | None, Known | None]:
    """On a mount that stores late: the newest checkpoint that is old enough to be stored, and the one that grows to it.

    Each commit deletes what is older, often before the mount has stored what it keeps: then the storage holds nothing.
    Ages count from the newest commit. So the mount's clock alone matters, whoever's it is.
    """
    by_age = sorted(complete, key=lambda one: (one.committed_seconds, one.step))
    if not by_age:
        return None, None
    settled = [one for one in by_age if by_age[-1].committed_seconds - one.committed_seconds >= settle_seconds]
    growing = by_age[len(settled) :]
    return (settled[-1] if settled else None), growing[0] if growing else None


def commit_time(checkpoint: Path) -> float:
    """When a checkpoint was committed, by its file system's clock: the manifest is written last. Now, if it is gone."""
    try:
        return fs.changed_seconds(str(checkpoint / MANIFEST))
    except OSError:
        return time.time()


def best(rules: Rules, complete: Iterable[Known]) -> tuple[int, ...]:
    """The steps of all ranked checkpoints, the best first."""
    if rules.monitor is None:
        return ()
    sign = 1 if rules.mode == "min" else -1
    ranked = [
        (sign * value, one.step)
        for one in complete
        if (value := one.metrics.get(rules.monitor)) is not None and math.isfinite(value)
    ]
    return tuple(step for _, step in sorted(ranked))


def gives_way(rules: Rules, complete: Iterable[Known], waiting: Known, newer: Known) -> bool:
    """Whether a newer capture may replace one that waits for storage: by the same rule, if it would stay for good."""
    found = [one for one in complete if one.step not in (waiting.step, newer.step)]
    if rules.keep_epochs and waiting.epoch_end and not newer.epoch_end:
        return False
    if waiting.step in best(rules, [*found, waiting, newer])[: rules.keep_best]:
        return False
    firsts = set(_firsts(rules, [*found, waiting]).values()), set(_firsts(rules, [*found, newer]).values())
    return waiting.step not in firsts[0] or newer.step in firsts[1]


def _firsts(rules: Rules, complete: Iterable[Known]) -> dict[int, int]:
    """The first checkpoint of each ``keep_every`` steps, by their number from 1."""
    firsts: dict[int, int] = {}
    if rules.keep_every is not None:
        for one in complete:
            number = one.step // rules.keep_every
            if number:
                firsts[number] = min(one.step, firsts.get(number, one.step))
    return firsts


def rules_of(info: Mapping[str, Any]) -> Rules | None:
    """How the run that wrote this manifest ranked checkpoints; None: it did not."""
    found = info.get(MONITOR)
    if not isinstance(found, dict):
        return None
    try:
        return Rules(monitor=found.get("name"), mode=found.get("mode"))  # type: ignore[arg-type]
    except ValueError:
        return None


def write_rules(rules: Rules) -> dict[str, Any]:
    """For a manifest's ``info``, so that tools can name the best checkpoint."""
    return {} if rules.monitor is None else {MONITOR: {"name": rules.monitor, "mode": rules.mode}}


def write_metrics(metrics: Mapping[str, float]) -> dict[str, float | str]:
    """Metrics as JSON values."""
    return {name: value if math.isfinite(value) else str(value) for name, value in sorted(metrics.items())}


def read_metrics(info: Mapping[str, Any]) -> dict[str, float]:
    """Read what :func:`write_metrics` put into a manifest's ``info``."""
    stored = info.get(METRICS)
    found: dict[str, float] = {}
    for name, value in stored.items() if isinstance(stored, dict) else ():
        if isinstance(value, str) and value in _UNRANKED:
            found[name] = _UNRANKED[value]
        elif isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _MOST:
            found[name] = float(value)
    return found


def check_name(what: str, name: object) -> str:
    """Validate a metric's name. Raises ValueError."""
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME or not name.isprintable():
        raise ValueError(f"{what} must be a metric's name, 1 to {MAX_NAME} printable characters, not {name!r:.80}")
    return name


def check_value(name: str, value: object) -> float:
    """Validate a metric's value: a number, or what float() takes (a tensor of one element). Raises ValueError."""
    if not isinstance(value, str | bytes | bytearray | bool):
        try:
            return float(value)  # type: ignore[arg-type]
        except (TypeError, ValueError, OverflowError, RuntimeError):
            pass  # refused below, like the others
    raise ValueError(f"the metric {name!r} must be one real number, not {' '.join(repr(value).split()):.80}")


def _is_count(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


_MOST = 1.7976931348623157e308  # a larger integer is no float
