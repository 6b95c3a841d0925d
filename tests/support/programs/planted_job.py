"""Starts of a small job in directories where something has been planted, in a process of their own: a start may hang.

``python -m tests.support.programs.planted_job FOLDER KIND`` prints one line of JSON for each name that a store uses.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import socket
import stat
import sys
from pathlib import Path

import torch
from torch import nn

from checkflow import Checkpointer
from checkflow.core.errors import CheckflowError
from checkflow.core.reports import run_report
from checkflow.runtime.format.manifest import EXTRA, MANIFEST
from checkflow.runtime.interval import profile
from checkflow.runtime.interval.algorithm import Costs
from checkflow.runtime.live_plan.cache import FOLDER
from checkflow.runtime.memory_tier.records import MARK
from checkflow.runtime.ranks.records import Attempt
from checkflow.runtime.shards import rendezvous
from checkflow.runtime.store.cleanup import DRAFT
from checkflow.runtime.store.lock import LOCK
from checkflow.runtime.system import fs
from tests.faults.fuzz.feeds import IDENTITY

STRANGER = 65534
NEWEST, SHARD = "step-00000002", "model-00000-of-00001.safetensors"
FOLDERS = (FOLDER, NEWEST, ".tmp-00000009-run", ".trash-step-00000009", ".replaced-step-00000009")
DRAFTS = (f"{MARK}.tmp", f".{run_report.FILE}.tmp", f".{profile.NAME}.tmp", DRAFT)
FILES = (
    LOCK, MARK, run_report.FILE, f".broken-{run_report.FILE}", profile.NAME, rendezvous.BOARD, f"{NEWEST}/{MANIFEST}",
    f"{NEWEST}/{EXTRA}", f"{NEWEST}/{SHARD}", f"{FOLDER}/{'0' * 32}.json",
)  # fmt: skip
NAMES = (*FOLDERS, *DRAFTS, *FILES)


def plant(path: Path, kind: str, away: Path) -> None:
    if kind == "stranger":  # what is there, or a file, is another user's
        path.parent.mkdir(exist_ok=True)
        if not path.exists():
            path.mkdir() if path.name in {Path(name).name for name in FOLDERS} else path.write_bytes(b"x")
        os.chown(path, STRANGER, STRANGER)
        return
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.parent.mkdir(exist_ok=True)
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "socket":
        there = os.getcwd()
        os.chdir(path.parent)  # the address of a socket has no room for a long path
        socket.socket(socket.AF_UNIX).bind(path.name)
        os.chdir(there)
    elif kind == "device":
        os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(1, 5))  # /dev/zero
    elif kind == "directory":
        path.mkdir()
    else:
        path.symlink_to(away if kind == "link" else away / "nothing")


def start(directory: Path, iterations: int) -> int | None:
    """Go on from what is there; the step of the resume."""
    torch.manual_seed(0)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with Checkpointer(model, optimizer, directory=directory, every=1) as checkpointer:
        for _ in checkpointer.steps(iterations):
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        profiles = profile.ProfileCache(directory)
        profiles.find(IDENTITY)
        profiles.keep(IDENTITY, Costs(1.0, 1.0, 1.0, 1.0, 1.0))
    with fs.folder(str(directory)) as root:
        rendezvous.post(root, "run", 2, Attempt(0, 1))
        rendezvous.read_board(root)
    return checkpointer.resumed_from


def main(folder: Path, kind: str) -> None:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda one: said.append(one.getMessage())  # type: ignore[method-assign]
    logging.getLogger("checkflow").addHandler(handler)
    template, away = folder / "template", folder / "away"
    start(template, 2)
    for name in NAMES:
        directory = folder / "job"
        shutil.copytree(template, directory)
        away.write_bytes(b"x") if name not in FOLDERS else away.mkdir()
        plant(directory / name, kind, away)
        said.clear()
        resumed, error = None, None
        try:
            resumed = start(directory, 4)
        except (CheckflowError, OSError) as failed:
            error = f"{type(failed).__name__}: {failed}"
        kept = away.read_bytes() == b"x" if name not in FOLDERS else not list(away.iterdir())
        sys.stdout.write(
            json.dumps({"name": name, "resumed": resumed, "error": error, "said": said, "kept": kept}) + "\n"
        )
        shutil.rmtree(directory)
        away.unlink() if name not in FOLDERS else away.rmdir()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
