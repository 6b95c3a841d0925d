"""A DataLoader whose position can be saved: every sample exactly once an epoch, in the same order, with the same
augmentation as without interruption, whatever the number of workers.

Order comes from (seed, epoch) alone, and each sample's randomness from (seed, epoch, index) alone, so that the whole
state is the epoch, how many of its samples reached a training step, and the seeds where they are drawn. Skipping to a
position loads nothing.

Without a seed of its own the loader draws an epoch's seeds when the epoch begins, from torch's generator, as many and
in the order as torch's loader does (torch/utils/data: ``_BaseDataLoaderIter``, then ``RandomSampler``): the samples
come in the order in which torch's would hand them out, and whatever else draws from that generator draws what it would.
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
from checkflow.runtime.worker_signals import WorkerShield

Batch = TypeVar("Batch")
_Place = tuple[int, int, int]  # (seed, epoch, index of a sample)
_Seeds = tuple[int, int]  # of an epoch: of its samples' randomness, and of its order


class LoaderListener(Protocol):
    """What a loader tells the checkpointer that follows it."""

    def on_seeds_needed(self) -> None:
        """A new epoch's seeds are about to be drawn."""

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
    """The user's data set, indexed by (seed, epoch, index), with every generator seeded by them before each sample."""

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any]) -> None:
        self.dataset = dataset
        self.collate = collate

    def __getitem__(self, place: _Place) -> Any:
        seed, epoch, index = place
        _seed_generators(derived_seed(seed, epoch, index))
        return self.dataset[index]

    def __getitems__(self, places: Sequence[_Place]) -> Any:
        if get_worker_info() is not None:  # a worker's generators serve nothing but its samples
            return self._batch(places)
        with _generators_kept():
            return self._batch(places)

    def _batch(self, places: Sequence[_Place]) -> Any:
        """The samples, collated: mixing samples draws numbers too, and they must be the same after a resume."""
        samples = [self[place] for place in places]
        seed, epoch, first = places[0]
        _seed_generators(derived_seed(seed, epoch, first, -1))
        return self.collate(samples)


def _as_it_is(batch: Any) -> Any:
    return batch


def _draw() -> int:
    """A seed from torch's generator, as its loaders and samplers draw theirs."""
    return int(torch.empty((), dtype=torch.int64).random_().item())


class _PlaceSampler(Sampler[list[_Place]]):
    """Batches of places for one epoch, from a position on."""

    def __init__(self, size: int, batch_size: int, shuffle: bool, drop_last: bool) -> None:
        self.size, self.batch_size, self.shuffle, self.drop_last = size, batch_size, shuffle, drop_last
        self.epoch = self.position = 0
        self.seeds: _Seeds = (0, 0)  # set before it is iterated

    @property
    def samples(self) -> int:
        """Samples used in an epoch."""
        return self.size - self.size % self.batch_size if self.drop_last else self.size

    def _order(self) -> list[int]:
        """Indices of the samples of the epoch, in the order in which they are used."""
        if not self.shuffle:
            return list(range(self.size))
        return torch.randperm(self.size, generator=torch.Generator().manual_seed(self.seeds[1])).tolist()

    def __iter__(self) -> Iterator[list[_Place]]:
        seed, epoch, order = self.seeds[0], self.epoch, self._order()
        for begin in range(self.position, self.samples, self.batch_size):
            yield [(seed, epoch, index) for index in order[begin : min(begin + self.batch_size, self.samples)]]

    def __len__(self) -> int:
        return -(-(self.samples - self.position) // self.batch_size)


class DataLoader:
    """``torch.utils.data.DataLoader`` for map-style data, resumable in the middle of an epoch.

    Args:
        dataset: anything with ``__len__`` and ``__getitem__``.
        seed: of the order and of every sample's randomness; the same seed gives the same epochs. None: each epoch's are
            drawn from torch's generator, as torch's loader draws them: ``torch.manual_seed`` decides, the order is that
            of torch's loader, and so is the training, where samples draw no numbers of their own.
        others: as torch's. Samplers are not taken: the order must follow from (seed, epoch).

    But for these draws the generators of the main process are left as they were, so that dropout does not repeat from
    batch to batch.

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
        seed: int | None = None,
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
        self._sampler = _PlaceSampler(len(dataset), batch_size, shuffle, drop_last)
        self._drawn: dict[int, _Seeds] = {}  # by epoch
        self._handed = 0  # samples of this epoch handed out so far
        self._fresh = True  # the epoch was set, and not iterated since
        self.shield = WorkerShield(worker_init_fn) if num_workers else None
        self.epochs_counted_elsewhere = False  # by Checkpointer.epochs: iterating twice is then a mistake
        self._loader: TorchDataLoader[Any] = TorchDataLoader(
            _SeededDataset(dataset, default_collate if collate_fn is None else collate_fn),
            batch_sampler=self._sampler,
            num_workers=num_workers,
            collate_fn=_as_it_is,
            pin_memory=pin_memory,
            timeout=timeout,
            worker_init_fn=self.shield,
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
        batches: Iterator[Any] = iter(())
        for number in range(len(self._sampler)):
            if self.listener is not None:
                self.listener.on_batch_requested()
            if not number:  # after the boundary: the epoch before must not have seen this one's seeds drawn
                self._sampler.seeds = self._epoch_seeds()
                if self.shield is not None:
                    self.shield.workers_start()
                batches = iter(self._loader)
            batch = next(batches)
            self._handed = min(self._handed + self.batch_size, self._sampler.samples)
            if self.listener is not None:
                self.listener.on_batch_handed(batch)
            yield batch

    def set_epoch(self, epoch: int, position: int = 0) -> None:
        """Iterate this epoch next, from a position (samples already used) on."""
        self._sampler.epoch, self._handed, self._fresh = epoch, position, True

    def _epoch_seeds(self) -> _Seeds:
        if self.seed is not None:
            return self.seed, derived_seed(self.seed, self.epoch)
        if self.epoch not in self._drawn:
            if self.listener is not None:
                self.listener.on_seeds_needed()
            self._drawn[self.epoch] = _draw(), _draw() if self._sampler.shuffle else 0
        return self._drawn[self.epoch]

    def end_workers(self) -> None:
        """End workers that persist; iterating starts new ones.

        They end at once as long as torch's iterator goes by itself. Where the collector takes it with a cycle of
        references it takes its queues first, no worker hears of the end, and each costs torch's five seconds.
        """
        self._loader._iterator = None

    def state_dict(self) -> dict[str, Any]:
        """Epoch and position, and what they are counted in."""
        return self.state_at(self.epoch, self._handed)

    def state_at(self, epoch: int, position: int) -> dict[str, Any]:
        """The state that goes on from this place, which may lie behind batches fetched ahead."""
        return {
            "epoch": epoch,
            "position": position,
            "size": self._sampler.size,
            "shuffle": self._sampler.shuffle,
            "seed": self.seed,
            "drawn": {number: seeds for number, seeds in self._drawn.items() if number >= epoch},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved position.

        Raises:
            MismatchError: the data set's size, the shuffling or the seed differs: other samples would be meant.
        """
        own = self.state_dict()
        for name in ("size", "shuffle", "seed"):
            if (want := state[name]) != (have := own[name]):
                raise MismatchError(f"the checkpoint's loader has {name}={want!r}, this one {name}={have!r}")
        self._drawn = dict(state.get("drawn", {}))
        self.set_epoch(state["epoch"], state["position"])
