"""What a plan file may not say, each rule broken alone in a plan that is otherwise right and sealed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from checkflow.core.errors import PlanError
from checkflow.core.graph import BOUNDARY, AnchorKey, AnchorKind
from checkflow.core.plan import _ITEM_BYTES, Plan, Wait, describe_mismatch, dumps, loads
from checkflow.core.timeline import StateGroup
from checkflow.planner.schedule.replay import check_plan
from tests.faults.plan_faults import FORWARD, good_plan


def step(index: int, **changes: Any) -> Callable[[Plan], Plan]:
    def plant(plan: Plan) -> Plan:
        steps = list(plan.timeline.steps)
        steps[index] = replace(steps[index], **changes)
        return replace(plan, timeline=replace(plan.timeline, steps=tuple(steps)))

    return plant


def groups(change: Callable[[tuple[StateGroup, ...]], tuple[StateGroup, ...]]) -> Callable[[Plan], Plan]:
    return lambda plan: replace(plan, timeline=replace(plan.timeline, groups=change(plan.timeline.groups)))


def spec(**changes: Any) -> Callable[[Plan], Plan]:
    def plant(plan: Plan) -> Plan:
        first, *others = plan.fingerprint.state
        return replace(plan, fingerprint=replace(plan.fingerprint, state=(replace(first, **changes), *others)))

    return plant


def fingerprint(**changes: Any) -> Callable[[Plan], Plan]:
    return lambda plan: replace(plan, fingerprint=replace(plan.fingerprint, **changes))


def proof(**changes: Any) -> Callable[[Plan], Plan]:
    return lambda plan: replace(plan, certificate=replace(plan.certificate, **changes))


def claim(**changes: Any) -> Callable[[Plan], Plan]:
    return lambda plan: replace(plan, **changes)


def snapshot_at(made: int) -> Callable[[Plan], Plan]:
    def plant(plan: Plan) -> Plan:
        chunks = list(plan.chunks)
        chunks[2] = replace(chunks[2], snapshot_step=made)
        return replace(plan, chunks=tuple(chunks))

    return plant


START = "does not begin with the boundary"
SORTED = "not sorted by deadline, each deadline once"
FAULTS: list[tuple[str, Callable[[Plan], Plan], str]] = [
    ("no key at the boundary", step(0, anchor=None), START),
    ("a segment first", step(0, kind="segment", anchor=None), START),
    ("another anchor first", step(0, anchor=AnchorKey(AnchorKind.FORWARD, "model/b")), START),
    ("a second boundary's key first", step(0, anchor=AnchorKey(AnchorKind.BOUNDARY, "", 1)), START),
    ("a boundary of another name later", step(2, anchor=AnchorKey(AnchorKind.BOUNDARY, "x")), "boundary within"),
    ("the boundary again", step(2, anchor=BOUNDARY), "occurs twice"),
    ("a time before the first", step(2, anchor=replace(FORWARD, occurrence=-1)), "times count from 0"),
    ("groups unsorted", groups(lambda found: (found[1], found[0], found[2])), SORTED),
    ("never written first", groups(lambda found: (found[2], *found[:2])), SORTED),
    ("one deadline twice", groups(lambda found: (found[0], replace(found[1], first_write=3), found[2])), SORTED),
    ("never written twice", groups(lambda found: (found[0], replace(found[1], first_write=None), found[2])), SORTED),
    ("due within a segment", groups(lambda found: (replace(found[0], first_write=2), *found[1:])), "due at step 1"),
    ("due where no hook is", step(4, anchor=None), "due at step 4, where eager training has no anchor"),
    ("snapshot within a segment", snapshot_at(3), "snapshot at step 3, where eager training has no anchor"),
    ("no micro-batch", fingerprint(micro_batches=0), "0 micro-batches"),
    ("no rank", fingerprint(ranks=0), "0 ranks"),
    ("every zeroth iteration", claim(interval=0), "every 0 iterations"),
    ("a horizon without end", claim(interval=10**12), "too many"),
    ("a wait beyond the horizon", claim(wait=Wait(10**6, 1.0)), "outside of 0"),
    ("a wait before the boundary", claim(wait=Wait(-1, 1.0)), "outside of 0"),
    ("a wait within a segment", claim(wait=Wait(1, 1.0)), "no anchor"),
    ("a wait of no time", claim(wait=Wait(0, 0.0)), "wait lasts 0.0 s"),
    ("a wait without end", claim(wait=Wait(0, 1e300)), "wait lasts"),
    ("a shape of another size", spec(shape=(3,)), r"8 bytes, not those of float32\[3\]"),
    ("a dtype of another size", spec(dtype="float64"), r"8 bytes, not those of float64\[2\]"),
    ("sizes below zero", spec(shape=(-1, -2)), r"not those of float32\[-1, -2\]"),
    ("an unknown dtype", spec(dtype="zebra"), "unknown dtype: zebra"),
    ("a bound below zero", proof(status="feasible", bound_bytes=-1), "a bound of -1 bytes"),
    ("a bound above the objective", proof(bound_bytes=31), "bound above its objective"),
    ("a graph's peak below zero", claim(graph_peak_bytes=-1), "peak of -1 bytes"),
    ("no link", claim(bandwidth_bytes_per_second=-1.0), "link gives -1.0 bytes"),
    ("device memory below zero", claim(memory_bandwidth_bytes_per_second=-1.0), "memory gives -1.0 bytes"),
    ("a link beyond numbers", claim(bandwidth_bytes_per_second=1.7e308), "link takes more bytes in an iteration"),
    ("memory beyond numbers", step(1, live_bytes=2**63), "not a whole number from 0"),
    ("memory and state beyond numbers", step(1, live_bytes=2**63 - 1), "more bytes than any memory"),
    ("durations beyond training", step(1, duration_seconds=1e308), "an iteration lasts"),
    (
        "durations beyond numbers",
        lambda plan: step(1, duration_seconds=1e308)(step(3, duration_seconds=1e308)(plan)),
        "an iteration lasts inf seconds",
    ),
]


def test_the_plan_is_good_otherwise() -> None:
    assert check_plan(loads(dumps(good_plan()))).peak_bytes == 30


@pytest.mark.parametrize(("fault", "reason"), [row[1:] for row in FAULTS], ids=[row[0] for row in FAULTS])
def test_refused_although_sealed(fault: Callable[[Plan], Plan], reason: str) -> None:
    with pytest.raises(PlanError, match=reason) as caught:
        loads(dumps(fault(good_plan())))
    assert "\n" not in str(caught.value)


def test_item_sizes_are_torch_s() -> None:
    assert {name: getattr(torch, name).itemsize for name in _ITEM_BYTES} == _ITEM_BYTES


@pytest.mark.parametrize(
    ("optimizers", "expected"),
    [
        ({"optimizer": "SGD foreach"}, []),
        ({"optimizer": "Adam foreach"}, ["optimizer optimizer: Adam foreach in the job, SGD foreach in the plan"]),
        ({}, ["optimizer optimizer: planned as SGD foreach, not in the job"]),
        (
            {"optimizer": "SGD foreach", "early": "Adam foreach"},
            ["optimizer early: Adam foreach in the job, not in the plan"],
        ),
    ],
)
def test_optimizers_of_one_side_only_are_differences(optimizers: dict[str, str], expected: list[str]) -> None:
    plan = good_plan()
    state = {entry.name: (entry.shape, entry.dtype) for entry in plan.fingerprint.state}
    assert describe_mismatch(plan, state, optimizers) == expected


def test_a_plan_of_several_ranks_is_valid_and_fits_no_job_of_one_process() -> None:
    plan = fingerprint(ranks=2)(good_plan()).sealed()
    check_plan(plan)
    state = {entry.name: (entry.shape, entry.dtype) for entry in plan.fingerprint.state}
    lines = describe_mismatch(plan, state, dict(plan.fingerprint.optimizers))
    assert lines == ["ranks: one process in the job, 2 ranks in the plan"]
