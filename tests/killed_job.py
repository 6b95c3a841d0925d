"""The training job that :mod:`kills` kills: what it trains, and what it notes for those who find it dead.

Everything draws random numbers: augmentation in loader workers, dropout, mixing in the loop, validation. Notes go to a
file outside of the job's directory, one line each, and are in the page cache when ``write`` returns: SIGKILL loses
none. Where the job is when it dies stands in memory that it shares with its killer.
"""

from __future__ import annotations

import functools
import json
import mmap
import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import psutil
import torch
import torch.nn.functional as F
import xxhash
from jobs import ahead
from torch import nn
from torch.utils.data import Dataset

import checkflow
from checkflow.runtime import files
from checkflow.runtime.opening import parse_step
from checkflow.runtime.store import Store

EPOCHS, SAMPLES, BATCH, KEEP = 4, 62, 4, 2
BATCHES = -(-SAMPLES // BATCH)
PLAN_PATIENCE_SECONDS = 10.0
PLANNER = "checkflow.planner.child"

TRAINING = (
    "start-up", "resume", "batch and boundary", "forward", "backward", "optimizer step", "after the step", "validation",
    "end of epoch", "end of training",
)  # fmt: skip
STORAGE = ("idle", "commit", "write", "fsync", "rename", "directory fsync", "retention")
PLANNING = ("none", "unplanned", "recording", "timing", "making the plan", "planned", "trying again later", "given up")


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
    def steps(self) -> int:
        return EPOCHS * -(-BATCHES // self.micro_batches)


VARIANTS = (
    Variant("its own plan, every=1", given=False, every=1, workers=2, micro_batches=2),
    Variant("a given plan, every=1", given=True, every=1, workers=2),
    Variant("its own plan, default", given=False, every=None, workers=1, persistent_workers=True),
    Variant("a given plan, default, step()", given=True, every=None, workers=2, explicit=True),
)


class Whereabouts:
    """Where a job is: three words in memory that it shares with the process that it was forked from."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, mmap.PAGESIZE)
        self.clear()

    def clear(self) -> None:
        self._memory[:3] = bytes(3)

    def at(self, phase: str) -> None:
        """The training thread is here."""
        self._memory[0] = TRAINING.index(phase)

    def at_storage(self, phase: str) -> None:
        """The writer is here."""
        self._memory[1] = STORAGE.index(phase)

    def at_planning(self, stage: str | None) -> None:
        self._memory[2] = PLANNING.index(stage or "none")

    def read(self) -> tuple[str, str, str]:
        training, storage, planning = self._memory[:3]
        return TRAINING[training], STORAGE[storage], PLANNING[planning]


class Notes:
    """What a job says of itself, readable after its death.

    A line that SIGKILL cut in two is none: notes come before what they tell of may be relied on.
    """

    def __init__(self, path: Path, life: int) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC)
        self._life = life

    def write(self, kind: str, **content: Any) -> None:
        os.write(self._fd, f"\n{json.dumps({'life': self._life, 'kind': kind, **content})}\n".encode())


def read_notes(path: Path) -> list[dict[str, Any]]:
    """All whole notes, oldest first."""
    notes = []
    for line in path.read_bytes().splitlines() if path.exists() else ():
        if line.startswith(b"{") and line.endswith(b"}"):
            notes.append(json.loads(line))
    return notes


def watch_storage(directory: Path, notes: Notes, where: Whereabouts) -> None:
    """Note what is acknowledged, when it is and not before, and where the writer is.

    A checkpoint is "durable" when the fsync has returned that follows its rename, the last of a commit, and "committed"
    when the store says so to the one who asked for it. Both must outlive whatever comes after.
    """
    directory.mkdir(parents=True, exist_ok=True)
    root = directory.stat().st_ino
    renamed: list[int] = []
    real = {name: getattr(files, name) for name in ("open_new", "pwrite", "fsync", "rename", "unlink", "rmdir")}

    def writing() -> bool:
        return threading.current_thread().name == "checkflow-writer"

    def watched(name: str, phase: str) -> None:
        def call(*arguments: Any, **named: Any) -> Any:
            if writing():
                where.at_storage(phase)
            return real[name](*arguments, **named)

        setattr(files, name, call)

    def fsync(fd: int) -> None:
        whole = bool(renamed) and os.fstat(fd).st_ino == root
        if writing():
            where.at_storage("directory fsync" if whole else "fsync")
        real["fsync"](fd)
        if whole:
            notes.write("durable", step=renamed.pop())

    def rename(old: str, new: str, *, dir_fd: int) -> None:
        if writing():
            where.at_storage("retention" if new.startswith(".trash-") else "rename")
        real["rename"](old, new, dir_fd=dir_fd)
        if old.startswith(".tmp-") and (step := parse_step(new)) is not None:
            renamed[:] = [step]

    for name, phase in (("open_new", "write"), ("pwrite", "write"), ("unlink", "retention"), ("rmdir", "retention")):
        watched(name, phase)
    files.fsync, files.rename = fsync, rename
    commit = Store.commit

    @functools.wraps(commit)
    def committing(store: Store, step: int, *arguments: Any, **named: Any) -> Path:
        where.at_storage("commit")
        path = commit(store, step, *arguments, **named)
        notes.write("committed", step=step)
        where.at_storage("idle")
        return path

    Store.commit = committing  # type: ignore[method-assign]


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


def make(variant: Variant) -> tuple[Net, torch.optim.Optimizer, Any]:
    torch.manual_seed(0)
    random.seed(1)
    numpy.random.seed(2)
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    return model, optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=variant.steps + 1)


def digest(*parts: bytes) -> str:
    whole = xxhash.xxh3_128()
    for part in parts:
        whole.update(len(part).to_bytes(8, "little") + part)
    return str(whole.hexdigest())


def tensor_bytes(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def digest_tensors(tensors: Mapping[str, torch.Tensor]) -> str:
    """Names, dtypes, shapes and bytes."""
    parts = []
    for name, tensor in sorted(tensors.items()):
        parts += [f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode(), tensor_bytes(tensor)]
    return digest(*parts)


def digest_state(model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any) -> dict[str, str]:
    """All that a resume must bring back, but for the place in the data: by torch's own names, without checkflow."""
    tensors = {f"model/{name}": tensor for name, tensor in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"optimizer/{name}.{key}"] = value
    groups = [{key: group[key] for key in sorted(group) if key != "params"} for group in optimizer.param_groups]
    _, words, *rest = numpy.random.get_state()
    drawn = repr((random.getstate(), rest)).encode()
    return {
        "tensors": digest_tensors(tensors),
        "extra": digest(repr(groups).encode(), repr(sorted(scheduler.state_dict().items())).encode()),
        "generators": digest(drawn, words.tobytes(), tensor_bytes(torch.get_rng_state())),
    }


def plan_processes() -> list[psutil.Process]:
    """The processes that plan for this one."""
    found = []
    for process in psutil.Process().children():
        try:
            if PLANNER in process.cmdline():
                found.append(process)
        except psutil.Error:  # it has ended meanwhile
            continue
    return found


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
        notes: Notes,
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
        where.at("start-up")
        self._model, self._optimizer, self._scheduler = make(variant)
        options: dict[str, Any] = {}
        if self._workers:
            options = {"multiprocessing_context": "fork", "persistent_workers": variant.persistent_workers}
        loader = checkflow.DataLoader(Images(), BATCH, shuffle=True, seed=3, num_workers=self._workers, **options)
        where.at("resume")
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
                where.at("end of epoch")
            if not self._told:  # there was nothing left to do
                self._note_restored(EPOCHS, 0)
            where.at("end of training")
        report = checkpointer.report()
        self._notes.write(
            "end", step=checkpointer.iteration, failed=report["failed"], breaches=report["breaches"], **self._state()
        )

    def _train(self, epoch: int) -> bool:
        """An epoch, or what is left of it; returns whether training goes on."""
        variant, where, checkpointer = self._variant, self._where, self._checkpointer
        position = checkpointer.loader.position
        self._model.train()
        where.at("batch and boundary")
        batches: Iterator[Any] = iter(checkpointer.loader)
        for indices, x, y in ahead(batches) if variant.explicit else batches:
            if not self._told:
                self._note_restored(epoch, position)
            self._note_begun(epoch, indices, x, y)
            loss = self._loss(x, y) / variant.micro_batches
            where.at("backward")
            loss.backward()
            position += len(indices)
            last = position == SAMPLES
            if position % (BATCH * variant.micro_batches) and not last:
                where.at("batch and boundary")
                continue
            where.at("optimizer step")
            self._optimizer.step()
            where.at("after the step")
            self._optimizer.zero_grad()
            self._scheduler.step()
            if variant.explicit or not last:
                self._note_boundary(epoch, position)
            where.at("batch and boundary")
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
        self._where.at("forward")
        share = float(numpy.random.uniform(0.7, 1.0))
        mixed = share * x + (1 - share) * x.flip(0) if random.random() < 0.5 else x
        return F.cross_entropy(self._model(mixed), y)

    def _validate(self) -> None:
        self._where.at("validation")
        self._model.eval()
        with torch.no_grad():
            self._model(torch.randn(40, 3, 8, 8))
        end = time.monotonic() + PLAN_PATIENCE_SECONDS
        if self._checkpointer.report()["planning"] == "making the plan":  # or the job would end before it is there
            for process in plan_processes():
                while process.is_running() and process.status() != psutil.STATUS_ZOMBIE and time.monotonic() < end:
                    time.sleep(0.005)

    def _state(self) -> dict[str, str]:
        return digest_state(self._model, self._optimizer, self._scheduler)

    def _note_stage(self) -> None:
        self._where.at_planning(self._checkpointer.report()["planning"])

    def _note_restored(self, epoch: int, position: int) -> None:
        """What this life goes on from, as it is when the first batch has come."""
        self._told = True
        step = self._checkpointer.resumed_from
        self._notes.write("restored", step=step, place=[epoch, position], **self._state())
        if step is None:
            self._notes.write("boundary", step=0, place=[epoch, position], **self._state())

    def _note_begun(self, epoch: int, indices: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> None:
        report = self._checkpointer.report()
        self._notes.write(
            "batch", step=self._checkpointer.iteration, epoch=epoch, indices=indices.tolist(),
            bytes=digest(tensor_bytes(x), tensor_bytes(y)), interval=report["plan_interval"] or 1,
        )  # fmt: skip

    def _note_boundary(self, epoch: int, position: int) -> None:
        """The state is that of one more iteration: what a checkpoint of it must hold. Noted before checkflow sees it."""
        self._notes.write(
            "boundary", step=self._checkpointer.iteration + 1, place=[epoch, position], **self._state()
        )


def live(
    variant: Variant, directory: Path, plan: Path | None, notes: Path, life: int, where: Whereabouts,
    break_runtime: Callable[[], None] | None = None,
) -> None:  # fmt: skip
    """One life, in the process that calls this."""
    told = Notes(notes, life)
    if break_runtime is not None:
        break_runtime()
    watch_storage(directory, told, where)
    Training(variant, directory, plan, told, where).run()
