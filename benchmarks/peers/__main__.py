"""checkflow beside other ways of making checkpoints: what they cost training, what the disk gives, what a kill leaves.

Peers take turns, block by block, so that a machine whose speed drifts drifts for all. With all peers the figures go to
benchmarks/results and the page to docs/, else to ``--output`` alone. A file of figures keeps what is not measured anew,
so that hours can be spent one state at a time, and each part says what it was measured on. The exit code is 1 if
checkflow misses a bar.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.peers.block import Block, request_for, run_block
from benchmarks.peers.figures import by_name, figures_of, missed
from benchmarks.peers.job import CASES
from benchmarks.peers.kills import Kills, kill_saves
from benchmarks.peers.page import plot, render
from benchmarks.peers.peers import OURS, PEERS
from checkflow.core.units import format_seconds
from checkflow.planner.measure.machine import this_machine

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
DOCS = ROOT / "docs"
KILLS = 60


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__.partition("\n")[0])
    parser.add_argument("--states", default="0.1,0.15,1,4", help=f"in GB, of {', '.join(CASES)} [0.1,0.15,1,4]")
    parser.add_argument("--only", help=f"peers, with commas between them, of {', '.join(PEERS)} [all]")
    parser.add_argument("--rounds", type=int, default=5, help="0: kills alone [5]")
    parser.add_argument("--kills", type=int, help="of each peer's re-saves; 0: none [60, if the file has none yet]")
    parser.add_argument("--every", type=int, default=5, help="iterations from one checkpoint to the next [5]")
    parser.add_argument("--iterations", type=int, help="timed in a block [10 to 100, by state]")
    parser.add_argument("--threads", type=int, help="that training has [as torch chooses]")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="that trains [cpu]")
    parser.add_argument("--seed", type=int, default=0, help="of the moments of kills [0]")
    parser.add_argument("--directory", type=Path, help="on the disk to measure [the temporary folder]")
    parser.add_argument("--output", type=Path, help="of the figures [with all peers in benchmarks/results]")
    parser.add_argument(
        "--render", action="store_true", help="make the page and its plots of the figures that are there"
    )
    asked = parser.parse_args(argv)
    asked.states = [part.strip() for part in asked.states.split(",")]
    asked.peers = [part.strip() for part in asked.only.split(",")] if asked.only else list(PEERS)
    for part, known in [*((one, CASES) for one in asked.states), *((one, PEERS) for one in asked.peers)]:
        if part not in known:
            parser.error(f"{part!r} is none of {', '.join(known)}")
    counts = (asked.every, asked.threads, asked.iterations)
    if min(asked.rounds, asked.kills or 0) < 0 or any(count is not None and count < 1 for count in counts):
        parser.error("--rounds and --kills must be 0 or more; --every, --threads and --iterations 1 or more")
    return asked


def line_of(found: Mapping[str, float], note: str) -> str:
    """One block, for whoever watches."""
    return (
        f"iteration {format_seconds(found['iteration_seconds'])} {100 * found['inflation_mean']:+.1f} %, held "
        f"{format_seconds(found['hold_seconds'])}, durable after {format_seconds(found['durable_seconds'])}, "
        f"{100 * found['durable_share']:.0f} % of raw, restored at {100 * found['restore_share']:.0f} %, memory "
        f"{100 * found['memory_share']:.0f} % of the state" + (f"; {note}" if note else "")
    )


def measure(asked: argparse.Namespace, state: str, directory: Path) -> dict[str, Any]:
    """All rounds of one size. A peer that fails is not tried again."""
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in asked.peers}
    failed: dict[str, str] = {}
    state_bytes = 0
    for number in range(asked.rounds):
        for name in asked.peers:
            if name in failed:
                continue
            found = run_block(
                request_for(
                    name, state, every=asked.every, iterations=asked.iterations, threads=asked.threads,
                    directory=directory, device=asked.device,
                )
            )  # fmt: skip
            if isinstance(found, Block):
                state_bytes = found.state_bytes
                rounds[name].append(figures_of(found))
                said = line_of(rounds[name][-1], found.note)
            else:
                failed[name] = said = found.reason
            print(f"{state} GB, round {number + 1}, {name}: {said}", flush=True)
    peers = {name: {"failed": failed[name]} if name in failed else by_name(rounds[name]) for name in asked.peers}
    return {"state_bytes": state_bytes, "peers": peers}


def kill(asked: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Kill re-saves of the smallest state."""
    results: dict[str, Any] = {}
    for name in asked.peers:
        found = kill_saves(name, asked.states[0], asked.kills or KILLS, directory=directory, seed=asked.seed)
        if isinstance(found, Kills):
            results[name] = {"count": found.count, "lost": found.lost, **vars(found)}
            said = f"{found.lost} of {found.count} kills lose the state: {found.left}"
        else:
            results[name] = {"failed": found.reason}
            said = found.reason
        print(f"{name}: {said}", flush=True)
    return results


