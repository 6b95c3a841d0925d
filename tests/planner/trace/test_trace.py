"""The trace against reality: anchors, operators and flops of steps that really run; what is left alone, and refused."""

from __future__ import annotations

import copy
import dataclasses
import functools
import random
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from checkflow.core.errors import TraceError
from checkflow.core.graph import BOUNDARY, Anchor, AnchorKey, AnchorKind, TrainingGraph
from checkflow.core.training_step import TrainingStep
from checkflow.planner.iteration.optimizers import Target
from checkflow.planner.operators.operators import flops
from checkflow.planner.trace.trace import trace
from tests.support.recording import record_step
from tests.support.steps import training_steps as steps
from tests.support.steps.training_steps import BUILDERS, on_meta


class _Real(TorchDispatchMode):
    """Every operator of a real run that makes new memory or writes to old, without the trace's own rules."""

    def __init__(self) -> None:
        super().__init__()
        self.targets: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        flat = torch.utils._pytree.tree_leaves
        old = {t.untyped_storage().data_ptr() for t in flat((args, kwargs)) if isinstance(t, torch.Tensor)}
        new = [t for t in flat(result) if isinstance(t, torch.Tensor)]
        fresh = any(t.untyped_storage().data_ptr() not in old for t in new)
        if (fresh or func._schema.is_mutable) and not func._schema.name.startswith(("aten::empty", "aten::new_empty")):
            self.targets.append(str(func))
        return result


def real_anchors(step: TrainingStep) -> list[Anchor]:
    """What hooks in eager training see in the second iteration, by hooks and a count of the tests' own."""
    fired: list[Anchor] = []
    real = _Real()

    def note(kind: AnchorKind, name: str) -> None:
        times = sum(anchor.key.kind is kind and anchor.key.name == name for anchor in fired)
        fired.append(Anchor(AnchorKey(kind, name, times), len(real.targets)))

    step.run(step.batch)
    names = {id(optimizer): name for name, optimizer in step.optimizers.items()}
    kinds = AnchorKind
    handles = [
        register_optimizer_step_pre_hook(lambda o, *_: note(kinds.OPTIMIZER_PRE, names[id(o)])),
        register_optimizer_step_post_hook(lambda o, *_: note(kinds.OPTIMIZER_POST, names[id(o)])),
    ]
    for owner, model in step.models.items():
        for path, module in model.named_modules():
            module.register_forward_pre_hook(lambda *_, name=f"{owner}/{path}": note(kinds.FORWARD, name))
        for path, parameter in model.named_parameters():
            if parameter.requires_grad:
                name = f"{owner}/{path}"
                parameter.register_post_accumulate_grad_hook(lambda _, name=name: note(kinds.GRADIENT, name))
    try:
        with real:
            step.run(step.batch)
    finally:
        for handle in handles:
            handle.remove()
    return fired


@pytest.mark.parametrize("name", BUILDERS)
def test_anchors_fire_where_they_do_in_real_training(name: str) -> None:
    graph = trace(on_meta(BUILDERS[name]), name=name, target="cpu")
    assert graph.anchors[0] == Anchor(BOUNDARY, 0)
    expected = real_anchors(BUILDERS[name]())
    assert [anchor.key for anchor in graph.anchors[1:]] == [anchor.key for anchor in expected]
    if not any(entry.placement == "host" for entry in graph.state):  # what runs on host scalars is no operator
        assert list(graph.anchors[1:]) == expected


@pytest.mark.parametrize("name", ["batch_norm", "parallel", "tied", "transformer", "micro_batches"])
def test_operators_are_those_of_real_training(name: str) -> None:
    graph = trace(on_meta(BUILDERS[name]), name=name, target="cpu")
    step = BUILDERS[name]()
    step.run(step.batch)
    with _Real() as real:
        step.run(step.batch)
    assert [operator.target for operator in graph.operators] == real.targets


def test_an_operator_whose_result_is_dropped_stays() -> None:
    """Eager training runs it, so the timeline has it (make_fx would remove it as dead code)."""
    model = nn.Linear(4, 4)

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = model(x)
        out.argmax(dim=1).eq(0).sum()
        return out.sum()

    graph = trace(TrainingStep(model, steps.sgd(model.parameters()), loss=loss, batch=torch.randn(2, 4)), name="n")
    targets = [operator.target for operator in graph.operators]
    assert {"aten.argmax.default", "aten.eq.Scalar"} <= set(targets)


