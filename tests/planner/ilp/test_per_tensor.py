"""The paper's ILP against the aggregate one, the exact rules and replay; its parts, and how chunks are split."""

from __future__ import annotations

import math
import random
import time
from collections import Counter
from dataclasses import replace

import pytest

from checkflow.core.errors import PlanError, SolverError
from checkflow.core.graph import AnchorKey, AnchorKind
from checkflow.core.plan import Certificate, Chunk, Plan, Policy
from checkflow.core.timeline import Step, Timeline
from checkflow.planner.exact import greedy
from checkflow.planner.exact.problem import Problem, make_problem
from checkflow.planner.ilp import flow, per_tensor, solvers
from checkflow.planner.ilp.per_tensor import PerTensorSchedule, find_chunks
from checkflow.planner.ilp.solvers import NothingFoundError, SolverChoice
from checkflow.planner.schedule.replay import Replay, check_plan
from tests.support.timelines import make_fingerprint, make_timeline, random_timeline

MIB = 2**20


def replayed(timeline: Timeline, problem: Problem, found: PerTensorSchedule) -> Replay:
    """The schedule as a plan, replayed: no equation of the ILP is asked."""
    assert found.chunks is not None
    peak = per_tensor.peak_bytes(problem, found.chunks)
    status = "optimal" if peak == found.bound_bytes else "feasible"
    proof = Certificate(status, "per-tensor", found.solve.name, found.solve.version, peak, found.bound_bytes)
    moved = sum(chunk.length_bytes for chunk in found.chunks)
    plan = Plan(
        make_fingerprint(timeline), "snapshot", 1.0, problem.unit_bytes, timeline, found.chunks, 0, peak, float(moved),
        problem.steps // len(timeline.steps), proof, memory_bandwidth_bytes_per_second=2.0,
    )  # fmt: skip
    return check_plan(plan)


def flow_peak_bytes(problem: Problem, policy: Policy, solver: SolverChoice = "highs") -> int | None:
    model = flow.build(problem, policy)
    found = solvers.solve(model.lp, solver)
    if found.status == "infeasible":
        return None
    assert found.bound is not None
    peak = flow.extract(model).peak_bytes(problem)
    assert peak == flow.peak_bound_bytes(problem, found.bound)
    return peak


def kinds(timeline: Timeline, problem: Problem) -> Counter[str]:
    """What is special about a random timeline."""
    first = [group.first_write for group in timeline.groups if group.size_bytes]
    link = problem.reached[-1] - problem.capacity[0]  # nothing can leave in the first step
    return Counter(
        {
            "a step of no length": any(step.duration_seconds == 0 for step in timeline.steps[1:]),
            "never written": None in first,
            "due at the boundary": 1 in first,
            "a tensor of no bytes": any(not size for group in timeline.groups for _, size in group.members),
            "nothing to move": not problem.total,
            "the link exactly full": 0 < problem.total == link,
            "one byte over": problem.total == link + 1,
        }
    )


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_per_tensor_is_flow_is_greedy(part: int) -> None:
    """1,040 timelines: chunks of one unit under the snapshot policy; the direct policy is never worse."""
    seen: Counter[str] = Counter()
    for seed in range(260 * part, 260 * (part + 1)):
        timeline = random_timeline(random.Random(seed))
        problem = make_problem(timeline, 1.0, 1)
        seen += kinds(timeline, problem)
        snapshot, direct = flow_peak_bytes(problem, "snapshot"), flow_peak_bytes(problem, "direct")
        assert direct == greedy.least_peak_bytes(problem, "direct"), seed
        assert snapshot == greedy.least_peak_bytes(problem, "snapshot"), seed
        found = find_chunks(timeline, problem, 1, solver="highs")
        if snapshot is None:
            assert (found.chunks, found.solve.status) == (None, "infeasible"), seed
            seen["infeasible"] += 1
            continue
        assert direct is not None, seed
        assert direct <= snapshot, seed
        replay = replayed(timeline, problem, found)
        assert replay.peak_bytes == found.bound_bytes == snapshot, seed
        seen["direct is better"] += direct < snapshot
        seen["a step's link exactly full"] += any(
            0 < used == capacity for used, capacity in zip(replay.link_bytes, replay.capacity_bytes, strict=True)
        )
        seen["above training's peak"] += snapshot > timeline.training_peak_bytes
    rare = {kind: count for kind, count in seen.items() if count < 5}
    assert not rare
    assert len(seen) == 11


