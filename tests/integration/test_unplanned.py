"""Jobs that do what their plan did not foresee: every committed checkpoint is still the truth of one boundary."""

from __future__ import annotations

import dataclasses
import random
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint as recompute
from torch.utils.data import TensorDataset, default_collate

import checkflow
from checkflow import api
from checkflow.api import Checkpointer
from checkflow.core import plan as plans
from checkflow.core.errors import CorruptCheckpointError, StorageError
from checkflow.core.graph import AnchorKind
from checkflow.core.plan import Plan
from checkflow.core.training_step import TrainingStep
from checkflow.runtime.data.loader import DataLoader
from checkflow.runtime.snapshot.executor import Execution
from checkflow.runtime.store.discovery import find
from tests.support.oracle import assert_checkpoint_is, clone_state, random_plan, same_bits, undated
from tests.support.planned_jobs import plan_by_trace
from tests.support.waiting import blocked, wait_for

Truths = dict[int, dict[str, torch.Tensor]]


@pytest.fixture(autouse=True)
def _random_plans_have_no_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "check_plan", plans.validate)


class Job:
    """A model, an EMA of it, and an Adam; ``run`` trains and keeps the truth of each boundary."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 3))
        self.ema = torch.optim.swa_utils.AveragedModel(self.model)
        self.models = {"model": self.model, "ema": self.ema}
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.optimizers = {"optimizer": self.optimizer}

    def iterate(self, *, step: bool = True) -> None:
        self.optimizer.zero_grad()
        F.cross_entropy(self.model(torch.randn(6, 4)), torch.randint(0, 3, (6,))).backward()
        if step:
            self.optimizer.step()
        self.ema.update_parameters(self.model)

    def plan(self, seed: int) -> Plan:
        return random_plan(self.models, self.optimizers, seed)


def open_job(job: Job, directory: Path, plan: Plan, **options: Any) -> Checkpointer:
    return Checkpointer(
        job.models, job.optimizers, directory=directory, plan=plan,
        **{"every": 1, "audit": 1, "keep_latest": 50, **options},
    )  # fmt: skip


def check(directory: Path, truths: Truths) -> list[int]:
    """Hold every checkpoint against its truth; returns the steps there are."""
    steps = []
    for path in find(directory):
        steps.append(int(path.name[5:]))
        assert_checkpoint_is(path, truths[steps[-1]])
    return sorted(steps)


def train(job: Job, checkpointer: Checkpointer, iterations: int, before: Any = lambda n: None) -> Truths:
    truths: Truths = {}
    for n in checkpointer.steps(iterations):
        if n:
            truths[n] = clone_state(job.models, job.optimizers)
        before(n)
        job.iterate()
    truths[checkpointer.iteration] = clone_state(job.models, job.optimizers)
    return truths


def warmed(seed: int = 0) -> Plan:
    job = Job()
    job.iterate()
    return job.plan(seed)


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("change", ["load_state_dict", "state table", "submodule", "group list"])
def test_replaced_containers_are_followed(change: str, every: int, tmp_path: Path) -> None:
    """Between two checkpoints, too, where nobody has looked at the state for some iterations."""
    job = Job()

    def before(n: int) -> None:
        if n != 4:
            return
        if change == "load_state_dict":
            job.optimizer.load_state_dict(job.optimizer.state_dict())
        elif change == "state table":
            parameter = job.model[0].weight
            job.optimizer.state[parameter] = {k: v.clone() for k, v in job.optimizer.state[parameter].items()}
        elif change == "submodule":
            job.model[1] = nn.BatchNorm1d(64)
        else:
            groups = [dict(group, params=list(group["params"])) for group in job.optimizer.param_groups]
            job.optimizer.param_groups = groups

    with open_job(job, tmp_path, warmed(), on_error="raise", every=every) as checkpointer:
        truths = train(job, checkpointer, 8, before)
    assert check(tmp_path, truths) == sorted({*range(every, 9, every), 8})


@pytest.mark.parametrize("snapshots", [False, True])
@pytest.mark.parametrize("part", ["model/0.weight", "model/1.running_mean", "optimizer/0.weight.exp_avg"])
def test_what_no_operator_was_seen_to_write_is_guarded(part: str, snapshots: bool, tmp_path: Path) -> None:
    """Unfrozen parameters, branches that the trace did not take, plans of another job: the plan gives no deadline."""
    job = Job()
    with open_job(job, tmp_path, undated(warmed(), part, snapshots=snapshots)) as checkpointer:
        truths = train(job, checkpointer, 6)
    assert checkpointer.report()["breaches"] == 0
    assert check(tmp_path, truths) == list(range(1, 7))


def test_a_buffer_that_is_planned_too_late_is_guarded_by_its_module(tmp_path: Path) -> None:
    """Hidden writes, double buffers, a module that the trace ran in evaluation first: the deadline comes too late."""
    job, plan = Job(), warmed()
    steps = plan.timeline.steps
    place = next(i for i, s in enumerate(steps) if s.anchor and s.anchor.kind is AnchorKind.OPTIMIZER_PRE)
    late = ("model/1.running_mean", "model/1.running_var", "model/1.num_batches_tracked")
    members = {name: size for group in plan.timeline.groups for name, size in group.members}
    groups: dict[int | None, dict[str, int]] = {}
    for group in plan.timeline.groups:
        for name, size in group.members:
            groups.setdefault(place + 1 if name in late else group.first_write, {})[name] = size
    ordered = sorted(groups.items(), key=lambda pair: (pair[0] is None, pair[0] or 0))
    timeline = dataclasses.replace(
        plan.timeline,
        groups=tuple(
            dataclasses.replace(plan.timeline.groups[0], first_write=first, members=tuple(sorted(found.items())))
            for first, found in ordered
        ),
    )
    chunks = tuple(
        dataclasses.replace(chunk, offload_step=place, snapshot_step=None) if chunk.tensor in late else chunk
        for chunk in plan.chunks
    )
    assert members.keys() >= set(late)
    with open_job(job, tmp_path, dataclasses.replace(plan, timeline=timeline, chunks=chunks).sealed()) as checkpointer:
        truths = train(job, checkpointer, 6)
    assert checkpointer.report()["breaches"] == 0
    assert check(tmp_path, truths) == list(range(1, 7))


def test_an_average_is_safe_before_the_loop_updates_it(tmp_path: Path) -> None:
    job = Job()
    with open_job(job, tmp_path, undated(warmed(), "ema/")) as checkpointer:
        truths = train(job, checkpointer, 6)
    assert checkpointer.report()["breaches"] == checkpointer.report()["failed"] == 0
    assert check(tmp_path, truths) == list(range(1, 7))


def test_an_average_updated_after_a_skipped_step_voids_that_checkpoint(tmp_path: Path) -> None:
    """A scaler skips the step, so that no anchor fires before the average is written."""
    job, truths = Job(), {}
    with open_job(job, tmp_path, undated(warmed(), "ema/"), audit=0) as checkpointer:
        for n in checkpointer.steps(9):
            if n:
                truths[n] = clone_state(job.models, job.optimizers)
            if n == 5:
                job.iterate(step=False)
            job.iterate()
        truths[9] = clone_state(job.models, job.optimizers)
    steps = check(tmp_path, truths)
    assert 5 not in steps
    assert steps[-1] == 9
    assert checkpointer.report()["failed"] == 1


def test_after_a_breach_everything_is_copied_at_the_boundary(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Weights written where no anchor stands: the audit proves it once, and then checkpoints are whole again."""
    job = Job()
    plan = warmed()
    place = next(i for i, s in enumerate(plan.timeline.steps) if s.anchor and s.anchor.kind is AnchorKind.OPTIMIZER_PRE)
    late = dataclasses.replace(
        plan,
        chunks=tuple(
            dataclasses.replace(chunk, offload_step=place, snapshot_step=None) if "model/3" in chunk.tensor else chunk
            for chunk in plan.chunks
        ),
    ).sealed()

    def before(n: int) -> None:
        job.model[3].weight.data.add_(0.5)  # no version counter tells

    with open_job(job, tmp_path, late, audit=0) as checkpointer:
        truths = train(job, checkpointer, 9, before)
    report = checkpointer.report()
    assert 1 <= report["breaches"] <= 3
    steps = check(tmp_path, truths)
    assert steps[-1] == 9
    assert len(steps) == 9 - report["breaches"]
    assert caplog.text.count("copied at each boundary") == 1


