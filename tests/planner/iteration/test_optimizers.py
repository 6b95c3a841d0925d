"""Every optimizer that torch has, in each of its implementations: traced, recorded, and run under audit.

Beside the optimizers what is done with them: parameter groups, frozen and forgotten parameters, several optimizers,
clipping, accumulation, scaled losses with skipped steps, steps inside of backward, hooks.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import inspect
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim

from checkflow.api import Checkpointer
from checkflow.core.errors import MismatchError, StorageError, TraceError
from checkflow.core.graph import TrainingGraph
from checkflow.core.plan import Plan
from checkflow.core.training_step import TrainingStep
from checkflow.planner.trace.trace import trace
from checkflow.runtime.store.discovery import find
from tests.support.oracle import assert_checkpoint_is, clone_state, same_bits
from tests.support.planned_jobs import assert_every_checkpoint_is_true, plan_by_trace, plan_graph
from tests.support.recording import record_step

Optimizer = torch.optim.Optimizer
Make = Callable[[Iterable[torch.Tensor]], Optimizer]
CLASSES = {name: value for name, value in vars(optim).items() if inspect.isclass(value) and value is not Optimizer}


def row(name: str, **options: Any) -> tuple[str, Make]:
    words = "".join(f" {key}" if value is True else f" {key}={value}" for key, value in options.items())
    return f"{name}{words}", functools.partial(CLASSES[name], **{"lr": 0.01, **options})


FOREACH_TOO = {
    "SGD": [{}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1, "maximize": True}],
    "Adam": [{}, {"amsgrad": True, "weight_decay": 0.1}],
    "AdamW": [{"amsgrad": True, "maximize": True}],
    "Adagrad": [{}],
    "RMSprop": [{}, {"centered": True, "momentum": 0.9}],
    "Adafactor": [{}],
    "Adadelta": [{}],
    "Adamax": [{}],
    "NAdam": [{"decoupled_weight_decay": True, "weight_decay": 0.1}],
    "RAdam": [{}],
    "ASGD": [{}],
    "Rprop": [{}],
}
FUSED = ["SGD", "Adam", "AdamW", "Adagrad"]
CAPTURABLE = ["Adam", "AdamW", "NAdam", "RAdam", "RMSprop", "Adadelta", "Adamax", "ASGD", "Rprop"]
OPTIMIZERS = dict(
    [
        *(row(n, **o, foreach=f) for n, options in FOREACH_TOO.items() for o in options for f in (False, True)),
        *(row(name, fused=True) for name in FUSED),
        row("SGD", momentum=0.9, dampening=0.1, fused=True),
        row("Adam", lr=torch.tensor(0.01)),
        row("Adam", lr=torch.tensor(0.01), fused=True, amsgrad=True),
    ]
)
SPARSE = {
    "SparseAdam": optim.SparseAdam,
    "SparseAdam maximize": functools.partial(optim.SparseAdam, maximize=True),
    "Adagrad": optim.Adagrad,
    "Adagrad foreach": functools.partial(optim.Adagrad, foreach=True),
    "SGD": functools.partial(optim.SGD, lr=0.1),
}
ELSEWHERE = {
    "Muon",
    "SparseAdam",
    "LBFGS",
}  # matrices only, sparse gradients only; LBFGS has no plan (test_closures.py)

X, LABELS = torch.randn(8, 12, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 4


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Linear(32, 4))


def training(
    model: nn.Module, optimizers: Optimizer | dict[str, Optimizer], iterate: Callable[[], Any]
) -> TrainingStep:
    named = optimizers if isinstance(optimizers, dict) else {"optimizer": optimizers}
    return TrainingStep(step=lambda _: iterate(), models={"model": model}, optimizers=named, batch=(X, LABELS))


def plain(make: Make) -> TrainingStep:
    model = network()
    return TrainingStep(
        model, make(model.parameters()), loss=lambda m, x, y: F.cross_entropy(m(x), y), batch=(X, LABELS)
    )


def deadlines(graph: TrainingGraph) -> dict[str, Any]:
    """By state tensor: where it lies, and how many anchors have fired when it is first written."""

    def anchors(operator: int | None) -> int | None:
        return None if operator is None else sum(anchor.position <= operator for anchor in graph.anchors)

    return {e.name: (e.size_bytes, e.placement, anchors(e.first_write)) for e in graph.state}


def targets(graph: TrainingGraph) -> list[str]:
    return [operator.target for operator in graph.operators]


def assert_works(build: Callable[[], TrainingStep], directory: Path, *, same: bool = True) -> TrainingGraph:
    """The trace and the record agree, and by the traced plan every checkpoint is the truth.

    Args:
        same: whether they show the same operators, too; otherwise only the same of the state.
    """
    graph = trace(build(), name="job", target="cpu")
    recorded = record_step(build(), name="job").graph
    assert deadlines(recorded) == deadlines(graph)
    assert not same or targets(recorded) == targets(graph)
    assert_every_checkpoint_is_true(build(), plan_graph(graph), directory, iterations=4)
    return graph


# Optimizers


def test_every_optimizer_of_torch_is_in_the_tables() -> None:
    found = {name for name, value in CLASSES.items() if issubclass(value, Optimizer)}
    assert found == FOREACH_TOO.keys() | ELSEWHERE
    for name in found - ELSEWHERE:
        options = inspect.signature(CLASSES[name]).parameters
        assert ("fused" in options) == (name in FUSED), name
        assert ("capturable" in options) == (name in CAPTURABLE), name


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_implementation_on_the_cpu(name: str, tmp_path: Path) -> None:
    assert_works(lambda: plain(OPTIMIZERS[name]), tmp_path)


@pytest.mark.parametrize(("steps", "t0", "averages"), [(0, 1e6, False), (0, 0, True), (5, 3, True), (3, 5, False)])
def test_asgd_averages_from_its_step_on(steps: int, t0: float, averages: bool) -> None:
    step = plain(functools.partial(optim.ASGD, foreach=False, t0=t0))
    for _ in range(steps):
        step.run(step.batch)
    for target in ("cpu", "cuda"):
        graph = trace(step, name="n", target=target)  # type: ignore[arg-type]
        assert any(o.target == "aten.sub.Tensor" and o.phase == "optimizer" for o in graph.operators) == averages


@pytest.mark.parametrize("name", [*FOREACH_TOO, "SGD fused", "Adam fused"])
def test_every_default_of_a_gpu_is_traced(name: str) -> None:
    """foreach, unless the user says fused, but Adafactor's loop; torch's step counters stay in host memory."""
    kind, _, fused = name.partition(" ")
    graph = trace(plain(functools.partial(CLASSES[kind], lr=0.01, **({"fused": True} if fused else {}))), name="n")
    expected = "for-loop" if kind == "Adafactor" else fused or "foreach"
    assert graph.optimizers == (("optimizer", f"{kind} {expected}"),)
    steps = [o.target for o in graph.operators if o.phase == "optimizer"]
    at_once = "aten._fused" if fused else "aten._foreach"
    assert any(target.startswith(at_once) for target in steps) == (expected != "for-loop")
    assert all(e.first_write is not None for e in graph.state if e.placement == "device")
    assert {e.name.rpartition(".")[2] for e in graph.state if e.placement == "host"} <= {"step", "mu_product"}


def test_a_rate_in_a_tensor_is_for_the_for_loop_unless_capturable() -> None:
    """torch's own rule on GPUs."""
    rate = torch.tensor(0.01)
    for options, expected in (({}, "for-loop"), ({"capturable": True}, "foreach capturable")):
        graph = trace(plain(functools.partial(optim.Adam, lr=rate, **options)), name="n", target="cuda")
        assert graph.optimizers == (("optimizer", f"Adam {expected}"),)
        assert any("_foreach" in target for target in targets(graph)) == (expected != "for-loop")


