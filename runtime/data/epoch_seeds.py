"""The seeds of a loader's epochs: given once for all, or drawn when an epoch begins; of several ranks, rank 0 draws.

What was drawn is a part of the loader's state, as far as epochs are concerned that a job may still go on with.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed

from checkflow.core.errors import MismatchError, UnsupportedError
from checkflow.runtime.data.order import Share
from checkflow.runtime.data.seeded_dataset import derived_seed

_T = TypeVar("_T")


class Seeds(NamedTuple):
    """Of one epoch."""

    samples: int  # of its samples' randomness
    order: int


def given_seeds(seed: int, epoch: int) -> Seeds:
    """An epoch's, where they follow from one seed."""
    return Seeds(seed, derived_seed(seed, epoch))


class EpochSeeds:
    """Seeds by epoch.

    Args:
        seed: that all follow from; None: they are drawn.
        generator: to draw from; None: torch's own.
        ordered: whether an epoch's order needs a seed.
    """

    def __init__(self, seed: int | None, generator: torch.Generator | None, *, ordered: bool) -> None:
        self._seed, self._generator, self._ordered = seed, generator, ordered
        self._drawn: dict[int, Seeds] = {}  # by epoch

    def known(self, epoch: int) -> bool:
        """Whether nothing has to be drawn for it."""
        return self._seed is not None or epoch in self._drawn

    def of(self, epoch: int, share: Share) -> Seeds:
        """An epoch's seeds, drawn if they are not known; then all ranks have to ask at once.

        Raises:
            UnsupportedError: there are several ranks, and no torch.distributed to share them.
        """
        if epoch not in self._drawn:
            if self._seed is not None:
                return given_seeds(self._seed, epoch)
            drawn = Seeds(self._draw(), self._draw() if self._ordered else 0)
            self._drawn[epoch] = agreed(drawn, share)
        return self._drawn[epoch]

    def _draw(self) -> int:
        """A seed, as torch's loaders and samplers draw theirs."""
        return int(torch.empty((), dtype=torch.int64).random_(generator=self._generator).item())

    def state_from(self, epoch: int) -> dict[str, Any]:
        """What a run that goes on in this epoch needs."""
        drawn = {number: tuple(seeds) for number, seeds in self._drawn.items() if number >= epoch}
        if self._generator is None:
            return {"drawn": drawn}
        return {"drawn": drawn, "generator": self._generator.get_state()}

    def put_back(self, state: dict[str, Any]) -> None:
        """Go on with what ``state_from`` gave.

        Raises:
            MismatchError: there is nothing of the generator in it, and there is one here.
        """
        if self._generator is not None and "generator" not in state:
            raise MismatchError("the checkpoint's loader has no generator=, this one has: other orders would follow")
        self._drawn = {int(number): Seeds(seeds[0], seeds[1]) for number, seeds in state["drawn"].items()}
        if self._generator is not None:
            self._generator.set_state(state["generator"])

    def forget(self) -> None:
        """Nothing was drawn."""
        self._drawn = {}


def agreed(drawn: _T, share: Share) -> _T:
    """Rank 0's, if there are several ranks."""
    if share.world_size == 1:
        return drawn
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        raise UnsupportedError("several ranks without torch.distributed cannot draw the same seeds: pass seed=")
    shared: list[Any] = [drawn]
    torch.distributed.broadcast_object_list(shared, src=0)
    return shared[0]  # type: ignore[no-any-return]
