"""CheckFreq's evaluation of its mechanism and of its frequency (its tables 3 and 4, figure 7), in small, on this CPU.

``python -m benchmarks.frequency [--only resnet18 …] [--overhead 0.035] [--quick]``: a table for each model, and all of
it as JSON in ``benchmarks/results/frequency-<cores>-cores.json`` (``--output``; with ``--quick`` nowhere else).

Shipped models train for real, on all cores but one (``--threads``): the last core stands in for what a GPU has of its
own, the link and the host's CPUs that copy and write. Each of five ways of making checkpoints (:mod:`benchmarks.ways`)
and training without any take turns in one process, in blocks of as many iterations, so that a machine whose speed
drifts drifts for all; beside them the hardware's own limits, one memcpy and one fsynced write of as many bytes.

Figures, each the median of all rounds, with its quartiles:

held       seconds for which the training thread waited or copied, for each checkpoint (table 3's "stall")
cost       seconds by which a block took longer than the same iterations without checkpoints, for each checkpoint:
           what is held, and what training loses to copies and writes that share memory and cores with it
overhead   the same as a share of training's time, at one interval k for all ways: the one that Algorithm 1 of CheckFreq
           picks for CheckFreq's own way from what was profiled (figure 7)
k          for each way the interval that Algorithm 1 picks from the profile, and the one that keeps its measured cost
           within the overhead; with the second, checkpoints in an epoch (table 4): one epoch of the model's data set
live       checkflow without a given interval: the k that its policy has come to, and the overhead then
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import math
import os
import platform
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import checkflow
from benchmarks.cpu_overhead import RawLimits, timed
from benchmarks.ways import BASELINES, Plain, Planned, Staged, TorchSave, Way, own_plan, real_step
from checkflow.hardware import format_seconds, format_size
from checkflow.planner.timing import Spread, spread_of

IMAGENET, DIGITS = 1_281_167, 1_437  # samples in an epoch
PLAIN, OURS = "plain", "checkflow"


@dataclass(frozen=True)
class Case:
    """A training job that two cores can run. Momentum doubles the state, as in the paper's models."""

    model: str
    batch_size: int
    optimizer: str | None  # None: the model's own
    samples: int

    @property
    def epoch_iterations(self) -> int:
        return math.ceil(self.samples / self.batch_size)


CASES = {
    case.model: case
    for case in (
        Case("digits", 32, None, DIGITS),
        Case("mnasnet", 8, "momentum", IMAGENET),
        Case("resnet18", 4, "momentum", IMAGENET),
        Case("alexnet", 4, "momentum", IMAGENET),
    )
}


@dataclass(frozen=True)
class Effort:
    """How much is measured: rounds, the least length of a block, and repetitions of what is profiled."""

    rounds: int
    block_seconds: float
    repetitions: int


FULL, QUICK = Effort(5, 1.2, 7), Effort(2, 0.3, 3)


@dataclass(frozen=True)
class Profile:
    """What CheckFreq profiles (its section 4.3.2), in seconds. On a CPU both of its copies are within one memory."""

    iteration: Spread  # T_i
    update: Spread  # T_w
    held_copy: Spread  # T_g: training stands still, and helps
    copy: Spread  # T_c: by a thread of its own
    commit: Spread  # T_s
    torch_save: Spread  # copy and write in one

    def critical_seconds(self, plan: checkflow.Plan) -> dict[str, tuple[float, float]]:
        """By way: (what one checkpoint holds training for, what it takes from its begin until it is durable).

        Algorithm 1's T_o and T_c + T_s, as each way has them; CheckFreq's own is its CPU mode, "persist" its GPU mode.
        """
        copy, commit = self.copy.median, self.commit.median
        beside = max(0.0, copy - (self.iteration.median - self.update.median))
        held = self.held_copy.median
        return {
            "torch.save": (self.torch_save.median, self.torch_save.median),
            "store": (held + commit, held + commit),
            "persist": (held, held + commit),
            "CheckFreq": (beside, copy + commit),
            OURS: (plan.stall_seconds, plan.stall_seconds + commit),  # one is gathered while one is committed
        }


def pick_interval(critical_seconds: float, whole_seconds: float, iteration_seconds: float, overhead: float) -> int:
    """The last lines of CheckFreq's Algorithm 1: the least k at which checkpoints follow each other without a wait, and
    what they hold training for stays within ``overhead`` of its time."""
    followed = math.ceil((whole_seconds - critical_seconds) / iteration_seconds)
    return max(1, followed, math.ceil(critical_seconds / (overhead * iteration_seconds)))


@dataclass(frozen=True)
class Block:
    """As many iterations as all blocks of a round have, under one way."""

    seconds: float  # until its last checkpoint was durable
    held_seconds: float
    checkpoints: int


@dataclass(frozen=True)
class Figures:
    """One way, over all rounds: see the module's text."""

    held_seconds: Spread
    cost_seconds: Spread
    overhead: Spread