@pytest.mark.parametrize("name", CAPTURABLE)
def test_capturable_state_lies_on_the_gpu_and_is_planned(name: str) -> None:
    graph = trace(plain(functools.partial(CLASSES[name], capturable=True)), name="n", target="cuda")
    assert graph.optimizers == (("optimizer", f"{name} foreach capturable"),)
    assert {e.placement for e in graph.state} == {"device"}
    assert all(e.first_write is not None for e in graph.state)


def test_muon_for_matrices_and_adamw_for_the_rest(tmp_path: Path) -> None:
    def build() -> TrainingStep:
        model = network()
        matrices, rest = ([p for p in model.parameters() if (p.dim() == 2) is two] for two in (True, False))
        both: dict[str, Optimizer] = {"muon": optim.Muon(matrices), "adamw": optim.AdamW(rest)}
        return TrainingStep(
            model, both, loss=lambda m, x, y: F.cross_entropy(m(x), y), batch=(X, LABELS)
        )  # fmt: skip

    graph = assert_works(build, tmp_path)
    assert {e.name for e in graph.state if e.name.startswith("muon/")} == {
        "muon/0.weight.momentum_buffer",
        "muon/3.weight.momentum_buffer",
    }


# Sparse gradients


def looking_up(make: Make, *, bag: bool, **options: Any) -> TrainingStep:
    torch.manual_seed(0)
    table = (nn.EmbeddingBag if bag else nn.Embedding)(60, 8, sparse=True, **options)
    model = nn.ModuleDict({"table": table, "head": nn.Linear(8, 4)})
    indices = torch.arange(32).remainder(23).reshape(8, 4)  # some twice, and 0 is padding where there is such
    both = {"tables": make(table.parameters()), "head": optim.SGD(model["head"].parameters(), lr=0.1)}

    def iterate() -> torch.Tensor:
        for optimizer in both.values():
            optimizer.zero_grad()
        rows = table(indices)
        loss = F.cross_entropy(model["head"](rows if bag else rows.sum(1)), LABELS)
        loss.backward()
        for optimizer in both.values():
            optimizer.step()
        return loss

    return training(model, both, iterate)


