"""torch.distributed.checkpoint with checkflow's store: ``dcp.save(…, storage_writer=Writer("checkpoints", step=10))``.

Ranks write files of their own aside. What they wrote travels to the coordinator with DCP's own messages, and it alone
commits, so that a version is whole, verified and durable, or absent. docs/how-to/dcp.md shows how to use it.
"""

from __future__ import annotations

import io
import os
import re
import secrets
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
import xxhash
from torch.distributed.checkpoint import planner as planning
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from checkflow.core.boxes import Box, part_name
from checkflow.core.errors import CorruptCheckpointError, MismatchError, StorageError, UnsupportedError
from checkflow.core.paths import refuse_url
from checkflow.core.state import dtype_name
from checkflow.runtime.format import codec
from checkflow.runtime.format.layout import STORED_TYPES, FileLayout, TensorRecord, make_layout
from checkflow.runtime.format.manifest import MAX_STEP, Manifest
from checkflow.runtime.shards.arrays import to_bytes
from checkflow.runtime.store.discovery import find, find_valid, logger
from checkflow.runtime.store.files import step_name
from checkflow.runtime.store.filling import Target, fill_all
from checkflow.runtime.store.parts import (
    Gathered,
    Source,
    Written,
    commit_ranks,
    folder_aside,
    narrow_to,
    take_in,
    write_part,
)
from checkflow.runtime.store.reader import open_checkpoint
from checkflow.runtime.store.retention import Rules
from checkflow.runtime.store.store import Store, reported
from checkflow.runtime.store.trust import Trust
from checkflow.runtime.weights.exporter import DCP as OWNER

_STEP = re.compile(r"(?:step-)?([0-9]{1,19})", re.ASCII)
Id = str | os.PathLike[str] | None


@dataclass(frozen=True, slots=True)
class _Share:
    """What a rank has written, as it travels to the coordinator. ``values``: all but tensors, encoded, by name."""

    folder: str
    written: Written
    values: Mapping[str, bytes]


