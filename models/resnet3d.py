"""R3D-18 for video (Tran et al., "A closer look at spatiotemporal convolutions", 2018), named as torchvision names its
parts: 33,371,472 parameters with 400 classes."""

from __future__ import annotations

import torch
from torch import nn

from checkflow.core.training_step import TrainingStep
from checkflow.models._classification import classification_step, initialize_convolutions


def _convolution(channels: int, outputs: int, stride: int) -> nn.Conv3d:
    return nn.Conv3d(channels, outputs, kernel_size=3, stride=stride, padding=1, bias=False)


class BasicBlock(nn.Module):
    """Two 3x3x3 convolutions beside a shortcut, which is a 1x1x1 convolution where the shape changes."""

    def __init__(self, channels: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Sequential(
            _convolution(channels, outputs, stride), nn.BatchNorm3d(outputs), nn.ReLU(inplace=True)
        )
        self.conv2 = nn.Sequential(_convolution(outputs, outputs, 1), nn.BatchNorm3d(outputs))
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Module | None = None
        if stride != 1 or channels != outputs:
            shortcut = nn.Conv3d(channels, outputs, kernel_size=1, stride=stride, bias=False)
            self.downsample = nn.Sequential(shortcut, nn.BatchNorm3d(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        y = self.conv2(self.conv1(x))
        y += shortcut
        out: torch.Tensor = self.relu(y)
        return out


def _stage(channels: int, outputs: int, stride: int) -> nn.Sequential:
    return nn.Sequential(BasicBlock(channels, outputs, stride), BasicBlock(outputs, outputs, 1))


class R3D18(nn.Module):
    """Clips B,3,frames,H,W to logits B,classes. ``width``: channels of the first stage."""

    def __init__(self, classes: int = 400, width: int = 64) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv3d(3, width, kernel_size=(3, 7, 7), stride=(1, 2, 2), padding=(1, 3, 3), bias=False),
            nn.BatchNorm3d(width),
            nn.ReLU(inplace=True),
        )
        self.layer1 = _stage(width, width, stride=1)
        self.layer2 = _stage(width, 2 * width, stride=2)
        self.layer3 = _stage(2 * width, 4 * width, stride=2)
        self.layer4 = _stage(4 * width, 8 * width, stride=2)
        self.avgpool = nn.AdaptiveAvgPool3d(1)
        self.fc = nn.Linear(8 * width, classes)
        initialize_convolutions(self)

    def forward(self, clips: torch.Tensor) -> torch.Tensor:
        x = self.stem(clips)
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        logits: torch.Tensor = self.fc(self.avgpool(x).flatten(1))
        return logits


def build(
    batch_size: int = 32, frames: int = 1, image_size: int = 112, classes: int = 400, width: int = 64
) -> TrainingStep:
    clips = torch.randn(batch_size, 3, frames, image_size, image_size)
    return classification_step(R3D18(classes, width), clips, classes)
