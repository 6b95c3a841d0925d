"""checkflow.resumable: interrupted at any batch, every loader's training goes on as if it had not been."""

from __future__ import annotations

import functools
import importlib.util
import logging
import multiprocessing
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, IterableDataset, SequentialSampler, get_worker_info
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data.distributed import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

import checkflow
from checkflow import api
from checkflow.api import Checkpointer
from checkflow.core import plan as plans
from checkflow.core.errors import MismatchError, UnsupportedError
from checkflow.runtime.data.adapters.base import ForeignLoader
from checkflow.runtime.data.adapters.freeze import freeze, thaw
from checkflow.runtime.data.adapters.replay import SkippingLoader
from checkflow.runtime.data.adapters.stateful import WAITING, StateLoader
from checkflow.runtime.data.loader import DataLoader
from checkflow.runtime.data.worker_processes import WorkerShield
from checkflow.runtime.format import codec
from tests.support import foreign
from tests.support.oracle import clone_state, random_plan, same_bits
from tests.support.pairing import pairs


def check_every_capture(kind: Callable[[], Any], *, take: int | None = None, **loop: Any) -> None:
    foreign.seeded(1)
    whole = foreign.Loop(foreign.make(kind), **loop)
    whole.run(foreign.EPOCHS, take=take)
    end = foreign.drawn()
    whole.loader.end_workers()
    assert len(whole.captures) >= foreign.EPOCHS * 2
    for used, capture in whole.captures:
        foreign.seeded(100 + used)
        other = foreign.Loop(foreign.make(kind), **loop)
        other.go_on(capture)
        before = [row for row in whole.rows[:used] if row[0] == "validation"]
        in_epoch = used - 1 - max((i for i in range(used) if whole.rows[i][0] == "validation"), default=-1)
        other.run(foreign.EPOCHS, over=len(before), take=take, taken=in_epoch)
        assert other.rows == whole.rows[used:], f"after {used}"
        assert foreign.drawn() == end
        other.loader.end_workers()


# The same state means the end of an epoch, and the begin of the next: only a length tells that nothing is left.
AMBIGUOUS = ("own, at once", 0)


@pytest.mark.parametrize("ahead", [None, 0, 1, 3])
@pytest.mark.parametrize("kind", foreign.KINDS)
def test_goes_on_from_every_batch(kind: str, ahead: int | None) -> None:
    if (kind, ahead) != AMBIGUOUS:
        check_every_capture(foreign.KINDS[kind], ahead=ahead)


@pytest.mark.parametrize("kind", foreign.KINDS)
def test_goes_on_in_epochs_that_the_loop_counts(kind: str) -> None:
    check_every_capture(foreign.KINDS[kind], counted=False)


@pytest.mark.parametrize("kind", foreign.KINDS)
def test_goes_on_after_epochs_left_early(kind: str) -> None:
    check_every_capture(foreign.KINDS[kind], take=2)


def check_lives(kind: Callable[[], Any], *, ahead: int | None = None) -> None:
    """Each life goes on from the first capture of the one before it, and must end like the first one."""
    foreign.seeded(1)
    whole = life = foreign.Loop(foreign.make(kind), ahead=ahead)
    whole.run(foreign.EPOCHS)
    end, used = foreign.drawn(), 0
    whole.loader.end_workers()
    while life.captures:
        rows, capture = life.captures[0]
        used += rows
        foreign.seeded(100 + used)
        life = foreign.Loop(foreign.make(kind), ahead=ahead)
        life.go_on(capture)
        life.run(foreign.EPOCHS)
        assert life.rows == whole.rows[used:], f"after {used}"
        assert foreign.drawn() == end
        life.loader.end_workers()
    assert used == whole.captures[-1][0]


@pytest.mark.parametrize("ahead", [None, 1])
@pytest.mark.parametrize("kind", foreign.KINDS)
def test_goes_on_from_a_life_that_went_on(kind: str, ahead: int | None) -> None:
    check_lives(foreign.KINDS[kind], ahead=ahead)


