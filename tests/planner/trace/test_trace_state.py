"""The trace's state against reality: names, sizes, where it lies, and the first operator that really writes it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from checkflow.core.errors import TraceError
from checkflow.core.graph import AnchorKey, AnchorKind, TrainingGraph
from checkflow.core.state import collect_state
from checkflow.core.training_step import TrainingStep
from checkflow.planner.trace.trace import trace
from tests.support.steps import training_steps as steps
from tests.support.steps.training_steps import BUILDERS, on_meta

SGD, ADAM = torch.optim.SGD, torch.optim.Adam
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": functools.partial(SGD, lr=0.1),
    "momentum": functools.partial(SGD, lr=0.1, momentum=0.9),
    "momentum-fused": functools.partial(SGD, lr=0.1, momentum=0.9, fused=True),
    "adam-loop": functools.partial(ADAM, foreach=False),
    "adam-foreach": functools.partial(ADAM, foreach=True),
    "adam-fused": functools.partial(ADAM, fused=True),
    "adamw-amsgrad": functools.partial(torch.optim.AdamW, amsgrad=True),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("build", [steps.batch_norm, steps.tied])
def test_state_is_that_of_a_real_job_after_its_first_iteration(build: Any, optimizer: str) -> None:
    make = OPTIMIZERS[optimizer]
    graph = trace(on_meta(functools.partial(build, make)), name="n")
    step = build(make)
    step.run(step.batch)
    state = collect_state(step.models, step.optimizers)
    expected = [
        (t.name, t.kind, tuple(t.tensor.shape), str(t.tensor.dtype)[6:], t.tensor.nbytes) for t in state.tensors
    ]
    assert [(e.name, e.kind, e.shape, e.dtype, e.size_bytes) for e in graph.state] == expected
    assert graph.ties == state.ties
    assert graph.state_bytes == sum(t.tensor.nbytes for t in state.tensors)
    (model,) = step.models.values()
    assert graph.parameters == sum(p.numel() for p in model.parameters())
    hosts = {entry.name for entry in graph.state if entry.placement == "host"}
    on_device = optimizer == "adam-fused" or not optimizer.startswith("adam")
    assert hosts == set() if on_device else hosts == {e.name for e in graph.state if e.name.endswith(".step")}
    assert all((entry.storage is None) == (entry.placement == "host") for entry in graph.state)


class _Writes(TorchDispatchMode):
    """Runs for real, and after every operator compares all state with what it was before the iteration."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self._tensors = tensors
        self._before = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        self.first: dict[str, str] = {}  # state tensor: the operator after which it was first seen to differ

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for name, tensor in self._tensors.items():
            if name not in self.first and not torch.equal(tensor, self._before[name]):
                self.first[name] = str(func)
        return result


def assert_first_writes(graph: TrainingGraph, step: TrainingStep) -> None:
    step.run(step.batch)
    tensors = {item.name: item.tensor for item in collect_state(step.models, step.optimizers).tensors}
    with _Writes(tensors) as writes:
        step.run(step.batch)
    traced = {e.name: e for e in graph.state if e.placement == "device"}
    for name, entry in traced.items():
        if name in writes.first:
            assert entry.first_write is not None, name
            assert graph.operators[entry.first_write].target == writes.first[name], name
            assert entry.storage in graph.operators[entry.first_write].writes
        else:
            assert entry.first_write is None, name
    assert any(name in writes.first for name in traced)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_first_writes_are_those_of_real_training(optimizer: str) -> None:
    """Batch norm's running statistics among them, whose write no schema tells."""
    torch.manual_seed(0)
    build = functools.partial(steps.batch_norm, OPTIMIZERS[optimizer])
    graph = trace(on_meta(build), name="n", target="cpu")
    assert_first_writes(graph, build())
    statistics = next(entry for entry in graph.state if entry.name == "model/bn.running_var")
    assert statistics.first_write is not None
    assert graph.operators[statistics.first_write].phase == "forward"


@pytest.mark.parametrize("name", ["tied", "parallel", "adversarial", "micro_batches"])
def test_first_writes_of_other_steps(name: str) -> None:
    torch.manual_seed(0)
    assert_first_writes(trace(on_meta(BUILDERS[name]), name=name, target="cpu"), BUILDERS[name]())


