"""Real processes that train together over gloo, one a rank."""

from __future__ import annotations

import multiprocessing
import os
import pickle
from collections.abc import Callable
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

Work = Callable[..., Any]


def preload(*more: str) -> None:
    """The process that others are forked from imports what most of them need, and ``more``."""
    modules = [  # pytest: where it is the main program, all import it
        "pytest", "torch._dynamo", "torch.distributed.run", "torch.distributed.fsdp",
        "torch.distributed.tensor.parallel", "tests.support.programs.ranks_job", *more,
    ]  # fmt: skip
    server: Any = forkserver._forkserver
    if server._preload_modules != modules:
        server._stop()
        server.set_forkserver_preload(modules)


def run_ranks(
    folder: Path, world_size: int, work: Work, *arguments: Any, exit_code: int = 0, preloaded: tuple[str, ...] = ()
) -> list[Any]:  # fmt: skip
    """``work(rank, world_size, *arguments)`` in processes of one process group; returns what each returned, by rank.

    ``folder`` is empty; ``work`` is a module's function. ``exit_code``: of all, which otherwise return nothing.
    ``preloaded``: modules that take long to import, and that other ranks do not need.
    """
    context = multiprocessing.get_context("forkserver")
    preload(*preloaded)
    processes = [
        context.Process(target=_rank, args=(folder, rank, world_size, work, arguments)) for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.join()
        assert [process.exitcode for process in processes] == [exit_code] * world_size
    finally:
        for process in processes:
            process.kill()
            process.join()
    if exit_code:
        return []
    return [pickle.loads((folder / f"result-{rank}").read_bytes()) for rank in range(world_size)]


def _rank(folder: Path, rank: int, world_size: int, work: Work, arguments: tuple[Any, ...]) -> None:
    import torch

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder / 'rendezvous'}", rank=rank, world_size=world_size
    )
    try:
        result = work(rank, world_size, *arguments)
        (folder / f"result-{rank}").write_bytes(pickle.dumps(result))
        torch.distributed.barrier()
    finally:
        torch.distributed.destroy_process_group()


def join_group() -> None:
    """The default group of a rank that torchrun has started, or started again.

    torchrun keeps one store for all its starts: without a prefix, a rank may read there where another one listened
    before the restart.
    """
    from torch import distributed as dist

    environment = os.environ
    store = dist.TCPStore(environment["MASTER_ADDR"], int(environment["MASTER_PORT"]), wait_for_workers=False)
    dist.init_process_group(
        "gloo", store=dist.PrefixStore(environment["TORCHELASTIC_RESTART_COUNT"], store),
        rank=int(environment["RANK"]), world_size=int(environment["WORLD_SIZE"]),
    )  # fmt: skip
