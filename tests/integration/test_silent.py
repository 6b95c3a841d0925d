"""What a loop does that is not saved, or not as it seems, is said: once, and with what to do."""

from __future__ import annotations

import contextlib
import copy
import itertools
import logging
from pathlib import Path
from typing import Any, Self

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import TensorDataset

import checkflow
from checkflow.core.errors import UnsupportedError
from checkflow.planner.live.planner import LivePlanner
from checkflow.runtime.job.progress import Progress
from checkflow.runtime.store.discovery import find
from tests.support.own_plans import Never


@pytest.fixture(autouse=True)
def _no_plan_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under one there would be checkpoints within epochs, from a step on that follows from the machine's speed."""
    monkeypatch.setattr(LivePlanner, "start", lambda self, recorded, **asked: Never())


DATA = TensorDataset(torch.randn(64, 4), torch.randint(0, 2, (64,)))
Job = tuple[nn.Module, torch.optim.Optimizer, checkflow.DataLoader]


def make() -> Job:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    return model, optimizer, checkflow.DataLoader(DATA, batch_size=8, shuffle=True)


def backward(model: nn.Module, batch: Any) -> None:
    F.cross_entropy(model(batch[0]), batch[1]).backward()


def iterate(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
    backward(model, batch)
    optimizer.step()
    optimizer.zero_grad()


def accumulate(job: Job, directory: Path, batches: int, epochs: int = 2, **options: Any) -> None:
    """Train, with a step after every so many batches."""
    model, optimizer, loader = job
    with checkflow.Checkpointer(model, optimizer, loader, directory=directory, **options) as checkpointer:
        for _ in checkpointer.epochs(epochs):
            for i, batch in enumerate(checkpointer.loader):
                backward(model, batch)
                if i % batches == batches - 1:
                    optimizer.step()
                    optimizer.zero_grad()


def steps(directory: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in find(directory))


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.levelno >= logging.WARNING]


def test_batches_left_over_at_the_end_of_an_epoch_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    accumulate(make(), tmp_path, 3, epochs=3, every=100)
    said = warnings(caplog)
    assert len(said) == 2
    assert said[0].startswith("2 batches of epoch 0 were handed out after the last optimizer step")
    assert "call optimizer.step() after an epoch's last batch" in said[0]
    assert said[1].startswith("training went on after step 6 and ended inside of the next iteration")
    assert steps(tmp_path) == []


