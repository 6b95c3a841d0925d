"""What the resumable loader costs: its throughput against torch's own, and the time to skip to a position.

``python benchmarks/loader_throughput.py [--only image-1ms …] [--batch-sizes 1 32 256] [--workers 0 4] [--rounds 9]
[--seconds 0.5] [--output FILE]``: a table, and the same as JSON in FILE, by default
benchmarks/results/loader-throughput-<cores>-cores.json.

Items:

- image-1ms, image-5ms: a compressed image is unpacked and cut into random views, flipped, with other contrast, as float
  tensors: so many views that an item costs at least 1 and 5 ms here, with what it draws from Python's and NumPy's and
  torch's generators.
- wait-1ms: an item that waits for 1 ms, as for storage.
- tensors: a ``TensorDataset``. own-tensors: the same in a class of the user's own, of which nobody knows that it draws
  no numbers.

Each case has one torch loader and one of ours, shuffled, with workers that stay; each loads an epoch that is not
counted, and then, round by round, one after the other, in turns the first, an epoch of some ``--seconds`` (of at least
two batches, and one for each worker). A figure is the median of the rounds; "of torch's" is the median of the rounds'
ratios, "added" that of their differences. Two targets: at least 97 % of torch's throughput where an item costs 1 ms or
more, and at most 10 µs a sample beyond torch's where items are only tensors. Which rows meet theirs is told.
"added CPU" is the same difference of the CPU's time, of the workers too (to 10 ms an epoch): other work on the machine
changes it less.

"skip" is a shuffled data set of 1,280,000 samples of which nothing is loaded before the position: the seconds from
``iter`` to the first batch at the begin, in the middle and before the end, torch's at the begin beside it, and the
memory that the order takes.

Let nothing else run meanwhile.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import platform
import random
import statistics
import time
import warnings
import zlib
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import TensorDataset

import checkflow

LEAST_SHARE = 0.97  # of torch's throughput, where an item costs LONG_SECONDS or more
LONG_SECONDS = 1e-3
MOST_ADDED_SECONDS = 10e-6  # a sample, where items are only tensors
SIDE, VIEW, FEATURES = 96, 64, 16
POSITIONS = (0, 640_000, 1_279_872)
ORDER = 1_280_000


class Images:
    """Compressed images, each cut into random views.

    Args:
        views: of one image; each takes some tenths of a millisecond.
    """

    def __init__(self, size: int, views: int) -> None:
        self._size, self._views = size, views
        smooth = np.add.outer(np.arange(SIDE), np.arange(SIDE)).astype(np.uint8)
        noise = np.random.default_rng(0).integers(0, 16, (SIDE, SIDE, 3), np.uint8)
        self._packed = zlib.compress((smooth[:, :, None] + noise).tobytes())

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image = np.frombuffer(zlib.decompress(self._packed), np.uint8).reshape(SIDE, SIDE, 3)
        return torch.stack([self._view(image) for _ in range(self._views)]).mean(0), index

    def _view(self, image: Any) -> torch.Tensor:
        top, left = random.randrange(SIDE - VIEW), random.randrange(SIDE - VIEW)
        cut = image[top : top + VIEW, left : left + VIEW].astype(np.float32) / 255
        if np.random.rand() < 0.5:
            cut = cut[:, ::-1]
        mean = cut.mean(axis=(0, 1))
        view = torch.from_numpy(np.ascontiguousarray((cut - mean) * np.float32(0.8 + 0.4 * np.random.rand())))
        return view.permute(2, 0, 1) + 0.01 * torch.rand(())


class Waiting:
    """Items that wait for 1 ms."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        time.sleep(LONG_SECONDS)
        return torch.zeros(FEATURES), index


