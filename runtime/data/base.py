"""What a Checkpointer needs of a loader whose position can be saved."""

from __future__ import annotations

import abc
import logging
import os
import reprlib
import weakref
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import numpy as np
from torch.utils.data import DataLoader as TorchDataLoader

from checkflow.core.errors import MismatchError, UnsupportedError
from checkflow.runtime.data.library_views import known_to_accelerate, torch_view
from checkflow.runtime.data.repeat.used import Comparison, Mark
from checkflow.runtime.data.worker_processes import WorkerShield, end_at_once, has_workers, is_lost_worker

logger = logging.getLogger("checkflow")


class LoaderListener(Protocol):
    """What a loader reports to the checkpointer that follows it."""

    def on_seeds_needed(self) -> None:
        """Numbers of training's are about to be drawn: an epoch's seeds, what a loader of another make draws as it
        begins an epoch or fetches a batch, or, at an epoch's end, whatever follows it."""

    def on_batch_requested(self) -> None:
        """A batch is asked for, and there is one: what the loop did so far belongs to the iteration before."""

    def on_batch_handed(self, batch: Any) -> None:
        """A batch is about to be handed out."""

    def on_lost_worker(self) -> None:
        """A worker has ended while a batch was waited for, and an error is about to be raised: where a signal that asks
        the job to end is the reason, this ends it instead."""

    def on_fetching_ahead(self) -> None:
        """From here on batches may be fetched ahead of the steps that use them."""


# By loader, torch's iterators of it that have workers: no part of a loader, which may be pickled.
_started: weakref.WeakKeyDictionary[ResumableLoader, weakref.WeakSet[Any]] = weakref.WeakKeyDictionary()
os.register_at_fork(after_in_child=_started.clear)  # they are the parent's to end


