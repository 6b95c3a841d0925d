"""What several ranks cost and share, by gloo on this machine's processors, each figure beside its bar.

One run measures: what a boundary takes of the training thread, and what of it the ranks' agreement takes; the time
from the last rank's files to the committed version, with the same fsyncs alone beside it; how many collectives are
checkflow's; bytes copied, written and read.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d as c10d

import checkflow
from checkflow.core.units import format_size
from checkflow.runtime.loop.agreement import Agreement
from checkflow.runtime.loop.boundary_actions import BoundaryActions
from checkflow.runtime.ranks.council import Council
from checkflow.runtime.state import restore
from checkflow.runtime.store.discovery import find
from checkflow.runtime.system import fs

RESULTS = Path(__file__).parent / "results"
MIB = 2**20
WARM_UP = 10  # iterations
BARS = {
    "agreement_median_seconds": 0.0002, "agreement_p99_seconds": 0.002, "commit_median_seconds": 0.02,
    "collectives": 0, "copied_over_share_bytes": 64 * 1024, "written_over_share_bytes": 64 * 1024,
    "read_over_own_bytes_a_piece": 8 * MIB, "restore_extra_bytes": 64 * MIB,
}  # fmt: skip


@dataclass(frozen=True)
class Size:
    """Of what is measured."""

    width: int = 1024
    layers: int = 4
    iterations: int = 400
    every: int = 20


def make_model(size: Size) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(*(nn.Linear(size.width, size.width) for _ in range(size.layers)))


def state_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """That this rank holds, numbers of steps included."""
    tensors: list[Any] = list(model.parameters())
    tensors += [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    local = [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors]
    return sum(one.numel() * one.element_size() for one in local)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, size: Size) -> None:
    """One iteration."""
    optimizer.zero_grad()
    model(torch.ones(2, size.width)).square().mean().backward()
    optimizer.step()


def collectives() -> int:
    """Of all process groups so far."""
    return sum(group._get_sequence_number_for_group() for group in c10d._world.pg_map)


def p99(values: Sequence[float]) -> float:
    return sorted(values)[min(len(values) - 1, int(0.99 * len(values)))]


# In a rank's process


def replicated(rank: int, folder: Path, size: Size) -> dict[str, Any]:
    """A DDP job: boundaries, commits, collectives, copied bytes."""
    model = nn.parallel.DistributedDataParallel(make_model(size))
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(WARM_UP):
        train(model, optimizer, size)
    before = collectives()
    for _ in range(size.iterations):
        train(model, optimizer, size)
    without = collectives() - before
    boundaries: list[tuple[float, float, float]] = []
    agreeing = 0.0
    receipts: dict[int, float] = {}
    committed: dict[int, float] = {}
    end_iteration, post_receipt = BoundaryActions.end_iteration, Council.post_receipt
    conclude, await_verdict = Council.conclude, Council.await_verdict

    def timed_boundary(self: BoundaryActions, boundary: Any) -> None:
        nonlocal agreeing
        wall, cpu, agreeing = time.perf_counter(), time.thread_time(), 0.0
        end_iteration(self, boundary)
        if not self.captured and self.iteration > WARM_UP:
            boundaries.append((time.perf_counter() - wall, time.thread_time() - cpu, agreeing))

    def timed_agreement(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            nonlocal agreeing
            begun = time.perf_counter()
            found = method(*arguments, **named)
            agreeing += time.perf_counter() - begun
            return found

        return call

    def timed_receipt(self: Council, receipt: Any) -> None:
        receipts[receipt.step] = time.monotonic()
        post_receipt(self, receipt)

    def timed_verdict(self: Council, attempt: Any, *arguments: Any) -> None:
        committed.setdefault(attempt.step, time.monotonic())
        conclude(self, attempt, *arguments)

    def timed_wait(self: Council, attempt: Any, *arguments: Any) -> None:
        await_verdict(self, attempt, *arguments)
        committed[attempt.step] = time.monotonic()

    BoundaryActions.end_iteration = timed_boundary  # type: ignore[method-assign]
    for name in ("arrive", "is_due", "leave"):
        setattr(Agreement, name, timed_agreement(getattr(Agreement, name)))
    Council.post_receipt = timed_receipt  # type: ignore[method-assign]
    Council.conclude, Council.await_verdict = timed_verdict, timed_wait  # type: ignore[method-assign]
    before = collectives()
    with checkflow.Checkpointer(model, optimizer, directory=folder / "replicated", every=size.every) as checkpointer:
        for _ in checkpointer.steps(size.iterations):
            train(model, optimizer, size)
    ours = collectives() - before - without
    report = checkpointer.report()
    return {
        "boundaries": boundaries, "receipts": receipts, "committed": committed, "collectives": ours,
        "collectives_of_training": without, "state_bytes": state_bytes(model, optimizer),
        "copied_bytes": report["bytes"]["captured_bytes"] / report["captures"],
        "versions": report["committed"], "failed": report["failed"],
    }  # fmt: skip


def sharded(rank: int, folder: Path, size: Size) -> dict[str, Any]:
    """An FSDP job: saves, or restores what another number of ranks has saved."""
    from torch.distributed.fsdp import fully_shard

    model = make_model(size)
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters())
    read, pieces = [0], [0]
    pread, narrow_to = fs.preadv, restore.narrow_to

    def counted(*arguments: Any, **named: Any) -> int:
        count = pread(*arguments, **named)
        read[0] += count
        return count

    def narrowed(*arguments: Any, **named: Any) -> Any:
        described = narrow_to(*arguments, **named)
        pieces[0] += sum(len(tensor.pieces) for tensor in described.tensors.values())
        return described

    fs.preadv, restore.narrow_to = counted, narrowed
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here on
    checkpointer = checkflow.Checkpointer(model, optimizer, directory=folder / "sharded", every=2)
    peak_bytes, resident_bytes = _status("VmHWM"), _status("VmRSS")
    found = {
        "resumed_from": checkpointer.resumed_from, "read_bytes": read[0], "pieces": pieces[0],
        "own_bytes": state_bytes(model, optimizer), "extra_bytes": peak_bytes - resident_bytes,
    }  # fmt: skip
    with checkpointer:
        for _ in checkpointer.steps(2):
            train(model, optimizer, size)
    return found


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def _rank(rank: int, ranks: int, port: int, what: str, folder: Path, size: Size) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    found = {"replicated": replicated, "sharded": sharded}[what](rank, folder, size)
    (folder / f"{what}-{ranks}-{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


# All ranks


def run(what: str, ranks: int, folder: Path, size: Size) -> list[dict[str, Any]]:
    """What each rank has measured."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(_rank, (ranks, port, what, folder, size), nprocs=ranks)  # type: ignore[attr-defined, no-untyped-call]
    return [json.loads((folder / f"{what}-{ranks}-{rank}.json").read_text()) for rank in range(ranks)]


