"""How a job's host memory lies in shared memory, and beside its checkpoints: names, contents, and their validation.

    <checkpoints>/.memory.json         says which folder, and in which start of the machine; gone after a clean end
    /dev/shm/checkflow-<token>/
      owner.json                       whose it is; locked for as long as its job lives
      life.json                        its run, and what that knows to be on storage
      layout-<digest>.json             where each tensor lies in a buffer
      buffer-<i>                       a staging buffer: the image of one checkpoint's files, allocated in full
      buffer-<i>.extra                 the extra state that belongs to it
      buffer-<i>.json                  the record: there only while the buffer holds a complete capture

:mod:`.tier` writes it, :mod:`.orphans` reads it, :mod:`.recovery` takes it.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, Protocol

from pydantic import Field, JsonValue, StringConstraints, TypeAdapter

from checkflow.core.graph import STRICT, Many, Named
from checkflow.runtime.format.layout import Layout
from checkflow.runtime.format.manifest import MAX_STEP
from checkflow.runtime.system import fs

if TYPE_CHECKING:
    from checkflow.runtime.format.digest import Digest, Digests

logger = logging.getLogger("checkflow")

ROOT = Path("/dev/shm")
PREFIX = "checkflow-"
MARK, OWNER, LIFE = ".memory.json", "owner.json", "life.json"
MOST_BYTES = 1 << 16  # of each of these
PIECE_BYTES = 1 << 26  # asked of the system at once: a signal undoes what one call has done, or waits for its end
NOTHING = -1  # in the place of a step, where storage has none
_BUFFER = re.compile(r"buffer-[0-9]{1,9}", re.ASCII)

Hash = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}\z")]
Count = Annotated[int, Field(ge=0, le=2**62)]
Stored = Annotated[int, Field(ge=NOTHING, le=MAX_STEP)]


@dataclass(frozen=True, slots=True)
class Mark:
    """The file beside the checkpoints."""

    __pydantic_config__ = STRICT
    token: Hash
    boot: str  # the start of the machine that the memory belongs to
    format: Literal["checkflow-memory"] = "checkflow-memory"
    version: Literal[1] = 1


@dataclass(frozen=True, slots=True)
class Owner:
    """Whose folder it is. A copy of the checkpoints' directory is another directory."""

    __pydantic_config__ = STRICT
    directory: str
    device: int
    inode: int
    pid: int = 0  # of the job; 0: written by an earlier release

    def is_of(self, path: str | os.PathLike[str]) -> bool:
        """Whether the directory of this path is the one. A network's file system may have got another number."""
        status = os.stat(path)
        same_place = status.st_dev == self.device or os.path.realpath(path) == self.directory
        return status.st_ino == self.inode and same_place


@dataclass(frozen=True, slots=True)
class KeptTensor:
    """A :class:`.format.layout.TensorRecord`."""

    __pydantic_config__ = STRICT
    name: str
    dtype: str
    shape: Many[Count]
    size_bytes: Count
    element_bytes: Count
    deadline: int
    permutation: Many[Count] | None
    conjugated: bool
    negated: bool


@dataclass(frozen=True, slots=True)
class KeptDigest:
    """A :class:`.format.digest.Digest` of a tensor at the boundary: what was staged must have it."""

    __pydantic_config__ = STRICT
    rule: Literal["xxh3", "sums"]
    value: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{1,16}\z")]


@dataclass(frozen=True, slots=True)
class Life:
    """What a run is to storage. Steps, or ``NOTHING``."""

    __pydantic_config__ = STRICT
    run_id: str
    base: Stored = NOTHING  # that it went on from, and whose run made that
    base_run: str = ""
    durable: Stored = NOTHING  # the newest that it knows to be on storage


@dataclass(frozen=True, slots=True)
class Record:
    """What a capture is beside its bytes."""

    __pydantic_config__ = STRICT
    step: Annotated[int, Field(ge=0, le=MAX_STEP)]
    layout: Hash  # xxh3-128 of the file that says it
    extra: Hash  # xxh3-128 of the extra state
    plan_digest: str
    by_plan: bool
    audited: bool  # all tensors have their digests here
    ties: Many[tuple[str, str]]
    absent: Many[str]
    digests: Named[str, KeptDigest]
    info: dict[str, JsonValue] = field(default_factory=dict)


class _Buffer(Protocol):
    @property
    def index(self) -> int: ...


class StagedCheckpoint(Protocol):
    """A complete checkpoint in a staging buffer, as far as its record tells of it."""

    @property
    def buffer(self) -> _Buffer: ...
    @property
    def step(self) -> int: ...
    @property
    def layout(self) -> Layout: ...
    @property
    def plan_digest(self) -> str: ...
    @property
    def by_plan(self) -> bool: ...
    @property
    def ties(self) -> tuple[tuple[str, str], ...]: ...
    @property
    def absent(self) -> tuple[str, ...]: ...
    @property
    def digests(self) -> Digests | None: ...
    @property
    def settled(self) -> Mapping[str, Digest]: ...


MARKS: TypeAdapter[Mark] = TypeAdapter(Mark)
OWNERS: TypeAdapter[Owner] = TypeAdapter(Owner)
LIVES: TypeAdapter[Life] = TypeAdapter(Life)
LAYOUTS: TypeAdapter[tuple[KeptTensor, ...]] = TypeAdapter(Many[KeptTensor])
RECORDS: TypeAdapter[Record] = TypeAdapter(Record)


def boot_id() -> str:
    """Of this start of the machine; "" where the system does not tell."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def dump_layout(layout: Layout) -> bytes:
    """The tensors of a layout: :func:`.format.layout.make_layout` makes the same of them again."""
    records = (placed.record for placed in layout.tensors.values())
    tensors = tuple(
        KeptTensor(
            one.name, one.dtype, one.shape, one.size_bytes, one.element_bytes, one.deadline, one.permutation,
            one.conjugated, one.negated,
        )
        for one in records
    )  # fmt: skip
    return LAYOUTS.dump_json(tensors)


def give_pages_back(memory: mmap.mmap) -> None:
    """At once: forked children that look at the same file would keep its pages for as long as they live."""
    if hasattr(mmap, "MADV_REMOVE"):
        with contextlib.suppress(OSError, ValueError):
            for begin in range(0, len(memory), PIECE_BYTES):
                memory.madvise(mmap.MADV_REMOVE, begin, min(PIECE_BYTES, len(memory) - begin))


def remove(path: Path) -> None:
    """A job's folder. What cannot be removed stays, and is told of."""
    try:
        with fs.folder(str(path)) as folder:
            for name in fs.names(folder):
                with contextlib.suppress(FileNotFoundError):  # another process gives it back, too
                    if _BUFFER.fullmatch(name):
                        with contextlib.suppress(OSError):  # it goes with the last that hold it open, then
                            _empty(folder, name)
                    fs.unlink(name, dir_fd=folder)
        os.rmdir(path)
    except FileNotFoundError:  # the system takes shared memory away when a user logs out (RemoveIPC)
        pass
    except OSError as error:
        logger.warning("%s holds memory, and cannot be removed: %s", path, error.strerror)


def _empty(folder: int, name: str) -> None:
    """A child that a dead job has forked may hold its buffers open: their pages would stay for as long as it lives."""
    fd = fs.open_claimed(name, dir_fd=folder)
    try:
        if size_bytes := os.fstat(fd).st_size:
            with mmap.mmap(fd, size_bytes) as memory:
                give_pages_back(memory)
    finally:
        fs.close_quietly(fd)
