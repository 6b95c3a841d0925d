"""benchmarks/iterator_accuracy.py: its three ways, short; what is counted, and what a checkpoint gives back."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import checkflow
from benchmarks.iterator_accuracy import (
    BATCH,
    Digits,
    Job,
    Record,
    lines_of,
    make_cuts,
    make_plan,
    plain,
    same,
    summary,
    uninterrupted,
    with_checkflow,
)

EPOCHS, CUTS = 3, {1: 7, 2: 20}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    yield
    torch.set_num_threads(before[0])
    torch.use_deterministic_algorithms(before[1])


def test_uses_are_counted_by_epoch() -> None:
    record = Record(2, used={0: (0, [0, 1]), 1: (0, [2]), 2: (1, [0, 1]), 3: (1, [1, 1])})
    assert record.irregular(3) == (2, 1)
    assert Record(1, used={0: (0, [2, 0, 1])}).irregular(3) == (0, 0)
    assert Record(2, used={0: (0, [0])}).irregular(3) == (0, 2 + 3)


def test_interruptions_are_within_every_second_epoch() -> None:
    iterations = -(-len(Digits(training=True)) // BATCH)
    for seed in range(50):
        cuts = make_cuts(seed, 9)
        assert list(cuts) == [1, 3, 5, 7]
        assert all(0 < cut < iterations for cut in cuts.values())
    assert make_cuts(1, 9) != make_cuts(2, 9)


@pytest.fixture(scope="module")
def plan() -> checkflow.Plan:
    return make_plan()


@pytest.mark.slow
def test_a_signal_of_somebody_else_ends_it(plan: checkflow.Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    iterate = Job.iterate

    def signalled(job: Job, iteration: int, epoch: int, batch: Any) -> None:
        iterate(job, iteration, epoch, batch)
        if iteration == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Job, "iterate", signalled)
    with pytest.raises(checkflow.Preempted):
        with_checkflow(plan, 3, EPOCHS, CUTS)


@pytest.mark.slow
def test_only_checkflow_ends_as_if_nothing_had_happened(plan: checkflow.Plan) -> None:
    samples = len(Digits(training=True))
    truth = uninterrupted(3, EPOCHS, {})
    assert (truth.starts, truth.irregular(samples)) == (1, (0, 0))
    resumed = with_checkflow(plan, 3, EPOCHS, CUTS)
    assert resumed.starts == 3
    assert resumed.used == truth.used
    assert resumed.accuracy == truth.accuracy
    assert same(resumed.weights, truth.weights)

    shuffled = plain(3, EPOCHS, CUTS)
    assert shuffled.starts == 3
    assert len(shuffled.used) == len(truth.used)
    assert not same(shuffled.weights, truth.weights)
    repeated, missed = shuffled.irregular(samples)
    # Each epoch that was cut has as many iterations, its last one whole in place of one that was not.
    whole = len(CUTS) * (BATCH - samples % BATCH)
    assert repeated == missed + whole
    assert missed > len(CUTS) * samples / 20


def test_the_table_shows_a_single_run() -> None:
    row = {"accuracy_by_epoch": [0.5, 0.75], "interruptions": 1, "repeated": 2, "missed": 3, "identical": True}
    (line,) = list(lines_of({"plain": summary([{**row, "seconds": 1}])}, 1))[1:]
    assert line.split() == ["plain", "75.00%", "-", "75.00%", "75.00%", "1", "2.0", "3.0", "1", "of", "1"]
