"""One look at the meeting place, and what follows: get, decide, put. The caller has the clock and the thread."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from checkflow.core.errors import StorageError
from checkflow.runtime.ranks.chair import Chair
from checkflow.runtime.ranks.meeting import MeetingPlace
from checkflow.runtime.ranks.member import Member, View
from checkflow.runtime.ranks.records import BOARD, CARD, RECEIPT, Board, Card, dumps, loads

Event = Callable[[Member, Chair | None, float], None]
BOARD_KEY = "board"


def card_key(rank: int) -> str:
    return f"card/{rank}"


def receipt_key(attempt: int, rank: int) -> str:
    return f"receipt/{attempt}/{rank}"


class Rounds:
    """The rounds of one rank.

    Args:
        chair: rank 0's.
        beat_seconds: how often a card or board that has not changed is put again, as a sign of life.
        publish: called with each view, before events are taken in.
    """

    def __init__(
        self, member: Member, chair: Chair | None, world_size: int, beat_seconds: float, publish: Callable[[View], None]
    ) -> None:
        self.member, self.chair = member, chair
        self._world_size, self._beat_seconds, self._publish = world_size, beat_seconds, publish
        self._sent: dict[str, tuple[Any, float]] = {}  # by key: what was said last, and when
        self._serial = 0
        self._posted: list[str] = []  # receipts of this rank at the place
        self._own_board: Board | None = None
        self.fault: StorageError | None = None  # of the last round: the place could not be reached

    def run(self, place: MeetingPlace, now: float, events: Callable[[], Iterable[Event]]) -> None:
        """One round. An unreachable place delays what it brings, and no decision that time makes."""
        self.fault = None
        try:
            self._get(place, now)
        except StorageError as error:
            self.fault = error
        if self._own_board is not None:
            self.member.hear(self._own_board, now)
        self._publish(self.member.view(now))
        for event in events():  # after the view is there, before the card is made: see member.py
            event(self.member, self.chair, now)
        self._serial += 1
        card = self.member.card(self._serial)
        if self.chair is not None:
            self.chair.hear(card, now)
            for receipt in list(self.member.outbox.values()):
                self.chair.hear_receipt(receipt, now)
                self.member.posted(receipt.attempt)
            self.chair.tick(now)
            self._own_board = self.chair.board(self._serial)
        try:
            self._put(place, card, now)
        except StorageError as error:
            self.fault = error

    def _get(self, place: MeetingPlace, now: float) -> None:
        if self.chair is None:
            found = place.get([BOARD_KEY])
            if BOARD_KEY in found:
                self.member.hear(loads(BOARD, found[BOARD_KEY], "rank 0's board"), now)
            return
        others = {card_key(rank): rank for rank in range(1, self._world_size)}
        for key, value in place.get(list(others)).items():
            self.chair.hear(loads(CARD, value, f"the card of rank {others[key]}"), now)
        number, ranks = self.chair.wanted()
        posted = {receipt_key(number, rank): rank for rank in ranks}
        for key, value in place.get(list(posted)).items() if posted else ():
            self.chair.hear_receipt(loads(RECEIPT, value, f"a receipt of rank {posted[key]}"), now)

    def _put(self, place: MeetingPlace, card: Card, now: float) -> None:
        if self.chair is None:
            for attempt, receipt in list(self.member.outbox.items()):
                key = receipt_key(attempt, self.member.rank)
                place.put(key, dumps(RECEIPT, receipt))
                self.member.posted(attempt)
                self._posted.append(key)
                card = self.member.card(self._serial)  # says so
            if self._is_news(card_key(card.rank), card, now):
                place.put(card_key(card.rank), dumps(CARD, card))
                self._sent[card_key(card.rank)] = card, now
            if len(self._posted) > 2:  # rank 0 reads the newest alone
                place.drop(self._posted[:-2])
                del self._posted[:-2]
            return
        board = self._own_board
        assert board is not None
        if self._is_news(BOARD_KEY, board, now):
            place.put(BOARD_KEY, dumps(BOARD, board))
            self._sent[BOARD_KEY] = board, now

    def _is_news(self, key: str, value: object, now: float) -> bool:
        said = self._sent.get(key)
        return said is None or said[0] != value or now - said[1] >= self._beat_seconds
