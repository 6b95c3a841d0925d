"""Small training steps, by what their loops do: averages and other writes after the step, state that modules keep,
batches and results of every kind."""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn, update_bn

from checkflow.core.training_step import TrainingStep
from tests.support.steps.layer_steps import Build, adam, mean_square, momentum, perceptron, step_of

# Writes after the step


def followed(
    follow: Callable[[nn.Module, nn.Module], Any], second: Callable[[nn.Module], nn.Module] = copy.deepcopy
) -> TrainingStep:
    """A second model, which does something with the first one after each of its steps."""
    model = perceptron()
    average = second(model)
    optimizer = adam(model.parameters())

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = mean_square(model, x)
        loss.backward()
        optimizer.step()
        follow(average, model)
        return loss

    models = {"model": model, "average": average}
    return TrainingStep(step=step, models=models, optimizers={"optimizer": optimizer}, batch=torch.randn(4, 6))


def update(average: Any, model: nn.Module) -> None:
    average.update_parameters(model)


def update_with_statistics(average: Any, model: nn.Module) -> None:
    average.update_parameters(model)
    update_bn([torch.ones(4, 6)], average)


@torch.no_grad()
def average_in_place(average: nn.Module, model: nn.Module) -> None:
    for slow, fast in zip(average.parameters(), model.parameters(), strict=True):
        slow.mul_(0.9).add_(fast, alpha=0.1)
    for slow, fast in zip(average.buffers(), model.buffers(), strict=True):
        slow.copy_(fast)


def average_by_state_dict(average: nn.Module, model: nn.Module) -> None:
    slow = average.state_dict()
    for key, fast in model.state_dict().items():
        slow[key] = slow[key].lerp(fast, 0.1) if fast.is_floating_point() else fast
    average.load_state_dict(slow)


def soft_update(average: nn.Module, model: nn.Module) -> None:
    for slow, fast in zip(average.parameters(), model.parameters(), strict=True):
        slow.data.copy_(0.95 * slow.data + 0.05 * fast.data)


def without_optimizer(update: Callable[[nn.Parameter], Any]) -> TrainingStep:
    model = nn.Linear(6, 2)

    def step(x: torch.Tensor) -> None:
        model.zero_grad()
        mean_square(model, x).backward()
        for parameter in model.parameters():
            update(parameter)

    return TrainingStep(step=step, models={"model": model}, batch=torch.randn(4, 6))


def assign(parameter: Any) -> None:
    parameter.data = parameter.data - 0.1 * parameter.grad


def copy_in(parameter: Any) -> None:
    parameter.data.copy_(parameter.data - 0.1 * parameter.grad)


def clamped() -> TrainingStep:
    model = nn.Linear(6, 1)
    optimizer = momentum(model.parameters())

    def step(x: torch.Tensor) -> None:
        for parameter in model.parameters():
            parameter.data = parameter.data * 0.999  # before anything has run
        optimizer.zero_grad()
        model(x).mean().backward()
        optimizer.step()
        for parameter in model.parameters():
            parameter.data.clamp_(-0.1, 0.1)

    return TrainingStep(model, optimizer, step=step, batch=torch.randn(4, 6))