class Swapping(nn.Module):
    """Its layers change inside of forward: taken by turns, or made anew."""

    def __init__(self, fresh: bool) -> None:
        super().__init__()
        self.first, self.last, self.fresh = nn.Linear(4, 64), nn.Linear(64, 3), fresh
        self.norm = nn.BatchNorm1d(64)
        self.others = (nn.BatchNorm1d(64),)  # not registered: no state as long as they lie here

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        if self.training:
            used = self.norm
            self.norm = nn.BatchNorm1d(64) if self.fresh else self.others[0]
            self.others = (used,)
        return self.last(F.relu(self.norm(hidden)))


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("seed", [0, 1])
def test_modules_that_are_swapped_inside_of_a_forward_are_followed(fresh: bool, seed: int, tmp_path: Path) -> None:
    """No hook hangs on what is swapped in, and what is swapped out is written by the optimizer alone."""

    def make() -> Job:
        job = Job()
        job.model = Swapping(fresh)
        parameters = [*job.model.parameters(), *job.model.others[0].parameters()]
        job.ema = torch.optim.swa_utils.AveragedModel(nn.Linear(1, 1))
        job.ema.update_parameters = lambda _: None
        job.models = {"model": job.model}
        job.optimizer = torch.optim.Adam(parameters[: 6 if fresh else None], lr=0.01)
        job.optimizers = {"optimizer": job.optimizer}
        return job

    job = make()
    job.iterate()
    plan = job.plan(seed)
    job = make()
    with open_job(job, tmp_path, plan, on_error="raise") as checkpointer:
        truths = train(job, checkpointer, 9)
    assert checkpointer.report()["breaches"] == checkpointer.report()["failed"] == 0
    assert check(tmp_path, truths) == list(range(1, 10))


