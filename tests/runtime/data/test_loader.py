"""checkflow.DataLoader: the rest of an epoch equals the uninterrupted one's, whoever loads it."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import IterableDataset, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from checkflow.core.errors import MismatchError, UnsupportedError
from checkflow.runtime.data.adapters.resumable import resumable
from checkflow.runtime.data.loader import DataLoader
from checkflow.runtime.data.seeded_dataset import derived_seed
from checkflow.runtime.data.worker_processes import WorkerShield, has_ended
from checkflow.runtime.format import codec
from tests.support.waiting import wait_for


class Augmented:
    """Samples that carry their index and what every generator gave for them."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[int, float, float, float]:
        if not 0 <= index < self.size:
            raise IndexError(index)
        return index, random.random(), float(np.random.rand()), float(torch.rand(()))


def rows(batches: Any) -> list[tuple[float, ...]]:
    return [tuple(float(column[i]) for column in batch) for batch in batches for i in range(len(batch[0]))]


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(0, 23),
    batch_size=st.integers(1, 7),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
    epoch=st.integers(0, 3),
    data=st.data(),
)
def test_resumed_anywhere_gives_the_rest(
    size: int, batch_size: int, shuffle: bool, drop_last: bool, epoch: int, data: st.DataObject
) -> None:
    def make() -> DataLoader:
        loader = DataLoader(Augmented(size), batch_size, shuffle, seed=5, drop_last=drop_last)
        loader.set_epoch(epoch)
        return loader

    whole = list(make())
    used = size - size % batch_size if drop_last else size
    assert len(whole) == len(make()) == -(-used // batch_size)
    indices = [int(row[0]) for row in rows(whole)]
    assert len(set(indices)) == len(indices) == used
    if not drop_last:
        assert sorted(indices) == list(range(size))
    stop = data.draw(st.integers(0, len(whole)))
    first = make()
    seen = list(itertools.islice(first, stop))
    state = first.state_dict()
    second = DataLoader(Augmented(size), batch_size, shuffle, seed=5, drop_last=drop_last)
    second.load_state_dict(state)
    assert rows(seen) + rows(second) == rows(whole)
    assert second.exhausted


@pytest.mark.parametrize("workers", [1, 4])
def test_workers_change_nothing(workers: int) -> None:
    def run(num_workers: int, position: int) -> list[tuple[float, ...]]:
        loader = DataLoader(Augmented(37), 5, True, seed=1, num_workers=num_workers)
        loader.set_epoch(2, position)
        return rows(loader)

    whole = run(0, 0)
    assert run(workers, 0) == whole
    assert run(workers, 15) == whole[15:]


class Cached:
    """Draws for a sample only when it is first made in a process."""

    def __init__(self) -> None:
        self.made: dict[int, float] = {}

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        if index not in self.made:
            self.made[index] = random.random()
        return index


def mixed(samples: list[int]) -> tuple[list[int], list[float]]:
    return samples, [random.random(), np.random.rand(), torch.rand(()).item()]


def test_what_samples_draw_changes_nothing_for_collating() -> None:
    def batches(workers: int) -> list[Any]:
        loader = DataLoader(Cached(), 4, shuffle=True, collate_fn=mixed, num_workers=workers, seed=3)
        return [batch for _ in range(2) for batch in loader]

    here = batches(0)  # where all has been made in the first epoch
    assert here == batches(2)
    assert len({tuple(numbers) for _, numbers in here}) == len(here) == 4


def test_epochs_differ_and_follow_each_other() -> None:
    loader = DataLoader(Augmented(16), 4, True, seed=0)
    first, second = rows(loader), rows(loader)
    assert loader.epoch == 1
    assert [row[0] for row in first] != [row[0] for row in second]
    assert {row[1] for row in first}.isdisjoint(row[1] for row in second)  # other augmentation too
    assert rows(DataLoader(Augmented(16), 4, True, seed=0)) == first
    assert rows(DataLoader(Augmented(16), 4, True, seed=1)) != first


def test_the_main_generators_are_left_alone() -> None:
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    expected = [(torch.rand(()).item(), random.random(), np.random.rand()) for _ in range(4)]
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    loader = DataLoader(Augmented(16), 4, True, seed=0)
    assert [(torch.rand(()).item(), random.random(), np.random.rand()) for _ in loader] == expected


def drawing(loader: Any, stops: list[int]) -> Iterator[tuple[list[int], float]]:
    """So many batches of each epoch, at most, each with a number drawn after it."""
    for stop in stops:
        for batch in itertools.islice(loader, stop):
            yield batch.tolist(), torch.rand(()).item()


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(1, 23),
    batch_size=st.integers(1, 7),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
    stops=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    seed=st.integers(0, 9),
)
def test_without_a_seed_it_draws_as_torch_s_loader_does(
    size: int, batch_size: int, shuffle: bool, drop_last: bool, stops: list[int], seed: int
) -> None:
    def run(kind: Any) -> tuple[list[Any], torch.Tensor]:
        torch.manual_seed(seed)
        rows = list(drawing(kind(list(range(size)), batch_size, shuffle, drop_last=drop_last), stops))
        return rows, torch.get_rng_state()

    (expected, end), (found, own_end) = run(TorchDataLoader), run(DataLoader)
    assert found == expected
    if expected:  # an epoch without a batch draws nothing
        assert torch.equal(own_end, end)


