"""One peer in a process of its own: training without it and with it by turns; saves at rest, and restores.

The turns are as long as the time from one checkpoint to the next, so that a drift of the machine cancels. The parent
looks at memory before the peer is made, and watches it while checkpoints are made that are not timed.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.peers import raw
from benchmarks.peers.job import CASES, Job
from benchmarks.peers.own import Checkflow
from benchmarks.peers.peers import PEERS
from benchmarks.store_speed import drop

WARM_UP = 3  # iterations, before training without checkpoints is timed
CYCLES = 3  # checkpoints, before those that are timed: checkflow audits the first three of each plan
AT_REST = 3  # saves, and restores
WATCH_SECONDS = 0.02
EXIT_SECONDS = 60.0
MOST_SAID = 200  # characters of an error
LIMIT_SECONDS = 900.0  # without a word of a block: it hangs


@dataclass(frozen=True)
class Request:
    """What a block is to measure.

    Args:
        every: iterations from one checkpoint to the next.
        iterations: timed with the peer, and as many without it.
        threads: that training has; None: as torch chooses.
        device: that trains: "cpu" or "cuda".
    """

    peer: str
    case: str
    every: int
    iterations: int
    threads: int | None
    directory: Path
    device: str = "cpu"


@dataclass(frozen=True)
class Block:
    """What one block found."""

    state_bytes: int
    plain_seconds: tuple[float, ...]  # of each iteration without the peer
    seconds: tuple[float, ...]  # and with it
    tail_seconds: float  # from the last of each turn until its checkpoint was durable, all together
    held_seconds: float  # by all checkpoints of these iterations together
    asked: int
    begun: int
    durable_seconds: tuple[float, ...]  # of each that became durable
    write_seconds: tuple[float, ...]  # of saves at rest, from when their state is in host memory
    raw_write_seconds: tuple[float, ...]  # just before each
    restore_seconds: tuple[float, ...]
    raw_read_seconds: tuple[float, ...]  # just before each
    memory_bytes: int  # above training alone, at the most
    device_memory_bytes: int | None  # likewise, of a GPU's
    note: str


@dataclass(frozen=True)
class Failure:
    """A peer that could not be measured, and why."""

    reason: str


def measure(request: Request, memory_watched: Callable[[], contextlib.AbstractContextManager[list[int]]]) -> Block:
    """Measure one block in this process."""
    if request.threads is not None:
        torch.set_num_threads(request.threads)
    job = Job(request.case, request.device)
    # Each part has peers of its own, whose buffers are free when the next begins.
    beside_training = _beside_training(job, request, memory_watched)
    gc.collect()
    at_rest = _at_rest(job, request)
    restored = _restored(job, request)
    return Block(state_bytes=job.state_bytes, **beside_training, **at_rest, **restored)


def _beside_training(
    job: Job, request: Request, memory_watched: Callable[[], contextlib.AbstractContextManager[list[int]]]
) -> dict[str, Any]:
    """What a block says of the turns, and of memory."""
    job.forget_peak()
    _train(job, WARM_UP)
    peak_alone = job.peak_bytes()
    with memory_watched() as alone:
        pass
    peer = _made(job, request, request.every)
    note = _prepared(peer)
    job.forget_peak()
    with memory_watched() as memory:
        peer.run(CYCLES * request.every)
        peer.settle()
    peak = job.peak_bytes()
    turns = request.iterations // request.every
    with contextlib.closing(peer), _uncollected():
        begun, held, durable = peer.checkpoints, peer.held_seconds, len(peer.saved)
        plain: list[float] = []
        seconds: list[float] = []
        tail_seconds = 0.0
        for _ in range(turns):
            with peer.apart() if isinstance(peer, Checkflow) else contextlib.nullcontext():
                plain += _train(job, request.every)
            seconds += peer.run(request.every)
            tail_seconds += _timed(peer.settle)
        begun, held = peer.checkpoints - begun, peer.held_seconds - held
        durable_seconds = tuple(one.seconds for one in peer.saved[durable:])
    if not durable_seconds:
        raise SystemExit(f"none of {begun} checkpoints became durable")
    return {
        "plain_seconds": tuple(plain),
        "seconds": tuple(seconds),
        "tail_seconds": tail_seconds,
        "held_seconds": held,
        "asked": turns,
        "begun": begun,
        "durable_seconds": durable_seconds,
        "memory_bytes": max(memory) - alone[0],
        "device_memory_bytes": None if peak is None or peak_alone is None else peak - peak_alone,
        "note": note,
    }


def _at_rest(job: Job, request: Request) -> dict[str, Any]:
    """What a block says of saves while training stands still."""
    raw_writes: list[float] = []
    with contextlib.closing(_made(job, request, 1)) as peer:
        _prepared(peer)
        for _ in range(CYCLES):
            peer.save()
        durable = len(peer.saved)
        for _ in range(AT_REST):
            peer.save(lambda: raw_writes.append(raw.write_seconds(request.directory, job.state_bytes)))
        write_seconds = tuple(one.write_seconds for one in peer.saved[durable:])
    return {"write_seconds": write_seconds, "raw_write_seconds": tuple(raw_writes)}


def _restored(job: Job, request: Request) -> dict[str, Any]:
    """What a block says of restores: of what was saved last, which is the state as it is."""
    digest = job.digest()
    raw_reads: list[float] = []
    restores: list[float] = []
    for _ in range(AT_REST):
        raw_reads.append(raw.read_seconds(request.directory, job.state_bytes))
        job.forget()
        for path in _checkpoints(request).rglob("*"):
            if path.is_file():
                drop(path)
        restores.append(_restore(job, request))
        if job.digest() != digest:
            raise SystemExit("the restored state differs from the saved one")
    return {"restore_seconds": tuple(restores), "raw_read_seconds": tuple(raw_reads)}


def _restore(job: Job, request: Request) -> float:
    """The seconds that a new peer takes to restore."""
    gc.collect()
    with contextlib.closing(_made(job, request, 1)) as peer:
        return _timed(peer.restore)


def _made(job: Job, request: Request, every: int) -> Any:
    return PEERS[request.peer].make(job, every, _checkpoints(request))


def _checkpoints(request: Request) -> Path:
    return request.directory / "checkpoints"


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Exclude what is here from garbage collections: a full one would fall on one turn of many."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _prepared(peer: Any) -> str:
    """What comes once in a job, and is not timed: for checkflow the plan."""
    return peer.prepare() if isinstance(peer, Checkflow) else ""


def _train(job: Job, iterations: int) -> list[float]:
    return [_timed(job.train) for _ in range(iterations)]


def _timed(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


# The process, and who watches it


def own_errors(directory: Path) -> None:
    """Let this process write its errors to a file, whose last line says why it failed."""
    with open(directory / "errors", "ab") as file:
        os.dup2(file.fileno(), sys.stderr.fileno())


def last_error(directory: Path) -> str:
    """What the process said last: of an exception that is its text, in which the directory is "…"."""
    path = directory / "errors"
    text = path.read_text(errors="replace").replace(str(directory), "…") if path.exists() else ""
    lines = [line.strip() for line in text.splitlines()]
    return next((line[:MOST_SAID] for line in reversed(lines) if line), "it said nothing")


def _in_process(request: Request, parent: Connection) -> None:
    own_errors(request.directory)
    parent.send(measure(request, functools.partial(_watched, parent)))


@contextlib.contextmanager
def _watched(parent: Connection) -> Iterator[list[int]]:
    """Let the parent follow this process's memory meanwhile: at least as it is at the beginning."""
    found: list[int] = []
    parent.send(True)
    parent.recv()  # it has looked
    yield found
    parent.send(False)
    found += parent.recv()


