"""The controller of the intervals, on simulated jobs: nothing here takes time."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkflow.runtime.interval.algorithm import Asked, Costs, choose
from checkflow.runtime.interval.controller import HISTORY
from checkflow.runtime.interval.measurements import Iteration, Measurements
from checkflow.runtime.interval.token_bucket import INTERVALS, WINDOW
from tests.support.simulated import SimulatedJob

PROFILE = 110  # iterations after which every simulated job here is profiled


def gaps(numbers: list[int]) -> set[int]:
    return {later - earlier for earlier, later in itertools.pairwise(numbers)}


@pytest.mark.parametrize(
    ("job", "expected", "reason"),
    [
        ({"persist_seconds": 0.5}, (1, 1), "plan"),
        ({}, (1, 3), "persist"),
        ({"slowdown": 0.1}, (1, 9), "overhead"),
        ({"capture_seconds": 0.1}, (3, 3), "persist"),
        ({"capture_seconds": 0.35, "persist_seconds": 0.5}, (10, 10), "overhead"),
        ({"capture_seconds": 0.005, "slowdown": 0.25, "persist_seconds": 2.0}, (1, 17), "overhead"),
        ({"unit": 3}, (3, 3), "plan"),
        ({"unit": 3, "persist_seconds": 10.0}, (3, 12), "persist"),
        ({"unit": 3, "capture_seconds": 0.35, "persist_seconds": 1.0}, (12, 12), "overhead"),
        ({"epoch": 1, "slowdown": 0.1}, (1, 9), "overhead"),
        ({"epoch": 10_000, "slowdown": 0.1}, (1, 9), "overhead"),
        ({"place": {"tiers": False}, "slowdown": 0.1}, (9, 9), "overhead"),
        ({"place": {"planned": False}, "capture_seconds": 0.7, "persist_seconds": 2.0}, (20, 20), "overhead"),
        ({"place": {"planned": False}, "persist_seconds": 7.5}, (8, 8), "persist"),
        ({"asked": Asked(0.01), "slowdown": 0.1}, (1, 30), "overhead"),
        ({"asked": Asked(0.0)}, (1, 3), "persist"),
        ({"asked": Asked(mtbf_seconds=5000.0), "capture_seconds": 0.1}, (3, 33), "mtbf"),
    ],
)
def test_what_a_profile_comes_to(job: dict[str, Any], expected: tuple[int, int], reason: str) -> None:
    """Exact times give the interval of the formula, and nothing changes it afterwards."""
    simulated = SimulatedJob(**job)
    simulated.run(PROFILE)
    assert simulated.intervals == expected
    assert simulated.controller.report.reason == reason
    allowed = simulated.asked.overhead
    assert simulated.run(600 * expected[1]) <= allowed * 1.01 + 1e-9
    assert simulated.intervals == expected
    assert len(simulated.controller.changes) == 1
    report = simulated.controller.report
    assert report.baseline_seconds == pytest.approx(1.0)
    assert report.overhead_share == pytest.approx(simulated.run(60 * expected[1]), abs=0.003)


@pytest.mark.parametrize(
    ("standing_seconds", "expected", "most"),
    [(0.0, (1, 9), 0.035), (0.01, (1, 12), 0.035), (0.0175, (1, 18), 0.035), (0.03, (1, 18), 0.0475)],
)
def test_what_every_iteration_pays_is_part_of_the_overhead(
    standing_seconds: float, expected: tuple[int, int], most: float
) -> None:
    """But for half of it, which checkpoints may have whatever hooks cost."""
    job = SimulatedJob(slowdown=0.1, standing_seconds=standing_seconds)
    job.run(PROFILE)
    assert job.intervals == expected
    taken = job.run(200 * expected[1])
    assert most * 0.9 <= taken <= most * 1.01
    assert job.controller.report.overhead_share == pytest.approx(taken, abs=0.001)


def test_captures_do_not_pay_for_what_free_iterations_have_too() -> None:
    job = SimulatedJob(capture_seconds=0.002, held_seconds=0.002, standing_seconds=0.005, persist_seconds=0.5)
    job.run(200)
    costs = job.controller.costs
    assert costs is not None
    assert costs.capture_seconds == pytest.approx(0.002)
    assert costs.standing_seconds == pytest.approx(0.005)


def test_a_profile_in_order() -> None:
    """As planned; then nothing is captured; then in host memory alone; that is paid; then by the intervals."""
    job = SimulatedJob(slowdown=0.1)
    job.run(PROFILE)
    (change,) = job.controller.changes
    free = next(n for n in range(1, PROFILE) if n not in job.captures)
    assert 5 <= free - 1 <= 16
    assert job.durable[: free - 1] == list(range(1, free))  # storage takes the newest
    between = [number for number in job.captures if free < number < change.step]
    assert between[0] >= free + 5
    assert between == list(range(between[0], between[0] + len(between)))
    assert len(between) in (3, 4)  # the third is known to have ended when the next iteration has
    assert not {*between} & {*job.durable}
    spent = job.overhead(0, between[0]) * between[0]
    paid = next(n for n in job.durable if n > free)
    assert 0.035 * (paid - 1) <= spent + 1e-9 <= 0.035 * (paid + 20)
    job.run(400)
    assert gaps([number for number in job.durable if number >= change.step + 50]) == {9}
    left_out = set(range(change.step + 50, 500)) - set(job.captures)
    assert {(number - job.durable[-1]) % 9 for number in left_out} == {7, 8}  # free iterations, before storage is due


@pytest.mark.parametrize("noise", [0.0, 0.03])
@pytest.mark.parametrize("place", [{}, {"tiers": False}, {"planned": False}])
@pytest.mark.parametrize("costs", [{"persist_seconds": 0.5}, {"slowdown": 0.1}, {"capture_seconds": 0.3}])
def test_a_profile_is_no_longer_than_checkfreqs(costs: dict[str, Any], place: dict[str, Any], noise: float) -> None:
    """50 iterations."""
    job = SimulatedJob(noise=noise, place=place, **costs)
    job.run(50)
    assert job.intervals is not None


@pytest.mark.parametrize(("capture_seconds", "interval"), [(0.7, 20), (5.0, 143), (30.0, 858)])
def test_without_a_plan_the_first_boundary_is_captured_and_paid_for(capture_seconds: float, interval: int) -> None:
    """CheckFreq's k = ceil(cost / (p Ti)), by the cost of the first one."""
    job = SimulatedJob(capture_seconds=capture_seconds, held_seconds=capture_seconds, place={"planned": False})
    job.run(40)
    assert job.captures[0] == 1
    assert job.intervals == (interval, interval)
    job.run(4 * interval)
    assert gaps(job.captures) == {interval}
    again = SimulatedJob(
        capture_seconds=capture_seconds, held_seconds=capture_seconds,
        place={"planned": False, "known": job.controller.costs},
    )  # fmt: skip
    again.run(4 * interval)
    assert again.captures[0] == again.durable[0] == 1  # what was measured before is no reason to wait
    assert gaps(again.captures) == {interval}


