"""A resumable loader in the shape of torch's, for libraries that take nothing else (Accelerate, transformers' Trainer).

They take a DataLoader apart, and make another one of its data set and its batch sampler that hands out the same batches
from another place, or a batch ahead. So this one's "batch sampler" deals batches that are loaded already, and its "data
set" hands them through. The resumable loader loads them, with workers of its own.

Libraries that count epochs themselves also skip, after a resume, the batches of an epoch that were used: they expect
every epoch to begin at its begin. For them, what was used is dealt as a name, loads nothing, and is an error where
nobody skips it. Within ``Checkpointer.epochs`` an epoch is what is left of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset, Sampler

from checkflow.core.errors import UnsupportedError


@dataclass(frozen=True, slots=True)
class _Used:
    """In the place of a batch that was used before the job resumed."""

    epoch: int
    number: int


class _Loaded(Dataset[Any]):
    """Hands batches through; as long as the data set that they come from."""

    def __init__(self, loader: Any) -> None:
        self._dataset = _setting(loader, "dataset", None)
        self._name = type(loader).__name__

    def __len__(self) -> int:
        if self._dataset is None:
            raise TypeError(f"how many samples an epoch of this {self._name} has is not known")
        return len(self._dataset)

    def __getitem__(self, batch: Any) -> Any:
        if isinstance(batch, _Used):
            raise UnsupportedError(
                f"batch {batch.number} of epoch {batch.epoch} was used before this job resumed, and nothing skips it: "
                "iterate checkpointer.epochs(), or have the library resume and skip too (docs/how-to/integrations.md)"
            )
        return batch


class _Batches(Sampler[Any]):
    """Deals the resumable loader's batches, each in a list of its own."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self.batch_size = _setting(loader, "batch_size", None)  # Accelerate asks for both
        self.drop_last = _setting(loader, "drop_last", False)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[list[Any]]:
        loader = self._loader
        if loader.listener is not None:
            loader.listener.on_fetching_ahead()
        if not loader.epochs_counted_elsewhere and loader.resumed:
            used = loader.used_batches()
            if loader.exhausted or used == loader.batches:  # who counts epochs has begun the next one
                loader.set_epoch(loader.epoch + 1, 0)
                used = 0
            for number in range(used):
                yield [_Used(loader.epoch, number)]
        for batch in loader.rest():
            yield [batch]


def _setting(loader: Any, name: str, otherwise: Any) -> Any:
    """Of the loader; or of the one of another make that it goes by."""
    return getattr(loader, name, getattr(getattr(loader, "loader", None), name, otherwise))


def _only(batches: list[Any]) -> Any:
    (batch,) = batches
    return batch


def torch_view(loader: Any) -> TorchDataLoader[Any]:
    """See :meth:`.base.ResumableLoader.as_torch`, whose loader this is."""
    # A generator of its own: torch draws a seed at each epoch's begin, which a resumed one would draw once more.
    return TorchDataLoader(
        _Loaded(loader),
        batch_sampler=_Batches(loader),
        collate_fn=_only,
        generator=torch.Generator(),
    )
