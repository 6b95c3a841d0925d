"""checkflow.resumable: interrupted at any batch, every loader's training goes on as if it had not been."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import foreign
import pytest


def check_every_capture(kind: Callable[[], Any], *, take: int | None = None, **loop: Any) -> None:
    foreign.seeded(1)
    whole = foreign.Loop(foreign.make(kind), **loop)
    whole.run(foreign.EPOCHS, take=take)
    end = foreign.drawn()
    whole.loader.end_workers()
    assert len(whole.captures) >= foreign.EPOCHS * 2
    for used, capture in whole.captures:
        foreign.seeded(100 + used)
        other = foreign.Loop(foreign.make(kind), **loop)
        other.go_on(capture)
        before = [row for row in whole.rows[:used] if row[0] == "validation"]
        in_epoch = used - 1 - max((i for i in range(used) if whole.rows[i][0] == "validation"), default=-1)
        other.run(foreign.EPOCHS, over=len(before), take=take, taken=in_epoch)
        assert other.rows == whole.rows[used:], f"after {used}"
        assert foreign.drawn() == end
        other.loader.end_workers()


# The same state means the end of an epoch, and the begin of the next: only a length tells that nothing is left.
AMBIGUOUS = ("own, at once", 0)


@pytest.mark.parametrize("ahead", [None, 0, 1, 3])
@pytest.mark.parametrize("kind", foreign.KINDS)
def test_goes_on_from_every_batch(kind: str, ahead: int | None) -> None:
    if (kind, ahead) != AMBIGUOUS:
        check_every_capture(foreign.KINDS[kind], ahead=ahead)


@pytest.mark.parametrize("ahead", [None, 1])
@pytest.mark.parametrize("kind", foreign.WORKERS)
def test_goes_on_with_workers(kind: str, ahead: int | None) -> None:
    check_every_capture(foreign.WORKERS[kind], ahead=ahead)


@pytest.mark.parametrize("kind", foreign.KINDS)
def test_goes_on_in_epochs_that_the_loop_counts(kind: str) -> None:
    check_every_capture(foreign.KINDS[kind], counted=False)


@pytest.mark.parametrize("kind", foreign.KINDS)
def test_goes_on_after_epochs_left_early(kind: str) -> None:
    check_every_capture(foreign.KINDS[kind], take=2)
