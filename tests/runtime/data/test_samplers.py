"""checkflow.DataLoader with users' samplers, ready batches, generators of their own, and several ranks."""

from __future__ import annotations

import itertools
import logging
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data.distributed import DistributedSampler

from checkflow.core.errors import MismatchError, UnsupportedError
from checkflow.runtime.data.loader import DataLoader
from checkflow.runtime.data.samplers import iterate_sampler
from checkflow.runtime.data.seeded_dataset import index_number
from tests.runtime.data.test_loader import Augmented, rows

SIZE = 23
data = Augmented(SIZE)


class Endless(Sampler[int]):
    """Draws from Python's and NumPy's generators, for ever."""

    def __iter__(self) -> Iterator[int]:
        while True:
            yield (random.randrange(SIZE) + int(np.random.randint(SIZE))) % SIZE


class ByEpoch(Sampler[int]):
    """A sampler that is told the epoch."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter([(index + self.epoch) % SIZE for index in range(SIZE)])

    def __len__(self) -> int:
        return SIZE


def own_generator() -> RandomSampler:
    return RandomSampler(data, generator=torch.Generator().manual_seed(3))


SAMPLERS: dict[str, Callable[[], Iterable[Any]]] = {
    "weighted": lambda: WeightedRandomSampler(torch.arange(1.0, SIZE + 1).tolist(), 2 * SIZE),
    "replacement": lambda: RandomSampler(data, replacement=True, num_samples=31),
    "own generator": own_generator,
    "told the epoch": ByEpoch,
    "endless": Endless,
    "list": lambda: [5, 3, 3, 8],
}


def take(loader: DataLoader, batches: int) -> list[tuple[float, ...]]:
    return rows(itertools.islice(loader, batches))


@pytest.mark.parametrize("seed", [7, None])
@pytest.mark.parametrize("name", SAMPLERS)
def test_any_sampler_goes_on_where_it_stopped(name: str, seed: int | None) -> None:
    def make() -> DataLoader:
        return DataLoader(data, 4, sampler=SAMPLERS[name](), seed=seed)

    torch.manual_seed(0)
    whole = make()
    first, second = take(whole, 5), take(whole, 5)
    torch.manual_seed(0)
    stopped = make()
    assert take(stopped, 5) == first
    assert take(stopped, 2) == second[:8]
    goes_on = make()
    goes_on.load_state_dict(stopped.state_dict())
    assert take(goes_on, 3) == second[8:20]
    assert name == "list" or first != second


def test_generators_are_left_as_they_were_while_a_sampler_draws() -> None:
    torch.manual_seed(0)
    random.seed(0)
    expected = [(torch.rand(()).item(), random.random()) for _ in range(3)]
    torch.manual_seed(0)
    random.seed(0)
    drawn = iterate_sampler(Endless(), 1, 0, block=2)
    between = [(next(drawn), (torch.rand(()).item(), random.random())) for _ in range(3)]
    assert [one for _, one in between] == expected
    assert [one for one, _ in between] == list(itertools.islice(iterate_sampler(Endless(), 1, 0), 3))


@pytest.mark.parametrize("length", [0, 1, 4, 5, 8])
def test_a_sampler_is_asked_block_by_block(length: int) -> None:
    assert list(iterate_sampler(range(length), 0, 0, block=4)) == list(range(length))


def test_torchs_own_samplers_are_what_shuffle_says() -> None:
    torch.manual_seed(5)
    expected = [batch[0].tolist() for batch in TorchDataLoader(data, 4, sampler=RandomSampler(data))]
    torch.manual_seed(5)
    assert [batch[0].tolist() for batch in DataLoader(data, 4, sampler=RandomSampler(data))] == expected
    one = DataLoader(data, 4, sampler=SequentialSampler(data))
    assert [row[0] for row in rows(one)] == list(range(SIZE))


@pytest.mark.parametrize("position", [0, 8, 16, 23])
def test_ready_batches(position: int) -> None:
    def make() -> DataLoader:
        return DataLoader(data, batch_sampler=BatchSampler(RandomSampler(data), 4, False), seed=1)

    whole = make()
    assert len(whole) == 6
    batches = [rows([batch]) for batch in whole]
    rest = make()
    rest.set_epoch(0, position)
    assert list(itertools.chain.from_iterable(batches))[position:] == rows(rest)


def test_samples_that_are_not_collated() -> None:
    loader = DataLoader(data, None, seed=0, shuffle=True)
    samples = list(loader)
    assert len(samples) == len(loader) == SIZE
    assert sorted(sample[0] for sample in samples) == list(range(SIZE))
    rest = DataLoader(data, None, seed=0, shuffle=True)
    rest.set_epoch(0, 20)
    assert list(rest) == samples[20:]


def test_samples_named_by_other_things_than_numbers() -> None:
    words = {"a": 1, "b": 2, ("c", 3): 3}
    loader = DataLoader(words, None, sampler=list(words), seed=0)
    assert list(loader) == [1, 2, 3]
    assert len({index_number(one) for one in (*words, 0, 1, -1, None, 1.5, b"a", ("c", 4), [1])}) == 11
    assert index_number(np.int64(3)) == index_number(torch.tensor(3)) == 3
    with pytest.raises(TypeError, match="index of type object"):
        index_number(object())


class Huge:
    """Samples by numbers of more than 64 bits."""

    def __getitem__(self, index: int) -> tuple[int, float]:
        return index % 2**40, random.random()


def test_numbers_of_more_than_64_bits() -> None:
    indices = [2**64 + 1, -(2**63) - 1, 2**63, 5]
    samples = list(DataLoader(Huge(), None, sampler=indices, seed=2**62))
    assert len({drawn for _, drawn in samples}) == 4
    assert list(DataLoader(Huge(), None, sampler=indices[1:], seed=2**62)) == samples[1:]
    assert list(DataLoader(Huge(), None, sampler=indices, seed=2**61)) != samples


def test_seeds_from_a_generator_of_its_own() -> None:
    def make() -> DataLoader:
        return DataLoader(data, 4, True, generator=torch.Generator().manual_seed(8))

    state = torch.get_rng_state()
    whole = make()
    first, second, third = rows(whole), rows(whole), rows(whole)
    assert torch.equal(torch.get_rng_state(), state)
    assert len({str(one) for one in (first, second, third)}) == 3
    stopped = make()
    assert [take(stopped, 6), take(stopped, 2)] == [first, second[:8]]
    goes_on = make()
    goes_on.load_state_dict(stopped.state_dict())
    assert [rows(goes_on), rows(goes_on)] == [second[8:], third]


class Library:
    """One that has a generator of its own, as albumentations has."""

    def __init__(self) -> None:
        self.generator = random.Random()
        self.set_random_seed = self.generator.seed

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> tuple[int, float]:
        return index, self.generator.random()


@pytest.mark.parametrize("workers", [0, 2])
def test_libraries_with_generators_of_their_own_are_reseeded(workers: int) -> None:
    def run(position: int) -> list[tuple[float, ...]]:
        library = Library()
        loader = DataLoader(library, 5, True, seed=0, num_workers=workers, reseed=library.set_random_seed)
        loader.set_epoch(0, position)
        return rows(loader)

    whole = run(0)
    assert run(10) == whole[10:]
    assert len({row[1] for row in whole}) == SIZE


class Fetching(Augmented):
    """Fetches whole batches."""

    asked: list[list[int]]

    def __getitems__(self, indices: list[int]) -> list[tuple[int, float, float, float]]:
        self.asked = [*getattr(self, "asked", []), list(indices)]
        return [self[index] for index in indices]


def test_who_fetches_whole_batches_is_asked_for_them() -> None:
    dataset = Fetching(10)
    whole = rows(DataLoader(dataset, 4, seed=0))
    assert dataset.asked == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    rest = DataLoader(dataset, 4, seed=0)
    rest.set_epoch(0, 4)
    assert rows(rest) == whole[4:]
    # A subset of samples that come one by one is seeded for each; of batches, it is asked for them.
    each = rows(DataLoader(Subset(data, range(10)), 5, seed=0))
    assert rows(DataLoader(Subset(data, range(10)), 2, seed=0)) == each
    assert rows(DataLoader(Subset(Subset(dataset, range(9)), [3, 4]), 2, seed=0))[0][0] == 3
    assert dataset.asked[-1] == [3, 4]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ranks_share_an_epoch_and_another_number_goes_on(ranks: int, workers: int) -> None:
    def make(rank: int, ranks: int) -> DataLoader:
        return DataLoader(data, 2, True, seed=3, rank=rank, world_size=ranks, num_workers=workers)

    whole = {row[0]: row for row in rows(make(0, 1))}
    loaders = [make(rank, 4) for rank in range(4)]
    seen = [row for loader in loaders for row in take(loader, 1)]
    states = [loader.state_dict() for loader in loaders]
    assert all(state == states[0] for state in states)
    for rank in range(ranks):
        loader = make(rank, ranks)
        loader.load_state_dict(states[0])
        seen += rows(loader)
        assert loader.dropped == loader.repeated == 0
    assert sorted(row[0] for row in seen) == list(range(SIZE))
    assert all(whole[row[0]] == row for row in seen)  # the augmentation, too


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_distributed_sampler_is_replaced_by_the_same_exactly_once(shuffle: bool) -> None:
    def make(rank: int, **options: Any) -> DataLoader:
        return DataLoader(data, 4, sampler=DistributedSampler(data, 2, rank, shuffle=shuffle, seed=6, **options))

    indices = [int(row[0]) for rank in range(2) for row in rows(make(rank))]
    assert sorted(indices) == list(range(SIZE))
    assert len(make(0)) == len(make(1)) == 3
    assert len(make(0, drop_last=True)) == 2


def test_what_is_left_out_is_told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "checkflow")
    loader = DataLoader(data, 5, seed=0, rank=0, world_size=2, tail="drop")
    assert len(loader) == len(list(loader)) == 2
    assert (loader.dropped, loader.repeated) == (3, 0)
    assert "epoch 0: 3 samples left out, 0 repeated" in caplog.text
    caplog.clear()
    assert len(list(DataLoader(data, 5, seed=0, rank=1, world_size=2, tail="pad"))) == 3
    assert not caplog.text  # rank 0 tells


def test_one_rank_is_told_nothing_of_drop_last(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "checkflow")
    loader = DataLoader(data, 5, drop_last=True)
    list(loader)
    assert loader.dropped == 3
    assert not caplog.text


@pytest.mark.parametrize(("options", "message"), [
    ({"batch_size": 0}, "batch_size must be"),
    ({"batch_size": True}, "batch_size must be"),
    ({"tail": "cut"}, "tail must be one of even, drop, pad"),
    ({"tail": "pad", "drop_last": True}, "exclude each other"),
    ({"sampler": [1], "shuffle": True}, "exclude each other"),
    ({"batch_sampler": [[1]], "batch_size": 2}, "batch_sampler excludes"),
    ({"batch_sampler": [[1]], "drop_last": True}, "batch_sampler excludes"),
    ({"batch_size": None, "drop_last": True}, "exclude each other"),
    ({"rank": 1}, "belong together"),
    ({"rank": 2, "world_size": 2}, "rank 2 of 2 ranks does not exist"),
    ({"num_workers": -1}, "num_workers"),
])  # fmt: skip
def test_contradictions_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DataLoader(data, **options)


def test_ranks_that_cannot_draw_the_same_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="pass seed="):
        next(iter(DataLoader(data, rank=0, world_size=2)))


def test_another_sampler_is_another_order() -> None:
    state = DataLoader(data, sampler=Endless()).state_dict()
    with pytest.raises(MismatchError, match="the sampler Endless, this one no sampler"):
        DataLoader(data).load_state_dict(state)


def test_the_length_of_what_has_none() -> None:
    with pytest.raises(TypeError, match="not known"):
        len(DataLoader(data, sampler=Endless()))
    assert len(DataLoader(data, batch_sampler=[[1, 2], [3]], rank=0, world_size=2)) == 1


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda data: {}, None),
        (lambda data: {"shuffle": True}, None),
        (lambda data: {"sampler": SequentialSampler(data)}, None),
        (lambda data: {"sampler": RandomSampler(data)}, None),
        (lambda data: {"sampler": RandomSampler(data, replacement=True)}, "RandomSampler"),
        (lambda data: {"sampler": RandomSampler(data, num_samples=9)}, "RandomSampler"),
        (lambda data: {"sampler": WeightedRandomSampler([1.0] * SIZE, SIZE)}, "WeightedRandomSampler"),
        (lambda data: {"sampler": SubsetRandomSampler(range(SIZE))}, "SubsetRandomSampler"),
        (
            lambda data: {"batch_sampler": BatchSampler(RandomSampler(data, replacement=True), 4, False)},
            "RandomSampler",
        ),
        (lambda data: {"batch_sampler": BatchSampler(SequentialSampler(data), 4, False)}, None),
    ],
)
def test_where_the_order_is_not_torchs_it_is_told_once(
    make: Callable[[Any], dict[str, Any]], told: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """And only there: the samples are those of torch's loader otherwise."""
    caplog.set_level(logging.INFO, "checkflow")
    plain = TensorDataset(torch.arange(SIZE))
    torch.manual_seed(5)
    torchs = [int(x) for (batch,) in TorchDataLoader(plain, **make(plain)) for x in batch]
    loader = DataLoader(plain, **make(plain))
    torch.manual_seed(5)
    assert ([int(x) for (batch,) in loader for x in batch] == torchs) == (told is None)
    for _ in range(2):  # a Checkpointer takes it, and another one
        loader.follow(mock.Mock())
    lines = [message for message in caplog.messages if "other samples than torch's DataLoader" in message]
    assert [line.split()[2] for line in lines] == ([] if told is None else [told])


def test_a_seed_of_the_loader_promises_no_order_of_torchs(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "checkflow")
    DataLoader(data, sampler=RandomSampler(data, replacement=True), seed=3).follow(mock.Mock())
    assert caplog.messages == []