def test_iterations_beside_which_a_plan_was_made_tell_nothing_later() -> None:
    job = SimulatedJob(iteration_seconds=1.5, place={"planned": False})
    job.run(40)
    assert job.controller.report.baseline_seconds == 1.5
    job.controller.place(40, 1)
    assert job.controller.report.baseline_seconds is None
    job.iteration_seconds = 1.0
    job.run(PROFILE)
    assert job.controller.report.baseline_seconds == 1.0


def test_a_trial_that_fails_is_made_again() -> None:
    job = SimulatedJob(place={"planned": False}, fails=True)
    job.run(200)
    assert job.captures == [1, 51, 101, 151]
    assert job.intervals is None


@pytest.mark.slow
def test_a_cost_that_may_be_nothing_grows_an_interval_without_end() -> None:
    job = SimulatedJob(Asked(0.0), capture_seconds=0.5)
    job.run(1000)
    assert job.intervals == (256, 256)
    job.capture_seconds = 0.0
    job.run(60 * 256)
    assert job.intervals == (1, 3)


INTERFERENCE = [
    ({"slowdown": 0.1}, {"persist_seconds": 9.0}),
    ({"slowdown": 0.1}, {"persist_seconds": 6.0, "slowdown": 0.3}),
    ({"capture_seconds": 0.02}, {"capture_seconds": 0.2}),
    ({"capture_seconds": 0.02, "slowdown": 0.05}, {"capture_seconds": 0.06, "slowdown": 0.2}),
    ({"persist_seconds": 2.0}, {"persist_seconds": 40.0}),
    ({"place": {"planned": False}, "capture_seconds": 0.5}, {"capture_seconds": 1.0, "persist_seconds": 20.0}),
    ({"unit": 4, "capture_seconds": 0.1, "slowdown": 0.05}, {"capture_seconds": 0.3, "slowdown": 0.2}),
]


