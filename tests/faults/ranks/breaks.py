"""Ways to break the agreement of several ranks, so that the kills can be seen to fail: ``make ranks-kills BREAK=name``.

Each takes away one thing that a promise rests on, in the ranks' processes; nothing on disk is changed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from checkflow.runtime.format import manifest
from checkflow.runtime.ranks import joining, receipts
from checkflow.runtime.ranks.chair import Chair
from checkflow.runtime.ranks.records import Receipt
from checkflow.runtime.start.ranks import RankStart
from checkflow.runtime.store.discovery import find
from checkflow.runtime.store.files import parse_step


def without_coverage() -> None:
    """A version is made of the receipts that came first, whatever they cover."""

    def collected(self: Chair) -> tuple[int, Mapping[int, Receipt]]:
        attempt = self.open_attempt
        enough = attempt is not None and len(self._receipts) >= self.world_size - 1
        return (attempt.number, dict(self._receipts)) if attempt is not None and enough else (0, {})

    Chair.collected = collected  # type: ignore[method-assign]
    receipts.check_version = lambda found, *rest: tuple(found.values())
    manifest.tensor_problem = lambda tensor, files: ""


def one_generation() -> None:
    """Each start takes the last one's word for its own."""
    joining.agree_generation = lambda *arguments: "same"


def own_start() -> None:
    """Other ranks than 0 restore the newest version but one, whatever was agreed."""
    made = RankStart.__init__

    def make(self: RankStart, *arguments: Any, **named: Any) -> None:
        made(self, *arguments, **named)
        steps = [step for path in find(self.store.directory) if (step := parse_step(path.name)) is not None]
        if self.council.rank and len(steps) > 1:
            object.__setattr__(self, "step", steps[1])  # it is frozen

    RankStart.__init__ = make  # type: ignore[method-assign]


BREAKS: dict[str, Callable[[], None]] = {one.__name__: one for one in (without_coverage, one_generation, own_start)}
