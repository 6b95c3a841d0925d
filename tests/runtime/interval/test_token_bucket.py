"""What checkpoints may cost at this moment: the bucket itself, and whole jobs that something interferes with."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import pytest

from checkflow.runtime.interval.algorithm import Asked, Costs, choose
from checkflow.runtime.interval.measurements import Iteration
from checkflow.runtime.interval.token_bucket import INTERVALS, SLACK, WINDOW, Bucket
from tests.support.simulated import SimulatedJob

P = 0.05


def add(bucket: Bucket, iteration: Iteration, *, interval: int = 1, earned: float = P, spread: float = 0.0) -> None:
    bucket.add(iteration, (1.0, spread), earned_seconds=earned, standing_seconds=0.0, interval=interval)


def spend(bucket: Bucket, *seconds: float, interval: int = 1, held: float = 0.0, earned: float = P) -> Bucket:
    """Iterations with a checkpoint under way."""
    for number, one in enumerate(seconds, 1):
        iteration = Iteration(number, one, captured=True, persisted=True, held_seconds=held)
        add(bucket, iteration, interval=interval, earned=earned)
    return bucket


def rest(bucket: Bucket, count: int, seconds: float = 1.0, interval: int = 1) -> Bucket:
    """Iterations without one."""
    for number in range(count):
        add(bucket, Iteration(1000 + number, seconds), interval=interval)
    return bucket


def test_what_is_spent_is_earned_again() -> None:
    bucket = Bucket()
    assert bucket.allows_writing()
    assert not spend(bucket, 1.3).allows_writing()
    assert bucket.level_seconds == pytest.approx(P - 0.3)
    assert not rest(bucket, 4).allows_writing()
    assert rest(bucket, 2).allows_writing()


@pytest.mark.parametrize(("interval", "window"), [(1, WINDOW), (33, WINDOW), (34, 34 * INTERVALS)])
def test_what_is_saved_up_and_what_is_owed_are_bounded(interval: int, window: int) -> None:
    bucket = rest(Bucket(), 1000, interval=interval)
    assert bucket.level_seconds == pytest.approx(SLACK * P)
    spend(bucket, *[1.4] * 1000, interval=interval)
    assert bucket.level_seconds == pytest.approx(-P * window)
    assert rest(bucket, window + 1, interval=interval).allows_writing()


def test_noise_may_be_saved_up() -> None:
    bucket = Bucket()
    for number in range(1000):
        add(bucket, Iteration(number, 1.0), earned=0.001, spread=0.01)
    assert bucket.level_seconds == pytest.approx(2 * 0.01 * 10)


def test_nothing_is_owed_where_nothing_may_be_spent() -> None:
    assert spend(Bucket(), *[2.0] * 100, earned=0.0).allows_writing()


def test_an_iteration_that_does_not_count_earns_and_costs_what_is_sure() -> None:
    bucket = Bucket()
    add(bucket, Iteration(1, 5.0, captured=True, counts=False))
    assert bucket.level_seconds == pytest.approx(P)
    add(bucket, Iteration(2, 5.0, captured=True, counts=False, held_seconds=0.2))
    assert bucket.level_seconds == pytest.approx(2 * P - 0.2)


def test_a_pause_is_charged_in_part() -> None:
    assert spend(Bucket(), 3.0).level_seconds == pytest.approx(P - 0.5)
    assert spend(Bucket(), 3.0, interval=10).level_seconds == pytest.approx(P - 2.0)  # a checkpoint may cost that


def test_what_training_surely_waited_is_no_pause() -> None:
    assert spend(Bucket(), 3.0, held=2.0).level_seconds == pytest.approx(P - 2.0)
    assert spend(Bucket(), 3.0, held=1.0).level_seconds == pytest.approx(P - 1.0)
    assert spend(Bucket(), 3.0, held=0.1).level_seconds == pytest.approx(P - 0.5)


def test_what_a_loader_stalls_is_no_checkpoints_cost() -> None:
    """Every tenth batch comes late, with a checkpoint under way or not."""
    stalls = [1.4 if number % 10 == 0 else 1.0 for number in range(200)]
    bucket = Bucket()
    for number, seconds in enumerate(stalls):
        add(bucket, Iteration(number, seconds))
    before = bucket.level_seconds
    spend(bucket, *stalls)
    assert bucket.level_seconds > before - 0.4
    assert not spend(Bucket(), *stalls, earned=0.03).allows_writing()


def test_what_was_measured_against_another_training_is_forgiven() -> None:
    bucket = spend(Bucket(), *[1.4] * 20)
    bucket.forgive(0.3)
    assert bucket.level_seconds == pytest.approx(-0.3)
    bucket.forgive(1.0)
    assert bucket.level_seconds == pytest.approx(-0.3)


def test_captures_in_between_go_on_while_a_persist_is_paid_and_end_where_they_cost_more() -> None:
    bucket = spend(Bucket(), *[1.4] * 10)

    def capture(seconds: float, count: int) -> bool:
        for number in range(count):
            if not bucket.allows_between():
                return False
            add(bucket, Iteration(100 + number, seconds, captured=True))
        return True

    assert not bucket.allows_writing()
    assert capture(1.01, 20)
    assert not capture(1.2, 20)
    assert not capture(1.0, 1)  # none until nothing is owed
    assert rest(bucket, 200).allows_between()


# Whole jobs


@dataclass(frozen=True)
class Scenario:
    """A job, and what interferes with it for some time. Times are in iterations."""

    job: dict[str, Any]
    interference: dict[str, float]

    def costs(self, **changes: float) -> Costs:
        """What a checkpoint costs in truth."""
        all_of_it = {"capture_seconds": 0.0, "persist_seconds": 3.0, "slowdown": 0.0, **self.job, **changes}
        persist = all_of_it["persist_seconds"]
        return Costs(1.0, all_of_it["capture_seconds"], persist, persist * all_of_it["slowdown"])

    def interval(self, overhead: float, **changes: float) -> int:
        """What follows from that."""
        tiers = "place" not in self.job
        chosen = choose(self.costs(**changes), self.job.get("unit", 1), overhead, tiers=tiers)
        assert chosen is not None
        return chosen.disk


SCENARIOS = {
    "slow storage": Scenario(
        {"capture_seconds": 0.003, "persist_seconds": 0.55, "slowdown": 0.05},
        {"persist_seconds": 10.0, "slowdown": 0.1, "capture_seconds": 0.02},
    ),
    "three times the overhead": Scenario(
        {"capture_seconds": 0.02, "persist_seconds": 0.55, "slowdown": 0.2},
        {"persist_seconds": 8.0, "slowdown": 0.15, "capture_seconds": 0.05},
    ),
    "tenfold persist": Scenario({"persist_seconds": 3.0, "slowdown": 0.1}, {"persist_seconds": 30.0}),
    "tenfold capture": Scenario({"capture_seconds": 0.03, "persist_seconds": 0.5}, {"capture_seconds": 0.3}),
    "no plan": Scenario(
        {"place": {"planned": False}, "capture_seconds": 0.5, "persist_seconds": 2.0},
        {"capture_seconds": 5.0, "persist_seconds": 20.0},
    ),
    "several iterations": Scenario(
        {"unit": 4, "capture_seconds": 0.1, "slowdown": 0.05}, {"capture_seconds": 0.6, "slowdown": 0.2}
    ),
}
LEARNING, DISTURBED = 300, 600  # iterations


def test_what_came_before_the_first_free_iterations_is_owed_too() -> None:
    """Seven iterations with a checkpoint cost half a second each; then training shows what it takes by itself."""
    job = SimulatedJob(capture_seconds=0.5, persist_seconds=0.5, place={"tiers": False})
    job.run(400)
    free = next(number for number in range(1, 401) if number not in job.captures)
    paid = next(number for number in job.captures if number > free)
    assert paid >= 0.5 * (free - 1) / 0.035


@pytest.mark.parametrize("overhead", [0.035, 0.05])
@pytest.mark.parametrize(("noise", "seed"), [(0.0, 0), (0.03, 1), (0.03, 2), (0.03, 3), (0.03, 4)])
@pytest.mark.parametrize("name", SCENARIOS)
def test_interference(name: str, noise: float, seed: int, overhead: float) -> None:
    """The overhead holds while the job is learned, while something interferes, and after; and the interval comes back.

    What a checkpoint costs that is under way when interference begins, and the one that shows it, is beyond it.
    """
    scenario = SCENARIOS[name]
    job = SimulatedJob(Asked(overhead), noise=noise, seed=seed, **scenario.job)
    margin = 1.0 if not noise else 1.25  # where times vary by 3 %, what training takes is known to some tenths of that
    job.run(LEARNING)
    assert job.overhead() <= overhead * margin + 1e-9
    assert job.worst_overhead(WINDOW) <= overhead * margin + SLACK * overhead / WINDOW + 0.005
    usual = scenario.interval(overhead)
    right = scenario.interval(overhead, **scenario.interference)
    costs = scenario.costs(**scenario.interference)
    one = costs.capture_seconds + costs.interference_seconds

    before = {key: getattr(job, key) for key in scenario.interference}
    for key, value in scenario.interference.items():
        setattr(job, key, value)
    written = job.written
    job.run(2 * right)
    assert job.written - written <= 6  # one or two that show it, and then hardly more than the cost allows
    job.run(DISTURBED - 2 * right)
    beyond = 2 * one / DISTURBED
    assert job.overhead(LEARNING) <= overhead * margin + beyond
    begin, most = LEARNING + DISTURBED // 2, overhead * (1.1 if not noise else 1.35)
    # Few intervals fit in: where a checkpoint came at the very end, whole intervals tell.
    whole = [max(n for n in job.durable if n <= last) for last in (begin, job.number)]
    assert min(job.overhead(begin), job.overhead(*whole) if whole[0] < whole[1] else math.inf) <= most
    under = max(job.intervals or (0, 0))
    assert under >= 0.5 * right

    for key, value in before.items():
        setattr(job, key, value)
    written = job.written
    while (job.intervals or (0, 0))[1] > 1.5 * usual + job.unit:
        job.run(1)
        assert job.number - LEARNING - DISTURBED <= (3 * under + 20 if not noise else 6 * under + 120)
    assert job.written - written <= (8 if not noise else 60)
    job.run(1000)
    assert job.overhead(LEARNING + DISTURBED) <= overhead * margin
    assert job.overhead() <= overhead * margin + 2 * one / job.number


@pytest.mark.parametrize("seed", range(3))
def test_costs_that_come_and_go(seed: int) -> None:
    """Every third hundred iterations storage is ten times as slow: the overhead holds over all of it."""
    job = SimulatedJob(Asked(P), noise=0.02, seed=seed, persist_seconds=1.0, slowdown=0.2)
    for turn in range(12):
        job.persist_seconds = 10.0 if turn % 3 == 2 else 1.0
        job.run(100)
    assert job.overhead() <= P * 1.1
    assert len(job.durable) >= 40


@pytest.mark.parametrize(("every", "seconds"), [(4, 0.3), (10, 0.4), (10, 1.0), (23, 2.0), (97, 50.0)])
@pytest.mark.parametrize("noise", [0.0, 0.03])
def test_pauses_starve_no_job(every: int, seconds: float, noise: float) -> None:
    """A loader that stalls, or a machine that stands still for a long time, costs some checkpoints, and not most."""
    job = SimulatedJob(slowdown=0.1, noise=noise, pauses=dict.fromkeys(range(0, 5000, every), seconds))
    job.run(110)
    written = job.written
    job.run(4000)
    assert job.written - written >= 4000 / 9 / 6


@pytest.mark.parametrize("epoch", [1, 2, 3, 5])
def test_epochs_shorter_than_one_commit_are_measured(epoch: int) -> None:
    """Their ends keep storage busy all the time, but for a control now and then, which leaves them out."""
    job = SimulatedJob(epoch=epoch, saves_epochs=True, persist_seconds=1.0 + 1.5 * epoch, slowdown=0.1)
    job.run(200)
    known = choose(Costs(1.0, 0.0, job.persist_seconds, 0.1 * job.persist_seconds), 1, 0.035)
    assert known is not None
    assert job.intervals is not None
    assert abs(job.intervals[1] - known.disk) <= 1
    job.run(1000)
    ends = set(range(epoch, job.number + 1, epoch))
    assert len(ends - set(job.captures)) <= 0.1 * len(ends) + 3


def test_ends_of_epochs_go_on_where_no_iteration_tells_anything() -> None:
    """A control is due in the end, and there is no time to hold the last commit's against."""
    known = Costs(1.0, 0.0, 3.0, 0.3)
    job = SimulatedJob(epoch=2, saves_epochs=True, counts=False, place={"known": known})
    job.run(1000)
    assert set(range(2, 1001, 2)) <= set(job.captures)


