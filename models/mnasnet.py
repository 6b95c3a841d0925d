"""MNASNet with depth multiplier 0.5 (Tan et al., "MnasNet: platform-aware neural architecture search for mobile",
2019), named as torchvision names its parts: 2,218,512 parameters."""

from __future__ import annotations

import torch
from torch import nn

from checkflow.core.training_step import TrainingStep
from checkflow.models._classification import classification_step, initialize_convolutions

MOMENTUM = 1 - 0.9997  # of the batch norms; the paper's decay, in torch's convention

# (output channels at multiplier 1, kernel size, stride, expansion, blocks)
STACKS = (
    (24, 3, 2, 3, 3),
    (40, 5, 2, 3, 3),
    (80, 5, 2, 6, 3),
    (96, 3, 1, 6, 2),
    (192, 5, 2, 6, 4),
    (320, 3, 1, 6, 1),
)


def _scaled(channels: int, multiplier: float) -> int:
    """Channels times the multiplier as the nearest multiple of 8, rounded up where that would lose over a tenth."""
    exact = channels * multiplier
    nearest = max(8, int(exact + 4) // 8 * 8)
    return nearest if nearest >= 0.9 * exact else nearest + 8


def _convolution(channels: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    convolution = nn.Conv2d(channels, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
    return [convolution, nn.BatchNorm2d(outputs, momentum=MOMENTUM)]


class InvertedResidual(nn.Module):
    """Expand with 1x1, filter each channel with a depthwise convolution, project back with 1x1."""

    def __init__(self, channels: int, outputs: int, kernel: int, stride: int, expansion: int) -> None:
        super().__init__()
        middle = channels * expansion
        self.residual = channels == outputs and stride == 1
        self.layers = nn.Sequential(
            *_convolution(channels, middle, 1),
            nn.ReLU(inplace=True),
            *_convolution(middle, middle, kernel, stride, groups=middle),
            nn.ReLU(inplace=True),
            *_convolution(middle, outputs, 1),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layers(x)
        return y + x if self.residual else y


def _stack(channels: int, outputs: int, kernel: int, stride: int, expansion: int, blocks: int) -> nn.Sequential:
    first = InvertedResidual(channels, outputs, kernel, stride, expansion)
    return nn.Sequential(first, *(InvertedResidual(outputs, outputs, kernel, 1, expansion) for _ in range(1, blocks)))


class MNASNet(nn.Module):
    """Images B,3,H,W to logits B,classes. ``multiplier`` scales the channels of every layer but the last."""

    def __init__(self, classes: int = 1000, multiplier: float = 0.5, dropout: float = 0.2) -> None:
        super().__init__()
        stem, channels = _scaled(32, multiplier), _scaled(16, multiplier)
        layers: list[nn.Module] = [
            *_convolution(3, stem, 3, stride=2),
            nn.ReLU(inplace=True),
            *_convolution(stem, stem, 3, groups=stem),
            nn.ReLU(inplace=True),
            *_convolution(stem, channels, 1),
        ]
        for base, kernel, stride, expansion, blocks in STACKS:
            outputs = _scaled(base, multiplier)
            layers.append(_stack(channels, outputs, kernel, stride, expansion, blocks))
            channels = outputs
        layers += [*_convolution(channels, 1280, 1), nn.ReLU(inplace=True)]
        self.layers = nn.Sequential(*layers)
        self.classifier = nn.Sequential(nn.Dropout(dropout, inplace=True), nn.Linear(1280, classes))
        initialize_convolutions(self)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        features: torch.Tensor = self.layers(images)
        logits: torch.Tensor = self.classifier(features.mean((2, 3)))
        return logits


def build(batch_size: int = 32, image_size: int = 224, classes: int = 1000, multiplier: float = 0.5) -> TrainingStep:
    images = torch.randn(batch_size, 3, image_size, image_size)
    return classification_step(MNASNet(classes, multiplier), images, classes)
