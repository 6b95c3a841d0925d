"""Samplers of users, iterated so that an epoch's order follows from a seed and the epoch alone."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from checkflow.runtime.data.process_generators import (
    generator_states,
    generators_kept,
    seed_generators,
    set_generator_states,
)

# A sampler is asked for so many at a time, since generators are changed around each time.
BLOCK = 4096


def iterate_sampler(sampler: Iterable[Any], seed: int, epoch: int, *, block: int = BLOCK) -> Iterator[Any]:
    """What it gives in this epoch, drawn from generators of its own: those of the process are left as they were.

    It may draw from Python's, NumPy's and torch's generators, or from a ``generator`` of its own, which is seeded, and
    so are those of a sampler that it goes by (``sampler``). ``set_epoch`` is called where there is one. It may be
    infinite: it is asked for ``block`` at a time.
    """
    with generators_kept():
        seed_generators(seed)
        for one in with_inner(sampler):
            if callable(set_epoch := getattr(one, "set_epoch", None)):
                set_epoch(epoch)
            if isinstance(generator := getattr(one, "generator", None), torch.Generator):
                generator.manual_seed(seed)
        iterator = iter(sampler)
        own = generator_states()
    yield from in_blocks(iterator, own, block)


def in_blocks(iterator: Iterator[Any], own: tuple[Any, ...], block: int) -> Iterator[Any]:
    """What an iterator gives, drawn from generators with these states, ``block`` at a time."""
    found = [None] * block
    while len(found) == block:
        with generators_kept():
            set_generator_states(own)
            found = list(itertools.islice(iterator, block))
            own = generator_states()
        yield from found


def with_inner(sampler: Any) -> Iterator[Any]:
    """It, and the samplers that it goes by."""
    seen: list[Any] = []
    while sampler is not None and not any(sampler is one for one in seen):
        seen.append(sampler)
        yield sampler
        sampler = getattr(sampler, "sampler", None)
