"""Commits captures: one process's, or several ranks', of which each writes its part into one directory.

It runs on each rank's writer thread. docs/explanation/ranks.md has the protocol.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import xxhash
from pydantic import TypeAdapter, ValidationError

from checkflow.core.errors import CheckflowError, MissingShardsError, StorageError, first_fault
from checkflow.runtime.format import codec
from checkflow.runtime.format.layout import Layout, file_image
from checkflow.runtime.format.manifest import BLOCK_BYTES, STAGES
from checkflow.runtime.ranks import receipts
from checkflow.runtime.ranks.council import Council
from checkflow.runtime.ranks.meeting import wait_until
from checkflow.runtime.ranks.records import Attempt, Receipt
from checkflow.runtime.snapshot.capturer import Capture
from checkflow.runtime.store.files import step_name
from checkflow.runtime.store.parts import Gathered, Source, Written, commit_ranks, folder_name, write_part
from checkflow.runtime.store.shared import SharedStore
from checkflow.runtime.store.store import Store, reported
from checkflow.runtime.system import fs

logger = logging.getLogger("checkflow")

#: What all ranks must have alike: otherwise they are at different iterations.
_ALIKE = ("iteration", "epoch", "position", "turns")
_WRITTEN: TypeAdapter[Written] = TypeAdapter(Written)
_T = TypeVar("_T")
_AGAIN_SECONDS = 5.0  # for rank 0's second try of a step that a silent rank has failed
_VERDICT_TIMES = 3  # as long as for receipts: rank 0 waits for these, writes and syncs


class RankCommit:
    """One rank's part in each commit.

    Args:
        store: rank 0's, or what the others know of it.
    """

    def __init__(self, council: Council, store: Store | SharedStore) -> None:
        self._council, self._store = council, store
        # The last one of this rank. Those of the start are of a dead run.
        self._attempt = max((one.number for one in council.view.attempts), default=0)
        self._of_start = self._attempt
        self._persist_seconds = 0.0  # of this rank's last files

    @property
    def rank(self) -> int:
        return self._council.rank

    @property
    def world_size(self) -> int:
        return self._council.world_size

    def commit(self, capture: Capture, extra: bytes, info: Mapping[str, Any]) -> Path:
        """Commit a capture, with all other ranks' if there are any. When it returns, the version survives a power cut.

        Raises:
            MissingShardsError: a rank has not written in time, or cannot; ``ranks`` names it.
            StorageError, MismatchError: there is no such version, on no rank.
        """
        if not isinstance(self._store, Store):  # rank 0 has it, and it alone commits
            return self._follow(capture, extra)
        if not self._council.alone:
            return self._lead(self._store, capture, extra, info)
        return self._store.commit(  # a version of one part has another form: no receipts, no boxes
            capture.step, capture.layout, capture.buffer.view, extra, info,
            ties=capture.ties, absent=capture.absent, plan_digest=capture.plan_digest,
        )  # fmt: skip

    def over(self, step: int) -> None:
        """A capture has ended, committed or not: no later attempt finds it here."""
        self._council.note_dropped(step)

    def _lead(self, store: Store, capture: Capture, extra: bytes, info: Mapping[str, Any]) -> Path:
        attempt = self._council.open_attempt(capture.step)
        of_stages = {STAGES: True} if self._council.view.start.pipelined else {}

        def gather(root: int, folder: int) -> Gathered:
            self._council.post_receipt(self._write(folder, attempt, capture, extra))
            found = self._council.collect(attempt, _joined_later)
            return Gathered([_loads(receipt) for receipt in found], extra, of_stages)

        try:
            path = commit_ranks(
                store, capture.step, str(attempt.number), gather, info=info, plan_digest=capture.plan_digest,
                published=lambda: self._council.conclude(attempt),
            )  # fmt: skip
        except BaseException as error:
            self._council.conclude(attempt, error)
            raise
        return path

    def _follow(self, capture: Capture, extra: bytes) -> Path:
        council, step = self._council, capture.step
        path = self._store.directory / step_name(step)
        patience_seconds = receipts.wait_seconds(self._persist_seconds) + council.view.capture_seconds
        mine = [one for one in council.view.attempts if one.number > self._of_start]
        if any((one.step, one.ended) == (step, "committed") for one in mine):
            return path  # it was tried again here, since rank 0's word came late
        tried = [one for one in mine if one.step == step]
        gone = {*council.view.silent} - {council.rank}
        wait_seconds = patience_seconds
        if tried and gone & {*tried[-1].missing}:  # rank 0 may have no reason to try again
            wait_seconds = min(wait_seconds, _AGAIN_SECONDS)
        attempt = council.await_attempt(step, wait_seconds, after=self._attempt)
        self._attempt = attempt.number
        try:
            with reported(f"cannot write rank {council.rank}'s part of step {step} to {self._store.directory}"):
                receipt = write_into(
                    council, self._store, attempt, patience_seconds,
                    lambda folder: self._write(folder, attempt, capture, extra),
                )  # fmt: skip
        except CheckflowError as error:
            council.post_receipt(self._receipt(attempt, failure=" ".join(str(error).split())))
            raise
        council.post_receipt(receipt)
        council.await_verdict(attempt, _VERDICT_TIMES * patience_seconds)
        return path

    def _write(self, folder: int, attempt: Attempt, capture: Capture, extra: bytes) -> Receipt:
        begun = time.perf_counter()
        written = write_staged(
            folder, self._council.rank, self._council.world_size, capture.layout, capture.buffer.view, capture.sources,
            extra, ties=capture.ties, absent=capture.absent,
        )  # fmt: skip
        self._persist_seconds = time.perf_counter() - begun
        return self._receipt(attempt, written=_WRITTEN.dump_json(written).decode())

    def _receipt(self, attempt: Attempt, **more: Any) -> Receipt:
        return receipt_of(self._council, attempt, persist_seconds=self._persist_seconds, **more)


def receipt_of(council: Council, attempt: Attempt, **more: Any) -> Receipt:
    """Return this rank's receipt of an attempt."""
    return Receipt(council.rank, council.world_size, council.generation, attempt.number, attempt.step, **more)


