"""Replay against planted faults: each breaks one promise of a good plan by as little as can be."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies

from checkflow.core.errors import PlanError
from checkflow.core.plan import Certificate, Chunk, Plan, dumps, loads
from checkflow.planner.schedule.replay import check_plan, simulate, snapshot_stall_seconds
from checkflow.planner.schedule.scheduler import PlanRequest, make_plan
from tests.support.timelines import make_fingerprint, make_timeline, timelines


def good_plan() -> Plan:
    """Nine bytes over a link of one byte per second, in units of one byte; every number below is counted by hand.

    Steps (seconds, live bytes): 0 (0, 5)  1 (2, 9)  2 (0, 7)  3 (3, 6)  4 (0, 6)  5 (5, 4).
    "a" (4 bytes) is first written in step 3, "b" (4) in step 5, "c" (1) never.
    """
    timeline = make_timeline([(0, 5), (2, 9), (0, 7), (3, 6), (0, 6), (5, 4)], [(3, [4]), (5, [4]), (None, [1])])
    a, b, c = "model/t3.0", "model/t5.0", "model/tNone.0"
    chunks = (
        Chunk(a, 0, 2, 1),
        Chunk(a, 2, 2, 3, 2),  # two bytes are late
        Chunk(b, 0, 1, 3),
        Chunk(b, 1, 3, 5, 4),  # three bytes are late
        Chunk(c, 0, 1, 5),
    )
    return Plan(
        make_fingerprint(timeline), "direct", 1.0, 1, timeline, chunks, 8, 9, 2.5, 1,
        Certificate("optimal", "greedy", "none", "", 9, 9), memory_bandwidth_bytes_per_second=4.0,
    )  # fmt: skip


def test_books() -> None:
    replay = check_plan(good_plan())
    assert replay.memory_bytes == (5, 9, 9, 8, 9, 7)
    assert replay.link_bytes == (0, 2, 0, 3, 0, 4)
    assert replay.capacity_bytes == (0, 2, 0, 3, 0, 5)
    assert (replay.peak_bytes, replay.peak_step) == (9, 1)
    assert (replay.snapshot_bytes, replay.stall_seconds, replay.finish_step) == (5, 2.5, 5)


def moved(index: int, **changes: int | None) -> Callable[[Plan], Plan]:
    """A fault in one chunk; the rest, the order too, stays right."""

    def plant(plan: Plan) -> Plan:
        chunks = list(plan.chunks)
        chunks[index] = replace(chunks[index], **changes)
        place = {"model/t3.0": 2, "model/t5.0": 4, "model/tNone.0": 6}
        chunks.sort(key=lambda chunk: (chunk.offload_step, place[chunk.tensor], chunk.tensor, chunk.offset_bytes))
        return replace(plan, chunks=tuple(chunks))

    return plant


def slower(plan: Plan) -> Plan:
    steps = list(plan.timeline.steps)
    steps[3] = replace(steps[3], duration_seconds=2.999)
    return replace(plan, timeline=replace(plan.timeline, steps=tuple(steps)))


def busier(plan: Plan) -> Plan:
    steps = list(plan.timeline.steps)
    steps[1] = replace(steps[1], link_bytes=1)
    return replace(plan, timeline=replace(plan.timeline, steps=tuple(steps)))


FAULTS: list[tuple[str, Callable[[Plan], Plan], str]] = [
    ("one byte over the link", moved(4, offload_step=3), r"moves 4 bytes in step 'op3', whose link takes 3"),
    ("a link that is slower by a thousandth", slower, "whose link takes 2"),
    ("training's own traffic", busier, "whose link takes 1"),
    ("direct copy after its deadline", moved(1, snapshot_step=None), "after its deadline"),
    ("snapshot after the deadline", moved(3, snapshot_step=5, offload_step=5), "snapshot too late"),
    ("snapshot one step late", moved(1, snapshot_step=3, offload_step=5), "snapshot too late"),
    ("leaves in the step of its snapshot", moved(1, offload_step=2), "snapshot too late"),
    ("snapshot earlier than claimed memory", moved(3, snapshot_step=3), "reaches 10|reaches 11"),
    ("a gap", moved(3, offset_bytes=2, length_bytes=2), "leave a gap at byte 1"),
    ("an overlap", moved(3, offset_bytes=0, length_bytes=4), "overlap at byte"),
    ("one byte missing at the end", moved(3, length_bytes=2), "copies 3 of the 4 bytes"),
    ("beyond the end", moved(3, length_bytes=4), "copies 5 of the 4 bytes"),
    ("a step beyond the iteration", moved(4, offload_step=9), "outside of 0 … 5"),
    (
        "an unknown tensor",
        lambda plan: replace(plan, chunks=(*plan.chunks[:-1], Chunk("model/x", 0, 1, 5))),
        "unknown state tensor: model/x",
    ),
    ("a chunk twice", lambda plan: replace(plan, chunks=(*plan.chunks, plan.chunks[-1])), "overlap"),
    ("a chunk left out", lambda plan: replace(plan, chunks=plan.chunks[:-1]), "copies 0 of the 1 bytes"),
    ("out of order", lambda plan: replace(plan, chunks=(plan.chunks[1], plan.chunks[0], *plan.chunks[2:])), "order"),
    ("peak understated", lambda plan: replace(plan, plan_peak_bytes=8), "claims a peak of 8 bytes .*, and reaches 9"),
    ("peak overstated", lambda plan: replace(plan, plan_peak_bytes=10), "claims a peak of 10 bytes"),
    ("stall understated", lambda plan: replace(plan, stall_seconds=2.4), "claims a stall of 2.4 s, and has 2.5 s"),
    ("device memory unknown", lambda plan: replace(plan, memory_bandwidth_bytes_per_second=0.0), "how fast"),
    ("no interval", lambda plan: replace(plan, interval=0), "every 0 iterations"),
    ("no unit", lambda plan: replace(plan, unit_bytes=0), "units of 0 bytes"),
    ("a policy it does not follow", lambda plan: replace(plan, policy="snapshot"), "policy is to snapshot"),
    ("objective understated", lambda plan: with_proof(plan, objective_bytes=8, bound_bytes=8), "peak of 8 bytes"),
    ("objective a unit too high", lambda plan: with_proof(plan, objective_bytes=10), "peak of 10 bytes"),
    ("bound above the objective", lambda plan: with_proof(plan, bound_bytes=10), "bound above its objective"),
    ("optimal without a bound", lambda plan: with_proof(plan, bound_bytes=8), "says optimal"),
]


def with_proof(plan: Plan, **changes: int) -> Plan:
    return replace(plan, certificate=replace(plan.certificate, **changes))


@pytest.mark.parametrize(("fault", "reason"), [row[1:] for row in FAULTS], ids=[row[0] for row in FAULTS])
def test_planted_fault(fault: Callable[[Plan], Plan], reason: str) -> None:
    with pytest.raises(PlanError, match=reason) as caught:
        check_plan(fault(good_plan()))
    assert "\n" not in str(caught.value)


def test_snapshot_may_be_held_for_longer_if_the_claims_say_so() -> None:
    """What the fault rows refuse is the claim: with the right numbers the same schedule is a plan."""
    plan = replace(moved(3, snapshot_step=3)(good_plan()), plan_peak_bytes=11)
    check_plan(with_proof(plan, objective_bytes=11, bound_bytes=11))


def test_feasible_needs_no_bound() -> None:
    plan = good_plan()
    proof = replace(plan.certificate, status="feasible", bound_bytes=0)
    assert check_plan(replace(plan, certificate=proof)).peak_bytes == 9


def test_link_is_counted_in_units() -> None:
    """A step may carry its whole units, what shorter steps lost before included, and no byte more."""
    timeline = make_timeline([(0, 1), (6, 1), (6, 1)], [(None, [12])])
    plan = Plan(
        make_fingerprint(timeline), "direct", 1.0, 4, timeline,
        (Chunk("model/tNone.0", 0, 4, 1), Chunk("model/tNone.0", 4, 8, 2)), 1, 1, 0.0, 1,
        Certificate("optimal", "greedy", "none", "", 1, 1),
    )  # fmt: skip
    assert check_plan(plan).capacity_bytes == (0, 4, 8)
    more = (Chunk("model/tNone.0", 0, 5, 1), Chunk("model/tNone.0", 5, 7, 2))
    with pytest.raises(PlanError, match="moves 5 bytes in step 'op1', whose link takes 4"):
        check_plan(replace(plan, chunks=more))


@given(timelines, strategies.sampled_from(["direct", "snapshot"]), strategies.integers(1, 3), strategies.randoms())
@settings(max_examples=200, deadline=None)
def test_books_are_those_of_a_count_step_by_step(timeline, policy, unit, rng: random.Random) -> None:
    """Of good plans with one chunk moved, so that broken schedules are counted right too."""
    request = PlanRequest(1.0, 2.0, policy=policy, unit_bytes=unit, formulation="greedy")
    plan = make_plan(timeline, make_fingerprint(timeline), request, graph_peak_bytes=0).plan
    if plan is None or not plan.chunks:
        return
    index = rng.randrange(len(plan.chunks))
    chunk = plan.chunks[index]
    last = len(timeline.steps) - 1
    changed = replace(chunk, offload_step=min(last, max(0, chunk.offload_step + rng.choice([-1, 1]))))
    shifted = replace(plan, chunks=(*plan.chunks[:index], changed, *plan.chunks[index + 1 :]))
    replay = simulate(shifted)
    for step in range(last + 1):
        held = sum(
            c.length_bytes
            for c in shifted.chunks
            if c.snapshot_step is not None and c.snapshot_step <= step <= c.offload_step
        )
        assert replay.memory_bytes[step] == timeline.steps[step].live_bytes + held
        assert replay.link_bytes[step] == sum(c.length_bytes for c in shifted.chunks if c.offload_step == step)


def test_a_plan_survives_its_file() -> None:
    plan = good_plan()
    read = loads(dumps(plan))
    assert read == plan.sealed()
    assert check_plan(read) == check_plan(plan)


def test_stall_reads_and_writes_every_byte() -> None:
    assert snapshot_stall_seconds(0, 0.0) == 0
    assert snapshot_stall_seconds(3, 2.0) == 3.0
    with pytest.raises(PlanError, match="how fast"):
        snapshot_stall_seconds(1, 0.0)


def test_a_training_job_needs_no_solver_for_it() -> None:
    heavy = ("torch", "pulp", "gurobipy", "highspy", "numpy", "networkx", "typer", "rich")
    code = f"import sys, checkflow.planner.schedule.replay; print([name for name in {heavy} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
