"""Loaders of another make, made resumable: what those that have a state and those that have none share.

A loader draws from the process's generators, which are training's. So whatever a resume sets up or fetches again draws
from copies; a batch fetched before the boundary and used after it is fetched again with the generators as they were.
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sized
from typing import Any, Final

import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import IterableDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter, _DatasetKind

from checkflow.runtime.data.adapters.torchdata import is_torchdatas
from checkflow.runtime.data.base import ResumableLoader, cannot_go_on, settle_length
from checkflow.runtime.data.fork_guard import start_safely
from checkflow.runtime.data.repeat.own_state import OwnState
from checkflow.runtime.data.repeat.used import Mark, digest, ranks
from checkflow.runtime.data.samplers import with_inner
from checkflow.runtime.data.worker_processes import WorkerShield, end_persistent_workers
from checkflow.runtime.state.collect import capture_generators, restore_generators

END: Final = object()  # in the place of a batch
Place = tuple[int, int]  # an epoch, and how many of its batches come before
# Of a loader, in the order in which a generator that several of them have gets its name.
_SOURCES = ("generator", "sampler", "batch_sampler", "dataset", "collate_fn")


class ForeignLoader(ResumableLoader):
    """The loop over an epoch, the position, and what a saved state is checked for.

    Args:
        loader: iterated once an epoch. Where it, its samplers or its data set have ``set_epoch``, that is called.
    """

    way: str  # how a position is reached again

    def __init__(self, loader: Iterable[Any]) -> None:
        super().__init__(_shield_of(loader))
        self.loader = loader
        self._ends: dict[int, int] = {}  # by epoch, how many batches it had, once its end was seen
        # From a place to the one where what follows was fetched: an epoch that was left, or is over; a batch that
        # could not be fetched.
        self._onward: dict[Place, Place] = {}
        self._own = OwnState(self._sources())
        self._sized = not isinstance(loader, TorchDataLoader) or _tells_length(loader)

    def _sources(self) -> dict[str, Any]:
        """What decides which batches come, by name: its generators are a part of the state."""
        return {name: getattr(self.loader, name, None) for name in _SOURCES}

    @property
    def batches(self) -> int | None:
        """In a whole epoch; None: not known before it is over."""
        return _length(self.loader) if self._sized else None

    def used_batches(self) -> int:
        """As the position counts them."""
        return self.position

    def __len__(self) -> int:
        """Batches in a whole epoch, as the loader says.

        Raises:
            TypeError: it does not say.
        """
        length = _length(self.loader)
        return super().__len__() if length is None else length

    @property
    def exhausted(self) -> bool:
        """Whether this epoch is known to have no batch left."""
        return self._is_over(self._here)

    def _is_over(self, place: Place) -> bool:
        epoch, position = place
        return position in (self._ends.get(epoch), self.batches)

    @property
    def _here(self) -> Place:
        return self._epoch, self._handed

    @property
    def _more(self) -> bool:
        """Whether this epoch is known to have a further batch."""
        return (batches := self.batches) is not None and self._handed < batches

    def _move(self, epoch: int, position: int) -> None:
        before = self._here
        super()._move(epoch, position)
        if self.listener is None:  # nobody will ask for a place before this one
            self._onward.clear()
            self._ends = {number: end for number, end in self._ends.items() if number >= self._epoch}
        if self._here > before:
            self._onward[before] = self._here

    def _rest_of_epoch(self) -> Iterator[Any]:
        return _Rest(self)

    def used(self, epoch: int, position: int, *, marked: bool) -> None:
        """What was handed out up to here has reached a step: no state before it will be asked for."""
        self._ends = {number: end for number, end in self._ends.items() if number >= epoch}
        self._onward = {place: later for place, later in self._onward.items() if place >= (epoch, position)}

    def _resume_at(self, epoch: int, position: int, *, over: bool) -> None:
        self.set_epoch(epoch, position)
        self._onward.clear()
        self._ends = {epoch: position} if over else {}

    @abc.abstractmethod
    def _open(self) -> Iterator[Any]:
        """Begin the epoch, or go on with it at the position."""

    @abc.abstractmethod
    def _fetch(self, iterator: Iterator[Any]) -> Any:
        """The next batch, or the end."""

    def _mark_of(self, batch: Any) -> Mark | None:
        """Of the batch that comes after the position."""
        parts = digest(batch)
        return Mark(self._handed, parts, indices=False) if parts else None

    def _notify_drawing(self) -> None:
        """Numbers are about to be drawn that are training's: its generators are to be as they would be here."""
        if self.listener is not None:
            self.listener.on_seeds_needed()

    def end_workers(self) -> None:
        """End workers that persist; iterating starts new ones."""
        self._end_workers_in_time()
        if isinstance(self.loader, TorchDataLoader):
            end_persistent_workers(self.loader)

    def _announce(self, epoch: int) -> None:
        """Say which epoch comes, as loops otherwise do by hand; and that workers may start."""
        for one in parts(self.loader):
            if callable(set_epoch := getattr(one, "set_epoch", None)):
                set_epoch(epoch)
        if self.shield is not None:
            self.shield.workers_start()
        if isinstance(self.loader, TorchDataLoader):
            start_safely(self.loader)

    def _begin_now(self) -> dict[str, Any]:
        """The generators that an epoch begins with: the process's, and the loader's own."""
        return {"process": capture_generators(), **self._saved_own(self._own.at(self._epoch))}

    @contextlib.contextmanager
    def _as_at(self, begin: Mapping[str, Any]) -> Iterator[None]:
        """With the generators as an epoch began with them; the process's are put back afterwards."""
        with drawing_from(begin["process"]):
            self._put_back_own(begin)
            yield

    @property
    def _name(self) -> str:
        """What a user calls the inner loader by."""
        return str(getattr(self.loader, "__name__", type(self.loader).__name__))

    def _saved_own(self, held: dict[str, Any]) -> dict[str, Any]:
        """With what earlier releases look for."""
        return {"own": [generator.get_state() for generator in _own_generators(self.loader)], "held": held}

    def _put_back_own(self, saved: Mapping[str, Any], *, below: str = "") -> None:
        if "held" in saved:
            self._own.put_back(saved["held"], below=below, accepted="loader" in self.accepted)
        elif not below:  # of an earlier release: what samplers and data have as ``generator``
            for generator, state in zip(_own_generators(self.loader), saved["own"], strict=True):
                generator.set_state(state)

    def _identity(self) -> dict[str, Any]:
        """What the position is counted in."""
        data = getattr(self.loader, "dataset", None)
        return {
            "way": self.way,
            "loader": type(self.loader).__name__,
            "workers": workers_of(self.loader),
            # Where nothing tells how many samples there are, the number of batches does, unless it follows from a size.
            "size": _length(data) if data is not None else None if _batch_size(self.loader) else _length(self.loader),
        }

    def _has_another_length(self, state: Mapping[str, Any]) -> bool:
        """Whether the data have, and that is accepted.

        Raises:
            MismatchError: it is not.
        """
        if state.get("ranks") != ranks():  # they may share the data in another way
            return False
        over = state["over"] or not state["position"]
        return settle_length(state, self._identity(), over=over, accepted=self.accepted) is not state

    def _forget(self) -> None:
        self._ends, self._onward = {}, {}


