"""The audit of checkflow.DataLoader: a run interrupted anywhere gives what the uninterrupted one gives, byte by byte.

Every pair of order, batch size, ``drop_last``, ``collate_fn`` and seed (given or drawn) is interrupted before and after
every batch of two or three epochs without workers, and at some places with one and four workers, which persist or not.
What is compared: the batches' bytes, and what the loop draws from torch's generator between them.
"""

from __future__ import annotations

import gc
import itertools
import json
import random
import sys
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, RandomSampler, Sampler, WeightedRandomSampler, _utils

from checkflow.core.errors import MismatchError, UnsupportedError
from checkflow.runtime.data.loader import DataLoader
from checkflow.runtime.data.order import Share
from checkflow.runtime.data.samplers import BLOCK
from checkflow.runtime.format import codec
from tests.support.pairing import pairs
from tests.support.waiting import PATIENCE_SECONDS

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create 4 worker:UserWarning")

SIZE = 9
BATCH_SIZES = (1, 3, 8, 20)  # one by one, exactly full, one left over, larger than the data
MOST_STATE_BYTES = 160


class Images:
    """Images that all three generators augment; each carries its index. It notes what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor, np.ndarray[Any, Any], float]:
        self.asked.append(index)
        return index, torch.rand(2), np.random.rand(1), random.random()


class Endless(Sampler[int]):
    """Draws for ever, from generators of the process and from one of its own."""

    def __init__(self) -> None:
        self.generator = torch.Generator()

    def __iter__(self) -> Iterator[int]:
        while True:
            shift = random.randrange(SIZE) + int(np.random.randint(SIZE))
            for index in torch.randint(SIZE, (512,), generator=self.generator).tolist():
                yield (index + shift) % SIZE


@dataclass
class Packed:
    """A container that torch knows nothing of."""

    samples: list[Any]


def mixed(samples: Any) -> tuple[Any, ...]:
    """As mixup: what is mixed with what, and how much, is drawn from all three generators."""
    partners, share = torch.randperm(8), np.random.beta(0.4, 0.4)
    return samples, partners, share, random.random()


COLLATES: dict[str, Callable[[Any], Any] | None] = {"default": None, "mixup": mixed, "container": Packed}
Make = Callable[[Images, int, bool], dict[str, Any]]


def own_generator(data: Images, _batch: int, _drop: bool) -> dict[str, Any]:
    return {"sampler": RandomSampler(data, generator=torch.Generator().manual_seed(3))}


def ready_batches(data: Images, batch: int, drop: bool) -> dict[str, Any]:
    return {"batch_sampler": BatchSampler(RandomSampler(data), batch, drop)}


ORDERS: dict[str, Make] = {
    "sequential": lambda _data, _batch, _drop: {},
    "shuffled": lambda _data, _batch, _drop: {"shuffle": True},
    "weighted": lambda *_: {"sampler": WeightedRandomSampler([1.0 + index for index in range(SIZE)], SIZE + 1)},
    "own generator": own_generator,
    "ready batches": ready_batches,
    "endless": lambda *_: {"sampler": Endless()},
    "not batched": lambda _data, _batch, _drop: {"shuffle": True},
}


@dataclass(frozen=True)
class Case:
    """One combination."""

    order: str
    collate: str
    batch_size: int
    drop_last: bool
    seed: int | None

    def loader(self, data: Images | None = None, **workers: Any) -> DataLoader:
        data = data or Images()
        chosen = ORDERS[self.order](data, self.batch_size, self.drop_last)
        if self.order == "not batched":
            chosen |= {"batch_size": None}
        elif self.order != "ready batches":
            chosen |= {"batch_size": self.batch_size, "drop_last": self.drop_last}
        return DataLoader(data, collate_fn=COLLATES[self.collate], seed=self.seed, **chosen, **workers)

    @property
    def epochs(self) -> int:
        """As many batches are many places: what is left of a run at each takes the time."""
        return 2 if self.batch_size == 1 else 3

    @property
    def most_batches(self) -> int | None:
        """That the loop takes of one epoch: where an order has no end, it is left with ``break``."""
        return 2 + SIZE // self.batch_size if self.order == "endless" else None


def cases(**workers: Any) -> tuple[str, list[Any]]:
    """Pairs of what a case is made of, and of these; what is not batched has neither batch sizes nor a last batch."""
    batched = [order for order in ORDERS if order != "not batched"]
    always: dict[str, Any] = {"collate": list(COLLATES), "seed": (7, None), **workers}
    names, found = pairs(order=batched, batch_size=BATCH_SIZES, drop_last=(False, True), **always)
    return names, found + pairs(order=["not batched"], batch_size=[1], drop_last=[False], **always)[1]


def raw(batch: Any) -> Any:
    """A batch with the bytes of all that is in it."""
    if isinstance(batch, torch.Tensor):
        return str(batch.dtype), tuple(batch.shape), batch.numpy().tobytes()
    if isinstance(batch, np.ndarray | np.generic):
        return str(batch.dtype), batch.shape, batch.tobytes()
    if isinstance(batch, Packed):
        return "Packed", raw(batch.samples)
    if isinstance(batch, tuple | list):
        return [raw(part) for part in batch]
    assert type(batch) in (int, float), type(batch)
    return batch


def samples(batch: Any, case: Case) -> list[tuple[int, bytes]]:
    """The index, and the bytes that were drawn for it, of each sample of a batch."""
    inner = batch[0] if case.collate == "mixup" else batch.samples if case.collate == "container" else batch
    if case.order == "not batched":
        inner = [inner]
    elif case.collate == "default":
        inner = list(zip(*inner, strict=True))
    return [(int(index), b"".join(np.asarray(part).tobytes() for part in drawn)) for index, *drawn in inner]


@dataclass
class Place:
    """Between two batches: all that an interrupted run needs to go on, as it is saved."""

    batches: int  # before it, of all epochs
    batches_of_epoch: int
    state: dict[str, Any]
    generator: torch.Tensor  # torch's, which the job saves


def train(loader: DataLoader, case: Case, taken: int = 0) -> Iterator[tuple[int, Any, float]]:
    """The loop of a job: the epoch, each batch, and what is drawn beside it, as dropout draws.

    Args:
        taken: batches of the first epoch that an earlier run has taken.
    """
    for epoch in range(loader.epoch, case.epochs):
        if case.most_batches is None:
            batches = iter(loader)
        else:
            if epoch != loader.epoch:
                loader.set_epoch(epoch)
            batches = itertools.islice(loader, case.most_batches - taken)
            taken = 0
        for batch in batches:
            yield epoch, batch, torch.rand(()).item()


def uninterrupted(loader: DataLoader, case: Case) -> tuple[list[tuple[int, Any, float]], list[Place]]:
    """All that the loop sees, and every place to go on from: before the first batch, and after each."""
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(11)
    others = random.getstate(), str(np.random.get_state())
    seen: list[tuple[int, Any, float]] = []
    places = [Place(0, 0, loader.state_dict(), torch.get_rng_state())]
    for row in train(loader, case):
        of_epoch = 1 + (places[-1].batches_of_epoch if seen and seen[-1][0] == row[0] else 0)
        seen.append(row)
        places.append(Place(len(seen), of_epoch, loader.state_dict(), torch.get_rng_state()))
    # The job's own generators give what they give without a loader; seeds that are drawn come from torch's.
    assert (random.getstate(), str(np.random.get_state())) == others
    torch.manual_seed(11)
    drawn = [drawn for *_, drawn in seen]
    assert len(set(drawn)) == len(drawn)
    assert case.seed is None or drawn == [torch.rand(()).item() for _ in drawn]
    return seen, places


def rest(loader: DataLoader, case: Case, place: Place) -> list[Any]:
    """What the loop sees after this place, in a process whose generators are anywhere."""
    saved = codec.encode(place.state)
    assert len(saved) <= MOST_STATE_BYTES
    # As JSON, too, whose keys are strings and which knows no tuples: it must mean the same place.
    loader.load_state_dict(json.loads(json.dumps(place.state)))
    of_json = loader.state_dict()
    loader.load_state_dict(codec.decode(saved))
    assert loader.state_dict() == of_json == place.state
    random.seed(99)
    torch.manual_seed(99)
    torch.set_rng_state(place.generator)
    return raw_rows(train(loader, case, place.batches_of_epoch))


def raw_rows(rows: Any) -> list[Any]:
    return [(epoch, raw(batch), drawn) for epoch, batch, drawn in rows]


def assert_right(case: Case, seen: list[tuple[int, Any, float]]) -> None:
    """What an epoch must give, whoever loads it."""
    epochs: list[list[tuple[int, bytes]]] = [[] for _ in range(case.epochs)]
    for epoch, batch, _ in seen:
        epochs[epoch] += samples(batch, case)
        if case.drop_last:
            assert len(samples(batch, case)) == case.batch_size
    given = SIZE + (case.order == "weighted")
    dropped = given % case.batch_size if case.drop_last else 0
    for number, epoch in enumerate(epochs):
        indices = [index for index, _ in epoch]
        if case.most_batches is not None:
            assert len(indices) == case.most_batches * case.batch_size
            continue
        assert len(indices) == given - dropped
        if case.order == "sequential":
            assert indices == list(range(given - dropped))
        elif case.order != "weighted":
            assert len(set(indices)) == len(indices)
            assert number == 0 or len(indices) < SIZE or indices != [index for index, _ in epochs[number - 1]]
    # Each sample's randomness is its own in each epoch.
    drawn = {(number, *sample) for number, epoch in enumerate(epochs) for sample in epoch}
    assert len({one for *_, one in drawn}) == len({(number, index) for number, index, _ in drawn}) == len(drawn)


@pytest.mark.parametrize(*cases())
def test_interrupted_anywhere(order: str, batch_size: int, drop_last: bool, collate: str, seed: int | None) -> None:
    case, data = Case(order, collate, batch_size, drop_last, seed), Images()
    seen, places = uninterrupted(case.loader(data), case)
    assert_right(case, seen)
    whole, asked = raw_rows(seen), data.asked
    used = [len(samples(batch, case)) for _, batch, _ in seen]
    for place in places:
        data = Images()
        found = rest(case.loader(data), case, place)
        assert found == whole[place.batches :], place.batches
        assert data.asked == asked[sum(used[: place.batches]) :], place.batches  # skipping loads nothing


KINDS = [(1, False), (1, True), (4, False), (4, True)]


@pytest.mark.parametrize(*cases(workers=(1, 4), persistent=(False, True)))
def test_with_workers(
    order: str, batch_size: int, drop_last: bool, collate: str, seed: int | None, workers: int, persistent: bool
) -> None:
    case = Case(order, collate, batch_size, drop_last, seed)
    seen, places = uninterrupted(case.loader(), case)
    whole = raw_rows(seen)
    loader = case.loader(num_workers=workers, persistent_workers=persistent)
    if not persistent:
        # One epoch, since each starts its workers anew: all that is left at a place of the last one.
        last = [place for place in places if place.state["epoch"] == case.epochs - 1] or places
        place = last[(workers + drop_last) % len(last)]
        assert rest(loader, case, place) == whole[place.batches :], place.batches
        return
    own, own_places = uninterrupted(loader, case)
    assert raw_rows(own) == whole
    # What was fetched ahead is no part of a place.
    assert [place.state for place in own_places] == [place.state for place in places]
    for number in (int(drop_last), len(places) // 2, len(places) - 1):
        place = places[min(number, len(places) - 1)]
        assert rest(loader, case, place) == whole[place.batches :], place.batches
    loader.end_workers()


@pytest.mark.parametrize("workers", [0, 1, 4])
def test_a_generator_of_the_loader_s_own(workers: int) -> None:
    """Its state is one more thing to save: it is 5 KB, and no JSON."""

    def make() -> DataLoader:
        return DataLoader(Images(), 2, True, generator=torch.Generator().manual_seed(8), num_workers=workers)

    whole, places = make(), []
    rows: list[Any] = []
    for _ in range(2):
        for batch in whole:
            rows.append(raw(batch))
            places.append(codec.encode(whole.state_dict()))
    assert len({str(row) for row in rows}) == len(rows) == 10
    for number, saved in list(enumerate(places, 1))[:: 1 if workers == 0 else 4]:
        assert len(saved) < 5300
        loader = make()
        loader.load_state_dict(codec.decode(saved))
        found = [raw(batch) for _ in range(loader.epoch, 2) for batch in loader]
        assert found == rows[number:]
    with pytest.raises(MismatchError, match="no generator="):
        make().load_state_dict(DataLoader(Images(), 2, True).state_dict())


class Counted(Images):
    """Counts what it is asked for, in memory that workers share."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = torch.zeros(SIZE, dtype=torch.int64).share_memory_()

    def __getitem__(self, index: int) -> Any:
        self.counts[index] += 1
        return super().__getitem__(index)


