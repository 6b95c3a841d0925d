"""Jobs that are killed, and leave captures in host memory.

They run in processes of their own. Storage takes every fourth capture only, so that what is newer can come from memory
alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from checkflow import api
from checkflow.api import Checkpointer
from checkflow.core import plan as plans
from checkflow.core.errors import StorageError
from checkflow.core.plan import Plan
from checkflow.runtime.interval.controller import Controller
from checkflow.runtime.memory_tier import orphans, records
from checkflow.runtime.memory_tier.records import LIFE, MARK, OWNER
from checkflow.runtime.memory_tier.tier import MemoryTier
from checkflow.runtime.persist import saver
from checkflow.runtime.store.discovery import find
from checkflow.runtime.store.files import parse_step
from checkflow.runtime.store.store import Store
from tests.support import jobs
from tests.support.oracle import random_plan
from tests.support.waiting import wait_for

RARE = 4  # iterations from one durable checkpoint to the next
PER_EPOCH = jobs.BATCHES

needs_memory = pytest.mark.skipif(
    not os.access("/dev/shm", os.W_OK) or os.statvfs("/dev/shm").f_bavail * os.statvfs("/dev/shm").f_frsize < 16 << 20,
    reason="there is no shared memory to speak of",
)


@dataclass(frozen=True)
class Death:
    """A job that dies; at the end of an iteration it waits until memory has the boundary before that."""

    job: jobs.Job
    breaks: str = ""
    stored: int | None = None  # what storage has by then
    root: Path = records.ROOT
    rare: int = RARE


def rarely(rare: int) -> None:
    """Every boundary is captured, and few are durable, for the rest of this process."""
    Controller.is_due = lambda self, number: True  # type: ignore[method-assign]
    Controller.is_durable = lambda self, number: number % rare == 0  # type: ignore[method-assign]


def die(death: Death) -> None:
    """In a process of its own."""
    rarely(death.rare)
    records.ROOT = death.root
    at = jobs.Killer.at
    checkpoints = death.job.directory / "checkpoints"

    def when_kept(self: jobs.Killer, *place: Any) -> None:
        if place == death.job.kill and place[0] == "after step":
            step = PER_EPOCH * place[1] + place[2]
            wait_for(lambda: step in kept_in(checkpoints))
            wait_for(lambda: death.stored in (None, known_to_be_stored(checkpoints)))
        at(self, *place)

    jobs.Killer.at = when_kept  # type: ignore[method-assign]
    if death.breaks:
        BREAKS[death.breaks]()
    jobs.run(death.job)


def full_disk() -> None:
    """From the sixth step on."""
    commit = Store.commit

    def fail(self: Store, step: int, *rest: Any, **more: Any) -> Path:
        if step > 5:
            raise StorageError("the disk is full")
        return commit(self, step, *rest, **more)

    Store.commit = fail  # type: ignore[method-assign]


def tear(step: int = 7) -> None:
    """What was staged is changed before the record of it is made: what a write too early would do."""
    keep = MemoryTier.keep

    def torn(self: MemoryTier, capture: Any, *rest: Any) -> None:
        if capture.step == step:
            placed = max(capture.layout.tensors.values(), key=lambda one: one.record.size_bytes)
            view = capture.buffer.view
            view[placed.staging_offset] ^= 1
        keep(self, capture, *rest)

    MemoryTier.keep = torn  # type: ignore[method-assign]


def tear_the_audited() -> None:
    """The first capture is audited, and torn; those that follow are neither looked at."""
    saver.FIRST_AUDITS = 1
    tear(1)


BREAKS: dict[str, Callable[[], None]] = {"full": full_disk, "torn": tear, "audited": tear_the_audited}


def folders() -> set[Path]:
    return {path for path in records.ROOT.glob("checkflow-*") if orphans.FOLDER.fullmatch(path.name)}


def folder_of(directory: Path) -> Path:
    return records.ROOT / f"checkflow-{json.loads((directory / MARK).read_text())['token']}"


def newest_on_storage(directory: Path) -> int | None:
    return max((step for path in find(directory) if (step := parse_step(path.name)) is not None), default=None)


def kept_in(directory: Path) -> list[int]:
    """The steps that memory has a record of."""
    return [json.loads(path.read_text())["step"] for path in folder_of(directory).glob("buffer-*.json")]


def known_to_be_stored(directory: Path) -> int:
    durable: int = json.loads((folder_of(directory) / LIFE).read_text())["durable"]
    return durable


def killed(
    tmp_path: Path,
    *,
    kill: tuple[str, int, int] = ("after step", 1, 1),
    breaks: str = "",
    stored: int | None = None,
    rare: int = RARE,
    **job: Any,
) -> Path:
    """The directory of the checkpoints of a job that died: with seven iterations finished, and the eighth stepped."""
    one = jobs.Job(tmp_path, kill=kill, every=None, **job)
    assert jobs.in_a_process(die, Death(one, breaks, stored, records.ROOT, rare)) == -signal.SIGKILL
    return tmp_path / "checkpoints"


def resume(directory: Path, **options: Any) -> Checkpointer:
    model, optimizer, scheduler = jobs.make()
    loader = jobs.DataLoader(jobs.data(1), jobs.BATCH, shuffle=True, seed=3)
    plan = jobs.make_plan()
    return Checkpointer(
        model, optimizer, loader, directory=directory, plan=plan, state={"scheduler": scheduler}, **options
    )  # fmt: skip


def train(checkpointer: Checkpointer) -> None:
    job = checkpointer._job
    (model,), (optimizer,) = job.models.values(), job.optimizers.values()
    for _, x, y in checkpointer.loader:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


def folders_below(tmp_path: Path) -> list[Path]:
    """Of a test's own directories. Other tests run at the same time, and have folders of their own."""
    found = []
    for path in folders():
        try:
            owner = json.loads((path / OWNER).read_text())["directory"]
        except FileNotFoundError:
            continue
        if Path(owner).is_relative_to(tmp_path):
            found.append(path)
    return found


