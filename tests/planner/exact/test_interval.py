"""Each figure about intervals against the ILP over every step: a schedule exists at the figure, and none just below it.

The ILP is the judge because it shares nothing with what makes the figures: no blocks, no exact rules, no bisection.
"""

from __future__ import annotations

import functools
import math
import random
import re
from dataclasses import replace

import pytest

from checkflow.core.machine.device import find_device
from checkflow.core.plan import Policy
from checkflow.core.timeline import Granularity, Timeline
from checkflow.planner.exact.interval import Question, frontier, longest_interval, smallest_interval
from checkflow.planner.exact.optimum import Budget
from checkflow.planner.exact.problem import make_problem, unit_for
from checkflow.planner.ilp import flow, solvers
from checkflow.planner.model_file.load import load_training_step
from checkflow.planner.schedule.compare import binding_interval
from checkflow.planner.schedule.explain import least_bandwidth, tight_interval
from checkflow.planner.schedule.scheduler import PlanRequest, make_plan
from checkflow.planner.timeline.roofline import durations_seconds
from checkflow.planner.timeline.steps import make_timeline
from checkflow.planner.trace.trace import trace
from tests.support.timelines import make_fingerprint, random_timeline
from tests.support.timelines import make_timeline as timeline_of

RTX_3090 = find_device("RTX 3090")


def ilp_peak(question: Question, interval: int, budget: Budget | None = None) -> int | None:
    """The least peak within the budget over all steps of all iterations; None: there is no schedule."""
    problem = make_problem(
        question.timeline, question.bandwidth_bytes_per_second, question.unit_bytes, iterations=interval
    )
    asked = question.budget(interval) if budget is None else budget
    found = solvers.solve(flow.build(problem, question.policy, question.prices, asked).lp, "highs")
    if found.bound is None:
        return None
    assert found.status == "optimal"
    return flow.peak_bound_bytes(problem, found.bound)


def ilp_fits(question: Question, interval: int, budget: Budget | None = None) -> bool:
    peak = ilp_peak(question, interval, budget)
    return peak is not None and (question.peak_limit_bytes is None or peak <= question.peak_limit_bytes)


def busy_timeline(rng: random.Random) -> Timeline:
    """Many deadlines and hills of memory: what leaves early then competes with what falls due soon."""
    steps, groups = [(0, rng.randint(0, 4))], []
    for _ in range(rng.randint(4, 9)):
        steps += [(rng.choice([0, 0, 1]), rng.randint(0, 6)), (rng.choice([1, 1, 2]), rng.randint(0, 6))]
    for first in range(1, len(steps)):
        if rng.random() < 0.5:
            groups.append((first, [rng.randint(0, 2)]))
    return timeline_of(steps, [*groups, (None, [rng.randint(0, 3)])])


def random_question(seed: int, policy: Policy = "direct") -> Question:
    """A few bytes over a slow link, with and without limits."""
    rng = random.Random(seed)
    timeline = busy_timeline(rng) if seed % 2 else random_timeline(rng, most_steps=6, most_bytes=8)
    limit = rng.choice([None, timeline.training_peak_bytes + rng.randint(0, 4)])
    overhead = rng.choice([None, 0.0, 0.1, 0.25, 0.5])
    memory = rng.choice([1.0, 2.0, 5.0, 40.0])
    return Question(timeline, 1, policy, rng.choice([0.3, 0.5, 1.0, 2.0]), memory, overhead, limit)


@functools.cache
def alexnet(granularity: Granularity) -> Timeline:
    """AlexNet of batch 1 on an RTX 3090, which most links are too slow for."""
    name, step = load_training_step("alexnet", batch_size=1, settings={}, optimizer=None)
    graph = trace(step, name=name, target="cuda")
    return make_timeline(graph, durations_seconds(graph, RTX_3090), granularity)


def alexnet_question(
    granularity: Granularity = "segment",
    policy: Policy = "direct",
    overhead: float | None = 0.035,
    more_bytes: int | None = 100_000_000,
    bandwidth: float = 20e9,
) -> Question:
    timeline = alexnet(granularity)
    limit = None if more_bytes is None else timeline.training_peak_bytes + more_bytes
    memory = RTX_3090.memory_bandwidth_bytes_per_second
    return Question(timeline, unit_for(timeline.state_bytes), policy, bandwidth, memory, overhead, limit)


