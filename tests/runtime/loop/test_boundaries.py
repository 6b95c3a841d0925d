"""Where an iteration ends, in every kind of loop: the events of a loop, and the boundaries that they show."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkflow.runtime.loop.boundaries import Boundaries, Boundary

Event = Callable[[Boundaries], Any]


def step(name: str = "optimizer") -> Event:
    return lambda loop: loop.optimizer_stepped(name)


def mark(micro_batches: int = 1, *, epoch_end: bool = False, ran: bool = True) -> Event:
    return lambda loop: loop.marked(micro_batches=micro_batches, epoch_end=epoch_end, ran=ran)


def turn(*, last: bool = False) -> Event:
    return lambda loop: loop.turn_ended(last=last)


def epoch(*, last: bool = False) -> Event:
    return lambda loop: loop.epoch_ended(last=last)


ran, batch, forward, end = (
    Boundaries.model_ran, Boundaries.batch_requested, Boundaries.forward, Boundaries.training_ended,
)  # fmt: skip
ahead, close = Boundaries.marking_begins, Boundaries.close
in_steps: Event = lambda loop: loop.loop_begins(in_steps=True)  # noqa: E731 - one of a list of events
in_epochs: Event = lambda loop: loop.loop_begins()  # noqa: E731
broken: Event = lambda loop: loop.loop_left(early=True, at_epoch_end=True)  # noqa: E731
done: Event = lambda loop: loop.loop_left(early=False)  # noqa: E731

ONE, TWO, NONE = ("optimizer",), ("generator", "critic"), ()
PLAIN, EPOCH, LAST = Boundary(), Boundary(epoch_end=True), Boundary(last=True)
MARKED = Boundary(explicit=True, micro_batches=1)

# optimizers, whether there is a loader, events, and the boundaries that these show
LOOPS: dict[str, tuple[tuple[str, ...], bool, list[Event], list[Boundary]]] = {
    "a batch after a step": (ONE, True, [batch, ran, step(), batch, ran, step(), end], [PLAIN, PLAIN]),
    "a batch without a step: gradients accumulate": (ONE, True, [batch, ran, batch, ran, step(), batch], [PLAIN]),
    "no event but the end": (ONE, True, [end], []),
    "an epoch's end": (ONE, True, [in_epochs, batch, ran, step(), epoch(), epoch()], [EPOCH]),
    "the last epoch's end": (ONE, True, [in_epochs, step(), epoch(last=True), done, end], [Boundary(True, True)]),
    "an epoch without a step": (ONE, True, [in_epochs, batch, ran, epoch(), end], []),
    "a turn of steps()": (ONE, False, [in_steps, ran, step(), turn(), step(), turn(last=True), done], [PLAIN, LAST]),
    "a turn without a step": (ONE, False, [in_steps, ran, turn(), ran, step(), turn()], [PLAIN]),
    "two optimizers, a turn": (TWO, False, [in_steps, step("critic"), turn(), step("generator"), turn()], [PLAIN] * 2),
    "a turn without optimizers": (NONE, False, [in_steps, turn(), turn()], [PLAIN, PLAIN]),
    "a forward after all steps": (ONE, False, [forward, ran, step(), forward, ran, step(), end], [PLAIN, PLAIN]),
    "a forward between two steps": (TWO, False, [step("critic"), forward, step("generator"), forward], [PLAIN]),
    "a forward, with a loader": (ONE, True, [step(), forward], []),
    "a forward in steps()": (ONE, False, [in_steps, step(), forward], []),
    "a forward after steps()": (ONE, False, [in_steps, step(), turn(), done, step(), forward], [PLAIN, PLAIN]),
    "a forward after a break": (ONE, False, [in_steps, step(), turn(), broken, step(), forward], [PLAIN]),
    "without optimizers, what ran": (NONE, True, [batch, ran, batch, batch, ran, end], [PLAIN, PLAIN]),
    "without optimizers, nothing but what ran": (NONE, False, [forward, ran, forward, ran, end], [PLAIN]),
    "step()": (ONE, True, [batch, ran, step(), mark(), batch, ran, step(), mark()], [MARKED, MARKED]),
    "step() alone, in its loops": (ONE, True, [mark(), step(), batch, forward, epoch(), turn(), end, mark()], [MARKED]),
    "step() at an epoch's end": (
        ONE, True, [step(), mark(3, epoch_end=True)], [Boundary(True, explicit=True, micro_batches=3)],
    ),
    "step() without a step": (ONE, True, [ran, mark(), end], []),
    "step() without optimizers": (NONE, True, [mark(), mark(ran=False), ran, mark(ran=False)], [MARKED, MARKED]),
    "batches fetched ahead": (ONE, True, [step(), ahead, batch, end, mark()], [MARKED]),
    "nothing once it is closed": (ONE, True, [step(), close, batch, epoch(), mark(), step(), end], []),
}  # fmt: skip


def boundaries_of(loop: Boundaries, events: list[Event]) -> list[Boundary]:
    found = []
    for event in events:
        if (boundary := event(loop)) is not None:
            found.append(boundary)
            loop.passed()
    return found


@pytest.mark.parametrize("name", LOOPS)
def test_each_kind_of_loop_has_its_boundaries(name: str) -> None:
    optimizers, loader, events, expected = LOOPS[name]
    assert boundaries_of(Boundaries(optimizers, loader=loader), events) == expected


def test_an_end_that_was_not_passed_is_found_again() -> None:
    """A checkpoint that raises at a boundary leaves the iteration uncounted: the next event ends it."""
    loop = Boundaries(ONE, loader=True)
    loop.optimizer_stepped("optimizer")
    assert loop.batch_requested() == loop.batch_requested() == PLAIN
    assert not loop.any_passed
    loop.passed()
    assert loop.any_passed
    assert not loop.under_way
    assert loop.batch_requested() is None


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ([], False),
        ([ran], True),
        ([step(), batch], True),
        ([in_epochs], True),
        ([in_epochs, done], False),
        ([in_steps, step(), turn(), broken], False),
        ([step(), batch, close], False),
    ],
)
def test_whether_a_boundary_is_expected(events: list[Event], expected: bool) -> None:
    loop = Boundaries(ONE, loader=True)
    boundaries_of(loop, events)
    assert loop.is_expected(waiting=0) is expected
    assert loop.is_expected(waiting=1) is (expected or loop.looping is None)


def test_a_loop_left_after_an_epochs_last_batch_ends_the_epoch() -> None:
    loop = Boundaries(ONE, loader=True)
    boundaries_of(loop, [in_epochs, broken])
    assert loop.ends_with_epoch
    loop.marking_begins()
    assert not loop.ends_with_epoch


EVENTS: dict[str, Event] = {
    "step": step("critic"), "other": step("generator"), "ran": ran, "batch": batch, "forward": forward, "turn": turn(),
    "epoch": epoch(), "mark": mark(), "ahead": ahead, "in steps": in_steps, "in epochs": in_epochs, "broken": broken,
    "done": done, "end": end, "close": close,
}  # fmt: skip


@given(
    st.sampled_from([TWO, NONE]), st.booleans(), st.lists(st.sampled_from(sorted(EVENTS)), max_size=40)
)  # fmt: skip
def test_any_events_end_each_iteration_once(optimizers: tuple[str, ...], loader: bool, names: list[str]) -> None:
    loop = Boundaries(optimizers, loader=loader)
    trained = marked = closed = False  # since the last boundary; by step() or for it; for good
    for name in names:
        if name in ("step", "other") and not optimizers:
            continue
        boundary = EVENTS[name](loop)
        shows = ("step", "other") if optimizers else ("ran", "mark") if marked else ("ran", "mark", "turn")
        trained |= name in shows
        marked |= name in ("mark", "ahead")
        closed |= name == "close"
        if boundary is not None:
            assert trained
            assert not closed
            assert boundary.explicit == marked == (name == "mark")
            assert boundary.epoch_end == (name == "epoch")
            assert name != "forward" or not loader
            loop.passed()
            trained = False
        elif name in ("batch", "epoch", "turn", "end", "mark"):
            assert not trained or closed or marked != (name == "mark")
        assert loop.iterated == (trained and not closed)
