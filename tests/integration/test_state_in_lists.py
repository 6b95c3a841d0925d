"""Tensors in lists of an optimizer's state and in Variables, in a whole job: planned, stored, and bit for bit."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import pytorch_optimizer
import torch
from torch import nn

from checkflow import Checkpointer, Variables
from checkflow.core import plan as plans
from checkflow.core.training_step import TrainingStep
from checkflow.planner.trace.trace import trace
from checkflow.runtime.format.manifest import EXTRA
from checkflow.runtime.store.reader import open_checkpoint
from tests.support.waiting import wait_for


def _names(words: Any) -> set[str]:
    return {name for name in words if ".Q." in name or ".GG." in name}


class Job:
    """SOAP replaces its tensors every few steps, and a variable is replaced in each."""

    def __init__(self, directory: Path, **arguments: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(24, 32), nn.Tanh(), nn.Linear(32, 4))
        self.optimizer = pytorch_optimizer.SOAP(self.model.parameters(), lr=1e-2, precondition_frequency=3)
        self.kept = Variables(hidden=torch.zeros(8, 4).t(), sum=torch.zeros(()), seldom=torch.zeros(3, 2).t())
        self.checkpointer = Checkpointer(
            self.model, self.optimizer, directory=directory, every=1, state={"kept": self.kept}, audit=1,
            on_error="raise", **arguments,
        )  # fmt: skip

    def train(self, until: int, *, for_plan: bool = False) -> Job:
        with self.checkpointer as checkpointer:
            for step in checkpointer.steps(until):
                if step % 5 == 4:
                    self.kept.seldom.add_(1)  # before the forward pass, and in few iterations only
                self.optimizer.zero_grad()
                result = self.model(torch.randn(8, 24))
                result.square().mean().backward()
                self.optimizer.step()
                self.kept.hidden = result.detach().t() * 1
                self.kept.sum.add_(result.detach().sum())
                if for_plan and step == 8:
                    wait_for(self.has_plan)
            self.layouts = self.place.execution.capturer.layout_changes
            self.distrusted = self.place.execution.distrusted
        return self

    @property
    def place(self) -> Any:
        return self.checkpointer._loop.place

    def has_plan(self) -> bool:
        answer = self.place.planning._making
        return self.place.plan is not None or answer is None or answer._process.poll() is not None

    def tensors(self) -> list[torch.Tensor]:
        return [*self.model.parameters(), self.kept.hidden, self.kept.sum, self.kept.seldom]


def test_a_resumed_job_ends_bit_for_bit_as_one_that_went_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    whole = Job(tmp_path / "whole").train(31).tensors()
    with caplog.at_level(logging.INFO, "checkflow"):
        first = Job(tmp_path / "parts").train(14, for_plan=True)
        second = Job(tmp_path / "parts").train(31)
    assert "a plan runs from here on" in caplog.text
    assert "a kept plan runs" in caplog.text
    assert "not in the plan" not in caplog.text
    assert [first.distrusted, second.distrusted] == [False, False]
    for one, other in zip(second.tensors(), whole, strict=True):
        assert torch.equal(one, other)
        assert one.stride() == other.stride()
    plan = second.place.plan
    lists = _names(spec.name for spec in plan.fingerprint.state)
    assert len(lists) == 8
    planned = {chunk.tensor for chunk in plan.chunks}
    assert planned >= lists | {"job-state/kept.hidden", "job-state/kept.sum"}
    report = second.checkpointer.last_capture
    assert report is not None
    seldom = plan.deadlines["job-state/kept.seldom"]  # what the recorded iteration did not write
    assert report.boundary_bytes == (second.kept.seldom.nbytes if seldom is None else 0)
    newest = tmp_path / "parts" / "step-00000031"
    assert (newest / EXTRA).stat().st_size < 16_000  # most of it are the generators
    with open_checkpoint(newest) as checkpoint:
        assert {"job-state/kept.hidden", "job-state/kept.sum", *lists} <= checkpoint.tensors.keys()
        assert checkpoint.tensors["optimizer/0.weight.Q.0"].pieces[0].file.startswith("optimizer-")


def test_a_variable_that_is_replaced_needs_no_other_layout(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kept = Variables(hidden=torch.zeros(2, 4))
    checkpointer = Checkpointer(model, optimizer, directory=tmp_path, every=1, state={"kept": kept}, plan=None)
    layouts = []
    with checkpointer:
        for _ in checkpointer.steps(12):
            layouts.append(checkpointer._loop.place.execution.capturer.layout_changes)
            optimizer.zero_grad()
            kept.hidden = model(kept.hidden.detach() + 1)
            kept.hidden.sum().backward()
            optimizer.step()
    assert layouts[-1] == layouts[2]
    with open_checkpoint(tmp_path / "step-00000012") as checkpoint:
        data = bytearray(32)
        checkpoint.read_into("job-state/kept.hidden", memoryview(data))
    assert torch.equal(torch.frombuffer(data, dtype=torch.float32).reshape(2, 4), kept.hidden.detach())


def test_a_traced_plan_has_what_lies_in_lists(tmp_path: Path) -> None:
    class Listing(torch.optim.Optimizer):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {})

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for parameter in self.param_groups[0]["params"]:
                table = self.state[parameter]
                if not table:
                    table["moments"] = [torch.zeros_like(parameter), (torch.zeros_like(parameter).t(), 3)]
                    self.state["all"] = {"count": torch.zeros(2)}
                table["moments"][0].add_(parameter.grad)
                parameter.data.sub_(table["moments"][0], alpha=0.1)

    model = nn.Linear(4, 3, bias=False)
    step = TrainingStep(model, Listing(model.parameters()), loss=lambda m, x: m(x).sum(), batch=torch.ones(2, 4))
    graph = trace(step, name="lists", target="cpu")
    found = {entry.name: entry.first_write for entry in graph.state}
    assert found.keys() == {
        "model/weight", "optimizer/weight.moments.0", "optimizer/weight.moments.1.0", "optimizer/all.count",
    }  # fmt: skip
    assert found["optimizer/weight.moments.0"] is not None
    assert found["optimizer/weight.moments.1.0"] is None


def test_a_list_that_grows_costs_no_plan(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its tensors are copied at the boundary, others as the plan says."""

    class Growing(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            super().step()
            self.state.setdefault("history", []).append(self.param_groups[0]["params"][0].detach().clone())

    def life(until: int) -> tuple[Any, plans.Plan | None]:
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        optimizer = Growing(model.parameters(), lr=0.1, momentum=0.9)
        checkpointer = Checkpointer(model, optimizer, directory=tmp_path, every=1, on_error="raise")
        place = checkpointer._loop.place
        with checkpointer:
            for step in checkpointer.steps(until):
                optimizer.zero_grad()
                model(torch.randn(2, 4)).sum().backward()
                optimizer.step()
                if step == 8 and place.planning._making is not None:
                    wait_for(lambda: place.planning._making._process.poll() is not None)
        return optimizer.state["history"], place.plan

    with caplog.at_level(logging.WARNING, "checkflow"):
        _, plan = life(12)
        history, _ = life(15)
    assert plan is not None
    assert not any("history.2" in spec.name for spec in plan.fingerprint.state)  # made in the recorded iteration
    assert len(history) == 15
    assert caplog.text.count("not in the plan") == 2  # once for each start
