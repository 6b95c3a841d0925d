"""One rank in the council, as a state machine: events and rank 0's board in, this rank's card and view out.

It has no clock, no thread and no torch. The training thread tells that it has *arrived* at a boundary before it reads
the view, and afterwards whether it *passed* or *waits* there. Whoever drives this machine publishes a view first, takes
in those events next, and asks for the card last: so a rank that has promised to stop at a boundary cannot go past it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from checkflow.core.reports.run_report import RankCosts
from checkflow.runtime.ranks import records
from checkflow.runtime.ranks.records import (
    Ack,
    Attempt,
    Board,
    Card,
    End,
    EndAsked,
    Receipt,
    Refusal,
    Start,
    StartReport,
    Uneven,
)

_CAPTURED = 64  # boundaries that a card names at most
_RECENT = 0.3  # weight of the newest measurement of an iteration


@dataclass(frozen=True, slots=True)
class View:
    """What a rank knows, for the training thread to read. A new one replaces it.

    Attributes:
        end: the boundary at which all ranks are to end, as far as rank 0 has said.
        end_now: nobody tries to reach a boundary: a rank is dead, or the grace is over.
        silent: ranks that do not answer, by rank 0's word; rank 0 itself, if its board does not change.
        capture_seconds, uneven: see :class:`.records.Board`.
    """

    scheduled: tuple[int, ...] = ()
    start: Start = field(default_factory=Start)
    refusal: Refusal | None = None
    attempts: tuple[Attempt, ...] = ()
    end: End | None = None
    end_now: bool = False
    silent: tuple[int, ...] = ()
    capture_seconds: float = 0.0
    uneven: Uneven | None = None

    def stops_at(self, step: int) -> bool:
        """Whether training ends at this boundary, or waits here until that is agreed."""
        # With ``end_now`` too: a rank that has promised to stop must not pass because its grace is over.
        return self.end_now or (self.end is not None and self.end.at == step)

    def attempt(self, number: int) -> Attempt | None:
        return next((one for one in self.attempts if one.number == number), None)


class Member:
    """One rank.

    Args:
        now: in seconds, by the clock of all later calls.
        silent_seconds: after which a board that does not change means that rank 0 is dead.
    """

    def __init__(self, rank: int, generation: str, now: float, silent_seconds: float) -> None:
        self.rank, self.generation = rank, generation
        self._silent_seconds, self._heard = silent_seconds, now
        self._board: Board | None = None
        self._card = Card(rank, generation, 0)
        self._arrived = self._passed = 0
        self._waits: int | None = None
        self._timed: tuple[int, float] | None = None  # a boundary, and when it was passed
        self._end_deadline: float | None = None
        self.outbox: dict[int, Receipt] = {}  # by attempt: not yet at the meeting place

    # Rank 0's word

    def hear(self, board: Board, now: float) -> None:
        """Take in a board, unless it is of another start of the job or not newer."""
        if not records.is_of(board, self.generation):
            return
        if self._board is not None and board.serial <= self._board.serial:
            return
        self._board, self._heard = board, now
        if board.end is not None:
            self._end_by(now + board.end.left_seconds)
        for attempt in board.attempts:
            if attempt.ended:
                self.outbox.pop(attempt.number, None)
        done = max((one.step for one in board.attempts if one.ended == "committed"), default=-1)
        self._forget_before(done + 1)

    def view(self, now: float) -> View:
        board = self._board
        alone = now - self._heard >= self._silent_seconds
        if board is None:
            ended = self._end_deadline is not None and (alone or now >= self._end_deadline)
            return View(end_now=ended, silent=(0,) if alone else ())
        end, agreed = board.end, board.end is not None and board.end.agreed
        gone = alone or bool(board.left)
        hopeless = gone and not agreed
        overdue = self._end_deadline is not None and now >= self._end_deadline
        end_now = (self._end_deadline is not None and (hopeless or overdue)) or (end is not None and end.at is None)
        silent = tuple(sorted({*board.silent, 0})) if gone else board.silent
        return View(
            board.scheduled, board.start, board.refusal, board.attempts, end, end_now, silent, board.capture_seconds,
            board.uneven,
        )  # fmt: skip

    # What happens here

    def arrived(self, step: int) -> None:
        """Training has come to a boundary, and reads the view next."""
        self._arrived = max(self._arrived, step)

    def passed(self, step: int, now: float, *, captured: bool) -> None:
        """Training goes on from a boundary."""
        self._leave(step, captured=captured)
        if self._timed is not None and step > self._timed[0]:
            seconds = (now - self._timed[1]) / (step - self._timed[0])
            known = self._card.iteration_seconds
            # The first ones are slow. Notice must be given in time for fast ones.
            seconds = seconds if not known else min(seconds, _RECENT * seconds + (1 - _RECENT) * known)
            self._card = replace(self._card, iteration_seconds=seconds)
        self._timed = step, now
        self._waits, self._passed = None, max(self._passed, step)

    def waits(self, step: int, *, captured: bool) -> None:
        """Training waits at a boundary until the end is agreed."""
        self._leave(step, captured=captured)
        self._waits = step

    def dropped(self, step: int) -> None:
        """The capture of a boundary is lost, or a newer one has replaced it."""
        self._card = replace(self._card, captured=tuple(one for one in self._card.captured if one != step))

    def post(self, receipt: Receipt) -> None:
        """A receipt is to be brought to the meeting place."""
        self.outbox[receipt.attempt] = receipt
        self._card = replace(self._card, persist_seconds=receipt.persist_seconds)

    def posted(self, attempt: int) -> None:
        """A receipt is at the meeting place."""
        self.outbox.pop(attempt, None)
        self._card = replace(self._card, posted=max(self._card.posted, attempt))

    def ask_end(self, reason: str, now: float, grace_seconds: float) -> None:
        """A signal asks this rank to end. The first one counts."""
        if self._card.end_asked is None:
            self._card = replace(self._card, end_asked=EndAsked(reason, grace_seconds))
            self._end_by(now + grace_seconds)

    def report(self, start: StartReport) -> None:
        self._card = replace(self._card, start=start)

    def refuse(self, refusal: Refusal) -> None:
        """This rank cannot start, so none may."""
        self._card = replace(self._card, refusal=refusal)

    def plan(self, interval: int) -> None:
        """Another plan runs here, with this interval; 0: none."""
        self._card = replace(self._card, plan_interval=interval)

    def tell_costs(self, held_seconds: float, copied_bytes: int, written_bytes: int, failed: int) -> None:
        """What checkpoints have cost this rank so far."""
        persist_seconds = self._card.persist_seconds
        costs = RankCosts(self.rank, held_seconds, persist_seconds, copied_bytes, written_bytes, failed)
        self._card = replace(self._card, costs=costs)

    def over(self, step: int | None) -> None:
        """Training has ended here after this iteration; None: another loop begins."""
        self._card = replace(self._card, over=step)

    def goes_past(self, step: int, *, under_way: bool) -> bool:
        """Take note of whether training goes on past an iteration: it is over on another rank.

        Args:
            under_way: whether an iteration has begun since the last boundary.
        """
        goes_on = self._card.over is None and (self._passed > step or (self._passed == step and under_way))
        self._card = replace(self._card, goes_on=goes_on)
        return goes_on

    def leave(self, reason: str) -> None:
        """This rank takes part no longer."""
        self._card = replace(self._card, left=reason)

    def card(self, serial: int) -> Card:
        """What this rank says now."""
        self._acknowledge()
        return replace(self._card, serial=serial)

    def _acknowledge(self) -> None:
        end = None if self._board is None else self._board.end
        if end is None or end.at is None or (self._card.ack is not None and self._card.ack.number >= end.number):
            return
        if self._waits == end.at or self._arrived < end.at:
            self._card = replace(self._card, ack=Ack(end.number, late=False))
        elif self._passed >= end.at:
            self._card = replace(self._card, ack=Ack(end.number, late=True))
        # Otherwise training is between its arrival and what it does there: the next card says.

    def _leave(self, step: int, *, captured: bool) -> None:
        self._arrived = max(self._arrived, step)
        card = replace(self._card, passed=max(self._card.passed, step))
        if captured and step not in card.captured:
            card = replace(card, captured=(*card.captured, step))
        self._card = card
        if len(card.captured) > _CAPTURED:
            self._forget_before(card.captured[-_CAPTURED])

    def _forget_before(self, since: int) -> None:
        captured = tuple(step for step in self._card.captured if step >= since)
        self._card = replace(self._card, captured=captured, since=max(self._card.since, since))

    def _end_by(self, deadline: float) -> None:
        self._end_deadline = deadline if self._end_deadline is None else min(self._end_deadline, deadline)
