"""From boundaries to durable checkpoints: the copy engine, the staging buffers and the writer of one job.

They outlive the plans that run in it (:mod:`.execution`): a checkpoint is audited and committed as it was begun.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from checkflow.runtime.capture import Capture
from checkflow.runtime.host_engine import HostCopyEngine
from checkflow.runtime.execution import Execution
from checkflow.runtime.persist import Writer
from checkflow.runtime.staging import StagingBuffers
from checkflow.runtime.store import Store

FIRST_AUDITS = 3  # of each plan's checkpoints


class Saving:
    """What captures are copied with, staged in and written by.

    Args:
        each: whether each capture is committed, however long training has to wait for storage; otherwise storage takes
            the newest one.
        host_buffers: staging buffers.
        audit: of how many captures one is audited; 0: none but the first ones.
    """

    def __init__(self, store: Store, *, each: bool, host_buffers: int, audit: int) -> None:
        self._store, self._each, self._audit_every = store, each, audit
        self.captures = 0
        with contextlib.ExitStack() as undo:
            self.engine = HostCopyEngine()
            undo.callback(self.engine.close)
            self.buffers = StagingBuffers(host_buffers)
            undo.callback(self.buffers.close)
            self.writer = Writer(self._commit, self._recycle, supersede=not each)
            undo.pop_all()

    def begin(self, execution: Execution, step: int, extra: bytes, info: Mapping[str, Any]) -> float:
        """Capture this boundary under a plan; returns the seconds waited for storage and buffers.

        Raises:
            CheckflowError: as :meth:`.capture.Capturer.begin`.
        """
        audit = execution.captures < FIRST_AUDITS or (self._audit_every and self.captures % self._audit_every == 0)
        # One being gathered, one being committed, none queueing: that bounds what a failure can cost.
        waited_seconds = self.writer.wait_until_at_most(1) if self._each else 0.0
        waited_seconds += execution.begin(step, extra, info, audit=bool(audit))
        self.captures += 1
        return waited_seconds

    def report(self) -> dict[str, Any]:
        """What became of the captures."""
        writer = self.writer
        return {
            "captures": self.captures,
            "committed": writer.committed,
            "superseded": writer.superseded,
            "audited": writer.audited,
            "breaches": writer.breaches,
            "last_persist_seconds": writer.last.seconds if writer.last else None,
            "checkpoint_bytes": writer.last.size_bytes if writer.last else None,
        }

    def close(self) -> None:
        """Commit what is left, then give threads and memory back."""
        self.writer.close()
        self.engine.close()
        self.buffers.close()

    def _commit(self, capture: Capture) -> Path:
        return self._store.commit(
            capture.step,
            capture.layout,
            capture.buffer.view,
            capture.extra,
            capture.info,
            ties=capture.ties,
            absent=capture.absent,
            plan_digest=capture.plan_digest,
        )

    def _recycle(self, capture: Capture) -> None:
        self.buffers.give_back(capture.buffer)