def test_a_module_that_is_skipped_does_not_lose_its_deadline(tmp_path: Path) -> None:
    """Layer drop: the anchor where a snapshot was planned does not fire, and the optimizer writes all the same."""
    job = Job()
    plan = warmed()
    steps = plan.timeline.steps
    norm = next(i for i, s in enumerate(steps) if s.anchor and s.anchor.name == "model/1")
    chunks = tuple(
        dataclasses.replace(chunk, offload_step=len(steps) - 1, snapshot_step=norm)
        if chunk.tensor.startswith("model/1.") and "running" not in chunk.tensor and "num" not in chunk.tensor
        else chunk
        for chunk in plan.chunks
    )
    truths: Truths = {}
    with open_job(job, tmp_path, dataclasses.replace(plan, chunks=chunks).sealed()) as checkpointer:
        for n in checkpointer.steps(6):
            if n:
                truths[n] = clone_state(job.models, job.optimizers)
            job.optimizer.zero_grad(set_to_none=False)
            x = job.model[0](torch.randn(6, 4))
            x = x if n in (2, 4) else job.model[1](x)
            F.cross_entropy(job.model[3](job.model[2](x)), torch.randint(0, 3, (6,))).backward()
            job.optimizer.step()
        truths[6] = clone_state(job.models, job.optimizers)
    assert checkpointer.report()["breaches"] == 0
    assert check(tmp_path, truths) == list(range(1, 7))


def test_a_module_that_is_taken_away_costs_the_plan_and_not_the_checkpoints(tmp_path: Path) -> None:
    job = Job()

    def before(n: int) -> None:
        if n == 3:
            job.model[1] = nn.Identity()
            job.ema.module[1] = nn.Identity()

    with open_job(job, tmp_path, warmed()) as checkpointer:
        truths = train(job, checkpointer, 7, before)
    assert check(tmp_path, truths) == list(range(1, 8))


def test_recomputed_forwards_are_no_anchors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Activation checkpointing runs a module's forward again inside backward; its second key must not fire there."""
    job, fired = Job(), []
    reached = Execution.reached

    def noting(self: Execution, key: Any) -> None:
        fired.append(key)
        reached(self, key)

    monkeypatch.setattr(Execution, "reached", noting)
    with open_job(job, tmp_path, warmed()) as checkpointer:
        for _ in checkpointer.steps(3):
            fired.clear()
            job.optimizer.zero_grad()
            out = recompute(job.model, torch.randn(6, 4), use_reentrant=False)
            F.cross_entropy(out, torch.randint(0, 3, (6,))).backward()
            job.optimizer.step()
            assert [key.occurrence for key in fired if key.name == "model/1"] == [0]