@pytest.mark.parametrize(("job", "interference"), INTERFERENCE)
@pytest.mark.parametrize("noise", [0.0, 0.02])
def test_interference_comes_and_goes(job: dict[str, Any], interference: dict[str, float], noise: float) -> None:
    """The paper's Table 5, and what it leaves out: the interval comes down again when the other job has ended."""
    simulated = SimulatedJob(noise=noise, seed=1, **job)
    assert simulated.run(600) < 0.06
    usual, before = simulated.intervals, {name: getattr(simulated, name) for name in interference}
    assert usual is not None
    for name, value in interference.items():
        setattr(simulated, name, value)
    simulated.run(300)
    assert simulated.run(1000) <= 0.035 * 1.1 + 0.1 * noise
    under = simulated.intervals
    assert under is not None
    assert under != usual
    assert min(under[0] - usual[0], under[1] - usual[1]) >= 0
    for name, value in before.items():
        setattr(simulated, name, value)
    simulated.run(40 * under[1])
    assert simulated.intervals is not None
    exact = SimulatedJob(**job)  # what noise made of the first interval is no measure
    exact.run(600)
    assert exact.intervals is not None
    for now, then in zip(simulated.intervals, exact.intervals, strict=True):
        assert abs(now - then) <= (0.0 if not noise else max(simulated.unit, 0.25 * then))
    assert simulated.run(1000) <= 0.035 * 1.1 + 0.1 * noise


@pytest.mark.slow
def test_growth_and_shrinking_take_few_steps() -> None:
    job = SimulatedJob(slowdown=0.1)
    job.run(500)
    job.persist_seconds = 30.0
    job.run(150)
    grown = [change for change in job.controller.changes if change.step > 500]
    assert grown[-1].disk == math.ceil(3.0 / 0.035)
    assert len(grown) <= 2
    job.run(2000)
    settled, written = len(job.controller.changes), len(job.durable)
    job.persist_seconds = 3.0
    while job.intervals != (1, 9):
        job.run(1)
    assert len(job.durable) - written <= 6
    job.run(4000)
    assert len(job.controller.changes) - settled <= 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "job",
    [
        {"slowdown": 0.1}, {"capture_seconds": 0.01, "persist_seconds": 0.5}, {"persist_seconds": 2.5},
        {"capture_seconds": 0.005, "slowdown": 0.2}, {"place": {"planned": False}, "capture_seconds": 1.0},
    ],
)  # fmt: skip
@pytest.mark.parametrize("seed", range(4))
def test_noise_moves_no_interval(job: dict[str, Any], seed: int) -> None:
    """Three per cent of noise, nearly the whole allowance: the interval stays near what exact times give."""
    simulated = SimulatedJob(noise=0.03, seed=seed, **job)
    simulated.run(PROFILE)
    first = simulated.intervals
    exact = SimulatedJob(**job)
    exact.run(PROFILE)
    assert first is not None
    assert exact.intervals is not None
    assert first[1] <= 2 * exact.intervals[1] + 1
    simulated.run(6000)
    assert len(simulated.controller.changes) <= 8
    assert simulated.intervals is not None
    assert exact.intervals[1] * 0.6 - 1 <= simulated.intervals[1] <= exact.intervals[1] * 1.5 + 1