@settings(max_examples=40, deadline=None)
@given(size=st.integers(1, 12), batch_size=st.integers(1, 5), shuffle=st.booleans(), data=st.data())
def test_drawn_seeds_go_on_from_any_batch(size: int, batch_size: int, shuffle: bool, data: st.DataObject) -> None:
    torch.manual_seed(3)
    loader = DataLoader(list(range(size)), batch_size, shuffle)
    rows, states = [], []
    for row in drawing(loader, [99, 99, 99]):
        rows.append(row)
        states.append((loader.state_dict(), torch.get_rng_state()))
    at = data.draw(st.integers(0, len(rows) - 1))
    state, generator = states[at]
    other = DataLoader(list(range(size)), batch_size, shuffle)
    other.load_state_dict(codec.decode(codec.encode(state)))
    torch.set_rng_state(generator)
    assert list(drawing(other, [99] * (3 - state["epoch"]))) == rows[at + 1 :]


def test_without_a_seed_workers_change_nothing() -> None:
    def run(num_workers: int) -> list[tuple[float, ...]]:
        torch.manual_seed(5)
        return rows(DataLoader(Augmented(37), 5, True, num_workers=num_workers))

    assert run(2) == run(0)


def test_two_passes_in_one_epoch_of_a_checkpointer_are_refused() -> None:
    loader = DataLoader(Augmented(4), 2)
    loader.epochs_counted_elsewhere = True
    assert len(list(loader)) == 2
    with pytest.raises(UnsupportedError, match="iterated twice"):
        next(iter(loader))


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("4 samples, .* 5 samples", DataLoader(Augmented(5), 2)),
        ("shuffle", DataLoader(Augmented(4), 2, True)),
        ("seed", DataLoader(Augmented(4), 2, seed=9)),
    ],
)
def test_a_position_in_other_data_is_refused(name: str, other: DataLoader) -> None:
    with pytest.raises(MismatchError, match=name):
        other.load_state_dict(DataLoader(Augmented(4), 2).state_dict())


def test_another_batch_size_goes_on_at_the_same_sample() -> None:
    loader = DataLoader(Augmented(10), 3, True, seed=2)
    whole = rows(DataLoader(Augmented(10), 3, True, seed=2))
    next(iter(loader))
    other = DataLoader(Augmented(10), 4, True, seed=2)
    other.load_state_dict(loader.state_dict())
    assert rows(other) == whole[3:]


def test_annotations_name_what_it_hands_out_as_torchs_do() -> None:
    def train(loader: DataLoader[tuple[torch.Tensor, torch.Tensor]]) -> None: ...

    assert typing.get_type_hints(train, {"torch": torch, "DataLoader": DataLoader})["loader"].__origin__ is DataLoader