AFTERWARDS: Mapping[str, Build] = {
    "AveragedModel": lambda: followed(update, AveragedModel),
    "AveragedModel multi": lambda: followed(
        update, functools.partial(AveragedModel, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    ),
    "AveragedModel single": lambda: followed(update, functools.partial(AveragedModel, avg_fn=get_ema_avg_fn(0.9))),
    "AveragedModel with update_bn": lambda: followed(update_with_statistics, AveragedModel),
    "average in place": lambda: followed(average_in_place),
    "average by state_dict": lambda: followed(average_by_state_dict),
    "target network": lambda: followed(soft_update),
    "clamp": clamped,
    "data assigned": lambda: without_optimizer(assign),
    "data copied": lambda: without_optimizer(copy_in),
}

# What modules and loops keep


class Remembering(nn.Module):
    """Hidden state kept between iterations: in an attribute, in a list that grows, in a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(5, 6)
        self.hidden: torch.Tensor | None = None
        self.history: list[torch.Tensor] = []
        self.last: dict[str, torch.Tensor] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.cell(x, torch.zeros(x.shape[0], 6) if self.hidden is None else self.hidden)
        self.hidden = hidden.detach()
        self.history.append(hidden.detach())
        self.last["hidden"] = hidden
        return hidden


class Buffered(nn.Module):
    """Hidden state in buffers, one of them replaced, one of no interest to a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(5, 6)
        self.register_buffer("hidden", torch.zeros(3, 6))
        self.register_buffer("scratch", torch.zeros(3, 6), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.cell(x, self.hidden)
        self.hidden = hidden.detach()
        self.scratch.copy_(hidden.detach())
        return hidden


class Queue(nn.Module):
    """Keys in a ring, a pointer that decides where the next go, a momentum encoder (MoCo), a codebook (VQ)."""

    def __init__(self) -> None:
        super().__init__()
        self.query = perceptron()
        self.key = copy.deepcopy(self.query).requires_grad_(False)
        self.register_buffer("queue", torch.randn(4, 8))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))
        self.register_buffer("codes", torch.randn(5, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for slow, fast in zip(self.key.parameters(), self.query.parameters(), strict=True):
                slow.data = slow.data * 0.9 + fast.data * 0.1
            keys = self.key(x)
        out = self.query(x)
        scores: torch.Tensor = out @ self.queue.clone()
        with torch.no_grad():
            start = int(self.pointer)
            self.queue[:, start : start + 4] = keys.t()
            self.pointer[0] = (start + 4) % 8
            near = F.one_hot(torch.cdist(out, self.codes).argmin(1), 5).float()
            self.codes.data.mul_(0.9).add_(near.t() @ out, alpha=0.1)
        return scores


class Counting(nn.Module):
    """Initialises itself in its first forward, counts its calls in a hook, and does other things every second time."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 4)
        self.register_buffer("ready", torch.zeros((), dtype=torch.bool))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("scale", torch.ones(4))
        self.register_forward_pre_hook(lambda module, _: module.calls.add_(1) and None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.linear(x)
        if not self.ready:
            self.scale.copy_(out.detach().std(0))
            self.ready.fill_(True)
        return out / self.scale if self.calls % 2 == 0 else out * 2


def validated(no_gradients: Callable[[], Any]) -> TrainingStep:
    model = perceptron()
    optimizer = adam(model.parameters())
    held_out = torch.randn(4, 6)

    def step(x: torch.Tensor) -> torch.Tensor:
        model.train()
        optimizer.zero_grad()
        mean_square(model, x).backward()
        optimizer.step()
        model.eval()
        with no_gradients():
            return mean_square(model, held_out)

    return TrainingStep(model, optimizer, step=step, batch=torch.randn(4, 6))


def asking() -> TrainingStep:
    """Asks where things are, and puts others there."""

    def loss(model: Any, x: torch.Tensor) -> torch.Tensor:
        here = next(model.parameters()).device
        out: torch.Tensor = model(x.to(here)) + torch.zeros(4, device=here) + x.new_zeros(4)
        return (out if out.is_cuda else out + torch.arange(4, device=model.weight.device)).square().mean()

    return step_of(nn.Linear(6, 4), torch.randn(4, 6), loss=loss)


KEPT: Mapping[str, Build] = {
    "hidden state": lambda: step_of(Remembering(), torch.randn(3, 5)),
    "hidden state in buffers": lambda: step_of(Buffered(), torch.randn(3, 5)),
    "queue": lambda: step_of(Queue(), torch.randn(4, 6), optimizer=lambda p: adam([q for q in p if q.requires_grad])),
    "counting": lambda: step_of(Counting(), torch.randn(4, 6)),
    "validation": lambda: validated(torch.no_grad),
    "validation in inference mode": lambda: validated(torch.inference_mode),
    "asking for devices": asking,
    "data parallel": lambda: step_of(nn.DataParallel(perceptron()), torch.randn(4, 6)),
}

# Batches and results


@dataclasses.dataclass
class Both:
    x: torch.Tensor
    y: torch.Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class Fixed:
    x: torch.Tensor
    y: torch.Tensor


Named = collections.namedtuple("Named", ["x", "y"])


class Output(collections.OrderedDict[str, Any]):
    """As models of the transformers library return: a dictionary whose items are attributes, too."""

    def __init__(self, **items: Any) -> None:
        super().__init__(items)
        vars(self).update(items)


class Answering(nn.Module):
    def __init__(self, kind: Callable[..., Any]) -> None:
        super().__init__()
        self.layers, self.kind = perceptron(), kind

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        out = self.layers(x)
        return self.kind(x=out, y=F.mse_loss(out, y))


def structured(batch: Any, take: Callable[[Any], Any], kind: Callable[..., Any] = Both) -> TrainingStep:
    """A batch of some kind, and a result of some kind, which the loop holds until the next one."""
    model = Answering(kind)
    optimizer = momentum(model.parameters())

    def step(batch: Any) -> Any:
        optimizer.zero_grad()
        out = model(*take(batch))
        (out["y"] if isinstance(out, dict) else out.y).backward()
        optimizer.step()
        return out

    return TrainingStep(model, optimizer, step=step, batch=batch)


def pair() -> dict[str, torch.Tensor]:
    return {"x": torch.randn(4, 6), "y": torch.randn(4, 4)}


def by_key(batch: Any) -> Any:
    return batch["x"], batch["y"]


def by_name(batch: Any) -> Any:
    return batch.x, batch.y


STRUCTURES: Mapping[str, Build] = {
    "dictionary": lambda: structured(pair(), by_key, dict),
    "dataclass": lambda: structured(Both(**pair()), by_name, Both),
    "frozen dataclass": lambda: structured(Fixed(**pair()), by_name, Fixed),
    "named tuple": lambda: structured(Named(**pair()), by_name, Named),
    "dictionary of one's own": lambda: structured(collections.UserDict(pair()), by_key, Output),
    "nested": lambda: structured([{"k": Both(**pair())}], lambda batch: by_name(batch[0]["k"])),
}
