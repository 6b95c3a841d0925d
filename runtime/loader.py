"""A DataLoader whose position can be saved: every sample exactly once an epoch, in the same order, with the same
augmentation as without interruption, whatever the number of workers.

Order comes from (seed, epoch) alone, and each sample's randomness from (seed, epoch, index) alone, so that the whole
state is two numbers: the epoch, and how many of its samples reached a training step. Skipping to a position loads
nothing.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

import torch
import xxhash
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset, IterableDataset, Sampler, default_collate, get_worker_info

from checkflow.errors import MismatchError, UnsupportedError

Batch = TypeVar("Batch")
_Place = tuple[int, int]  # (epoch, index of a sample)


class LoaderListener(Protocol):
    """What a loader tells the checkpointer that follows it."""

    def on_batch_requested(self) -> None:
        """A batch is asked for, and there is one: what the loop did so far belongs to the iteration before."""

    def on_batch_handed(self, batch: Any) -> None:
        """A batch is about to be handed out."""


def derived_seed(*parts: int) -> int:
    """63 bits that depend on all parts, the same on every machine."""
    return xxhash.xxh3_64_intdigest(b"".join(part.to_bytes(8, "little", signed=True) for part in parts)) >> 1


def _seed_generators(seed: int) -> None:
    random.seed(seed)
    torch.default_generator.manual_seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed & 0xFFFFFFFF)


@contextlib.contextmanager
def _generators_kept() -> Iterator[None]:
    """Python's, NumPy's and torch's generators are afterwards as they were before."""
    python, torch_state = random.getstate(), torch.default_generator.get_state()
    numpy = sys.modules.get("numpy")
    numpy_state = numpy.random.get_state() if numpy else None
    try:
        yield
    finally:
        random.setstate(python)
        torch.default_generator.set_state(torch_state)
        if numpy and numpy_state is not None:
            numpy.random.set_state(numpy_state)


class _SeededDataset(Dataset[Any]):
    """The user's data set, indexed by (epoch, index), with every generator seeded by them before each sample."""

    def __init__(self, dataset: Any, seed: int, collate: Callable[[list[Any]], Any]) -> None:
        self.dataset = dataset
        self.seed = seed
        self.collate = collate

    def __getitem__(self, place: _Place) -> Any:
        epoch, index = place
        _seed_generators(derived_seed(self.seed, epoch, index))
        return self.dataset[index]

    def __getitems__(self, places: Sequence[_Place]) -> Any:
        if get_worker_info() is not None:  # a worker's generators serve nothing but its samples
            return self._batch(places)
        with _generators_kept():
            return self._batch(places)

    def _batch(self, places: Sequence[_Place]) -> Any:
        """The samples, collated: mixing samples draws numbers too, and they must be the same after a resume."""
        samples = [self[place] for place in places]
        epoch, first = places[0]
        _seed_generators(derived_seed(self.seed, epoch, first, -1))
        return self.collate(samples)


def _as_it_is(batch: Any) -> Any:
    return batch


