"""Looks at checkpoints without a job: what a directory holds, whether it is whole, how two checkpoints differ.

Nothing is changed or renamed here.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from checkflow.core.errors import CheckflowError, ReportError, StorageError
from checkflow.core.reports import run_report
from checkflow.runtime.format import codec
from checkflow.runtime.format.manifest import MANIFEST, MAX_STEP, owner_of
from checkflow.runtime.memory_tier.orphans import left_step
from checkflow.runtime.store import retention
from checkflow.runtime.store.cleanup import BROKEN, SUPERSEDED, is_leftover
from checkflow.runtime.store.discovery import find
from checkflow.runtime.store.files import glance, parse_step, step_name
from checkflow.runtime.store.lock import locked_since
from checkflow.runtime.store.reader import Checkpoint, open_checkpoint
from checkflow.runtime.store.retention import Known, Rules, best, known, read_metrics, rules_of, write_metrics
from checkflow.runtime.system import fs
from checkflow.runtime.system.mounts import mount_of

if TYPE_CHECKING:
    import torch

Kind = Literal["checkpoint", "broken", "superseded", "leftover"]
_LONGEST = 60  # of a value in a message
_CLOCK_SECONDS = 2.0  # tolerance between a file system's clock and the host's


@dataclass(frozen=True, slots=True)
class Listed:
    """One entry of a checkpoint directory.

    Attributes:
        kind: "broken": set aside by a restore; "superseded": by going back; "leftover": half written or half deleted.
        fault: why it cannot be restored, judged by names, sizes and manifest; None: nothing found.
        metrics: by name; NaN and infinite ones as text.
        best: whether it is the best of all, by the newest run's metric.
        ranks: that wrote it together; None: not known.
        stays: why retention keeps it on this mount, beside its rules; None: it does not.
        owner: its user, if neither root nor the caller: no job resumes from it unless ``trust`` allows it.
    """

    path: Path
    kind: Kind
    step: int | None
    size_bytes: int
    created_unix_seconds: float | None
    epoch: int | None
    epoch_end: bool
    tensors: int | None
    run_id: str | None
    fault: str | None
    metrics: Mapping[str, float | str] = field(default_factory=dict)
    best: bool = False
    owner: str | None = None
    ranks: int | None = None
    stays: str | None = None


@dataclass(frozen=True, slots=True)
class Verified:
    """The outcome for one checkpoint; ``fault``: the first damage found."""

    path: Path
    step: int | None
    size_bytes: int
    fault: str | None


@dataclass(frozen=True, slots=True)
class Changed:
    """A tensor that differs between two checkpoints.

    Attributes:
        first, second: dtype and shape; None: it is missing.
        elements, differing: the number of all, and of those with other bytes; None if type or shape differ.
        largest: the largest change of a value; None if no finite values changed.
    """

    name: str
    first: str | None
    second: str | None
    elements: int | None = None
    differing: int | None = None
    largest: float | None = None


@dataclass(frozen=True, slots=True)
class Differences:
    """Between two checkpoints. ``extra``: (path, first value, second value) of everything but tensors."""

    first: Path
    second: Path
    compared: int
    tensors: tuple[Changed, ...]
    extra: tuple[tuple[str, str, str], ...]


def list_directory(directory: str | os.PathLike[str]) -> tuple[Listed, ...]:
    """All entries of a checkpoint directory, checkpoints first, newest first; or the one that :func:`choose` takes."""
    root = Path(directory)
    if (one := _one_meant(root)) is not None:
        return (_look_at(one, "checkpoint", is_best=one == _best_of(one.parent)),)
    first = _best_of(root)
    checkpoints = [_look_at(path, "checkpoint", is_best=path == first) for path in find(root)]
    checkpoints = [one for one in checkpoints if not one.fault or os.path.exists(one.path)]  # else retention deleted it
    checkpoints = _with_reasons(root, checkpoints)
    others: list[Listed] = []
    for name in sorted(fs.folder_names(str(root))):
        kind = _kind_of(name)
        if kind is not None:
            others.append(_look_at(root / name, kind))
    return (*checkpoints, *others)


def _with_reasons(root: Path, checkpoints: list[Listed]) -> list[Listed]:
    """Say of each checkpoint that stays since its mount stores late, why."""
    mount = mount_of(root)
    if mount is None or not mount.late:
        return checkpoints
    whole = [
        Known(one.step, committed_seconds=retention.commit_time(one.path))
        for one in checkpoints
        if one.step is not None and not one.fault
    ]
    settled, growing = retention.settling(whole, retention.SETTLE_SECONDS)
    age = f"{retention.SETTLE_SECONDS:.0f} s older than the newest"
    reasons: dict[int | None, str] = {}
    if growing is not None:
        reasons[growing.step] = f"{mount.kind} stores late, and this is the next to be {age}"
    if settled is not None:
        reasons[settled.step] = f"{mount.kind} stores late, and no newer one is {age}"
    return [dataclasses.replace(one, stays=reasons.get(one.step)) for one in checkpoints]


def home_of(reference: str | os.PathLike[str]) -> Path:
    """The directory of checkpoints that is meant, or that holds the one that is meant."""
    one = _one_meant(Path(reference))
    return Path(reference) if one is None else one.parent


def _one_meant(path: Path) -> Path | None:
    """The single checkpoint that is meant; None: a directory of checkpoints."""
    return choose(path) if _is_checkpoint(path) or ("@" in path.name and not os.path.exists(path)) else None


def _kind_of(name: str) -> Kind | None:
    if name.startswith(BROKEN):
        return "broken"
    if name.startswith(SUPERSEDED):
        return "superseded"
    return "leftover" if is_leftover(name) else None


def _best_of(root: Path) -> Path | None:
    """The best checkpoint by the newest run's metric; None: there is no metric, or no ranked checkpoint."""
    rules: Rules | None = None
    complete: dict[int, tuple[Path, Known]] = {}
    for path in find(root):
        try:
            info = glance(path).info
        except CheckflowError:
            continue
        step = parse_step(path.name) or 0
        complete[step] = path, known(step, info)
        if len(complete) == 1 and (rules := rules_of(info)) is None:
            return None
    ranked = best(rules, (one for _, one in complete.values())) if rules is not None else ()
    return complete[ranked[0]][0] if ranked else None