@pytest.mark.slow
def test_pauses_and_a_single_slow_checkpoint_change_nothing() -> None:
    job = SimulatedJob(slowdown=0.1, pauses=dict.fromkeys(range(130, 5000, 97), 50.0))
    job.run(PROFILE)
    job.run(5000)
    assert len(job.controller.changes) == 1
    job.persist_seconds = 60.0
    job.run(9)
    job.persist_seconds = 3.0
    job.run(2000)
    assert len(job.controller.changes) == 1


def test_training_that_becomes_slower_is_no_overhead() -> None:
    """A checkpoint of every iteration leaves no free one; longer sequences look like interference until a control."""
    job = SimulatedJob(capture_seconds=0.01, persist_seconds=0.4)
    job.run(300)
    assert job.intervals == (1, 1)
    job.iteration_seconds = 2.0
    job.run(400)
    assert job.intervals == (1, 1)
    assert job.controller.report.baseline_seconds == 2.0
    job.iteration_seconds = 0.2  # the same checkpoint is five times as much of it, and storage falls behind
    job.run(400)
    assert job.intervals == (2, 2)


def test_what_training_surely_waited_is_the_least_that_a_capture_costs() -> None:
    """Free iterations were measured on a slower machine: by them alone, a capture would cost nothing."""
    job = SimulatedJob(persist_seconds=0.5, held_seconds=0.14)
    job.run(PROFILE)
    assert job.intervals == (4, 4)
    job.held_seconds = 0.0
    job.run(2000)
    assert job.intervals == (1, 1)
    job.held_seconds = 0.28
    job.run(200)
    assert job.intervals == (8, 8)


def test_a_suspicion_is_settled_at_once() -> None:
    """There is no free iteration to hold the others against: the next control does not wait for its time."""
    job = SimulatedJob(capture_seconds=0.01, persist_seconds=0.4)
    job.run(100)
    assert job.intervals == (1, 1)
    job.capture_seconds = 0.3
    job.run(80)
    assert job.intervals is not None
    assert job.intervals[0] == 9
    job.run(400)
    assert job.intervals == (9, 9)


def test_controls_are_rare_and_short() -> None:
    job = SimulatedJob(persist_seconds=0.5)
    job.run(4000)
    assert job.intervals == (1, 1)
    left_out = 4000 - len([number for number in job.captures if number > 100]) - 100
    assert 60 <= left_out <= 140
    assert gaps(job.captures) <= {1, *range(5, 9)}


@pytest.mark.slow
def test_a_known_job_is_not_profiled() -> None:
    known = Costs(1.0, 0.01, 3.0, 0.3)
    job = SimulatedJob(place={"known": known})
    expected = choose(known, 1, 0.035)
    assert expected is not None
    assert job.intervals == (expected.memory, expected.disk)
    job.capture_seconds, job.slowdown = 0.01, 0.1
    job.run(500)
    assert job.durable[0] == expected.disk
    assert [change.step for change in job.controller.changes] == [0]
    other = SimulatedJob(place={"known": dataclasses.replace(known, interference_seconds=30.0)})
    other.run(10_000)  # it was wrong: what is measured takes its place
    assert other.intervals == (1, 3)


def test_what_hooks_took_of_a_known_job_is_known() -> None:
    costs = {"slowdown": 0.1, "standing_seconds": 0.0175}
    job = SimulatedJob(place={"known": Costs(1.0175, 0.0, 3.0, 0.3, 0.0175)}, **costs)
    assert job.intervals == (1, 18)
    job.run(40)
    assert job.controller.report.overhead_share == pytest.approx(0.3 / 18 + 0.0175)
    job.run(4000)
    assert job.intervals == (1, 18)
    assert job.overhead() <= 0.035 * 1.01


@pytest.mark.parametrize(("free", "expected"), [(1, 0.25), (2, 0.25), (3, 0.125)])
def test_what_is_known_of_hooks_holds_until_more_is(free: int, expected: float) -> None:
    samples = Measurements()
    for number in range(free):
        samples.add(Iteration(number, 2.0, held_seconds=0.125))
    costs = samples.estimate(Costs(2.0, 0.0, 3.0, 0.3, 0.25))
    assert costs is not None
    assert costs.standing_seconds == expected


