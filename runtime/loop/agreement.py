"""What all ranks agree at boundaries: which ones are saved, and at which one training ends.

The training thread reads what the council has heard, and sends no message. It waits at the last boundary alone.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from checkflow.runtime.loop.preemption import Preemption
from checkflow.runtime.ranks.council import Council
from checkflow.runtime.ranks.member import View

_SCHEDULED = 16  # boundaries that a schedule names at most
_WAIT_SHARE = 0.6  # of the grace period: the rest is for the last checkpoint


class Agreement:
    """This is one rank's side of the agreement.

    Args:
        by_number: which boundaries are saved follows from their numbers alone.
        grace_seconds: from a signal to the end.

    Attributes:
        leads: whether this rank decides for all.
    """

    def __init__(self, council: Council, preemption: Preemption, *, by_number: bool, grace_seconds: float) -> None:
        self._council, self._preemption, self._grace_seconds = council, preemption, grace_seconds
        self.leads, self.world_size, self._by_number = council.rank == 0, council.world_size, by_number
        self._view: View = council.view
        self._scheduled: deque[int] = deque(maxlen=_SCHEDULED)  # rank 0's
        self._ends_by: float | None = None  # time.monotonic

    @property
    def ahead(self) -> int:
        """Return by how many iterations rank 0 decides before a boundary."""
        return 0 if self._by_number else self._council.overview.lead

    @property
    def plan_interval(self) -> int | None:
        """Rank 0: the longest of all ranks' plans, in iterations; 0: some have none; None: some have not said."""
        return self._council.overview.plan_interval

    def alike(self, own: bool, *, otherwise: bool) -> bool:
        """Return an answer that is the same on all ranks: ``otherwise``, since this rank alone knows ``own``.

        A process that trains alone answers ``own``.
        """
        return otherwise

    def note_plan(self, interval: int) -> None:
        """Another plan runs on this rank; 0: none."""
        self._council.note_plan(interval)

    def arrive(self, step: int) -> bool:
        """Training has come to a boundary; returns whether it ends there, or waits there until that is agreed."""
        if self._preemption.asked:
            self.ask_end()
        self._view = view = self._council.note_boundary(step)
        if not view.stops_at(step):
            return False
        if self._ends_by is None:
            left_seconds = self._grace_seconds if view.end is None else view.end.left_seconds
            self._ends_by = time.monotonic() + _WAIT_SHARE * left_seconds
        self._preemption.begin_ending()
        return True

    def is_saved(self, step: int) -> bool:
        """Return whether all ranks that end here save it: not where a rank is dead, or the grace period over."""
        return self._view.end is not None and self._view.end.at == step

    def ends_between(self) -> bool:
        """Return whether training ends between boundaries, where a signal asks for it: all ranks end at a boundary."""
        return False

    def is_due(self, step: int, ahead: int, *, wanted: bool) -> bool:
        """Return whether all ranks capture this boundary.

        Args:
            ahead: as :attr:`ahead` was when rank 0 decided.
            wanted: whether rank 0 wants the boundary that is so many iterations ahead of this one.
        """
        if self._by_number:
            return wanted
        if not self.leads:
            return step in self._view.scheduled
        if wanted and ahead and (not self._scheduled or self._scheduled[-1] < step):
            self._scheduled.append(step + ahead)
            self._council.schedule(tuple(self._scheduled))
        return step in self._scheduled

    def follow(self, under_way: Callable[[], bool]) -> None:
        """The training loop says whether an iteration has begun since the last boundary."""
        self._council.under_way = under_way

    def over(self, step: int | None) -> None:
        """Training has ended on this rank after this iteration; None: another loop begins."""
        self._council.note_over(step)

    def leave(self, step: int, *, captured: bool, ending: bool = False) -> bool:
        """Go on from a boundary; returns whether training ends there instead, as all ranks have agreed.

        Args:
            ending: what :meth:`arrive` has returned.
        """
        if not ending:
            self._council.leave_boundary(step, captured=captured)
            return False
        left_seconds = 0.0 if self._ends_by is None else max(0.0, self._ends_by - time.monotonic())
        if not self._council.await_end(step, captured=captured, wait_seconds=left_seconds):
            self._preemption.goes_on()
            return False
        view = self._council.view
        other = "a rank that does not answer" if view.silent else "another rank"
        self._preemption.ask_for_others(other if view.end is None else view.end.reason)
        return True

    def ask_end(self) -> None:
        """A signal asks this rank to end, and so all. Any thread may call it, more than once."""
        self._council.request_end(self._preemption.name or "a signal", self._grace_seconds)


class LoneAgreement(Agreement):
    """A process that trains alone agrees with itself: it saves what it wants, and ends as soon as a signal asks."""

    @property
    def ahead(self) -> int:
        return 0

    def alike(self, own: bool, *, otherwise: bool) -> bool:
        return own

    def arrive(self, step: int) -> bool:
        return self._preemption.begin_ending()

    def is_saved(self, step: int) -> bool:
        return True

    def ends_between(self) -> bool:
        return self._preemption.begin_ending()

    def is_due(self, step: int, ahead: int, *, wanted: bool) -> bool:
        return wanted