def test_phases_and_modules_of_operators() -> None:
    graph = trace(on_meta(steps.batch_norm), name="n")
    found = {(operator.target, operator.phase, operator.module) for operator in graph.operators}
    assert ("aten.convolution.default", "forward", "model/conv") in found
    assert ("aten.convolution_backward.default", "backward", "model/conv") in found
    assert ("aten.native_batch_norm_backward.default", "backward", "model/bn") in found
    assert ("aten._foreach_add_.List", "optimizer", "") in found
    assert len({operator.name for operator in graph.operators}) == len(graph.operators)
    order = [operator.phase for operator in graph.operators]
    assert order == sorted(order, key=["forward", "backward", "optimizer"].index)


# Costs


@pytest.mark.parametrize("name", BUILDERS)
def test_flops_equal_those_of_the_flop_counter(name: str) -> None:
    graph = trace(on_meta(BUILDERS[name]), name=name, target="cpu")
    step = BUILDERS[name]()
    with FlopCounterMode(display=False) as counter:
        step.run(step.batch)
    assert graph.flops == counter.get_total_flops() > 0


def test_bytes_that_operators_touch() -> None:
    def loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        rows = model(tokens)  # 3 rows of 8 floats out of 1000
        wide = rows[:, None, :].expand(3, 100, 8) + 1  # reads 24 floats, writes 2400
        return wide.sum()

    model = nn.Embedding(1000, 8)
    step = TrainingStep(model, steps.sgd(model.parameters()), loss=loss, batch=torch.tensor([1, 5, 7]))
    graph = trace(step, name="n", target="cpu")
    by_target = {operator.target: operator for operator in graph.operators}
    lookup = by_target["aten.embedding.default"]
    assert (lookup.read_bytes, lookup.written_bytes) == (3 * 8 * 4 + 3 * 8, 3 * 8 * 4)
    add = by_target["aten.add.Tensor"]
    assert (add.read_bytes, add.written_bytes) == (24 * 4, 2400 * 4)
    update = by_target["aten.add_.Tensor"]  # parameter += -lr * gradient: reads both, writes one
    assert (update.read_bytes, update.written_bytes) == (2 * 8000 * 4, 8000 * 4)
    assert update.dtype == "float32"


# The user's objects


def everything(step: TrainingStep) -> Any:
    """All that a trace could disturb, by identity and by value."""
    seen: list[Any] = []
    for model in step.models.values():
        for name, module in model.named_modules():
            tables = {k: dict(v) for k, v in vars(module).items() if isinstance(v, dict)}
            seen.append((name, module.training, {k: {a: id(b) for a, b in t.items()} for k, t in tables.items()}))
            seen.append(sorted((k, id(v)) for k, v in vars(module).items()))
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            hooks = (tensor._backward_hooks, getattr(tensor, "_post_accumulate_grad_hooks", None))
            value = tensor.tolist() if tensor.device.type == "cpu" else None
            seen.append((name, id(tensor), id(tensor.grad), tensor._version, str(hooks), value))
    for optimizer in step.optimizers.values():
        groups = [{k: id(v) if k == "params" else v for k, v in g.items()} for g in optimizer.param_groups]
        seen.append([(id(g["params"]), [id(p) for p in g["params"]]) for g in optimizer.param_groups])
        seen.append((id(optimizer.param_groups), groups, sorted(vars(optimizer)), optimizer.step.__qualname__))
        seen.append({id(p): (id(s), {k: (id(v), str(v)) for k, v in s.items()}) for p, s in optimizer.state.items()})
    seen.append((torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()))
    seen.append((torch.get_default_device(), torch.is_grad_enabled(), torch.compiler.is_compiling()))
    seen.append((torch.is_inference_mode_enabled(), torch._C._is_multithreading_enabled()))
    return seen


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("trained", [False, True])
def test_the_users_objects_are_left_as_they_were(trained: bool, fails: bool) -> None:
    model = steps.BatchNormNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    calls: list[int] = []

    def iteration(batch: Any) -> torch.Tensor:
        calls.append(1)
        model.drop.train(not model.drop.training)
        optimizer.zero_grad()
        loss = steps.cross_entropy(model, *batch)
        loss.backward()
        optimizer.step()
        scheduler.step()
        if fails and len(calls) == 2 + trained:
            raise ValueError("in the second run")
        random.random(), np.random.rand(), torch.rand(1)
        return loss

    batch = (torch.randn(4, 3, 6, 6), torch.randint(5, (4,)))
    step = TrainingStep(step=iteration, models={"model": model}, optimizers={"optimizer": optimizer}, batch=batch)
    if trained:
        step.run(batch)
    next(model.parameters()).register_hook(lambda gradient: gradient)
    before, rates = everything(step), (scheduler.last_epoch, scheduler.get_last_lr())
    if fails:
        with pytest.raises(TraceError, match=r"raised ValueError at .*test_trace\.py:\d+ .*in the second run"):
            trace(step, name="n")
    else:
        trace(step, name="n")
    assert everything(step) == before
    assert (scheduler.last_epoch, scheduler.get_last_lr()) == rates
    step.run(batch)  # and they still work
    assert next(model.parameters()).grad is not None