@pytest.mark.parametrize("options", [{}, {"padding_idx": 0}, {"max_norm": 1.0}], ids=["plain", "padding", "max_norm"])
@pytest.mark.parametrize("bag", [True, False], ids=["bag", "embedding"])
@pytest.mark.parametrize("name", SPARSE)
def test_sparse_gradients(name: str, bag: bool, options: dict[str, Any], tmp_path: Path) -> None:
    graph = assert_works(lambda: looking_up(SPARSE[name], bag=bag, **options), tmp_path, same=False)
    table = next(entry for entry in graph.state if entry.name == "model/table.weight")
    assert table.first_write is not None
    # Rows that are too long are shortened where they are looked up, which writes the table in forward.
    assert graph.operators[table.first_write].phase == ("forward" if options.get("max_norm") else "optimizer")


def test_rows_of_padding_leave_the_gradient_of_an_embedding_in_operators_of_their_own() -> None:
    def build() -> TrainingStep:
        return looking_up(SPARSE["SGD"], bag=False, padding_idx=0)

    ours, real = targets(trace(build(), name="n", target="cpu")), targets(record_step(build(), name="n").graph)
    assert ours.count("aten.index.Tensor") == 2
    # Being watched costs a real sparse gradient a copy: autograd takes over only what nobody else refers to.
    real.remove("aten.clone.default")
    assert ours == real


# Groups, parameters, several optimizers


def iterating(model: nn.Module, *optimizers: Optimizer, forward: Callable[[], torch.Tensor] | None = None) -> Any:
    def iterate() -> torch.Tensor:
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = F.cross_entropy(model(X) if forward is None else forward(), LABELS)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        return loss

    return iterate


