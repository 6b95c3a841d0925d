"""Jobs for ``checkflow torture``: good ones, and ones that break what is promised, each in its own way.

``python -m tests.support.programs.tortured_job KIND DIRECTORY``. They make real checkpoints with the real store, as
fast as it goes, and know nothing of torch. Those of ``TRAINING`` are training jobs with a Checkpointer.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from pathlib import Path

from checkflow.runtime.store.discovery import find
from checkflow.runtime.store.store import Store
from tests.support.store_tools import fill, recover, small_layout

PAUSE_SECONDS = 0.005
FAILURE = 7
TRAINING = ("trains", "goes back", "is told to go back")


def flip_a_byte(checkpoint: Path) -> None:
    """In the largest file, in place."""
    file = max(checkpoint.iterdir(), key=lambda path: path.stat().st_size)
    with open(file, "r+b") as opened:
        opened.seek(-1, os.SEEK_END)
        last = opened.read(1)[0]
        opened.seek(-1, os.SEEK_END)
        opened.write(bytes([last ^ 1]))


def find_in(directory: Path) -> tuple[Path, ...]:
    """The checkpoints of a directory that may not be there yet, newest first."""
    return find(directory) if directory.exists() else ()


def before(kind: str, directory: Path) -> None:
    """What such a job does before it opens its directory."""
    there = find_in(directory)
    if kind == "fails" or (kind == "fails later" and there):
        print("the data set is missing", file=sys.stderr)  # noqa: T201
        sys.exit(FAILURE)
    if kind == "good":
        print("[/b] is no markup", flush=True)  # noqa: T201
    if kind == "makes none":
        print("nothing to train", file=sys.stderr)  # noqa: T201
        sys.exit()
    if kind == "loses the newest" and there:
        shutil.rmtree(there[0])
    if kind == "damages at start" and there:
        flip_a_byte(there[0])
    if kind == "comes to its end" and len(there) > 1:
        sys.exit()
    if kind == "leaves a child" and os.fork() == 0:
        os.setsid()
        time.sleep(600)
        os._exit(0)


def save(kind: str, directory: Path) -> None:
    """Checkpoint after checkpoint."""
    before(kind, directory)
    went_on = bool(find_in(directory))
    layout = small_layout()
    others = [Store(directory.with_name("second"), run_id="second")] if kind == "writes to two" else []
    away = kind == "writes elsewhere" or (kind == "writes elsewhere later" and went_on)
    home = directory.with_name("elsewhere") if away else directory
    if others:  # so that only one of them is seen at first
        time.sleep(0.5)
    with Store(home, run_id=f"run{os.getpid()}", keep_epochs=False) as store:
        checkpoint = None if kind == "begins anew" else recover(store)
        step = 0 if checkpoint is None else checkpoint.step
        if checkpoint is not None:
            checkpoint.close()
        while True:
            if kind == "hangs" and went_on:
                time.sleep(600)
            step += 1
            path = store.commit(step, layout, fill(layout, step)[0], b"", {})
            if kind == "damages a byte":
                flip_a_byte(path)
            if kind == "ends":
                os._exit(0)
            time.sleep(600 if others else PAUSE_SECONDS)


def train(kind: str, directory: Path) -> None:
    """A small network, with a loader's worker."""
    import torch
    import torch.nn.functional as F

    from checkflow import api
    from checkflow.api import Checkpointer
    from checkflow.core import plan as plans
    from checkflow.runtime.data.loader import DataLoader
    from checkflow.runtime.memory_tier.records import MARK
    from tests.support.jobs import Net, data
    from tests.support.oracle import random_plan

    there = find_in(directory)
    if kind == "goes back" and len(there) > 1:
        there[0].rename(directory / "mine")
        (directory / MARK).unlink(missing_ok=True)  # host memory has a newer one
    torch.set_num_threads(1)
    torch.manual_seed(0)
    api.check_plan = plans.validate  # a random plan obeys deadlines, and no link
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    plan = random_plan({"model": model}, {"optimizer": optimizer}, 0)
    loader = DataLoader(data(1), 4, shuffle=True, seed=3, num_workers=1, multiprocessing_context="fork")
    with Checkpointer(
        model, optimizer, loader, directory=directory, plan=plan, every=1, keep_epochs=False,
        resume=int(there[1].name[5:]) if kind == "is told to go back" and len(there) > 1 else "auto",
    ) as checkpointer:  # fmt: skip
        for _ in checkpointer.epochs(10**6):
            for _, x, y in checkpointer.loader:
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()


if __name__ == "__main__":
    chosen = sys.argv[1]
    (train if chosen in TRAINING else save)(chosen, Path(sys.argv[2]).absolute())
