"""A version of several ranks: each writes files of its own into one temporary directory, and rank 0 commits them.

How ranks meet and wait is the callers' business. What passes between them is :class:`Written`, the data of a receipt.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import TypeAdapter

from checkflow.core.boxes import Box, overlap, part_name, whole
from checkflow.core.errors import MismatchError, StorageError, UnsupportedError
from checkflow.core.graph import STRICT, Many, Named
from checkflow.core.units import format_size
from checkflow.runtime.format import codec, manifest
from checkflow.runtime.format.layout import STORED_TYPES, Layout, TensorRecord
from checkflow.runtime.format.manifest import FileEntry, FileName, Manifest, Piece, Size, TensorEntry
from checkflow.runtime.store.cleanup import remove, temporary_name
from checkflow.runtime.store.file_writer import Image, write_file, write_files
from checkflow.runtime.store.store import Store, sync_folder
from checkflow.runtime.system import fs

_ENTRIES: TypeAdapter[dict[str, TensorEntry]] = TypeAdapter(dict[str, TensorEntry])
_PIECE: TypeAdapter[Piece] = TypeAdapter(Piece)
_CHECKSUM_BYTES = 19  # of a block, with its quotes and comma


@dataclass(frozen=True, slots=True)
class Source:
    """Of which state tensor a record of a rank's layout is which part. ``own``: other ranks hold other values."""

    tensor: str
    box: Box
    own: bool = False


class Alike(NamedTuple):
    """For how many tensors, and parts of tensors, of all ranks a rank's part stands."""

    tensors: int = 1
    parts: int = 1


@dataclass(frozen=True, slots=True)
class Part:
    """A box of a state tensor, under ``key`` in a rank's file. The rest as in :class:`.manifest.TensorEntry`."""

    __pydantic_config__ = STRICT
    tensor: str
    file: FileName
    key: str
    dtype: str
    shape: Many[Size]
    offsets: Many[Size]
    lengths: Many[Size]
    permutation: Many[int] | None = None
    own: bool = False


@dataclass(frozen=True, slots=True)
class Written:
    """What a rank has written, durably.

    Args:
        ties, absent: as in the manifest.
        extra_digest: of extra state that all ranks must have alike; "" for none.
    """

    __pydantic_config__ = STRICT
    rank: int
    files: Named[FileName, FileEntry] = field(default_factory=dict)
    parts: Many[Part] = ()
    ties: Many[tuple[str, str]] = ()
    absent: Many[str] = ()
    extra_digest: str = ""


@dataclass(frozen=True, slots=True)
class Gathered:
    """All that makes a version.

    Args:
        written: by rank.
        extra: the content of ``state.msgpack``, rank 0's; None: it is among what was written.
        info: joins the manifest's where only the ranks together know it.
    """

    written: Sequence[Written]
    extra: bytes | None
    info: Mapping[str, Any] = field(default_factory=dict)


# ----------------------------------------------------------------------------------------------------------- each rank


