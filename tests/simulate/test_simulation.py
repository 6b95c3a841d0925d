"""Simulated failures: held against a walk through each iteration, against Daly's formula, and as a command."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkflow.cli.main import FAILED, FOUND, INFEASIBLE, USAGE, main
from checkflow.core import plan as plans
from checkflow.core.errors import PlanError
from checkflow.core.machine.device import CATALOGUE, write_device
from checkflow.core.plan import Plan
from checkflow.core.timeline import Timeline
from checkflow.planner.pipeline import default_memory_limit_bytes
from checkflow.planner.schedule.scheduler import PlanRequest, make_plan
from checkflow.runtime.interval.algorithm import Costs, Intervals, algorithm_1, choose, least_waste
from checkflow.simulate import simulation, strategies
from checkflow.simulate.simulation import MOST_RUNS, Failures, Result, Way, simulate_failures
from checkflow.simulate.strategies import StorageSpeed, Ways, restore_seconds
from tests.support.timelines import make_fingerprint, make_timeline, timelines

HOUR, DAY = 3600.0, 86400.0

# Whole seconds, so that sums are exact and a checkpoint may be durable in the very moment of a failure.
ways_in_seconds = st.builds(
    Way,
    name=st.just("way"),
    capture_interval=st.shared(st.integers(1, 3), key="capture"),
    interval=st.tuples(st.shared(st.integers(1, 3), key="capture"), st.integers(1, 4)).map(math.prod),
    stall_seconds=st.integers(0, 4).map(float),
    durable_seconds=st.integers(0, 15).map(float),
)


def way_of(name: str, interval: int, stall_seconds: float, durable_seconds: float) -> Way:
    """All that is captured goes to storage."""
    return Way(name, interval, interval, stall_seconds, durable_seconds)


def walk(way: Way, iteration_seconds: float, up_seconds: float) -> tuple[float, float]:
    """One life of a job, iteration by iteration: seconds trained, and how many of them storage has."""
    clock, trained, kept, iteration = 0.0, 0.0, 0.0, 0
    while clock < up_seconds:
        step = min(iteration_seconds, up_seconds - clock)
        clock, trained, iteration = clock + step, trained + step, iteration + 1
        if step < iteration_seconds:
            break
        if iteration % way.interval == 0 and clock + way.durable_seconds <= up_seconds:
            kept = trained
        if iteration % way.capture_interval == 0:
            clock += way.stall_seconds
    return trained, kept


def walked(way: Way, iteration_seconds: float, failures: Failures, duration_seconds: float, seed: int) -> list[float]:
    """A whole run with these failures: training that counts, that is done again, checkpoints, starts; in seconds."""
    random, left, start = np.random.default_rng(seed), duration_seconds, 0.0
    useful = again = held = starting = 0.0
    while left > 0:
        drawn = failures.scale_seconds * float(random.weibull(failures.shape, 1)[0])
        lived = min(drawn, left)
        up = max(0.0, lived - start)
        trained, kept = walk(way, iteration_seconds, up)
        if lived == left:  # the run ends, and nothing fails
            kept = trained
        useful, again, held = useful + kept, again + trained - kept, held + up - trained
        starting, left, start = starting + lived - up, left - lived, failures.restart_seconds
    return [useful, again, held, starting]


def shares(result: Result) -> list[float]:
    return [result.useful.mean, result.again, result.stalls, result.starts]


@given(ways_in_seconds, st.integers(1, 3).map(float), st.integers(0, 200).map(float))
def test_one_life_is_that_of_a_walk_through_each_iteration(way: Way, iteration: float, up: float) -> None:
    every = way.interval // way.capture_interval
    interval, stall = np.array([[way.capture_interval * iteration]]), np.array([[way.stall_seconds]])
    trained = simulation._trained(np.array([up]), interval, stall)
    kept = simulation._durable(np.array([up]), interval, np.array([[every]]), stall, np.array([[way.durable_seconds]]))
    assert [float(trained[0, 0]), float(kept[0, 0])] == [*walk(way, iteration, up)]


@given(
    ways_in_seconds,
    st.floats(0.5, 5),
    st.floats(1, 60),
    st.floats(0, 20),
    st.sampled_from([0.5, 0.7, 1.0, 2.0]),
    st.integers(0, 2**32),
)
def test_a_run_is_that_of_a_walk(
    way: Way, iteration: float, mtbf: float, restart: float, shape: float, seed: int
) -> None:
    failures = Failures(mtbf, restart, shape)
    found = simulate_failures([way], iteration, failures, 500.0, runs=1, seed=seed).results[0]
    assert shares(found) == pytest.approx([part / 500 for part in walked(way, iteration, failures, 500.0, seed)])
    assert sum(shares(found)) == pytest.approx(1)


@pytest.mark.parametrize(("interval", "stall", "restart"), [(60, 20.0, 0.0), (600, 20.0, 300.0), (3600, 1.0, 60.0)])
def test_synchronous_checkpoints_waste_what_daly_says(interval: int, stall: float, restart: float) -> None:
    """Expected time for w seconds of training: M e^(R/M) (e^((w + c)/M) - 1); here every checkpoint ends its stall."""
    mtbf = HOUR
    way = way_of("synchronous", interval, stall, stall)
    result = simulate_failures([way], 1.0, Failures(mtbf, restart), 400 * DAY, runs=100, seed=7).results[0]
    expected = interval / (mtbf * math.exp(restart / mtbf) * math.expm1((interval + stall) / mtbf))
    error = (result.useful.high - result.useful.low) / 3.29 / math.sqrt(100)
    assert abs(result.useful.mean - expected) < 4 * error
    assert error < 0.002 * expected  # or that would tell nothing


def test_the_interval_that_wastes_least_is_better_than_others() -> None:
    stall, failures = 12.0, Failures(2 * HOUR, 60.0)
    best = least_waste(1, 1.0, stall, failures.mtbf_seconds)
    ways = [way_of(str(k), k, stall, stall) for k in (best, best * 5 // 7, best * 7 // 5)]
    right, often, seldom = simulate_failures(ways, 1.0, failures, 90 * DAY, runs=1500, seed=1).results
    assert right.useful.mean > often.useful.mean
    assert right.useful.mean > seldom.useful.mean


def test_without_failures_checkpoints_alone_take_time() -> None:
    found = simulate_failures([way_of("w", 9, 1.0, 2.0)], 1.0, Failures(1e12, 60.0), 1000.0, runs=3, seed=0)
    result = found.results[0]
    assert found.failures_a_run == 0
    assert shares(result) == pytest.approx([0.9, 0, 0.1, 0])
    assert (result.lost_seconds, result.most_lost_seconds) == (0, 0)
    assert result.useful.low == result.useful.high == result.useful.mean


def test_a_job_that_never_lives_to_a_checkpoint_gets_nowhere() -> None:
    result = simulate_failures([way_of("w", 10**9, 1.0, 1.0)], 1.0, Failures(60.0, 1.0), DAY, runs=20, seed=0).results[
        0
    ]
    assert result.useful.mean < 0.01  # the last life, which does not fail
    assert result.again > 0.9


def test_a_start_that_takes_longer_than_lives_last_is_all_that_happens() -> None:
    result = simulate_failures([way_of("w", 1, 0.0, 0.0)], 1.0, Failures(10.0, 1e6), DAY, runs=5, seed=0).results[0]
    assert result.starts > 0.99


def test_all_ways_meet_the_same_failures() -> None:
    ways = [way_of("a", 5, 1.0, 2.0), way_of("b", 50, 1.0, 2.0), way_of("a", 5, 1.0, 2.0)]
    first, other, same = simulate_failures(ways, 1.0, Failures(600.0, 10.0), DAY, runs=10, seed=3).results
    assert shares(first) == shares(same)
    assert first.starts == other.starts
    alone = simulate_failures(ways[:1], 1.0, Failures(600.0, 10.0), DAY, runs=10, seed=3).results[0]
    assert alone == first
    assert simulate_failures(ways[:1], 1.0, Failures(600.0, 10.0), DAY, runs=10, seed=4).results[0] != first


def test_what_is_lost_at_a_failure() -> None:
    """Anything from the time until it is durable to an interval more, evenly."""
    way = way_of("w", 100, 0.0, 30.0)
    result = simulate_failures([way], 1.0, Failures(50_000.0, 0.0), 5e7, runs=10, seed=0).results[0]
    assert result.lost_seconds == pytest.approx(80, rel=0.01)
    assert result.most_lost_seconds == pytest.approx(129, abs=0.3)


@pytest.mark.parametrize("shape", [0.5, 0.7, 1.0, 3.0])
def test_the_mean_time_between_failures_is_what_was_asked(shape: float) -> None:
    found = simulate_failures([way_of("w", 1, 0.0, 0.0)], 1.0, Failures(1000.0, 0.0, shape), 1e7, runs=10, seed=2)
    assert found.failures_a_run == pytest.approx(10_000, rel=0.05)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (lambda: Failures(0.0, 1.0), "mean time between failures"),
        (lambda: Failures(math.inf, 1.0), "mean time between failures"),
        (lambda: Failures(1.0, -1.0), "a restart must take"),
        (lambda: Failures(1.0, 1.0, 0.1), "shape"),
        (lambda: Failures(1.0, 1.0, math.nan), "shape"),
        (lambda: way_of("w", 0, 1.0, 1.0), "every 0 iterations"),
        (lambda: Way("w", 4, 3, 1.0, 1.0), "every 3 iterations, of 4 for"),
        (lambda: Way("w", 4, 8, 1.0, 1.0), "every 8 iterations, of 4 for"),
        (lambda: way_of("w", 1, -1.0, 1.0), "takes -1.0 s"),
        (lambda: way_of("w", 1, 1.0, math.inf), "takes inf s"),
        (lambda: StorageSpeed(0.0, 1.0), "0.0 bytes per second"),
        (lambda: StorageSpeed(1.0, math.inf), "inf bytes per second"),
        (lambda: simulate_failures([], 0.0, Failures(1.0, 1.0), 1.0, runs=1, seed=0), "an iteration takes 0.0 s"),
        (lambda: simulate_failures([], 1.0, Failures(1.0, 1.0), 0.0, runs=1, seed=0), "1 runs of 0.0 s"),
        (lambda: simulate_failures([], 1.0, Failures(1.0, 1.0), 1.0, runs=0, seed=0), "0 runs of 1.0 s"),
        (lambda: simulate_failures([], 1.0, Failures(1.0, 1.0), 1.0, runs=MOST_RUNS + 1, seed=0), "100001 runs"),
        (lambda: simulate_failures([], 1.0, Failures(1.0, 1.0), 100_001.0, runs=1, seed=0), "soon: ask for a shorter"),
        (lambda: simulate_failures([], 1.0, Failures(1.0, 1.0), 2001.0, runs=1000, seed=0), "fewer --runs"),
    ],
)
def test_what_makes_no_sense_is_refused(asked: Callable[[], object], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        asked()


def test_no_ways_and_the_most_failures_are_fine() -> None:
    assert simulate_failures([], 1.0, Failures(1.0, 1.0), 2000.0, runs=1000, seed=0).results == ()


def test_intervals_of_any_length_are_fine() -> None:
    result = simulate_failures([way_of("w", 10**30, 1.0, 1.0)], 1.0, Failures(600.0, 1.0), 1e4, runs=2, seed=0).results[
        0
    ]
    assert result.stalls == 0


# The ways of a plan

MEMORY_BANDWIDTH = 1e3


def planned(
    bandwidth: float = 100.0,
    groups: Sequence[tuple[int | None, list[int]]] = ((2, [100, 200]),),
    link_bytes: dict[int, int] | None = None,
) -> Plan:
    """An iteration of 4 s: 300 bytes, unless a test says otherwise, that the optimizer writes in its last second."""
    timeline = make_timeline([(0, 50), (3, 90), (1, 60)], list(groups), link_bytes)
    request = PlanRequest(bandwidth, MEMORY_BANDWIDTH, memory_limit_bytes=10**6, unit_bytes=1, overhead=0.5)
    outcome = make_plan(timeline, make_fingerprint(timeline), request, graph_peak_bytes=0)
    assert outcome.plan is not None
    return outcome.plan


def ways_of(plan: Plan, storage: StorageSpeed, **options: Any) -> Ways:
    return strategies.ways_of(plan, storage, **{"mtbf_seconds": HOUR, "overhead": 0.035, **options})


def test_the_ways_of_a_plan() -> None:
    storage = StorageSpeed(30.0, 60.0)  # 10 s to write, 5 to read
    plan = planned()
    assert restore_seconds(plan, storage) == 5
    found = ways_of(plan, storage, every_seconds=[60.0, 4.0])
    assert found.left_out == ()
    minute, iteration, best, checkfreq, rarer, ours = found.ways  # captures cost nothing, and need no row
    assert minute == way_of("synchronous, every 1 min", 15, 13.0, 13.0)  # 3 s over the link, 10 s to storage
    assert iteration == way_of("synchronous, every 4.00 s", 1, 13.0, 13.0)
    assert best == way_of("synchronous, least waste", least_waste(1, 4.0, 13.0, HOUR), 13.0, 13.0)
    # All of it leaves before the optimizer writes: no stall, and no snapshot.
    assert checkfreq == way_of("CheckFreq, CPU snapshot", 4, 0.0, 13.0)  # 13 s under way, of iterations of 4 s
    assert rarer == replace(checkfreq, name="CheckFreq, least waste")  # nothing to waste
    assert ours == Way("checkflow", 3, 1, 0.0, 13.0)  # captured within an iteration, beside the one that is written


def test_a_slow_link_holds_each_way_in_its_own_manner() -> None:
    storage = StorageSpeed(300.0, 300.0)
    plan = planned(50.0)  # 150 of 300 bytes leave in time
    assert plan.stall_seconds > 0
    _, on_gpu, rarer, alone, ours = ways_of(plan, storage).ways
    assert (on_gpu.name, on_gpu.interval) == ("CheckFreq, GPU snapshot", 5)
    assert (on_gpu.stall_seconds, on_gpu.durable_seconds) == pytest.approx((0.6, 0.6 + 6 + 1))
    best = least_waste(1, 4.0, 0.6, HOUR)
    assert rarer == replace(on_gpu, name="CheckFreq, least waste", interval=best, capture_interval=best)
    best = least_waste(1, 4.0, plan.stall_seconds, HOUR)
    assert (alone.name, alone.interval, alone.capture_interval) == ("checkflow, host_buffers=1", best, best)
    assert alone.stall_seconds == ours.stall_seconds == plan.stall_seconds
    chosen = choose(Costs(4.0, plan.stall_seconds, 1.0, 0.0), plan.interval, 0.035, mtbf_seconds=HOUR)
    assert chosen == Intervals(ours.capture_interval, ours.interval, "mtbf")
    assert ours.capture_interval < ours.interval
    _, on_cpu, rarer, *_ = ways_of(plan, storage, memory_limit_bytes=390).ways  # 90 and 300, and not a byte more
    assert on_cpu == way_of("CheckFreq, CPU snapshot", 22, 3.0, 7.0)  # 3 s, of which 3.5 % are allowed
    assert rarer.interval == least_waste(1, 4.0, 3.0, HOUR)
    assert ways_of(plan, storage, memory_limit_bytes=391).ways[1] == on_gpu


@pytest.mark.parametrize("memory_bytes", [100, 10**6])
@pytest.mark.parametrize("bandwidth", [30.0, 50.0, 75.0, 100.0, 1000.0])
def test_checkfreqs_interval_is_that_of_its_algorithm(bandwidth: float, memory_bytes: int) -> None:
    plan = planned(bandwidth)
    copy_seconds = 300 / bandwidth
    algorithm = algorithm_1(
        iteration_seconds=4.0, copy_seconds=copy_seconds, write_seconds=1.0,
        cpu_stall_seconds=max(0.0, copy_seconds - (4.0 - 1.0)), gpu_stall_seconds=600 / MEMORY_BANDWIDTH,
        fits=memory_bytes - 90 > 300, overhead=0.035,
    )  # fmt: skip
    checkfreq = ways_of(plan, StorageSpeed(300.0, 300.0), memory_limit_bytes=memory_bytes).ways[1]
    assert checkfreq.name == f"CheckFreq, {algorithm.mode} snapshot"
    assert checkfreq.interval == algorithm.interval
    assert checkfreq.stall_seconds == pytest.approx(algorithm.stall_seconds)


def test_state_that_is_never_written_holds_no_write_up() -> None:
    frozen = planned(75.0, groups=[(2, [225]), (None, [500])])
    checkfreq = ways_of(frozen, StorageSpeed(1e6, 1e6)).ways[1]
    assert (checkfreq.name, checkfreq.interval, checkfreq.stall_seconds) == ("CheckFreq, CPU snapshot", 3, 0.0)
    assert checkfreq.durable_seconds == pytest.approx(725 / 75 + 725 / 1e6)


def test_what_training_moves_leaves_less_of_the_link() -> None:
    busy = planned(100.0, groups=[(2, [100])], link_bytes={1: 150})
    # Of the 300 bytes that cross the link in the three seconds, 150 are left for it.
    assert ways_of(busy, StorageSpeed(1e6, 1e6)).ways[1].durable_seconds == pytest.approx(2.0 + 1e-4)
    full = replace(busy, timeline=make_timeline([(0, 50), (3, 90), (1, 60)], [(2, [100])], {1: 400}))
    found = ways_of(full, StorageSpeed(1e6, 1e6))
    assert [way.name for way in found.ways] == ["synchronous, least waste", "checkflow"]
    assert found.left_out == ("CheckFreq: training itself keeps the link busy all the time",)


def test_a_way_that_costs_more_than_is_allowed_at_any_interval_is_left_out_aloud() -> None:
    found = ways_of(planned(50.0), StorageSpeed(1.0, 1.0), overhead=0.0)
    assert [way.name for way in found.ways] == ["synchronous, least waste"]
    assert [text.partition(":")[0] for text in found.left_out] == [
        "CheckFreq",
        "checkflow, host_buffers=1",
        "checkflow",
    ]


def test_when_a_plan_has_moved_everything() -> None:
    assert strategies._finish_seconds(planned(100.0)) == 3
    assert strategies._finish_seconds(planned(1000.0)) == 3  # the one step in which the link is free that long
    slow = planned(30.0)  # 300 bytes take ten seconds, in some of which training waits
    assert (slow.wait is not None, slow.interval) == (True, 2)
    assert 10 <= strategies._finish_seconds(slow) <= 8 + slow.stall_seconds


@given(timelines, st.integers(1, 5))
def test_a_copy_takes_as_long_as_a_walk_through_the_steps(timeline: Timeline, bandwidth: int) -> None:
    available = timeline.available_bytes(bandwidth)
    found = strategies._copied_seconds(timeline, bandwidth)
    if found is None:
        assert timeline.state_bytes > available[-1] == 0
        return
    left, clock, taken = float(timeline.state_bytes), 0.0, 0.0
    while left > 1e-9:
        for step, reached in zip(timeline.steps, available, strict=True):
            takes, taken = reached - taken, reached
            if left <= takes + 1e-9:
                clock, left = clock + step.duration_seconds * (left / takes if left else 0), 0.0
                break
            left, clock = left - takes, clock + step.duration_seconds
        taken = 0.0
    assert found == pytest.approx(clock)


def test_a_plan_with_nothing_to_move() -> None:
    timeline = make_timeline([(0, 1), (1, 1)], [])
    request = PlanRequest(1.0, 1.0, memory_limit_bytes=10, unit_bytes=1)
    plan = make_plan(timeline, make_fingerprint(timeline), request, graph_peak_bytes=0).plan
    assert plan is not None
    found = ways_of(plan, StorageSpeed(1.0, 1.0), mtbf_seconds=1.0, overhead=0.0)
    assert [(way.interval, way.durable_seconds) for way in found.ways] == [(1, 0.0)] * 4


def test_a_plan_whose_iterations_take_no_time_is_refused() -> None:
    plan = planned()
    timeline = make_timeline([(0, 50), (0, 90)], [(None, [100, 200])])
    with pytest.raises(PlanError, match=r"takes 0\.0 s"):
        ways_of(replace(plan, timeline=timeline), StorageSpeed(1.0, 1.0))


# The command


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs ``checkflow simulate`` in an empty folder: exit code, standard output, standard error."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main(["simulate", *arguments])
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


DIGITS = ("digits", "--device", "cpu", "--storage", "100MB/s", "--mtbf", "1h", "--runs", "20", "--duration", "1d")


def test_a_model_and_its_plan_say_the_same(call: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "digits", "--device", "cpu", "-o", "digits.json"]) == FOUND
    answers = []
    for subject in (DIGITS, ("digits.json", *DIGITS[3:])):
        code, out, err = call(*subject, "--json", "--every", "10min", "--seed", "5")
        assert (code, err) == (FOUND, "")
        answers.append(json.loads(out))
    model, plan = answers
    assert model == plan
    assert model["state_bytes"] == 6_269_368
    assert (model["mtbf_seconds"], model["shape"], model["overhead"]) == (3600, 1, 0.035)
    assert model["restart_seconds"] == pytest.approx(60.0627, abs=1e-3)
    assert (model["runs"], model["seed"], model["duration_seconds"]) == (20, 5, DAY)
    assert model["memory_limit_bytes"] == default_memory_limit_bytes(CATALOGUE["cpu"])
    assert [row["name"] for row in model["results"]] == [
        "synchronous, every 10 min",
        "synchronous, least waste",
        "CheckFreq, CPU snapshot",
        "CheckFreq, least waste",
        "checkflow",
    ]
    for row in model["results"]:
        parts = row["useful_share"]["mean"], row["again_share"], row["stalls_share"], row["starts_share"]
        assert sum(parts) == pytest.approx(1)
        assert row["lost_iterations"] == pytest.approx(row["lost_seconds"] / model["iteration_seconds"])
    often, ours = model["results"][0], model["results"][-1]
    assert often["interval"] == round(600 / model["iteration_seconds"])
    assert ours["useful_share"]["mean"] > often["useful_share"]["mean"]
    assert ours["interval"] == math.ceil(0.06269368 / model["iteration_seconds"])  # what storage can take
    made = plans.load("digits.json")
    assert ours["stall_seconds"] == made.stall_seconds


@pytest.mark.slow
def test_the_table_says_what_was_simulated(call: Any) -> None:
    code, out, err = call(*DIGITS, "--every", "1h")
    assert (code, err) == (FOUND, "")
    for words in ("digits on cpu: 1 d with a failure every 1 h", "synchronous", "CheckFreq", "checkflow", "seed 0"):
        assert words in out
    assert "100 MB/s" in out
    assert "--shape" not in out
    assert "--memory-limit" not in out
    code, out, err = call(*DIGITS[:5], "--mtbf", "100000d", "--duration", "1h", "--runs", "2")
    assert (code, err) == (FOUND, "")
    assert ", 0 failures in each in the mean" in out


@pytest.mark.slow
def test_a_device_file_says_how_fast_its_disk_is(call: Any) -> None:
    device = replace(CATALOGUE["cpu"], name="mine", disk_write_bytes_per_second=5e7, disk_read_bytes_per_second=2e8)
    write_device(device, "device.json")
    asked = ("digits", "--device", "device.json", "--mtbf", "1h", "--runs", "2", "--duration", "2h", "--json")
    code, out, err = call(*asked)
    assert (code, err) == (FOUND, "")
    said = json.loads(out)
    assert (said["storage_write_bytes_per_second"], said["storage_read_bytes_per_second"]) == (5e7, 2e8)
    write_device(replace(device, disk_read_bytes_per_second=None), "device.json")
    said = json.loads(call(*asked)[1])
    assert (said["storage_write_bytes_per_second"], said["storage_read_bytes_per_second"]) == (5e7, 5e7)
    said = json.loads(call(*asked, "--storage", "1GB/s")[1])
    assert (said["storage_write_bytes_per_second"], said["storage_read_bytes_per_second"]) == (1e9, 1e9)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("digits",), USAGE, "--mtbf"),
        (("digits", "--mtbf", "1h"), USAGE, "the speed of storage is not known"),
        ((*DIGITS, "--mtbf", "soon"), USAGE, "not a time"),
        ((*DIGITS, "--mtbf", "0s"), USAGE, "more than zero"),
        ((*DIGITS, "--storage", "1"), USAGE, "1GB/s"),
        ((*DIGITS, "--shape", "0"), USAGE, "a shape is from 0.3"),
        ((*DIGITS, "--shape", "nan"), USAGE, "a shape is from 0.3"),
        ((*DIGITS, "--shape", "flat"), USAGE, "not a number"),
        ((*DIGITS, "--runs", "0"), USAGE, "--runs"),
        ((*DIGITS, "--seed", "-1"), USAGE, "--seed"),
        ((*DIGITS, "--every", "1"), USAGE, "not a time"),
        ((*DIGITS, "--mtbf", "10ms"), USAGE, "that can be simulated soon"),
        ((*DIGITS, "--every", "999999999999d"), USAGE, "longer than any training"),
        ((*DIGITS, "--runs", "100001"), USAGE, "from 1 to 100,000 runs"),
        (("digits", "--device", "auto", "--mtbf", "1h"), USAGE, "the speed of storage is not known"),
        (("none.json", "--mtbf", "1h"), USAGE, "the speed of storage is not known"),
        (("none.json", "--mtbf", "1h", "--storage", "1GB/s"), FAILED, "none.json"),
        (("none.json", "--mtbf", "1h", "--device", "cpu"), USAGE, "--device does nothing here"),
        ((*DIGITS, "--bandwidth", "1kB/s", "--max-interval", "1"), INFEASIBLE, "must leave"),
    ],
)
def test_bad_input_is_one_line(call: Any, arguments: tuple[str, ...], code: int, words: str) -> None:
    found, out, err = call(*arguments)
    assert (found, out) == (code, "")
    assert words in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("none", ["0", "0s", "0min", "0.0 h"])
def test_a_start_may_take_no_time(call: Any, none: str) -> None:
    code, out, _ = call(*DIGITS, "--restart", none, "--storage", "1TB/s", "--json")
    assert code == FOUND
    assert json.loads(out)["restart_seconds"] < 1e-4


@pytest.mark.slow
def test_each_option_reaches_the_simulation(call: Any) -> None:
    def result(*options: str, way: str = "checkflow") -> dict[str, Any]:
        said = json.loads(call(*DIGITS, "--json", *options)[1])
        return {**said, **next((row for row in said["results"] if row["name"].startswith(way)), {})}

    usual, slow = result(), ("--bandwidth", "30MB/s", "--storage", "100GB/s")
    shaped = result("--shape", "0.5")
    assert (shaped["shape"], shaped["failures_a_run"] != usual["failures_a_run"]) == (0.5, True)
    assert result("--seed", "1")["failures_a_run"] != usual["failures_a_run"]
    assert result("--restart", "10min")["starts_share"] > 5 * usual["starts_share"]
    assert result("--duration", "2d")["failures_a_run"] > 1.5 * usual["failures_a_run"]
    free = result(*slow, "--overhead", "10", way="CheckFreq,")
    tight = result(*slow, "--overhead", "10", "--memory-limit", "18MB", way="CheckFreq,")
    assert tight["memory_limit_bytes"] == 18e6
    assert (free["name"], tight["name"]) == ("CheckFreq, GPU snapshot", "CheckFreq, CPU snapshot")
    dear = result(*slow, "--overhead", "0.2", "--memory-limit", "18MB", way="CheckFreq,")
    assert dear["interval"] > 2 * tight["interval"]


@pytest.mark.slow
def test_options_of_the_plan_reach_it(call: Any) -> None:
    asked = (*DIGITS, "--json", "--optimizer", "adam", "--batch-size", "8", "--link-share", "0.5")
    said = json.loads(call(*asked, "--set", "width=8", "--max-interval", "7", "--overhead", "0.9")[1])
    assert main(["plan", "digits", "--device", "cpu", "-o", "plan.json", *asked[-6:], "--set", "width=8"]) == FOUND
    made = plans.load("plan.json")
    assert said["state_bytes"] == made.fingerprint.state_bytes
    assert said["iteration_seconds"] == made.timeline.iteration_seconds
    assert said["bandwidth_bytes_per_second"] == CATALOGUE["cpu"].link_bandwidth_bytes_per_second / 2
    refused = call(*DIGITS, "--policy", "snapshot", "--bandwidth", "100MB/s", "--max-interval", "1", "--overhead", "0")
    assert refused[0] == INFEASIBLE


def test_what_a_plan_file_needs_is_no_torch(call: Any) -> None:
    assert main(["plan", "digits", "--device", "cpu", "-o", "digits.json"]) == FOUND
    program = (
        "import sys; from checkflow.cli.main import main\n"
        f"assert main(['simulate', 'digits.json', *{DIGITS[3:]!r}]) == 0\n"
        "print([name for name in ('torch', 'networkx', 'pulp', 'highspy') if name in sys.modules], file=sys.stderr)"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment)
    assert done.stderr == "[]\n"


def test_a_plan_for_a_device_that_nobody_knows(call: Any) -> None:
    write_device(replace(CATALOGUE["cpu"], name="mine"), "device.json")
    assert main(["plan", "digits", "--device", "device.json", "-o", "digits.json"]) == FOUND
    asked = ("digits.json", *DIGITS[3:])
    assert "memory is not known" in call(*asked)[1]
    assert json.loads(call(*asked, "--json")[1])["memory_limit_bytes"] is None
    assert json.loads(call(*asked, "--json", "--memory-limit", "1GB")[1])["memory_limit_bytes"] == 1e9
    assert "memory is not known" not in call(*asked, "--memory-limit", "1GB")[1]


def test_what_a_shape_does_not_change_is_said(call: Any) -> None:
    assert "at random (--shape 1)" in call(*DIGITS, "--shape", "0.7")[1]


def test_where_there_is_no_plan_the_json_says_why(call: Any) -> None:
    code, out, err = call(*DIGITS, "--bandwidth", "1kB/s", "--max-interval", "1", "--json")
    assert code == INFEASIBLE
    assert "must leave" in err
    said = json.loads(out)
    assert (said["model"], said["device"], said["results"]) == ("digits", "cpu", [])
    assert said["explanation"] in err
