"""Puts on storage what a dead run had in host memory, as a version like others, before all restore.

Each rank finds what lies on its machine, whichever rank left it. Rank 0 chooses versions of which all parts are found;
ranks write the parts that they see, and rank 0 commits. What one process has left is a version of one part.
docs/explanation/memory-tier.md and ranks.md have the rules. Memory is freed only after the job was restored.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from pydantic import JsonValue, TypeAdapter, ValidationError

from checkflow.core.errors import CheckflowError, CorruptCheckpointError, MismatchError, StorageError, UnsupportedError
from checkflow.core.graph import STRICT, Many
from checkflow.runtime.format import manifest
from checkflow.runtime.memory_tier import recovery
from checkflow.runtime.memory_tier.orphans import mark_names, may_be_here, words_of
from checkflow.runtime.memory_tier.records import MARK, RunLife, remove
from checkflow.runtime.memory_tier.recovery import Found
from checkflow.runtime.persist.rank_commit import receipt_of, write_into, write_staged
from checkflow.runtime.ranks.council import RECLAIM_SECONDS, Council
from checkflow.runtime.ranks.receipts import LEAST_WAIT_SECONDS
from checkflow.runtime.ranks.records import Attempt, Receipt, StartReport, name_ranks
from checkflow.runtime.store.file_writer import write_file
from checkflow.runtime.store.files import parse_step
from checkflow.runtime.store.parts import Gathered, Written, commit_ranks
from checkflow.runtime.store.shared import SharedStore
from checkflow.runtime.store.store import Store, reported
from checkflow.runtime.system import fs

logger = logging.getLogger("checkflow")


@dataclass(frozen=True, slots=True)
class PartInMemory:
    """This record tells rank 0 of a dead rank's part of a version; ``void``: as :attr:`.recovery.Found.void`."""

    __pydantic_config__ = STRICT
    life: RunLife
    step: int
    plan_digest: str
    info: dict[str, JsonValue] = field(default_factory=dict)
    void: bool = False


@dataclass(frozen=True)
class _Version:
    """A version holds all parts of a step of a dead run, by rank."""

    life: RunLife
    step: int
    parts: Mapping[int, PartInMemory]

    @property
    def void(self) -> bool:
        return any(part.void for part in self.parts.values())


_PARTS: TypeAdapter[tuple[PartInMemory, ...]] = TypeAdapter(Many[PartInMemory])
_WRITTEN: TypeAdapter[tuple[Written, ...]] = TypeAdapter(Many[Written])


@dataclass(frozen=True)
class LeftMemory:
    """This record has what dead ranks of a directory have left on this machine."""

    directory: Path
    rank: int  # that has looked
    marks: tuple[str, ...] = ()
    folders: tuple[Path, ...] = ()
    found: tuple[Found, ...] = ()

    def report(self) -> str:
        """Return the found parts for :class:`.ranks.records.StartReport`."""
        there = ((one.life, one.record, one.void) for one in self.found)
        kept = tuple(PartInMemory(life, one.step, one.plan_digest, one.info, void) for life, one, void in there)
        return _PARTS.dump_json(kept).decode() if kept else ""

    def assist(self, council: Council, store: SharedStore, attempt: Attempt, dead_run_id: str) -> None:
        """Another rank than 0: write what lies here of an attempt's version, and say so."""
        mine = self.parts_of(dead_run_id, attempt.step)

        def write(folder: int) -> tuple[Written, ...]:
            return _write_parts(folder, mine, _claim(store, attempt))

        try:
            with reported(f"cannot write what lies in host memory of step {attempt.step} to {store.directory}"):
                written = write_into(council, store, attempt, LEAST_WAIT_SECONDS, write) if mine else ()
        except CheckflowError as error:
            council.post_receipt(receipt_of(council, attempt, failure=" ".join(str(error).split())))
        else:
            council.post_receipt(receipt_of(council, attempt, written=_WRITTEN.dump_json(written).decode()))

    def parts_of(self, dead_run_id: str, step: int) -> list[Found]:
        """Return the parts of a version that lie here, the part of this rank's number first."""
        mine = [one for one in self.found if (one.life.run_id, one.record.step) == (dead_run_id, step)]
        return sorted(mine, key=lambda one: one.life.rank != self.rank)

    def give_back(self) -> None:
        """Free the memory, since the job has been restored. Rank 0 removes the marks, those of lost machines, too."""
        for mark in () if self.rank else self.marks:
            with contextlib.suppress(OSError):
                os.unlink(self.directory / mark)
        for path in self.folders:
            remove(path)


