"""CheckFreq's evaluation of its mechanism and of its frequency (its tables 3 and 4, figure 7), in small, on this CPU.

Models train for real on all cores but one, which stands in for a GPU's link. Five ways of making checkpoints
(:mod:`benchmarks.ways`) and training without any take turns in one process; each figure is the median of all rounds.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import math
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

import checkflow
from benchmarks.cpu_overhead import RawLimits, timed
from benchmarks.ways import BASELINES, Plain, Planned, Staged, TorchSave, Way, own_plan, real_step
from checkflow.core.units import format_seconds, format_size
from checkflow.planner.measure.timing import Spread, spread_of
from checkflow.runtime.interval import algorithm

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
        Case("mnasnet", 4, "momentum", IMAGENET),
        Case("resnet18", 2, "momentum", IMAGENET),
        Case("alexnet", 1, "momentum", IMAGENET),
    )
}


@dataclass(frozen=True)
class Effort:
    """How much is measured: rounds, the least length of a block, repetitions of what is profiled, and in what time."""

    rounds: int  # at most
    block_seconds: float
    repetitions: int
    seconds: float  # for one model, about; a share of it is for what the live policy does


FULL, QUICK = Effort(5, 1.0, 3, 60.0), Effort(2, 0.3, 3, 20.0)
LEAST_ROUNDS = 2
LIVE_SHARE = 0.3  # of a model's time


@dataclass(frozen=True)
class Profile:
    """What CheckFreq profiles (its section 4.3.2), in seconds. On a CPU both of its copies are within one memory."""

    iteration: Spread  # T_i
    update: Spread  # T_w
    held_copy: Spread  # T_g: training stands still, and helps
    copy: Spread  # T_c: by a thread of its own
    commit: Spread  # T_s
    torch_save: Spread  # copy and write in one

    def costs(self, plan: checkflow.Plan) -> dict[str, tuple[float, float]]:
        """By way: (what one checkpoint holds training for, what it takes besides until it is durable), in seconds.

        These are T_o and T_c + T_s - T_o of Algorithm 1, as each way has them: "persist" is CheckFreq's GPU mode,
        "CheckFreq" its CPU mode. checkflow gathers one checkpoint while it commits another.
        """
        copy, commit, held = self.copy.median, self.commit.median, self.held_copy.median
        late = max(0.0, copy - (self.iteration.median - self.update.median))
        return {
            "torch.save": (self.torch_save.median, 0.0),
            "store": (held + commit, 0.0),
            "persist": (held, commit),
            "CheckFreq": (late, copy + commit - late),
            OURS: (plan.stall_seconds, commit),
        }

    def algorithm_1(self, state_bytes: int, overhead: float) -> algorithm.Choice:
        """What CheckFreq would do here: its interval, and its mode."""
        room_bytes = psutil.virtual_memory().total - psutil.Process().memory_info().rss
        return algorithm.algorithm_1(
            iteration_seconds=self.iteration.median,
            copy_seconds=self.copy.median,
            write_seconds=self.commit.median,
            cpu_stall_seconds=max(0.0, self.copy.median - (self.iteration.median - self.update.median)),
            gpu_stall_seconds=self.held_copy.median,
            fits=room_bytes > state_bytes,
            overhead=overhead,
        )


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
    """The order of a round: each round another one begins, and every second one goes backwards, so that none comes
    after the same one each time."""
    first = number % len(names)
    order = [*names[first:], *names[:first]]
    return order if number % 2 == 0 else [order[0], *reversed(order[1:])]


def run_block(way: Way, iterations: int) -> Block:
    held, checkpoints = way.held_seconds, way.checkpoints

    def work() -> None:
        way.run(iterations)
        way.settle()

    seconds = timed(work)
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
        saved = open_ways.enter_context(closing(TorchSave(step, 1, directory / "profiled-torch.save")))
        staged = open_ways.enter_context(
            closing(Staged(step, 1, directory / "profiled", copies_beside=False, commits_beside=False))
        )
        for number in range(repetitions):
            times["held_copy"].append(staged.measure_copy(helped=True))
            times["copy"].append(staged.measure_copy(helped=False))
            times["commit"].append(staged.measure_commit(number))
            times["torch_save"].append(timed(lambda n=number: saved.save(n)))  # type: ignore[misc]
    return Profile(**{name: spread_of(seconds) for name, seconds in times.items()})


def take_turns(
    case: Case, step: checkflow.TrainingStep, plan: checkflow.Plan, every: int, iterations: int, effort: Effort,
    directory: Path, end: float,
) -> tuple[dict[str, list[Block]], dict[str, Spread]]:  # fmt: skip
    """All ways in turns, at one interval, after a warm-up each; and the hardware's limits, once a round.

    Args:
        step: trained without checkpoints and by the baselines; checkflow has a copy of its own, where its hooks stay.
        iterations: of a block.
        end: by time.monotonic; no round but the first ``LEAST_ROUNDS`` begins after it.
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
            if number >= LEAST_ROUNDS and time.monotonic() > end:
                break
            for name in turns(list(ways), number):
                blocks[name].append(run_block(ways[name], iterations))
            copies.append(raw.copy_seconds())
            writes.append(raw.write_seconds())
    return blocks, {"memcpy": spread_of(copies), "write_and_fsync": spread_of(writes)}


