"""Iterable-style data in the workers of torchdata's loader, with what these draw as a part of its state.

torchdata saves where a data set is, and the seed that a worker began with; not how far that worker's generators, and
those that the data set has, have come. Without this, samples that draw numbers (augmentation, a shuffled buffer) would
be others after a resume.
"""

from __future__ import annotations

import multiprocessing.sharedctypes
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from checkflow.runtime.data.adapters.freeze import Overlaps, freeze, thaw
from checkflow.runtime.data.process_generators import seed_generators
from checkflow.runtime.data.repeat.own_state import OwnState, has_state
from checkflow.runtime.data.seeded_dataset import derived_seed
from checkflow.runtime.format import codec
from checkflow.runtime.state.collect import capture_generators, restore_generators


class WorkerStream(IterableDataset[Any]):
    """A user's data set, as a worker iterates it.

    Args:
        persistent: whether workers outlive an epoch. They are seeded for each then, so that an epoch does not depend on
            what they drew in those before; the first one as torch seeds them.
    """

    def __init__(self, dataset: IterableDataset[Any], *, persistent: bool) -> None:
        self.dataset, self._persistent, self._overlaps = dataset, persistent, Overlaps()
        self._epoch = multiprocessing.sharedctypes.RawValue("q", 0)  # workers see it change, however they are started

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def set_epoch(self, epoch: int) -> None:
        """This epoch comes."""
        self._epoch.value = epoch
        if callable(set_epoch := getattr(self.dataset, "set_epoch", None)):
            set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        if worker is not None and self._persistent and self._epoch.value:
            seed_generators(derived_seed(worker.seed, self._epoch.value))
        iterator = iter(self.dataset)
        return (
            _Stream(self.dataset, iterator, self._overlaps)
            if has_state(self.dataset) or has_state(iterator)
            else iterator
        )


class _Stream:
    """An iteration whose state is that of the data set, of its iterator, and of the worker's generators."""

    def __init__(self, dataset: Any, iterator: Iterator[Any], overlaps: Overlaps) -> None:
        self._dataset, self._iterator = dataset, iterator
        self._own, self._overlaps = OwnState({"dataset": dataset}), overlaps
        self._ended = False

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return next(self._iterator)
        except StopIteration:
            self._ended = True
            raise

    @property
    def _parts(self) -> dict[str, Any]:
        parts = {"dataset": self._dataset, "iterator": self._iterator}
        if self._iterator is self._dataset:
            del parts["iterator"]
        return {name: part for name, part in parts.items() if has_state(part)}

    def state_dict(self) -> dict[str, Any]:
        # As bytes: torchdata takes states apart, and compares them item by item.
        generators = codec.encode(capture_generators())
        # Copies: torchdata holds each state against the last one, and would find no change in what changed in place.
        parts = thaw(freeze({name: part.state_dict() for name, part in self._parts.items()}, self._overlaps))
        own = {"own": codec.encode(found)} if (found := self._own.now()) else {}
        return {"generators": generators, "ended": self._ended, **own, **parts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if has_state(self._dataset):
            self._dataset.load_state_dict(state["dataset"])
        self._ended = state["ended"]  # torchdata asks for one more batch; some data sets begin anew then
        self._iterator = iter(()) if self._ended else iter(self._dataset)
        if "iterator" in self._parts:
            self._iterator.load_state_dict(state["iterator"])  # type: ignore[attr-defined]
        if "own" in state:
            self._own.put_back(codec.decode(state["own"]))
        restore_generators(codec.decode(state["generators"]))


class ShownDataset:
    """A ``worker_init_fn`` by which the user's code finds the user's own data set in ``get_worker_info()``.

    Args:
        then: the user's ``worker_init_fn``.
    """

    def __init__(self, then: Callable[[int], None] | None) -> None:
        self._then = then

    def __call__(self, worker: int) -> None:
        info = get_worker_info()
        assert info is not None
        assert isinstance(info.dataset, WorkerStream)
        object.__setattr__(info, "dataset", info.dataset.dataset)
        if self._then is not None:
            self._then(worker)
