"""Loops and jobs that are no first ones: what step() counts when batches were fetched before its first call, and a
second job in one process, with the loader of the first."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import RandomSampler

import checkflow
from checkflow.runtime.live_plan.planning import Planning
from tests.runtime.data.test_loader import Augmented, rows
from tests.support.foreign import Loop

SAMPLES = 12


@pytest.fixture(autouse=True)
def _nothing_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a plan: that takes most of a short job's time, and counts no batch."""
    monkeypatch.setattr(Planning, "begin", lambda *_: None)


def samples(size: int = SAMPLES) -> list[torch.Tensor]:
    return [torch.tensor([float(index)]) for index in range(size)]


def mapped() -> Any:
    return checkflow.DataLoader(samples(), 1, True)


def skipping() -> Any:
    return checkflow.resumable([torch.tensor([[float(index)]]) for index in range(SAMPLES)])


def late(
    directory: Path, loader: Any, stop: int | None, *, ahead: int = 1, take: int = 1, told: bool = False
) -> list[int]:
    """A loop that fetches after the optimizer's step and before step(): the samples used in iterations that ended."""
    torch.manual_seed(0)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    used: list[int] = []
    checkpointer = checkflow.Checkpointer(model, optimizer, loader, directory=directory, every=1, signals=())
    try:
        if told:
            checkpointer.step(0)
        for _ in checkpointer.epochs(1):
            batches = iter(checkpointer.loader)
            waiting = list(itertools.islice(batches, ahead * take))
            while waiting:
                now, waiting = waiting[:take], waiting[take:]
                for batch in now:
                    model(batch).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                waiting += itertools.islice(batches, take)
                checkpointer.step(take)
                used += [int(batch) for batch in now]
                if len(used) == stop:
                    return used
    finally:
        checkpointer.close()
    return used


@pytest.mark.slow
@pytest.mark.parametrize(("ahead", "take", "told"), [(1, 1, False), (1, 2, False), (3, 1, True), (2, 2, True)])
@pytest.mark.parametrize("make", [mapped, skipping])
def test_fetching_between_the_step_and_its_mark_loses_no_batch(
    make: Callable[[], Any], ahead: int, take: int, told: bool, tmp_path: Path
) -> None:
    whole = late(tmp_path / "whole", make(), None, ahead=ahead, take=take, told=told)
    assert sorted(whole) == list(range(SAMPLES))
    for stop in range(take, SAMPLES, take):
        directory = tmp_path / str(stop)
        begun = late(directory, make(), stop, ahead=ahead, take=take, told=told)
        assert begun + late(directory, make(), None, ahead=ahead, take=take, told=told) == whole


@pytest.mark.slow
@pytest.mark.parametrize("make", [mapped, skipping])
def test_what_was_fetched_further_ahead_is_counted_right_from_the_second_step_on(
    make: Callable[[], Any], tmp_path: Path
) -> None:
    whole = late(tmp_path / "whole", make(), None, ahead=3)
    for stop in range(2, SAMPLES):
        directory = tmp_path / str(stop)
        begun = late(directory, make(), stop, ahead=3)
        assert begun + late(directory, make(), None, ahead=3) == whole


@pytest.mark.slow
def test_interrupted_at_every_step_each_sample_once(tmp_path: Path) -> None:
    parts = [late(tmp_path, mapped(), 1) for _ in range(SAMPLES)]
    assert sorted(itertools.chain.from_iterable(parts)) == list(range(SAMPLES))
    assert late(tmp_path, mapped(), None) == []


def test_a_step_that_was_skipped_is_counted_all_the_same() -> None:
    """No optimizer stepped, as a scaler does it: nothing was taken for a boundary, so that nothing is taken back."""
    progress = Loop(loader := checkflow.DataLoader(samples(), 1)).progress
    batches = iter(loader)
    next(batches), next(batches)
    assert not progress.take_back()
    progress.count(1)
    assert (progress.position, progress.waiting) == (1, 1)


