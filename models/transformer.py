"""torch's own nn.Transformer: width 512, one head, one encoder and one decoder layer: 7,358,464 parameters.

Without embeddings or a head: its batch is embedded already, and the loss takes features as the logits of classes.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from checkflow.core.training_step import TrainingStep


def _loss(model: nn.Module, source: torch.Tensor, target: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(source, target).flatten(0, 1), labels.flatten())


def build(
    batch_size: int = 32,
    source_length: int = 10,
    target_length: int = 20,
    width: int = 512,
    heads: int = 1,
    layers: int = 1,
    hidden: int = 2048,
) -> TrainingStep:
    """Source ``source_length``,B,width and target ``target_length``,B,width; one label per target position."""
    # The encoder is nn.Transformer's own, without nested tensors: they need batch_first, and torch warns about it.
    encoder_layer = nn.TransformerEncoderLayer(width, heads, hidden)
    encoder = nn.TransformerEncoder(encoder_layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)
    model = nn.Transformer(width, heads, layers, layers, hidden, custom_encoder=encoder)
    source = torch.randn(source_length, batch_size, width)
    target = torch.randn(target_length, batch_size, width)
    labels = torch.randint(width, (target_length, batch_size))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return TrainingStep(model, optimizer, loss=_loss, batch=(source, target, labels))
