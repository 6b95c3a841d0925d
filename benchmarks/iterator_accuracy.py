"""CheckFreq's figure 6, in small, on this CPU: what a loader that cannot resume does to an epoch, and to accuracy.

A small network learns digits uninterrupted, interrupted with torch's loader, which shuffles anew, and interrupted by
SIGTERM and resumed by checkflow. The uninterrupted run takes its batches from checkflow's loader, too.
"""

from __future__ import annotations

import argparse
import collections
import copy
import functools
import json
import os
import random
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

import checkflow
from benchmarks.ways import own_plan

DIGITS = Path(checkflow.__file__).parent / "demo" / "digits.npz"
BATCH, NOISE = 32, 0.1  # noise: standard deviation, of pixels in 0 … 1
OVERHEAD = 0.035
EVERY_EPOCHS = 2  # from one interruption to the next
Cuts = Mapping[int, int]  # by epoch, how many of its iterations are made before the interruption
Weights = dict[str, torch.Tensor]


class Digits(Dataset[Any]):
    """Every second digit for training, each shifted by up to one pixel and with noise; the others as they are."""

    def __init__(self, *, training: bool) -> None:
        with np.load(DIGITS) as data:
            images, labels = data["images"], data["labels"]
        chosen = slice(0 if training else 1, None, 2)
        self.images = torch.from_numpy(images[chosen]).float().div(16).unsqueeze(1)
        self.labels = torch.from_numpy(labels[chosen]).long()
        self.training = training

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        image = self.images[index]
        if self.training:
            down, right = torch.randint(-1, 2, (2,)).tolist()
            image = torch.roll(image, (down, right), dims=(1, 2)) + NOISE * torch.randn_like(image)
        return image, self.labels[index], index


class Net(nn.Module):
    """Images B,1,8,8 to logits B,10, with batch norm and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
            *(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)),
        )
        self.classifier = nn.Sequential(nn.Flatten(), nn.Dropout(0.2), nn.Linear(32 * 4 * 4, 10))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.classifier(self.features(images))
        return logits


@dataclass
class Record:
    """What a run did, over all its interruptions."""

    epochs: int
    used: dict[int, tuple[int, list[int]]] = field(default_factory=dict)  # by iteration: its epoch, its samples
    accuracy: dict[int, float] = field(default_factory=dict)  # by epoch, after it
    weights: Weights = field(default_factory=dict)
    starts: int = 0

    def irregular(self, samples: int) -> tuple[int, int]:
        """How many samples were repeated in an epoch, and how many missed, over all epochs."""
        repeated = missed = 0
        for epoch in range(self.epochs):
            counts = collections.Counter(index for at, row in self.used.values() if at == epoch for index in row)
            repeated += sum(count - 1 for count in counts.values())
            missed += samples - len(counts)
        return repeated, missed


class Job:
    """All that a training script makes before its loop."""

    def __init__(self, seed: int, record: Record) -> None:
        torch.manual_seed(seed)
        self.record = record
        record.starts += 1
        self.model = Net()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=3e-3)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, record.epochs)
        self.data, self.held_out = Digits(training=True), Digits(training=False)
        self.model.train()

    def iterate(self, iteration: int, epoch: int, batch: Any) -> None:
        images, labels, indices = batch
        self.optimizer.zero_grad()
        F.cross_entropy(self.model(images), labels).backward()
        self.optimizer.step()
        self.record.used[iteration] = epoch, indices.tolist()

    def end_epoch(self, epoch: int) -> None:
        self.scheduler.step()
        self.model.eval()
        with torch.no_grad():
            right = (self.model(self.held_out.images).argmax(1) == self.held_out.labels).sum()
        self.model.train()
        self.record.accuracy[epoch] = int(right) / len(self.held_out)

    def end(self) -> None:
        self.record.weights = {f"model.{name}": value for name, value in self.model.state_dict().items()}
        for number, values in self.optimizer.state_dict()["state"].items():
            self.record.weights |= {f"optimizer.{number}.{key}": value for key, value in values.items()}


def uninterrupted(seed: int, epochs: int, _cuts: Cuts) -> Record:
    record = Record(epochs)
    job = Job(seed, record)
    loader = checkflow.DataLoader(job.data, batch_size=BATCH, shuffle=True)
    for epoch in range(epochs):
        for batch in loader:
            job.iterate(len(record.used), epoch, batch)
        job.end_epoch(epoch)
    job.end()
    return record


def plain(seed: int, epochs: int, cuts: Cuts) -> Record:
    """Saves at the iteration right before the interruption, and knows its number, as CheckFreq's baseline does."""
    record = Record(epochs)
    saved: dict[str, Any] | None = None
    while True:
        job = Job(seed + 1000 * record.starts, record)
        parts = {"model": job.model, "optimizer": job.optimizer, "scheduler": job.scheduler}
        loader = DataLoader(job.data, batch_size=BATCH, shuffle=True)
        if saved is not None:
            for name, part in parts.items():
                part.load_state_dict(saved[name])  # type: ignore[attr-defined]
        first = divmod(len(record.used), len(loader))
        saved = None
        for epoch in range(first[0], epochs):
            left = len(loader) - (first[1] if epoch == first[0] else 0)
            for batch, _ in zip(loader, range(left), strict=False):
                job.iterate(len(record.used), epoch, batch)
                if len(record.used) == epoch * len(loader) + cuts.get(epoch, 0):
                    saved = {name: copy.deepcopy(part.state_dict()) for name, part in parts.items()}  # type: ignore[attr-defined]
                    break
            if saved is not None:
                break
            job.end_epoch(epoch)
        if saved is None:
            job.end()
            return record


