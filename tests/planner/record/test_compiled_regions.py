"""Compiled training steps: planned by trace, run, every checkpoint held against the truth.

The backends are cheap ones: "aot_eager" splits forward and backward and moves what a region writes to its end, as
torch's own does, and runs the operators one by one. One test takes the real one, where a C++ compiler is there.
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.registry import lookup_backend
from torch._functorch.aot_autograd import make_boxed_func
from torch.utils._python_dispatch import _disable_current_modes

from checkflow.anchors.hooks import around_forward
from checkflow.anchors.regions import compiled_regions
from checkflow.api import Checkpointer
from checkflow.core.graph import BOUNDARY, AnchorKey, AnchorKind
from checkflow.core.training_step import TrainingStep
from checkflow.planner.record.recorder import IterationRecorder
from checkflow.planner.trace.trace import trace
from checkflow.runtime.snapshot.capturer import Capturer
from checkflow.runtime.snapshot.program import compile_plan
from tests.support.planned_jobs import assert_every_checkpoint_is_true, plan_by_trace, plan_graph
from tests.support.recording import record_step
from tests.support.steps import training_steps as steps

BACKEND = "aot_eager"
BACKEND_IN_USE: Any = BACKEND
Compile = Callable[[TrainingStep], TrainingStep]


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def compiled(what: Any, **options: Any) -> Any:
    return torch.compile(what, backend=BACKEND_IN_USE, **options)


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x / 2), y)


def prepared_batches(optimizer: steps.MakeOptimizer = steps.sgd) -> TrainingStep:
    """Batch norm, in a model that is not the first thing to run: what it writes is due at its forward, not before."""
    plain = steps.batch_norm(optimizer)
    return TrainingStep(plain.models, plain.optimizers, loss=loss_of, batch=plain.batch)


# Ways to compile the step of ``prepared_batches``


def wrapped_model(step: TrainingStep) -> TrainingStep:
    return TrainingStep(
        compiled(step.models["model"], fullgraph=True), step.optimizers, loss=step.loss, batch=step.batch
    )


def model_in_place(step: TrainingStep) -> TrainingStep:
    step.models["model"].compile(backend=BACKEND_IN_USE)
    return step


def forward_method(step: TrainingStep) -> TrainingStep:
    model = step.models["model"]
    model.forward = compiled(model.forward)
    return step


def layer_in_place(step: TrainingStep) -> TrainingStep:
    step.models["model"].shared.compile(backend=BACKEND)
    return step


def wrapped_layer(step: TrainingStep) -> TrainingStep:
    model: Any = step.models["model"]
    model.shared = compiled(model.shared)
    return step


def loss_function(step: TrainingStep) -> TrainingStep:
    return TrainingStep(step.models, step.optimizers, loss=compiled(loss_of, fullgraph=True), batch=step.batch)


def train_function(step: TrainingStep) -> TrainingStep:
    (model,), (optimizer,) = step.models.values(), step.optimizers.values()

    @torch.compile(backend=BACKEND_IN_USE)
    def train(batch: Any) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch[0] / 2), batch[1])
        loss.backward()
        optimizer.step()
        return loss

    return TrainingStep(step=train, models=step.models, optimizers=step.optimizers, batch=step.batch)


# Before that, torch runs all of such a function as it is.
COMPILES_BACKWARD = torch.torch_version.TorchVersion(torch.__version__) >= (2, 13)
WHOLE_ITERATION = pytest.param(
    train_function, marks=pytest.mark.skipif(not COMPILES_BACKWARD, reason="this torch compiles no backward")
)


def optimizer_step(step: TrainingStep) -> TrainingStep:
    (optimizer,) = step.optimizers.values()
    return stepping(step, compiled(optimizer.step))


def stepping(step: TrainingStep, update: Callable[[], Any]) -> TrainingStep:
    """The same iteration, in which the optimizer steps by ``update()``."""
    (model,), (optimizer,) = step.models.values(), step.optimizers.values()

    def train(batch: Any) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch[0] / 2), batch[1])
        loss.backward()
        update()
        return loss

    return TrainingStep(step=train, models=step.models, optimizers=step.optimizers, batch=step.batch)


def graph_break(step: TrainingStep) -> TrainingStep:
    model: Any = step.models["model"]
    model.drop.register_forward_hook(lambda *_: torch._dynamo.graph_break())
    return wrapped_model_in_pieces(step)


def wrapped_model_in_pieces(step: TrainingStep) -> TrainingStep:
    return TrainingStep(compiled(step.models["model"]), step.optimizers, loss=step.loss, batch=step.batch)


WAYS: list[tuple[Compile, tuple[str, ...]]] = [
    (wrapped_model, ("model/",)),
    (graph_break, ("model/",)),
    (model_in_place, ("model/",)),
    (forward_method, ("model/",)),
    (layer_in_place, ("model/shared",)),
    (wrapped_layer, ("model/shared",)),
    (loss_function, ("loss_of()",)),
    (train_function, ("train()",)),
    (optimizer_step, ("step()",)),
]


RECORDED = [row for row in WAYS if row[0] in (wrapped_model, model_in_place, loss_function, optimizer_step)]


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What checkflow logged; torch's compiler has its own to say."""
    return [record.getMessage() for record in caplog.records if record.name == "checkflow"]


