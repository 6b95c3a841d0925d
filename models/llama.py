"""Llama 3 ("The Llama 3 herd of models", 2024) in bfloat16, trained with AdamW: ``size`` 8B (8,030,261,248 parameters),
70B (70,553,706,496) or 405B (405,853,388,800)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import nn

from checkflow.core.errors import ModelError
from checkflow.core.training_step import TrainingStep

DTYPE = torch.bfloat16  # of parameters, and so of AdamW's moments
EPSILON = 1e-5
ROTATION_BASE = 500_000.0


@dataclass(frozen=True)
class Size:
    """One of the paper's models (its table 3). ``hidden``: inner width of the feed-forward layers."""

    layers: int
    width: int
    heads: int
    hidden: int
    rate: float  # peak learning rate
    key_heads: int = 8  # of keys and values: each serves heads / key_heads heads of queries


SIZES: Mapping[str, Size] = {
    "8B": Size(layers=32, width=4096, heads=32, hidden=14336, rate=3e-4),
    "70B": Size(layers=80, width=8192, heads=64, hidden=28672, rate=1.5e-4),
    "405B": Size(layers=126, width=16384, heads=128, hidden=53248, rate=8e-5),
}


def _linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False, dtype=DTYPE)


class RMSNorm(nn.Module):
    """Divide each vector by its root mean square, in float32 (Zhang and Sennrich, 2019); any shape ending in width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width, dtype=DTYPE))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPSILON)
        return scaled.to(x.dtype) * self.weight


def rotations(sequence: int, head_width: int) -> torch.Tensor:
    """Rotary position embedding (Su et al., 2021): complex numbers ``sequence``,head_width/2, one for each pair."""
    frequencies = ROTATION_BASE ** -(torch.arange(0, head_width, 2) / head_width)
    angles = torch.outer(torch.arange(sequence).float(), frequencies)
    return torch.polar(torch.ones_like(angles), angles)


def _rotate(x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    """Turn each pair of neighbours in x (B,T,heads,head width) by its position's angle."""
    pairs = torch.view_as_complex(x.float().view(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turns[:, None]).flatten(-2).to(x.dtype)


class Attention(nn.Module):
    """Causal grouped-query attention (Ainslie et al., 2023). B,T,width in and out."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.head_width = size.width // size.heads
        self.wq = _linear(size.width, size.width)
        self.wk = _linear(size.width, size.key_heads * self.head_width)
        self.wv = _linear(size.width, size.key_heads * self.head_width)
        self.wo = _linear(size.width, size.width)

    def forward(self, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        query, key, value = (project(x).unflatten(-1, (-1, self.head_width)) for project in (self.wq, self.wk, self.wv))
        query, key = _rotate(query, turns), _rotate(key, turns)
        attended = F.scaled_dot_product_attention(
            query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), is_causal=True, enable_gqa=True
        )
        out: torch.Tensor = self.wo(attended.transpose(1, 2).flatten(2))
        return out


class FeedForward(nn.Module):
    """SwiGLU (Shazeer, 2020): a gated layer of ``hidden`` units. B,T,width in and out."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.w1 = _linear(size.width, size.hidden)
        self.w2 = _linear(size.hidden, size.width)
        self.w3 = _linear(size.width, size.hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return out


class Layer(nn.Module):
    """Attention, then the feed-forward layer, each behind a norm and beside a shortcut. B,T,width."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(size.width)
        self.attention = Attention(size)
        self.ffn_norm = RMSNorm(size.width)
        self.feed_forward = FeedForward(size)

    def forward(self, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), turns)
        out: torch.Tensor = x + self.feed_forward(self.ffn_norm(x))
        return out


class Llama(nn.Module):
    """Token ids B,T, T at most ``sequence``, to logits B,T,vocabulary. Parts are named as in Meta's own code."""

    rotations: torch.Tensor

    def __init__(self, size: Size, vocabulary: int, sequence: int) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocabulary, size.width, dtype=DTYPE)
        self.layers = nn.ModuleList(Layer(size) for _ in range(size.layers))
        self.norm = RMSNorm(size.width)
        self.output = _linear(size.width, vocabulary)
        self.register_buffer("rotations", rotations(sequence, size.width // size.heads), persistent=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tok_embeddings(tokens)
        turns = self.rotations[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x, turns)
        logits: torch.Tensor = self.output(self.norm(x))
        return logits


def _loss(model: nn.Module, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1).float(), targets.flatten())


def _chosen(size: str, layers: int | None, width: int | None) -> Size:
    if size not in SIZES:
        raise ModelError(f"unknown size {size!r}; choose one of: {', '.join(SIZES)}")
    chosen = SIZES[size]
    if width is not None:
        if width < 1 or width % (2 * chosen.heads):
            raise ModelError(f"width {width} does not divide into {chosen.heads} heads of an even width")
        chosen = replace(chosen, width=width, hidden=chosen.hidden * width // chosen.width)
    return chosen if layers is None else replace(chosen, layers=layers)


def build(
    batch_size: int = 1,
    sequence: int = 8192,
    size: str = "8B",
    layers: int | None = None,
    width: int | None = None,
    vocabulary: int = 128_256,
    tensor: int | None = None,
) -> TrainingStep:
    """Sequences of ``sequence`` tokens. ``layers`` and ``width``: for a smaller model of the same shape.

    The width of the feed-forward layers follows ``width``; the number of heads is that of ``size``. ``tensor``: how
    many ranks share each layer (with ``--ranks``); FSDP2 shards what each has over the others.

    Raises:
        ModelError: no such size, a width that does not divide into its heads, or ranks that do not divide.
    """
    chosen = _chosen(size, layers, width)
    model = Llama(chosen, vocabulary, sequence)
    if tensor is not None:
        from checkflow.models._tensor_parallel import shard

        shard(model, model.layers, tensor, chosen.key_heads)
    optimizer = torch.optim.AdamW(model.parameters(), lr=chosen.rate, betas=(0.9, 0.95), weight_decay=0.1)
    tokens, targets = torch.randint(vocabulary, (2, batch_size, sequence))
    return TrainingStep(model, optimizer, loss=_loss, batch=(tokens, targets))