def test_two_optimizers_of_which_one_rarely_steps(tmp_path: Path) -> None:
    job = Job()
    rare = torch.optim.SGD([job.model[3].weight], lr=0.1, momentum=0.9)
    often = torch.optim.Adam([p for p in job.model.parameters() if p is not job.model[3].weight])
    job.optimizers = {"often": often, "rare": rare}

    def iterate(n: int) -> None:
        for optimizer in job.optimizers.values():
            optimizer.zero_grad()
        F.cross_entropy(job.model(torch.randn(6, 4)), torch.randint(0, 3, (6,))).backward()
        often.step()
        if n % 3 == 0:
            rare.step()
        job.ema.update_parameters(job.model)

    iterate(0)
    plan = undated(random_plan(job.models, job.optimizers, 1), "ema/")
    truths: Truths = {}
    with open_job(job, tmp_path, plan) as checkpointer:
        for n in checkpointer.steps(9):
            if n:
                truths[n] = clone_state(job.models, job.optimizers)
            iterate(n)
        truths[9] = clone_state(job.models, job.optimizers)
    assert checkpointer.report()["breaches"] == checkpointer.report()["failed"] == 0
    assert check(tmp_path, truths) == list(range(1, 10))


def test_growing_state_without_memory_for_it_stops_checkpoints_and_not_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from checkflow.runtime.memory_tier import staging
    from checkflow.runtime.memory_tier.tier import MemoryTier

    job = Job()
    with open_job(job, tmp_path, warmed()) as checkpointer:

        def before(n: int) -> None:
            if n == 2:
                job.optimizer.state[job.model[0].weight]["grown"] = torch.zeros(100_000)

                def refuse(size_bytes: int, node: int | None) -> None:
                    raise StorageError("no host memory")

                monkeypatch.setattr(MemoryTier, "allocate", lambda *_: None)
                monkeypatch.setattr(staging, "_private", refuse)
            if n == 5:
                monkeypatch.undo()

        truths = train(job, checkpointer, 8, before)
    steps = check(tmp_path, truths)
    assert set(steps) >= {1, 2, 6, 7, 8}
    assert not {3, 4, 5} & set(steps)


def test_an_interrupt_inside_a_copy_of_the_training_thread_hangs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import threading

    from checkflow.runtime.transfer import host

    job, armed = Job(), []
    move = host.move

    def interrupted(target: int, source: int, length_bytes: int) -> None:
        if armed and threading.current_thread() is threading.main_thread():
            armed.clear()
            raise KeyboardInterrupt
        move(target, source, length_bytes)

    plan = warmed()
    truths: Truths = {}
    with pytest.raises(KeyboardInterrupt), open_job(job, tmp_path, plan) as checkpointer:
        monkeypatch.setattr(host, "move", interrupted)
        for n in checkpointer.steps(9):
            if n:
                truths[n] = clone_state(job.models, job.optimizers)
            if n == 4:
                armed.append(True)
            job.iterate()
    assert check(tmp_path, truths)[-1] == 4


def test_the_last_capture_is_delivered_before_the_writer_closes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from checkflow.runtime.persist.writer import Writer

    submit = Writer.submit

    def slow(self: Writer, capture: Any) -> None:
        wait_for(blocked(threading.main_thread()))
        submit(self, capture)

    monkeypatch.setattr(Writer, "submit", slow)
    monkeypatch.setattr("checkflow.runtime.transfer.host.SMALL_BYTES", 0)
    job = Job()
    with open_job(job, tmp_path, warmed()) as checkpointer:
        truths = train(job, checkpointer, 2)
    assert check(tmp_path, truths) == [1, 2]


def test_errors_on_the_way_out_close_and_never_hide_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = warmed()
    job = Job()

    def failing(self: Any, *arguments: Any, **keywords: Any) -> Path:
        raise StorageError("planted")

    monkeypatch.setattr("checkflow.runtime.store.store.Store.commit", failing)
    with pytest.raises(ZeroDivisionError), open_job(job, tmp_path, plan, on_error="raise") as checkpointer:
        turns = checkpointer.steps(9)
        for _ in range(2):
            next(turns)
            job.iterate()
        raise ZeroDivisionError
    with pytest.raises(StorageError, match="planted"), open_job(job, tmp_path, plan, on_error="raise") as checkpointer:
        for _ in checkpointer.steps(1):
            job.iterate()
    monkeypatch.undo()
    monkeypatch.setattr(api, "check_plan", plans.validate)
    with open_job(job, tmp_path, plan):  # the lock was given back each time
        pass
    assert not any(module._forward_pre_hooks for module in job.model.modules())


