"""The models whose training throughput is published, as their sources train them: built on ``meta``, never run.

Only what the roofline sees is told: shapes, dtypes, order. Weights are not initialised, losses are the usual ones.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn

from checkflow.core.training_step import TrainingStep
from checkflow.models.mnasnet import MNASNet
from checkflow.models.resnet18 import ResNet18
from checkflow.models.vgg11 import VGG11

# "float32": on the general units. "tf32": convolutions and products on the matrix units. "float16" and "bfloat16": by
# autocast. "float16 model": the model is in float16 and the optimizer updates a float32 copy (Apex's level O2).
Precision = Literal["float32", "tf32", "float16", "bfloat16", "float16 model"]
# How images lie in memory: channel by channel (torch's default), or pixel by pixel (``channels_last``).
Layout = Literal["NCHW", "NHWC"]
Attention = Literal["plain", "masked", "causal kernel"]
IMAGE_SIZE = 224
CLASSES = 1000


class Bottleneck(nn.Module):
    """The block of ResNet-50 and deeper. Version 1 has the stride in the first convolution, 1.5 in the second."""

    def __init__(self, channels: int, middle: int, stride: int, version: str) -> None:
        super().__init__()
        outputs = 4 * middle
        first, second = (stride, 1) if version == "1" else (1, stride)
        self.body = nn.Sequential(
            nn.Conv2d(channels, middle, 1, first, bias=False),
            nn.BatchNorm2d(middle),
            nn.ReLU(inplace=True),
            nn.Conv2d(middle, middle, 3, second, 1, bias=False),
            nn.BatchNorm2d(middle),
            nn.ReLU(inplace=True),
            nn.Conv2d(middle, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(channels, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.body(x)
        y += self.shortcut(x)
        out: torch.Tensor = self.relu(y)
        return out


def resnet(depth: Literal[50, 152], version: str = "1.5") -> nn.Module:
    layers: list[nn.Module] = [
        nn.Conv2d(3, 64, 7, 2, 3, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
    ]
    channels = 64
    third, fourth = {50: (4, 6), 152: (8, 36)}[depth]
    for middle, blocks, stride in ((64, 3, 1), (128, third, 2), (256, fourth, 2), (512, 3, 2)):
        for block in range(blocks):
            layers.append(Bottleneck(channels, middle, stride if block == 0 else 1, version))
            channels = 4 * middle
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, CLASSES))


def alexnet() -> nn.Module:
    """As tf_cnn_benchmarks has it: 384 channels in the fourth convolution, where torchvision's has 256."""
    layers: list[nn.Module] = []
    channels = 3
    for outputs, kernel, stride, padding, pools in (
        (64, 11, 4, 2, True),
        (192, 5, 1, 2, True),
        (384, 3, 1, 1, False),
        (384, 3, 1, 1, False),
        (256, 3, 1, 1, True),
    ):
        layers += [nn.Conv2d(channels, outputs, kernel, stride, padding), nn.ReLU(inplace=True)]
        layers += [nn.MaxPool2d(3, 2)] if pools else []
        channels = outputs
    return nn.Sequential(*layers, *_classifier(256 * 6 * 6))


def vgg16() -> nn.Module:
    layers: list[nn.Module] = []
    channels = 3
    for outputs, convolutions in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(convolutions):
            layers += [nn.Conv2d(channels, outputs, 3, padding=1), nn.ReLU(inplace=True)]
            channels = outputs
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, *_classifier(512 * 7 * 7))


def _classifier(inputs: int) -> list[nn.Module]:
    return [
        nn.Flatten(),
        nn.Linear(inputs, 4096),
        nn.ReLU(inplace=True),
        nn.Dropout(),
        nn.Linear(4096, 4096),
        nn.ReLU(inplace=True),
        nn.Dropout(),
        nn.Linear(4096, CLASSES),
    ]


