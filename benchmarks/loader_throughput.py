"""What the resumable loader costs: its throughput against torch's own, the time to skip to a position, and what the
comparison of batches after a resume takes of each iteration before.

Both loaders' epochs go side by side, in turns the first. A figure is the median of the rounds; a row has met or missed
its target when all within its error (95 %) does. Let nothing else run meanwhile.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import json
import math
import multiprocessing
import os
import platform
import random
import statistics
import time
import warnings
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from scipy.stats import mstats
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import TensorDataset

import checkflow
from checkflow.runtime.data.repeat.used import digest

LEAST_SHARE = 0.97  # of torch's throughput, where an item costs LONG_SECONDS or more
LONG_SECONDS = 1e-3
MOST_ADDED_SECONDS, MOST_ADDED_A_BATCH_SECONDS = 10e-6, 50e-6  # a sample, where items are only tensors; the larger one
SIDE, VIEW, FEATURES = 96, 64, 16
LEAST_ROUNDS, CASE_SECONDS = 16, 240.0
SHARE_ERROR, ADDED_ERROR_SECONDS = 0.01, 0.5e-6  # enough is known when a figure may be off by no more than that
LEFT_OUT, DOUBT = 0.2, 0.05  # of the pairs of rounds, at either end; how often a figure is further off, both sides
TRIALS, FASTER = 20, 1.1  # of how long an item takes: the machine's speed changes, and it may become faster yet
POSITIONS = (0, 640_000, 1_279_872)
ORDER = 1_280_000
MOST_DIGEST_SECONDS = 50e-6  # of the training thread, an iteration, where batches are fetched again after a resume


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


@dataclass(frozen=True)
class Asked:
    """How long a case is measured: seconds of one epoch, about, and of all of them at most."""

    seconds: float
    case_seconds: float


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
    seconds *= FASTER
    one, many = item_seconds(Images(1, 1)), item_seconds(Images(1, 11))
    views = 1 + max(0, round((seconds - one) / (many - one) * 10))
    while min(item_seconds(Images(1, views)) for _ in range(TRIALS)) < seconds:
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
    """Of this process's threads and of its workers so far, in nanoseconds' steps."""
    pids = [os.getpid(), *(child.pid for child in psutil.Process().children())]
    threads = [thread for pid in pids for thread in Path(f"/proc/{pid}/task").iterdir()]
    return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9


def epoch_seconds(loader: Any, samples: int) -> tuple[float, float]:
    """Of one epoch, a sample: passed, and of CPU time."""
    cpu, begun = cpu_seconds(), time.perf_counter()
    seen = sum(len(targets) for _, targets in loader)
    seconds = time.perf_counter() - begun
    if seen != samples:
        raise SystemExit(f"{type(loader).__name__} gave {seen} samples of {samples}")
    return seconds / samples, (cpu_seconds() - cpu) / samples


def side_by_side(loaders: Sequence[Any], samples: int, first: int) -> tuple[float, float]:
    """Seconds of one epoch of each, a sample, batch by batch in turns."""
    batches = [iter(loader) for loader in loaders]
    seconds, seen = [0.0, 0.0], [0, 0]
    while seen != [samples, samples]:
        for which in (first, 1 - first):
            begun = time.perf_counter()
            _, targets = next(batches[which])
            seconds[which] += time.perf_counter() - begun
            seen[which] += len(targets)
        first = 1 - first
    if any(next(each, None) is not None for each in batches):
        raise SystemExit(f"an epoch has more than {samples} samples")
    return seconds[0] / samples, seconds[1] / samples


def make_loaders(dataset: Any, batch_size: int, workers: int) -> tuple[Any, Any]:
    """Torch's and ours."""
    options: dict[str, Any] = {"num_workers": workers, "persistent_workers": bool(workers)}
    theirs = TorchDataLoader(dataset, batch_size, True, **options)
    return theirs, checkflow.DataLoader(dataset, batch_size, True, **options)


Times = list[tuple[float, float]]  # of each round: seconds a sample, torch's and ours


def in_turns(loaders: Sequence[Any], samples: int, first: int) -> tuple[tuple[float, float], tuple[float, float]]:
    """Seconds of one epoch of each, a sample, one after the other: passed, and of CPU time."""
    taken = {which: epoch_seconds(loaders[which], samples) for which in (first, 1 - first)}
    return (taken[0][0], taken[1][0]), (taken[0][1], taken[1][1])