def test_the_loader_without_epochs_goes_on_in_the_right_epoch(tmp_path: Path) -> None:
    data = TensorDataset(torch.arange(10), torch.randn(10, 4), torch.randint(0, 3, (10,)))

    def run(stop: int, directory: Path) -> list[list[int]]:
        job, used = Job(), []
        loader = DataLoader(data, 4, shuffle=True, seed=2)
        with Checkpointer(job.models, job.optimizers, loader, directory=directory, plan=plan, every=1) as checkpointer:
            while checkpointer.iteration + 1 < stop:
                for indices, x, y in checkpointer.loader:
                    job.optimizer.zero_grad()
                    F.cross_entropy(job.model(x), y).backward()
                    job.optimizer.step()
                    used.append([loader.epoch, *indices.tolist()])
                    if checkpointer.iteration + 1 >= stop:
                        break
        return used

    plan = warmed()
    whole = run(9, tmp_path / "whole")
    for stop in range(1, 8):
        directory = tmp_path / str(stop)
        assert run(stop, directory) + run(9, directory) == whole, stop


def test_collating_draws_the_same_numbers_after_a_resume() -> None:
    def mix(samples: list[Any]) -> Any:
        batch = default_collate(samples)
        return [*batch, torch.rand(()), random.random()]

    def rows(position: int, workers: int) -> list[Any]:
        loader = DataLoader(TensorDataset(torch.arange(12)), 4, True, seed=1, collate_fn=mix, num_workers=workers)
        loader.set_epoch(1, position)
        return [(batch.tolist(), float(number), other) for batch, number, other in loader]

    torch.manual_seed(5)
    whole = rows(0, 0)
    assert torch.initial_seed() == 5
    assert rows(0, 1) == whole
    assert rows(4, 0) == whole[1:]
    assert len({row[1] for row in whole}) == len(whole)


def test_leaving_epochs_after_the_last_batch_ends_the_epoch(tmp_path: Path) -> None:
    data = TensorDataset(torch.randn(8, 4), torch.randint(0, 3, (8,)))
    plan = warmed()
    seen = []
    for _ in range(3):
        job = Job()
        with Checkpointer(
            job.models, job.optimizers, DataLoader(data, 4), directory=tmp_path, plan=plan, every=1
        ) as checkpointer:
            for epoch in checkpointer.epochs(9):
                seen.append(epoch)
                for x, y in checkpointer.loader:
                    job.optimizer.zero_grad()
                    F.cross_entropy(job.model(x), y).backward()
                    job.optimizer.step()
                break  # out of time
    assert seen == [0, 1, 2]


def test_several_optimizer_steps_in_one_turn_of_steps(tmp_path: Path) -> None:
    job = Job()
    with open_job(job, tmp_path, warmed()) as checkpointer:
        turns = 0
        for _ in checkpointer.steps(4):
            turns += 1
            for _ in range(3):
                job.iterate()
    assert turns == checkpointer.iteration == 4


def test_batches_of_one_step_are_counted_as_told(tmp_path: Path) -> None:
    data = TensorDataset(torch.randn(16, 4), torch.randint(0, 3, (16,)))
    plan = warmed()
    job = Job()
    with Checkpointer(
        job.models, job.optimizers, DataLoader(data, 2), directory=tmp_path, plan=plan, every=1
    ) as checkpointer:
        for n, (x, y) in enumerate(checkpointer.loader, 1):
            F.cross_entropy(job.model(x), y).backward()
            if n % 2 == 0:
                job.optimizer.step()
                job.optimizer.zero_grad()
                checkpointer.step(batches=2)
            if n == 4:
                break
    again = Job()
    with Checkpointer(
        again.models, again.optimizers, DataLoader(data, 2), directory=tmp_path, plan=plan
    ) as checkpointer:
        assert checkpointer.loader.position == 8


def test_values_that_an_optimizer_keeps_beside_parameters_survive(tmp_path: Path) -> None:
    job = Job()
    job.optimizer.state["clock"] = {"t": 5}
    with open_job(job, tmp_path, warmed()) as checkpointer:
        train(job, checkpointer, 2)
    other = Job()
    with open_job(other, tmp_path, warmed()):
        assert other.optimizer.state["clock"] == {"t": 5}
        assert same_bits(other.model[0].weight, job.model[0].weight)


