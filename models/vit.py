"""ViT-B/16 (Dosovitskiy et al., "An image is worth 16x16 words", 2021), named as torchvision names its parts:
86,567,656 parameters."""

from __future__ import annotations

import torch
from torch import nn

from checkflow.core.training_step import TrainingStep
from checkflow.models._classification import classification_step


class EncoderBlock(nn.Module):
    """Self-attention, then two linear layers, each after a layer norm and beside a shortcut. B,tokens,width."""

    def __init__(self, width: int, heads: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(width, eps=1e-6)
        self.self_attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.dropout = nn.Dropout(dropout)
        self.ln_2 = nn.LayerNorm(width, eps=1e-6)
        self.mlp = nn.Sequential(
            nn.Linear(width, hidden), nn.GELU(), nn.Dropout(dropout), nn.Linear(hidden, width), nn.Dropout(dropout)
        )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.ln_1(tokens)
        attended, _ = self.self_attention(x, x, x, need_weights=False)
        x = tokens + self.dropout(attended)
        out: torch.Tensor = x + self.mlp(self.ln_2(x))
        return out


class Encoder(nn.Module):
    """Position embedding, blocks, final layer norm. B,tokens,width in and out."""

    def __init__(self, tokens: int, layers: int, width: int, heads: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.pos_embedding = nn.Parameter(torch.empty(1, tokens, width).normal_(std=0.02))
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.Sequential()
        for i in range(layers):
            self.layers.add_module(f"encoder_layer_{i}", EncoderBlock(width, heads, hidden, dropout))
        self.ln = nn.LayerNorm(width, eps=1e-6)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.ln(self.layers(self.dropout(tokens + self.pos_embedding)))
        return out


class VisionTransformer(nn.Module):
    """Images B,3,image_size,image_size to logits B,classes; ``patch_size`` divides ``image_size``."""

    def __init__(
        self,
        image_size: int = 224,
        patch_size: int = 16,
        layers: int = 12,
        heads: int = 12,
        width: int = 768,
        classes: int = 1000,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.conv_proj = nn.Conv2d(3, width, kernel_size=patch_size, stride=patch_size)
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        tokens = (image_size // patch_size) ** 2 + 1
        self.encoder = Encoder(tokens, layers, width, heads, 4 * width, dropout)
        self.heads = nn.Sequential()
        self.heads.add_module("head", nn.Linear(width, classes))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        patches = self.conv_proj(images).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.class_token.expand(images.shape[0], -1, -1), patches], dim=1)
        logits: torch.Tensor = self.heads(self.encoder(tokens)[:, 0])
        return logits


def build(
    batch_size: int = 32,
    image_size: int = 224,
    patch_size: int = 16,
    layers: int = 12,
    heads: int = 12,
    width: int = 768,
    classes: int = 1000,
) -> TrainingStep:
    images = torch.randn(batch_size, 3, image_size, image_size)
    model = VisionTransformer(image_size, patch_size, layers, heads, width, classes)
    return classification_step(model, images, classes)