def filesystem(directory: Path) -> str:
    """The kind of file system that holds a directory."""
    holding = [one for one in psutil.disk_partitions(all=True) if directory.is_relative_to(one.mountpoint)]
    return max(holding, key=lambda one: len(one.mountpoint)).fstype if holding else "an unknown file system"


def versions(peers: Sequence[str]) -> dict[str, str]:
    """Of Python, of the kernel, and of what the peers consist of, as far as it is installed."""
    found = {"Python": platform.python_version(), "Linux": platform.release()}
    for package in dict.fromkeys(package for name in peers for package in PEERS[name].packages):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "missing"
    return found


def begin(output: Path | None) -> dict[str, Any]:
    """The figures that a file has already."""
    if output is None or not output.exists():
        return {"states": {}, "kills": {}}
    found: dict[str, Any] = json.loads(output.read_text())
    return found


def keep(content: Mapping[str, Any], output: Path | None) -> None:
    if output is not None:
        output.write_text(json.dumps(content, indent=1) + "\n")


def results_of(device: str) -> Path:
    """The file that this machine's figures are kept in."""
    machine = f"{os.cpu_count()}-cores"
    if device == "cuda":
        machine = re.sub(r"[^a-z0-9]+", "-", this_machine().name.lower())
    return RESULTS / f"peers-{machine}.json"


def write_page(content: Mapping[str, Any], name: str) -> None:
    """The page ``name`` and its plots."""
    (DOCS / "development" / f"{name}.md").write_text(render(content, name))
    for state, found in content["states"].items():
        (DOCS / "images" / f"{name}-{state}.svg").write_text(plot(found["peers"]))


def main(argv: Sequence[str] | None = None) -> int:
    asked = parse(argv)
    page = "peers-gpu" if asked.device == "cuda" else "peers"
    if asked.render:
        write_page(json.loads((asked.output or results_of(asked.device)).read_text()), page)
        return 0
    if asked.threads is not None:
        torch.set_num_threads(asked.threads)  # the machine's name says how many
    whole = asked.output is None and asked.only is None
    output: Path | None = results_of(asked.device) if whole else asked.output
    with tempfile.TemporaryDirectory(dir=asked.directory, prefix="checkflow-peers-") as name:
        directory = Path(name).resolve()
        environment = {
            "machine": this_machine().name,
            "memory_bytes": psutil.virtual_memory().total,
            "filesystem": filesystem(directory),
            "versions": versions(asked.peers),
            "every": asked.every,
            "threads": torch.get_num_threads(),
        }
        content = begin(output)
        for state in asked.states if asked.rounds else ():
            content["states"][state] = {"environment": environment, **measure(asked, state, directory)}
            keep(content, output)  # what hours have made outlives what comes after
        if asked.kills or (asked.kills is None and not content["kills"]):
            peers = kill(asked, directory)
            content["kills"] = {"environment": environment, "state": asked.states[0], "peers": peers}
            keep(content, output)
    if whole:
        write_page(content, page)
    lines = missed(content)
    if OURS in asked.peers:
        print("\n".join(lines) or "checkflow reaches its bars")
    return 1 if lines else 0


if __name__ == "__main__":
    raise SystemExit(main())