def groups_of_several_implementations() -> TrainingStep:
    model = network()
    optimizer = optim.Adam(
        [
            {"params": model[0].parameters(), "lr": 0.1, "foreach": True},
            {"params": model[1].parameters(), "fused": True, "weight_decay": 0.1},
            {"params": model[3].parameters(), "foreach": False, "amsgrad": True},
        ]
    )
    return training(model, optimizer, iterating(model, optimizer))


def frozen_in_the_optimizer() -> TrainingStep:
    model = network()
    model[0].requires_grad_(False)
    optimizer = optim.Adam(model.parameters())
    return training(model, optimizer, iterating(model, optimizer))


def frozen_outside_of_the_optimizer() -> TrainingStep:
    model = network()
    model[0].requires_grad_(False)
    optimizer = optim.AdamW([p for p in model.parameters() if p.requires_grad], weight_decay=0.1)
    return training(model, optimizer, iterating(model, optimizer))


def no_gradient_for_some() -> TrainingStep:
    model = network()
    model.add_module("unused", nn.Linear(4, 4))
    optimizer = optim.Adam(model.parameters())
    return training(model, optimizer, iterating(model, optimizer, forward=lambda: model[:4](X)))


def parameters_of_no_model() -> TrainingStep:
    model = network()
    scale, shift = nn.Parameter(torch.ones(4)), nn.Parameter(torch.zeros(()))
    optimizer = optim.Adam([{"params": model.parameters()}, {"params": [scale, shift], "lr": 0.1}])
    return training(model, optimizer, iterating(model, optimizer, forward=lambda: model(X) * scale + shift))


def one_optimizer_over_two_models() -> TrainingStep:
    torch.manual_seed(0)
    body, head = nn.Linear(12, 32), nn.Linear(32, 4)
    optimizer = optim.AdamW([*body.parameters(), *head.parameters()])
    iterate = iterating(head, optimizer, forward=lambda: head(body(X).tanh()))
    return TrainingStep(
        step=lambda _: iterate(), models={"body": body, "head": head}, optimizers={"optimizer": optimizer}, batch=X
    )


def adversarial(critic_steps: int = 3) -> TrainingStep:
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(3, 32), nn.ReLU(), nn.Linear(32, 12))
    critic = nn.Sequential(nn.Linear(12, 16), nn.LeakyReLU(), nn.Linear(16, 1))
    of_generator, of_critic = optim.Adam(generator.parameters()), optim.RMSprop(critic.parameters())

    def iterate(batch: torch.Tensor) -> torch.Tensor:
        for _ in range(critic_steps):
            of_critic.zero_grad()
            loss: torch.Tensor = critic(generator(torch.randn(8, 3)).detach()).mean() - critic(batch).mean()
            loss.backward()
            of_critic.step()
            nn.utils.clip_grad_value_(critic.parameters(), 0.1)
            with torch.no_grad():
                for parameter in critic.parameters():
                    parameter.clamp_(-0.1, 0.1)
        of_generator.zero_grad()
        (-critic(generator(torch.randn(8, 3))).mean()).backward()
        of_generator.step()
        return loss

    return TrainingStep(
        step=iterate,
        models={"generator": generator, "critic": critic},
        optimizers={"of_generator": of_generator, "of_critic": of_critic},
        batch=X,
    )


# Gradients: clipped, accumulated, zeroed at any place


def clipping(**options: Any) -> TrainingStep:
    model = network()
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def iterate() -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(X), LABELS)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1, **options)
        optimizer.step()
        return loss

    return training(model, optimizer, iterate)