def with_checkflow(plan: checkflow.Plan, seed: int, epochs: int, cuts: Cuts) -> Record:
    record = Record(epochs)
    with tempfile.TemporaryDirectory() as directory:
        while len(record.accuracy) < epochs:
            job = Job(seed + 1000 * record.starts, record)
            try:
                _train(job, directory, plan, cuts)
            except checkflow.Preempted:
                if divmod(len(record.used), -(-len(job.data) // BATCH)) not in cuts.items():
                    raise  # somebody else has asked this process to end
                continue
            job.end()
    return record


def _train(job: Job, directory: str, plan: checkflow.Plan, cuts: Cuts) -> None:
    loader = checkflow.DataLoader(job.data, batch_size=BATCH, shuffle=True)
    with checkflow.Checkpointer(
        job.model, job.optimizer, loader, directory=directory, plan=plan, state={"scheduler": job.scheduler},
        on_error="raise",
    ) as checkpointer:  # fmt: skip
        for epoch in checkpointer.epochs(job.record.epochs):
            for batch in checkpointer.loader:
                iteration = checkpointer.iteration
                job.iterate(iteration, epoch, batch)
                if iteration + 1 == epoch * len(loader) + cuts.get(epoch, 0):
                    os.kill(os.getpid(), signal.SIGTERM)
            job.end_epoch(epoch)


def make_plan() -> checkflow.Plan:
    """As the job makes its own."""
    job = Job(0, Record(1))
    images, labels = job.data.images[:BATCH], job.data.labels[:BATCH]
    step = checkflow.TrainingStep(
        job.model, job.optimizer, loss=lambda model, x, y: F.cross_entropy(model(x), y), batch=(images, labels)
    )
    with tempfile.TemporaryDirectory() as directory:
        return own_plan(step, Path(directory), OVERHEAD)


def make_cuts(seed: int, epochs: int) -> dict[int, int]:
    """Interruptions in the middle of every second epoch, none of them at its begin or its end."""
    chosen = random.Random(seed)
    iterations = -(-len(Digits(training=True)) // BATCH)
    return {epoch: chosen.randrange(1, iterations) for epoch in range(1, epochs, EVERY_EPOCHS)}


def same(one: Weights, other: Weights) -> bool:
    """Whether all tensors have the same bits."""
    return one.keys() == other.keys() and all(
        value.numpy().tobytes() == other[name].numpy().tobytes() for name, value in one.items()
    )


def measure(seeds: Iterable[int], epochs: int) -> dict[str, list[dict[str, Any]]]:
    """By way, a row for each seed."""
    samples = len(Digits(training=True))
    ways: dict[str, Callable[[int, int, Cuts], Record]] = {
        "uninterrupted": uninterrupted,
        "plain": plain,
        "checkflow": functools.partial(with_checkflow, make_plan()),
    }
    rows: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
    for seed in seeds:
        truth: Weights = {}
        for way, train in ways.items():
            begun = time.perf_counter()
            record = train(seed, epochs, make_cuts(seed, epochs))
            truth = truth or record.weights
            repeated, missed = record.irregular(samples)
            rows[way].append(
                {
                    "seed": seed,
                    "interruptions": record.starts - 1,
                    "repeated": repeated,
                    "missed": missed,
                    "identical": same(record.weights, truth),
                    "accuracy_by_epoch": [record.accuracy[epoch] for epoch in range(epochs)],
                    "seconds": time.perf_counter() - begun,
                }
            )
    return rows


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of one way, over all seeds."""
    accuracies = [row["accuracy_by_epoch"][-1] for row in rows]
    return {
        "accuracy_mean": statistics.fmean(accuracies),
        "accuracy_deviation": statistics.stdev(accuracies) if len(accuracies) > 1 else None,
        "accuracy_least": min(accuracies),
        "accuracy_most": max(accuracies),
        "interruptions_mean": statistics.fmean(row["interruptions"] for row in rows),
        "repeated_mean": statistics.fmean(row["repeated"] for row in rows),
        "missed_mean": statistics.fmean(row["missed"] for row in rows),
        "identical_runs": sum(row["identical"] for row in rows),
        "seconds": sum(row["seconds"] for row in rows),
    }


def lines_of(summaries: Mapping[str, Mapping[str, Any]], runs: int) -> Iterable[str]:
    """The table."""
    yield (
        f"{'way':14} {'accuracy':>9} {'deviation':>9} {'least':>7} {'most':>7} {'interrupted':>11} "
        f"{'repeated':>8} {'missed':>7} identical"
    )
    for way, row in summaries.items():
        deviation = "-" if row["accuracy_deviation"] is None else f"{row['accuracy_deviation']:.2%}"
        yield (
            f"{way:14} {row['accuracy_mean']:9.2%} {deviation:>9} {row['accuracy_least']:7.2%} "
            f"{row['accuracy_most']:7.2%} {row['interruptions_mean']:11g} {row['repeated_mean']:8.1f} "
            f"{row['missed_mean']:7.1f} {row['identical_runs']} of {runs}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=20)
    results = Path(__file__).parent / "results" / "iterator-accuracy.json"
    parser.add_argument("--output", type=Path, default=results)
    chosen = parser.parse_args()
    if chosen.seeds < 1 or chosen.epochs < EVERY_EPOCHS:
        parser.error(f"it takes one seed and {EVERY_EPOCHS} epochs at least")
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    rows = measure(range(chosen.seeds), chosen.epochs)
    summaries = {way: summary(of_way) for way, of_way in rows.items()}
    for line in lines_of(summaries, chosen.seeds):
        print(line)
    samples = len(Digits(training=True))
    print(f"{chosen.seeds} runs of {chosen.epochs} epochs with {samples} samples, {BATCH} a batch; tested on the rest")
    content = {"epochs": chosen.epochs, "samples": samples, "batch_size": BATCH, "ways": summaries, "runs": rows}
    chosen.output.write_text(json.dumps(content, indent=2) + "\n")
    regular = summaries["checkflow"]
    if regular["repeated_mean"] or regular["missed_mean"] or regular["identical_runs"] < chosen.seeds:
        raise SystemExit("checkflow's runs are not those that nobody interrupted")


if __name__ == "__main__":
    main()