@pytest.mark.parametrize("workers", [1, 4])
@pytest.mark.parametrize("position", [0, 2, 6, 8, 9])
def test_workers_are_asked_for_nothing_that_is_skipped(position: int, workers: int) -> None:
    data = Counted()
    order = [index for batch in DataLoader(Images(), 2, True, seed=4) for index, *_ in zip(*batch, strict=True)]
    loader = DataLoader(data, 2, True, seed=4, num_workers=workers)
    loader.set_epoch(0, position)
    list(loader)
    assert [index for index in order if data.counts[index]] == order[position:]
    assert data.counts.sum() == SIZE - position


# Errors in the midst


class Faulty(Images):
    """Some samples cannot be read."""

    def __init__(self, bad: set[int], error: type[Exception]) -> None:
        super().__init__()
        self.bad, self.error = bad, error

    def __getitem__(self, index: int) -> Any:
        if index in self.bad:
            raise self.error(f"sample {index} cannot be read")
        return super().__getitem__(index)


def told(function: Callable[..., Any], *arguments: Any) -> tuple[type[Exception], str]:
    """The error, and how it is shown. Nobody keeps it: it refers to torch's iterator, whose workers would end late."""
    try:
        function(*arguments)
    except Exception as error:  # noqa: BLE001 - the test says which
        return type(error), traceback.format_exc()
    raise AssertionError("there was no error")


