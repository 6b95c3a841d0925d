"""Other people's loops: the programs of docs/how-to/integrations.md, run as they stand there, cut anywhere.

A program is cut by an error, or by SIGKILL in a process of its own, at a place of its work: where a batch is fetched
(ahead of its use), in a forward pass, after an optimizer step. What a run used is written down when an optimizer has
stepped, with the iteration, so that a replay replaces what it replays.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import re
import signal
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader as TorchDataLoader

import checkflow
from checkflow.core.errors import UnsupportedError
from checkflow.core.state import as_optimizers
from tests.support import jobs
from tests.support.oracle import clone_state, same_bits
from tests.support.planned_jobs import plan_by_trace

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PROGRAMS = dict(
    re.findall(r"```python\n# ([^\n]+)\n(.*?)```", (ROOT / "docs/how-to/integrations.md").read_text(), re.DOTALL)
)
NEEDS = {"accelerate": "accelerate", "accelerate's loader": "accelerate", "trainer": "transformers"}
LOADERLESS = ("get_batch", "get_batch, step")
SAMPLES, BATCH, EPOCHS, ITERATIONS = 18, 4, 3, 12
# Batches of an epoch: 4 4 4 4 2; with two to an iteration three iterations, the last of them with one.
Place = tuple[str, int]


class CutError(Exception):
    pass


@dataclass
class Cut:
    """When a place is reached for the n-th time, counted from 1 in this process: an error, or a signal to it."""

    place: Place | None
    signal: int | None = None
    seen: dict[str, int] = dataclasses.field(default_factory=dict)

    def at(self, what: str) -> None:
        self.seen[what] = self.seen.get(what, 0) + 1
        if (what, self.seen[what]) == self.place:
            if self.signal is None:
                raise CutError
            os.kill(os.getpid(), self.signal)


class Samples:
    """Augmented by random numbers; each tells its index."""

    def __init__(self, cut: Cut, size: int = SAMPLES) -> None:
        generator = torch.Generator().manual_seed(5)
        self.cut, self.augmented, self.x = cut, True, torch.randn(size, 8, generator=generator)
        self.y = torch.randint(0, 5, (size,), generator=generator)

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.cut.at("fetch")
        noise = 0.1 * torch.randn(8) if self.augmented else 0.0
        return {"x": self.x[index] + noise, "y": self.y[index], "index": index}


class Net(nn.Module):
    """With dropout, which draws numbers, and batch norm, which keeps some; gives its loss, as Trainer wants it."""

    def __init__(self, note: Any) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 5))
        self.note = note

    def forward(self, x: torch.Tensor, y: torch.Tensor, index: torch.Tensor) -> dict[str, torch.Tensor]:
        if self.training:
            self.note(index)
        return {"loss": F.cross_entropy(self.body(x), y)}


class Run:
    """One process's run of a program, or what stands for one."""

    def __init__(self, name: str, directory: Path, seed: int, cut: Cut) -> None:
        self.name, self.directory, self.cut = name, directory, cut
        self.samples: list[int] = []  # that reached no step yet
        torch.manual_seed(seed)  # a resumed run has to bring back everything that follows from it
        self.model = Net(self.note)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.optimizer.register_step_post_hook(self.stepped)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.8)
        self.dataset = Samples(cut)
        self.variables = self.given(seed)

    def given(self, seed: int) -> dict[str, Any]:
        """What the page says is given."""
        variables: dict[str, Any] = {
            "checkflow": checkflow,
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "dataset": self.dataset,
            "directory": str(self.directory),
            "epochs": EPOCHS,
            "iterations": ITERATIONS,
            "loss_of": lambda model, batch: model(**batch)["loss"],
            "get_batch": self.get_batch,
            "evaluate": self.evaluate,
        }
        if NEEDS.get(self.name) == "accelerate":
            from accelerate import Accelerator
            from accelerate.utils import send_to_device

            from checkflow.integrations.accelerate import checkpointer_of

            variables |= {
                "Accelerator": Accelerator,
                "send_to_device": send_to_device,
                "checkpointer_of": checkpointer_of,
            }
        if self.name == "trainer":
            variables |= trainer_variables(self.directory, seed)
        return variables

    @property
    def checkpointer(self) -> Any:
        return self.variables["attached"].checkpointer if self.name == "trainer" else self.variables["checkpointer"]

    def get_batch(self) -> dict[str, Any]:
        chosen = torch.randint(SAMPLES, (BATCH,))
        self.cut.at("fetch")
        return {"x": self.dataset.x[chosen], "y": self.dataset.y[chosen], "index": chosen}

    def evaluate(self) -> None:
        self.model.eval()
        with torch.no_grad():
            self.model(**self.get_batch())
        self.model.train()

    def note(self, index: torch.Tensor) -> None:
        self.samples += index.tolist()
        self.cut.at("forward")

    def stepped(self, *_: Any) -> None:
        with open(self.directory.parent / f"{self.directory.name}.used", "a") as file:
            file.write(f"{self.checkpointer.iteration} {' '.join(map(str, self.samples))}\n")
        self.samples = []
        self.cut.at("step")

    def go(self, program: str | None = None) -> dict[str, torch.Tensor]:
        exec(program or PROGRAMS[self.name], self.variables)
        return clone_state({"model": self.model}, {"optimizer": self.optimizer})