def test_batch_norm_that_does_not_train_writes_nothing() -> None:
    step = steps.batch_norm()
    step.models["model"].eval()
    graph = trace(step, name="n")
    first = {entry.name: entry.first_write for entry in graph.state if entry.kind == "buffer"}
    assert set(first.values()) == {None}


def test_every_buffer_has_the_forward_of_its_module_as_barrier() -> None:
    """Whether a write was seen or not: the runtime guards it there."""
    graph = trace(on_meta(steps.tied), name="n")
    barriers = {entry.name: entry.barrier for entry in graph.state}
    assert barriers.pop("model/scale") == AnchorKey(AnchorKind.FORWARD, "model/")
    assert set(barriers.values()) == {None}
    written = trace(on_meta(steps.batch_norm), name="n")
    for entry in written.state:
        module = entry.name.rpartition(".")[0]
        assert entry.barrier == (AnchorKey(AnchorKind.FORWARD, module) if entry.kind == "buffer" else None)
        assert entry.kind != "buffer" or entry.first_write is not None


def test_a_replaced_state_tensor_counts_as_written_where_its_successor_is_made() -> None:
    model = nn.Linear(3, 3)

    def step(x: torch.Tensor) -> None:
        for parameter in model.parameters():
            parameter.grad = None
        model(x).sum().backward()
        for parameter in model.parameters():
            parameter.data = parameter.data - 0.1 * parameter.grad

    graph = trace(TrainingStep(step=step, models={"m": model}, batch=torch.randn(2, 3)), name="n")
    for entry in graph.state:
        assert entry.first_write is not None
        assert graph.operators[entry.first_write].target == "aten.sub.Tensor"


class DoubleBuffered(nn.Module):
    """Statistics in two buffers: each iteration writes the spare one, then exchanges them."""

    def __init__(self, writes: bool) -> None:
        super().__init__()
        self.writes = writes
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("spare", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.writes:
            self.spare.copy_(x.detach().mean(0))
        self.mean, self.spare = self.spare, self.mean
        return x - self.mean


@pytest.mark.parametrize("writes", [True, False])
def test_buffers_that_are_exchanged_are_written_where_either_is(writes: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 4), DoubleBuffered(writes))
    step = TrainingStep(model, steps.sgd(model.parameters()), loss=lambda m, x: m(x).sum(), batch=torch.randn(2, 4))
    graph = trace(step, name="n")
    for entry in graph.state:
        if entry.kind == "buffer":
            assert entry.barrier == AnchorKey(AnchorKind.FORWARD, "model/1")
            if writes:
                assert entry.first_write is not None
                assert graph.operators[entry.first_write].target == "aten.copy_.default"
            else:
                assert entry.first_write is None


def test_a_tensor_that_only_allocation_replaces_is_written_by_the_last_operator() -> None:
    model = nn.Linear(4, 4)
    model.register_buffer("scratch", torch.zeros(3))

    def step(x: torch.Tensor) -> None:
        model(x)
        model.scratch = torch.empty_like(model.scratch)

    graph = trace(TrainingStep(step=step, models={"m": model}, batch=torch.randn(2, 4)), name="n")
    scratch = next(entry for entry in graph.state if entry.name == "m/scratch")
    assert scratch.first_write == len(graph.operators) - 1 == 0


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize(
    "optimizer", [torch.optim.RMSprop, torch.optim.Rprop, torch.optim.Adadelta, torch.optim.Adamax, torch.optim.NAdam]
)
def test_step_counters_lie_in_host_memory_unless_capturable(optimizer: Any, trained: bool) -> None:
    step = steps.parallel(functools.partial(optimizer, lr=0.01))
    if trained:
        step.run(step.batch)
    graph = trace(step, name="n", target="cuda")
    counters = {entry.name: entry.placement for entry in graph.state if entry.name.endswith(".step")}
    assert len(counters) == len(list(step.models["model"].parameters()))
    assert set(counters.values()) == {"host"}
    others = {e.placement for e in graph.state if not e.name.endswith((".step", ".mu_product"))}
    assert others == {"device"}
    capturable = steps.parallel(functools.partial(optimizer, lr=0.01, capturable=True))
    assert {entry.placement for entry in trace(capturable, name="n", target="cuda").state} == {"device"}


