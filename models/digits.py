"""The demo's network: 8x8 handwritten digits to ten classes, with batch norm and dropout.

On two CPU cores an iteration of batch 32 takes some 20 ms, long enough to copy its state meanwhile.
"""

from __future__ import annotations

import torch
from torch import nn

from checkflow.core.training_step import TrainingStep
from checkflow.models._classification import cross_entropy


def _convolution(channels: int, outputs: int) -> list[nn.Module]:
    convolution = nn.Conv2d(channels, outputs, kernel_size=3, padding=1, bias=False)
    return [convolution, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]


class DigitsNet(nn.Module):
    """Images B,1,8,8 to logits B,10. ``width``: channels of the first convolution."""

    def __init__(self, width: int = 80, dropout: float = 0.2) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *_convolution(1, width),
            *_convolution(width, width),
            *_convolution(width, width),
            *_convolution(width, width),
            *_convolution(width, 2 * width),
            nn.MaxPool2d(kernel_size=2),
            nn.Dropout(dropout),
            *_convolution(2 * width, 2 * width),
            nn.AdaptiveAvgPool2d(1),
        )
        self.dropout = nn.Dropout(dropout)
        self.classifier = nn.Linear(2 * width, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        features: torch.Tensor = self.features(images)
        logits: torch.Tensor = self.classifier(self.dropout(features.flatten(1)))
        return logits


def build(batch_size: int = 32, width: int = 80, dropout: float = 0.2) -> TrainingStep:
    model = DigitsNet(width, dropout)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    images, labels = torch.rand(batch_size, 1, 8, 8), torch.randint(10, (batch_size,))
    return TrainingStep(model, optimizer, loss=cross_entropy, batch=(images, labels))