class Writer(StorageWriter):
    """Saves versions of ``dcp.save`` and ``dcp.async_save`` in a checkflow directory.

    When the save returns, or its future is done, the version survives a power cut. After an error there is none.

    Args:
        directory: of all versions, on storage that all ranks see; made if it is missing.
        step: of the version. Or give each save a ``checkpoint_id`` such as 10, "step-10" or "<directory>/step-10".
        keep_latest: how many versions stay, at least 2.
        keep_every: steps whose multiples also stay.
        trust: whose files are accepted, beside root's and this user's: a group's name, or "anyone".

    Raises:
        ValueError: an argument is out of its range.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        step: int | None = None,
        *,
        keep_latest: int = 2,
        keep_every: int | None = None,
        trust: str | None = None,
    ) -> None:
        Rules(keep_latest, keep_every=keep_every)
        refuse_url(directory)
        self.directory = Path(directory).absolute()
        self.step = None if step is None else _checked(step)
        self._run_id = f"{OWNER}-{secrets.token_hex(4)}"
        self._open: dict[str, Any] = {
            "run_id": self._run_id, "keep_latest": keep_latest, "keep_every": keep_every, "trust": trust
        }  # fmt: skip

    def reset(self, checkpoint_id: Id = None) -> None:
        if checkpoint_id is not None:
            self.step = _step_of(checkpoint_id, self.directory)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False  # never chosen by a path alone

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if not kwargs.get("use_collectives", True):
            raise UnsupportedError("dcp.save with use_collectives=False makes no version of all ranks: leave it out")
        if self.step is None:
            raise ValueError('the version has no step: pass Writer(…, step=10), or checkpoint_id="step-10"')

    def prepare_local_plan(self, plan: planning.SavePlan) -> planning.SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[planning.SavePlan]) -> list[planning.SavePlan]:
        with Store(self.directory, **self._open):
            pass  # makes the directory, and removes what earlier saves left half written
        # Only what is the same at each save: with plan caching, ranks keep the first save's plans.
        return [replace(plan, storage_data=(rank, len(plans))) for rank, plan in enumerate(plans)]

    def write_data(self, plan: planning.SavePlan, planner: planning.SavePlanner) -> Future[list[WriteResult]]:
        rank, ranks = plan.storage_data
        step = _given(self.step)
        tensors: dict[str, planning.WriteItem] = {}
        sources: dict[str, Source] = {}
        records: list[TensorRecord] = []
        values: dict[str, bytes] = {}
        for item in plan.items:
            if item.tensor_data is None:
                values[item.index.fqn] = codec.encode(_value(planner, item), name=item.index.fqn)
                continue
            record, source = _describe(item.index.fqn, item.tensor_data)
            records.append(record)
            tensors[record.name], sources[record.name] = item, source
        layout = make_layout(records, shard=rank, shards=ranks)
        owner = f"{OWNER}.{rank}.{secrets.token_hex(8)}"
        with (
            reported(f"rank {rank} cannot write its part of step {step} to {self.directory}"),
            folder_aside(self.directory, step, owner) as (name, folder),
        ):
            written = write_part(folder, rank, ranks, layout, lambda file: _image(file, tensors, planner), sources)
        size_bytes = sum(entry.size_bytes for entry in written.files.values())
        done: Future[list[WriteResult]] = Future()
        done.set_result([WriteResult(MetadataIndex(name), size_bytes, _Share(name, written, values))])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        shares: list[_Share] = [result.storage_data for of_rank in results for result in of_rank]
        values = {name: codec.decode(data, name=name) for one in shares for name, data in one.values.items()}
        extra = codec.encode({OWNER: {"paths": metadata.planner_data, "values": values}}, marks=None)

        def gather(root: int, folder: int) -> Gathered:
            for one in shares:
                take_in(root, folder, one.folder, one.written)
            return Gathered([one.written for one in shares], extra)

        there = {part.tensor.removeprefix(f"{OWNER}/") for one in shares for part in one.written.parts} | values.keys()
        if missing := sorted(metadata.state_dict_metadata.keys() - there):
            raise MismatchError(f"no rank has written {missing[0]!r}, which the save plan of all ranks names")
        with Store(self.directory, spare=[one.folder for one in shares], **self._open) as store:
            info = {"created": round(time.time(), 3)}
            commit_ranks(store, _given(self.step), secrets.token_hex(8), gather, info=info)


def _checked(step: int) -> int:
    if not 0 <= step <= MAX_STEP:
        raise ValueError(f"a step is a number from 0 to {MAX_STEP}, not {step}")
    return step


def _given(step: int | None) -> int:
    assert step is not None, "set_up_storage_writer has checked it"
    return step


def _step_of(checkpoint_id: str | os.PathLike[str], directory: Path) -> int:
    refuse_url(str(checkpoint_id))
    path = Path(str(checkpoint_id))
    found = _STEP.fullmatch(path.name)
    if found is None or (path.parent != Path() and path.parent.absolute() != directory):
        raise ValueError(f'checkpoint_id is "10", "step-10" or "{directory}/step-10" for step 10, not "{path}"')
    return _checked(int(found[1]))


def _describe(fqn: str, data: planning.TensorWriteData) -> tuple[TensorRecord, Source]:
    """The record of a part of a tensor, and what it is. Types that no file can hold are refused with the layout."""
    if data.properties.layout is not torch.strided:
        raise UnsupportedError(f"{fqn} is a tensor of layout {data.properties.layout}: make it dense with .to_dense()")
    name = f"{OWNER}/{fqn}"
    box = Box(tuple(data.size), tuple(data.chunk.offsets), tuple(data.chunk.sizes))
    dtype = dtype_name(data.properties.dtype)
    size = STORED_TYPES[dtype].element_bytes if dtype in STORED_TYPES else 0
    record = TensorRecord(part_name(name, box), dtype, box.lengths, size * box.volume, size)
    return record, Source(name, box)


def _image(
    file: FileLayout, tensors: Mapping[str, planning.WriteItem], planner: planning.SavePlanner
) -> Iterator[memoryview]:
    yield memoryview(file.header)
    for placed in file.tensors:
        item = tensors[placed.record.name]
        tensor = cast(torch.Tensor, planner.resolve_data(item)).detach()
        found, planned = (dtype_name(tensor.dtype), tuple(tensor.shape)), (placed.record.dtype, placed.record.shape)
        if found != planned:
            raise MismatchError(
                f"{item.index.fqn} is {found[0]}{list(found[1])}, and was planned as {planned[0]}{list(planned[1])}"
            )
        yield from to_bytes(tensor)


def _value(planner: planning.SavePlanner, item: planning.WriteItem) -> Any:
    """What is no tensor, itself: planners give a pickle, which may hold anything."""
    kind, plain = type(planner), DefaultSavePlanner
    if (
        issubclass(kind, plain)
        and kind.resolve_data is plain.resolve_data
        and kind.transform_object is plain.transform_object
    ):
        assert isinstance(planner, plain)
        return planner.lookup_object(item.index)
    stream = cast(io.BytesIO, planner.resolve_data(item))
    stream.seek(0)
    try:
        return torch.load(stream, map_location="cpu", weights_only=True)
    except Exception as error:
        raise UnsupportedError(
            f"{item.index.fqn} comes from {kind.__name__} as a pickle that torch.load with weights_only refuses: "
            "have state_dict() return numbers, strings, containers or tensors instead"
        ) from error


# ------------------------------------------------------------------------------------------------------------- reading


@dataclass(frozen=True, slots=True)
class _Version:
    """What a version holds; ``values`` and ``paths`` by DCP's names."""

    step: int
    manifest: Manifest = field(repr=False)
    values: Mapping[str, Any] = field(repr=False)
    paths: Any = field(repr=False)

    @property
    def kind(self) -> str:
        """A digest that is the same for versions of the same tensors and names."""
        tensors = sorted((name, entry.dtype, entry.shape) for name, entry in self.manifest.tensors.items())
        return xxhash.xxh3_64_hexdigest(repr((tensors, sorted(self.values))).encode())


