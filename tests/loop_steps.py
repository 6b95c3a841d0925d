"""Small training steps, by what their loops do: autograd used freely, averages and other writes after the step, state
kept in modules, batches and results of every kind."""

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
from torch.func import functional_call, grad, grad_and_value, jacrev, vmap
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn, update_bn

from checkflow.training_step import TrainingStep
from tests.layer_steps import Build, adam, mean_square, momentum, perceptron, step_of

# Functions and operators of the user's own


class Power(torch.autograd.Function):
    """Saves a tensor, returns one that has no gradient and a value that is no tensor."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, power: int) -> Any:
        ctx.save_for_backward(x)
        ctx.power = power
        positive = x > 0
        ctx.mark_non_differentiable(positive)
        return x**power, positive, "power"

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor, *_: Any) -> Any:
        (x,) = ctx.saved_tensors
        return gradient * ctx.power * x ** (ctx.power - 1), None


class Sine(torch.autograd.Function):
    """With its context set up apart, as torch.func wants it."""

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return x.sin()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient * ctx.saved_tensors[0].cos()


class ClampAndCount(torch.autograd.Function):
    """Works in place, and writes a buffer on the way."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, statistics: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        statistics.mul_(0.9).add_(x.mean(0), alpha=0.1)
        ctx.save_for_backward(x.clone())
        ctx.mark_dirty(x)
        return x.clamp_(min=0)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        return gradient * (ctx.saved_tensors[0] > 0), None


@torch.library.custom_op("checkflow_steps::double", mutates_args=())
def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@double.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("checkflow_steps::triple", mutates_args=())
def triple(x: torch.Tensor) -> torch.Tensor:
    return x * 3


@torch.library.custom_op("checkflow_steps::track", mutates_args=("statistics",))
def track(x: torch.Tensor, statistics: torch.Tensor) -> None:
    statistics.mul_(0.9).add_(x.mean(0))


double.register_autograd(lambda ctx, gradient: gradient * 2)
triple.register_autograd(lambda ctx, gradient: gradient * 3)


class Statistics(nn.Module):
    """A linear layer with statistics of its output, which ``follow`` updates in forward."""

    def __init__(self, follow: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 4)
        self.follow = follow
        self.register_buffer("statistics", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.follow(self.linear(x), self.statistics)


def tracked(x: torch.Tensor, statistics: torch.Tensor) -> torch.Tensor:
    track(x.detach(), statistics)
    return x * statistics


def through(function: Callable[[torch.Tensor], torch.Tensor]) -> TrainingStep:
    return step_of(nn.Linear(6, 4), torch.randn(4, 6), loss=lambda m, x: function(m(x)).square().mean())


def powered(x: torch.Tensor) -> torch.Tensor:
    out, positive, name = Power.apply(x, 2)
    assert name == "power"
    return out * positive  # type: ignore[no-any-return]


OWN: Mapping[str, Build] = {
    "function": lambda: through(powered),
    "function apart": lambda: through(Sine.apply),
    "function that writes": lambda: step_of(Statistics(ClampAndCount.apply), torch.randn(4, 6)),
    "operator": lambda: through(double),
    "operator that writes": lambda: step_of(Statistics(tracked), torch.randn(4, 6)),
}

# Gradients of gradients, of samples, of functions


def penalised() -> TrainingStep:
    """A critic with a gradient penalty (WGAN-GP), and its generator."""
    critic = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    generator = nn.Linear(3, 6)
    update_critic, update_generator = adam(critic.parameters()), adam(generator.parameters())

    def step(images: torch.Tensor) -> torch.Tensor:
        fake = generator(torch.randn(4, 3)).detach()
        share = torch.rand(4, 1)
        mixed = (share * images + (1 - share) * fake).requires_grad_()
        (slope,) = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)
        loss: torch.Tensor = critic(fake).mean() - critic(images).mean() + (slope.norm(2, dim=1) - 1).square().mean()
        update_critic.zero_grad()
        loss.backward()
        update_critic.step()
        update_generator.zero_grad()
        (-critic(generator(torch.randn(4, 3))).mean()).backward()
        update_generator.step()
        return loss

    models = {"critic": critic, "generator": generator}
    optimizers = {"update_critic": update_critic, "update_generator": update_generator}
    return TrainingStep(step=step, models=models, optimizers=optimizers, batch=torch.randn(4, 6))


