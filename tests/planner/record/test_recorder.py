"""Recorded iterations: the same graph as the trace's, from real tensors, and training that does not notice."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils.flop_counter import FlopCounterMode

from checkflow.core.errors import TraceError
from checkflow.core.graph import AnchorKey, AnchorKind, StateEntry, TrainingGraph
from checkflow.core.training_step import TrainingStep
from checkflow.planner.iteration.lifetimes import StorageLedger
from checkflow.planner.record.recorder import IterationRecorder, held_tensors
from checkflow.planner.trace.trace import trace
from tests.support.oracle import clone_state, same_bits
from tests.support.planned_jobs import assert_every_checkpoint_is_true, plan_graph
from tests.support.recording import record_step
from tests.support.steps import training_steps as steps

adam = functools.partial(torch.optim.Adam, lr=1e-3)
adam_foreach = functools.partial(torch.optim.Adam, lr=1e-3, foreach=True)
adam_fused = functools.partial(torch.optim.Adam, lr=1e-3, fused=True)


def state_of(graph: TrainingGraph) -> list[StateEntry]:
    """Names, sizes, places, barriers and first writes; storages are numbered as they are met."""
    return [dataclasses.replace(entry, storage=None) for entry in graph.state]


def peak_bytes(graph: TrainingGraph, *, eager: bool) -> int:
    return max(max(part) for part in graph.live_bytes(eager=eager))


def assert_same_iteration(recorded: TrainingGraph, traced: TrainingGraph) -> None:
    assert [operator.target for operator in recorded.operators] == [operator.target for operator in traced.operators]
    assert recorded.anchors == traced.anchors
    assert state_of(recorded) == state_of(traced)
    for eager in (True, False):
        assert peak_bytes(recorded, eager=eager) == peak_bytes(traced, eager=eager)
    for field in ("model", "batch", "micro_batches", "optimizers", "autocast", "ties", "parameters", "flops"):
        assert getattr(recorded, field) == getattr(traced, field), field
    for one, other in zip(recorded.operators, traced.operators, strict=True):
        same = ("phase", "module", "dtype", "flops", "read_bytes", "written_bytes")
        assert [getattr(one, field) for field in same] == [getattr(other, field) for field in same], one.target


def shipped(name: str, batch_size: int, optimizer: Any) -> TrainingStep:
    step: TrainingStep = importlib.import_module(f"checkflow.models.{name}").build(batch_size)
    step.optimizers = {"optimizer": optimizer(step.models["model"].parameters())}
    return step


@pytest.mark.parametrize(
    ("name", "batch_size", "optimizer"),
    [
        ("alexnet", 1, steps.sgd),
        ("mnasnet", 2, adam_foreach),
        ("resnet18", 1, adam),
        ("vgg11", 1, steps.sgd),
        ("vit", 1, steps.sgd),
        ("resnet3d", 1, steps.sgd),
        ("transformer", 1, adam_fused),
        ("bert", 1, steps.sgd),
    ],
)
def test_a_recorded_iteration_is_the_traced_one(name: str, batch_size: int, optimizer: Any) -> None:
    with torch.device("meta"):
        traced = trace(shipped(name, batch_size, optimizer), name=name, target="cpu")
    recorded = record_step(shipped(name, batch_size, optimizer), name=name)
    assert_same_iteration(recorded.graph, traced)
    assert len(recorded.durations_seconds) == len(traced.operators)
    assert all(seconds > 0 for seconds in recorded.durations_seconds)


BUILDERS: dict[str, Callable[[], TrainingStep]] = {
    "batch norm": functools.partial(steps.batch_norm, adam),
    "parallel": functools.partial(steps.parallel, adam_foreach),
    "tied": functools.partial(steps.tied, adam_fused),
    "transformer": steps.transformer,
    "micro-batches": steps.micro_batches,
    "two optimizers": steps.adversarial,
}


@pytest.mark.parametrize("name", BUILDERS)
def test_small_steps_too(name: str) -> None:
    torch.manual_seed(0)
    with torch.device("meta"):
        traced = trace(BUILDERS[name](), name=name, target="cpu")
    recorded = record_step(BUILDERS[name](), name=name).graph
    assert state_of(recorded) == state_of(traced)
    assert [anchor.key for anchor in recorded.anchors] == [anchor.key for anchor in traced.anchors]
    # Temporary numbers beside counters in host memory are a few bytes that the record takes for the device's.
    assert peak_bytes(recorded, eager=True) == pytest.approx(peak_bytes(traced, eager=True), rel=0.01)


@pytest.mark.parametrize("name", BUILDERS)
def test_plans_of_recorded_iterations_keep_every_checkpoint_true(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    step = BUILDERS[name]()
    assert_every_checkpoint_is_true(step, plan_graph(record_step(step, name=name).graph), tmp_path)


@pytest.mark.parametrize("name", BUILDERS)
def test_training_does_not_notice(name: str) -> None:
    states = []
    for recorded in (False, True):
        torch.manual_seed(0)
        step = BUILDERS[name]()
        if recorded:
            record_step(step, name=name)
        else:
            step.run(step.batch)
            step.run(step.batch)
        step.run(step.batch)
        states.append(clone_state(step.models, step.optimizers))
    one, other = states
    assert one.keys() == other.keys()
    assert all(same_bits(one[key], other[key]) for key in one)


def recording(step: TrainingStep) -> IterationRecorder:
    step.run(step.batch)
    recorder = IterationRecorder(step.models, step.optimizers, name="job")
    recorder.begin(step.batch)
    return recorder


def hooks_of(step: TrainingStep) -> int:
    (model,) = step.models.values()
    modules = sum(len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules())
    return modules + sum(len(p._post_accumulate_grad_hooks or ()) for p in model.parameters())


@pytest.mark.parametrize("how", ["end", "abandon", "abandon twice"])
def test_everything_is_given_back(how: str) -> None:
    step = steps.batch_norm()
    recorder = recording(step)
    assert hooks_of(step) > 0
    assert len(_get_current_dispatch_mode_stack()) == 1
    step.run(step.batch)
    recorder.end() if how == "end" else recorder.abandon()
    if how == "abandon twice":
        recorder.abandon()
    assert hooks_of(step) == 0
    assert _get_current_dispatch_mode_stack() == []


def test_a_step_that_fails_leaves_nothing_behind() -> None:
    step = steps.batch_norm()
    calls = []

    def loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 2:
            raise ZeroDivisionError
        return steps.cross_entropy(model, x, y)

    broken = TrainingStep(step.models["model"], step.optimizers["optimizer"], loss=loss, batch=step.batch)
    with pytest.raises(ZeroDivisionError):
        record_step(broken, name="job")
    assert hooks_of(step) == 0
    assert _get_current_dispatch_mode_stack() == []


def test_a_mode_of_the_users_that_began_later_stays() -> None:
    step = steps.batch_norm()
    recorder = recording(step)
    with FlopCounterMode(display=False) as counter:
        step.run(step.batch)
        graph = recorder.end().graph
        before = counter.get_total_flops()
        step.run(step.batch)
    assert before == graph.flops
    assert counter.get_total_flops() == 2 * before
    assert _get_current_dispatch_mode_stack() == []


def test_ended_on_another_thread_it_watches_no_more() -> None:
    step = steps.batch_norm()
    recorder = recording(step)
    step.run(step.batch)
    thread = threading.Thread(target=recorder.abandon)
    thread.start()
    thread.join()
    seen = recorder._iteration.position()
    step.run(step.batch)
    assert recorder._iteration.position() == seen
    recorder.abandon()
    assert _get_current_dispatch_mode_stack() == []


def test_the_first_iteration_makes_state_and_is_refused() -> None:
    step = steps.batch_norm(adam)
    recorder = IterationRecorder(step.models, step.optimizers, name="job")
    recorder.begin(step.batch)
    step.run(step.batch)
    with pytest.raises(TraceError, match=r"changes the set of state \(optimizer/"):
        recorder.end()


def test_an_iteration_without_a_step_is_refused() -> None:
    step = steps.batch_norm()
    recorder = recording(step)
    steps.cross_entropy(step.models["model"], *step.batch).backward()
    with pytest.raises(TraceError, match="no optimizer stepped"):
        recorder.end()


@pytest.mark.slow
def test_from_forward_to_forward() -> None:
    """A loop that says nothing of boundaries is recorded from one forward pre-hook of its model to the next."""
    step = steps.batch_norm()
    (model,) = step.models.values()
    step.run(step.batch)
    recorder = IterationRecorder(step.models, step.optimizers, name="job")
    graphs: list[TrainingGraph] = []
    calls: list[int] = []

    def boundary(_module: nn.Module, _arguments: Any) -> None:
        calls.append(1)
        if len(calls) == 1:
            recorder.begin(step.batch)
        elif len(calls) == 2:
            graphs.append(recorder.end(batch=step.batch).graph)

    with model.register_forward_pre_hook(boundary, prepend=True):
        for _ in range(3):
            step.run(step.batch)
    expected = record_step(steps.batch_norm(), name="job").graph
    (graph,) = graphs
    # zero_grad, which stands before the forward, computes nothing; the model's own forward is the boundary.
    assert [o.target for o in graph.operators] == [o.target for o in expected.operators]
    whole = AnchorKey(AnchorKind.FORWARD, "model/")
    assert graph.anchors == tuple(anchor for anchor in expected.anchors if anchor.key != whole)
    assert state_of(graph) == state_of(expected)


def test_sparse_gradients() -> None:
    def build() -> TrainingStep:
        model = nn.Sequential(nn.Embedding(100, 8, sparse=True), nn.Flatten(), nn.Linear(24, 2, bias=False))
        optimizers = {
            "sparse": torch.optim.SparseAdam([model[0].weight], lr=0.1),
            "dense": torch.optim.SGD([model[2].weight], lr=0.1),
        }
        batch = torch.arange(12).reshape(4, 3)

        def iterate(tokens: torch.Tensor) -> None:
            for optimizer in optimizers.values():
                optimizer.zero_grad()
            model(tokens).square().mean().backward()
            for optimizer in optimizers.values():
                optimizer.step()

        return TrainingStep(step=iterate, models={"model": model}, optimizers=optimizers, batch=batch)

    recorded, traced = record_step(build(), name="n").graph, trace(build(), name="n", target="cpu")
    assert [e.name for e in recorded.state] == [e.name for e in traced.state]
    written = {entry.name: entry.first_write for entry in recorded.state if entry.placement == "device"}
    pre = next(a.position for a in recorded.anchors if a.key == AnchorKey(AnchorKind.OPTIMIZER_PRE, "sparse"))
    assert all(first is not None and first >= pre for first in written.values())


def test_what_a_loop_holds_is_counted() -> None:
    """A real loop keeps its last logits in a variable until the next ones are there; a function does not."""
    model = nn.Linear(256, 256, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(64, 256)
    recorder = IterationRecorder({"model": model}, {"optimizer": optimizer}, name="loop")
    out = None
    for turn in range(2):
        if turn == 1:
            recorder.begin(x, held=out)
        optimizer.zero_grad()
        out = model(x)
        out.square().mean().backward()
        optimizer.step()
    graph = recorder.end(batch=x).graph
    held = next(storage for storage in graph.storages if storage.name == "result.0")
    assert (held.size_bytes, held.created) == (64 * 256 * 4, -1)
    assert held.eager_end == 0  # until the first operator's result takes its place


def test_state_that_is_replaced_is_written_where_its_successor_is_made() -> None:
    model = nn.Linear(4, 4, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def iterate(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        model.weight.data = model.weight.data * 0.5
        optimizer.step()

    step = TrainingStep(step=iterate, models={"m": model}, optimizers={"o": optimizer}, batch=torch.randn(2, 4))
    graph = record_step(step, name="n").graph
    (entry,) = graph.state
    assert entry.first_write is not None
    assert graph.operators[entry.first_write].target == "aten.mul.Tensor"
    assert state_of(graph) == state_of(trace(step, name="n", target="cpu"))


def test_held_tensors_are_found_wherever_python_holds_them() -> None:
    class Keeper:
        pass

    keeper = Keeper()
    keeper.cache = {"logits": torch.zeros(3)}  # type: ignore[attr-defined]
    local = torch.zeros(4)[1:]
    with FakeTensorMode():
        fake = torch.zeros(5)
    found = {id(tensor) for tensor in held_tensors(torch.device("cpu"))}
    assert {id(local), id(keeper.cache["logits"])} <= found  # type: ignore[attr-defined]
    assert id(fake) not in found
    elsewhere = torch.zeros(6, device="meta")
    assert id(elsewhere) in {id(tensor) for tensor in held_tensors(torch.device("meta"))} - found


def test_memory_that_belongs_to_no_tensor_lives_all_iteration_long() -> None:
    ledger = StorageLedger(lambda: 3)
    for size in (0, -5, 7):
        ledger.enter_unseen("other", size)
    (storage,), _ = ledger.storages()
    assert (storage.name, storage.size_bytes, storage.created, storage.eager_end) == ("other", 7, -1, 3)


def test_operators_that_take_functions_end_the_recording_and_not_the_job() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def iterate(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        chosen: torch.Tensor = torch.cond(x.sum() > 0, lambda y: model(y) * 2, lambda y: model(y), (x,))
        chosen.square().mean().backward()
        optimizer.step()
        return chosen

    step = TrainingStep(step=iterate, models={"model": model}, optimizers={"sgd": optimizer}, batch=torch.ones(2, 4))
    before = model.weight.detach().clone()
    with pytest.raises(TraceError, match="cond cannot be recorded"):
        record_step(step, name="n")
    assert not model.weight.equal(before)
    assert _get_current_dispatch_mode_stack() == []


@pytest.mark.slow
def test_begun_inside_of_a_mode_that_ends_first() -> None:
    step = steps.parallel()
    step.run(step.batch)
    recorder = IterationRecorder(step.models, step.optimizers, name="job")
    with FlopCounterMode(display=False):
        recorder.begin(step.batch)
        step.run(step.batch)
    assert len(_get_current_dispatch_mode_stack()) == 1  # the recorder's
    graph = recorder.end(batch=step.batch).graph
    assert _get_current_dispatch_mode_stack() == []
    assert len(graph.operators) == len(record_step(steps.parallel(), name="n").graph.operators)


class _Deaf(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_a_mode_below_and_a_mode_above() -> None:
    step = steps.parallel()
    with _Deaf():
        recorder = recording(step)
        step.run(step.batch)
        with _Deaf():
            graph = recorder.end().graph
    assert len(graph.operators) == len(record_step(steps.parallel(), name="n").graph.operators)
    assert _get_current_dispatch_mode_stack() == []