def test_hooks_are_measured_anew_with_training() -> None:
    job = SimulatedJob(slowdown=0.1, standing_seconds=0.01)
    job.run(1000)
    job.iteration_seconds, job.standing_seconds, job.persist_seconds = 0.1, 0.00175, 0.3
    job.run(1000)
    costs = job.controller.costs
    assert costs is not None
    assert costs.standing_seconds == pytest.approx(0.00175)
    assert job.intervals == (1, 18)


def test_another_plan_is_profiled_anew() -> None:
    job = SimulatedJob(slowdown=0.1)
    job.run(200)
    job.unit = 4
    job.controller.place(job.number, 4)
    assert job.intervals is None
    since = len(job.captures)
    job.run(PROFILE)
    assert all(number % 4 == 0 for number in job.captures[since:])
    assert job.intervals == (4, 12)


@pytest.mark.parametrize(
    ("unit", "iteration", "expected"), [(1, 1.0, 30), (7, 1.0, 28), (1, 0.25, 120), (1, 45.0, 1), (4, 45.0, 4)]
)
def test_seconds(unit: int, iteration: float, expected: int) -> None:
    job = SimulatedJob(Asked(every_seconds=30.0), unit=unit, iteration_seconds=iteration, capture_seconds=0.01)
    job.run(1000)
    assert job.intervals == (expected, expected)
    assert gaps(job.captures) == ({expected} if unit != 7 else {28, 35})  # 30 s in the mean
    assert sum(job.captures[-1:]) * iteration / len(job.captures) == pytest.approx(
        max(30.0, unit * iteration), rel=0.02
    )
    assert job.captures == job.durable
    assert job.captures[0] == expected  # no profile comes first
    assert job.controller.report.reason == "every"


def test_seconds_where_no_iteration_tells_anything() -> None:
    job = SimulatedJob(Asked(every_seconds=30.0), counts=False)
    job.run(300)
    assert job.captures == list(range(30, 301, 30))


@pytest.mark.parametrize("place", [{}, {"planned": False}])
def test_a_profile_where_no_iteration_tells_anything_ends(place: dict[str, Any]) -> None:
    """What training surely waited takes the place of what cannot be measured, and is in nobody's profile."""
    job = SimulatedJob(capture_seconds=10.0, held_seconds=10.0, counts=False, place=place)
    job.run(100)
    assert job.intervals == (286, 286)
    assert job.controller.costs is None
    assert len(job.captures) <= 16
    job.run(4000)
    assert job.overhead(100) <= 0.035 * 1.1
    assert len(job.durable) >= 4000 // 286
    job.counts = True
    job.capture_seconds = job.held_seconds = 0.1
    job.run(4000)
    assert job.intervals[1] <= 4


@pytest.mark.parametrize("standing_seconds", [0.0175, 0.05])
def test_hooks_are_seen_where_no_iteration_tells_anything(standing_seconds: float) -> None:
    """Where they alone take more than the overhead, a debt ends all the same."""
    job = SimulatedJob(capture_seconds=1.0, held_seconds=1.0, standing_seconds=standing_seconds, counts=False)
    job.run(100)
    begun = len(job.durable)
    job.run(4000)
    assert job.overhead(100) <= (standing_seconds + 0.0175) * 1.1
    assert 4000 // 65 <= len(job.durable) - begun <= 4000 // 55  # each iteration has 17.5 ms left to pay for a second


def test_a_debt_ends_where_iterations_stop_to_tell_anything() -> None:
    job = SimulatedJob(slowdown=0.1)
    job.run(300)
    job.persist_seconds = 60.0
    while job.controller._bucket.allows_writing() or job._left_seconds:
        job.run(1)
    job.counts = False
    since = len(job.durable)
    job.run(300)
    assert len(job.durable) > since