class ResumableLoader(abc.ABC):
    """Iterated once an epoch; each time the rest of it, the whole of it unless a position was restored.

    A position counts what was used of an epoch, in whatever the loader counts: samples, or batches.

    Attributes:
        listener: notified of all that is handed out.
        epochs_counted_elsewhere: by ``Checkpointer.epochs``: to iterate twice in one is a mistake then.
        shield: of its workers, against signals; None: it has none.
        workers_end_by: when the job ends, of a signal, as time.monotonic() has it: busy workers are not waited for;
            None: it goes on, or ends as it likes.
        remainder: how many samples were added to fill the last batch, for Accelerate.
        accepted: differences from the checkpoint that the user accepts (``Checkpointer(accept=…)``).
        mark: of the batch that is handed out; None: nothing of it can be compared in a later run.
        comparison: what a checkpoint says of the batches that were used, for those that come again.
    """

    remainder = 0

    def __init__(self, shield: WorkerShield | None = None) -> None:
        self.listener: LoaderListener | None = None
        self.epochs_counted_elsewhere = False
        self.shield = shield
        self.workers_end_by: float | None = None
        self.accepted: frozenset[str] = frozenset()
        self.mark: Mark | None = None
        self.comparison = Comparison()
        self._epoch = self._handed = 0
        self._fresh = True  # the epoch was set, and not iterated since
        self._pass = 0  # counts iterations and changes of the place: an iteration begun before the last is over
        self._followed = False  # the place is where a Checkpointer's run left it

    @property
    def epoch(self) -> int:
        """The epoch that is, or will be, iterated."""
        return self._epoch

    @property
    def position(self) -> int:
        """How much of this epoch has been handed out."""
        return self._handed

    @property
    @abc.abstractmethod
    def exhausted(self) -> bool:
        """Whether this epoch is known to have no batch left."""

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the batch that was handed out last is known to be the epoch's last one: for Accelerate."""
        return self.exhausted

    @property
    def resumed(self) -> bool:
        """Whether the next iteration goes on within an epoch."""
        return self._fresh and self._handed > 0

    def used_batches(self) -> int:
        """How many batches of this epoch were handed out so far, in this run and those before.

        Raises:
            UnsupportedError: the loader does not know.
        """
        raise UnsupportedError(f"a {type(self).__name__} does not say how many batches of an epoch were used")

    @property
    @abc.abstractmethod
    def batches(self) -> int | None:
        """In a whole epoch; None: not known before it is over."""

    def __len__(self) -> int:
        """Batches in a whole epoch.

        Raises:
            TypeError: that is not known.
        """
        if (batches := self.batches) is None:
            raise TypeError(f"how many batches an epoch of this {type(self).__name__} has is not known")
        return batches

    def set_epoch(self, epoch: int, position: int | None = None) -> None:
        """Iterate this epoch next, from a position on.

        Without one, as samplers' ``set_epoch`` is called at the begin of each epoch: from its begin, or, if it is the
        one in which the job was resumed, from there. ``Checkpointer.epochs`` counts epochs itself, and lets such calls
        change nothing.

        Raises:
            ValueError: there is no such epoch, or no such position.
        """
        for what, number in (("epoch", epoch), ("position", 0 if position is None else position)):
            if isinstance(number, bool) or not isinstance(number, int | np.integer) or number < 0:
                raise ValueError(f"set_epoch: {what} must be a whole number of at least 0, not {number!r}")
        epoch = int(epoch)  # of NumPy's no checkpoint is made
        if position is None:
            if self.epochs_counted_elsewhere or (self._fresh and epoch == self._epoch):
                return
            position = 0
        elif self.listener is None:
            self._followed = False
        self._move(epoch, position)

    def _move(self, epoch: int, position: int) -> None:
        self._epoch, self._handed, self._fresh = epoch, position, True
        self._pass += 1

    def follow(self, listener: LoaderListener) -> None:
        """A job begins, or goes on, with this loader."""
        self.listener, self._followed = listener, True
        self.epochs_counted_elsewhere = False  # unless this job calls epochs(), too
        self.workers_end_by = None

    def begin_anew(self) -> None:
        """A job that has nothing to go on from begins: what an earlier one left of its run is forgotten.

        A place that the user gave since (``load_state_dict``, or ``set_epoch`` with a position) stays.
        """
        if self._followed:
            self._followed = False
            self._move(0, 0)
            self._forget()
            self.comparison = Comparison()

    def _forget(self) -> None:  # noqa: B027 - most loaders keep nothing
        """Nothing was drawn, and nothing handed out."""

    def __iter__(self) -> Iterator[Any]:
        """The rest of the epoch. The next iteration is the next epoch, wherever this one was left.

        There is one place in an epoch, so that one iteration at a time can go on from it.

        Raises:
            UnsupportedError: iterated twice in one turn of ``Checkpointer.epochs``: samples would count twice; or an
                iteration was to go on after another one began, or after ``set_epoch`` or ``load_state_dict``.
        """
        return known_to_accelerate(self, self.rest())

    def rest(self) -> Iterator[Any]:
        """As iterating it, unknown to Accelerate."""
        return _Iteration(self)

    def _begin_pass(self) -> int:
        if not self._fresh:
            if self.epochs_counted_elsewhere:
                raise UnsupportedError(
                    "the training loader is iterated twice in one epoch; use another loader for evaluation"
                )
            self._move(self.epoch + 1, 0)
        self._fresh = False
        self._pass += 1
        return self._pass

    def as_torch(self) -> TorchDataLoader[Any]:
        """This loader in the shape of torch's, for ``accelerator.prepare`` and for transformers' Trainer.

        These fetch batches ahead of using them: ``Checkpointer.step`` must be called after each optimizer step, and no
        boundary is found without it. A loop over ``Checkpointer.epochs`` goes on within the epoch; a library that
        counts its epochs itself must skip what of an epoch was used, as for torch's loader
        (docs/how-to/integrations.md).
        """
        return torch_view(self)

    def dealt_by(self) -> dict[str, Any]:
        """What decides which samples each rank gets, in words, where the loader deals to the ranks: they must have it
        alike.
        """
        return {}

    def deals_itself(self, state: Mapping[str, Any]) -> str:
        """The name of what deals to the ranks in place of checkflow, so that a saved place is of one rank, and means
        nothing to another number of ranks; "": it means the same to any.
        """
        return ""

    @abc.abstractmethod
    def _rest_of_epoch(self) -> Iterator[Any]:
        """Notify the listener of each batch when it is asked for and before it is handed out, and move the position."""

    def used(self, epoch: int, position: int, *, marked: bool) -> None:  # noqa: B027 - most loaders keep nothing
        """What was handed out up to here has reached a step: no state before it will be asked for.

        Args:
            marked: whether the loop said so by ``step()``, and may have fetched ahead; otherwise it has used all.
        """

    def _notify_requested(self) -> None:
        if self.listener is not None:
            self.listener.on_batch_requested()

    def _notify_handed(self, batch: Any) -> None:
        if self.listener is not None:
            self.listener.on_batch_handed(batch)

    def _note_workers(self, iterator: Iterator[Any]) -> Iterator[Any]:
        if has_workers(iterator):
            _started.setdefault(self, weakref.WeakSet()).add(iterator)
        return iterator

    def _end_workers_in_time(self) -> None:
        """If the job has little time; otherwise torch ends them when it is done with them."""
        if self.workers_end_by is None:
            return
        if self.shield is not None:
            self.shield.lower()
        end_at_once(tuple(_started.get(self, ())), self.workers_end_by)

    @abc.abstractmethod
    def end_workers(self) -> None:
        """End workers that persist; iterating starts new ones."""

    def state_dict(self) -> dict[str, Any]:
        """All that is needed to go on from here."""
        return self.state_at(self.epoch, self.position)

    @abc.abstractmethod
    def state_at(self, epoch: int, position: int) -> dict[str, Any]:
        """The state that goes on from this place, which may lie behind batches fetched ahead."""

    @abc.abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved position.

        Raises:
            MismatchError: the loader is another one: other samples would be meant.
        """


# What a loader's identity has, in words for a user. "…" is its value.
_WORDS = {
    "size": "a data set of … samples",
    "shuffle": "shuffle=…",
    "sampler": "the sampler …",
    "seed": "seed=…",
    "loader": "the type …",
    "workers": "num_workers=…",
}
# By "way"; None: a loader that is no loader of another make.
_KINDS = {
    None: "a checkflow.DataLoader of map-style data",
    "state": "a loader with a state of its own",
    "skip": "a loader whose batches are fetched again",
}


def settle_length(
    state: Mapping[str, Any], identity: Mapping[str, Any], *, over: bool, accepted: frozenset[str]
) -> Mapping[str, Any]:
    """The state; with the data's length as it is now, where another one is accepted.

    Args:
        over: whether the state lies at an epoch's end or begin.

    Raises:
        MismatchError: the length is another one, and that is not accepted, or the epoch would go on with it.
    """
    there, here = state.get("size"), identity["size"]
    if "size" not in state or there == here:  # earlier releases saved that of map-style data only
        return state
    said = f"the checkpoint's loader has {_in_words('size', there)}, this one {_in_words('size', here)}"
    if not over:
        raise MismatchError(f"{said}, and the checkpoint lies within an epoch: finish that with the data as they were")
    if "length" not in accepted:
        raise MismatchError(f'{said}: accept=("length",) begins the next epoch with the data as they are now')
    logger.warning("%s: the next epoch begins with the data as they are now, which accept= allows", said)
    return {**state, "size": here}


def refuse_another(state: Mapping[str, Any], identity: Mapping[str, Any]) -> None:
    """Refuse the state of a loader of another identity: what its position is counted in, but for the data's length.

    Raises:
        MismatchError: it is another one.
        TypeError: it is no state of a loader.
    """
    if not isinstance(state, Mapping) or not isinstance(state.get("epoch"), int):
        raise TypeError(f"load_state_dict takes what a loader's state_dict() gave, not {reprlib.repr(state)}")
    if (want := state.get("way")) != (have := identity.get("way")):
        raise MismatchError(f"the checkpoint's loader is {_KINDS.get(want, want)}, this one is {_KINDS[have]}")
    for name, here in identity.items():
        if name != "size" and (there := state.get(name)) != here:
            raise MismatchError(
                f"the checkpoint's loader has {_in_words(name, there)}, this one {_in_words(name, here)}"
            )


def _in_words(name: str, value: Any) -> str:
    if name == "sampler" and value is None:
        return "no sampler"
    if name == "size" and value is None:
        return "a data set of no known size"
    return _WORDS[name].replace("…", str(value))


def cannot_go_on() -> RuntimeError:
    """What an iteration raises that an error has ended: to stop would say that the epoch is over."""
    return RuntimeError(
        "this iteration of the loader ended with an error, and cannot go on: start the job again, or set the loader's "
        "place (set_epoch(epoch, position) or load_state_dict) and iterate it anew"
    )


class _Iteration(Iterator[Any]):
    """The rest of one epoch, as long as nothing else moves the loader's place."""

    def __init__(self, loader: ResumableLoader) -> None:
        self._loader = loader
        self._pass = 0  # 0: the first batch has not been asked for
        self._rest: Iterator[Any] | None = None
        self._ended = False

    def __next__(self) -> Any:
        if self._ended:
            raise StopIteration
        if not self._pass:
            self._pass = self._loader._begin_pass()
        elif self._pass != self._loader._pass:
            raise UnsupportedError(
                "this iteration of the loader cannot go on: another one began since, or the epoch was set, and there "
                "is one place in an epoch; use a loader for each of two loops that run at once"
            )
        try:
            if self._rest is None:
                self._rest = self._loader._rest_of_epoch()
            return next(self._rest)
        except RuntimeError as error:
            if self._loader.listener is not None and is_lost_worker(error):
                self._loader.listener.on_lost_worker()
            raise
        except StopIteration:
            self._ended = True
            if self._loader.listener is not None:
                self._loader.listener.on_seeds_needed()  # where nothing was left: what follows the epoch draws, too
            raise
