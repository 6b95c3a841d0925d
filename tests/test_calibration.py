"""The roofline against the world: published ResNet-50 throughputs, and the feasible cells of the paper's Table I."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import nn

from checkflow.graph import TrainingGraph
from checkflow.hardware import find_device
from checkflow.models._classification import classification_step
from checkflow.planner.cost import Float32Precision, durations_seconds
from checkflow.planner.load import load_training_step
from checkflow.planner.trace import trace

DEFAULTS = Float32Precision()


class Bottleneck(nn.Module):
    """ResNet-50's block (version 1.5: the stride is in the 3x3 convolution)."""

    def __init__(self, channels: int, middle: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * middle
        self.body = nn.Sequential(
            nn.Conv2d(channels, middle, 1, bias=False),
            nn.BatchNorm2d(middle),
            nn.ReLU(inplace=True),
            nn.Conv2d(middle, middle, 3, stride, 1, bias=False),
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


def _resnet50() -> nn.Module:
    layers: list[nn.Module] = [
        nn.Conv2d(3, 64, 7, 2, 3, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
    ]
    channels = 64
    for middle, blocks, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for block in range(blocks):
            layers.append(Bottleneck(channels, middle, stride if block == 0 else 1))
            channels = 4 * middle
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 1000))


@cache
def _resnet50_graph() -> TrainingGraph:
    with torch.device("meta"):
        step = classification_step(_resnet50(), torch.randn(256, 3, 224, 224), 1000)
    return trace(step, name="resnet50")


def _in_float32(graph: TrainingGraph) -> TrainingGraph:
    return graph


def _in_float16(graph: TrainingGraph) -> TrainingGraph:
    """As mixed precision runs it: half the bytes, computed by the matrix units."""
    halved = (
        replace(op, dtype="float16", read_bytes=op.read_bytes // 2, written_bytes=op.written_bytes // 2)
        for op in graph.operators
    )
    return replace(graph, operators=tuple(halved))


def test_resnet50_is_resnet50() -> None:
    graph = _resnet50_graph()
    assert graph.parameters == 25_557_032
    # 4.09 billion multiply-adds forward, as published; backward twice that, but for the gradient of the images.
    assert graph.flops / 256 == pytest.approx(3 * 2 * 4.09e9, rel=0.02)


@pytest.mark.parametrize(
    ("device", "precision", "published", "most"),
    [
        ("GTX 1080 Ti", _in_float32, 209, 1.1),
        ("V100", _in_float32, 367, 1.1),
        ("V100", _in_float16, 1200, 1.1),
        ("RTX 3090", _in_float32, 561, 1.1),
        ("RTX 3090", _in_float16, 1205, 1.1),
        ("A100 80GB", _in_float32, 938, 1.5),  # one factor for both precisions: the catalogue says why
        ("A100 80GB", _in_float16, 2470, 1.1),
    ],
)
def test_published_throughput(
    device: str, precision: Callable[[TrainingGraph], TrainingGraph], published: float, most: float
) -> None:
    """Images per second of ResNet-50 at batch 256; where the catalogue has them from is said there."""
    seconds = sum(durations_seconds(precision(_resnet50_graph()), find_device(device), DEFAULTS))
    assert 0.9 <= (256 / seconds) / published <= most


@pytest.mark.parametrize(
    ("model", "batch_size", "bandwidths"),
    [("alexnet", 32, (63e9,)), ("alexnet", 1024, (63e9, 40e9, 20e9)), ("bert", 32, (63e9, 40e9, 20e9))],
)
def test_feasible_cells_of_table_1(model: str, batch_size: int, bandwidths: tuple[float, ...]) -> None:
    """What the Checkflow paper found feasible on an RTX 3090 must be: the state fits into what the link moves before
    the optimizer first writes (all of these models' state is first written there)."""
    name, step = load_training_step(model, batch_size=batch_size)
    graph = trace(step, name=name)
    durations = durations_seconds(graph, find_device("RTX 3090"), DEFAULTS)
    before_the_optimizer = sum(
        seconds for seconds, operator in zip(durations, graph.operators, strict=True) if operator.phase != "optimizer"
    )
    for bandwidth in bandwidths:
        assert graph.state_bytes <= before_the_optimizer * bandwidth