def accumulating(*, at_end: bool = False, set_to_none: bool = True) -> TrainingStep:
    model = network()
    optimizer = optim.Adam(model.parameters())

    def iterate() -> None:
        if not at_end:
            optimizer.zero_grad(set_to_none=set_to_none)
        for part in range(4):
            rows = slice(2 * part, 2 * part + 2)
            (F.cross_entropy(model(X[rows]), LABELS[rows]) / 4).backward()
        optimizer.step()
        if at_end:
            optimizer.zero_grad(set_to_none=set_to_none)

    return training(model, optimizer, iterate)


def micro_batches() -> TrainingStep:
    model = network()
    loss = lambda m, x, y: F.cross_entropy(m(x), y)  # noqa: E731
    return TrainingStep(model, optim.Adam(model.parameters()), loss=loss, batch=(X, LABELS), micro_batches=3)


def hooked() -> TrainingStep:
    """The user's own step hooks, which change gradients before and weights after."""
    model = network()
    optimizer = optim.Adam(model.parameters())

    def before(*_: Any) -> None:
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(0.5)

    def after(*_: Any) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.clamp_(-1, 1)

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)
    return training(model, optimizer, iterating(model, optimizer))


def stepping_in_backward(foreach: bool) -> TrainingStep:
    model = network()
    optimizers = {parameter: optim.Adam([parameter], foreach=foreach) for parameter in model.parameters()}

    def update(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)

    def iterate() -> None:
        F.cross_entropy(model(X), LABELS).backward()

    return training(model, {f"of{i}": one for i, one in enumerate(optimizers.values())}, iterate)


def scaling(*, clip: bool, fused: bool = False, scaler: torch.amp.GradScaler | None = None) -> TrainingStep:
    model = network()
    optimizer = optim.Adam(model.parameters(), fused=fused)
    scaler = scaler or torch.amp.GradScaler("cpu", init_scale=4.0)

    def iterate() -> torch.Tensor:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(X), LABELS)
        scaler.scale(loss).backward()
        if clip:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        return loss

    return training(model, optimizer, iterate)


STEPS: dict[str, Callable[[], TrainingStep]] = {
    "groups of several implementations": groups_of_several_implementations,
    "frozen in the optimizer": frozen_in_the_optimizer,
    "frozen outside of the optimizer": frozen_outside_of_the_optimizer,
    "no gradient for some": no_gradient_for_some,
    "parameters of no model": parameters_of_no_model,
    "one optimizer over two models": one_optimizer_over_two_models,
    "adversarial, three critic steps": adversarial,
    "clip by norm": clipping,
    "clip by norm foreach": functools.partial(clipping, foreach=True),
    "clip by norm for-loop": functools.partial(clipping, foreach=False, norm_type=float("inf")),
    "clip, error if not finite": functools.partial(clipping, error_if_nonfinite=True),
    "accumulate by hand": accumulating,
    "accumulate, zero at the end": functools.partial(accumulating, at_end=True),
    "accumulate into zeros": functools.partial(accumulating, at_end=True, set_to_none=False),
    "micro-batches": micro_batches,
    "hooked": hooked,
    "step in backward": functools.partial(stepping_in_backward, False),
    "step in backward foreach": functools.partial(stepping_in_backward, True),
    "scaled": functools.partial(scaling, clip=False),
    "scaled and clipped": functools.partial(scaling, clip=True),
    "scaled, fused": functools.partial(scaling, clip=False, fused=True),
}


@pytest.mark.parametrize("name", STEPS)
def test_every_step_by_trace_and_by_record(name: str, tmp_path: Path) -> None:
    assert_works(STEPS[name], tmp_path)
    assert trace(STEPS[name](), name="job", target="cuda").operators  # such as a GPU would run it


# Jobs that do not always do the same