def test_bad_arguments_are_refused() -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Any:
            return iter(range(3))

    with pytest.raises(UnsupportedError, match="map-style"):
        DataLoader(Stream())
    for bad in (0, -1, 2.0, True):
        with pytest.raises(ValueError, match="batch_size"):
            DataLoader(TensorDataset(torch.zeros(3)), bad)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="num_workers is 0"):
        DataLoader(TensorDataset(torch.zeros(3)), timeout=1)


BAD: list[tuple[str, Any]] = [
    *(("sampler", value) for value in (5, "abc", len)),
    *(("batch_sampler", value) for value in (5, "abc")),
    *(("generator", value) for value in (5, "x", torch)),
    *((name, value) for name in ("collate_fn", "worker_init_fn", "reseed") for value in (5, "x")),
    *(("num_workers", value) for value in (1.5, "2", None, -1, True)),
    *((name, "yes") for name in ("shuffle", "drop_last", "pin_memory", "persistent_workers", "in_order")),
    *(("shuffle", value) for value in (2, 0.5, [])),
    *(("seed", value) for value in (True, "3", 1.0, 2**63)),
    *(("tail", value) for value in ("some", 5)),
]


@pytest.mark.parametrize(("name", "bad"), BAD)
def test_what_means_nothing_is_refused_when_the_loader_is_made(name: str, bad: Any) -> None:
    with pytest.raises(ValueError, match=rf"^{name} must be .*not|^{name} must give .*not") as caught:
        DataLoader(TensorDataset(torch.zeros(3)), **{name: bad})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("share", [{"rank": "0", "world_size": 1}, {"rank": 0, "world_size": 1.0}])
def test_ranks_are_whole_numbers(share: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be a whole number"):
        DataLoader(TensorDataset(torch.zeros(3)), **share)


def test_what_means_something_is_taken() -> None:
    data = [0, 1, 2]
    for options in (
        {"sampler": [2, 1]},
        {"sampler": range(2)},
        {"batch_sampler": [[0], [1, 2]]},
        {"generator": torch.Generator()},
        {"num_workers": np.int64(0)},
        {"shuffle": 1},
        {"shuffle": np.True_},
        {"seed": np.int64(3)},
    ):
        assert len(list(DataLoader(data, **options))) >= 2, options  # type: ignore[arg-type]


LOADERS: dict[str, Any] = {
    "map-style": lambda: DataLoader([0, 1, 2, 3], 2),
    "fetched again": lambda: resumable([0, 1]),
    "its own state": lambda: resumable(StatefulDataLoader([0, 1, 2, 3], 2)),
}


@pytest.mark.parametrize("kind", LOADERS)
def test_no_epoch_and_no_state(kind: str) -> None:
    loader = LOADERS[kind]()
    whole = list(LOADERS[kind]())
    for bad in ("abc", 1.5, -1, None, True):
        with pytest.raises(ValueError, match="set_epoch: epoch must be"):
            loader.set_epoch(bad)
        if bad is not None:
            with pytest.raises(ValueError, match="set_epoch: position must be"):
                loader.set_epoch(0, bad)
    for bad in (None, 5, "x", {}, {"epoch": "0"}, []):
        with pytest.raises(TypeError, match=r"load_state_dict takes what a loader's state_dict\(\) gave"):
            loader.load_state_dict(bad)
    assert [str(batch) for batch in loader] == [str(batch) for batch in whole]


def test_what_makes_no_loader_is_told() -> None:
    with pytest.raises(UnsupportedError, match="a Tensor is no loader"):
        resumable(torch.zeros(3, 2))
    loader = resumable(lambda: None)
    with pytest.raises(TypeError, match=r"<lambda>, which checkflow\.resumable was given .* returned a NoneType"):
        next(iter(loader))


def test_derived_seeds_differ() -> None:
    seeds = {derived_seed(s, e, i) for s in range(-3, 3) for e in range(10) for i in range(50)}
    assert len(seeds) == 6 * 10 * 50
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_a_worker_whose_trainer_died_before_it_looked_ends(tmp_path: Path) -> None:
    """torch's own watch begins later, and would take whoever adopted the worker for its parent."""
    started = tmp_path / "worker"
    trainer = os.fork()
    if trainer == 0:
        shield = WorkerShield(lambda _: started.write_text(str(os.getpid())))
        shield.workers_start()
        if os.fork() == 0:
            while os.getppid() == shield._trainer:
                time.sleep(0.001)
            shield(0)
            time.sleep(100)  # as a worker that waits for ever
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(trainer, 0)[1]) == 0
    while not (started.exists() and started.read_text()):
        time.sleep(0.001)
    worker = int(started.read_text())
    while not has_ended(worker):
        time.sleep(0.001)