def raw_commit_seconds(folder: Path) -> float:
    """What rank 0's commit asks of storage, alone: two small files, the directory, a rename, the directory above."""
    found = []
    for number in range(20):
        begun, new = time.perf_counter(), folder / f"raw-{number}.tmp"
        new.mkdir()
        for name in ("state", "manifest"):
            with open(new / name, "wb") as file:
                file.write(bytes(4096))
                file.flush()
                os.fsync(file.fileno())
        _sync(new)
        new.rename(folder / f"raw-{number}")
        _sync(folder)
        found.append(time.perf_counter() - begun)
    return statistics.median(found)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def measure(ranks: int, folder: Path, size: Size) -> dict[str, Any]:
    load = os.getloadavg()[0]
    found = run("replicated", ranks, folder, size)
    walls, cpus, agreeing = ([[times[at] for times in one["boundaries"]] for one in found] for at in range(3))
    steps = set.intersection(*(set(one["committed"]) for one in found))
    last = {step: max(one["receipts"][step] for one in found) for step in steps}
    leads = [found[0]["committed"][step] - last[step] for step in steps]
    alls = [max(one["committed"][step] for one in found) - last[step] for step in steps]
    whole = found[0]["state_bytes"]
    newest = find(folder / "replicated")[0]
    written = [sum(path.stat().st_size for path in newest.glob(f"*-{rank:05}-of-*")) for rank in range(ranks)]
    run("sharded", ranks, folder, size)
    onto = run("sharded", ranks - 1, folder, size)
    assert all(one["resumed_from"] == 2 for one in onto), "what four ranks saved, three resume"
    return {
        "ranks": ranks, "load_before": round(load, 2), "iterations": size.iterations, "versions": found[0]["versions"],
        "failed": found[0]["failed"], "state_bytes": whole,
        "agreement_median_seconds": max(map(statistics.median, agreeing)),
        "agreement_p99_seconds": max(map(p99, agreeing)),
        "boundary_median_seconds": max(map(statistics.median, walls)), "boundary_p99_seconds": max(map(p99, walls)),
        "boundary_median_cpu_seconds": max(map(statistics.median, cpus)),
        "boundary_p99_cpu_seconds": max(map(p99, cpus)),
        "commit_median_seconds": statistics.median(leads), "commit_on_all_median_seconds": statistics.median(alls),
        "raw_commit_seconds": raw_commit_seconds(folder),
        "collectives": max(abs(one["collectives"]) for one in found),
        "collectives_of_training": found[0]["collectives_of_training"],
        "copied_bytes": [one["copied_bytes"] for one in found], "written_bytes": written,
        "copied_over_share_bytes": max(one["copied_bytes"] for one in found) - whole / ranks,
        "written_over_share_bytes": max(written) - whole / ranks,
        "copied_to_state": sum(one["copied_bytes"] for one in found) / whole, "written_to_state": sum(written) / whole,
        "reshard": onto,
        "read_over_own_bytes_a_piece": max((one["read_bytes"] - one["own_bytes"]) / one["pieces"] for one in onto),
        "restore_extra_bytes": max(one["extra_bytes"] for one in onto),
    }  # fmt: skip


