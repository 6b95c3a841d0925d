"""Loader workers that outlive a trainer which was killed: they hold nothing of its checkpoints."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from checkflow.runtime.format.manifest import MANIFEST
from checkflow.runtime.store.discovery import find
from checkflow.runtime.store.lock import claimed
from checkflow.runtime.store.store import Store
from tests.support.store_tools import recover
from tests.support.waiting import wait_for

ROOT = Path(__file__).parents[3]
# The last commit but one of the first epoch comes to no end before the workers of the second one are forked.
JOB = """
import os, sys, threading
from pathlib import Path
import torch, torch.nn.functional as F
from tests.support import jobs
from checkflow.core import plan as plans
from checkflow import api
from checkflow.runtime.system import fs
from checkflow.runtime.store import store
from checkflow.api import Checkpointer
from checkflow.runtime.data.loader import DataLoader

api.check_plan = plans.validate
directory = Path(sys.argv[1])
model, optimizer, scheduler = jobs.make()
loader = DataLoader(jobs.data(1), jobs.BATCH, shuffle=True, seed=3, num_workers=2, multiprocessing_context="fork")
writing, forked, real = threading.Event(), threading.Event(), fs.fsync

def fsync(fd):
    if os.readlink(f"/proc/self/fd/{fd}").endswith(".safetensors") and f"/.tmp-{jobs.BATCHES - 1:08d}-" in os.readlink(
        f"/proc/self/fd/{fd}"
    ):
        writing.set()
        forked.wait()
    real(fd)

fs.fsync = fsync
with Checkpointer(
    model, optimizer, loader, directory=directory, plan=jobs.make_plan(), state={"scheduler": scheduler}, every=1
) as checkpointer:
    for epoch in checkpointer.epochs(2):
        for indices, x, y in checkpointer.loader:
            if epoch == 1:
                print("forked", flush=True)
                sys.stdin.readline()
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        os.register_at_fork(before=writing.wait)
"""


def held_by(process: psutil.Process) -> list[str]:
    """What it has open of the checkpoints."""
    return [file.path for file in process.open_files() if "/checkpoints/" in file.path]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_orphaned_workers_hold_no_lock_and_no_file(tmp_path: Path) -> None:
    directory = tmp_path / "checkpoints"
    trainer = subprocess.Popen(
        [sys.executable, "-c", JOB, str(directory)], text=True, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT),
             "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    workers: list[psutil.Process] = []
    try:
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == "forked\n"
        workers = psutil.Process(trainer.pid).children(recursive=True)
        assert len(workers) == 2
        for worker in workers:
            wait_for(lambda worker=worker: held_by(worker) == [])  # its first act, which it may not have come to yet
            worker.suspend()  # they are to outlive it, as workers do that are in the middle of a long sample
            wait_for(lambda worker=worker: worker.status() == psutil.STATUS_STOPPED)
        assert [path for worker in workers for path in held_by(worker)] == []
        trainer.send_signal(signal.SIGKILL)
        trainer.wait()
        with Store(directory, run_id="next", lock_wait_seconds=0) as store:
            checkpoint = recover(store)
            assert checkpoint is not None
            checkpoint.close()
            root = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
            try:
                for path in find(directory):
                    with claimed(path.name, MANIFEST, dir_fd=root) as unread:
                        assert unread
            finally:
                os.close(root)
        assert not [path for path in directory.iterdir() if path.name.startswith((".tmp", ".trash"))]
    finally:
        for worker in workers:
            if worker.is_running():
                worker.kill()
        trainer.kill()
        trainer.communicate()  # last: orphans have its output open
