"""How fast checkpoints become durable and come back, beside what the same disk gives raw, in one run.

Ways take turns, so that a disk whose speed drifts drifts for all; the best raw way counts, and a training loop runs
beside all writes. Where one of the four targets is missed, the exit code is 1.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from checkflow.core.units import format_size
from checkflow.runtime.format import codec
from checkflow.runtime.format.layout import Layout, TensorRecord, make_layout, write_headers
from checkflow.runtime.state.restore import resume_from
from checkflow.runtime.store.reader import Checkpoint, open_checkpoint
from checkflow.runtime.store.store import Store

BLOCK_BYTES = 8 * 2**20  # of one raw write or read
THREADS = (1, 4, 6)
SMALL_TENSORS = 1000
LEAST_WRITE_OF_RAW, LEAST_RESTORE_OF_RAW = 0.90, 0.85
MOST_MANY_OF_ONE = 1.10
MOST_MEMORY_BYTES = 64 * 2**20  # beside the staging buffer and the state itself
EXTRA = codec.encode({"job": {"modules": {}, "optimizers": {}, "objects": {}}})
RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Way:
    """One way to do it, and what surrounds that without counting."""

    work: Callable[[], object]
    before: Callable[[], object] = lambda: None
    after: Callable[[], object] = lambda: None


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--directory", type=Path, help="on the disk to measure (default: for temporary files)")
    parser.add_argument("--mib", type=int, default=256, help="of state, in MiB (default: 256)")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--output", type=Path, default=RESULTS / f"store-speed-{os.cpu_count()}-cores.json",
        help="file for the figures, as JSON (default: benchmarks/results/store-speed-<cores>-cores.json)",
    )  # fmt: skip
    arguments = parser.parse_args()
    if arguments.mib < 16 or arguments.mib % 8 or arguments.rounds < 1:
        parser.error("--mib must be a multiple of 8 from 16 on, and --rounds 1 or more")
    return arguments


Ways = dict[str, Way]


# Raw


def in_threads(count: int, blocks: range, work: Callable[[int], object]) -> None:
    def run(first: int) -> None:
        for offset in blocks[first::count]:
            work(offset)

    threads = [threading.Thread(target=run, args=(first,)) for first in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def write_raw(path: Path, source: mmap.mmap, *, flags: int, threads: int) -> None:
    """A new file of these bytes, durable."""
    view = memoryview(source)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | flags, 0o666)

    def write(offset: int) -> None:
        if os.pwrite(fd, view[offset : offset + BLOCK_BYTES], offset) != BLOCK_BYTES:
            raise OSError(f"{path}: a short write")

    in_threads(threads, range(0, len(view), BLOCK_BYTES), write)
    os.fsync(fd)
    os.close(fd)


def replace_raw(path: Path, source: mmap.mmap, *, flags: int, threads: int) -> None:
    """The same, and as much is removed."""
    write_raw(path, source, flags=flags, threads=threads)
    path.unlink()


def read_raw(path: Path, target: mmap.mmap, *, flags: int, threads: int) -> None:
    view = memoryview(target)
    fd = os.open(path, os.O_RDONLY | flags)

    def read(offset: int) -> None:
        if os.preadv(fd, [view[offset : offset + BLOCK_BYTES]], offset) != BLOCK_BYTES:
            raise OSError(f"{path}: a short read")

    in_threads(threads, range(0, len(view), BLOCK_BYTES), read)
    os.close(fd)


def drop(path: Path) -> None:
    """Tell the page cache to forget a file."""
    fd = os.open(path, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def raw_ways(function: Callable[..., None], path: Path, memory: mmap.mmap, **around: Callable[[], object]) -> Ways:
    kinds = {"buffered": 0, "direct": os.O_DIRECT}
    return {
        f"raw {kind}" + (f", {count} threads" if count > 1 else ""): Way(
            partial(function, path, memory, flags=flags, threads=count), **around
        )
        for kind, flags in kinds.items()
        for count in THREADS
    }


# Ours


def layout_of(size_bytes: int, tensors: int) -> Layout:
    """So many float32 tensors of a model, of so many bytes together."""
    each, over = divmod(size_bytes // 4, tensors)
    lengths = [each + (index < over) for index in range(tensors)]
    return make_layout(
        [TensorRecord(f"model/t{i:05d}", "float32", (length,), 4 * length, 4) for i, length in enumerate(lengths)]
    )


def filled(layout: Layout, source: mmap.mmap) -> mmap.mmap:
    """A staging buffer as the runtime has it: anonymous memory, every page touched."""
    staging = mmap.mmap(-1, layout.buffer_bytes)
    staging[: len(source)] = source[:]
    staging[len(source) :] = bytes(layout.buffer_bytes - len(source))
    write_headers(layout, memoryview(staging))
    return staging


class Commits:
    """A store that is written again and again; two checkpoints stay.

    Args:
        retention: whether the store removes the others, as part of a commit.
    """

    def __init__(self, directory: Path, layout: Layout, source: mmap.mmap, *, retention: bool = False) -> None:
        self.store = Store(directory, run_id="benchmark", keep_latest=2 if retention else 10**6)
        self._layout, self._staging = layout, filled(layout, source)
        self._step = 0

    @property
    def way(self) -> Way:
        return Way(self.commit, after=self._remove_old)

    def commit(self) -> None:
        self._step += 1
        self.store.commit(self._step, self._layout, memoryview(self._staging), EXTRA, {})

    def _remove_old(self) -> None:
        for old in self.store.checkpoints()[2:]:
            shutil.rmtree(old)


def model_of(checkpoint: Checkpoint) -> torch.nn.Module:
    """A model of the checkpoint's tensors, in touched memory."""
    model = torch.nn.Module()
    for name, entry in checkpoint.tensors.items():
        model.register_parameter(name.partition("/")[2], torch.nn.Parameter(torch.ones(entry.shape)))
    return model


