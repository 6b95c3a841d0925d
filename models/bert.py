"""The encoder of RoBERTa-base without its pooler (Liu et al., 2019): 124,055,040 parameters.

Its head is a linear layer on the first token, with 2 classes: 1,538 more parameters.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from checkflow.core.training_step import TrainingStep
from checkflow.models._classification import classification_step

PADDING = 1  # RoBERTa's padding token; positions count from PADDING + 1
EPSILON = 1e-5


class Embeddings(nn.Module):
    """Token ids B,T (without padding) to vectors B,T,width: token, position and token type added up."""

    def __init__(self, vocabulary: int, positions: int, width: int, dropout: float) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(vocabulary, width, padding_idx=PADDING)
        self.position_embeddings = nn.Embedding(positions, width, padding_idx=PADDING)
        self.token_type_embeddings = nn.Embedding(1, width)  # RoBERTa has one type: its row 0 is added everywhere
        self.norm = nn.LayerNorm(width, eps=EPSILON)
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(PADDING + 1, PADDING + 1 + tokens.shape[1], device=tokens.device)
        x = self.word_embeddings(tokens) + self.position_embeddings(positions)
        x = x + self.token_type_embeddings(torch.zeros_like(tokens))
        out: torch.Tensor = self.dropout(self.norm(x))
        return out


class SelfAttention(nn.Module):
    """B,T,width in and out."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.output = nn.Linear(width, width)
        self.dropout = dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            project(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for project in (self.query, self.key, self.value)
        )
        dropout = self.dropout if self.training else 0.0
        attended = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout)
        out: torch.Tensor = self.output(attended.transpose(1, 2).flatten(2))
        return out


class Layer(nn.Module):
    """Self-attention, then two linear layers, each with a shortcut and a layer norm behind it. B,T,width."""

    def __init__(self, width: int, heads: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.attention = SelfAttention(width, heads, dropout)
        self.attention_norm = nn.LayerNorm(width, eps=EPSILON)
        self.intermediate = nn.Linear(width, hidden)
        self.output = nn.Linear(hidden, width)
        self.output_norm = nn.LayerNorm(width, eps=EPSILON)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.attention_norm(x + self.dropout(self.attention(x)))
        y = self.output(F.gelu(self.intermediate(x)))
        out: torch.Tensor = self.output_norm(x + self.dropout(y))
        return out


class Encoder(nn.Module):
    """Token ids B,T to vectors B,T,width."""

    def __init__(
        self, vocabulary: int, positions: int, layers: int, heads: int, width: int, hidden: int, dropout: float
    ) -> None:
        super().__init__()
        self.embeddings = Embeddings(vocabulary, positions, width, dropout)
        self.layers = nn.Sequential(*(Layer(width, heads, hidden, dropout) for _ in range(layers)))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(self.embeddings(tokens))
        return out


class SequenceClassifier(nn.Module):
    """Token ids B,T to logits B,classes."""

    def __init__(self, encoder: Encoder, width: int, classes: int) -> None:
        super().__init__()
        self.encoder = encoder
        self.classifier = nn.Linear(width, classes)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.classifier(self.encoder(tokens)[:, 0])
        return logits


def build(
    batch_size: int = 32,
    length: int = 256,
    vocabulary: int = 50265,
    layers: int = 12,
    heads: int = 12,
    width: int = 768,
    classes: int = 2,
    dropout: float = 0.1,
) -> TrainingStep:
    """Sequences of ``length`` tokens, at most 512."""
    encoder = Encoder(vocabulary, 512 + PADDING + 1, layers, heads, width, 4 * width, dropout)
    tokens = torch.randint(PADDING + 1, vocabulary, (batch_size, length))
    return classification_step(SequenceClassifier(encoder, width, classes), tokens, classes)
