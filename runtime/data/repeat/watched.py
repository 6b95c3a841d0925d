"""A sampler of the user's own in a loader that iterates it where nobody sees it: torchdata's."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch.utils.data import Sampler

from checkflow.runtime.data.process_generators import generator_states, set_generator_states
from checkflow.runtime.data.repeat.own_state import OwnState, has_state
from checkflow.runtime.data.repeat.used import MOST_INDICES, Comparison


class WatchedSampler(Sampler[Any]):
    """A sampler whose every pass within an epoch is the same, is compared, and whose first indices are noted.

    torchdata begins three passes where it goes on within an epoch. A sampler that draws as a pass begins would give
    another order in the last one, which is used.

    Args:
        comparison: gives what a checkpoint says of its order.
        batches: whether it gives batches.

    Attributes:
        first: the indices that this pass gave first.
    """

    def __init__(self, sampler: Iterable[Any], comparison: Callable[[], Comparison], *, batches: bool) -> None:
        self._sampler, self.comparison, self._batches = sampler, comparison, batches
        self._own = OwnState({"sampler": sampler})
        self._epoch = 0
        self._begun: tuple[dict[str, Any], tuple[Any, ...]] | None = None
        self.first: list[Any] = []

    def begins(self, epoch: int) -> None:
        """Passes that begin from here on are this epoch's."""
        self._epoch, self._begun = epoch, None

    def __len__(self) -> int:
        return len(self._sampler)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:  # such as set_epoch
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.__dict__["_sampler"], name)

    def __iter__(self) -> Iterator[Any]:
        if self._begun is None:
            self._begun = self._own.at(self._epoch), generator_states()
        else:
            self._own.put_back(self._begun[0])
            set_generator_states(self._begun[1])
        order = iter(self._sampler)
        self.first = []
        return order if has_state(order) else self._passed(order, self.first)

    def _passed(self, order: Iterator[Any], first: list[Any]) -> Iterator[Any]:
        comparison = self.comparison()
        compare = comparison.batches if self._batches else comparison.samples
        compared = compare(self._epoch, order)
        for given in itertools.islice(compared, MOST_INDICES):
            first.extend(given if self._batches else [given])
            yield given
        yield from compared


def watch_sampler(loader: Any, comparison: Callable[[], Comparison]) -> WatchedSampler | None:
    """Watch the sampler of torchdata's loader; None: it is torch's or torchdata's, or is restored by its own state."""
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    holder = loader if name == "sampler" or not _is_known(loader.batch_sampler) else loader.batch_sampler
    name = name if holder is loader else "sampler"
    sampler = getattr(holder, name, None)
    if isinstance(sampler, WatchedSampler):  # made resumable once more
        sampler.comparison = comparison
        return sampler
    if sampler is None or _is_known(sampler) or has_state(sampler):
        return None
    watched = WatchedSampler(sampler, comparison, batches=name == "batch_sampler")
    vars(holder)[name] = watched  # torch's loader lets none of its own be set
    if loader.sampler is sampler:
        vars(loader)["sampler"] = watched
    return watched


def _is_known(sampler: Any) -> bool:
    return type(sampler).__module__.partition(".")[0] in ("torch", "torchdata")
