"""Small training steps that the planner's tests trace, and run for real to compare."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode, conv_backward_flop, sdpa_backward_flop_count, sdpa_flop_count

from checkflow.core.training_step import TrainingStep

MakeOptimizer = Callable[[Any], torch.optim.Optimizer]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


class BatchNormNet(nn.Module):
    """Convolution, batch norm, dropout, and a second batch norm that runs twice in one forward."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(4)
        self.shared = nn.BatchNorm2d(4)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.bn(self.conv(x)))
        x = self.shared(self.drop(self.shared(x)))
        out: torch.Tensor = self.head(x.mean((2, 3)))
        return out


class ParallelNet(nn.Module):
    """Two branches from one input, joined, with a shortcut around both."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 6)
        self.left = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
        self.right = nn.Linear(6, 6)
        self.head = nn.Linear(12, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        joined = torch.cat([self.left(x) + x, torch.sigmoid(self.right(x))], dim=1)
        out: torch.Tensor = self.head(joined)
        return out


class TiedNet(nn.Module):
    """An embedding whose weight is also the output layer's, and a buffer that nothing writes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.mixer = nn.Linear(4, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.ones(4))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.mixer(self.embedding(tokens) * self.scale)).flatten(0, 1)
        return out


def flop_counter() -> FlopCounterMode:
    """torch's own counter, which also knows the attention of CPUs by the formulas that it has for the one of GPUs, and
    counts the gradient of a grouped convolution's weight by group."""

    def forward(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
        return sdpa_flop_count(query, shared(query, key), shared(query, value))

    def backward(gradient: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
        return sdpa_backward_flop_count(gradient, query, shared(query, key), shared(query, value))

    def shared(query: Any, key: Any) -> list[int]:
        batch, _, *others = key  # before torch 2.13 its formulas want as many heads of keys as of queries
        return [batch, query[1], *others]

    def convolution(gradient: Any, images: Any, weight: Any, *rest: Any, out_shape: Any, **_: Any) -> int:
        *others, groups, wanted = rest
        of_images, of_weight = (
            conv_backward_flop.__wrapped__(gradient, images, weight, *others, groups, mask, out_shape)
            for mask in ([wanted[0], False], [False, wanted[1]])
        )
        return int(of_images + of_weight // groups)

    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    attention_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    mended = {attention: forward, attention_backward: backward, torch.ops.aten.convolution_backward: convolution}
    return FlopCounterMode(display=False, custom_mapping=mended)


def cross_entropy(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x), y)


def batch_norm(optimizer: MakeOptimizer = sgd) -> TrainingStep:
    model = BatchNormNet()
    batch = (torch.randn(4, 3, 6, 6), torch.randint(5, (4,)))
    return TrainingStep(model, optimizer(model.parameters()), loss=cross_entropy, batch=batch)


def parallel(optimizer: MakeOptimizer = sgd) -> TrainingStep:
    model = ParallelNet()
    batch = (torch.randn(4, 6), torch.randint(5, (4,)))
    return TrainingStep(model, optimizer(model.parameters()), loss=cross_entropy, batch=batch)


def tied(optimizer: MakeOptimizer = sgd) -> TrainingStep:
    model = TiedNet()
    batch = (torch.randint(7, (2, 3)), torch.randint(7, (6,)))
    return TrainingStep(model, optimizer(model.parameters()), loss=cross_entropy, batch=batch)


def transformer(optimizer: MakeOptimizer = sgd) -> TrainingStep:
    model = nn.Transformer(8, nhead=2, num_encoder_layers=1, num_decoder_layers=1, dim_feedforward=16)
    batch = (torch.randn(3, 2, 8), torch.randn(4, 2, 8))

    def loss(model: nn.Module, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = model(source, target)
        return out.square().mean()

    return TrainingStep(model, optimizer(model.parameters()), loss=loss, batch=batch)


def micro_batches(optimizer: MakeOptimizer = sgd) -> TrainingStep:
    model = BatchNormNet()
    batch = (torch.randn(4, 3, 6, 6), torch.randint(5, (4,)))
    return TrainingStep(model, optimizer(model.parameters()), loss=cross_entropy, batch=batch, micro_batches=3)


class OffloadedNet(nn.Module):
    """Convolutions and a wide linear layer, whose saved activations wait for their backward in host memory.

    Args:
        offload: "no", "pageable" (``save_on_cpu()``) or "pinned" (``save_on_cpu(pin_memory=True)``).
    """

    def __init__(self, width: int, offload: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(inputs, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU())
            for inputs in (3, width, width)
        )
        self.head = nn.Sequential(nn.Linear(width * 64, 4 * width), nn.Tanh(), nn.Linear(4 * width, 10))
        self.offload = offload

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        saving = torch.autograd.graph.save_on_cpu(pin_memory=self.offload == "pinned")
        with contextlib.nullcontext() if self.offload == "no" else saving:
            for block in self.blocks:
                x = block(x)
        out: torch.Tensor = self.head(x.flatten(1))
        return out


def offloading(batch_size: int = 16, width: int = 32, offload: str = "pageable") -> TrainingStep:
    """A training step that uses the link itself; ``offload="no"`` is the same step without."""
    model = OffloadedNet(width, offload)
    batch = (torch.randn(batch_size, 3, 8, 8), torch.randint(10, (batch_size,)))
    return TrainingStep(model, sgd(model.parameters()), loss=cross_entropy, batch=batch)


def adversarial() -> TrainingStep:
    """A generator and a critic, each with its own optimizer, clipping, and an averaged copy of the generator."""
    generator, critic = (
        nn.Linear(3, 6),
        nn.Sequential(nn.Linear(6, 4, bias=False), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1)),
    )
    average = nn.Linear(3, 6).requires_grad_(False)
    update_generator = torch.optim.Adam(generator.parameters(), lr=1e-3)
    update_critic = torch.optim.SGD(critic.parameters(), lr=0.1, momentum=0.9)
    captured = list(critic.parameters())  # held outside of the module, as many training scripts do

    def step(images: torch.Tensor) -> torch.Tensor:
        fake = generator(images[:, :3])
        loss = F.softplus(critic(fake.detach())).mean() + F.softplus(-critic(images)).mean()
        update_critic.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(captured, 1.0)
        update_critic.step()
        update_generator.zero_grad()
        (-critic(fake).mean()).backward()
        update_generator.step()
        with torch.no_grad():
            for slow, fast in zip(average.parameters(), generator.parameters(), strict=True):
                slow.lerp_(fast, 0.1)
        return loss

    return TrainingStep(
        step=step,
        models={"generator": generator, "critic": critic, "average": average},
        optimizers={"update_generator": update_generator, "update_critic": update_critic},
        batch=torch.randn(5, 6),
    )


BUILDERS: dict[str, Callable[[], TrainingStep]] = {
    "batch_norm": batch_norm,
    "parallel": parallel,
    "tied": tied,
    "transformer": transformer,
    "micro_batches": micro_batches,
    "adversarial": adversarial,
}


def on_meta(build: Callable[[], TrainingStep]) -> TrainingStep:
    """Without any memory: to be traced, not run."""
    with torch.device("meta"):
        return build()