class LowPrecisionLayerNorm(nn.LayerNorm):
    """A layer norm that computes in the dtype of autocast, which gives torch's own float32."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", enabled=False):
            weight, bias = (None if one is None else one.to(x.dtype) for one in (self.weight, self.bias))
            return F.layer_norm(x, self.normalized_shape, weight, bias)


class Block(nn.Module):
    """A transformer's layer. B,T,width in and out.

    ``attention``: by one causal kernel, or with probabilities that are tensors of their own (B,heads,T,T), to which a
    mask may have been added. ``norm_first``: layer norms before the two parts, as in ViT and GPT, or behind their
    shortcuts, as in BERT.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        attention: Attention,
        *,
        norm_first: bool,
        norm: type[nn.LayerNorm],
        dropout: float,
    ) -> None:
        super().__init__()
        self.heads, self.kind, self.norm_first = heads, attention, norm_first
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.output = nn.Linear(width, width)
        self.norm_1, self.norm_2 = norm(width), norm(width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            project(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for project in (self.query, self.key, self.value)
        )
        if self.kind == "causal kernel":
            mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        else:
            scores = query @ key.transpose(-2, -1) * query.shape[-1] ** -0.5
            if self.kind == "masked":
                scores = scores + scores.new_zeros(x.shape[0], 1, 1, x.shape[1])
            mixed = self.dropout(scores.softmax(-1)) @ value
        out: torch.Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return out

    def feed_forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.narrow(F.gelu(self.widen(x)))
        return out

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.norm_first:
            x = x + self.dropout(self.attention(self.norm_1(x)))
            return x + self.dropout(self.feed_forward(self.norm_2(x)))
        x = self.norm_1(x + self.dropout(self.attention(x)))
        out: torch.Tensor = self.norm_2(x + self.dropout(self.feed_forward(x)))
        return out


class Vit(nn.Module):
    """ViT-B/16 as in timm 0.6: attention that keeps its probabilities, no dropout."""

    def __init__(self) -> None:
        super().__init__()
        width = 768
        self.patches = nn.Conv2d(3, width, 16, 16)
        self.first = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.zeros(1, 197, width))
        layers = (Block(width, 12, "plain", norm_first=True, norm=nn.LayerNorm, dropout=0.0) for _ in range(12))
        self.layers = nn.Sequential(*layers, nn.LayerNorm(width))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        patches = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(images.shape[0], -1, -1), patches], dim=1) + self.positions
        logits: torch.Tensor = self.head(self.layers(x)[:, 0])
        return logits