def trainer_variables(directory: Path, seed: int) -> dict[str, Any]:
    import transformers

    from checkflow.integrations.transformers import attach

    arguments = transformers.TrainingArguments(
        output_dir=str(directory), num_train_epochs=EPOCHS, gradient_accumulation_steps=2, save_strategy="no",
        per_device_train_batch_size=BATCH,
        eval_strategy="steps", eval_steps=2, logging_steps=1, report_to=[], use_cpu=True, disable_tqdm=True,
        remove_unused_columns=False, label_names=["y"], seed=seed, data_seed=3,
    )  # fmt: skip
    held_out = Samples(Cut(None), size=6)
    return {"transformers": transformers, "arguments": arguments, "held_out": held_out, "attach": attach}


def used(directory: Path) -> list[list[int]]:
    """The samples of each iteration; what was done again has replaced what it repeated."""
    rows: dict[int, list[int]] = {}
    for line in (directory.parent / f"{directory.name}.used").read_text().splitlines():
        iteration, *samples = map(int, line.split())
        rows[iteration] = samples
    assert sorted(rows) == list(range(len(rows)))
    return [rows[iteration] for iteration in range(len(rows))]


def start(name: str, directory: Path, seed: int, place: Place | None = None) -> Run | None:
    """A run that comes to its end; or none, since it was cut."""
    torch.set_num_threads(1)
    run = Run(name, directory, seed, Cut(place))
    if place is None:
        run.variables["final"] = run.go()
        return run
    with pytest.raises(CutError):
        run.go()
    return None


def start_and_kill(name: str, directory: Path, seed: int, place: Place) -> None:
    """As a process of its own."""
    torch.set_num_threads(1)
    Run(name, directory, seed, Cut(place, signal.SIGKILL)).go()


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, list[list[int]]]]:
    """By program, the state at the end and what was used; made when first asked for."""
    folder = tmp_path_factory.mktemp("uninterrupted")

    class Made(dict[str, Any]):
        def __missing__(self, name: str) -> Any:
            directory = folder / name
            run = start(name, directory, 0)
            assert run is not None
            self[name] = run.variables["final"], used(directory)
            return self[name]

    return Made()


@pytest.fixture(autouse=True)
def _accelerate_as_in_a_new_process() -> Iterator[None]:
    yield
    if state := sys.modules.get("accelerate.state"):
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()


def needed(name: str) -> None:
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])


def assert_equal(state: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert state.keys() == expected.keys()
    assert [name for name in state if not same_bits(state[name], expected[name])] == []


def test_the_page_has_these_programs() -> None:
    assert list(PROGRAMS) == ["trainer", "accelerate", "accelerate's loader", "fetch ahead", *LOADERLESS]


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name not in LOADERLESS])
def test_each_sample_once_an_epoch(name: str, uninterrupted: dict[str, Any]) -> None:
    needed(name)
    rows = uninterrupted[name][1]
    assert len(rows) == EPOCHS * (5 if name == "fetch ahead" else 3)
    flat = [sample for row in rows for sample in row]
    for epoch in range(EPOCHS):
        assert sorted(flat[epoch * SAMPLES : (epoch + 1) * SAMPLES]) == list(range(SAMPLES))


# Within an epoch, at an epoch's last step, in the first iteration of one, before anything new is durable.
CUTS: list[list[Place]] = [
    [("forward", 9), ("forward", 6)],
    [("step", 3), ("step", 1), ("step", 2), ("forward", 1)],
    [("step", 4), ("forward", 4)],
    [("fetch", 20), ("fetch", 21)],
    [("fetch", 50)],
]


