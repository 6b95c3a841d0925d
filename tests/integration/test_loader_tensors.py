"""Large tensors in a loader's state, and in parameter groups, are state tensors, and there before training goes on."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import checkflow
from checkflow.runtime.format.layout import STORED_TYPES
from checkflow.runtime.format.manifest import EXTRA
from checkflow.runtime.state.gathering import EARLY_BYTES
from checkflow.runtime.store.reader import open_checkpoint
from tests.support.ranks.processes import run_ranks

BATCHES = 40
WIDTH = 128


class Reservoir:
    """A loader that mixes each batch into a buffer, which lies column by column."""

    def __init__(self, rank: int = 0) -> None:
        self.buffer = torch.full((WIDTH, WIDTH), 1.0 + rank).t()
        self.least = torch.zeros(EARLY_BYTES // 4 - 1)  # one number less than a state tensor has
        self.most = torch.zeros(EARLY_BYTES // 4)
        self.rows: list[torch.Tensor] = []  # of which there are more at each checkpoint
        self.at = 0

    def __len__(self) -> int:
        return BATCHES

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.at < BATCHES:
            self.buffer.mul_(0.9)[self.at] += torch.rand(WIDTH)
            self.least += self.buffer[self.at, 0]
            self.most -= self.buffer[self.at, 0]
            self.rows.append(self.most * 2)
            self.at += 1
            yield self.buffer[: self.at].sum(0, keepdim=True)

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "tensors": [self.buffer, self.least, self.most], "rows": self.rows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]
        self.buffer, self.least, self.most = state["tensors"]
        self.rows = state["rows"]


class Rotated(torch.optim.SGD):
    """Each group has a basis, in which its gradients are turned."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=torch.tensor(0.01), momentum=0.9)
        for group in self.param_groups:
            group["basis"] = torch.eye(WIDTH).reshape(WIDTH, 1, WIDTH).permute(2, 1, 0)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["basis"].mul_(0.99)
            group["params"][0].grad @= group["basis"][:, 0]
        super().step()