def error_of_next(batches: Iterator[Any]) -> type[Exception]:
    return told(next, batches)[0]


@pytest.mark.parametrize("error", [ValueError, KeyError, StopIteration])
@pytest.mark.parametrize("workers", [0, 1, 4])
def test_who_goes_on_after_an_error_has_all_other_batches(workers: int, error: type[Exception]) -> None:
    """As of torch's loader; an error never looks like an epoch's end."""
    whole = [raw(batch) for batch in DataLoader(Images(), 2, seed=1)]
    loader = DataLoader(Faulty({2, 8}, error), 2, seed=1, num_workers=workers)
    batches = iter(loader)
    expected_error = RuntimeError if error is StopIteration else error
    for number, expected in enumerate(whole):
        before = loader.position
        if number in (1, 4):
            # At the place of the last good batch the bad one comes again, once it can be read.
            assert error_of_next(batches) == expected_error
            assert loader.position == before
            again = DataLoader(Images(), 2, seed=1)
            again.load_state_dict(loader.state_dict())
            assert raw(next(iter(again))) == expected
        else:
            assert raw(next(batches)) == expected
            assert loader.position == min(SIZE, 2 * number + 2)
    assert [error_of_next(batches) for _ in range(2)] == [StopIteration, StopIteration]
    assert loader.epoch == 0


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_is_told_as_it_was_raised(workers: int) -> None:
    loader = DataLoader(Faulty({2}, ValueError), 2, seed=1, num_workers=workers)
    kind, text = told(list, loader)
    assert kind is ValueError
    assert "sample 2 cannot be read" in text
    assert ", in __getitem__" in text


