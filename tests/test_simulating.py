"""Simulated failures: held against a walk through each iteration, against Daly's formula, and as a command."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkflow import plan as plans
from checkflow import simulating
from checkflow.cli import FAILED, FOUND, INFEASIBLE, USAGE, main
from checkflow.errors import PlanError
from checkflow.hardware import CATALOGUE, write_device
from checkflow.plan import Plan
from checkflow.planner.schedule import Request, make_plan
from checkflow.runtime.policy import Costs, algorithm_1, choose, least_waste
from checkflow.runtime.policy import Profile as AlgorithmProfile
from checkflow.simulating import Failures, Result, Simulation, Storage, Way, restore_seconds, simulate, ways_of
from tests.timelines import make_fingerprint, make_timeline

HOUR, DAY = 3600.0, 86400.0

# Whole seconds, so that sums are exact and a checkpoint may be durable in the very moment of a failure.
ways_in_seconds = st.builds(
    Way,
    name=st.just("way"),
    interval=st.integers(1, 6),
    stall_seconds=st.integers(0, 4).map(float),
    durable_seconds=st.integers(0, 15).map(float),
)


def walk(way: Way, iteration_seconds: float, up_seconds: float) -> tuple[float, float]:
    """One life of a job, iteration by iteration: seconds trained, and how many of them storage has."""
    clock, trained, kept = 0.0, 0.0, 0.0
    while clock < up_seconds:
        for _ in range(way.interval):
            step = min(iteration_seconds, up_seconds - clock)
            clock, trained = clock + step, trained + step
            if step < iteration_seconds:
                return trained, kept
        if clock + way.durable_seconds <= up_seconds:
            kept = trained
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
    return [result.useful.mean, result.again, result.checkpoints, result.restarts]


@given(ways_in_seconds, st.integers(1, 3).map(float), st.integers(0, 200).map(float))
def test_one_life_is_that_of_a_walk_through_each_iteration(way: Way, iteration: float, up: float) -> None:
    interval, stall = np.array([[way.interval * iteration]]), np.array([[way.stall_seconds]])
    trained = simulating._trained(np.array([up]), interval, stall)
    kept = simulating._durable(np.array([up]), interval, stall, np.array([[way.durable_seconds]]))
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
    found = simulate([way], iteration, failures, 500.0, runs=1, seed=seed).results[0]
    assert shares(found) == pytest.approx([part / 500 for part in walked(way, iteration, failures, 500.0, seed)])
    assert sum(shares(found)) == pytest.approx(1)


@pytest.mark.parametrize(("interval", "stall", "restart"), [(60, 20.0, 0.0), (600, 20.0, 300.0), (3600, 1.0, 60.0)])
def test_synchronous_checkpoints_waste_what_daly_says(interval: int, stall: float, restart: float) -> None:
    """Expected time for w seconds of training: M e^(R/M) (e^((w + c)/M) - 1); here every checkpoint ends its stall."""
    mtbf = HOUR
    way = Way("synchronous", interval, stall, stall)
    result = simulate([way], 1.0, Failures(mtbf, restart), 400 * DAY, runs=100, seed=7).results[0]
    expected = interval / (mtbf * math.exp(restart / mtbf) * math.expm1((interval + stall) / mtbf))
    error = (result.useful.high - result.useful.low) / 3.29 / math.sqrt(100)
    assert abs(result.useful.mean - expected) < 4 * error
    assert error < 0.002 * expected  # or that would tell nothing


def test_the_interval_that_wastes_least_is_better_than_others() -> None:
    stall, failures = 12.0, Failures(2 * HOUR, 60.0)
    best = least_waste(1, 1.0, stall, failures.mtbf_seconds)
    ways = [Way(str(k), k, stall, stall) for k in (best // 3, best, 3 * best)]
    few, right, many = (one.useful.mean for one in simulate(ways, 1.0, failures, 30 * DAY, runs=300, seed=1).results)
    assert right > few
    assert right > many


def test_without_failures_checkpoints_alone_take_time() -> None:
    found = simulate([Way("w", 9, 1.0, 2.0)], 1.0, Failures(1e12, 60.0), 1000.0, runs=3, seed=0)
    result = found.results[0]
    assert found.failures_a_run == 0
    assert shares(result) == pytest.approx([0.9, 0, 0.1, 0])
    assert (result.lost_seconds, result.most_lost_seconds) == (0, 0)
    assert result.useful.low == result.useful.high == result.useful.mean


def test_a_job_that_never_lives_to_a_checkpoint_gets_nowhere() -> None:
    result = simulate([Way("w", 10**9, 1.0, 1.0)], 1.0, Failures(60.0, 1.0), DAY, runs=20, seed=0).results[0]
    assert result.useful.mean < 0.01  # the last life, which does not fail
    assert result.again > 0.9


def test_a_start_that_takes_longer_than_lives_last_is_all_that_happens() -> None:
    result = simulate([Way("w", 1, 0.0, 0.0)], 1.0, Failures(10.0, 1e6), DAY, runs=5, seed=0).results[0]
    assert result.restarts > 0.99


def test_all_ways_meet_the_same_failures() -> None:
    ways = [Way("a", 5, 1.0, 2.0), Way("b", 50, 1.0, 2.0), Way("a", 5, 1.0, 2.0)]
    first, other, same = simulate(ways, 1.0, Failures(600.0, 10.0), DAY, runs=10, seed=3).results
    assert shares(first) == shares(same)
    assert first.restarts == other.restarts
    alone = simulate(ways[:1], 1.0, Failures(600.0, 10.0), DAY, runs=10, seed=3).results[0]
    assert alone == first
    assert simulate(ways[:1], 1.0, Failures(600.0, 10.0), DAY, runs=10, seed=4).results[0] != first


def test_what_is_lost_at_a_failure() -> None:
    """Half an interval and the time until it is durable, in the mean; never more than both."""
    way = Way("w", 100, 0.0, 30.0)
    result = simulate([way], 1.0, Failures(50_000.0, 0.0), 5e7, runs=10, seed=0).results[0]
    assert result.lost_seconds == pytest.approx(80, rel=0.05)
    assert 125 < result.most_lost_seconds <= 130


@pytest.mark.parametrize("shape", [0.5, 0.7, 1.0, 3.0])
def test_the_mean_time_between_failures_is_what_was_asked(shape: float) -> None:
    found = simulate([Way("w", 1, 0.0, 0.0)], 1.0, Failures(1000.0, 0.0, shape), 1e7, runs=10, seed=2)
    assert found.failures_a_run == pytest.approx(10_000, rel=0.05)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (lambda: Failures(0.0, 1.0), "mean time between failures"),
        (lambda: Failures(math.inf, 1.0), "mean time between failures"),
        (lambda: Failures(1.0, -1.0), "a start takes"),
        (lambda: Failures(1.0, 1.0, 0.1), "shape"),
        (lambda: Failures(1.0, 1.0, math.nan), "shape"),
        (lambda: simulate([], 0.0, Failures(1.0, 1.0), 1.0, runs=1, seed=0), "an iteration takes 0.0 s"),
        (lambda: simulate([], 1.0, Failures(1.0, 1.0), 0.0, runs=1, seed=0), "nothing to simulate"),
        (lambda: simulate([], 1.0, Failures(1.0, 1.0), 1.0, runs=0, seed=0), "nothing to simulate"),
        (lambda: simulate([], 1.0, Failures(1.0, 1.0), 100_001.0, runs=1, seed=0), "fewer runs"),
        (lambda: simulate([], 1.0, Failures(1.0, 1.0), 2001.0, runs=1000, seed=0), "fewer runs"),
    ],
)
def test_what_makes_no_sense_is_refused(asked: Callable[[], object], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        asked()


def test_no_ways_and_the_most_failures_are_fine() -> None:
    assert simulate([], 1.0, Failures(1.0, 1.0), 2000.0, runs=1000, seed=0).results == ()


# The ways of a plan

MEMORY_BANDWIDTH = 1e3


def planned(bandwidth: float = 100.0, *, steps: Sequence[tuple[int, int]] = ((0, 50), (3, 90), (1, 60))) -> Plan:
    """An iteration of 4 s: 300 bytes that the optimizer writes in its last second."""
    timeline = make_timeline(list(steps), [(2, [100, 200])])
    request = Request(bandwidth, MEMORY_BANDWIDTH, memory_limit_bytes=10**6, unit_bytes=1, overhead=0.5)
    outcome = make_plan(timeline, make_fingerprint(timeline), request, graph_peak_bytes=0)
    assert outcome.plan is not None
    return outcome.plan


def test_the_ways_of_a_plan() -> None:
    storage = Storage(30.0, 60.0)  # 10 s to write, 5 to read
    plan = planned()
    assert restore_seconds(plan, storage) == 5
    ways = ways_of(plan, storage, mtbf_seconds=HOUR, overhead=0.035, every_seconds=[60.0, 4.0])
    minute, iteration, best, checkfreq, ours = ways
    assert minute == Way("synchronous", 15, 13.0, 13.0)  # 3 s over the link, 10 s to storage
    assert iteration == Way("synchronous", 1, 13.0, 13.0)
    assert best == Way("synchronous, least waste", least_waste(1, 4.0, 13.0, HOUR), 13.0, 13.0)
    # All of it leaves before the optimizer writes: no stall, and no snapshot.
    assert checkfreq == Way("CheckFreq, CPU snapshot", 4, 0.0, 13.0)  # 13 s under way, of iterations of 4 s
    assert ours == Way("checkflow", 3, 0.0, 13.0)  # captured within an iteration, beside the one that is written


def test_a_slow_link_holds_each_way_in_its_own_manner() -> None:
    storage = Storage(300.0, 300.0)
    plan = planned(50.0)  # 150 of 300 bytes leave in time
    chosen = choose(Costs(4.0, plan.stall_seconds, 1.0, 0.0), plan.interval, 0.035, mtbf_seconds=HOUR)
    assert chosen is not None
    *_, on_gpu, ours = ways_of(plan, storage, mtbf_seconds=HOUR, overhead=0.035)
    assert on_gpu.name == "CheckFreq, GPU snapshot"
    assert on_gpu.stall_seconds == pytest.approx(2 * 300 / MEMORY_BANDWIDTH)
    assert on_gpu.durable_seconds == pytest.approx(0.6 + 6 + 1)
    assert (ours.interval, ours.stall_seconds) == (chosen.disk, plan.stall_seconds)
    *_, on_cpu, ours = ways_of(plan, storage, mtbf_seconds=HOUR, overhead=0.035, memory_bytes=100)
    assert on_cpu == Way("CheckFreq, CPU snapshot", 22, 3.0, 7.0)  # 3 s, of which 3.5 % are allowed


@pytest.mark.parametrize("memory_bytes", [100, 10**6])
@pytest.mark.parametrize("bandwidth", [30.0, 50.0, 75.0, 100.0, 1000.0])
def test_checkfreqs_interval_is_that_of_its_algorithm(bandwidth: float, memory_bytes: int) -> None:
    plan = planned(bandwidth)
    copy = 300 / bandwidth
    algorithm = algorithm_1(
        AlgorithmProfile(4.0, 1.0, copy, 600 / MEMORY_BANDWIDTH, 1.0, 300, 90, memory_bytes), overhead=0.035
    )
    ways = ways_of(plan, Storage(300.0, 300.0), mtbf_seconds=HOUR, overhead=0.035, memory_bytes=memory_bytes)
    checkfreq = next(way for way in ways if way.name.startswith("CheckFreq"))
    assert checkfreq.name == f"CheckFreq, {algorithm.mode} snapshot"
    assert checkfreq.interval == algorithm.interval
    assert checkfreq.stall_seconds == pytest.approx(algorithm.stall_seconds)


def test_a_way_that_costs_more_than_is_allowed_at_any_interval_is_left_out() -> None:
    names = [way.name for way in ways_of(planned(50.0), Storage(1.0, 1.0), mtbf_seconds=HOUR, overhead=0.0)]
    assert names == ["synchronous, least waste"]


def test_when_a_plan_has_moved_everything() -> None:
    assert simulating._finish_seconds(planned(100.0)) == 3
    assert simulating._finish_seconds(planned(1000.0)) == 3  # the one step in which the link is free that long
    slow = planned(30.0)  # 300 bytes take ten seconds, in some of which training waits
    assert slow.interval > 1
    assert slow.wait is not None
    assert slow.interval * 4 + slow.stall_seconds >= simulating._finish_seconds(slow) >= 10
    nothing = make_timeline([(0, 1), (1, 1)], [])
    request = Request(1.0, 1.0, memory_limit_bytes=10, unit_bytes=1)
    plan = make_plan(nothing, make_fingerprint(nothing), request, graph_peak_bytes=0).plan
    assert plan is not None
    assert simulating._finish_seconds(plan) == 0
    assert [way.interval for way in ways_of(plan, Storage(1.0, 1.0), mtbf_seconds=1.0, overhead=0.0)] == [1, 1, 1]


def test_a_plan_whose_iterations_take_no_time_is_refused() -> None:
    plan = planned()
    timeline = make_timeline([(0, 50), (0, 90)], [(None, [100, 200])])
    with pytest.raises(PlanError, match="takes no time"):
        ways_of(replace(plan, timeline=timeline), Storage(1.0, 1.0), mtbf_seconds=1.0, overhead=0.035)


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
    assert model["failures"] == {"mtbf_seconds": 3600, "restart_seconds": pytest.approx(60.0627, abs=1e-3), "shape": 1}
    assert (model["runs"], model["seed"], model["duration_seconds"]) == (20, 5, DAY)
    assert [row["way"] for row in model["results"]] == [
        "synchronous",
        "synchronous, least waste",
        "CheckFreq, CPU snapshot",
        "checkflow",
    ]
    for row in model["results"]:
        parts = row["useful_share"]["mean"], row["again_share"], row["checkpoints_share"], row["restarts_share"]
        assert sum(parts) == pytest.approx(1)
        assert row["lost_iterations"] == pytest.approx(row["lost_seconds"] / model["iteration_seconds"])
    often, ours = model["results"][0], model["results"][-1]
    assert often["interval"] == round(600 / model["iteration_seconds"])
    assert ours["useful_share"]["mean"] > often["useful_share"]["mean"]
    assert ours["interval"] == math.ceil(0.06269368 / model["iteration_seconds"])  # what storage can take
    made = plans.load("digits.json")
    assert ours["stall_seconds"] == made.stall_seconds


def test_the_table_says_what_was_simulated(call: Any) -> None:
    code, out, err = call(*DIGITS, "--every", "1h")
    assert (code, err) == (FOUND, "")
    for words in ("digits on cpu: 1 d with a failure every 1 h", "synchronous", "CheckFreq", "checkflow", "seed 0"):
        assert words in out
    assert "100 MB/s" in out
    code, out, err = call(*DIGITS[:5], "--mtbf", "100000d", "--duration", "1h", "--runs", "2")
    assert (code, err) == (FOUND, "")
    assert "0 failures in each" in out


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
        (("digits", "--mtbf", "1h"), USAGE, "how fast is storage?"),
        ((*DIGITS, "--mtbf", "soon"), USAGE, "not a time"),
        ((*DIGITS, "--mtbf", "0s"), USAGE, "more than none"),
        ((*DIGITS, "--storage", "1"), USAGE, "1GB/s"),
        ((*DIGITS, "--shape", "0"), USAGE, "a shape is from 0.3"),
        ((*DIGITS, "--shape", "nan"), USAGE, "a shape is from 0.3"),
        ((*DIGITS, "--shape", "flat"), USAGE, "not a number"),
        ((*DIGITS, "--runs", "0"), USAGE, "--runs"),
        ((*DIGITS, "--seed", "-1"), USAGE, "--seed"),
        ((*DIGITS, "--every", "1"), USAGE, "not a time"),
        ((*DIGITS, "--mtbf", "10ms"), FAILED, "more than can be simulated"),
        (("none.json", "--mtbf", "1h"), FAILED, "none.json"),
        (("none.json", "--mtbf", "1h", "--device", "cpu"), USAGE, "--device does nothing here"),
        ((*DIGITS, "--bandwidth", "1kB/s", "--max-interval", "1"), INFEASIBLE, "must leave"),
    ],
)
def test_bad_input_is_one_line(call: Any, arguments: tuple[str, ...], code: int, words: str) -> None:
    found, out, err = call(*arguments)
    assert (found, out) == (code, "")
    assert words in err
    assert err.count("\n") == 1


def test_a_start_may_take_no_time(call: Any) -> None:
    code, out, _ = call(*DIGITS, "--restart", "0", "--storage", "1TB/s", "--json")
    assert code == FOUND
    assert json.loads(out)["failures"]["restart_seconds"] < 1e-4


def test_a_simulation_is_data() -> None:
    found: Simulation = simulate([Way("w", 1, 0.0, 0.0)], 1.0, Failures(10.0, 1.0), 100.0, runs=2, seed=0)
    with pytest.raises(AttributeError):
        found.runs = 3  # type: ignore[misc]