def test_seconds_follow_training() -> None:
    job = SimulatedJob(Asked(every_seconds=30.0), noise=0.02)
    job.run(1000)
    assert len(job.controller.changes) == 1
    job.iteration_seconds = 2.0
    job.run(1000)
    assert job.intervals is not None
    assert job.intervals[1] == pytest.approx(15, abs=1)
    job.iteration_seconds = 1.0
    job.run(1000)
    assert job.intervals[1] == pytest.approx(30, abs=2)


def test_a_number_of_iterations_overrides_everything() -> None:
    job = SimulatedJob(Asked(every=4), slowdown=5.0, capture_seconds=5.0, place={"every": 4})
    job.run(400)
    assert job.captures == job.durable == list(range(4, 401, 4))
    assert job.controller.changes == ()
    assert job.controller.report.reason == "every"


def test_a_clock_that_stands_still_tells_nothing() -> None:
    job = SimulatedJob(iteration_seconds=0.0, slowdown=0.1)
    job.run(500)
    assert job.intervals is None
    assert job.captures == job.durable == list(range(1, 501))


def test_what_changes_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "checkflow"):
        job = SimulatedJob(capture_seconds=0.005, slowdown=0.1)
        job.run(PROFILE)
        (record,) = caplog.records
        step = job.controller.changes[0].step
        assert record.getMessage() == (
            f"from step {step} on a checkpoint every 10 iterations, and one in host memory every iteration: one "
            "costs 305 ms of training, and may cost 3.5 % of iterations of 1.00 s"
        )
        job.run(500)
        assert len(caplog.records) == 1
        job.slowdown, job.persist_seconds = 0.0, 40.0
        job.run(500)
        assert caplog.records[-1].getMessage().endswith("storage takes 40.0 s for one")


def test_nothing_is_said_until_something_changes(caplog: pytest.LogCaptureFixture) -> None:
    """Measured, and as planned: that is no news. Rarer, and as planned again: both are."""
    with caplog.at_level(logging.INFO, "checkflow"):
        job = SimulatedJob(persist_seconds=0.1)
        job.run(PROFILE)
        assert [(change.disk, change.reason) for change in job.controller.changes] == [(1, "plan")]
        assert caplog.messages == []
        job.persist_seconds = 30.0
        job.run(500)
        assert caplog.messages
        job.persist_seconds = 0.1
        job.run(3000)
    assert (
        caplog.messages[-1]
        == f"from step {job.controller.changes[-1].step} on a checkpoint every iteration: as planned"
    )


@pytest.mark.slow
def test_the_history_is_bounded() -> None:
    job = SimulatedJob(persist_seconds=2.0)
    for turn in range(2 * HISTORY):  # growing from 2 to 9 is one change, shrinking two
        job.persist_seconds = 9.0 if turn % 2 else 2.0
        job.run(100)
    assert len(job.controller.changes) == HISTORY


seconds = st.floats(0.0, 5.0)


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(
    st.integers(1, 5), seconds, seconds, st.floats(0.0, 0.5), st.floats(0.0, 0.1), st.booleans(), st.booleans(),
    st.integers(0, 99),
)  # fmt: skip
def test_whatever_the_costs(
    unit: int, capture: float, persist: float, slowdown: float, noise: float, planned: bool, tiers: bool, seed: int
) -> None:
    job = SimulatedJob(
        capture_seconds=capture, persist_seconds=persist + 0.01, slowdown=slowdown, noise=noise, unit=unit, seed=seed,
        place={"planned": planned, "tiers": tiers},
    )  # fmt: skip
    job.run(700)
    assert all(number % unit == 0 for number in job.captures)
    assert set(job.durable) <= set(job.captures)
    for change in job.controller.changes:
        assert change.memory % unit == change.disk % change.memory == 0
        assert (planned and tiers) or change.memory == change.disk
    assert job.intervals is not None
    job.run(3 * job.intervals[1] + 100)
    longest = job.intervals[1] + max(WINDOW, INTERVALS * job.intervals[1])  # until what was spent is paid
    assert job.number - job.captures[-1] <= longest + 30
    assert job.run(2000) <= 0.035 * 1.1 + 0.5 * noise + 0.005  # what is lost in noise is not seen
