"""What a trace cannot do, or not alone: each error says what to change, and a record does it."""

from __future__ import annotations

import concurrent.futures
import functools
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import nn

import checkflow
from checkflow.api import Checkpointer
from checkflow.core.errors import TraceError, UnsupportedError
from checkflow.core.graph import AnchorKind
from checkflow.core.training_step import TrainingStep
from checkflow.planner.live.planner import LivePlanner
from checkflow.planner.trace.trace import trace
from checkflow.runtime.store.discovery import find
from tests.support.own_plans import Never
from tests.support.planned_jobs import assert_every_checkpoint_is_true, plan_by_trace, plan_graph
from tests.support.recording import record_step
from tests.support.steps.autograd_steps import Statistics, triple
from tests.support.steps.layer_steps import adam, mean_square, momentum, perceptron, step_of
from tests.support.writes import WatchedWrites


def skipping() -> TrainingStep:
    """Leaves an iteration out whose loss is no number."""
    model = perceptron()
    optimizer = adam(model.parameters())

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        loss = mean_square(model, x)
        if torch.isnan(loss):  # the line
            return
        loss.backward()
        optimizer.step()

    return TrainingStep(model, optimizer, step=step, batch=torch.randn(4, 6))


def masked() -> TrainingStep:
    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x)[x[:, 0] > -9].square().mean()  # type: ignore[no-any-return]  # the line

    return step_of(perceptron(), torch.randn(4, 6), loss=loss)


def without_fake_kernel() -> TrainingStep:
    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return triple(model(x)).square().mean()  # type: ignore[no-any-return]  # the line

    return step_of(perceptron(), torch.randn(4, 6), loss=loss)


def jagged_of(x: torch.Tensor, rows: int = 1) -> torch.Tensor:
    return torch.nested.as_nested_tensor([x[:rows], x[rows:]], layout=torch.jagged)


def jagged() -> TrainingStep:
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4))
    optimizer = momentum(model.parameters())

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(jagged_of(x)).values().square().mean().backward()  # the line
        optimizer.step()

    return TrainingStep(model, optimizer, step=step, batch=torch.randn(4, 6))


def through_numpy() -> TrainingStep:
    """Writes a buffer after the step, where no operator and no version counter tells."""
    model = perceptron()
    model.register_buffer("count", torch.zeros(3))
    optimizer = momentum(model.parameters())

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        mean_square(model, x).backward()
        optimizer.step()
        model.count.numpy()[:] += 1  # the line

    return TrainingStep(model, optimizer, step=step, batch=torch.randn(4, 6))


class FakeQuantised(nn.Module):
    """Quantisation in training: an observer follows the range of its inputs in forward."""

    def __init__(self) -> None:
        super().__init__()
        from torch.ao.quantization import FakeQuantize, MovingAverageMinMaxObserver

        self.quantise = FakeQuantize(observer=MovingAverageMinMaxObserver)
        self.layers = perceptron()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(self.quantise(x))  # the line
        return out


NEED_A_RECORD: Mapping[str, tuple[Callable[[], TrainingStep], str]] = {
    "skipped": (skipping, "_local_scalar_dense.default needs the values"),
    "masked": (masked, "needs the values"),
    "no fake kernel": (without_fake_kernel, "checkflow_steps.triple.default has no fake implementation"),
    "numpy": (through_numpy, "read-only"),
    "jagged": (jagged, "makes sizes that depend on data"),
    "quantised": (lambda: step_of(FakeQuantised(), torch.randn(4, 6)), "has no fake implementation"),
}


@pytest.mark.parametrize("name", NEED_A_RECORD)
def test_an_error_offers_the_record(name: str) -> None:
    build, reason = NEED_A_RECORD[name]
    with pytest.raises(TraceError) as caught:
        trace(build(), name="job")
    message = str(caught.value)
    assert message.startswith("cannot trace job: ")
    assert reason in message
    assert "\n" not in message
    assert "Checkpointer(plan=None)" in message
    assert f"{__file__}:" in message
    assert "the line" in message


