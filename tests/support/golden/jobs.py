"""The jobs whose checkpoints are kept in tests/data. A job there must resume as long as there is a golden file of it.

So this module only grows: a job that is to save something new is another job, with goldens of its own.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, Dataset

import checkflow
from checkflow.core.generators import generator_state

SAMPLES, BATCH, BATCHES = 26, 4, 7
CLASSES, WIDTH, WIDE = 5, 8, 128
RANK_EPOCHS = 2
Digests = dict[str, str]


class Images(Dataset[tuple[int, torch.Tensor, torch.Tensor]]):
    """Each sample carries its index."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        image = torch.rand(3, 6, 6, generator=generator)
        return index, image, torch.randint(CLASSES, (), generator=generator)


class Net(nn.Module):
    """A convolution in channels_last, batch norm, a weight under two names, and a complex buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.drop = nn.Conv2d(3, WIDTH, 3), nn.BatchNorm2d(WIDTH), nn.Dropout(0.2)
        self.first, self.again, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.again.weight = self.first.weight
        self.scale = nn.Parameter(torch.ones((), dtype=torch.bfloat16))
        self.register_buffer("phase", torch.tensor([1 + 2j, 3 - 4j]))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        pooled = torch.relu(self.norm(self.conv(images))).mean((2, 3))
        hidden: torch.Tensor = self.head(self.drop(self.again(torch.relu(self.first(pooled)))))
        return hidden * self.scale.float()


class Job:
    """A job of one process: ``loader`` is "checkflow" or "torch"."""

    def __init__(self, directory: Path, loader: str, epochs: int, **options: Any) -> None:
        self.epochs = epochs
        self.begun: Digests = {}  # what it held at its first batch: random numbers are restored there
        torch.manual_seed(11)
        np.random.seed(12)
        random.seed(13)
        self.model = Net().to(memory_format=torch.channels_last)
        decayed = [one for one in self.model.parameters() if one.ndim > 1]
        others = [one for one in self.model.parameters() if one.ndim <= 1]
        self.optimizer = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
            lr=0.01, amsgrad=True, foreach=False,
        )  # fmt: skip
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 5, 0.5)
        self.kept = checkflow.Variables(
            seen=0, best=float("inf"), names=["a", ("b", 2**70), {3: b"bytes"}],
            mean=torch.zeros(3, dtype=torch.float64), counts=np.arange(4, dtype=np.int16),
            draws=np.random.default_rng(14),
        )  # fmt: skip
        if loader == "checkflow":
            self.loader: Any = checkflow.DataLoader(Images(), BATCH, shuffle=True, seed=5)
        else:
            generator = torch.Generator().manual_seed(6)
            self.loader = checkflow.resumable(DataLoader(Images(), BATCH, shuffle=True, generator=generator))
        self.checkpointer = checkflow.Checkpointer(
            self.model, self.optimizer, self.loader, directory=directory, monitor="loss", grace_seconds=600,
            state={"scheduler": self.scheduler, "kept": self.kept}, **options,
        )  # fmt: skip

    def train(self, last: Callable[[int], bool] = lambda step: False) -> list[list[int]]:
        """Train to the end, or until ``last`` is so after a step; returns the samples of each step."""
        used: list[list[int]] = []
        with self.checkpointer:
            for _ in self.checkpointer.epochs(self.epochs):
                for indices, images, classes in self.checkpointer.loader:
                    self.begun = self.begun or self.digests()
                    used.append(indices.tolist())
                    self._step(images.to(memory_format=torch.channels_last), classes)
                    if last(self.checkpointer.iteration + 1):
                        break
                else:
                    continue
                break
        return used

    def _step(self, images: torch.Tensor, classes: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(images), classes)
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        self.kept.seen += len(images)
        self.kept.best = min(self.kept.best, loss.item())
        self.kept.mean = self.kept.mean + self.kept.draws.random()
        np.random.rand()
        random.random()
        self.checkpointer.metric("loss", loss.item())

    def digests(self) -> Digests:
        """What the job holds now, by part."""
        kept = {name: value for name, value in vars(self.kept).items() if name != "draws"}
        return {
            "model": digest(self.model.state_dict()),
            "memory order": digest({name: one.stride() for name, one in self.model.state_dict().items()}),
            "optimizer": digest(self.optimizer.state_dict()),
            "scheduler": digest(self.scheduler.state_dict()),
            "variables": digest({**kept, "draws": generator_state(self.kept.draws)}),
            "numbers": digest([torch.get_rng_state(), np.random.get_state(), random.getstate()]),
        }


class RankJob:
    """One rank of a job under FSDP2 or DDP; each has its own random numbers and statistics."""

    def __init__(self, rank: int, ranks: int, kind: str, directory: Path, **options: Any) -> None:
        self.begun: Digests = {}
        torch.manual_seed(21)
        model: Any = nn.Sequential(
            nn.Linear(WIDTH, 10), nn.ReLU(), nn.BatchNorm1d(10), nn.Dropout(0.1), nn.Linear(10, CLASSES)
        )
        if kind == "ddp":
            model = nn.parallel.DistributedDataParallel(model, broadcast_buffers=False)
        elif kind == "fsdp":
            model = fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))
        self.model = model
        torch.manual_seed(100 + rank)
        np.random.seed(200 + rank)
        random.seed(300 + rank)
        self.optimizer = torch.optim.Adam(model.parameters(), lr=0.01, foreach=False)
        self.kept = checkflow.Variables(rank=rank, seen=0)
        self.loader = checkflow.DataLoader(Rows(), BATCH, shuffle=True, seed=5)
        self.checkpointer = checkflow.Checkpointer(
            model, self.optimizer, self.loader, directory=directory, grace_seconds=600, state={"kept": self.kept},
            **options,
        )  # fmt: skip

    def train(self, last: Callable[[int], bool] = lambda step: False) -> list[list[int]]:
        """As :meth:`Job.train`."""
        used: list[list[int]] = []
        with self.checkpointer:
            for _ in self.checkpointer.epochs(RANK_EPOCHS):
                for indices, rows, classes in self.checkpointer.loader:
                    self.begun = self.begun or self.digests()
                    used.append(indices.tolist())
                    self.optimizer.zero_grad()
                    F.cross_entropy(self.model(rows), classes).backward()
                    self.optimizer.step()
                    self.kept.seen += len(rows)
                    np.random.rand()
                    random.random()
                    if last(self.checkpointer.iteration + 1):
                        break
                else:
                    continue
                break
        return used

    def digests(self) -> Digests:
        """What this rank holds now, by part."""
        model = {name.removeprefix("module."): value for name, value in self.model.state_dict().items()}
        return {
            "model": digest(model),
            "optimizer": digest(self.optimizer.state_dict()),
            "variables": digest(dict(vars(self.kept))),
            "numbers": digest([torch.get_rng_state(), np.random.get_state(), random.getstate()]),
        }


class Mixing:
    """A loader that keeps a large buffer, column by column."""

    def __init__(self) -> None:
        self.at, self.buffer = 0, torch.zeros(WIDE, WIDE).t()

    def __len__(self) -> int:
        return BATCHES

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.at < BATCHES:
            self.buffer.mul_(0.5)[self.at] += torch.rand(WIDE)
            self.at += 1
            yield self.buffer[:WIDTH, :WIDTH].clone()

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "buffer": self.buffer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.buffer = state["at"], state["buffer"]


class Averaging(torch.optim.SGD):
    """It has tensors in lists and in groups, and adds a key to its state_dict."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1, momentum=0.9)
        self.average = torch.zeros(WIDTH)
        self.param_groups[0]["basis"] = torch.eye(WIDE).t()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        (weight,) = self.param_groups[0]["params"]
        self.state[weight].setdefault("powers", [torch.zeros(WIDTH, WIDTH).t(), 0])[0].add_(weight.detach() ** 2)
        self.average.lerp_(weight.detach()[0], 0.5)
        self.param_groups[0]["basis"].mul_(0.9)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "average": self.average}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.average = state_dict["average"]


