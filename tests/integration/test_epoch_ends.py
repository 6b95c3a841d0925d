"""The ends of epochs are saved and stay, however a loop says where its boundaries are."""

from __future__ import annotations

import itertools
import logging
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F

from checkflow import api
from checkflow.api import Checkpointer
from checkflow.core import plan as plans
from checkflow.runtime.data.loader import DataLoader
from checkflow.runtime.format import codec
from checkflow.runtime.format.manifest import EXTRA
from checkflow.runtime.store.discovery import find
from checkflow.runtime.store.files import glance
from tests.support import jobs

EPOCHS, BATCHES = 3, jobs.BATCHES


@pytest.fixture(autouse=True)
def _a_random_plan_obeys_no_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "check_plan", plans.validate)


def train(
    directory: Path, loop: str, *, most: int = 10**6,
    after: Callable[[Checkpointer], object] = lambda checkpointer: None, **options: Any,
) -> Checkpointer:  # fmt: skip
    """Some iterations, or all of them.

    Args:
        loop: who marks boundaries: "checkflow"; "step", each with ``step()``; "ahead", so too, and batches are fetched
            before the one before them has reached its step; "plain", so too, without ``epochs()``; "endless", without
            it, ahead, and from one epoch into the next; "accumulated", two batches each, and ``step(2)``.
        after: called at the end of each loop over batches.
    """
    random.seed(1)
    numpy.random.seed(2)
    model, optimizer, scheduler = jobs.make()
    loader = DataLoader(jobs.data(1), jobs.BATCH, shuffle=True, seed=3)
    micro = 2 if loop == "accumulated" else 1
    with Checkpointer(
        model, optimizer, loader, directory=directory, plan=jobs.make_plan(), state={"scheduler": scheduler},
        keep_latest=2, keep_epochs=True, **options,
    ) as checkpointer:  # fmt: skip
        for batches in epochs(checkpointer, loop):
            for number, (_, x, y) in enumerate(batches, 1):
                F.cross_entropy(model(x), y).backward()
                if number % micro:
                    continue
                checkpointer._saving.writer.wait_until_at_most(0)  # an end that waits gives way to a newer one
                optimizer.step()
                optimizer.zero_grad()
                if loop != "checkflow":
                    checkpointer.step(micro)
                most -= 1
                if not most:
                    return checkpointer
            model.eval()
            with torch.no_grad():
                model(torch.randn(4, 8))
            model.train()
            after(checkpointer)
    return checkpointer


def epochs(checkpointer: Checkpointer, loop: str) -> Iterator[Iterator[Any]]:
    """The batches of each loop over batches."""
    loader = checkpointer.loader
    if loop == "endless":
        through = itertools.chain.from_iterable(iter(loader) for _ in range(EPOCHS + 1))
        yield itertools.islice(jobs.ahead(through), EPOCHS * BATCHES - checkpointer.iteration)
    elif loop == "plain":
        for _ in range(EPOCHS):
            yield iter(loader)
    else:
        for _ in checkpointer.epochs(EPOCHS):
            yield jobs.ahead(loader) if loop == "ahead" else iter(loader)


def ends(directory: Path) -> dict[int, int]:
    """Of the checkpoints that are ends of epochs: how many epochs are over."""
    manifests = [glance(path) for path in find(directory)]
    return {one.step: one.info["epoch"] for one in reversed(manifests) if one.info["epoch_end"]}  # type: ignore[misc]


@pytest.mark.parametrize("loop", ["checkflow", "step", "ahead", "accumulated"])
def test_ends_of_epochs_stay(loop: str, tmp_path: Path) -> None:
    per_epoch = BATCHES // 2 if loop == "accumulated" else BATCHES
    train(tmp_path, loop, every=1)
    assert ends(tmp_path) == {per_epoch * epoch: epoch for epoch in (1, 2, 3)}
    steps = {glance(path).step for path in find(tmp_path)}
    assert steps == {*ends(tmp_path), EPOCHS * per_epoch - 1}  # the two newest, and those


@pytest.mark.parametrize("loop", ["plain", "endless"])
def test_a_loop_that_does_not_say_that_it_has_epochs_keeps_none_and_they_are_counted(loop: str, tmp_path: Path) -> None:
    """It may pass through its data thousands of times."""
    train(tmp_path, loop, every=1, keep_every=5)
    found = {one.step: one.info for one in map(glance, find(tmp_path))}
    assert {step: info["epoch"] for step, info in found.items()} == {5: 0, 10: 1, 15: 2, 17: 2, 18: 2}
    assert not any(info["epoch_end"] for info in found.values())


