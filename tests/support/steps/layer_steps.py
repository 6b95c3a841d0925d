"""Small training steps, by what their layers do: numbers, norms, wrappers around weights, sequences, lookups."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, prune, rnn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential, create_selective_checkpoint_contexts

from checkflow.core.training_step import TrainingStep

momentum = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
adam = functools.partial(torch.optim.Adam, lr=0.01)
Build = Callable[[], TrainingStep]
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")  # of a batch norm


def mean_square(model: nn.Module, *batch: Any) -> torch.Tensor:
    out: torch.Tensor = model(*batch)
    return out.float().square().mean() if not out.is_complex() else out.abs().square().mean()


def step_of(
    model: nn.Module, *batch: Any, loss: Callable[..., torch.Tensor] = mean_square, optimizer: Any = momentum
) -> TrainingStep:
    return TrainingStep(model, optimizer(model.parameters()), loss=loss, batch=batch)


def perceptron() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 4))


# Numbers and memory


def of_dtype(dtype: torch.dtype) -> TrainingStep:
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.ReLU(inplace=True), nn.Linear(8, 4)).to(dtype)
    return step_of(model, torch.randn(4, 6, dtype=dtype), optimizer=adam)


def complex_weights() -> TrainingStep:
    return step_of(nn.Linear(6, 4).to(torch.complex64), torch.randn(4, 6, dtype=torch.complex64))


def in_autocast(model: nn.Module, x: torch.Tensor, run: Callable[..., Any] = nn.Module.__call__) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out: torch.Tensor = run(model, x)
        return out.float().square().mean()


def channels_last(dimensions: int) -> TrainingStep:
    conv, norm, shape, layout = {
        2: (nn.Conv2d, nn.BatchNorm2d, (2, 3, 6, 6), torch.channels_last),
        3: (nn.Conv3d, nn.BatchNorm3d, (2, 3, 4, 4, 4), torch.channels_last_3d),
    }[dimensions]
    model = nn.Sequential(conv(3, 4, 2), norm(4), nn.ReLU(inplace=True), conv(4, 2, 1))
    return step_of(model.to(memory_format=layout), torch.randn(shape).to(memory_format=layout))


NUMBERS: Mapping[str, Build] = {
    "bfloat16": functools.partial(of_dtype, torch.bfloat16),
    "float16": functools.partial(of_dtype, torch.float16),
    "float64": functools.partial(of_dtype, torch.float64),
    "complex": complex_weights,
    "autocast": lambda: step_of(perceptron(), torch.randn(4, 6), loss=in_autocast),
    "channels_last": functools.partial(channels_last, 2),
    "channels_last_3d": functools.partial(channels_last, 3),
}

# Activation checkpointing


def recomputed(run: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> TrainingStep:
    return step_of(perceptron(), torch.randn(4, 6), loss=lambda model, x: run(model, x).float().square().mean())


def recomputed_inside(model: Any, x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = model[4](checkpoint(model[1:4], model[0](x), use_reentrant=True))
    return out


def recomputed_in_part(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    kept = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])
    out: torch.Tensor = checkpoint(model, x, use_reentrant=False, context_fn=kept)
    return out


RECOMPUTED: Mapping[str, Build] = {
    "checkpoint": lambda: recomputed(functools.partial(checkpoint, use_reentrant=False)),
    "checkpoint reentrant": lambda: recomputed(recomputed_inside),
    "checkpoint_sequential": lambda: recomputed(lambda m, x: checkpoint_sequential(m, 2, x, use_reentrant=False)),
    "checkpoint selective": lambda: recomputed(recomputed_in_part),
    "checkpoint autocast": lambda: step_of(
        perceptron(),
        torch.randn(4, 6),
        loss=functools.partial(in_autocast, run=functools.partial(checkpoint, use_reentrant=False)),
    ),
}

# Norms and sharing


class Twice(nn.Module):
    """One module called twice, under two names; one weight in two modules; one batch norm for two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.again = self.first
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 6)
        self.head.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.norm(self.again(self.norm(self.first(x)))))
        return out


def norms() -> TrainingStep:
    layers = (
        nn.Linear(6, 8), nn.LayerNorm(8), nn.GroupNorm(2, 8), nn.RMSNorm(8), nn.BatchNorm1d(8, affine=False),
        nn.BatchNorm1d(8, track_running_stats=False), nn.BatchNorm1d(8, momentum=None),
    )  # fmt: skip
    return step_of(nn.Sequential(*layers), torch.randn(4, 6))


def instance_norms() -> TrainingStep:
    layers = (nn.Conv1d(2, 4, 3), nn.InstanceNorm1d(4, affine=True), nn.InstanceNorm1d(4, track_running_stats=True))
    return step_of(nn.Sequential(*layers, nn.LocalResponseNorm(2)), torch.randn(3, 2, 8))


