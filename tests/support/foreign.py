"""Loaders of many makes, as their users write them, and a loop that trains on them and can be gone on with."""

from __future__ import annotations

import itertools
import pickle
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

from checkflow.runtime.data.adapters.resumable import resumable
from checkflow.runtime.data.base import ResumableLoader
from checkflow.runtime.format import codec
from checkflow.runtime.job.progress import Progress

SIZE, BATCH, EPOCHS = 14, 4, 3


def drawn() -> list[float]:
    """What every generator gives."""
    return [random.random(), float(np.random.rand()), float(torch.rand(()))]


class MapData:
    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index), *drawn()], dtype=torch.float64)


class PlainMapData(MapData):
    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index)])


def share() -> range:
    """Of a worker, unevenly."""
    info = get_worker_info()
    return range(SIZE) if info is None else range(info.id, SIZE, info.num_workers)


class Stream(IterableDataset[torch.Tensor]):
    """Without a state; its order comes from a buffer that draws as it goes, and samples draw too."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        waiting, buffer = list(share()), []
        random.shuffle(waiting)
        while waiting or buffer:
            while waiting and len(buffer) < 4:
                buffer.append(waiting.pop())
            index = buffer.pop(int(torch.randint(len(buffer), ())))
            yield torch.tensor([float(index), *drawn()], dtype=torch.float64)


class StatefulStream(IterableDataset[torch.Tensor]):
    """With a state: torchdata's contract, on the data set."""

    def __init__(self) -> None:
        self.left: list[int] | None = None

    def __iter__(self) -> Iterator[torch.Tensor]:
        if self.left is None:
            self.left = list(share())
            random.shuffle(self.left)
        while self.left:
            index = self.left.pop(random.randrange(len(self.left)))
            yield torch.tensor([float(index), *drawn()], dtype=torch.float64)
        self.left = None

    def state_dict(self) -> dict[str, Any]:
        return {"left": self.left}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.left = None if state["left"] is None else list(state["left"])


