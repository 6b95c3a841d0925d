"""In which order an epoch's samples are used, which of them each rank takes at each step, and what becomes of the tail.

The order is the whole job's: a step takes its next ``world_size * batch_size`` samples, and rank r the r-th batch of
these. So a position is one number, and what is left can be dealt to any number of ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

Tail = Literal["even", "drop", "pad"]
TAILS: tuple[str, ...] = get_args(Tail)


@dataclass(frozen=True, slots=True)
class Share:
    """Which part of each step is ours.

    Raises:
        ValueError: there is no such rank.
    """

    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank {self.rank} of {self.world_size} ranks does not exist")


class RankBatch(NamedTuple):
    """This rank's batch of one step."""

    indices: list[Any]
    end: int  # how many of the epoch's samples have been used after it, by all ranks
    used: list[Any]  # which of them this step uses, of all ranks


class Steps(Iterator[RankBatch]):
    """The steps of one epoch from a position on, dealt to one rank.

    Args:
        share: the rank's.
        position: how many samples were used before.

    Attributes:
        dropped, repeated: samples that no rank takes, and that are taken once more, at the epoch's end; once that has
            been reached.
    """

    def __init__(self, share: Share, position: int) -> None:
        self._share, self._position = share, position
        self.dropped = self.repeated = 0
        self._next: RankBatch | None = None

    def _deal(self) -> RankBatch | None:
        """The next step; None at the epoch's end."""
        raise NotImplementedError

    @property
    def more(self) -> bool:
        """Whether there is another step."""
        if self._next is None:
            self._next = self._deal()
        return self._next is not None

    def __next__(self) -> RankBatch:
        step, self._next = self._next or self._deal(), None
        if step is None:
            raise StopIteration
        return step

    def _step(self, used: list[Any], indices: list[Any]) -> RankBatch:
        self._position += len(used)
        return RankBatch(indices, self._position, used)

    def _even(self, left: list[Any]) -> RankBatch | None:
        """All that is left, in parts that differ by one at most; where that would leave a rank without any, none."""
        rank, ranks = self._share.rank, self._share.world_size
        if len(left) < ranks:
            self.dropped = len(left)
            return None
        size, larger = divmod(len(left), ranks)
        begin = rank * size + min(rank, larger)
        return self._step(left, left[begin : begin + size + (rank < larger)])


class SampleSteps(Steps):
    """Steps of ``batch_size`` samples a rank.

    The tail, what is left when fewer than a whole step's samples are:

    - "even": smaller last batches, whose sizes differ by one at most. Were there fewer samples than ranks, the step
      before takes one sample a rank less, so that every rank has some; where that cannot be (batches of one, fewer
      samples than ranks in all), they are dropped, by all ranks alike.
    - "drop": no rank takes them.
    - "pad": the epoch's first samples are used again, so that the last step is whole.

    Args:
        order: the epoch's samples, from its begin.
        batch_size: of one rank.
    """

    def __init__(self, order: Iterable[Any], batch_size: int, share: Share, tail: Tail, position: int = 0) -> None:
        super().__init__(share, position)
        self._batch_size, self._tail = batch_size, tail
        self._whole = batch_size * share.world_size
        samples = iter(order)
        self._first = list(itertools.islice(samples, self._whole)) if tail == "pad" else []
        self._samples = itertools.islice(itertools.chain(self._first, samples), position, None)
        self._ahead: list[Any] = []  # the tail is seen before it begins
        self._ended = False

    def _look_ahead(self, count: int) -> None:
        missing = count - len(self._ahead)
        if missing > 0 and not self._ended:
            found = list(itertools.islice(self._samples, missing))
            self._ended = len(found) < missing
            self._ahead += found

    def _deal(self) -> RankBatch | None:
        rank, ranks = self._share.rank, self._share.world_size
        self._look_ahead(self._whole + ranks)
        left = len(self._ahead)
        if left >= self._whole:
            close = self._tail == "even" and self._whole < left < self._whole + ranks
            size = self._batch_size - (close and self._batch_size > 1)
            taken = self._take(size * ranks)
            return self._step(taken, taken[rank * size : (rank + 1) * size])
        if not left:
            return None
        tail = self._take(left)
        if self._tail == "drop":
            self.dropped = left
            return None
        if self._tail == "even":
            return self._even(tail)
        self.repeated = self._whole - left
        padded = tail + list(itertools.islice(itertools.cycle(self._first), self.repeated))
        return self._step(tail, padded[rank * self._batch_size : (rank + 1) * self._batch_size])

    def _take(self, count: int) -> list[Any]:
        taken, self._ahead = self._ahead[:count], self._ahead[count:]
        return taken


class BatchSteps(Steps):
    """Steps of one ready batch a rank, as a batch sampler makes them.

    The tail, fewer batches than ranks: under "even" their samples are dealt anew, evenly, and dropped where they are
    fewer than ranks; under "drop" no rank takes them; under "pad" the epoch's first batches are used again.

    Args:
        order: the epoch's batches, from its begin.

    Raises:
        ValueError: a batch is empty: no position lies before or behind it.
    """

    def __init__(self, order: Iterable[Iterable[Any]], share: Share, tail: Tail, position: int = 0) -> None:
        super().__init__(share, position)
        self._tail = tail
        batches = map(_filled, order)
        self._first = list(itertools.islice(batches, share.world_size)) if tail == "pad" else []
        self._batches = _behind(itertools.chain(self._first, batches), position)

    def _deal(self) -> RankBatch | None:
        rank, ranks = self._share.rank, self._share.world_size
        step = list(itertools.islice(self._batches, ranks))
        used = list(itertools.chain.from_iterable(step))
        if len(step) == ranks:
            return self._step(used, step[rank])
        if not step:
            return None
        if self._tail == "drop":
            self.dropped = len(used)
            return None
        if self._tail == "even":
            return self._even(used)
        again = list(itertools.islice(itertools.cycle(self._first), ranks - len(step)))
        self.repeated = sum(len(batch) for batch in again)
        return self._step(used, (step + again)[rank])


def _filled(batch: Iterable[Any]) -> list[Any]:
    indices = list(batch)
    if not indices:
        raise ValueError("the batch sampler gave an empty batch")
    return indices


def _behind(batches: Iterator[list[Any]], position: int) -> Iterator[list[Any]]:
    """Without the first samples; what is left of a batch that they end in comes as it is."""
    for batch in batches:
        if position < len(batch):
            yield batch[position:]
            break
        position -= len(batch)
    yield from batches


def count_steps(samples: int, batch_size: int, world_size: int, tail: Tail) -> int:
    """How many steps :class:`SampleSteps` deals of so many samples."""
    steps, left = divmod(samples, batch_size * world_size)
    if not left or tail == "drop":
        return steps
    if tail == "pad" or left >= world_size or (steps and batch_size > 1):
        return steps + 1
    return steps
