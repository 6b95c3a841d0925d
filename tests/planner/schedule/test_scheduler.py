"""From a timeline to a checked plan: certificates, limits, chunks, the same bytes every time."""

from __future__ import annotations

import functools
import logging
import math
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings, strategies

from checkflow.core.errors import PlanError, SolverError
from checkflow.core.graph import GraphStorage, Operator, StateEntry, TrainingGraph
from checkflow.core.machine.device import find_device
from checkflow.core.plan import Fingerprint, Plan, StateSpec, Wait, dumps
from checkflow.core.timeline import StateGroup, Step, Timeline
from checkflow.planner.exact.problem import Flow
from checkflow.planner.ilp import cbc, solvers
from checkflow.planner.schedule import certify, scheduler
from checkflow.planner.schedule.replay import check_plan
from checkflow.planner.schedule.scheduler import (
    FrontierRow,
    Outcome,
    PlanRequest,
    bandwidth_in_pieces,
    fingerprint_of,
    make_plan,
    pieces_of,
)
from tests.support.timelines import Best, make_fingerprint, make_timeline, random_timeline, search, timelines


def plan_of(timeline: Timeline, **asked: Any) -> Outcome:
    """A link of one byte per second and units of one byte, unless something else is asked."""
    request = PlanRequest(**{
        "bandwidth_bytes_per_second": 1.0, "memory_bandwidth_bytes_per_second": 2.0, "unit_bytes": 1,
        "max_interval": 1, **asked,
    })  # fmt: skip
    return make_plan(timeline, make_fingerprint(timeline), request, graph_peak_bytes=7)


def crowded() -> Timeline:
    """Direct copies cannot make it without snapshots, and these raise the peak: 20 bytes due after 8 seconds."""
    return make_timeline(
        [(0, 30), (4, 40), (0, 38), (4, 39), (0, 35), (20, 37)], [(3, [5, 0, 1]), (5, [14]), (None, [3])]
    )


asked_of_plans = strategies.fixed_dictionaries(
    {
        "policy": strategies.sampled_from(["direct", "snapshot"]),
        "formulation": strategies.sampled_from(["auto", "flow", "greedy"]),
        "memory_limit_bytes": strategies.none() | strategies.integers(0, 9),
        "extra_memory_bytes": strategies.none() | strategies.integers(0, 3),
        "relax_memory": strategies.booleans(),
        "overhead": strategies.none() | strategies.sampled_from([0.0, 0.3, 0.7]),
        "max_interval": strategies.sampled_from([1, 1, 2]),
    }
)
small_timelines = strategies.integers(0, 2**32).map(
    lambda seed: random_timeline(random.Random(seed), most_steps=5, most_bytes=4)
)


def best_at(timeline: Timeline, asked: dict[str, Any], interval: int) -> tuple[int, Best, float] | None:
    """By exhaustive search: the interval, its best schedule, and the seconds that training waits.

    At one byte per second over the link and two inside the device, a byte that is waited for and a snapshot take a
    second each.
    """
    share, policy = asked["overhead"], asked["policy"]
    queue = timeline.queued_bytes(1.0)[0]  # of training's own traffic: it goes before the first byte that is waited for
    budget = timeline.state_bytes if share is None else share * interval * timeline.iteration_seconds + 1e-9
    costs = {0: 0.0}
    if share is not None and policy == "direct":
        costs |= {wait: queue + wait for wait in range(1, timeline.state_bytes + 1) if queue + wait <= budget}
    found = [
        (best.peak_bytes, cost + best.snapshot_bytes, best, cost)
        for wait, cost in costs.items()
        if (best := search(timeline, policy, most_snapshots=int(budget - cost), iterations=interval, waits={0: wait}))
    ]
    least = min(found, default=None, key=lambda row: row[:2])
    return None if least is None else (interval, least[2], least[3])