def test_longer_epochs_lose_no_end() -> None:
    job = SimulatedJob(epoch=40, saves_epochs=True, persist_seconds=5.0, slowdown=0.1)
    job.run(2000)
    assert job.intervals is not None
    assert set(range(40, 2001, 40)) <= set(job.captures)


@pytest.mark.parametrize("costs", [{"capture_seconds": 9.0}, {"persist_seconds": 10.0, "slowdown": 0.9}])
def test_a_known_profile_that_is_far_too_cheap(costs: dict[str, Any]) -> None:
    """The budget holds from the first checkpoint on, and what it refuses is bounded."""
    job = SimulatedJob(place={"known": Costs(1.0, 0.001, 0.5, 0.001)}, **costs)
    job.run(100)
    assert len(job.captures) <= 4
    job.run(2000)
    assert len(job.durable) >= 4
    longest = max(later - earlier for earlier, later in itertools.pairwise([0, *job.durable, job.number]))
    assert longest <= INTERVALS * math.ceil(9.0 / 0.035)
    assert job.overhead(200) <= 0.035 * 1.15


@pytest.mark.parametrize("believed", [0.2, 0.8, 1.3, 5.0])
def test_a_known_profile_of_another_speed_starves_nothing(believed: float) -> None:
    job = SimulatedJob(place={"known": Costs(believed, 0.0, 3.0, 0.3)}, slowdown=0.1)
    job.run(400)
    assert job.intervals == (1, 9)
    assert job.overhead() <= 0.035 * 1.1 + 0.01
    assert len(job.durable) >= 20


