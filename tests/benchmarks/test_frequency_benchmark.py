"""The benchmark of frequency: a short run, ways that are honest baselines, and figures that are what they say."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import checkflow
from benchmarks import frequency, ways
from checkflow.models import digits
from checkflow.runtime.persist import saver
from checkflow.runtime.state.collect import StateWalk
from checkflow.runtime.transfer import host
from checkflow.runtime.transfer.host import HostCopyEngine

WAYS = list(ways.BASELINES)


class LateEngine(HostCopyEngine):
    """Copies nothing until it is waited for: what may be written before then is torn for sure."""

    def _run(self) -> None:
        """Hands on what has arrived, and copies nothing itself."""
        while True:
            with self._mutex:
                while self._delivery is None and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
                call = self._delivery
            assert call is not None
            self._deliver(call)


def small_step() -> checkflow.TrainingStep:
    torch.manual_seed(0)
    step = digits.build(batch_size=2, width=32)
    step.run(step.batch)
    return step


def state_of(step: checkflow.TrainingStep) -> dict[str, torch.Tensor]:
    return {item.name: item.tensor.clone() for item in StateWalk(step.models, step.optimizers).current().tensors}


def saved_by(way: str, directory: Path, number: int) -> dict[str, torch.Tensor]:
    """What a way saved of one boundary, by the names of state tensors."""
    if way == "torch.save":
        content = torch.load(directory / f"{number}.pt", weights_only=True)
        (groups,) = [one["param_groups"] for one in content["optimizers"].values()]
        names = list(dict(digits.DigitsNet(32).named_parameters()))
        found = {f"model/{key}": tensor for key, tensor in content["models"]["model"].items()}
        for index in groups[0]["params"]:
            for key, tensor in content["optimizers"]["optimizer"]["state"][index].items():
                found[f"optimizer/{names[index]}.{key}"] = tensor
        return found
    folder = directory / f"step-{number:08d}"
    files = {owner: load_file(folder / f"{owner}-00000-of-00001.safetensors") for owner in ("model", "optimizer")}
    return {f"{owner}/{key}": tensor for owner, tensors in files.items() for key, tensor in tensors.items()}


@pytest.mark.parametrize("way", WAYS)
def test_a_baseline_saves_the_state_at_its_boundaries(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saver, "HostCopyEngine", LateEngine)
    monkeypatch.setattr(host, "SMALL_BYTES", -1)  # which are copied at once otherwise
    step = small_step()
    with closing(ways.BASELINES[way](step, 2, tmp_path / "saved")) as job:
        for first in (0, 2):
            at_boundary = state_of(step)
            assert len(job.run(2)) == 2
            job.settle()
            saved = saved_by(way, tmp_path / "saved", first)
            assert saved.keys() == at_boundary.keys()
            assert [name for name in saved if not torch.equal(saved[name], at_boundary[name])] == []
            assert not torch.equal(saved["model/classifier.weight"], state_of(step)["model/classifier.weight"])
        assert job.checkpoints == 2
        assert job.held_seconds > 0
    hooks = [optimizer._optimizer_step_pre_hooks for optimizer in step.optimizers.values()]
    assert hooks == [{}]


def test_a_baseline_refuses_state_that_moved(tmp_path: Path) -> None:
    step = small_step()
    with closing(ways.BASELINES["store"](step, 1, tmp_path / "saved")) as job:
        weight = step.models["model"].get_parameter("classifier.weight")
        weight.data = weight.data.clone()
        with pytest.raises(RuntimeError, match="was replaced"):
            job.run(1)


def test_figures_are_by_checkpoint_and_beside_the_same_rounds_training() -> None:
    plain = [frequency.Block(10.0, 0.0, 0), frequency.Block(20.0, 0.0, 0)]
    figures = frequency.figures_of([frequency.Block(11.0, 0.5, 2), frequency.Block(24.0, 1.5, 2)], plain)
    assert (figures.held_seconds.least, figures.held_seconds.most) == (0.25, 0.75)
    assert (figures.cost_seconds.least, figures.cost_seconds.most) == (0.5, 2.0)
    assert figures.overhead.median == pytest.approx(0.15)
    with pytest.raises(ValueError, match="longer"):
        frequency.figures_of([frequency.Block(11.0, 0.5, 2)], plain)


def test_turns() -> None:
    orders = ["".join(frequency.turns("abc", number)) for number in range(4)]
    assert orders == ["abc", "bac", "cab", "acb"]


@pytest.mark.slow
def test_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing here depends on how long anything takes."""
    monkeypatch.setitem(frequency.CASES, "digits", frequency.Case("digits", 2, None, 1_437))
    monkeypatch.setattr(
        frequency, "QUICK", frequency.Effort(rounds=1, block_seconds=0.01, repetitions=1, seconds=3600.0)
    )
    output, threads = tmp_path / "found.json", torch.get_num_threads()
    try:
        assert frequency.main(["--quick", "--directory", str(tmp_path), "--output", str(output)]) == 0
    finally:
        torch.set_num_threads(threads)
    (row,) = json.loads(output.read_text())["models"]
    assert list(row["ways"]) == [*WAYS, "checkflow"]
    for found in row["ways"].values():
        assert found["held_seconds"]["median"] > 0
        assert found["checkpoints_per_epoch"] == 719 // found["measured_every"]
    assert row["block_iterations"] % row["every"] == 0
    assert row["rounds"] == 1
    assert row["live"]["frequency"]["disk_interval"] >= 1
    assert row["live"]["committed"] <= row["live"]["captures"] + 2  # those under way when it began, too
    assert [path.name for path in tmp_path.iterdir()] == ["found.json"]
    printed = capsys.readouterr().out
    assert all(f"\n{way} " in printed for way in row["ways"])
