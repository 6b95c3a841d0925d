"""VGG-11 without batch norm (configuration A of Simonyan and Zisserman, 2015): 132,863,336 parameters."""

from __future__ import annotations

import torch
from torch import nn

from checkflow.core.training_step import TrainingStep
from checkflow.models._classification import classification_step, initialize_convolutions

STAGES = ((1,), (2,), (4, 4), (8, 8), (8, 8))  # channels in multiples of the width; a pooling ends each stage


class VGG11(nn.Module):
    """Images B,3,H,W to logits B,classes; H and W at least 32. ``width``: channels of the first convolution."""

    def __init__(self, classes: int = 1000, width: int = 64, dropout: float = 0.5) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for stage in STAGES:
            for multiple in stage:
                convolution = nn.Conv2d(channels, multiple * width, kernel_size=3, padding=1)
                layers += [convolution, nn.ReLU(inplace=True)]
                channels = multiple * width
            layers.append(nn.MaxPool2d(kernel_size=2, stride=2))
        self.features = nn.Sequential(*layers)
        self.avgpool = nn.AdaptiveAvgPool2d((7, 7))
        self.classifier = nn.Sequential(
            nn.Linear(channels * 7 * 7, 64 * width),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            nn.Linear(64 * width, 64 * width),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            nn.Linear(64 * width, classes),
        )
        initialize_convolutions(self)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        features: torch.Tensor = self.avgpool(self.features(images))
        logits: torch.Tensor = self.classifier(features.flatten(1))
        return logits


def build(batch_size: int = 32, image_size: int = 224, classes: int = 1000, width: int = 64) -> TrainingStep:
    images = torch.randn(batch_size, 3, image_size, image_size)
    return classification_step(VGG11(classes, width), images, classes)
