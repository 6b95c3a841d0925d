"""What Checkpointer is called with besides the job and its plan: read, and refused where it is out of its range.

What is wrong in an argument is said before anything of the job is looked at, opened or made.
"""

from __future__ import annotations

import operator
import os
import reprlib
import signal
import sys
import threading
from dataclasses import dataclass
from typing import TypeGuard

import torch.distributed

from checkflow.core.device import parse_seconds, parse_size
from checkflow.core.errors import CheckflowError, UnsupportedError
from checkflow.core.planner_api import Wishes
from checkflow.runtime import job_arguments
from checkflow.runtime.data.base import ResumableLoader
from checkflow.runtime.interval.policy import Asked
from checkflow.runtime.loop.preemption import HEEDED
from checkflow.runtime.store.retention import Rules

MOST_HOST_BUFFERS = 1000  # each of the size of the state: more is a slip, and would take hours to make


@dataclass(frozen=True)
class Arguments:
    """How a job is checkpointed.

    Attributes:
        follow: whether a job that becomes another one gets a new plan.
        raising: whether a checkpoint that failed ends training.
        others: as ``Checkpointer`` takes them, read.
    """

    directory: str | os.PathLike[str]
    rules: Rules
    asked: Asked
    wishes: Wishes
    follow: bool
    resume: str | int
    host_buffers: int
    audit: int
    raising: bool
    signals: tuple[signal.Signals, ...]
    grace_seconds: float


def check_arguments(
    *, model: object, optimizer: object, loader: object, directory: object, plan: object, state: object,
    host_buffers: object, resume: object, on_error: object, audit: object,
) -> None:  # fmt: skip
    """Refuse what ``Checkpointer`` cannot work with.

    Raises:
        UnsupportedError: the loader is not one of checkflow's.
        TypeError, ValueError: any other argument is of another type; is out of its range.
    """
    job_arguments.refuse_no_job(model, optimizer)
    if loader is not None and not isinstance(loader, ResumableLoader):
        raise UnsupportedError(
            f"loader is a {type(loader).__name__}: pass checkflow.resumable(loader), or a checkflow.DataLoader, "
            "or none and iterate checkpointer.steps()"
        )
    job_arguments.refuse_no_directory(directory)
    job_arguments.refuse_no_plan(plan)
    job_arguments.refuse_no_objects(state)
    if not _is_count(host_buffers, 1) or host_buffers > MOST_HOST_BUFFERS:
        raise ValueError(f"host_buffers must be a whole number from 1 to {MOST_HOST_BUFFERS}, not {host_buffers!r}")
    if resume not in ("auto", "never", "must") and not _is_count(resume, 0):
        raise ValueError(f'resume must be "auto", "never", "must" or a step, not {resume!r}')
    if on_error not in ("warn", "raise"):
        raise ValueError(f'on_error must be "warn" or "raise", not {on_error!r}')
    if not _is_count(audit, 0):
        raise ValueError(f"audit must be a whole number of at least 0, not {audit!r}")


def refuse_ranks() -> None:
    """Refuse a job of several processes.

    Raises:
        UnsupportedError: torch.distributed has more than one rank.
    """
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized() and (ranks := distributed.get_world_size()) > 1:
        raise UnsupportedError(
            f"torch.distributed has {ranks} ranks: this version checkpoints one process; save loader.state_dict() with "
            "what the job saves itself, which checkflow.DataLoader goes on from with any number of ranks"
        )


def read_asked(overhead: object, every: object, mtbf: object) -> Asked:
    """How often checkpoints are made, or what they may cost.

    Raises:
        ValueError: one of them is out of its range, or two of them contradict each other.
    """
    share = read_share(overhead)
    if every is not None and mtbf is not None:
        raise ValueError("every says how often already: pass every or mtbf, not both")
    if isinstance(every, str):
        return Asked(share, every_seconds=_read_time("every", every))
    if every is not None and not _is_count(every, 1):
        raise ValueError(
            f'every must be a whole number of iterations, at least 1, text such as "30s", or None, not {every!r}'
        )
    if mtbf is None or isinstance(mtbf, str):
        return Asked(share, every, mtbf_seconds=None if mtbf is None else _read_time("mtbf", mtbf))
    if isinstance(mtbf, bool) or not isinstance(mtbf, int | float) or not 0 < mtbf <= sys.float_info.max:
        raise ValueError(f'mtbf must be seconds, more than 0, text such as "4h", or None, not {reprlib.repr(mtbf)}')
    return Asked(share, every, mtbf_seconds=float(mtbf))


def _read_time(name: str, text: str) -> float:
    try:
        seconds = parse_seconds(text)
        if not seconds <= threading.TIMEOUT_MAX:
            raise ValueError(f"{name}: {reprlib.repr(text)} is more than {threading.TIMEOUT_MAX:.3g} seconds")
        return seconds
    except CheckflowError as error:
        raise ValueError(f"{name}: {error}") from None


def read_share(overhead: object) -> float:
    """A share of training's time.

    Raises:
        ValueError: it is none.
    """
    number = isinstance(overhead, int | float) and not isinstance(overhead, bool)
    if not number or not 0 <= overhead <= sys.float_info.max:  # type: ignore[operator]
        raise ValueError(
            f"overhead must be a share of training's time, 0 or more, such as 0.035, not {reprlib.repr(overhead)}"
        )
    return float(overhead)  # type: ignore[arg-type]


def read_size(extra_memory: object) -> int | None:
    """Bytes, given as a number or as text such as "2GB".

    Raises:
        ValueError: neither.
    """
    if extra_memory is None or _is_count(extra_memory, 0):
        return extra_memory
    if isinstance(extra_memory, str):
        try:
            return parse_size(extra_memory)
        except CheckflowError as error:
            raise ValueError(f"extra_memory: {error}") from None
    raise ValueError(f'extra_memory must be bytes, text such as "2GB", or None, not {extra_memory!r}')


def read_signals(signals: object) -> tuple[signal.Signals, ...]:
    """The signals that end training, given by name.

    Raises:
        ValueError: something else, or a signal that cannot mean this.
    """
    names = tuple(signals) if isinstance(signals, tuple | list | set | frozenset) else None
    if names is None or not all(name in HEEDED for name in names):
        raise ValueError(
            f"signals must be a tuple of some of {', '.join(HEEDED)} (Ctrl-C is heeded beside them), or () for none, "
            f"not {signals!r}"
        )
    return tuple(signal.Signals[name] for name in dict.fromkeys(names))


def read_batches(batches: object) -> int:
    """How many batches reached a step.

    Raises:
        ValueError: it is not a whole number of at least 0.
    """
    try:
        count = -1 if isinstance(batches, bool) else operator.index(batches)  # type: ignore[arg-type]
    except TypeError:
        count = -1
    if count < 0:
        raise ValueError(f"step() takes how many batches reached it, a whole number of at least 0, not {batches!r}")
    return count


def read_grace(grace_seconds: object) -> float:
    """Seconds from a signal to the end.

    Raises:
        ValueError: no number of seconds above 0, or more than a thread can wait for.
    """
    number = isinstance(grace_seconds, int | float) and not isinstance(grace_seconds, bool)
    if not number or not 0 < grace_seconds <= threading.TIMEOUT_MAX:  # type: ignore[operator]
        raise ValueError(
            f"grace_seconds must be a number of seconds above 0, and at most {threading.TIMEOUT_MAX:.0f}, not "
            f"{reprlib.repr(grace_seconds)}"
        )
    return float(grace_seconds)  # type: ignore[arg-type]


def _is_count(value: object, least: int) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