def targets_of(model: torch.nn.Module) -> list[tuple[str, memoryview]]:
    return [
        (f"model/{name}", memoryview(parameter.detach().numpy()).cast("B"))
        for name, parameter in model.named_parameters()
    ]


def drop_all(store: Store) -> None:
    for path in store.checkpoints():
        for file in path.iterdir():
            drop(file)


def read_checkpoint(store: Store, targets: list[tuple[str, memoryview]]) -> None:
    """Open the newest and read all of it: each byte verified, once."""
    with open_checkpoint(store.checkpoints()[0]) as checkpoint:
        checkpoint.read_many_into(targets)
        _ = checkpoint.extra_bytes


def restore(store: Store, model: torch.nn.Module) -> None:
    """What a job does."""
    if resume_from(store, "auto", {"model": model}, {}, {}) is None:
        raise SystemExit("the checkpoint is gone")


# Training, and memory


class Training:
    """A loop of small matrices on a thread of its own, with one core's worth of work."""

    def __init__(self) -> None:
        self.iterations = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Training:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        torch.set_num_threads(1)
        model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        batch = torch.randn(64, 256)
        while not self._ended.is_set():
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
            self.iterations += 1


def status_bytes(key: str) -> int:
    text = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith(f"{key}:"))


@contextmanager
def risen(found: list[int]) -> Iterator[None]:
    """How far resident memory rose at the highest."""
    before = status_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the highest so far is now's
    yield
    found.append(status_bytes("VmHWM") - before)


# The measurement


def take_turns(ways: Ways, rounds: int, training: Training | None) -> dict[str, dict[str, Any]]:
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    iterations: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds + 1):
        for name, way in ways.items():
            way.before()
            before, begun = 0 if training is None else training.iterations, time.perf_counter()
            way.work()
            taken, after = time.perf_counter() - begun, 0 if training is None else training.iterations
            way.after()
            if turn:  # the first one warms up
                seconds[name].append(taken)
                iterations[name].append((after - before) / taken)
    return {
        name: {
            "median_seconds": statistics.median(times),
            "seconds": [round(one, 4) for one in times],
            **({"training_iterations_per_second": statistics.median(iterations[name])} if training else {}),
        }
        for name, times in seconds.items()
    }


def best_raw(rows: dict[str, dict[str, Any]]) -> str:
    return min((name for name in rows if name.startswith("raw")), key=lambda name: rows[name]["median_seconds"])


def rate_of_raw(rows: dict[str, dict[str, Any]], name: str) -> float:
    """Our rate, of the best raw way's."""
    ratio: float = rows[best_raw(rows)]["median_seconds"] / rows[name]["median_seconds"]
    return ratio


def show(title: str, rows: dict[str, dict[str, Any]], size_bytes: int) -> None:
    print(title)
    for name, row in rows.items():
        rate = size_bytes / row["median_seconds"]
        spread = f"{min(row['seconds']):.3f} to {max(row['seconds']):.3f} s"
        beside = row.get("training_iterations_per_second")
        trained = "" if beside is None else f", training {beside:.0f} iterations/s"
        print(
            f"  {name:24s}{format_size(int(rate))}/s, {100 * rate_of_raw(rows, name):4.0f} % of raw, {spread}{trained}"
        )


