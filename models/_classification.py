"""What the shipped classifiers share: a synthetic batch, cross entropy, and plain SGD at learning rate 0.1."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from checkflow.core.training_step import TrainingStep


def classification_step(model: nn.Module, inputs: torch.Tensor, classes: int) -> TrainingStep:
    """Train ``model`` on ``inputs`` (first dimension: batch) with a random label out of ``classes`` for each sample."""
    labels = torch.randint(classes, (inputs.shape[0],))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return TrainingStep(model, optimizer, loss=cross_entropy, batch=(inputs, labels))


def cross_entropy(model: nn.Module, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(inputs), labels)


def initialize_convolutions(model: nn.Module) -> None:
    """He initialization (fan out) for convolutions and small normal weights for linear layers, as torchvision's."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Conv3d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.01)
            nn.init.zeros_(module.bias)