def frozen_batch_norm() -> TrainingStep:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.BatchNorm1d(8))

    def loss(model: Any, x: torch.Tensor) -> torch.Tensor:
        model.train()
        model[1].eval()
        return mean_square(model, x)

    return step_of(model, torch.randn(4, 6), loss=loss)


def dry_run_first() -> TrainingStep:
    model = nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.LazyLinear(4))
    model(torch.randn(4, 6))
    return step_of(model, torch.randn(4, 6))


NORMS: Mapping[str, Build] = {
    "shared": lambda: step_of(Twice(), torch.randn(4, 6)),
    "norms": norms,
    "instance norms": instance_norms,
    "sync batch norm": lambda: step_of(nn.SyncBatchNorm.convert_sync_batchnorm(perceptron()), torch.randn(4, 6)),
    "frozen batch norm": frozen_batch_norm,
    "lazy after a dry run": dry_run_first,
}

# Weights that are computed


def inside(of_jit: Callable[[nn.Module], Any], *inner: nn.Module) -> TrainingStep:
    """A scripted module between others, with statistics before it."""
    model = nn.Sequential(perceptron(), nn.Linear(4, 8), of_jit(nn.Sequential(*inner)), nn.Linear(8, 2))
    return step_of(model, torch.randn(4, 6))


def by_jit(module: nn.Module) -> Any:
    return torch.jit.trace(module, torch.randn(4, 8), check_trace=False)


SCRIPTED: Mapping[str, Build] = {
    "scripted": lambda: step_of(torch.jit.script(perceptron()), torch.randn(4, 6)),
    "traced by jit": lambda: step_of(by_jit(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))), torch.randn(4, 8)),
    "scripted inside": lambda: inside(torch.jit.script, nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh()),
    "traced by jit inside": lambda: inside(by_jit, nn.Linear(8, 8), nn.LayerNorm(8)),
}


def wrapped(*wrap: Callable[[nn.Module], nn.Module]) -> TrainingStep:
    model = nn.Sequential(wrap[0](nn.Linear(6, 8)), nn.Tanh(), wrap[-1](nn.Linear(8, 4)))
    return step_of(model, torch.randn(4, 6), loss=lambda m, x: (m(x) - m(-x)).square().mean() + mean_square(m, x))


WEIGHTS: Mapping[str, Build] = {
    "spectral_norm old": lambda: wrapped(nn.utils.spectral_norm),
    "spectral_norm new": lambda: wrapped(parametrizations.spectral_norm),
    "spectral_norm both": lambda: wrapped(parametrizations.spectral_norm, nn.utils.spectral_norm),
    "weight_norm old": lambda: wrapped(nn.utils.weight_norm),
    "weight_norm new": lambda: wrapped(parametrizations.weight_norm, parametrizations.orthogonal),
    "pruned": lambda: wrapped(
        lambda layer: prune.random_unstructured(layer, "weight", 0.5),
        lambda layer: prune.l1_unstructured(layer, "weight", 2),
    ),
}

# Sequences and lookups


class Recurrent(nn.Module):
    def __init__(self, kind: Any, **options: Any) -> None:
        super().__init__()
        self.cells = kind(5, 6, **options)
        width = options.get("proj_size") or 6 * (1 + options.get("bidirectional", False))
        self.head = nn.Linear(width, 3)

    def forward(self, x: torch.Tensor, lengths: Any = None) -> torch.Tensor:
        self.cells.flatten_parameters()
        if lengths is None:
            return self.head(self.cells(x)[0])  # type: ignore[no-any-return]
        first = self.cells.batch_first
        packed = rnn.pack_padded_sequence(x, lengths, batch_first=first, enforce_sorted=False)
        padded, _ = rnn.pad_packed_sequence(self.cells(packed)[0], batch_first=first, total_length=5)
        return self.head(padded)  # type: ignore[no-any-return]


class Cells(nn.Module):
    """A recurrent loop of the user's own."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTMCell(5, 6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = c = torch.zeros(x.shape[0], 6)
        out = []
        for now in x.unbind(1):
            h, c = self.cell(now, (h, c))
            out.append(self.head(h))
        return torch.stack(out, 1)


class Packed(nn.Module):
    """Takes a PackedSequence."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.GRU(5, 6)

    def forward(self, packed: rnn.PackedSequence) -> torch.Tensor:
        return rnn.pad_packed_sequence(self.cells(packed)[0])[0]


def connectionist(targets: tuple[int, ...], lengths: Any) -> TrainingStep:
    """ctc_loss with padded targets or targets behind one another, lengths as tensors or numbers."""

    def loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor, *given: torch.Tensor) -> torch.Tensor:
        return F.ctc_loss(model(x).log_softmax(-1), y, *(given or lengths))

    given = lengths if isinstance(lengths[0], torch.Tensor) else ()
    return step_of(nn.Linear(5, 7), torch.randn(6, 2, 5), torch.randint(1, 7, targets), *given, loss=loss)