def memory_of(process: psutil.Process) -> int:
    """Of a process and its children, each shared page once."""
    total = 0
    for one in [process, *process.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended since
            total += one.memory_full_info().pss
    return total


def run_block(request: Request) -> Block | Failure:
    """Measure one block in a new process."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_in_process, args=(request, there))
    process.start()
    there.close()
    try:
        found = _follow(here, psutil.Process(process.pid))
    except BaseException:
        process.kill()
        raise
    process.join(EXIT_SECONDS)
    if process.is_alive():
        process.kill()
        process.join()
    failure = Failure(f"{last_error(request.directory)} (exit code {process.exitcode})")
    shutil.rmtree(request.directory)
    return found or failure


def _follow(child: Connection, process: psutil.Process) -> Block | None:
    """Watch memory when the child asks for it, until it sends what it found; None: it ended, or hangs."""
    samples: list[int] | None = None
    with contextlib.suppress(EOFError, psutil.NoSuchProcess):
        while True:
            if samples is not None and not child.poll(WATCH_SECONDS):
                samples.append(memory_of(process))
            elif samples is None and not child.poll(LIMIT_SECONDS):
                return None
            elif isinstance(message := child.recv(), Block):
                return message
            elif message:
                samples = [memory_of(process)]
                child.send(None)
            else:
                child.send(samples)
                samples = None
    return None


def request_for(
    peer: str,
    case: str,
    *,
    every: int,
    iterations: int | None,
    threads: int | None,
    directory: Path,
    device: str = "cpu",
) -> Request:
    """A block of whole checkpoint cycles, in a new directory of its own."""
    asked = iterations or CASES[case].iterations
    whole = max(2, -(-asked // every)) * every
    place = Path(tempfile.mkdtemp(dir=directory, prefix="block-"))
    return Request(peer, case, every, whole, threads, place, device)
