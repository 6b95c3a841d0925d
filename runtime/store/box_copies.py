"""Copies of boxes that lie in a file's blocks, or in memory, with gaps between their rows."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import numpy as np

from checkflow.core.boxes import Box, common, flat_range, whole
from checkflow.runtime.format.manifest import BLOCK_BYTES

BoxCopy = Callable[[memoryview], None]  # takes a block, and copies out of it what is wanted


def box_copies(
    piece: Box, shared: Box, target: Box, element_bytes: int, begin: int, out: memoryview
) -> Iterator[tuple[int, BoxCopy]]:
    """(block, copy) for each block of a file that holds some of ``shared``, often several a block.

    Args:
        piece: the box that lies in the file, row-major, from byte ``begin`` on.
        shared: of it, what is wanted.
        target: the box whose row-major bytes ``out`` is to hold.
    """
    # One more dimension, of an element's bytes: then no block and no alignment cuts an element.
    stored, wanted, held = (_in_bytes(box, element_bytes) for box in (piece, shared, target))
    memory = np.frombuffer(out, np.uint8).reshape(held.lengths)
    last = begin + stored.volume
    for block in range(begin // BLOCK_BYTES, -(-last // BLOCK_BYTES)):
        low = block * BLOCK_BYTES
        first = max(begin, low)
        at = first - low
        for within in flat_range(stored, first - begin, min(last, low + BLOCK_BYTES) - begin):
            if (found := common(within, wanted)) is not None:
                yield block, functools.partial(_copy, at, within.lengths, _place(found, within), memory, held, found)
            at += within.volume


def _in_bytes(box: Box, element_bytes: int) -> Box:
    return Box((*box.shape, element_bytes), (*box.offsets, 0), (*box.lengths, element_bytes))


def _place(box: Box, outer: Box) -> tuple[slice, ...]:
    """A box as slices of an array that holds another one."""
    return tuple(slice(o - p, o - p + n) for o, p, n in zip(box.offsets, outer.offsets, box.lengths, strict=True))


def _copy(
    at: int,
    lengths: tuple[int, ...],
    source: tuple[slice, ...],
    memory: np.ndarray[tuple[int, ...], np.dtype[np.uint8]],
    held: Box,
    found: Box,
    block: memoryview,
) -> None:
    count = whole(lengths).volume
    memory[_place(found, held)] = np.frombuffer(block, np.uint8, count, at).reshape(lengths)[source]
