"""A training script that goes on where it was killed: a small convolutional network on handwritten digits.

The lines that checkflow added to the script end in ``# checkflow``; without ``--directory`` it runs without
checkpoints. Its journal says what it did, and when: by that ``checkflow demo`` proves that no sample was lost.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

import checkflow  # checkflow
from checkflow.models.digits import DigitsNet
from checkflow.torture.journal import Journal

BATCH_SIZE = 32
TRAINING_SHARE = 0.8
NOISE = 0.05  # standard deviation of the augmentation; pixels lie in 0 … 1

Sample = tuple[torch.Tensor, int, int]  # image 1,8,8; label; index in the data set


class Digits(Dataset[Sample]):
    """UCI's digits (digits.md): the first share of them for training, with random noise, or the rest for validation."""

    def __init__(self, *, training: bool) -> None:
        with np.load(Path(__file__).with_name("digits.npz")) as data:
            images, labels = data["images"], data["labels"]
        border = int(len(labels) * TRAINING_SHARE)
        chosen = slice(0, border) if training else slice(border, None)
        self.images = torch.from_numpy((images[chosen] / 16).astype(np.float32)).unsqueeze(1)
        self.labels = [int(label) for label in labels[chosen]]
        self.training = training

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Sample:
        image = self.images[index]
        if self.training:
            image = image + NOISE * torch.randn_like(image)
        return image, self.labels[index], index


class DigitsTraining:
    """Model, optimizer, scheduler, and an epoch of training and validation with them."""

    def __init__(self, journal: Journal) -> None:
        self.model = DigitsNet()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=1, gamma=0.7)
        self.validation = DataLoader(Digits(training=False), batch_size=BATCH_SIZE)
        self._journal, self._iteration = journal, 0

    def begin(self, iteration: int) -> None:
        self._iteration = iteration
        self._journal.write("start", iteration=iteration)

    def epoch(self, number: int, batches: Iterable[Any]) -> None:
        self.model.train()
        for images, labels, indices in batches:
            self.optimizer.zero_grad()
            F.cross_entropy(self.model(images), labels).backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
            self._journal.write(
                "step",
                iteration=self._iteration,
                epoch=number,
                samples=indices.tolist(),
                at_seconds=time.perf_counter(),
            )
            self._iteration += 1
        self._journal.write("validation", epoch=number)
        self._journal.write("validated", epoch=number, accuracy=self.accuracy())
        self.scheduler.step()

    @torch.no_grad()
    def accuracy(self) -> float:
        """Share of the validation set that is recognised."""
        self.model.eval()
        right = sum(int((self.model(images).argmax(1) == labels).sum()) for images, labels, _ in self.validation)
        return right / len(self.validation.dataset)  # type: ignore[arg-type]

    def save(self, path: Path) -> None:
        """Weights, buffers and optimizer state, as they are, for comparison."""
        from safetensors.torch import save_file

        tensors = {f"model.{key}": value for key, value in self.model.state_dict().items()}
        for index, state in self.optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{index}.{key}": value for key, value in state.items()}
        save_file(tensors, path)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m checkflow.demo.training", description=__doc__.partition("\n")[0])
    parser.add_argument("--directory", type=Path, help="where checkpoints go; without it there are none")
    parser.add_argument("--plan", type=Path, help="the plan file, made by: checkflow plan digits --device cpu -o FILE")
    parser.add_argument("--journal", type=Path, required=True, help="what happened is appended to this file")
    parser.add_argument("--result", type=Path, help="the final state goes to this safetensors file")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()

    torch.manual_seed(arguments.seed)
    torch.use_deterministic_algorithms(True)
    # Threads that compute together wait for each other, busily, whenever something else needs one of few cores.
    torch.set_num_threads(1)
    journal = Journal(arguments.journal)
    job = DigitsTraining(journal)
    loader = checkflow.DataLoader(Digits(training=True), batch_size=BATCH_SIZE, shuffle=True, seed=arguments.seed)
    if arguments.directory is None:
        job.begin(0)
        for epoch in range(arguments.epochs):
            job.epoch(epoch, loader)
        journal.write("end")
    else:
        with checkflow.Checkpointer(  # checkflow
            job.model,  # checkflow
            job.optimizer,  # checkflow
            loader,  # checkflow
            directory=arguments.directory,  # checkflow
            plan=arguments.plan,  # checkflow
            state={"scheduler": job.scheduler},  # checkflow
            every=1,  # checkflow
        ) as checkpointer:  # checkflow
            job.begin(checkpointer.iteration)
            for epoch in checkpointer.epochs(arguments.epochs):  # checkflow
                job.epoch(epoch, checkpointer.loader)  # checkflow
        journal.write("end", report=checkpointer.report())
    if arguments.result is not None:
        job.save(arguments.result)


if __name__ == "__main__":
    main()