class Reader(StorageReader):
    """Loads a version into the state of ``dcp.load``, on any number of ranks; each reads and verifies what it needs.

    Args:
        directory: where a :class:`Writer` saves versions.
        step: None: the newest whole one, of which the coordinator verifies every byte. Or as ``checkpoint_id``.
        trust: as for :class:`Writer`.
    """

    def __init__(self, directory: str | os.PathLike[str], step: int | None = None, *, trust: str | None = None) -> None:
        refuse_url(directory)
        self.directory = Path(directory).absolute()
        self.step = None if step is None else _checked(step)
        self._trust = trust
        self._version: _Version | None = None

    def reset(self, checkpoint_id: Id = None) -> None:
        if checkpoint_id is not None:
            self.step = _step_of(checkpoint_id, self.directory)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False

    def read_metadata(self, *args: Any, **options: Any) -> Metadata:  # **kwargs: DCP would ask for a rank's own
        self._version = version = self._newest() if self.step is None else self._look(self.step)
        described: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        for name, entry in version.manifest.tensors.items():
            chunks = [ChunkStorageMetadata(torch.Size(one.offsets), torch.Size(one.lengths)) for one in entry.pieces]
            properties = TensorProperties(getattr(torch, entry.dtype))
            described[name.removeprefix(f"{OWNER}/")] = TensorStorageMetadata(
                properties, torch.Size(entry.shape), chunks
            )
        described |= {name: BytesStorageMetadata() for name in version.values}
        return Metadata(described, version.paths)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: planning.LoadPlan) -> planning.LoadPlan:
        return replace(plan, storage_data=self._read.kind)

    def prepare_global_plan(self, plans: list[planning.LoadPlan]) -> list[planning.LoadPlan]:
        step = self._whole_step() if self.step is None else self.step
        kind = (self._read if self._read.step == step else self._look(step)).kind
        if any(plan.storage_data != kind for plan in plans):
            raise MismatchError(
                f"the newest whole version of {self.directory} is of step {step}, and holds other state than a newer "
                f"one, which is damaged or just being made: pass Reader(…, step={step})"
            )
        return [replace(plan, storage_data=step) for plan in plans]

    def read_data(self, plan: planning.LoadPlan, planner: planning.LoadPlanner) -> Future[None]:
        version = self._read if self._read.step == plan.storage_data else self._look(plan.storage_data)
        tensors = []
        for item in plan.items:
            name = item.storage_index.fqn
            if item.type is planning.LoadItemType.BYTE_IO:
                stream = io.BytesIO()
                torch.save(version.values[name], stream)
                stream.seek(0)
                planner.load_bytes(item, stream)
            else:
                tensors.append((item, _wanted(item, version.manifest.tensors[f"{OWNER}/{name}"].shape)))
        self._fill(version, tensors, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _fill(
        self, version: _Version, wanted: list[tuple[planning.ReadItem, Box]], planner: planning.LoadPlanner
    ) -> None:
        targets: list[Target] = []
        apart: list[tuple[torch.Tensor, torch.Tensor]] = []
        given: list[tuple[planning.ReadItem, torch.Tensor]] = []
        around: dict[str, Box] = {}
        for item, box in wanted:
            name = f"{OWNER}/{item.storage_index.fqn}"
            tensor = planner.resolve_tensor(item).detach()
            if tuple(tensor.shape) != box.lengths:
                raise MismatchError(f"{item.dest_index.fqn} takes {list(tensor.shape)}, not {list(box.lengths)}")
            dtype = getattr(torch, version.manifest.tensors[name].dtype)
            filled = tensor if tensor.dtype == dtype else torch.empty(box.lengths, dtype=dtype)
            if filled is not tensor:
                apart.append((tensor, filled))
            targets.append((name, filled, box))
            given.append((item, tensor))
            around[name] = _around(around[name], box) if name in around else box
        path = self.directory / step_name(version.step)
        with open_checkpoint(path, lambda all_of_it: narrow_to(all_of_it, around), trust=self._trusted) as checkpoint:
            fill_all(checkpoint, targets)
        for tensor, filled in apart:
            tensor.copy_(filled)
        for item, tensor in given:
            planner.commit_tensor(item, tensor)

    @property
    def _read(self) -> _Version:
        assert self._version is not None, "DCP calls read_metadata first"
        return self._version

    @property
    def _trusted(self) -> Trust:
        return Trust(self.directory, self._trust)

    def _look(self, step: int) -> _Version:
        found: list[Manifest] = []

        def only_values(described: Manifest) -> Manifest:
            found.append(described)
            return narrow_to(described, {})

        path = self.directory / step_name(step)
        with open_checkpoint(path, only_values, trust=self._trusted) as checkpoint:
            extra = codec.decode(checkpoint.extra_bytes)
        own = extra.get(OWNER) if isinstance(extra, dict) else None
        if not isinstance(own, dict) or not isinstance(own.get("values"), dict) or "paths" not in own:
            raise MismatchError(f"{path} was not saved by checkflow.integrations.dcp")
        return _Version(step, found[0], own["values"], own["paths"])

    def _newest(self) -> _Version:
        """The newest version by its manifest; what else is damaged, the coordinator will find."""
        for path in find(self.directory):
            try:
                return self._look(int(path.name.removeprefix("step-")))
            except CorruptCheckpointError as error:
                logger.warning("passing over %s: %s", path.name, error)
        raise StorageError(f"{self.directory} holds no whole version")

    def _whole_step(self) -> int:
        found = find_valid(self.directory, self._trusted)
        if found is None:
            raise StorageError(f"{self.directory} holds no whole version")
        with found:
            return found.step


def _wanted(item: planning.ReadItem, shape: tuple[int, ...]) -> Box:
    """What an item reads, as a box of the whole tensor."""
    chunk = item.storage_index.offset or (0,) * len(shape)
    return Box(shape, tuple(a + b for a, b in zip(chunk, item.storage_offsets, strict=True)), tuple(item.lengths))


def _around(one: Box, other: Box) -> Box:
    """The smallest box that contains both."""
    begins = tuple(map(min, one.offsets, other.offsets))
    ends = (
        max(a + n, b + m)
        for a, n, b, m in zip(one.offsets, one.lengths, other.offsets, other.lengths, strict=True)
    )  # fmt: skip
    return Box(one.shape, begins, tuple(end - begin for begin, end in zip(begins, ends, strict=True)))
