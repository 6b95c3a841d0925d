"""Two ranks that save by dcp.save and are killed at random moments, and what is found afterwards.

``python -m tests.faults.kill_dcp DIRECTORY KILLS SEED`` prints one line of JSON. A third of the kills each meets
rank 0, rank 1 and both at once. Every life loads the newest version, and goes on from there.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import signal
import sys
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from checkflow.integrations.dcp import Reader, Writer
from checkflow.runtime.inspect import verify
from checkflow.runtime.store.cleanup import is_leftover
from checkflow.runtime.store.discovery import find
from checkflow.runtime.store.files import parse_step

RANKS = 2
ROWS = 300  # do not divide evenly among blocks or pages
PATIENCE_SECONDS = 120.0


def state_of(step: int, mesh: Any) -> dict[str, Any]:
    rows = torch.arange(float(ROWS * 1000)).reshape(ROWS, 1000) + step
    return {
        "model": {"weight": distribute_tensor(rows, mesh, [Shard(0)]), "bias": torch.full((7,), float(step))},
        "step": step,
    }


def fault_of(state: dict[str, Any]) -> str:
    """What is wrong with a loaded state, whichever step it is of."""
    expected = state_of(state["step"], state["model"]["weight"].device_mesh)["model"]
    for name, tensor in state["model"].items():
        here, there = ((one.to_local() if name == "weight" else one) for one in (tensor, expected[name]))
        if not torch.equal(here, there):
            return f"{name} of step {state['step']} has other values"
    return ""


def train(rank: int, meeting: Path, directory: Path, pipe: int) -> None:
    """One life of a rank: load, then save each step until it is killed. It says what was begun and acknowledged."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))
    step = 0
    if directory.exists() and find(directory):
        state = state_of(-1, mesh)
        dcp.load(state, storage_reader=Reader(directory))
        if fault := fault_of(state):
            os.write(pipe, f"wrong {fault}\n".encode())
        step = state["step"] + 1
        os.write(pipe, f"loaded {state['step']}\n".encode())
    while True:
        os.write(pipe, f"begun {step}\n".encode())
        dcp.save(state_of(step, mesh), storage_writer=Writer(directory, step=step))
        os.write(pipe, f"done {step}\n".encode())
        step += 1


def start(rank: int, meeting: Path, directory: Path) -> tuple[int, int]:
    ours, theirs = os.pipe()
    if (pid := os.fork()) == 0:
        os.close(ours)
        try:
            train(rank, meeting, directory, theirs)
        except BaseException:  # noqa: BLE001 - the other rank was killed
            with contextlib.suppress(OSError):
                os.write(theirs, f"ended {traceback.format_exc().splitlines()[-1]}\n".encode())
        finally:
            os._exit(1)
    os.close(theirs)
    return pid, ours


def one_life(directory: Path, meeting: Path, source: random.Random) -> tuple[list[list[str]], str]:
    """What each rank said, and whom the kill met."""
    victims, saves, delay = source.choice([(0,), (1,), (0, 1)]), source.randint(0, 4), source.uniform(0, 0.15)
    ranks = [start(rank, meeting, directory) for rank in range(RANKS)]
    said = ["", ""]

    def listen(seconds: float) -> bool:
        """Take in what ranks say; False once both have ended."""
        open_ones = {ranks[rank][1]: rank for rank in range(RANKS) if ranks[rank][1] not in closed}
        for fd in select.select(list(open_ones), [], [], seconds)[0]:
            if data := os.read(fd, 1 << 16):
                said[open_ones[fd]] += data.decode()
            else:
                closed.add(fd)
        return len(closed) < RANKS

    closed: set[int] = set()
    end = time.monotonic() + PATIENCE_SECONDS
    while said[0].count("begun") <= saves:
        if not listen(1.0) or time.monotonic() > end:
            raise RuntimeError(f"the ranks do not save: {said}")
    time.sleep(delay)
    for rank in victims:
        os.kill(ranks[rank][0], signal.SIGKILL)
    listen(0.2)  # the other one may go on a little, or see it at once
    for pid, _ in ranks:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    while listen(1.0):
        pass
    for _, fd in ranks:
        os.close(fd)
    return [text.splitlines() for text in said], "both" if len(victims) == RANKS else f"rank {victims[0]}"


def check(directory: Path, acknowledged: int) -> list[str]:
    """Every version verifies, and the newest is not older than what was acknowledged."""
    found = find(directory) if directory.exists() else ()
    problems = [f"{path.name}: {fault}" for path in found if (fault := verify(path).fault)]
    newest = parse_step(found[0].name) if found else -1
    if newest is None or newest < acknowledged:
        problems.append(f"step {acknowledged} was acknowledged, step {newest} is the newest")
    return problems


def main() -> None:
    place, kills, source = Path(sys.argv[1]), int(sys.argv[2]), random.Random(int(sys.argv[3]))
    directory = place / "versions"
    acknowledged, problems, met, torn = -1, [], Counter[str](), 0
    for life in range(kills):
        said, victims = one_life(directory, place / f"meeting-{life}", source)
        met[victims] += 1
        lines = [line.split(" ", 1) for of_rank in said for line in of_rank]
        problems += [f"life {life}: {rest}" for kind, rest in lines if kind == "wrong"]
        loaded = {int(rest) for kind, rest in lines if kind == "loaded"}
        if len(loaded) > 1 or (loaded and min(loaded) < acknowledged):
            problems.append(f"life {life}: loaded {sorted(loaded)}, and {acknowledged} was acknowledged")
        acknowledged = max([acknowledged, *(int(rest) for kind, rest in lines if kind == "done")])
        problems += [f"life {life}: {problem}" for problem in check(directory, acknowledged)]
        torn += any(is_leftover(path.name) for path in directory.iterdir()) if directory.exists() else 0
    sys.stdout.write(
        json.dumps({"kills": kills, "met": met, "torn": torn, "versions": acknowledged + 1, "problems": problems})
        + "\n"
    )


if __name__ == "__main__":
    main()