class TensorsAnywhere:
    """A job of one process that has tensors outside of a model and of an optimizer's tables."""

    def __init__(self, directory: Path, **options: Any) -> None:
        self.begun: Digests = {}
        torch.manual_seed(31)
        self.model = nn.Linear(WIDTH, WIDTH, bias=False)
        self.optimizer = Averaging(self.model.parameters())
        self.kept = checkflow.Variables(hidden=torch.zeros(3, WIDTH).t())
        self.mixing = Mixing()
        self.checkpointer = checkflow.Checkpointer(
            self.model, self.optimizer, checkflow.resumable(self.mixing), directory=directory, grace_seconds=600,
            state={"kept": self.kept}, **options,
        )  # fmt: skip

    def train(self, last: Callable[[int], bool] = lambda step: False) -> None:
        with self.checkpointer:
            for _ in self.checkpointer.epochs(1):
                for rows in self.checkpointer.loader:
                    self.begun = self.begun or self.digests()
                    self.optimizer.zero_grad()
                    hidden = self.model(rows)
                    hidden.square().mean().backward()
                    self.optimizer.step()
                    self.kept.hidden = hidden.detach()[:3].t() * 1
                    if last(self.checkpointer.iteration + 1):
                        return

    def digests(self) -> Digests:
        """As :meth:`Job.digests`; a loader's place is one batch further."""
        tensors = [self.optimizer.param_groups[0]["basis"], self.kept.hidden, self.optimizer.average]
        return {
            "model": digest(self.model.state_dict()),
            "optimizer": digest(self.optimizer.state_dict()),
            "others": digest([tensors, [one.stride() for one in tensors]]),
            "loader": digest([self.mixing.state_dict(), self.mixing.buffer.stride()]),
            "numbers": digest([torch.get_rng_state()]),
        }


