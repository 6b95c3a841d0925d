"""Where a job is before it is killed, in memory that it shares with its killer, and what it notes of its storage."""

from __future__ import annotations

import functools
import mmap
import os
import random
import signal
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy
import torch
import xxhash
from torch import nn

from checkflow.runtime.store.files import parse_step
from checkflow.runtime.store.store import Store
from checkflow.runtime.system import fs
from checkflow.torture.journal import Journal

TRAINING = (
    "start-up", "resume", "batch and boundary", "forward", "backward", "optimizer step", "after the step", "validation",
    "end of epoch", "end of training",
)  # fmt: skip
STORAGE = ("idle", "commit", "write", "fsync", "rename", "directory fsync", "retention")
PLANNING = ("none", "unplanned", "recording", "timing", "making the plan", "planned", "trying again later", "given up")
KINDS = {"training thread": TRAINING, "storage": STORAGE, "planning": PLANNING}


class Whereabouts:
    """Where a job is, in memory that it shares with the process that it was forked from.

    A phase of a few microseconds is never met by chance, nor seen from outside in time. So one may be chosen: the job
    then kills itself as it enters it, as suddenly as anybody else would.
    """

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, mmap.PAGESIZE)
        self.clear()

    def clear(self, deadly: tuple[str, str, int] | None = None) -> None:
        """For a new life, which ends when it enters this phase of this kind, at the how manieth time."""
        self._memory[:6] = bytes(6)
        if deadly is not None:
            kind, phase, times = deadly
            self._memory[3:6] = bytes((list(KINDS).index(kind) + 1, KINDS[kind].index(phase), times))

    def at(self, kind: str, phase: str) -> None:
        """The job comes to this phase."""
        slot, number = list(KINDS).index(kind), KINDS[kind].index(phase)
        self._memory[slot] = number
        if self._memory[3:5] == bytes((slot + 1, number)):
            self._memory[5] -= 1
            if not self._memory[5]:
                os.kill(os.getpid(), signal.SIGKILL)

    def read(self) -> dict[str, str]:
        """Kind to phase."""
        return {kind: phases[at] for (kind, phases), at in zip(KINDS.items(), self._memory[:3], strict=True)}


def watch_storage(directory: Path, notes: Journal, where: Whereabouts) -> None:
    """Note what is acknowledged, when it is and not before, and where the writer is.

    A checkpoint is "durable" when the fsync has returned that follows its rename, the last of a commit, and "committed"
    when the store says so to the one who asked for it. Both must outlive whatever comes after.
    """
    directory.mkdir(parents=True, exist_ok=True)
    root = directory.stat().st_ino
    renamed: list[int] = []
    real = {name: getattr(fs, name) for name in ("open_new", "pwrite", "fsync", "rename", "unlink", "rmdir")}

    def writing() -> bool:
        return threading.current_thread().name == "checkflow-writer"

    def watched(name: str, phase: str) -> None:
        def call(*arguments: Any, **named: Any) -> Any:
            if writing():
                where.at("storage", phase)
            return real[name](*arguments, **named)

        setattr(fs, name, call)

    def fsync(fd: int) -> None:
        whole = bool(renamed) and os.fstat(fd).st_ino == root
        if writing():
            where.at("storage", "directory fsync" if whole else "fsync")
        real["fsync"](fd)
        if whole:
            notes.write("durable", step=renamed.pop())

    def rename(old: str, new: str, *, dir_fd: int) -> None:
        if writing():
            where.at("storage", "retention" if new.startswith(".trash-") else "rename")
        real["rename"](old, new, dir_fd=dir_fd)
        if old.startswith(".tmp-") and (step := parse_step(new)) is not None:
            renamed[:] = [step]

    for name, phase in (("open_new", "write"), ("pwrite", "write"), ("unlink", "retention"), ("rmdir", "retention")):
        watched(name, phase)
    fs.fsync, fs.rename = fsync, rename
    commit = Store.commit

    @functools.wraps(commit)
    def committing(store: Store, step: int, *arguments: Any, **named: Any) -> Path:
        where.at("storage", "commit")
        path = commit(store, step, *arguments, **named)
        notes.write("committed", step=step)
        where.at("storage", "idle")
        return path

    Store.commit = committing  # type: ignore[method-assign]


def digest(*parts: bytes) -> str:
    whole = xxhash.xxh3_128()
    for part in parts:
        whole.update(len(part).to_bytes(8, "little") + part)
    return str(whole.hexdigest())


def tensor_bytes(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def digest_tensors(tensors: Mapping[str, torch.Tensor]) -> str:
    """Names, dtypes, shapes and bytes."""
    parts = []
    for name, tensor in sorted(tensors.items()):
        parts += [f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode(), tensor_bytes(tensor)]
    return digest(*parts)


def digest_state(model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any) -> dict[str, str]:
    """All that a resume must bring back, but for the place in the data: by torch's own names, without checkflow."""
    tensors = {f"model/{name}": tensor for name, tensor in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"optimizer/{name}.{key}"] = value
    groups = [{key: group[key] for key in sorted(group) if key != "params"} for group in optimizer.param_groups]
    _, words, *rest = numpy.random.get_state()
    drawn = repr((random.getstate(), rest)).encode()
    return {
        "tensors": digest_tensors(tensors),
        "extra": digest(repr(groups).encode(), repr(sorted(scheduler.state_dict().items())).encode()),
        "generators": digest(drawn, words.tobytes(), tensor_bytes(torch.get_rng_state())),
    }