class _Rest(Iterator[Any]):
    """The rest of an epoch. A batch that could not be fetched counts, and where the inner iterator goes on after it
    (torch's do) so does this; where that has nothing more to give, it ended with the error."""

    def __init__(self, loader: ForeignLoader) -> None:
        self._loader = loader
        self._iterator: Iterator[Any] | None = None
        self._notified = False
        self._failed = False  # the last fetch
        self._broken = False

    def __del__(self) -> None:  # before torch's iterator, which would wait for each worker
        self._loader._end_workers_in_time()

    def __next__(self) -> Any:
        loader = self._loader
        if self._broken:
            raise cannot_go_on()
        if self._iterator is None:
            if loader.exhausted:
                raise StopIteration
            # At the begin of an epoch, too, the boundary comes first: what is drawn from here on belongs to what
            # follows.
            if loader._handed == 0 and loader._more:
                self._tell()
            self._iterator = self._opened()
        if loader._more and not self._notified:
            self._tell()
        batch = self._fetched(self._iterator)
        if batch is END:
            loader._ends[loader._epoch] = loader._handed
            raise StopIteration
        if not self._notified:
            self._tell()
        self._notified = False
        loader.mark = loader._mark_of(batch)
        loader._handed += 1
        loader._notify_handed(batch)
        return batch

    def _tell(self) -> None:
        self._loader._notify_requested()
        self._notified = True

    def _opened(self) -> Iterator[Any]:
        try:
            return self._loader._open()
        except BaseException:
            self._broken = True
            raise

    def _fetched(self, iterator: Iterator[Any]) -> Any:
        loader = self._loader
        try:
            batch = loader._fetch(iterator)
        except BaseException:
            self._failed, self._notified = True, False
            place = loader._here
            loader._handed += 1
            loader._onward[place] = loader._here
            raise
        if batch is END and self._failed and not (loader.exhausted or _goes_on_after_errors(iterator)):
            self._broken = True
            raise cannot_go_on()
        self._failed = False
        return batch


