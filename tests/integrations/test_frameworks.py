"""Other training frameworks with checkflow: killed anywhere and started again, jobs end bit for bit the same."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import callbacks

from checkflow.core.errors import UnsupportedError
from checkflow.integrations.lightning import CheckflowCallback
from checkflow.runtime.store.discovery import find
from checkflow.runtime.store.files import parse_step
from tests.support.jobs import KILLS
from tests.support.programs.framework_jobs import EPOCHS, JOBS, SAMPLES
from tests.support.waiting import wait_for

ROOT = Path(__file__).parents[2]


def run(name: str, folder: Path) -> list[int]:
    """How each life of a job ended."""
    command = [sys.executable, "-m", "tests.support.programs.framework_jobs", name, str(folder)]
    made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    ends = json.loads(made.stdout.splitlines()[-1])
    assert isinstance(ends, list)
    assert ends[0] == ends[-1] == 0, made.stderr
    return ends


def used(folder: Path, name: str) -> list[list[int]]:
    """The samples of each iteration; what was done again has replaced what it repeated."""
    rows: dict[int, list[int]] = {}
    for line in (folder / f"{name}.used").read_text().splitlines():
        iteration, samples = json.loads(line)
        rows[iteration] = samples
    return [rows[iteration] for iteration in sorted(rows)]


def assert_same(one: Any, other: Any, place: str = "") -> None:
    assert type(one) is type(other), place
    if isinstance(one, dict):
        assert one.keys() == other.keys(), place
        for key in one:
            assert_same(one[key], other[key], f"{place}.{key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), place
        for number, (left, right) in enumerate(zip(one, other, strict=True)):
            assert_same(left, right, f"{place}[{number}]")
    else:
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other, place


@pytest.mark.slow
@pytest.mark.parametrize("name", JOBS)
def test_killed_anywhere_and_asked_to_end_a_job_ends_the_same(name: str, tmp_path: Path) -> None:
    ends = run(name, tmp_path)
    assert ends[1:-2] == [-signal.SIGKILL] * KILLS
    assert ends[-2] == 75  # asked to end
    rows = used(tmp_path, "cut")
    assert rows == used(tmp_path, "whole")
    flat = [sample for row in rows for sample in row]
    for epoch in range(EPOCHS):
        assert sorted(flat[epoch * SAMPLES : (epoch + 1) * SAMPLES]) == list(range(SAMPLES))
    assert_same(*(torch.load(tmp_path / f"{name}.final", weights_only=True) for name in ("cut", "whole")))


def test_checkflow_imports_no_framework() -> None:
    frameworks = "{'lightning', 'transformers', 'accelerate', 'torchtitan'}"
    code = f"import sys, checkflow; checkflow.Checkpointer; sys.exit(bool({frameworks} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


@pytest.mark.parametrize("name", ["lightning", "transformers", "accelerate", "torchtitan"])
def test_a_missing_framework_is_one_line(name: str) -> None:
    code = f"import sys; sys.modules['{name}'] = None; import checkflow.integrations.{name}"
    made = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False, capture_output=True, text=True)
    says = f"ModuleNotFoundError: checkflow.integrations.{name} needs {name}: pip install 'checkflow[{name}]'"
    assert made.stderr.splitlines()[-1] == says


def fit(
    folder: Path,
    *,
    loader: Any = None,
    held_out: Any = None,
    ckpt_path: str | None = None,
    iterating: bool = False,
    **options: Any,
) -> tuple[Any, Any]:
    """A short fit of Lightning's in this process; returns its Trainer and the callback."""
    import lightning.pytorch as pl

    from checkflow.integrations.lightning import CheckflowCallback

    class Module(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(2, 1)

        def training_step(self, batch: Any, number: int) -> Any:
            loss = self.layer(batch).sum()
            self.log("loss", loss, on_step=False, on_epoch=True)
            if self.current_epoch in (0, 2) and number == 0:
                self.log("seldom", float(self.current_epoch), on_step=False, on_epoch=True)
            return loss

        def validation_step(self, batch: Any) -> None:
            """Nothing to see."""

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["epoch"] = -1  # replaces what was there
            checkpoint["seen"] = checkpoint["global_step"]

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            assert checkpoint["epoch"] == -1
            assert checkpoint["seen"] == checkpoint["global_step"]
            assert checkpoint["state_dict"].keys() == self.state_dict().keys()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    class Iterating(Module):
        def training_step(self, dataloader_iter: Any) -> Any:
            return self.layer(next(dataloader_iter)[0]).sum()

    callback = CheckflowCallback(folder, every=1, **options.pop("checkflow", {}))
    trainer = pl.Trainer(
        devices=1, logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[callback, *options.pop("callbacks", ())], **{"max_epochs": 2, "accelerator": "cpu", **options},
    )  # fmt: skip
    loader = torch.utils.data.DataLoader(torch.ones(6, 2), batch_size=2) if loader is None else loader
    trainer.fit(Iterating() if iterating else Module(), loader, held_out, ckpt_path=ckpt_path)
    return trainer, callback


def train(
    folder: Path, *act: Any, data: Any = None, every: int = 1, best: Any = None, **settings: Any
) -> tuple[Any, list[int]]:
    """A short training of Trainer's in this process; returns it, and the samples of each step."""
    import transformers

    from checkflow.integrations.transformers import attach

    used: list[int] = []

    class Callback(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            for one in act:
                one(state.global_step, control)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            used.extend(x.flatten().int().tolist())
            return {"loss": self.layer(x).sum()}

    arguments = transformers.TrainingArguments(
        output_dir=str(folder / "hf"), use_cpu=True, report_to=[], disable_tqdm=True, save_strategy="no",
        **{"per_device_train_batch_size": 2, **settings},
    )  # fmt: skip
    data = [{"x": torch.tensor([float(number)])} for number in range(6)] if data is None else data
    trainer = transformers.Trainer(Model(), arguments, train_dataset=data, eval_dataset=data, callbacks=[Callback()])
    attach(trainer, folder / "all", every=every, **(best or {}))
    trainer.train()
    return trainer, used


class Stream(torch.utils.data.IterableDataset[Any]):
    """Five batches of two, and no length."""

    def __iter__(self) -> Any:
        return iter([{"x": torch.tensor([float(number)])} for number in range(10)])


def fail_at(step: int) -> Any:
    def act(now: int, control: Any) -> None:
        if now == step:
            raise InterruptedError

    return act


@pytest.mark.slow
@pytest.mark.parametrize("accumulated", [1, 2])
@pytest.mark.parametrize("step", [5, 7])
def test_trainer_goes_on_in_data_without_a_length(step: int, accumulated: int, tmp_path: Path) -> None:
    settings = {"data": Stream(), "max_steps": 9, "gradient_accumulation_steps": accumulated}
    whole, used = train(tmp_path / "whole", **settings)
    with pytest.raises(InterruptedError):
        train(tmp_path / "cut", fail_at(step), **settings)
    again, rest = train(tmp_path / "cut", **settings)
    assert len(rest) < len(used)
    assert rest == used[-len(rest) :]
    assert again.state.global_step == whole.state.global_step == 9


@pytest.mark.slow
def test_a_finished_training_is_over_until_it_has_more_steps(tmp_path: Path) -> None:
    _, used = train(tmp_path / "whole", max_steps=8)
    _, first = train(tmp_path / "cut", max_steps=4)
    again, none = train(tmp_path / "cut", max_steps=4)
    assert (again.state.global_step, none) == (4, [])
    assert first + train(tmp_path / "cut", max_steps=8)[1] == used


def test_what_comes_after_the_last_step_is_no_state(tmp_path: Path) -> None:
    """Trainer adds up the losses twice then, and may load the best model."""
    import transformers

    finish = transformers.Trainer._finalize_training

    def spoil(self: Any, *arguments: Any) -> Any:
        torch.nn.init.zeros_(self.model.layer.weight)
        return finish(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformers.Trainer, "_finalize_training", spoil)
        first, _ = train(tmp_path, every=100, max_steps=4)
    again, used = train(tmp_path, every=100, max_steps=4)
    assert used == []
    assert again.model.layer.weight.item() != 0
    assert again._total_loss_scalar == first._total_loss_scalar


@pytest.mark.slow
def test_what_trainer_counts_in_a_step_s_batches_is_part_of_the_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Such as num_items_in_batch: no checkpoint has to hold it."""
    import transformers

    from checkflow.integrations.transformers import attach

    class Callback(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 20:
                wait_for(lambda: list((tmp_path / "all" / "plans").glob("*.json")))

    config = transformers.GPT2Config(vocab_size=10, n_positions=4, n_embd=4, n_layer=1, n_head=1)
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, report_to=[], max_steps=30, save_strategy="no", disable_tqdm=True
    )
    data = [{"input_ids": torch.tensor([1, 2, 3]), "labels": torch.tensor([1, 2, 3])}] * 20
    model = transformers.GPT2LMHeadModel(config)
    trainer = transformers.Trainer(model, arguments, train_dataset=data, callbacks=[Callback()])
    attach(trainer, tmp_path / "all", every=1)
    trainer.train()
    assert "carries" not in caplog.text


def test_a_training_that_stopped_early_is_over(tmp_path: Path) -> None:
    def stop(step: int, control: Any) -> None:
        control.should_training_stop = True

    train(tmp_path, stop, max_steps=4)
    again, used = train(tmp_path, max_steps=4)
    assert (again.state.global_step, used) == (1, [])


@pytest.mark.parametrize("changed", [{"per_device_train_batch_size": 1}, {"gradient_accumulation_steps": 2}])
def test_a_place_among_other_steps_is_refused(changed: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(InterruptedError):
        train(tmp_path, fail_at(3))
    with pytest.raises(UnsupportedError, match="where these arguments make other steps"):
        train(tmp_path, **changed)


def test_leaving_an_epoch_is_refused(tmp_path: Path) -> None:
    def leave(step: int, control: Any) -> None:
        control.should_epoch_stop = True

    with pytest.raises(UnsupportedError, match="should_epoch_stop leaves an epoch"):
        train(tmp_path, leave)


class Endless(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Any:
        while True:
            yield torch.ones(2)


LOADER = torch.utils.data.DataLoader(torch.ones(6, 2), batch_size=2)  # type: ignore[arg-type]
WRONG: dict[str, tuple[str, dict[str, Any]]] = {
    "several loaders": ("there are several training loaders", {"loader": [LOADER, LOADER]}),
    "no length": ("the training loader has no length", {"loader": torch.utils.data.DataLoader(Endless())}),
    "dataloader_iter": ("let it take batch", {"iterating": True}),
    "new loaders": ("reload_dataloaders_every_n_epochs=…", {"reload_dataloaders_every_n_epochs": 1}),
    "the same batches": ("overfit_batches=…", {"overfit_batches": 1}),
    "weight averaging": ("the callback EMAWeightAveraging changes", {"callbacks": [callbacks.EMAWeightAveraging()]}),
    "accumulation": (
        "the callback GradientAccumulationScheduler changes",
        {"callbacks": [callbacks.GradientAccumulationScheduler({1: 2})]},
    ),
    "twice": ("several CheckflowCallbacks", {"callbacks": [CheckflowCallback("other")]}),
    "FSDP 1": ("does not save what FSDPStrategy holds", {"strategy": "fsdp", "accelerator": "cuda"}),
}


@pytest.mark.parametrize("name", WRONG)
def test_lightning_used_wrongly(name: str, tmp_path: Path) -> None:
    message, options = WRONG[name]
    if "accelerator" in options and not torch.cuda.is_available():
        pytest.skip("Lightning's FSDPStrategy needs a GPU")
    with pytest.raises(UnsupportedError, match=re.escape(message).replace("…", ".*")):
        fit(tmp_path, **options)


def test_another_package_of_lightning_s_is_named() -> None:
    from checkflow.integrations.lightning import _refuse

    other = type("Trainer", (), {"__module__": "pytorch_lightning.trainer.trainer"})()
    with pytest.raises(UnsupportedError, match="one of pytorch_lightning, another package"):
        _refuse(other)


class At(callbacks.Callback):  # type: ignore[misc]
    """Does something before a batch of an epoch."""

    def __init__(self, epoch: int, batch: int, act: Any) -> None:
        self.place, self.act = (epoch, batch), act

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, number: int) -> None:
        if (trainer.current_epoch, number) == self.place:
            self.act(trainer)


def fail(trainer: Any) -> None:
    raise InterruptedError


def test_sums_of_an_epoch_before_a_resume_count_in_no_later_one(tmp_path: Path) -> None:
    with pytest.raises(InterruptedError):
        fit(tmp_path, max_epochs=3, callbacks=[At(0, 2, fail)])
    trainer, callback = fit(tmp_path, max_epochs=3)
    assert callback.checkpointer.resumed_from in (1, 2)
    assert trainer.callback_metrics["seldom"] == 2


def test_the_best_by_what_lightning_s_validation_logs_is_kept(tmp_path: Path) -> None:
    import lightning.pytorch as pl

    class Validation(pl.Callback):  # type: ignore[misc]
        def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            pl_module.log("quality", (0.5, 0.9, 0.1)[trainer.current_epoch])

    best = {"keep_best": 1, "monitor": "quality", "mode": "max"}
    fit(tmp_path / "a", max_epochs=3, callbacks=[Validation()], held_out=LOADER, checkflow=best)
    assert [parse_step(path.name) for path in find(tmp_path / "a")] == [9, 8, 6]
    best["monitor"] = "seldom"  # a mean that training logs is known after validation, and of the epoch before then
    fit(tmp_path / "b", max_epochs=3, callbacks=[Validation()], held_out=LOADER, checkflow=best)
    assert [parse_step(path.name) for path in find(tmp_path / "b")] == [9, 8]


def test_the_best_by_what_trainer_evaluates_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers
    from transformers.trainer_utils import EvalLoopOutput

    values = iter((0.5, 0.9, 0.1))
    monkeypatch.setattr(
        transformers.Trainer, "evaluation_loop",
        lambda *_, **__: EvalLoopOutput(None, None, {"eval_quality": next(values)}, 1),
    )  # fmt: skip
    best = {"keep_best": 1, "monitor": "eval_quality", "mode": "max"}
    train(tmp_path, best=best, num_train_epochs=3, eval_strategy="epoch")
    assert [parse_step(path.name) for path in find(tmp_path / "all")] == [9, 8, 6]


def test_a_fit_that_a_limit_ended_goes_on_and_one_that_stopped_early_does_not(tmp_path: Path) -> None:
    def stop(trainer: Any) -> None:
        trainer.should_stop = True

    fit(tmp_path / "limit", callbacks=[At(0, 1, stop)])
    assert fit(tmp_path / "limit")[0].global_step == 6
    early = [fit(tmp_path / "early", max_epochs=9, callbacks=[
        callbacks.EarlyStopping("loss", patience=1, mode="max", check_on_train_epoch_end=True)
    ])[0].global_step for _ in range(2)]  # fmt: skip
    assert early == [6, 6]


def test_lightning_s_own_checkpoint_beside_ours(tmp_path: Path) -> None:
    trainer, _ = fit(tmp_path / "one")
    trainer.save_checkpoint(tmp_path / "some.ckpt")
    with pytest.raises(UnsupportedError, match="leave ckpt_path out"):
        fit(tmp_path / "other", ckpt_path=str(tmp_path / "some.ckpt"))


def test_lightning_takes_options_of_the_checkpointer_alone(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="no option evry"):
        fit(tmp_path, checkflow={"evry": 3})


def test_a_longer_fit_goes_on_within_its_epoch(tmp_path: Path) -> None:
    """Lightning ends the epoch in which max_steps are reached; more steps use what is left of it."""
    for steps, resumed in ((4, None), (4, 4), (6, 4)):
        trainer, callback = fit(tmp_path, max_epochs=-1, max_steps=steps)
        assert callback.checkpointer.resumed_from == resumed
        assert (trainer.global_step, callback.checkpointer.iteration) == (steps, steps)
    assert (trainer.current_epoch, callback.checkpointer.loader.epoch) == (2, 2)


@pytest.mark.parametrize(
    ("version", "tensor_parallel", "message"), [(1, 1, "what FSDP 1 holds"), (2, 2, "their ranks share samples")]
)
def test_parallelism_of_accelerate_s(version: int, tensor_parallel: int, message: str) -> None:
    from accelerate import DistributedType, ParallelismConfig

    from checkflow.integrations.accelerate import refuse_parallelism

    parallelism = ParallelismConfig(tp_size=tensor_parallel)
    one: Any = SimpleNamespace(
        distributed_type=DistributedType.FSDP, is_fsdp2=version == 2, parallelism_config=parallelism
    )
    with pytest.raises(UnsupportedError, match=message):
        refuse_parallelism(one)


def test_accelerate_used_wrongly(tmp_path: Path) -> None:
    from accelerate import Accelerator

    from checkflow.integrations.accelerate import checkpointer_of

    accelerator = Accelerator(cpu=True)
    with pytest.raises(UnsupportedError, match="has prepared no model"):
        checkpointer_of(accelerator, directory=tmp_path)
    _, loader = accelerator.prepare(torch.nn.Linear(2, 1), LOADER)
    with pytest.raises(UnsupportedError, match=re.escape("loader = checkflow.resumable(loader), and prepare that")):
        checkpointer_of(accelerator, loader, directory=tmp_path)


@pytest.mark.parametrize(
    ("settings", "resume", "message"),
    [
        ({}, "some", "leave it out; checkflow goes on from its own directory"),
        ({"ignore_data_skip": True}, None, "would use samples again"),
        ({"auto_find_batch_size": True}, None, "auto_find_batch_size"),
        ({"eval_on_start": True}, None, "eval_on_start"),
        ({"accelerator_config": {"split_batches": True}}, None, "split_batches: leave it out"),
    ],
)
def test_trainer_used_wrongly(settings: dict[str, Any], resume: str | None, message: str, tmp_path: Path) -> None:
    import transformers

    from checkflow.integrations.transformers import attach

    arguments = transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[], **settings)
    trainer = transformers.Trainer(torch.nn.Linear(2, 1), arguments, train_dataset=torch.ones(6, 2))
    with pytest.raises(UnsupportedError, match=message):
        attach(trainer, tmp_path)
        trainer.train(resume_from_checkpoint=resume)


def test_trainer_is_attached_once(tmp_path: Path) -> None:
    import transformers

    from checkflow.integrations.transformers import attach

    arguments = transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[])
    trainer = transformers.Trainer(torch.nn.Linear(2, 1), arguments, train_dataset=torch.ones(6, 2))
    attach(trainer, tmp_path)
    with pytest.raises(UnsupportedError, match="attached already"):
        attach(trainer, tmp_path)
