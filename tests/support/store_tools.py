"""What the tests of layout, store and reader share: training state made of numpy arrays, free of torch."""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from checkflow.runtime.format.layout import STORED_TYPES, Layout, TensorRecord, make_layout, write_headers
from checkflow.runtime.store import discovery
from checkflow.runtime.store.reader import Checkpoint
from checkflow.runtime.store.store import Store

Array = np.ndarray[Any, Any]


def record(
    name: str, shape: Sequence[int], dtype: str = "float32", *, deadline: int = 0, order: Sequence[int] | None = None
) -> TensorRecord:
    size = STORED_TYPES[dtype].element_bytes
    count = int(np.prod(shape, dtype=object)) if len(shape) else 1
    return TensorRecord(
        name, dtype, tuple(shape), size * count, size, deadline, None if order is None else tuple(order)
    )


def fill(layout: Layout, seed: int) -> tuple[memoryview, dict[str, bytes]]:
    """A staging buffer with every tensor in its memory order, and the row-major bytes of each.

    The buffer is aligned as the runtime's are, and forked children have it too. All bytes follow from the seed; a
    boolean tensor has zeros and ones.
    """
    source = np.random.default_rng(seed)
    staging = memoryview(mmap.mmap(-1, max(1, layout.buffer_bytes)))[: layout.buffer_bytes]
    write_headers(layout, staging)
    expected = {}
    for name, placed in layout.tensors.items():
        item = placed.record
        data = source.integers(0, 2 if item.dtype == "bool" else 256, item.size_bytes, np.uint8)
        logical = data.reshape(*item.shape, item.element_bytes)
        order = item.permutation or range(len(item.shape))
        memory = np.ascontiguousarray(logical.transpose(*order, len(item.shape)))
        staging[placed.staging_offset : placed.staging_offset + item.size_bytes] = memory.tobytes()
        expected[name] = data.tobytes()
    return staging, expected


def read_all(checkpoint: Checkpoint) -> dict[str, bytes]:
    """Every tensor through our reader."""
    found = {}
    for name in checkpoint.tensors:
        data = bytearray(checkpoint.size_bytes(name))
        checkpoint.read_into(name, memoryview(data))
        found[name] = bytes(data)
    return found


def small_layout() -> Layout:
    """Two owners, a turned tensor, a scalar, an empty tensor, a complex one: everything in a few hundred bytes."""
    return make_layout(
        [
            record("model/conv.weight", (2, 3, 2, 2), order=(0, 2, 3, 1)),
            record("model/bn.num_batches_tracked", (), "int64"),
            record("model/empty", (0, 4)),
            record("model/mask", (5,), "bool", deadline=3),
            record("optimizer/conv.weight.exp_avg", (2, 3), "complex128"),
        ]
    )


def tree(directory: Path) -> Mapping[str, bytes]:
    """Every file below a directory with its content."""
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def recover(store: Store) -> Checkpoint | None:
    """What a job that has opened this store goes on from."""
    return discovery.recover(
        store.checkpoints(), lambda path: discovery.open_verified(path, store.trust), store.set_aside
    )
