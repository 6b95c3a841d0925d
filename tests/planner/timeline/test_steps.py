"""Timelines of random graphs against their definition, operator by operator, and the choice among anchors."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from checkflow.core.errors import PlanError
from checkflow.core.graph import (
    BOUNDARY,
    Anchor,
    AnchorKey,
    AnchorKind,
    GraphStorage,
    Operator,
    StateEntry,
    TrainingGraph,
)
from checkflow.core.machine.device import find_device
from checkflow.core.timeline import Granularity, Timeline
from checkflow.core.training_step import TrainingStep
from checkflow.planner.schedule.scheduler import PlanRequest, fingerprint_of, make_plan
from checkflow.planner.timeline.steps import make_timeline
from checkflow.planner.trace.trace import trace
from checkflow.runtime.job.compatibility import make_guards
from tests.support.steps import training_steps as steps

GRANULARITIES: tuple[Granularity, ...] = ("segment", "operator")


def operator(index: int) -> Operator:
    return Operator(f"op{index}", "aten.op", "forward", "", "float32", 0, 0, 0, (), (), link_bytes=index * index)


def graph_of(
    operators: int, storages: list[GraphStorage], state: list[StateEntry], anchors: list[tuple[AnchorKind, int]]
) -> TrainingGraph:
    counts: dict[AnchorKind, int] = {}
    placed = [Anchor(BOUNDARY, 0)]
    for kind, position in sorted(anchors, key=lambda item: item[1]):
        placed.append(Anchor(AnchorKey(kind, "x", counts.get(kind, 0)), position))
        counts[kind] = counts.get(kind, 0) + 1
    return TrainingGraph(
        model="m",
        batch=(),
        micro_batches=1,
        optimizers=(),
        autocast="",
        operators=tuple(operator(i) for i in range(operators)),
        storages=tuple(storages),
        state=tuple(state),
        anchors=tuple(placed),
    )


@st.composite
def graphs(draw: st.DrawFn) -> tuple[TrainingGraph, list[float]]:
    n = draw(st.integers(0, 12))
    kinds = st.sampled_from([kind for kind in AnchorKind if kind is not AnchorKind.BOUNDARY])
    anchors = draw(st.lists(st.tuples(kinds, st.integers(0, n)), max_size=8))
    storages = []
    for i in range(draw(st.integers(0, 6))):
        created = draw(st.integers(-1, n))
        end = draw(st.integers(max(created, -1), n))
        storages.append(
            GraphStorage(
                f"s{i}", "activation", draw(st.integers(0, 100)), created, draw(st.integers(created, end)), end
            )
        )
    forward = sum(kind is AnchorKind.FORWARD for kind, _ in anchors)
    state = []
    for i in range(draw(st.integers(0, 6))):
        first = draw(st.none() | st.integers(0, n - 1)) if n else None
        barrier = None
        if forward and draw(st.booleans()):
            barrier = AnchorKey(AnchorKind.FORWARD, "x", draw(st.integers(0, forward - 1)))
        placement = draw(st.sampled_from(["device", "host"]))
        size = draw(st.integers(0, 50))
        state.append(StateEntry(f"e{i}", "buffer", (size,), "uint8", size, placement, None, first, barrier))
    durations = draw(st.lists(st.floats(0, 1), min_size=n, max_size=n))
    return graph_of(n, storages, state, anchors), durations


def operators_of(timeline: Timeline) -> list[range]:
    """The operators of each step, read off the labels."""
    found, reached = [], 0
    for step in timeline.steps:
        last = reached
        if step.kind != "anchor":
            first_name, last_name = step.label.split(" … ")[0], step.label.split(" … ")[-1]
            assert first_name == f"op{reached}"
            last = int(last_name.removeprefix("op")) + 1
        found.append(range(reached, last))
        reached = last
    return found


@given(graphs(), st.sampled_from(GRANULARITIES))
def test_steps_cover_the_operators_once_in_order(
    drawn: tuple[TrainingGraph, list[float]], granularity: Granularity
) -> None:
    graph, durations = drawn
    timeline = make_timeline(graph, durations, granularity)
    covered = operators_of(timeline)
    assert list(itertools.chain(*covered)) == list(range(len(graph.operators)))
    assert timeline.steps[0].anchor == BOUNDARY
    assert math.isclose(timeline.iteration_seconds, sum(durations), abs_tol=1e-12)
    for step, operators in zip(timeline.steps, covered, strict=True):
        assert (step.kind == "anchor") == (len(operators) == 0)
        assert step.kind in ("anchor", granularity)
        assert math.isclose(step.duration_seconds, sum(durations[i] for i in operators), abs_tol=1e-12)
    if granularity == "segment":
        kinds = [step.kind for step in timeline.steps]
        assert not any(one == other for one, other in itertools.pairwise(kinds))
        assert all(step.anchor is not None for step in timeline.steps if step.kind == "anchor")
        positions = {anchor.position for anchor in graph.anchors}
        at = [operators.start for step, operators in zip(timeline.steps, covered, strict=True) if step.kind == "anchor"]
        assert at == sorted(positions)


@given(graphs(), st.sampled_from(GRANULARITIES))
def test_live_bytes_are_those_of_the_storages_definition(
    drawn: tuple[TrainingGraph, list[float]], granularity: Granularity
) -> None:
    graph, durations = drawn
    timeline = make_timeline(graph, durations, granularity)
    for step, operators in zip(timeline.steps, operators_of(timeline), strict=True):
        if step.kind == "anchor":
            position = operators.start
            expected = sum(s.size_bytes for s in graph.storages if s.created < position <= max(s.eager_end, 0))
        else:
            expected = max(
                sum(s.size_bytes for s in graph.storages if s.created <= i <= s.eager_end) for i in operators
            )
        assert step.live_bytes == expected
        assert step.link_bytes == sum(i * i for i in operators)


@given(graphs())
def test_no_deadline_fires_later_than_a_guard(drawn: tuple[TrainingGraph, list[float]]) -> None:
    """In real training too, where what runs between two anchors of one position may write unseen."""
    graph, durations = drawn
    timeline = make_timeline(graph, durations, "segment")
    fires = {anchor.key: number for number, anchor in enumerate(graph.anchors)}
    step_of = {name: group.first_write for group in timeline.groups for name, _ in group.members}
    for entry in graph.state:
        if entry.placement == "device" and entry.barrier is not None and graph.operators:
            step = step_of[entry.name]
            assert step is not None
            deadline = timeline.steps[step - 1].anchor
            assert deadline is not None
            assert fires[deadline] <= fires[entry.barrier]


@given(graphs(), st.sampled_from(GRANULARITIES))
def test_deadlines_come_right_before_the_first_write(
    drawn: tuple[TrainingGraph, list[float]], granularity: Granularity
) -> None:
    graph, durations = drawn
    timeline = make_timeline(graph, durations, granularity)
    covered = operators_of(timeline)
    position = {anchor.key: anchor.position for anchor in graph.anchors}
    step_of = {name: group.first_write for group in timeline.groups for name, _ in group.members}
    assert set(step_of) == {entry.name for entry in graph.state if entry.placement == "device"}
    for entry in graph.state:
        if entry.placement == "host":
            continue
        step = step_of[entry.name]
        due = [] if entry.first_write is None else [entry.first_write]
        if entry.barrier is not None and graph.operators:
            due.append(min(position[entry.barrier], len(graph.operators) - 1))
        if not due:
            assert step is None
            continue
        assert step is not None
        assert timeline.steps[step - 1].kind == "anchor"  # where its snapshot is made
        assert min(due) in covered[step]  # no earlier than needed
        if entry.barrier is not None:
            assert covered[step].start <= position[entry.barrier]  # complete before the barrier's module runs
    writes = [group.first_write for group in timeline.groups]
    assert writes == sorted(writes, key=lambda step: (step is None, step or 0))
    assert len(set(writes)) == len(writes)
    assert all(group.members == tuple(sorted(group.members)) for group in timeline.groups)
    assert timeline.state_bytes == sum(e.size_bytes for e in graph.state if e.placement == "device")


@pytest.mark.parametrize(
    ("fired", "chosen"),
    [
        ([AnchorKind.FORWARD, AnchorKind.FORWARD], (AnchorKind.FORWARD, 1)),  # the innermost module
        ([AnchorKind.GRADIENT, AnchorKind.OPTIMIZER_PRE], (AnchorKind.OPTIMIZER_PRE, 0)),
        ([AnchorKind.OPTIMIZER_PRE, AnchorKind.OPTIMIZER_POST], (AnchorKind.OPTIMIZER_PRE, 0)),
        ([AnchorKind.OPTIMIZER_POST, AnchorKind.FORWARD], (AnchorKind.FORWARD, 0)),
        ([AnchorKind.FORWARD, AnchorKind.GRADIENT], (AnchorKind.FORWARD, 0)),
        ([AnchorKind.GRADIENT, AnchorKind.GRADIENT], (AnchorKind.GRADIENT, 1)),
    ],
)
def test_one_anchor_stands_for_all_at_a_position(fired: list[AnchorKind], chosen: tuple[AnchorKind, int]) -> None:
    graph = graph_of(2, [], [], [(kind, 1) for kind in fired])
    timeline = make_timeline(graph, [1.0, 2.0], "segment")
    keys = [step.anchor for step in timeline.steps if step.kind == "anchor"]
    assert keys == [BOUNDARY, AnchorKey(chosen[0], "x", chosen[1])]


def module_graph(guarded: Mapping[str, int | None]) -> TrainingGraph:
    """Three nested modules whose forwards begin at one position, and one buffer of some of them, by first write."""
    names = ("m/outer", "m/outer.mid", "m/outer.mid.inner")
    keys = [AnchorKey(AnchorKind.FORWARD, name) for name in names]
    state = [
        StateEntry(f"{name}.b", "buffer", (4,), "uint8", 4, "device", None, first, AnchorKey(AnchorKind.FORWARD, name))
        for name, first in guarded.items()
    ]
    graph = graph_of(4, [], state, [])
    return dataclasses.replace(graph, anchors=(Anchor(BOUNDARY, 0), *(Anchor(key, 2) for key in keys)))


@pytest.mark.parametrize(
    ("guarded", "chosen"),
    [
        ({}, "m/outer.mid.inner"),
        ({"m/outer.mid.inner": None}, "m/outer.mid.inner"),
        ({"m/outer.mid": None}, "m/outer.mid"),
        ({"m/outer.mid.inner": 2, "m/outer": None}, "m/outer"),  # earliest of all, seen writes or not
        ({"m/outer.mid": 3}, "m/outer.mid"),
    ],
)
def test_a_module_with_buffers_is_guarded_before_it_runs(guarded: dict[str, int | None], chosen: str) -> None:
    timeline = make_timeline(module_graph(guarded), [1.0] * 4, "segment")
    (anchor,) = [step.anchor for step in timeline.steps if step.kind == "anchor"][1:]
    assert anchor == AnchorKey(AnchorKind.FORWARD, chosen)
    assert [group.first_write for group in timeline.groups] == ([3] if guarded else [])


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_a_buffer_that_is_written_late_is_due_at_its_module_s_forward(granularity: Granularity) -> None:
    graph = module_graph({"m/outer.mid": 3})
    graph = dataclasses.replace(graph, anchors=(*graph.anchors, Anchor(AnchorKey(AnchorKind.GRADIENT, "x"), 3)))
    (group,) = make_timeline(graph, [1.0] * 4, granularity).groups
    steps_of_it = make_timeline(graph, [1.0] * 4, granularity).steps
    assert group.first_write is not None
    assert steps_of_it[group.first_write].label.startswith("op2")


def test_the_boundary_stands_for_what_fires_with_it() -> None:
    graph = graph_of(1, [], [], [(AnchorKind.FORWARD, 0), (AnchorKind.OPTIMIZER_PRE, 0)])
    steps_of_it = make_timeline(graph, [1.0], "segment").steps
    assert [step.anchor for step in steps_of_it] == [BOUNDARY, None]


def test_state_written_in_the_first_segment_is_due_at_the_boundary() -> None:
    entry = StateEntry("model/w", "parameter", (4,), "float32", 16, "device", None, 1)
    graph = graph_of(3, [], [entry], [(AnchorKind.FORWARD, 2)])
    (group,) = make_timeline(graph, [1.0] * 3, "segment").groups
    assert (group.first_write, group.members) == (1, (("model/w", 16),))


def test_durations_must_match_the_operators() -> None:
    with pytest.raises(PlanError, match="2 durations for 3 operators"):
        make_timeline(graph_of(3, [], [], []), [1.0, 1.0], "segment")


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_the_timeline_of_a_traced_step(granularity: Granularity) -> None:
    with torch.device("meta"):
        step = steps.batch_norm(torch.optim.Adam)
    graph = trace(step, name="n")
    timeline = make_timeline(graph, [1e-5] * len(graph.operators), granularity)
    assert timeline.training_peak_bytes == max(max(part) for part in graph.live_bytes(eager=True))
    hosts = sum(entry.size_bytes for entry in graph.state if entry.placement == "host")
    assert timeline.state_bytes == graph.state_bytes - hosts
    deadline = {name: timeline.steps[group.first_write - 1] for group in timeline.groups for name, _ in group.members}
    if granularity == "segment":
        forward = AnchorKey(AnchorKind.FORWARD, "model/bn")
        assert deadline["model/bn.running_mean"].anchor == forward  # batch norm writes it in its forward
        assert deadline["model/conv.weight"].anchor == AnchorKey(AnchorKind.OPTIMIZER_PRE, "optimizer")
    else:
        # Its module's forward begins with counting the batch.
        assert deadline["model/bn.running_mean"].label == "before add_"


class LateStatistics(nn.Module):
    """Owns a buffer that its forward only reads, around a module whose forward begins at the same operator."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.BatchNorm1d(4)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(x) * self.scale
        return out