def _goes_on_after_errors(iterator: Iterator[Any]) -> bool:
    """Whether it is one of torch's over map-style data, which end where there are no indices left."""
    return isinstance(iterator, _BaseDataLoaderIter) and iterator._dataset_kind == _DatasetKind.Map


@contextlib.contextmanager
def drawing_from(generators: Mapping[str, Any] | None) -> Iterator[None]:
    """With the process's generators like this, and as they were before afterwards; None: with these themselves."""
    if generators is None:
        yield
        return
    before = capture_generators()
    restore_generators(generators)
    try:
        yield
    finally:
        restore_generators(before)


def parts(loader: Any) -> list[Any]:
    """A loader and what it goes by: its samplers, and theirs, and its data set; each once."""
    samplers = [one for name in ("batch_sampler", "sampler") for one in with_inner(getattr(loader, name, None))]
    dataset = getattr(loader, "dataset", None)
    found = {id(one): one for one in (loader, *samplers, dataset) if one is not None}
    return list(found.values())


def workers_of(loader: Any) -> int:
    """How many worker processes torch starts for it."""
    return loader.num_workers if isinstance(loader, TorchDataLoader) else 0


def iterates_as_torch(loader: TorchDataLoader[Any]) -> bool:
    """Whether a subclass leaves iterating as it is."""
    kind = type(loader)
    return kind.__iter__ is TorchDataLoader.__iter__ and kind._get_iterator is TorchDataLoader._get_iterator


def _tells_length(loader: TorchDataLoader[Any]) -> bool:
    """Whether its length is that of an epoch: of iterable-style data torch estimates it, since workers hand out more
    where each has a smaller last batch; and subclasses may iterate in another way."""
    return not isinstance(loader.dataset, IterableDataset) and (is_torchdatas(loader) or iterates_as_torch(loader))


def _own_generators(loader: Any) -> list[torch.Generator]:
    found: list[torch.Generator] = []
    for one in parts(loader):
        generator = getattr(one, "generator", None)
        if isinstance(generator, torch.Generator) and not any(generator is other for other in found):
            found.append(generator)
    return found


def _batch_size(loader: Any) -> int | None:
    size = getattr(loader, "batch_size", None)
    return size if isinstance(size, int) else None


def _length(loader: Any) -> int | None:
    """None: it does not say. Those that have ``__len__`` may still have to say that they cannot."""
    if not isinstance(loader, Sized):
        return None
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None


def _shield_of(loader: Any) -> WorkerShield | None:
    """Put a shield before what its workers begin with; None: it has no workers of torch's."""
    if not workers_of(loader):
        return None
    if not isinstance(loader.worker_init_fn, WorkerShield):
        loader.worker_init_fn = WorkerShield(loader.worker_init_fn)
    return loader.worker_init_fn