class _PlaceSampler(Sampler[list[_Place]]):
    """Batches of places for one epoch, from a position on."""

    def __init__(self, size: int, batch_size: int, shuffle: bool, drop_last: bool, seed: int) -> None:
        self.size, self.batch_size, self.shuffle, self.drop_last, self.seed = size, batch_size, shuffle, drop_last, seed
        self.epoch = self.position = 0

    def order(self, epoch: int) -> list[int]:
        """Indices of the samples of an epoch, in the order in which they are used."""
        if not self.shuffle:
            return list(range(self.size))
        generator = torch.Generator().manual_seed(derived_seed(self.seed, epoch))
        return torch.randperm(self.size, generator=generator).tolist()

    @property
    def samples(self) -> int:
        """Samples used in an epoch."""
        return self.size - self.size % self.batch_size if self.drop_last else self.size

    def __iter__(self) -> Iterator[list[_Place]]:
        epoch, order = self.epoch, self.order(self.epoch)
        for begin in range(self.position, self.samples, self.batch_size):
            yield [(epoch, index) for index in order[begin : min(begin + self.batch_size, self.samples)]]

    def __len__(self) -> int:
        return -(-(self.samples - self.position) // self.batch_size)


class DataLoader:
    """``torch.utils.data.DataLoader`` for map-style data, resumable in the middle of an epoch.

    Args:
        dataset: anything with ``__len__`` and ``__getitem__``.
        seed: of the order and of every sample's randomness; the same seed gives the same epochs.
        others: as torch's. Samplers are not taken: the order must follow from (seed, epoch).

    The generators of the main process are left as they were, so that dropout does not repeat from batch to batch.

    Raises:
        UnsupportedError: the data set is iterable-style.
        ValueError: the batch size is not a whole number of at least 1.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int = 1,
        shuffle: bool = False,
        *,
        seed: int = 0,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
    ) -> None:
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
            raise UnsupportedError("checkflow.DataLoader takes map-style data (with __len__ and __getitem__)")
        if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
            raise ValueError(f"batch_size must be a whole number of at least 1, not {batch_size!r}")
        self.dataset, self.batch_size, self.seed = dataset, batch_size, seed
        self.listener: LoaderListener | None = None
        self._sampler = _PlaceSampler(len(dataset), batch_size, shuffle, drop_last, seed)
        self._handed = 0  # samples of this epoch handed out so far
        self._fresh = True  # the epoch was set, and not iterated since
        self.epochs_counted_elsewhere = False  # by Checkpointer.epochs: iterating twice is then a mistake
        self._loader: TorchDataLoader[Any] = TorchDataLoader(
            _SeededDataset(dataset, seed, default_collate if collate_fn is None else collate_fn),
            batch_sampler=self._sampler,
            num_workers=num_workers,
            collate_fn=_as_it_is,
            pin_memory=pin_memory,
            timeout=timeout,
            worker_init_fn=worker_init_fn,
            multiprocessing_context=multiprocessing_context,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            generator=torch.Generator(),  # torch draws a base seed at each epoch: not from the main generator
        )

    @property
    def epoch(self) -> int:
        """The epoch that is, or will be, iterated."""
        return self._sampler.epoch

    @property
    def position(self) -> int:
        """How many samples of this epoch have been handed out."""
        return self._handed

    @property
    def exhausted(self) -> bool:
        """Whether this epoch has no batch left."""
        return self._handed >= self._sampler.samples

    def __len__(self) -> int:
        """Batches in a whole epoch."""
        return -(-self._sampler.samples // self.batch_size)

    def __iter__(self) -> Iterator[Any]:
        """The rest of the epoch: all of it, unless a position was restored. The next iteration is the next epoch.

        Raises:
            UnsupportedError: iterated twice in one turn of ``Checkpointer.epochs``: samples would count twice.
        """
        if not self._fresh:
            if self.epochs_counted_elsewhere:
                raise UnsupportedError(
                    "the training loader is iterated twice in one epoch; use another loader for evaluation"
                )
            self.set_epoch(self.epoch + 1)
        self._fresh = False
        self._sampler.position = self._handed
        batches = iter(self._loader)
        for _ in range(len(self._sampler)):
            if self.listener is not None:
                self.listener.on_batch_requested()
            batch = next(batches)
            self._handed = min(self._handed + self.batch_size, self._sampler.samples)
            if self.listener is not None:
                self.listener.on_batch_handed(batch)
            yield batch

    def set_epoch(self, epoch: int, position: int = 0) -> None:
        """Iterate this epoch next, from a position (samples already used) on."""
        self._sampler.epoch, self._handed, self._fresh = epoch, position, True

    def end_workers(self) -> None:
        """End workers that persist; iterating starts new ones.

        They end at once as long as torch's iterator goes by itself. Where the collector takes it with a cycle of
        references it takes its queues first, no worker hears of the end, and each costs torch's five seconds.
        """
        self._loader._iterator = None

    def state_dict(self) -> dict[str, Any]:
        """Epoch and position, and what they are counted in."""
        sampler = self._sampler
        return {
            "epoch": self.epoch,
            "position": self._handed,
            "size": sampler.size,
            "shuffle": sampler.shuffle,
            "seed": sampler.seed,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved position.

        Raises:
            MismatchError: the data set's size, the shuffling or the seed differs: other samples would be meant.
        """
        for name in ("size", "shuffle", "seed"):
            if state[name] != getattr(self._sampler, name):
                have, want = getattr(self._sampler, name), state[name]
                raise MismatchError(f"the checkpoint's loader has {name}={want!r}, this one {name}={have!r}")
        self.set_epoch(state["epoch"], state["position"])
