"""Inputs at the edges of what is planned: answered, or refused in one line, and soon."""

from __future__ import annotations

import re
from itertools import accumulate
from typing import Any

import pytest

from checkflow.core.errors import PlanError
from checkflow.core.graph import BOUNDARY
from checkflow.core.plan import Plan
from checkflow.core.timeline import StateGroup, Step, Timeline
from checkflow.core.units import parse_bandwidth
from checkflow.planner.exact import bounds, greedy
from checkflow.planner.exact.interval import Question
from checkflow.planner.exact.problem import Problem
from checkflow.planner.schedule.explain import explain, tight_interval
from checkflow.planner.schedule.scheduler import Outcome, PlanRequest, make_plan
from tests.support.timelines import make_fingerprint, make_timeline

GB = 10**9


def plan(timeline: Timeline, **asked: Any) -> Outcome:
    usual = {"bandwidth_bytes_per_second": 1.0, "memory_bandwidth_bytes_per_second": 1e9, "formulation": "greedy"}
    return make_plan(timeline, make_fingerprint(timeline), PlanRequest(**usual | asked), graph_peak_bytes=0)


@pytest.mark.timeout(300)  # a sweep that gains one unit a turn would not end in a lifetime
def test_a_peak_that_is_missed_by_one_unit_is_refused_at_once() -> None:
    """However many units there are: no sweep may gain just the one that is missing."""
    many = 10**12
    due = (2 * many, 4 * many + 1, 4 * many + 1, 4 * many + 1)
    problem = Problem(1, 4 * many + 1, (0, 0, many, 3 * many), (many, 2 * many, many, 2 * many), due)
    assert bounds.least_wait(problem, 3 * many) == 1
    assert bounds.fewest_snapshots(problem, 3 * many, 0) is None


def test_a_step_of_no_length_to_speak_of_beside_a_long_one() -> None:
    """The least bandwidth is looked for where the short step carries all state: the long one then carries more units
    than 64 bits count."""
    timeline = make_timeline([(0, GB), (0, GB), (0, GB), (10**6, GB)], [(3, [100 * GB])])
    first, short, *others = timeline.steps
    short = Step("operator", "short", 1e-12, GB)
    timeline = Timeline("operator", (first, short, *others), timeline.groups)
    outcome = plan(timeline, bandwidth_bytes_per_second=25e9, extra_memory_bytes=0)
    assert outcome.status == "infeasible"


def test_a_fast_link_and_a_long_iteration() -> None:
    timeline = make_timeline([(0, 5), (10**9, 5)], [(1, [10])])
    assert plan(timeline, bandwidth_bytes_per_second=2.0**62, unit_bytes=1).status == "optimal"


def test_as_many_bytes_as_memory_counts() -> None:
    """Their units, the last one whole, are more than 64 bits count."""
    timeline = make_timeline([(0, 2**62), (1, 2**62)], [(1, [2**62 - 1])])
    with pytest.raises(PlanError, match="more bytes than any memory has"):
        plan(timeline)


@pytest.mark.parametrize("asked", [{"unit_bytes": 2**63}, {"memory_limit_bytes": 10**400}, {"memory_limit_bytes": 9.5}])
def test_numbers_that_are_no_bytes_are_refused(asked: dict[str, Any]) -> None:
    with pytest.raises(PlanError):
        plan(make_timeline([(0, 9), (10, 9)], [(1, [2])]), **asked)


def test_a_wait_longer_than_plans_hold_is_none() -> None:
    """Thirty years of waiting are within an overhead of 500 %; a plan of it would be refused by its own replay."""
    timeline = make_timeline([(0, 5), (10**6, 5)], [(1, [3 * GB])])
    assert plan(timeline, overhead=5.0, extra_memory_bytes=0).status == "infeasible"


def left_over(plan: Plan) -> list[float]:
    """What the link has left for checkpoints by the end of each step: training's own traffic first, the wait too."""
    steps, rate = plan.timeline.steps, plan.bandwidth_bytes_per_second
    queue, left = 0.0, list[float]()
    for settling in (True, False):
        left = []
        for index, step in enumerate(steps * plan.interval):
            seconds = step.duration_seconds
            if plan.wait is not None and plan.wait.step == index and not settling:
                seconds += plan.wait.seconds
            queue += step.link_bytes
            left.append(max(0.0, seconds * rate - queue))
            queue = max(0.0, queue - seconds * rate)
    return list(accumulate(left))


