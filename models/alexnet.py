"""AlexNet, as torchvision builds it (Krizhevsky, "One weird trick for parallelizing convolutional neural networks",
2014): 61,100,840 parameters."""

from __future__ import annotations

import torch
from torch import nn

from checkflow.core.training_step import TrainingStep
from checkflow.models._classification import classification_step


class AlexNet(nn.Module):
    """Images B,3,H,W to logits B,classes; H and W at least 63. ``width``: channels of the first convolution."""

    def __init__(self, classes: int = 1000, width: int = 64, dropout: float = 0.5) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, width, kernel_size=11, stride=4, padding=2),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(kernel_size=3, stride=2),
            nn.Conv2d(width, 3 * width, kernel_size=5, padding=2),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(kernel_size=3, stride=2),
            nn.Conv2d(3 * width, 6 * width, kernel_size=3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(6 * width, 4 * width, kernel_size=3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(4 * width, 4 * width, kernel_size=3, padding=1),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(kernel_size=3, stride=2),
        )
        self.avgpool = nn.AdaptiveAvgPool2d((6, 6))
        self.classifier = nn.Sequential(
            nn.Dropout(dropout),
            nn.Linear(4 * width * 6 * 6, 64 * width),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            nn.Linear(64 * width, 64 * width),
            nn.ReLU(inplace=True),
            nn.Linear(64 * width, classes),
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        features: torch.Tensor = self.avgpool(self.features(images))
        logits: torch.Tensor = self.classifier(features.flatten(1))
        return logits


def build(batch_size: int = 32, image_size: int = 224, classes: int = 1000, width: int = 64) -> TrainingStep:
    images = torch.randn(batch_size, 3, image_size, image_size)
    return classification_step(AlexNet(classes, width), images, classes)