def _look_at(path: Path, kind: Kind, *, is_best: bool = False) -> Listed:
    return dataclasses.replace(_read_one(path, kind, is_best), owner=_other_owner(path))


def _other_owner(path: Path) -> str | None:
    try:
        uid = os.stat(path, follow_symlinks=False).st_uid
    except OSError:  # deleted by retention meanwhile
        return None
    return None if uid in (0, os.geteuid()) else fs.user_name(uid)


def _read_one(path: Path, kind: Kind, is_best: bool) -> Listed:
    try:
        manifest = glance(path)
    except CheckflowError as error:
        fault = str(error).removeprefix(f"{path}/").removeprefix(f"{path} ")
        return Listed(path, kind, parse_step(path.name), size_of(path), None, None, False, None, None, fault)
    created, epoch = manifest.info.get("created"), manifest.info.get("epoch")
    return Listed(
        path, kind, manifest.step, size_of(path),
        float(created) if isinstance(created, int | float) else None,
        epoch if isinstance(epoch, int) else None,
        manifest.info.get("epoch_end") is True, len(manifest.tensors), manifest.run_id, None,
        write_metrics(read_metrics(manifest.info)), is_best, ranks=manifest.world_size,
    )  # fmt: skip


def size_of(path: Path) -> int:
    """The bytes of all files in a directory; files that vanish meanwhile count as nothing."""
    total = 0
    try:
        with os.scandir(path) as entries:
            for entry in entries:
                try:
                    total += entry.stat(follow_symlinks=False).st_size
                except OSError:  # deleted by retention meanwhile
                    continue
    except OSError:
        return 0
    return total


