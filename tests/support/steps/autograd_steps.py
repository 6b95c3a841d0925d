"""Small training steps that use autograd freely: functions and operators of the user's own, torch.func, gradients of
gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, grad_and_value, jacrev, vmap

from checkflow.core.training_step import TrainingStep
from tests.support.steps.layer_steps import Build, adam, mean_square, perceptron, step_of

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