@pytest.mark.parametrize(
    ("name", "number"), [(name, (2 * n + k) % len(CUTS)) for n, name in enumerate(PROGRAMS) for k in range(2)]
)
def test_cut_and_started_again_it_ends_the_same(
    name: str, number: int, tmp_path: Path, uninterrupted: dict[str, Any]
) -> None:
    needed(name)
    places = CUTS[number]
    if name in LOADERLESS:  # they fetch batches, not samples
        places = [(what, count // 4 if what == "fetch" else count) for what, count in places]
    state, rows = uninterrupted[name]
    directory = tmp_path / "cut"
    for seed, place in enumerate(places):
        start(name, directory, seed, place)
    run = start(name, directory, 99)
    assert run is not None
    assert run.checkpointer.resumed_from
    assert used(directory) == rows
    assert_equal(run.variables["final"], state)


@pytest.mark.parametrize("name", ["accelerate's loader", "trainer"])
def test_killed_and_started_again_it_ends_the_same(name: str, tmp_path: Path, uninterrupted: dict[str, Any]) -> None:
    needed(name)
    directory = tmp_path / "killed"
    assert jobs.in_a_process(start_and_kill, name, directory, 0, ("forward", 12)) == -signal.SIGKILL
    assert jobs.in_a_process(start_and_kill, name, directory, 1, ("step", 2)) == -signal.SIGKILL
    run = start(name, directory, 99)
    assert run is not None
    assert run.checkpointer.resumed_from
    assert used(directory) == uninterrupted[name][1]
    assert_equal(run.variables["final"], uninterrupted[name][0])


@pytest.mark.parametrize("name", PROGRAMS)
def test_asked_to_end_it_ends_at_the_next_boundary(name: str, tmp_path: Path, uninterrupted: dict[str, Any]) -> None:
    needed(name)
    directory = tmp_path / "asked"
    run = Run(name, directory, 0, Cut(("step", 4), signal.SIGTERM))
    with pytest.raises(checkflow.Preempted):
        run.go()
    assert run.cut.seen["step"] == 4
    again = start(name, directory, 99)
    assert again is not None
    assert again.checkpointer.resumed_from == 4
    assert used(directory) == uninterrupted[name][1]
    assert_equal(again.variables["final"], uninterrupted[name][0])


@pytest.mark.parametrize("name", PROGRAMS)
def test_started_again_after_its_end_it_does_nothing(name: str, tmp_path: Path, uninterrupted: dict[str, Any]) -> None:
    needed(name)
    directory = tmp_path / "twice"
    start(name, directory, 0)
    again = start(name, directory, 99)
    assert again is not None
    assert again.cut.seen.get("step", 0) == 0
    assert_equal(again.variables["final"], uninterrupted[name][0])


def test_what_trainer_logged_comes_back(tmp_path: Path) -> None:
    needed("trainer")
    histories = []
    for cut in (None, ("forward", 9)):
        directory = tmp_path / str(cut)
        if cut is not None:
            start("trainer", directory, 0, cut)
        run = start("trainer", directory, 0)
        assert run is not None
        state = run.variables["trainer"].state
        assert state.global_step == state.max_steps == 9
        kept = ("step", "epoch", "learning_rate", "eval_loss", "loss")
        histories.append([{key: row[key] for key in kept if key in row} for row in state.log_history[:-1]])
    assert histories[1] == histories[0]
    assert [row["step"] for row in histories[0] if "eval_loss" in row] == [
        2,
        4,
        6,
        8,
        9,
    ]  # Trainer evaluates at its end, too


@pytest.mark.parametrize("name", ["accelerate", "accelerate's loader"])
def test_accelerate_trains_as_with_its_own_loader(name: str, tmp_path: Path) -> None:
    """Without checkflow, on torch's loader: the same steps, those at the ends of epochs among them."""
    needed("accelerate")
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    ours = Run(name, tmp_path / "checkflow", 0, Cut(None))
    ours.dataset.augmented = False  # from whose numbers torch's loader would take those of an epoch's order
    final = ours.go()
    run = Run(name, tmp_path / "plain", 0, Cut(None))
    run.dataset.augmented = False
    run.variables["checkpointer"] = counted = types.SimpleNamespace(iteration=0)
    torchs = DataLoaderConfiguration(use_seedable_sampler=False)
    accelerator = Accelerator(gradient_accumulation_steps=2, dataloader_config=torchs)
    model, optimizer, batches, scheduler = accelerator.prepare(
        run.model, run.optimizer, TorchDataLoader(run.dataset, batch_size=BATCH, shuffle=True), run.scheduler
    )
    for _ in range(EPOCHS):
        for batch in batches:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch)["loss"])
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            counted.iteration += accelerator.sync_gradients
    assert used(ours.directory) == used(run.directory)
    assert_equal(final, clone_state({"model": run.model}, {"optimizer": run.optimizer}))


