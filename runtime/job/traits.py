"""What an iteration looks like from outside: its batches, autocast and duration, for comparison with a plan's.

Batches are those of the loader, or the tensors that whole models get. Only shapes and dtypes are kept.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from checkflow.core.plan import Fingerprint
from checkflow.core.state import dtype_name, training_device, with_shapes

BatchShape = tuple[tuple[tuple[int, ...], str], ...]


@dataclass(frozen=True)
class Traits:
    """The parts of a plan's fingerprint that only a running iteration shows."""

    batch: BatchShape  # the first micro-batch's
    micro_batches: int
    autocast: str

    @staticmethod
    def of(fingerprint: Fingerprint) -> Traits:
        return Traits(fingerprint.batch, fingerprint.micro_batches, fingerprint.autocast)

    def differences(self, planned: Traits) -> list[str]:
        """What differs from a plan's traits, one line each."""
        both = {
            "batch": (_text(self.batch), _text(planned.batch)),
            "micro-batches": (str(self.micro_batches), str(planned.micro_batches)),
            "autocast": (self.autocast or "off", planned.autocast or "off"),
        }
        return [f"{name}: {have} in the job, {want} in the plan" for name, (have, want) in both.items() if have != want]


@dataclass(frozen=True)
class Seen:
    """One observed iteration."""

    traits: Traits
    evaluations: int  # forward passes of whole models in evaluation mode
    seconds: float  # from the first batch or training forward to the boundary

    def looks_like(self, other: Seen) -> bool:
        """Whether it did the same as another, as far as can be seen."""
        return self.traits == other.traits and self.evaluations == other.evaluations


class IterationWatch:
    """Observes one iteration after the other."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.timing = False  # whether to wait for the GPU at both ends of an iteration
        self._batch: BatchShape | None = None
        self._handed = self._evaluations = 0
        self._autocast = ""
        self._forwards: Counter[str] = Counter()
        self._started = False
        self._began = time.perf_counter()  # until ``_start`` knows better

    def batch_handed(self, batch: Any) -> None:
        self._start()
        self._handed += 1
        if self._batch is None:
            self._batch = describe(batch)

    def forward(self, name: str, arguments: Any) -> None:
        """A whole model runs forward in training mode."""
        self._start()
        if self._batch is None:
            self._batch = describe(arguments)
        if not self._autocast and torch.is_autocast_enabled(self._device.type):
            self._autocast = dtype_name(torch.get_autocast_dtype(self._device.type))
        self._forwards[name] += 1

    def evaluated(self) -> None:
        """A whole model runs forward in evaluation mode."""
        self._evaluations += 1

    def end(self, micro_batches: int | None) -> Seen:
        """Describe the iteration that ends here. Unknown ``micro_batches``: the fewest forwards of any model."""
        if self.timing:
            self._synchronize()
        seconds = time.perf_counter() - self._began
        count = min(self._forwards.values(), default=1) if micro_batches is None else micro_batches
        seen = Seen(Traits(self._batch or (), max(count, 1), self._autocast), self._evaluations, seconds)
        self._reset()
        return seen

    @property
    def batch(self) -> BatchShape:
        """The current iteration's batch, as far as it is known."""
        return self._batch or ()

    @property
    def handed(self) -> int:
        """Batches that the loader handed out since the boundary."""
        return self._handed

    def _reset(self) -> None:
        self._batch = None
        self._handed = self._evaluations = 0
        self._autocast = ""
        self._forwards.clear()
        self._started = False
        self._began = time.perf_counter()

    def _start(self) -> None:
        if not self._started:
            self._started = True
            if self.timing:
                self._synchronize()
            self._began = time.perf_counter()

    def _synchronize(self) -> None:
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)


def describe(structure: Any) -> BatchShape:
    """Shape and dtype of each tensor in a nested structure of lists, tuples and dictionaries."""
    return tuple(
        (tuple(tensor.shape), dtype_name(tensor.dtype))
        for leaf in pytree.tree_leaves(structure)
        if isinstance(leaf, torch.Tensor)
        for tensor in with_shapes(leaf)
    )


def as_tensors(batch: BatchShape) -> list[torch.Tensor]:
    """Tensors on the meta device that look like this."""
    return [torch.empty(shape, dtype=getattr(torch, dtype), device="meta") for shape, dtype in batch]


def _text(batch: BatchShape) -> str:
    return ", ".join(f"{dtype}{list(shape)}" for shape, dtype in batch) or "none"


def device_name(models: Mapping[str, torch.nn.Module]) -> tuple[str, str]:
    """The kind of the device that a job trains on ("cpu", "cuda"), and the device's name."""
    device = training_device(models)
    return device.type, torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def allocated_peak_bytes(models: Mapping[str, torch.nn.Module]) -> int | None:
    """The peak of torch's CUDA allocator on the job's device, since it was last reset; None on a CPU."""
    device = training_device(models)
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
