"""Jobs that grow or unfreeze: it is said that their scripts must follow, and a script that looks first resumes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import checkflow
from checkflow.core.errors import MismatchError
from checkflow.planner.live.planner import LivePlanner
from tests.support.own_plans import Never
from tests.support.ranks.processes import run_ranks

SAID = "has another form than this run began with ("


@pytest.fixture(autouse=True)
def _no_plan_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of these jobs is about plans."""
    monkeypatch.setattr(LivePlanner, "start", lambda self, recorded, **asked: Never())


class StoppedError(Exception):
    pass


def grow(params: nn.ParameterDict, optimizer: torch.optim.Optimizer) -> None:
    """As gsplat does: the parameters get more rows, and so does the optimizer's state."""
    for group in optimizer.param_groups:
        old = group["params"][0]
        state = optimizer.state.pop(old)
        new = nn.Parameter(torch.cat([old.data, old.data[:8] + 0.01]))
        for key, value in state.items():
            if key != "step":
                state[key] = torch.cat([value, torch.zeros_like(value[:8])])
        group["params"][0] = params[group["name"]] = new
        optimizer.state[new] = state


def growing(directory: Path, *, looks: bool, stop: int | None = None) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    seen = checkflow.peek(directory) if looks else None
    rows = {name: 32 if seen is None else seen.shapes[f"model/{name}"][0] for name in ("means", "colors")}
    params = nn.ParameterDict({name: nn.Parameter(torch.randn(count, 3)) for name, count in rows.items()})
    optimizer = torch.optim.Adam([{"params": [one], "lr": 1e-2, "name": name} for name, one in params.items()])
    with checkflow.Checkpointer(params, optimizer, directory=directory, every=1) as checkpointer:
        for step in checkpointer.steps(24):
            optimizer.zero_grad()
            (params["means"] * params["colors"]).square().mean().backward()
            optimizer.step()
            if step % 6 == 5:
                grow(params, optimizer)
            if step == stop:
                raise StoppedError
    return everything(params, optimizer)


def unfreezing(directory: Path, *, looks: bool, stop: int | None = None) -> dict[str, torch.Tensor]:
    """The head trains first, and from epoch 2 on the body, too."""
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh())
    model = nn.Sequential(body, nn.Linear(16, 1))
    for parameter in body.parameters():
        parameter.requires_grad_(False)
    optimizer = torch.optim.Adam(model[1].parameters(), lr=1e-2)

    def unfreeze() -> None:
        for parameter in body.parameters():
            parameter.requires_grad_(True)
        optimizer.add_param_group({"params": list(body.parameters()), "lr": 1e-3})

    data = TensorDataset(torch.randn(96, 8), torch.arange(96))
    loader = checkflow.DataLoader(data, batch_size=8, shuffle=True)
    seen = checkflow.peek(directory) if looks else None
    if seen is not None and len(seen.groups["optimizer"]) == 2:
        unfreeze()
    with checkflow.Checkpointer(model, optimizer, loader, directory=directory, every=1) as checkpointer:
        for epoch in checkpointer.epochs(4):
            if epoch >= 2 and len(optimizer.param_groups) == 1:
                unfreeze()
            for x, _ in checkpointer.loader:
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
                if checkpointer.iteration == stop:
                    raise StoppedError
    return everything(model, optimizer)


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    found = dict(model.state_dict())
    for name, parameter in model.named_parameters():
        found |= {f"{name}.{key}": value for key, value in optimizer.state[parameter].items()}
    return found


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [record for record in caplog.records if SAID in record.getMessage()]
    assert all(record.levelno == logging.WARNING for record in found)
    caplog.clear()
    return [record.getMessage().partition(": ")[0] for record in found]