def test_a_job_guards_no_buffer_before_its_plan_does() -> None:
    model = nn.Sequential(nn.Linear(4, 4), LateStatistics(), nn.Linear(4, 2))
    optimizer = steps.sgd(model.parameters())

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
        model[1].scale.mul_(0.9)  # later than the runtime, which knows forwards only, waits for

    job = TrainingStep(step=step, models={"model": model}, optimizers={"optimizer": optimizer}, batch=torch.randn(3, 4))
    graph = trace(job, name="n", target="cpu")
    device = find_device("cpu")
    timeline = make_timeline(graph, [1e-3] * len(graph.operators), "segment")
    request = PlanRequest(1e9, device.memory_bandwidth_bytes_per_second)
    plan = make_plan(timeline, fingerprint_of(graph, device), request, graph_peak_bytes=0).plan
    assert plan is not None
    outer = AnchorKey(AnchorKind.FORWARD, "model/1")
    for name in ("model/1.scale", "model/1.inner.running_mean", "model/1.inner.num_batches_tracked"):
        deadline = plan.deadlines[name]
        assert deadline is not None
        assert timeline.steps[deadline].anchor == outer
    guards = make_guards(plan, job.models, job.optimizers)
    # The inner module's own forward comes after the anchor by which its buffers are due.
    late = {plan.chunks[index].tensor for key, found in guards.at_forward.items() if key == outer for index in found}
    assert not late
    assert set(guards.at_forward) <= {AnchorKey(AnchorKind.FORWARD, "model/1.inner")}