# The smallest interval


@pytest.mark.parametrize("policy", ["direct", "snapshot"])
def test_smallest_interval_of_random_timelines(policy: Policy) -> None:
    longer = never = 0
    for seed in range(140):
        question, most = random_question(seed, policy), 1 + seed % 7
        interval = smallest_interval(question, most)
        if interval is None:
            never += 1
            assert not ilp_fits(question, most), seed
        else:
            assert ilp_fits(question, interval), seed
            assert interval == 1 or not ilp_fits(question, interval - 1), seed
            longer += interval > 1
    assert longer > 15
    assert never > 15


@pytest.mark.parametrize(
    ("granularity", "policy", "overhead", "more_bytes"),
    [
        ("segment", "direct", 0.1, 100_000_000),
        ("segment", "direct", 0.035, None),
        ("operator", "direct", 0.4, 0),
        ("segment", "direct", None, 220_000_000),
        ("segment", "snapshot", 0.035, None),
        ("segment", "snapshot", None, 240_000_000),
    ],
)
def test_smallest_interval_of_alexnet(
    granularity: Granularity, policy: Policy, overhead: float | None, more_bytes: int | None
) -> None:
    question = alexnet_question(granularity, policy, overhead, more_bytes)
    interval = smallest_interval(question, longest_interval(question.timeline, policy, None))
    assert interval is not None
    assert interval > 1
    assert ilp_fits(question, interval)
    assert not ilp_fits(question, interval - 1)


def test_an_interval_is_never_longer_than_asked() -> None:
    question = alexnet_question()
    interval = smallest_interval(question, 1000)
    assert interval is not None
    assert smallest_interval(question, interval) == interval
    assert smallest_interval(question, interval - 1) is None


# The frontier


def assert_least(
    question: Question, interval: int, stall_seconds: float, extra_bytes: int, less_seconds: float
) -> None:
    """Within the stall this is the least peak; within any less of it, the least peak is higher, or there is none."""
    may_wait = question.overhead is not None and question.policy == "direct"
    peak = question.timeline.training_peak_bytes + extra_bytes
    assert ilp_peak(question, interval, Budget(stall_seconds, may_wait)) == peak
    if stall_seconds:
        tighter = ilp_peak(question, interval, Budget(max(0.0, stall_seconds - less_seconds), may_wait))
        assert tighter is None or tighter > peak


@pytest.mark.parametrize("policy", ["direct", "snapshot"])
def test_frontier_rows_of_random_timelines(policy: Policy) -> None:
    priced = bent = 0
    for seed in range(80):
        question = random_question(seed, policy)
        rows = frontier(question, 6)
        for row in rows:
            prices = question.prices
            tiny = 1e-3 * min(prices.wait_seconds, prices.snapshot_seconds)
            assert_least(question, row.interval, row.stall_seconds, row.extra_bytes, tiny)
            priced += row.stall_seconds > 0
        bent += len(rows) > 2
    assert priced > 25
    assert policy == "snapshot" or bent > 3


def test_a_snapshot_leaves_no_earlier_than_it_must() -> None:
    """Two snapshots do: the first one makes room just in time for the hill. Sent as soon as it could leave, it would
    take the link from a unit that is due next, which then needs a snapshot of its own, and is on the hill instead."""
    steps = [(0, 0), (1, 0), (0, 0), (1, 0), (1, 3), (0, 0), (2, 0)]
    question = Question(timeline_of(steps, [(1, [1]), (3, [1]), (6, [2])]), 1, "direct", 1.0, 8.0, 0.1, 3)
    rows = [(row.interval, row.stall_seconds, row.extra_bytes) for row in frontier(question, 1)]
    assert rows == [(1, 0.5, 0), (1, 0.25, 1)]
    assert smallest_interval(question, 1) == 1  # the overhead allows 0.5 s