def choose(reference: str | os.PathLike[str]) -> Path:
    """The checkpoint that is meant: its own path, a directory of checkpoints (the newest), ``DIRECTORY@STEP``, or
    ``DIRECTORY@best``, by the newest run's metric. Raises StorageError if there is none.
    """
    path = Path(reference)
    if not os.path.exists(path):
        folder, at, step = str(reference).rpartition("@")
        if at and step == "best":
            if (found_best := _best_of(Path(folder))) is None:
                raise StorageError(
                    f"{folder} holds no best checkpoint: none has the metric that its job monitors; "
                    f"checkflow ls {folder} lists them"
                )
            return found_best
        if not at or not step.isdecimal() or len(step) > len(str(MAX_STEP)):
            raise StorageError(f"there is no {path}")
        path = Path(folder) / step_name(int(step))
        if not os.path.isdir(path):
            if left_step(folder) == int(step):
                raise StorageError(
                    f"step {int(step)} of {folder} lies in this machine's memory, where its job left it: the next run "
                    "there saves it"
                )
            raise StorageError(
                f"{folder} holds no checkpoint of step {int(step)}: checkflow ls {folder} lists those that it has"
            )
        return path
    if _is_checkpoint(path):
        return path
    if not (found := find(path)):
        raise StorageError(f"{path} holds no checkpoint")
    return found[0]


def choose_all(reference: str | os.PathLike[str]) -> tuple[Path, ...]:
    """:func:`choose`, but for a directory all its checkpoints, newest first."""
    path = Path(reference)
    if os.path.exists(path) and not _is_checkpoint(path):
        if not (found := find(path)):
            raise StorageError(f"{path} holds no checkpoint")
        return found
    return (choose(reference),)


def _is_checkpoint(path: Path) -> bool:
    return os.path.exists(path / MANIFEST) or parse_step(path.name) is not None


def verify(path: Path, progress: Callable[[int], None] = lambda size_bytes: None) -> Verified:
    """Compare every byte of a checkpoint with its checksum. ``progress`` gets sizes of parts, on any thread."""
    try:
        with open_checkpoint(path) as checkpoint:
            checkpoint.verify(progress)
            return Verified(path, checkpoint.step, size_of(path), None)
    except CheckflowError as error:
        return Verified(path, parse_step(path.name), size_of(path), str(error))


def compare(first: Path, second: Path, progress: Callable[[str], None] = lambda name: None) -> Differences:
    """How two checkpoints differ: tensors by bytes and values, and everything else. Two tensors are in memory at a
    time.
    """
    with open_checkpoint(first) as one, open_checkpoint(second) as other:
        ours, theirs = _names(one), _names(other)
        changed = []
        for name in sorted(ours.keys() | theirs.keys()):
            progress(name)
            difference = _compare_tensor(name, one, other, ours.get(name), theirs.get(name))
            if difference is not None:
                changed.append(dataclasses.replace(difference, name=_with_rank(name)))
        extra = tuple(_unlike_extras(_extras(one), _extras(other)))
    return Differences(first, second, len(ours.keys() | theirs.keys()), tuple(changed), extra)


def _extras(checkpoint: Checkpoint) -> list[dict[str, Any]]:
    """All that is no tensor, by its path, for each rank; empty where a rank has nothing to itself."""
    found = [checkpoint.extra_bytes, *map(checkpoint.rank_extra_bytes, range(1, checkpoint.manifest.world_size))]
    return [{} if extra is None else dict(_leaves(codec.decode(extra))) for extra in found]


def _unlike_extras(ours: Sequence[dict[str, Any]], theirs: Sequence[dict[str, Any]]) -> Iterator[tuple[str, str, str]]:
    """What differs on rank 0, then what further ranks that both have do not share with it."""
    if len(ours) != len(theirs):
        yield "ranks", str(len(ours)), str(len(theirs))
    yield from _unlike(ours[0], theirs[0])
    for rank, both in enumerate(zip(ours[1:], theirs[1:], strict=False), 1):
        firsts = zip(both, (ours[0], theirs[0]), strict=True)
        own = {path for one, of_rank_0 in firsts for path, *_ in _unlike(one, of_rank_0)}
        for path, here, there in _unlike(*both):
            if path in own:
                yield f"rank {rank}: {path}", here, there