def job(directory: Path, loader: Any, epochs: int = 2) -> tuple[list[float], list[float]]:
    """One job, as a notebook's cell runs it: the batches, and the weights."""
    torch.manual_seed(0)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    seen = []
    with checkflow.Checkpointer(model, optimizer, loader, directory=directory, signals=()) as checkpointer:
        for _ in checkpointer.epochs(epochs):
            for batch in checkpointer.loader:
                seen.append(float(batch.sum()))
                (model(batch) * torch.rand(())).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
    return seen, [parameter.item() for parameter in model.parameters()]


def stateful() -> Any:
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")
    return checkflow.resumable(torchdata.StatefulDataLoader(samples(), 5))


KINDS: dict[str, Callable[[], Any]] = {
    "own": lambda: checkflow.DataLoader(samples(), 5, True),
    "own, by a sampler": lambda: checkflow.DataLoader(samples(), 5, sampler=RandomSampler(samples())),
    "torch's": lambda: checkflow.resumable(TorchDataLoader(samples(), 5, shuffle=True)),
    "with a state": stateful,
    "skipping": lambda: checkflow.resumable(skipping().loader),
    "a function": lambda: checkflow.resumable(lambda: (torch.rand(2, 1) for _ in range(3))),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_second_job_with_the_loader_of_the_first_is_the_same(kind: str, tmp_path: Path) -> None:
    loader = KINDS[kind]()
    first = job(tmp_path / "first", loader)
    assert job(tmp_path / "second", loader) == first
    assert job(tmp_path / "other", KINDS[kind]()) == first


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["own", "own, by a sampler", "torch's", "with a state", "a function"])
def test_a_second_job_goes_on_from_its_own_checkpoint(kind: str, tmp_path: Path) -> None:
    loader = KINDS[kind]()
    first = job(tmp_path / "first", loader, 3)
    begun, _ = job(tmp_path / "second", loader, 2)
    seen, weights = job(tmp_path / "second", KINDS[kind](), 3)
    assert (begun + seen, weights) == first


def test_a_place_that_the_user_gave_is_kept(tmp_path: Path) -> None:
    def rest(loader: Any, directory: Path) -> list[float]:
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        with checkflow.Checkpointer(model, optimizer, loader, directory=directory, signals=()) as checkpointer:
            return [float(batch) for batch in checkpointer.loader]

    loader, other = mapped(), mapped()
    next(iter(other))
    state = other.state_dict()
    other.load_state_dict(state)
    expected = [float(batch) for batch in other]
    loader.load_state_dict(state)
    assert rest(loader, tmp_path / "first") == expected
    loader.load_state_dict(state)
    assert rest(loader, tmp_path / "second") == expected  # also where another job was before
    assert len(rest(loader, tmp_path / "third")) == SAMPLES


