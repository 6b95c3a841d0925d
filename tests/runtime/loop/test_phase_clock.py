"""The clock of phases: by a clock that is set by hand, and in real jobs, where nothing is timed."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from torch import nn
from torch.utils.data import TensorDataset

from checkflow import api
from checkflow.api import Checkpointer
from checkflow.core import plan as plans
from checkflow.core.graph import AnchorKey, AnchorKind
from checkflow.core.training_step import TrainingStep
from checkflow.runtime.data.loader import DataLoader
from checkflow.runtime.loop import training_loop
from checkflow.runtime.loop.phase_clock import (
    DATA,
    ERROR_SHARE,
    FORWARD_BACKWARD,
    OTHER,
    PHASES,
    UPDATE,
    PhaseClock,
    Quantiles,
)
from tests.support.oracle import random_plan
from tests.support.planned_jobs import plan_by_trace


class Hand:
    """A clock that goes when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def wait(self, seconds: float) -> None:
        self.now += seconds


def totals(clock: PhaseClock) -> dict[str, float]:
    return {name: round(times.total, 6) for name, times in clock.read().phases.items() if times.total}


# The clock alone


def test_time_belongs_to_the_phase_that_the_last_event_began() -> None:
    hand = Hand()
    clock = PhaseClock(hand)
    hand.wait(50)  # the job is set up
    clock.enter(DATA)
    hand.wait(1)
    clock.enter(FORWARD_BACKWARD)
    hand.wait(2)
    with clock.holding("anchors"):
        hand.wait(3)
    hand.wait(4)
    clock.enter(UPDATE)
    hand.wait(5)
    clock.enter(OTHER)
    hand.wait(6)
    with clock.holding("planning"):
        hand.wait(7)
    with clock.holding("boundary"):
        hand.wait(8)
        clock.shift(2)
    clock.end_iteration(captured=True)
    hand.wait(1000)  # the next iteration has not ended
    reading = clock.read()
    assert totals(clock) == {
        "data": 1, "forward_backward": 6, "update": 5, "other": 6, "planning": 7, "snapshot_wait": 9, "persist_wait": 2,
    }  # fmt: skip
    assert (reading.iterations, reading.iteration.total) == (1, 36)
    assert reading.iteration.median == reading.iteration.p99 == 36
    assert reading.computing_seconds == 11
    assert reading.stall_seconds is None  # one checkpoint was begun, none has ended
    assert clock.held_seconds == {"anchors": 3, "boundary": 6, "buffers": 2, "planning": 7}
    assert clock.longest_hold_seconds == 7


def test_what_begins_while_training_is_held_begins_when_it_goes_on() -> None:
    hand = Hand()
    clock = PhaseClock(hand)
    clock.enter(DATA)
    with clock.holding("boundary"):
        hand.wait(1)
        clock.enter(FORWARD_BACKWARD)
        hand.wait(2)
        with clock.holding("planning"):
            hand.wait(4)
        hand.wait(8)
    hand.wait(16)
    clock.end_iteration(captured=False)
    assert totals(clock) == {"snapshot_wait": 11, "planning": 4, "forward_backward": 16}
    assert clock.longest_hold_seconds == 11  # the inner one is none of the outer one's


def test_a_stall_is_what_one_checkpoint_holds() -> None:
    hand = Hand()
    clock = PhaseClock(hand)
    clock.enter(FORWARD_BACKWARD)

    def iterate(held: float, captured: bool = False, under_way: bool = False) -> None:
        hand.wait(10)
        with clock.holding("anchors"):
            hand.wait(held)
        clock.end_iteration(captured=captured, under_way=under_way)
        clock.enter(FORWARD_BACKWARD)

    iterate(100, captured=True)  # the first capture begins: what came before is none of it
    iterate(1, under_way=True)
    iterate(2)
    iterate(3, captured=True)
    assert clock.read().stall_seconds == 6  # it was under way all the time
    clock.new_plan()
    assert (clock.read().stall_seconds, clock.read().computing_seconds) == (None, None)
    iterate(50, captured=True)
    iterate(4, captured=True)
    assert clock.read().stall_seconds == 4
    assert clock.read().iterations == 6  # those of the old plan count all the same


