"""Loaders that a resume used to repeat wrongly, in silence: each is exact after every batch, or refused by name."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
import webdataset
from torch import nn
from torch.utils.data import BatchSampler, IterableDataset, RandomSampler, Sampler
from torch.utils.data import DataLoader as TorchDataLoader
from torchdata import nodes
from torchdata.stateful_dataloader import StatefulDataLoader

import checkflow
from checkflow.core.errors import MismatchError, UnsupportedError
from checkflow.runtime.data.adapters.stateful import StateLoader
from checkflow.runtime.format import codec
from checkflow.runtime.job.progress import Progress
from tests.support import foreign

SIZE, BATCH, EPOCHS = foreign.SIZE, foreign.BATCH, foreign.EPOCHS


class Own(Sampler[int]):
    """Draws from a generator that it keeps, as the pass begins; ``lazily``: index by index."""

    def __init__(self, rng: Any, *, lazily: bool = False) -> None:
        self.rng, self.lazily = rng, lazily

    def __len__(self) -> int:
        return SIZE

    def __iter__(self) -> Iterator[int]:
        return self.one_by_one() if self.lazily else iter(self.order())

    def order(self) -> list[int]:
        if isinstance(self.rng, random.Random):
            return self.rng.sample(range(SIZE), SIZE)
        if isinstance(self.rng, torch.Generator):
            return torch.randperm(SIZE, generator=self.rng).tolist()
        return list(map(int, self.rng.permutation(SIZE)))

    def one_by_one(self) -> Iterator[int]:
        left = self.order()
        while left:
            yield left.pop(self.rng.integers(len(left)))


class Saved(Own):
    """Its state is in no attribute that is found."""

    def __init__(self) -> None:
        rng = np.random.default_rng(5)
        super().__init__(None)
        self.order = lambda: list(map(int, rng.permutation(SIZE)))  # type: ignore[method-assign]
        self.state_dict = lambda: {"rng": rng.bit_generator.state}
        self.load_state_dict = lambda state: setattr(rng.bit_generator, "state", state["rng"])


class Buckets(Sampler[list[int]]):
    """Batches, by a generator deep inside."""

    def __init__(self) -> None:
        self.parts = {"rng": [np.random.default_rng(9)]}

    def __len__(self) -> int:
        return -(-SIZE // BATCH)

    def __iter__(self) -> Iterator[list[int]]:
        order = list(map(int, self.parts["rng"][0].permutation(SIZE)))
        return iter([order[begin : begin + BATCH] for begin in range(0, SIZE, BATCH)])


class Passes:
    """Counts its passes, and gives others by that."""

    def __init__(self) -> None:
        self.passes = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        order = random.Random(self.passes).sample(range(SIZE), SIZE)
        self.passes += 1
        return iter([torch.tensor(order[begin : begin + BATCH]) for begin in range(0, SIZE, BATCH)])


class Lines(IterableDataset[int]):
    """The same for a data set."""

    def __init__(self) -> None:
        self.passes = 0

    def __iter__(self) -> Iterator[int]:
        self.passes += 1
        yield from random.Random(self.passes).sample(range(SIZE), SIZE)


class Unseeded(Sampler[int]):
    """An order that no one can make again."""

    def __len__(self) -> int:
        return SIZE

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(range(SIZE), key=lambda _: os.urandom(8)))


def hugging_face(buffer: int = 6) -> Any:
    data = datasets.Dataset.from_dict({"i": list(range(SIZE))}).to_iterable_dataset(num_shards=2)
    return data.shuffle(seed=5, buffer_size=buffer)


def column(rows: list[Any]) -> torch.Tensor:
    return torch.tensor([row["i"] for row in rows])


def with_hugging_face(kind: Any, workers: int = 0) -> Any:
    context = {"multiprocessing_context": "fork"} if workers else {}
    return kind(hugging_face(), BATCH, collate_fn=column, num_workers=workers, **context)


def in_torch(sampler: Any) -> Any:
    return TorchDataLoader(foreign.PlainMapData(), BATCH, sampler=sampler)  # type: ignore[arg-type]


def in_torchdata(sampler: Any, workers: int = 0) -> Any:
    return foreign.stateful_loader(foreign.PlainMapData(), workers, sampler=sampler)


def of_nodes(sampler: Any) -> Any:
    node: Any = nodes.Batcher(nodes.SamplerWrapper(sampler), BATCH, drop_last=False)
    return nodes.Loader(nodes.Prefetcher(nodes.Mapper(node, torch.tensor), 2))


def web(*stages: Any) -> Any:
    return TorchDataLoader(webdataset.DataPipeline(lambda: iter(range(SIZE)), *stages), BATCH)


def spread(seed: int = 1) -> RandomSampler:
    return RandomSampler(range(SIZE), generator=torch.Generator().manual_seed(seed))  # type: ignore[arg-type]


EXACT: dict[str, Callable[[], Any]] = {
    "Hugging Face's shuffle": lambda: with_hugging_face(TorchDataLoader),
    "Hugging Face's shuffle in torchdata's": lambda: with_hugging_face(StatefulDataLoader),
    "numpy's Generator": lambda: in_torch(Own(np.random.default_rng(0))),
    "numpy's Generator, lazily": lambda: in_torch(Own(np.random.default_rng(0), lazily=True)),
    "numpy's RandomState": lambda: in_torch(Own(np.random.RandomState(3))),
    "random's": lambda: in_torch(Own(random.Random(2))),
    "torch's by another name": lambda: in_torch(Own(torch.Generator().manual_seed(4))),
    "a sampler's state": lambda: in_torch(Saved()),
    "batches": lambda: TorchDataLoader(foreign.PlainMapData(), batch_sampler=Buckets()),  # type: ignore[arg-type]
    "numpy's in torchdata's": lambda: in_torchdata(Own(np.random.default_rng(0))),
    "random's in torchdata's": lambda: in_torchdata(Own(random.Random(2))),
    "batches in torchdata's": lambda: StatefulDataLoader(foreign.PlainMapData(), batch_sampler=Buckets()),  # type: ignore[arg-type]
    "webdataset, a generator": lambda: web(webdataset.shuffle(6, initial=6, rng=random.Random(3))),
    "webdataset, by epoch": lambda: web(webdataset.detshuffle(6, 6, seed=3)),
    "nodes over random": lambda: of_nodes(RandomSampler(range(SIZE))),  # type: ignore[arg-type]
    "nodes over random's generator": lambda: of_nodes(spread()),
    "nodes over numpy's": lambda: of_nodes(Own(np.random.default_rng(0))),
    "counted passes": Passes,
    "counted passes of a data set": lambda: TorchDataLoader(Lines(), BATCH),
}
WORKERS: dict[str, Callable[[], Any]] = {
    "Hugging Face's shuffle": lambda: with_hugging_face(TorchDataLoader, 2),
    "Hugging Face's shuffle in torchdata's": lambda: with_hugging_face(StatefulDataLoader, 2),
    "numpy's in torchdata's": lambda: in_torchdata(Own(np.random.default_rng(0)), 2),
}


def check(kind: Callable[[], Any], places: slice) -> None:
    """From each of these places on, all is as it would have been without an interruption; each sample comes once."""
    foreign.seeded(1)
    whole = foreign.Loop(foreign.make(kind))
    whole.run(EPOCHS)
    end = foreign.drawn()
    whole.loader.end_workers()
    epochs: list[list[Any]] = [[]]
    for row in whole.rows:
        epochs.append([]) if row[0] == "validation" else epochs[-1].extend(torch.tensor(row[0]).flatten().tolist())
    assert [sorted(epoch) for epoch in epochs] == [list(range(SIZE))] * EPOCHS + [[]]
    assert epochs[0] != sorted(epochs[0])
    for used, capture in whole.captures[places]:
        foreign.seeded(100 + used)
        other = foreign.Loop(foreign.make(kind))
        other.go_on(capture)
        other.run(EPOCHS)
        assert other.rows == whole.rows[used:], f"after {used}"
        assert foreign.drawn() == end
        other.loader.end_workers()


@pytest.mark.parametrize("kind", EXACT)
def test_goes_on_exactly_from_every_batch(kind: str) -> None:
    check(EXACT[kind], slice(None))


@pytest.mark.parametrize("kind", WORKERS)
def test_goes_on_exactly_with_workers(kind: str) -> None:
    check(WORKERS[kind], slice(1, None, 4))


NEVER: dict[str, Callable[[], Any]] = {
    "map-style": lambda: in_torch(Unseeded()),
    "batches": lambda: TorchDataLoader(
        foreign.PlainMapData(), batch_sampler=BatchSampler(Unseeded(), 4, drop_last=False)
    ),  # type: ignore[arg-type]
    "torchdata": lambda: in_torchdata(Unseeded()),
    "torchdata, workers": lambda: in_torchdata(Unseeded(), 2),
    # Whole orders: that two of them agree by chance must not happen.
    "fetched again": lambda: lambda: (torch.tensor(list(Unseeded())) for _ in range(4)),
    "webdataset": lambda: web(webdataset.shuffle(SIZE, initial=SIZE)),
    "nodes": lambda: of_nodes(Unseeded()),
}


def first_life(kind: Callable[[], Any], batches: int = 2) -> bytes:
    """A capture within the first epoch."""
    loop = foreign.Loop(foreign.make(kind))
    rows = iter(loop.loader)
    for _ in range(batches + 1):
        loop._use(next(rows))
    loop.loader.end_workers()
    return loop.captures[batches - 1][1]


def go_on(kind: Callable[[], Any], capture: bytes, *accepted: str) -> list[Any]:
    """The rest of the epoch."""
    loop = foreign.Loop(foreign.make(kind))
    loop.progress = Progress(loop.loader, frozenset(accepted))
    loop.go_on(capture)
    try:
        loop.run(1)
    finally:
        loop.loader.end_workers()
    return [row for row in loop.rows if row[0] != "validation"]


@pytest.mark.parametrize("kind", NEVER)
def test_what_does_not_repeat_is_refused_or_accepted(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    capture = first_life(NEVER[kind])
    with pytest.raises(MismatchError, match=r"does not repeat .*(sample|batch) \d+ of epoch 0.*accept="):
        go_on(NEVER[kind], capture)
    assert "does not repeat" not in caplog.text
    assert go_on(NEVER[kind], capture, "loader")
    assert caplog.text.count("does not repeat") == 1


@pytest.mark.parametrize("kind", ["map-style", "fetched again"])
def test_a_job_with_such_a_loader_ends_at_its_start(kind: str, tmp_path: Path) -> None:
    def train(stop: int | None, **options: Any) -> int:
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        loader = checkflow.resumable(NEVER[kind]())
        with checkflow.Checkpointer(model, optimizer, loader, directory=tmp_path, every=1, **options) as checkpointer:
            for _ in checkpointer.epochs(1):
                for batch in checkpointer.loader:
                    model(batch.reshape(-1, 1).float()).mean().backward()
                    optimizer.step()
                    if checkpointer.iteration == stop:
                        raise KeyboardInterrupt
        return checkpointer.iteration

    with pytest.raises(KeyboardInterrupt):
        train(2)
    with pytest.raises(MismatchError, match="does not repeat"):
        train(None)
    assert train(None, accept=("loader",)) > 2


class Augmented(IterableDataset[Any]):
    """Its order repeats; what it makes of a sample does not."""

    def __init__(self, shift: int = 0) -> None:
        self.shift = shift

    def __iter__(self) -> Iterator[Any]:
        for index in range(SIZE):
            yield np.random.default_rng().random(3), index + self.shift


def rest_of(shift: int, state: dict[str, Any], used: Any) -> list[Any]:
    loader = checkflow.resumable(TorchDataLoader(Augmented(shift), BATCH))
    Progress(loader).resume({"epoch": 0, "position": 2, "turns": 2, "generators": None, "loader": state, "used": used})
    return [labels.tolist() for _, labels in loader]


def test_augmentation_that_does_not_repeat_is_told_and_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    loader = checkflow.resumable(TorchDataLoader(Augmented(), BATCH))
    progress = Progress(loader)
    batches = iter(loader)
    for _ in range(2):
        next(batches)[0].zero_()  # loops change batches: what was handed out counts
        progress.batch_handed()
    progress.count()
    state, used = loader.state_at(0, 2), progress.capture()["used"]
    assert rest_of(0, state, used) == [[8, 9, 10, 11], [12, 13]]
    assert caplog.text.count("the loader's augmentation does not repeat") == 1
    with pytest.raises(MismatchError, match="2 of its 2 tensors, arrays or texts differ"):
        rest_of(1, state, used)


def test_workers_that_hand_out_in_any_order_are_refused() -> None:
    for loader in (
        StatefulDataLoader(foreign.PlainMapData(), BATCH, num_workers=2, in_order=False),  # type: ignore[arg-type]
        StatefulDataLoader(foreign.Stream(), BATCH, num_workers=2, in_order=False),
        foreign.Unwrapped(foreign.PlainMapData(), BATCH, num_workers=2, in_order=False),  # type: ignore[arg-type]
    ):
        with pytest.raises(UnsupportedError, match="in_order=False"):
            checkflow.resumable(loader)


# Generators of the data


class Drawing(foreign.PlainMapData):
    """Draws for each sample from a generator of its own."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(3)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index), self.rng.random()], dtype=torch.float64)


