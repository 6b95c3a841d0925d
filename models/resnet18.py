"""ResNet-18 (He et al., "Deep residual learning for image recognition", 2016), named as torchvision names its parts:
11,689,512 parameters."""

from __future__ import annotations

import torch
from torch import nn

from checkflow.core.training_step import TrainingStep
from checkflow.models._classification import classification_step, initialize_convolutions


class BasicBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut, which is a 1x1 convolution where the shape changes."""

    def __init__(self, channels: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, outputs, kernel_size=3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(outputs, outputs, kernel_size=3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample: nn.Module | None = None
        if stride != 1 or channels != outputs:
            shortcut = nn.Conv2d(channels, outputs, kernel_size=1, stride=stride, bias=False)
            self.downsample = nn.Sequential(shortcut, nn.BatchNorm2d(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        y += shortcut
        out: torch.Tensor = self.relu(y)
        return out


def _stage(channels: int, outputs: int, stride: int) -> nn.Sequential:
    return nn.Sequential(BasicBlock(channels, outputs, stride), BasicBlock(outputs, outputs, 1))


class ResNet18(nn.Module):
    """Images B,3,H,W to logits B,classes. ``width``: channels of the first stage."""

    def __init__(self, classes: int = 1000, width: int = 64) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, kernel_size=7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(kernel_size=3, stride=2, padding=1)
        self.layer1 = _stage(width, width, stride=1)
        self.layer2 = _stage(width, 2 * width, stride=2)
        self.layer3 = _stage(2 * width, 4 * width, stride=2)
        self.layer4 = _stage(4 * width, 8 * width, stride=2)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(8 * width, classes)
        initialize_convolutions(self)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(images))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        logits: torch.Tensor = self.fc(self.avgpool(x).flatten(1))
        return logits


def build(batch_size: int = 32, image_size: int = 224, classes: int = 1000, width: int = 64) -> TrainingStep:
    images = torch.randn(batch_size, 3, image_size, image_size)
    return classification_step(ResNet18(classes, width), images, classes)