def double_backward() -> TrainingStep:
    layers = (nn.Conv1d(2, 4, 3), nn.BatchNorm1d(4), nn.LeakyReLU(), nn.Flatten(), nn.Linear(24, 1))

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return slope.square().sum() + mean_square(model, x)

    return step_of(nn.Sequential(*layers), torch.randn(3, 2, 8), loss=loss)


def meta_learning() -> TrainingStep:
    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        weights = dict(model.named_parameters())
        first = functional_call(model, weights, (x,)).square().mean()
        slopes = torch.autograd.grad(first, list(weights.values()), create_graph=True)
        adapted = {key: weight - 0.1 * slope for (key, weight), slope in zip(weights.items(), slopes, strict=True)}
        return functional_call(model, adapted, (x,)).square().mean()

    return step_of(nn.Linear(6, 2), torch.randn(4, 6), loss=loss)


def assigned(gradients: Callable[[nn.Module, Any], Mapping[str, torch.Tensor]], batch: Any) -> TrainingStep:
    """The gradients are computed by functions, and given to the optimizer."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = adam(model.parameters())

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        found = gradients(model, batch)
        for name, parameter in model.named_parameters():
            parameter.grad = found[name]
        optimizer.step()

    return TrainingStep(model, optimizer, step=step, batch=batch)


def clipped_by_sample(model: nn.Module, batch: Any) -> Mapping[str, torch.Tensor]:
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def loss(weights: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(functional_call(model, weights, (x[None],))[0], y)

    samples = vmap(grad(loss), in_dims=(None, 0, 0))(weights, *batch)
    return {
        name: (each / each.flatten(1).norm(dim=1).clamp(min=1).view(-1, *[1] * (each.dim() - 1))).mean(0)
        for name, each in samples.items()
    }


def by_function(model: nn.Module, x: torch.Tensor) -> Mapping[str, torch.Tensor]:
    def loss(weights: Any) -> torch.Tensor:
        return functional_call(model, weights, (x,)).square().mean()

    return grad_and_value(loss)(dict(model.named_parameters()))[0]  # type: ignore[no-any-return]


FUNCTIONAL: Mapping[str, Build] = {
    "gradient penalty": penalised,
    "double backward": double_backward,
    "meta-learning": meta_learning,
    "per-sample gradients": lambda: assigned(clipped_by_sample, (torch.randn(4, 6), torch.randn(4, 1))),
    "torch.func.grad": lambda: assigned(by_function, torch.randn(4, 6)),
    "functional_call": lambda: step_of(
        perceptron(),
        torch.randn(4, 6),
        loss=lambda m, x: functional_call(m, dict(m.state_dict(keep_vars=True)), (x,)).square().mean(),
    ),
    "jacobian": lambda: step_of(
        nn.Linear(3, 2), torch.randn(4, 3), loss=lambda m, x: vmap(jacrev(m))(x).square().mean()
    ),
    "vmap with dropout": lambda: step_of(
        nn.Linear(6, 4),
        torch.randn(4, 6),
        loss=lambda m, x: vmap(lambda one: F.dropout(m(one)), randomness="different")(x).square().mean(),
    ),
    "forward mode": lambda: step_of(
        nn.Linear(6, 2),
        torch.randn(4, 6),
        loss=lambda m, x: torch.func.jvp(functools.partial(mean_square, m), (x,), (torch.ones_like(x),))[1],
    ),
}

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
