"""How a job's host memory lies in shared memory and beside its checkpoints, and its validation.

docs/reference/files.md lists the files. :mod:`.tier` writes, :mod:`.orphans` and :mod:`.recovery` read them.
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

from checkflow.core.boxes import Box
from checkflow.core.graph import STRICT, Many, Named
from checkflow.runtime.format.layout import Layout, TensorRecord
from checkflow.runtime.format.manifest import MAX_STEP
from checkflow.runtime.store.parts import Source
from checkflow.runtime.system import fs
from checkflow.runtime.system.aligned_memory import advise, map_address

if TYPE_CHECKING:
    from checkflow.runtime.format.digest import Digest, Digests

logger = logging.getLogger("checkflow")

ROOT = Path("/dev/shm")
PREFIX = "checkflow-"
MARK, OWNER, LIFE = ".memory.json", "owner.json", "life.json"
RANK_MARK = re.compile(r"\.memory-([0-9a-f]{32})\.json", re.ASCII)  # of one of several ranks
MOST_BYTES = 1 << 16  # of each small file
PIECE_BYTES = 1 << 26  # allocated by one call: a signal undoes the call, or waits for its end
NOTHING = -1  # instead of a step if storage has none
_BUFFER = re.compile(r"buffer-[0-9]{1,9}", re.ASCII)

Hash = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}\z")]
Count = Annotated[int, Field(ge=0, le=2**62)]
Stored = Annotated[int, Field(ge=NOTHING, le=MAX_STEP)]


@dataclass(frozen=True, slots=True)
class Mark:
    """The file beside the checkpoints."""

    __pydantic_config__ = STRICT
    token: Hash
    boot: str  # the machine's boot id
    format: Literal["checkflow-memory"] = "checkflow-memory"
    version: Literal[1] = 1


def rank_mark(token: str) -> str:
    """The name of the mark of one of several ranks: each has another one at each start."""
    return f".memory-{token}.json"


@dataclass(frozen=True, slots=True)
class Owner:
    """Whose folder it is. A copy of the checkpoints' directory is another directory."""

    __pydantic_config__ = STRICT
    directory: str
    device: int
    inode: int
    pid: int = 0  # the job's; 0: written by an earlier release

    def is_of(self, path: str | os.PathLike[str]) -> bool:
        """Whether this path is the owner's directory. A network file system may have a new device number."""
        status = os.stat(path)
        same_place = status.st_dev == self.device or os.path.realpath(path) == self.directory
        return status.st_ino == self.inode and same_place


@dataclass(frozen=True, slots=True)
class KeptSource:
    """A :class:`.store.parts.Source`: which part of which state tensor a rank has."""

    __pydantic_config__ = STRICT
    tensor: str
    shape: Many[Count]
    offsets: Many[Count]
    lengths: Many[Count]
    own: bool

    def source(self) -> Source:
        return Source(self.tensor, Box(self.shape, self.offsets, self.lengths), self.own)


@dataclass(frozen=True, slots=True)
class KeptTensor:
    """A :class:`.format.layout.TensorRecord`, and of a rank's layout what it is."""

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
    source: KeptSource | None = None  # None: a whole tensor

    def record(self) -> TensorRecord:
        return TensorRecord(
            self.name, self.dtype, self.shape, self.size_bytes, self.element_bytes, self.deadline, self.permutation,
            self.conjugated, self.negated,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class KeptDigest:
    """The :class:`.format.digest.Digest` of a tensor at the boundary, which the staged bytes must have."""

    __pydantic_config__ = STRICT
    rule: Literal["xxh3", "sums"]
    value: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{1,16}\z")]


@dataclass(frozen=True, slots=True)
class RunLife:
    """Whose captures these are, and how that run relates to storage. Steps, or ``NOTHING``."""

    __pydantic_config__ = STRICT
    run_id: str
    base: Stored = NOTHING  # resumed from, and the run that made it
    base_run: str = ""
    durable: Stored = NOTHING  # the newest known to be on storage
    rank: Annotated[int, Field(ge=0)] = 0
    ranks: Annotated[int, Field(ge=1)] = 1


@dataclass(frozen=True, slots=True)
class CaptureRecord:
    """Everything about a capture but its bytes."""

    __pydantic_config__ = STRICT
    step: Annotated[int, Field(ge=0, le=MAX_STEP)]
    layout: Hash  # xxh3-128 of the layout file
    extra: Hash  # xxh3-128 of the extra state
    plan_digest: str
    by_plan: bool
    audited: bool  # digests of all tensors are here
    ties: Many[tuple[str, str]]
    absent: Many[str]
    digests: Named[str, KeptDigest]
    info: dict[str, JsonValue] = field(default_factory=dict)


class _Buffer(Protocol):
    @property
    def index(self) -> int: ...


class StagedCheckpoint(Protocol):
    """A complete checkpoint in a staging buffer."""

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
    @property
    def sources(self) -> Mapping[str, Source]: ...


MARKS: TypeAdapter[Mark] = TypeAdapter(Mark)
OWNERS: TypeAdapter[Owner] = TypeAdapter(Owner)
LIVES: TypeAdapter[RunLife] = TypeAdapter(RunLife)
LAYOUTS: TypeAdapter[tuple[KeptTensor, ...]] = TypeAdapter(Many[KeptTensor])
RECORDS: TypeAdapter[CaptureRecord] = TypeAdapter(CaptureRecord)


def boot_id() -> str:
    """The machine's boot id; "" if the system does not say."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def dump_layout(layout: Layout, sources: Mapping[str, Source]) -> bytes:
    """The tensors of a layout, of which :func:`.format.layout.make_layout` makes the same layout again."""

    def kept(name: str) -> KeptSource | None:
        if (one := sources.get(name)) is None:
            return None
        return KeptSource(one.tensor, one.box.shape, one.box.offsets, one.box.lengths, one.own)

    records = (placed.record for placed in layout.tensors.values())
    tensors = tuple(
        KeptTensor(
            one.name, one.dtype, one.shape, one.size_bytes, one.element_bytes, one.deadline, one.permutation,
            one.conjugated, one.negated, kept(one.name),
        )
        for one in records
    )  # fmt: skip
    return LAYOUTS.dump_json(tensors)


def give_pages_back(memory: mmap.mmap | memoryview) -> None:
    """Free pages at once: forked children that map the file would keep them as long as they live."""
    if hasattr(mmap, "MADV_REMOVE"):
        address = map_address(memory)
        for begin in range(0, len(memory), PIECE_BYTES):
            if not advise(address + begin, min(PIECE_BYTES, len(memory) - begin), mmap.MADV_REMOVE):
                break


def remove(path: Path) -> None:
    """Remove a job's folder. What cannot be removed stays and is logged."""
    try:
        with fs.folder(str(path)) as folder:
            for name in fs.names(folder):
                with contextlib.suppress(FileNotFoundError):  # another process removes it, too
                    if _BUFFER.fullmatch(name):
                        with contextlib.suppress(OSError):  # then it goes with its last user
                            _empty(folder, name)
                    fs.unlink(name, dir_fd=folder)
        os.rmdir(path)
    except FileNotFoundError:  # systemd removes it when the user logs out (RemoveIPC)
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
