"""The background writer: complete captures, one after the other, onto durable storage.

A capture is written by the store's commit protocol, or it fails as a whole; either way its buffer goes back and
training goes on. Where captures come faster than storage takes them, the newest replaces the one that still waits
(``supersede``), or the training thread waits (``wait_until_at_most``): the caller chooses. A capture may also be held
back: it stays in host memory until a newer one replaces it, or all are to be written (``urge``). One that storage did
not take stays, too, until a newer one is begun: if there is none, it is tried once more (``settle``).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from checkflow.core.errors import CheckflowError, ConsistencyError
from checkflow.runtime.format.digest import Digest, digest_memory
from checkflow.runtime.snapshot.capturer import Capture
from checkflow.runtime.snapshot.unwritten import WrittenError

logger = logging.getLogger("checkflow")
Commit = Callable[[Capture], Path]
_TELL_AGAIN_SECONDS = 60.0  # that checkpoints fail, for the same reason as before


@dataclass(frozen=True)
class Persisted:
    """The outcome of one capture."""

    step: int
    path: Path | None  # None: it was not committed
    error: CheckflowError | None
    seconds: float
    size_bytes: int  # of its tensors' files
    audited: bool


@dataclass(frozen=True, slots=True)
class Durable:
    """The newest capture that is on storage, by time.monotonic."""

    step: int
    begun: float
    committed: float


class Writer:
    """One thread that commits captures.

    Args:
        commit: writes one capture durably and returns its path; raises CheckflowError if it cannot.
        recycle: gives a capture's buffer back.
        supersede: whether a newer capture replaces one that still waits.
        gives_way: whether one that waits may be replaced by a newer one.
        newest: whether no capture was begun after this one.
        errand: other work for this thread, between captures; see ``nudge``. Must raise nothing.
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
    ) -> None:
        self._commit, self._recycle, self._supersede = commit, recycle, supersede
        self._gives_way, self._errand, self._void = gives_way, errand, void
        self._waiting: deque[Capture] = deque()
        self._newest = newest
        self._held: Capture | None = None  # complete, and not to be written yet
        self._lost: Capture | None = None  # which storage did not take at its first try
        self._again: Capture | None = None  # which is tried once more
        self._mutex = threading.RLock()  # entered by itself, not by the condition: see system/signals.py
        self._changed = threading.Condition(self._mutex)
        self._busy = self._closed = self._nudged = False
        self._error: CheckflowError | None = None
        self._lost_error: CheckflowError | None = None
        self._written: list[str] = []
        self.committed = self.failed = self.superseded = self.audited = self.breaches = 0
        self.breached_plans: set[str] = set()  # by digest: a breach refutes the plan that it was captured by
        self.last: Persisted | None = None
        self.durable: Durable | None = None
        self.persisted_bytes, self.persist_seconds = 0, 0.0  # of what was committed
        self.last_failure: tuple[float, str] | None = None  # when, by time.monotonic, and why
        self.after_each: Callable[[], None] = _nothing  # outcome, on the writer's thread; must raise nothing
        self._reason: object = None  # why checkpoints fail, as it was told last; None: the last one did not
        self._told, self._untold = 0.0, 0  # when, by time.monotonic; failures since then
        self._thread = threading.Thread(target=self._run, name="checkflow-writer", daemon=True)
        self._thread.start()

    def submit(self, capture: Capture) -> None:
        """Take a complete capture; returns at once."""
        self._take(capture, hold=False)

    def hold(self, capture: Capture) -> None:
        """Take a complete capture, and hold it back; unless it replaces one that waits, since storage is due then."""
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
                for one in self._waiting:
                    (dropped if self._gives_way(one, capture) else kept).append(one)
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
        """Captures that wait for storage, and the one that is being written."""
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
        """There is an errand: it is done before the next commit, and before this closes."""
        with self._mutex:
            self._nudged = True
            self._changed.notify_all()

    def wait_until_at_most(self, outstanding: int) -> float:
        """Wait until at most so many captures are neither committed nor failed; returns the seconds waited.

        Captures that are held back do not count, unless none may be left: then they are written, too.
        """
        begun = time.perf_counter()
        if not outstanding:
            self.urge()
        with self._mutex:
            while len(self._waiting) + self._busy > outstanding:
                self._changed.wait()
        return time.perf_counter() - begun

    def settle(self) -> None:
        """Wait until every capture is committed, or has failed: the newest one twice, as no other makes up for it."""
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
        """A newer capture is begun: the one that storage did not take is given up."""
        with self._mutex:
            lost, self._lost = self._lost, None
        if lost is not None:
            self._recycle(lost)

    def take_error(self) -> CheckflowError | None:
        """The first error since the last call, if there was one."""
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
                self.last = outcome
                self._busy = False
                self.committed += outcome.error is None
                self.failed += outcome.error is not None
                self._note(capture, outcome)
                stays = self._lost is capture
                self._changed.notify_all()
            if not stays:
                self._recycle(capture)
            self.after_each()

    def _note(self, capture: Capture, outcome: Persisted) -> None:
        now, error = time.monotonic(), outcome.error
        if error is not None:
            self.last_failure = (now, f"{type(error).__name__}: {error}")
            self._error = self._error or error
            void = isinstance(error, ConsistencyError | WrittenError)
            if not void and capture is not self._again and self._newest(capture):
                self._lost, self._lost_error = capture, error
            return
        if capture is self._again and self._error is self._lost_error:
            self._error = None  # made up for
        self.durable = Durable(capture.step, capture.begun, now)
        self.persisted_bytes += outcome.size_bytes
        self.persist_seconds += outcome.seconds

    def _persist(self, capture: Capture) -> Persisted:
        begun = time.perf_counter()
        path, error = None, None
        try:
            self._audit(capture)
            path = self._commit(capture)
            if self._reason is not None:
                self._reason, self._untold = None, 0
                logger.info("checkpoint of step %d is saved: those that follow are as before", capture.step)
        except CheckflowError as reason:
            error = reason
            if isinstance(reason, WrittenError):
                with self._mutex:
                    self._written.append(reason.name)
            if isinstance(reason, ConsistencyError):
                self._void(capture)
            self._tell(capture, reason)
        except Exception as reason:
            # A fault of ours must not end the training job either; the traceback goes to the log.
            said = " ".join(str(reason).split())
            error = CheckflowError(f"checkpoint of step {capture.step}: {type(reason).__name__}: {said}")
            logger.exception("checkpoint of step %d failed, training goes on", capture.step)
        return Persisted(
            capture.step, path, error, time.perf_counter() - begun,
            sum(file.size_bytes for file in capture.layout.files), capture.digests is not None,
        )  # fmt: skip

    def _tell(self, capture: Capture, error: CheckflowError) -> None:
        """A full disk refuses one checkpoint after the other: each reason is told, and that it stays, now and then."""
        reason, now = _reason_of(error), time.monotonic()
        if reason == self._reason and now - self._told < _TELL_AGAIN_SECONDS and capture is not self._again:
            self._untold += 1
            logger.debug("checkpoint of step %d failed, training goes on: %s", capture.step, error)
            return
        more = f" (so did {self._untold} before it)" if self._untold and reason == self._reason else ""
        self._reason, self._told, self._untold = reason, now, 0
        logger.warning("checkpoint of step %d failed, training goes on: %s%s", capture.step, error, more)

    def _audit(self, capture: Capture) -> None:
        """Hold the staged bytes against the digests made at the boundary, those of settled tensors before it."""
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
    """Equal for failures that differ in the checkpoint alone."""
    cause = error.__cause__
    return type(error), (cause.errno if isinstance(cause, OSError) else str(error))


def _nothing() -> None:
    """Nobody wants to know."""