def planned() -> checkflow.Plan:
    """Two micro-batches of the job, traced."""
    model = Net(lambda _: None)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def iterate(batches: Any) -> None:
        for batch in batches:
            (model(**batch)["loss"] / 2).backward()
        optimizer.step()
        optimizer.zero_grad()

    batch = {"x": torch.randn(BATCH, 8), "y": torch.zeros(BATCH, dtype=torch.long), "index": torch.arange(BATCH)}
    step = checkflow.TrainingStep(
        step=iterate, models={"model": model}, optimizers={"optimizer": optimizer}, batch=(batch, batch),
        micro_batches=2,
    )  # fmt: skip
    return plan_by_trace(step, chunk_bytes=256)


@pytest.mark.parametrize("name", ["accelerate", "accelerate's loader", "get_batch", "get_batch, step"])
def test_by_a_plan_every_checkpoint_is_true(name: str, tmp_path: Path, uninterrupted: dict[str, Any]) -> None:
    """Anchors are reached inside of wrapped optimizers and prepared models, too; audits look at every checkpoint."""
    needed(name)
    assert "every=1," in PROGRAMS[name]
    program = PROGRAMS[name].replace("every=1,", 'every=1, plan=plan, audit=1, on_error="raise",')
    plan, directory = planned(), tmp_path / "planned"
    cut = Run(name, directory, 0, Cut(("forward", 8)))
    cut.variables["plan"] = plan
    with pytest.raises(CutError):
        cut.go(program)
    run = Run(name, directory, 99, Cut(None))
    run.variables["plan"] = plan
    assert_equal(run.go(program), uninterrupted[name][0])
    assert used(directory) == uninterrupted[name][1]
    for checkpointer in (cut.variables["checkpointer"], run.variables["checkpointer"]):
        report = checkpointer.report()
        assert report["plan"]["source"] == "given"
        assert report["committed"] == report["audited"] > 2
        assert report["breaches"] == report["failed"] == 0


def test_accelerate_in_mixed_precision(tmp_path: Path) -> None:
    needed("accelerate")
    program = PROGRAMS["accelerate"].replace("Accelerator(", 'Accelerator(mixed_precision="bf16", ')
    whole = Run("accelerate", tmp_path / "whole", 0, Cut(None))
    final = whole.go(program)
    assert whole.variables["accelerator"].mixed_precision == "bf16"
    with pytest.raises(CutError):
        Run("accelerate", tmp_path / "cut", 0, Cut(("forward", 8))).go(program)
    again = Run("accelerate", tmp_path / "cut", 99, Cut(None))
    assert_equal(again.go(program), final)
    assert again.checkpointer.resumed_from
    assert used(again.directory) == used(whole.directory)


def test_batches_from_elsewhere_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = Run("fetch ahead", tmp_path / "elsewhere", 0, Cut(None))
    loader = checkflow.DataLoader(run.dataset, batch_size=BATCH)
    with checkflow.Checkpointer(run.model, run.optimizer, loader, directory=run.directory, every=1) as checkpointer:
        run.variables["checkpointer"] = checkpointer
        for batch in TorchDataLoader(run.dataset, batch_size=BATCH):
            run.model(**batch)["loss"].backward()
            run.optimizer.step()
            checkpointer.step()
    assert [record.message for record in caplog.records if "from elsewhere" in record.message] != []
    assert caplog.text.count("from elsewhere") == 1


