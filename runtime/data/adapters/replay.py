"""Loaders without a state: what was used of an epoch is fetched again, and thrown away."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import xxhash
from torch.utils.data import DataLoader as TorchDataLoader

from checkflow.core.errors import MismatchError, UnsupportedError
from checkflow.runtime.data.adapters.base import END, ForeignLoader
from checkflow.runtime.data.adapters.torchdata import loses_state
from checkflow.runtime.data.base import refuse_another
from checkflow.runtime.data.process_generators import (
    generator_states,
    generators_kept,
    seed_generators,
    set_generator_states,
)
from checkflow.runtime.data.repeat.used import ranks
from checkflow.runtime.format import codec

logger = logging.getLogger("checkflow")


@dataclass(frozen=True)
class _Failed:
    """In the place of a batch that could not be fetched."""

    error: Exception


class SkippingLoader(ForeignLoader):
    """Goes on by fetching an epoch's batches anew, up to the position.

    An epoch must follow from its number (``set_epoch``), from the generators that the process and the loader have, and
    from the passes that the loader has counted, when it begins, or be the same each time. It is begun, and its first
    batch fetched, with the process's generators. Later batches draw from a copy, seeded by what these were: training
    draws between two batches, and does not where batches are fetched again.

    Args:
        loader: an iterator that starts over (DALI's: it has ``reset``) must be as it is when a job starts; the epochs
            before are fetched again, too.
    """

    way = "skip"

    def __init__(self, loader: Any) -> None:
        super().__init__(loader)
        self._begun: dict[int, dict[str, Any]] = {}  # by epoch, what it began with
        self._stream: tuple[Any, ...] = ()  # the generators that this epoch's later batches draw from
        self._draws = type(loader) not in (list, tuple)  # other sequences may load, and draw
        self._first: list[Any] = []  # the first batch of this epoch, until it is handed out
        # Of an iterator that starts over, by epoch: how many batches were fetched, and whether it came to its end.
        self._passes: dict[int, tuple[int, bool]] = {}
        self._starts_over = isinstance(loader, Iterator)
        self._made = 0  # passes, by the loader itself

    def _sources(self) -> dict[str, Any]:
        whole = isinstance(self.loader, TorchDataLoader | Iterator)  # these have what is no source, or are repeated
        return super()._sources() | ({} if whole else {"loader": self.loader})

    def _open(self) -> Iterator[Any]:
        epoch, position = self._here
        if self._starts_over and not self._made:
            self._repeat_passes()
        begin = self._begun.get(epoch)
        if begin is not None:
            with self._as_at(begin):
                iterator = self._begin(epoch)
        else:
            self._notify_drawing()
            begin = self._begin_now()
            begin["seed"] = xxhash.xxh3_64_intdigest(codec.encode(_drawn_from(begin))) >> 1
            if self.listener is None:  # otherwise used() says what will not be asked for
                self._begun = {number: other for number, other in self._begun.items() if number >= epoch - 1}
            self._begun[epoch] = begin
            iterator = self._begin(epoch)
        with generators_kept():
            seed_generators(begin["seed"])
            self._stream = generator_states()
        if position:
            logger.info("%d batches of epoch %d are fetched again, and thrown away", position, epoch)
        for number in range(position):
            batch = self._skip(iterator, number)
            if batch is END:
                raise MismatchError(
                    f"the checkpoint lies after batch {position} of epoch {epoch}, and the loader has {number} in it"
                )
            if batch is not None:
                self.comparison.batch(epoch, number, batch)
        return iterator

    def _skip(self, iterator: Iterator[Any], number: int) -> Any:
        try:
            return self._fetch(iterator)
        except Exception as error:  # noqa: BLE001 - it counts, as it does where the batches are used
            logger.warning("batch %d of epoch %d, which was used, could not be fetched again: %s",
                           number, self._epoch, error)  # fmt: skip
            return None

    def _begin(self, epoch: int) -> Iterator[Any]:
        """Start a pass, and fetch its first batch."""
        self._announce(epoch)
        self.end_workers()  # torch draws a base seed when workers start: for each epoch, as where the job resumes
        iterator = self._note_workers(iter(self.loader))
        first = _first_of(iterator)
        if first is END and self._starts_over and self._made:  # others start over by themselves
            self.loader.reset()  # type: ignore[attr-defined]
            iterator = self._note_workers(iter(self.loader))
            first = _first_of(iterator)
        self._first = [first]
        self._made += 1
        self._passes[epoch] = 0, False
        return iterator

    def _fetch(self, iterator: Iterator[Any]) -> Any:
        batch = None
        try:
            batch = self._first.pop() if self._first else self._next(iterator)
        finally:
            if self._starts_over:
                fetched, _ = self._passes[self._epoch]
                self._passes[self._epoch] = (fetched, True) if batch is END else (fetched + 1, False)
        if isinstance(batch, _Failed):
            raise batch.error
        return batch

    def _next(self, iterator: Iterator[Any]) -> Any:
        if not self._draws:
            return next(iterator, END)
        trainings = generator_states()
        set_generator_states(self._stream)
        try:
            return next(iterator, END)
        finally:
            self._stream = generator_states()
            set_generator_states(trainings)

    def _repeat_passes(self) -> None:
        """Bring an iterator that starts over through the epochs before this one."""
        passes = {epoch: made for epoch, made in self._passes.items() if epoch < self._epoch}
        if passes:
            count = sum(fetched for fetched, _ in passes.values())
            logger.info("%d batches of the %d epochs before are fetched again, and thrown away", count, len(passes))
        with generators_kept():
            for epoch, (fetched, ended) in sorted(passes.items()):
                iterator = self._begin(epoch)
                for _ in range(fetched - 1 + ended):
                    next(iterator, END)
        self._passes = passes

    def used(self, epoch: int, position: int, *, marked: bool) -> None:
        """What was handed out up to here has reached a step: no state before it will be asked for."""
        super().used(epoch, position, marked=marked)
        self._begun = {number: begin for number, begin in self._begun.items() if number >= epoch}

    def state_at(self, epoch: int, position: int) -> dict[str, Any]:
        """The state that goes on from this place, which may lie behind batches fetched ahead."""
        over = self._is_over((epoch, position))
        first = epoch + 1 if over else epoch  # that is begun again
        passes = {number: made for number, made in self._passes.items() if number < first and self._starts_over}
        if over and epoch in passes:  # as the loop will ask for more before it goes on to the next
            passes[epoch] = position, True
        return {
            "epoch": epoch,
            "position": position,
            **self._identity(),
            "over": over,
            "begun": {number: begin for number, begin in self._begun.items() if number >= first},
            "passes": passes,
            "ranks": ranks(),
            "held": {} if first in self._begun else self._own.at(first),
        }

    def deals_itself(self, state: Mapping[str, Any]) -> str:
        return self._name if state["position"] > 0 or state.get("passes") else ""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved position.

        Raises:
            MismatchError: the loader is another one, or has another number of workers.
            UnsupportedError: it is an iterator that starts over, and was iterated already.
        """
        if isinstance(state, Mapping) and state.get("way") == "state" and loses_state(self.loader):
            state = _of_its_state(state, self._identity())
        refuse_another(state, self._identity())
        if self._starts_over and self._made:
            raise UnsupportedError(
                f"this {type(self.loader).__name__} was iterated before it is to go on from a checkpoint: make another"
            )
        self._has_another_length(state)
        self._begun, self._passes = dict(state["begun"]), dict(state["passes"])
        self._own.put_back(state.get("held", {}), accepted="loader" in self.accepted)
        self._resume_at(state["epoch"], state["position"], over=state["over"])

    def _forget(self) -> None:
        super()._forget()
        self._begun, self._passes = {}, {}


def _drawn_from(begin: Mapping[str, Any]) -> dict[str, Any]:
    """What an epoch draws from, of what it begins with."""
    drawn = {name: begin[name] for name in ("process", "own")}
    held = begin["held"].get("generators")
    return {**drawn, "held": held} if held else drawn


def _of_its_state(state: dict[str, Any], identity: dict[str, Any]) -> dict[str, Any]:
    """What an earlier release saved of a loader whose state does not hold all: the epoch's begin is in it."""
    inner, epoch = state["inner"], state["epoch"]
    begun = {} if inner is None or state["over"] or inner["epoch"] != epoch else {epoch: {**inner["begin"], "seed": 0}}
    kept = {name: state[name] for name in ("epoch", "position", "over")}
    return {**identity, **kept, "begun": begun, "passes": {}}


def _first_of(iterator: Iterator[Any]) -> Any:
    """An error is raised when the batch is handed out: torch's iterators go on after it."""
    try:
        return next(iterator, END)
    except Exception as error:  # noqa: BLE001 - raised again where the batch is handed out
        return _Failed(error)
