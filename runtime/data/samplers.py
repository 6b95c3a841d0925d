"""Samplers of users, iterated so that an epoch's order follows from a seed and the epoch alone."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from checkflow.runtime.data.process_generators import (
    generator_states,
    generators_kept,
    seed_generators,
    set_generator_states,
)
from checkflow.runtime.data.repeat.own_state import OwnState, has_state
from checkflow.runtime.format import codec

# A sampler is asked for so many at a time, since generators are changed around each time.
BLOCK = 4096


class SamplerStates:
    """What a sampler has as each epoch begins, beside what it is seeded with: its order can be made again from that.

    That is generators that lie in its attributes, counts of its passes, and its own state (``state_dict``), where no
    ``set_epoch`` says which epoch comes.

    Args:
        dataset: what it samples, which is no part of it.
    """

    def __init__(self, sampler: Any, dataset: Any) -> None:
        self._samplers = list(with_inner(sampler))
        self._stateful = [one for one in self._samplers if has_state(one) and not callable(_set_epoch(one))]
        seeded = [one.generator for one in self._samplers if _is_seeded(one)]
        self._own = OwnState({"sampler": sampler}, [dataset, *seeded])
        self._begun: dict[int, dict[str, Any]] = {}  # by epoch

    def begin(self, epoch: int) -> None:
        """Its next pass is this epoch's, perhaps once more."""
        if (begun := self._begun.get(epoch)) is not None:
            self._put(begun)
        else:
            self._begun[epoch] = self._at(epoch)

    def used(self, epoch: int) -> None:
        """No epoch before it will be asked for."""
        self._begun = {number: state for number, state in self._begun.items() if number >= epoch}

    def state_from(self, epoch: int) -> dict[str, Any]:
        """What a run that goes on in this epoch needs."""
        begun = {number: state for number, state in self._begun.items() if number >= epoch}
        if epoch not in begun:
            begun[epoch] = self._at(epoch)
        return {"samplers": begun} if any(begun.values()) else {}

    def put_back(self, state: Mapping[str, Any], *, accepted: bool) -> None:
        """Go on with what ``state_from`` gave.

        Raises:
            MismatchError: a generator is not there, and that is not ``accepted``.
        """
        self._begun = {int(number): begun for number, begun in state.get("samplers", {}).items()}
        if self._begun:  # the epoch that goes on or comes next: where it has begun it is set anew
            self._put(self._begun[min(self._begun)], accepted=accepted)

    def forget(self) -> None:
        """No epoch has begun."""
        self._begun = {}

    def _at(self, epoch: int) -> dict[str, Any]:
        states = [one.state_dict() for one in self._stateful]
        return self._own.at(epoch) | ({"states": copied(states)} if states else {})

    def _put(self, begun: Mapping[str, Any], *, accepted: bool = True) -> None:
        for one, state in zip(self._stateful, begun.get("states", ()), strict=False):
            one.load_state_dict(copied(state))
        self._own.put_back(begun, accepted=accepted)


def copied(state: Any) -> Any:
    """A state that its object does not change any more."""
    return codec.decode(codec.encode(state, name="the sampler's state"))


def iterate_sampler(
    sampler: Iterable[Any], seed: int, epoch: int, *, states: SamplerStates | None = None, block: int = BLOCK
) -> Iterator[Any]:
    """What it gives in this epoch, drawn from generators of its own: those of the process are left as they were.

    It may draw from Python's, NumPy's and torch's generators, or from a ``generator`` of its own, which is seeded, and
    so are those of a sampler that it goes by (``sampler``); what else it has of its own are its ``states``.
    ``set_epoch`` is called where there is one. It may be infinite: it is asked for ``block`` at a time.
    """
    with generators_kept():
        seed_generators(seed)
        if states is not None:
            states.begin(epoch)
        for one in with_inner(sampler):
            if callable(set_epoch := _set_epoch(one)):
                set_epoch(epoch)
            if _is_seeded(one):
                one.generator.manual_seed(seed)
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


def _set_epoch(sampler: Any) -> Any:
    return getattr(sampler, "set_epoch", None)


def _is_seeded(sampler: Any) -> bool:
    """Whether it has the generator that torch's samplers have, which is seeded for each epoch."""
    return isinstance(getattr(sampler, "generator", None), torch.Generator)


def with_inner(sampler: Any) -> Iterator[Any]:
    """It, and the samplers that it goes by."""
    seen: list[Any] = []
    while sampler is not None and not any(sampler is one for one in seen):
        seen.append(sampler)
        yield sampler
        sampler = getattr(sampler, "sampler", None)
