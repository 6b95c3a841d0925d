"""The background writer: commits complete captures one after the other. A failed capture does not end training.

If captures come faster than storage takes them, the newest replaces the waiting one (``supersede``), or the training
thread waits (``wait_until_at_most``). A capture may be held back in host memory until ``urge``. A failed one stays
until a newer one begins; without a newer one it is tried once more (``settle``).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from checkflow.core.errors import CheckflowError, ConsistencyError, VoidCheckpointError
from checkflow.core.reports.capture_times import KEPT_CAPTURES
from checkflow.runtime.format.digest import Digest, digest_memory
from checkflow.runtime.snapshot.capturer import Capture
from checkflow.runtime.snapshot.unwritten import WrittenError

logger = logging.getLogger("checkflow")

_LOOK_SECONDS = 1.0  # at a thread that may have ended
Commit = Callable[[Capture], Path]
_LOG_AGAIN_SECONDS = 60.0  # between log lines about the same failure


@dataclass(frozen=True)
class Persisted:
    """The outcome of one capture."""

    step: int
    path: Path | None  # None: not committed
    error: CheckflowError | None
    seconds: float
    size_bytes: int  # of its tensors' files
    audited: bool
    # When, by time.monotonic; 0: it did not come to this.
    begun: float = 0.0
    audited_at: float = 0.0
    written_at: float = 0.0
    published_at: float = 0.0
    ended: float = 0.0


@dataclass(frozen=True, slots=True)
class Durable:
    """The newest capture on storage, by time.monotonic."""

    step: int
    begun: float
    committed: float


class Writer:
    """One thread that commits captures.

    Args:
        commit: writes one capture durably and returns its path; raises CheckflowError if it cannot.
        recycle: gives a capture's buffer back.
        supersede: whether a newer capture replaces a waiting one, if ``gives_way`` allows it.
        spared: so many of the newest waiting ones are not replaced.
        newest: whether no capture was begun after this one.
        errand: other work for this thread, between captures; see ``nudge``. Must not raise.
        void: called with a capture that an audit refuted.
    """

    def __init__(
        self,
        commit: Commit,
        recycle: Callable[[Capture], None],
        *,
        supersede: bool,
        gives_way: Callable[[Capture, Capture], bool] = lambda waiting, newer: True,
        newest: Callable[[Capture], bool] = lambda _: False,
        errand: Callable[[], None] = lambda: None,
        void: Callable[[Capture], None] = lambda _: None,
        spared: int = 0,
    ) -> None:
        self._commit, self._recycle, self._supersede, self._spared = commit, recycle, supersede, spared
        self._gives_way, self._errand, self._void = gives_way, errand, void
        self._waiting: deque[Capture] = deque()
        self._newest = newest
        self._held: Capture | None = None  # complete, held back
        self._lost: Capture | None = None  # failed at its first try
        self._again: Capture | None = None  # being tried once more
        self._mutex = threading.RLock()  # entered by itself, not by the condition: see system/signals.py
        self._changed = threading.Condition(self._mutex)
        self._busy = self._closed = self._nudged = False
        self._error: CheckflowError | None = None
        self._lost_error: CheckflowError | None = None
        self._written: list[str] = []
        self.committed = self.failed = self.void = self.superseded = self.audited = self.breaches = 0
        self.breached_plans: set[str] = set()  # digests of plans that an audit refuted
        self.recent: deque[Persisted] = deque(maxlen=KEPT_CAPTURES)  # the last ones
        self.durable: Durable | None = None
        self.persisted_bytes, self.persist_seconds = 0, 0.0  # of what was committed
        self.last_failure: tuple[float, str] | None = None  # time.monotonic, and the reason
        self.after_each: Callable[[], None] = _nothing  # on the writer's thread; must not raise
        self._reason: object = None  # of the last failure that was logged; None: the last commit worked
        self._logged_at, self._unlogged = 0.0, 0  # time.monotonic of that line; failures since
        self._thread = threading.Thread(target=self._run, name="checkflow-writer", daemon=True)
        self._thread.start()

    @property
    def last(self) -> Persisted | None:
        return self.recent[-1] if self.recent else None

    def submit(self, capture: Capture) -> None:
        """Take a complete capture; returns at once."""
        self._take(capture, hold=False)

    def hold(self, capture: Capture) -> None:
        """Take a complete capture and hold it back, unless it replaces one that waits for storage."""
        self._take(capture, hold=True)

    def _take(self, capture: Capture, *, hold: bool) -> None:
        dropped: list[Capture] = []
        with self._mutex:
            if self._closed:
                raise RuntimeError("a capture was delivered after the writer was closed")
            if self._held is not None:
                dropped.append(self._held)
                self._held = None
            if self._supersede:
                kept: deque[Capture] = deque()
                for left, one in zip(range(len(self._waiting), 0, -1), self._waiting, strict=True):
                    replaced = left > self._spared and self._gives_way(one, capture)
                    (dropped if replaced else kept).append(one)
                hold = hold and len(kept) == len(self._waiting)
                self._waiting = kept
            self.superseded += len(dropped)
            if hold:
                self._held = capture
            else:
                self._waiting.append(capture)
            self._changed.notify_all()
        for old in dropped:
            self._recycle(old)

    @property
    def outstanding(self) -> int:
        """Captures that wait for storage or are being written."""
        with self._mutex:
            return len(self._waiting) + self._busy

    def urge(self) -> None:
        """Write what is held back."""
        with self._mutex:
            if self._held is not None:
                self._waiting.append(self._held)
                self._held = None
                self._changed.notify_all()

    def nudge(self) -> None:
        """Run the errand before the next commit and before closing."""
        with self._mutex:
            self._nudged = True
            self._changed.notify_all()

    def wait_until_at_most(self, outstanding: int) -> float:
        """Wait until at most so many captures are outstanding (0: held-back ones, too); returns the seconds waited.

        Raises:
            CheckflowError: the writer's thread has ended, so nothing will be written any more.
        """
        begun = time.perf_counter()
        if not outstanding:
            self.urge()
        with self._mutex:
            while len(self._waiting) + self._busy > outstanding:
                if not self._thread.is_alive():
                    raise CheckflowError("the thread that writes checkpoints has ended by an error: nothing is saved")
                self._changed.wait(_LOOK_SECONDS)
        return time.perf_counter() - begun

    def settle(self) -> None:
        """Wait until every capture is committed or has failed; the newest is tried twice."""
        self.wait_until_at_most(0)
        with self._mutex:
            if self._lost is None:
                return
            logger.warning("step %d is the newest: its checkpoint is tried once more", self._lost.step)
            self._again, self._lost = self._lost, None
            self._waiting.append(self._again)
            self._changed.notify_all()
        self.wait_until_at_most(0)

    def forget_lost(self) -> None:
        """Drop the failed capture: a newer one begins."""
        with self._mutex:
            lost, self._lost = self._lost, None
        if lost is not None:
            self._recycle(lost)

    def take_error(self) -> CheckflowError | None:
        """The first error since the last call, if any."""
        with self._mutex:
            error, self._error = self._error, None
            return error

    def take_written(self) -> list[str]:
        """Settled tensors that were found written since the last call."""
        with self._mutex:
            written, self._written = self._written, []
            return written

    def close(self) -> None:
        """Commit what is left, then stop."""
        self.settle()
        with self._mutex:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._mutex:
                while not (self._waiting or self._closed or self._nudged):
                    self._changed.wait()
                nudged, self._nudged = self._nudged, False
                if not nudged and not self._waiting:
                    return
                capture = None if nudged else self._waiting.popleft()
                self._busy = capture is not None
            if capture is None:
                self._errand()
                continue
            outcome = self._persist(capture)
            with self._mutex:
                self.recent.append(outcome)
                self._busy = False
                self.committed += outcome.error is None
                void = isinstance(outcome.error, VoidCheckpointError)
                self.void += void
                self.failed += outcome.error is not None and not void
                self._note(capture, outcome)
                stays = self._lost is capture
                self._changed.notify_all()
            if not stays:
                self._recycle(capture)
            self.after_each()

    def _note(self, capture: Capture, outcome: Persisted) -> None:
        now, error = time.monotonic(), outcome.error
        if isinstance(error, VoidCheckpointError):
            return
        if error is not None:
            self.last_failure = (now, f"{type(error).__name__}: {error}")
            self._error = self._error or error
            void = isinstance(error, ConsistencyError | WrittenError)
            if not void and capture is not self._again and self._newest(capture):
                self._lost, self._lost_error = capture, error
            return
        if capture is self._again and self._error is self._lost_error:
            self._error = None  # the retry worked
        self.durable = Durable(capture.step, capture.begun, outcome.published_at or now)
        self.persisted_bytes += outcome.size_bytes
        self.persist_seconds += outcome.seconds

    def _persist(self, capture: Capture) -> Persisted:
        begun, audited_at = time.monotonic(), 0.0
        path, error = None, None
        try:
            self._audit(capture)
            audited_at = time.monotonic()
            path = self._commit(capture)
            if self._reason is not None:
                self._reason, self._unlogged = None, 0
                logger.info("checkpoint of step %d is saved: checkpoints succeed again", capture.step)
        except CheckflowError as reason:
            error = reason
            if isinstance(reason, WrittenError):
                with self._mutex:
                    self._written.append(reason.name)
            if isinstance(reason, ConsistencyError):
                self._void(capture)
            self._log(capture, reason)
        except Exception as reason:
            # A bug must not end the training job either.
            said = " ".join(str(reason).split())
            error = CheckflowError(f"checkpoint of step {capture.step}: {type(reason).__name__}: {said}")
            logger.exception("checkpoint of step %d failed, training goes on", capture.step)
        ended = time.monotonic()
        return Persisted(
            capture.step, path, error, ended - begun,
            sum(file.size_bytes for file in capture.layout.files), capture.digests is not None,
            begun, audited_at, capture.written_at, capture.published_at, ended,
        )  # fmt: skip

    def _log(self, capture: Capture, error: CheckflowError) -> None:
        """Log a failure; a recurring one, such as a full disk, only now and then."""
        if isinstance(error, VoidCheckpointError):
            logger.info("no checkpoint of step %d, training goes on: %s", capture.step, error)
            return
        reason, now = _reason_of(error), time.monotonic()
        if reason == self._reason and now - self._logged_at < _LOG_AGAIN_SECONDS and capture is not self._again:
            self._unlogged += 1
            logger.debug("checkpoint of step %d failed, training goes on: %s", capture.step, error)
            return
        more = f" (so did {self._unlogged} before it)" if self._unlogged and reason == self._reason else ""
        self._reason, self._logged_at, self._unlogged = reason, now, 0
        logger.warning("checkpoint of step %d failed, training goes on: %s%s", capture.step, error, more)

    def _audit(self, capture: Capture) -> None:
        """Compare the staged bytes with the digests of the boundary; those of settled tensors are older."""
        for name, digest in capture.settled.items():
            if not _is_staged(capture, name, digest):
                raise WrittenError(capture.step, name)
        if capture.digests is None:
            if capture.by_plan and capture.plan_digest in self.breached_plans:
                raise ConsistencyError(
                    f"the checkpoint of step {capture.step} was captured by a plan that does not fit this job, as the "
                    "audit of an earlier one showed: it is void"
                )
            return
        self.audited += 1
        for name, digest in capture.digests.take().items():
            if name not in capture.settled and not _is_staged(capture, name, digest):
                self.breaches += 1
                self.breached_plans.add(capture.plan_digest)
                raise ConsistencyError(
                    f"the checkpoint of step {capture.step} is torn: {name} was written before its copy was made; "
                    "it is void, and the plan does not fit this job"
                )


def _is_staged(capture: Capture, name: str, digest: Digest) -> bool:
    """Whether a tensor's staged bytes have this digest."""
    placed = capture.layout.tensors[name]
    return (
        digest_memory(digest.rule, capture.buffer.address + placed.staging_offset, placed.record.size_bytes) == digest
    )


def _reason_of(error: CheckflowError) -> object:
    """Equal for failures that differ only in the checkpoint."""
    cause = error.__cause__
    return type(error), (cause.errno if isinstance(cause, OSError) else str(error))


def _nothing() -> None:
    """The default ``after_each``."""