@pytest.mark.parametrize("ready", [False, True], ids=["samples", "ready batches"])
def test_accelerate_knows_the_last_batch_of_a_prepared_loader(ready: bool) -> None:
    needed("accelerate")
    from accelerate import Accelerator

    accelerator = Accelerator()
    order = {"batch_sampler": [[0, 1], [2], [3, 4, 5]]} if ready else {"batch_size": 2}
    loader = checkflow.DataLoader(torch.arange(6), **order)
    assert accelerator.prepare(loader) is loader
    for _ in range(2):
        ends = [accelerator.gradient_state.end_of_dataloader for _ in loader]
        assert ends == [False, False, True]
        assert not accelerator.gradient_state.in_dataloader
    for _ in loader:  # left in its middle
        break
    assert not accelerator.gradient_state.in_dataloader
    inner = []
    for _ in loader:
        inner.append([accelerator.gradient_state.end_of_dataloader for _ in accelerator.prepare(batches_of(4))])
        assert accelerator.gradient_state.active_dataloader is loader
    assert inner == [[False, True]] * 3


def batches_of(samples: int) -> TorchDataLoader[Any]:
    return TorchDataLoader(torch.arange(samples), batch_size=2)  # type: ignore[arg-type]


def test_an_optimizer_in_a_wrapper_is_the_one_inside() -> None:
    needed("accelerate")
    from accelerate import Accelerator

    inner = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    wrapped = Accelerator().prepare(inner)
    assert wrapped is not inner
    assert as_optimizers(wrapped) == {"optimizer": inner}
    assert as_optimizers({"a": wrapped, "b": inner}) == {"a": inner, "b": inner}

    class Lookahead(torch.optim.SGD):
        """Has state of its own, and steps by itself."""

        def __init__(self) -> None:
            super().__init__(nn.Linear(2, 2).parameters(), lr=0.1)
            self.optimizer = inner

    other = Lookahead()
    assert as_optimizers(other) == {"optimizer": other}


def some_batches(loader: Any, count: int) -> list[list[int]]:
    return [batch.tolist() for batch, _ in zip(loader, range(count), strict=False)]


def resumed_loader(position: int, **order: Any) -> checkflow.DataLoader:
    loader = checkflow.DataLoader(torch.arange(10), **(order or {"batch_size": 4}), seed=1)
    loader.set_epoch(2, position)
    return loader


def test_batches_that_were_used_must_be_skipped() -> None:
    with pytest.raises(UnsupportedError, match=re.escape("batch 0 of epoch 2 was used before this job resumed")):
        next(iter(resumed_loader(8).as_torch()))
    assert some_batches(resumed_loader(0).as_torch(), 9) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


@pytest.mark.parametrize(
    ("position", "batches"), [(4, 1), (8, 2), (10, 0)], ids=["one", "two", "all, and so the next epoch"]
)
@pytest.mark.parametrize("ready", [False, True], ids=["samples", "ready batches"])
def test_accelerate_skips_what_was_used(position: int, batches: int, ready: bool) -> None:
    needed("accelerate")
    from accelerate import Accelerator

    order = {"batch_sampler": [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]} if ready else {"batch_size": 4}
    loader = resumed_loader(position, **order)
    accelerator = Accelerator()
    prepared = accelerator.prepare(loader.as_torch())
    assert len(prepared) == 3
    rest = [batch.tolist() for batch in accelerator.skip_first_batches(prepared, batches)]
    assert rest == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]][batches:]
    assert loader.epoch == (3 if position == 10 else 2)
    assert [batch.tolist() for batch in prepared] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]  # the next epoch


def test_a_samplers_set_epoch_changes_no_place_that_was_restored(tmp_path: Path) -> None:
    loader = resumed_loader(8)
    loader.set_epoch(2)  # as loops for DistributedSampler call it
    assert some_batches(loader, 9) == [[8, 9]]
    loader.set_epoch(2)  # again, then: from its begin
    assert len(some_batches(loader, 9)) == 3
    loader.epochs_counted_elsewhere = True
    loader.set_epoch(3, 4)
    loader.set_epoch(7)
    assert (loader.epoch, loader.position) == (3, 4)


def test_without_step_the_log_says_that_no_checkpoint_is_made(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = Run("fetch ahead", tmp_path / "unmarked", 0, Cut(None))
    loader = checkflow.DataLoader(run.dataset, batch_size=BATCH)
    with caplog.at_level(logging.WARNING, "checkflow"):
        with checkflow.Checkpointer(run.model, run.optimizer, loader, directory=run.directory, every=1) as checkpointer:
            run.variables["checkpointer"] = checkpointer
            for batch in loader.as_torch():
                run.model(**batch)["loss"].backward()
                run.optimizer.step()
        assert checkpointer.report()["committed"] == 0
    assert "no checkpoint was made" in caplog.text
