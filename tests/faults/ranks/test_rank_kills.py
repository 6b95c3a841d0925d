"""A short form of ``make ranks-kills``, and that its checks can fail."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.faults.ranks.checks import check, make_reference
from tests.faults.ranks.job import KINDS
from tests.faults.ranks.places import PHASES, owner_of
from tests.faults.ranks.run import kill


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize("kind", KINDS)
def test_kills_of_ranks_lose_nothing(tmp_path: Path, kind: str) -> None:
    *_, tally = kill(3, 3, tmp_path, kinds=[kind])
    assert tally.problems == []
    assert tally.kills == 3
    assert tally.boundaries > 0


@pytest.mark.slow
def test_a_start_that_is_not_agreed_is_found(tmp_path: Path) -> None:
    *_, tally = kill(20, 1, tmp_path, kinds=["fsdp"], breaking="own_start")
    assert tally.problems


def line(event: str, step: int, at: float, shared: str = "a", **more: Any) -> dict[str, Any]:
    return {"event": event, "step": step, "at": at, "shared": shared, "own": "b", "drawn": "c", "start": "1.0", **more}


def durable(step: int, at: float) -> dict[str, Any]:
    return {"event": "durable", "step": step, "at": at}


WHOLE = [line("boundary", 1, 1.0, "x"), line("boundary", 2, 2.0, "y"), line("ended", 2, 3.0, "y")]


@pytest.mark.parametrize(
    ("mine", "other", "problem"),
    [
        (line("restored", 1, 6.0, "x"), line("restored", 1, 6.0, "x"), None),
        (line("restored", 1, 6.0, "x"), line("restored", 2, 6.0, "y"), "start 1.0: the ranks restored different steps"),
        (line("restored", 1, 6.0, "y"), line("restored", 1, 6.0, "x"), "rank 0 holds another state at step 1"),
        (line("restored", 3, 6.0, "x"), line("restored", 3, 6.0, "x"), "rank 0 holds another state at step 3"),
        (line("restored", 1, 6.0, "x", own="d"), line("restored", 1, 6.0, "x"), "rank 0 holds another state at step 1"),
        (line("restored", 1, 6.0, "x", drawn="d"), line("restored", 1, 6.0, "x"), None),
        (line("boundary", 1, 6.0, "x", drawn="d"), line("boundary", 1, 6.0, "x"), "rank 0 holds another state"),
    ],
)
def test_what_is_not_as_it_was_is_found(mine: dict[str, Any], other: dict[str, Any], problem: str | None) -> None:
    reference = make_reference([WHOLE, WHOLE], (0, 0))
    starts = {"event": "starts", "at": 5.0}
    found = check([[starts, mine], [starts, other]], reference)
    assert problem is None or problem in found[0] + found[-1]
    assert bool(found) == (problem is not None)


def test_what_was_acknowledged_before_a_start_must_be_restored() -> None:
    reference = make_reference([WHOLE, WHOLE], (0, 1))
    restored = [{"event": "starts", "at": 5.0}, line("restored", 1, 6.0, "x")]
    assert check([restored, [durable(1, 4.0), durable(2, 5.5), *restored]], reference) == []
    lost = check([restored, [durable(2, 4.0), *restored]], reference)
    assert lost == [f"rank {rank} restored step 1, and step 2 was acknowledged" for rank in (0, 1)]


def test_replicas_that_differ_are_no_reference() -> None:
    other = [line("boundary", 1, 1.0, "x"), line("boundary", 2, 2.0, "z"), line("ended", 2, 3.0, "z")]
    make_reference([WHOLE, other], (0, 1))
    with pytest.raises(AssertionError, match=r"replicas differ without any kill, at steps \[2\]"):
        make_reference([WHOLE, other], (0, 0))


@pytest.mark.parametrize("phase", PHASES)
def test_each_phase_is_there(phase: str) -> None:
    for path, name in PHASES[phase][1]:
        assert callable(getattr(owner_of(path), name))