class OwnTensors:
    """As a ``TensorDataset`` of two tensors."""

    def __init__(self, size: int) -> None:
        self._inputs, self._targets = torch.randn(size, FEATURES), torch.arange(size)

    def __len__(self) -> int:
        return len(self._inputs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._inputs[index], self._targets[index]


def item_seconds(dataset: Any, items: int = 50) -> float:
    """The median time of one item, as the main process makes it."""
    times = []
    for index in range(items):
        begun = time.perf_counter()
        dataset[index % len(dataset)]
        times.append(time.perf_counter() - begun)
    return statistics.median(times)


def views_for(seconds: float) -> int:
    """How many views make an item cost so much here, at least."""
    one, many = item_seconds(Images(1, 1)), item_seconds(Images(1, 11))
    views = 1 + max(0, round((seconds - one) / (many - one) * 10))
    while item_seconds(Images(1, views)) < seconds:
        views += 1
    return views


def makers(only: list[str]) -> dict[str, Callable[[int], Any]]:
    """By kind of items: what makes a data set of so many."""
    found: dict[str, Callable[[int], Any]] = {}
    for kind in only:
        if kind.startswith("image"):
            views = views_for(KINDS[kind])
            found[kind] = lambda size, views=views: Images(size, views)  # type: ignore[misc]
        elif kind == "wait-1ms":
            found[kind] = Waiting
        elif kind == "own-tensors":
            found[kind] = OwnTensors
        else:
            found[kind] = lambda size: TensorDataset(torch.randn(size, FEATURES), torch.arange(size))
    return found


KINDS = {"image-1ms": 1e-3, "image-5ms": 5e-3, "wait-1ms": 1e-3, "tensors": 0.0, "own-tensors": 0.0}  # least seconds


def cpu_seconds() -> float:
    """Of this process and of its workers so far."""
    times = [child.cpu_times() for child in psutil.Process().children()]
    return time.process_time() + sum(one.user + one.system for one in times)


def epoch_seconds(loader: Any, samples: int) -> tuple[float, float]:
    """Of one epoch, a sample: passed, and of CPU time."""
    cpu, begun = cpu_seconds(), time.perf_counter()
    seen = sum(len(targets) for _, targets in loader)
    seconds = time.perf_counter() - begun
    if seen != samples:
        raise SystemExit(f"{type(loader).__name__} gave {seen} samples of {samples}")
    return seconds / samples, (cpu_seconds() - cpu) / samples


def measure(make: Callable[[int], Any], batch_size: int, workers: int, rounds: int, seconds: float) -> dict[str, Any]:
    """One case: both loaders, round by round."""
    trial = make(2 * batch_size)
    one, _ = epoch_seconds(TorchDataLoader(trial, batch_size), len(trial))
    batches = max(2, workers, round(seconds / one * max(1, min(workers, os.cpu_count() or 1)) / batch_size))
    dataset = make(batches * batch_size)
    options: dict[str, Any] = {"num_workers": workers, "persistent_workers": bool(workers)}
    loaders = {
        "torch": TorchDataLoader(dataset, batch_size, True, **options),
        "checkflow": checkflow.DataLoader(dataset, batch_size, True, **options),
    }
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in loaders}
    for loader in loaders.values():
        epoch_seconds(loader, len(dataset))
    for number in range(rounds):
        for name in sorted(loaders, reverse=number % 2 == 0):
            times[name].append(epoch_seconds(loaders[name], len(dataset)))
    row: dict[str, Any] = {"batch_size": batch_size, "workers": workers, "samples": len(dataset)}
    row["item_seconds"] = item_seconds(dataset)
    for kind, which in (("", 0), ("cpu_", 1)):
        theirs, ours = ([each[which] for each in times[name]] for name in ("torch", "checkflow"))
        pairs = list(zip(theirs, ours, strict=True))
        row |= {
            f"torch_{kind}seconds_a_sample": statistics.median(theirs),
            f"{kind}seconds_a_sample": statistics.median(ours),
            f"added_{kind}seconds_a_sample": statistics.median(mine - other for other, mine in pairs),
        }
        if not which:
            shares = [other / mine for other, mine in pairs]
            row["of_torchs_throughput"] = statistics.median(shares)
            row["of_torchs_throughput_least_and_most"] = [min(shares), max(shares)]
    return row


def judge(kind: str, row: dict[str, Any]) -> dict[str, Any]:
    """The row's target, and whether it is met."""
    if KINDS[kind] >= LONG_SECONDS:
        return {"target": f"at least {LEAST_SHARE:.0%}", "met": row["of_torchs_throughput"] >= LEAST_SHARE}
    target = f"at most {MOST_ADDED_SECONDS * 1e6:g} µs added"
    return {"target": target, "met": row["added_seconds_a_sample"] <= MOST_ADDED_SECONDS}


class Unread:
    """Samples that must not be loaded before a position."""

    def __init__(self) -> None:
        self.loaded = 0

    def __len__(self) -> int:
        return ORDER

    def __getitem__(self, index: int) -> int:
        self.loaded += 1
        return index