@pytest.mark.parametrize(*pairs(kind=list(foreign.WORKERS), ahead=[None, 1], check=[check_every_capture, check_lives]))
def test_goes_on_with_workers(kind: str, ahead: int | None, check: Any) -> None:
    check(foreign.WORKERS[kind], ahead=ahead)


class Chosen(StatefulDataLoader[Any]):
    """Leaves batches out: its count is not torchdata's."""

    def __iter__(self) -> Any:
        return (batch for batch in super().__iter__() if int(batch[0, 0]) % 8 == 0)


def test_a_loader_that_hands_out_in_a_way_of_its_own_is_left_to_torchdata() -> None:
    def kind() -> Any:
        return Chosen(foreign.StreamOfMaps(), foreign.BATCH, num_workers=0)

    whole = list(checkflow.resumable(kind()))
    loader = checkflow.resumable(kind())
    assert torch.equal(next(iter(loader)), whole[0])
    state = loader.state_at(0, 1)
    other = checkflow.resumable(kind())
    other.load_state_dict(state)
    assert [batch.tolist() for batch in other] == [batch.tolist() for batch in whole[1:]]


class Partly(IterableDataset[torch.Tensor]):
    """Of each worker so many samples; some cannot be read, and the iteration goes on behind them."""

    def __init__(self, sizes: tuple[int, ...], bad: tuple[int, ...] = ()) -> None:
        self.sizes, self.bad = sizes, bad

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = get_worker_info()
        worker = 0 if info is None else info.id
        return map(self.read, range(100 * worker, 100 * worker + self.sizes[worker]))

    def read(self, index: int) -> torch.Tensor:
        if index in self.bad:
            raise OSError(f"sample {index}")
        return torch.tensor(float(index))


def take(loader: Any, count: int) -> list[Any]:
    """So many batches, those that cannot be read as None."""
    found, batches = [], iter(loader)
    for _ in range(count):
        try:
            found.append(next(batches).tolist())
        except OSError:
            found.append(None)
        except StopIteration:
            break
    return found


@pytest.mark.parametrize("workers", [0, 1])
def test_a_batch_that_could_not_be_read_counts_in_every_life(workers: int) -> None:
    def kind() -> Any:
        return checkflow.resumable(foreign.iterable_loader(Partly((20,), (5,)), workers))

    whole = take(kind(), 9)
    assert whole.count(None) == 1
    loader, used, lives = kind(), [], 0
    while len(used) < len(whole):
        used += take(loader, 1)
        state = loader.state_at(0, len(used))
        loader.end_workers()
        loader, lives = kind(), lives + 1
        loader.load_state_dict(state)
    assert used == whole
    assert lives == len(whole)


def test_data_that_changed_under_a_worker_is_noticed() -> None:
    loader = checkflow.resumable(foreign.iterable_loader(Partly((20, 20)), 2))
    take(loader, 3)
    state = loader.state_at(0, 3)
    loader.end_workers()
    other = checkflow.resumable(foreign.iterable_loader(Partly((2, 20)), 2))
    other.load_state_dict(state)
    with pytest.raises(MismatchError, match="comes from another worker than when the checkpoint was made"):
        take(other, 1)
    other.end_workers()


