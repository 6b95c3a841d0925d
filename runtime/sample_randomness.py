"""The randomness of samples: every generator is seeded by (seed, epoch, index) before the sample is made.

So augmentation does not depend on which worker makes a sample, on what was made before it, or on whether the job was
interrupted. In the main process the generators are put back afterwards: dropout would repeat from batch to batch.
"""

from __future__ import annotations

import contextlib
import operator
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import xxhash
from torch.utils.data import Dataset, Subset, get_worker_info

Reseed = Callable[[int], object]
_OF_COLLATING = -1  # in the place of an index


def derived_seed(*parts: int) -> int:
    """63 bits that depend on all parts, the same on every machine."""
    return xxhash.xxh3_64_intdigest(b"".join(part.to_bytes(8, "little", signed=True) for part in parts)) >> 1


def index_number(index: Any) -> int:
    """What stands for a sample in its seed: its index, or a digest of that where it is no whole number.

    Raises:
        TypeError: the index says nothing that is the same in every process.
    """
    try:
        return operator.index(index)
    except TypeError:
        pass
    plain = isinstance(index, str | bytes | float | None) or (
        isinstance(index, tuple | list) and all(index_number(part) is not None for part in index)
    )
    if not plain:
        raise TypeError(f"an index of type {type(index).__name__} cannot be told apart by its value")
    return xxhash.xxh3_64_intdigest(repr(index).encode()) >> 1


def seed_generators(seed: int, reseed: Reseed | None = None) -> None:
    """Seed Python's, NumPy's and torch's generators, and what ``reseed`` seeds."""
    random.seed(seed)
    torch.default_generator.manual_seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed & 0xFFFFFFFF)
    if reseed is not None:
        reseed(seed)


def generator_states() -> tuple[Any, ...]:
    """Python's, torch's and, if it was imported, NumPy's generators as they are: for :func:`set_generator_states`."""
    numpy = sys.modules.get("numpy")
    return random.getstate(), torch.default_generator.get_state(), numpy.random.get_state() if numpy else None


def set_generator_states(states: tuple[Any, ...]) -> None:
    """Put them back."""
    python, torch_state, numpy_state = states
    random.setstate(python)
    torch.default_generator.set_state(torch_state)
    if numpy_state is not None:
        sys.modules["numpy"].random.set_state(numpy_state)


@contextlib.contextmanager
def generators_kept() -> Iterator[None]:
    """All generators of the process are afterwards as they were before."""
    states = generator_states()
    try:
        yield
    finally:
        set_generator_states(states)


@dataclass(frozen=True, slots=True)
class Batch:
    """Which samples make up a batch: what goes to a worker."""

    seed: int
    epoch: int
    indices: list[Any]


class SeededDataset(Dataset[Any]):
    """The user's data set, indexed by whole batches, collated: mixing samples draws numbers, too.

    A data set that fetches whole batches itself (``__getitems__``) is asked for them, and seeded once for each.

    Args:
        batched: whether samples are collated to batches; otherwise each goes through ``collate`` by itself.
        reseed: called with the seed of each sample, for generators of other libraries; None: there are none.
    """

    def __init__(
        self, dataset: Any, collate: Callable[[Any], Any], *, batched: bool = True, reseed: Reseed | None = None
    ) -> None:
        self.dataset, self.collate = dataset, collate
        self._batched, self._reseed = batched, reseed
        self._whole = batched and _fetches_batches(dataset)

    def __getitems__(self, batch: Batch) -> Any:
        if get_worker_info() is not None:  # a worker's generators serve nothing but its samples
            return self._make(batch)
        with generators_kept():
            return self._make(batch)

    def _make(self, batch: Batch) -> Any:
        indices, place = batch.indices, (batch.seed, batch.epoch)
        if not self._batched:
            return self.collate(self._sample(place, indices[0]))
        samples: Sequence[Any]
        if self._whole:
            self._seed(*place, index_number(indices[0]))
            samples = self.dataset.__getitems__(indices)
        else:
            samples = [self._sample(place, index) for index in indices]
        self._seed(*place, index_number(indices[0]), _OF_COLLATING)
        return self.collate(samples)

    def _sample(self, place: tuple[int, int], index: Any) -> Any:
        self._seed(*place, index_number(index))
        return self.dataset[index]

    def _seed(self, *parts: int) -> None:
        seed_generators(derived_seed(*parts), self._reseed)


def _fetches_batches(dataset: Any) -> bool:
    """Whether it has a way of its own to fetch a whole batch; a Subset has one only if what it is a part of has."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return callable(getattr(dataset, "__getitems__", None))
