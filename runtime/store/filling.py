"""Reads a checkpoint's tensors into those of a job, on any device and in any memory order."""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Iterator

import torch

from checkflow.core.boxes import Box, flat_range, whole
from checkflow.runtime.store.reader import Checkpoint

_APART_BYTES = 32 << 20  # host memory for tensors that cannot be read into directly
Target = tuple[str, torch.Tensor, Box | None]  # the name in the checkpoint; None: the tensor is all of it


def fill_all(checkpoint: Checkpoint, targets: Collection[Target]) -> None:
    """Read tensors' values: directly into row-major host tensors, into others through host memory, some at a time."""
    buffers: list[tuple[str, Box | None, memoryview]] = []
    apart: list[tuple[torch.Tensor, torch.Tensor]] = []

    def read() -> None:
        if all(box is None for _, box, _ in buffers):
            checkpoint.read_many_into([(name, buffer) for name, _, buffer in buffers])
        else:
            checkpoint.read_boxes_into(buffers)
        for tensor, target in apart:
            tensor.detach().copy_(target)
        buffers.clear()
        apart.clear()

    place = {name: number for number, name in enumerate(checkpoint.tensors)}
    first = dict(checkpoint.ties)
    with torch.no_grad():
        for name, tensor, box in sorted(targets, key=lambda one: place.get(first.get(one[0], one[0]), len(place))):
            if not tensor.nbytes:
                continue
            if tensor.is_cpu and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
                buffers.append((name, box, _memory(tensor)))
                continue
            for part, of_whole in _parts(tensor, box):
                target = torch.empty(part.shape, dtype=tensor.dtype, device="cpu")
                apart.append((part, target))
                buffers.append((name, of_whole, _memory(target)))
                if sum(one.nbytes for _, one in apart) >= _APART_BYTES:
                    read()
        read()


def _memory(tensor: torch.Tensor) -> memoryview:
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def _parts(tensor: torch.Tensor, box: Box | None) -> Iterator[tuple[torch.Tensor, Box | None]]:
    """Parts of a rank's tensor of which a copy is small, each with its box in the checkpoint's tensor."""
    if box is None or tensor.nbytes <= _APART_BYTES:
        yield tensor, box
        return
    local = whole(tensor.shape)
    count = _APART_BYTES // tensor.element_size()
    for begin in range(0, local.volume, count):
        for one in flat_range(local, begin, min(local.volume, begin + count)):
            slices = tuple(slice(o, o + n) for o, n in zip(one.offsets, one.lengths, strict=True))
            moved = tuple(o + p for o, p in zip(box.offsets, one.offsets, strict=True))
            yield tensor[slices], Box(box.shape, moved, one.lengths)