def run_and_check(
    step: TrainingStep, plan: Plan, directory: Path, iterate: Callable[[int], Any], turns: int
) -> tuple[Checkpointer, set[int]]:
    """Train; every checkpoint must be the truth of its boundary, skipped steps or not. Returns the steps saved, too."""
    truths: dict[int, Any] = {}
    with Checkpointer(
        step.models, step.optimizers, directory=directory, plan=plan, every=1, audit=1, keep_latest=99, on_error="raise"
    ) as checkpointer:
        for n, _ in enumerate(checkpointer.steps(turns)):
            # A turn without an optimizer step is part of the next iteration: the boundary before it stands.
            truths.setdefault(checkpointer.iteration, clone_state(step.models, step.optimizers))
            iterate(n)
        truths.setdefault(checkpointer.iteration, clone_state(step.models, step.optimizers))
    assert checkpointer.report()["breaches"] == checkpointer.report()["failed"] == 0
    for path in find(directory):
        assert_checkpoint_is(path, truths[int(path.name[5:])])
    return checkpointer, {int(path.name[5:]) for path in find(directory)}


def test_a_critic_that_is_trained_more_often(tmp_path: Path) -> None:
    """The plan's iteration trains both; most of the job's train the critic only, as the step itself decides."""
    step = adversarial(critic_steps=1)
    generator = step.optimizers["of_generator"].step
    plan = plan_by_trace(adversarial(critic_steps=1))

    def iterate(n: int) -> None:
        step.optimizers["of_generator"].step = generator if n % 3 == 2 else (lambda: None)  # type: ignore[method-assign]
        step.run(step.batch)

    assert run_and_check(step, plan, tmp_path, iterate, 9)[1] == set(range(1, 10))