def test_going_back_to_a_damaged_step_is_refused_and_hides_nothing(tmp_path: Path) -> None:
    job, plan = Job(), warmed()
    with open_job(job, tmp_path, plan) as checkpointer:
        train(job, checkpointer, 4)
    file = tmp_path / "step-00000002" / "model-00000-of-00001.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(CorruptCheckpointError):
        open_job(Job(), tmp_path, plan, resume=2)
    assert [path.name[-1] for path in find(tmp_path)] == ["4", "3", "2", "1"]


def test_a_recurring_fault_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Odd:
        value: Any = 1

        def state_dict(self) -> Any:
            return {"value": self.value}

        def load_state_dict(self, state: Any) -> None:
            self.value = state["value"]

    job, odd = Job(), Odd()
    with open_job(job, tmp_path, warmed(), state={"odd": odd}) as checkpointer:
        for n in checkpointer.steps(8):
            if n == 3:
                odd.value = lambda: None
            job.iterate()
    messages = [record for record in caplog.records if "given up" in record.message or "odd" in record.message]
    assert len(messages) == 1
    assert "\n" not in messages[0].message


def test_without_optimizers_what_seems_unwritten_is_due_at_the_boundary(tmp_path: Path) -> None:
    """No step tells when the loop may write it: here a copy of the weights, which no operator of the plan makes."""
    models = {"model": nn.Linear(4, 4), "target": nn.Linear(4, 4)}

    def iterate(x: torch.Tensor) -> None:
        models["model"](x).square().mean().backward()
        with torch.no_grad():
            for parameter in models["model"].parameters():
                parameter.sub_(parameter.grad, alpha=0.1)
                parameter.grad = None

    plan = plan_by_trace(TrainingStep(step=iterate, models=models, batch=torch.ones(2, 4)), link_use=0.02)
    loose = {
        index
        for index, chunk in enumerate(plan.chunks)
        if chunk.tensor.startswith("target/") and chunk.snapshot_step is None
    }
    assert loose
    assert all(plan.deadlines[plan.chunks[index].tensor] is None for index in loose)
    truths: Truths = {}
    with Checkpointer(models, {}, directory=tmp_path, plan=plan, every=1, audit=1, keep_latest=50) as checkpointer:
        boundary = checkpointer._loop.execution.capturer._program.works[0]
        assert boundary.key.kind is AnchorKind.BOUNDARY
        assert loose <= set(boundary.due)
        for n in checkpointer.steps(6):
            if n:
                truths[n] = clone_state(models, {})
            iterate(torch.ones(2, 4))
            for slow, fast in zip(models["target"].parameters(), models["model"].parameters(), strict=True):
                slow.data.copy_(fast.data)
    report = checkpointer.report()
    assert report["breaches"] == report["failed"] == 0
    truths[6] = clone_state(models, {})
    assert check(tmp_path, truths) == [1, 2, 3, 4, 5, 6]


def test_what_takes_the_place_of_nothing_is_saved(tmp_path: Path) -> None:
    """A buffer and a parameter that were None, between two checkpoints."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    model.register_buffer("late", None)
    model.register_parameter("free", None)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    with checkflow.Checkpointer(model, optimizer, directory=tmp_path, every=1, on_error="raise", keep_latest=9) as one:
        for n in one.steps(6):
            if n == 3:
                model.late = torch.ones(3)
                model.free = nn.Parameter(torch.ones(2))
            optimizer.zero_grad()
            model(torch.randn(2, 4)).sum().backward()
            optimizer.step()
        truth = clone_state({"model": model}, {"optimizer": optimizer})
    assert {"model/late", "model/free"} <= set(truth)
    assert_checkpoint_is(tmp_path / "step-00000006", truth)


def test_another_list_of_parameters_is_followed(tmp_path: Path) -> None:
    """An optimizer without state tells nothing else of it."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
    with checkflow.Checkpointer(model, optimizer, directory=tmp_path, every=1, on_error="raise", keep_latest=9) as one:
        for n in one.steps(5):
            if n == 3:
                optimizer.param_groups[0]["params"] = list(model.parameters())
            optimizer.zero_grad()
            model(torch.randn(2, 4)).sum().backward()
            optimizer.step()
    assert len(find(tmp_path)) == 5