def look(directory: Path, rank: int, *, locked: bool) -> LeftMemory:
    """Find what lies on this machine, and free what nobody can resume from.

    Args:
        directory: of the checkpoints; it may be missing.
        locked: whether this process holds its lock.

    Raises:
        LockedError: another process uses such memory.
        StorageError: it cannot be read now.
    """
    try:
        marks = mark_names(directory)
    except FileNotFoundError:
        marks = ()
    except OSError as error:
        raise StorageError(f"cannot read the checkpoint directory {directory}: {error.strerror}") from error
    here = [mark for mark in marks if may_be_here(mark)]
    folders = {path: mark for mark in here if (path := recovery.folder_of(directory, mark)) is not None}
    recovery.tidy(folders, directory if locked else None)
    found: list[Found] = []
    for path, mark in folders.items():
        whose = "the run before" if mark == MARK else "a rank of the run before"
        try:
            found += recovery.captures_in(path)
        except CorruptCheckpointError as error:
            logger.warning("what %s had in host memory is passed over: %s", whose, error)
        except OSError as error:
            raise _unreadable(path, error, whose) from error
    return LeftMemory(directory, rank, marks, tuple(folders), tuple(found))


def _unreadable(path: Path, error: OSError, whose: str = "the run before") -> StorageError:
    return StorageError(
        f"what {whose} had in host memory cannot be read now: {error.strerror}; try again, or delete {path} to give it "
        "up"
    )


def _write_parts(folder: int, parts: Sequence[Found], claim: str) -> tuple[Written, ...]:
    """Write the parts that no other rank of this machine has claimed."""
    written = (_write_part(folder, one, claim) for one in parts)
    return tuple(one for one in written if one is not None)


def _write_part(folder: int, one: Found, claim: str) -> Written | None:
    """Write a part; None: another rank of this machine writes it, or it is damaged."""
    with fs.folder(str(one.path)) as kept:
        try:
            fs.close(fs.open_new(claim, dir_fd=kept, mode=0o600))
        except FileExistsError:
            return None
    try:
        sources, layout, extra, memory = recovery.load(one)
    except (CorruptCheckpointError, UnsupportedError, ValidationError) as error:
        logger.warning(
            "step %d of rank %d in host memory is passed over: %s", one.record.step, one.life.rank, words_of(error)
        )
        return None
    written = write_staged(
        folder, one.life.rank, one.life.ranks, layout, memoryview(memory), sources, extra,
        ties=one.record.ties, absent=one.record.absent,
    )  # fmt: skip
    if one.life.rank:
        return written
    entry = write_file(folder, manifest.EXTRA, iter([memoryview(extra)]))
    return replace(written, files={**written.files, manifest.EXTRA: entry})


def reclaim_alone(store: Store, mode: str | int, council: Council) -> tuple[int | None, Callable[[], None]]:
    """One process: :func:`reclaim` what the run before had in this machine's memory, however many ranks it had.

    Returns the newest step of that, and what frees the memory once the job is restored. Raises as :func:`look`, too.
    """
    left = look(store.directory, 0, locked=True)
    steps = reclaim(store, mode, left, {0: StartReport(kept=left.report())}, council)
    return max(steps, default=None), left.give_back


# -------------------------------------------------------------------------------------------------------------- rank 0


def reclaim(
    store: Store, mode: str | int, left: LeftMemory, reports: Mapping[int, StartReport], council: Council
) -> frozenset[int]:
    """Put the newest version that lies in host memory on storage, older ones that retention would keep, and that of
    step ``mode``; returns their steps.

    Args:
        reports: of all ranks.

    Raises:
        StorageError: that fails, or ``mode`` is "never"; memory stays as it is.
    """
    there = [one for one in _versions(store, reports) if _is_of_storage(store, one)]
    for one in (one for one in _newer(store, mode, there) if one.void):
        logger.warning("step %d in host memory is passed over: %s", one.step, recovery.VOID)
    versions = _newer(store, mode, [one for one in there if not one.void])
    if not versions:
        return frozenset()
    if mode != "never":
        council.reclaim(store.run_id, versions[0].life.run_id)
        recovery.delete_old(store)
    stay = recovery.worth_keeping(store, [(one.step, one.parts[0].info) for one in versions])
    done: set[int] = set()
    for one in sorted(versions, key=lambda one: one.step != mode):
        if one.step != mode and one.step not in stay and any(step > one.step for step in done):
            continue
        needed = one.step == mode if isinstance(mode, int) else not done
        try:
            if _commit(store, mode, left, one, council, needed=needed):
                done.add(one.step)
        except (CorruptCheckpointError, MismatchError, UnsupportedError, ValidationError) as error:
            logger.warning("step %d in host memory is passed over: %s", one.step, words_of(error))
    return frozenset(done)


