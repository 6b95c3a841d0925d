"""From an epoch's steps to its batches, or errors in their places: through torch's loader, or made here."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any, NoReturn

import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import Dataset, Sampler, get_worker_info

from checkflow.runtime.data.order import RankBatch, SampleSteps, Share, Steps
from checkflow.runtime.data.seeded_dataset import Batch, SeededDataset

_LABEL = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"  # under which profilers show torch's


class Feed(Sampler[Any]):
    """What batches are made from; torch's loader fetches ahead of what it hands out."""

    def __init__(self) -> None:
        self.begin(SampleSteps((), 1, Share(), "even"), 0, 0)

    def begin(self, steps: Steps, seed: int, epoch: int) -> None:
        """The next iteration is this epoch's."""
        self.steps, self._seed, self._epoch = steps, seed, epoch
        self.fetched: deque[RankBatch] = deque()  # steps that were not handed out

    @property
    def more(self) -> bool:
        """Whether there is a step that was not handed out."""
        return bool(self.fetched) or self.steps.more

    def __iter__(self) -> Iterator[Batch]:
        fetched = self.fetched
        for step in self.steps:
            fetched.append(step)
            yield self._seed, self._epoch, step.indices


class Failure:
    """An error in place of a batch: who asks for the next one gets the next one."""

    def __init__(self, error: Exception) -> None:
        worker = get_worker_info()
        self._error = None if worker else error
        self._wrapped: ExceptionWrapper | None = None
        if worker:  # a traceback stays in its process: it becomes a part of the error's text, as torch does it
            self._wrapped = ExceptionWrapper(where=f"in DataLoader worker process {worker.id}")  # type: ignore[no-untyped-call]

    def raise_it(self) -> NoReturn:
        error = self._take()
        try:
            raise error
        except StopIteration:  # a loop would take it for the epoch's end
            raise RuntimeError("a sample, or collate_fn, raised StopIteration") from error
        finally:
            # A frame that refers to the error that passed it is a cycle: the collector would have to take torch's
            # iterator, whose workers then end slowly.
            del error

    def _take(self) -> Exception:
        if self._wrapped is not None:
            try:
                self._wrapped.reraise()  # type: ignore[no-untyped-call]
            except Exception as made:  # noqa: BLE001 - what it is there for
                return made.with_traceback(None)
        error, self._error = self._error, None
        assert error is not None
        return error


class Caught(Dataset[Any]):
    """Batches, and errors in their places: what is raised beside them is of torch's loader or of a sampler."""

    def __init__(self, dataset: SeededDataset) -> None:
        self._dataset = dataset

    def __getitems__(self, batch: Batch) -> Any:
        try:
            return self._dataset.__getitems__(batch)
        except Exception as error:  # noqa: BLE001 - raised again where the batch is handed out
            return Failure(error)


def made_here(feed: Feed, dataset: Caught) -> Iterator[Any]:
    """The batches, made in this process, as torch's iterator without workers makes them, whose own work is spared."""

    def make(batch: Batch) -> Any:
        if not torch._C._autograd._profiler_enabled():
            return dataset.__getitems__(batch)
        with torch.autograd.profiler.record_function(_LABEL):
            return dataset.__getitems__(batch)

    return map(make, feed)
