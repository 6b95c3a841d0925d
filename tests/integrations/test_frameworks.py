"""Other training frameworks with checkflow: killed anywhere and started again, jobs end bit for bit the same."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from checkflow.core.errors import UnsupportedError
from tests.support.programs.framework_jobs import EPOCHS, JOBS, SAMPLES

ROOT = Path(__file__).parents[2]


def run(name: str, folder: Path, kills: int) -> list[int]:
    """How each life of a job ended."""
    command = [sys.executable, "-m", "tests.support.programs.framework_jobs", name, str(folder), str(kills)]
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


@pytest.mark.parametrize("kills", [2, pytest.param(30, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", JOBS)
def test_killed_anywhere_and_asked_to_end_a_job_ends_the_same(name: str, kills: int, tmp_path: Path) -> None:
    ends = run(name, tmp_path, kills)
    assert ends[1:-2] == [-signal.SIGKILL] * kills
    assert ends[-2] == 75  # asked to end
    rows = used(tmp_path, "cut")
    assert rows == used(tmp_path, "whole")
    flat = [sample for row in rows for sample in row]
    for epoch in range(EPOCHS):
        assert sorted(flat[epoch * SAMPLES : (epoch + 1) * SAMPLES]) == list(range(SAMPLES))
    assert_same(*(torch.load(tmp_path / f"{name}.final") for name in ("cut", "whole")))


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
    folder: Path, *, loader: Any = None, ckpt_path: str | None = None, iterating: bool = False, **options: Any
) -> tuple[Any, Any]:
    """A short fit of Lightning's in this process; returns its Trainer and the callback."""
    import lightning.pytorch as pl

    from checkflow.integrations.lightning import CheckflowCallback

    class Module(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(2, 1)

        def training_step(self, batch: Any, number: int) -> Any:
            return self.layer(batch).sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    class Iterating(Module):
        def training_step(self, dataloader_iter: Any) -> Any:
            return self.layer(next(dataloader_iter)[0]).sum()

    callback = CheckflowCallback(folder, every=1, **options.pop("checkflow", {}))
    trainer = pl.Trainer(
        devices=1, logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[callback], **{"max_epochs": 2, "accelerator": "cpu", **options},
    )  # fmt: skip
    loader = torch.utils.data.DataLoader(torch.ones(6, 2), batch_size=2) if loader is None else loader
    trainer.fit(Iterating() if iterating else Module(), loader, ckpt_path=ckpt_path)
    return trainer, callback


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
    "FSDP 1": ("does not save what FSDPStrategy holds", {"strategy": "fsdp", "accelerator": "cuda"}),
}


@pytest.mark.parametrize("name", WRONG)
def test_lightning_used_wrongly(name: str, tmp_path: Path) -> None:
    message, options = WRONG[name]
    if "accelerator" in options and not torch.cuda.is_available():
        pytest.skip("Lightning's FSDPStrategy needs a GPU")
    with pytest.raises(UnsupportedError, match=re.escape(message).replace("…", ".*")):
        fit(tmp_path, **options)


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