@pytest.mark.parametrize("name", NEED_A_RECORD)
def test_and_a_record_keeps_checkpoints_true(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    step = NEED_A_RECORD[name][0]()
    assert_every_checkpoint_is_true(step, plan_graph(record_step(step, name=name).graph), tmp_path, iterations=5)


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_a_live_job_on_nested_tensors_is_recorded(
    layout: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each batch has a shape of its own, which no other tensor has."""
    recorded = []

    def start(_: LivePlanner, one: Any, **asked: Any) -> Never:
        recorded.append(one.graph.batch)
        return Never()

    monkeypatch.setattr(LivePlanner, "start", start)
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4))
    optimizer = momentum(model.parameters())
    with checkflow.Checkpointer(model, optimizer, directory=tmp_path, every=1) as checkpointer:
        for turn in checkpointer.steps(6):
            x = torch.randn(4, 6)
            batch = torch.nested.as_nested_tensor([x[: 1 + turn % 3], x[1 + turn % 3 :]], layout=layout)
            optimizer.zero_grad()
            model(batch).values().square().mean().backward()
            optimizer.step()
    assert recorded == [(((4, 6), "float32"), ((3,), "int64")) if layout is torch.jagged else (((24,), "float32"),)]
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_jagged_batch_is_traced() -> None:
    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch).values().square().mean()  # type: ignore[no-any-return]

    step = step_of(nn.Linear(6, 4), jagged_of(torch.randn(4, 6)), loss=loss)
    graph = trace(step, name="job", target="cpu")
    assert graph.batch == record_step(step, name="job").graph.batch == (((4, 6), "float32"), ((3,), "int64"))


# Lazy modules


def lazy() -> TrainingStep:
    return step_of(nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.LazyLinear(4)), torch.randn(4, 6))


def ready() -> TrainingStep:
    step = lazy()
    step.models["model"](step.batch[0])
    return step


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_lazy_modules_get_their_shapes_in_a_trace_only(target: Any) -> None:
    step = lazy()
    model = step.models["model"]
    before = {name: (type(module), sorted(vars(module))) for name, module in model.named_modules()}
    assert trace(step, name="job", target=target) == trace(ready(), name="job", target=target)
    assert {name: (type(module), sorted(vars(module))) for name, module in model.named_modules()} == before
    assert all(isinstance(p, nn.UninitializedParameter) for p in model[0].parameters())
    assert isinstance(model[1].running_mean, nn.UninitializedBuffer)
    model(torch.randn(2, 3))  # another shape than the trace's: it left nothing behind
    assert model[0].in_features == 3


def test_a_job_whose_parameters_have_no_shape_is_told_what_to_do(tmp_path: Path) -> None:
    plan = plan_by_trace(lazy())
    step = lazy()
    with pytest.raises(UnsupportedError, match=r"model/0\.weight has no shape yet: run the model once"):
        Checkpointer(step.models, step.optimizers, directory=tmp_path, plan=plan)
    torch.manual_seed(0)
    assert_every_checkpoint_is_true(ready(), plan, tmp_path, iterations=3)


def test_a_lazy_module_that_never_runs_is_refused() -> None:
    model = nn.ModuleDict({"used": nn.Linear(6, 4), "unused": nn.LazyLinear(4)})
    step = step_of(model, torch.randn(4, 6), loss=lambda m, x: m["used"](x).sum())
    with pytest.raises(UnsupportedError, match=r"model/unused\.weight has no shape yet"):
        trace(step, name="job")


# Writes that nobody tells of


@torch.library.custom_op("checkflow_steps::lie", mutates_args=())
def lie(x: torch.Tensor, statistics: torch.Tensor) -> torch.Tensor:
    statistics.add_(1)
    return x.clone()


@lie.register_fake
def _(x: torch.Tensor, statistics: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


lie.register_autograd(lambda ctx, gradient: (gradient, None))


def test_an_operator_that_lies_is_found_out_and_does_no_harm(tmp_path: Path) -> None:
    """A buffer is due before its module's forward, whatever operators say."""

    def build() -> TrainingStep:
        torch.manual_seed(0)
        return step_of(Statistics(lie), torch.randn(4, 6))

    step = build()
    step.run(step.batch)
    with (
        pytest.raises(AssertionError, match=r"lie\.default writes model/statistics, and nothing says so"),
        WatchedWrites(step, []),
    ):
        step.run(step.batch)
    graph = trace(build(), name="job", target="cpu")
    (entry,) = [entry for entry in graph.state if entry.kind == "buffer"]
    assert entry.first_write is None
    assert entry.barrier is not None
    assert entry.barrier.kind is AnchorKind.FORWARD
    assert_every_checkpoint_is_true(build(), plan_graph(graph), tmp_path, iterations=4)


# Jobs without an optimizer


def by_hand() -> tuple[nn.Module, Callable[[], None]]:
    torch.manual_seed(0)
    model = nn.Linear(6, 2)
    x = torch.randn(4, 6)

    def iterate() -> None:
        model.zero_grad()
        mean_square(model, x).backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.data -= 0.1 * parameter.grad

    return model, iterate


def test_without_an_optimizer_iterations_are_those_of_the_loop(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, iterate = by_hand()
    step = TrainingStep(step=lambda _: iterate(), models={"model": model}, batch=torch.zeros(1))
    plan = plan_by_trace(step)
    with Checkpointer(model, {}, directory=tmp_path / "explicit", plan=plan) as checkpointer:
        for _ in range(plan.interval):
            iterate()
            checkpointer.step()
    assert checkpointer.iteration == plan.interval
    assert [path.name for path in find(tmp_path / "explicit")] == [f"step-{plan.interval:08d}"]
    with (
        caplog.at_level(logging.WARNING, logger="checkflow"),
        Checkpointer(model, {}, directory=tmp_path / "none", plan=plan) as checkpointer,
    ):
        for _ in range(3):
            iterate()
    assert checkpointer.iteration == 1
    (said,) = [record.message for record in caplog.records]
    assert said.endswith(
        "all that ran counts as one: iterate checkpointer.steps(), or call checkpointer.step() after each"
    )


# Values that a trace knows


def deciding(value: torch.Tensor, decide: Callable[[nn.Module], bool]) -> TrainingStep:
    model = nn.Linear(6, 4)
    model.register_buffer("value", value)

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        out = mean_square(model, x)
        return out * 2 if decide(model) else out

    return step_of(model, torch.randn(4, 6), loss=loss)


def add_unknown(model: Any) -> None:
    model.value.add_(model.weight.detach().sum())


def in_a_list(model: Any) -> None:
    torch._foreach_copy_([model.value], [model.weight.detach().sum()])


def by_data(model: Any) -> None:
    model.value.data = model.weight.detach().sum()


def by_batch_norm(model: Any) -> None:
    F.batch_norm(model.weight.detach().view(-1, 1), model.value, torch.ones(1), training=True)


@pytest.mark.parametrize(
    ("value", "change"),
    [
        (torch.zeros(()), add_unknown),
        (torch.zeros(()), in_a_list),
        (torch.zeros(()), by_data),
        (torch.zeros(1), by_batch_norm),
    ],
)
def test_a_value_is_known_until_it_depends_on_data(value: torch.Tensor, change: Callable[[Any], None]) -> None:
    def before(model: nn.Module) -> bool:
        return bool(model.value >= 0)  # type: ignore[operator]

    def after(model: nn.Module) -> bool:
        change(model)
        return bool(model.value >= 0)  # type: ignore[operator]

    assert trace(deciding(value, before), name="job").operators
    with pytest.raises(TraceError, match="needs the values"):
        trace(deciding(value, after), name="job")


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_a_counter_of_a_module_lies_on_the_device(target: Any) -> None:
    def decide(model: Any) -> bool:
        model.value += 1
        later = model.value * 2
        return bool(later[()] % 4 == 0)

    graph = trace(deciding(torch.zeros((), dtype=torch.long), decide), name="job", target=target)
    (entry,) = [entry for entry in graph.state if entry.kind == "buffer"]
    assert entry.placement == "device"
    assert entry.first_write is not None
    assert graph.operators[entry.first_write].target == "aten.add_.Tensor"
    assert "aten.remainder.Scalar" in [operator.target for operator in graph.operators]
    assert not [operator for operator in graph.operators if operator.link_bytes]


# Threads


class Threads(nn.Module):
    """Runs its second layer in a thread of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            return pool.submit(self.second, self.first(x)).result()


@pytest.mark.parametrize("run", [record_step, trace, functools.partial(trace, target="cpu")])
def test_forward_in_another_thread_is_refused(run: Callable[..., Any]) -> None:
    with pytest.raises(TraceError, match="cannot plan job: model/second runs forward in another thread"):
        run(step_of(Threads(), torch.ones(2, 6)), name="job")


@pytest.mark.slow
def test_a_job_that_runs_forward_in_another_thread_trains_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = Threads()
    optimizer = momentum(model.parameters())
    with checkflow.Checkpointer(model, optimizer, directory=tmp_path, every=1) as checkpointer:
        for _ in checkpointer.steps(12):
            optimizer.zero_grad()
            model(torch.ones(2, 6)).square().mean().backward()
            optimizer.step()
    assert "could be recorded: cannot plan Threads: model/second runs forward in another thread" in caplog.text
    newest = max(tmp_path.glob("step-*/model-*.safetensors"))
    assert safetensors.torch.load_file(newest)["second.weight"].equal(model.second.weight)
