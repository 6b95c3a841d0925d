"""Loaders that have a state, resumed by it."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from torch.utils.data import IterableDataset, RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from checkflow.core.errors import MismatchError, UnsupportedError
from checkflow.runtime.data.adapters.base import END, ForeignLoader, Place, drawing_from, parts
from checkflow.runtime.data.adapters.freeze import Overlaps, freeze, thaw
from checkflow.runtime.data.adapters.torchdata import Again, begin_anew, is_torchdatas
from checkflow.runtime.data.base import refuse_another
from checkflow.runtime.data.repeat.used import Comparison, Mark, ranks
from checkflow.runtime.data.repeat.watched import watch_sampler
from checkflow.runtime.format import codec
from checkflow.runtime.state.collect import capture_generators
from checkflow.runtime.system.signals import raised_by_handler

logger = logging.getLogger("checkflow")

#: States that are kept at most before anything reached a step: a loop that never calls step() would fill the memory.
WAITING = 64

_DRAWING = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


@runtime_checkable
class StatefulLoader(Protocol):
    """A loader that knows its state: torchdata's ``StatefulDataLoader``, MosaicML's ``StreamingDataLoader``, or a
    user's own.

    ``iter`` begins an epoch, or goes on with the one whose state was loaded. ``state_dict`` is that of the batches
    handed out so far, whatever was fetched ahead of them inside, and consists of what checkpoints hold (numbers, text,
    containers, arrays, tensors). It is asked for when a checkpoint is made; at each batch where the loop fetches ahead,
    or the length of an epoch is not known. The process's generators are no part of it: checkflow saves them. A loader
    without ``__len__`` hands out nothing from a state that was taken after an epoch's last batch.
    """

    def __iter__(self) -> Iterator[Any]: ...
    def state_dict(self) -> Any: ...
    def load_state_dict(self, state_dict: Any, /) -> Any: ...


@dataclass(frozen=True)
class _Inner:
    """Where the inner loader is.

    Attributes:
        state: its own, as :meth:`StateLoader._copy` gives it; None: nothing was fetched yet.
        epoch: that this lies in.
        ended: whether at the end of that.
        begin: the generators that the epoch began with.
        own: the loader's own ones as they are here; "held" is missing, of an earlier release.
        calls: how often it was asked for a batch since it began, those that could not be fetched included.
    """

    state: bytes | None = None
    epoch: int = -1
    ended: bool = False
    begin: Mapping[str, Any] | None = None
    own: Mapping[str, Any] = field(default_factory=lambda: {"own": [], "held": {}})
    calls: int | None = None  # for a batch, since the loader began it; None: not known, of an earlier release


class StateLoader(ForeignLoader):
    """Goes on from the inner loader's own state.

    That is asked for when a checkpoint is made, and is exact then, since the batch that follows has not been fetched.
    Where this does not hold (the loop fetches ahead, and reports by ``step()`` what it has used; or a further batch is
    fetched to see whether there is one) it is taken before each fetch, and kept until that batch has reached a step: as
    many states as the loop is ahead.

    Raises:
        UnsupportedError: a state of the loader does not hold the order of its batches.
    """

    way = "state"

    def __init__(self, loader: StatefulLoader) -> None:
        _refuse_unsaved_order(loader)
        super().__init__(loader)
        self.loader: StatefulLoader
        self._at = _Inner()  # before the first epoch, at the last end of one, or to be loaded; else see _running
        self._to_load = False
        self._draws_late = _draws_late(loader)
        torchdatas = is_torchdatas(loader)
        self._mapped = mapped = torchdatas and not isinstance(loader.dataset, IterableDataset)  # type: ignore[attr-defined]
        self._watched = watch_sampler(loader, self._expected) if mapped else None
        self._compares = torchdatas and not mapped  # batches: data without a state are fetched again
        self._running: tuple[int, Mapping[str, Any]] | None = None  # the epoch that was begun, and its begin
        self._fetched = 0  # of it
        self._calls: int | None = 0  # as of _Inner
        self._marked: bool | None = None  # whether the loop reports what it has used; None: not known yet
        # Before each batch that was fetched and, as far as is known, has not been used: it may be fetched again.
        self._kept: dict[Place, tuple[_Inner, Mapping[str, Any]]] = {}
        self._warned = False  # that a state was dropped
        self._overlaps = Overlaps()
        self._again: dict[Place, Mapping[str, Any]] = {}  # generators that a batch is to be fetched again with

    def _open(self) -> Iterator[Any]:
        at, place = self._at, self._here
        if self._to_load and at.epoch == self._epoch and not at.ended:
            return self._restored(at)
        again = self._again.get(place)
        if again is None:
            self._notify_drawing()
        self._keep(again)
        # Where the loop left an epoch early a resume has only the state: without a resume the same is done.
        left = at if self._to_load else self._now() if self._running is not None else None
        if left is not None:
            self._leave(left)
        self._announce(self._epoch)
        with drawing_from(again):
            self._running, self._fetched = (self._epoch, self._begin_now()), 0
            self._pass_begins(self._epoch)
            iterator = self._note_workers(iter(self.loader))
            self._calls = 0
            if left is not None and not left.ended:
                iterator = _OrTheNext(iterator, self.loader)
            if again is not None:
                self._again[place] = capture_generators()  # the first batch goes on from here
        return iterator

    def _fetch(self, iterator: Iterator[Any]) -> Any:
        place = self._here
        again = self._again.pop(place, None)
        if again is None:
            self._notify_drawing()
        if place not in self._kept:
            self._keep(again)
        at_end = None
        if not self._more:  # loaders differ in what their state is once they have come to the end
            at_end = self._kept[place][0].state if place in self._kept and self._handed else self._copy()
        batch = None
        try:
            with drawing_from(again):
                batch = next(iterator, END)
        finally:  # one that could not be fetched counts
            self._fetched += batch is not END
            self._calls = None if self._calls is None else self._calls + (batch is not END)
        if batch is END and self._running is not None:
            self._kept.pop(place, None)
            state = self._copy() if at_end is None else at_end
            self._at = _Inner(state, self._epoch, True, self._running[1], self._own_now(), self._calls)
            self._running = None
        return batch

    def _load(self, at: _Inner) -> Again:
        """Returns what is to be fetched and thrown away when it is iterated next."""
        assert at.state is not None
        self.end_workers()
        state, again = begin_anew(self.loader, thaw(at.state), at.calls)
        self.loader.load_state_dict(state)
        return again

    def _throw_away(self, iterator: Iterator[Any], again: Again, epoch: int) -> None:
        if again.batches:
            logger.info("%d batches of epoch %d are fetched again, and thrown away", again.batches, epoch)
        for number in range(again.batches):
            batch = None
            try:
                batch = next(iterator, END)
            except Exception as error:
                if raised_by_handler(error):
                    raise
                # It counts, as it does where the batches are used.
                logger.warning("batch %d of epoch %d, which was used, could not be fetched again: %s",
                               number, epoch, error)  # fmt: skip
            if batch is END:
                there = f"after batch {again.batches} of epoch {epoch}"
                raise MismatchError(f"the checkpoint lies {there}, and the loader has {number} in it")
            again.refuse_other_data(iterator, number + 1)
            if batch is not None:
                self.comparison.batch(epoch, number, batch)

    def _restored(self, at: _Inner, *, rest: bool = True) -> Iterator[Any]:
        """The rest of the epoch that this lies in; the process's generators are left as they are.

        Args:
            rest: whether that is wanted; otherwise data without a state is not fetched again to come there.
        """
        assert at.begin is not None
        self._announce(at.epoch)
        with self._as_at(at.begin):  # what is drawn in setting up is drawn as it was then
            self._pass_begins(at.epoch)
            again = self._load(at)
            iterator = self._note_workers(iter(self.loader))
            if rest:
                self._throw_away(iterator, again, at.epoch)
        if self._compares and not again.batches and not at.ended:
            self.comparison.skip("the data go on by their own state")
        self._to_load = False  # only now: where this was interrupted, it is done again
        self._calls = again.batches or at.calls
        if self._draws_late:
            self._put_back_own(at.own)
        else:
            for data in ("dataset", "collate_fn"):  # a sampler draws its order again
                self._put_back_own(at.own, below=data)
        self._running, self._fetched = (at.epoch, at.begin), self._handed
        return iterator

    def _leave(self, at: _Inner) -> None:
        """Bring the inner loader where the next epoch begins, from the end of one, or from where the loop left it.

        At the end some loaders hand out nothing more, and begin the next epoch when they are iterated again; others
        begin it at once. Left within an epoch, some begin the next one, and others first hand out the rest.
        """
        iterator = self._restored(at, rest=at.ended)
        if not at.ended:
            return
        with drawing_from(capture_generators()):
            more = next(iterator, END) is not END
        del iterator  # its workers end
        if more:
            self._load(at)
            if "held" in at.own:
                self._put_back_own(at.own)

    def _keep(self, again: Mapping[str, Any] | None) -> None:
        """Keep what the next batch is fetched from, if it may be asked for after that."""
        if self.listener is not None and (self._marked is not False or not self._more):
            self._kept[self._here] = self._now(), again if again is not None else capture_generators()
        if self._marked is None and len(self._kept) > WAITING:
            del self._kept[min(self._kept)]
            if not self._warned:
                self._warned = True
                logger.warning(
                    "%d batches were handed out, and none has reached a step: older loader states than those of the "
                    "last %d are dropped; a loop that fetches ahead must call step() after every iteration",
                    WAITING, WAITING,
                )  # fmt: skip

    def used(self, epoch: int, position: int, *, marked: bool) -> None:
        """What was handed out up to here has reached a step: no state before it will be asked for."""
        super().used(epoch, position, marked=marked)
        self._marked = marked
        for place in [place for place in self._kept if place < (epoch, position)]:
            del self._kept[place]

    def _now(self) -> _Inner:
        if self._running is None:
            return self._at
        epoch, begin = self._running
        batches = self.batches
        ended = batches is not None and self._fetched >= batches
        return _Inner(self._copy(), epoch, ended, begin, self._own_now(), self._calls)

    def _own_now(self) -> dict[str, Any]:
        return self._saved_own(self._own.now())

    def _expected(self) -> Comparison:
        return self.comparison

    def _pass_begins(self, epoch: int) -> None:
        if self._watched is not None:
            self._watched.begins(epoch)

    def _mark_of(self, batch: Any) -> Mark | None:
        if self._watched is not None:
            return Mark(0, self._watched.first, indices=True) if self._watched.first else None
        return super()._mark_of(batch) if self._compares else None

    def _copy(self) -> bytes:
        """The inner loader's state as it is: what it does later must not change that."""
        state = self.loader.state_dict()
        if state is None:
            raise UnsupportedError(
                f"state_dict() of {type(self.loader).__name__} returned None: this loader has no state"
            )
        try:
            return freeze(state, self._overlaps)
        except (pickle.PicklingError, TypeError, AttributeError, RecursionError):
            # What checkpoints hold can be copied after all; anything else is refused by its name.
            return freeze(codec.decode(codec.encode(state, name="the loader's state")))

    def state_at(self, epoch: int, position: int) -> dict[str, Any]:
        """The state that goes on from this place, which may lie behind batches fetched ahead.

        Raises:
            UnsupportedError: it was not kept, or the inner loader's state cannot be saved.
        """
        later = place = epoch, position
        while later not in self._kept and later in self._onward:
            later = self._onward[later]
        if later in self._kept:
            at = self._kept[later][0]
        elif later == self._here or epoch > self._epoch:
            at = self._now()
        else:
            at = None
        if at is None or at.epoch > epoch:
            raise UnsupportedError(
                f"the loader's state before batch {position} of epoch {epoch} was not kept: call step() after every "
                "iteration, from the first on"
            )
        again = self._again | {later: generators for later, (_, generators) in self._kept.items()}
        again = {later: again[later] for later in sorted(again) if later >= place}
        return {
            "epoch": epoch,
            "position": position,
            **self._identity(),
            "over": self._is_over(place),
            "ranks": ranks(),
            "inner": None if at.state is None else _saved(at),
            "again": [[*later, generators] for later, generators in again.items()],
        }

    def deals_itself(self, state: Mapping[str, Any]) -> str:
        return "" if state.get("inner") is None else self._name

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved position.

        Raises:
            MismatchError: the loader is another one, or has another number of workers.
        """
        refuse_another(state, self._identity())
        inner = state["inner"]
        if self._has_another_length(state) and inner is not None and self._mapped:
            self._put_back_own(inner)  # torchdata would go through the old order, by indices of the new data
            inner = None
        self._to_load, self._running = inner is not None, None
        self._at = _Inner() if inner is None else _read(inner)
        self._kept.clear()
        self._again = {(epoch, position): generators for epoch, position, generators in state["again"]}
        self._resume_at(state["epoch"], state["position"], over=state["over"])

    def _forget(self) -> None:
        super()._forget()
        self._at, self._to_load, self._running, self._fetched = _Inner(), False, None, 0
        self._kept.clear()
        self._again, self._marked = {}, None


class _OrTheNext(Iterator[Any]):
    """The rest of an epoch that was left, or the next one if that is nothing."""

    def __init__(self, rest: Iterator[Any], loader: StatefulLoader) -> None:
        self._batches, self._loader = rest, loader
        self._first = True

    def __next__(self) -> Any:
        first, self._first = self._first, False
        batch = next(self._batches, END)
        if batch is not END:
            return batch
        if not first:
            raise StopIteration
        self._batches = iter(self._loader)
        return next(self._batches)


def _saved(at: _Inner) -> dict[str, Any]:
    """As extra state."""
    assert at.state is not None
    return {
        "state": thaw(at.state), "epoch": at.epoch, "ended": at.ended, "begin": at.begin, **at.own,
        "calls": at.calls,
    }  # fmt: skip


def _read(inner: Mapping[str, Any]) -> _Inner:
    state = freeze(inner["state"])
    own = {name: inner[name] for name in ("own", "held") if name in inner}
    return _Inner(state, inner["epoch"], inner["ended"], inner["begin"], own, inner.get("calls"))


def _draws_late(loader: Any) -> bool:
    """Whether torchdata's order and its workers' seed come from one generator: the seed is drawn after the order, but
    before it when a state is loaded, so that later epochs would have other orders."""
    sampler = getattr(loader, "sampler", None)
    torchdatas = type(sampler).__module__.startswith("torchdata.") and not getattr(sampler, "replacement", True)
    return torchdatas and getattr(sampler, "generator", None) is loader.generator


def _refuse_unsaved_order(loader: Any) -> None:
    """Refuse torchdata's loader with one of torch's samplers that draws its order from the process's generator: neither
    saves what it drew."""
    if not is_torchdatas(loader):
        return
    for one in parts(loader):
        if isinstance(one, _DRAWING) and one.generator is None:
            raise UnsupportedError(
                f"the order of this {type(one).__name__} is in no state of {type(loader).__name__}, and a resume would "
                "draw another: give the sampler generator=torch.Generator(), or pass shuffle=True, or a plain torch "
                "DataLoader to checkflow.resumable"
            )