@pytest.mark.every_case
@pytest.mark.parametrize("solver", ["cbc", "gurobi"])
def test_solvers_agree(solver: SolverChoice) -> None:
    for seed in range(60):
        timeline = random_timeline(random.Random(seed))
        problem = make_problem(timeline, 1.0, 1)
        one, other = (find_chunks(timeline, problem, 2, solver=name) for name in ("highs", solver))
        assert other.solve.name == solver
        assert (one.bound_bytes, one.solve.status, one.chunk_bytes) == (
            other.bound_bytes,
            other.solve.status,
            other.chunk_bytes,
        ), seed
        if other.chunks is not None:
            assert replayed(timeline, problem, other).peak_bytes == one.bound_bytes


# Steps as (seconds, live bytes), groups as (first write, sizes), unit, largest chunk; then: peak, or None where there
# is no schedule, and the chunk size that was reached. The link takes one byte per second.
EDGES = {
    "nothing to move": ([(0, 5), (1, 7)], [], 1, 4, 7, 4),
    "one byte": ([(0, 5), (1, 7)], [(None, [1])], 1, 4, 8, 4),
    "tensors of no bytes": ([(0, 5), (1, 7)], [(1, [0, 0])], 1, 4, 7, 4),
    "one step": ([(0, 5)], [(None, [1])], 1, 1, None, 1),
    "exactly full": ([(0, 0), (4, 1)], [(1, [3]), (None, [1])], 1, 4, 5, 4),
    "one byte over": ([(0, 0), (4, 1)], [(1, [4]), (None, [1])], 1, 4, None, 4),
    "one over, in either of two steps": ([(0, 0), (3, 1), (3, 1)], [(1, [4, 2])], 1, 4, 7, 1),
    "whole tensors fit": ([(0, 0), (5, 0)], [(1, [2, 3])], 1, 100, 5, 100),
    "split once": ([(0, 0), (4, 0), (4, 0)], [(None, [8])], 1, 8, 8, 4),
    "split to the unit": ([(0, 9)] + [(1, 0)] * 4, [(None, [4])], 1, 4, 10, 1),
    "not below the unit": ([(0, 0), (4, 0), (4, 0)], [(None, [3, 3, 2])], 4, 4, None, 3),
    "no multiples of the unit": ([(0, 0), (8, 0), (4, 0)], [(None, [7, 5])], 4, 8, 12, 4),
    "chunks smaller than the unit": ([(0, 0), (4, 0)], [(1, [3])], 4, 1, 3, 1),
}


@pytest.mark.parametrize("row", EDGES.values(), ids=EDGES)
def test_edges(
    row: tuple[list[tuple[int, int]], list[tuple[int | None, list[int]]], int, int, int | None, int],
) -> None:
    steps, groups, unit, chunk_bytes, peak, reached = row
    timeline = make_timeline(steps, groups)
    problem = make_problem(timeline, 1.0, unit)
    found = find_chunks(timeline, problem, chunk_bytes, solver="highs")
    assert found.chunk_bytes == reached
    if peak is None:
        assert (found.chunks, found.solve.status) == (None, "infeasible")
        return
    assert replayed(timeline, problem, found).peak_bytes == found.bound_bytes == peak
    assert found.chunks is not None
    assert all(chunk.length_bytes <= reached for chunk in found.chunks)


def test_small_tensors_stay_whole() -> None:
    timeline = make_timeline([(0, 0), (20, 0)], [(1, [3, 8, 9]), (None, [20])])
    problem = make_problem(timeline, 2.0, 1)
    pieces = per_tensor.cut(timeline, problem, 8)
    assert [(piece.tensor, piece.offset_bytes, piece.length_bytes) for piece in pieces] == [
        ("model/t1.0", 0, 3), ("model/t1.1", 0, 8), ("model/t1.2", 0, 8), ("model/t1.2", 8, 1),
        ("model/tNone.0", 0, 8), ("model/tNone.0", 8, 8), ("model/tNone.0", 16, 4),
    ]  # fmt: skip
    with pytest.raises(PlanError, match="at least one byte"):
        per_tensor.cut(timeline, problem, 0)


def test_a_limit_on_the_peak() -> None:
    """It is kept by splitting where that helps; where it does not, nothing is split and the bound tells."""
    timeline = make_timeline([(0, 0), (8, 0), (8, 0), (8, 0)], [(None, [8])])
    problem = make_problem(timeline, 1.0, 1)
    # whole: 8 bytes are held. In two: one is created when the other has left, and no three parts can leave so.
    for limit, reached in ((None, 8), (8, 8), (7, 4), (4, 4), (3, 1), (2, 8)):
        found = find_chunks(timeline, problem, 8, peak_limit_bytes=limit, solver="highs")
        assert found.chunk_bytes == reached, limit
        assert found.solve.status == "optimal"
        if limit in (3, 2):
            assert found.chunks is None
            assert found.bound_bytes == max(4, reached)
        else:
            assert replayed(timeline, problem, found).peak_bytes == found.bound_bytes == reached


