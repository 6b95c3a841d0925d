"""The training job that ``run`` kills: what it trains, and what it notes for those who find it dead.

Everything draws random numbers: augmentation in loader workers, dropout, mixing in the loop, validation.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

import checkflow
from checkflow.core import plan as plans
from checkflow.torture.journal import Journal
from tests.faults.kills.notes import Whereabouts, digest, digest_state, tensor_bytes, watch_storage
from tests.faults.kills.processes import children
from tests.support.jobs import ahead
from tests.support.planned_jobs import plan_by_trace

EPOCHS, SAMPLES, BATCH, KEEP = 6, 62, 4, 2
BATCHES = -(-SAMPLES // BATCH)
PLAN_PATIENCE_SECONDS = 10.0
PLANNER = "checkflow.planner.live.process"


@dataclass(frozen=True)
class Variant:
    """How a job uses checkflow."""

    name: str
    given: bool  # a plan made ahead of it, or one that it makes itself
    every: int | None
    workers: int
    micro_batches: int = 1
    persistent_workers: bool = False
    explicit: bool = False  # mark boundaries with step(), fetching a batch ahead

    @property
    def trajectory(self) -> tuple[int, bool]:
        """Jobs that are alike in this come to the same bits at the same boundaries."""
        return self.micro_batches, self.explicit

    @property
    def cadence(self) -> str:
        return "default" if self.every is None else f"every={self.every}"

    @property
    def steps(self) -> int:
        return EPOCHS * -(-BATCHES // self.micro_batches)


VARIANTS = (
    Variant("its own plan, every=1", given=False, every=1, workers=2, micro_batches=2),
    Variant("a given plan, every=1", given=True, every=1, workers=2),
    Variant("its own plan, default", given=False, every=None, workers=1, persistent_workers=True),
    Variant("a given plan, default, step()", given=True, every=None, workers=2, explicit=True),
)


class Net(nn.Module):
    """138,000 parameters: with Adam's moments a checkpoint has some 1.7 MB, more than L5 allows beyond its bound."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1),
            nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten(), nn.Linear(2048, 64), nn.Dropout(0.3), nn.Linear(64, 10),
        )  # fmt: skip

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.body(images)