def _with_rank(name: str) -> str:
    rank, plain = owner_of(name)
    return name if rank is None else f"{plain} of rank {rank}"


def _names(checkpoint: Checkpoint) -> dict[str, str]:
    """Every tensor's name, further names and those of ranks' own tensors included, to its kind."""
    kinds = {name: f"{entry.dtype}{list(entry.shape)}" for name, entry in checkpoint.manifest.tensors.items()}
    return kinds | {name: kinds[of] for name, of in checkpoint.ties}


def _compare_tensor(
    name: str, one: Checkpoint, other: Checkpoint, ours: str | None, theirs: str | None
) -> Changed | None:
    if ours is None or theirs is None or ours != theirs:
        return Changed(name, ours, theirs)
    here, there = _read(one, name), _read(other, name)
    if here == there:
        return None
    first, second = (_as_tensor(one, name, data) for data in (here, there))
    width = len(here) // first.numel()
    differing = (_rows(here, width) != _rows(there, width)).any(1).sum()
    return Changed(name, ours, theirs, first.numel(), int(differing), _largest_change(first, second))


def _read(checkpoint: Checkpoint, name: str) -> bytearray:
    data = bytearray(checkpoint.size_bytes(name))
    checkpoint.read_into(name, memoryview(data))
    return data


def _as_tensor(checkpoint: Checkpoint, name: str, data: bytearray) -> torch.Tensor:
    import torch

    entry = checkpoint.manifest.tensors[dict(checkpoint.ties).get(name, name)]
    return torch.frombuffer(data, dtype=torch.uint8).view(getattr(torch, entry.dtype))


def _rows(data: bytearray, width: int) -> Any:
    import numpy as np

    return np.frombuffer(data, np.uint8).reshape(-1, width)


def _largest_change(first: torch.Tensor, second: torch.Tensor) -> float | None:
    """Of values that are finite in both."""
    import torch

    wide = torch.complex128 if first.is_complex() else torch.float64
    try:
        change = (first.to(wide) - second.to(wide)).abs()
    except (RuntimeError, NotImplementedError):  # packed types that torch cannot convert to numbers
        return None
    change = change[change.isfinite()]
    return float(change.max()) if change.numel() else None


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Everything in nested mappings and sequences, by its path."""
    if isinstance(value, Mapping):
        inner: Sequence[tuple[str, Any]] = [(f".{key}" if path else str(key), one) for key, one in value.items()]
    elif isinstance(value, list | tuple):
        inner = [(f"[{number}]", one) for number, one in enumerate(value)]
    else:
        yield path, value
        return
    if not inner:
        yield path, value
    for step, one in inner:
        yield from _leaves(one, path + step)


def _unlike(first: Mapping[str, Any], second: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    for path in dict.fromkeys((*first, *second)):
        if path not in first or path not in second:
            here, there = (_in_words(one[path]) if path in one else "-" for one in (first, second))
            yield path, here, there
        elif codec.encode(first[path]) != codec.encode(second[path]):
            yield path, _in_words(first[path]), _in_words(second[path])


def _in_words(value: Any) -> str:
    if isinstance(value, bytes):
        return f"{len(value)} bytes"
    if hasattr(value, "dtype") and hasattr(value, "shape") and math.prod(value.shape) > 1:
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    text = " ".join(repr(value).split())
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


@dataclass(frozen=True, slots=True)
class Running:
    """A running job, as of its newest report. ``memory_step``: the newest whole checkpoint in host memory."""

    run_id: str
    memory_step: int | None
    written_unix_seconds: float


def running_job(directory: str | os.PathLike[str]) -> Running | None:
    """The job that holds the directory's lock; None: there is none, or it has not reported yet."""
    root = Path(directory)
    since = locked_since(root)
    if since is None:
        return None
    try:
        runs = run_report.load(root / run_report.FILE)
    except ReportError:  # not written yet, or damaged
        return None
    newest = runs[-1] if runs else None
    if newest is None or newest.closed or newest.started_unix_seconds < since - _CLOCK_SECONDS:
        return None  # the report is an earlier run's
    return Running(newest.run_id, newest.lag.captured_step, newest.written_unix_seconds)
