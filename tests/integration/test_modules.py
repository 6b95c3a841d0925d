"""Training steps that people really have, the model half: each is planned by trace and by record, and kept true.

A row of the tables in ``layer_steps``, ``autograd_steps`` and ``loop_steps`` is one kind of step.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from checkflow.api import Checkpointer
from checkflow.core.graph import BOUNDARY, AnchorKey, AnchorKind, StateEntry, TrainingGraph
from checkflow.core.state import collect_state
from checkflow.core.training_step import TrainingStep
from checkflow.planner.timeline.steps import make_timeline
from checkflow.planner.trace.trace import trace
from tests.support.oracle import clone_state
from tests.support.planned_jobs import assert_every_checkpoint_is_true, plan_graph
from tests.support.recording import record_step
from tests.support.steps import autograd_steps as own
from tests.support.steps import layer_steps as layers
from tests.support.steps import loop_steps as loops
from tests.support.writes import assert_writes_are_those_of_reality

Build = layers.Build
EXACT: Mapping[str, Build] = {
    **layers.NUMBERS, **layers.RECOMPUTED, **layers.NORMS, **layers.WEIGHTS, **layers.SEQUENCES, **layers.LOOKUPS,
    **layers.SCRIPTED, **own.OWN, **own.FUNCTIONAL, **loops.AFTERWARDS, **loops.KEPT, **loops.STRUCTURES,
}  # fmt: skip
STEPS: Mapping[str, Build] = {**EXACT, **layers.PACKED}


def build(name: str) -> TrainingStep:
    torch.manual_seed(0)
    return STEPS[name]()


@functools.cache
def traced(name: str) -> TrainingGraph:
    return trace(build(name), name=name, target="cpu")


def deadlines(graph: TrainingGraph) -> dict[str, AnchorKey | None]:
    """The anchor by which each tensor on the device must have been copied."""
    timeline = make_timeline(graph, [1.0] * len(graph.operators), "segment")
    return {
        name: None if group.first_write is None else timeline.steps[group.first_write - 1].anchor
        for group in timeline.groups
        for name, _ in group.members
    }


def described(entry: StateEntry) -> tuple[Any, ...]:
    return (entry.name, entry.kind, entry.shape, entry.dtype, entry.size_bytes, entry.placement, entry.barrier)


@pytest.fixture(autouse=True)
def _quiet(recwarn: pytest.WarningsRecorder) -> Iterator[None]:
    """torch warns of much that these steps do on purpose."""
    yield
    recwarn.clear()


@pytest.mark.parametrize("name", STEPS)
def test_checkpoints_of_a_traced_step_are_true(name: str, tmp_path: Path) -> None:
    assert_every_checkpoint_is_true(build(name), plan_graph(traced(name)), tmp_path, iterations=4)


@pytest.mark.parametrize("name", EXACT)
def test_state_is_first_written_where_it_is_in_reality(name: str) -> None:
    assert_writes_are_those_of_reality(traced(name), build(name))


@pytest.mark.parametrize("name", STEPS)
def test_the_record_agrees_with_the_trace(name: str) -> None:
    recorded = record_step(build(name), name=name).graph
    assert [described(entry) for entry in recorded.state] == [described(entry) for entry in traced(name).state]
    assert deadlines(recorded) == deadlines(traced(name))
    assert (recorded.ties, recorded.optimizers, recorded.batch) == (
        traced(name).ties, traced(name).optimizers, traced(name).batch
    )  # fmt: skip
    keys = [[anchor.key for anchor in graph.anchors] for graph in (recorded, traced(name))]
    assert sorted(map(str, keys[0])) == sorted(map(str, keys[1]))
    assert keys[0] == keys[1] or name not in EXACT


@pytest.mark.parametrize("name", STEPS)
def test_a_trace_for_a_gpu_shows_the_same_state(name: str) -> None:
    step = build(name)
    before = {item.name: id(item.tensor) for item in collect_state(step.models, step.optimizers).tensors}
    graph = trace(step, name=name, target="cuda")
    expected = [(entry.name, entry.kind, entry.shape, entry.dtype) for entry in traced(name).state]
    assert [(entry.name, entry.kind, entry.shape, entry.dtype) for entry in graph.state] == expected
    assert {entry.name for entry in graph.state if entry.placement == "host"} <= {
        name for name, *_ in expected if name.endswith(".step")
    }
    written = {entry.name for entry in graph.state if entry.first_write is not None}
    assert written == {entry.name for entry in traced(name).state if entry.first_write is not None}
    assert graph.batch == traced(name).batch != ()
    assert not [storage for storage in graph.storages if storage.name == "captured" and storage.size_bytes > 200]
    after = {item.name: id(item.tensor) for item in collect_state(step.models, step.optimizers).tensors}
    assert after == before


# What is written in forward, and by when it must have been copied


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("spectral_norm old", {"model/0.weight_u", "model/0.weight_v", "model/2.weight_u", "model/2.weight_v"}),
        (
            "spectral_norm new",
            {f"model/{i}.parametrizations.weight.0._{vector}" for i in (0, 2) for vector in "uv"},
        ),
        ("embedding max_norm", {"model/0.weight"}),
        ("embedding bag max_norm", {"model/bag.weight"}),
        ("norms", {f"model/{i}.{what}" for i in (4, 6) for what in layers.STATISTICS}),
        ("frozen batch norm", {f"model/3.{what}" for what in layers.STATISTICS}),
        ("shared", {f"model/norm.{what}" for what in layers.STATISTICS}),
        ("function that writes", {"model/statistics"}),
        ("operator that writes", {"model/statistics"}),
        ("hidden state in buffers", {"model/hidden"}),
        ("AveragedModel", {f"model/1.{what}" for what in layers.STATISTICS}),
    ],
)
def test_what_is_written_in_forward_is_due_there(name: str, written: set[str]) -> None:
    graph = traced(name)
    first = {entry.name: entry.first_write for entry in graph.state if entry.first_write is not None}
    assert {name for name, write in first.items() if graph.operators[write].phase == "forward"} == written
    due = deadlines(graph)
    assert {anchor.kind for name in written if (anchor := due[name])} <= {AnchorKind.BOUNDARY, AnchorKind.FORWARD}
    late = {anchor.kind for name, anchor in due.items() if anchor is not None and name not in written}
    assert late & {AnchorKind.OPTIMIZER_PRE, AnchorKind.OPTIMIZER_POST}


def test_an_average_is_due_after_the_step() -> None:
    due = deadlines(traced("AveragedModel"))
    kinds = {name: anchor.kind for name, anchor in due.items() if anchor is not None and name.startswith("average/")}
    assert kinds.pop("average/n_averaged") is AnchorKind.OPTIMIZER_POST
    assert set(kinds.values()) == {AnchorKind.OPTIMIZER_POST}


# Devices


@pytest.mark.slow
@pytest.mark.parametrize("of_jit", [torch.jit.script, layers.by_jit])
def test_a_scripted_job_goes_on_as_if_uncut(of_jit: Any, tmp_path: Path) -> None:
    """With statistics inside, which one anchor guards; what jit itself traced runs on real tensors only."""
    made: list[TrainingStep] = []
    for directory, stop in (("whole", 8), ("cut", 4), ("cut", 8)):
        torch.manual_seed(0)
        step = layers.inside(of_jit, nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh())
        plan = plan_graph(record_step(step, name="n").graph)
        assert plan.deadlines["model/2.1.running_mean"] == plan.deadlines["model/2.1.running_var"]
        torch.manual_seed(1)
        made.append(layers.inside(of_jit, nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh()))
        with Checkpointer(
            made[-1].models, made[-1].optimizers, directory=tmp_path / directory, plan=plan, every=plan.interval,
            audit=1, on_error="raise",
        ) as checkpointer:  # fmt: skip
            for _ in checkpointer.steps(stop):
                made[-1].run(made[-1].batch)
        assert checkpointer.report()["breaches"] == 0
    whole, again = (clone_state(step.models, step.optimizers) for step in (made[0], made[2]))
    assert checkpointer.resumed_from == 4
    # torch.jit itself computes its first iterations in other ways than later ones, by rounding errors.
    torch.testing.assert_close(whole, again)


def moved(loss: Any) -> TrainingStep:
    return layers.step_of(nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)), torch.randn(4, 6), loss=loss)


@pytest.mark.parametrize("target", ["cpu", "cuda"])
@pytest.mark.parametrize("device", [0, "cuda", "cuda:0", torch.device("cuda", 1)])
@pytest.mark.parametrize(
    "use",
    [
        lambda m, x, device: m(x.to(device)),
        lambda m, x, device: m(x.to(device=device, non_blocking=True)),
        lambda m, x, device: m(x) + torch.zeros(4, device=device),
        lambda m, x, device: m(x) + torch.tensor([1.0, 2, 3, 4], device=device),
        lambda m, x, device: m(x) + x.new_zeros(4, device=device),
        lambda m, x, device: m.to(device)(x),
        lambda m, x, device: m.to(device, torch.float32).cuda()(x.pin_memory().cuda(non_blocking=True)),
    ],
)
def test_a_device_that_is_not_there_may_be_named(use: Any, device: Any, target: Any) -> None:
    graph = trace(moved(lambda m, x: use(m, x, device).square().mean()), name="job", target=target)
    assert {entry.placement for entry in graph.state} == {"device"}
    assert {(operator.link_bytes, operator.waited_bytes) for operator in graph.operators} == {(0, 0)}
    assert all(entry.first_write is not None for entry in graph.state)


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_a_default_device_that_is_not_there(target: Any) -> None:
    step = moved(lambda m, x: (m(x) + torch.ones(4)).square().mean())
    expected = trace(step, name="job", target=target)
    torch.set_default_device("cuda")
    try:
        assert trace(step, name="job", target=target) == expected
    finally:
        torch.set_default_device(None)


def test_pinned_memory_is_plain_memory_for_a_cpu() -> None:
    plain = trace(moved(lambda m, x: (m(x) + torch.zeros(4)).sum()), name="job", target="cpu")
    pinned = moved(lambda m, x: (m(x.pin_memory()) + torch.zeros(4, pin_memory=True)).sum())
    assert trace(pinned, name="job", target="cpu") == plain


# Lengths


@pytest.mark.slow
def test_sequences_are_planned_for_the_longest() -> None:
    """Whatever the lengths are; and a batch that is packed already has the rows that it has."""

    def packed(*lengths: int) -> TrainingGraph:
        step = layers.step_of(layers.Recurrent(nn.GRU), torch.randn(4, 3, 5), torch.tensor(lengths))
        return trace(step, name="job", target="cpu")

    assert packed(4, 3, 1) == packed(4, 4, 4)
    longest = record_step(
        layers.step_of(layers.Recurrent(nn.GRU), torch.randn(4, 3, 5), torch.tensor([4, 4, 4])), name="job"
    ).graph
    ours, real = (sum(op.flops for op in graph.operators) for graph in (packed(4, 3, 1), longest))
    assert ours == real
    rows = trace(STEPS["packed batch"](), name="job").batch[0]
    assert rows == ((8, 5), "float32")


@pytest.mark.parametrize(
    ("targets", "lengths", "longest"),
    [((2, 3), None, 3), ((2, 3), [2, 1], 2), ((5,), None, 3), ((5,), [4, 1], 4)],
)
def test_ctc_loss_needs_the_memory_of_its_longest_target(targets: Any, lengths: Any, longest: int) -> None:
    given = lengths or torch.tensor([3, 2])

    def loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.ctc_loss(model(x).log_softmax(-1), y, (6, 5), given, reduction="sum")

    step = layers.step_of(nn.Linear(5, 7), torch.randn(6, 2, 5), torch.randint(1, 7, targets), loss=loss)
    graph = trace(step, name="job", target="cpu")
    (index,) = [i for i, operator in enumerate(graph.operators) if operator.target.startswith("aten._ctc_loss.")]
    made = [graph.storages[i].size_bytes for i in graph.operators[index].writes]
    assert sorted(made) == [2 * 4, 2 * 6 * (2 * longest + 1) * 4]


# Data parallel


@pytest.fixture
def process_group() -> Iterator[None]:
    """Of this process alone."""
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("process_group")
def test_data_parallel_training_broadcasts_buffers_before_any_module_runs(tmp_path: Path) -> None:
    """They are due before that, under the names that they have without the wrapper."""

    def build() -> TrainingStep:
        torch.manual_seed(0)
        return layers.step_of(nn.parallel.DistributedDataParallel(layers.perceptron()), torch.randn(4, 6))

    graph = trace(build(), name="job", target="cpu")
    recorded = record_step(build(), name="job").graph
    due = {entry.name: deadlines(graph)[entry.name] for entry in graph.state if entry.kind == "buffer"}
    assert due == dict.fromkeys([f"model/1.{what}" for what in layers.STATISTICS], BOUNDARY)
    assert [described(entry) for entry in recorded.state] == [described(entry) for entry in graph.state]
    assert deadlines(recorded) == deadlines(graph)
    assert_every_checkpoint_is_true(build(), plan_graph(graph), tmp_path, iterations=4)