@pytest.mark.parametrize("block", [10, 20])
@pytest.mark.parametrize("known", [True, False])
def test_training_of_two_speeds(block: int, known: bool) -> None:
    """Each change of speed looks like another training; that forgives no debt time and again."""
    place = {"known": Costs(1.15, 0.0, 5.0, 5.0)} if known else {}
    job = SimulatedJob(persist_seconds=10.0, slowdown=0.5, place=place)
    for turn in range(4000 // block):
        job.iteration_seconds = 1.3 if turn % 2 else 1.0
        job.run(block)
    assert job.overhead(400) <= 0.035 * 2
    assert len(job.durable) >= 8


@pytest.mark.parametrize(("standing_seconds", "waits"), [(0.0, 1.0), (0.0175, 2.0)])
def test_a_job_waits_for_what_is_left(standing_seconds: float, waits: float) -> None:
    """A checkpoint costs 1.5 s all at once: 43 iterations pay for it, 35 ms each, twice as many at half of that."""
    job = SimulatedJob(slowdown=0.1, standing_seconds=standing_seconds)
    job.run(400)
    job.run(max(job.durable) + job.intervals[1] - 1 - job.number)  # just before the next one
    job.slowdown = 0.5
    job.run(200)
    first, second = [number for number in job.durable if number >= 400][:2]
    assert waits * 1.5 / 0.035 - 12 <= second - first <= waits * 1.5 / 0.035 + 3
