"""The arithmetic of intervals: CheckFreq's algorithm case by case, its join with a plan, both tiers, and failures."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkflow.core.errors import CheckflowError
from checkflow.core.units import parse_seconds
from checkflow.runtime.interval.algorithm import (
    Choice,
    Costs,
    Intervals,
    algorithm_1,
    choose,
    in_iterations,
    join,
    least_multiple,
    least_waste,
)

# Ti 1, Tw 0.25, Tc 0.5, Tg 0.125, Ts 3 (binary fractions: sums are exact), m 100, M 800, Mmax 1000.
USUAL = {
    "iteration_seconds": 1.0, "update_seconds": 0.25, "cpu_copy_seconds": 0.5, "gpu_copy_seconds": 0.125,
    "write_seconds": 3.0, "size_bytes": 100, "peak_bytes": 800, "memory_bytes": 1000,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "overhead", "expected"),
    [
        # The snapshot hides behind the rest of the iteration, so that it may as well go to host memory.
        pytest.param({}, 0.05, Choice(4, "CPU", 0.0), id="hidden"),
        pytest.param({"cpu_copy_seconds": 0.75}, 0.05, Choice(4, "CPU", 0.0), id="just hidden"),
        pytest.param({"cpu_copy_seconds": 1.0}, 0.05, Choice(4, "GPU", 0.125), id="not hidden: on the GPU"),
        pytest.param({"cpu_copy_seconds": 0.875}, 0.05, Choice(4, "GPU", 0.125), id="equal stalls: on the GPU"),
        pytest.param({"cpu_copy_seconds": 0.8125}, 0.05, Choice(4, "CPU", 0.0625), id="the GPU's stall is longer"),
        pytest.param({"cpu_copy_seconds": 1.0, "peak_bytes": 900}, 0.05, Choice(5, "CPU", 0.25), id="memory just full"),
        pytest.param({"cpu_copy_seconds": 1.0, "peak_bytes": 899}, 0.05, Choice(4, "GPU", 0.125), id="one byte over"),
        pytest.param({"cpu_copy_seconds": 1.0, "peak_bytes": 1001}, 0.05, Choice(5, "CPU", 0.25), id="no memory left"),
        # k by the time to persist: ceil((Tc + Ts - To) / Ti), or by the overhead: ceil(To / (p Ti))
        pytest.param({"write_seconds": 3.5}, 0.05, Choice(4, "CPU", 0.0), id="a whole quotient"),
        pytest.param({"write_seconds": 3.5001}, 0.05, Choice(5, "CPU", 0.0), id="a little more"),
        pytest.param({"cpu_copy_seconds": 1.0}, 0.01, Choice(13, "GPU", 0.125), id="by the overhead"),
        pytest.param(
            {"iteration_seconds": 1.0, "update_seconds": 1.0, "cpu_copy_seconds": 1.0, "write_seconds": 0.0,
             "memory_bytes": 0}, 0.05, Choice(20, "CPU", 1.0), id="the paper's: one unit of time each, 5 %",
        ),
        # edges
        pytest.param(
            {"cpu_copy_seconds": 0.0, "gpu_copy_seconds": 0.0, "write_seconds": 0.0}, 0.05, Choice(1, "GPU", 0.0),
            id="nothing takes time",
        ),
        pytest.param({}, 0.0, Choice(4, "CPU", 0.0), id="p = 0, no stall"),
        pytest.param({"cpu_copy_seconds": 1.0}, 0.0, Choice(None, "GPU", 0.125), id="p = 0, a stall"),
        pytest.param(
            {"cpu_copy_seconds": 8.0, "gpu_copy_seconds": 7.0, "write_seconds": -0.0, "update_seconds": 0.0,
             "iteration_seconds": 0.5}, 14.0, Choice(2, "GPU", 7.0), id="p above 1",
        ),
        pytest.param(
            {"cpu_copy_seconds": 1.0, "gpu_copy_seconds": 0.25, "update_seconds": 1.0, "write_seconds": 0.0,
             "iteration_seconds": 1.0}, 1.0, Choice(1, "GPU", 0.25), id="less than an iteration",
        ),
        pytest.param(
            {"update_seconds": 2.0, "cpu_copy_seconds": 0.5, "peak_bytes": 1000, "write_seconds": 0.0}, 1.0,
            Choice(2, "CPU", 1.5), id="Tc + Ts < To: an update longer than the iteration",
        ),
    ],
)  # fmt: skip
def test_algorithm_1(changes: dict[str, float], overhead: float, expected: Choice) -> None:
    it = USUAL | changes
    assert expected == algorithm_1(
        iteration_seconds=it["iteration_seconds"],
        copy_seconds=it["cpu_copy_seconds"],
        write_seconds=it["write_seconds"],
        cpu_stall_seconds=max(0.0, it["cpu_copy_seconds"] - (it["iteration_seconds"] - it["update_seconds"])),
        gpu_stall_seconds=it["gpu_copy_seconds"],
        fits=it["memory_bytes"] - it["peak_bytes"] > it["size_bytes"],
        overhead=overhead,
    )


@pytest.mark.parametrize(
    ("unit", "iterations", "expected"),
    [(1, 0.0, 1), (1, 1.0, 1), (1, 1.01, 2), (3, 0.0, 3), (3, 3.0, 3), (3, 4.0, 6), (3, 6.0, 6), (1, 0.3 / 0.1, 3)],
)
def test_least_multiple(unit: int, iterations: float, expected: int) -> None:
    assert least_multiple(unit, iterations) == expected


times = st.floats(0, 100) | st.just(0.0)
shares = st.floats(0.001, 1)
units = st.integers(1, 9)


@given(units, st.floats(0.01, 10), times, times, shares, st.floats(1, 3))
def test_the_join_is_the_least_multiple_within_both_bounds(
    unit: int, iteration: float, persist: float, stall: float, overhead: float, more: float
) -> None:
    k = join(unit, iteration, persist, stall, overhead)
    assert k is not None
    assert k % unit == 0
    bound = max(persist / iteration, stall / (overhead * iteration))
    assert bound * (1 - 1e-6) <= k <= max(unit, (bound + unit) * (1 + 1e-6))
    assert k <= (join(unit, iteration, persist * more, stall, overhead) or 0)
    assert k <= (join(unit, iteration, persist, stall * more, overhead) or 0)
    assert k >= (join(unit, iteration, persist, stall, overhead * more) or 0)


costs = st.builds(Costs, st.floats(0.01, 10), times, times, times, st.just(0.0) | st.floats(0, 0.1))


@given(costs, units, shares, st.none() | st.floats(1, 1e6), st.booleans())
def test_both_tiers_are_within_the_overhead(
    cost: Costs, unit: int, overhead: float, mtbf: float | None, tiers: bool
) -> None:
    chosen = choose(cost, unit, overhead, mtbf_seconds=mtbf, tiers=tiers)
    assert chosen is not None
    assert chosen.memory % unit == 0
    assert chosen.disk % chosen.memory == 0
    assert tiers or chosen.memory == chosen.disk
    assert chosen.disk * cost.iteration_seconds >= cost.persist_seconds * (1 - 1e-6)
    standing = cost.standing_seconds / cost.training_seconds
    assert cost.share(chosen.memory, chosen.disk) <= max(overhead, standing + overhead / 2) * (1 + 1e-6)
    # For captures in between storage waits for a third longer at most, and then to the next of them.
    alone = choose(cost, unit, overhead, mtbf_seconds=mtbf, tiers=False)
    assert alone is not None
    assert alone.disk <= chosen.disk <= alone.disk / 0.75 * (1 + 1e-6)


@pytest.mark.parametrize(
    ("cost", "unit", "overhead", "mtbf", "expected"),
    [
        (Costs(1, 0, 0, 0), 1, 0.0, None, Intervals(1, 1, "plan")),
        (Costs(1, 0, 2.5, 0), 1, 0.0, None, Intervals(1, 3, "persist")),
        (Costs(1, 0, 2.5, 0), 3, 0.0, None, Intervals(3, 3, "plan")),
        (Costs(1, 0.001, 0, 0), 1, 0.0, None, None),
        (Costs(1, 0, 0, 0.25), 1, 0.0625, None, Intervals(1, 4, "overhead")),
        (Costs(1, 0.25, 0, 0), 1, 0.0625, None, Intervals(4, 4, "overhead")),
        (Costs(1, 0.125, 0, 0.125), 1, 0.0625, None, Intervals(4, 4, "overhead")),
        (Costs(1, 0.125, 100, 0), 1, 0.0625, None, Intervals(2, 100, "persist")),
        (Costs(1, 0.015625, 0, 0.75), 1, 0.0625, None, Intervals(1, 16, "overhead")),
        (Costs(1, 0.125, 0, 0), 1, 0.0625, 3600, Intervals(2, 30, "mtbf")),
        (Costs(1, 0.125, 0, 0), 1, 0.0625, 10, Intervals(2, 2, "overhead")),
        (Costs(1.03125, 0.125, 0, 0.125, 0.03125), 1, 0.0625, None, Intervals(8, 8, "overhead")),
        (Costs(1.015625, 0.125, 0, 0.125, 0.015625), 1, 0.0625, None, Intervals(6, 6, "overhead")),
        pytest.param(Costs(1.5, 0.125, 0, 0.125, 0.5), 1, 0.0625, None, Intervals(8, 8, "overhead"), id="half is left"),
        pytest.param(Costs(1, 0, 0, 0.25, 2), 1, 0.0625, None, Intervals(1, 16, "overhead"), id="nothing but hooks"),
        (Costs(1, 0, 2.5, 0, 0.5), 1, 0.0, None, Intervals(1, 3, "persist")),
        pytest.param(Costs(1, 0.0625, 0, 1e-12), 1, 0.0625, None, Intervals(1, 1, "plan"), id="nothing is left"),
        pytest.param(
            Costs(1, 0.0625, 50, 1e-12), 1, 0.0625, None, Intervals(50, 50, "persist"), id="rounded to nothing"
        ),
    ],
)
def test_choose(cost: Costs, unit: int, overhead: float, mtbf: float | None, expected: Intervals | None) -> None:
    assert choose(cost, unit, overhead, mtbf_seconds=mtbf) == expected


def expected_seconds(k: int, iteration: float, stall: float, mtbf: float) -> float:
    """Daly's total time for a second of training, restarts aside."""
    w = k * iteration
    return mtbf * math.expm1((w + stall) / mtbf) / w