def main() -> int:
    arguments = parse_arguments()
    size_bytes = arguments.mib * 2**20
    with tempfile.TemporaryDirectory(dir=arguments.directory, prefix="checkflow-benchmark-") as folder:
        source, target = mmap.mmap(-1, size_bytes), mmap.mmap(-1, size_bytes)
        source[:] = os.urandom(size_bytes)
        target[:] = source[:]
        one = Commits(Path(folder) / "one", layout_of(size_bytes, 1), source)
        many = Commits(Path(folder) / "many", layout_of(size_bytes, SMALL_TENSORS), source)
        retaining = Commits(Path(folder) / "retaining", layout_of(size_bytes, 1), source, retention=True)
        ours = {"one tensor": one.way, f"{SMALL_TENSORS} tensors": many.way}
        raw_path = Path(folder) / "raw"
        raw = raw_ways(write_raw, raw_path, source, after=raw_path.unlink)
        for _ in range(2):
            retaining.commit()
        with Training() as training:
            writes = take_turns({**raw, **ours}, arguments.rounds, training)
            ways = {**raw_ways(replace_raw, raw_path, source), "one tensor": Way(retaining.commit)}
            replacing = take_turns(ways, arguments.rounds, training)
        memory: dict[str, list[int]] = {"commit": [], "restore": []}
        with risen(memory["commit"]):
            one.commit()
            many.commit()
        reads, restored = measure_reads(Path(folder), one.store, many.store, target, arguments.rounds)
        memory["restore"] = restored
        for commits in (one, many, retaining):
            commits.store.close()
    show("durable write, beside a training loop", writes, size_bytes)
    show("the same, and as much removed", replacing, size_bytes)
    show("read from the disk", reads, size_bytes)
    figures = {
        "size_bytes": size_bytes,
        "rounds": arguments.rounds,
        "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "write": writes,
        "write_and_remove": replacing,
        "read": reads,
        "write_of_raw": rate_of_raw(writes, "one tensor"),
        "write_and_remove_of_raw": rate_of_raw(replacing, "one tensor"),
        "read_of_raw": rate_of_raw(reads, "read one"),
        "restore_of_raw": rate_of_raw(reads, "restore one"),
        "many_commit_of_one": ratio(writes, f"{SMALL_TENSORS} tensors", "one tensor"),
        "many_read_of_one": ratio(reads, "read many", "read one"),
        "many_restore_of_one": ratio(reads, "restore many", "restore one"),
        "memory_risen_bytes": {name: max(found) for name, found in memory.items()},
    }
    arguments.output.write_text(json.dumps(figures, indent=2) + "\n")
    met = [show_target(*target) for target in targets(figures)]
    return 0 if all(met) else 1


def targets(figures: dict[str, Any]) -> list[tuple[str, bool]]:
    """Each target with the figure that stands for it, and whether it was met."""
    write = min(figures["write_of_raw"], figures["write_and_remove_of_raw"])
    back = figures["restore_of_raw"]
    many = max(figures["many_commit_of_one"], figures["many_restore_of_one"])
    memory = max(figures["memory_risen_bytes"].values())
    return [
        (f"a durable write has {write:.2f} of raw's rate (at least {LEAST_WRITE_OF_RAW})", write >= LEAST_WRITE_OF_RAW),
        (f"a restore has {back:.2f} of raw's rate (at least {LEAST_RESTORE_OF_RAW})", back >= LEAST_RESTORE_OF_RAW),
        (
            f"{SMALL_TENSORS} tensors take {figures['many_commit_of_one']:.2f} of one's time to write, "
            f"{figures['many_restore_of_one']:.2f} to restore (at most {MOST_MANY_OF_ONE})",
            many <= MOST_MANY_OF_ONE,
        ),
        (f"{memory / 2**20:.0f} MiB more memory (less than {MOST_MEMORY_BYTES >> 20})", memory < MOST_MEMORY_BYTES),
    ]


def show_target(what: str, met: bool) -> bool:
    print(f"{'met   ' if met else 'MISSED'} {what}")
    return met


def measure_reads(
    folder: Path, one: Store, many: Store, target: mmap.mmap, rounds: int
) -> tuple[dict[str, dict[str, Any]], list[int]]:
    path = folder / "raw"
    with open(path, "xb") as file:
        file.write(target)
        os.fsync(file.fileno())
    with open_checkpoint(one.checkpoints()[0]) as checkpoint:
        model_one = model_of(checkpoint)
    with open_checkpoint(many.checkpoints()[0]) as checkpoint:
        model_many = model_of(checkpoint)
    drop_one, drop_many = partial(drop_all, one), partial(drop_all, many)
    ways = {
        **raw_ways(read_raw, path, target, before=partial(drop, path)),
        "read one": Way(partial(read_checkpoint, one, targets_of(model_one)), drop_one),
        "read many": Way(partial(read_checkpoint, many, targets_of(model_many)), drop_many),
        "restore one": Way(partial(restore, one, model_one), drop_one),
        "restore many": Way(partial(restore, many, model_many), drop_many),
    }
    rows = take_turns(ways, rounds, None)
    found: list[int] = []
    with risen(found):
        restore(one, model_one)
        restore(many, model_many)
    return rows, found


def ratio(rows: dict[str, dict[str, Any]], name: str, other: str) -> float:
    found: float = rows[name]["median_seconds"] / rows[other]["median_seconds"]
    return found


if __name__ == "__main__":
    sys.exit(main())
