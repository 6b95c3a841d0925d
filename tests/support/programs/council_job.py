"""One rank of a job under torchrun: trains by all-reduces, saves each third boundary by the council, and tells of it.

``council_job.py DIRECTORY MODE``: in ``DIRECTORY/log-<rank>`` a line of JSON for each thing that has happened. MODE:
"end": rank 1 asks for the end after a while; "kill", "stop": the last rank is killed or stopped at step 4, before its
receipt; "agent": likewise torchrun's agent, which has the store, is stopped; "refuse": rank 1 refuses to start.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from checkflow.core.errors import CheckflowError, LockedError
from checkflow.runtime.ranks import council as councils
from checkflow.runtime.ranks import joining, receipts
from checkflow.runtime.ranks.identity import find_identity
from checkflow.runtime.ranks.records import Receipt, StartReport
from tests.support.waiting import wait_for

LAST_STEP = 5000
DEATHS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}  # of the last rank


def main(directory: Path, mode: str) -> None:
    torch.set_num_threads(1)
    dies, silent_seconds = mode in DEATHS, 15.0
    if dies:  # what a living rank says is waited for below
        receipts.LEAST_WAIT_SECONDS = councils._CLOSE_SECONDS = 0.1
    if mode == "agent":
        joining.ANSWER_SECONDS = silent_seconds = 1.0
        councils._BEAT_SECONDS = 0.1
    dist.init_process_group("gloo")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun's, when a rank has died: what it would see is asked here
    identity = find_identity()
    assert identity is not None
    rank, world_size = identity.rank, identity.world_size
    log = (directory / f"log-{rank}").open("a", buffering=1)

    def tell(what: str, **more: Any) -> None:
        log.write(json.dumps({"what": what, "time": time.monotonic(), **more}) + "\n")

    tell("begins", pid=os.getpid(), launch=identity.launch)
    council = joining.join(identity, directory, silent_seconds=silent_seconds)
    try:
        if mode == "refuse" and rank == 1:
            error = LockedError("the directory is locked by process 1")
            council.refuse(error)
            raise error
        step = council.agree_start(StartReport({"job": "one"}), lambda reports: len(reports)).step or 0
        council.agree_restored(StartReport({"job": "one"}, restored=True), 30)
        tell("starts", step=step, generation=council.generation)
        train(council, rank, world_size, step, mode, tell)
    except CheckflowError as error:
        tell("fails", kind=type(error).__name__, message=str(error), ranks=getattr(error, "ranks", []))
        if dies and rank == 0:  # its last word is heard
            wait_for(lambda: '"fails"' in (directory / "log-1").read_text())
    finally:
        council.close()
    tell("ends")
    os._exit(0)  # a process group of which a rank is dead does not end by itself


def train(council: Any, rank: int, world_size: int, step: int, mode: str, tell: Any) -> None:
    number = 0
    while step < LAST_STEP:
        step += 1
        dist.all_reduce(torch.ones(4))
        if mode in DEATHS and step == 4 and rank == world_size - 1:
            tell("goes")
            os.kill(os.getpid(), DEATHS[mode])
        if mode == "agent" and step == 4 and rank == 0:
            os.kill(os.getppid(), signal.SIGSTOP)
        view = council.note_boundary(step)
        if view.stops_at(step):
            if council.await_end(step, captured=True, wait_seconds=30):
                tell("ended", step=step, agreed=view.end is not None)
                return
        else:
            council.leave_boundary(step, captured=True)
        if step % 3 == 1 and step < 20:
            number = save(council, rank, world_size, step, number, dies=mode in DEATHS)
            tell("saved", step=step)
        if mode == "end" and rank == 1 and step == 30:
            council.request_end("SIGTERM", 60.0)


def save(council: Any, rank: int, world_size: int, step: int, number: int, *, dies: bool) -> int:
    """What the writers' threads do, here on the main one."""
    attempt = council.open_attempt(step) if rank == 0 else council.await_attempt(step, 10, after=number)
    council.post_receipt(Receipt(rank, world_size, council.generation, attempt.number, step))
    if rank:
        council.await_verdict(attempt, 10)
        return int(attempt.number)
    if dies:
        wait_for(lambda: len(council._rounds.chair._receipts) == world_size - 1)
    try:
        assert len(council.collect(attempt, lambda ordered: None)) == world_size
    except CheckflowError as error:
        council.conclude(attempt, error)
        raise
    council.conclude(attempt)
    return int(attempt.number)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
