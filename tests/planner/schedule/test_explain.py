"""Why it does not fit: the least bandwidth is exact, and the words name the interval that binds."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies

from checkflow.core.graph import AnchorKey, AnchorKind
from checkflow.core.plan import Policy
from checkflow.core.timeline import StateGroup, Step, Timeline
from checkflow.planner.exact.interval import Question
from checkflow.planner.ilp import flow, solvers
from checkflow.planner.schedule.explain import TightInterval, explain, least_bandwidth, tight_interval
from tests.support.timelines import make_timeline, random_timeline, search, timelines

MEMORY = 936e9  # bytes per second


def ask(
    timeline: Timeline,
    bandwidth: float = 1.0,
    policy: Policy = "direct",
    peak: int | None = None,
    *,
    unit: int = 1,
    overhead: float | None = None,
    memory: float = 2.0,
) -> Question:
    return Question(timeline, unit, policy, bandwidth, memory, overhead, peak)


def ilp_fits(question: Question, interval: int = 1) -> bool:
    """The same question to a solver."""
    problem = question.problem(interval)
    found = solvers.solve(flow.build(problem, question.policy, question.prices, question.budget(interval)).lp, "highs")
    if found.bound is None:
        return False
    limit = question.peak_limit_bytes
    return limit is None or flow.peak_bound_bytes(problem, found.bound) <= limit


@given(timelines, strategies.sampled_from(["direct", "snapshot"]), strategies.none() | strategies.integers(0, 9))
@settings(max_examples=300, deadline=None)
def test_fits_is_what_exhaustive_search_finds(timeline, policy: Policy, peak: int | None) -> None:
    best = search(timeline, policy)
    expected = best is not None and (peak is None or best.peak_bytes <= peak)
    assert ask(timeline, policy=policy, peak=peak).fits(1) == expected


@pytest.mark.parametrize("overhead", [None, 0.0, 0.4])
@pytest.mark.parametrize("policy", ["direct", "snapshot"])
def test_least_bandwidth_is_least(policy: Policy, overhead: float | None) -> None:
    """A solver finds a schedule at the answer and none at one byte per second less."""
    found = none = 0
    for seed in range(100):
        timeline = random_timeline(random.Random(seed))
        steps = tuple(replace(step, duration_seconds=step.duration_seconds / 100) for step in timeline.steps)
        timeline = replace(timeline, steps=steps)
        question = ask(timeline, 1.0, policy, seed % 7 if seed % 2 else None, overhead=overhead, memory=200.0)
        interval = 1 + seed % 3 % 2
        least = least_bandwidth(question, interval)
        if least is None:
            none += 1
            assert not ilp_fits(replace(question, bandwidth_bytes_per_second=1e9), interval), seed
        elif least:
            found += 1
            assert ilp_fits(replace(question, bandwidth_bytes_per_second=least), interval), seed
            slower = replace(question, bandwidth_bytes_per_second=least - 1)
            assert least == 1 or not ilp_fits(slower, interval), seed
    assert found > {("snapshot", 0.0): -1, ("snapshot", 0.4): 10}.get((policy, overhead), 20)  # snapshots cost time
    assert none > 3


def test_the_answer_does_not_depend_on_the_link_at_hand() -> None:
    timeline = trained_model()
    answers = {least_bandwidth(ask(timeline, rate, unit=512, memory=MEMORY)) for rate in (1.0, 20e9, 37e9, 1e15)}
    assert len(answers) == 1


def trained_model() -> Timeline:
    """ResNet-like: a forward of 1.8 ms, then 212 MB of state are written, then 4 ms more."""
    forward = AnchorKey(AnchorKind.FORWARD, "model/layer4.1.bn2")
    boundary = AnchorKey(AnchorKind.BOUNDARY, "")
    return Timeline(
        "segment",
        (
            Step("anchor", str(boundary), 0.0, 900_000_000, anchor=boundary),
            Step("segment", "conv … relu", 1.8e-3, 1_000_000_000),
            Step("anchor", str(forward), 0.0, 1_000_000_000, anchor=forward),
            Step("segment", "bn … step", 4.0e-3, 950_000_000),
        ),
        (StateGroup(3, (("model/w", 212_000_000),)),),
    )


def sentence(
    timeline: Timeline, bandwidth: float, policy: Policy = "direct", peak: int | None = None, *,
    overhead: float | None = None, interval: int = 1,
) -> str:  # fmt: skip
    question = ask(timeline, bandwidth, policy, peak, unit=512, overhead=overhead, memory=MEMORY)
    assert not question.fits(interval)
    return explain(question, interval)


def test_words_of_a_link_that_is_too_slow_for_a_deadline() -> None:
    assert sentence(trained_model(), 63e9, "direct", 1_000_000_000) == (
        "from the boundary to layer4.1.bn2's forward 212 MB must leave in 1.80 ms: 118 GB/s;"
        " the link gives 63.0 GB/s, and the memory limit of 1.00 GB leaves no room for more snapshots;"
        " it takes 118 GB/s, or 98.6 MB (98600448 bytes) more device memory,"
        " or --overhead 0.270 (1.57 ms a checkpoint)"
    )


def test_words_of_a_link_that_is_too_slow_for_the_iteration() -> None:
    for policy in ("direct", "snapshot"):
        text = sentence(trained_model(), 20e9, policy)  # type: ignore[arg-type]
        assert text.startswith("from the boundary to the next boundary 212 MB must leave in 5.80 ms: 36.6 GB/s;")
        assert "the link gives 20.0 GB/s; it takes 36.6 GB/s" in text
        assert ("or --overhead" in text) == (policy == "direct")
    later = sentence(trained_model(), 15e9, "snapshot", interval=2)
    assert later.startswith("from the boundary to the boundary 2 iterations later 212 MB must leave in 11.6 ms: 18.3")


def test_words_of_an_overhead_that_is_not_enough() -> None:
    text = sentence(trained_model(), 20e9, overhead=0.035)
    assert "and to wait for the rest takes" in text
    assert "where the overhead allows 203 µs" in text
    # The price that is named is enough, and nothing less than its last digit is.
    assert "or --overhead 0.858 (4.97 ms a checkpoint)" in text
    assert ask(trained_model(), 20e9, unit=512, overhead=0.858, memory=MEMORY).fits(1)
    assert not ask(trained_model(), 20e9, unit=512, overhead=0.856, memory=MEMORY).fits(1)


def test_words_of_memory_that_is_too_small() -> None:
    assert sentence(trained_model(), 63e9, "direct", 999_999_999) == (
        "training alone needs 1000000000 bytes of device memory; the limit is 999999999 bytes: it takes a smaller"
        " batch, another device, or --relax-memory"
    )
    timeline = make_timeline([(0, 9_000), (1, 9_000)], [(1, [4096])])
    assert sentence(timeline, 1e6, "direct", 10_000) == (
        "3.58 kB would have to leave before the end of the boundary, in no time: the memory limit of 10.0 kB leaves"
        " too little room for snapshots; no link is fast enough, it takes 3.10 kB (3096 bytes) more device memory,"
        " or --overhead 0.00359 (3.58 ms a checkpoint)"
    )
    # A copy in device memory needs room under the snapshot policy, however fast the link.
    timeline = make_timeline([(0, 9_000), (1, 9_000), (1, 9_000)], [(None, [4096])])
    assert sentence(timeline, 1e6, "snapshot", 9_100).startswith(
        "the memory limit of 9.10 kB leaves too little room for snapshots to keep the link busy; no link is fast enough"
    )


def test_words_of_a_stall_that_is_too_long() -> None:
    assert "the overhead allowed leaves no room for more snapshots" in sentence(trained_model(), 63e9, overhead=1e-6)
    assert sentence(trained_model(), 63e9, "snapshot", overhead=1e-6) == (
        "the snapshot policy copies all 212 MB inside device memory, which stalls training for 453 µs, where the"
        " overhead allows 0.01 µs; no link is fast enough, or --overhead 0.0782 (453 µs a checkpoint)"
    )


def test_only_the_limit_that_binds_is_named() -> None:
    plenty = 10**12
    assert "the overhead allowed leaves no room" in sentence(trained_model(), 63e9, "direct", plenty, overhead=0.0)
    assert "and the memory limit of 1.00 GB leaves no room" in sentence(
        trained_model(), 63e9, "direct", 1_000_000_000, overhead=0.1
    )


def test_words_of_an_iteration_without_time() -> None:
    timeline = make_timeline([(0, 9), (0, 9)], [(None, [700])])
    assert sentence(timeline, 1.0) == "700 B must leave in an iteration that takes no time; no link is fast enough"


def test_training_s_own_traffic_is_told() -> None:
    timeline = make_timeline([(0, 9), (1, 9)], [(None, [4096])], {1: 3000})
    text = sentence(timeline, 6000.0)
    assert "4.10 kB must leave in 1.00 s: 7.10 kB/s; the link gives 6.00 kB/s, of which training itself" in text
    assert "uses 3.00 kB" in text


def test_bandwidths_that_look_alike_are_told_in_full() -> None:
    timeline = make_timeline([(0, 9), (1, 9)], [(None, [1024 * 1000])])
    assert "1024000 B/s; the link gives 1023999 B/s; it takes 1.03 MB/s" in sentence(timeline, 1_023_999.0)


@given(timelines, strategies.sampled_from(["direct", "snapshot"]), strategies.integers(0, 9), strategies.integers(1, 3))
@settings(max_examples=200, deadline=None)
def test_tight_interval_is_a_proof(timeline, policy: Policy, peak: int, interval: int) -> None:
    """Where one is named there is no schedule, and the rate that it asks for is one that the link does not give."""
    question = ask(timeline, 1.0, policy, max(peak, timeline.training_peak_bytes))
    tight = tight_interval(question, interval)
    if tight is not None:
        assert not question.fits(interval)
        assert tight.bytes_per_second > 1.0
        assert tight.short_bytes > 0
    elif policy == "direct":
        assert question.fits(interval)


def test_rate_of_no_time_is_infinite() -> None:
    timeline = make_timeline([(0, 9), (1, 9)], [(1, [5])])
    tight = tight_interval(ask(timeline, 1.0, peak=10))
    assert tight == TightInterval("the end of the boundary", 4, 0.0, float("inf"), 4)
    assert tight.own_bytes == 0.0