@pytest.mark.parametrize(("way", "calls"), WAYS, ids=[way.__name__ for way, _ in WAYS])
def test_every_checkpoint_of_a_compiled_step_is_true(
    way: Compile,
    calls: tuple[str, ...],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    step = way(prepared_batches(momentum))
    plan = plan_by_trace(step)
    assert plan.fingerprint.compiled == calls
    reached: set[AnchorKey] = set()
    monkeypatch.setattr(Capturer, "reached", _noting(Capturer.reached, reached))
    checkpointer = assert_every_checkpoint_is_true(step, plan, tmp_path, iterations=6)
    assert not said(caplog)
    # What ran is the plan: every anchor that has work fired, so that nothing was caught up with or hurried.
    assert {key for _, key in compile_plan(plan).position} <= reached
    assert checkpointer.last_capture is not None
    assert "barrier" not in {record.anchor for record in checkpointer.last_capture.log}


def _noting(method: Callable[..., None], reached: set[AnchorKey]) -> Callable[..., None]:
    def noted(self: Capturer, key: AnchorKey) -> None:
        reached.add(key)
        method(self, key)

    return noted


def test_a_compiled_region_has_one_anchor_and_its_gradients_come_together() -> None:
    def places(step: TrainingStep) -> dict[AnchorKey, int]:
        return {anchor.key: anchor.position for anchor in trace(step, name="n", target="cpu").anchors}

    step = prepared_batches()
    eager = places(step)
    compiled = places(layer_in_place(step))
    assert compiled == eager  # a layer of one module, whose own gradients come together anyway
    whole = places(wrapped_model(prepared_batches()))
    update = AnchorKey(AnchorKind.OPTIMIZER_PRE, "optimizer")
    forward = AnchorKey(AnchorKind.FORWARD, "model/")
    assert [key for key in whole if key.kind is AnchorKind.FORWARD] == [forward]
    gradients = {key for key in eager if key.kind is AnchorKind.GRADIENT}
    assert {key for key in whole if key.kind is AnchorKind.GRADIENT} == gradients
    assert {whole[key] for key in gradients} == {eager[update]} == {whole[update]}
    assert len({eager[key] for key in gradients}) > 1


@pytest.mark.slow
def test_a_plan_for_an_uncompiled_model_stays_consistent_when_it_is_compiled(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plan = plan_by_trace(prepared_batches(momentum))
    for way in (wrapped_model, loss_function, *([train_function] if COMPILES_BACKWARD else ())):
        torch._dynamo.reset()
        caplog.clear()
        assert_every_checkpoint_is_true(way(prepared_batches(momentum)), plan, tmp_path / way.__name__, iterations=4)
        (line,) = said(caplog)
        assert "pass what torch.compile(model) returns" in line


def test_code_that_was_compiled_before_and_models_that_are_passed_without_their_wrapper(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """No hook ever fires in code that had none when it was compiled, nor is any hung on what nobody passed."""
    step = loss_function(prepared_batches(momentum))
    step.run(step.batch)
    plan = plan_by_trace(prepared_batches(momentum))
    assert_every_checkpoint_is_true(step, plan, tmp_path / "before", iterations=4)
    assert len(said(caplog)) == 1

    step = prepared_batches(momentum)
    wrapped = wrapped_model(step)
    job = TrainingStep(
        step=lambda batch: wrapped.run(batch), models=step.models, optimizers=step.optimizers, batch=step.batch
    )
    assert_every_checkpoint_is_true(job, plan, tmp_path / "wrapper", iterations=4)
    assert len(said(caplog)) == 2


@pytest.mark.slow
def test_a_model_that_is_compiled_in_the_middle_of_a_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name, compile_now in {
        "in_place": lambda step: step.models["model"].compile(backend=BACKEND),
        "again": lambda step: step.models["model"].compile(backend=BACKEND),
        "function": lambda step: setattr(step, "loss", compiled(loss_of)),
    }.items():
        torch._dynamo.reset()
        step = prepared_batches(momentum)
        if name == "again":
            step.models["model"].compile(backend=BACKEND)

        def iterate(iteration: int, step: TrainingStep = step, compile_now: Any = compile_now) -> None:
            if iteration == 3:
                compile_now(step)
            step.run(step.batch)

        plan = plan_by_trace(step)
        assert_every_checkpoint_is_true(step, plan, tmp_path / name, iterate=iterate)
        assert len(said(caplog)) == (0 if name == "again" else 1)
        caplog.clear()


class Plain(torch.optim.Optimizer):
    """An optimizer of the user's own, which torch compiles in one piece (its own have a graph break in their steps)."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter.sub_(parameter.grad, alpha=0.1)


def test_a_step_that_is_compiled_in_one_piece_has_everything_due_at_the_boundary(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def job() -> TrainingStep:
        step = prepared_batches(Plain)
        (optimizer,) = step.optimizers.values()
        return stepping(step, compiled(lambda: optimizer.step(), fullgraph=True))

    plan = plan_by_trace(job())
    assert [step.anchor for step in plan.timeline.steps if step.anchor is not None] == [BOUNDARY]
    assert set(plan.deadlines.values()) == {0}
    for name, made in {"compiled": plan, "uncompiled": plan_by_trace(prepared_batches(Plain))}.items():
        torch._dynamo.reset()
        caplog.clear()
        checkpointer = assert_every_checkpoint_is_true(job(), made, tmp_path / name)
        (line,) = said(caplog)
        assert "call optimizer.step() outside" in line
        assert checkpointer.last_capture is not None
        for record in checkpointer.last_capture.log:
            from_copy = made.chunks[record.chunk].snapshot_step is not None and record.kind == "offload"
            assert record.anchor == "boundary" or from_copy


@pytest.mark.slow
def test_a_changing_batch_size_compiles_anew_and_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name, options in {"anew": {"dynamic": False}, "dynamic": {"dynamic": True}}.items():
        torch._dynamo.reset()
        plain = prepared_batches(momentum)
        step = TrainingStep(
            compiled(plain.models["model"], **options), plain.optimizers, loss=plain.loss, batch=plain.batch
        )
        x, y = step.batch

        def iterate(iteration: int, step: TrainingStep = step, x: Any = x, y: Any = y) -> None:
            size = 2 + iteration % 3
            step.run((x[:size], y[:size]))

        assert_every_checkpoint_is_true(step, plan_by_trace(step), tmp_path / name, iterate=iterate)
        assert not said(caplog)


@pytest.mark.slow
def test_compiled_parts_of_a_step_with_two_models_and_of_one_with_micro_batches(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    step = steps.adversarial()
    step.models["critic"].compile(backend=BACKEND)
    plan = plan_by_trace(step)
    assert plan.fingerprint.compiled == ("critic/",)
    assert_every_checkpoint_is_true(step, plan, tmp_path / "two", iterations=5)
    plain = steps.micro_batches(momentum)
    step = TrainingStep(
        compiled(plain.models["model"]), plain.optimizers, loss=plain.loss, batch=plain.batch, micro_batches=3
    )
    assert_every_checkpoint_is_true(step, plan_by_trace(step), tmp_path / "micro", iterations=5)
    assert not said(caplog)


@pytest.mark.parametrize("way", [wrapped_model, WHOLE_ITERATION], ids=["model", "function"])
def test_checkpoints_leave_compiled_code_as_it_is(way: Compile, tmp_path: Path) -> None:
    """As many graphs with the same losses, with checkpoints and without."""

    def train(directory: Path | None) -> tuple[list[float], dict[str, int]]:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        torch.manual_seed(0)
        step = way(prepared_batches(momentum))
        if directory is None:
            losses = [step.run(step.batch).item() for _ in range(5)]
        else:
            plan = plan_by_trace(step)
            with Checkpointer(step.models, step.optimizers, directory=directory, plan=plan) as checkpointer:
                losses = [step.run(step.batch).item() for _ in checkpointer.steps(5)]
        return losses, dict(torch._dynamo.utils.counters["stats"])

    plain = train(None)
    assert train(tmp_path) == plain
    assert plain[1]["unique_graphs"] >= 1


def test_without_a_loader_the_forward_of_a_compiled_model_marks_the_boundary(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    step = wrapped_model(prepared_batches(momentum))
    with Checkpointer(
        step.models, step.optimizers, directory=tmp_path / "model", plan=plan_by_trace(step)
    ) as checkpointer:
        for _ in range(4):
            step.run(step.batch)
    assert checkpointer.iteration == 4
    assert not said(caplog)

    step = loss_function(prepared_batches(momentum))
    with Checkpointer(
        step.models, step.optimizers, directory=tmp_path / "function", plan=plan_by_trace(step)
    ) as checkpointer:
        for _ in range(4):
            step.run(step.batch)
    (line,) = said(caplog)
    assert "iterate checkpointer.steps(n)" in line


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch's own backend needs a C++ compiler, and there is none")
def test_the_real_backend(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It writes batch norm's statistics by kernels of its own, which no operator and no dispatch mode shows."""
    plain = prepared_batches(momentum)
    step = TrainingStep(torch.compile(plain.models["model"]), plain.optimizers, loss=plain.loss, batch=plain.batch)  # type: ignore[arg-type]
    assert_every_checkpoint_is_true(step, plan_by_trace(step), tmp_path / "traced", iterations=4)
    recorded = record_step(step, name="job").graph
    regions = [operator for operator in recorded.operators if operator.target == "compiled region"]
    assert [operator.phase for operator in regions] == ["forward", "backward"]
    assert all(operator.reads and operator.writes for operator in regions)
    assert_every_checkpoint_is_true(step, plan_graph(recorded), tmp_path / "recorded", iterations=4)
    assert not said(caplog)


# Recording a live job


def hiding(module: Any, examples: Any) -> Any:
    """A backend whose operators no dispatch mode sees, as it sees none of the kernels that torch's own generates."""

    def compile_graph(graph: Any, _examples: Any) -> Any:
        def run(*arguments: Any) -> Any:
            with _disable_current_modes():
                return graph(*arguments)

        return make_boxed_func(run)

    return aot_autograd(fw_compiler=compile_graph, keep_inference_input_mutations=True)(module, examples)


@pytest.mark.parametrize(("way", "calls"), RECORDED, ids=[way.__name__ for way, _ in RECORDED])
def test_a_compiled_job_is_recorded_as_it_runs(
    way: Compile,
    calls: tuple[str, ...],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(globals(), "BACKEND_IN_USE", hiding)
    step = way(prepared_batches(momentum))
    step.run(step.batch)  # compiled before: no hook of the recording is in the code
    recorded = record_step(step, name="job")
    graph, traced = recorded.graph, trace(step, name="job", target="cpu")
    assert len(recorded.durations_seconds) == len(graph.operators)
    assert {entry.name: entry.barrier for entry in graph.state} == {entry.name: entry.barrier for entry in traced.state}
    written = [
        {entry.name for entry in found.state if entry.kind != "buffer" and entry.first_write is not None}
        for found in (graph, traced)
    ]
    assert written[0] == written[1]
    kinds = (AnchorKind.FORWARD, AnchorKind.OPTIMIZER_PRE, AnchorKind.OPTIMIZER_POST)
    assert [a.key for a in graph.anchors if a.key.kind in kinds] == [
        a.key for a in traced.anchors if a.key.kind in kinds
    ]
    assert_every_checkpoint_is_true(step, plan_graph(graph), tmp_path, iterations=4)
    assert not said(caplog)
    if way is not loss_function:  # of which nothing tells afterwards
        assert graph.compiled == calls


@pytest.mark.slow
@pytest.mark.parametrize("way", [wrapped_model, WHOLE_ITERATION], ids=["model", "function"])
def test_recording_changes_no_bit_and_compiled_code_stays_compiled(
    way: Compile, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = 0

    def backend(module: Any, examples: Any) -> Any:
        inner = lookup_backend(BACKEND)(module, examples)

        def run(*arguments: Any) -> Any:
            nonlocal runs
            runs += 1
            return inner(*arguments)

        return run

    def train(*, recording: bool) -> tuple[list[float], list[int]]:
        nonlocal runs
        torch._dynamo.reset()
        torch.manual_seed(0)
        step, losses, counts = way(prepared_batches(momentum)), [], []
        for iteration in range(5):
            recorder = IterationRecorder(step.models, step.optimizers, name="job")
            if recording and iteration == 1:  # as in a job: in which the optimizer's step is compiled anew
                recorder.begin()
            runs = 0
            losses.append(step.run(step.batch).item())
            counts.append(runs)
            if recording and iteration == 1:
                recorder.end()
        return losses, counts

    monkeypatch.setitem(globals(), "BACKEND_IN_USE", backend)
    plain = train(recording=False)
    assert min(plain[1]) >= 1
    assert train(recording=True) == plain


# Regions


def test_regions_are_found_however_a_module_was_compiled() -> None:
    class Decorated(nn.Linear):
        pass

    model: Any = nn.Sequential(
        nn.Sequential(nn.Linear(2, 2), nn.Tanh()), nn.Linear(2, 2), nn.Linear(2, 2), torch.compile(Decorated)(2, 2)
    )
    model[0].compile(backend=BACKEND)
    model[0][0].compile(backend=BACKEND)  # inside of another one: no region of its own
    model[1] = compiled(model[1])
    model[2] = torch.compiler.disable(model[2])
    regions = compiled_regions({"m": model})
    assert {name: region.name for name, region in regions.items()} == {
        "m/0": "m/0", "m/0.0": "m/0", "m/0.1": "m/0", "m/1": "m/1", "m/3": "m/3",
    }  # fmt: skip
    assert [regions[name].entry for name in ("m/0", "m/1", "m/3")] == [model[0], model[1], None]
    whole = compiled(nn.Sequential(nn.Linear(2, 2)))
    assert {name: region.entry for name, region in compiled_regions({"m": whole}).items()} == {
        "m/": whole, "m/0": whole,
    }  # fmt: skip


def test_calls_around_a_module_compiled_in_place_can_be_taken_away_in_any_order() -> None:
    model: Any = nn.Linear(2, 2)
    model.compile(backend=BACKEND)
    calls: list[str] = []
    first = around_forward(model, lambda *_: calls.append("first"))
    second = around_forward(model, lambda *_: calls.append("second"), lambda *_: calls.append("after"))
    model(torch.ones(1, 2))
    assert calls == ["second", "first", "after"]
    assert second.in_place()
    assert first.in_place()
    first.remove()
    model(torch.ones(1, 2))
    assert calls[3:] == ["second", "after"]
    second.remove()
    model(torch.ones(1, 2))
    assert len(calls) == 5
    assert copy.deepcopy(model)._compiled_call_impl is None
    model.compile(backend=BACKEND)
    assert not second.in_place()