def table(found: dict[str, Any]) -> str:
    def said(name: str, value: float) -> str:
        if name.endswith("_seconds"):
            return f"{1000 * value:.3f} ms"
        return format_size(int(value)) if "_bytes" in name else f"{value:g}"

    lines = [f"{'':38} {'measured':>12} {'bar':>12}"]
    for name, bar in BARS.items():
        over = "" if found[name] <= bar else "  over"
        lines.append(f"{name:38} {said(name, found[name]):>12} {said(name, bar):>12}{over}")
    beside = (
        "boundary_median_seconds", "boundary_p99_seconds", "boundary_median_cpu_seconds", "boundary_p99_cpu_seconds",
        "commit_on_all_median_seconds", "raw_commit_seconds", "copied_to_state", "written_to_state", "load_before",
    )  # fmt: skip
    return "\n".join([*lines, *(f"{name:38} {said(name, found[name]):>12}" for name in beside)]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--iterations", type=int, default=Size.iterations)
    parser.add_argument("--width", type=int, default=Size.width)
    parser.add_argument("--output", type=Path, help="the file for the figures")
    asked = parser.parse_args()
    size = Size(width=asked.width, iterations=asked.iterations)
    with tempfile.TemporaryDirectory(prefix="checkflow-ranks-") as folder:
        found = measure(asked.ranks, Path(folder), size)
    print(table(found), end="")
    machine = f"{os.cpu_count()} cores"
    file = asked.output or RESULTS / f"ranks-{machine.replace(' ', '-')}.json"
    file.write_text(
        json.dumps({"machine": machine, "torch": torch.__version__, "bars": BARS, **found}, indent=1) + "\n"
    )
    print(f"written to {file}")


if __name__ == "__main__":
    main()
