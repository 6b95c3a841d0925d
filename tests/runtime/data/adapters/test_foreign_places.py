"""Loaders of another make: places behind the one that is fetched, and batches that cannot be fetched."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

import checkflow
from checkflow.runtime.data.adapters.replay import SkippingLoader
from tests.support import foreign
from tests.support.pairing import pairs

# Places that are behind


SHORT: dict[str, Callable[[int], Any]] = {
    "torchdata": lambda batches: StatefulDataLoader(foreign.MapData(), -(-foreign.SIZE // batches), shuffle=True),
    "function": lambda batches: lambda: (torch.rand(2, 1) for _ in range(batches)),
    "list": lambda batches: foreign.sequence()[:batches],
}


@pytest.mark.parametrize(*pairs(kind=list(SHORT), batches=[1, 2, 3], ahead=[0, 1, 3, 5]))
def test_goes_on_where_the_loop_is_epochs_ahead(kind: str, batches: int, ahead: int) -> None:
    def loop() -> foreign.Loop:
        return foreign.Loop(checkflow.resumable(SHORT[kind](batches)), ahead=ahead, counted=False)

    foreign.seeded(1)
    whole = loop()
    whole.run_through(10)
    end = foreign.drawn()
    assert len(whole.captures) == 10
    for used, capture in whole.captures[:-1]:
        foreign.seeded(100 + used)
        other = loop()
        other.go_on(capture)
        other.run_through(10 - used)
        assert other.rows == whole.rows[used:], f"after {used}"
        assert foreign.drawn() == end


@pytest.mark.parametrize("take", [2, 4])
@pytest.mark.parametrize(
    "kind",
    [
        lambda: foreign.stateful_loader(foreign.PlainMapData(), 0, shuffle=True, generator=torch.Generator()),
        foreign.OwnSizedLoader,
        foreign.OwnLoader,
        lambda: foreign.sequence()[:4],
    ],
)
def test_epochs_that_are_left_without_asking_for_their_end_are_captured(kind: Any, take: int) -> None:
    epoch = [batch[:, 0].tolist() for batch in checkflow.resumable(kind())]
    assert len(epoch) == 4
    loop = foreign.Loop(foreign.make(kind), counted=False)
    for _ in range(3):
        for _, batch in zip(range(take), loop.loader, strict=False):
            loop._use(batch)
    assert [used for used, _ in loop.captures] == list(range(1, 3 * take))
    other = foreign.Loop(foreign.make(kind), counted=False)
    other.go_on(loop.captures[take - 1][1])  # made when the second epoch was begun
    assert [batch[:, 0].tolist() for batch in other.loader] == epoch[take:]


# Batches that cannot be fetched


def numbers(loader: Any) -> list[Any]:
    """What one iteration hands out, errors too."""
    iterator, found = iter(loader), list[Any]()
    while True:
        try:
            found.append(next(iterator).tolist())
        except OSError as error:
            found.append(str(error).splitlines()[-1].split()[-1])
        except StopIteration:
            return found


@pytest.mark.parametrize("index", [0, 2, 13])
@pytest.mark.parametrize(
    "kind",
    [
        lambda dataset: foreign.Unwrapped(dataset, 1),
        lambda dataset: StatefulDataLoader(dataset, 1),
    ],
)
def test_errors_are_passed_as_torch_passes_them(kind: Any, index: int, caplog: pytest.LogCaptureFixture) -> None:
    expected = numbers(TorchDataLoader(foreign.Failing(index), 1))  # type: ignore[arg-type]
    assert len(expected) == foreign.SIZE
    assert expected[index] == str(index)
    loader = checkflow.resumable(kind(foreign.Failing(index)))
    for _ in range(2):
        assert numbers(loader) == expected
        assert loader.exhausted
    iterator = iter(loader)
    for _ in range(4):
        with contextlib.suppress(OSError):
            next(iterator)
    other = checkflow.resumable(kind(foreign.Failing(index)))
    other.load_state_dict(loader.state_dict())
    assert numbers(other) == expected[4:]
    if isinstance(other, SkippingLoader):
        assert ("could not be fetched again" in caplog.text) == (index < 4)


class Broken(foreign.OwnLoader):
    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from itertools.islice(super().__iter__(), 2)
        raise OSError("flaky")


class BrokenSizedLoader(Broken):
    def __len__(self) -> int:
        return 4


@pytest.mark.parametrize("kind", [Broken, BrokenSizedLoader, lambda: lambda: iter(Broken())])
def test_an_error_is_no_end_of_an_epoch(kind: Any) -> None:
    loop = foreign.Loop(foreign.make(kind), counted=False)
    iterator = iter(loop.loader)
    for _ in range(2):
        loop._use(next(iterator))
    with pytest.raises(OSError, match="flaky"):
        next(iterator)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="ended with an error, and cannot go on"):
            next(iterator)
    assert not loop.loader.exhausted
    assert not loop.loader.state_dict()["over"]


def test_what_cannot_be_begun_is_no_end_of_an_epoch() -> None:
    class Closed(foreign.OwnLoader):
        def __iter__(self) -> Iterator[torch.Tensor]:
            raise OSError("closed")

    iterator = iter(checkflow.resumable(Closed()))
    with pytest.raises(OSError, match="closed"):
        next(iterator)
    with pytest.raises(RuntimeError, match="ended with an error, and cannot go on"):
        next(iterator)