@pytest.mark.parametrize("interval", [2, 5, 50, 500])
def test_a_stall_does_not_grow_with_the_interval(interval: int) -> None:
    """Hooks hold every iteration for a second; a checkpoint 8 s more at its boundary, and 4 s more in the next one."""
    hand = Hand()
    clock = PhaseClock(hand)
    clock.enter(FORWARD_BACKWARD)
    for number in range(1, 4 * interval + 1):
        hand.wait(10)
        begins, follows = number % interval == 0, number % interval == 1 and number > 1
        with clock.holding("boundary" if begins else "anchors"):
            hand.wait(1 + 8 * begins + 4 * follows)
        clock.end_iteration(captured=begins)
        clock.enter(FORWARD_BACKWARD)
    assert clock.read().stall_seconds == pytest.approx(12, rel=0.01)


def test_a_step_within_a_step_and_one_that_raises() -> None:
    hand, step = Hand(), AnchorKey(AnchorKind.OPTIMIZER_PRE, "sgd")
    clock = PhaseClock(hand)
    for begins, ends in ((2, 2), (2, 1), (1, 1), (0, 1), (1, 1)):
        for _ in range(begins):
            clock.step_begins(step)
            hand.wait(1)
        for _ in range(ends):
            clock.step_ends(step)
            hand.wait(10)
        clock.end_iteration(captured=False)
    assert totals(clock) == {"update": (2 + 10) + (2 + 10) + 1 + 1, "other": 10 + 10 + 10 + 10}


def test_an_iteration_whose_begin_nobody_saw_is_left_out() -> None:
    hand = Hand()
    clock = PhaseClock(hand)
    hand.wait(500)
    clock.end_iteration(captured=True)
    hand.wait(3)
    clock.end_iteration(captured=True)
    assert (clock.read().iterations, totals(clock)) == (1, {"other": 3})


def test_without_iterations_there_are_no_quantiles() -> None:
    reading = PhaseClock(Hand()).read()
    assert (reading.iterations, reading.iteration.total, reading.iteration.median, reading.iteration.p99) == (
        0, 0, None, None,
    )  # fmt: skip
    assert (reading.computing_seconds, reading.stall_seconds) == (None, None)


EVENTS = st.one_of(
    st.sampled_from(["end", "captured", "new plan"]),
    st.integers(0, len(PHASES) - 1),
    st.lists(st.sampled_from(["anchors", "boundary", "planning"]), min_size=1, max_size=3),
)


@hypothesis_settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2**20), EVENTS), max_size=40))
def test_in_any_order_phases_add_up_to_the_iterations(events: list[tuple[int, Any]]) -> None:
    hand = Hand()
    clock = PhaseClock(hand)
    clock.enter(DATA)
    begun, whole = hand.now, 0.0
    for ticks, event in events:
        hand.wait(ticks / 1024)
        if isinstance(event, int):
            clock.enter(event)
        elif event == "new plan":
            clock.new_plan()
        elif isinstance(event, list):
            hold(clock, hand, event)
        else:
            clock.end_iteration(captured=event == "captured")
            whole += hand.now - begun
            begun = hand.now
    reading = clock.read()
    assert reading.iteration.total == pytest.approx(whole, abs=1e-6)
    assert sum(times.total for times in reading.phases.values()) == pytest.approx(whole, abs=1e-6)
    assert all(times.total >= 0 for times in reading.phases.values())


def hold(clock: PhaseClock, hand: Hand, kinds: list[str]) -> None:
    """Holds inside of holds, the innermost partly a wait for storage."""
    with clock.holding(kinds[0]):
        hand.wait(1)
        if kinds[1:]:
            hold(clock, hand, kinds[1:])
        else:
            clock.shift(0.5)


# Quantiles


@pytest.mark.parametrize("seconds", [0.0, 1.5])
def test_at_whatever_line_a_duration_is_interrupted_the_others_can_be_asked_for(seconds: float) -> None:
    """By Ctrl-C; or another thread makes a report just then."""
    line = 0
    while True:
        quantiles, left = Quantiles(), line

        def interrupt(frame: Any, event: str, _: Any) -> Any:
            nonlocal left
            if frame.f_code is not Quantiles.add.__code__:
                return None
            if event == "line":
                left -= 1
                if left < 0:
                    raise KeyboardInterrupt
            return interrupt

        quantiles.add(1.0)
        before = sys.gettrace()
        sys.settrace(interrupt)
        try:
            quantiles.add(seconds)
        except KeyboardInterrupt:
            pass
        else:
            break
        finally:
            sys.settrace(before)
        assert all(quantiles.at(share) is not None for share in (0.0, 0.5, 0.99, 1.0))
        line += 1
    assert line >= 4
    assert quantiles.count == 2