@pytest.mark.slow
@given(small_timelines, asked_of_plans)
@settings(max_examples=300, deadline=None)
def test_every_request_is_answered_as_exhaustive_search_would(timeline: Timeline, asked: dict[str, Any]) -> None:
    outcome = plan_of(timeline, solver="auto", **asked)
    training = timeline.training_peak_bytes
    limits = [asked["memory_limit_bytes"]] if asked["memory_limit_bytes"] is not None else []
    limits += [training + asked["extra_memory_bytes"]] if asked["extra_memory_bytes"] is not None else []
    limit = min(limits, default=math.inf)
    searched = functools.cache(functools.partial(best_at, timeline, asked))

    def smallest_within(limit: float) -> tuple[int, Best, float] | None:
        rows = (searched(interval) for interval in range(1, asked["max_interval"] + 1))
        return next((row for row in rows if row is not None and row[1].peak_bytes <= limit), None)

    best = smallest_within(limit)
    over = best is None and asked["relax_memory"]
    if over:  # the least peak of the longest interval, and the smallest interval that has it
        best = next((row for peak in range(20) if (row := smallest_within(peak)) is not None), None)
    assert (outcome.plan is not None) == (best is not None)
    if best is None:
        assert outcome.plan is None
        assert outcome.status == "infeasible"
        assert outcome.explanation
        assert outcome.chunks == 0
        assert outcome.plan_peak_bytes is outcome.interval is outcome.stall_seconds is None
        return
    interval, schedule, wait = best
    assert outcome.plan is not None
    plan, replay = outcome.plan, check_plan(outcome.plan)
    assert plan.interval == outcome.interval == interval
    assert plan.plan_peak_bytes == replay.peak_bytes == schedule.peak_bytes
    assert plan.certificate.status == outcome.status == outcome.solver.status == "optimal"
    assert outcome.solver.objective_bytes == plan.certificate.objective_bytes == schedule.peak_bytes
    assert outcome.solver.bound_bytes == plan.certificate.bound_bytes == schedule.peak_bytes
    if asked["policy"] == "direct":
        assert plan.stall_seconds == replay.stall_seconds == pytest.approx(wait + schedule.snapshot_bytes)
    assert bool(outcome.explanation) == (over or interval > 1)
    assert plan.graph_peak_bytes == 7


