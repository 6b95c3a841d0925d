"""From boundaries to durable checkpoints: one job's copy engine, staging buffers and writer. They outlive its plans."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from checkflow.core.errors import CheckflowError, StorageError
from checkflow.runtime.memory_tier.records import NOTHING, RunLife
from checkflow.runtime.memory_tier.staging import Locking, StagingBuffers
from checkflow.runtime.memory_tier.tier import MemoryTier
from checkflow.runtime.persist.metrics import Metrics
from checkflow.runtime.persist.rank_commit import RankCommit
from checkflow.runtime.persist.writer import Writer
from checkflow.runtime.snapshot.capturer import Capture
from checkflow.runtime.snapshot.executor import Execution
from checkflow.runtime.store.retention import EPOCH_END, Known
from checkflow.runtime.store.shared import SharedStore
from checkflow.runtime.store.store import Store
from checkflow.runtime.transfer.engine import CopyEngine
from checkflow.runtime.transfer.host import HostCopyEngine

logger = logging.getLogger("checkflow")

FIRST_AUDITS = 3  # of each plan


def make_engine(device: torch.device) -> tuple[CopyEngine, Locking | None]:
    """The copy engine for a device, and what locks host memory for it."""
    if device.type == "cpu":
        return HostCopyEngine(), None
    from checkflow.runtime.transfer.cuda import CudaCopyEngine
    from checkflow.runtime.transfer.cuda_device import CudaDevice

    gpu = CudaDevice(device)
    return CudaCopyEngine(gpu), gpu


class Saving:
    """Copies, stages and writes a job's captures.

    Args:
        each: commit every capture, even if training must wait for storage; otherwise storage takes the newest one.
        audit: every how many captures to audit; 0: only the first ones.
        base: the step that the job resumed from, and the run that made it.
        ranks: commits with all other ranks; or alone, if there are none.
        ranked: the best checkpoints at the start, by which all ranks judge.
    """

    def __init__(
        self, store: Store | SharedStore, ranks: RankCommit, device: torch.device, *, each: bool, host_buffers: int,
        audit: int, base: tuple[int, str] = (NOTHING, ""), ranked: Sequence[Known] | None = None,
    ) -> None:  # fmt: skip
        self._store, self._each, self._audit_every = store, each, audit
        self.host_buffers = host_buffers
        self._ranks = ranks
        # Rank 0's writer decides which captures give way to newer ones. Others keep what it may still ask for.
        follows = not store.commits
        self._base_step = None if base[0] == NOTHING else base[0]
        self.metrics = Metrics(store, ranked)
        self.captures = 0
        self.newest: tuple[int, float] | None = None  # step of the newest capture, and time.monotonic at its begin
        self._held_back: set[int] = set()  # steps of captures that stay in host memory for now
        with contextlib.ExitStack() as undo:
            self.engine, locking = make_engine(device)
            undo.callback(self.engine.close)
            life = RunLife(store.run_id, *base, rank=ranks.rank, ranks=ranks.world_size)
            self.tier = MemoryTier(store.directory, life)
            tier = self.tier if host_buffers > 1 else None  # a single buffer is seldom complete
            self.buffers = StagingBuffers(host_buffers + follows, locking, self._urge, tier)
            undo.callback(self.buffers.close)
            self.writer = Writer(
                self._commit,
                self._recycle,
                supersede=not each,
                gives_way=self._gives_way,
                newest=self._is_newest,
                errand=self.metrics.write_late,
                void=self._void,
                spared=1 if follows else 0,
            )
            undo.pop_all()

    def begin(
        self,
        execution: Execution,
        step: int,
        extra: bytes | Callable[[], bytes],
        info: Mapping[str, Any],
        *,
        durable: bool = True,
    ) -> float:
        """Capture this boundary under a plan; returns the seconds waited for storage and buffers.

        Not ``durable``: it stays in host memory until a newer capture replaces it or the job ends.
        """
        audit = execution.captures < FIRST_AUDITS or (self._audit_every and self.captures % self._audit_every == 0)
        # One is gathered, one committed, none queues: that bounds what a failure can cost. The number of captures
        # with bytes still on their way from a GPU is bounded by the staging buffers.
        waited_seconds = self.writer.wait_until_at_most(1) if self._each else 0.0
        self.newest = (step, time.monotonic())
        self.writer.forget_lost()  # this one replaces it
        (self._held_back.discard if durable else self._held_back.add)(step)
        self.metrics.begun(step)
        try:
            waited_seconds += execution.begin(step, extra, info, audit=bool(audit))
        except BaseException:
            self.metrics.ended(step)
            raise
        self.captures += 1
        return waited_seconds

    def submit(self, capture: Capture) -> None:
        """Take a complete capture, on any thread."""
        hold = capture.step in self._held_back
        self._held_back.difference_update([step for step in list(self._held_back) if step <= capture.step])
        self.metrics.submitted(capture.step)
        try:
            self._outlive(capture)
        except Exception:  # a bug must not keep it from storage
            logger.exception("the capture of step %d ends with the process", capture.step)
        (self.writer.hold if hold else self.writer.submit)(capture)

    def keep(self, step: int) -> None:
        """Have storage take this capture after all, with later metrics."""
        self._held_back.discard(step)
        self.writer.urge()
        self.writer.nudge()

    @property
    def durable_step(self) -> int | None:
        """The newest step that this run committed, or else resumed from; None: there is none."""
        durable = self.writer.durable
        return self._base_step if durable is None else durable.step

    def close(self) -> StorageError | None:
        """Commit what is left, retry what failed last, release threads and memory; returns why the newest is not
        durable.
        """
        self.writer.close()
        self.engine.close()
        kept, durable = self.tier.newest(), self.durable_step
        lost = kept is not None and (durable is None or durable < kept)
        self.buffers.close(leave=lost)
        if self.newest is None or (durable is not None and durable >= self.newest[0]):
            return None
        why = "" if self.writer.last_failure is None else f" ({self.writer.last_failure[1]})"
        rest = "nothing is" if durable is None else f"step {durable} is"
        stays = f"; step {kept} stays in this machine's memory: the next run here saves it" if lost else ""
        return StorageError(
            f"the last checkpoint, of step {self.newest[0]}, is not on storage{why}: {rest} durable in "
            f"{self._store.where}{stays}"
        )

    def _outlive(self, capture: Capture) -> None:
        """Let a complete capture outlive the process, unless its plan is refuted."""
        if not self.tier.mark() or self._is_refuted(capture):
            return
        if not isinstance(capture.extra, bytes):
            try:
                capture.extra = capture.extra()
            except CheckflowError:  # the writer repeats this and reports the error
                return
        info = {**capture.info, **self.metrics.known(capture.step)}
        self.tier.keep(capture, capture.extra, info)
        if self._is_refuted(capture):  # by the writer, meanwhile
            self.tier.forget(capture.buffer.index)

    def _is_refuted(self, capture: Capture) -> bool:
        return capture.by_plan and capture.plan_digest in self.writer.breached_plans

    def _void(self, capture: Capture) -> None:
        """The writer's audit refuted this capture, and maybe its plan."""
        try:
            self.tier.forget(capture.buffer.index)
            if capture.plan_digest in self.writer.breached_plans:
                self.tier.distrust(capture.plan_digest)
        except StorageError as error:  # the buffer cannot be taken either until this works
            logger.warning("cannot remove void captures from host memory: %s", error)

    def _commit(self, capture: Capture) -> Path:
        extra = capture.extra if isinstance(capture.extra, bytes) else capture.extra()
        info = {**capture.info, **self.metrics.info(capture.step)}
        path = self._ranks.commit(capture, extra, info)
        capture.written_at, capture.published_at = self._store.committed_at
        self.tier.stored(capture.step)
        return path

    def _urge(self) -> None:
        self.writer.urge()

    def _gives_way(self, waiting: Capture, newer: Capture) -> bool:
        """Whether slow storage may skip a capture: not one that retention would keep."""
        epoch_ends = waiting.info.get(EPOCH_END) is True, newer.info.get(EPOCH_END) is True
        return self.metrics.gives_way(waiting.step, newer.step, epoch_ends=epoch_ends)

    def _is_newest(self, capture: Capture) -> bool:
        return self.newest is not None and self.newest[0] == capture.step

    def _recycle(self, capture: Capture) -> None:
        self.metrics.ended(capture.step)
        self._ranks.over(capture.step)
        self.buffers.give_back(capture.buffer)
