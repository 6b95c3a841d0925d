"""CheckFreq's evaluation of adaptive frequencies (its table 5), in small, on this CPU: a job gets a neighbour.

One job trains without checkpoints, with the interval that checkflow's policy changes ("adaptive"), and with the one it
had chosen when the neighbour came ("static"). A phase's overhead is its time over the mean of the same phase without
checkpoints, before and after.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import checkflow
from benchmarks.frequency import CASES, share_text
from benchmarks.neighbour import Kind, Neighbour
from benchmarks.ways import Plain, Planned, own_plan, real_step
from checkflow.core.units import format_rate, format_seconds, format_size
from checkflow.planner.measure.timing import spread_of

PHASES = ("alone", "disturbed", "alone again")
SETTINGS = ("static", "adaptive")
WINDOW = 10  # iterations in a line of the trace


@dataclass(frozen=True)
class Effort:
    """Rounds, and iterations of each phase."""

    rounds: int
    iterations: tuple[int, int, int]


FULL, QUICK = Effort(3, (160, 160, 320)), Effort(1, (20, 20, 20))


@dataclass(frozen=True)
class Job:
    """What all runs share."""

    step: checkflow.TrainingStep
    plan: checkflow.Plan
    overhead: float
    directory: Path
    kind: Kind
    neighbours: int


@dataclass(frozen=True)
class Run:
    """One training run: of each phase, each iteration's seconds, k after each window, and the checkpoints made durable
    in it; and k when the neighbour came."""

    seconds: tuple[tuple[float, ...], ...]
    intervals: tuple[tuple[int, ...], ...]
    k_before: int
    committed: tuple[int, ...]
    neighbour: Mapping[str, Any]


def run(way: Plain | Planned, neighbour: Neighbour, effort: Effort) -> Run:
    """Train through the three phases, window by window."""
    seconds: list[tuple[float, ...]] = []
    intervals: list[tuple[int, ...]] = []
    committed: list[int] = []
    chosen = 0
    with neighbour:
        for phase, iterations in zip(PHASES, effort.iterations, strict=True):
            before = way.committed
            if phase == "disturbed":
                if isinstance(way, Planned):
                    way.decide()  # if there were too few iterations for that
                chosen = way.interval
                neighbour.begin()
            taken: list[float] = []
            after: list[int] = []
            for first in range(0, iterations, WINDOW):  # to ask for k costs a report, and its way through the caches
                taken += way.run(min(WINDOW, iterations - first))
                after.append(way.interval)
            if phase == "disturbed":
                neighbour.end()
            seconds.append(tuple(taken))
            intervals.append(tuple(after))
            committed.append(way.committed - before)
    return Run(tuple(seconds), tuple(intervals), chosen, tuple(committed), neighbour.outcome)


def mean_of(first: Run, second: Run) -> Run:
    """Two runs without checkpoints as one: of each iteration, what it took in the mean."""
    seconds = tuple(
        tuple((one + other) / 2 for one, other in zip(*phase, strict=True))
        for phase in zip(first.seconds, second.seconds, strict=True)
    )
    return Run(seconds, first.intervals, first.k_before, first.committed, first.neighbour)


def overheads(run: Run, plain: Run) -> dict[str, float]:
    """By phase, and by a phase's second half: the share of time that checkpoints added."""
    found = {}
    for phase, with_them, without in zip(PHASES, run.seconds, plain.seconds, strict=True):
        half = len(with_them) // 2
        found[phase] = sum(with_them) / sum(without) - 1
        found[f"{phase}, settled"] = sum(with_them[half:]) / sum(without[half:]) - 1
    return found


