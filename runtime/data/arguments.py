"""What checkflow.DataLoader is called with: read, and refused where it contradicts itself, as torch refuses it."""

from __future__ import annotations

import operator
import reprlib
from collections.abc import Iterable, Mapping, Sized
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from checkflow.core.errors import UnsupportedError
from checkflow.runtime.data.order import TAILS, Share, Tail
from checkflow.runtime.data.samplers import with_inner


def read_seed(seed: Any) -> int | None:
    if seed is None:
        return None
    number = _whole(seed)
    if number is None or not -(2**63) <= number < 2**63:
        raise ValueError(f"seed must be a whole number of 64 bits, or None, not {seed!r}")
    return number


def _whole(value: Any) -> int | None:
    """A whole number, NumPy's too; None: it is none, or a bool."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def read_workers(num_workers: Any) -> int:
    number = _whole(num_workers)
    if number is None or number < 0:
        raise ValueError(f"num_workers must be a whole number of at least 0, not {num_workers!r}")
    return number


def refuse_other_types(
    *, sampler: Any, batch_sampler: Any, generator: Any, flags: Mapping[str, Any], **calls: Any
) -> None:
    """What torch takes, and fails at in the middle of an epoch.

    Args:
        flags: those that say yes or no; None: what the default is.
        calls: functions, or None.
    """
    for name, order in (("sampler", sampler), ("batch_sampler", batch_sampler)):
        if order is not None and (isinstance(order, str | bytes) or not _can_be_iterated(order)):
            raise ValueError(
                f"{name} must give an epoch's indices when it is iterated, or be None, not {_short(order)}"
            )
    if generator is not None and not isinstance(generator, torch.Generator):
        raise ValueError(f"generator must be a torch.Generator, or None, not {_short(generator)}")
    for name, function in calls.items():
        if function is not None and not callable(function):
            raise ValueError(f"{name} must be a function, or None, not {_short(function)}")
    for name, flag in flags.items():
        if flag is not None and not isinstance(flag, bool | np.bool_) and _whole(flag) not in (0, 1):
            raise ValueError(f"{name} must be True or False, not {_short(flag)}")


def _can_be_iterated(order: Any) -> bool:
    return hasattr(order, "__iter__") or hasattr(order, "__getitem__")


def _short(value: object) -> str:
    return reprlib.repr(value)


def refuse_dealing(order: Any) -> None:
    """A sampler that gives each rank its own, where this loader would deal that to the ranks again."""
    for one in with_inner(order):
        if isinstance(ranks := getattr(one, "num_replicas", 1), int) and ranks > 1:
            raise ValueError(
                f"{type(one).__name__} deals to the ranks already, and this loader would deal its part again: pass a "
                "sampler of the whole order, or, where it is to deal, rank=0, world_size=1"
            )


def given_share(rank: int | None, world_size: int | None) -> Share:
    if rank is None or world_size is None:
        raise ValueError("rank and world_size belong together")
    for name, value in (("rank", rank), ("world_size", world_size)):
        if _whole(value) is None:
            raise ValueError(f"{name} must be a whole number, not {value!r}")
    return Share(rank, world_size)


def refuse_contradictions(
    batch_size: int | None, shuffle: bool | None, sampler: Any, batch_sampler: Any, *, drop_last: bool,
    tail: str | None, timeout: float, workers: int, in_order: bool,
) -> None:  # fmt: skip
    """As torch refuses them, and those of what torch has not."""
    if timeout and not workers:
        raise ValueError(f"timeout={timeout!r} is for batches of workers, and num_workers is 0")
    if batch_size is not None and (isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1):
        raise ValueError(f"batch_size must be a whole number of at least 1, or None, not {batch_size!r}")
    if tail is not None and tail not in TAILS:
        raise ValueError(f"tail must be one of {', '.join(TAILS)}, not {tail!r}")
    if drop_last and tail not in (None, "drop"):
        raise ValueError(f"drop_last=True and tail={tail!r} exclude each other")
    if sampler is not None and shuffle:
        raise ValueError("sampler and shuffle exclude each other")
    if batch_sampler is not None and (batch_size != 1 or shuffle or sampler is not None or drop_last):
        raise ValueError("batch_sampler excludes batch_size, shuffle, sampler and drop_last")
    if batch_size is None and batch_sampler is None and drop_last:
        raise ValueError("batch_size=None and drop_last exclude each other")
    if workers > 1 and not in_order:
        raise ValueError("in_order=False and several workers exclude each other: a position says which came before")


def refuse_other_data(dataset: Any) -> None:
    """What is not asked for its samples one by one."""
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        raise UnsupportedError(
            "checkflow.DataLoader takes map-style data (with __len__ and __getitem__); for others: "
            "checkflow.resumable(torch.utils.data.DataLoader(...))"
        )


@dataclass(frozen=True, slots=True)
class Order:
    """Where an epoch's order comes from, and who takes what of it.

    Attributes:
        sampler: None: the loader makes the order itself, or takes that of a batch sampler.
        seed: None: drawn for each epoch.
        share: None: as torch.distributed says when an epoch begins.
    """

    sampler: Iterable[Any] | None
    shuffle: bool
    seed: int | None
    tail: Tail
    share: Share | None


def without_known_sampler(order: Order, dataset: Any, generator: torch.Generator | None) -> Order:
    """Without a sampler of torch's own, where the loader makes the same order itself."""
    sampler = order.sampler
    if type(sampler) is SequentialSampler and sampler.data_source is dataset:
        return replace(order, sampler=None)
    if type(sampler) is RandomSampler and sampler.data_source is dataset:
        plain = not sampler.replacement and sampler._num_samples is None
        if plain and sampler.generator is generator:
            return replace(order, sampler=None, shuffle=True)
    if type(sampler) is DistributedSampler and sampler.dataset is dataset:
        share = Share(sampler.rank, sampler.num_replicas)
        if order.share in (None, share):  # otherwise it is to deal itself
            return Order(
                sampler=None,
                shuffle=sampler.shuffle,
                seed=sampler.seed if order.seed is None else order.seed,
                tail="drop" if sampler.drop_last else order.tail,
                share=share,
            )
    return order


def refuse_no_order(order: Order, batch_sampler: Any, dataset: Any) -> None:
    """Where nothing says which samples an epoch has, or two would deal them to the ranks."""
    if order.sampler is None and batch_sampler is None and not isinstance(dataset, Sized):
        raise ValueError(
            f"the data set, a {type(dataset).__name__}, has no __len__, and there is no sampler: nothing says "
            "which samples an epoch has; give it __len__, or pass sampler= or batch_sampler="
        )
    if order.share != Share():
        refuse_dealing(order.sampler if batch_sampler is None else batch_sampler)