def _versions(store: Store, reports: Mapping[int, StartReport]) -> list[_Version]:
    """Return the steps of which all ranks' parts are there, and which storage does not have, newest first."""
    stored = {parse_step(path.name) for path in store.checkpoints()}
    found: dict[tuple[str, int, int], dict[int, PartInMemory]] = {}
    for rank, report in sorted(reports.items()):
        try:
            kept = _PARTS.validate_json(report.kept) if report.kept else ()
        except ValidationError as error:
            raise StorageError(f"the report of rank {rank} is damaged: {words_of(error)}") from None
        for part in kept:
            found.setdefault((part.life.run_id, part.life.ranks, part.step), {})[part.life.rank] = part
    whole = [
        (step, parts)
        for (_, ranks, step), parts in found.items()
        if step not in stored and parts.keys() == set(range(ranks))
    ]
    lives = [max((part.life for part in parts.values()), key=lambda life: life.durable) for _, parts in whole]
    versions = [_Version(life, step, parts) for life, (step, parts) in zip(lives, whole, strict=True)]
    return sorted(versions, key=lambda one: -one.step)


def _is_of_storage(store: Store, one: _Version) -> bool:
    """Return whether storage is as the version's run left it."""
    try:
        recovery.refuse_other_life(one.life, recovery.newest_stored(store))
    except CorruptCheckpointError as error:
        logger.warning("step %d in host memory is passed over: %s", one.step, error)
        return False
    return True


def _newer(store: Store, mode: str | int, versions: Sequence[_Version]) -> list[_Version]:
    """Return, of the run with the newest version, those newer than storage, and that of step ``mode``."""
    newest = recovery.newest_stored(store).step
    wanted = [one for one in versions if one.step > newest or one.step == mode]
    return [one for one in wanted if one.life.run_id == wanted[0].life.run_id]


def _commit(store: Store, mode: str | int, left: LeftMemory, one: _Version, council: Council, *, needed: bool) -> bool:
    """Commit a version; returns whether it is on storage now, which one that is not ``needed`` may fail to be.

    Raises StorageError as :func:`reclaim`, or if memory is unreadable now; another error if the version is damaged.
    """
    commit: Callable[[], object] = functools.partial(_commit_parts, store, left, one, council)
    gives_up, why = "give it up with checkflow memory --free --force", ""
    if council.alone and one.life.ranks == 1:  # it keeps the form that one process writes
        part, *_ = left.parts_of(one.life.run_id, one.step)
        commit = _loaded(store, part)
        gives_up, why = f"delete {part.path}", " to give it up"
    if mode == "never":
        raise StorageError(
            f'resume="never", but the run before left step {one.step} of {store.directory} in host memory: choose '
            f"another directory, or {gives_up}"
        )
    logger.info("step %d was complete in host memory when the run before ended: it is being saved", one.step)
    try:
        commit()
    except (CorruptCheckpointError, MismatchError):
        raise
    except CheckflowError as error:
        message = (
            f"step {one.step} lies in host memory, where the run before left it, and cannot be saved: {error}; mend "
            f"that, or {gives_up}{why}"
        )
        if needed:
            raise StorageError(message) from error
        logger.warning("%s", message)
        return False
    return True


def _loaded(store: Store, one: Found) -> Callable[[], object]:
    """Read and verify what one process has left; returns what commits it, in the form of one process."""
    try:
        _, layout, extra, memory = recovery.load(one)
    except OSError as error:
        raise _unreadable(one.path, error) from error
    record = one.record
    return lambda: store.commit(
        record.step, layout, memoryview(memory), extra, record.info,
        ties=record.ties, absent=record.absent, plan_digest=record.plan_digest, retire=False, run_id=one.life.run_id,
    )  # fmt: skip


def _commit_parts(store: Store, left: LeftMemory, one: _Version, council: Council) -> None:
    attempt = council.open_attempt(one.step, RECLAIM_SECONDS)

    def gather(root: int, folder: int) -> Gathered:
        mine = _write_parts(folder, left.parts_of(one.life.run_id, one.step), _claim(store, attempt))
        council.post_receipt(receipt_of(council, attempt, written=_WRITTEN.dump_json(mine).decode()))
        receipts = council.collect(attempt, lambda found: None, RECLAIM_SECONDS)
        ordered = sorted((part for receipt in receipts for part in _loads(receipt)), key=lambda part: part.rank)
        if missing := tuple(sorted(one.parts.keys() - {part.rank for part in ordered})):
            raise CorruptCheckpointError(f"the part of {name_ranks(missing)} is damaged")
        return Gathered(ordered, None)

    first = one.parts[0]
    try:
        commit_ranks(
            store, one.step, str(attempt.number), gather,
            info=first.info, plan_digest=first.plan_digest, retire=False, run_id=one.life.run_id,
        )  # fmt: skip
    except BaseException as error:
        council.conclude(attempt, error)
        raise
    council.conclude(attempt)


def _claim(store: Store | SharedStore, attempt: Attempt) -> str:
    """Return the name of the file by which one of a machine's ranks takes a part in an attempt."""
    return f"taken-{store.run_id}-{attempt.step}-{attempt.number}"


def _loads(receipt: Receipt) -> tuple[Written, ...]:
    try:
        return _WRITTEN.validate_json(receipt.written)
    except ValidationError as error:
        raise StorageError(f"the receipt of rank {receipt.rank} is damaged: {words_of(error)}") from None