def figures_of(blocks: Sequence[Block], plain: Sequence[Block]) -> Figures:
    """Each block beside the one of its round without checkpoints.

    Raises:
        ValueError: there is no round.
    """
    pairs = list(zip(blocks, plain, strict=True))
    return Figures(
        spread_of([block.held_seconds / block.checkpoints for block in blocks]),
        spread_of([(block.seconds - base.seconds) / block.checkpoints for block, base in pairs]),
        spread_of([block.seconds / base.seconds - 1 for block, base in pairs]),
    )


def block_iterations(every: int, iteration_seconds: float, least_seconds: float) -> int:
    """The least multiple of ``every`` that lasts so long."""
    return every * max(1, math.ceil(least_seconds / (every * iteration_seconds)))


def turns(names: Sequence[str], number: int) -> list[str]:
    """The order of a round: each round another one begins."""
    first = number % len(names)
    return [*names[first:], *names[:first]]


def run_block(way: Way, iterations: int) -> Block:
    held, checkpoints = way.held_seconds, way.checkpoints
    seconds = timed(lambda: (way.run(iterations), way.settle()))
    return Block(seconds, way.held_seconds - held, way.checkpoints - checkpoints)


def profile(step: checkflow.TrainingStep, directory: Path, repetitions: int) -> Profile:
    """Measure what Algorithm 1 asks for, on a machine that does nothing else."""
    times: dict[str, list[float]] = {field.name: [] for field in dataclasses.fields(Profile)}
    begun: list[float] = []
    hooks = []
    for optimizer in step.optimizers.values():
        hooks.append(optimizer.register_step_pre_hook(lambda *_: begun.append(time.perf_counter())))
        hooks.append(
            optimizer.register_step_post_hook(lambda *_: times["update"].append(time.perf_counter() - begun.pop()))
        )
    times["iteration"] += Plain(step).run(repetitions)
    for hook in hooks:
        hook.remove()
    with ExitStack() as open_ways:
        saved = open_ways.enter_context(closing(TorchSave(step, 1, directory / "torch.save")))
        staged = open_ways.enter_context(
            closing(Staged(step, 1, directory / "staged", copies_beside=False, commits_beside=False))
        )
        for number in range(repetitions):
            times["held_copy"].append(staged.measure_copy(helped=True))
            times["copy"].append(staged.measure_copy(helped=False))
            times["commit"].append(staged.measure_commit(number))
            times["torch_save"].append(timed(lambda n=number: saved.save(n)))  # type: ignore[misc]
    return Profile(**{name: spread_of(seconds) for name, seconds in times.items()})


def take_turns(
    case: Case, step: checkflow.TrainingStep, plan: checkflow.Plan, every: int, iterations: int, effort: Effort,
    directory: Path,
) -> tuple[dict[str, list[Block]], dict[str, Spread]]:  # fmt: skip
    """All ways in turns, at one interval, after a warm-up each; and the hardware's limits, once a round.

    Args:
        step: trained without checkpoints and by the baselines; checkflow has a copy of its own, where its hooks stay.
        iterations: of a block.
    """
    with ExitStack() as open_ways:
        ways: dict[str, Way] = {PLAIN: Plain(step)}
        for name, make in BASELINES.items():
            ways[name] = open_ways.enter_context(closing(make(step, every, directory / name)))
        other = real_step(case.model, case.batch_size, case.optimizer)
        ways[OURS] = open_ways.enter_context(closing(Planned(other, directory / OURS, plan=plan, every=every)))
        raw = RawLimits(directory, sum(spec.size_bytes for spec in plan.fingerprint.state))
        for name, way in ways.items():
            # The first three checkpoints of a Checkpointer are audited, which later ones seldom are.
            run_block(way, (4 if name == OURS else 1) * every)
        blocks: dict[str, list[Block]] = {name: [] for name in ways}
        copies, writes = [], []
        for number in range(effort.rounds):
            for name in turns(list(ways), number):
                blocks[name].append(run_block(ways[name], iterations))
            copies.append(raw.copy_seconds())
            writes.append(raw.write_seconds())
    return blocks, {"memcpy": spread_of(copies), "write_and_fsync": spread_of(writes)}


