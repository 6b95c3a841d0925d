"""Where training ends: rank 0's decision from all ranks' cards. Pure; who leaves early would hang the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from checkflow.runtime.ranks.records import Card, End, Uneven

_MOST_NAMED = 9  # ranks


def go_on(
    end: End | None, cards: Mapping[int, Card], world_size: int, silent: tuple[int, ...], lead: int
) -> End | None:
    """The end as rank 0 is to publish it, from the one published before.

    A proposal names a boundary ``lead`` iterations ahead of the foremost rank. A rank that is past it gets a later one.
    It is agreed when all ranks have promised to stop there. With a dead rank nobody tries to reach a boundary.
    """
    asked = [card.end_asked for _, card in sorted(cards.items()) if card.end_asked is not None]
    if end is None and not asked:
        return None
    if end is not None and (end.agreed or end.at is None):
        return end
    reason, left_seconds = (end.reason, end.left_seconds) if end is not None else (asked[0].reason, 0.0)
    if asked and end is None:
        left_seconds = min(one.left_seconds for one in asked)
    number = 1 if end is None else end.number + 1
    if silent:
        return End(number, None, reason, left_seconds)
    proposal = End(number, max(card.passed for card in cards.values()) + lead, reason, left_seconds)
    if end is None:
        return proposal
    acks = [card.ack for card in cards.values() if card.ack is not None and card.ack.number == end.number]
    if any(ack.late for ack in acks):
        return proposal
    return replace(end, agreed=len(acks) == world_size)


def compare(cards: Mapping[int, Card]) -> Uneven | None:
    """Where training has ended, and which ranks train on; None: it has ended nowhere."""
    over = {rank: card.over for rank, card in sorted(cards.items()) if card.over is not None}
    if not over:
        return None
    at = min(over.values())
    ended = [rank for rank, iteration in over.items() if iteration == at]
    going = [
        rank
        for rank, card in sorted(cards.items())
        if (card.passed > at or card.goes_on if card.over is None else card.over > at)
    ]
    return Uneven(at, tuple(ended[:_MOST_NAMED]), tuple(going[:_MOST_NAMED]))
