"""A job of several ranks under torchrun's own agent, forked from a process that has imported everything.

Each rank notes digests of all that it holds at each boundary and after each restore, and what it knows to be durable.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import nn
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

import checkflow
from checkflow.runtime.persist.rank_commit import RankCommit
from checkflow.torture.journal import Journal
from tests.faults.ranks.places import Places, watch
from tests.support.programs.ranks_job import Data, make_model, wrap
from tests.support.ranks.processes import join_group

PAUSE_SECONDS = 0.01  # an iteration
GRACE_SECONDS = 10.0
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Kind:
    """How a job is spread. Ranks of one number in ``replicas`` hold the same."""

    name: str
    ranks: int
    epochs: int  # about 48 iterations
    replicas: tuple[int, ...]


KINDS = {
    one.name: one
    for one in (
        Kind("ddp", 2, 8, (0, 0)), Kind("fsdp", 3, 12, (0, 1, 2)), Kind("tp", 2, 4, (0, 1)),
        Kind("hsdp", 4, 16, (0, 1, 0, 1)),
    )
}  # fmt: skip


@dataclass(frozen=True)
class Life:
    """One start of a job by its launcher."""

    kind: Kind
    directory: Path
    notes: Path  # of rank N: ``notes-N``
    number: int
    every: str
    restarts: int = 0  # that the launcher makes itself, when ranks end


class Notes(Journal):
    """Each line has the time."""

    def write(self, event: str, **content: Any) -> None:
        super().write(event, at=time.monotonic(), **content)


def launch(life: Life, places: Places, breaking: Callable[[], None] | None) -> None:
    """In the launcher's process, until the job is over."""
    places.launches(os.getpid())
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    config = LaunchConfig(
        1, 1, life.kind.ranks, run_id=f"life-{life.number}", rdzv_backend="c10d", rdzv_endpoint="localhost:0",
        max_restarts=life.restarts, start_method="fork", monitor_interval=0.05,
    )  # fmt: skip
    try:
        elastic_launch(config, train)(life, places, breaking)
    except ChildFailedError as error:
        raise SystemExit(f"ranks failed: {sorted(error.failures)}") from None
    except SignalException as error:
        raise SystemExit(str(error)) from None


def digests_of(model: nn.Module, optimizer: torch.optim.Optimizer, *, buffers: bool) -> dict[str, str]:
    """Of this rank's own part: what its replicas must hold alike, its buffers, and its random numbers."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        model = model.module
    shared, own = xxhash.xxh3_128(), xxhash.xxh3_128()

    def add(into: Any, name: str, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            local: Any = value.to_local() if hasattr(value, "to_local") else value
            into.update(name.encode() + local.detach().contiguous().numpy().tobytes())

    for name, parameter in model.named_parameters():
        add(shared, name, parameter)
        for key, value in sorted(optimizer.state.get(parameter, {}).items()):
            add(shared, f"{name}.{key}", value)
    for name, buffer in model.named_buffers() if buffers else ():
        add(own, name, buffer)
    drawn = xxhash.xxh3_128_hexdigest(torch.get_rng_state().numpy().tobytes())
    return {"shared": str(shared.hexdigest()), "own": str(own.hexdigest()), "drawn": str(drawn)}


def train(life: Life, places: Places, breaking: Callable[[], None] | None) -> None:
    """In a rank's process."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, 0, 0, 0, 0)  # torchrun's ranks outlive it, where they are programs
    torch.set_num_threads(1)
    rank, kind = int(os.environ["RANK"]), life.kind
    notes = Notes(Path(f"{life.notes}-{rank}"), start=_start_of(life))
    places.enter(rank, os.getpid())
    notes.write("starts")
    watch(places, rank)
    _note_commits(notes)
    if breaking is not None:
        breaking()
    join_group()
    model = wrap(make_model(kind.name), kind.name)
    torch.manual_seed(100 if kind.name == "tp" else 100 + rank)  # ranks of one tensor-parallel group drop alike
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    share = {"rank": 0, "world_size": 1} if kind.name == "tp" else {}
    loader: Any = checkflow.DataLoader(Data(), batch_size=4, shuffle=True, seed=5, **share)
    buffers = kind.name != "ddp" or rank == 0  # DDP takes rank 0's

    def note(event: str, step: int) -> None:
        notes.write(event, step=step, **digests_of(model, optimizer, buffers=buffers))

    try:
        checkpointer = checkflow.Checkpointer(
            model, optimizer, loader, directory=life.directory, audit=1, grace_seconds=GRACE_SECONDS,
            every=int(life.every) if life.every.isdecimal() else life.every,
        )  # fmt: skip
    except checkflow.CheckflowError as error:
        notes.write("refused", kind=type(error).__name__, message=str(error))
        raise
    note("restored", checkpointer.resumed_from or 0)
    try:
        with checkpointer:
            for _ in checkpointer.epochs(kind.epochs):
                for batch, target in loader:
                    optimizer.zero_grad()
                    places.at(rank, "forward")
                    loss = nn.functional.mse_loss(model(batch), target)
                    places.at(rank, "backward")
                    loss.backward()
                    places.at(rank, "optimizer step")
                    optimizer.step()
                    note("boundary", checkpointer.iteration + 1)
                    time.sleep(PAUSE_SECONDS)
    except BaseException as error:
        notes.write("raised", kind=type(error).__name__, message=str(error), step=checkpointer.iteration)
        raise
    note("ended", checkpointer.iteration)
    places.leave(rank)
    with contextlib.suppress(RuntimeError):  # another rank may be dead now
        dist.barrier()
    dist.destroy_process_group()


def _start_of(life: Life) -> str:
    return f"{life.number}.{os.environ['TORCHELASTIC_RESTART_COUNT']}"


def _note_commits(notes: Notes) -> None:
    commit = RankCommit.commit

    def noted(self: RankCommit, capture: Any, *arguments: Any) -> Path:
        path = commit(self, capture, *arguments)
        notes.write("durable", step=capture.step)
        return path

    RankCommit.commit = noted  # type: ignore[method-assign]
