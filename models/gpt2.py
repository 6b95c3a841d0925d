"""GPT-2 small (Radford et al., "Language models are unsupervised multitask learners", 2019): 124,439,808 parameters.

Parts are named as in the published checkpoint. The output layer is the token embedding; AdamW decays only matrices.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from checkflow.core.training_step import TrainingStep


class Attention(nn.Module):
    """Causal self-attention. B,T,width in and out."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.c_attn = nn.Linear(width, 3 * width)  # query, key and value
        self.c_proj = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.c_attn(x).chunk(3, dim=-1)
        )
        dropout = self.dropout if self.training else 0.0
        attended = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        out: torch.Tensor = self.c_proj(attended.transpose(1, 2).flatten(2))
        return out


class FeedForward(nn.Module):
    """Two linear layers, four times as wide between them. B,T,width in and out."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.c_fc = nn.Linear(width, 4 * width)
        self.c_proj = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))
        return out


class Block(nn.Module):
    """Attention, then the feed-forward layer, each behind a norm and beside a shortcut. B,T,width."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(width)
        self.attn = Attention(width, heads, dropout)
        self.ln_2 = nn.LayerNorm(width)
        self.mlp = FeedForward(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.dropout(self.attn(self.ln_1(x)))
        out: torch.Tensor = x + self.dropout(self.mlp(self.ln_2(x)))
        return out


class Transformer(nn.Module):
    """Token ids B,T, T at most ``positions``, to vectors B,T,width."""

    def __init__(self, vocabulary: int, positions: int, layers: int, heads: int, width: int, dropout: float) -> None:
        super().__init__()
        self.wte = nn.Embedding(vocabulary, width)
        self.wpe = nn.Embedding(positions, width)
        self.dropout = nn.Dropout(dropout)
        self.h = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.wte(tokens) + self.wpe(positions))
        for block in self.h:
            x = block(x)
        out: torch.Tensor = self.ln_f(x)
        return out


class GPT2(nn.Module):
    """Token ids B,T to logits B,T,vocabulary."""

    def __init__(self, vocabulary: int, positions: int, layers: int, heads: int, width: int, dropout: float) -> None:
        super().__init__()
        self.transformer = Transformer(vocabulary, positions, layers, heads, width, dropout)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        self.lm_head.weight = self.transformer.wte.weight
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                # Residual additions grow with their number: two per layer.
                std = 0.02 / math.sqrt(2 * layers) if name.endswith("c_proj") else 0.02
                nn.init.normal_(module.weight, std=std)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.lm_head(self.transformer(tokens))
        return logits


def _loss(model: nn.Module, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def _mixed_loss(model: nn.Module, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    with torch.autocast(tokens.device.type, dtype=torch.bfloat16):
        return _loss(model, tokens, targets)


def build(
    batch_size: int = 8,
    length: int = 1024,
    vocabulary: int = 50257,
    layers: int = 12,
    heads: int = 12,
    width: int = 768,
    dropout: float = 0.1,
    mixed: bool = False,
) -> TrainingStep:
    """Sequences of ``length`` tokens, at most 1,024. ``mixed``: forward under autocast to bfloat16."""
    model = GPT2(vocabulary, 1024, layers, heads, width, dropout)
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=6e-4, betas=(0.9, 0.95))
    tokens, targets = torch.randint(vocabulary, (2, batch_size, length))
    return TrainingStep(model, optimizer, loss=_mixed_loss if mixed else _loss, batch=(tokens, targets))
