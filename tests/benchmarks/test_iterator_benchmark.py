"""benchmarks/iterator_accuracy.py, short: checkflow's run is the uninterrupted one, and torch's loader's is not."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks.iterator_accuracy import BATCH, Record, main


@pytest.fixture(autouse=True)
def _settings_stay() -> Iterator[None]:
    before = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    yield
    torch.set_num_threads(before[0])
    torch.use_deterministic_algorithms(before[1])


def test_uses_are_counted_by_epoch() -> None:
    record = Record(2, used={0: (0, [0, 1]), 1: (0, [2]), 2: (1, [0, 1]), 3: (1, [1, 1])})
    assert record.irregular(3) == (2, 1)
    assert Record(1, used={0: (0, [2, 0, 1])}).irregular(3) == (0, 0)
    assert Record(2, used={0: (0, [0])}).irregular(3) == (0, 2 + 3)


@pytest.mark.slow
def test_only_checkflow_ends_as_if_nothing_had_happened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "found.json"
    monkeypatch.setattr(sys, "argv", ["iterator_accuracy", "--seeds", "1", "--epochs", "4", "--output", str(output)])
    main()
    found = json.loads(output.read_text())
    assert f"1 runs of 4 epochs with {found['samples']} samples" in capsys.readouterr().out
    (truth,), (plain,), (resumed,) = (found["runs"][way] for way in ("uninterrupted", "plain", "checkflow"))
    assert [row["interruptions"] for row in (truth, plain, resumed)] == [0, 2, 2]
    for row in (truth, resumed):
        assert (row["repeated"], row["missed"], row["identical"]) == (0, 0, True)
    assert resumed["accuracy_by_epoch"] == truth["accuracy_by_epoch"]
    assert not plain["identical"]
    # Each epoch that was cut has as many iterations, its last one whole in place of one that was not.
    assert plain["repeated"] == plain["missed"] + 2 * (BATCH - found["samples"] % BATCH)
    assert plain["missed"] > 0
