"""Small jobs of other training frameworks, with checkflow, that kill themselves: ``framework_jobs NAME FOLDER``.

A framework is imported once, and each life of a job is a fork. Lives are killed at each place in turn, the how manieth
time by chance: where a sample is fetched, in a forward pass, in validation, after an optimizer's step.
``<folder>/whole`` has the uninterrupted job.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader, Dataset

from tests.support.jobs import KILLS

SAMPLES, BATCH = 18, 4
EPOCHS = KILLS + 6  # iterations for as many kills
PLACES = ("fetch", "forward", "evaluate", "step")
Cut = tuple[str, int, int] | None  # where, the how manieth time in this life, which signal


class Life:
    """One life: counts places, and writes down what each optimizer's step used."""

    def __init__(self, folder: Path, cut: Cut) -> None:
        self.folder, self.cut, self.waiting, self.counts = folder, cut, list[int](), dict[str, int]()
        self.iteration: Callable[[], int] = lambda: 0

    def at(self, place: str) -> None:
        self.counts[place] = count = self.counts.get(place, 0) + 1
        if self.cut is not None and self.cut[:2] == (place, count):
            os.kill(os.getpid(), self.cut[2])

    def stepped(self, *_: Any) -> None:
        with open(f"{self.folder}.used", "a") as file:
            file.write(json.dumps([self.iteration(), self.waiting]) + "\n")
        self.waiting = []
        self.at("step")

    def end(self, model: nn.Module, optimizers: list[torch.optim.Optimizer], **more: Any) -> None:
        state = {"model": model.state_dict(), "optimizers": [one.state_dict() for one in optimizers], **more}
        torch.save(state, f"{self.folder}.final")


class Samples(Dataset[Any]):
    """Augmented by random numbers; each tells its index."""

    def __init__(self, life: Life, size: int = SAMPLES) -> None:
        generator = torch.Generator().manual_seed(5)
        self.life, self.x = life, torch.randn(size, 8, generator=generator)
        self.y = torch.randint(0, 5, (size,), generator=generator)

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.life.at("fetch")
        return {"x": self.x[index] + 0.1 * torch.randn(8), "labels": self.y[index], "index": index}


