"""What other libraries see of a resumable loader: Accelerate learns of its last batch, others get one in torch's shape.

Accelerate, and transformers' Trainer, take a DataLoader apart, and make another one of its data set and its batch
sampler, from another place or a batch ahead. So the "batch sampler" of this one deals batches that are loaded already,
and its "data set" hands them through.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset, Sampler

from checkflow.core.errors import UnsupportedError


def known_to_accelerate(loader: Any, batches: Iterator[Any]) -> Iterator[Any]:
    """The loader's batches; while they are iterated Accelerate knows of it, where it is in use.

    ``accelerator.accumulate`` takes a step at the end of an epoch even where fewer batches than usual have been
    accumulated; ``accelerator.prepare`` gives back a resumable loader as it is, and would not know where that is.

    Args:
        loader: its ``end_of_dataloader`` says whether the batch that was handed out last is the last one, and its
            ``remainder`` how many samples were added to fill it.
    """
    return _Known(loader, batches) if "accelerate.state" in sys.modules else batches


class _Known(Iterator[Any]):
    def __init__(self, loader: Any, batches: Iterator[Any]) -> None:
        self._loader, self._batches = loader, batches
        self._known = False

    def __next__(self) -> Any:
        if not self._known:
            sys.modules["accelerate.state"].GradientState()._add_dataloader(self._loader)
            self._known = True
        try:
            return next(self._batches)
        except StopIteration:
            self._forget()
            raise

    def _forget(self) -> None:
        if self._known:
            self._known = False
            # Asked for anew: tests of users reset this shared state.
            if module := sys.modules.get("accelerate.state"):
                module.GradientState()._remove_dataloader(self._loader)

    def __del__(self) -> None:  # the loop was left in its middle
        self._forget()


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
    """See :meth:`.base.ResumableLoader.as_torch`, whose loader this is.

    Libraries that count epochs themselves also skip, after a resume, the batches of an epoch that were used: they
    expect every epoch to begin at its begin. For them, a used batch is a placeholder that loads nothing, and is an
    error where nobody skips it. Within ``Checkpointer.epochs`` an epoch is what is left of it.
    """
    # A generator of its own: torch draws a seed at each epoch's begin, which a resumed one would draw once more.
    return TorchDataLoader(
        _Loaded(loader),
        batch_sampler=_Batches(loader),
        collate_fn=_only,
        generator=torch.Generator(),
    )