def test_a_wait_serves_training_s_own_traffic_first() -> None:
    """Four bytes of the last iteration are still in the queue when training waits at the boundary."""
    steps = (
        Step("anchor", "boundary", 0.0, 9, anchor=BOUNDARY),
        Step("operator", "quiet", 10.0, 9),
        Step("operator", "busy", 1.0, 9, link_bytes=5),
    )
    timeline = Timeline("operator", steps, (StateGroup(1, (("model/a", 2),)),))
    found = plan(timeline, overhead=0.9, extra_memory_bytes=0, unit_bytes=1, max_interval=1).plan
    if found is not None:  # a wait of 6 s, if any
        sent = [0] * len(steps)
        for chunk in found.chunks:
            sent[chunk.offload_step] += chunk.length_bytes
        for due, link in zip(accumulate(sent), left_over(found), strict=True):
            assert due <= link + 1e-6


def own_traffic(*steps: tuple[float, int, int], first_write: int, size: int) -> Timeline:
    """Steps as (seconds, live bytes, own bytes)."""
    made = [
        Step("operator" if i else "anchor", f"op{i}", float(lasts), live, own, None if i else BOUNDARY)
        for i, (lasts, live, own) in enumerate(steps)
    ]
    return Timeline("operator", tuple(made), (StateGroup(first_write, (("model/a", size),)),))


def test_rates_count_traffic_that_is_carried_over() -> None:
    """Half of the first second goes to what the last iteration left behind: the rate that is needed says so."""
    timeline = own_traffic((0, 9000, 0), (1, 9000, 0), (0, 9000, 0), (3, 9000, 0), (1, 9000, 3000),
                           first_write=3, size=1800)  # fmt: skip
    question = Question(timeline, 1, "direct", 2000.0, 1e9, None, 9000)
    assert not question.fits(1)
    tight = tight_interval(question)
    assert tight is not None
    assert tight.bytes_per_second > 2000.0
    needed, given = re.findall(r"([0-9.]+ k?B/s)", explain(question))[:2]
    assert parse_bandwidth(needed) > parse_bandwidth(given)


def test_rates_leave_out_traffic_that_can_come_later() -> None:
    """What training asks of the link at the end of the interval is still in the queue when the interval is over."""
    timeline = own_traffic((0, 9000, 0), (1, 9000, 0), (0, 9000, 5000), (9, 9000, 0), first_write=3, size=2000)
    question = Question(timeline, 1, "direct", 1000.0, 1e9, None, 9000)
    tight = tight_interval(question)
    assert tight is not None
    text = explain(question)
    assert "it takes 2.00 kB/s" in text
    assert tight.bytes_per_second == pytest.approx(2000.0)


@pytest.mark.parametrize("overhead", [None, 0.01])
def test_the_frontier_has_the_interval_that_the_link_needs(overhead: float | None) -> None:
    timeline = make_timeline([(0, 9), (1, 9)], [(None, [40])])
    outcome = plan(timeline, unit_bytes=1, overhead=overhead)
    assert outcome.interval == 40
    assert any(row.interval == 40 and row.stall_seconds == 0 for row in outcome.frontier)


def test_the_reason_says_of_which_interval_it_speaks() -> None:
    """The price that rescues a checkpoint every thousand iterations is not that of one every iteration."""
    outcome = plan(make_timeline([(0, 9), (10, 9)], [(1, [2])]), unit_bytes=1, extra_memory_bytes=0)
    assert outcome.status == "infeasible"
    assert "--overhead 0.000200" in outcome.explanation  # 2 s in 1,000 iterations
    assert "1000 iterations" in outcome.explanation


def test_what_the_first_iteration_rules_out_is_not_tried_on_longer_horizons(monkeypatch: pytest.MonkeyPatch) -> None:
    """Snapshot policy: no interval helps against a deadline, and its horizons are walked through step by step."""
    walked = 0
    rule = greedy.snapshot_flow

    def counted(problem: Problem, peak_bytes: int) -> Any:
        nonlocal walked
        walked += problem.steps
        return rule(problem, peak_bytes)

    monkeypatch.setattr(greedy, "snapshot_flow", counted)
    steps = [(0, 9000)] + [(1, 9000)] * 30
    outcome = plan(make_timeline(steps, [(10, [8000])]), policy="snapshot", extra_memory_bytes=0, unit_bytes=1)
    assert outcome.status == "infeasible"
    assert walked < 10 * 1000 * len(steps)  # far fewer than a bisection over the longest horizon