def test_equation_7_as_printed_lets_chunks_leave_before_they_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    """S_{e,1} is free where (7) is stated from step 2 on: a "schedule" below what any can reach."""
    timeline = make_timeline([(0, 0), (3, 0), (3, 9)], [(None, [3])])
    # the paper's first step is an operator with a duration; the boundary has none
    problem = replace(make_problem(timeline, 1.0, 1), capacity=(3, 0, 3))
    right = find_chunks(timeline, problem, 3, solver="highs")
    assert right.bound_bytes == 12
    monkeypatch.setattr(per_tensor, "_FIRST_OFFLOAD", 0)
    model = per_tensor.build(problem, per_tensor.cut(timeline, problem, 3))
    found = per_tensor.solve(model, "highs")
    assert found.objective == pytest.approx(0)
    left = [step for step, binary in model.offloaded[0].items() if binary.varValue > 0.5]
    made = [step for step, binary in model.created[0].items() if binary.varValue > 0.5]
    assert (left, made) == ([0], [1])
    with pytest.raises(SolverError, match="breaks its own rules"):
        per_tensor.extract(model)
    wrong = replace(right, chunks=(Chunk("model/tNone.0", 0, 3, 0, made[0]),), bound_bytes=9)
    with pytest.raises(PlanError, match="snapshot too late"):
        replayed(timeline, problem, wrong)


def large_timeline(seed: int) -> Timeline:
    """Tensors of about 8 MiB, some bytes more or less, over steps that carry whole numbers of 8 MiB."""
    rng = random.Random(seed)
    sizes = [8 * MIB + rng.choice([-8, -1, 0, 0, 1, 8, 256]) for _ in range(rng.randint(2, 6))]
    steps, left = [(0, rng.randint(0, 4) * 8 * MIB)], len(sizes)
    while left > 0:
        carried = rng.randint(0, 3)
        steps.append((carried * 8 * MIB, rng.randint(0, 4) * 8 * MIB + rng.randint(0, 9)))
        left -= carried
    return make_timeline(steps, [(rng.randint(1, len(steps) - 1), sizes)])


@pytest.mark.parametrize(("solver", "count"), [("highs", 60), ("gurobi", 60), ("cbc", 30)])
def test_no_byte_hides_in_a_solver_s_tolerance(solver: SolverChoice, count: int) -> None:
    """A binary that is a millionth short of one would let a chunk of 8 MiB exceed the link by 8 bytes."""
    found = 0
    for seed in range(count):
        timeline = large_timeline(seed)
        problem = make_problem(timeline, 1.0)
        assert problem.unit_bytes == 512
        model = per_tensor.build(problem, per_tensor.cut(timeline, problem, 8 * MIB))
        solved, chunks = per_tensor._solve_to_the_byte(model, solver, time.perf_counter() + 3600)
        if chunks is not None:
            schedule = PerTensorSchedule(chunks, per_tensor.peak_bound_bytes(model, solved.bound), 8 * MIB, solved)
            assert replayed(timeline, problem, schedule).peak_bytes == schedule.bound_bytes, seed
            found += 1
    assert found > count // 3


def test_what_the_tolerance_hides_is_seen() -> None:
    """The case that the finer tolerance is for: else this file would not show that it is needed."""
    broken = 0
    for seed in range(60):
        timeline = large_timeline(seed)
        problem = make_problem(timeline, 1.0)
        model = per_tensor.build(problem, per_tensor.cut(timeline, problem, 8 * MIB))
        if per_tensor.solve(model, "highs").status != "infeasible":
            try:
                per_tensor.extract(model)
            except SolverError as error:
                broken += "bytes leave in step" in str(error)
    assert broken > 0


def test_no_schedule_is_read_from_broken_values() -> None:
    timeline = make_timeline([(0, 1), (2, 1), (2, 1)], [(None, [2, 2])])
    problem = make_problem(timeline, 1.0, 1)
    model = per_tensor.build(problem, per_tensor.cut(timeline, problem, 2))
    with pytest.raises(SolverError, match="not 0 or 1"):
        per_tensor.extract(model)  # not solved
    per_tensor.solve(model, "highs")
    chunks = per_tensor.extract(model)
    assert len(chunks) == 2
    step = next(step for step, binary in model.offloaded[0].items() if binary.varValue > 0.5)
    binary = model.offloaded[0][step]
    for value, message in ((0.6, "not 0 or 1"), (2.0, "not 0 or 1"), (0.0, "breaks its own rules")):
        binary.varValue = value
        with pytest.raises(SolverError, match=message):
            per_tensor.extract(model)
    binary.varValue = 1.0
    assert per_tensor.extract(model) == chunks