def refuse_long_list(layout: Layout, sources: Mapping[str, Source], alike: Mapping[str, Alike], ranks: int) -> None:
    """Refuse a version whose manifest would be too large, before anything of it is written.

    Args:
        layout: of one of ``ranks``, of which the others' are estimated.
        alike: by the name of a part; those that are missing stand for themselves.

    Raises:
        UnsupportedError: it would be.
    """
    size_bytes = parts = 0
    for name, placed in layout.tensors.items():
        source = sources.get(name) or Source(name, whole(placed.record.shape))
        stands_for = alike.get(name, Alike())
        piece = Piece(placed.file, placed.key, source.box.offsets, source.box.lengths)
        entry = TensorEntry(source.box.shape, placed.record.dtype, (), placed.record.permutation)
        size_bytes += stands_for.tensors * len(_ENTRIES.dump_json({source.tensor: entry}))
        size_bytes += stands_for.parts * len(_PIECE.dump_json(piece))
        parts += stands_for.parts
    blocks = sum(-(-file.size_bytes // manifest.BLOCK_BYTES) for file in layout.files)
    size_bytes += ranks * blocks * _CHECKSUM_BYTES
    if size_bytes > manifest.MAX_MANIFEST_BYTES:
        raise UnsupportedError(
            f"a checkpoint of this job would have some {parts} tensors or parts of tensors, whose list takes "
            f"{format_size(size_bytes)}, more than {format_size(manifest.MAX_MANIFEST_BYTES)}: keep them in fewer and "
            "larger ones, or shard over fewer ranks and replicate between them (HSDP)"
        )


def folder_name(step: int, run_id: str, attempt: str) -> str:
    """The directory into which all ranks write: an attempt has another one than those before it."""
    return temporary_name(step, f"{run_id}.{attempt}")


@contextlib.contextmanager
def folder_aside(directory: Path, step: int, owner: str) -> Iterator[tuple[str, int]]:
    """A new directory for one rank's files, its name and a descriptor, where the attempt's is made later. It is removed
    after an error, and else by :func:`take_in`, or as a leftover by the next store that is opened without it.

    Args:
        directory: the store's.
        owner: another one each time, of letters, digits, ``_``, ``.``, ``-``.
    """
    with fs.folder(str(directory.resolve(strict=True))) as root:
        name = temporary_name(step, owner)
        fs.mkdir(name, dir_fd=root)
        try:
            with fs.folder(name, dir_fd=root) as folder:
                yield name, folder
        except BaseException:
            with contextlib.suppress(OSError):  # the first error is the one to report
                remove(name, dir_fd=root)
            raise


def take_in(root: int, folder: int, name: str, written: Written) -> None:
    """Move a rank's files from its :func:`folder_aside` into the attempt's directory."""
    try:
        with fs.folder(name, dir_fd=root) as aside:
            for file in written.files:
                fs.move(file, old_dir_fd=aside, dir_fd=folder)
        fs.rmdir(name, dir_fd=root)
    except FileNotFoundError:
        raise StorageError(
            f"what rank {written.rank} wrote is gone: another job saves to this directory, or not all ranks see it"
        ) from None


def write_part(
    folder: int,
    rank: int,
    ranks: int,
    layout: Layout,
    image: Image,
    sources: Mapping[str, Source],
    *,
    extra: bytes | None = None,
    ties: Sequence[tuple[str, str]] = (),
    absent: Sequence[str] = (),
    extra_digest: str = "",
) -> Written:
    """Write a rank's files, durably. Their names become durable when the version is committed.

    Args:
        folder: descriptor of the attempt's directory.
        layout: made with this rank's number and that of all ranks.
        image: yields a file's bytes, as for :meth:`.store.Store.commit`.
        sources: which records are only parts, or the rank's own; others are whole tensors.
        extra: what this rank has to itself. Rank 0 has it in the version's extra state.

    Raises:
        OSError, StorageError: it could not be written.
    """
    files = write_files(folder, layout, image)
    if extra is not None:
        name = manifest.rank_extra_name(rank, ranks)
        files[name] = write_file(folder, name, iter([memoryview(extra)]))
    parts = []
    for name, placed in layout.tensors.items():
        record = placed.record
        source = sources.get(name) or Source(name, whole(record.shape))
        if source.box.lengths != record.shape:
            raise ValueError(f"{name} has {list(record.shape)}, its box {list(source.box.lengths)}")
        box = source.box
        parts.append(
            Part(
                source.tensor, placed.file, placed.key, record.dtype, box.shape, box.offsets, box.lengths,
                record.permutation, source.own,
            )
        )  # fmt: skip
    return Written(rank, files, tuple(parts), tuple(ties), tuple(absent), extra_digest)


# -------------------------------------------------------------------------------------------------------------- rank 0


def commit_ranks(
    store: Store,
    step: int,
    attempt: str,
    gather: Callable[[int, int], Gathered],
    *,
    info: Mapping[str, Any],
    plan_digest: str = "",
    retire: bool = True,
    published: Callable[[], None] = lambda: None,
    run_id: str | None = None,
) -> Path:
    """Commit what all ranks write. When this returns, the version survives a power cut; if it raises, there is none.

    Args:
        attempt: another one each time, of letters, digits, ``_``, ``.``, ``-``.
        gather: called with descriptors of the store's directory and of the attempt's, which exists from now on.
            Returns when all ranks have written.
        info: the manifest's, which retention reads; and ``retire`` and ``run_id``: as :meth:`.store.Store.commit` takes
            them.
        published: as :meth:`.store.Store.commit_written` takes it.

    Raises:
        MismatchError: ranks contradict each other: about a tensor, or about what covers it.
        StorageError: it could not be written; and what ``gather`` raises.
    """

    def write(root: int, temporary: str) -> None:
        fs.mkdir(temporary, dir_fd=root)  # (2)
        folder = fs.open_folder(temporary, dir_fd=root)
        try:
            gathered = gather(root, folder)  # (3)
            described = join(
                gathered.written,
                step,
                store.run_id if run_id is None else run_id,
                plan_digest,
                manifest.to_info({**info, **gathered.info}),
            )
            for name, entry in described.files.items():
                _refuse_size(folder, name, entry)
            if gathered.extra is not None:
                extra = write_file(folder, manifest.EXTRA, iter([memoryview(gathered.extra)]))
                described = dataclasses.replace(described, files={**described.files, manifest.EXTRA: extra})
            extras = [name for name in described.files if name.endswith(Path(manifest.EXTRA).suffix)]
            if any(_is_newer(folder, name) for name in extras):
                described = dataclasses.replace(described, version=2)
            write_file(folder, manifest.MANIFEST, iter([memoryview(manifest.dumps(described))]))  # (4)
            sync_folder(folder)  # (5)
        finally:
            fs.close_quietly(folder)

    return store.commit_written(step, write, info=info, retire=retire, attempt=attempt, published=published)


def join(written: Sequence[Written], step: int, run_id: str, plan_digest: str, info: Mapping[str, Any]) -> Manifest:
    """The manifest of what ranks have written, but for ``state.msgpack``. Raises MismatchError."""
    files: dict[str, FileEntry] = {}
    absent: dict[str, None] = {}
    ties: dict[str, str] = {}
    alike: tuple[int, str] | None = None
    for one in written:
        files |= one.files
        absent |= dict.fromkeys(one.absent)
        for further, name in one.ties:
            if ties.setdefault(further, name) != name:
                raise MismatchError(f"{further} is tied to {ties[further]}, and on rank {one.rank} to {name}")
        if one.extra_digest:
            alike = alike or (one.rank, one.extra_digest)
            if one.extra_digest != alike[1]:
                raise MismatchError(
                    f"rank {one.rank} is at another iteration, epoch or place in its data than rank {alike[0]}"
                )
    tensors = {name: _entry(name, parts) for name, parts in _by_name(written).items()}
    for name, tensor in tensors.items():
        if problem := manifest.tensor_problem(tensor, files):
            raise MismatchError(f"what the ranks saved of {name} {problem}")
    for further, name in ties.items():
        if further in tensors or name not in tensors:
            raise MismatchError(f"{further} and {name} are one tensor on some ranks only")
    return Manifest(
        step, run_id, plan_digest, len(written), files, tensors, tuple(ties.items()),
        tuple(name for name in absent if name not in tensors), dict(info),
    )  # fmt: skip


def _by_name(written: Sequence[Written]) -> dict[str, list[tuple[int, Part]]]:
    """Every part, and the rank that wrote it, under its tensor's name in the manifest.

    Of tensors that are the ranks' own, the lowest rank's has the plain name, which every reader knows.
    """
    found: dict[str, list[tuple[int, Part]]] = {}
    first: dict[str, int] = {}
    for one in sorted(written, key=lambda one: one.rank):
        for part in one.parts:
            name = part.tensor
            if part.own and first.setdefault(name, one.rank) != one.rank:
                name = manifest.own_name(name, one.rank)
            found.setdefault(name, []).append((one.rank, part))
    return found


def _entry(name: str, parts: Sequence[tuple[int, Part]]) -> TensorEntry:
    (first_rank, first), *others = parts
    for rank, part in others:
        if part.own != first.own:
            raise MismatchError(f"{name} is a rank's own on rank {rank if part.own else first_rank} alone")
        if (part.dtype, part.shape) != (first.dtype, first.shape):
            raise MismatchError(
                f"{name} is {first.dtype}{list(first.shape)} on rank {first_rank}, and on rank {rank} it is "
                f"{part.dtype}{list(part.shape)}"
            )
    kept = [part for _, part in parts if math.prod(part.lengths)] or [first]  # an empty one only of an empty tensor
    orders = {part.permutation for part in kept}
    return TensorEntry(
        first.shape,
        first.dtype,
        tuple(Piece(part.file, part.key, part.offsets, part.lengths) for part in kept),
        kept[0].permutation if len(orders) == 1 else None,
        ("pair",) if first.dtype in STORED_TYPES and STORED_TYPES[first.dtype].pair else (),
    )


def _refuse_size(folder: int, name: str, entry: FileEntry) -> None:
    """Refuse a file that is not here, or not as long as its rank says."""
    fd, size = fs.open_regular(name, dir_fd=folder)
    fs.close_quietly(fd)
    if size != entry.size_bytes:
        raise StorageError(
            f"{name} has {size} bytes, and {entry.size_bytes} by its record: do all ranks see one directory?"
        )


def _is_newer(folder: int, name: str) -> bool:
    """Whether earlier releases cannot read this extra state."""
    fd, _ = fs.open_regular(name, dir_fd=folder)
    try:
        head = bytearray(codec.HEAD_BYTES)
        fs.read_all(fd, memoryview(head), 0)
    finally:
        fs.close_quietly(fd)
    return codec.is_newer(bytes(head))


def part_records(
    name: str, boxes: Sequence[Box], like: TensorRecord, *, own: bool = False
) -> tuple[list[TensorRecord], dict[str, Source]]:
    """Records of a layout for the boxes of a tensor that a rank saves, and what each is.

    ``like``: dtype, element size, deadline, memory order and signs of the tensor.
    """
    records, sources = [], {}
    for box in boxes:
        record = dataclasses.replace(
            like, name=part_name(name, box), shape=box.lengths, size_bytes=box.volume * like.element_bytes
        )
        records.append(record)
        sources[record.name] = Source(name, box, own)
    return records, sources


# ------------------------------------------------------------------------------------------------------------- restore


def narrow_to(described: Manifest, wanted: Mapping[str, Box], rank: int | None = None) -> Manifest:
    """The part of a manifest that a rank reads: the pieces that hold something of boxes, and files of those.

    ``rank``: whose own extra state is read, if the version has some; of pipeline stages, all ranks' is.
    """
    tensors = {}
    for name, box in wanted.items():
        entry = described.tensors[name]
        kept = tuple(piece for piece in entry.pieces if overlap(piece.offsets, piece.lengths, box))
        tensors[name] = dataclasses.replace(entry, pieces=kept or entry.pieces[:1])
    needed = {manifest.EXTRA, *(piece.file for entry in tensors.values() for piece in entry.pieces)}
    ranks = range(1, described.world_size) if manifest.STAGES in described.info else () if rank is None else (rank,)
    needed |= {manifest.rank_extra_name(one, described.world_size) for one in ranks}
    return dataclasses.replace(
        described,
        tensors=tensors,
        ties=tuple((further, name) for further, name in described.ties if name in tensors),
        files={name: entry for name, entry in described.files.items() if name in needed},
    )
