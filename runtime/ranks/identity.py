"""Which rank of which job this process is. Imports torch only where it is in use."""

from __future__ import annotations

import os
import re
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from checkflow.core.errors import UnsupportedError

_UNFIT = re.compile(r"[^A-Za-z0-9_.-]")


@dataclass(frozen=True, slots=True)
class Identity:
    """A process of a job of several, or the only one of a job whose tensors are sharded.

    Attributes:
        local_rank: among the processes of its node.
        node: by number under torchrun, otherwise by host name.
        launch: what the launcher calls this start of the job; not unique, and "" where it has no name.
    """

    rank: int
    world_size: int
    local_rank: int
    node: str
    launch: str


def find_identity(environment: Mapping[str, str] = os.environ, *, sharded: bool = False) -> Identity | None:
    """This process's identity by torch.distributed; None: it trains alone, and needs no council.

    Args:
        sharded: the job holds DTensors, so it is saved as a job of ranks even if it has one.

    Raises:
        UnsupportedError: torchrun has started several processes, and the process group is not there yet.
    """
    group = _process_group()
    if group is None:
        if environment.get("TORCHELASTIC_RUN_ID") and environment.get("WORLD_SIZE", "1") != "1":
            raise UnsupportedError(
                f"torchrun has started {environment['WORLD_SIZE']} ranks: call torch.distributed.init_process_group() "
                "before you make the Checkpointer"
            )
        return None
    rank, world_size = group
    if world_size == 1 and not sharded:
        return None
    local = environment.get("LOCAL_RANK", "")
    node = environment.get("GROUP_RANK") or socket.gethostname()
    return Identity(rank, world_size, int(local) if local.isdecimal() else rank, node, launch_of(environment))


def launch_of(environment: Mapping[str, str]) -> str:
    """The start of the job that torchrun counts; "" under another launcher."""
    run, restart = environment.get("TORCHELASTIC_RUN_ID"), environment.get("TORCHELASTIC_RESTART_COUNT", "0")
    if not run:
        return ""
    return f"{_UNFIT.sub('-', run)[:60]}.{_UNFIT.sub('-', restart)[:10]}"


def _process_group() -> tuple[int, int] | None:
    """Rank and world size of the default process group."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed.get_rank(), distributed.get_world_size()