class Images(Dataset[Any]):
    """Pictures, turned, shifted and made noisy by three generators when they are fetched."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(4)
        self.images = torch.randn(SAMPLES, 3, 8, 8, generator=generator)
        self.labels = torch.randint(0, 10, (SAMPLES,), generator=generator)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        image = self.images[index]
        if random.random() < 0.5:
            image = image.flip(2)
        image = image.roll(int(numpy.random.randint(0, 8)), 1)
        return index, image + 0.1 * torch.randn(3, 8, 8), self.labels[index]


def preload() -> None:
    """What every job imports, once for all that are forked from this process."""
    import torch._dynamo

    import checkflow.planner.live.planner

    _ = checkflow.Checkpointer, checkflow.DataLoader, torch._dynamo, checkflow.planner.live.planner


def make_plan(file: Path) -> None:
    """The plan of a job as ``checkflow plan`` makes it, on a link that it nearly fills."""
    model, optimizer, _ = make(VARIANTS[1])
    images = Images()
    step = checkflow.TrainingStep(
        model, optimizer, loss=lambda model, x, y: F.cross_entropy(model(x), y),
        batch=(images.images[:BATCH], images.labels[:BATCH]),
    )  # fmt: skip
    plans.save(plan_by_trace(step), file)


def make(variant: Variant) -> tuple[Net, torch.optim.Optimizer, Any]:
    torch.manual_seed(0)
    random.seed(1)
    numpy.random.seed(2)
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    return model, optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=variant.steps + 1)


class Training:
    """One life of a job: trains from wherever it stands to the end, or for some iterations.

    Args:
        plan: a plan file; None: the job makes its own.
        iterations: at most so many in this life.
        workers: instead of the variant's.
    """

    def __init__(
        self,
        variant: Variant,
        directory: Path,
        plan: Path | None,
        notes: Journal,
        where: Whereabouts,
        *,
        iterations: int | None = None,
        workers: int | None = None,
    ) -> None:
        self._variant, self._directory, self._plan = variant, directory, plan
        self._notes, self._where, self._left = notes, where, iterations
        self._workers = variant.workers if workers is None else workers
        self._told = False  # what it went on from

    def run(self) -> None:
        torch.set_num_threads(1)
        variant, where = self._variant, self._where
        where.at("training thread", "start-up")
        self._model, self._optimizer, self._scheduler = make(variant)
        options: dict[str, Any] = {}
        if self._workers:
            options = {"multiprocessing_context": "fork", "persistent_workers": variant.persistent_workers}
        loader = checkflow.DataLoader(Images(), BATCH, shuffle=True, seed=3, num_workers=self._workers, **options)
        where.at("training thread", "resume")
        with checkflow.Checkpointer(
            self._model, self._optimizer, loader, directory=self._directory, plan=self._plan,
            state={"scheduler": self._scheduler}, every=variant.every, keep_latest=KEEP, keep_epochs=False,
        ) as checkpointer:  # fmt: skip
            self._checkpointer = checkpointer
            self._note_stage()
            for epoch in checkpointer.epochs(EPOCHS):
                if not self._train(epoch):
                    break
                self._validate()
                if not variant.explicit:
                    self._note_boundary(epoch + 1, 0)
                where.at("training thread", "end of epoch")
            else:
                if variant.explicit:  # the end of training is saved if its last step was not: after what followed that
                    step = checkpointer.iteration
                    self._notes.write("boundary", step=step, place=[EPOCHS, 0], **self._state())
            if not self._told:  # there was nothing left to do
                self._note_restored(EPOCHS, 0)
            where.at("training thread", "end of training")
        report = checkpointer.report()
        self._notes.write(
            "end", step=checkpointer.iteration, failed=report["failed"], breaches=report["breaches"], **self._state()
        )

    def _train(self, epoch: int) -> bool:
        """An epoch, or what is left of it; returns whether training goes on."""
        variant, where, checkpointer = self._variant, self._where, self._checkpointer
        position = checkpointer.loader.position
        self._model.train()
        where.at("training thread", "batch and boundary")
        batches: Iterator[Any] = iter(checkpointer.loader)
        for indices, x, y in ahead(batches) if variant.explicit else batches:
            if not self._told:
                self._note_restored(epoch, position)
            self._note_begun(epoch, indices, x, y)
            loss = self._loss(x, y) / variant.micro_batches
            where.at("training thread", "backward")
            loss.backward()
            position += len(indices)
            last = position == SAMPLES
            if position % (BATCH * variant.micro_batches) and not last:
                where.at("training thread", "batch and boundary")
                continue
            where.at("training thread", "optimizer step")
            self._optimizer.step()
            where.at("training thread", "after the step")
            self._optimizer.zero_grad()
            self._scheduler.step()
            if variant.explicit or not last:
                self._note_boundary(epoch, position)
            where.at("training thread", "batch and boundary")
            if variant.explicit:
                checkpointer.step()
            self._note_stage()
            if self._left is not None:
                self._left -= 1
                if not self._left:
                    if last and not variant.explicit:
                        self._note_boundary(epoch + 1, 0)
                    return False
        if not self._told:  # the epoch had no batch left
            self._note_restored(epoch, position)
        return True

    def _loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Of the batch mixed with itself, turned round."""
        self._where.at("training thread", "forward")
        share = float(numpy.random.uniform(0.7, 1.0))
        mixed = share * x + (1 - share) * x.flip(0) if random.random() < 0.5 else x
        return F.cross_entropy(self._model(mixed), y)

    def _validate(self) -> None:
        self._where.at("training thread", "validation")
        self._model.eval()
        with torch.no_grad():
            self._model(torch.randn(40, 3, 8, 8))
        end = time.monotonic() + PLAN_PATIENCE_SECONDS
        if self._stage() == "making the plan":  # or the job would end before it is there
            while any(PLANNER in command for _, command in children(os.getpid())) and time.monotonic() < end:
                time.sleep(0.02)

    def _state(self) -> dict[str, str]:
        return digest_state(self._model, self._optimizer, self._scheduler)

    def _note_stage(self) -> None:
        self._where.at("planning", self._stage())

    def _stage(self) -> str:
        planning = self._checkpointer.report()["planning"]
        return "none" if planning is None else str(planning["stage"])

    def _note_restored(self, epoch: int, position: int) -> None:
        """What this life goes on from, as it is when the first batch has come."""
        self._told = True
        step = self._checkpointer.resumed_from
        self._notes.write("restored", step=step, place=[epoch, position], **self._state())
        if step is None:
            self._notes.write("boundary", step=0, place=[epoch, position], **self._state())

    def _note_begun(self, epoch: int, indices: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> None:
        plan = self._checkpointer.report()["plan"]
        self._notes.write(
            "batch", step=self._checkpointer.iteration, epoch=epoch, indices=indices.tolist(),
            bytes=digest(tensor_bytes(x), tensor_bytes(y)), interval=1 if plan is None else plan["interval"],
        )  # fmt: skip

    def _note_boundary(self, epoch: int, position: int) -> None:
        """The state is that of one more iteration: what its checkpoint must hold. Noted before checkflow sees it."""
        self._notes.write("boundary", step=self._checkpointer.iteration + 1, place=[epoch, position], **self._state())


def live(
    variant: Variant, directory: Path, plan: Path | None, notes: Path, life: int, where: Whereabouts,
    break_runtime: Callable[[], None] | None = None,
) -> None:  # fmt: skip
    """One life, in the process that calls this."""
    told = Journal(notes, life=life)
    if break_runtime is not None:
        break_runtime()
    watch_storage(directory, told, where)
    Training(variant, directory, plan, told, where).run()
