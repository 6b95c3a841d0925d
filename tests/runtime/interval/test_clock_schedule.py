"""Checkpoints so many seconds apart: the arithmetic, and jobs whose iterations take what they are told to."""

from __future__ import annotations

import itertools
import logging
import random
from collections.abc import Iterable

import pytest

from checkflow.runtime.interval.algorithm import Asked, Intervals, is_time, late_after
from checkflow.runtime.interval.controller import Controller
from checkflow.runtime.interval.measurements import Iteration


@pytest.mark.parametrize(
    ("since", "late", "interval", "due"),
    [
        (29.4, 0.0, 1.0, False),
        (29.5, 0.0, 1.0, True),
        (28.4, 1.1, 1.0, True),  # the last one was late
        (29.9, -0.5, 1.0, False),  # or early
        (30.0, -0.5, 1.0, True),
        (25.9, 0.0, 8.0, False),
        (26.0, 0.0, 8.0, True),
        (14.9, 0.0, 1000.0, False),  # long iterations: half of what was asked is the least, as far as the clock decides
        (15.0, 0.0, 1000.0, True),
    ],
)
def test_the_boundary_nearest_to_the_moment(since: float, late: float, interval: float, due: bool) -> None:
    assert is_time(since, late, 30.0, interval) is due


@pytest.mark.parametrize(
    ("since", "late", "expected"), [(30, 0, 0), (31, 0, 1), (29.5, 0, -0.5), (31, -1, 0), (31, 2, 3), (4000, 0, 15)]
)
def test_what_is_made_up_for(since: float, late: float, expected: float) -> None:
    assert late_after(since, late, 30.0) == expected


def by_hand(every_seconds: float, seconds: Iterable[float], unit: int = 1) -> tuple[list[float], Controller]:
    """The moments of a job's checkpoints whose iterations take these seconds."""
    controller = Controller(Asked(every_seconds=every_seconds))
    controller.place(0, unit)
    now, moments = 0.0, []
    for number, taken in enumerate(seconds, start=1):
        now += taken
        controller.ended(Iteration(number, taken))
        if controller.is_due(number):
            assert controller.is_durable(number)
            controller.captured(number, durable=True)
            moments.append(now)
    return moments, controller


@pytest.mark.parametrize(
    ("every", "long", "cycle"),
    [
        pytest.param(1.0, 0.5, 20, id="evaluation now and then"),
        pytest.param(1.0, 0.06, 2, id="evaluation in every second iteration"),
        pytest.param(1.0, 0.06, 1, id="evaluation in every iteration"),
        pytest.param(1.0, 0.7, 1, id="iterations of most of what was asked"),
        pytest.param(30.0, 0.1, 8, id="short epochs"),
        pytest.param(20.0, 5.0, 1000, id="long and rare"),
    ],
)
def test_seconds_are_the_clock_s(every: float, long: float, cycle: int, caplog: pytest.LogCaptureFixture) -> None:
    """Of iterations some are long, and nearly all time may be theirs: checkpoints are as far apart as asked."""
    random_ = random.Random(0)
    with caplog.at_level(logging.INFO, "checkflow"):
        moments, controller = by_hand(
            every, [(long if n % cycle == 0 else 0.01) * random_.uniform(0.8, 1.2) for n in range(1, 20_001)]
        )
    apart = [after - before for before, after in itertools.pairwise([0.0, *moments])]
    assert sum(apart) / len(apart) == pytest.approx(every, rel=0.02)
    assert min(apart) >= every / 2
    assert max(apart) <= every + 1.2 * long
    assert len(controller.changes) <= 2
    assert len(caplog.records) == len(controller.changes)


def test_pauses_that_are_longer_than_what_was_asked_move_no_interval() -> None:
    """One window in three tells of one."""
    moments, controller = by_hand(1.0, [5.0 if n % 1000 == 0 else 0.01 for n in range(1, 20_001)])
    assert len(moments) == pytest.approx(20 * (10 + 1), abs=5)
    assert len(controller.changes) == 1


def test_after_a_long_pause_seconds_begin_anew() -> None:
    """What a night's stop made late is made up for by half of one distance, once."""
    moments, _ = by_hand(30.0, [1.0] * 45 + [40_000.0] + [1.0] * 100)
    assert moments == [30.0, 40_045.0, 40_060.0, 40_090.0, 40_120.0]


def test_seconds_count_from_what_was_saved_besides() -> None:
    controller = Controller(Asked(every_seconds=30.0))
    due = []
    for number in range(1, 101):
        controller.ended(Iteration(number, 1.0))
        if controller.is_due(number):
            due.append(number)
        if controller.is_due(number) or number == 40:  # an epoch ends
            controller.captured(number, durable=True, counts=number != 40)
    assert due == [30, 70, 100]


def test_seconds_under_another_plan() -> None:
    controller = Controller(Asked(every_seconds=30.0))
    for number in range(1, 41):
        controller.ended(Iteration(number, 1.0))
        if controller.is_due(number):
            controller.captured(number, durable=True)
    assert controller.intervals == Intervals(30, 30, "every")
    controller.place(40, 8)
    assert controller.intervals == Intervals(32, 32, "every")
    due = []
    for number in range(41, 200):
        controller.ended(Iteration(number, 1.0))
        if controller.is_due(number):
            due.append(number)
            controller.captured(number, durable=True)
    assert due == [56, 88, 120, 152, 176]  # 60, 90, 120, 150 and 180 are the moments