def first_batch_seconds(loader: Any) -> float:
    begun = time.perf_counter()
    batch = next(iter(loader))
    seconds = time.perf_counter() - begun
    if len(batch) != 128:
        raise SystemExit(f"the first batch has {len(batch)} samples")
    return seconds


def measure_skip(rounds: int) -> dict[str, Any]:
    """Times to the first batch from a position on, and what the order takes."""
    times: dict[str, list[float]] = {}
    for _ in range(rounds):
        times.setdefault("torch, from the begin", []).append(first_batch_seconds(TorchDataLoader(Unread(), 128, True)))
        for position in POSITIONS:
            loader = checkflow.DataLoader(Unread(), 128, True, seed=0)
            loader.set_epoch(3, position)
            times.setdefault(f"from {position}", []).append(first_batch_seconds(loader))
            if loader.dataset.loaded != 128:
                raise SystemExit(f"{loader.dataset.loaded} samples were loaded for one batch")
    memory = {}
    for kind in ("torch", "checkflow"):
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as fresh:
            memory[kind] = fresh.submit(order_bytes, kind).result()
    medians = {name: statistics.median(values) for name, values in times.items()}
    return {"samples": ORDER, "first_batch_seconds": medians, "order_bytes": memory}


def order_bytes(kind: str) -> int:
    """What a fresh process, warm by another loader, grows by until its first batch is there."""
    make = {"torch": TorchDataLoader, "checkflow": checkflow.DataLoader}[kind]
    warm, large = iter(make(range(512), 128, True)), iter(make(Unread(), 128, True))
    next(warm)
    before = psutil.Process().memory_info().rss
    next(large)
    return int(psutil.Process().memory_info().rss - before)


def main() -> None:
    cores = os.cpu_count()
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="*", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--batch-sizes", nargs="*", type=int, default=[1, 32, 256])
    parser.add_argument("--workers", nargs="*", type=int, default=[0, 4])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=0.5, help="of one epoch, about")
    parser.add_argument("--note", default="", help="about the machine, for the file")
    results = Path(__file__).parent / "results" / f"loader-throughput-{cores}-cores.json"
    parser.add_argument("--output", type=Path, default=results)
    asked = parser.parse_args()
    torch.set_num_threads(1)  # as in workers
    warnings.filterwarnings("ignore", "This DataLoader will create")  # more workers than cores
    rows = []
    head = f"{'items':12} {'batch':>5} {'workers':>7} {'item':>9} {'torch':>9} {'ours':>9}"
    print(f"{head} {'of torch':>10} {'added':>9} {'added CPU':>9}  target")
    for (kind, make), workers, batch_size in itertools.product(
        makers(asked.only).items(), asked.workers, asked.batch_sizes
    ):
        row = {"items": kind, **measure(make, batch_size, workers, asked.rounds, asked.seconds)}
        row |= judge(kind, row)
        rows.append(row)
        print(
            f"{kind:12} {batch_size:5} {workers:7} {micro(row['item_seconds'])} {micro(row['torch_seconds_a_sample'])}"
            f" {micro(row['seconds_a_sample'])} {row['of_torchs_throughput']:10.1%}"
            f" {micro(row['added_seconds_a_sample'])} {micro(row['added_cpu_seconds_a_sample'])}"
            f"  {row['target']}{'' if row['met'] else ': MISSED'}",
            flush=True,
        )
    skip = measure_skip(asked.rounds)
    for name, seconds in skip["first_batch_seconds"].items():
        print(f"first batch of {ORDER:,} shuffled samples, {name}: {seconds * 1e3:.1f} ms")
    for name, size in skip["order_bytes"].items():
        print(f"the order's memory, {name}: {size / 1e6:.1f} MB")
    where = {"cores": cores, "python": platform.python_version(), "torch": torch.__version__, "note": asked.note}
    content = {**where, "rounds": asked.rounds, "rows": rows, "skip": skip}
    asked.output.write_text(json.dumps(content, indent=1) + "\n")
    if missed := [f"{row['items']}/{row['batch_size']}/{row['workers']}" for row in rows if not row["met"]]:
        raise SystemExit(f"targets missed (items/batch size/workers): {', '.join(missed)}")


def micro(seconds: float) -> str:
    return f"{seconds * 1e6:6.1f} µs"


if __name__ == "__main__":
    main()
