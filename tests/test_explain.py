"""Why it does not fit: the least bandwidth is exact, and the words name the interval that binds."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies

from checkflow.graph import AnchorKey, AnchorKind
from checkflow.plan import Policy
from checkflow.planner import flow, solvers
from checkflow.planner.explain import Interval, Limits, explain, fits, least_bandwidth, tight_interval
from checkflow.planner.problem import make_problem
from checkflow.timeline import StateGroup, Step, Timeline
from tests.timelines import make_timeline, random_timeline, search, timelines


def ilp_fits(timeline: Timeline, bandwidth: float, limits: Limits, unit: int = 1) -> bool:
    """The same question to a solver."""
    problem = make_problem(timeline, bandwidth, unit)
    found = solvers.solve(flow.build(problem, limits.policy, limits.most_snapshots).lp, "highs")
    if found.bound is None:
        return False
    return limits.peak_bytes is None or flow.peak_bound_bytes(problem, found.bound) <= limits.peak_bytes


@given(
    timelines,
    strategies.sampled_from(["direct", "snapshot"]),
    strategies.none() | strategies.integers(0, 9),
    strategies.none() | strategies.integers(0, 5),
)
@settings(max_examples=300, deadline=None)
def test_fits_is_what_exhaustive_search_finds(timeline, policy: Policy, peak: int | None, most: int | None) -> None:
    best = search(timeline, policy, most_snapshots=most)
    expected = best is not None and (peak is None or best.peak_bytes <= peak)
    assert fits(make_problem(timeline, 1.0, 1), Limits(policy, peak, most)) == expected


@pytest.mark.parametrize("policy", ["direct", "snapshot"])
def test_least_bandwidth_is_least(policy: Policy) -> None:
    """A solver finds a schedule at the answer and none at one byte per second less."""
    found = none = 0
    for seed in range(150):
        timeline = random_timeline(random.Random(seed))
        steps = tuple(replace(step, duration_seconds=step.duration_seconds / 100) for step in timeline.steps)
        timeline = replace(timeline, steps=steps)
        limits = Limits(policy, seed % 7 if seed % 2 else None)
        least = least_bandwidth(timeline, limits, 1)
        if least is None:
            none += 1
            assert not ilp_fits(timeline, 1e9, limits), seed
        elif least:
            found += 1
            assert ilp_fits(timeline, least, limits), seed
            assert least == 1 or not ilp_fits(timeline, least - 1, limits), seed
    assert found > 50
    assert none > 10


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


def sentence(timeline: Timeline, bandwidth: float, limits: Limits) -> str:
    problem = make_problem(timeline, bandwidth, 512)
    assert not fits(problem, limits)
    return explain(timeline, bandwidth, problem, limits)


def test_words_of_a_link_that_is_too_slow_for_a_deadline() -> None:
    text = sentence(trained_model(), 63e9, Limits("direct", 1_000_000_000))
    assert text == (
        "from the boundary to forward model/layer4.1.bn2 212 MB must leave in 1.80 ms: 118 GB/s;"
        " the link gives 63.0 GB/s, and the memory limit of 1.00 GB leaves no room for more snapshots;"
        " it fits from 118 GB/s on, or in 98.6 MB (98600448 bytes) more device memory"
    )


def test_words_of_a_link_that_is_too_slow_for_the_iteration() -> None:
    for policy in ("direct", "snapshot"):
        text = sentence(trained_model(), 20e9, Limits(policy))
        assert text.startswith("from the boundary to the next boundary 212 MB must leave in 5.80 ms: 36.6 GB/s;")
        assert text.endswith("the link gives 20.0 GB/s; it fits from 36.6 GB/s on")


def test_words_of_memory_that_is_too_small() -> None:
    assert sentence(trained_model(), 63e9, Limits("direct", 999_999_999)) == (
        "training alone needs 1000000000 bytes of device memory; the limit is 999999999 bytes"
    )
    timeline = make_timeline([(0, 9_000), (1, 9_000)], [(1, [4096])])
    assert sentence(timeline, 1e6, Limits("direct", 10_000)) == (
        "3.58 kB would have to leave before the end of the boundary, in no time: the memory limit of 10.0 kB leaves"
        " too little room for snapshots; no link is fast enough: it takes at least 3.10 kB (3096 bytes) more device"
        " memory"
    )
    # A copy in device memory needs room under the snapshot policy, however fast the link.
    timeline = make_timeline([(0, 9_000), (1, 9_000), (1, 9_000)], [(None, [4096])])
    assert sentence(timeline, 1e6, Limits("snapshot", 9_100)).startswith(
        "the memory limit of 9.10 kB leaves too little room for snapshots to keep the link busy; no link is fast enough"
    )


def test_words_of_a_stall_that_is_too_long() -> None:
    assert "the overhead allowed leaves no room for more snapshots" in sentence(
        trained_model(), 63e9, Limits("direct", None, 10)
    )
    assert sentence(trained_model(), 63e9, Limits("snapshot", None, 10)) == (
        "the snapshot policy copies all 212 MB inside device memory, which stalls training for longer than the overhead"
        " allows; no link is fast enough"
    )


def test_only_the_limit_that_binds_is_named() -> None:
    plenty = 10**12
    assert "the overhead allowed leaves no room" in sentence(trained_model(), 63e9, Limits("direct", plenty, 10))
    assert "and the memory limit of 1.00 GB leaves no room" in sentence(
        trained_model(), 63e9, Limits("direct", 1_000_000_000, plenty)
    )


def test_words_of_an_iteration_without_time() -> None:
    timeline = make_timeline([(0, 9), (0, 9)], [(None, [700])])
    assert sentence(timeline, 1.0, Limits("direct")) == (
        "700 B must leave in an iteration that takes no time; no link is fast enough"
    )


def test_training_s_own_traffic_is_told() -> None:
    timeline = make_timeline([(0, 9), (1, 9)], [(None, [4096])], {1: 3000})
    text = sentence(timeline, 6000.0, Limits("direct"))
    assert "4.10 kB must leave in 1.00 s: 7.10 kB/s; the link gives 6.00 kB/s, of which training itself" in text
    assert "uses 3.00 kB" in text


def test_bandwidths_that_look_alike_are_told_in_full() -> None:
    timeline = make_timeline([(0, 9), (1, 9)], [(None, [1024 * 1000])])
    assert "1024000 B/s; the link gives 1023999 B/s; it fits from 1.03 MB/s on" in sentence(
        timeline, 1_023_999.0, Limits("direct")
    )


@given(timelines, strategies.sampled_from(["direct", "snapshot"]), strategies.integers(0, 9))
@settings(max_examples=200, deadline=None)
def test_tight_interval_is_a_proof(timeline, policy: Policy, peak: int) -> None:
    """Where one is named there is no schedule, and the rate that it asks for is one that the link does not give."""
    limits = Limits(policy, max(peak, timeline.training_peak_bytes))
    problem = make_problem(timeline, 1.0, 1)
    tight = tight_interval(timeline, problem, limits)
    if tight is not None:
        assert not fits(problem, limits)
        assert tight.bytes_per_second > 1.0
    elif policy == "direct":
        assert fits(problem, limits)


def test_rate_of_no_time_is_infinite() -> None:
    assert Interval("here", 3, 0.0, 0).bytes_per_second == float("inf")
    assert Interval("here", 3, 2.0, 1).bytes_per_second == 2.0
