"""DLRM (Naumov et al., "Deep learning recommendation model for personalization and recommendation systems", 2019), in
the size of its benchmark on the Criteo Kaggle data: 540,677,217 parameters, nearly all of them in 26 tables.

The tables have sparse gradients, one row for each index of the batch, and an optimizer of their own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from checkflow.core.errors import ModelError
from checkflow.core.training_step import TrainingStep

# Rows of each table: the distinct values of the 26 categories in the Criteo Display Advertising Challenge's training
# data, as the paper's benchmark (facebookresearch/dlrm, bench/dlrm_s_criteo_kaggle.sh) counts them.
TABLES = (
    *(1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194),
    *(27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572),
)
FEATURES = 13  # dense ones
BOTTOM, TOP = (512, 256, 64), (512, 256)  # hidden layers of the two networks, as in that benchmark

# Optimizers of the tables; both take sparse gradients. The benchmark uses SGD.
TABLE_OPTIMIZERS: Mapping[str, Any] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "sparse_adam": lambda parameters: torch.optim.SparseAdam(parameters, lr=1e-3),
}


def _network(widths: Sequence[int], *, last_relu: bool) -> nn.Sequential:
    """Linear layers from width to width with a ReLU after each; ``last_relu``: after the last one, too."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        linear = nn.Linear(inputs, outputs)
        nn.init.normal_(linear.weight, std=math.sqrt(2 / (inputs + outputs)))
        nn.init.normal_(linear.bias, std=math.sqrt(1 / outputs))
        layers += [linear, nn.ReLU(inplace=True)]
    return nn.Sequential(*(layers if last_relu else layers[:-1]))


class Tables(nn.Module):
    """Indices tables,B,lookups to vectors B,tables,width: for each table the sum of the rows looked up."""

    def __init__(self, rows: Sequence[int], width: int) -> None:
        super().__init__()
        tables = [nn.EmbeddingBag(count, width, mode="sum", sparse=True) for count in rows]
        for table in tables:
            nn.init.uniform_(table.weight, -math.sqrt(1 / table.num_embeddings), math.sqrt(1 / table.num_embeddings))
        self.tables = nn.ModuleList(tables)

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        return torch.stack([table(indices[i]) for i, table in enumerate(self.tables)], dim=1)


class DLRM(nn.Module):
    """Dense features B,13 and indices tables,B,lookups to logits B."""

    pairs: torch.Tensor

    def __init__(self, rows: Sequence[int], width: int) -> None:
        super().__init__()
        self.embeddings = Tables(rows, width)
        self.bottom = _network((FEATURES, *BOTTOM, width), last_relu=True)
        vectors = len(rows) + 1
        self.register_buffer("pairs", torch.tril_indices(vectors, vectors, offset=-1), persistent=False)
        self.top = _network((width + vectors * (vectors - 1) // 2, *TOP, 1), last_relu=False)

    def forward(self, dense: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        x = self.bottom(dense)
        vectors = torch.cat([x.unsqueeze(1), self.embeddings(indices)], dim=1)
        products = torch.bmm(vectors, vectors.transpose(1, 2))  # the dot product of every pair
        interactions = products[:, self.pairs[0], self.pairs[1]]
        logits: torch.Tensor = self.top(torch.cat([x, interactions], dim=1)).squeeze(1)
        return logits


def build(
    batch_size: int = 128,
    width: int = 16,
    lookups: int = 1,
    rows: int | None = None,
    table_optimizer: str = "sgd",
) -> TrainingStep:
    """Embeddings of ``width``; ``lookups`` rows per table and sample; ``rows``: at most this many per table.

    Raises:
        ModelError: no such optimizer for the tables.
    """
    if table_optimizer not in TABLE_OPTIMIZERS:
        known = ", ".join(TABLE_OPTIMIZERS)
        raise ModelError(f"unknown table_optimizer {table_optimizer!r}; choose one of: {known}")
    counts = TABLES if rows is None else tuple(min(rows, count) for count in TABLES)
    model = DLRM(counts, width)
    networks = [*model.bottom.parameters(), *model.top.parameters()]
    optimizers = {
        "networks": torch.optim.SGD(networks, lr=0.1),
        "tables": TABLE_OPTIMIZERS[table_optimizer](model.embeddings.parameters()),
    }

    def step(batch: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> torch.Tensor:
        dense, indices, clicked = batch
        for optimizer in optimizers.values():
            optimizer.zero_grad()
        loss = F.binary_cross_entropy_with_logits(model(dense, indices), clicked)
        loss.backward()  # type: ignore[no-untyped-call]
        for optimizer in optimizers.values():
            optimizer.step()
        return loss

    dense = torch.rand(batch_size, FEATURES)
    indices = torch.stack([torch.randint(count, (batch_size, lookups)) for count in counts])
    clicked = torch.randint(2, (batch_size,)).float()
    return TrainingStep(step=step, models={"model": model}, optimizers=optimizers, batch=(dense, indices, clicked))
