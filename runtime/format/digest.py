"""Digests with which audits compare staged bytes: ``xxh3`` of host memory, ``sums`` of device memory.

``sums`` runs on the device by torch's operators on integers, and on the host for the staged copy.
docs/explanation/consistency.md defines it.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import xxhash

if TYPE_CHECKING:  # imported where it is used: what checkpoints hold is looked at without torch
    import torch

    from checkflow.core.state import StateTensor

BLOCK_ITEMS = 2**16  # 256 KiB: fits a core's cache together with its weights
GOLDEN = 0x9E3779B97F4A7C15
_SLICE_BLOCKS = 32  # digested at once on a device: 16 MiB of products
_BLOCK_BYTES = 4 * BLOCK_ITEMS
_MODULUS = 2**64

Rule = Literal["xxh3", "sums"]


@dataclass(frozen=True, slots=True)
class Digest:
    """A digest by one of the rules: equal bytes have equal digests."""

    rule: Rule
    value: int


def digest_memory(rule: Rule, address: int, size_bytes: int) -> Digest:
    data = memoryview((ctypes.c_char * size_bytes).from_address(address)).cast("B") if size_bytes else memoryview(b"")
    if rule == "xxh3":
        return Digest(rule, xxhash.xxh3_64_intdigest(data))
    return Digest(rule, _combined(_host_sums(np.frombuffer(data, np.uint8)), size_bytes))


def in_host_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor's bytes can be read by address."""
    return tensor.device.type == "cpu"


class Digests:
    """Digests of all state tensors at this instant; those in device memory are computed on the current stream."""

    def __init__(self, tensors: Iterable[StateTensor]) -> None:
        import torch

        self._known: dict[str, Digest] = {}
        self._sizes: dict[str, int] = {}  # of tensors on the device, in order
        sums: list[torch.Tensor] = []
        weights: torch.Tensor | None = None
        for item in tensors:
            tensor = item.tensor
            if in_host_memory(tensor):
                self._known[item.name] = digest_memory("xxh3", tensor.data_ptr(), tensor.nbytes)
            else:
                self._sizes[item.name] = tensor.nbytes
                weights = weights_on(tensor.device) if weights is None else weights
                sums += device_sums(tensor, weights)
        self._device = sums[0].device if sums else None
        self._sums = _to_host(torch.cat(sums)) if sums else torch.empty(0, dtype=torch.int64, device="cpu")

    def take(self) -> Mapping[str, Digest]:
        """All digests. The device must have computed them: it has once a capture that began later is complete."""
        if self._sizes:
            sums, first = self._sums.numpy().view(np.uint64), 0
            for name, size_bytes in self._sizes.items():
                count = -(-size_bytes // _BLOCK_BYTES)
                self._known[name] = Digest("sums", _combined(sums[first : first + count], size_bytes))
                first += count
            self._sizes = {}
        return self._known

    def wait(self) -> Mapping[str, Digest]:
        """Wait for the device, then return all digests."""
        if self._device is not None and self._device.type == "cuda":
            import torch

            torch.cuda.current_stream(self._device).synchronize()
        return self.take()


def device_sums(tensor: torch.Tensor, weights: torch.Tensor) -> list[torch.Tensor]:
    """The sums of a tensor's blocks, computed on its device by :func:`weights_on` it; nothing waits for them."""
    import torch

    begin, size_bytes = tensor.storage_offset() * tensor.element_size(), tensor.nbytes
    memory = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    memory.set_(tensor.untyped_storage(), begin, (size_bytes,), (1,))
    whole = size_bytes - size_bytes % _BLOCK_BYTES
    sums = []
    for first in range(0, whole, _SLICE_BLOCKS * _BLOCK_BYTES):
        items = _items(memory[first : min(first + _SLICE_BLOCKS * _BLOCK_BYTES, whole)])
        sums.append((items.view(-1, BLOCK_ITEMS) * weights).sum(1))
    if whole < size_bytes:
        items = _items(memory[whole:])
        sums.append((items * weights[: len(items)]).sum(0, keepdim=True))
    return sums


def _items(memory: torch.Tensor) -> torch.Tensor:
    """Bytes as 32-bit integers; copied if they are not aligned."""
    import torch

    missing = -len(memory) % 4
    if missing:
        memory = torch.nn.functional.pad(memory, (0, missing))
    elif memory.storage_offset() % 4 or memory.data_ptr() % 4:
        memory = memory.clone()
    return memory.view(torch.int32)


def _to_host(sums: torch.Tensor) -> torch.Tensor:
    if sums.device.type == "cpu":
        return sums
    import torch

    return torch.empty(sums.shape, dtype=sums.dtype, device="cpu", pin_memory=True).copy_(sums, non_blocking=True)


def _host_sums(data: np.ndarray[Any, np.dtype[np.uint8]]) -> np.ndarray[Any, np.dtype[np.uint64]]:
    weights = _weights()
    sums = np.zeros(-(-len(data) // _BLOCK_BYTES), np.uint64)
    items = np.zeros(BLOCK_ITEMS, np.int64)
    for number in range(len(sums)):
        block = data[number * _BLOCK_BYTES : (number + 1) * _BLOCK_BYTES]
        if len(block) % 4:
            block = np.pad(block, (0, -len(block) % 4))
        count = len(block) // 4
        items[:count] = block.view("<i4")
        sums[number] = np.dot(items[:count].view(np.uint64), weights[:count])
    return sums


def _combined(sums: np.ndarray[Any, np.dtype[np.uint64]], size_bytes: int) -> int:
    numbers = np.arange(1, len(sums) + 1, dtype=np.uint64)
    mixed = _mix(sums + numbers * np.uint64(GOLDEN))
    length = _mix(np.array([size_bytes], np.uint64))
    return (int(mixed.sum(dtype=np.uint64)) + int(length[0])) % _MODULUS


def _mix(values: np.ndarray[Any, np.dtype[np.uint64]]) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """A bijection of 64-bit numbers after which every bit depends on all."""
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        values = (values ^ (values >> np.uint64(33))) * np.uint64(factor)
    return values ^ (values >> np.uint64(33))


@functools.cache
def _weights() -> np.ndarray[Any, np.dtype[np.uint64]]:
    """One odd number for each item of a block; no two have the same low 33 bits."""
    positions = np.arange(BLOCK_ITEMS, dtype=np.uint64)
    scattered = positions * np.uint64(0x85EBCA6B) % np.uint64(2**32)  # an odd factor keeps them distinct
    high = _mix(positions + np.uint64(GOLDEN)) << np.uint64(33)
    return high | scattered << np.uint64(1) | np.uint64(1)


def weights_on(device: torch.device) -> torch.Tensor:
    """The weights on a device, made for one audit so that no device memory stays taken."""
    return _host_weights(pinned=device.type != "cpu").to(device, non_blocking=True)


@functools.cache
def _host_weights(*, pinned: bool) -> torch.Tensor:
    import torch

    weights = torch.from_numpy(_weights().view(np.int64))
    return weights.pin_memory() if pinned else weights