def test_nothing_refers_to_an_error_that_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers whose iterator goes by itself end at once; where the collector takes it, in five seconds each."""
    monkeypatch.delitem(sys.modules, "accelerate.state", raising=False)  # other tests may have imported it
    gc.collect()
    gc.disable()
    try:
        batches = iter(DataLoader(Faulty({2}, ValueError), 2, seed=1, num_workers=1))
        next(batches)
        gone = weakref.ref(batches._rest._batches)
        assert error_of_next(batches) is ValueError
        del batches
        assert gone() is None
    finally:
        gc.enable()


def broken_collate(batch: Any) -> Any:
    raise ValueError(f"{len(batch)} samples do not fit together")


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_in_collate_fn_ends_a_loop_where_it_is(workers: int) -> None:
    loader = DataLoader(Images(), 4, seed=1, collate_fn=broken_collate, num_workers=workers)
    kind, text = told(list, loader)
    assert kind is ValueError
    assert "4 samples do not fit together" in text
    assert (loader.epoch, loader.position) == (0, 0)


class Interrupted(Sampler[int]):
    def __init__(self, given: int) -> None:
        self.given = given

    def __iter__(self) -> Iterator[int]:
        yield from (index % SIZE for index in range(self.given))
        raise ValueError("the order cannot be read")


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_of_a_sampler_is_no_end_of_an_epoch(workers: int) -> None:
    begin = iter(DataLoader(Images(), 2, sampler=Interrupted(3), seed=1, num_workers=workers))
    assert [error_of_next(begin) for _ in range(2)] == [ValueError, ValueError]
    later = iter(DataLoader(Images(), 600, sampler=Interrupted(BLOCK + 1), seed=1, num_workers=workers))
    kind, text = told(list, later)
    assert kind is ValueError
    assert "the order cannot be read" in text
    assert [error_of_next(later) for _ in range(2)] == [RuntimeError, RuntimeError]


class Stuck(Images):
    def __getitem__(self, index: int) -> Any:
        if index == 4:
            time.sleep(PATIENCE_SECONDS)
        return super().__getitem__(index)


@pytest.mark.slow
def test_a_worker_that_takes_too_long_is_no_end_of_an_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "accelerate.state", raising=False)  # other tests may have imported it
    batches = iter(DataLoader(Stuck(), 2, seed=1, num_workers=1, timeout=PATIENCE_SECONDS))
    assert len([next(batches), next(batches)]) == 2
    monkeypatch.setattr(_utils, "MP_STATUS_CHECK_INTERVAL", 0.1)  # so long its end waits for this worker
    batches._rest._batches._timeout = 0.5  # the first ones took as long as it takes to start a worker
    for message in ("timed out", "ended with an error, and cannot go on"):
        kind, text = told(next, batches)
        assert kind is RuntimeError
        assert message in text


# Loops that are left, begun again, and at once


@pytest.mark.parametrize(("workers", "persistent"), [(0, False), *KINDS])
def test_a_loop_that_was_left_is_followed_by_the_next_epoch(workers: int, persistent: bool) -> None:
    """As of torch's loader, which begins anew. What was fetched ahead is forgotten."""
    whole = DataLoader(Images(), 2, True, seed=3)
    epochs = [[raw(batch) for batch in whole] for _ in range(3)]
    loader = DataLoader(Images(), 2, True, seed=3, num_workers=workers, persistent_workers=persistent)
    for epoch, stop in enumerate((2, 1, 5)):
        found = []
        for batch in loader:
            found.append(raw(batch))
            if len(found) == stop:
                break
        assert found == epochs[epoch][:stop]
        assert (loader.epoch, loader.position) == (epoch, min(2 * stop, SIZE))
        # Whoever goes on from here has the rest, and nothing of what was fetched ahead is missing.
        again = DataLoader(Images(), 2, True, seed=3)
        again.load_state_dict(loader.state_dict())
        assert [raw(batch) for batch in again] == epochs[epoch][stop:]
    loader.end_workers()