@contextlib.contextmanager
def random_plans_and_nothing_left(tmp_path: Path) -> Iterator[None]:
    """For a test in whose process jobs run by random plans."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(api, "check_plan", plans.validate)  # a random plan obeys deadlines, and no link
        yield
    give_back(tmp_path)


def give_back(tmp_path: Path) -> None:
    """What is left below a test's directory."""
    for path in folders_below(tmp_path):
        shutil.rmtree(path)


class Tied(nn.Module):
    """Two names for one weight, and a layer that is used late: until then its optimizer state is absent."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.again, self.late = (nn.Linear(8, 8) for _ in range(3))
        self.again.weight = self.first.weight

    def forward(self, x: torch.Tensor, *, late: bool) -> torch.Tensor:
        x = self.again(self.first(x))
        return self.late(x) if late else x


def tied() -> tuple[Tied, torch.optim.Optimizer]:
    torch.manual_seed(0)
    numpy.random.seed(0)
    random.seed(0)
    model = Tied()
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


def tied_plan() -> Plan:
    """It has the late layer's state, too."""
    model, optimizer = tied()
    model(torch.ones(4, 8), late=True).sum().backward()
    optimizer.step()
    return random_plan({"model": model}, {"optimizer": optimizer}, 0)


def train_tied(directory: Path, steps: int, every: int | None = 1, last: Callable[[], object] = lambda: None) -> None:
    """In a process of its own.

    Args:
        last: called in the iteration after so many, when it has stepped.
    """
    api.check_plan = plans.validate  # a random plan obeys deadlines, and no link
    model, optimizer = tied()
    with Checkpointer(model, optimizer, directory=directory, plan=tied_plan(), every=every) as checkpointer:
        for step in checkpointer.steps(steps + 1):
            optimizer.zero_grad()
            model(torch.full((4, 8), float(step)), late=False).square().mean().backward()
            optimizer.step()
            if step == steps:
                last()
            checkpointer.metric("loss", step / 8)


def die_tied(directory: Path, steps: int) -> None:
    """Killed with its last boundary in host memory, and nothing on storage."""

    def die() -> None:
        wait_for(lambda: steps in kept_in(directory))
        os.kill(os.getpid(), signal.SIGKILL)

    rarely(1000)
    train_tied(directory, steps, None, die)