@given(timelines, strategies.integers(1, 4), strategies.integers(1, 4), strategies.sampled_from(["direct", "snapshot"]))
@settings(max_examples=300, deadline=None)
def test_units_and_chunks_of_any_size(timeline: Timeline, unit: int, chunk: int, policy: str) -> None:
    """Replay accepts the plan (make_plan raises otherwise), every byte is there, and little is lost by rounding."""
    outcome = plan_of(timeline, unit_bytes=unit, chunk_bytes=chunk, policy=policy, formulation="greedy")
    exact = search(timeline, policy)  # type: ignore[arg-type]
    if outcome.plan is None:
        fewer = sum(timeline.capacities_bytes(1.0, unit)) < -(-timeline.state_bytes // unit)
        assert exact is None or policy == "snapshot" or fewer
        return
    assert exact is not None
    assert sum(part.length_bytes for part in outcome.plan.chunks) == timeline.state_bytes
    assert all(1 <= part.length_bytes <= chunk for part in outcome.plan.chunks)
    objective = outcome.plan.certificate.objective_bytes
    assert objective - unit < outcome.plan.plan_peak_bytes <= objective
    if policy == "direct":
        assert exact.peak_bytes <= outcome.plan.plan_peak_bytes < exact.peak_bytes + 2 * unit


def test_the_same_input_gives_the_same_bytes_whoever_certifies() -> None:
    """In another process too, where hashes are seeded anew; only the certificate names the solver."""
    plans = {}
    for solver in ("highs", "cbc", "gurobi"):
        outcome = plan_of(crowded(), formulation="flow", solver=solver)
        assert outcome.plan is not None
        assert (outcome.solver.name, outcome.status, outcome.plan.certificate.solver) == (solver, "optimal", solver)
        plans[solver] = outcome.plan
    assert len({plan.chunks for plan in plans.values()}) == 1
    code = (
        "import sys; from tests.planner.schedule.test_scheduler import crowded, plan_of; from checkflow.core.plan "
        "import dumps;"
        "sys.stdout.buffer.write(dumps(plan_of(crowded(), formulation='flow', solver='highs').plan))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert result.stdout == dumps(plans["highs"])


def test_the_order_in_which_state_is_listed_changes_nothing() -> None:
    timeline = make_timeline([(0, 5), (4, 9), (0, 6), (9, 8)], [(3, [2, 1, 3]), (None, [1, 2])])
    groups = tuple(replace(group, members=group.members[::-1]) for group in timeline.groups)
    one, other = (plan_of(line).plan for line in (timeline, replace(timeline, groups=groups)))
    assert one is not None
    assert other is not None
    assert one.chunks == other.chunks


def test_training_s_own_peak_needs_no_solver() -> None:
    timeline = make_timeline([(0, 5), (4, 9), (0, 6), (4, 8)], [(3, [5])])
    outcome = plan_of(timeline)
    assert (outcome.status, outcome.formulation, outcome.solver.name) == ("optimal", "greedy", "none")
    assert outcome.plan_peak_bytes == outcome.training_peak_bytes == outcome.solver.bound_bytes == 9
    assert outcome.solver.gap == 0
    assert plan_of(timeline, solver="cbc").solver.name == "cbc"  # unless one is asked for
    assert plan_of(timeline, formulation="flow").formulation == "flow"


def test_a_higher_peak_is_certified() -> None:
    outcome = plan_of(crowded())
    assert (outcome.status, outcome.formulation, outcome.solver.name) == ("optimal", "flow", "highs")
    assert outcome.plan_peak_bytes is not None
    assert outcome.plan_peak_bytes > outcome.training_peak_bytes
    assert outcome.solver.variables > 0
    assert outcome.solver.constraints > 0


def stopped(objective: float | None) -> Any:
    """A solver that has proved nothing when its time is up."""

    def solve(lp: Any, solver: str, seconds: float) -> solvers.Solve:
        if objective is None:
            raise solvers.NothingFoundError("nothing")
        found = solvers_solve(lp, "highs", seconds)
        return replace(found, status="feasible", bound=-math.inf)

    return solve


solvers_solve = solvers.solve


@pytest.mark.parametrize("objective", [None, 1.0])
def test_a_time_out_is_feasible_and_nothing_more(monkeypatch: pytest.MonkeyPatch, objective: float | None) -> None:
    monkeypatch.setattr(certify.solvers, "solve", stopped(objective))
    outcome = plan_of(crowded(), formulation="flow")
    assert outcome.status == "feasible"
    assert outcome.solver.bound_bytes == outcome.training_peak_bytes
    assert outcome.solver.gap is not None
    assert outcome.solver.gap > 0
    assert outcome.plan is not None
    assert outcome.plan.certificate.status == "feasible"
    # left to itself, checkflow has a proof of its own
    outcome = plan_of(crowded())
    assert (outcome.status, outcome.formulation, outcome.solver.name) == ("optimal", "greedy", "none")


def test_a_real_time_out() -> None:
    """No time to speak of: the schedule is there all the same, and it is not called optimal."""
    outcome = plan_of(crowded(), formulation="flow", solver="cbc", time_limit_seconds=1e-6)
    assert outcome.plan is not None
    assert outcome.status in ("optimal", "feasible")
    assert (outcome.status == "optimal") == (outcome.solver.bound_bytes == outcome.solver.objective_bytes)


@pytest.mark.parametrize("asked", [{"solver": "highs"}, {"formulation": "flow"}])
def test_a_missing_solver_that_was_asked_for(monkeypatch: pytest.MonkeyPatch, asked: dict[str, str]) -> None:
    for name in ("gurobipy", "highspy"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(cbc, "_runs", lambda path: False)
    with pytest.raises(SolverError, match="not installed"):
        plan_of(crowded(), **asked)


def test_no_solver_at_all(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("gurobipy", "highspy"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(cbc, "_runs", lambda path: False)
    with caplog.at_level(logging.WARNING, "checkflow"):
        outcome = plan_of(crowded())
    assert (outcome.status, outcome.solver.name) == ("optimal", "none")
    assert "not installed" in caplog.text


@pytest.mark.parametrize(
    ("lie", "message"),
    [
        ({"status": "infeasible", "objective": None, "bound": None}, "there is one"),
        ({"bound": 1e6}, "claims a bound"),
    ],
)
def test_a_solver_that_lies_is_caught(monkeypatch: pytest.MonkeyPatch, lie: dict[str, Any], message: str) -> None:
    def solve(lp: Any, solver: str, seconds: float) -> solvers.Solve:
        return replace(solvers_solve(lp, "highs", seconds), **lie)

    monkeypatch.setattr(certify.solvers, "solve", solve)
    with pytest.raises(SolverError, match=message):
        plan_of(crowded(), formulation="flow")


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (lambda flow: replace(flow, made=(0, *flow.made[:-1])), "leave before it is made"),
        (lambda flow: replace(flow, direct=(*flow.direct[1:], 0)), "moves 4 bytes in step 'op0'"),
        (lambda flow: replace(flow, direct=(0,) * 6), "moves .* of .* units"),
        (lambda flow: replace(flow, made=(*flow.made[:2], 0, 0, sum(flow.made), 0)), "after its deadline|too late"),
    ],
)
def test_a_schedule_that_breaks_a_rule_never_leaves(
    monkeypatch: pytest.MonkeyPatch, fault: Callable[[Flow], Flow], message: str
) -> None:
    """Whatever rule or solver may be wrong, checks stand between it and the plan file."""
    right = certify.find_schedule

    def wrong(*arguments: Any) -> Any:
        schedule = right(*arguments)
        return replace(schedule, flow=fault(schedule.flow))

    monkeypatch.setattr(scheduler, "find_schedule", wrong)
    with pytest.raises(PlanError, match=message):
        plan_of(crowded(), formulation="greedy")


def test_memory_limits() -> None:
    timeline = crowded()
    least = plan_of(timeline).plan_peak_bytes
    assert least is not None
    extra = least - timeline.training_peak_bytes
    assert plan_of(timeline, memory_limit_bytes=least).status == "optimal"
    assert plan_of(timeline, extra_memory_bytes=extra).status == "optimal"
    for asked in ({"memory_limit_bytes": least - 1}, {"extra_memory_bytes": extra - 1}):
        outcome = plan_of(timeline, **asked)
        assert (outcome.status, outcome.plan) == ("infeasible", None)
        assert "1 B more device memory" in outcome.explanation
        assert outcome.frontier == plan_of(timeline).frontier  # what it would take is told
        relaxed = plan_of(timeline, **asked, relax_memory=True)
        assert relaxed.plan_peak_bytes == least
        assert "raised by 1 B (1 bytes), as little as possible" in relaxed.explanation
    assert plan_of(timeline, memory_limit_bytes=least, relax_memory=True).explanation == ""


def test_frontier_has_both_ends() -> None:
    # One byte is due at the boundary and snapshotted. If it leaves in step 1, memory is free again at step 2, where it
    # is short, but one of the others comes too late and needs a snapshot too; if it waits, the others leave directly.
    timeline = make_timeline([(0, 2), (2, 0), (0, 3), (0, 2), (1, 0), (2, 1)], [(1, [1]), (4, [1]), (5, [1, 1])])
    outcome = plan_of(timeline)
    assert outcome.frontier == (FrontierRow(1, 2.0, 0), FrontierRow(1, 1.0, 1))
    assert (outcome.stall_seconds, outcome.plan_peak_bytes) == (2.0, 3)
    # One second of waiting is worth the two seconds of snapshots.
    shorter = plan_of(timeline, overhead=0.2)  # of five seconds
    assert (shorter.stall_seconds, shorter.plan_peak_bytes) == (1.0, 3)
    assert shorter.plan is not None
    assert shorter.plan.wait == Wait(0, 1.0)
    assert shorter.frontier == (FrontierRow(1, 1.0, 0),)
    # Where snapshots are cheaper, they are made instead.
    cheaper = plan_of(timeline, overhead=0.2, memory_bandwidth_bytes_per_second=8.0)
    assert (cheaper.stall_seconds, cheaper.plan_peak_bytes) == (0.5, 3)
    assert plan_of(make_timeline([(0, 1), (1, 1)], [(None, [2])])).frontier == ()
    assert plan_of(make_timeline([(0, 1), (2, 1)], [(None, [2])])).frontier == (FrontierRow(1, 0.0, 0),)


def test_rates() -> None:
    outcome = plan_of(crowded())
    assert outcome.durable_bytes_per_second == pytest.approx(23 / 28)
    assert outcome.least_bandwidth_bytes_per_second == 1
    assert outcome.plan_seconds > 0


# Pieces


@pytest.mark.parametrize(
    ("sizes", "pieces", "rate"),
    [
        ([], 0, 2.0),
        ([0, 0], 0, 2.0),  # tensors of no bytes are not copied
        ([1], 1, 1 / (1 / 2 + 3)),
        ([8], 1, 8 / (8 / 2 + 3)),  # exactly a chunk
        ([9], 2, 9 / (9 / 2 + 6)),
        ([1, 7, 0, 16], 4, 24 / (24 / 2 + 12)),
    ],
)
def test_pieces_cost_the_link_their_seconds(sizes: list[int], pieces: int, rate: float) -> None:
    timeline = make_timeline([(0, 1), (9, 1)], [(1, sizes[:1]), (None, sizes[1:])])
    request = PlanRequest(2.0, 1.0, chunk_bytes=8, copy_seconds=3.0)
    assert pieces_of(timeline, 8) == pieces
    assert bandwidth_in_pieces(timeline, request) == pytest.approx(rate)
    assert bandwidth_in_pieces(timeline, replace(request, copy_seconds=0.0)) == 2.0
    # A quarter of the link is a quarter of its time, pieces or bytes.
    part = replace(request, bandwidth_bytes_per_second=0.5, link_share=0.25)
    assert bandwidth_in_pieces(timeline, part) == pytest.approx(rate / 4)


@settings(max_examples=60, deadline=None)
@given(timeline=small_timelines, asked=asked_of_plans, seconds=strategies.sampled_from([0.0, 0.01, 0.2, 3.0]))
def test_a_plan_with_pieces_is_that_of_a_slower_link(timeline: Timeline, asked: dict[str, Any], seconds: float) -> None:
    """Not a byte of the file is different, and so it is replayed and certified as any other."""
    asked = {**asked, "chunk_bytes": 2}
    rate = bandwidth_in_pieces(timeline, PlanRequest(1.0, 2.0, chunk_bytes=2, copy_seconds=seconds))
    ours = plan_of(timeline, **asked, copy_seconds=seconds)
    slower = plan_of(timeline, **asked, bandwidth_bytes_per_second=rate)
    assert (ours.status, ours.frontier, ours.piece_bandwidth_bytes_per_second) == (slower.status, slower.frontier, rate)
    if ours.plan is None:
        assert slower.plan is None
    else:
        assert slower.plan is not None
        check_plan(ours.plan)
        assert dumps(ours.plan) == dumps(slower.plan)
    if not seconds:
        assert rate == 1.0


def test_many_small_tensors_are_checkpointed_less_often_than_one_of_as_many_bytes() -> None:
    def outcome_of(sizes: list[int], **asked: Any) -> Outcome:
        timeline = make_timeline([(0, 10**6), (10, 10**6)], [(None, sizes)])
        asked = {"bandwidth_bytes_per_second": 1e6, "copy_seconds": 0.01, "max_interval": 9, **asked}
        return plan_of(timeline, **asked, unit_bytes=None, extra_memory_bytes=0)

    one, many = outcome_of([8 * 10**6]), outcome_of([8000] * 1000)
    assert (one.interval, many.interval) == (1, 2)  # 8.01 seconds, and 18
    assert one.plan is not None
    assert many.plan is not None
    assert one.plan.bandwidth_bytes_per_second == pytest.approx(8e6 / 8.01)
    assert many.plan.bandwidth_bytes_per_second == pytest.approx(8e6 / 18)
    assert (many.pieces, many.piece_bandwidth_bytes_per_second) == (1000, many.plan.bandwidth_bytes_per_second)
    assert many.explanation.endswith("; in 1000 pieces the link's 1.00 MB/s are 444 kB/s")
    # The least bandwidth is the whole link's: what the pieces leave is taken as well. Here ten seconds are all theirs.
    assert many.least_bandwidth_bytes_per_second is None
    cheaper = outcome_of([8000] * 1000, copy_seconds=0.002)
    least = cheaper.least_bandwidth_bytes_per_second
    assert least == pytest.approx(8e6 / (10 - 2), abs=2)
    assert outcome_of([8000] * 1000, copy_seconds=0.002, bandwidth_bytes_per_second=least).interval == 1
    assert outcome_of([8000] * 1000, copy_seconds=0.002, bandwidth_bytes_per_second=least - 3).interval == 2


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (name, value)
        for name in ("bandwidth_bytes_per_second", "memory_bandwidth_bytes_per_second", "time_limit_seconds")
        for value in (0.0, -1.0, math.nan, math.inf)
        if (name, value) != ("time_limit_seconds", math.inf)  # that is no limit
    ],
)
def test_requests_that_make_no_sense(name: str, value: float) -> None:
    with pytest.raises(PlanError, match=name):
        plan_of(crowded(), **{name: value})


@pytest.mark.parametrize(
    "asked", [{"chunk_bytes": 0}, {"unit_bytes": 0}, {"overhead": -0.1}, {"memory_limit_bytes": -1}]
)
def test_requests_below_their_least(asked: dict[str, Any]) -> None:
    with pytest.raises(PlanError, match=next(iter(asked))):
        plan_of(crowded(), **asked)


@pytest.mark.parametrize(
    ("steps", "groups", "message"),
    [
        ([Step("operator", "a", math.nan, 1)], (), "lasts nan seconds"),
        ([Step("operator", "a", -1.0, 1)], (), "lasts -1.0 seconds"),
        ([Step("operator", "a", 0.0, -1)], (), "not a whole number"),
        ([Step("operator", "a", 0.0, 1, -1)], (), "not a whole number"),
        ([], (), "no steps"),
        ([Step("operator", "a", 0.0, 1)], (StateGroup(1, (("x", 1),)),), "first written at step 1 of 1"),
        ([Step("operator", "a", 0.0, 1)], (StateGroup(None, (("x", -1),)),), "not a whole number"),
    ],
)
def test_timelines_that_make_no_sense(steps, groups, message: str) -> None:
    timeline = Timeline("operator", tuple(steps), groups)
    request = PlanRequest(1.0, 1.0)
    fingerprint = Fingerprint("", (), (), (), 1, "", (), "cpu")
    with pytest.raises(PlanError, match=message):
        make_plan(timeline, fingerprint, request, graph_peak_bytes=0)


def test_huge_costs_are_planned() -> None:
    timeline = make_timeline([(0, 10**18), (10**9, 10**18)], [(None, [10**15])])
    plan = plan_of(timeline, bandwidth_bytes_per_second=1e12, unit_bytes=None, chunk_bytes=10**13).plan
    assert isinstance(plan, Plan)
    assert plan.unit_bytes == 2**26
    assert plan.plan_peak_bytes == 10**18


def test_five_hundred_random_plans_replay() -> None:
    """Snapshot plans are never below direct ones, and every plan is replayed."""
    for seed in range(250):
        timeline = random_timeline(random.Random(seed), most_steps=12, most_bytes=30)
        direct, snapshot = (plan_of(timeline, policy=policy, formulation="greedy") for policy in ("direct", "snapshot"))
        if snapshot.plan is not None:
            assert direct.plan is not None
            assert direct.plan.plan_peak_bytes <= snapshot.plan.plan_peak_bytes


def test_fingerprint() -> None:
    graph = TrainingGraph(
        model="m", batch=(((2, 3), "float32"),), micro_batches=2, optimizers=(("optimizer", "SGD foreach"),),
        autocast="", operators=(Operator("op", "aten.mul.Tensor", "forward", "", "float32", 1, 1, 1, (0,), (0,)),),
        storages=(GraphStorage("w", "parameter", 24, -1, 1, 1),),
        state=(
            StateEntry("model/w", "parameter", (2, 3), "float32", 24, "device", 0, 0),
            StateEntry("optimizer/w.step", "optimizer", (), "float32", 4, "host", None, 0),
        ),
        anchors=(), ties=(("model/v", "model/w"),),
    )  # fmt: skip
    assert fingerprint_of(graph, find_device("rtx3090")) == Fingerprint(
        model="m",
        state=(
            StateSpec("model/w", (2, 3), "float32", 24, False),
            StateSpec("optimizer/w.step", (), "float32", 4, True),
        ),
        ties=(("model/v", "model/w"),),
        batch=(((2, 3), "float32"),),
        micro_batches=2,
        autocast="",
        optimizers=(("optimizer", "SGD foreach"),),
        device=find_device("rtx3090").name,
    )


def test_per_tensor_plans_the_snapshot_policy() -> None:
    """Whatever policy is asked for, and with the same answers as the aggregate ILP where chunks are single units."""
    found = later = 0
    for seed in range(60):
        timeline = random_timeline(random.Random(seed))
        asked: dict[str, Any] = {"chunk_bytes": 1, "solver": "highs", "max_interval": 2, "overhead": 100.0}
        if seed % 2:
            asked["extra_memory_bytes"] = 1
        one = plan_of(timeline, formulation="per-tensor", policy="direct", **asked)
        other = plan_of(timeline, formulation="flow", policy="snapshot", **asked)
        assert (one.policy, one.status, one.interval) == ("snapshot", other.status, other.interval), seed
        assert (one.plan_peak_bytes, one.explanation) == (other.plan_peak_bytes, other.explanation), seed
        if one.plan is None:
            continue
        assert one.plan.policy == "snapshot"
        assert one.formulation == one.plan.certificate.formulation == "per-tensor"
        assert (one.solver.name, one.solver.gap) == ("highs", 0)
        assert one.solver.variables >= 1
        found += 1
        later += one.interval == 2
    assert found > 20
    assert later > 3


def test_per_tensor_without_a_schedule_of_such_chunks() -> None:
    """Three tensors of 300 bytes fill two steps of 512: pooled, they fit; whole, they do not."""
    timeline = make_timeline([(0, 1), (512, 1), (512, 1)], [(None, [300, 300, 300])])
    assert plan_of(timeline, policy="snapshot", unit_bytes=512, max_interval=1).plan is not None
    with pytest.raises(SolverError, match="in chunks of 300 bytes, and finer ones have: take smaller chunks"):
        plan_of(timeline, formulation="per-tensor", unit_bytes=512, max_interval=1)
    assert plan_of(timeline, formulation="per-tensor", unit_bytes=512, chunk_bytes=100, max_interval=1).plan is not None