MOVES: dict[str, Callable[[DataLoader], Any]] = {
    "another loop": lambda loader: list(loader),
    "another loop, left": lambda loader: next(iter(loader)),
    "set_epoch": lambda loader: loader.set_epoch(5),
    "load_state_dict": lambda loader: loader.load_state_dict(DataLoader(Images(), 2, True, seed=3).state_dict()),
}


@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (1, False), (1, True)])
@pytest.mark.parametrize("move", MOVES)
def test_two_iterations_at_once_are_refused_in_words(move: str, workers: int, persistent: bool) -> None:
    """Torch's two iterators go on side by side (persistent workers mix them up); here, one place would be two's."""
    loader = DataLoader(Images(), 2, True, seed=3, num_workers=workers, persistent_workers=persistent)
    first = iter(loader)
    next(first)
    MOVES[move](loader)
    state = loader.state_dict()
    with pytest.raises(UnsupportedError, match="another one began since, or the epoch was set"):
        next(first)
    assert loader.state_dict() == state
    # The newer one goes on, whatever became of the older.
    loader.set_epoch(1)
    whole = DataLoader(Images(), 2, True, seed=3)
    whole.set_epoch(1)
    assert [raw(batch) for batch in loader] == [raw(batch) for batch in whole]
    loader.end_workers()


def test_an_iteration_that_is_over_stays_so() -> None:
    loader = DataLoader(Images(), 2, seed=3)
    first = iter(loader)
    assert len(list(first)) == 5
    list(loader)
    assert list(first) == []  # as every iterator of Python's, whatever the loader does now