@pytest.mark.parametrize(("target", "expected"), [("cuda", "foreach"), ("cpu", "for-loop")])
def test_optimizers_are_traced_as_the_target_would_run_them(target: Any, expected: str) -> None:
    graph = trace(on_meta(lambda: steps.parallel(torch.optim.Adam)), name="n", target=target)
    assert graph.optimizers == (("optimizer", f"Adam {expected}"),)
    foreach = [o for o in graph.operators if o.target.startswith("aten._foreach")]
    assert bool(foreach) == (expected == "foreach")


def test_a_choice_of_the_users_is_kept() -> None:
    build = functools.partial(steps.parallel, functools.partial(torch.optim.Adam, foreach=False))
    graph = trace(on_meta(build), name="n", target="cuda")
    assert graph.optimizers == (("optimizer", "Adam for-loop"),)
    assert not [o for o in graph.operators if o.target.startswith("aten._foreach")]


def test_capturable_state_lies_on_the_device() -> None:
    build = functools.partial(steps.parallel, functools.partial(torch.optim.Adam, capturable=True))
    graph = trace(on_meta(build), name="n", target="cuda")
    assert {entry.placement for entry in graph.state} == {"device"}
    assert not torch.compiler.is_compiling()


class Choosy(torch.optim.Optimizer):
    """Signed steps of small gradients only: which operators run depends on the data."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
                momentum.lerp_(parameter.grad, 0.1)
                if momentum.abs().max().item() < 10:
                    parameter.sub_(momentum.sign(), alpha=group["lr"])


def test_an_optimizer_that_decides_upon_data_is_one_operator() -> None:
    def make(parameters: Any) -> torch.optim.Optimizer:
        first, *rest = parameters
        return Choosy([{"params": [first]}, {"params": rest}])

    graph = trace(on_meta(lambda: steps.parallel(make)), name="n")
    step = steps.parallel(make)
    step.run(step.batch)
    state = collect_state(step.models, step.optimizers)
    assert [e.name for e in graph.state] == [t.name for t in state.tensors]
    opaque = [i for i, o in enumerate(graph.operators) if o.phase == "optimizer"]
    assert [graph.operators[i].target for i in opaque] == ["Choosy.step"]
    assert {e.first_write for e in graph.state if e.placement == "device"} == set(opaque)
    assert [a.key.kind for a in graph.anchors[-2:]] == [AnchorKind.OPTIMIZER_PRE, AnchorKind.OPTIMIZER_POST]
    assert [a.position for a in graph.anchors[-2:]] == [opaque[0], opaque[0] + 1]


class Counting(torch.optim.Optimizer):
    """Keeps something for all parameters together, made before training."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.state["all"] = {"steps": 0, "sums": [torch.zeros(2)]}  # type: ignore[index]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        common: Any = self.state["all"]  # type: ignore[index]
        common["steps"] += 1
        common["sums"][0] += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(parameter.grad * common["sums"][0][0], alpha=group["lr"] / common["steps"])


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_what_an_optimizer_keeps_for_all_parameters_is_there_and_left_as_it_is(target: Any) -> None:
    step = steps.parallel(Counting)
    (optimizer,) = step.optimizers.values()
    common: Any = optimizer.state["all"]  # type: ignore[index]
    total = common["sums"][0]
    graph = trace(step, name="n", target=target)
    assert optimizer.state["all"] is common  # type: ignore[index]
    assert common == {"steps": 0, "sums": [total]}
    assert common["sums"][0] is total
    assert total.tolist() == [0, 0]
    assert [e.name for e in graph.state] == [t.name for t in collect_state(step.models, step.optimizers).tensors]
    assert trace(on_meta(lambda: steps.parallel(Counting)), name="n", target=target).state == graph.state


class LateState(torch.optim.Optimizer):
    """Looks at the data before it makes its state."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad.nonzero().shape[0] > 3:
                    parameter.sub_(parameter.grad)
                self.state[parameter]["seen"] = torch.ones_like(parameter)


def test_an_optimizer_whose_state_only_data_can_tell_is_refused() -> None:
    with pytest.raises(TraceError, match="cannot trace LateState: its state is not known before it has run"):
        trace(on_meta(lambda: steps.parallel(LateState)), name="n")
