"""A data set that seeds every generator by (seed, epoch, index) before each sample is made.

So augmentation does not depend on which worker makes a sample, on what was made before it, or on whether the job was
interrupted. In the main process the generators are put back afterwards: dropout would repeat from batch to batch.
"""

from __future__ import annotations

import operator
import struct
from collections.abc import Callable, Sequence
from typing import Any

import torch
import xxhash
from torch.utils.data import (
    ConcatDataset,
    Dataset,
    StackDataset,
    Subset,
    TensorDataset,
    default_collate,
    default_convert,
    get_worker_info,
)
from torch.utils.data._utils import collate as torch_collate

from checkflow.runtime.data.process_generators import Reseed, generator_states, seed_generators, set_generator_states

try:
    from numpy import ndarray
except ImportError:  # torch does without it
    _ARRAYS: tuple[type, ...] = ()
else:
    _ARRAYS = (ndarray,)
_OF_COLLATING = -1  # in the place of an index
_PLAIN = (list, tuple, range, torch.Tensor, *_ARRAYS)  # what gives numbers and draws none
_number = struct.Struct("<q").pack


def derived_seed(*parts: int) -> int:
    """63 bits that depend on all parts, the same on every machine."""
    return xxhash.xxh3_64_intdigest(b"".join(map(_packed, parts))) >> 1


def _packed(part: int) -> bytes:
    try:
        return _number(part)
    except struct.error:  # more than 64 bits
        return xxhash.xxh3_64_digest(repr(part).encode())


def index_number(index: Any) -> int:
    """What stands for a sample in its seed: its index, or a digest of that where it is no whole number.

    Raises:
        TypeError: the index says nothing that is the same in every process.
    """
    try:
        return operator.index(index)
    except TypeError:
        return _digest_of(index)


def _digest_of(index: Any) -> int:
    plain = isinstance(index, str | bytes | float | None) or (
        isinstance(index, tuple | list) and all(index_number(part) is not None for part in index)
    )
    if not plain:
        raise TypeError(
            f"an index of type {type(index).__name__} has no value that other processes share: use numbers or text"
        ) from None
    return xxhash.xxh3_64_intdigest(repr(index).encode()) >> 1


# Which samples make up a batch: seed, epoch, indices. It goes to a worker: a plain tuple is pickled in half the time.
Batch = tuple[int, int, list[Any]]


class SeededDataset(Dataset[Any]):
    """The user's data set, indexed by whole batches, collated: mixing samples draws numbers, too.

    A data set that fetches whole batches itself (``__getitems__``) is asked for them, and seeded once for each. Where
    nothing can draw, nothing is seeded: see :func:`draws_nothing`.

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
        plain = is_torchs(collate)
        # Torch's own draws nothing; samples of classes that do when they are looked at go on from the last one's seed.
        self._seeds_collating = batched and not plain
        self._seeds = reseed is not None or not plain or not draws_nothing(dataset)

    def __getitems__(self, batch: Batch) -> Any:
        if not self._seeds or get_worker_info() is not None:  # a worker's generators serve nothing but its samples
            return self._make(batch)
        states = generator_states()
        try:
            return self._make(batch)
        finally:
            set_generator_states(states)

    def _make(self, batch: Batch) -> Any:
        dataset, (seed, epoch, indices) = self.dataset, batch
        samples: Sequence[Any]
        if self._whole:
            if self._seeds:
                seed_generators(derived_seed(seed, epoch, index_number(indices[0])), self._reseed)
            samples = dataset.__getitems__(indices)
        elif self._seeds:
            samples = self._samples(batch)
        else:
            samples = [dataset[index] for index in indices]
        if not self._batched:
            return self.collate(samples[0])
        if self._seeds_collating:
            seed_generators(derived_seed(seed, epoch, index_number(indices[0]), _OF_COLLATING), self._reseed)
        return self.collate(samples)

    def _samples(self, batch: Batch) -> list[Any]:
        """Each made after the generators were seeded for it."""
        dataset, reseed, seed = self.dataset, self._reseed, seed_generators
        epoch_seed, epoch, indices = batch
        digest, place = xxhash.xxh3_64_intdigest, _packed(epoch_seed) + _packed(epoch)
        samples = []
        for index in indices:  # ``derived_seed``, of which the first two parts are packed already
            number = index if type(index) is int else index_number(index)
            seed(digest(place + _packed(number)) >> 1, reseed)
            samples.append(dataset[index])
        return samples


def _fetches_batches(dataset: Any) -> bool:
    """Whether it has a way of its own to fetch a whole batch; a Subset has one only if what it is a part of has."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return callable(getattr(dataset, "__getitems__", None))


def is_torchs(collate: Callable[[Any], Any]) -> bool:
    """Whether it is torch's default, nothing registered with it."""
    known = torch_collate.default_collate_fn_map.values()
    default = collate is default_collate or collate is default_convert
    return default and all(one.__module__ == torch_collate.__name__ for one in known)


def draws_nothing(dataset: Any) -> bool:
    """Whether indexing it surely draws from no generator: tensors and arrays, and what torch composes of them.

    Exactly these types: a class that inherits from one of them may do anything.
    """
    if type(dataset) is TensorDataset:
        return all(type(tensor) is torch.Tensor for tensor in dataset.tensors)
    if type(dataset) is Subset:
        return type(dataset.indices) in _PLAIN and draws_nothing(dataset.dataset)
    if type(dataset) is ConcatDataset:
        return all(map(draws_nothing, dataset.datasets))
    if type(dataset) is StackDataset:
        parts = dataset.datasets
        return all(map(draws_nothing, parts.values() if isinstance(parts, dict) else parts))
    return type(dataset) in (torch.Tensor, range) or (type(dataset) in _ARRAYS and dataset.dtype != object)
