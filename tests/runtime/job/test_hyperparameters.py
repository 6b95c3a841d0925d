"""A start with other hyperparameters than the checkpoint was made with: what is said, and what goes on."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import lr_scheduler as torchs
from torch.utils.data import TensorDataset

from checkflow import api
from checkflow.api import Checkpointer
from checkflow.core import plan as plans
from checkflow.core.errors import MismatchError
from checkflow.runtime.data.adapters.resumable import resumable
from checkflow.runtime.data.base import ResumableLoader
from checkflow.runtime.data.loader import DataLoader
from checkflow.runtime.job import hyperparameters
from checkflow.runtime.job.progress import Progress
from tests.support.oracle import random_plan

SAMPLES = 24
TAKES = ' (hyperparameters="script" takes the script\'s)'
SCHEDULERS: dict[str, Callable[..., Any]] = {
    "StepLR": lambda o, gamma: torchs.StepLR(o, 2, gamma=gamma),
    "MultiStepLR": lambda o, gamma: torchs.MultiStepLR(o, [2, 3, 7] if gamma == 0.5 else [4, 6, 8]),
    "LambdaLR": lambda o, gamma: torchs.LambdaLR(o, lambda epoch: epoch / (3 + epoch)),
    "CosineAnnealingLR": lambda o, gamma: torchs.CosineAnnealingLR(o, 20),
    "SequentialLR": lambda o, gamma: torchs.SequentialLR(
        o, [torchs.LinearLR(o, 0.1, total_iters=3), torchs.ExponentialLR(o, gamma)], [3]
    ),
    "OneCycleLR": lambda o, gamma: torchs.OneCycleLR(o, [group["lr"] for group in o.param_groups], total_steps=40),
    "ReduceLROnPlateau": lambda o, gamma: torchs.ReduceLROnPlateau(o, factor=gamma, patience=0, threshold=10.0),
}
OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "SGD": lambda groups, decay: torch.optim.SGD(groups, momentum=0.9, weight_decay=decay),
    "AdamW": lambda groups, decay: torch.optim.AdamW(groups, weight_decay=decay),
}


@pytest.fixture(autouse=True)
def _random_plans_have_no_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "check_plan", plans.validate)


@dataclass(frozen=True)
class Script:
    """What one start of the training script asks for."""

    optimizer: str = "SGD"
    rates: tuple[Any, ...] = (0.1, 0.02)  # of each group
    decay: float = 1e-4
    scheduler: str = "StepLR"
    gamma: float = 0.5
    seed: int = 1
    loader: Callable[[TensorDataset], Any] = field(default=lambda data: DataLoader(data, 4, shuffle=True))

    def make(self) -> tuple[nn.Module, Any, Any, Any]:
        torch.manual_seed(self.seed)
        model = nn.Sequential(*(nn.Linear(3, 3) for _ in self.rates))
        groups = [
            {"params": one.parameters(), "lr": rate} for one, rate in zip(model, copy.deepcopy(self.rates), strict=True)
        ]
        optimizer = OPTIMIZERS[self.optimizer](groups, self.decay)
        scheduler = SCHEDULERS[self.scheduler](optimizer, self.gamma)
        data = TensorDataset(torch.arange(SAMPLES), torch.randn(SAMPLES, 3, generator=torch.Generator().manual_seed(0)))
        return model, optimizer, scheduler, self.loader(data)


@dataclass
class Run:
    """What was seen of one start."""

    samples: list[int] = field(default_factory=list)
    rates: list[list[float]] = field(default_factory=list)  # of the groups, when each iteration ran
    seeds: set[int] = field(default_factory=set)  # of torch's generator, likewise
    optimizer: Any = None
    scheduler: Any = None


def iterate(model: nn.Module, optimizer: Any, scheduler: Any, x: torch.Tensor) -> None:
    optimizer.zero_grad()
    F.mse_loss(model(x), x).backward()
    optimizer.step()
    scheduler.step(*([1.0] if isinstance(scheduler, torchs.ReduceLROnPlateau) else []))


def rates(optimizer: Any) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups]


def start(directory: Path, script: Script, iterations: int, **options: Any) -> Run:
    """Train so many iterations, from where the last start stopped, and leave the loop there."""
    model, optimizer, scheduler, _ = script.make()
    iterate(model, optimizer, scheduler, torch.ones(1, 3))
    plan = random_plan({"model": model}, {"optimizer": optimizer}, 0)
    model, optimizer, scheduler, loader = script.make()
    run = Run(optimizer=optimizer, scheduler=scheduler)
    checkpointer = Checkpointer(
        model, optimizer, loader, directory=directory, plan=plan, state={"scheduler": scheduler}, every=1, **options
    )
    with checkpointer:
        for _ in checkpointer.epochs(100):
            for batch, x in checkpointer.loader:
                run.samples += batch.tolist()
                run.rates.append(rates(optimizer))
                run.seeds.add(torch.initial_seed())
                iterate(model, optimizer, scheduler, x)
                iterations -= 1
                if not iterations:
                    checkpointer.step()
                    return run
    raise AssertionError


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """The lines on hyperparameters since the last call."""
    caplog.set_level(logging.INFO, "checkflow")

    def lines() -> list[str]:
        found = [
            r.getMessage()
            for r in caplog.records
            if "the script asks" in r.getMessage() or "which hyperp" in r.getMessage()
        ]
        caplog.clear()
        return found

    return lines


Lines = Callable[[], list[str]]


@pytest.mark.parametrize("choice", ["checkpoint", "script"])
@pytest.mark.parametrize(("optimizer", "scheduler"), [("SGD", name) for name in SCHEDULERS] + [("AdamW", "LambdaLR")])
def test_the_same_script_is_told_nothing(
    optimizer: str, scheduler: str, choice: str, tmp_path: Path, told: Lines
) -> None:
    """Although the scheduler has moved what the groups hold; and the rates are those of an uninterrupted run."""
    script = Script(optimizer, scheduler=scheduler)
    runs = [start(tmp_path / "cut", script, count, hyperparameters=choice) for count in (5, 4)]
    assert runs[0].rates + runs[1].rates == start(tmp_path / "whole", script, 9).rates
    assert told() == []


@pytest.mark.parametrize(
    ("optimizer", "scheduler", "was"),
    [
        *(("SGD", name, (0.1, 0.02)) for name in SCHEDULERS),
        ("AdamW", "LambdaLR", (0.1, 0.02)),
        ("AdamW", "CosineAnnealingLR", (0.1, 0.02)),
        ("AdamW", "StepLR", (torch.tensor(0.1), torch.tensor(0.02))),
        ("SGD", "StepLR", (0.0, 0.02)),
    ],
)
def test_a_changed_rate_keeps_its_schedule(
    optimizer: str, scheduler: str, was: tuple[Any, ...], tmp_path: Path, told: Lines
) -> None:
    """The script's rate runs as if it had been so from the begin; the other group's is what it was."""
    first = Script(optimizer, was, scheduler=scheduler)
    changed = replace(first, rates=(was[0] * 0 + 0.03, was[1]))
    start(tmp_path / "a", first, 5)
    untouched = start(tmp_path / "a", changed, 1)
    (line,) = (line for line in told() if line.startswith("lr of"))
    assert line.startswith("lr of optimizer, group 0: the script asks for 0.0")
    assert ": keeping " in line
    assert line.endswith(TAKES)
    assert untouched.rates[0] == start(tmp_path / "b", first, 6).rates[5]
    told()
    taken = start(tmp_path / "a", changed, 4, hyperparameters="script").rates
    (line,) = (line for line in told() if line.startswith("lr of"))
    asks = float(line.partition("asks for ")[2].partition(",")[0])
    assert ("which the schedule has brought to" in line) == (taken[0][0] != pytest.approx(asks))
    truth = start(tmp_path / "c", changed, 10).rates[6:]
    if was[0]:
        assert taken == [pytest.approx(row, rel=1e-6) for row in truth]
    else:
        assert taken[0][0] == 0.03
    start(tmp_path / "a", changed, 1)
    assert told() == []


@pytest.mark.parametrize(
    ("changed", "line", "of"),
    [
        (
            {"decay": 0.5},
            "weight_decay of optimizer, groups 0 and 1: the script asks for 0.5, the checkpoint was made with 0.0001: ",
            lambda run: run.optimizer.param_groups[1]["weight_decay"],
        ),
        (
            {"gamma": 0.9},
            "gamma of state['scheduler']: the script asks for 0.9, the checkpoint was made with 0.5: ",
            lambda run: run.scheduler.gamma,
        ),
        (
            {"scheduler": "SequentialLR", "gamma": 0.9},
            "gamma of scheduler 1 in state['scheduler']: the script asks for 0.9, the checkpoint was made with 0.5: ",
            lambda run: run.scheduler._schedulers[1].gamma,
        ),
        (
            {"scheduler": "MultiStepLR", "gamma": 0.9},
            "milestones of state['scheduler']: the script asks for [4, 6, 8], the checkpoint was made with [2, 3, 7]: ",
            lambda run: sorted(run.scheduler.milestones.elements()),
        ),
        (
            {"seed": 7},
            "seed of torch: the script asks for 7, the checkpoint was made with 1: ",
            lambda run: max(run.seeds),
        ),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_it_is_told_once_and_chosen_by_one_argument(
    changed: Mapping[str, Any], line: str, of: Callable[[Run], Any], tmp_path: Path, told: Lines
) -> None:
    first = replace(Script(), **{name: value for name, value in changed.items() if name == "scheduler"})
    other = replace(first, **changed)
    was = of(start(tmp_path, first, 5))
    for _ in range(2):  # as long as the script asks for it
        assert of(start(tmp_path, other, 1)) == was
        assert told() == [f"{line}keeping {was}{TAKES}"]
    run = start(tmp_path, other, 1, hyperparameters="script")
    (said,) = told()
    now = of(run)
    assert now != was
    assert said.startswith(f"{line}taking {now}")
    assert TAKES not in said
    assert of(start(tmp_path, other, 1)) == now
    assert told() == []
    assert of(start(tmp_path, first, 1)) == now
    assert len(told()) == 1


def test_many_groups_are_one_line(tmp_path: Path, told: Lines) -> None:
    script = Script(rates=(0.1,) * 12, scheduler="CosineAnnealingLR")
    start(tmp_path, script, 2)
    start(tmp_path, replace(script, rates=(0.2,) * 5 + (0.3,) + (0.2,) * 5 + (0.1,)), 1)
    assert [line.partition(",")[2].partition(",")[0] for line in told()] == [
        " groups 0", " group 5: the script asks for 0.3"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("groups", "words"),
    [([-1], ""), ([3], ", group 3"), ([0, 1], ", groups 0 and 1"), ([0, 1, 2], ", groups 0 to 2"),
     ([0, 2, 5], ", groups 0, 2 and 5"), ([4, 5, 6, 7], ", groups 4 to 7")],
)  # fmt: skip
def test_how_groups_are_named(groups: list[int], words: str) -> None:
    assert hyperparameters._numbers(groups) == words


def test_what_a_scheduler_has_moved_stays(tmp_path: Path, told: Lines) -> None:
    """A number that the scheduler changes itself cannot be told from its progress."""
    SCHEDULERS["restarts"] = lambda o, gamma: torchs.CosineAnnealingWarmRestarts(o, 3 if gamma == 0.5 else 4, T_mult=2)
    script = Script(scheduler="restarts")
    start(tmp_path, script, 5)
    run = start(tmp_path, replace(script, gamma=0.9), 1, hyperparameters="script")
    assert (run.scheduler.T_0, run.scheduler.T_i) == (4, 6)
    assert told() == [
        "T_0 of state['scheduler']: the script asks for 4, the checkpoint was made with 3: taking 4",
        "T_i of state['scheduler']: the script asks for 4, the checkpoint was made with 3: keeping 6, which the "
        "scheduler has reached",
    ]


def of_seed(seed: int | None, batch: int = 4) -> Callable[[TensorDataset], ResumableLoader]:
    return lambda data: DataLoader(data, batch, shuffle=True, seed=seed)


@pytest.mark.parametrize(("was", "now"), [(3, 4), (None, 4), (3, None)])
@pytest.mark.parametrize("iterations", [4, 6, 8])  # an epoch has 6: in its middle, at its end, in the next one
def test_another_seed_of_the_loader(
    was: int | None, now: int | None, iterations: int, tmp_path: Path, told: Lines
) -> None:
    """Refused, as before, or the script's from the next epoch on: each sample is used exactly once in each epoch."""
    first, other = Script(loader=of_seed(was)), Script(loader=of_seed(now))
    samples = start(tmp_path, first, iterations).samples
    with pytest.raises(MismatchError, match=rf"seed={was}, this one seed={now} \(hyperparameters=\"script\" takes"):
        start(tmp_path, other, 1)
    samples += start(tmp_path, other, 1, hyperparameters="script").samples
    (line,) = told()
    assert line.startswith(
        f"seed of the loader: the script asks for {now}, the checkpoint was made with {was}: taking {now};"
    )
    samples += start(tmp_path, other, 23 - iterations).samples  # which finds the rest of the epoch in its order, too
    epochs = [samples[begin : begin + SAMPLES] for begin in range(0, 4 * SAMPLES, SAMPLES)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(SAMPLES))] * 4
    begun = -(-iterations // 6)
    if was is not None:
        assert epochs[:begun] == orders(of_seed(was))[:begun]
    if now is not None:
        assert epochs[begun:] == orders(of_seed(now))[begun:]
    assert told() == []


def test_an_epoch_keeps_its_order_through_several_seeds(tmp_path: Path) -> None:
    starts = (start(tmp_path, Script(loader=of_seed(seed)), 2, hyperparameters="script").samples for seed in (3, 4, 5))
    assert [sample for samples in starts for sample in samples] == orders(of_seed(3))[0]


def orders(make: Callable[[TensorDataset], ResumableLoader]) -> list[list[int]]:
    loader = make(TensorDataset(torch.arange(SAMPLES)))
    return [[int(i) for (batch,) in loader for i in batch] for _ in range(4)]


def test_a_seed_of_torch_in_the_middle_of_an_epoch(tmp_path: Path, told: Lines) -> None:
    script = Script()
    samples = start(tmp_path, script, 4).samples
    run = start(tmp_path, replace(script, seed=7), 8, hyperparameters="script")
    samples += run.samples
    assert run.seeds == {7}
    assert told() == [
        "seed of torch: the script asks for 7, the checkpoint was made with 1: taking 7; an epoch that has begun "
        "keeps its order"
    ]
    assert sorted(samples[:SAMPLES]) == sorted(samples[SAMPLES:]) == list(range(SAMPLES))


def test_torchs_own_seed_is_none_of_the_scripts(tmp_path: Path, told: Lines, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without manual_seed each process has another one, of 64 bits."""
    for seed, choice in ((6633690184123994101, "checkpoint"), (1818945934695919258, "script"), (1, "script")):
        monkeypatch.setattr(torch, "initial_seed", lambda seed=seed: seed)
        start(tmp_path, Script(), 2, hyperparameters=choice)
    assert told() == []


@pytest.mark.parametrize("choice", ["checkpoint", "script"])
@pytest.mark.parametrize("batched", [False, True])
def test_another_batch_size_goes_on_at_the_sample(choice: str, batched: bool, tmp_path: Path, told: Lines) -> None:
    def of(size: int) -> Script:
        if not batched:
            return Script(loader=of_seed(3, size))
        sampler = torch.utils.data.BatchSampler(range(SAMPLES), size, drop_last=False)
        return Script(loader=lambda data: DataLoader(data, batch_sampler=sampler))

    samples = start(tmp_path, of(4), 2).samples
    samples += start(tmp_path, of(8), 2, hyperparameters=choice).samples
    assert told() == [
        "batch_size of the loader: the script asks for 8, the checkpoint was made with 4: taking 8 from this "
        "place in the epoch, whatever hyperparameters= says"
    ]
    assert sorted(samples) == list(range(SAMPLES))
    start(tmp_path, of(8), 1)
    assert told() == []


@dataclass
class Batches:
    """A loader without a state."""

    data: TensorDataset
    batch_size: int

    def __len__(self) -> int:
        return SAMPLES // self.batch_size

    def __iter__(self) -> Iterator[Any]:
        for begin in range(0, SAMPLES, self.batch_size):
            yield self.data[begin : begin + self.batch_size]


@pytest.mark.parametrize(("iterations", "fits"), [(2, False), (6, True)])
def test_a_place_in_batches_of_another_size(iterations: int, fits: bool, tmp_path: Path, told: Lines) -> None:
    """A loader whose batches are fetched again would skip, or repeat, samples: but at an epoch's end."""

    def of(size: int) -> Script:
        return Script(loader=lambda data: resumable(Batches(data, size)))

    start(tmp_path, of(4), iterations)
    if fits:
        assert start(tmp_path, of(8), 3).samples == list(range(SAMPLES))
        assert len(told()) == 1
        return
    with pytest.raises(
        MismatchError, match="stopped after 2 batches of 4 in an epoch, and batches of 8 may not end there"
    ):
        start(tmp_path, of(8), 1)
    assert start(tmp_path, of(4), 4).samples == list(range(8, SAMPLES))


@pytest.mark.parametrize("choice", ["checkpoint", "script"])
def test_a_checkpoint_that_does_not_say(
    choice: str, tmp_path: Path, told: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    capture = Progress.capture
    with monkeypatch.context() as older:
        older.setattr(
            Progress, "capture", lambda self: {k: v for k, v in capture(self).items() if k != hyperparameters.ENTRY}
        )
        start(tmp_path, Script(), 4)
    script = Script(rates=(0.5, 0.02))
    assert start(tmp_path, script, 1, hyperparameters=choice).rates == [[0.025, 0.005]]
    assert told() == [
        "the checkpoint does not say which hyperparameters its script asked for: the checkpoint's values are kept, and "
        "later changes of the script are logged"
    ]
    start(tmp_path, replace(script, decay=0.5), 1)
    assert [line.partition(" ")[0] for line in told()] == ["weight_decay"]


def test_objects_that_go_on_training_are_not_told(tmp_path: Path, told: Lines) -> None:
    """A notebook makes another Checkpointer for what has trained: it holds what the checkpoint has."""
    script = Script(scheduler="ReduceLROnPlateau")
    model, optimizer, scheduler, _ = script.make()
    iterate(model, optimizer, scheduler, torch.ones(1, 3))
    plan = random_plan({"model": model}, {"optimizer": optimizer}, 0)
    for stop in (3, 6):
        with Checkpointer(
            model, optimizer, directory=tmp_path, plan=plan, state={"scheduler": scheduler}, every=1
        ) as checkpointer:
            for _ in checkpointer.steps(stop):
                iterate(model, optimizer, scheduler, torch.ones(1, 3))
    assert told() == []