def measure_live(
    case: Case, step: checkflow.TrainingStep, plan: checkflow.Plan, overhead: float, effort: Effort, directory: Path
) -> dict[str, Any] | None:
    """What the policy comes to by itself, and what it costs: between two halves of the same training without it.

    None: it has chosen no interval in the model's time.

    Args:
        step: trained without checkpoints; checkflow has a copy of its own.
    """
    other = real_step(case.model, case.batch_size, case.optimizer)
    with closing(Planned(other, directory, plan=plan, overhead=overhead)) as way:
        if not way.decide(effort.seconds):
            return None
        usual = way.checkpointer.report()["frequency"]["baseline_seconds"]
        least_seconds = min(2.5 * effort.block_seconds, LIVE_SHARE * effort.seconds / 4)
        half = block_iterations(way.interval, usual, least_seconds)
        plain = sum(Plain(step).run(half))
        captures, committed = way.checkpoints, way.committed
        seconds = sum(way.run(2 * half))
        captures, committed = way.checkpoints - captures, way.committed - committed
        frequency = way.checkpointer.report()["frequency"]
        plain += sum(Plain(step).run(half))
    return {
        "overhead": seconds / plain - 1,
        "iterations": 2 * half,
        "captures": captures,
        "committed": committed,
        "frequency": frequency,
    }


def pick(unit: int, iteration_seconds: float, hidden_seconds: float, cost_seconds: float, overhead: float) -> int:
    """The least interval at which checkpoints follow each other without a wait, and cost no more than ``overhead``."""
    every = algorithm.join(unit, iteration_seconds, hidden_seconds, cost_seconds, overhead)
    assert every is not None  # only where nothing may be paid
    return every


