"""A job of several ranks under torchrun: DDP, FSDP2, HSDP or tensor parallel. Its digest at the end is of all state.

``ranks_job.py DIRECTORY KIND EPOCHS [OPTION=VALUE ...]`` appends JSON lines to ``log-<rank>`` in the working directory.
Options: loop=steps (without a loader; loop=marked: by step(); loop=plain: says nothing), evaluate=1 (after each step),
every ("auto" for none), rank1_every (one rank's), pause (seconds an iteration), grace_seconds, surgery=1 (load other
weights after the last step), planned=1 (wait for this rank's plan after iteration 8; planned=first: on rank 0 only),
storage=hangs:3 or fails:3 (for steps after 3, until torchrun restarts it), dies=1:5 (rank 1, as soon as memory has
step 5; likewise), losses=3,1,2 (the metric "loss" after each epoch, of which the best state is kept), checks=slowly
(rank 0 reads rank 1's file for longer than any rank needs to end, and not to the end after one has), manifest=2000 (its
limit in bytes), silent=3 (seconds after which a rank that says nothing counts as dead).
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import checkflow
from checkflow.core.errors import StorageError
from checkflow.runtime import checkpointer as checkpointers
from checkflow.runtime.format import manifest
from checkflow.runtime.ranks import council as councils
from checkflow.runtime.ranks.joining import join
from checkflow.runtime.store import block_reader
from checkflow.runtime.store.store import Store
from tests.support.ranks.jobs import is_kept
from tests.support.ranks.processes import join_group
from tests.support.waiting import wait_for

WIDTH = 64


class Data(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> Any:
        generator = torch.Generator().manual_seed(index)
        return torch.randn(WIDTH, generator=generator), torch.randn(3, generator=generator)


def make_model(kind: str) -> nn.Module:
    torch.manual_seed(1)
    inner = 258 if kind == "tp" else 257  # DTensor cannot multiply uneven parts
    return nn.Sequential(
        nn.Linear(WIDTH, inner), nn.ReLU(), nn.BatchNorm1d(inner), nn.Linear(inner, 130), nn.Dropout(0.1),
        nn.Linear(130, 3),
    )  # fmt: skip


def wrap(model: nn.Module, kind: str) -> nn.Module:
    world = dist.get_world_size()
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if kind in ("fsdp", "hsdp"):
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (world,) if kind == "fsdp" else (2, world // 2),
                                mesh_dim_names=("shard",) if kind == "fsdp" else ("replicate", "shard"))  # fmt: skip
        for layer in model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    if kind == "tp":
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        model[2] = nn.Identity()  # its statistics would have to be sharded, too
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
        return parallelize_module(model, mesh, {"0": ColwiseParallel(), "3": RowwiseParallel()})
    return model


def digest_of(models: list[nn.Module], optimizer: torch.optim.Optimizer) -> str:
    """Of all whole tensors, the same on all ranks where they are replicated or sharded."""
    found = hashlib.sha256()

    def add(name: str, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            found.update(name.encode() + whole.detach().contiguous().numpy().tobytes())

    for model in models:
        if isinstance(model, nn.parallel.DistributedDataParallel):
            model = model.module
        for name, parameter in model.named_parameters():
            add(name, parameter)
            for key, value in sorted(optimizer.state.get(parameter, {}).items()):
                add(f"{name}.{key}", value)
    return found.hexdigest()


def break_storage(how: str, last: int) -> None:
    """Storage takes no step after this one."""
    commit = Store.commit_written

    def broken(self: Store, step: int, *rest: Any, **more: Any) -> Path:
        if step > last and how == "hangs":
            threading.Event().wait()
        if step > last:
            raise StorageError("the disk is full")
        return commit(self, step, *rest, **more)

    Store.commit_written = broken  # type: ignore[method-assign]


def check_slowly() -> None:
    """Of rank 0: a block of rank 1 is read only where the other ranks live on, as a launcher ends all when one ends."""
    read = block_reader.read_block

    def slowly(file: Any, *arguments: Any) -> Any:
        if file.path.name.startswith("model-00001"):
            pids = [json.loads(path.read_text().splitlines()[0])["pid"] for path in Path().glob("log-*")]
            end = time.monotonic() + 5
            wait_for(lambda: time.monotonic() > end or not all(Path(f"/proc/{pid}").exists() for pid in pids))
            if time.monotonic() <= end:
                threading.Event().wait()
        return read(file, *arguments)

    block_reader.read_block = slowly


def batches(
    checkpointer: checkflow.Checkpointer, loader: Any, epochs: int, losses: list[float], loop: str | None
) -> Iterator[Any]:
    """With a loader by epochs, otherwise as ``loop`` says. ``losses``: after each epoch, if there are some."""
    if loader is None:
        for step in checkpointer.steps(6 * epochs) if loop == "steps" else range(6 * epochs):
            yield tuple(torch.stack(one) for one in zip(*(Data()[(step + i) % 48] for i in range(4)), strict=True))
            if loop == "marked":
                checkpointer.step()
        return
    for epoch in checkpointer.epochs(epochs):
        yield from checkpointer.loader
        if losses:
            checkpointer.metric("loss", losses[epoch])


def main() -> None:
    directory, kind, epochs, *rest = sys.argv[1:]
    options = dict(one.split("=", 1) for one in rest)
    torch.set_num_threads(1)
    join_group()
    rank = dist.get_rank()
    log = Path(f"log-{rank}").open("a", encoding="utf-8")  # noqa: SIM115

    def tell(what: str, **more: Any) -> None:
        log.write(json.dumps({"what": what, "pid": os.getpid(), **more}) + "\n")
        log.flush()

    tell("starts")
    first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    if first and "storage" in options:
        how, _, last = options["storage"].partition(":")
        break_storage(how, int(last))
    manifest.MAX_MANIFEST_BYTES = int(options.get("manifest", manifest.MAX_MANIFEST_BYTES))
    if "silent" in options:
        checkpointers.join = functools.partial(join, silent_seconds=float(options["silent"]))
        councils._BEAT_SECONDS = 0.1
    doomed, _, fatal = options.get("dies", "-1:0").partition(":")
    if rank == 0 and "checks" in options:
        check_slowly()
    model = wrap(make_model(kind), kind)
    torch.manual_seed(100 if kind == "tp" else 100 + rank)  # ranks of one tensor-parallel group drop alike
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    share = {"rank": 0, "world_size": 1} if kind == "tp" else {}
    loader = None
    if "loop" not in options:
        loader = checkflow.DataLoader(Data(), batch_size=4, shuffle=True, seed=5, **share)
    every: Any = options.get(f"rank{rank}_every") or options.get("every", "1")
    logging.getLogger("checkflow").setLevel(logging.INFO)
    losses = [float(one) for one in options["losses"].split(",")] if "losses" in options else []
    best: dict[str, Any] = {"keep_best": 1, "monitor": "loss"} if losses else {}
    begun = time.monotonic()
    try:
        checkpointer = checkflow.Checkpointer(
            model, optimizer, loader, directory=directory, audit=1,
            grace_seconds=float(options.get("grace_seconds", "25")),
            every=int(every) if every.isdecimal() else None if every == "auto" else every, **best,
        )  # fmt: skip
    except checkflow.CheckflowError as error:
        tell("refuses", kind=type(error).__name__, message=str(error), seconds=time.monotonic() - begun)
        raise
    tell("begins", step=checkpointer.resumed_from)
    try:
        with checkpointer:
            for batch, target in batches(checkpointer, loader, int(epochs), losses, options.get("loop")):
                optimizer.zero_grad()
                loss = nn.functional.mse_loss(model(batch), target)
                loss.backward()
                optimizer.step()
                if "evaluate" in options:
                    model.eval()
                    with torch.no_grad():
                        model(batch)
                    model.train()
                if first and rank == int(doomed) and checkpointer.iteration == int(fatal):
                    wait_for(lambda: is_kept(Path(directory), int(fatal), dist.get_world_size()))
                    os.kill(os.getpid(), signal.SIGKILL)
                tell("stepped", step=checkpointer.iteration + 1, durable=checkpointer.durable_step)
                time.sleep(float(options.get("pause", "0")))
                waits = options.get("planned") == "1" or (rank == 0 and "planned" in options)
                if waits and checkpointer.iteration == 8:
                    making = checkpointer._loop.place.planning._making
                    wait_for(lambda: making is None or making._process.poll() is not None)  # noqa: B023
            if "surgery" in options:
                model.load_state_dict({name: 2 * value for name, value in model.named_parameters()}, strict=False)
    except BaseException as error:
        report = checkpointer.report()
        tell("raised", kind=type(error).__name__, message=str(error), step=checkpointer.iteration,
             durable=checkpointer.durable_step, failed=report["failed"])  # fmt: skip
        raise
    report = checkpointer.report()
    tell("ended", step=checkpointer.iteration, durable=checkpointer.durable_step, failed=report["failed"],
         committed=report["committed"], captures=report["captures"], audits=report["audits_passed"],
         plan=report["plan"], moved=report["bytes"], ranks=report["ranks"],
         digest=digest_of([model], optimizer))  # fmt: skip
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