JOB_OF_WORKERS = """
import os, sys, time
from torch.utils.data import DataLoader
from torch.utils.data._utils.worker import ManagerWatchdog
from torchdata.stateful_dataloader import StatefulDataLoader
import checkflow

begin, trainer = ManagerWatchdog.__init__, os.getpid()

def late(watch):
    print(os.getpid(), flush=True)
    while os.getppid() == trainer:
        time.sleep(0.001)
    begin(watch)

ManagerWatchdog.__init__ = late
options = {"num_workers": 1, "multiprocessing_context": "fork"}
loader = {
    "ours": lambda: checkflow.DataLoader(range(2), **options),
    "torch's": lambda: checkflow.resumable(DataLoader(range(2), **options)),
    "torchdata's": lambda: checkflow.resumable(StatefulDataLoader(range(2), **options)),
}[sys.argv[1]]()
list(loader)
"""


@pytest.mark.parametrize("kind", ["ours", "torch's", "torchdata's"])
def test_a_worker_whose_trainer_dies_just_before_torch_looks_ends(kind: str) -> None:
    """By then it has looked itself, and torch's watch finds another parent: that is not the one it is to watch."""
    with subprocess.Popen([sys.executable, "-c", JOB_OF_WORKERS, kind], stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None
        worker = int(trainer.stdout.readline())
        trainer.kill()
        try:
            wait_for(lambda: has_ended(worker))
        finally:
            if not has_ended(worker):
                os.kill(worker, signal.SIGKILL)


class Numbers:
    """Two items."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize("make", [
    lambda **options: DataLoader(Numbers(), **options),
    lambda **options: resumable(TorchDataLoader(Numbers(), **options)),
    lambda **options: resumable(StatefulDataLoader(Numbers(), **options)),
], ids=["ours", "torch's", "torchdata's"])  # fmt: skip
@pytest.mark.parametrize("training", [True, False])
def test_a_forked_worker_outlasts_signals_from_the_fork_on(
    make: Any, training: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each looks as soon as multiprocessing runs it, before torch does anything."""
    seen = multiprocessing.get_context("fork").Array("i", 2)
    real = multiprocessing.process.BaseProcess.run

    def run(process: Any) -> None:
        number = process._args[process._args.index(shield) + 1]
        seen[number] = 1 + (signal.getsignal(signal.SIGUSR2) == shield._arrived)
        real(process)

    loader = make(num_workers=2, multiprocessing_context="fork")
    shield = loader.shield
    if training:
        shield.raise_for([signal.SIGUSR2])
    monkeypatch.setattr(multiprocessing.process.BaseProcess, "run", run)
    assert [int(batch) for batch in loader] == [0, 1]
    shield.lower()
    assert list(seen) == [1 + training] * 2


def test_a_forked_process_that_is_no_worker_keeps_its_handlers() -> None:
    shield = WorkerShield(None)
    shield.raise_for([signal.SIGUSR2])
    child = os.fork()
    if child == 0:
        os._exit(int(signal.getsignal(signal.SIGUSR2) == shield._arrived))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_worker_whose_trainer_lives_goes_on() -> None:
    shield = WorkerShield(None)
    shield.workers_start()
    child = os.fork()
    if child == 0:
        shield(0)
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