def trace_of(run: Run, plain: Run) -> list[dict[str, Any]]:
    """Windows of iterations: overhead against the phase without checkpoints, and k at the end."""
    lines = []
    number = 0
    for phase, with_them, intervals, without in zip(PHASES, run.seconds, run.intervals, plain.seconds, strict=True):
        usual = sum(without) / len(without)
        for first in range(0, len(with_them), WINDOW):
            window = with_them[first : first + WINDOW]
            overhead = sum(window) / (usual * len(window)) - 1
            number += len(window)
            lines.append({"until": number, "phase": phase, "overhead": overhead, "k": intervals[first // WINDOW]})
    return lines


def one_round(job: Job, effort: Effort, number: int) -> dict[str, Any]:
    """The three runs, each with checkpoints and a neighbour of its own."""
    plan, directory = job.plan, job.directory / str(number)
    directory.mkdir()

    def neighbour() -> Neighbour:
        return Neighbour(job.kind, directory, job.neighbours)

    first = run(Plain(job.step), neighbour(), effort)
    with closing(Planned(job.step, directory / "adaptive", plan=plan, overhead=job.overhead)) as way:
        adaptive = run(way, neighbour(), effort)
        frequency = way.checkpointer.report()["frequency"]
    second = run(Plain(job.step), neighbour(), effort)
    plain = mean_of(first, second)
    every = adaptive.k_before
    with closing(Planned(job.step, directory / "static", plan=plan, every=every)) as way:
        way.run(4 * every)  # the first three checkpoints are audited, which later ones seldom are
        static = run(way, neighbour(), effort)
    return {
        "k": {
            "adaptive": {phase: chosen[-1] or every for phase, chosen in zip(PHASES, adaptive.intervals, strict=True)},
            "static": dict.fromkeys(PHASES, every),
        },
        "iteration_seconds": {
            phase: dataclasses.asdict(spread_of(seconds)) for phase, seconds in zip(PHASES, plain.seconds, strict=True)
        },
        "drift": {
            phase: sum(after) / sum(before) - 1
            for phase, before, after in zip(PHASES, first.seconds, second.seconds, strict=True)
        },
        "overhead": {"adaptive": overheads(adaptive, plain), "static": overheads(static, plain)},
        "neighbours": [one.neighbour for one in (first, adaptive, second, static)],
        "iterations_per_durable": {
            setting: {
                phase: iterations / count if count else None
                for phase, iterations, count in zip(PHASES, effort.iterations, one.committed, strict=True)
            }
            for setting, one in (("adaptive", adaptive), ("static", static))
        },
        "frequency": frequency,
        "trace": {"adaptive": trace_of(adaptive, plain), "static": trace_of(static, plain)},
    }


def lines_of(rounds: Sequence[Mapping[str, Any]], overhead: float) -> list[str]:
    """The table over all rounds, and the trace of the first one."""
    lines = [f"{'overhead, of all rounds':28} {'static':>26} {'adaptive':>26}   ({overhead:.1%} allowed)"]
    for phase in rounds[0]["overhead"]["static"]:
        lines.append(_line(phase, (_shares(rounds, setting, phase) for setting in SETTINGS)))
    lines.append("k, in each round; and iterations for each checkpoint that became durable")
    for phase in PHASES:
        lines.append(_line(phase, (_intervals(rounds, setting, phase) for setting in SETTINGS)))
    lines.append("drift, training without checkpoints after the adaptive run against before it")
    for phase in PHASES:
        lines.append(_line(phase, [", ".join(f"{one['drift'][phase]:+.1%}" for one in rounds)]))
    within = sum(one["overhead"]["adaptive"]["disturbed"] <= overhead for one in rounds)
    back = sum(_came_back(one["k"]["adaptive"]) for one in rounds)
    lines.append(
        f"adaptive: within {overhead:.1%} over all iterations beside the neighbour in {within} of {len(rounds)} "
        f"rounds; k is back afterwards in {back}"
    )
    lines.append("the first round, by windows of iterations: overhead (k)")
    traces = [rounds[0]["trace"][setting] for setting in SETTINGS]
    for windows in zip(*traces, strict=True):
        name = f"to {windows[0]['until']}, {windows[0]['phase']}"
        lines.append(_line(name, (f"{one['overhead']:.1%} ({one['k']})" for one in windows)))
    return lines


def _came_back(k: Mapping[str, int]) -> bool:
    """Whether k is in the end within half as much again of what it was at first, or one iteration."""
    return k["alone again"] <= max(1.5 * k["alone"], k["alone"] + 1)


def _line(name: str, cells: Iterable[str]) -> str:
    return f"{name:28} " + " ".join(f"{cell:>26}" for cell in cells)


def _shares(rounds: Sequence[Mapping[str, Any]], setting: str, phase: str) -> str:
    return share_text(dataclasses.asdict(spread_of([one["overhead"][setting][phase] for one in rounds])))


def _intervals(rounds: Sequence[Mapping[str, Any]], setting: str, phase: str) -> str:
    ks = ", ".join(str(one["k"][setting][phase]) for one in rounds)
    durable = ", ".join(
        "none" if (found := one["iterations_per_durable"][setting][phase]) is None else f"{found:.1f}" for one in rounds
    )
    return f"{ks}; {durable}"


def main(argv: Sequence[str] | None = None) -> int:
    cores = os.cpu_count() or 1
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--neighbour", choices=["disk", "cpu"], default="disk")
    parser.add_argument("--neighbours", type=int, help="threads of it [4 that write, or 1 that computes]")
    parser.add_argument("--model", choices=list(CASES), default="digits")
    parser.add_argument("--overhead", type=float, default=0.05, help="p, a share of training's time")
    parser.add_argument("--threads", type=int, default=max(1, cores - 1), help="that training has")
    parser.add_argument("--directory", type=Path, help="on the disk that is to be written [the temporary folder]")
    parser.add_argument("--quick", action="store_true", help="one short round, to see that it runs")
    parser.add_argument("--rounds", type=int, help=f"[{FULL.rounds}, with --quick {QUICK.rounds}]")
    parser.add_argument("--output", type=Path)
    chosen = parser.parse_args(argv)
    if not 0 < chosen.overhead < 1:
        parser.error(f"--overhead must be a share such as 0.05, not {chosen.overhead}")
    if chosen.neighbours is None:
        chosen.neighbours = 4 if chosen.neighbour == "disk" else 1
    torch.set_num_threads(chosen.threads)
    case, effort = CASES[chosen.model], QUICK if chosen.quick else FULL
    effort = dataclasses.replace(effort, rounds=chosen.rounds or effort.rounds)
    with tempfile.TemporaryDirectory(dir=chosen.directory, prefix="checkflow-interference-") as name:
        directory = Path(name)
        step = real_step(case.model, case.batch_size, case.optimizer)
        plan = own_plan(step, directory / "planning", chosen.overhead)
        job = Job(step, plan, chosen.overhead, directory, chosen.neighbour, chosen.neighbours)
        rounds = [one_round(job, effort, number) for number in range(effort.rounds)]
    state_bytes = sum(spec.size_bytes for spec in plan.fingerprint.state)
    usual = rounds[0]["iteration_seconds"]["alone"]["median"]
    told = rounds[0]["neighbours"][0]
    print(
        f"{case.model}, batch {case.batch_size}: state {format_size(state_bytes)}, an iteration {format_seconds(usual)}"
        f" alone; beside it {chosen.neighbours} threads: "
        + (f"{format_rate(told['bytes_per_second'])} written" if chosen.neighbour == "disk" else "products of matrices")
    )
    print("\n".join(lines_of(rounds, chosen.overhead)))
    where = {"machine": f"{cores} cores", "torch": torch.__version__, "python": platform.python_version()}
    asked = {key: getattr(chosen, key) for key in ("model", "neighbour", "neighbours", "overhead", "threads")}
    content = {**where, **asked, "state_bytes": state_bytes, "rounds": rounds}
    results = Path(__file__).parent / "results" / f"interference-{chosen.neighbour}-{cores}-cores.json"
    if (output := chosen.output or (None if chosen.quick else results)) is not None:
        output.write_text(json.dumps(content, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
