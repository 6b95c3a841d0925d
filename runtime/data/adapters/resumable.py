"""checkflow.resumable: which loader goes on in which way."""

from __future__ import annotations

import importlib.util
import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch.utils.data import BatchSampler, IterableDataset, IterDataPipe
from torch.utils.data import DataLoader as TorchDataLoader

from checkflow.core.errors import UnsupportedError
from checkflow.runtime.data.adapters.base import iterates_as_torch
from checkflow.runtime.data.adapters.replay import SkippingLoader
from checkflow.runtime.data.adapters.stateful import StatefulLoader, StateLoader
from checkflow.runtime.data.adapters.torchdata import loses_state
from checkflow.runtime.data.adapters.worker_streams import ShownDataset, WorkerStream
from checkflow.runtime.data.base import ResumableLoader
from checkflow.runtime.data.loader import DataLoader
from checkflow.runtime.data.order import Tail
from checkflow.runtime.data.process_generators import Reseed
from checkflow.runtime.data.repeat.own_state import has_state

logger = logging.getLogger("checkflow")
_Loader = TypeVar("_Loader", bound=DataLoader)


def resumable(
    loader: Any,
    *,
    seed: int | None = None,
    reseed: Reseed | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    tail: Tail | None = None,
) -> ResumableLoader:
    """Make a loader resumable, for ``Checkpointer``.

    Args:
        loader: what comes, and how it goes on after a resume:

            - torch's ``DataLoader`` over map-style data: becomes a ``checkflow.DataLoader`` with all its settings. It
              gives the same batches after the same ``torch.manual_seed``, bit for bit where samples draw no numbers.
              A ``generator``, or a sampler of the user's own that draws, is seeded for each epoch: another order.
            - a loader with ``state_dict`` and ``load_state_dict`` (:class:`.stateful.StatefulLoader`; torchdata's,
              MosaicML's, your own): by its own state. What torchdata's workers draw from their generators is not in it.
              A state that leaves out what follows from it (a shuffle buffer of Hugging Face datasets, a sampler in
              torchdata's nodes) is not used: the epoch's batches up to the position are fetched again.
            - torch's ``DataLoader`` over iterable-style data: as torchdata's ``StatefulDataLoader``, if torchdata is
              installed: by the data set's state if it has one. Otherwise the epoch's batches up to the position are
              fetched again, and thrown away.
            - a list of batches, or another iterable: likewise, by fetching again. Each iteration must give an epoch.
            - a function that returns such an iterable; it is called for each epoch, with its number if it has a
              parameter: ``lambda epoch: batches(epoch)``.
            - DALI's iterators, from a function with a parameter ``checkpoints``, which is None, or a list of one
              checkpoint (bytes) for each pipeline: ``enable_checkpointing=True``, ``pipeline(checkpoint=…)``. By these.
              An iterator itself goes on by fetching again, from the first epoch on.

            The loader given is used from here on, and is not to be iterated elsewhere.
        seed, reseed, rank, world_size, tail: as of ``checkflow.DataLoader``, for map-style data.

    Raises:
        UnsupportedError: an iterator that can be used once only, or what is no loader.
        ValueError: an argument that is for map-style data, with another loader.
    """
    options = {"seed": seed, "reseed": reseed, "rank": rank, "world_size": world_size, "tail": tail}
    if isinstance(loader, ResumableLoader):
        made: ResumableLoader = loader
    elif isinstance(loader, StatefulLoader):
        _refuse_any_order(loader)
        made = _by_state(loader)
    elif isinstance(loader, TorchDataLoader):
        plain = iterates_as_torch(loader)
        if plain and not isinstance(loader.dataset, IterableDataset):
            return of_map_style(
                loader, DataLoader, seed=seed, reseed=reseed, rank=rank, world_size=world_size, tail=tail
            )
        _refuse_any_order(loader)
        made = _of_iterable_style(loader) if plain else SkippingLoader(loader)
    else:
        made = _of_another(loader)
    if odd := [name for name, value in options.items() if value is not None]:
        if made is loader:
            raise ValueError(f"{', '.join(odd)}: this {type(loader).__name__} is resumable already; make it with these")
        raise ValueError(f"{', '.join(odd)}: for torch's DataLoader over map-style data, not for {_name(loader)}")
    return made


def _settings(loader: TorchDataLoader[Any]) -> dict[str, Any]:
    """Of every torch loader."""
    return {
        "num_workers": loader.num_workers,
        "collate_fn": loader.collate_fn,
        "pin_memory": loader.pin_memory,
        "timeout": loader.timeout,
        "worker_init_fn": loader.worker_init_fn,
        "multiprocessing_context": loader.multiprocessing_context,
        "generator": loader.generator,
        "prefetch_factor": loader.prefetch_factor,
        "persistent_workers": loader.persistent_workers,
        "pin_memory_device": loader.pin_memory_device,
        "in_order": loader.in_order,
    }


def of_map_style(loader: TorchDataLoader[Any], kind: Callable[..., _Loader], **options: Any) -> _Loader:
    """torch's loader over map-style data as one of ours, with all its settings."""
    batch_sampler: Any = loader.batch_sampler
    if type(batch_sampler) is BatchSampler:  # torch's own, made by the loader or by the user
        order: dict[str, Any] = {
            "batch_size": batch_sampler.batch_size,
            "sampler": batch_sampler.sampler,
            "drop_last": batch_sampler.drop_last,
        }
    elif batch_sampler is not None:
        order = {"batch_sampler": batch_sampler}
    else:
        order = {"batch_size": None, "sampler": loader.sampler}
    return kind(loader.dataset, **order, **_settings(loader), **options)


