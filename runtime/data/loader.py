"""A DataLoader whose position can be saved: each sample once an epoch, in the same order, with the same augmentation.

Order comes from (seed, epoch), each sample's randomness from (seed, epoch, index): the state is the epoch, its position
and drawn seeds, and skipping loads nothing. Without a seed the loader draws an epoch's from torch's generator as
torch's loader does, so that the order is torch's, too.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from typing import TYPE_CHECKING, Any, Generic

import torch
import torch.distributed
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import (
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    default_collate,
    default_convert,
)

from checkflow.runtime.data.arguments import (
    Order,
    given_share,
    read_seed,
    read_workers,
    refuse_contradictions,
    refuse_no_order,
    refuse_other_data,
    refuse_other_types,
    without_known_sampler,
)
from checkflow.runtime.data.base import LoaderListener, ResumableLoader, cannot_go_on, refuse_another, settle_length
from checkflow.runtime.data.epoch_seeds import EpochSeeds, Seeds, given_seeds
from checkflow.runtime.data.feed import Caught, Failure, Feed, made_here
from checkflow.runtime.data.fork_guard import start_safely
from checkflow.runtime.data.order import BatchSteps, SampleSteps, Share, Steps, Tail, count_steps
from checkflow.runtime.data.process_generators import Reseed
from checkflow.runtime.data.repeat.own_state import OwnState
from checkflow.runtime.data.repeat.used import Mark
from checkflow.runtime.data.samplers import BLOCK, SamplerStates, iterate_sampler, with_inner
from checkflow.runtime.data.seeded_dataset import SeededDataset, derived_seed
from checkflow.runtime.data.worker_processes import WorkerShield, end_persistent_workers

logger = logging.getLogger("checkflow")
_DRAWING = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)  # in ways that are not made here
_OF_WORKERS = -2  # in the place of an index
_SURE = 64  # boundaries after which a loop will not begin to report its steps; then states before the last are not kept
if TYPE_CHECKING:
    from typing_extensions import TypeVar

    _T_co = TypeVar("_T_co", covariant=True, default=Any)
else:
    from typing import TypeVar

    _T_co = TypeVar("_T_co", covariant=True)


class DataLoader(ResumableLoader, Generic[_T_co]):
    """``torch.utils.data.DataLoader`` for map-style data, resumable in the middle of an epoch.

    In annotations it is ``DataLoader[Sample]``, as torch's.

    Args:
        dataset: anything with ``__getitem__``, and ``__len__`` if there is no sampler. One that fetches whole batches
            (``__getitems__``) is asked for them, and seeded once for each batch instead of each sample.
        sampler, batch_sampler: the order; it must follow from the generators of Python, NumPy and torch, or from a
            ``generator`` or ``set_epoch`` of the sampler's own: these are seeded for each epoch. It is the order of the
            whole job, dealt to the ranks. A ``DistributedSampler`` only says that: its ranks, whether it shuffles,
            and its seed. This loader shuffles by that seed in an order of its own, deals it, each sample exactly once,
            and counts epochs; the sampler's ``set_epoch`` changes nothing.
        seed: of the order and of every sample's randomness; the same seed gives the same epochs. None: each epoch's are
            drawn from torch's generator, as torch's loader draws them: ``torch.manual_seed`` decides, the order is that
            of torch's loader (but for workers that persist, and for samplers that draw in other ways than ``shuffle``:
            with replacement, weighted, of a subset, which draw from generators of their own), and so is the training,
            where samples draw no numbers of their own. With several ranks, rank 0 draws for all.
        generator: that they are drawn from, in place of torch's own.
        reseed: called with a seed of 63 bits before each sample, for libraries that have generators of their own:
            ``reseed=transform.set_random_seed`` (albumentations). ``numpy.random.default_rng()`` makes one of
            these: make it anew for each sample, by ``torch.initial_seed()``, which is the sample's.
        rank, world_size: which part of each step is this process's; None: as torch.distributed says when the epoch
            begins. ``batch_size`` is that of one rank. 0 of 1: the sampler deals already.
        tail: of an epoch, what is left when fewer samples than a whole step takes are, under several ranks: "even" is
            smaller last batches, "drop" leaves them out (so does ``drop_last``), "pad" takes the epoch's first samples
            again. ``dropped`` and ``repeated`` say how many these were.
        others: as torch's. A batch that a sample or ``collate_fn`` raises an error in is passed over by who goes on
            after it, as torch's is.

    But for the draws of seeds the generators of the main process are left as they were, so that dropout does not repeat
    from batch to batch.

    Raises:
        UnsupportedError: the data set is iterable-style.
        ValueError: an argument is out of its range, or does not go with another.
    """

    _draws_as_torch = False  # whether an epoch's order is that of torch's after the same torch.manual_seed

    def __init__(
        self,
        dataset: Any,
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Iterable[Any] | None = None,
        batch_sampler: Iterable[Iterable[Any]] | None = None,
        num_workers: int = 0,
        collate_fn: Callable[[Any], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        generator: torch.Generator | None = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
        seed: int | None = None,
        reseed: Reseed | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        tail: Tail | None = None,
    ) -> None:
        num_workers = read_workers(num_workers)
        refuse_other_types(
            sampler=sampler, batch_sampler=batch_sampler, generator=generator, collate_fn=collate_fn,
            worker_init_fn=worker_init_fn, reseed=reseed,
            flags={"shuffle": shuffle, "drop_last": drop_last, "pin_memory": pin_memory,
                   "persistent_workers": persistent_workers, "in_order": in_order},
        )  # fmt: skip
        super().__init__(WorkerShield(worker_init_fn) if num_workers else None)
        refuse_other_data(dataset)
        refuse_contradictions(
            batch_size, shuffle, sampler, batch_sampler, drop_last=drop_last, tail=tail, timeout=timeout,
            workers=num_workers, in_order=in_order,
        )  # fmt: skip
        asked = Order(
            sampler, bool(shuffle), read_seed(seed), tail or ("drop" if drop_last else "even"),
            None if rank is None and world_size is None else given_share(rank, world_size),
        )  # fmt: skip
        order = without_known_sampler(asked, dataset, generator)
        refuse_no_order(order, batch_sampler, dataset)
        self.dataset, self.batch_size, self.drop_last = dataset, batch_size, drop_last
        self.num_workers, self.generator, self.batch_sampler = num_workers, generator, batch_sampler
        self.sampler, self.shuffle, self.seed, self.tail = order.sampler, order.shuffle, order.seed, order.tail
        self._share = order.share
        self._seeds = EpochSeeds(self.seed, generator, ordered=self.shuffle or not self._ordered_here)
        order_by = sampler if batch_sampler is None else batch_sampler
        self._states = None if self._ordered_here else SamplerStates(order_by, dataset)
        self._told = False  # what is logged once
        # Generators that samples draw from beside those that are seeded for each; with workers, these have copies.
        self._own = OwnState({"dataset": dataset, "collate_fn": collate_fn})
        self._own_at: dict[tuple[int, int], dict[str, Any]] = {}  # by epoch and position, where there are some
        self._unmarked = 0  # boundaries in a row that no step() has reported: such a loop does not fetch ahead
        self.dropped = self.repeated = 0  # samples, at the end of the last epoch that came to its end
        self._used: int | None = 0  # batches of this epoch; None: to be found by its position
        self._feed = Feed()
        self._dealt_in = 0  # the pass whose steps the feed has
        self._base = torch.Generator()  # torch draws a base seed at each epoch: not from the main generator
        collate = collate_fn or (default_convert if batch_size is None and batch_sampler is None else default_collate)
        self.collate_fn = collate
        device: dict[str, Any] = {"pin_memory_device": pin_memory_device} if pin_memory_device else {}
        seeded = SeededDataset(dataset, collate, batched=self._batched, reseed=reseed)
        self._caught = Caught(seeded)
        self._loader: TorchDataLoader[Any] = TorchDataLoader(
            self._caught,
            batch_sampler=self._feed,
            num_workers=num_workers,
            collate_fn=_as_it_is,
            pin_memory=pin_memory,
            timeout=timeout,
            worker_init_fn=self.shield,
            multiprocessing_context=multiprocessing_context,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            in_order=in_order,
            generator=self._base,
            **device,
        )

    @property
    def _batched(self) -> bool:
        return self.batch_size is not None or self.batch_sampler is not None

    @property
    def share(self) -> Share:
        """This process's part of each step."""
        if self._share is not None:  # the user has said which
            return self._share
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return Share(torch.distributed.get_rank(), torch.distributed.get_world_size())
        return Share()

    @property
    def exhausted(self) -> bool:
        """Whether this epoch is known to have no batch left."""
        if not self._handed:
            return self.batches == 0
        if self._ordered_here:
            return self._count(self._left) == 0
        if self._dealt_in == self._pass:
            return not self._feed.more
        # A sampler's length need not be this epoch's, and counts batches where it makes them: what it gives decides.
        return self._seeds.known(self.epoch) and not self._steps(self._epoch_seeds()).more

    @property
    def _ordered_here(self) -> bool:
        """Whether this loader makes the order itself."""
        return self.sampler is None and self.batch_sampler is None

    @property
    def _left(self) -> int:
        """Samples of an epoch that this loader orders."""
        return max(0, len(self.dataset) - self._handed)

    def used_batches(self) -> int:
        if self._ordered_here:
            return self._count(len(self.dataset)) - self._count(self._left)
        if self._used is None:
            if not self._seeds.known(self.epoch) and self.share.world_size > 1:
                return super().used_batches()  # all ranks would have to draw at once
            self._used = self._find_used(self._epoch_seeds())
        return self._used

    def _find_used(self, seeds: Seeds) -> int:
        """By iterating the sampler anew, which no iteration that goes on would survive."""
        used = itertools.takewhile(lambda step: step.end <= self._handed, self._steps(seeds, 0))
        return sum(1 for _ in used)

    def _move(self, epoch: int, position: int) -> None:
        super()._move(epoch, position)
        self._used = 0 if position == 0 else None

    def _count(self, samples: int) -> int:
        return count_steps(samples, self.batch_size or 1, self.share.world_size, self.tail)

    @property
    def batches(self) -> int | None:
        """In a whole epoch; None: the sampler does not say."""
        if self.batch_sampler is None:
            order = self.dataset if self.sampler is None else self.sampler
            return self._count(len(order)) if isinstance(order, Sized) else None
        if not isinstance(self.batch_sampler, Sized):
            return None
        batches, ranks = len(self.batch_sampler), self.share.world_size
        return batches // ranks if self.tail == "drop" else -(-batches // ranks)

    def _rest_of_epoch(self) -> Iterator[Any]:
        if self._ordered_here and self.exhausted:
            self._end(self._left, 0)
            return iter(())
        # At the begin of an epoch the boundary comes first: the epoch before must not have seen this one's seeds drawn.
        notified = self._handed == 0
        if notified:
            self._notify_requested()
        seeds = self._epoch_seeds()
        if self._used is None and not self._ordered_here:
            self._used = self._find_used(seeds)
        self._feed.begin(self._steps(seeds), seeds.samples, self.epoch)
        self._dealt_in = self._pass
        if not self._feed.more:
            self._end(self._feed.steps.dropped, self._feed.steps.repeated)
            return iter(())
        self._base.manual_seed(derived_seed(seeds.samples, self.epoch, _OF_WORKERS))
        if self.shield is not None:
            self.shield.workers_start()
            start_safely(self._loader)
        return _Rest(self, self._batches(), notified=notified)

    def _batches(self) -> Iterator[Any]:
        """What the feed's steps become."""
        if self.num_workers or self._loader.pin_memory:
            return self._note_workers(iter(self._loader))
        return made_here(self._feed, self._caught)

    def _end(self, dropped: int, repeated: int) -> None:
        """The epoch is over."""
        self.dropped, self.repeated = dropped, repeated
        asked = self.share.world_size == 1 and not repeated  # by drop_last, which says it all
        if (dropped or repeated) and not asked and self.share.rank == 0:
            logger.info("epoch %d: %d samples left out, %d repeated", self.epoch, dropped, repeated)

    def _steps(self, seeds: Seeds, position: int | None = None) -> Steps:
        position = self._handed if position is None else position
        share = self.share
        order: Iterable[Any]
        if self.batch_sampler is not None:
            order = self._iterate(self.batch_sampler, seeds)
            return BatchSteps(self.comparison.batches(self.epoch, order), share, self.tail, position)
        if self.sampler is not None:
            order = self._iterate(self.sampler, seeds)
        elif self.shuffle:
            order = _shuffled(len(self.dataset), seeds.order)
        else:
            order = range(len(self.dataset))
        order = self.comparison.samples(self.epoch, order)
        return SampleSteps(order, self.batch_size or 1, share, self.tail, position)

    def _iterate(self, order: Iterable[Any], seeds: Seeds) -> Iterator[Any]:
        """What a sampler gives in this epoch."""
        return iterate_sampler(order, seeds.order, self.epoch, states=self._states)

    def _epoch_seeds(self) -> Seeds:
        if self.listener is not None and not self._seeds.known(self.epoch):
            self.listener.on_seeds_needed()
        return self._seeds.of(self.epoch, self.share)

    def follow(self, listener: LoaderListener) -> None:
        """A job begins, or goes on, with this loader."""
        super().follow(listener)
        order = self.sampler if self.batch_sampler is None else self.batch_sampler
        drawing = [type(one).__name__ for one in with_inner(order) if isinstance(one, _DRAWING)]
        told, self._told = self._told, True
        if self.num_workers and (own := self._own.now()) and not told:
            logger.warning(
                "samples draw from a random generator of their own, %s, of which each worker has a copy: a resume does "
                "not repeat its numbers; make it anew for each sample, from torch.initial_seed(), or pass reseed=",
                next(iter(own["generators"])),
            )  # fmt: skip
        if drawing and self.seed is None and not (told or self._draws_as_torch):
            logger.info(
                "the loader's %s draws from a seed of each epoch's own, so that a resume finds its order: other "
                "samples than torch's DataLoader gives after the same torch.manual_seed", drawing[0],
            )  # fmt: skip

    def end_workers(self) -> None:
        """End workers that persist; iterating starts new ones."""
        self._end_workers_in_time()
        end_persistent_workers(self._loader)

    def state_at(self, epoch: int, position: int) -> dict[str, Any]:
        """The state that goes on from this place, which may lie behind batches fetched ahead."""
        states = {} if self._states is None else self._states.state_from(epoch)
        if not self.num_workers and (own := self._own_at.get((epoch, position), self._own.now())):
            states["data"] = own
        return {"epoch": epoch, "position": position, **self._identity(), **self._seeds.state_from(epoch), **states}

    def used(self, epoch: int, position: int, *, marked: bool) -> None:
        """What was handed out up to here has reached a step: no state before it will be asked for."""
        self._unmarked = 0 if marked else self._unmarked + 1
        self._own_at = {place: own for place, own in self._own_at.items() if place >= (epoch, position)}
        if self._states is not None:
            self._states.used(epoch)

    def _forget(self) -> None:
        self._seeds.forget()
        if self._states is not None:
            self._states.forget()
        self.dropped = self.repeated = 0

    def _identity(self) -> dict[str, Any]:
        """What the position is counted in."""
        order = self.batch_sampler if self.batch_sampler is not None else self.sampler
        return {
            "size": len(self.dataset) if isinstance(self.dataset, Sized) else None,
            "shuffle": self.shuffle,
            "sampler": None if order is None else " of ".join(type(one).__name__ for one in with_inner(order)),
            "seed": self.seed,
        }

    def dealt_by(self) -> dict[str, Any]:
        if self.share.world_size == 1:
            return {}
        said = self._identity()
        return {
            "number of samples": said.pop("size"), "batch_size": self.batch_size, **said, "tail": self.tail,
            "number of ranks": self.share.world_size,
        }  # fmt: skip

    def deals_itself(self, state: Mapping[str, Any]) -> str:
        dealt = self._share == Share() and not self._ordered_here and state["position"] > 0
        return f"its {self._identity()['sampler']}, under rank=0, world_size=1" if dealt else ""

    def reseeded(self, state: dict[str, Any]) -> dict[str, Any]:
        """A saved state with this loader's seed in place of its own; an epoch that has begun keeps its order."""
        epoch, seed = state["epoch"], state["seed"]
        begun = {} if seed is None or not state["position"] else {epoch: tuple(given_seeds(seed, epoch))}
        return {**state, "seed": self.seed, "drawn": begun | state["drawn"]}  # which may be of an earlier seed still

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved position.

        Raises:
            MismatchError: the data set's size, the order or the seed differs: other samples would be meant.
        """
        identity = self._identity()
        refuse_another(state, identity)
        epoch, position = state["epoch"], state["position"]
        over = position == 0 or (self._ordered_here and self._count(max(0, state["size"] - position)) == 0)
        settled = settle_length(state, identity, over=over, accepted=self.accepted)
        self._seeds.put_back(state)
        self._own.put_back(state.get("data", {}), accepted="loader" in self.accepted)
        self._own_at.clear()
        if self._states is not None:
            self._states.put_back(state, accepted="loader" in self.accepted)
        if settled is not state and position:
            epoch, position = epoch + 1, 0
        self.set_epoch(epoch, position)


class _Rest(Iterator[Any]):
    """What is left of an epoch that has some: the loader's place moves with each batch.

    Args:
        batches: what the feed's steps become, errors in their places.
        notified: whether the listener knows that the first one is asked for.
    """

    def __init__(self, loader: DataLoader, batches: Iterator[Any], *, notified: bool) -> None:
        self._loader, self._feed, self._batches, self._notified = loader, loader._feed, batches, notified
        self._broken = False  # by an error
        self._looked = False  # for generators of the data's

    def __del__(self) -> None:  # before torch's iterator, which would wait for each worker
        self._loader._end_workers_in_time()

    def __next__(self) -> Any:
        if self._broken:
            raise cannot_go_on()
        loader, feed = self._loader, self._feed
        self._broken = True  # unless this returns
        more = feed.more
        self._broken = False
        if not more:
            loader._end(feed.steps.dropped, feed.steps.repeated)
            raise StopIteration
        if not self._notified:
            loader._notify_requested()
        self._notified = False
        self._broken = True
        batch = next(self._batches)
        self._broken = False
        step = feed.fetched.popleft()
        if type(batch) is Failure:
            batch.raise_it()
        loader._handed = step.end
        if loader.listener is not None and not loader.num_workers:
            if not self._looked:
                loader._own.look()  # some make theirs with the first sample
                self._looked = True
            if loader._unmarked < _SURE and (own := loader._own.now()):
                loader._own_at[loader._epoch, step.end] = own
        loader.mark = Mark(step.end - len(step.used), step.used, indices=True)
        if loader._used is not None:
            loader._used += 1
        loader._notify_handed(batch)
        return batch


def _as_it_is(batch: Any) -> Any:
    return batch


def _shuffled(size: int, seed: int) -> Iterator[int]:
    order = torch.randperm(size, generator=torch.Generator().manual_seed(seed), device="cpu")
    return itertools.chain.from_iterable(order[begin : begin + BLOCK].tolist() for begin in range(0, size, BLOCK))
