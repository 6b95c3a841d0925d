"""Rank 0's part of the council, as a state machine: all ranks' cards and receipts in, the board out.

It has no clock, no thread and no torch. :meth:`Chair.tick` decides what time decides: who is dead, which attempt has
failed, where training ends.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from checkflow.core.reports.run_report import RankCosts
from checkflow.runtime.ranks import ending, records, starting
from checkflow.runtime.ranks.receipts import wait_seconds
from checkflow.runtime.ranks.records import (
    Attempt,
    Board,
    Card,
    Ended,
    Receipt,
    Start,
    StartReport,
    name_ranks,
)

_FIRST_NOTICE_SECONDS, _LONGEST_NOTICE_SECONDS = 0.25, 8.0
_FIRST_LEAD, _MOST_LEAD = 2, 100_000  # iterations
_SPAN_SECONDS = 10.0  # of which a capture is counted in multiples, so that the board seldom changes
_DOUBT_SECONDS = 1.0  # a card may be older than the capture of the last boundary, which training had passed


@dataclass(frozen=True, slots=True)
class Overview:
    """What rank 0's policy knows of all ranks.

    Attributes:
        passed: the boundary that the foremost rank has passed.
        lead: by how many iterations a decision is to come before its boundary, so that all ranks learn of it in time;
            0: not known yet.
        plan_interval: the longest of the ranks' plans, in iterations; 0: some have none; None: some have not said.
        reports: what each rank brings to the start, if all have come.
        left: ranks that take part no longer.
        costs: what checkpoints have cost each rank that has said so.
    """

    passed: int = 0
    lead: int = 0
    plan_interval: int | None = None
    reports: Mapping[int, StartReport] = field(default_factory=dict)
    left: tuple[int, ...] = ()
    costs: tuple[RankCosts, ...] = ()


class Chair:
    """Rank 0's machine.

    Args:
        now: in seconds, by the clock of all later calls.
        silent_seconds: after which a card that does not change means that its rank is dead.
        start_seconds: within which all ranks come to the start.
    """

    def __init__(
        self, generation: str, world_size: int, now: float, *, silent_seconds: float, start_seconds: float
    ) -> None:
        self.generation, self.world_size = generation, world_size
        self._silent_seconds, self._start_by = silent_seconds, now + start_seconds
        self.cards: dict[int, Card] = {}
        self._heard: dict[int, float] = {}
        self._notice_seconds = _FIRST_NOTICE_SECONDS
        self._board = Board(generation, 0, world_size)
        self._receipts: dict[int, Receipt] = {}  # of the open attempt
        self._deadline, self._opened = math.inf, now  # of the open attempt
        self._given_seconds: float | None = None  # for its receipts
        self._numbers = 0

    # What comes in

    def hear(self, card: Card, now: float) -> None:
        """Take in a card, unless it is of another start of the job or not newer."""
        known = self.cards.get(card.rank)
        if not records.is_of(card, self.generation) or card.rank >= self.world_size:
            return
        if known is None or card.serial > known.serial:
            self.cards[card.rank], self._heard[card.rank] = card, now

    def hear_receipt(self, receipt: Receipt, now: float) -> None:
        """Take in a receipt of the open attempt; others are dropped. Rank 0's own starts the deadline."""
        attempt = self.open_attempt
        if attempt is None or receipt.attempt != attempt.number or not records.is_of(receipt, self.generation):
            return
        self._receipts.setdefault(receipt.rank, receipt)
        if receipt.rank == 0 and self._deadline == math.inf:
            patience_seconds = wait_seconds(receipt.persist_seconds) + self._board.capture_seconds
            self._deadline = now + (patience_seconds if self._given_seconds is None else self._given_seconds)

    # What rank 0 decides

    def schedule(self, steps: tuple[int, ...]) -> None:
        self._board = replace(self._board, scheduled=steps)

    def reclaim(self, run_id: str, dead_run_id: str) -> None:
        """All ranks have come: each attempt until :meth:`resume` puts a dead run's captures on storage."""
        if self._board.start.stage == "reports":
            self._board = replace(self._board, start=Start("reclaim", run_id=run_id, dead_run_id=dead_run_id))

    def tell_best(self, best: tuple[tuple[int, float], ...]) -> None:
        """The best checkpoints on storage, by which all ranks judge further ones."""
        self._board = replace(self._board, start=replace(self._board.start, best=best))

    def resume(self, step: int | None, run_id: str) -> None:
        """All ranks have come: they restore this step, or begin anew."""
        start = self._board.start
        if start.stage in ("reports", "reclaim"):
            names = {card.start.names for card in self.cards.values() if card.start is not None}
            start = replace(start, stage="restore", step=step, run_id=run_id, pipelined=len(names) > 1)
            self._board = replace(self._board, start=start)

    def settle(self) -> None:
        """The damaged version that a refusal speaks of is set aside, or was found whole."""
        if self._board.refusal is not None:
            self._board = replace(self._board, refusal=replace(self._board.refusal, settled=True))

    def open(self, step: int, now: float, patience_seconds: float | None = None) -> int:
        """Open an attempt to write a version; returns its number. An open one before it has failed.

        Args:
            patience_seconds: for the other ranks' receipts, from rank 0's own one on; None: by what that one says.
        """
        if self.open_attempt is not None:
            self.conclude(self.open_attempt.number, "failed", f"step {step} was begun before it was complete")
        self._numbers += 1
        self._board = self._board.with_attempt(Attempt(self._numbers, step))
        self._receipts, self._deadline, self._opened = {}, math.inf, now
        self._given_seconds = patience_seconds
        return self._numbers

    def conclude(self, number: int, ended: Ended, reason: str = "", missing: tuple[int, ...] = ()) -> None:
        """How an open attempt has ended. The first word counts."""
        attempt = self.open_attempt
        if attempt is not None and attempt.number == number:
            self._board = self._board.with_attempt(replace(attempt, ended=ended, reason=reason, missing=missing))

    def leave(self, reason: str) -> None:
        self._board = replace(self._board, left=reason)

    # What comes out

    @property
    def open_attempt(self) -> Attempt | None:
        newest = self._board.attempts[-1] if self._board.attempts else None
        return newest if newest is not None and not newest.ended else None

    def collected(self) -> tuple[int, Mapping[int, Receipt]]:
        """The open attempt's number and all ranks' receipts of it; 0 where some are missing."""
        attempt = self.open_attempt
        whole = attempt is not None and len(self._receipts) == self.world_size
        return (attempt.number, dict(self._receipts)) if attempt is not None and whole else (0, {})

    def wanted(self) -> tuple[int, list[int]]:
        """The open attempt's number, and the ranks that have posted receipts which were not heard."""
        attempt = self.open_attempt
        if attempt is None:
            return 0, []
        return attempt.number, [
            rank for rank, card in self.cards.items() if card.posted >= attempt.number and rank not in self._receipts
        ]

    def board(self, serial: int) -> Board:
        return replace(self._board, serial=serial)

    def overview(self) -> Overview:
        reports = {rank: card.start for rank, card in sorted(self.cards.items()) if card.start is not None}
        return Overview(
            max((card.passed for card in self.cards.values()), default=0),
            self._lead(),
            self._plan_interval(),
            reports if len(reports) == self.world_size and self._board.refusal is None else {},
            tuple(rank for rank, card in sorted(self.cards.items()) if card.left),
            tuple(card.costs for _, card in sorted(self.cards.items()) if card.costs is not None),
        )

    # What time decides

    def tick(self, now: float) -> None:
        """Decide all that can be decided now."""
        silent = tuple(
            rank
            for rank in range(self.world_size)
            if (rank in self.cards and (self.cards[rank].left or now - self._heard[rank] >= self._silent_seconds))
            or (rank not in self.cards and now >= self._start_by)
        )
        board = self._board
        start, refusal = board.start, board.refusal
        if refusal is None:
            start, refusal = starting.go_on(start, self.cards, self.world_size, silent)
        end = ending.go_on(board.end, self.cards, self.world_size, silent, self._lead() or _FIRST_LEAD)
        if end is not None and board.end is not None and end.number > board.end.number:
            # A rank was past the boundary: news takes longer than was thought.
            self._notice_seconds = min(2 * self._notice_seconds, _LONGEST_NOTICE_SECONDS)
        self._board = replace(
            board, silent=silent, start=start, refusal=refusal, end=end, capture_seconds=self._capture_seconds(),
            uneven=ending.compare(self.cards),
        )  # fmt: skip
        self._settle(now)

    def _lead(self) -> int:
        iteration_seconds = min((card.iteration_seconds for card in self.cards.values()), default=0.0)
        if not iteration_seconds or len(self.cards) < self.world_size:
            return 0
        return min(_MOST_LEAD, 1 + math.ceil(self._notice_seconds / iteration_seconds))

    def _capture_seconds(self) -> float:
        spans = ((card.plan_interval or 0) * card.iteration_seconds for card in self.cards.values())
        return max(spans, default=0.0) // _SPAN_SECONDS * _SPAN_SECONDS

    def _plan_interval(self) -> int | None:
        intervals = [card.plan_interval for card in self.cards.values() if card.plan_interval is not None]
        if 0 in intervals:
            return 0
        return max(intervals) if len(intervals) == self.world_size else None

    def _settle(self, now: float) -> None:
        """End the open attempt as soon as it cannot become a version."""
        attempt = self.open_attempt
        if attempt is None:
            return
        missing = tuple(rank for rank in range(self.world_size) if rank not in self._receipts)
        for rank, receipt in sorted(self._receipts.items()):
            if receipt.failure:
                self.conclude(attempt.number, "failed", f"rank {rank}: {receipt.failure}")
                return
        skipped = tuple(rank for rank in missing if self._skipped(rank, attempt.step))
        if skipped and now - self._opened >= _DOUBT_SECONDS:
            reason = f"{name_ranks(skipped)} passed step {attempt.step} without a capture of it"
            self.conclude(attempt.number, "void", reason, skipped)
            return
        dead = tuple(rank for rank in missing if rank in self._board.silent)
        if dead:
            reason = self._ended_before(dead, attempt.step) or (
                f"{name_ranks(dead)} of {self.world_size} ended or does not answer"
            )
            self.conclude(attempt.number, "failed", reason, dead)
            return
        if missing and self._overdue(now):
            reason = self._ended_before(missing, attempt.step) or (
                f"no receipt of {name_ranks(missing)} of {self.world_size} for step {attempt.step} in time"
            )
            self.conclude(attempt.number, "failed", reason, missing)

    def _ended_before(self, missing: tuple[int, ...], step: int) -> str:
        """Why ranks are missing, if training has ended on them before this step."""
        uneven = self._board.uneven
        return str(uneven) if uneven is not None and uneven.at < step and {*uneven.ended} & {*missing} else ""

    def _overdue(self, now: float) -> bool:
        return now >= self._deadline

    def _skipped(self, rank: int, step: int) -> bool:
        """Whether a rank has no capture of a boundary, and will have none. It may capture the last one that it has
        passed, if a metric is recorded there.
        """
        card = self.cards.get(rank)
        return card is not None and card.passed > step >= card.since and step not in card.captured