def measure(case: Case, overhead: float, effort: Effort, where: Path | None) -> dict[str, Any]:
    """One model: its profile, its plan, and every way's figures."""
    end = time.monotonic() + (1 - LIVE_SHARE) * effort.seconds
    with tempfile.TemporaryDirectory(dir=where, prefix="checkflow-frequency-") as name:
        directory = Path(name)
        step = real_step(case.model, case.batch_size, case.optimizer)
        plan = own_plan(step, directory / "planning", overhead)
        state_bytes = sum(spec.size_bytes for spec in plan.fingerprint.state)
        taken = profile(step, directory, effort.repetitions)
        usual = taken.iteration.median
        picked = taken.algorithm_1(state_bytes, overhead)
        assert picked.interval is not None
        every = algorithm.least_multiple(plan.interval, picked.interval)
        iterations = block_iterations(every, usual, effort.block_seconds)
        blocks, raw = take_turns(case, step, plan, every, iterations, effort, directory, end)
        live = measure_live(case, step, plan, overhead, effort, directory / "live")
    usual = statistics.median(block.seconds for block in blocks[PLAIN]) / iterations  # while all of this was measured
    rows = {}
    for way, (held, hidden) in taken.costs(plan).items():
        figures = figures_of(blocks[way], blocks[PLAIN])
        unit = plan.interval if way == OURS else 1
        # Whatever it consists of, training pays a checkpoint's cost.
        kept = pick(unit, usual, hidden, max(0.0, figures.cost_seconds.median), overhead)
        rows[way] = {
            **dataclasses.asdict(figures),
            "profiled_every": pick(unit, usual, hidden, held, overhead),
            "measured_every": kept,
            "checkpoints_per_epoch": case.epoch_iterations // kept,
        }
    return {
        "model": case.model,
        "batch_size": case.batch_size,
        "optimizer": case.optimizer or "its own",
        "state_bytes": state_bytes,
        "epoch_iterations": case.epoch_iterations,
        "profile": dataclasses.asdict(taken),
        "algorithm_1": dataclasses.asdict(picked),
        "plan": {"interval": plan.interval, "stall_seconds": plan.stall_seconds},
        "raw": {name: dataclasses.asdict(seconds) for name, seconds in raw.items()},
        "every": every,
        "block_iterations": iterations,
        "rounds": len(blocks[PLAIN]),
        "ways": rows,
        "live": live,
    }


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
        f"{plan['interval']}, stall {format_seconds(plan['stall_seconds']) if plan['stall_seconds'] else 'none'}",
        f"a checkpoint every {row['every']} iterations, {row['rounds']} rounds; k by the profile, by the cost; "
        f"checkpoints in an epoch of {row['epoch_iterations']} iterations",
        f"{'way':10} {'held':>32} {'cost':>32} {'overhead':>24} {'k':>9} {'an epoch':>9}",
    ]
    for way, found in row["ways"].items():
        intervals = f"{found['profiled_every']}, {found['measured_every']}"
        lines.append(
            f"{way:10} {time_text(found['held_seconds']):>32} {time_text(found['cost_seconds']):>32} "
            f"{share_text(found['overhead']):>24} {intervals:>9} {found['checkpoints_per_epoch']:9}"
        )
    live = row["live"]
    if live is None:
        return [*lines, "live: the policy chose no interval in this time"]
    chosen = live["frequency"]
    lines.append(
        f"live: a durable checkpoint every {chosen['disk_interval']} iterations, one in memory every "
        f"{chosen['memory_interval']} ({chosen['reason']}); overhead {live['overhead']:.1%} over {live['iterations']} "
        f"iterations ({live['committed']} durable, {live['captures']} captured), by its own measure "
        f"{chosen['overhead_share']:.1%}"
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
    parser.add_argument("--rounds", type=int, help=f"[{FULL.rounds}, with --quick {QUICK.rounds}]")
    parser.add_argument("--seconds", type=float, help=f"for each model, about [{FULL.seconds:g}]")
    parser.add_argument("--output", type=Path)
    chosen = parser.parse_args(argv)
    if not 0 < chosen.overhead < 1:
        parser.error(f"--overhead must be a share such as 0.035, not {chosen.overhead}")
    if chosen.seconds is not None and not chosen.seconds > 0:
        parser.error(f"--seconds must be more than 0, not {chosen.seconds}")
    torch.set_num_threads(chosen.threads)
    only = chosen.only[:1] if chosen.quick else chosen.only
    effort = QUICK if chosen.quick else FULL
    effort = dataclasses.replace(
        effort, rounds=chosen.rounds or effort.rounds, seconds=chosen.seconds or effort.seconds
    )
    rows = []
    for name in only:
        row = measure(CASES[name], chosen.overhead, effort, chosen.directory)
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