@pytest.mark.parametrize("how", ["in the optimizer", "as a new group"])
def test_unfreezing_after_a_while_costs_the_plan_and_not_the_checkpoints(
    how: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    build = frozen_in_the_optimizer if how == "in the optimizer" else frozen_outside_of_the_optimizer
    plan = plan_by_trace(build())
    step = build()
    first = step.models["model"][0]  # type: ignore[index]

    def iterate(n: int) -> None:
        if n == 4:
            first.requires_grad_(True)
            if how == "as a new group":
                step.optimizers["optimizer"].add_param_group({"params": list(first.parameters()), "lr": 0.01})
        step.run(step.batch)

    before = first.weight.detach().clone()
    assert run_and_check(step, plan, tmp_path, iterate, 8)[1] == set(range(1, 9))
    assert not torch.equal(first.weight, before)
    lines = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    (said,) = [line for line in lines if "has another form" not in line]
    assert len(lines) == (2 if how == "as a new group" else 1)
    assert said.startswith("6 state tensors")  # Adam's for weight and bias
    assert "optimizer/0.weight.step is the first" in said
    assert "a new plan would hide them" in said


@pytest.mark.parametrize("every", [1, 6])
def test_a_job_that_was_unfrozen_starts_again_with_its_plan(
    every: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plan = plan_by_trace(frozen_in_the_optimizer())
    jobs = []
    for directory, stop in (("whole", None), ("cut", 8), ("cut", None)):
        step = frozen_in_the_optimizer()
        caplog.clear()
        with (
            contextlib.suppress(InterruptedError),
            Checkpointer(
                step.models, step.optimizers, directory=tmp_path / directory, plan=plan, every=every, audit=1
            ) as checkpointer,
        ):
            for n in checkpointer.steps(12):
                if n == stop:
                    raise InterruptedError
                step.models["model"][0].requires_grad_(n >= 6)  # type: ignore[index]
                step.run(step.batch)
        said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        assert [line.partition(" (")[0] for line in said] == ["6 state tensors"] * (every == 1 or stop is None)
        jobs.append(clone_state(step.models, step.optimizers))
    assert checkpointer.resumed_from == (8 if every == 1 else 6)
    assert [name for name in jobs[0] if not same_bits(jobs[0][name], jobs[2][name])] == []


def test_other_state_than_planned_is_refused_after_a_resume_too(tmp_path: Path) -> None:
    plan = plan_by_trace(plain(functools.partial(optim.SGD, lr=0.1, momentum=0.9)))
    for steps, refused in ((1, False), (2, True)):
        step = plain(functools.partial(optim.SGD, lr=0.1, momentum=0.9))
        end = pytest.raises(StorageError, match="step 1 is durable") if refused else contextlib.nullcontext()
        with end, Checkpointer(step.models, step.optimizers, directory=tmp_path, plan=plan, every=1) as checkpointer:
            for _ in checkpointer.steps(steps):
                if refused:
                    step.models["model"].register_buffer("further", torch.zeros(3))
                    with pytest.raises(MismatchError, match=r"model/further: float32\[3\] in the job, not in the plan"):
                        step.run(step.batch)
                        checkpointer.step()
                    break
                step.run(step.batch)


class Lookahead(Optimizer):
    """As public ones are written: around another, with a state of its own, and never made by Optimizer.__init__."""

    def __init__(self, inner: Optimizer, every: int) -> None:
        self.inner, self.every, self.param_groups, self.defaults = inner, every, inner.param_groups, inner.defaults
        self.state = collections.defaultdict(dict)
        for group in self.param_groups:
            group["counter"] = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step(closure)
        for group in self.param_groups:
            group["counter"] = (group["counter"] + 1) % self.every
            for parameter in group["params"]:
                slow = self.state[parameter].setdefault("slow", parameter.detach().clone())
                if group["counter"] == 0:
                    parameter.copy_(slow.lerp_(parameter, 0.5))

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)


class Handing(Optimizer):
    """Another: it hands on what the one inside has, and its slow weights are no state that an optimizer would know."""

    def __init__(self, inner: Optimizer) -> None:
        self.base, self.param_groups, self.state, self.defaults = inner, inner.param_groups, inner.state, inner.defaults

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.base.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.base.zero_grad(set_to_none)


def looking_ahead(every: int = 1, *, scheduled: bool = False, handing: bool = False) -> TrainingStep:
    model = network()
    inner = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    outer = Handing(inner) if handing else Lookahead(inner, every)
    if scheduled:  # which goes around the step as it is
        optim.lr_scheduler.ConstantLR(outer)
    optimizers = {"outer": outer} if handing else {"outer": outer, "inner": inner}
    iterate = iterating(model, outer)
    return TrainingStep(step=lambda _: iterate(), models={"model": model}, optimizers=optimizers, batch=X)


@pytest.mark.parametrize("options", [{}, {"scheduled": True}, {"handing": True}], ids=str)
def test_wrappers_that_torch_hangs_no_hooks_into(options: dict[str, Any], tmp_path: Path) -> None:
    assert_works(functools.partial(looking_ahead, **options), tmp_path)


@pytest.mark.parametrize("way", ["steps", "plain", "scheduled"])
def test_a_wrapper_is_seen_to_step(way: str, tmp_path: Path) -> None:
    plan, jobs, steps = plan_by_trace(looking_ahead(3)), [], []
    for directory, stop in (("whole", 8), ("cut", 4), ("cut", 8)):
        step = looking_ahead(3, scheduled=way == "scheduled")
        with Checkpointer(
            step.models, step.optimizers, directory=tmp_path / directory, plan=plan, every=plan.interval
        ) as checkpointer:
            left = range(checkpointer.iteration, stop)
            for _ in checkpointer.steps(stop) if way == "steps" else left:
                step.run(step.batch)
        jobs.append(clone_state(step.models, step.optimizers))
        steps.append(checkpointer.iteration)
    assert steps == [8, 4, 8]
    assert [name for name in jobs[0] if not same_bits(jobs[0][name], jobs[2][name])] == []
    others = Lookahead(optim.SGD(network().parameters(), lr=0.1), 1)  # no class was changed
    others.step()


def test_parameters_without_a_gradient_in_some_iterations(tmp_path: Path) -> None:
    step = plain(functools.partial(optim.Adam, lr=0.1))
    model = step.models["model"]
    plan = plan_by_trace(plain(functools.partial(optim.Adam, lr=0.1)))

    def iterate(n: int) -> None:
        step.optimizers["optimizer"].zero_grad()
        rows = X if n % 2 else F.pad(X[:, :0], (0, 12))
        out = model(rows) if n % 3 else model[3](model[2](torch.ones(8, 32)))  # type: ignore[index,operator]
        F.cross_entropy(out, LABELS).backward()
        step.optimizers["optimizer"].step()

    assert run_and_check(step, plan, tmp_path, iterate, 7)[1] == set(range(1, 8))


class Scaled:
    """A scaled training whose loss overflows now and then, so that the scaler skips the optimizer's step."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        self.model = network()
        self.optimizer = optim.Adam(self.model.parameters(), lr=0.01)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
        self.scales: list[float] = []

    def iterate(self, turn: int) -> None:
        self.scales.append(self.scaler.get_scale())
        self.optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(self.model(X * torch.rand(8, 1)), LABELS)
        self.scaler.scale(loss * (math.inf if turn in (2, 5, 6) else 1.0)).backward()
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()


def test_steps_that_a_scaler_skips(tmp_path: Path) -> None:
    plan = plan_by_trace(scaling(clip=True))
    job = Scaled()
    step = TrainingStep(
        step=lambda _: None, models={"model": job.model}, optimizers={"optimizer": job.optimizer}, batch=X
    )
    assert run_and_check(step, plan, tmp_path, job.iterate, 12)[1] == set(range(1, 10))
    assert len(job.scales) == 9 + 3
    assert job.scaler.get_scale() != 64.0


@pytest.mark.parametrize("stop", [3, 6, 8])
def test_a_scaled_job_goes_on_as_if_uncut(stop: int, tmp_path: Path) -> None:
    """Killed right after a skipped step, between two of them, and after the scale has changed."""
    plan = plan_by_trace(scaling(clip=True))

    def train(directory: Path, last: int) -> tuple[Scaled, int]:
        job = Scaled()
        with (
            contextlib.suppress(InterruptedError),
            Checkpointer(
                job.model, job.optimizer, directory=directory, plan=plan, every=1, audit=1, on_error="raise",
                state={"scaler": job.scaler, "turns": Turns(job)},
            ) as checkpointer,
        ):  # fmt: skip
            for turn in checkpointer.steps(12):
                assert turn == len(job.scales)
                if turn == last:
                    raise InterruptedError
                job.iterate(turn)
        return job, checkpointer.iteration

    whole, iterations = train(tmp_path / "whole", 99)
    assert iterations == 9
    train(tmp_path / "cut", stop)
    again, iterations = train(tmp_path / "cut", 99)
    assert iterations == 9
    assert again.scales == whole.scales
    assert again.scaler.state_dict() == whole.scaler.state_dict()
    truths = [clone_state({"model": job.model}, {"optimizer": job.optimizer}) for job in (whole, again)]
    assert [name for name in truths[0] if not same_bits(truths[0][name], truths[1][name])] == []


class Turns:
    """The turns of a job so far, skipped steps too: what a loop's own counter would be."""

    def __init__(self, job: Scaled) -> None:
        self._job = job

    def state_dict(self) -> dict[str, Any]:
        return {"scales": list(self._job.scales)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._job.scales[:] = state["scales"]


# Refused


def test_differentiable_optimizers_need_a_graph_that_no_loop_has() -> None:
    with pytest.raises(TraceError, match="a leaf Variable that requires grad is being used in an in-place operation"):
        trace(plain(functools.partial(optim.SGD, lr=0.1, differentiable=True)), name="n")
    step = plain(functools.partial(optim.SGD, lr=0.1, differentiable=True))
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad is being used in an in-place operation"):
        step.run(step.batch)  # torch says the same of the real one