@given(units, st.floats(0.05, 5), st.floats(0, 20), st.floats(10, 1000))
def test_least_waste_wastes_least(unit: int, iteration: float, stall: float, mtbf: float) -> None:
    k = least_waste(unit, iteration, stall, mtbf)
    assert k % unit == 0
    here = expected_seconds(k, iteration, stall, mtbf)
    for other in range(unit, 3 * max(k, math.ceil(mtbf / iteration / 10)), unit):
        if other * iteration + stall < 500 * mtbf:
            assert here <= expected_seconds(other, iteration, stall, mtbf) * (1 + 1e-9)


@given(st.floats(0.001, 0.01), st.floats(0.1, 1), st.floats(1e4, 1e6))
def test_least_waste_is_youngs_where_failures_are_rare(iteration: float, stall: float, mtbf: float) -> None:
    young = math.sqrt(2 * stall * mtbf) / iteration
    assert least_waste(1, iteration, stall, mtbf) == pytest.approx(young, rel=0.02)


def test_no_cost_no_wait() -> None:
    assert least_waste(3, 1.0, 0.0, 1e5) == 3
    assert least_waste(1, 1.0, 5.0, 1e-3) == 1  # failures all the time


@pytest.mark.parametrize(
    ("unit", "iteration", "seconds", "expected"),
    [(1, 1.0, 30.0, 30), (7, 1.0, 30.0, 28), (1, 60.0, 30.0, 1), (5, 60.0, 30.0, 5), (1, 0.4, 1.0, 2)],
)
def test_seconds_as_iterations(unit: int, iteration: float, seconds: float, expected: int) -> None:
    assert in_iterations(unit, iteration, seconds) == expected


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30s", 30), ("10min", 600), ("4h", 14400), (" 1.5 d ", 129600), ("250ms", 0.25), ("1e3s", 1000)],
)
def test_times(text: str, seconds: float) -> None:
    assert parse_seconds(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "30", "s", "-1s", "0s", "1e999s", "10m", "4 hours", "٣s", "nan s"])
def test_what_is_no_time(text: str) -> None:
    with pytest.raises(CheckflowError, match=re.escape(repr(text)) + "|more than none"):
        parse_seconds(text)
