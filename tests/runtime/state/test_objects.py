"""Objects under ``state=``: another class of scheduler is refused, or begins anew where the job says so."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as torchs
from torch.optim.swa_utils import SWALR

import checkflow
from checkflow.cli.main import main
from checkflow.core.errors import MismatchError
from checkflow.planner.live.planner import LivePlanner
from checkflow.runtime.loop import boundary_actions
from checkflow.runtime.state.collect import capture_extra
from checkflow.runtime.state.objects import fit
from tests.support.own_plans import Never
from tests.support.ranks.processes import run_ranks


@pytest.fixture(autouse=True)
def _no_plan_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of these jobs is about plans."""
    monkeypatch.setattr(LivePlanner, "start", lambda self, recorded, **asked: Never())


Make = Callable[[torch.optim.Optimizer], Any]
LR = 0.01


class Wrapper:
    """Holds a scheduler of torch's as Accelerate's does."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler

    def state_dict(self) -> Any:
        return self.scheduler.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.scheduler.load_state_dict(state)

    def step(self) -> None:
        self.scheduler.step()


class Counting(Wrapper):
    """Its state has the scheduler's in it."""

    def state_dict(self) -> Any:
        return {"turns": 3, "inner": self.scheduler.state_dict()}

    def load_state_dict(self, state: Any) -> None:
        self.scheduler.load_state_dict(state["inner"])


class Warm(torchs.LRScheduler):
    """A user's own."""

    def __init__(self, optimizer: torch.optim.Optimizer, turns: int = 4) -> None:
        self.turns = turns
        super().__init__(optimizer)

    def get_lr(self) -> list[Any]:
        return [base * min(1.0, (self.last_epoch + 1) / self.turns) for base in self.base_lrs]


class Renamed(Warm):
    pass


class WarmToo(Warm):
    """A user's class with other numbers in it."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer)
        self.__dict__.pop("turns")
        self.first = self.length = 1


class Own:
    """No scheduler of torch's."""

    def __init__(self, **values: Any) -> None:
        self.values = values

    def state_dict(self) -> Any:
        return self.values

    def load_state_dict(self, state: Any) -> None:
        self.values = dict(state)

    def step(self) -> None:
        pass


class Other(Own):
    pass


def sequence(*makes: Make) -> Make:
    return lambda o: torchs.SequentialLR(o, [make(o) for make in makes], [4 * n for n in range(1, len(makes))])


def exponential(o: Any) -> Any:
    return torchs.ExponentialLR(o, 0.9)


def linear(o: Any) -> Any:
    return torchs.LinearLR(o, 1.0, 0.0, total_iters=8)


def cosine(o: Any) -> Any:
    return torchs.CosineAnnealingLR(o, 8)


def step(o: Any) -> Any:
    return torchs.StepLR(o, 3)


def cycle(o: Any) -> Any:
    return torchs.OneCycleLR(o, 0.1, total_steps=40)


def chained(o: Any) -> Any:
    return torchs.ChainedScheduler([exponential(o), linear(o)])


def plateau(o: Any) -> Any:
    return torchs.ReduceLROnPlateau(o, factor=0.5, patience=0, threshold=10.0)


def no(o: Any) -> Any:
    return None


class Life:
    """One start of a script: a linear model, and a scheduler if ``make`` makes one."""

    def __init__(self, make: Make = no, lr: float = LR, name: str = "scheduler", **more: Any) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Linear(4, 4)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr, weight_decay=0.1)
        self.scheduler = make(self.optimizer)
        self.state = ({} if self.scheduler is None else {name: self.scheduler}) | {
            key: of(self.optimizer) if callable(of) else of for key, of in more.items()
        }
        self.rates: list[float] = []

    def iterate(self) -> None:
        self.rates.append(self.optimizer.param_groups[0]["lr"])
        self.optimizer.zero_grad()
        self.model(torch.randn(8, 4)).square().mean().backward()
        self.optimizer.step()
        for one in self.state.values():
            one.step(*([1.0] if isinstance(one, torchs.ReduceLROnPlateau) else []))

    def run(self, directory: Path, steps: int, **options: Any) -> Life:
        with checkflow.Checkpointer(
            self.model, self.optimizer, directory=directory, every=1, state=self.state, **options
        ) as checkpointer:
            for _ in checkpointer.steps(steps):
                self.iterate()
        return self


