"""Ways to break the council, so that what the simulation checks can be seen to fail: each takes away one check."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from checkflow.runtime.ranks import chair, ending, member, receipts, records
from checkflow.runtime.ranks.records import Card, End, Receipt

Patch = tuple[Any, str, Any]  # an object, its attribute, and what stands there instead


def _promise_before_looking(self: member.Member) -> None:
    """A rank acknowledges whatever boundary it is told of, even one that it has passed."""
    end = None if self._board is None else self._board.end
    if end is not None and end.at is not None:
        self._card = replace(self._card, ack=records.Ack(end.number, late=False))


def _do_without_all(
    end: End | None, cards: dict[int, Card], world_size: int, silent: Sequence[int], lead: int
) -> End | None:
    """The end is agreed when one rank has acknowledged it."""
    found = _GO_ON(end, cards, world_size, tuple(silent), lead)
    acked = found is not None and any(
        card.ack is not None and card.ack.number == found.number for card in cards.values()
    )
    return replace(found, agreed=True) if found is not None and found.at is not None and acked else found


_GO_ON = ending.go_on


def _without_coverage(*named: Any) -> Any:
    """Receipts make a version whatever the files hold."""
    return _CHECK_VERSION(*named[:-1], lambda ordered: None)


_CHECK_VERSION = receipts.check_version

#: By name: what is broken, and what the simulation must then say.
BREAKS: dict[str, tuple[Patch, str]] = {
    "no_generation": (
        (records, "is_of", lambda record, generation: isinstance(record, Receipt) or record.generation == generation),
        "mixed steps",
    ),
    "no_coverage": ((receipts, "check_version", _without_coverage), "not covered"),
    "no_deadline_for_receipts": (
        (chair.Chair, "_overdue", lambda self, now: False),
        "waited too long for the receipts",
    ),
    "no_deadline_for_the_end": ((member.Member, "_end_by", lambda self, deadline: None), "waited too long for the end"),
    "promise_before_looking": ((member.Member, "_acknowledge", _promise_before_looking), "left at"),
    "end_without_all": ((ending, "go_on", _do_without_all), "left at"),
}
