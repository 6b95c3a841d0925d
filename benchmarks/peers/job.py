"""The job that all peers checkpoint: a GPT-2 of some size with AdamW, whose state is three times its weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import xxhash
from torch import nn

import checkflow
from checkflow.models.gpt2 import GPT2

GPU_ROWS, GPU_TOKENS = 16, 512  # of a batch there: what keeps it busy for some 20 ms


@dataclass(frozen=True)
class Case:
    """A size of state. ``tokens``: of the one row of a batch on the CPU. ``iterations``: timed in a block."""

    layers: int
    heads: int
    width: int
    vocabulary: int
    tokens: int
    iterations: int


# By gigabytes of state.
CASES = {
    "0.01": Case(1, 4, 192, 1024, 16, 20),
    "0.1": Case(8, 4, 256, 4096, 256, 100),
    "0.15": Case(13, 4, 256, 4096, 116, 100),  # 165 ms on an EPYC; many small operators: Python's lock costs the most
    "1": Case(8, 12, 768, 16384, 64, 20),
    "4": Case(24, 16, 1024, 16384, 64, 10),
}


def _loss(model: nn.Module, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    with torch.autocast(tokens.device.type, torch.bfloat16, enabled=tokens.is_cuda):
        logits = model(tokens)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class _Step(checkflow.TrainingStep):
    """An iteration that returns when the GPU has done it, though not what runs beside it."""

    def run(self, batch: Any) -> Any:
        loss = super().run(batch)
        if loss.is_cuda:
            torch.cuda.current_stream().synchronize()
        return loss


class Job:
    """A training step with real tensors. One iteration has been made, so the optimizer has its state."""

    def __init__(self, name: str, device: str = "cpu") -> None:
        case = CASES[name]
        self.on_gpu = on_gpu = device == "cuda"
        torch.manual_seed(0)
        self.model = GPT2(case.vocabulary, 1024, case.layers, case.heads, case.width, dropout=0.0)
        # Not every peer stores a shared tensor once, and that is not what is compared here.
        self.model.lm_head.weight = nn.Parameter(self.model.lm_head.weight.detach().clone())
        self.model.to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=on_gpu)
        shape = (2, GPU_ROWS, GPU_TOKENS) if on_gpu else (2, 1, case.tokens)
        batch = tuple(torch.randint(case.vocabulary, shape).to(device))
        self.step = _Step(self.model, self.optimizer, loss=_loss, batch=batch)
        self.train()

    def train(self) -> None:
        """Make one iteration."""
        self.step.run(self.step.batch)

    def state(self) -> dict[str, Any]:
        """What scripts save: both state dicts, whose tensors are the live ones."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def tensors(self) -> Iterator[torch.Tensor]:
        """All tensors of the state, as they are now."""
        for parameter in self.model.parameters():
            yield parameter.detach()
            # Those that are there: a restore that brings back none must show, too.
            yield from (value for _, value in sorted(self.optimizer.state[parameter].items()))

    @property
    def state_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors())

    def digest(self) -> str:
        """Of all bytes of the state."""
        found = xxhash.xxh3_128()
        for tensor in self.tensors():
            found.update(tensor.cpu().numpy())
        return found.hexdigest()

    def forget_peak(self) -> None:
        """Let :meth:`peak_bytes` count from here."""
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats()

    def peak_bytes(self) -> int | None:
        """The most that was allocated on the GPU since; None on the CPU."""
        return torch.cuda.max_memory_allocated() if self.on_gpu else None

    def forget(self) -> None:
        """Overwrite the state, so that a restore has to bring all of it back."""
        for tensor in self.tensors():
            tensor.zero_()