@hypothesis_settings(max_examples=200, deadline=None)
@given(
    st.lists(st.one_of(st.just(0.0), st.floats(1e-9, 1e7)), min_size=1, max_size=60),
    st.sampled_from([0.0, 0.01, 0.5, 0.99, 1.0]),
)
def test_quantiles_are_within_their_error(values: list[float], share: float) -> None:
    quantiles = Quantiles()
    for value in values:
        quantiles.add(value)
    true = sorted(values)[max(1, math.ceil(share * len(values))) - 1]
    found = quantiles.at(share)
    assert found is not None
    assert abs(found - true) <= true * ERROR_SHARE * (1 + 1e-9)


@given(st.lists(st.one_of(st.just(0.0), st.floats(1e-8, 1e6)), max_size=60))
def test_a_histogram_counts_each_duration_in_its_bin(values: list[float]) -> None:
    quantiles = Quantiles()
    for value in values:
        quantiles.add(value)
    bins = quantiles.histogram()
    assert sum(bins.values()) == len(values)
    assert bins.get(0.0, 0) == values.count(0.0)
    for end in bins:  # up to each end lie as many as are no longer, but for those too near to say
        counted = sum(count for other, count in bins.items() if other <= end)
        near = 1 + 2 * ERROR_SHARE
        assert sum(value <= end / near for value in values) <= counted <= sum(value <= end * near for value in values)
        assert end == 0 or math.isclose(4 * math.log10(end), round(4 * math.log10(end)), abs_tol=1e-6)


def test_quantiles_take_bounded_memory() -> None:
    quantiles = Quantiles()
    for n in range(20_000):
        quantiles.add(1e-9 * 1.002**n)  # 1 ns to 7 years
    assert len(quantiles._buckets) < 2100
    assert quantiles.at(1.0) == pytest.approx(1e-9 * 1.002**19_999, rel=ERROR_SHARE)


# In real jobs: an hour passes in each place, and is found again


class Slow(nn.Module):
    """A layer whose forward and backward take their time."""

    def __init__(self, hand: Hand, forward: float, backward: float) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.hand, self.forward_seconds, self.backward_seconds = hand, forward, backward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.hand.wait(self.forward_seconds)
        y: torch.Tensor = self.layer(x)
        if y.requires_grad:
            y.register_hook(lambda _: self.hand.wait(self.backward_seconds))
        return y


class SlowSGD(torch.optim.SGD):
    hand: Hand

    def step(self, closure: Any = None) -> None:
        super().step()
        self.hand.wait(1000)


class SlowData(TensorDataset):
    hand: Hand

    def __getitem__(self, index: int) -> Any:
        self.hand.wait(10_000)
        return super().__getitem__(index)


@pytest.fixture
def hand(monkeypatch: pytest.MonkeyPatch) -> Hand:
    made = Hand()
    monkeypatch.setattr(api, "check_plan", plans.validate)
    monkeypatch.setattr(training_loop, "PhaseClock", lambda: PhaseClock(made))
    return made


def make(hand: Hand) -> tuple[Slow, SlowSGD, Any]:
    torch.manual_seed(0)
    torch.optim.SGD([nn.Parameter(torch.zeros(1))])  # from here on torch calls hooks in its step too, within SlowSGD's
    model = Slow(hand, 1, 20)
    optimizer = SlowSGD(model.parameters(), lr=0.1)
    optimizer.hand = hand
    plan = random_plan({"model": model}, {"optimizer": optimizer}, 0)
    return model, optimizer, plan


def learn(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, *, step: bool = True) -> None:
    F.mse_loss(model(x), torch.zeros(len(x), 3)).backward()
    if step:
        optimizer.step()
        optimizer.zero_grad()


def phases(checkpointer: Checkpointer) -> dict[str, float]:
    """Totals by phase, what really passed (some µs of ours are no time of the hand's) left out."""
    report = checkpointer.report()["phases"]
    assert report["clock"] == "host"
    names = {name: round(times["total_seconds"]) for name, times in report.items() if name in PHASES}
    assert sum(names.values()) == round(report["iteration"]["total_seconds"])
    return {name: seconds for name, seconds in names.items() if seconds}