class Bert(nn.Module):
    """BERT with the head for SQuAD: token ids B,T to logits of where the answer starts and ends, B,T,2."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.words, self.positions, self.types = (
            nn.Embedding(30528, width),
            nn.Embedding(512, width),
            nn.Embedding(2, width),
        )
        self.norm, self.dropout = nn.LayerNorm(width), nn.Dropout(0.1)
        blocks = (
            Block(width, width // 64, "masked", norm_first=False, norm=nn.LayerNorm, dropout=0.1) for _ in range(layers)
        )
        self.layers = nn.Sequential(*blocks)
        self.head = nn.Linear(width, 2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.words(tokens) + self.positions(places) + self.types(torch.zeros_like(tokens))
        out: torch.Tensor = self.head(self.layers(self.dropout(self.norm(x))))
        return out


class Mpt(nn.Module):
    """MosaicML's GPT: token ids B,T to logits B,T,vocabulary by the embedding's own weights; no dropout.

    What runs between its layers is in bfloat16: its sharded parameters are cast before they are used.
    """

    def __init__(self, width: int, heads: int, layers: int, length: int) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(50368, width), nn.Embedding(length, width)
        blocks = (
            Block(width, heads, "causal kernel", norm_first=True, norm=LowPrecisionLayerNorm, dropout=0.0)
            for _ in range(layers)
        )
        self.layers = nn.Sequential(*blocks, LowPrecisionLayerNorm(width))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.layers((self.words(tokens) + self.positions(places)).bfloat16())
        return F.linear(x, self.words.weight)


@dataclass(frozen=True)
class Task:
    """A model with what it is trained on. ``length``: tokens of a sequence; throughput counts what ``unit`` says."""

    build: Callable[[], nn.Module]
    optimizer: Literal["sgd", "momentum", "adam"]
    unit: Literal["images", "sequences", "tokens"] = "images"
    length: int = 0
    clips: bool = False  # the norm of all gradients, to 1


def _bert(width: int, layers: int) -> Task:
    return Task(lambda: Bert(width, layers), "adam", "sequences", 384, clips=True)


def _mpt(width: int, heads: int, layers: int) -> Task:
    return Task(lambda: Mpt(width, heads, layers, 2048), "adam", "tokens", 2048, clips=True)


TASKS = {
    "ResNet-50 v1.5": Task(lambda: resnet(50), "momentum"),
    "ResNet-50 v1": Task(lambda: resnet(50, "1"), "sgd"),
    "ResNet-152 v1": Task(lambda: resnet(152, "1"), "sgd"),
    "AlexNet": Task(alexnet, "sgd"),
    "VGG-16": Task(vgg16, "sgd"),
    "VGG-11": Task(VGG11, "momentum"),
    "ResNet-18": Task(ResNet18, "momentum"),
    "MNASNet 1.0": Task(lambda: MNASNet(multiplier=1.0), "momentum"),
    "ViT-B/16": Task(Vit, "momentum"),
    "BERT-base, SQuAD": _bert(768, 12),
    "BERT-large, SQuAD": _bert(1024, 24),
    "MPT-125M": _mpt(768, 12, 12),
    "MPT-350M": _mpt(1024, 16, 24),
    "MPT-760M": _mpt(1536, 12, 24),
    "MPT-1B": _mpt(2048, 16, 24),
}


def training_step(
    name: str, precision: Precision, batch_size: int, micro_batches: int = 1, layout: Layout = "NCHW"
) -> TrainingStep:
    """One iteration of a task: ``micro_batches`` times forward and backward on ``batch_size``, one optimizer step."""
    task = TASKS[name]
    with torch.device("meta"):
        model = task.build()
        if task.unit == "images":
            lies = torch.channels_last if layout == "NHWC" else torch.contiguous_format
            inputs = torch.empty(batch_size, 3, IMAGE_SIZE, IMAGE_SIZE, memory_format=lies)
            model = model.to(memory_format=lies)  # type: ignore[call-overload]
            labels = torch.empty(batch_size, dtype=torch.int64)
        else:
            inputs = torch.empty(batch_size, task.length, dtype=torch.int64)
            labels = torch.empty((batch_size, 2) if task.unit == "sequences" else inputs.shape, dtype=torch.int64)
        models, updated = _parameters(model, precision)
        optimizer = _optimizer(task, updated)
        inputs = inputs.half() if precision == "float16 model" and task.unit == "images" else inputs

    def iteration(batch: Any) -> torch.Tensor:
        optimizer.zero_grad()
        model.zero_grad()
        for _ in range(micro_batches):
            with _autocast(precision):
                loss = _loss(model, *batch) / micro_batches
            loss.backward()  # type: ignore[no-untyped-call]
        masters = precision == "float16 model"
        if masters:
            for copy in updated:
                copy.grad = torch.empty_like(copy)
            torch._foreach_copy_([copy.grad for copy in updated], [p.grad for p in model.parameters()])
        if task.clips:
            nn.utils.clip_grad_norm_(updated, 1.0)
        optimizer.step()
        if masters:
            with torch.no_grad():
                torch._foreach_copy_(list(model.parameters()), updated)
        return loss

    return TrainingStep(
        step=iteration,
        models=models,
        optimizers={"optimizer": optimizer},
        batch=(inputs, labels),
        micro_batches=micro_batches,
    )


def _parameters(model: nn.Module, precision: Precision) -> tuple[dict[str, nn.Module], list[torch.Tensor]]:
    """The step's models, and what its optimizer updates."""
    if precision != "float16 model":
        return {"model": model}, list(model.parameters())
    masters = nn.ParameterList(nn.Parameter(parameter.detach().clone()) for parameter in model.parameters())
    return {"model": model.half(), "masters": masters}, list(masters)


def _optimizer(task: Task, parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
    if task.optimizer == "adam":
        return torch.optim.AdamW(parameters, lr=1e-4)
    momentum = 0.9 if task.optimizer == "momentum" else 0.0
    return torch.optim.SGD(parameters, lr=0.1, momentum=momentum, weight_decay=1e-4)


def _autocast(precision: Precision) -> AbstractContextManager[Any]:
    if precision in ("float16", "bfloat16"):
        return torch.autocast("cuda", getattr(torch, precision))
    return nullcontext()


def _loss(model: nn.Module, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross entropy of labels (images), of where the answer starts and ends (sequences), of tokens (tokens)."""
    logits = model(inputs)
    if logits.shape[-1] == 2:
        starts, ends = logits.unbind(-1)
        return F.cross_entropy(starts.float(), labels[:, 0]) + F.cross_entropy(ends.float(), labels[:, 1])
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten())