class Net(nn.Module):
    """With dropout, which draws numbers, and batch norm, which keeps some."""

    def __init__(self, life: Life) -> None:
        super().__init__()
        self.life = life
        self.body = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 5))

    def forward(self, x: torch.Tensor, labels: torch.Tensor, index: torch.Tensor) -> dict[str, torch.Tensor]:
        if self.training:
            self.life.waiting += index.tolist()
        self.life.at("forward" if self.training else "evaluate")
        logits = self.body(x)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def lightning(life: Life, seed: int, *, manual: bool = False) -> None:
    import logging

    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import EarlyStopping

    from checkflow.integrations.lightning import CheckflowCallback

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Module(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net, self.automatic_optimization = Net(life), not manual
            self.logged: list[Any] = []

        def training_step(self, batch: Any, number: int) -> Any:
            loss = self.net(**batch)["loss"]
            self.log("loss", loss, on_step=True, on_epoch=True)
            if not manual:
                return loss
            one, other = self.optimizers()
            one.zero_grad()
            other.zero_grad()
            self.manual_backward(loss)
            one.step()
            if number % 2:
                other.step()
            return None

        def on_train_epoch_start(self) -> None:
            with torch.no_grad():
                self.net.body[0].weight.mul_(1 + 0.01 * torch.rand(()))

        def validation_step(self, batch: Any, number: int) -> None:
            self.log("val_loss", self.net(**batch)["loss"])

        def configure_optimizers(self) -> Any:
            if manual:
                one = torch.optim.Adam(self.net.body[0].parameters(), lr=0.01)
                return [one, torch.optim.SGD(self.net.body[4].parameters(), lr=0.1, momentum=0.9)]
            one = torch.optim.Adam(self.parameters(), lr=0.01)
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(one, factor=0.9, patience=0)
            return {"optimizer": one, "lr_scheduler": {"scheduler": plateau, "monitor": "loss_epoch"}}

    module = Module()
    callback = CheckflowCallback(directory=life.folder, every=1)
    trainer = pl.Trainer(
        max_epochs=EPOCHS, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
        callbacks=[EarlyStopping("val_loss", patience=99), callback],
        accumulate_grad_batches=1 if manual else 2, val_check_interval=2,
    )  # fmt: skip
    life.iteration = lambda: callback.checkpointer.iteration  # type: ignore[union-attr]
    register_optimizer_step_post_hook(
        lambda optimizer, *_: life.stepped() if optimizer is trainer.optimizers[0] else None
    )
    trainer.fit(
        module, DataLoader(Samples(life), BATCH, shuffle=True), DataLoader(Samples(Life(life.folder, None), 6), 3)
    )
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    life.end(module, trainer.optimizers, metrics=metrics, step=trainer.global_step, epoch=trainer.current_epoch)


def lightning_manual(life: Life, seed: int) -> None:
    lightning(life, seed, manual=True)


def transformers(life: Life, seed: int) -> None:
    import transformers as hf

    from checkflow.integrations.transformers import attach

    model = Net(life)
    arguments = hf.TrainingArguments(
        output_dir=f"{life.folder}.hf", num_train_epochs=EPOCHS, per_device_train_batch_size=BATCH, report_to=[],
        gradient_accumulation_steps=2, save_strategy="no", eval_strategy="steps", eval_steps=4, logging_steps=3,
        use_cpu=True, disable_tqdm=True, remove_unused_columns=False, label_names=["labels"], seed=seed,
        learning_rate=0.01, metric_for_best_model="eval_loss",
    )  # fmt: skip
    trainer = hf.Trainer(
        model, arguments, train_dataset=Samples(life), eval_dataset=Samples(Life(life.folder, None), 6),
        callbacks=[hf.EarlyStoppingCallback(99)],
    )  # fmt: skip
    life.iteration = lambda: trainer.state.global_step
    register_optimizer_step_post_hook(life.stepped)
    attach(trainer, life.folder, every=1)
    trainer.train()
    kept = ("loss", "eval_loss", "learning_rate", "step", "epoch")
    logged = [{name: row[name] for name in kept if name in row} for row in trainer.state.log_history]
    life.end(model, [trainer.optimizer], logged=logged)


def accelerate(life: Life, seed: int) -> None:
    from accelerate import Accelerator

    import checkflow
    from checkflow.integrations.accelerate import checkpointer_of

    accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True)
    model = Net(life)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    optimizer.register_step_post_hook(life.stepped)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)
    loader = checkflow.resumable(DataLoader(Samples(life), BATCH, shuffle=True))
    model, stepped, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    with checkpointer_of(accelerator, loader, directory=life.folder, every=1) as checkpointer:
        life.iteration = lambda: checkpointer.iteration
        for _ in checkpointer.epochs(EPOCHS):
            for batch in checkpointer.loader:
                with accelerator.accumulate(model):
                    accelerator.backward(model(**batch)["loss"])
                    stepped.step()
                    scheduler.step()
                    stepped.zero_grad()
    life.end(model, [optimizer], rate=scheduler.get_last_lr())


JOBS: dict[str, Callable[[Life, int], None]] = {
    "lightning": lightning,
    "lightning_manual": lightning_manual,
    "transformers": transformers,
    "accelerate": accelerate,
}


def live(name: str, folder: Path, seed: int, cut: Cut) -> int:
    """One life, in a fork; returns its exit code, or the signal as a negative number."""
    if child := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    code = 1
    try:
        torch.manual_seed(seed)
        random.seed(seed)
        JOBS[name](Life(folder, cut), seed)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:  # noqa: BLE001 - a fork must not go on as its parent
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        os._exit(code)


def main(name: str, folder: Path) -> None:
    """Prints how each life ended, as JSON."""
    torch.set_num_threads(1)
    for module in ("lightning.pytorch", "transformers.trainer", "accelerate"):
        if module.startswith(name.partition("_")[0]):
            importlib.import_module(module)
    importlib.import_module("torch._dynamo")  # as an optimizer's first step does, in each life
    draw = random.Random(name)
    ends = [live(name, folder / "whole", 0, None)]
    places = [place for place in draw.sample(PLACES, len(PLACES)) if (name, place) != ("accelerate", "evaluate")]
    for kill in range(KILLS):
        place = places[kill % len(places)]
        count = draw.randint(1, 5) * (4 if place == "fetch" else 1)
        begun = any((folder / "cut").glob("step-*"))  # otherwise the next life is a new job, of its own seed
        ends.append(live(name, folder / "cut", len(ends) if begun else 0, (place, count, signal.SIGKILL)))
    ends.append(live(name, folder / "cut", 98, ("step", 2, signal.SIGTERM)))
    ends.append(live(name, folder / "cut", 99, None))
    sys.stdout.write(json.dumps(ends) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