def write_into(
    council: Council, store: Store | SharedStore, attempt: Attempt, wait_seconds: float, write: Callable[[int], _T]
) -> _T:
    """Write into the directory that rank 0 makes for this attempt, given a descriptor of it, as soon as it is there."""
    name = folder_name(attempt.step, store.run_id, str(attempt.number))
    with fs.folder(str(store.directory)) as root:

        def opened() -> int | None:
            try:
                return fs.open_folder(name, dir_fd=root)
            except FileNotFoundError:
                found = council.view.attempt(attempt.number)
                if found is not None and found.ended:
                    raise StorageError(f"step {attempt.step} was not saved: {found.reason}") from None
                if 0 in council.view.silent:
                    raise MissingShardsError(f"rank 0 ended or does not answer, without {name}", (0,)) from None
                return None

        folder: int | None = wait_until(opened, wait_seconds)
        if folder is None:
            raise StorageError(f"{name} of rank 0 is not seen here: do all ranks see one directory?")
        try:
            return write(folder)
        finally:
            fs.close_quietly(folder)


def write_staged(
    folder: int, rank: int, ranks: int, layout: Layout, staging: memoryview, sources: Mapping[str, Source],
    extra: bytes, **more: Any,
) -> Written:  # fmt: skip
    """Write a rank's capture, as :func:`.store.parts.write_part` does. Rank 0's extra state is left to the commit."""
    known = codec.decode(extra)
    alike = codec.encode({name: known[name] for name in _ALIKE})
    return write_part(
        folder, rank, ranks, layout, lambda file: file_image(file, staging, BLOCK_BYTES), sources,
        extra=extra if rank else None, extra_digest=xxhash.xxh3_128_hexdigest(alike), **more,
    )  # fmt: skip


def _loads(receipt: Receipt) -> Written:
    """Return the files that a rank has written; StorageError if its receipt does not say."""
    try:
        found = _WRITTEN.validate_json(receipt.written)
    except ValidationError as error:
        raise StorageError(f"the receipt of rank {receipt.rank} is damaged: {first_fault(error)}") from None
    if found.rank != receipt.rank:
        raise StorageError(f"the receipt of rank {receipt.rank} is of files of rank {found.rank}")
    return found


def _joined_later(found: object) -> None:
    """What covers each tensor is checked where the parts are joined, before the manifest is written."""
