"""When the copies of a run's last captures were made, and what training did meanwhile. Pure data, and its file.

All times are seconds since the capture's boundary; negative ones lie before it. docs/reference/files.md describes
every field. pydantic is imported only where a file is read.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from checkflow.core.errors import ReportError, first_fault
from checkflow.core.graph import STRICT, Many
from checkflow.core.small_files import check_density, check_fields, read_object, read_regular

FILE = "captures.json"
KEPT_CAPTURES = 3
MOST_COPIES = 2000  # of one capture; neighbours are merged beyond
VERSION = 1
MAX_BYTES = 1 << 22  # some four times the size of the largest
_MOST_SECONDS = 1e9
_MOST_BYTES = 2**63


@dataclass(frozen=True, slots=True)
class CopyTimes:
    """Chunks that were copied one right after the other."""

    __pydantic_config__ = STRICT
    kind: Literal["snapshot", "offload", "boundary"]
    tensor: str  # of the first chunk; "" at the boundary
    chunks: int
    size_bytes: int
    begun_seconds: float
    seconds: float | None  # None: only when the copy was ordered is known, as on a GPU


@dataclass(frozen=True, slots=True)
class Spell:
    """What training did, or what held it, for a while."""

    __pydantic_config__ = STRICT
    what: str  # "iteration", a phase as in the run's report, or one of its holds
    begun_seconds: float
    seconds: float


@dataclass(frozen=True, slots=True)
class StorageTimes:
    """How storage took a capture; None: it did not come to this."""

    __pydantic_config__ = STRICT
    begun_seconds: float
    audited_seconds: float | None
    written_seconds: float | None
    published_seconds: float | None
    ended_seconds: float


@dataclass(frozen=True, slots=True)
class CaptureTimes:
    """One capture, from its boundary on."""

    __pydantic_config__ = STRICT
    step: int
    begun_unix_seconds: float
    plan_digest: str  # "": everything was copied at the boundary
    arrived_seconds: float
    copies: Many[CopyTimes]
    training: Many[Spell]
    storage: StorageTimes | None


@dataclass(frozen=True, slots=True)
class CaptureFile:
    """The last captures of one run, the newest last."""

    __pydantic_config__ = STRICT
    run_id: str
    model: str
    device: str
    captures: Many[CaptureTimes]
    format: Literal["checkflow-captures"] = "checkflow-captures"
    version: Literal[1] = 1


def merge_copies(copies: Sequence[CopyTimes], most: int = MOST_COPIES) -> tuple[CopyTimes, ...]:
    """Return at most so many copies: neighbours of one kind become one, from the first begin to the last end."""
    size = math.ceil(len(copies) / most)
    if size <= 1:
        return tuple(copies)
    while True:
        merged: list[CopyTimes] = []
        for kind in dict.fromkeys(one.kind for one in copies):
            same = [one for one in copies if one.kind == kind]
            merged += [_merge(same[begin : begin + size]) for begin in range(0, len(same), size)]
        if len(merged) <= most:
            return tuple(sorted(merged, key=lambda one: one.begun_seconds))
        size += 1


def _merge(copies: Sequence[CopyTimes]) -> CopyTimes:
    first = copies[0]
    ends = [one.begun_seconds + one.seconds for one in copies if one.seconds is not None]
    return CopyTimes(
        first.kind,
        first.tensor,
        sum(one.chunks for one in copies),
        sum(one.size_bytes for one in copies),
        first.begun_seconds,
        max(ends) - first.begun_seconds if ends else None,
    )


def dumps(file: CaptureFile) -> bytes:
    return json.dumps(file, default=_fields, allow_nan=False).encode() + b"\n"


def _fields(one: Any) -> dict[str, Any]:  # asdict is slow, and training waits for it
    return {name: getattr(one, name) for name in one.__slots__}


def load(path: str | os.PathLike[str]) -> CaptureFile:
    """Return what a file holds.

    Raises:
        ReportError: the file cannot be read, is damaged, or is of another version; one line with the reason.
    """
    try:
        data = read_regular(path, MAX_BYTES + 1)
    except OSError as error:
        raise ReportError(f"cannot read the times of captures {path}: {error.strerror or error}") from error
    return loads(data, str(path))


def loads(data: bytes, name: str) -> CaptureFile:
    """Return a file's content, as :func:`load`; ``name`` is for messages."""
    from pydantic import TypeAdapter, ValidationError

    what = f"{name} holds no times of captures"
    if len(data) > MAX_BYTES:
        raise ReportError(f"{what}: it has more than {MAX_BYTES} bytes")
    try:
        check_density(data)
        plain = json.loads(data, object_pairs_hook=read_object)
        version = plain.get("version") if isinstance(plain, dict) else None
        if isinstance(version, int) and version != VERSION:
            raise ReportError(f"{name} is of version {version}; this checkflow reads version {VERSION}")
        check_fields(plain, CaptureFile)
        del plain  # a hostile file may be large
        found: CaptureFile = TypeAdapter(CaptureFile).validate_json(data)
    except ValidationError as error:
        raise ReportError(f"{what}: {first_fault(error)}") from None
    except (ValueError, RecursionError) as error:
        raise ReportError(f"{what}: {' '.join(str(error).split()) or type(error).__name__}") from None
    if len(found.captures) > KEPT_CAPTURES:
        raise ReportError(f"{what}: it has more than {KEPT_CAPTURES} captures")
    for index, capture in enumerate(found.captures):
        if problem := _contradiction(capture):
            raise ReportError(f"{what}: captures.{index}: {problem}")
    return found


def _contradiction(capture: CaptureTimes) -> str | None:
    """Return what no capture can have."""
    if len(capture.copies) > MOST_COPIES:
        return f"more than {MOST_COPIES} copies"
    spans: list[tuple[float, float | None]] = [(one.begun_seconds, one.seconds) for one in capture.copies]
    spans += [(one.begun_seconds, one.seconds) for one in capture.training]
    lasting = [seconds for _, seconds in spans if seconds is not None]
    storage = capture.storage
    moments = [begun for begun, _ in spans] + [capture.arrived_seconds]
    if storage is not None:
        moments += [one for one in dataclasses.astuple(storage) if one is not None]
    if any(abs(one) > _MOST_SECONDS for one in (*lasting, *moments)) or min(lasting, default=0.0) < 0:
        return "a time that none has"
    if any(one.chunks < 0 or not 0 <= one.size_bytes < _MOST_BYTES for one in capture.copies):
        return "a copy of a size that none has"
    if not 0 <= capture.begun_unix_seconds < 1e11 or not 0 <= capture.step <= 10**18:
        return "a step, or a date, that none has"
    return None
