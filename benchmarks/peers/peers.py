"""The peers by name, and what is asked of each."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from benchmarks.peers import libraries
from benchmarks.peers.files import Saved
from benchmarks.peers.job import Job
from benchmarks.peers.own import Checkflow, CheckFreq
from benchmarks.peers.raw import Raw
from benchmarks.ways import Way


class Peer(Way, Protocol):
    """One job whose checkpoints one peer makes."""

    saved: list[Saved]  # all that became durable

    def save(self, ready: Callable[[], None] = ...) -> None:
        """Train once, call ``ready``, and save while training stands still; returns when it is durable."""

    def restore(self) -> None:
        """Bring the newest checkpoint back into the job's tensors; it is an error if there is none."""


Make = Callable[[Job, int, Path], Peer]


@dataclass(frozen=True)
class Entry:
    """A peer.

    Args:
        make: given the job, the iterations from checkpoint to checkpoint, and a directory.
        again: makes it for kills: each save goes over the one before, if the peer allows it.
        packages: whose versions a result names.
    """

    make: Make
    again: Make
    packages: tuple[str, ...] = ("torch",)


def _files(kind: Callable[..., Peer], *packages: str, over: bool = True) -> Entry:
    return Entry(kind, functools.partial(kind, again=True) if over else kind, ("torch", *packages))


def _checkfreq(*, copies_beside: bool, commits_beside: bool) -> Entry:
    make = functools.partial(CheckFreq, copies_beside=copies_beside, commits_beside=commits_beside)
    return Entry(make, make)


OURS = "checkflow"
RAW = "raw copy and write"  # no peer, but what they are to be compared with
IN_PLACE = "torch.save in place"
PEERS: Mapping[str, Entry] = {
    "torch.save": _files(libraries.TorchSave),
    IN_PLACE: _files(libraries.TorchSaveInPlace),
    "dcp.save": _files(libraries.DcpSave),
    "dcp.async_save thread": _files(libraries.DcpThread),
    "dcp.async_save process": _files(libraries.DcpProcess),
    "torchsnapshot take": _files(libraries.Torchsnapshot, "torchsnapshot"),
    "torchsnapshot async_take": _files(libraries.TorchsnapshotAsync, "torchsnapshot"),
    "torch_checkpointing": _files(libraries.TorchCheckpointing, "torch-checkpointing", over=False),
    "CheckFreq synchronous": _checkfreq(copies_beside=False, commits_beside=False),
    "CheckFreq persist beside": _checkfreq(copies_beside=False, commits_beside=True),
    "CheckFreq pipelined": _checkfreq(copies_beside=True, commits_beside=True),
    OURS: Entry(Checkflow, Checkflow),
    RAW: _files(Raw),
}