def test_what_is_set_between_loops_is_where_the_next_one_begins() -> None:
    loader = DataLoader(Images(), 2, True, seed=3)
    whole = [[raw(batch) for batch in loader] for _ in range(3)]
    loader.set_epoch(1, 4)
    assert [raw(batch) for batch in loader] == whole[1][2:]
    assert [raw(batch) for batch in loader] == whole[2]


# What is known of a place


@pytest.mark.parametrize("order", [order for order in ORDERS if order != "endless"])
@pytest.mark.parametrize("drop_last", [False, True])
def test_the_last_batch_is_known_to_be_the_last(order: str, drop_last: bool) -> None:
    case = Case(order, "default", 4, drop_last and order != "not batched", 7)
    loader = case.loader()
    assert not loader.exhausted
    number = 0
    for number, _ in enumerate(loader, 1):
        again = case.loader()
        again.load_state_dict(loader.state_dict())
        assert loader.exhausted == again.exhausted == (number == len(loader))
    assert number == len(loader)
    assert loader.exhausted


class Growing(Sampler[int]):
    """An epoch is longer than the one before."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self)))

    def __len__(self) -> int:
        return 3 + 3 * self.epoch


def test_a_sampler_s_length_of_another_epoch_ends_nothing() -> None:
    loader = DataLoader(Images(), 2, sampler=Growing(), seed=1)
    loader.set_epoch(2, 4)  # in a new process, whose sampler knows of no epoch yet and is 3 long
    assert not loader.exhausted
    assert [index for batch in loader for index in batch[0].tolist()] == [4, 5, 6, 7, 8]


@pytest.mark.parametrize(("size", "options", "dropped"), [
    (3, {"batch_size": 5, "drop_last": True}, 3),
    (3, {"batch_size": 2, "rank": 0, "world_size": 4}, 3),
    (0, {"batch_size": 2}, 0),
])  # fmt: skip
def test_an_epoch_without_any_batch_says_what_it_left_out(size: int, options: dict[str, Any], dropped: int) -> None:
    loader = DataLoader(list(range(size)), seed=0, **options)
    assert loader.exhausted
    assert list(loader) == []
    assert (loader.dropped, loader.repeated) == (dropped, 0)


# What cannot work


class Dealing(Sampler[int]):
    """As torch's DistributedSampler and its like."""

    num_replicas = 2

    def __iter__(self) -> Iterator[int]:
        return iter(range(0, SIZE, 2))


@pytest.mark.parametrize(("options", "message"), [
    ({"in_order": False, "num_workers": 2}, "in_order=False and several workers"),
    ({"seed": 2**63}, "seed must be a whole number of 64 bits"),
    ({"seed": "3"}, "seed must be a whole number of 64 bits"),
    ({"sampler": Dealing()}, "Dealing deals to the ranks already"),
    ({"batch_sampler": BatchSampler(Dealing(), 2, False)}, "Dealing deals to the ranks already"),
])  # fmt: skip
def test_what_has_no_place_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DataLoader(Images(), **options)


def test_a_sampler_may_deal_itself() -> None:
    sampler = torch.utils.data.DistributedSampler(Images(), 2, 1, shuffle=False)  # type: ignore[arg-type]
    loader = DataLoader(sampler.dataset, 2, sampler=sampler, rank=0, world_size=1)
    assert [index for batch in loader for index in batch[0].tolist()] == [1, 3, 5, 7, 0]
    assert DataLoader(sampler.dataset, 2, sampler=sampler).share == Share(1, 2)


def test_an_empty_ready_batch_is_refused() -> None:
    with pytest.raises(ValueError, match="an empty batch"):
        list(DataLoader(Images(), batch_sampler=[[0, 1], []], seed=0))


def test_ready_batches_of_another_order_are_another_order() -> None:
    data = Images()
    state = DataLoader(data, batch_sampler=BatchSampler(RandomSampler(data), 2, False)).state_dict()
    with pytest.raises(
        MismatchError, match="sampler BatchSampler of RandomSampler, this one the sampler BatchSampler of range"
    ):
        DataLoader(data, batch_sampler=BatchSampler(range(SIZE), 2, False)).load_state_dict(state)
