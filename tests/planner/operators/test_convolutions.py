"""What the trace says of convolutions: flops of grouped ones, where Winograd's algorithm fits, layouts of images."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from checkflow.core.graph import Operator
from checkflow.core.training_step import TrainingStep
from checkflow.planner.trace.trace import trace


def _step(model: nn.Module, images: torch.Tensor) -> TrainingStep:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return TrainingStep(model, optimizer, loss=lambda model, x: model(x).square().mean(), batch=images)


def _convolutions(model: nn.Module, images: torch.Tensor) -> tuple[Operator, Operator]:
    """Forward and backward of a model with one convolution."""
    forward, backward = (op for op in trace(_step(model, images), name="m").operators if "convolution" in op.target)
    return forward, backward


class Apart(nn.Module):
    """A grouped convolution as one ungrouped convolution a group."""

    def __init__(self, layer: nn.Conv2d | nn.ConvTranspose2d) -> None:
        super().__init__()
        kind, groups = type(layer), layer.groups
        sizes = layer.in_channels // groups, layer.out_channels // groups, layer.kernel_size, layer.stride
        self.layers = nn.ModuleList(kind(*sizes, padding=layer.padding) for _ in range(groups))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        parts = images.chunk(len(self.layers), dim=1)
        return torch.cat([layer(part) for layer, part in zip(self.layers, parts, strict=True)], dim=1)


@pytest.mark.parametrize("needs_images_gradient", [False, True])
@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(8, 8, 3, padding=1, groups=8),  # depthwise
        nn.Conv2d(8, 12, (3, 5), stride=2, groups=4),
        nn.Conv2d(8, 12, 3, groups=1),
        nn.ConvTranspose2d(8, 12, 3, stride=2, groups=4),
    ],
    ids=["depthwise", "grouped", "whole", "transposed"],
)
def test_a_grouped_convolution_counts_as_its_groups_apart(layer: nn.Conv2d, needs_images_gradient: bool) -> None:
    images = torch.randn(2, 8, 10, 12, requires_grad=needs_images_gradient)
    whole = trace(_step(layer, images), name="whole").flops
    with FlopCounterMode(display=False) as counter:
        _step(Apart(layer), images).run(images)
    assert whole == counter.get_total_flops() > 0


@dataclass(frozen=True)
class Case:
    kernel: int | tuple[int, int] = 3
    stride: int = 1
    dilation: int = 1
    groups: int = 1


@pytest.mark.parametrize(
    ("case", "fast"),
    [
        (Case(), True),
        (Case(kernel=5), True),
        (Case(kernel=1), False),
        (Case(kernel=(3, 1)), False),
        (Case(stride=2), False),
        (Case(dilation=2), False),
        (Case(groups=2), False),
    ],
)
def test_where_winograd_s_algorithm_fits(case: Case, fast: bool) -> None:
    layer = nn.Conv2d(4, 6, case.kernel, case.stride, dilation=case.dilation, groups=case.groups)
    for operator in _convolutions(layer, torch.randn(2, 4, 12, 12)):
        assert operator.winograd == fast


def test_winograd_s_algorithm_is_for_images() -> None:
    assert not any(op.winograd for op in _convolutions(nn.Conv1d(4, 6, 3), torch.randn(2, 4, 12)))
    assert not any(op.winograd for op in _convolutions(nn.Conv3d(4, 6, 3), torch.randn(2, 4, 5, 5, 5)))
    assert not any(op.winograd for op in _convolutions(nn.ConvTranspose2d(4, 6, 3), torch.randn(2, 4, 12, 12)))


def test_images_that_lie_pixel_by_pixel_are_not_turned() -> None:
    layer, images = nn.Conv2d(4, 6, 3, bias=False), torch.randn(2, 4, 12, 12)
    weight, result = 4 * 6 * 4 * 9, 4 * 2 * 6 * 100
    forward, backward = _convolutions(layer, images)
    assert forward.relaid_bytes == images.nbytes + weight + result
    # Read: the result's gradient, images and weight; written: the weight's gradient.
    assert backward.relaid_bytes == result + images.nbytes + 2 * weight
    # A pooling gives its gradient the layout of its images; a mean's would lie channel by channel.
    model = nn.Sequential(layer, nn.AvgPool2d(2)).to(memory_format=torch.channels_last)
    pixels = images.to(memory_format=torch.channels_last)
    assert [op.relaid_bytes for op in _convolutions(model, pixels)] == [0, 0]


def test_volumes_have_layouts_too() -> None:
    layer, volumes = nn.Conv3d(4, 6, 3), torch.randn(2, 4, 5, 5, 5)
    assert _convolutions(layer, volumes)[0].relaid_bytes > 0
    layer, volumes = layer.to(memory_format=torch.channels_last_3d), volumes.to(memory_format=torch.channels_last_3d)
    assert _convolutions(layer, volumes)[0].relaid_bytes == 0