@pytest.mark.parametrize(
    ("granularity", "policy", "overhead"),
    [("segment", "direct", 0.035), ("operator", "direct", None), ("segment", "snapshot", None)],
)
def test_frontier_rows_of_alexnet(granularity: Granularity, policy: Policy, overhead: float | None) -> None:
    question = alexnet_question(granularity, policy, overhead)
    rows = frontier(question, longest_interval(question.timeline, policy, None))
    unit_seconds = min(question.prices.wait_seconds, question.prices.snapshot_seconds)
    assert rows
    for row in rows:
        assert_least(question, row.interval, row.stall_seconds, row.extra_bytes, unit_seconds)


# The least bandwidth


@pytest.mark.parametrize("granularity", ["segment", "operator"])
@pytest.mark.parametrize(
    ("interval", "policy", "overhead", "more_bytes"),
    [
        (1, "direct", None, None),
        (1, "direct", None, 50_000_000),
        (3, "direct", 0.0, 0),
        (2, "snapshot", None, 200_000_000),
    ],
)
def test_least_bandwidth_of_alexnet(
    granularity: Granularity, interval: int, policy: Policy, overhead: float | None, more_bytes: int | None
) -> None:
    question = alexnet_question(granularity, policy, overhead, more_bytes)
    least = least_bandwidth(question, interval)
    assert least is not None
    assert ilp_fits(replace(question, bandwidth_bytes_per_second=least), interval)
    assert not ilp_fits(replace(question, bandwidth_bytes_per_second=least - 1), interval)


def test_least_bandwidth_of_alexnet_where_training_may_wait() -> None:
    """The price of a wait changes with the link by less than a solver's tolerance for one byte per second: a millionth
    is what it can tell."""
    question = alexnet_question()
    least = least_bandwidth(question, 2)
    assert least is not None
    assert ilp_fits(replace(question, bandwidth_bytes_per_second=least * (1 + 1e-6)), 2)
    assert not ilp_fits(replace(question, bandwidth_bytes_per_second=least * (1 - 1e-6)), 2)


# The tight interval


@pytest.mark.parametrize("policy", ["direct", "snapshot"])
def test_tight_interval_proves_that_there_is_no_schedule_without_waiting(policy: Policy) -> None:
    """Nor over any link slower than the rate that it asks for. Training's own traffic aside, which may have to wait."""
    named = 0
    for seed in range(140):
        question, interval = random_question(seed, policy), 1 + seed % 3
        tight = tight_interval(question, interval)
        if tight is None:
            continue
        named += 1
        budget = replace(question.budget(interval), may_wait=False)
        assert not ilp_fits(question, interval, budget), seed
        if math.isinf(tight.bytes_per_second):
            assert not ilp_fits(replace(question, bandwidth_bytes_per_second=1e6), interval, budget), seed
        elif not tight.own_bytes:
            slower = replace(question, bandwidth_bytes_per_second=tight.bytes_per_second * (1 - 1e-6))
            assert not ilp_fits(slower, interval, budget), seed
    assert named > 30


def test_rate_of_the_tight_interval_is_the_least_bandwidth_where_only_link_and_room_bind() -> None:
    """Direct policy, any number of snapshots, no wait: then all that can be short is an interval, and the one that asks
    for the fastest link is named, so that its rate cures all of them, and nothing less does."""
    cured = 0
    for seed in range(140):
        question, interval = replace(random_question(seed), overhead=None), 1 + seed % 3
        tight = tight_interval(question, interval)
        if any(step.link_bytes for step in question.timeline.steps):
            continue
        assert ilp_fits(question, interval) == (tight is None), seed
        if tight is not None and tight.seconds:
            cured += 1
            rate = tight.bytes_per_second
            assert ilp_fits(replace(question, bandwidth_bytes_per_second=rate), interval), seed
            assert not ilp_fits(replace(question, bandwidth_bytes_per_second=rate * (1 - 1e-6)), interval), seed
    assert cured > 20


@pytest.mark.parametrize("more_bytes", [None, 50_000_000])
def test_tight_interval_of_alexnet(more_bytes: int | None) -> None:
    """All state is some whole units and a part of one: the rate is for the bytes, the schedule for whole units."""
    question = alexnet_question(overhead=None, more_bytes=more_bytes)
    tight = tight_interval(question)
    assert tight is not None
    assert (tight.end == "the next boundary") == (more_bytes is None)
    unit_rate = question.unit_bytes / tight.seconds
    for rate, fits in ((tight.bytes_per_second + unit_rate, True), (tight.bytes_per_second - unit_rate, False)):
        assert ilp_fits(replace(question, bandwidth_bytes_per_second=rate), 1) == fits