def test_what_is_interrupted_while_batches_are_thrown_away_is_done_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a notebook, where the cell is run once more."""
    loader = checkflow.resumable(foreign.iterable_loader(Partly((20,)), 0))
    take(loader, 3)
    other = checkflow.resumable(foreign.iterable_loader(Partly((20,)), 0))
    other.load_state_dict(loader.state_at(0, 3))
    read = Partly.read

    def interrupt(self: Partly, index: int) -> torch.Tensor:
        if index == 5:
            raise KeyboardInterrupt
        return read(self, index)

    with monkeypatch.context() as patch:
        patch.setattr(Partly, "read", interrupt)
        with pytest.raises(KeyboardInterrupt):
            take(other, 1)
    other.set_epoch(0, 3)  # as epochs() does
    assert take(other, 2) == [[12.0, 13.0, 14.0, 15.0], [16.0, 17.0, 18.0, 19.0]]


# Whole jobs


class Stopped(Exception):  # noqa: N818 - no error
    """Ends a job where it is."""


def train(kind: str, directory: Path, stop: tuple[str, int] | None = None, *, ahead: bool = False) -> Any:
    """Train to the end, or to the stop; returns the rows used and the state at the end."""
    foreign.seeded(2)
    model = nn.Sequential(nn.Linear(1, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loader = checkflow.resumable(foreign.KINDS[kind]())
    with Checkpointer(model, optimizer, loader, directory=directory, plan=plan(), every=1, audit=1) as checkpointer:
        for epoch in checkpointer.epochs(foreign.EPOCHS):
            model.train()
            for batch in foreign.fetched_ahead(checkpointer.loader, 1 if ahead else 0):
                data = batch[0]["data"] if isinstance(batch, list) else batch
                optimizer.zero_grad()
                model(data[:, :1].float()).square().mean().backward()
                optimizer.step()
                with open(directory.with_suffix(".rows"), "a") as file:
                    file.write(f"{checkpointer.iteration}: {epoch} {data.tolist()}\n")
                if stop == ("step", checkpointer.iteration):
                    raise Stopped
                if ahead:
                    checkpointer.step()
            model.eval()
            torch.rand(epoch + 1)  # as validation may
            if stop == ("epoch", epoch):
                raise Stopped
    return clone_state({"model": model}, {"optimizer": optimizer}), torch.get_rng_state()


@functools.cache
def plan() -> Any:
    model = nn.Sequential(nn.Linear(1, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    model(torch.zeros(2, 1)).sum().backward()
    optimizer.step()
    return random_plan({"model": model}, {"optimizer": optimizer}, 0)


def rows_of(directory: Path) -> dict[str, str]:
    """By iteration, the one that was done last."""
    return dict(line.split(": ", 1) for line in directory.with_suffix(".rows").read_text().splitlines())


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize(
    "kind",
    [
        "torch, map-style",
        "torchdata, map-style, generator",
        "torchdata, iterable-style",
        "own",
        "own, sized, at once",
        "torch, iterable-style",
        "torch, iterable-style with state",
        "torch, otherwise iterated",
        "list",
        "function of the epoch",
        "DALI, starts over",
        "DALI, checkpoints",
    ],
)
def test_a_job_ends_bit_identically(kind: str, ahead: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "check_plan", plans.validate)
    plan()
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    state, generator = train(kind, whole, ahead=ahead)
    for stop in (("step", 1), ("epoch", 0), ("step", len(rows_of(whole)) - 2)):
        with pytest.raises(Stopped):
            train(kind, parts, stop, ahead=ahead)
    found, found_generator = train(kind, parts, ahead=ahead)
    assert rows_of(parts) == rows_of(whole)
    assert found.keys() == state.keys()
    assert all(same_bits(found[name], tensor) for name, tensor in state.items())
    assert same_bits(found_generator, generator)


# torch's loader over map-style data


class OwnBatches:
    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[1, 5], [2], [9, 3, 4]])


def first_of_each(samples: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([sample[0] for sample in samples]) * 2


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {"batch_size": 4},
    "shuffled": {"batch_size": 4, "shuffle": True},
    "no tail": {"batch_size": 4, "shuffle": True, "drop_last": True},
    "workers": {"batch_size": 4, "shuffle": True, "num_workers": 2, "prefetch_factor": 3, "timeout": 600},
    "collated": {"batch_size": 3, "collate_fn": first_of_each},
    "samples": {"batch_size": None, "shuffle": True},
}
#: Of these the order may be drawn, too: from one number more than torch's loader draws.
ORDERS: dict[str, dict[str, Any]] = {
    "sampler": {"batch_size": 4, "sampler": [3, 1, 4, 1, 5]},
    "batches": {"batch_sampler": OwnBatches()},
    "torch's batches": {"batch_sampler": BatchSampler(SequentialSampler(range(foreign.SIZE)), 5, drop_last=True)},
}


def batches_of(settings: dict[str, Any], *, wrap: bool) -> tuple[list[Any], list[float]]:
    """Of two epochs, and a number drawn after each."""
    torch.manual_seed(5)
    loader: Any = TorchDataLoader(foreign.PlainMapData(), **settings)  # type: ignore[arg-type]
    loader = checkflow.resumable(loader) if wrap else loader
    rows = [(batch.tolist(), float(torch.rand(()))) for _ in range(2) for batch in loader]
    assert len(rows) == 2 * len(loader) > 0
    batches, numbers = zip(*rows, strict=True)
    return list(batches), list(numbers)


@pytest.mark.parametrize("name", SETTINGS)
def test_torch_s_loader_gives_the_same_batches_and_draws_the_same(name: str) -> None:
    assert batches_of(SETTINGS[name], wrap=True) == batches_of(SETTINGS[name], wrap=False)


@pytest.mark.parametrize("name", ORDERS)
def test_torch_s_loader_gives_the_same_batches(name: str) -> None:
    assert batches_of(ORDERS[name], wrap=True)[0] == batches_of(ORDERS[name], wrap=False)[0]


def test_every_setting_is_taken_over() -> None:
    context = multiprocessing.get_context("fork")
    loader = TorchDataLoader(
        foreign.MapData(), 4, num_workers=2, timeout=7, worker_init_fn=foreign.print_nothing, prefetch_factor=5,
        multiprocessing_context=context, persistent_workers=True, pin_memory=True,
    )  # type: ignore[arg-type]  # fmt: skip
    made = checkflow.resumable(loader)
    assert isinstance(made, DataLoader)
    for name in (
        "num_workers", "timeout", "prefetch_factor", "multiprocessing_context", "persistent_workers", "in_order",
        "pin_memory",
    ):  # fmt: skip
        assert getattr(made._loader, name) == getattr(loader, name), name
    assert isinstance(made.shield, WorkerShield)
    assert made.shield._then is foreign.print_nothing
    seeded = checkflow.resumable(loader, seed=3, rank=1, world_size=2, tail="drop", reseed=print)
    assert isinstance(seeded, DataLoader)
    assert (seeded.seed, seeded.share.rank, seeded.share.world_size, seeded.tail) == (3, 1, 2, "drop")
    assert checkflow.resumable(made) is made


def test_torch_s_loader_over_iterable_style_data_keeps_its_settings() -> None:
    loader = foreign.iterable_loader(
        foreign.Stream(), 2, timeout=7, worker_init_fn=abs, prefetch_factor=5, persistent_workers=True, drop_last=True,
        collate_fn=first_of_each,
    )  # fmt: skip
    made = checkflow.resumable(loader)
    assert isinstance(made, StateLoader)
    inner: Any = made.loader
    assert isinstance(inner, StatefulDataLoader)
    for name in (
        "num_workers", "timeout", "prefetch_factor", "multiprocessing_context", "persistent_workers", "in_order",
        "pin_memory", "batch_size", "drop_last", "collate_fn",
    ):  # fmt: skip
        assert getattr(inner, name) == getattr(loader, name), name


@pytest.mark.slow
def test_without_torchdata_iterable_style_data_is_fetched_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    caplog.set_level(logging.INFO, "checkflow")
    kind = functools.partial(foreign.iterable_loader, foreign.Stream(), 2)
    assert isinstance(checkflow.resumable(kind()), SkippingLoader)
    assert caplog.text.count("takes as long as it took to load them") == 1
    check_every_capture(kind, ahead=None)


@pytest.mark.parametrize("kind", ["torchdata, map-style", "torch, iterable-style", "torch, iterable-style with state"])
def test_workers_are_shielded(kind: str) -> None:
    made = foreign.make(foreign.WORKERS[kind])
    assert isinstance(made, ForeignLoader)
    assert made.shield is not None
    assert made.loader.worker_init_fn is made.shield  # type: ignore[attr-defined]
    assert checkflow.resumable(made.loader).shield is made.shield  # one, however often it is wrapped


# What else is told


def test_workers_find_the_user_s_data_set() -> None:
    loader = checkflow.resumable(foreign.iterable_loader(foreign.AskingStream(), 2))
    assert isinstance(loader, StateLoader)
    assert sorted(index for batch in loader for index in batch.tolist()) == list(range(foreign.SIZE))


def test_states_are_bounded_where_no_step_is_told(caplog: pytest.LogCaptureFixture) -> None:
    loader = checkflow.resumable(StatefulDataLoader(range(200), 1))  # type: ignore[arg-type]
    assert isinstance(loader, StateLoader)
    loop = foreign.Loop(loader, ahead=0, counted=False)
    assert len(list(loader)) == 200
    assert len(loader._kept) <= WAITING
    assert caplog.text.count("must call step()") == 1
    loop.progress.count(1)
    with pytest.raises(UnsupportedError, match="was not kept"):
        loop.progress.capture()
    loop.progress.count(198)
    other = foreign.Loop(checkflow.resumable(StatefulDataLoader(range(200), 1)), ahead=0, counted=False)  # type: ignore[arg-type]
    other.go_on(codec.encode(loop.progress.capture()))
    assert [batch.tolist() for batch in other.loader] == [[199]]


def test_as_torch_says_what_the_loader_says() -> None:
    view: Any = checkflow.resumable(foreign.stateful_loader(foreign.MapData(), 0, drop_last=True)).as_torch()
    assert len(view.dataset) == foreign.SIZE
    assert (view.batch_sampler.batch_size, view.batch_sampler.drop_last) == (foreign.BATCH, True)
    view = checkflow.resumable(foreign.sequence()).as_torch()
    with pytest.raises(TypeError, match="how many samples"):
        len(view.dataset)
    assert len(view) == 5


def test_a_loader_that_is_resumable_takes_no_arguments() -> None:
    with pytest.raises(ValueError, match="seed: this DataLoader is resumable already; make it with these"):
        checkflow.resumable(DataLoader(range(3)), seed=1)  # type: ignore[arg-type]


def test_a_state_that_cannot_be_copied_is_refused() -> None:
    class Deep(foreign.OwnLoader):
        def state_dict(self) -> Any:
            state: list[Any] = []
            for _ in range(10**5):
                state = [state]
            return state

    with pytest.raises(UnsupportedError, match=r"the loader's state.* is nested more than"):
        list(checkflow.resumable(Deep()))


def test_an_epoch_is_iterated_once() -> None:
    loader = foreign.make(foreign.sequence)
    loader.epochs_counted_elsewhere = True
    assert len(list(loader)) == len(loader) == 5
    with pytest.raises(UnsupportedError, match="iterated twice"):
        next(iter(loader))


def test_the_epoch_is_told_to_whoever_asks() -> None:
    class Told(foreign.PlainMapData):
        def __init__(self) -> None:
            self.epochs: list[int] = []

        def set_epoch(self, epoch: int) -> None:
            self.epochs.append(epoch)

    dataset = Told()
    sampler = DistributedSampler(dataset, num_replicas=1, rank=0)  # type: ignore[arg-type]
    loader = checkflow.resumable(StatefulDataLoader(dataset, 4, sampler=sampler))  # type: ignore[arg-type]
    rows = [[batch.tolist() for batch in loader] for _ in range(2)]
    assert dataset.epochs == [0, 1]
    assert sampler.epoch == 1
    assert rows[0] != rows[1]


@pytest.mark.parametrize(
    ("ahead", "kind"), [(3, "torchdata, map-style"), (None, "torchdata, iterable-style"), (None, "own, sized")]
)
def test_no_more_states_are_kept_than_batches_are_ahead(ahead: int | None, kind: str) -> None:
    loader = foreign.make(foreign.KINDS[kind])
    assert isinstance(loader, StateLoader)
    kept: list[int] = []

    class Watched(foreign.Loop):
        def on_batch_handed(self, batch: Any) -> None:
            super().on_batch_handed(batch)
            kept.append(len(loader._kept))

    Watched(loader, ahead=ahead).run(2)
    assert 0 < max(kept) <= (ahead or 0) + 2  # those handed out, and at an epoch's begin its predecessor's last


def test_states_are_taken_where_they_are_needed_only() -> None:
    class Counted(foreign.OwnSizedLoader):
        taken = 0

        def state_dict(self) -> dict[str, Any]:
            self.taken += 1
            return super().state_dict()

    inner = Counted()
    loop = foreign.Loop(checkflow.resumable(inner))
    loop.run(1)
    before = inner.taken
    loop.captures.clear()
    loop.run(2)
    assert inner.taken - before == len(loop.captures)  # 4, and the end of the epoch is one of them


@pytest.mark.parametrize(
    ("saved", "other", "name"),
    [
        (foreign.sequence, lambda: tuple(foreign.sequence()), "the type list, .* the type tuple"),
        (foreign.sequence, foreign.OwnLoader, "fetched again, .* a state of its own"),
        (foreign.KINDS["torchdata, map-style"], foreign.WORKERS["torchdata, map-style"], "num_workers="),
    ],
)
def test_another_loader_is_refused(saved: Any, other: Any, name: str) -> None:
    with pytest.raises(MismatchError, match=name):
        checkflow.resumable(other()).load_state_dict(checkflow.resumable(saved()).state_dict())


def test_fewer_batches_than_were_used_are_refused() -> None:
    loader = checkflow.resumable(foreign.LazyBatches())
    iterator = iter(loader)
    for _ in range(3):
        next(iterator)
    other = checkflow.resumable(lambda: iter(foreign.sequence()[:1]))
    state = loader.state_dict() | {"loader": "_Made"}
    other.load_state_dict(state)
    with pytest.raises(MismatchError, match="the loader has 1 in it"):
        next(iter(other))


def test_arguments_for_map_style_data_are_refused_elsewhere() -> None:
    with pytest.raises(ValueError, match="seed, tail: for torch's DataLoader over map-style data, not for a list"):
        checkflow.resumable(foreign.sequence(), seed=1, tail="drop")


def test_the_length_is_the_loader_s() -> None:
    assert len(checkflow.resumable(foreign.OwnSizedLoader())) == 4
    with pytest.raises(TypeError, match="not known"):
        len(checkflow.resumable(foreign.LazyBatches()))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(2.5),
        torch.arange(6).reshape(2, 3).t(),
        torch.zeros(0, 3),
        torch.ones(3, dtype=torch.bfloat16)[::2],
        torch.tensor([True, False]),
        torch.tensor([1 + 2j]).conj(),
    ],
)
def test_a_state_is_frozen_as_it_was(tensor: torch.Tensor) -> None:
    expected, state = tensor.clone(), {"x": [tensor, {"y": (1, "two")}]}
    frozen = freeze(state)
    tensor.zero_()
    state["x"].clear()
    found = thaw(frozen)
    assert found["x"][0].dtype == expected.dtype
    assert torch.equal(found["x"][0], expected)
    assert found["x"][1] == {"y": (1, "two")}
    found["x"][0].zero_()  # it can be written


def test_what_no_checkpoint_holds_is_named() -> None:
    class Locked(foreign.OwnLoader):
        def state_dict(self) -> dict[str, Any]:
            return {"lock": threading.Lock()}

    with pytest.raises(UnsupportedError, match=r"the loader's state\['lock'\]"):
        list(checkflow.resumable(Locked()))
