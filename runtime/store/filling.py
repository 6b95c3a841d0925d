"""Reads a checkpoint's tensors into those of a job, on any device and in any memory order."""

from __future__ import annotations

import ctypes
from collections.abc import Collection

import torch

from checkflow.runtime.store.reader import Checkpoint

_APART_BYTES = 32 << 20  # host memory for tensors that cannot be read into directly


def fill_all(checkpoint: Checkpoint, targets: Collection[tuple[str, torch.Tensor]]) -> None:
    """Read tensors' values: directly into row-major host tensors, into others through host memory, some at a time."""
    buffers: list[tuple[str, memoryview]] = []
    apart: list[tuple[torch.Tensor, torch.Tensor]] = []

    def read() -> None:
        checkpoint.read_many_into(buffers)
        for tensor, target in apart:
            tensor.detach().copy_(target)
        buffers.clear()
        apart.clear()

    place = {name: number for number, name in enumerate(checkpoint.tensors)}
    first = dict(checkpoint.ties)
    with torch.no_grad():
        for name, tensor in sorted(targets, key=lambda one: place[first.get(one[0], one[0])]):
            size_bytes = tensor.nbytes
            if not size_bytes:
                continue
            target = tensor
            if not tensor.is_cpu or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
                target = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
                apart.append((tensor, target))
            memory = (ctypes.c_char * size_bytes).from_address(target.data_ptr())
            buffers.append((name, memoryview(memory).cast("B")))
            if sum(one.nbytes for _, one in apart) >= _APART_BYTES:
                read()
        read()