@pytest.mark.parametrize("place", ["meta", "real", "fake"])
def test_every_kind_of_tensor_gives_the_same_graph(place: str) -> None:
    build = functools.partial(steps.batch_norm, torch.optim.Adam)
    if place == "meta":
        step = on_meta(build)
    elif place == "fake":
        with FakeTensorMode():
            step = build()
    else:
        step = build()
    assert trace(step, name="n") == trace(build(), name="n")


def test_weights_that_a_module_keeps_in_a_list_are_found() -> None:
    """nn.LSTM runs on a list of its parameters."""

    def build() -> TrainingStep:
        model = nn.LSTM(4, 5)
        loss = lambda model, x: model(x)[0].sum()  # noqa: E731
        return TrainingStep(model, steps.sgd(model.parameters()), loss=loss, batch=torch.randn(3, 2, 4))

    step = build()
    weights = step.models["model"]._flat_weights
    kept = [id(w) for w in weights]
    graph = trace(step, name="n")
    assert all(entry.first_write is not None for entry in graph.state)
    assert step.models["model"]._flat_weights is weights
    assert [id(w) for w in weights] == kept


def test_tensors_that_share_memory_share_a_storage() -> None:
    flat = torch.zeros(20)
    model = nn.Linear(3, 4)
    model.weight, model.bias = nn.Parameter(flat[:12].view(4, 3)), nn.Parameter(flat[12:16])
    graph = trace(
        TrainingStep(model, steps.sgd(model.parameters()), loss=lambda m, x: m(x).sum(), batch=torch.randn(2, 3)),
        name="n",
    )
    weight, bias = graph.state
    assert weight.storage == bias.storage is not None
    assert graph.storages[weight.storage].size_bytes == 80
    assert graph.state_bytes == 64


def test_a_step_may_name_its_device_and_open_autocast() -> None:
    model = nn.Linear(4, 4)

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            out: torch.Tensor = model(x.to("cuda", non_blocking=True)) + torch.ones(4, device="cuda")
            return out.cuda().float().sum()

    step = TrainingStep(model, steps.sgd(model.parameters()), loss=loss, batch=torch.randn(2, 4))
    graph = trace(step, name="n")
    assert graph.autocast == "bfloat16"
    assert "bfloat16" in {o.dtype for o in graph.operators if o.target == "aten.addmm.default"}
    assert torch.autocast.__init__.__name__ == "__init__"
    assert trace(steps.parallel(), name="n").autocast == ""


def test_compiled_and_checkpointed_models_can_be_traced() -> None:
    from torch.utils.checkpoint import checkpoint

    plain = steps.parallel()
    compiled = steps.parallel()
    compiled.models["model"] = torch.compile(compiled.models["model"])  # type: ignore[assignment]
    found, expected = trace(compiled, name="n"), trace(plain, name="n")
    assert dataclasses.replace(found, anchors=expected.anchors, compiled=()) == expected
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    step = TrainingStep(
        model,
        steps.sgd(model.parameters()),
        loss=lambda m, x: checkpoint(m, x, use_reentrant=False).sum(),
        batch=torch.randn(2, 4),
    )
    graph = trace(step, name="n")
    forward = [a.key for a in graph.anchors if a.key.kind is AnchorKind.FORWARD]
    assert forward == [AnchorKey(AnchorKind.FORWARD, f"model/{path}") for path in ("", "0", "1")]
    recomputed = [o.phase for o in graph.operators if o.target == "aten.addmm.default"]
    assert recomputed == ["forward", "backward"]


