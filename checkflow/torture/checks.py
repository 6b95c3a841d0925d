"""What must hold of a checkpoint directory whose job was killed, as far as can be seen from outside: L1 to L6.

docs/how-to/torture.md says what each promise is. Every verdict comes from what lies on the disk, none from a clock, and
nothing is changed or renamed there. Each check returns what is wrong.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from checkflow.core.errors import CorruptCheckpointError, LockedError, ReportError, StorageError
from checkflow.core.reports import run_report
from checkflow.core.reports.run_report import RunReport
from checkflow.runtime.format.manifest import MANIFEST
from checkflow.runtime.store.cleanup import BROKEN, DRAFT, SUPERSEDED, is_leftover
from checkflow.runtime.store.files import REPLACED, parse_step, step_name
from checkflow.runtime.store.lock import claimed, locked_since
from checkflow.runtime.store.reader import open_checkpoint

WRITING = ".tmp-"
MOST_WRITING = 1  # one writer, one checkpoint at a time
LAG_INTERVALS = 3  # the interval under way, the one being gathered, the one that storage lags behind

Promise = Literal["L1", "L2", "L3", "L5", "L6"]
Signature = tuple[tuple[str, int, int, int, int], ...]


@dataclass(frozen=True, slots=True)
class BrokenPromise:
    """A promise that was broken, in one line."""

    promise: Promise
    text: str


@dataclass(frozen=True, slots=True)
class Listing:
    """A look at a directory that a job may be writing to: names alone.

    Attributes:
        published: step of each checkpoint to the inode of its directory; one that is just being exchanged counts.
        writing: whether one is being written.
    """

    published: Mapping[int, int] = field(default_factory=dict)
    writing: bool = False

    def newer_than(self, before: Listing) -> frozenset[int]:
        """The steps that were published since."""
        return frozenset(step for step, inode in self.published.items() if before.published.get(step) != inode)


@dataclass(frozen=True, slots=True)
class Found:
    """What lies in a directory that nobody writes to.

    Attributes:
        restorable: the newest step that is whole, byte for byte; None: there is none.
        damaged: names of checkpoints, and what is wrong with them.
        aside: names that jobs have given to checkpoints which they found damaged, or went back behind.
        leftovers: name, inode and time of change of all that is half done, but for what is being read.
        whole: signatures of checkpoints that were read and found whole, by name.
    """

    restorable: int | None = None
    damaged: tuple[tuple[str, str], ...] = ()
    aside: frozenset[str] = frozenset()
    leftovers: frozenset[tuple[str, int, int]] = frozenset()
    whole: Mapping[str, Signature] = field(default_factory=dict)
    size_bytes: int = 0


def look(directory: Path) -> Listing:
    """Names in a directory; of one that is not there yet, none."""
    published: dict[int, int] = {}
    replaced: dict[int, int] = {}
    writing = False
    with contextlib.suppress(FileNotFoundError), os.scandir(directory) as entries:
        for entry in entries:
            writing = writing or _is_half_written(entry.name)
            if (step := parse_step(entry.name)) is not None:
                published[step] = entry.inode()
            elif (step := parse_step(entry.name.removeprefix(REPLACED))) is not None:
                replaced[step] = entry.inode()
    return Listing({**replaced, **published}, writing)


def _is_half_written(name: str) -> bool:
    """Whether it is the directory of a checkpoint that is not complete yet."""
    return name.startswith(WRITING) and name != DRAFT


def vanished(directory: Path, step: int) -> bool:
    """Whether a checkpoint is gone while its job may be exchanging it for another of the same step."""
    final, replaced = directory / step_name(step), directory / (REPLACED + step_name(step))
    return all(_is_missing(path) for path in (final, replaced, final))


def _is_missing(path: Path) -> bool:
    """Whether there is nothing of this name; a file system that does not answer does not say so."""
    try:
        path.lstat()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return False


def refuse_locked(directory: Path, what: str) -> None:
    """Nobody may write to the directory now.

    Raises:
        LockedError: somebody does.
    """
    if locked_since(directory) is not None:
        raise LockedError(f"{directory} is being written by {what}; stop it first")


def examine(directory: Path, before: Found) -> Found:
    """Read every checkpoint of a directory that nobody writes to; older ones only if they are not what they were.

    Args:
        before: what was found last time.

    Raises:
        StorageError: one cannot be read, which is neither whole nor damaged.
        MismatchError: one has a format that this version does not know.
    """
    try:
        with os.scandir(directory) as entries:
            names = {entry.name: entry.inode() for entry in entries}
    except FileNotFoundError:
        return Found()
    except OSError as error:
        raise StorageError(f"cannot read the checkpoint directory {directory}: {error.strerror}") from error
    restorable, damaged, whole = None, [], {}
    for step, name in sorted(_candidates(names).items(), reverse=True):
        signature = _signature(directory / name)
        known = restorable is not None and before.whole.get(name) == signature
        if not known and (fault := _fault(directory / name)):
            damaged.append((name, fault))
            continue
        whole[name] = signature
        restorable = step if restorable is None else restorable
    aside = frozenset(name for name in names if name.startswith((BROKEN, SUPERSEDED)))
    leftovers = frozenset(
        (name, inode, (directory / name).lstat().st_ctime_ns)
        for name, inode in names.items()
        if is_leftover(name) and not _is_read(directory, name)
    )
    return Found(restorable, tuple(damaged), aside, leftovers, whole, size_bytes(directory))


def _candidates(names: Mapping[str, int]) -> dict[int, str]:
    """What the next run could go on from: it brings back a checkpoint that was killed in the middle of its exchange."""
    found = {step: name for name in names if (step := parse_step(name.removeprefix(REPLACED))) is not None}
    return found | {step: name for name in names if (step := parse_step(name)) is not None}


def _fault(path: Path) -> str | None:
    """What is damaged of a checkpoint; None: it is whole."""
    try:
        with open_checkpoint(path) as checkpoint:
            checkpoint.verify()
    except CorruptCheckpointError as error:
        return str(error).removeprefix(f"{path.absolute()}/")
    return None


def _signature(path: Path) -> Signature:
    """Changes whenever somebody writes to a checkpoint's files."""
    found = []
    with contextlib.suppress(OSError), os.scandir(path) as entries:  # reading it says what is wrong
        for entry in entries:
            status = entry.stat(follow_symlinks=False)
            found.append((entry.name, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns))
    return tuple(sorted(found))