def test_bound_is_lifted_to_the_next_possible_peak() -> None:
    timeline = make_timeline([(0, 1000), (9000, 700)], [(1, [5120, 768])])
    problem = make_problem(timeline, 1.0, 512)
    model = per_tensor.build(problem, per_tensor.cut(timeline, problem, 2048))  # all sizes are multiples of 256
    for bound, least in ((None, 1000), (-math.inf, 1000), (0.0, 1000), (0.5, 1256), (0.5 + 1e-7, 1256), (0.6, 1468)):
        assert per_tensor.peak_bound_bytes(model, bound) == least, bound


def test_too_large_a_model_is_refused_before_it_is_built() -> None:
    timeline = make_timeline([(0, 1)] + [(1000, 1)] * 999, [(None, [700_000])])
    problem = make_problem(timeline, 1.0, 1)
    with pytest.raises(SolverError, match=r"2,09\d,\d+ variables for 700 chunks, more than 2,000,000: take larger"):
        find_chunks(timeline, problem, 1000)


def test_a_time_out_is_no_schedule() -> None:
    timeline = random_timeline(random.Random(0), most_steps=30, most_bytes=60)
    problem = make_problem(timeline, 2.0, 1)
    with pytest.raises(NothingFoundError, match="found nothing"):
        find_chunks(timeline, problem, 1, solver="highs", time_limit_seconds=1e-6)


def test_variables_that_are_fixed_at_zero_are_not_made() -> None:
    """C until the deadline, P up to the step before the last offload, S where the chunk fits the link."""
    timeline = make_timeline([(0, 1), (2, 1), (1, 1), (2, 1), (1, 1)], [(2, [2])])
    problem = make_problem(timeline, 1.0, 1)
    model = per_tensor.build(problem, per_tensor.cut(timeline, problem, 2))
    windows = [list(part[0]) for part in (model.created, model.preserved, model.offloaded)]
    assert windows == [[0, 1], [1, 2], [1, 3]]


def test_two_iterations() -> None:
    """State is written in the first; the rest of the horizon carries what is in snapshots, or never written."""
    timeline = make_timeline([(0, 3), (2, 4), (1, 5)], [(1, [3]), (None, [3])])
    once = make_problem(timeline, 1.0, 1)
    assert find_chunks(timeline, once, 3, solver="highs").chunks is None
    twice = replace(
        once,
        live_bytes=once.live_bytes * 2,
        capacity=tuple(timeline.capacities_bytes(1.0, 1, 2)),
        due=once.due + once.due[-1:] * 3,
    )
    found = find_chunks(timeline, twice, 1, solver="highs")
    assert found.chunks is not None
    assert {chunk.offload_step for chunk in found.chunks} == {1, 2, 4, 5}
    assert (
        replayed(timeline, twice, found).peak_bytes == found.bound_bytes == greedy.least_peak_bytes(twice, "snapshot")
    )


@pytest.mark.slow
def test_eager_training_makes_snapshots_at_anchors_only() -> None:
    """At segment granularity; the plan's validation refuses others."""
    above = 0
    for seed in range(200):
        timeline = segments(random_timeline(random.Random(seed)))
        problem = make_problem(timeline, 1.0, 1)
        found = find_chunks(timeline, problem, 1, solver="highs")
        assert (found.chunks is None) == (flow_peak_bytes(problem, "snapshot") is None)
        if found.chunks is not None:
            assert replayed(timeline, problem, found).peak_bytes == flow_peak_bytes(problem, "snapshot"), seed
            above += found.bound_bytes > timeline.training_peak_bytes
    assert above > 10


def segments(timeline: Timeline) -> Timeline:
    """The same steps, each after an anchor of its own; state is due at those."""
    steps = [timeline.steps[0]]
    for index, step in enumerate(timeline.steps[1:]):
        key = AnchorKey(AnchorKind.FORWARD, f"m{index}", 0)
        steps += [Step("anchor", f"a{index}", 0.0, step.live_bytes, 0, key), replace(step, kind="segment")]
    groups = tuple(replace(group, first_write=group.first_write and 2 * group.first_write) for group in timeline.groups)
    return Timeline("segment", tuple(steps), groups)
