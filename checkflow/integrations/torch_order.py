"""A resumable loader whose samplers draw as they do under torch's own: so the order is that of a run without checkflow.

``checkflow.DataLoader`` seeds a sampler for each epoch. This one lets it draw from the process's generators where an
epoch begins, and keeps what these were: with them a resume finds the order again.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from checkflow.core.errors import MismatchError
from checkflow.runtime.data.adapters.base import drawing_from
from checkflow.runtime.data.base import ResumableLoader
from checkflow.runtime.data.epoch_seeds import EpochSeeds, Seeds, agreed
from checkflow.runtime.data.loader import DataLoader
from checkflow.runtime.data.order import Share
from checkflow.runtime.data.process_generators import generator_states, generators_kept, seed_generators
from checkflow.runtime.data.samplers import BLOCK, in_blocks, with_inner
from checkflow.runtime.data.seeded_dataset import derived_seed
from checkflow.runtime.state.collect import capture_generators, compact_generators

logger = logging.getLogger("checkflow")
_ORDER = ("sampler", "batch_sampler", "shuffle", "seed", "tail", "_seeds", "_states")  # what decides a DataLoader's


class TorchOrderLoader(DataLoader):
    """A ``checkflow.DataLoader`` with torch's order, whatever its sampler draws at an epoch's begin, and from what.

    ``set_epoch`` is called where a sampler has it. What a sampler draws after its first index comes from generators of
    its own, as training draws in between. After a resume, the sampler's generators and Accelerate's
    ``initial_seed`` are the saved ones.

    Attributes:
        before: the same loader with the order of checkflow 0.1 as it was; a checkpoint of that goes on in it.
    """

    before: ResumableLoader | None = None
    _draws_as_torch = True

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        if not self._ordered_here:
            self._seeds = _Begins(self)

    def _iterate(self, order: Iterable[Any], seeds: Seeds) -> Iterator[Any]:
        if isinstance(self._seeds, _Begins):
            return self._seeds.iterate(self.epoch, seeds)
        return super()._iterate(order, seeds)

    def used(self, epoch: int, position: int, *, marked: bool) -> None:
        """What was handed out up to here has reached a step: no state before it will be asked for."""
        super().used(epoch, position, marked=marked)
        if isinstance(self._seeds, _Begins):
            self._seeds.forget_before(epoch)

    def _identity(self) -> dict[str, Any]:
        identity = super()._identity()
        if isinstance(self._seeds, _Begins):  # an earlier checkflow says that it has another sampler
            identity["sampler"] += ", drawing as under torch"
        return identity

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved position.

        Raises:
            MismatchError: the data set's size or the sampler differs: other samples would be meant.
        """
        if self.before is not None and isinstance(state, Mapping) and "drawn" in state:
            for name in _ORDER:
                setattr(self, name, getattr(self.before, name))
            logger.info("the order of the samples is that of the checkflow which made this checkpoint, not Trainer's")
        super().load_state_dict(state)


class _Begins(EpochSeeds):
    """What epochs began with, in place of their seeds; of several ranks, what rank 0's began with."""

    def __init__(self, loader: TorchOrderLoader) -> None:
        super().__init__(None, loader.generator, ordered=False)
        self._loader = loader
        self._begun: dict[int, dict[str, Any]] = {}  # by epoch
        self._live: dict[int, Iterator[Any]] = {}  # by epoch, the order as it was begun, until it is iterated

    def known(self, epoch: int) -> bool:
        return epoch in self._begun

    def of(self, epoch: int, share: Share) -> Seeds:
        if epoch not in self._begun:
            begin: dict[str, Any] = {
                "process": compact_generators(capture_generators()),
                "own": [one.get_state() for one in self._own()],
                "seeds": [one.initial_seed for one in self._seeded()],
            }
            self._begin_states(epoch)
            begin["samples"], order = self._start(epoch)
            self._begun[epoch] = agreed(begin, share)
            self._live = {epoch: order} if share.world_size == 1 else {}
        return Seeds(self._begun[epoch]["samples"], 0)

    def iterate(self, epoch: int, seeds: Seeds) -> Iterator[Any]:
        """An epoch's order, from its begin."""
        if (order := self._live.pop(epoch, None)) is None:
            begin = self._begun[epoch]
            with drawing_from(begin["process"]):
                self._set_own(begin)
                self._begin_states(epoch)
                _, order = self._start(epoch)
        yield from itertools.islice(order, 1)
        with generators_kept():
            seed_generators(derived_seed(seeds.samples, epoch))
            states = generator_states()
        yield from in_blocks(order, states, BLOCK)

    def _begin_states(self, epoch: int) -> None:
        """What samplers hold beside these generators: noted at an epoch's first begin, and set again at others."""
        if self._loader._states is not None:
            self._loader._states.begin(epoch)

    def _start(self, epoch: int) -> tuple[int, Iterator[Any]]:
        """Begin an order, in the steps in which torch's iterator does; returns the seed of the samples, too."""
        loader = self._loader
        for one in self._samplers():
            if callable(set_epoch := getattr(one, "set_epoch", None)):
                set_epoch(epoch)
        if loader.batch_sampler is not None:
            order = iter(loader.batch_sampler)
            samples = self._draw_base(epoch)
        else:
            assert loader.sampler is not None
            samples = self._draw_base(epoch)  # before a sampler: torch's BatchSampler asks it later
            order = iter(loader.sampler)
        first = list(itertools.islice(order, 1))
        return samples, itertools.chain(first, order)

    def _draw_base(self, epoch: int) -> int:
        """The seed that torch's iterator draws; workers that persist have theirs since the first epoch."""
        if epoch and self._loader._loader.persistent_workers:
            with generators_kept():
                return self._draw()
        return self._draw()

    def _samplers(self) -> list[Any]:
        loader = self._loader
        return list(with_inner(loader.sampler if loader.batch_sampler is None else loader.batch_sampler))

    def _seeded(self) -> list[Any]:
        """Accelerate's, which seed their generator by themselves at each epoch."""
        return [one for one in self._samplers() if hasattr(one, "initial_seed")]

    def _own(self) -> list[torch.Generator]:
        plain = [one for one in self._samplers() if not hasattr(one, "initial_seed")]
        found = [self._generator, *(getattr(one, "generator", None) for one in plain)]
        return [one for one in found if isinstance(one, torch.Generator)]

    def _set_own(self, begin: Mapping[str, Any]) -> None:
        generators, seeded = self._own(), self._seeded()
        if (len(generators), len(seeded)) != (len(begin["own"]), len(begin["seeds"])):
            raise MismatchError(
                "the checkpoint's sampler has other generators than this one: other orders would follow"
            )
        for generator, state in zip(generators, begin["own"], strict=True):
            generator.set_state(state)
        for one, seed in zip(seeded, begin["seeds"], strict=True):
            one.initial_seed = seed

    def forget_before(self, epoch: int) -> None:
        self._begun = {number: begin for number, begin in self._begun.items() if number >= epoch}

    def state_from(self, epoch: int) -> dict[str, Any]:
        return {"begun": {number: begin for number, begin in self._begun.items() if number >= epoch}}

    def put_back(self, state: dict[str, Any]) -> None:
        self._begun = {int(number): dict(begin) for number, begin in state["begun"].items()}
        self._live = {}

    def forget(self) -> None:
        self._begun, self._live = {}, {}
