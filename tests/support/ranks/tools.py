"""Versions of several ranks without processes: arrays cut as FSDP2, HSDP, tensor parallel and DDP cut them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from checkflow.core.boxes import Box, Held, shares, whole
from checkflow.runtime.format.layout import Layout, TensorRecord, file_image, make_layout, write_headers
from checkflow.runtime.format.manifest import BLOCK_BYTES, Manifest
from checkflow.runtime.store.parts import Gathered, Source, Written, commit_ranks, narrow_to, part_records, write_part
from checkflow.runtime.store.reader import open_checkpoint
from checkflow.runtime.store.store import Store
from tests.support.store_tools import Array, record

Ranks = list[dict[str, Held]]  # by rank: what it holds, by name

#: How many ranks cut rows, columns, and hold the same.
KINDS = {
    "one": (1, 1, 1), "fsdp 2": (2, 1, 1), "fsdp 3": (3, 1, 1), "fsdp 4": (4, 1, 1), "hsdp 2x2": (2, 1, 2),
    "ddp 2": (1, 1, 2), "tp 2": (1, 2, 1), "fsdp-tp 2x2": (2, 2, 1),
}  # fmt: skip


def arranged(kind: str, arrays: Mapping[str, Array]) -> Ranks:
    """Rows are cut among "fsdp" ranks, columns, where there are some, among "tp" ranks; the rest is replicated."""
    by_rows, by_columns, replicas = KINDS[kind]
    places = [(r, d, t) for r in range(replicas) for d in range(by_rows) for t in range(by_columns)]
    found: Ranks = []
    for replica, row, column in places:
        mine = {}
        for name, array in arrays.items():
            box = whole(array.shape)
            alike = {"replica": replica, "row": row, "column": column}
            del alike["replica"]
            if array.ndim > 1:
                box = chunk(box, 1, by_columns, column)
            else:
                del alike["column"]
            if array.ndim:
                box = chunk(box, 0, by_rows, row)
            else:
                del alike["row"]
            holders = tuple(
                rank
                for rank, (_, d, t) in enumerate(places)
                if alike.get("row", d) == d and alike.get("column", t) == t
            )
            mine[name] = Held(name, box, array.dtype.itemsize, holders)
        found.append(mine)
    return found


def chunk(box: Box, dim: int, parts: int, number: int) -> Box:
    """As torch.chunk: the last parts may be shorter, or empty."""
    size = -(-box.lengths[dim] // parts)
    first = min(box.lengths[dim], size * number)
    offsets, lengths = list(box.offsets), list(box.lengths)
    offsets[dim] += first
    lengths[dim] = min(size, lengths[dim] - first)
    return Box(box.shape, tuple(offsets), tuple(lengths))


def part(array: Array, box: Box) -> Array:
    return np.asarray(array[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.lengths, strict=True))])


def write_rank(
    folder: int, rank: int, ranks: Ranks, arrays: Mapping[str, Array], *, own: Mapping[str, Array] | None = None,
    **more: Any,
) -> Written:  # fmt: skip
    """A rank's share of the arrays, and what it has to itself (``own``), into the attempt's folder."""
    records: list[TensorRecord] = []
    sources: dict[str, Source] = {}
    values: dict[str, Array] = {}
    for name, boxes in shares(ranks[rank].values(), rank).items():
        mine, of = part_records(name, boxes, record(name, arrays[name].shape, arrays[name].dtype.name))
        records, sources = records + mine, sources | of
        values |= {name: part(arrays[source.tensor], source.box) for name, source in of.items()}
    for name, array in (own or {}).items():
        mine, of = part_records(name, [whole(array.shape)], record(name, array.shape, array.dtype.name), own=True)
        records, sources, values = records + mine, sources | of, values | {name: array}
    layout = make_layout(records, shard=rank, shards=len(ranks))
    staging = filled(layout, values)
    return write_part(
        folder, rank, len(ranks), layout, lambda file: file_image(file, staging, BLOCK_BYTES), sources, **more
    )


def filled(layout: Layout, values: Mapping[str, Array]) -> memoryview:
    staging = memoryview(bytearray(layout.buffer_bytes))
    write_headers(layout, staging)
    for name, placed in layout.tensors.items():
        data = values[name].tobytes()
        staging[placed.staging_offset : placed.staging_offset + len(data)] = data
    return staging


def save(
    store: Store, step: int, ranks: Ranks, arrays: Mapping[str, Array], *, extra: bytes = b"of rank 0",
    own: Sequence[Mapping[str, Array]] = (), extras: Sequence[bytes] = (),
) -> Path:  # fmt: skip
    """A version of these ranks; of one, as one process saves it. ``extras``: of each rank to itself."""
    if len(ranks) == 1:
        layout = make_layout([record(name, array.shape, array.dtype.name) for name, array in arrays.items()])
        return store.commit(step, layout, filled(layout, arrays), extra, {})

    def gather(root: int, folder: int) -> Gathered:
        written = [
            write_rank(
                folder, rank, ranks, arrays, own=own[rank] if own else None,
                extra=(extras[rank] if extras else f"of rank {rank}".encode()) if rank else None, extra_digest="same",
            )
            for rank in range(len(ranks))
        ]  # fmt: skip
        return Gathered(written, extra, {})

    return commit_ranks(store, step, f"a{step}", gather, info={})


def load(path: Path, wanted: Mapping[str, Box], rank: int = 0) -> dict[str, Array]:
    """Boxes of a version's tensors, as a rank reads them."""

    def narrow(described: Manifest) -> Manifest:
        return narrow_to(described, wanted, rank)

    with open_checkpoint(path, narrow) as checkpoint:
        found = {name: np.empty(box.lengths, checkpoint.manifest.tensors[name].dtype) for name, box in wanted.items()}
        checkpoint.read_boxes_into(
            [(name, box, memoryview(found[name].reshape(-1).view(np.uint8).data)) for name, box in wanted.items()]
        )
        return found