def measure(case: Case, overhead: float, effort: Effort, where: Path | None) -> dict[str, Any]:
    """One model: its profile, its plan, and every way's figures."""
    with tempfile.TemporaryDirectory(dir=where, prefix="checkflow-frequency-") as name:
        directory = Path(name)
        step = real_step(case.model, case.batch_size, case.optimizer)
        plan = own_plan(step, directory / "planning", overhead)
        taken = profile(step, directory, effort.repetitions)
        usual = taken.iteration.median
        critical = taken.critical_seconds(plan)
        picked = {way: pick_interval(*seconds, usual, overhead) for way, seconds in critical.items()}
        picked[OURS] = round_up(picked[OURS], plan.interval)
        every = round_up(picked["CheckFreq"], plan.interval)
        iterations = block_iterations(every, usual, effort.block_seconds)
        blocks, raw = take_turns(case, step, plan, every, iterations, effort, directory)
    rows = {}
    for way in critical:
        figures = figures_of(blocks[way], blocks[PLAIN])
        # Whatever the checkpoint's cost is made of, training pays it; the rest is hidden behind it.
        kept = pick_interval(max(0.0, figures.cost_seconds.median), critical[way][1], usual, overhead)
        kept = round_up(kept, plan.interval) if way == OURS else kept
        rows[way] = {
            **dataclasses.asdict(figures),
            "profiled_every": picked[way],
            "measured_every": kept,
            "checkpoints_per_epoch": case.epoch_iterations // kept,
        }
    return {
        "model": case.model,
        "batch_size": case.batch_size,
        "optimizer": case.optimizer or "its own",
        "state_bytes": sum(spec.size_bytes for spec in plan.fingerprint.state),
        "epoch_iterations": case.epoch_iterations,
        "profile": dataclasses.asdict(taken),
        "plan": {"interval": plan.interval, "stall_seconds": plan.stall_seconds},
        "raw": {name: dataclasses.asdict(seconds) for name, seconds in raw.items()},
        "every": every,
        "block_iterations": iterations,
        "ways": rows,
    }


def round_up(every: int, interval: int) -> int:
    """The least multiple of a plan's interval that is no less."""
    return -(-every // interval) * interval


def time_text(seconds: Mapping[str, float]) -> str:
    """A spread for people: the median, and where the middle half lies."""
    middle = [format_seconds(abs(seconds[key])) for key in ("lower", "upper")]
    signs = ["-" if seconds[key] < 0 else "" for key in ("lower", "upper")]
    sign = "-" if seconds["median"] < 0 else ""
    return f"{sign}{format_seconds(abs(seconds['median']))} ({signs[0]}{middle[0]} to {signs[1]}{middle[1]})"


def share_text(share: Mapping[str, float]) -> str:
    return f"{share['median']:.1%} ({share['lower']:.1%} to {share['upper']:.1%})"


def lines_of(row: Mapping[str, Any]) -> list[str]:
    """The table of one model."""
    taken, raw, plan = row["profile"], row["raw"], row["plan"]
    size = format_size(row["state_bytes"])
    lines = [
        f"{row['model']}, batch {row['batch_size']}, optimizer {row['optimizer']}: state {size}, an iteration "
        f"{time_text(taken['iteration'])}, {format_seconds(taken['update']['median'])} of it the update",
        f"limits: memcpy {time_text(raw['memcpy'])}, write and fsync {time_text(raw['write_and_fsync'])}",
        f"profile: copy {time_text(taken['copy'])}, commit {time_text(taken['commit'])}; plan: interval "
        f"{plan['interval']}, stall {format_seconds(plan['stall_seconds'])}",
        f"a checkpoint every {row['every']} iterations; k by the profile, by the cost; checkpoints in an epoch of "
        f"{row['epoch_iterations']} iterations",
        f"{'way':10} {'held':>32} {'cost':>32} {'overhead':>24} {'k':>9} {'an epoch':>9}",
    ]
    for way, found in row["ways"].items():
        intervals = f"{found['profiled_every']}, {found['measured_every']}"
        lines.append(
            f"{way:10} {time_text(found['held_seconds']):>32} {time_text(found['cost_seconds']):>32} "
            f"{share_text(found['overhead']):>24} {intervals:>9} {found['checkpoints_per_epoch']:9}"
        )
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    cores = os.cpu_count() or 1
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="*", choices=list(CASES), default=list(CASES))
    parser.add_argument("--overhead", type=float, default=0.035, help="p, a share of training's time")
    parser.add_argument("--threads", type=int, default=max(1, cores - 1), help="that training has")
    parser.add_argument("--directory", type=Path, help="on the disk that is to be written [the temporary folder]")
    parser.add_argument("--quick", action="store_true", help="few rounds of the smallest model; see that it runs")
    parser.add_argument("--output", type=Path)
    chosen = parser.parse_args(argv)
    if not 0 < chosen.overhead < 1:
        parser.error(f"--overhead must be a share such as 0.035, not {chosen.overhead}")
    torch.set_num_threads(chosen.threads)
    only = chosen.only[:1] if chosen.quick else chosen.only
    rows = []
    for name in only:
        row = measure(CASES[name], chosen.overhead, QUICK if chosen.quick else FULL, chosen.directory)
        rows.append(row)
        print("\n".join(lines_of(row)), flush=True)
        gc.collect()
    where = {"machine": f"{cores} cores", "torch": torch.__version__, "python": platform.python_version()}
    content = {**where, "threads": chosen.threads, "overhead": chosen.overhead, "models": rows}
    default = None if chosen.quick else Path(__file__).parent / "results" / f"frequency-{cores}-cores.json"
    if (output := chosen.output or default) is not None:
        output.write_text(json.dumps(content, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