def masked_transformer() -> TrainingStep:
    model = nn.Transformer(8, 2, 1, 1, 16, batch_first=True)

    def loss(model: Any, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        causal = model.generate_square_subsequent_mask(target.shape[1])
        padding = torch.zeros(source.shape[:2], dtype=torch.bool)
        padding[:, -1] = True
        out: torch.Tensor = model(
            source, target, tgt_mask=causal, src_key_padding_mask=padding, memory_key_padding_mask=padding
        )
        return out.square().mean()

    return step_of(model, torch.randn(2, 4, 8), torch.randn(2, 3, 8), loss=loss)


def frozen_encoder() -> TrainingStep:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.Sequential(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(8, 2))

    def loss(model: Any, x: torch.Tensor) -> torch.Tensor:
        model[0].eval()
        with torch.no_grad():
            seen = model[0](x)
        return mean_square(model[1], seen)

    return step_of(model, torch.randn(2, 3, 8), loss=loss)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True, add_bias_kv=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.attention(x, x, x, average_attn_weights=False)[0]
        return out


SEQUENCES: Mapping[str, Build] = {
    "lstm": lambda: step_of(
        Recurrent(nn.LSTM, bidirectional=True, num_layers=2, dropout=0.2, batch_first=True), torch.randn(3, 4, 5)
    ),
    "lstm projected": lambda: step_of(Recurrent(nn.LSTM, proj_size=3), torch.randn(3, 4, 5)),
    "gru": lambda: step_of(Recurrent(nn.GRU), torch.randn(3, 4, 5)),
    "rnn": lambda: step_of(Recurrent(nn.RNN), torch.randn(3, 4, 5)),
    "cells": lambda: step_of(Cells(), torch.randn(3, 4, 5)),
    "ctc_loss": lambda: connectionist((2, 3), (torch.tensor([6, 5]), torch.tensor([3, 2]))),
    "ctc_loss numbers": lambda: connectionist((2, 3), ((6, 5), (3, 2))),
    "ctc_loss concatenated": lambda: connectionist((5,), (torch.tensor([6, 5]), torch.tensor([3, 2]))),
    "transformer masked": masked_transformer,
    "encoder frozen": frozen_encoder,
    "attention": lambda: step_of(Attention(), torch.randn(2, 3, 8)),
}
# Planned for the longest sequence, and so with other operators than those of shorter ones.
PACKED: Mapping[str, Build] = {
    "lstm packed": lambda: step_of(Recurrent(nn.LSTM, batch_first=True), torch.randn(3, 4, 5), torch.tensor([4, 2, 3])),
    "gru packed": lambda: step_of(Recurrent(nn.GRU), torch.randn(4, 3, 5), torch.tensor([4, 2, 3])),
    "rnn packed by numbers": lambda: step_of(
        Recurrent(nn.RNN, bidirectional=True),
        torch.randn(4, 3, 5),
        loss=lambda model, x: mean_square(model, x, [4, 3, 1]),
    ),
    "packed batch": lambda: step_of(Packed(), rnn.pack_sequence([torch.randn(n, 5) for n in (4, 3, 1)])),
}


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag, self.head = nn.EmbeddingBag(9, 4, max_norm=0.5, mode="mean"), nn.Linear(4, 3)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.bag(rows))
        return out


def looked_up(**options: Any) -> TrainingStep:
    return step_of(nn.Sequential(nn.Embedding(9, 4, **options), nn.Linear(4, 3)), torch.randint(9, (2, 3)))


def spectra(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    out = model(x)
    spectrum = torch.stft(out, 8, window=torch.hann_window(8), return_complex=True).abs().mean()
    return spectrum + torch.fft.rfft(out).abs().mean() + torch.einsum("bi,bj->ij", out, x).mean()


def images() -> TrainingStep:
    layers = (
        nn.ConvTranspose2d(2, 4, 2), nn.Upsample(scale_factor=2, mode="bilinear"), nn.ReLU(inplace=True),
        nn.Dropout2d(0.2), nn.PixelShuffle(2), nn.PReLU(), nn.RReLU(), nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(2),
        nn.Hardtanh(inplace=True),
    )  # fmt: skip
    return step_of(nn.Sequential(*layers), torch.randn(2, 2, 3, 3))


LOOKUPS: Mapping[str, Build] = {
    "embedding max_norm": lambda: looked_up(max_norm=0.5),
    "embedding bag max_norm": lambda: step_of(Bag(), torch.randint(9, (2, 3))),
    "embedding padded": lambda: looked_up(padding_idx=0, scale_grad_by_freq=True),
    "bilinear": lambda: step_of(nn.Bilinear(4, 5, 3), torch.randn(2, 4), torch.randn(2, 5)),
    "spectra": lambda: step_of(nn.Linear(32, 32), torch.randn(2, 32), loss=spectra),
    "images": images,
}
