"""What a SIGKILL during a re-save leaves.

Each life is a new job that saves once, trains, and saves again over what is there: to the same path if the peer allows
that, else as its documentation says. It is killed with its children at a random moment of the second save. Another
process then restores, and must find one of the two states, bit for bit.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import signal
import statistics
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

from benchmarks.peers.block import EXIT_SECONDS, LIMIT_SECONDS, Failure, last_error, own_errors
from benchmarks.peers.job import Job
from benchmarks.peers.peers import PEERS

DRY_RUNS = 3  # second saves that are not killed, which show how long one takes
TRIES = 5  # lives for each kill that is wanted: some second saves end before the signal comes
OLD, NEW, MIXTURE, NOTHING = "old", "new", "mixture", "nothing"


@dataclass(frozen=True)
class Kills:
    """How many kills during a re-save left what: the state before it, its own, a mixture, or nothing that loads."""

    save_seconds: float  # of a whole one
    left: dict[str, int]
    reasons: tuple[str, ...]  # why nothing loads, each once

    @property
    def count(self) -> int:
        return sum(self.left.values())

    @property
    def lost(self) -> int:
        """Those after which no state can be had."""
        return self.left.get(MIXTURE, 0) + self.left.get(NOTHING, 0)


@dataclass(frozen=True)
class _Life:
    """One life, from its second save on."""

    states: tuple[str, str]  # digests of what it saved first, and then
    seconds: float | None  # of the second save; None: it was killed during it


def _live(peer: str, case: str, directory: Path, parent: Connection) -> None:
    os.setpgid(0, 0)
    own_errors(directory)
    job = Job(case)
    made = PEERS[peer].again(job, 1, directory / "checkpoints")
    made.save(lambda: parent.send(job.digest()))
    made.save(lambda: parent.send(job.digest()))
    parent.send(made.saved[-1].seconds)
    parent.recv()  # until it is killed


def _look(peer: str, case: str, directory: Path, parent: Connection) -> None:
    os.setpgid(0, 0)
    own_errors(directory)
    job = Job(case)
    job.forget()
    made = PEERS[peer].again(job, 1, directory / "checkpoints")
    made.restore()
    parent.send(job.digest())
    parent.recv()


class _Child:
    """A process of a group of its own, which its end kills."""

    def __init__(self, context: ForkServerContext, work: Callable[..., None], *arguments: Any) -> None:
        self.pipe, there = context.Pipe()
        self.process = context.Process(target=work, args=(*arguments, there))
        self.process.start()
        there.close()

    def hear(self) -> Any:
        """What it says next; None: it ended instead, or hangs."""
        with contextlib.suppress(EOFError, ConnectionResetError):
            return self.pipe.recv() if self.pipe.poll(LIMIT_SECONDS) else None
        return None

    def kill(self) -> None:
        """Kill it and its children; the second time there is nothing to do."""
        if self.pipe.closed:
            return
        assert self.process.pid is not None
        with contextlib.suppress(ProcessLookupError):  # it has no group of its own yet, or all have ended
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        self.process.join(EXIT_SECONDS)
        self.pipe.close()

    def __enter__(self) -> _Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


def _one_life(context: ForkServerContext, peer: str, case: str, directory: Path, after: float | None) -> _Life | None:
    """Let a job live, and kill it so many seconds after its second save has begun; None: it died by itself."""
    with _Child(context, _live, peer, case, directory) as child:
        states = (child.hear(), child.hear())
        if None in states:
            return None
        if after is not None and not child.pipe.poll(after):
            child.kill()
            return _Life(states, None)
        seconds = child.hear()
        return None if seconds is None else _Life(states, seconds)


def _left(context: ForkServerContext, peer: str, case: str, directory: Path, states: tuple[str, str]) -> str:
    with _Child(context, _look, peer, case, directory) as child:
        found = child.hear()
    if found is None:
        return NOTHING
    return dict(zip(states, (OLD, NEW), strict=True)).get(found, MIXTURE)


def kill_saves(peer: str, case: str, kills: int, *, directory: Path, seed: int) -> Kills | Failure:
    """Kill that many second saves of one peer."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.peers.peers", "torch._dynamo"])  # an optimizer's first step imports it
    moments = random.Random(seed)
    whole: list[float] = []
    left: Counter[str] = Counter()
    reasons: dict[str, None] = {}
    for _ in range(DRY_RUNS + TRIES * kills):
        if left.total() == kills:
            break
        after = moments.uniform(0, statistics.median(whole)) if len(whole) >= DRY_RUNS else None
        with tempfile.TemporaryDirectory(dir=directory, prefix="kill-") as name:
            place = Path(name)
            life = _one_life(context, peer, case, place, after)
            if life is None:
                return Failure(last_error(place))
            if life.seconds is None:
                found = _left(context, peer, case, place, life.states)
                left[found] += 1
                if found == NOTHING:
                    reasons[last_error(place)] = None
            elif after is None:
                whole.append(life.seconds)
    if left.total() < kills:
        return Failure(f"only {left.total()} of {kills} kills came before a save's end")
    return Kills(statistics.median(whole), dict(left), tuple(reasons))
