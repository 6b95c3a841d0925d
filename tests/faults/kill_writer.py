"""Writers that are killed at random moments, and what is found afterwards. Run as a program by test_store.py.

A process of its own, free of torch and threads, so that a writer is a plain fork and a round takes milliseconds:
``python -m tests.faults.kill_writer DIRECTORY ROUNDS SEED`` prints one line of JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sys
import time
from pathlib import Path

from checkflow.runtime.store.discovery import find
from checkflow.runtime.store.reader import open_checkpoint
from checkflow.runtime.store.store import Store
from tests.support.store_tools import fill, read_all, recover, small_layout

LOCK_SECONDS = 60.0  # a worker lives ten times as long


def seed_of(run: int, step: int) -> int:
    """Every attempt at a checkpoint has content of its own."""
    return run * 1_000_000 + step


def write_until_killed(directory: Path, run: int, pipe: int) -> None:
    """The writer: go on from what is there; say what is attempted and what was acknowledged."""
    layout = small_layout()
    with Store(directory, run_id=f"run{run}", keep_epochs=False, lock_wait_seconds=LOCK_SECONDS) as store:
        if os.fork() == 0:  # a loader worker, which outlives its trainer
            os.write(pipe, f"worker {os.getpid()} 0\n".encode())
            time.sleep(600)
            os._exit(0)
        checkpoint = recover(store)
        step = 0 if checkpoint is None else checkpoint.step + 1
        # Now and then a run does its last step again, so that the exchange is met as well.
        step -= run % 2 if step else 0
        while True:
            staging, _ = fill(layout, seed_of(run, step))
            os.write(pipe, f"attempt {run} {step}\n".encode())
            store.commit(step, layout, staging, str((run, step)).encode(), {"run": run})
            os.write(pipe, f"done {run} {step}\n".encode())
            step += 1


def check(directory: Path, noted: set[tuple[int, int]], acknowledged: tuple[int, int] | None) -> str | None:
    """What is wrong, if anything."""
    with Store(directory, run_id="check", keep_epochs=False, lock_wait_seconds=LOCK_SECONDS) as store:
        checkpoint = recover(store)
        broken = [name for name in os.listdir(directory) if name.startswith(".") and name != ".lock"]
        if checkpoint is None:
            return f"left behind: {broken}" if broken else "everything is lost" if acknowledged else None
        with checkpoint:
            if broken:
                return f"left behind: {broken}"
            for path in find(directory):
                with open_checkpoint(path) as one:
                    one.verify()
            state = (checkpoint.info["run"], checkpoint.step)
            if acknowledged and state[1] < acknowledged[1]:
                return f"step {acknowledged[1]} was acknowledged, step {state[1]} is the newest"
            if acknowledged and state[1] == acknowledged[1] and state[0] < acknowledged[0]:
                return f"step {state[1]} of run {acknowledged[0]} was acknowledged, run {state[0]}'s is there"
            if state not in noted or checkpoint.extra_bytes != str(state).encode():
                return f"{state} was never written"
            if read_all(checkpoint) != fill(small_layout(), seed_of(*state))[1]:
                return f"{state} is mixed"
    return None


def kill_one(
    directory: Path, run: int, attempts: int, wait_seconds: float
) -> tuple[set[tuple[int, int]], tuple[int, int] | None]:
    """One writer's life: what it attempted, and the last that it acknowledged. It is killed after so many attempts."""
    ours, theirs = os.pipe()
    writer = os.fork()
    if writer == 0:
        with contextlib.suppress(BaseException):
            write_until_killed(directory, run, theirs)
        os._exit(1)
    os.close(theirs)
    text = b""
    while text.count(b"attempt") < attempts:
        if not (data := os.read(ours, 1 << 16)):
            raise RuntimeError("the writer ended by itself")
        text += data
    time.sleep(wait_seconds)
    os.kill(writer, signal.SIGKILL)
    _, status = os.waitpid(writer, 0)
    if not os.WIFSIGNALED(status):
        raise RuntimeError("the writer ended by itself")
    # Its worker, if it had come to that, says so, however late; else nobody has the pipe's other end any more.
    while b"worker" not in text and (data := os.read(ours, 1 << 16)):
        text += data
    os.set_blocking(ours, False)
    with contextlib.suppress(BlockingIOError):
        while data := os.read(ours, 1 << 16):
            text += data
    os.close(ours)
    noted, last, workers = set(), None, []
    for kind, first, second in (line.split() for line in text.decode().splitlines()):
        if kind == "attempt":
            noted.add((int(first), int(second)))
        elif kind == "done":
            last = (int(first), int(second))
        else:
            workers.append(int(first))
    # The lock must be free although the worker lives: open the store before the worker is ended.
    # It gives the lock up as its first act, which it may not have come to yet.
    Store(directory, run_id="after", keep_epochs=False, lock_wait_seconds=LOCK_SECONDS).close()
    for worker in workers:
        os.kill(worker, signal.SIGKILL)
    return noted, last


def main() -> None:
    directory, rounds, source = Path(sys.argv[1]), int(sys.argv[2]), random.Random(int(sys.argv[3]))
    noted: set[tuple[int, int]] = set()
    acknowledged: tuple[int, int] | None = None
    problems, commits = [], 0
    for run in range(rounds):
        attempted, last = kill_one(directory, run, source.randint(0, 5), source.uniform(0, 0.03))
        noted |= attempted
        commits += len(attempted)
        acknowledged = last or acknowledged
        if problem := check(directory, noted, acknowledged):
            problems.append(f"after run {run}: {problem}")
    sys.stdout.write(
        json.dumps({"kills": rounds, "commits": commits, "problems": problems, "last": acknowledged}) + "\n"
    )


if __name__ == "__main__":
    main()