class Rows(Dataset[tuple[int, torch.Tensor, torch.Tensor]]):
    """Each sample carries its index."""

    def __len__(self) -> int:
        return 8 * SAMPLES

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        return index, torch.rand(WIDTH, generator=generator), torch.randint(CLASSES, (), generator=generator)


def run_rank(
    rank: int, ranks: int, kind: str, directory: Path, end: int | None, options: dict[str, Any]
) -> tuple[int | None, Digests, list[list[int]], dict[int, Digests]]:
    """Train to a step, or to the end: the step it began at, and what it held then; the samples; what it held later."""
    job = RankJob(rank, ranks, kind, directory, **options)
    held = {}

    def last(step: int) -> bool:
        held[step] = job.digests()
        return step == end

    used = job.train(last)
    return job.checkpointer.resumed_from, job.begun, used, held


def digest(value: Any) -> str:
    """A digest of any state, by types, names and bits."""
    found = hashlib.sha256()

    def add(one: Any) -> None:
        if isinstance(one, DTensor):
            one = one.full_tensor()
        if isinstance(one, torch.Tensor):
            data = one.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            found.update(f"{one.dtype} {tuple(one.shape)} ".encode() + data)
        elif isinstance(one, np.ndarray):
            found.update(f"{one.dtype} {one.shape} ".encode() + one.tobytes())
        elif isinstance(one, dict):
            found.update(f"{len(one)} names ".encode())
            for name in sorted(one, key=repr):
                add(name)
                add(one[name])
        elif isinstance(one, list | tuple):
            found.update(f"{type(one).__name__} of {len(one)} ".encode())
            for part in one:
                add(part)
        else:
            found.update(f"{type(one).__name__} {one!r} ".encode())

    add(value)
    return found.hexdigest()