def test_an_optimizer_that_steps_in_backward() -> None:
    model = nn.Linear(4, 4)
    optimizers = {parameter: torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()}

    def update(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    named = {f"update{i}": optimizer for i, optimizer in enumerate(optimizers.values())}

    def step(x: torch.Tensor) -> None:
        model(x).sum().backward()

    graph = trace(TrainingStep(step=step, models={"m": model}, optimizers=named, batch=torch.randn(2, 4)), name="n")
    assert all(entry.first_write is not None for entry in graph.state)
    assert sum(a.key.kind is AnchorKind.OPTIMIZER_POST for a in graph.anchors) == 2


@pytest.mark.slow
def test_the_same_step_gives_the_same_graph_twice() -> None:
    step = steps.transformer(torch.optim.Adam)
    first = trace(step, name="n")
    assert trace(step, name="n") == first
    assert trace(copy.deepcopy(step), name="n") == first


# Errors


def failing(loss: Callable[..., Any]) -> TrainingStep:
    model = nn.Linear(4, 4)
    return TrainingStep(model, steps.sgd(model.parameters()), loss=loss, batch=torch.randn(2, 4))


def branch_on_data(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(x).sum()
    return loss * 2 if loss.item() > 3 else loss  # the line


def size_of_data(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    kept: torch.Tensor = model(x[x[:, 0] > 0])  # the line
    return kept.sum()


def wrong_shape(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = model(x[:, :3])  # the line
    return out.sum()


def no_loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return {}["nothing"]  # the line


@torch.library.custom_op("checkflow_tests::opaque", mutates_args=())
def opaque(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


bare = torch.library.Library("checkflow_tests", "FRAGMENT")
bare.define("bare(Tensor x) -> Tensor")
bare.impl("bare", lambda x: x.clone(), "CPU")


def no_fake_kernel(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = model(opaque(x))  # the line
    return out.sum()


def no_kernel_but_the_cpus(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = model(torch.ops.checkflow_tests.bare(x))  # the line
    return out.sum()


@pytest.mark.parametrize(
    ("loss", "operator"),
    [
        (branch_on_data, "aten._local_scalar_dense.default needs the values"),
        (size_of_data, "needs the values"),
        (wrong_shape, "aten.addmm.default raised RuntimeError"),
        (no_loss, "the training step raised KeyError"),
        (no_fake_kernel, "register_fake"),
        (no_kernel_but_the_cpus, "checkflow_tests.bare.default has no fake implementation"),
    ],
)
def test_an_error_names_operator_and_source_line(
    loss: Callable[..., Any], operator: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(TraceError) as caught:
        trace(failing(loss), name="mine")
    message = str(caught.value)
    assert message.startswith("cannot trace mine: ")
    assert operator in message
    assert __file__ in message
    assert "# the line" in message
    assert "\n" not in message
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("rows", [2**61, 2**62, 2**62 + 1])
def test_a_batch_beyond_64_bits_is_refused(rows: int) -> None:
    """Torch's count of its bytes is negative, zero, and plausible."""
    step = TrainingStep(
        model := nn.Linear(1, 1),
        torch.optim.SGD(model.parameters(), lr=0.1),
        loss=lambda model, x: model(x).sum(),
        batch=torch.randn(rows, 1, device="meta"),
    )
    with pytest.raises(TraceError, match=rf"a tensor of shape \[{rows}, 1\] has more bytes than memory has addresses"):
        trace(step, name="n")


def test_modules_are_nested_as_deep_as_they_train() -> None:
    model: nn.Module = nn.Linear(4, 4)
    for _ in range(200):
        model = nn.Sequential(model)
    step = TrainingStep(
        model, torch.optim.SGD(model.parameters()), loss=lambda model, x: model(x).sum(), batch=torch.ones(2, 4)
    )
    step.run(step.batch)
    limit = sys.getrecursionlimit()
    assert len(trace(step, name="n").anchors) == 1 + 201 + 2 + 2
    assert len(record_step(step, name="n").graph.anchors) == 1 + 201 + 2 + 2
    assert sys.getrecursionlimit() == limit


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_experts_in_groups_of_any_type(dtype: torch.dtype) -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, 16, 32, dtype=dtype))
            self.before = nn.Parameter(torch.ones(16, dtype=dtype))

        def forward(self, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
            return torch._grouped_mm(rows * self.before, self.weight, offs=ends)

    def shown(graph: TrainingGraph) -> list[tuple[str, str, int, int]]:
        return [(o.target, o.phase, o.written_bytes, o.flops) for o in graph.operators]

    model = Experts()
    batch = torch.ones(8, 16, dtype=dtype), torch.tensor([2, 4, 6, 8], dtype=torch.int32)
    step = TrainingStep(
        model,
        torch.optim.SGD(model.parameters()),
        loss=lambda model, *groups: model(*groups).square().sum(),
        batch=batch,
    )
    made = shown(trace(step, name="n", target="cpu"))
    assert made == shown(record_step(step, name="n").graph)
    grouped = [operator[1:] for operator in made if operator[0] == "aten._grouped_mm.default"]
    flops = 2 * 8 * 16 * 32  # each row meets the matrix of its group
    assert grouped[0] == ("forward", 8 * 32 * dtype.itemsize, flops)
    assert sorted(grouped[1:]) == [
        ("backward", 8 * 16 * dtype.itemsize, flops),
        ("backward", 4 * 16 * 32 * dtype.itemsize, flops),
    ]


def test_matrices_in_pairs_and_columns_in_groups() -> None:
    ends = torch.tensor([3, 4], dtype=torch.int32)
    for left, right, products in (((2, 8, 16), (2, 16, 32), 2 * 8 * 16 * 32), ((2, 8, 16), (16, 4), 8 * 16 * 4)):
        a, b = torch.ones(left), torch.ones(right)
        assert flops(torch.ops.aten._grouped_mm.default, (a, b, ends), {}, None) == 2 * products


def test_a_number_that_is_only_looked_at_does_not_end_the_trace() -> None:
    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = F.mse_loss(model(x), x)
        totals.append(out.item())
        return out

    totals: list[Any] = []
    assert len(trace(failing(loss), name="n").operators) > 0
    assert totals == []  # the user's own, as it was


def test_state_that_changes_from_iteration_to_iteration_is_refused() -> None:
    model = nn.Linear(2, 2)

    def step(x: torch.Tensor) -> None:
        model.register_buffer(f"buffer{len(model._buffers)}", torch.zeros(3))

    with pytest.raises(TraceError, match=r"changes the set of state \(m/buffer1\)"):
        trace(TrainingStep(step=step, models={"m": model}, batch=torch.randn(1, 2)), name="n")
    assert not model._buffers


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("target", "norms"), [("cuda", "float32"), ("cpu", "lower")])
def test_autocast_follows_the_rules_of_the_target(dtype: torch.dtype, target: Target, norms: str) -> None:
    """CUDA computes layer norms and softmaxes in float32; products are in lower precision wherever they run."""
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.Softmax(-1), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def iteration(batch: tuple[torch.Tensor, torch.Tensor]) -> None:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=dtype):
            loss = F.cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()

    batch = (torch.randn(4, 8), torch.randint(3, (4,)))
    graph = trace(
        TrainingStep(step=iteration, models={"m": model}, optimizers={"o": optimizer}, batch=batch),
        name="n",
        target=target,
    )
    lower = str(dtype).removeprefix("torch.")
    expected = lower if norms == "lower" else norms
    found = {op.target: op for op in graph.operators}
    for name in ("aten.native_layer_norm.default", "aten.native_layer_norm_backward.default", "aten._softmax.default"):
        assert found[name].dtype == expected, name
    assert {op.dtype for op in graph.operators if op.flops} == {lower}
    # A GPU's softmax reads float16 as it is; bfloat16 is copied first.
    element = 2 if expected == lower or dtype == torch.float16 else 4
    assert found["aten._softmax.default"].read_bytes == 4 * 8 * element
    assert not torch._C._dispatch_has_kernel_for_dispatch_key("aten::layer_norm", "AutocastCPU")  # as it was