def measure(make: Callable[[int], Any], batch_size: int, workers: int, asked: Asked, *, long: bool) -> dict[str, Any]:
    """One case: both loaders, round by round."""
    trial = make(max(2, 2 * workers) * batch_size)
    loader = make_loaders(trial, batch_size, workers)[0]
    one = min(epoch_seconds(loader, len(trial))[0] for _ in range(2))
    del loader  # its workers end
    seconds = asked.seconds * 4 if workers else asked.seconds  # beginning an epoch takes them a while
    dataset = make(max(2, 2 * workers, round(seconds / one / batch_size)) * batch_size)
    loaders, begun = make_loaders(dataset, batch_size, workers), time.perf_counter()
    for loader in loaders:
        epoch_seconds(loader, len(dataset))
    times: Times = []
    cpu: Times = []
    rounds = LEAST_ROUNDS
    while len(times) < rounds:
        if workers:
            passed, used = in_turns(loaders, len(dataset), len(times) % 2)
            cpu.append(used)
        else:
            passed = side_by_side(loaders, len(dataset), len(times) % 2)
        times.append(passed)
        # Looked at seldom: the more often, the sooner something would be told by chance.
        if len(times) == rounds and not known(times, long, batch_size):
            more_rounds = rounds // 4 * 2
            if (time.perf_counter() - begun) * (1 + more_rounds / rounds) < asked.case_seconds:
                rounds += more_rounds
    throughput, more = share(times), added(times)
    row: dict[str, Any] = {"batch_size": batch_size, "workers": workers, "samples": len(dataset), "rounds": len(times)}
    return row | {
        "item_seconds": item_seconds(dataset),
        "torch_seconds_a_sample": statistics.median(theirs for theirs, _ in times),
        "seconds_a_sample": statistics.median(ours for _, ours in times),
        "added_seconds_a_sample": more.figure,
        "added_seconds_error": more.error,
        "of_torchs_throughput": throughput.figure,
        "of_torchs_throughput_error": throughput.error,
        "of_torchs_throughput_in_all": sum(theirs for theirs, _ in times) / sum(ours for _, ours in times),
        "torch_cpu_seconds_a_sample": statistics.median(theirs for theirs, _ in cpu) if cpu else None,
        "added_cpu_seconds_a_sample": added(cpu).figure if cpu else None,
        "torchs_share_of_cpu": share(cpu).figure if cpu else None,
        **judge(throughput, more, long, batch_size),
    }


@dataclass(frozen=True)
class Estimate:
    """A figure, and how far it may be off."""

    figure: float
    error: float


def estimate(values: Sequence[float]) -> Estimate:
    """The trimmed mean of what two rounds together give, for each two."""
    pairs = [statistics.fmean(pair) for pair in zip(values[::2], values[1::2], strict=True)]
    least, most = mstats.trimmed_mean_ci(np.array(pairs), limits=(LEFT_OUT, LEFT_OUT), alpha=DOUBT)
    return Estimate(float(most + least) / 2, float(most - least) / 2)


def added(times: Times) -> Estimate:
    """Seconds a sample beyond torch's."""
    return estimate([ours - theirs for theirs, ours in times])


def share(times: Times) -> Estimate:
    """Torch's seconds, of ours."""
    logarithm = estimate([math.log(theirs / ours) for theirs, ours in times])
    return Estimate(math.exp(logarithm.figure), math.exp(logarithm.figure) * logarithm.error)


def known(times: Times, long: bool, batch_size: int) -> bool:
    """Whether it is known well enough how they compare: by the ratio where an item takes ``long``."""
    throughput, more = share(times), added(times)
    exact = throughput.error <= SHARE_ERROR if long else more.error <= ADDED_ERROR_SECONDS
    return exact and judge(throughput, more, long, batch_size)["verdict"] != OPEN


MET, MISSED, OPEN = "met", "MISSED", "not told apart"


def judge(throughput: Estimate, more: Estimate, long: bool, batch_size: int) -> dict[str, str]:
    """The target of items that take ``long``, or of tensors, and what became of it."""
    if long:
        over, error, target = throughput.figure - LEAST_SHARE, throughput.error, f"at least {LEAST_SHARE:.0%}"
    else:
        most = max(MOST_ADDED_SECONDS, MOST_ADDED_A_BATCH_SECONDS / batch_size)
        over, error = most - more.figure, more.error
        target = f"at most {most * 1e6:g} µs added"
    return {"target": target, "verdict": MET if over >= error else MISSED if over < -error else OPEN}


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