def loader(hand: Hand, samples: int, batch: int) -> DataLoader:
    data = SlowData(torch.randn(samples, 4))
    data.hand = hand
    return DataLoader(data, batch)


def test_an_epoch_with_accumulation_validation_and_a_scheduler(tmp_path: Path, hand: Hand) -> None:
    model, optimizer, plan = make(hand)
    with Checkpointer(model, optimizer, loader(hand, 4, 1), directory=tmp_path, plan=plan) as checkpointer:
        for _ in checkpointer.epochs(2):
            for n, (x,) in enumerate(checkpointer.loader):
                learn(model, optimizer, x, step=n % 2 == 1)
            model.eval()
            with torch.no_grad():
                model(torch.ones(1, 4))  # a second of validation
            model.train()
            hand.wait(100_000)  # and what else an epoch ends with
    assert checkpointer.report()["phases"]["iterations"] == 4
    assert phases(checkpointer) == {
        "data": 8 * 10_000, "forward_backward": 8 * 21, "update": 4 * 1000, "other": 2 * 100_001,
    }  # fmt: skip


def test_a_loop_without_a_loader(tmp_path: Path, hand: Hand) -> None:
    model, optimizer, plan = make(hand)
    with Checkpointer(model, optimizer, directory=tmp_path, plan=plan) as checkpointer:
        for _ in checkpointer.steps(3):
            hand.wait(300)  # a batch from somewhere; before the first forward nothing tells that training has begun
            learn(model, optimizer, torch.ones(2, 4))
            hand.wait(50)
    assert phases(checkpointer) == {"forward_backward": 3 * 21, "update": 3000, "other": 2 * 300 + 3 * 50}


def test_explicit_steps_and_two_optimizers(tmp_path: Path, hand: Hand) -> None:
    first, one, _ = make(hand)
    second, other, _ = make(hand)
    models, optimizers = {"first": first, "second": second}, {"one": one, "other": other}
    plan = random_plan(models, optimizers, 0)
    with Checkpointer(models, optimizers, loader(hand, 6, 2), directory=tmp_path, plan=plan) as checkpointer:
        for _ in checkpointer.epochs(1):
            for (x,) in checkpointer.loader:
                learn(second, other, x)
                hand.wait(7)  # between the two
                learn(first, one, x)
                checkpointer.step()
                hand.wait(70)  # after the boundary: the next iteration's, the last one's is nobody's
    assert phases(checkpointer) == {
        "data": 6 * 10_000, "forward_backward": 3 * 42, "update": 3 * 2000, "other": 3 * 7 + 2 * 70,
    }  # fmt: skip


def test_without_an_optimizer_validation_is_told_apart(tmp_path: Path, hand: Hand) -> None:
    model = nn.BatchNorm1d(4)  # running statistics are its only state that changes
    plan = plan_by_trace(TrainingStep(step=model, models={"model": model}, batch=torch.randn(3, 4)))
    model.register_forward_hook(lambda *_: hand.wait(1 if model.training else 30))
    with Checkpointer(model, {}, directory=tmp_path, plan=plan) as checkpointer:
        for _ in checkpointer.steps(2):
            model(torch.randn(3, 4))
            model.eval()
            model(torch.randn(3, 4))
            model.train()
    assert phases(checkpointer) == {"forward_backward": 2, "other": 2 * 30}


def test_steps_inside_of_backward_are_updates(tmp_path: Path, hand: Hand) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Slow(hand, 1, 20), nn.Linear(3, 3))
    optimizers = {}
    for name, layer in (("a", model[0]), ("b", model[1])):
        optimizers[name] = SlowSGD(layer.parameters(), lr=0.1)
        optimizers[name].hand = hand
    plan = random_plan({"model": model}, optimizers, 0)
    # The last layer's step comes before the first layer's backward.
    model[1].bias.register_post_accumulate_grad_hook(lambda _: None)
    model[1].weight.register_post_accumulate_grad_hook(lambda _: optimizers["b"].step())
    with Checkpointer({"model": model}, optimizers, directory=tmp_path, plan=plan) as checkpointer:
        for _ in checkpointer.steps(2):
            model(torch.randn(3, 4)).sum().backward()
            optimizers["a"].step()
            model.zero_grad()
    assert phases(checkpointer) == {"forward_backward": 2 * 21, "update": 2 * 2000}