class Job:
    def __init__(self, directory: Path, rank: int = 0, **arguments: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(WIDTH, WIDTH, bias=False)
        self.optimizer = Rotated(self.model.parameters())
        self.reservoir = Reservoir(rank)
        self.loader = checkflow.resumable(self.reservoir)
        self.checkpointer = checkflow.Checkpointer(
            self.model, self.optimizer, directory=directory, loader=self.loader, every=1, plan=None,
            on_error="raise", **arguments,
        )  # fmt: skip
        self.layouts: list[int] = []

    def train(self, until: int) -> Job:
        with self.checkpointer as checkpointer:
            batches = iter(self.loader)
            for _ in checkpointer.steps(until):
                self.layouts.append(checkpointer._loop.place.execution.capturer.layout_changes)
                self.optimizer.zero_grad()
                self.model(next(batches)).square().mean().backward()
                self.optimizer.step()
        return self

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        reservoir = self.reservoir
        basis = self.optimizer.param_groups[0]["basis"]
        return self.model.weight.detach(), reservoir.buffer, reservoir.least, reservoir.most, basis, *reservoir.rows


def assert_same(found: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
        assert one.stride() == other.stride()


def test_a_job_goes_on_with_them_bit_for_bit(tmp_path: Path) -> None:
    whole = Job(tmp_path / "whole").train(12)
    Job(tmp_path / "parts").train(4)
    parts = Job(tmp_path / "parts")
    assert parts.checkpointer.resumed_from == 4
    assert_same(parts.train(12).tensors, whole.tensors)
    assert whole.layouts[-1] == whole.layouts[-2]  # though each state has other memory
    newest = tmp_path / "parts" / "step-00000012"
    with open_checkpoint(newest) as checkpoint:
        beside = {
            name: one for name, one in checkpoint.tensors.items() if not name.startswith(("model/", "optimizer/"))
        }
        assert beside.keys() == {
            "loader-state/inner.state.tensors.0", "loader-state/inner.state.tensors.2",
            "job-state/optimizer.param_groups.0.basis",
        }  # fmt: skip
        assert beside["loader-state/inner.state.tensors.0"].pieces[0].file.startswith("loader-state")
        assert all(one.dtype in STORED_TYPES for one in beside.values())
    # After a few checkpoints the rows lie there, and nothing beside them.
    assert 12 * EARLY_BYTES < (newest / EXTRA).stat().st_size < 14 * EARLY_BYTES


def test_an_older_checkpoint_is_taken_where_they_are_damaged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    whole = Job(tmp_path / "whole").train(6)
    Job(tmp_path / "cut").train(4)
    (file,) = (tmp_path / "cut" / "step-00000004").glob("loader-state*")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with caplog.at_level(logging.WARNING, "checkflow"):
        job = Job(tmp_path / "cut")
    assert "loader-state" in caplog.text
    assert job.checkpointer.resumed_from == 3
    assert_same(job.train(6).tensors, whole.tensors)


def test_a_loader_that_refuses_leaves_the_job_as_it_was(tmp_path: Path) -> None:
    Job(tmp_path).train(2)
    job_model = nn.Linear(WIDTH, WIDTH, bias=False)
    before = job_model.weight.detach().clone()
    with pytest.raises(checkflow.MismatchError, match="loader"):
        checkflow.Checkpointer(
            job_model, Rotated(job_model.parameters()), directory=tmp_path,
            loader=checkflow.DataLoader(range(4), 2, seed=1), every=1, plan=None,  # type: ignore[arg-type]
        )  # fmt: skip
    assert torch.equal(job_model.weight, before)


def train_rank(rank: int, world_size: int, directory: Path, until: int, accept: tuple[str, ...]) -> Any:
    return [one.clone() for one in Job(directory, rank, accept=accept).train(until).tensors]


@pytest.mark.slow
def test_each_rank_goes_on_with_its_own(tmp_path: Path) -> None:
    def run(name: str, directory: str, until: int, ranks: int = 2, accept: tuple[str, ...] = ()) -> Any:
        (tmp_path / name).mkdir()
        return run_ranks(tmp_path / name, ranks, train_rank, tmp_path / directory, until, accept)

    whole = run("a", "whole", 6)
    run("b", "parts", 3)
    parts = run("c", "parts", 6)
    for found, expected in zip(parts, whole, strict=True):
        assert_same(found, expected)
    assert not torch.equal(whole[0][1], whole[1][1])
    more = run("d", "parts", 7, ranks=3, accept=("ranks",))
    assert torch.equal(more[2][1][:6], more[0][1][:6])  # a new rank takes what rank 0 had
    assert not torch.equal(more[2][1][:6], more[1][1][:6])


def test_no_model_has_their_owner_as_its_name(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(checkflow.UnsupportedError, match="can be called loader-state"):
        checkflow.Checkpointer(
            {"loader-state": model}, torch.optim.SGD(model.parameters()), directory=tmp_path, every=1, plan=None
        )


class Views(Reservoir):
    """A loader whose state holds a buffer and a row of it."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "row": self.buffer.t()[1]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.row = state.pop("row")
        super().load_state_dict(state)


def test_it_is_said_once_that_tensors_stop_sharing_memory(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def run(until: int) -> None:
        model, views = nn.Linear(WIDTH, WIDTH, bias=False), Views()
        kept = checkflow.Variables(all=torch.zeros(4, 4), row=None, whole=None)
        kept.row, kept.whole = kept.all[1], kept.all.view(4, 4)
        loader = checkflow.resumable(views)
        with checkflow.Checkpointer(
            model, Rotated(model.parameters()), directory=tmp_path, loader=loader, every=1, plan=None,
            state={"kept": kept}, on_error="raise",
        ) as checkpointer:  # fmt: skip
            batches = iter(loader)
            for _ in checkpointer.steps(until):
                model(next(batches)).square().mean().backward()

    with caplog.at_level(logging.WARNING, "checkflow"):
        run(3)
    said = [record.getMessage() for record in caplog.records if "memory of its own" in record.getMessage()]
    assert len(said) == 2
    assert any(one.startswith("job-state/kept.row shares memory") for one in said)
    assert any("tensors that share memory, one of shape (128,)" in one for one in said)