@pytest.mark.parametrize("every", [1, 4, 8])
def test_without_a_remainder_nothing_is_said(every: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    accumulate(make(), tmp_path, every)
    assert not warnings(caplog)
    assert steps(tmp_path)[-1] == 16 // every  # the other end may have been left out, to see what training takes


def test_a_boundary_that_is_saved_before_the_remainder_is_the_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Going on from it takes the remainder again: nothing is lost, and the end is no more said to be."""
    accumulate(make(), tmp_path, 3, every=1)
    assert steps(tmp_path)[-1] == 4
    assert [message[:27] for message in warnings(caplog)] == ["2 batches of epoch 0 were h"]
    caplog.clear()
    accumulate(make(), tmp_path, 3, every=1)  # two batches are left, and are a remainder again
    assert [message[:27] for message in warnings(caplog)] == ["2 batches of epoch 1 were h"]


@pytest.mark.parametrize("batches", [14, 15])
def test_an_end_inside_of_an_iteration_is_told(batches: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Without ``epochs()``, where batches of two epochs may belong to one iteration."""
    model, optimizer, loader = make()
    with checkflow.Checkpointer(model, optimizer, loader, directory=tmp_path, every=100) as checkpointer:
        both = (batch for _ in range(2) for batch in checkpointer.loader)
        for used, batch in enumerate(itertools.islice(both, batches), 1):
            backward(model, batch)
            if used % 3 == 0:
                optimizer.step()
                optimizer.zero_grad()
    assert ["training went on after step 4 and ended inside" in message for message in warnings(caplog)] == (
        [True] if batches == 14 else []
    )
    assert steps(tmp_path) == ([] if batches == 14 else [5])


def test_an_optimizer_that_does_not_step_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer, loader = make()
    other = copy.deepcopy(model)
    its = torch.optim.Adam(other.parameters())
    with checkflow.Checkpointer(model, optimizer, loader, directory=tmp_path) as checkpointer:
        for epoch in checkpointer.epochs(3):
            assert bool(warnings(caplog)) == (epoch > 0)
            for batch in checkpointer.loader:
                iterate(other, its, batch)
    assert len(warnings(caplog)) == 1
    assert "8 batches were used, and no optimizer that was passed has stepped" in caplog.text


@pytest.mark.parametrize("loop", ["plain", "break", "explicit"])
def test_a_loop_without_a_step_is_told(loop: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer, loader = make()
    with checkflow.Checkpointer(model, optimizer, loader, directory=tmp_path) as checkpointer:
        for i, batch in enumerate(checkpointer.loader):
            backward(model, batch)
            if loop == "explicit":
                checkpointer.step()
            if loop == "break" and i == 4:
                break
    used = 5 if loop == "break" else 8
    said = [message for message in warnings(caplog) if "no optimizer that was passed has stepped" in message]
    assert len(said) == 1
    assert said[0].startswith(f"{used} batches were used")


def test_turns_without_a_step_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer, _ = make()
    with checkflow.Checkpointer(model, optimizer, directory=tmp_path) as checkpointer:
        for i in checkpointer.steps(210):
            assert ("100 turns of steps()" in caplog.text) == (i >= 100)
            backward(model, DATA[:8])
    assert i == 209
    assert len(warnings(caplog)) == 1


def test_a_short_loop_without_a_step_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer, _ = make()
    with checkflow.Checkpointer(model, optimizer, directory=tmp_path) as checkpointer:
        for _ in checkpointer.steps(3):
            backward(model, DATA[:8])
    assert [line[:36] for line in warnings(caplog)] == ["3 turns of steps() have ended, and n"]


def test_a_step_that_comes_late_is_no_fault(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer, loader = make()
    with checkflow.Checkpointer(model, optimizer, loader, directory=tmp_path) as checkpointer:
        batches = (batch for _ in itertools.count() for batch in checkpointer.loader)
        turns = 0
        for _ in checkpointer.steps(120):
            turns += 1
            backward(model, next(batches))
            if turns % 60 == 0:
                optimizer.step()
    assert turns == 120
    assert checkpointer.iteration == 2
    assert not warnings(caplog)


class Indexed:
    """A loop over its own data, by the numbers of ``steps``: the batch of turn 5 is bad, and its step is skipped."""

    def __init__(self, steps_of: str) -> None:
        torch.manual_seed(5)
        self.model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        self.data = torch.randn(12, 8, 4)
        self.data[5] = torch.inf if steps_of != "accumulated" else 1.0
        self.steps_of, self.turns = steps_of, list[int]()

    def iterate(self, turn: int) -> None:
        self.turns.append(turn)
        if self.steps_of == "filtered" and not self.data[turn].isfinite().all():
            return
        if self.steps_of != "accumulated" or turn % 3 == 0:
            self.optimizer.zero_grad()
        loss = self.model(self.data[turn]).square().mean()
        if self.steps_of == "scaled":
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            return
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        if norm.isfinite() if self.steps_of == "guarded" else turn % 3 == 2 or self.steps_of != "accumulated":
            self.optimizer.step()

    def train(self, directory: Path, stop: int | None = None) -> Self:
        with (
            contextlib.suppress(InterruptedError),
            checkflow.Checkpointer(
                self.model, self.optimizer, directory=directory, every=1, audit=1, state={"scaler": self.scaler}
            ) as checkpointer,
        ):
            for turn in checkpointer.steps(12):
                if turn == stop:
                    raise InterruptedError
                self.iterate(turn)
        self.iteration = checkpointer.iteration
        return self


@pytest.mark.slow
@pytest.mark.parametrize(
    ("steps_of", "stop"),
    [
        ("scaled", 3), ("scaled", 6), ("guarded", 5), ("guarded", 6), ("filtered", 7), ("filtered", 11),
        ("accumulated", 3), ("accumulated", 5), ("accumulated", 7),
    ],
)  # fmt: skip
def test_each_turn_comes_once_though_no_optimizer_steps_in_it(steps_of: str, stop: int, tmp_path: Path) -> None:
    whole = Indexed(steps_of).train(tmp_path / "whole")
    assert whole.turns == list(range(12))
    assert whole.iteration == (4 if steps_of == "accumulated" else 11)
    begun = Indexed(steps_of).train(tmp_path / "cut", stop)
    again = Indexed(steps_of).train(tmp_path / "cut")
    boundary = stop - stop % 3 if steps_of == "accumulated" else 5 if stop == 6 else stop
    assert begun.turns == list(range(stop))
    assert again.turns == list(range(boundary, 12))  # what followed the last step was not saved, and is done again
    assert again.iteration == whole.iteration
    for one, other in ((whole.model, again.model), (whole.optimizer, again.optimizer), (whole.scaler, again.scaler)):
        torch.testing.assert_close(one.state_dict(), other.state_dict(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.slow
def test_a_loop_that_was_left_goes_on_with_its_next_turn(tmp_path: Path) -> None:
    job = Indexed("accumulated")
    with checkflow.Checkpointer(job.model, job.optimizer, directory=tmp_path, every=1) as checkpointer:
        for turn in checkpointer.steps(12):
            if turn == 5:
                break
            job.iterate(turn)
        for turn in checkpointer.steps(12):
            job.iterate(turn)
        assert list(checkpointer.steps(12)) == []
    assert job.turns == list(range(12))


@pytest.mark.slow
def test_turns_of_a_checkpoint_that_does_not_count_them_are_iterations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Indexed("plain")
    capture = Progress.capture
    monkeypatch.setattr(
        Progress, "capture", lambda self: {key: value for key, value in capture(self).items() if key != "turns"}
    )
    job.train(tmp_path, 4)
    monkeypatch.undo()
    assert Indexed("plain").train(tmp_path).turns == list(range(4, 12))


@pytest.mark.slow
def test_a_loop_that_calls_step_twice_in_a_turn_counts_both(tmp_path: Path) -> None:
    model, optimizer, _ = make()

    def train(stop: int) -> list[int]:
        seen = []
        with checkflow.Checkpointer(model, optimizer, directory=tmp_path, every=1) as checkpointer:
            for turn in checkpointer.steps(8):
                if turn == stop:
                    break
                seen.append(turn)
                for _ in range(2):
                    iterate(model, optimizer, DATA[:8])
                    checkpointer.step()
        return seen

    assert train(4) == [0, 2]
    assert train(8) == [4, 6]


@pytest.mark.parametrize("loop", ["epochs", "steps", "plain"])
def test_batches_from_elsewhere_are_told(loop: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer, _ = make()
    original = TorchDataLoader(DATA, batch_size=8)
    loader = checkflow.resumable(original)
    with checkflow.Checkpointer(model, optimizer, loader, directory=tmp_path) as checkpointer:
        if loop == "epochs":
            for epoch in checkpointer.epochs(3):
                assert len(warnings(caplog)) == (epoch > 0)
                for batch in original:
                    iterate(model, optimizer, batch)
        elif loop == "steps":
            for _, batch in zip(checkpointer.steps(8), original, strict=False):
                iterate(model, optimizer, batch)
        else:
            for batch in original:
                iterate(model, optimizer, batch)
    assert len(warnings(caplog)) == 1
    assert "iterate checkpointer.loader" in caplog.text


@pytest.mark.parametrize("way", ["closed", "displaced", "left"])
def test_a_closed_one_is_refused(way: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer, loader = make()
    closed = checkflow.Checkpointer(model, optimizer, loader, directory=tmp_path)
    second = None
    if way == "closed":
        closed.close()
    elif way == "displaced":
        second = checkflow.Checkpointer(*make(), directory=tmp_path)
    else:
        with closed:
            pass
    caplog.clear()
    uses: list[Any] = [
        lambda: next(closed.epochs(2)),
        lambda: next(closed.steps(2)),
        closed.step,
        lambda: closed.step(0),
        closed.__enter__,
    ]
    for use in uses:
        with pytest.raises(UnsupportedError, match=f"this Checkpointer of {tmp_path} is closed.*make another one"):
            use()
    assert not caplog.records
    closed.close()
    if second is not None:
        second.close()


@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("loop", ["epochs", "steps"])
def test_closing_inside_of_a_loop_lets_it_go_on_to_its_end(loop: str, explicit: bool, tmp_path: Path) -> None:
    model, optimizer, loader = make()
    with checkflow.Checkpointer(model, optimizer, loader, directory=tmp_path, every=1) as checkpointer:
        turns = []
        for n in checkpointer.epochs(3) if loop == "epochs" else checkpointer.steps(6):
            turns.append(n)
            assert len(turns) < 10
            for i, batch in enumerate(loader if loop == "epochs" else [DATA[:8]]):
                iterate(model, optimizer, batch)
                if explicit:
                    checkpointer.step()
                if n == 2 and i == 0:
                    checkpointer.close()
        with pytest.raises(UnsupportedError, match="is closed"):
            checkpointer.step()
    assert turns == list(range(3 if loop == "epochs" else 6))
    assert steps(tmp_path)[-1] == {"epochs": 16, "steps": 2}[loop] + explicit


def test_a_loader_that_another_one_follows_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer, loader = make()
    first = checkflow.Checkpointer(model, optimizer, loader, directory=tmp_path / "first")
    second = checkflow.Checkpointer(model, optimizer, loader, directory=tmp_path / "second")
    assert len(warnings(caplog)) == 1
    assert f"the loader belonged to the Checkpointer of {tmp_path / 'first'}, which is not closed" in caplog.text
    first.close()
    for _ in second.epochs(1):
        for batch in second.loader:
            iterate(model, optimizer, batch)
    second.close()
    assert steps(tmp_path / "second")[-1] == 8


@pytest.mark.parametrize("way", ["closed", "dropped", "same directory"])
def test_a_loader_that_is_free_again_is_not_told(way: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer, loader = make()
    first = checkflow.Checkpointer(model, optimizer, loader, directory=tmp_path / "first")
    if way == "closed":
        first.close()
    elif way == "dropped":
        del first
    second = tmp_path / ("first" if way == "same directory" else "second")
    checkflow.Checkpointer(model, optimizer, loader, directory=second).close()
    assert "the loader belonged to" not in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("what", ["epochs", "steps"])
def test_a_finished_job_that_is_started_again_says_so(
    what: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def train(n: int) -> int:
        model, optimizer, loader = make()
        turns = 0
        with checkflow.Checkpointer(model, optimizer, loader, directory=tmp_path) as checkpointer:
            batches = (batch for _ in itertools.count() for batch in checkpointer.loader)
            for _ in checkpointer.epochs(n) if what == "epochs" else checkpointer.steps(n):
                turns += 1
                for batch in checkpointer.loader if what == "epochs" else [next(batches)]:
                    iterate(model, optimizer, batch)
        return turns

    caplog.set_level(logging.INFO, "checkflow")
    line = f"nothing is left to do: 2 {what} were asked for, and earlier runs did 2"
    assert train(2) == 2
    assert "nothing is left" not in caplog.text
    assert train(2) == 0
    assert caplog.text.count(line) == 1
    caplog.clear()
    assert train(3) == 1
    assert "nothing is left" not in caplog.text
    assert not warnings(caplog)


def test_a_place_without_its_loader_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer, loader = make()
    with checkflow.Checkpointer(model, optimizer, loader, directory=tmp_path, every=1) as checkpointer:
        for epoch in checkpointer.epochs(2):
            for i, batch in enumerate(checkpointer.loader):
                if (epoch, i) == (1, 3):
                    break
                iterate(model, optimizer, batch)
            else:
                continue
            break
    model, optimizer, loader = make()
    with checkflow.Checkpointer(model, optimizer, directory=tmp_path, every=1) as checkpointer:
        assert len(warnings(caplog)) == 1
        assert "made with a loader, at position 24 of epoch 1, and this Checkpointer has none" in caplog.text
        for _ in checkpointer.steps(12):
            iterate(model, optimizer, DATA[:8])
    caplog.clear()
    with checkflow.Checkpointer(model, optimizer, loader, directory=tmp_path) as checkpointer:
        assert len(warnings(caplog)) == 1
        assert "the checkpoint was made without a loader" in caplog.text
        next(checkpointer.epochs(2))
        assert (loader.epoch, loader.position) == (1, 0)
