"""Whole plans, with every option, against an integer program over single bytes."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from checkflow.core.graph import BOUNDARY
from checkflow.core.plan import Policy
from checkflow.core.timeline import StateGroup, Step, Timeline
from checkflow.planner.schedule.scheduler import Outcome, PlanRequest, make_plan
from tests.support.byte_by_byte import Asked, best, shortest_stall
from tests.support.timelines import make_fingerprint

SEEDS = 36  # of each overhead


def any_timeline(rng: random.Random) -> Timeline:
    """One step to seven, some anchors, some of no length; training's own traffic, that may pile up, in some."""
    own = rng.choice([0, 0, 0.3, 0.6])
    steps = [Step("anchor", "boundary", 0.0, rng.randint(0, 4), anchor=BOUNDARY)]
    for index in range(1, rng.randint(1, 7)):
        lasts = rng.choice([0, 0, 1, 1, 2, 3])
        kind = "operator" if lasts or rng.random() < 0.3 else "anchor"
        traffic = rng.randint(0, 3) if rng.random() < own else 0
        steps.append(Step(kind, f"step {index}", float(lasts), rng.randint(0, 4), traffic))  # type: ignore[arg-type]
    groups: dict[int, list[tuple[str, int]]] = {}
    left = rng.randint(0, 6)
    while left:
        size, first = rng.randint(0, left), rng.randint(1, len(steps))
        groups.setdefault(first, []).append((f"model/t{first}.{len(groups.get(first, []))}", size))
        left -= max(size, 1)
    return Timeline(
        "operator",
        tuple(steps),
        tuple(StateGroup(None if first == len(steps) else first, tuple(m)) for first, m in sorted(groups.items())),
    )


def crowded_timeline(rng: random.Random) -> Timeline:
    """Three deadlines to six, and hills of live memory between them: snapshots must leave for later ones."""
    steps = [Step("anchor", "boundary", 0.0, rng.randint(0, 5), anchor=BOUNDARY)]
    groups = []
    for index in range(rng.randint(3, 6)):
        steps.append(Step("operator", f"operator {index}", float(rng.choice([1, 1, 2, 3])), rng.randint(0, 5)))
        steps.append(Step("anchor", f"anchor {index}", 0.0, rng.randint(0, 5)))
        groups.append(StateGroup(len(steps), ((f"model/t{index}", rng.choice([1, 1, 2, 3, 4])),)))
    steps.append(Step("operator", "end", float(rng.choice([1, 2])), rng.randint(0, 6)))
    return Timeline("operator", tuple(steps), tuple(groups))


def in_order(asked: Asked, longest: int) -> tuple[int, int, float] | None:
    """Interval, peak, stall: each the least that those before it leave."""
    for interval in range(1, longest + 1):
        found = best(asked, interval)
        if found is not None:
            return interval, *found
    return None


def assert_frontier(outcome: Outcome, asked: Asked) -> None:
    training = asked.timeline.training_peak_bytes
    free = replace(asked, free=asked.overhead is not None, overhead=None)
    for row in outcome.frontier:
        found = shortest_stall(replace(free, limit_bytes=training + row.extra_bytes), row.interval)
        assert found == pytest.approx(row.stall_seconds)
        assert not any(
            other.interval <= row.interval
            and other.stall_seconds <= row.stall_seconds
            and other.extra_bytes <= row.extra_bytes
            for other in outcome.frontier
            if other != row
        )


@pytest.mark.parametrize("overhead", [None, 0.0, 0.01, 0.3, 5.0])
def test_plans_are_the_best_there_are(overhead: float | None) -> None:
    plans = none = later = 0
    for seed in range(SEEDS):
        rng = random.Random(f"{overhead} {seed}")
        crowded = seed % 3 == 0
        timeline = crowded_timeline(rng) if crowded else any_timeline(rng)
        policy: Policy = rng.choice(["direct", "direct", "snapshot"])
        extra = rng.choice([None, None, 0, 1, 2])
        limit = None if extra is None else timeline.training_peak_bytes + extra
        asked = Asked(timeline, policy, overhead, rng.choice([4, 2, 1, 0.5, 0.25, 0.1]), limit)
        request = PlanRequest(
            1.0,
            2 / asked.snapshot_seconds,
            policy=policy,
            overhead=overhead,
            extra_memory_bytes=extra,
            max_interval=1 if crowded else rng.choice([1, 2, 3, 4]),
            formulation="flow" if seed % 9 == 0 else "greedy",
            unit_bytes=1,
        )
        outcome = make_plan(timeline, make_fingerprint(timeline), request, graph_peak_bytes=0)
        truth = in_order(asked, request.max_interval or 1)
        if outcome.plan is None:
            assert truth is None, seed
            none += 1
        else:
            plan = outcome.plan
            assert truth == (plan.interval, plan.plan_peak_bytes, pytest.approx(plan.stall_seconds)), seed
            plans += 1
            later += plan.interval > 1
        assert_frontier(outcome, asked)
        least = outcome.least_bandwidth_bytes_per_second
        if least:
            assert best(replace(asked, bytes_per_second=float(least)), 1) is not None, seed
            if least > 1:
                assert best(replace(asked, bytes_per_second=least - 1.0), 1) is None, seed
    assert plans > 5
    assert none > 3
    assert later > 0 or overhead != 0.3