def _refuse_any_order(loader: Any) -> None:
    if isinstance(loader, TorchDataLoader) and loader.num_workers > 1 and not loader.in_order:
        raise UnsupportedError(
            "in_order=False hands out batches as workers happen to have them: a position among these means nothing; "
            "make the loader with in_order=True"
        )


def _by_state(loader: StatefulLoader) -> ResumableLoader:
    """By its state, unless that does not hold all that its batches follow from."""
    return SkippingLoader(loader) if loses_state(loader) else StateLoader(loader)


def _of_iterable_style(loader: TorchDataLoader[Any]) -> ResumableLoader:
    dataset = loader.dataset
    stateless = not has_state(dataset) and inspect.isgeneratorfunction(getattr(type(dataset), "__iter__", None))
    if (loader.num_workers == 0 and stateless) or loses_state(loader):
        return SkippingLoader(loader)  # as torchdata would, but for what is drawn meanwhile
    if importlib.util.find_spec("torchdata") is None:
        logger.info(
            "the iterable-style data of this loader has no state without torchdata (pip install torchdata): a resume "
            "fetches the batches of its epoch up to the position again, which takes as long as it took to load them"
        )
        return SkippingLoader(loader)
    from torchdata.stateful_dataloader import StatefulDataLoader

    settings = _settings(loader)
    if loader.num_workers and not isinstance(dataset, IterDataPipe):
        dataset = WorkerStream(dataset, persistent=loader.persistent_workers)  # type: ignore[arg-type]
        settings["worker_init_fn"] = ShownDataset(settings["worker_init_fn"])
    return StateLoader(StatefulDataLoader(dataset, loader.batch_size, drop_last=loader.drop_last, **settings))


def _of_another(loader: Any) -> ResumableLoader:
    if isinstance(loader, Iterator):
        if not callable(getattr(loader, "reset", None)):
            raise UnsupportedError(
                f"{_name(loader)} can be iterated once only, and a resume could not begin it again: pass a function "
                "that makes it, or give it state_dict and load_state_dict"
            )
        if callable(getattr(loader, "checkpoints", None)):
            logger.info(
                "a resume takes %s through all its batches again; pass checkflow.resumable a function with a parameter "
                "'checkpoints' that makes it, and a resume uses its own checkpoints", _name(loader),
            )  # fmt: skip
        return SkippingLoader(loader)
    if isinstance(loader, Iterable) and not isinstance(loader, Mapping | str | bytes | torch.Tensor):
        return SkippingLoader(loader)
    if callable(loader) and not isinstance(loader, type):
        parameters = list(inspect.signature(loader).parameters.values())
        if any(parameter.name == "checkpoints" for parameter in parameters):
            return StateLoader(CheckpointedIterator(loader))
        return SkippingLoader(_Made(loader, counted=any(_is_positional(parameter) for parameter in parameters)))
    raise UnsupportedError(
        f"{_name(loader)} is no loader: pass one that is iterated once an epoch, a function that makes such, or make a "
        "checkflow.DataLoader of a data set"
    )


def _is_positional(parameter: inspect.Parameter) -> bool:
    required = parameter.default is inspect.Parameter.empty or parameter.name == "epoch"
    return required and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)


def _name(loader: object) -> str:
    kind = type(loader).__name__
    return f"{'an' if kind[0] in 'AEIOUaeiou' else 'a'} {kind}"


class _Made:
    """What a function makes for each epoch.

    Args:
        counted: whether it takes the epoch's number.
    """

    def __init__(self, make: Callable[..., Iterable[Any]], *, counted: bool) -> None:
        self._make, self._counted = make, counted
        self.__name__ = getattr(make, "__qualname__", type(make).__name__)
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        made = self._make(self._epoch) if self._counted else self._make()
        if not isinstance(made, Iterable) and not hasattr(made, "__getitem__"):
            raise TypeError(
                f"{self.__name__}, which checkflow.resumable was given to make a loader for each epoch, returned "
                f"{_name(made)}, which cannot be iterated"
            )
        return iter(made)


class CheckpointedIterator:
    """An iterator with ``checkpoints()``, as DALI's framework iterators have over pipelines with
    ``enable_checkpointing=True``: a list of bytes, one for each pipeline, of the batches that were handed out.

    A pipeline takes a checkpoint only when it is made, so that a resume makes the iterator anew. (DALI's documentation,
    "Checkpointing", and nvidia/dali/plugin/base_iterator.py.) Tested with an iterator of this shape, not with DALI.

    Args:
        make: called with None, or with such a list.
    """

    def __init__(self, make: Callable[..., Any]) -> None:
        self._make = make
        self._iterator: Any = None

    def _made(self) -> Any:
        if self._iterator is None:
            self._iterator = self._make(checkpoints=None)
        return self._iterator

    def __iter__(self) -> Iterator[Any]:
        return iter(self._made())

    def __len__(self) -> int:
        return len(self._made())

    def state_dict(self) -> dict[str, Any]:
        return {"checkpoints": [bytes(checkpoint) for checkpoint in self._made().checkpoints()]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._iterator = None  # its pipelines hold GPU memory
        self._iterator = self._make(checkpoints=list(state["checkpoints"]))