class Lazy(Drawing):
    """Makes it with the first sample."""

    def __init__(self) -> None:
        self.rng = None

    def __getitem__(self, index: int) -> torch.Tensor:
        self.rng = self.rng or np.random.default_rng(3)
        return super().__getitem__(index)


class LazyOrder(Own):
    """Makes it with its first pass."""

    def order(self) -> list[int]:
        self.rng = self.rng or np.random.default_rng(5)
        return super().order()


class EachPass(IterableDataset[int]):
    """Makes it with each pass."""

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        self.rng = random.Random(self.epoch)
        yield from self.rng.sample(range(SIZE), SIZE)


class Mixing:
    """The same as a ``collate_fn``."""

    def __init__(self) -> None:
        self.rng = random.Random(4)

    def mix(self, samples: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack(samples) + self.rng.randrange(SIZE) / SIZE


class DrawingStream(foreign.StatefulStream):
    """Iterable-style, with a state that leaves its generator out."""

    def __init__(self) -> None:
        super().__init__()
        self.rng = random.Random(6)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (sample + self.rng.random() for sample in super().__iter__())


DRAWING: dict[str, tuple[Callable[[], Any], int | None]] = {
    "data": (lambda: TorchDataLoader(Drawing(), BATCH, shuffle=True), None),  # type: ignore[arg-type]
    "data, ahead": (lambda: TorchDataLoader(Drawing(), BATCH, shuffle=True), 2),  # type: ignore[arg-type]
    "data, made late": (lambda: TorchDataLoader(Lazy(), BATCH, shuffle=True), None),  # type: ignore[arg-type]
    "data, made late, ahead": (lambda: TorchDataLoader(Lazy(), BATCH, shuffle=True), 2),  # type: ignore[arg-type]
    "order, made late": (lambda: in_torch(LazyOrder(None)), None),
    "order of torchdata's, made late": (lambda: in_torchdata(LazyOrder(None)), None),
    "a stream, made in each pass": (lambda: TorchDataLoader(EachPass(), BATCH), None),
    "collate_fn": (lambda: TorchDataLoader(foreign.PlainMapData(), BATCH, collate_fn=Mixing().mix), None),  # type: ignore[arg-type]
    "data of torchdata's": (lambda: foreign.stateful_loader(Drawing(), 0, shuffle=True), None),
    "a stream": (lambda: foreign.iterable_loader(DrawingStream(), 0), None),
    "a stream in workers": (lambda: foreign.iterable_loader(DrawingStream(), 2), None),
}


@pytest.mark.parametrize("kind", DRAWING)
def test_generators_of_the_data_are_saved(kind: str) -> None:
    make, ahead = DRAWING[kind]
    foreign.seeded(1)
    whole = foreign.Loop(foreign.make(make), ahead=ahead)
    whole.run(2)
    whole.loader.end_workers()
    for used, capture in whole.captures[1::3]:
        foreign.seeded(100 + used)
        other = foreign.Loop(foreign.make(make), ahead=ahead)
        other.go_on(capture)
        other.run(2)
        assert other.rows == whole.rows[used:], f"after {used}"
        other.loader.end_workers()


def test_generators_that_workers_copy_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    loader = checkflow.DataLoader(Drawing(), BATCH, num_workers=1)
    for _ in range(2):
        loader.follow(foreign.Loop(loader))
    assert caplog.text.count("a random generator of their own, dataset.rng") == 1


# Another length of the data

SIZED: dict[str, Callable[[int], Any]] = {
    "map-style": lambda size: TorchDataLoader(list(range(size)), 2, shuffle=True),  # type: ignore[arg-type]
    "sampler": lambda size: TorchDataLoader(list(range(size)), 2, sampler=list(range(size))),  # type: ignore[arg-type]
    "torchdata": lambda size: StatefulDataLoader(list(range(size)), 2, shuffle=True),  # type: ignore[arg-type]
    "list": lambda size: list(torch.arange(size).split(2)),
}


@pytest.mark.parametrize("size", [6, 14])
@pytest.mark.parametrize("kind", SIZED)
def test_another_length_at_an_epoch_s_end_needs_consent(kind: str, size: int) -> None:
    foreign.seeded(1)
    whole = foreign.Loop(foreign.make(lambda: SIZED[kind](10)))
    whole.run(2)
    within, end = whole.captures[1][1], next(capture for used, capture in whole.captures if used == 6)
    for accepted in ((), ("length",)):
        with pytest.raises(MismatchError, match=r"has .*, and the checkpoint lies within an epoch"):
            go_on(lambda: SIZED[kind](size), within, *accepted)
    with pytest.raises(MismatchError, match=r'accept=\("length",\) begins the next epoch'):
        go_on(lambda: SIZED[kind](size), end)
    loop = foreign.Loop(foreign.make(lambda: SIZED[kind](size)))
    loop.progress = Progress(loop.loader, frozenset({"length"}))
    loop.go_on(end)
    loop.run(2)
    used = [index for row in loop.rows if row[0] != "validation" for index in row[0]]
    assert sorted(used) == list(range(size))
    with pytest.raises(MismatchError, match="the checkpoint's loader has"):  # its next checkpoints are of this length
        go_on(lambda: SIZED[kind](10), loop.captures[0][1])


@pytest.mark.parametrize("size", [6, 14])
def test_another_length_in_a_loop_that_counts_its_epochs(size: int) -> None:
    loop = foreign.Loop(checkflow.DataLoader(list(range(10)), 2, True), counted=False)
    loop.run(1)
    next(iter(loop.loader))  # the boundary of an epoch's end
    state = loop.loader.state_at(0, 10)
    other = checkflow.DataLoader(list(range(size)), 2, True)
    other.accepted = frozenset({"length"})
    other.load_state_dict(state)
    assert (other.epoch, other.position) == (1, 0)
    assert sorted(index for batch in other for index in batch.tolist()) == list(range(size))


# What earlier releases saved


def test_what_goes_on_by_a_state_is_told_not_to_be_compared(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "checkflow")
    for kind in ("own", "torch, iterable-style with state", "torchdata, map-style"):
        caplog.clear()
        assert len(go_on(foreign.KINDS[kind], first_life(foreign.KINDS[kind]))) == 2
        assert caplog.text.count("nothing shows whether the loader goes on with the samples that come next") == 1


def without(capture: bytes, name: str) -> bytes:
    return codec.encode({key: value for key, value in codec.decode(capture).items() if key != name})


def test_a_checkpoint_that_says_nothing_of_the_batches_is_taken(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "checkflow")
    capture = without(first_life(EXACT["Hugging Face's shuffle"]), "used")
    assert len(go_on(EXACT["Hugging Face's shuffle"], capture)) == 2
    assert caplog.text.count("the checkpoint is of an earlier release") == 1


def earlier(value: Any) -> Any:
    """A state without what was added to it since."""
    if isinstance(value, dict):
        return {key: earlier(part) for key, part in value.items() if key not in ("held", "ranks", "used")}
    return [earlier(part) for part in value] if isinstance(value, list) else value


@pytest.mark.parametrize(
    "kind", ["torchdata, map-style, generator", "torch, iterable-style", "torch, iterable-style with state", "list"]
)
def test_states_of_an_earlier_release_are_taken(kind: str) -> None:
    foreign.seeded(1)
    whole = foreign.Loop(foreign.make(foreign.KINDS[kind]))
    whole.run(2)
    for used, capture in whole.captures:
        other = foreign.Loop(foreign.make(foreign.KINDS[kind]))
        other.go_on(codec.encode(earlier(codec.decode(capture))))
        other.run(2)
        assert other.rows == whole.rows[used:]


def test_a_state_behind_a_shuffle_buffer_is_replayed_from_the_epoch_s_begin() -> None:
    foreign.seeded(1)
    whole = [batch.tolist() for batch in with_hugging_face(TorchDataLoader)]
    earlier = StateLoader(with_hugging_face(StatefulDataLoader))
    batches = iter(earlier)
    next(batches), next(batches)
    loader = checkflow.resumable(with_hugging_face(TorchDataLoader))
    loader.load_state_dict(codec.decode(codec.encode(earlier.state_at(0, 2))))
    assert [batch.tolist() for batch in loader] == whole[2:]


def test_a_generator_that_is_not_there_is_named(caplog: pytest.LogCaptureFixture) -> None:
    kinds: list[Callable[[], Any]] = [lambda: in_torch(Own(random.Random(2))), lambda: in_torch(Own(0))]
    state = checkflow.resumable(kinds[0]()).state_dict()
    other = checkflow.resumable(kinds[1]())
    with pytest.raises(MismatchError, match=r"has a random generator sampler.rng, and this one has none there"):
        other.load_state_dict(state)
    other.accepted = frozenset({"loader"})
    other.load_state_dict(state)
    assert "has a random generator sampler.rng" in caplog.text