def _is_read(directory: Path, name: str) -> bool:
    """Whether somebody reads a checkpoint: then what is to be deleted stays for now."""
    with contextlib.suppress(OSError):
        root = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            with claimed(name, MANIFEST, dir_fd=root) as unread:
                return not unread
        finally:
            os.close(root)
    return False


def size_bytes(directory: Path) -> int:
    """Of all files below."""
    total = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(folder, name)).st_size
    return total


def read_runs(directory: Path) -> tuple[RunReport, ...]:
    """What the job's last runs say of themselves; nothing, where there is no report that can be read."""
    with contextlib.suppress(ReportError):
        return run_report.load(directory / run_report.FILE)
    return ()


def check_found(acknowledged: int | None, found: Found, excused: Collection[str] = ()) -> list[BrokenPromise]:
    """L1 and L3, after a kill.

    Args:
        excused: names of checkpoints that were damaged before, or nobody knows since when.
    """
    wrong = [BrokenPromise("L3", f"{name} is damaged: {fault}") for name, fault in found.damaged if name not in excused]
    if acknowledged is not None and (found.restorable is None or found.restorable < acknowledged):
        newest = "none can be restored" if found.restorable is None else f"step {found.restorable} is the newest whole"
        wrong.append(
            BrokenPromise("L1", f"the checkpoint of step {acknowledged} was there before the kill, and {newest}")
        )
    return wrong


def check_resumed(before: Found, after: Found, run: RunReport) -> list[BrokenPromise]:
    """L1: a started job goes on from the newest checkpoint that was whole when it started."""
    if before.restorable is None or (run.resumed_from is not None and run.resumed_from >= before.restorable):
        return []
    how = "began anew" if run.resumed_from is None else f"went on from step {run.resumed_from}"
    name = step_name(before.restorable)
    moved = sorted(one for one in after.aside - before.aside if one.startswith((BROKEN + name, SUPERSEDED + name)))
    now = f"; it is called {moved[0]} now" if moved else ""
    return [BrokenPromise("L1", f"the job {how}, though step {before.restorable} was there, whole{now}")]


def abandoned(before: Found, after: Found) -> tuple[str, ...]:
    """The new names of checkpoints that a job left behind by ``resume=`` an older step. They are whole, and
    none of them is lost; the newest first."""
    return tuple(sorted((name for name in after.aside - before.aside if name.startswith(SUPERSEDED)), reverse=True))


def check_replayed(before: RunReport | None, run: RunReport) -> list[BrokenPromise]:
    """L6, where the job asked for exact intervals; otherwise storage takes the newest as fast as it goes.

    On a GPU, whose host runs ahead by as many staging buffers as there are, nothing is held against a bound.

    Args:
        before: the run that was killed, as of its last report.
    """
    replayed = run.replayed_iterations
    if before is None or replayed is None or before.failed or before.device != "cpu":
        return []
    often = before.frequency
    if often.reason != "every" or often.disk_interval is None or often.changes:  # by time, it varies
        return []
    most = LAG_INTERVALS * often.disk_interval
    if replayed <= most:
        return []
    return [BrokenPromise("L6", f"{replayed} iterations at least are done again, and {most} at most may be")]


def check_audits(run: RunReport) -> list[BrokenPromise]:
    """L2, by what the run itself found."""
    if not run.breaches:
        return []
    return [
        BrokenPromise("L2", f"{run.breaches} checkpoints were not the state of their boundary, by the job's own audits")
    ]


def check_leftovers(before: Found, after: Found, *, saved: bool) -> list[BrokenPromise]:
    """L5: half done work does not pile up. What somebody reads stays until it is not read any more.

    Args:
        saved: whether the run between the two has made a checkpoint.
    """
    wrong = []
    writing = sorted(name for name, _, _ in after.leftovers if _is_half_written(name))
    if len(writing) > MOST_WRITING:
        wrong.append(BrokenPromise("L5", f"half-written checkpoints pile up: {', '.join(writing)}"))
    if saved and (stale := sorted(name for name, _, _ in before.leftovers & after.leftovers)):
        text = f"left by an earlier run, and not removed by one that saved after it: {', '.join(stale)}"
        wrong.append(BrokenPromise("L5", text))
    return wrong
