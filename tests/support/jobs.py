"""A training job that can be killed at a chosen place, run in processes of their own by the tests."""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from checkflow import api
from checkflow.api import Checkpointer
from checkflow.core import plan as plans
from checkflow.core.plan import Plan
from checkflow.planner.live.process import LOWEST_PRIORITY
from checkflow.runtime import reporter
from checkflow.runtime.data.loader import DataLoader
from tests.support.oracle import clone_state, random_plan
from tests.support.waiting import wait_for

EPOCHS, SAMPLES, BATCH = 3, 22, 4
GRACE_SECONDS = 3600.0  # from a signal to the end: a boundary comes sooner, however busy the machine is
BATCHES = -(-SAMPLES // BATCH)
KILLS = int(os.environ.get("CHECKFLOW_KILLS", "4"))  # of a job in a slow test; 30 by hand
PLACES = ("forward", "backward", "step", "after step", "validation", "epoch end")


@dataclass(frozen=True)
class Job:
    """One run of the job: where it lives, and where it is killed or signalled (place, epoch, number), or None."""

    directory: Path
    kill: tuple[str, int, int] | None = None
    workers: int = 0
    explicit: bool = False  # mark boundaries with step(), fetching a batch ahead
    interval: int = 1  # of the plan
    every: int | None = 1
    planless: bool = False  # the job makes its own plan, and waits for it
    number: int = signal.SIGKILL  # of the signal
    group: bool = False  # loader workers get it too, as from a scheduler or a terminal
    accumulate: int = 1  # micro-batches of an iteration
    reports: bool = False  # with each checkpoint, however long the last report took
    options: Mapping[str, Any] = field(default_factory=dict)  # further arguments of the Checkpointer


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


class Killer:
    """Signals its own process when the chosen place is reached; killed, nothing is flushed, nothing is closed."""

    def __init__(self, job: Job) -> None:
        self.job = job

    def at(self, *place: Any) -> None:
        if place == self.job.kill:
            (os.killpg if self.job.group else os.kill)(os.getpid(), self.job.number)


def data(seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(SAMPLES, 8, generator=generator)
    return TensorDataset(torch.arange(SAMPLES), x, torch.randint(0, 5, (SAMPLES,), generator=generator))


def make() -> tuple[Net, torch.optim.Optimizer, Any]:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)


def make_plan(seed: int = 0, interval: int = 1) -> Plan:
    model, optimizer, _ = make()
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    return random_plan({"model": model}, {"optimizer": optimizer}, seed, chunk_bytes=1000, interval=interval)


def run(job: Job) -> None:
    """Train to the end, or to the kill; saves the final state as "final.pt" and appends what was used to "samples"."""
    if job.group:
        os.setpgid(0, 0)
    torch.set_num_threads(1)
    api.check_plan = plans.validate  # a random plan obeys deadlines, and no link
    if job.reports:
        reporter.WRITTEN_EVERY_SECONDS, reporter.MOST_SHARE = 0.0, math.inf
    model, optimizer, scheduler = make()
    killer = Killer(job)
    # Forked workers end when their parent is killed; a fork server of their own would keep them waiting.
    fork = "fork" if job.workers else None
    loader = DataLoader(
        data(1), BATCH, shuffle=True, seed=3, num_workers=job.workers, multiprocessing_context=fork
    )  # fmt: skip
    plan = make_plan(interval=job.interval)  # in any case: it draws numbers
    with Checkpointer(
        model, optimizer, loader, directory=job.directory / "checkpoints", plan=None if job.planless else plan,
        state={"scheduler": scheduler}, every=job.every, **{"grace_seconds": GRACE_SECONDS, "audit": 1, **job.options},
    ) as checkpointer:  # fmt: skip
        for epoch in checkpointer.epochs(EPOCHS):
            model.train()
            batches = ahead(checkpointer.loader) if job.explicit else checkpointer.loader
            for number, (indices, x, y) in enumerate(batches):
                if job.planless:
                    wait_for_plan(job, checkpointer, killer)
                killer.at("forward", epoch, number)
                if number % job.accumulate == 0:
                    optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)
                killer.at("backward", epoch, number)
                loss.backward()
                killer.at("step", epoch, number)
                if (number + 1) % job.accumulate == 0:
                    optimizer.step()
                note(job.directory, checkpointer.iteration, epoch, indices)
                if job.explicit:
                    checkpointer.step()
                killer.at("after step", epoch, number)
            model.eval()
            with torch.no_grad():
                model(torch.randn(7, 8))
            killer.at("validation", epoch, 0)
            scheduler.step()
            killer.at("epoch end", epoch, 0)
    state = clone_state({"model": model}, {"optimizer": optimizer})
    final = {"state": state, "scheduler": scheduler.state_dict(), "rng": torch.get_rng_state()}
    torch.save(final, job.directory / "final.pt")


def wait_for_plan(job: Job, checkpointer: Checkpointer, killer: Killer) -> None:
    """Where it is being made, wait for the end of the process that does; or be killed before it ends."""
    making = checkpointer._loop.place.planning._making
    if making is not None:
        # One that is stopped before it has said that it ends with the job stays for ever. It lowers its priority next.
        process = psutil.Process(making.pid)
        wait_for(lambda: process.status() == psutil.STATUS_ZOMBIE or process.nice() == LOWEST_PRIORITY)
        os.kill(making.pid, signal.SIGSTOP)
        (job.directory / "planning process").write_text(str(making.pid))
        killer.at("planning", 0, 0)
        os.kill(making.pid, signal.SIGCONT)
        making._process.wait()


def ahead(batches: Any) -> Any:
    """Hand out batches one late, as loops that prefetch do."""
    iterator = iter(batches)
    held = next(iterator, None)
    while held is not None:
        following = next(iterator, None)
        yield held
        held = following


def note(directory: Path, iteration: int, epoch: int, indices: torch.Tensor) -> None:
    """A line for each batch that reached a step; in the page cache at once, so SIGKILL loses nothing."""
    with open(directory / "samples", "a") as file:
        file.write(f"{iteration} {epoch} {' '.join(str(int(index)) for index in indices)}\n")


def samples(directory: Path) -> list[list[int]]:
    """The samples of each iteration, replays having replaced what they replayed, epoch first."""
    lines: dict[int, list[int]] = {}
    for line in (directory / "samples").read_text().splitlines():
        iteration, *rest = (int(word) for word in line.split())
        lines = {at: row for at, row in lines.items() if at < iteration}
        lines[iteration] = rest
    assert sorted(lines) == list(range(len(lines)))
    return [lines[at] for at in sorted(lines)]


def start(job: Job) -> int:
    """Run a job in a process of its own; returns its exit code (-9 when it was killed)."""
    return in_a_process(run, job)


def in_a_process(function: Callable[..., None], *arguments: Any) -> int:
    """Call a function of an importable module in a process of its own; returns its exit code."""
    context = multiprocessing.get_context("forkserver")
    # Imported once, in the server that every job is forked from.
    context.set_forkserver_preload(["torch", "torch._dynamo", "checkflow.runtime.checkpointer", "pydantic"])
    process = context.Process(target=function, args=arguments)
    process.start()
    process.join()
    assert process.exitcode is not None
    return process.exitcode