@pytest.mark.parametrize("batches", [-1, 1.5, True, "1", torch.tensor(1.0)])
def test_step_counts_whole_batches(batches: Any, tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with checkflow.Checkpointer(model, optimizer, mapped(), directory=tmp_path, signals=()) as checkpointer:
        with pytest.raises(ValueError, match="a whole number of at least 0"):
            checkpointer.step(batches)
        checkpointer.step(0)


def test_more_batches_than_were_handed_out_are_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with checkflow.Checkpointer(model, optimizer, mapped(), directory=tmp_path, signals=()) as checkpointer:
        batches, counts = iter(checkpointer.loader), []
        for count in [1, 2, 2]:
            model(next(batches)).sum().backward()
            optimizer.step()
            checkpointer.step(count)
            counts.append(len([line for line in caplog.messages if "only 1 batches were handed out" in line]))
        assert counts == [0, 1, 1]
        assert checkpointer._progress.position == 3


def test_an_epoch_s_last_iteration_may_be_shorter(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "checkflow")
    used = late(tmp_path, checkflow.DataLoader(samples(5), 1), None, take=2)
    assert used == [0, 1, 2, 3, 4]
    assert not [line for line in caplog.messages if "were handed out since" in line]


def replacing(position: int = 0) -> checkflow.DataLoader:
    data = range(20000)
    sampler = RandomSampler(data, replacement=True, num_samples=len(data), generator=torch.Generator())
    loader = checkflow.DataLoader(data, 1000, seed=3, sampler=sampler)
    loader.set_epoch(0, position)
    return loader


@pytest.mark.parametrize("position", [0, 3000])
def test_counting_used_batches_moves_no_sampler(position: int) -> None:
    def run(counts: list[int]) -> Iterator[list[int]]:
        loader = replacing(position)
        for batch in loader:
            counts.append(loader.used_batches())
            yield batch.tolist()

    counts: list[int] = []
    begun = position // 1000
    expected = [batch.tolist() for batch in replacing(position)]
    assert list(run(counts)) == expected
    assert counts == list(range(begun + 1, 21))
    assert replacing(position).used_batches() == begun


def test_counting_used_batches_draws_nothing_at_an_epoch_s_begin() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    assert checkflow.DataLoader(samples(), 2, sampler=RandomSampler(samples())).used_batches() == 0
    assert torch.equal(torch.get_rng_state(), before)


def test_data_without_a_length_needs_a_sampler() -> None:
    class Unsized:
        def __getitem__(self, index: int) -> int:
            return index

    with pytest.raises(ValueError, match="has no __len__, and there is no sampler"):
        checkflow.DataLoader(Unsized())
    assert [batch.tolist() for batch in checkflow.DataLoader(Unsized(), sampler=[4, 2])] == [[4], [2]]


def test_a_job_that_was_left_early_is_followed_by_a_whole_one(tmp_path: Path) -> None:
    loader = checkflow.DataLoader(Augmented(6), 2)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for name in ("first", "second"):
        with checkflow.Checkpointer(model, optimizer, loader, directory=tmp_path / name, signals=()) as checkpointer:
            assert [row[0] for row in rows(itertools.islice(checkpointer.loader, 2))] == [0, 1, 2, 3]


def restarting(directory: Path, seed: int | None, stop: int | None = None) -> list[float]:
    """As docs/how-to/integrations.md wants a loop over steps() that begins the loader anew by itself."""
    torch.manual_seed(0)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    loader = checkflow.DataLoader(samples(100), 2, True, seed=seed)
    seen: list[float] = []
    with checkflow.Checkpointer(model, optimizer, loader, directory=directory, every=1, signals=()) as checkpointer:
        batches: Iterator[Any] | None = None
        for i in checkpointer.steps(8):
            if i % 3 == 0 or batches is None:
                checkpointer.loader.set_epoch(i // 3)
                batches = iter(checkpointer.loader)
            batch = next(batches)
            seen.append(float(batch.sum()))
            (model(batch) * torch.rand(())).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if len(seen) == stop:
                break
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, None])
def test_a_loop_that_begins_the_loader_anew_says_its_epoch(seed: int | None, tmp_path: Path) -> None:
    whole = restarting(tmp_path / "whole", seed)
    for stop in range(1, 8):
        directory = tmp_path / str(stop)
        begun = restarting(directory, seed, stop)
        rest = restarting(directory, seed)
        assert begun + rest == whole


def test_a_job_without_epochs_follows_one_that_counted_them(tmp_path: Path) -> None:
    loader = checkflow.DataLoader(samples(), 5, True)
    job(tmp_path, loader)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with checkflow.Checkpointer(model, optimizer, loader, directory=tmp_path, signals=()) as checkpointer:
        assert checkpointer.resumed_from
        epochs = [len(list(checkpointer.loader)) for _ in range(3)]
    assert epochs[1:] == [3, 3]
