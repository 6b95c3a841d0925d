"""State of every kind on its whole way: traced, planned, run under audit, committed, read by anyone, and resumed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn
from torch.utils import _pytree as pytree

from checkflow.api import Checkpointer
from checkflow.core.graph import TrainingGraph
from checkflow.core.plan import Plan
from checkflow.core.state import collect_state
from checkflow.core.training_step import TrainingStep
from checkflow.planner.trace.trace import trace
from checkflow.runtime.data.loader import DataLoader
from checkflow.runtime.format.layout import STORED_TYPES
from checkflow.runtime.store.discovery import find
from tests.support.oracle import clone_state, same_bits
from tests.support.planned_jobs import assert_every_checkpoint_is_true, plan_graph
from tests.support.recording import record_step
from tests.support.steps.training_steps import sgd

Build = Callable[[], TrainingStep]
momentum = functools.partial(torch.optim.SGD, lr=0.01, momentum=0.9)
adam = functools.partial(torch.optim.Adam, lr=0.01)


def training(
    model: nn.Module, optimizer: Callable[[Any], torch.optim.Optimizer] = momentum, *shape: int
) -> TrainingStep:
    """A step of a model that takes 4,3 (or ``shape``) to something whose squares are the loss."""

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = model(x).abs().square().mean()
        return out

    return TrainingStep(model, optimizer(model.parameters()), loss=loss, batch=torch.randn(4, 3))


class Bytes(nn.Module):
    """A buffer of some dtype whose bytes change in each forward, one that nothing writes, and a linear layer."""

    def __init__(self, dtype: torch.dtype, count: int = 12) -> None:
        super().__init__()
        self.head = nn.Linear(3, 2)
        size = count * dtype.itemsize
        # Zeros and ones alone are a valid boolean.
        self.register_buffer("written", torch.arange(size, dtype=torch.uint8).remainder(2).view(dtype))
        self.register_buffer("still", torch.ones(size, dtype=torch.uint8).view(dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.written.view(torch.uint8).bitwise_xor_(1)
        out: torch.Tensor = self.head(x)
        return out


class Complex(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 2, dtype=dtype))
        self.register_buffer("phase", torch.randn(2, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.phase.mul_(0.9 + 0.1j)
        return (x.to(self.weight.dtype) @ self.weight) * self.phase


class Quantised(nn.Module):
    """Weights kept in eight bits beside the full ones, and the scale that they were made with."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.full = nn.Parameter(torch.randn(3, 2))
        self.weight = nn.Parameter(torch.zeros(3, 2).to(dtype), requires_grad=False)
        self.register_buffer("scale", torch.tensor(1.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.scale.copy_(self.full.abs().amax() / 7)
            self.weight.copy_((self.full / self.scale).to(self.weight.dtype))
        return x @ self.full + x @ (self.weight.to(x.dtype) * self.scale)


class MasterWeights(torch.optim.Optimizer):
    """SGD with momentum for parameters of few bits, whose state is of 32."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["master"] = parameter.detach().float().clone()
                    state["momentum"] = torch.zeros_like(parameter, dtype=torch.float32)
                state["momentum"].mul_(0.9).add_(parameter.grad.float())
                state["master"].sub_(group["lr"] * state["momentum"])
                parameter.copy_(state["master"])


class Sizes(nn.Module):
    """Nothing, one, and around every size at which something is cut: a page, a small copy, a chunk."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.scale = nn.Linear(3, 2), nn.Parameter(torch.tensor(1.5))
        self.none, self.one = nn.Parameter(torch.empty(0)), nn.Parameter(torch.ones(1))
        self.none_wide = nn.Parameter(torch.empty(3, 0))
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("rows", torch.empty(0, 5))
        self.register_buffer("missing", None)
        for size in (1, 4095, 4096, 4097, 32768, 32769, 65535, 65536, 65537):
            self.register_buffer(f"of{size}", torch.zeros(size, dtype=torch.uint8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for buffer in self.buffers():
            buffer.add_(1)
        out: torch.Tensor = self.head(x) * self.scale * self.one + self.none.sum() + self.none_wide.sum()
        return out


class Flat(nn.Module):
    """All parameters are views of one buffer, as in flattening wrappers; a buffer is the same memory as one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(3, 5), nn.Linear(5, 2)
        flat, begin = torch.randn(sum(p.numel() for p in self.parameters())), 0
        for parameter in self.parameters():
            parameter.data = flat[begin : begin + parameter.numel()].view_as(parameter)
            begin += parameter.numel()
        self.register_buffer("same", self.head.bias.data)
        self.register_buffer("flat", flat, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(torch.tanh(self.body(x)))
        return out


class Orders(nn.Module):
    """Dense tensors in other orders than row-major, and a buffer that is replaced in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.turned = nn.Parameter(torch.randn(2, 3).t())
        self.permuted = nn.Parameter(torch.randn(2, 3, 4).permute(2, 0, 1))
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.register_buffer("images", torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last))
        self.register_buffer("mean", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.images.mul_(0.9)
        y = x @ self.turned + self.permuted.sum() + self.conv(self.images).sum()
        self.mean = self.mean * 0.9 + y.detach().mean(0)
        return y


class Lazy(nn.Module):
    """Views that conjugate and negate: their memory is not their value."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 2, dtype=torch.complex64).conj())
        self.register_buffer("phase", torch.randn(2, dtype=torch.complex128).conj())
        self.register_buffer("turned", torch.randn(2, 3, dtype=torch.complex64).conj().t())
        self.register_buffer("scalar", torch.tensor(1 - 2j).conj())
        self.register_buffer("negative", torch._neg_view(torch.randn(2, dtype=torch.bfloat16)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.phase.mul_(1j)
            self.turned.mul_(0.5j)
            self.scalar.mul_(1j)
            self.negative.mul_(0.5)
        return (x.to(self.weight.dtype) @ self.weight) * self.phase * self.scalar + self.negative


class Scaled(torch.Tensor):
    """Eight bits and a scale that stand for 32 bits, as quantising libraries have them."""

    @staticmethod
    def __new__(cls, data: torch.Tensor, scale: torch.Tensor) -> Scaled:
        made = torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=scale.dtype, device=data.device)
        made.data8, made.scale = data, scale
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["data8", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], context: None, size: Any, stride: Any) -> Scaled:
        return Scaled(inner["data8"], inner["scale"])

    def full(self) -> torch.Tensor:
        return self.data8.float() * self.scale

    def write(self, values: torch.Tensor) -> None:
        self.scale.copy_(values.abs().amax() / 127 + 1e-9)
        self.data8.copy_((values / self.scale).round())

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return Scaled(args[0].data8, args[0].scale)
        return func(*pytree.tree_map_only(Scaled, Scaled.full, args), **(kwargs or {}))


def scaled(*shape: int) -> Scaled:
    return Scaled(torch.randint(-9, 9, shape, dtype=torch.int8), torch.tensor(0.5))


class Subclasses(nn.Module):
    """A frozen weight and a buffer of a subclass that consists of others; a buffer that is plain but for its type."""

    class Named(torch.Tensor):
        pass

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(2, 2)
        self.weight = nn.Parameter(scaled(3, 2), requires_grad=False)
        self.register_buffer("shift", scaled(2))
        self.register_buffer("named", torch.randn(2).as_subclass(self.Named))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.weight.data8.add_(1)
            self.shift.write(self.shift.full() * 0.9)
            self.named.mul_(0.9)
        out: torch.Tensor = self.head(x @ self.weight + self.shift) + self.named
        return out


class EightBitMomentum(torch.optim.Optimizer):
    """State that only the optimizer knows how to make: a resume cannot make it from a shape and a dtype."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    if not state:
                        shape = torch.zeros_like(parameter, dtype=torch.int8)
                        state["momentum"] = Scaled(shape, torch.ones((), device=parameter.device))
                    moved = state["momentum"].full() * 0.9 + parameter.grad
                    state["momentum"].write(moved)
                    parameter.sub_(group["lr"] * moved)


class TrainedSubclass(nn.Module):
    """A weight of the subclass that has gradients itself, in 32 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(scaled(3, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


class Rounding(torch.optim.Optimizer):
    """SGD for parameters of the subclass."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.write(parameter.full() - group["lr"] * parameter.grad)


class Jagged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 2)
        rows = [torch.randn(2, 3), torch.randn(4, 3)]
        self.register_buffer("rows", torch.nested.nested_tensor(rows, layout=torch.jagged))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.rows.values().mul_(0.9)
        return self.head(x) + self.rows.values().sum()


class Graph(nn.Module):
    """A sparse matrix as a buffer, whose values are written."""

    def __init__(self, layout: torch.layout) -> None:
        super().__init__()
        self.head = nn.Linear(3, 2)
        self.register_buffer("edges", torch.eye(4).roll(1, 0).to_sparse(layout=layout))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            values = self.edges._values() if self.edges.layout is torch.sparse_coo else self.edges.values()
            values.mul_(1.01)
        out: torch.Tensor = self.edges @ self.head(x)
        return out


class Counting(nn.Module):
    """Buffers alone, as a clustering or a table of averages has them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("sums", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.sums.add_(x.mean(0))
        return self.sums


def without_optimizer(model: nn.Module) -> TrainingStep:
    return TrainingStep(step=lambda x: model(x), models={"model": model}, batch=torch.randn(4, 3))


def empty_groups() -> TrainingStep:
    def make(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([{"params": []}, {"params": parameters}, {"params": []}], lr=0.1, momentum=0.9)

    return training(nn.Linear(3, 2), make)


def ties_between_models() -> TrainingStep:
    one, other = nn.Linear(3, 3), nn.Linear(3, 3)
    other.weight = one.weight
    other.register_buffer("copy", one.bias.data)
    update_one, update_other = sgd(one.parameters()), sgd([other.bias])

    def step(x: torch.Tensor) -> None:
        update_one.zero_grad()
        update_other.zero_grad()
        other(one(x)).square().mean().backward()
        update_one.step()
        update_other.step()

    optimizers = {"update_one": update_one, "update_other": update_other}
    return TrainingStep(step=step, models={"one": one, "other": other}, optimizers=optimizers, batch=torch.randn(4, 3))


# Of these a layer can be trained; the others of the table are bytes to it.
TRAINED = ("float64", "float16", "bfloat16")
KINDS: dict[str, Build] = {
    **{dtype: functools.partial(lambda d: training(Bytes(getattr(torch, d))), dtype) for dtype in STORED_TYPES},
    **{f"trained {d}": functools.partial(lambda d: half(getattr(torch, d)), d) for d in TRAINED},
    "complex64, Adam": lambda: training(Complex(torch.complex64), adam),
    "complex128, SGD": lambda: training(Complex(torch.complex128)),
    "int8 weights": lambda: training(Quantised(torch.int8)),
    "float8_e4m3fn weights": lambda: training(Quantised(torch.float8_e4m3fn)),
    "float8_e5m2 weights": lambda: training(Quantised(torch.float8_e5m2), adam),
    "sizes": lambda: training(Sizes(), adam),
    "views of one buffer": lambda: training(Flat(), adam),
    "orders": lambda: training(Orders()),
    "lazy views": lambda: training(Lazy()),
    "subclasses": lambda: training(Subclasses(), adam),
    "trained subclass": lambda: training(TrainedSubclass(), Rounding),
    "8-bit momentum": lambda: training(nn.Linear(3, 2), EightBitMomentum),
    "jagged": lambda: training(Jagged()),
    "empty groups": empty_groups,
    "ties between models": ties_between_models,
    "buffers alone": lambda: without_optimizer(Counting()),
    "no state": lambda: without_optimizer(nn.Tanh()),
    "no bytes": lambda: training(Hollow()),
}


class Hollow(nn.Module):
    """State without a byte."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3, 0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.weight).sum(1) + x.sum(1)


def half(dtype: torch.dtype) -> TrainingStep:
    step = training(nn.Linear(3, 2).to(dtype), MasterWeights)
    step.batch = step.batch.to(dtype)
    return step


def make(name: str, seed: int = 0) -> TrainingStep:
    torch.manual_seed(seed)
    return (KINDS | RECORDED)[name]()


def every_iteration(graph: TrainingGraph) -> Plan:
    """A plan of a checkpoint at each boundary, whatever it costs: these jobs are too small for anything to be free."""
    plan = plan_graph(graph, link_use=0.2, chunk_bytes=65536, overhead=1e3, max_interval=1)
    assert plan.interval == 1
    return plan


def assert_resumes_bit_for_bit(name: str, plan: Plan, directory: Path) -> None:
    """Three iterations, then a new job from the files for three more: as six of a job that nobody watched."""
    truth = make(name)
    for _ in range(6):
        truth.run(truth.batch)
    expected = clone_state(truth.models, truth.optimizers)
    for seed, upto in ((0, 3), (1, 6)):
        step = make(name, seed)
        step.batch = truth.batch
        with Checkpointer(
            step.models, step.optimizers, directory=directory, plan=plan, every=1, audit=1, on_error="raise"
        ) as checkpointer:
            assert checkpointer.resumed_from == (3 if seed else None)
            for _ in checkpointer.steps(upto):
                step.run(step.batch)
    found = clone_state(step.models, step.optimizers)
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert same_bits(found[key], tensor), key


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_state_goes_the_whole_way(name: str, tmp_path: Path) -> None:
    graph = trace(make(name), name=name, target="cpu")
    plan = every_iteration(graph)
    assert_every_checkpoint_is_true(make(name), plan, tmp_path / "run", iterations=4)
    assert_resumes_bit_for_bit(name, plan, tmp_path / "resume")
    if name != "lazy views":  # torch's foreach kernels take no conjugated tensors, in real training neither
        state = [(entry.name, entry.shape, entry.dtype) for entry in graph.state]
        assert [(e.name, e.shape, e.dtype) for e in trace(make(name), name=name, target="cuda").state] == state


# What torch has no fakes for is recorded.
RECORDED: dict[str, Build] = {
    "COO": lambda: training(Graph(torch.sparse_coo)),
    "CSR": lambda: training(Graph(torch.sparse_csr)),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR:UserWarning")
@pytest.mark.parametrize("name", RECORDED)
def test_sparse_state_is_recorded_and_saved_in_its_parts(name: str, tmp_path: Path) -> None:
    plan = every_iteration(record_step(make(name), name=name).graph)
    assert_every_checkpoint_is_true(make(name), plan, tmp_path / "run", iterations=4)
    assert_resumes_bit_for_bit(name, plan, tmp_path / "resume")
    parts = {"COO": {"edges.indices"}, "CSR": {"edges.crow_indices", "edges.col_indices"}}[name] | {"edges.values"}
    newest = find(tmp_path / "run")[0]
    assert parts <= safetensors.torch.load_file(newest / "model-00000-of-00001.safetensors").keys()


@pytest.mark.parametrize(
    "name", ["subclasses", "trained subclass", "8-bit momentum", "jagged", "complex64, Adam", "sizes"]
)
def test_a_record_agrees_with_the_trace(name: str) -> None:
    traced, recorded = trace(make(name), name=name, target="cpu"), record_step(make(name), name=name).graph
    assert len(recorded.operators) == len(traced.operators)
    assert recorded.live_bytes(eager=True) == traced.live_bytes(eager=True)
    assert [(e.name, e.shape, e.first_write) for e in recorded.state] == [
        (e.name, e.shape, e.first_write) for e in traced.state
    ]


def test_a_subclass_is_the_state_tensors_inside_of_it() -> None:
    step = make("subclasses")
    names = [item.name for item in collect_state(step.models, step.optimizers).tensors]
    assert names[:5] == [
        "model/weight.data8",
        "model/weight.scale",
        "model/shift.data8",
        "model/shift.scale",
        "model/named",
    ]
    graph = trace(step, name="n", target="cpu")
    assert graph.parameters == 6 + 4 + 2  # 3,2 and 2,2 and 2: each once, whatever it consists of


def test_a_part_that_is_replaced_is_seen(tmp_path: Path) -> None:
    """The subclass stays the same object; the tensor that holds its values does not."""
    plan = every_iteration(trace(make("subclasses"), name="n", target="cpu"))
    step = make("subclasses")

    def iterate(number: int) -> None:
        step.run(step.batch)
        if number == 3:
            shift = step.models["model"].shift
            shift.data8 = shift.data8.clone() + 1

    assert_every_checkpoint_is_true(step, plan, tmp_path, iterations=6, iterate=iterate)


def test_lazy_views_are_values_in_the_file(tmp_path: Path) -> None:
    """Anyone who reads the file sees what the job saw, not what its memory held."""
    plan = every_iteration(trace(make("lazy views"), name="n", target="cpu"))
    step = make("lazy views")
    with Checkpointer(step.models, step.optimizers, directory=tmp_path, plan=plan, every=1) as checkpointer:
        for _ in checkpointer.steps(1):
            step.run(step.batch)
    weight = step.models["model"].weight.detach()
    assert weight.is_conj()
    saved = safetensors.torch.load_file(find(tmp_path)[0] / "model-00000-of-00001.safetensors")
    assert saved["weight"].tolist() == weight.tolist()
    assert saved["negative"].tolist() == step.models["model"].negative.tolist()


def test_without_optimizers_a_batch_is_an_iteration(tmp_path: Path) -> None:
    plan = every_iteration(trace(make("buffers alone"), name="n", target="cpu"))
    for upto in (1, 3):  # epochs
        model = Counting()
        loader = DataLoader([torch.full((3,), float(i)) for i in range(6)], 2)
        with Checkpointer(model, {}, loader, directory=tmp_path, plan=plan, every=1, keep_latest=99) as checkpointer:
            for _ in checkpointer.epochs(upto):
                for x in checkpointer.loader:
                    model(x)
    assert checkpointer.iteration == 9
    assert checkpointer.resumed_from == 3
    assert model.sums.tolist() == [3 * (0.5 + 2.5 + 4.5)] * 3
    assert len(find(tmp_path)) == 9


def test_what_is_not_persistent_is_not_saved(tmp_path: Path) -> None:
    """As in torch's own state_dict: a job that goes on makes such buffers anew."""
    model = nn.Linear(3, 2)
    model.register_buffer("cache", torch.zeros(2), persistent=False)
    step = training(model)
    plan = every_iteration(trace(step, name="n", target="cpu"))
    assert "model/cache" not in {spec.name for spec in plan.fingerprint.state}
    with Checkpointer(step.models, step.optimizers, directory=tmp_path, plan=plan, every=1) as checkpointer:
        for _ in checkpointer.steps(1):
            step.run(step.batch)
            model.cache += 1
    fresh = training(nn.Linear(3, 2))
    with Checkpointer(fresh.models, fresh.optimizers, directory=tmp_path, plan=plan) as resumed:
        assert resumed.resumed_from == 1
    assert same_bits(fresh.models["model"].weight.detach(), model.weight.detach())


def pair(names: dict[str, str]) -> TrainingStep:
    """Two models and their optimizers, which are called ``names``."""
    torch.manual_seed(0)
    models = {"G": nn.Linear(3, 4), "D": nn.Linear(4, 2)}
    optimizers = {names[name]: adam(model.parameters()) for name, model in models.items()}

    def step(x: torch.Tensor) -> None:
        models["D"](models["G"](x)).square().sum().backward()
        for optimizer in optimizers.values():
            optimizer.step()
            optimizer.zero_grad()

    return TrainingStep(step=step, models=models, optimizers=optimizers, batch=torch.ones(5, 3))


@pytest.mark.parametrize("names", [("G", "D"), ("G", "G.optimizer"), ("D", "other")])
def test_an_optimizer_may_be_named_as_a_model(names: tuple[str, str], tmp_path: Path) -> None:
    """As GANs do. Planned, and gone on from."""
    named = dict(zip("GD", names, strict=True))
    plan = every_iteration(trace(pair(named), name="n", target="cpu"))
    straight, first, second = (pair(named) for _ in range(3))
    for _ in range(5):
        straight.run(straight.batch)
    for job, upto in ((first, 2), (second, 5)):
        given = {names[at]: optimizer for at, optimizer in enumerate(job.optimizers.values())}
        with Checkpointer(job.models, given, directory=tmp_path, plan=plan, every=1) as checkpointer:
            for _ in checkpointer.steps(upto):
                job.run(job.batch)
    assert checkpointer.resumed_from == 2
    truth = clone_state(straight.models, straight.optimizers)
    for name, value in clone_state(second.models, second.optimizers).items():
        assert same_bits(value, truth[name]), name


def test_a_model_without_an_optimizer(tmp_path: Path) -> None:
    with Checkpointer(
        Counting(), directory=tmp_path, plan=every_iteration(trace(make("buffers alone"), name="n"))
    ) as one:
        assert one.resumed_from is None
