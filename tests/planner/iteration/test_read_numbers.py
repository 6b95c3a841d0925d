"""Numbers that a training step reads: they flow, what depends on them is tried, and the user's own are as before."""

from __future__ import annotations

import collections
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from checkflow.core.errors import ModelError, TraceError
from checkflow.core.training_step import TrainingStep
from checkflow.planner.trace.trace import trace
from tests.support.planned_jobs import assert_every_checkpoint_is_true, plan_by_trace

X, LABELS = torch.randn(8, 6, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 3
Look = Callable[[torch.Tensor, nn.Linear], Any]


def looking(look: Look) -> TrainingStep:
    """A training step that looks at its loss and its model before the optimizer steps."""
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(batch: Any) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        look(loss, model)
        optimizer.step()
        return loss

    return TrainingStep(step=step, models={"m": model}, optimizers={"o": optimizer}, batch=(X, LABELS))


class Meter:
    def __init__(self) -> None:
        self.total, self.count, self.best = 0.0, 0, math.inf
        self.history: list[float] = []

    def update(self, value: float, n: int = 1) -> None:
        self.total += value * n
        self.count += n
        self.best = min(self.best, value)
        self.history.append(round(value, 3))

    @property
    def mean(self) -> float:
        return self.total / self.count


def accumulated() -> Look:
    total = 0.0

    def look(loss: torch.Tensor, model: nn.Linear) -> None:
        nonlocal total
        total += loss.item() * 8

    return look


def metered() -> Look:
    meter = Meter()

    def look(loss: torch.Tensor, model: nn.Linear) -> str:
        meter.update(loss.item(), 8)
        return json.dumps({"mean": meter.mean, "best": meter.best})

    return look


def best() -> Look:
    record = {"best": math.inf, "epoch": 0}

    def look(loss: torch.Tensor, model: nn.Linear) -> None:
        if loss.item() < record["best"]:
            record["best"] = loss.item()
            record["epoch"] += 1

    return look


def averaged_tensor() -> Look:
    recent: collections.deque[torch.Tensor] = collections.deque(maxlen=3)
    return lambda loss, model: recent.append(loss.detach()) or torch.stack(list(recent)).mean().item()


def finite(loss: torch.Tensor, model: nn.Linear) -> None:
    if not math.isfinite(loss.item()):
        raise SystemExit("the loss is lost")


def lost(loss: torch.Tensor, model: nn.Linear) -> None:
    if torch.isnan(loss):
        raise RuntimeError("the loss is lost")


def early(loss: torch.Tensor, model: nn.Linear) -> str:
    return "good" if float(loss) < 0.1 or loss.item() > 50 else "well"


LOOKS: dict[str, Look] = {
    "sum over iterations": accumulated(),
    "meter": metered(),
    "best": best(),
    "tensors kept": averaged_tensor(),
    "formats": lambda loss, model: f"{loss.item():.4f} {loss:.3f} {loss} {loss.item()!r}",
    "conversions": lambda loss, model: (float(loss), int(loss), round(loss.item(), 2), math.exp(loss.item())),
    "list": lambda loss, model: sum(model.bias.tolist()) / max(model.bias.tolist()),
    "array": lambda loss, model: np.mean(model.bias.detach().cpu().numpy() ** 2),
    "arrays of lists": lambda loss, model: np.asarray([loss.item(), float(loss)]).std(),
    "accuracy": lambda loss, model: (model(X).argmax(1) == LABELS).sum().item() / 8,
    "norm": lambda loss, model: f"{nn.utils.get_total_norm([p.grad for p in model.parameters()]).item():g}",
    "finite": finite,
    "lost": lost,
    "words": early,
}


@pytest.mark.parametrize("name", LOOKS)
def test_what_only_looks_is_planned_and_every_checkpoint_is_the_truth(name: str, tmp_path: Path) -> None:
    step = looking(LOOKS[name])
    plan = plan_by_trace(step)
    assert trace(looking(LOOKS[name]), name="n", target="cuda").operators
    assert_every_checkpoint_is_true(step, plan, tmp_path, iterations=3)


def test_a_number_is_an_operator_that_waits_for_the_device() -> None:
    plain = trace(looking(lambda loss, model: None), name="n").operators
    read = trace(looking(lambda loss, model: loss.item()), name="n").operators
    assert [o.target for o in read if o not in plain] == ["aten._local_scalar_dense.default"]


def test_what_the_user_counts_is_as_it_was() -> None:
    meter, totals, counts, seen = Meter(), [1.5], {"n": 3}, {1}
    step_number, words = 7, "before"

    def look(loss: torch.Tensor, model: nn.Linear) -> None:
        nonlocal step_number, words
        step_number += 1
        words = f"{loss.item()}"
        meter.update(loss.item())
        totals.append(loss.item())
        counts["n"] += int(loss)
        seen.add(step_number)
        GLOBALS["last"] = loss

    trace(looking(look), name="n")
    assert (step_number, words, totals, counts, seen) == (7, "before", [1.5], {"n": 3}, {1})
    assert vars(meter) == vars(Meter())
    assert GLOBALS == {}


GLOBALS: dict[str, Any] = {}


# What decides is refused, by operator and line.


def skips(loss: torch.Tensor, model: nn.Linear) -> None:
    if loss.item() > 3:  # the line
        model.weight.grad = None


def scales(loss: torch.Tensor, model: nn.Linear) -> None:
    if float(loss) > 1.5:  # the line
        model.weight.grad *= 2


def scales_late(loss: torch.Tensor, model: nn.Linear) -> None:
    total = sum(p.grad.square().sum().item() for p in model.parameters()) ** 0.5
    limit = 1.0 if total < 1 else total  # the line
    if limit != 1.0:
        model.weight.grad /= limit


def waits(loss: torch.Tensor, model: nn.Linear) -> None:
    error = loss
    while error.item() > 1e-3:  # the line
        error = error / 2


def waits_for_good(loss: torch.Tensor, model: nn.Linear) -> None:
    while not loss.item() > 1e9:  # the line
        pass


def chooses_by_truth(loss: torch.Tensor, model: nn.Linear) -> None:
    if (model.weight.grad > 0).all():  # the line
        model.weight.grad.zero_()


def takes_so_many(loss: torch.Tensor, model: nn.Linear) -> None:
    model.weight.grad[: int((LABELS == 1).sum())].zero_()  # the line


def insists(loss: torch.Tensor, model: nn.Linear) -> None:
    assert torch.isfinite(loss).all()  # the line


@pytest.mark.parametrize(
    "look", [skips, scales, scales_late, waits, waits_for_good, chooses_by_truth, takes_so_many, insists]
)
@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_what_a_number_decides_is_refused_by_operator_and_line(
    look: Look, target: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("checkflow.planner.iteration.read_numbers._PATIENCE", 300)
    with pytest.raises(TraceError) as caught:
        trace(looking(look), name="mine", target=target)
    message = str(caught.value)
    assert message.startswith("cannot trace mine: aten._local_scalar_dense.default needs the values of tensors at ")
    assert __file__ in message
    assert "# the line" in message
    assert "let checkflow record a real iteration instead (Checkpointer(plan=None))" in message
    assert "\n" not in message


class Twins(nn.Module):
    """Modules of the same shape, each with all kinds of state, of which the step may choose one."""

    def __init__(self, choose: Callable[[Twins, torch.Tensor], nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right = (nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)) for _ in range(2))
        self.choose = choose
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("spare", torch.zeros(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean, self.spare = 0.9 * self.spare + 0.1 * x.mean(0).detach(), self.mean
        return self.choose(self, x)(x) + self.mean  # type: ignore[no-any-return]


def choosing(choose: Callable[[Twins, torch.Tensor], nn.Module]) -> TrainingStep:
    model = Twins(choose)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # which makes no state for what was never chosen
    return TrainingStep(model, optimizer, loss=lambda model, x: model(x).square().mean(), batch=torch.randn(8, 6))


def by_sum(model: Twins, x: torch.Tensor) -> nn.Module:
    return model.left if x.sum() > 0 else model.right  # the line


def by_index(model: Twins, x: torch.Tensor) -> nn.Module:
    return (model.left, model.right)[x.argmax().item()]  # type: ignore[index]  # the line


def by_plain_index(model: Twins, x: torch.Tensor) -> nn.Module:
    return {0: model.left, 1: model.right}[int(x.argmax())]  # the line


def by_plain_truth(model: Twins, x: torch.Tensor) -> nn.Module:
    return (model.left, model.right)[int(x.sum() > 0)]  # the line


@pytest.mark.parametrize("choose", [by_sum, by_index, by_plain_index, by_plain_truth])
@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_a_choice_between_modules_of_one_shape_is_refused(choose: Any, target: Any) -> None:
    with pytest.raises(TraceError, match=r"default needs the values of tensors at .*# the line"):
        trace(choosing(choose), name="n", target=target)


@pytest.mark.parametrize("change", [lambda one, other: one.copy_(other), lambda one, other: other.mul_(one)])
def test_a_choice_between_buffers_of_one_shape_is_refused(change: Any) -> None:
    def choose(model: Twins, x: torch.Tensor) -> nn.Module:
        change(*((model.mean, model.spare) if x.sum() > 0 else (model.spare, model.mean)))  # the line
        return model.left

    with pytest.raises(TraceError, match=r"default needs the values of tensors at .*# the line"):
        trace(choosing(choose), name="n")


def test_a_choice_between_optimizers_of_one_shape_is_refused_where_their_steps_are_opaque() -> None:
    tables = nn.ModuleList(nn.Embedding(10, 3, sparse=True) for _ in range(2))
    optimizers = {str(i): torch.optim.SparseAdam(table.parameters()) for i, table in enumerate(tables)}

    def step(batch: torch.Tensor) -> None:
        loss = sum(table(batch).sum() for table in tables)
        loss.backward()
        for optimizer in optimizers.values() if step.first else ():  # type: ignore[attr-defined]
            optimizer.step()  # makes the state
        step.first = False  # type: ignore[attr-defined]
        optimizers["0" if loss > 0 else "1"].step()  # the line

    step.first = True  # type: ignore[attr-defined]
    job = TrainingStep(step=step, models={"m": tables}, optimizers=optimizers, batch=torch.arange(4))
    with pytest.raises(TraceError, match=r"default needs the values of tensors at .*# the line"):
        trace(job, name="n")


def test_buffers_that_are_replaced_and_exchanged_are_the_same_state_in_each_iteration(tmp_path: Path) -> None:
    kept: list[torch.Tensor] = []

    def choose(model: Twins, x: torch.Tensor) -> nn.Module:
        kept.append(x.sum())
        (x * torch.stack(kept[-3:]).sum().item()).relu()  # one more is kept in each iteration
        return nn.Sequential(model.left, model.right)

    step = choosing(choose)
    plan = plan_by_trace(step)
    kept.clear()
    assert_every_checkpoint_is_true(step, plan, tmp_path, iterations=3)


def test_a_loop_that_is_not_entered_is_named_where_something_else_fails_for_it() -> None:
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch: Any) -> None:
        x, loss = batch[0], batch[0].sum()
        while x.norm().item() > 1:  # the line
            x = x / 2
            loss = F.cross_entropy(model(x), batch[1])
        loss.backward()  # fails
        optimizer.step()

    with pytest.raises(TraceError) as caught:
        trace(TrainingStep(step=step, models={"m": model}, optimizers={"o": optimizer}, batch=(X, LABELS)), name="mine")
    message = str(caught.value)
    assert message.startswith("cannot trace mine: aten._local_scalar_dense.default needs the values of tensors at ")
    assert message.index("# the line") < message.index("# fails") < message.index("does not require grad")
    assert "\n" not in message


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_loss_that_is_a_number_is_no_loss(micro_batches: int) -> None:
    model = nn.Linear(6, 3)
    step = TrainingStep(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        loss=lambda model, x, y: F.cross_entropy(model(x), y).item(),
        batch=(X, LABELS),
        micro_batches=micro_batches,
    )
    for run in (lambda: step.run(step.batch), lambda: trace(step, name="n")):
        with pytest.raises(ModelError, match=r"^loss= returned a float, not a tensor: .* without \.item\(\)$"):
            run()


def test_a_number_is_called_as_python_calls_it() -> None:
    with pytest.raises(TraceError, match="'float' object has no attribute 'backward'"):
        trace(looking(lambda loss, model: loss.item().backward()), name="n")  # type: ignore[attr-defined]


def test_the_same_place_of_a_cycle_is_tried() -> None:
    """What runs every second time does so in the tried iteration as in the traced one."""
    turn = 0

    def look(loss: torch.Tensor, model: nn.Linear) -> None:
        nonlocal turn
        turn += 1
        if turn % 2:
            model.bias.grad.mul_(0.5)
        loss.item()

    targets = [o.target for o in trace(looking(look), name="n").operators]
    assert "aten.mul_.Tensor" not in targets  # the traced iteration is the second
    assert turn == 0