@pytest.fixture
def classless(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Have checkpoints name no class of a scheduler, as earlier code wrote them."""

    def without(*arguments: Any) -> dict[str, Any]:
        found = capture_extra(*arguments)
        return {**found, "job": {key: value for key, value in found["job"].items() if key != "schedulers"}}

    return lambda on: monkeypatch.setattr(boundary_actions, "capture_extra", without if on else capture_extra)


def held(life: Life) -> Any:
    """What a refusal must leave alone."""
    return copy.deepcopy((life.model.state_dict(), life.optimizer.state_dict(), life.state["scheduler"].state_dict()))


@pytest.mark.parametrize("named", [True, False], ids=["named", "classless"])
@pytest.mark.parametrize(
    ("first", "then", "what"),
    [
        (cycle, cosine, "state['scheduler'] is OneCycleLR in the checkpoint, CosineAnnealingLR in the job"),
        (exponential, step, "state['scheduler'] is ExponentialLR in the checkpoint, StepLR in the job"),
        (step, exponential, "state['scheduler'] is StepLR in the checkpoint, ExponentialLR in the job"),
        (cosine, lambda o: torchs.CosineAnnealingWarmRestarts(o, 3),
         "state['scheduler'] is CosineAnnealingLR in the checkpoint, CosineAnnealingWarmRestarts in the job"),
        (lambda o: SWALR(o, 0.1), linear, "state['scheduler'] is SWALR in the checkpoint, LinearLR in the job"),
        (plateau, cosine, "state['scheduler'] is ReduceLROnPlateau in the checkpoint, CosineAnnealingLR in the job"),
        (chained, sequence(exponential, linear),
         "state['scheduler'] is ChainedScheduler in the checkpoint, SequentialLR in the job"),
        (sequence(linear, exponential), sequence(linear, cosine),
         "scheduler 1 in state['scheduler'] is ExponentialLR in the checkpoint, CosineAnnealingLR in the job"),
        (sequence(linear, exponential), sequence(linear, exponential, cosine),
         "state['scheduler'] has 2 schedulers in the checkpoint, 3 in the job"),
        (lambda o: torchs.ChainedScheduler([sequence(linear, step)(o)]),
         lambda o: torchs.ChainedScheduler([sequence(linear, cosine)(o)]),
         "scheduler 1 in scheduler 0 in state['scheduler'] is StepLR in the checkpoint, CosineAnnealingLR in the job"),
        (lambda o: Wrapper(cycle(o)), lambda o: Wrapper(linear(o)),
         "state['scheduler'] is OneCycleLR in the checkpoint, LinearLR in the job"),
        (lambda o: Counting(cycle(o)), lambda o: Counting(linear(o)),
         "state['scheduler'] is OneCycleLR in the checkpoint, LinearLR in the job"),
        (Warm, cosine, "state['scheduler'] is Warm in the checkpoint, CosineAnnealingLR in the job"),
        (Warm, WarmToo, "state['scheduler'] is one with turns in the checkpoint, WarmToo in the job"),
    ],
)  # fmt: skip
def test_another_class_of_scheduler_is_refused(
    first: Make, then: Make, what: str, named: bool, tmp_path: Path, classless: Callable[[bool], None]
) -> None:
    """Also nested ones, and in a wrapper; of checkpoints that name no class, by the keys of their state."""
    classless(not named)
    Life(first).run(tmp_path, 5)
    life = Life(then)
    before = held(life)
    with pytest.raises(MismatchError) as refusal:
        life.run(tmp_path, 9)
    said = str(refusal.value)
    assert said.endswith(
        ' (fresh=("scheduler",) begins it anew); run the job as it was, or pass another directory'
    )  # fmt: skip
    where, _, rest = what.partition(" in the checkpoint, ")
    assert (where if named else where.partition(" is ")[0]) in said
    assert f" in the checkpoint, {rest} (fresh" in said
    assert str(before) == str(held(life))


@pytest.mark.parametrize("named", [True, False], ids=["named", "classless"])
@pytest.mark.parametrize(
    ("first", "then"),
    [
        (Warm, Renamed),
        (cosine, cosine),
        (sequence(linear, cosine), sequence(linear, cosine)),
        (lambda o: Wrapper(cosine(o)), cosine),
        (cosine, lambda o: Wrapper(cosine(o))),
        (lambda o: Own(a=1), lambda o: Other(b=2)),
        (cosine, lambda o: Own(last_epoch=0)),
    ],
)
def test_a_class_of_the_users_own_may_have_another_name(
    first: Make, then: Make, named: bool, tmp_path: Path, classless: Callable[[bool], None]
) -> None:
    classless(not named)
    state = copy.deepcopy(Life(first).run(tmp_path, 5).state["scheduler"].state_dict())
    life = Life(then).run(tmp_path, 5)
    assert life.state["scheduler"].state_dict() == state


def test_another_release_of_torch_adds_and_removes_what_all_schedulers_have() -> None:
    scheduler = plateau(Life().optimizer)
    state = scheduler.state_dict() | {"verbose": False}
    del state["default_min_lr"]
    assert fit({"objects": {"s": state}}, {"s": scheduler}, (), ()).objects == {"s": scheduler}


def without_checkflow(first: Make, then: Make, until: int, steps: int) -> Life:
    """The same with torch alone: the new scheduler is made for an optimizer that has its first rate again."""
    life, again = Life(first), Life(then)
    torch.manual_seed(0)
    Life()
    for _ in range(until):
        life.iterate()
    again.model.load_state_dict(life.model.state_dict())
    groups = again.optimizer.state_dict()["param_groups"]
    again.optimizer.load_state_dict({"state": life.optimizer.state_dict()["state"], "param_groups": groups})
    for _ in range(steps - until):
        again.iterate()
    return again


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (no, linear), (Warm, cosine), (cycle, sequence(linear, cosine)), (no, chained),
        (Warm, lambda o: Wrapper(linear(o))), (cycle, linear), (no, cosine),
    ],
)  # fmt: skip
def test_a_cooldown_goes_by_the_rates_of_the_new_schedule(
    first: Make, then: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """After a constant rate or another schedule. It is cut, and started again with the same text."""
    truth = without_checkflow(first, then, 10, 18)
    Life(first).run(tmp_path, 10)
    begun = Life(then).run(tmp_path, 13, fresh=("scheduler",))
    (line,) = (record for record in caplog.records if "begins anew" in record.getMessage())
    assert line.levelno == logging.WARNING
    assert line.getMessage().startswith("state['scheduler'] is ")
    assert ("lr of optimizer begins at [0.01] as the script's schedule does" in line.getMessage()) == (first is cycle)
    caplog.clear()
    resumed = Life(then).run(tmp_path, 18, fresh=("scheduler",))
    assert "begins anew" not in caplog.text
    assert begun.rates + resumed.rates == truth.rates
    assert len(set(truth.rates)) > 3
    groups = [life.optimizer.state_dict()["param_groups"] for life in (resumed, truth)]
    assert groups[0] == groups[1]
    assert all(map(torch.equal, resumed.model.parameters(), truth.model.parameters()))


def test_what_no_schedule_sets_is_the_checkpoint_s(tmp_path: Path) -> None:
    life = Life()
    life.optimizer.param_groups[0] |= {"weight_decay": 0.3, "betas": (0.8, 0.9)}
    life.run(tmp_path, 4)
    group = Life(cosine).run(tmp_path, 5, fresh=("scheduler",)).optimizer.param_groups[0]
    assert (group["weight_decay"], group["betas"], group["initial_lr"]) == (0.3, (0.8, 0.9), LR)


def test_a_cooldown_from_the_rate_that_was_reached(tmp_path: Path) -> None:
    Life(cycle).run(tmp_path, 10)
    seen = checkflow.peek(tmp_path)
    assert seen is not None
    reached = seen.groups["optimizer"][0]["lr"]
    assert Life(linear, lr=reached).run(tmp_path, 12, fresh=("scheduler",)).rates == [reached, reached * 7 / 8]


def test_a_scheduler_that_goes_on_keeps_the_rates(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Beside one that is added, and under one that has no rates of its own."""
    Life(step).run(tmp_path, 7)
    rates = Life(step, more=plateau).run(tmp_path, 9, fresh=("more",)).rates
    assert rates == pytest.approx([LR * 0.01, LR * 0.01 * 0.5])
    assert "lr of optimizer stays [" in caplog.text
    Life(linear).run(tmp_path / "b", 5)
    assert Life(plateau).run(tmp_path / "b", 6, fresh=("scheduler",)).rates == pytest.approx([LR * 3 / 8])


def test_what_the_job_has_no_longer_is_dropped_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The rate stays where the schedule had brought it; a script that keeps its text starts again and again."""
    Life(linear).run(tmp_path, 4)
    with pytest.raises(MismatchError, match=r"state\['scheduler'\] is only in the checkpoint \(fresh=.* drops it\)"):
        Life().run(tmp_path, 5)
    caplog.clear()
    assert Life().run(tmp_path, 6, fresh=("scheduler",)).rates == pytest.approx([LR / 2] * 2)
    (line,) = (record.getMessage() for record in caplog.records if "is dropped" in record.getMessage())
    assert line == (
        "state['scheduler'] is only in the checkpoint: it is dropped, as fresh= says; "
        "lr of optimizer stays [0.005000000000000001] as in the checkpoint, where the script has [0.01]"
    )
    caplog.clear()
    for steps in (7, 8):
        assert Life().run(tmp_path, steps, fresh=("scheduler",)).rates == pytest.approx([LR / 2])
    assert "dropped" not in caplog.text
    assert Life().run(tmp_path, 9).rates == pytest.approx([LR / 2])
    with pytest.raises(ValueError, match="fresh has 'scheduler', and neither the job nor the checkpoint has that"):
        Life().run(tmp_path, 10, fresh=("scheduler",))


def test_a_name_that_nobody_knows_is_an_error(tmp_path: Path) -> None:
    says = "fresh has 'schedular', and neither the job nor the checkpoint has that in state=: 'scheduler'"
    with pytest.raises(ValueError, match=says):
        Life(linear).run(tmp_path / "anew", 4, fresh=("schedular",))
    Life(linear).run(tmp_path, 4)
    with pytest.raises(ValueError, match=says):
        Life().run(tmp_path, 5, fresh=("schedular",))


def test_variables_begin_anew_too(tmp_path: Path) -> None:
    kept = checkflow.Variables(best=1.0)
    kept.step = lambda: None
    Life(linear, kept=kept).run(tmp_path, 4)
    other = checkflow.Variables(worst=2.0)
    other.step = lambda: None
    with pytest.raises(MismatchError, match=r'only in the checkpoint \(fresh=\("kept",\) begins it anew\)'):
        Life(linear, kept=other).run(tmp_path, 5)
    Life(linear, kept=other).run(tmp_path, 5, fresh=("kept",))
    assert other.worst == 2.0


def test_imported_weights_have_no_objects(tmp_path: Path) -> None:
    Life(cycle).run(tmp_path, 10)
    assert main(["import", str(tmp_path), str(tmp_path / "imported")]) == 0
    with pytest.raises(ValueError, match="fresh has 'schedular', and neither"):
        Life(linear).run(tmp_path / "imported", 2, fresh=("schedular",))
    assert Life(linear).run(tmp_path / "imported", 2, fresh=("scheduler",)).rates == [LR, LR * 7 / 8]
    assert Life(linear).run(tmp_path / "imported", 3, fresh=("scheduler",)).rates == pytest.approx([LR * 6 / 8])


def of_rank(rank: int, world_size: int, directory: Path) -> list[list[float]]:
    starts = [(cycle, 10, ()), (linear, 12, ("scheduler", "b", "a")), (linear, 14, ("scheduler", "b", "a"))]
    own = {"a": Own(n=0), "b": Own(n=1)}
    return [Life(make, **own).run(directory, steps, fresh=fresh).rates for make, steps, fresh in starts]


@pytest.mark.timeout(300)
def test_all_ranks_begin_the_same_anew(tmp_path: Path) -> None:
    """And agree on their arguments, though each process orders a set in its own way."""
    (tmp_path / "ranks").mkdir()
    found = run_ranks(tmp_path / "ranks", 2, of_rank, tmp_path / "directory")
    assert found[0] == found[1]
    assert [*found[0][1], *found[0][2]] == pytest.approx([LR, LR * 7 / 8, LR * 6 / 8, LR * 5 / 8])