class StatefulIteration:
    """An iterator with a state, over a data set that has none."""

    def __init__(self) -> None:
        self.indices, self.at = list(share()), 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        return self

    def __next__(self) -> torch.Tensor:
        if self.at == len(self.indices):
            raise StopIteration
        self.at += 1
        return torch.tensor([float(self.indices[self.at - 1]), *drawn()], dtype=torch.float64)

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class StreamOfIterations(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return StatefulIteration()


class StreamOfMaps(IterableDataset[torch.Tensor]):
    """Its iterator is no generator, and has no state."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        return map(PlainMapData().__getitem__, range(first, SIZE, step))


class OwnLoader:
    """A user's loader: an order for each epoch, a state that it changes in place, numbers drawn for each batch.

    Args:
        at_once: loaded at an epoch's end it begins the next one; otherwise it hands out the nothing that is left.
        length: whether it has one.
    """

    def __init__(self, *, at_once: bool = False) -> None:
        self.at_once = at_once
        self.state: dict[str, Any] = {"epoch": 0, "used": []}
        self.loaded = False

    def __iter__(self) -> Iterator[torch.Tensor]:
        used: list[int] = self.state["used"]
        over = len(used) >= SIZE
        if not self.loaded or (over and self.at_once):
            if used:
                self.state["epoch"] += 1
            used.clear()
        self.loaded = False
        order = torch.randperm(SIZE, generator=torch.Generator().manual_seed(self.state["epoch"])).tolist()
        while len(used) < SIZE:
            indices = order[len(used) : len(used) + BATCH]
            used += indices
            yield torch.tensor([[float(index), *drawn()] for index in indices], dtype=torch.float64)

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state, self.loaded = pickle.loads(pickle.dumps(state)), True


class OwnSizedLoader(OwnLoader):
    def __len__(self) -> int:
        return -(-SIZE // BATCH)


class LazyBatches:
    """Without a state: draws its order as it goes, from the generators that training draws from."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        left = list(range(SIZE))
        while left:
            take = [left.pop(int(torch.randint(len(left), ()))) for _ in range(min(BATCH, len(left)))]
            yield torch.tensor([[float(index), *drawn()] for index in take], dtype=torch.float64)


class OtherwiseIterated(TorchDataLoader[Any]):
    """A subclass that iterates in its own way: every batch twice."""

    def __iter__(self) -> Any:
        for batch in super().__iter__():
            yield batch
            yield batch + 0.5


class Unwrapped(TorchDataLoader[Any]):
    """A subclass whose iterators are torch's own."""

    def __iter__(self) -> Any:
        return super().__iter__()


class DrawnSequence(Sequence[torch.Tensor]):
    """Loads when it is asked, and draws."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: Any) -> Any:
        if index >= len(self):
            raise IndexError
        return torch.tensor([[float(index), *drawn()]], dtype=torch.float64)


class Failing(PlainMapData):
    """One sample cannot be read."""

    def __init__(self, index: int) -> None:
        self.index = index

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == self.index:
            raise OSError(f"sample {index}")
        return super().__getitem__(index)


class AskingStream(IterableDataset[torch.Tensor]):
    """Its workers read what they share from the data set that torch shows them."""

    size = SIZE

    def __iter__(self) -> Iterator[torch.Tensor]:
        info: Any = get_worker_info()
        return iter([torch.tensor(index) for index in range(info.id, info.dataset.size, info.num_workers)])


def by_epoch(epoch: int) -> Iterator[torch.Tensor]:
    order = torch.randperm(SIZE, generator=torch.Generator().manual_seed(epoch))
    return iter([order[begin : begin + BATCH].double().reshape(-1, 1) for begin in range(0, SIZE, BATCH)])


class Pipelines:
    """An iterator of the shape of DALI's DALIGenericIterator: it is its own iterator; it ends with StopIteration and
    goes on with its next epoch, in another order, after ``reset()``, which ``iter`` calls once it was used, or which it
    calls itself (``auto_reset``). ``checkpoints()`` are of its pipelines, which take one only when they are made."""

    def __init__(self, checkpoints: list[bytes] | None = None, *, auto_reset: bool = False) -> None:
        self.auto_reset = auto_reset
        self.epoch, self.at = (0, 0) if checkpoints is None else pickle.loads(checkpoints[0])
        self.consumed = checkpoints is not None
        self.rows = self._order()

    def _order(self) -> list[int]:
        return torch.randperm(SIZE, generator=torch.Generator().manual_seed(self.epoch)).tolist()

    def __iter__(self) -> Pipelines:
        if self.at and self.consumed:
            self.reset()
        return self

    def __len__(self) -> int:
        return -(-SIZE // BATCH)

    def __next__(self) -> list[dict[str, torch.Tensor]]:
        self.consumed = True
        if self.at >= SIZE:
            if self.auto_reset:
                self.reset()
            raise StopIteration
        indices = self.rows[self.at : self.at + BATCH]
        self.at += BATCH
        return [{"data": torch.tensor(indices, dtype=torch.float64).reshape(-1, 1)}]

    def reset(self) -> None:
        if self.at >= SIZE:  # otherwise DALI ignores it
            self.epoch, self.at = self.epoch + 1, 0
            self.rows = self._order()

    def checkpoints(self) -> list[bytes]:
        return [pickle.dumps((self.epoch, self.at))]


class PlainlyReset(Pipelines):
    """One that starts over by ``reset()`` alone, as the oldest do."""

    def __iter__(self) -> Pipelines:
        return self


def sequence() -> list[torch.Tensor]:
    return [torch.full((2, 1), float(number)) for number in range(5)]


def iterable_loader(dataset: Any, workers: int, **options: Any) -> TorchDataLoader[Any]:
    return TorchDataLoader(dataset, BATCH, num_workers=workers, **_forked(workers), **options)


def stateful_loader(dataset: Any, workers: int, **options: Any) -> StatefulDataLoader[Any]:
    return StatefulDataLoader(dataset, BATCH, num_workers=workers, **_forked(workers), **options)


def _forked(workers: int) -> dict[str, Any]:
    return {"multiprocessing_context": "fork"} if workers else {}


#: What is in one process: by name, what makes the loader as its user has it.
KINDS: dict[str, Callable[[], Any]] = {
    "torch, map-style": lambda: TorchDataLoader(MapData(), BATCH, shuffle=True),  # type: ignore[arg-type]
    "torch, map-style, generator": lambda: TorchDataLoader(
        MapData(), BATCH, shuffle=True, generator=torch.Generator().manual_seed(3)
    ),  # type: ignore[arg-type]
    "torchdata, map-style": lambda: stateful_loader(MapData(), 0, shuffle=True),
    "torchdata, map-style, generator": lambda: stateful_loader(
        MapData(), 0, shuffle=True, generator=torch.Generator().manual_seed(3)
    ),
    "torchdata, iterable-style": lambda: stateful_loader(StatefulStream(), 0),
    "own": OwnLoader,
    "own, at once": lambda: OwnLoader(at_once=True),
    "own, sized": OwnSizedLoader,
    "own, sized, at once": lambda: OwnSizedLoader(at_once=True),
    "torch, iterable-style": lambda: iterable_loader(Stream(), 0),
    "torch, iterable-style with state": lambda: iterable_loader(StatefulStream(), 0),
    "torch, iterable-style, iterator with state": lambda: iterable_loader(StreamOfIterations(), 0),
    "torch, iterable-style, iterator without state": lambda: iterable_loader(StreamOfMaps(), 0),
    "torchdata, iterable-style without state": lambda: stateful_loader(StreamOfMaps(), 0),
    "torch, otherwise iterated": lambda: OtherwiseIterated(MapData(), BATCH, shuffle=True),  # type: ignore[arg-type]
    "list": sequence,
    "sequence that draws": DrawnSequence,
    "iterable": LazyBatches,
    "function": lambda: lambda: iter(LazyBatches()),
    "function of the epoch": lambda: by_epoch,
    "DALI, starts over": Pipelines,
    "DALI, starts over by itself": lambda: Pipelines(auto_reset=True),
    "DALI, starts over by reset": PlainlyReset,
    "DALI, checkpoints": lambda: lambda checkpoints: Pipelines(checkpoints),
    "DALI, checkpoints, starts over by itself": lambda: lambda checkpoints: Pipelines(checkpoints, auto_reset=True),
}

#: With worker processes.
WORKERS: dict[str, Callable[[], Any]] = {
    "torch, map-style": lambda: TorchDataLoader(
        MapData(), BATCH, shuffle=True, num_workers=2, multiprocessing_context="fork"
    ),  # type: ignore[arg-type]
    # What its workers draw is in no state of torchdata's.
    "torchdata, map-style": lambda: stateful_loader(PlainMapData(), 2, shuffle=True),
    "torchdata, persistent": lambda: stateful_loader(PlainMapData(), 2, shuffle=True, persistent_workers=True),
    "torch, otherwise iterated": lambda: Unwrapped(
        MapData(), BATCH, shuffle=True, num_workers=1, multiprocessing_context="fork", persistent_workers=True
    ),  # type: ignore[arg-type]
    "torch, iterable-style": lambda: iterable_loader(Stream(), 2),
    "torch, iterable-style, persistent": lambda: iterable_loader(Stream(), 2, persistent_workers=True),
    "torch, iterable-style, iterator without state": lambda: iterable_loader(StreamOfMaps(), 2),
    "torchdata, iterable-style without state": lambda: stateful_loader(StreamOfMaps(), 2),
    "torchdata, now and then": lambda: stateful_loader(StreamOfMaps(), 2, snapshot_every_n_steps=2),
    "torch, iterable-style with state": lambda: iterable_loader(StatefulStream(), 2),
    "torch, with state, persistent": lambda: iterable_loader(StatefulStream(), 2, persistent_workers=True),
    "torch, iterator with state": lambda: iterable_loader(StreamOfIterations(), 2, worker_init_fn=print_nothing),
}


def print_nothing(worker: int) -> None:
    """A ``worker_init_fn``: the user's own data set is what a worker finds."""
    info = get_worker_info()
    assert info is not None
    assert isinstance(info.dataset, StreamOfIterations)


def fetched_ahead(batches: Iterable[Any], ahead: int) -> Iterator[Any]:
    """So many are fetched before one is handed out, and one more each time."""
    iterator = iter(batches)
    waiting = list(itertools.islice(iterator, ahead + 1))
    while waiting:
        yield waiting.pop(0)
        waiting += itertools.islice(iterator, 1)


class Loop:
    """A training loop as Checkpointer follows it, with a capture at each boundary.

    Args:
        ahead: how many batches it fetches ahead of the one that it uses; with ``step()`` then. None: without.
        counted: whether ``epochs()`` counts its epochs.
    """

    def __init__(self, loader: ResumableLoader, *, ahead: int | None = None, counted: bool = True) -> None:
        self.loader, self.ahead, self.counted = loader, ahead, counted
        self.progress = Progress(loader)
        self.captures: list[tuple[int, bytes]] = []  # batches used before each, and what was captured
        self.rows: list[Any] = []
        self._stepped = False
        loader.listener = self
        loader.epochs_counted_elsewhere = counted

    def on_seeds_needed(self) -> None:
        self.progress.restore_generators()

    def on_batch_requested(self) -> None:
        if self.ahead is None:
            self._boundary()

    def on_batch_handed(self, batch: Any) -> None:
        self.progress.batch_handed()
        self.progress.restore_generators()

    def _boundary(self) -> None:
        if self._stepped:
            self._stepped = False
            if self.ahead is None:
                self.progress.count()
            self.captures.append((len(self.rows), codec.encode(self.progress.capture())))

    def go_on(self, capture: bytes) -> None:
        self.progress.resume(codec.decode(capture))

    def run(self, epochs: int, *, over: int = 0, take: int | None = None, taken: int = 0) -> None:
        """Train for so many epochs.

        Args:
            over: epochs that are, if the loop counts them.
            take: at most so many batches of each.
            taken: of the first.
        """
        if not self.counted and self.loader.exhausted:  # its boundary was when the next epoch was begun
            assert list(self.loader) == []
        while (self.progress.epoch if self.counted else over) < epochs:
            if self.counted:
                self.loader.set_epoch(self.progress.epoch, self.progress.position)
                if self.progress.position == 0 or self.loader.exhausted:
                    self.progress.restore_generators()
            for batch in itertools.islice(self._batches(), None if take is None else take - taken):
                self._use(batch)
            taken, over = 0, over + 1
            self.rows.append(("validation", drawn()))
            if self.counted:
                self.progress.end_epoch()
                if self.ahead is None and self._stepped:
                    self._stepped = False
                    self.captures.append((len(self.rows), codec.encode(self.progress.capture())))
        self.progress.restore_generators()

    def _batches(self) -> Iterator[Any]:
        return iter(self.loader) if self.ahead is None else fetched_ahead(self.loader, self.ahead)

    def run_through(self, batches: int) -> None:
        """Until so many rows are used, whatever epochs they are of."""
        assert self.ahead is not None
        missing = batches - len(self.rows)
        for batch in itertools.islice(fetched_ahead(self._endless(), self.ahead), missing):
            self._use(batch)

    def _endless(self) -> Iterator[Any]:
        while True:
            yield from self.loader

    def _use(self, batch: Any) -> None:
        data = batch[0]["data"] if isinstance(batch, list) else batch
        self.rows.append((data.tolist(), drawn()))
        self._stepped = True
        if self.ahead is not None:
            self.progress.count(1)
            self._boundary()


def seeded(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def make(kind: Callable[[], Any]) -> ResumableLoader:
    return resumable(kind())