def measure_digests() -> dict[str, float]:
    """By batches of several kinds, the median time that the training thread takes for one that is handed out.

    All are made before: those that come from workers lie in no cache of this core either.
    """
    batches: dict[str, Callable[[], Any]] = {
        "images and labels": lambda: [torch.rand(32, 3, 224, 224), torch.randint(9, (32,))],
        "channels last": lambda: torch.rand(32, 3, 224, 224).to(memory_format=torch.channels_last),
        "tokens": lambda: {name: torch.randint(9000, (8, 2048)) for name in ("input_ids", "attention_mask", "labels")},
        "8 tensors": lambda: [torch.rand(32, 100) for _ in range(8)],
        "64 boxes": lambda: [{"boxes": torch.rand(5, 4), "labels": torch.randint(9, (5,))} for _ in range(64)],
        "texts": lambda: {"text": ["word " * 200 for _ in range(64)], "label": list(range(64))},
    }
    found = {}
    for name, make in batches.items():
        times, made = [], [make() for _ in range(32)]
        for batch in made:
            begun = time.perf_counter()
            digest(batch)
            times.append(time.perf_counter() - begun)
        found[name] = statistics.median(times)
    return found


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
    parser.add_argument("--seconds", type=float, default=0.25, help="of one epoch, about")
    parser.add_argument("--case-seconds", type=float, default=CASE_SECONDS, help="of a case, about, at most")
    parser.add_argument("--note", default="", help="about the machine, for the file")
    results = Path(__file__).parent / "results" / f"loader-throughput-{cores}-cores.json"
    parser.add_argument("--output", type=Path, default=results)
    parser.add_argument("--again", action="store_true", help="only rows of the file that were not told apart")
    asked = parser.parse_args()
    if asked.again and not asked.output.is_file():
        parser.error(f"there is no {asked.output} of which to measure rows again")
    torch.set_num_threads(1)  # as in workers
    warnings.filterwarnings("ignore", "This DataLoader will create")  # more workers than cores
    before = json.loads(asked.output.read_text()) if asked.again else {"rows": []}
    chosen = [
        (kind, batch_size, workers)
        for kind, workers, batch_size in itertools.product(asked.only, asked.workers, asked.batch_sizes)
    ]
    done = {case_of(row): row for row in before["rows"] if row["verdict"] != OPEN or case_of(row) not in chosen}
    cases = [case_of(row) for row in before["rows"]] or chosen
    make = makers([kind for kind in asked.only if any(case[0] == kind and case not in done for case in cases)])
    rows, limits = [], Asked(asked.seconds, asked.case_seconds)
    head = f"{'items':12} {'batch':>5} {'workers':>7} {'item':>9} {'torch':>9} {'ours':>9}"
    print(f"{head} {'of torch':>15} {'in all':>7} {'added':>16} {'added CPU':>9} {'CPU':>6}  target")
    for case in cases:
        row = done.get(case)
        if row is None:
            kind, batch_size, workers = case
            row = {"items": kind, **measure(make[kind], batch_size, workers, limits, long=KINDS[kind] >= LONG_SECONDS)}
            print(line_of(row), flush=True)
        rows.append(row)
    skip = measure_skip(LEAST_ROUNDS)
    for name, seconds in skip["first_batch_seconds"].items():
        print(f"first batch of {ORDER:,} shuffled samples, {name}: {seconds * 1e3:.1f} ms")
    for name, size in skip["order_bytes"].items():
        print(f"the order's memory, {name}: {size / 1e6:.1f} MB")
    digests = measure_digests()
    for name, seconds in digests.items():
        verdict = MET if seconds <= MOST_DIGEST_SECONDS else MISSED
        print(f"a batch of {name} is digested in {seconds * 1e6:.1f} µs: {verdict}")
    where = {
        "cores": cores,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "note": asked.note or before.get("note", ""),
    }
    content = {**where, "rows": rows, "skip": skip, "digest_seconds": digests}
    asked.output.write_text(json.dumps(content, indent=1) + "\n")
    for verdict, count in collections.Counter(row["verdict"] for row in rows).items():
        print(f"{count} {verdict}")
    if missed := [f"{row['items']}/{row['batch_size']}/{row['workers']}" for row in rows if row["verdict"] == MISSED]:
        raise SystemExit(f"targets missed (items/batch size/workers): {', '.join(missed)}")
    if slow := [name for name, seconds in digests.items() if seconds > MOST_DIGEST_SECONDS]:
        raise SystemExit(f"digests take more than {MOST_DIGEST_SECONDS * 1e6:g} µs: {', '.join(slow)}")


def case_of(row: dict[str, Any]) -> tuple[str, int, int]:
    return row["items"], row["batch_size"], row["workers"]


def line_of(row: dict[str, Any]) -> str:
    return (
        f"{row['items']:12} {row['batch_size']:5} {row['workers']:7} {micro(row['item_seconds'])}"
        f" {micro(row['torch_seconds_a_sample'])} {micro(row['seconds_a_sample'])}"
        f" {row['of_torchs_throughput']:7.1%} ±{row['of_torchs_throughput_error']:6.1%}"
        f" {row['of_torchs_throughput_in_all']:7.1%}"
        f" {micro(row['added_seconds_a_sample'])} ±{row['added_seconds_error'] * 1e6:5.1f}"
        f" {micro(row['added_cpu_seconds_a_sample'])} {percent(row['torchs_share_of_cpu'])}"
        f"  {row['target']}: {row['verdict']}"
    )


def percent(share: float | None) -> str:
    return f"{'':6}" if share is None else f"{share:6.1%}"


def micro(seconds: float | None) -> str:
    return f"{'':9}" if seconds is None else f"{seconds * 1e6:6.1f} µs"


if __name__ == "__main__":
    main()