@pytest.mark.parametrize(
    ("job", "stop", "change", "refusal"),
    [
        (growing, 15, "step 6 {}model/colors is float32[40, 3] instead of float32[32, 3], and 1 more)",
         "model/colors is float32[48, 3] in the checkpoint, float32[32, 3] in the job"),
        (unfreezing, 28, "step 25 {}optimizer has 2 parameter groups instead of 1)",
         "optimizer 'optimizer' has other parameter groups: 2 in the checkpoint, 1 in the job"),
    ],
)  # fmt: skip
def test_a_script_that_looks_first_goes_on(
    job: Callable[..., dict[str, torch.Tensor]], stop: int, change: str, refusal: str, tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """To the same bits as without interruption. One that does not look is refused, with the way out."""
    whole = job(tmp_path / "whole", looks=False)
    assert told(caplog) == [change.format(SAID)]
    with pytest.raises(StoppedError):
        job(tmp_path / "cut", looks=True, stop=stop)
    assert told(caplog) == [change.format(SAID)]
    with pytest.raises(MismatchError) as refused:
        job(tmp_path / "cut", looks=False)
    assert refusal in str(refused.value)
    assert "checkflow.peek(directory) tells it" in str(refused.value)
    resumed = job(tmp_path / "cut", looks=True)
    assert whole.keys() == resumed.keys()
    assert [name for name, value in whole.items() if not torch.equal(value, resumed[name])] == []


class Job:
    """A small model with all that changes by itself: lazy state, running statistics, a rate."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
        self.frozen = [*self.model[2].parameters()]
        for parameter in self.frozen:
            parameter.requires_grad_(False)
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)

    def run(self, directory: Path, change: Callable[[Job], object]) -> None:
        state = {"scheduler": self.scheduler}
        with checkflow.Checkpointer(self.model, self.optimizer, directory=directory, every=1, state=state) as one:
            for step in one.steps(6):
                if step == 3:
                    change(self)
                self.optimizer.zero_grad()
                self.model(torch.randn(8, 4)).square().mean().backward()
                self.optimizer.step()
                self.scheduler.step()


def thaw(job: Job) -> None:
    for parameter in job.frozen:
        parameter.requires_grad_(True)


def new_memory(job: Job) -> None:
    for parameter in job.model.parameters():
        parameter.data = parameter.data.clone()


def reload(job: Job) -> None:
    job.optimizer.load_state_dict(job.optimizer.state_dict())


@pytest.mark.parametrize("change", [lambda job: None, thaw, new_memory, reload])
def test_what_resumes_without_help_is_not_said(
    change: Callable[[Job], object], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Job().run(tmp_path, change)
    assert told(caplog) == []
    Job().run(tmp_path, lambda job: None)


def add(job: Job) -> None:
    job.model.append(nn.Linear(4, 4))


def buffer(job: Job) -> None:
    job.model[0].register_buffer("seen", torch.zeros(3))


def narrow(job: Job) -> None:
    job.model[1].num_batches_tracked = job.model[1].num_batches_tracked.int()


def tie(job: Job) -> None:
    job.model[2].bias = job.model[0].bias


def turn(job: Job) -> None:
    job.optimizer.param_groups[0]["params"].reverse()


def drop(job: Job) -> None:
    job.optimizer.param_groups[0]["params"].pop()


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (add, "model/3.bias is new, and 1 more"),
        (buffer, "model/0.seen is new"),
        (narrow, "model/1.num_batches_tracked is int32[] instead of int64[]"),
        (tie, "group 0 of optimizer has no longer 2.bias, and 3 more"),
        (turn, "group 0 of optimizer has its parameters in another order"),
        (drop, "group 0 of optimizer has no longer 2.bias"),
    ],
)
def test_every_other_form_is_said(
    change: Callable[[Job], object], what: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Job().run(tmp_path, change)
    assert told(caplog) == [f"step 4 {SAID}{what})"]


def of_rank(rank: int, ranks: int, directory: Path) -> list[str]:
    handler: Any = logging.Handler()
    lines: list[str] = []
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("checkflow").addHandler(handler)
    Job().run(directory, buffer)
    return [line for line in lines if SAID in line]


def test_of_several_ranks_one_says_it(tmp_path: Path) -> None:
    (tmp_path / "ranks").mkdir()
    first, second = run_ranks(tmp_path / "ranks", 2, of_rank, tmp_path / "directory")
    assert len(first) == 1
    assert second == []