@pytest.mark.parametrize("loop", ["step", "ahead", "accumulated"])
def test_without_an_interval_they_are_captured_all_the_same(
    loop: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("checkflow.runtime.interval.controller.Controller.is_due", lambda self, number: False)
    monkeypatch.setattr(
        "checkflow.runtime.interval.controller.Controller.leaves_out_epochs", property(lambda self: False)
    )
    per_epoch = BATCHES // 2 if loop == "accumulated" else BATCHES
    train(tmp_path, loop)
    assert ends(tmp_path) == {per_epoch * epoch: epoch for epoch in (1, 2, 3)}


@pytest.mark.parametrize("loop", ["step", "ahead"])
def test_one_goes_on_from_an_end_as_from_any_boundary(loop: str, tmp_path: Path) -> None:
    """What follows an epoch's last ``step()`` has not been done: it comes after an empty loader."""
    train(tmp_path / "a", loop, every=1, most=BATCHES)
    assert ends(tmp_path / "a") == {BATCHES: 1}
    train(tmp_path / "b", loop, every=1)
    train(tmp_path / "a", loop, every=1)
    one, other = (glance(find(tmp_path / name)[0]) for name in ("a", "b"))
    assert one.step == other.step == EPOCHS * BATCHES
    assert one.tensors == other.tensors
    weights = [name for name in one.files if name.endswith(".safetensors")]
    assert weights
    assert [one.files[name] for name in weights] == [other.files[name] for name in weights]
    extra, expected = (codec.decode((find(tmp_path / name)[0] / EXTRA).read_bytes()) for name in ("a", "b"))
    assert codec.encode(sorted_by_key(extra)) == codec.encode(sorted_by_key(expected))


def sorted_by_key(value: Any) -> Any:
    """Optimizers list their state in another order after a resume."""
    if isinstance(value, dict):
        return [(key, sorted_by_key(value[key])) for key in sorted(value, key=repr)]
    return [sorted_by_key(item) for item in value] if isinstance(value, list | tuple) else value


@pytest.mark.parametrize("loop", ["checkflow", "step", "ahead", "accumulated"])
def test_an_end_that_is_captured_late_is_one_too(loop: str, tmp_path: Path) -> None:
    """For its metric, which the loop tells when the epoch's last step is marked; or since training ends there."""
    per_epoch = BATCHES // 2 if loop == "accumulated" else BATCHES
    values = iter((0.5, 0.25, 0.75))
    train(tmp_path, loop, every=100, keep_best=1, monitor="loss", after=lambda job: job.metric("loss", next(values)))
    found = {per_epoch * epoch: epoch for epoch in (1, 2, 3)}
    assert ends(tmp_path) == found


@pytest.mark.parametrize(("loop", "done", "told"), [("plain", 4, False), ("plain", 8, True), ("checkflow", 8, False)])
def test_a_resumed_loop_that_may_count_epochs_itself_is_told_which_one_goes_on(
    loop: str, done: int, told: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "checkflow"):
        train(tmp_path, loop, every=1, most=done)
        assert "goes on" not in caplog.text.replace("goes on from", "")
        train(tmp_path, loop, every=1, most=BATCHES)
    assert caplog.text.count("epoch 1 goes on: a loop that counts epochs itself begins at") == told


def test_a_sampler_that_cannot_say_whether_more_follows_costs_no_checkpoint(tmp_path: Path) -> None:
    """It is the user's, and may fail: the loop is told when it asks for a batch, as by torch's loader."""

    class Failing(DataLoader[Any]):
        asked = 0
        fails = False

        @property
        def exhausted(self) -> bool:
            if not self.fails:
                return super().exhausted
            self.asked += 1
            raise ValueError("the sampler failed")

    model, optimizer, _ = jobs.make()
    loader = Failing(jobs.data(1), jobs.BATCH, shuffle=True, seed=3)
    with Checkpointer(model, optimizer, loader, directory=tmp_path, plan=jobs.make_plan(), every=1) as checkpointer:
        for _ in checkpointer.epochs(1):
            for _, x, y in checkpointer.loader:
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                loader.fails = True
                checkpointer.step()
                loader.fails = False
    assert loader.asked
    assert [glance(path).step for path in find(tmp_path)] == [BATCHES, BATCHES - 1]
    assert not ends(tmp_path)


def test_a_last_iteration_with_fewer_batches_ends_its_epoch(tmp_path: Path) -> None:
    model, optimizer, _ = jobs.make()
    loader = DataLoader(jobs.data(1), jobs.BATCH, shuffle=True, seed=3)
    with Checkpointer(
        model, optimizer, loader, directory=tmp_path, plan=jobs.make_plan(), every=1, keep_epochs=True
    ) as checkpointer:
        for _ in checkpointer.epochs(2):
            for number, (_, x, y) in enumerate(checkpointer.loader, 1):
                F.cross_entropy(model(x), y).backward()
                if number % 4 and number < BATCHES:
                    continue
                optimizer.step()
                optimizer.zero_grad()
                checkpointer.step(4 if number == 4 else 2)
                if number == BATCHES:
                    checkpointer.step(0)  # nothing more has reached it: no end of another epoch
    assert ends(tmp_path) == {2: 1, 4: 2}