# Memory that is raised as little as possible


def raised_bytes(explanation: str) -> int:
    found = re.search(r"it was raised by [^(]*\((\d+) bytes\), as little as possible", explanation)
    assert found is not None, explanation
    return int(found[1])


def assert_least_raise(timeline: Timeline, request: PlanRequest) -> None:
    """At the longest interval a schedule has the raised limit as its peak, and none has a byte less."""
    longest = longest_interval(timeline, request.policy, request.max_interval)
    outcome = make_plan(timeline, make_fingerprint(timeline), request, graph_peak_bytes=0)
    assert outcome.plan is not None
    assert request.memory_limit_bytes is not None
    limit = request.memory_limit_bytes + raised_bytes(outcome.explanation)
    question = Question(
        timeline,
        outcome.plan.unit_bytes,
        request.policy,
        request.bandwidth_bytes_per_second,
        request.memory_bandwidth_bytes_per_second,
        request.overhead,
        limit,
    )
    assert ilp_peak(question, longest) == limit
    assert outcome.plan.plan_peak_bytes <= outcome.plan.certificate.objective_bytes <= limit
    assert outcome.interval is not None
    assert outcome.interval == 1 or not ilp_fits(question, outcome.interval - 1)


@pytest.mark.parametrize("policy", ["direct", "snapshot"])
def test_memory_of_random_timelines_is_raised_as_little_as_possible(policy: Policy) -> None:
    raised = 0
    for seed in range(80):
        question = random_question(seed, policy)
        limit = max(0, question.timeline.training_peak_bytes - 1)
        request = PlanRequest(
            bandwidth_bytes_per_second=question.bandwidth_bytes_per_second,
            memory_bandwidth_bytes_per_second=question.memory_bandwidth_bytes_per_second,
            memory_limit_bytes=limit,
            relax_memory=True,
            policy=policy,
            formulation="greedy",
            overhead=question.overhead,
            max_interval=1 + seed % 4,
            unit_bytes=1,
        )
        longest = replace(question, peak_limit_bytes=None)
        if limit and ilp_peak(longest, 1 + seed % 4) is not None:
            raised += 1
            assert_least_raise(question.timeline, request)
    assert raised > 20


def test_memory_of_alexnet_is_raised_as_little_as_possible() -> None:
    timeline = alexnet("segment")
    request = PlanRequest(
        bandwidth_bytes_per_second=63e9,
        memory_bandwidth_bytes_per_second=RTX_3090.memory_bandwidth_bytes_per_second,
        memory_limit_bytes=timeline.training_peak_bytes,
        relax_memory=True,
        overhead=0.035,
        max_interval=6,
    )
    assert_least_raise(timeline, request)


# What `checkflow show` names


def test_binding_bandwidth_of_a_plan() -> None:
    """A plan's interval, peak and stall hold over the link that is named as the least, and not over a slower one."""
    timeline = alexnet("segment")
    request = PlanRequest(
        bandwidth_bytes_per_second=20e9,
        memory_bandwidth_bytes_per_second=RTX_3090.memory_bandwidth_bytes_per_second,
        max_interval=6,
    )
    plan = make_plan(timeline, make_fingerprint(timeline), request, graph_peak_bytes=0).plan
    assert plan is not None
    least, interval = binding_interval(plan)
    assert least is not None
    assert interval is not None
    question = alexnet_question(
        overhead=None, more_bytes=plan.certificate.objective_bytes - timeline.training_peak_bytes
    )
    assert ilp_fits(replace(question, bandwidth_bytes_per_second=least), plan.interval)
    assert not ilp_fits(replace(question, bandwidth_bytes_per_second=least - 1), plan.interval)


def test_a_timeline_without_state_needs_no_interval() -> None:
    question = Question(timeline_of([(0, 5), (1, 6)], []), 512, "direct", 1.0, 2.0, 0.0, 6)
    assert smallest_interval(question, 5) == 1
    assert [(row.interval, row.stall_seconds, row.extra_bytes) for row in frontier(question, 5)] == [(1, 0.0, 0)]
    assert least_bandwidth(question) == 0
    assert tight_interval(question) is None
