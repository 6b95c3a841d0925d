"""Training that is killed with SIGKILL three times, and what that cost: ``checkflow demo``.

:mod:`checkflow.demo.training` runs as a process of its own, uninterrupted and without checkpoints, which gives the true
result, and again with a checkpoint every iteration while this module kills it. What is compared comes from the journals
and the final states; only that no checkpoint failed is the checkpointer's own word.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import checkflow
from checkflow.core.errors import CheckflowError
from checkflow.torture.journal import JournalReader, Line, read_journal
from checkflow.torture.processes import POLL_SECONDS, Child, below, nothing_left, start, tail

RUN_LIMIT_SECONDS = 900.0  # a run that has not ended by then hangs, on a slow machine too
# While an iteration runs, one checkpoint is gathered, one may be committed, and its own step may be in the journal.
MOST_REPLAYED_ITERATIONS = 3


@dataclass(frozen=True, slots=True)
class DemoKill:
    """One SIGKILL and what it cost."""

    place: str  # "training" or "validation"
    iteration: int  # iterations that the job had done
    resumed_from: int

    @property
    def replayed(self) -> int:
        return self.iteration - self.resumed_from


@dataclass(frozen=True, slots=True)
class Check:
    """One claim, whether it holds, and what was seen."""

    claim: str
    holds: bool
    seen: str


@dataclass(frozen=True)
class DemoResult:
    """What the demo saw."""

    iterations: int
    epochs: int
    accuracy: float
    kills: tuple[DemoKill, ...]
    checks: tuple[Check, ...]
    seconds_without: float  # median of an iteration, without checkpoints
    seconds_with: float  # likewise, with a durable checkpoint every iteration
    held_seconds: float  # of it, for how long checkpointing held the training thread (mean, after the last kill)
    checkpoint_bytes: int

    @property
    def passed(self) -> bool:
        return all(check.holds for check in self.checks)


@dataclass(frozen=True, slots=True)
class KillPoint:
    """When to kill: after a step (of an iteration) or a validation (of an epoch) has begun, and a little later."""

    event: str  # "step" or "validation"
    number: int
    delay_seconds: float


class Run:
    """The training script as a child process, started as often as it takes."""

    def __init__(self, folder: Path, name: str, epochs: int, seed: int, plan: Path | None) -> None:
        self.journal, self.result = folder / f"{name}.jsonl", folder / f"{name}.safetensors"
        self._log = folder / f"{name}.log"
        self._command = [sys.executable, "-P", "-m", "checkflow.demo.training"]
        self._command += ["--journal", str(self.journal), "--result", str(self.result)]
        self._command += ["--epochs", str(epochs), "--seed", str(seed)]
        if plan is not None:
            self._command += ["--plan", str(plan), "--directory", str(folder / "checkpoints")]
        # The child finds the checkflow that runs here, whether it is installed or not, and nothing of this folder.
        paths = [str(Path(checkflow.__file__).parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        self._deadline = time.monotonic() + RUN_LIMIT_SECONDS

    def train(self, point: KillPoint | None = None) -> None:
        """Run until the point comes, and kill; without one, to the end.

        Raises:
            CheckflowError: the training fails, ends before its kill, or hangs.
        """
        journal, strangers = JournalReader(self.journal, from_the_end=True), below()
        with nothing_left(strangers):
            job = start(self._command, self._log, strangers, env=self._env)
            while (code := job.process.poll()) is None:
                if point is not None and _kill_if_due(job.process, point, journal):
                    return
                if time.monotonic() > self._deadline:
                    raise CheckflowError(f"the training did not end within {RUN_LIMIT_SECONDS:.0f} s")
                time.sleep(POLL_SECONDS)
        if code or point is not None:
            said = tail(job, lines=1) or "it said nothing"
            raise CheckflowError(f"the training ended with exit code {code}: {said}")


def _kill_if_due(process: Child, point: KillPoint, journal: JournalReader) -> bool:
    journal.look()
    if not any(_reached(line, point) for line in journal.lines):
        return False
    if point.event == "validation" and journal.lines[-1]["event"] != "validation":
        return False  # this validation has passed: wait for the next one
    time.sleep(point.delay_seconds)
    if point.event == "validation":
        # A process that is stopped cannot leave validation between the look and the kill.
        os.kill(process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        journal.look()
        if journal.lines[-1]["event"] != "validation":
            os.kill(process.pid, signal.SIGCONT)
            return False
    os.kill(process.pid, signal.SIGKILL)
    return True


def _reached(line: Line, point: KillPoint) -> bool:
    """Whether this line of the journal is the point, or a later one of its kind."""
    number = line.get("iteration" if point.event == "step" else "epoch", -1)
    return bool(line["event"] == point.event and number >= point.number)


def choose_points(seed: int, epochs: int, steps_per_epoch: int, iteration_seconds: float) -> list[KillPoint]:
    """Three points in order: early in training, inside a validation, late in training."""
    chance = random.Random(seed)
    steps, middle = epochs * steps_per_epoch, (epochs - 1) // 2
    early = chance.randrange(2, (middle + 1) * steps_per_epoch - 1)
    late = chance.randrange((middle + 1) * steps_per_epoch + 1, steps - 2)
    return [
        KillPoint("step", early, chance.uniform(0, iteration_seconds)),
        KillPoint("validation", middle, chance.uniform(0, iteration_seconds / 2)),
        KillPoint("step", late, chance.uniform(0, iteration_seconds)),
    ]


def run(folder: Path, plan: Path, say: Callable[[str], None], *, epochs: int, seed: int) -> DemoResult:
    """Train, kill, resume and compare.

    Args:
        folder: empty; journals, checkpoints and results go here.
        plan: a plan file for the network of ``checkflow.models.digits`` at the script's batch size.
        say: gets what is about to be done, one line each.
        epochs: at least 3, so that training goes on after the validation that is killed.

    Raises:
        CheckflowError: a training run fails in a way that leaves nothing to compare.
    """
    if epochs < 3:
        raise CheckflowError(f"the demo needs at least 3 epochs, not {epochs}")
    before, after = (Run(folder, name, epochs, seed, None) for name in ("before", "after"))
    say("training without checkpoints, uninterrupted: the truth to compare with")
    before.train()
    lines = read_journal(before.journal)
    steps_per_epoch = len(_steps(lines)) // epochs

    job = Run(folder, "killed", epochs, seed, plan)
    for point in choose_points(seed, epochs, steps_per_epoch, _median_seconds(lines)):
        place = "iteration" if point.event == "step" else "the validation of epoch"
        say(f"training with a checkpoint every iteration, SIGKILL in {place} {point.number}")
        job.train(point)
    say("training on to the end")
    job.train()
    # Once more, so that whatever else the machine does weighs on both sides of the comparison of times.
    say("training without checkpoints again")
    after.train()
    return compare(before, job, after, epochs=epochs)


def compare(before: Run, job: Run, after: Run, *, epochs: int) -> DemoResult:
    """Hold the journal and the final state of the killed run against those of the uninterrupted ones."""
    lines, truth = read_journal(job.journal), _steps(read_journal(before.journal))
    kills = _kills(lines)
    report = lines[-1]["report"]
    accuracies = [line["accuracy"] for line in lines if line["event"] == "validated"]
    return DemoResult(
        iterations=len(truth),
        epochs=epochs,
        accuracy=accuracies[-1],
        kills=tuple(kills),
        checks=(
            _check_weights([before.result, after.result], job.result),
            _check_samples(_effective(lines), truth),
            _check_kills(kills),
            _check_report(report),
        ),
        seconds_without=_median_seconds([*read_journal(before.journal), *read_journal(after.journal)]),
        seconds_with=_median_seconds(lines),
        held_seconds=sum(report["held_seconds"].values()) / max(1, report["captures"]),
        checkpoint_bytes=report["checkpoint_bytes"] or 0,
    )


def _steps(lines: list[Line]) -> list[Line]:
    return [line for line in lines if line["event"] == "step"]


def _median_seconds(lines: list[Line]) -> float:
    """From one step to the next, where nothing came in between."""
    return statistics.median(
        float(line["at_seconds"] - before["at_seconds"])
        for before, line in itertools.pairwise(lines)
        if before["event"] == line["event"] == "step"
    )


def _kills(lines: list[Line]) -> list[DemoKill]:
    """Every start but the first came after a kill; the line before it says where that was."""
    kills, done = [], 0
    for before, line in itertools.pairwise(lines):
        if before["event"] == "step":
            done = before["iteration"] + 1
        if line["event"] == "start":
            place = "validation" if before["event"] == "validation" else "training"
            kills.append(DemoKill(place, done, line["iteration"]))
    return kills


def _effective(lines: list[Line]) -> list[Line]:
    """The steps that made the final state: a start takes back every step from its iteration on."""
    steps: list[Line] = []
    for line in lines:
        if line["event"] == "start":
            steps = [step for step in steps if step["iteration"] < line["iteration"]]
        elif line["event"] == "step":
            steps.append(line)
    return steps


def _check_weights(references: Sequence[Path], result: Path) -> Check:
    import torch
    from safetensors.torch import load_file

    have = load_file(result)
    odd: list[str] = []
    for want in map(load_file, references):
        odd += sorted(set(want) ^ set(have))
        odd += [name for name in want if name in have and not _same_bits(torch, want[name], have[name])]
    size = sum(tensor.nbytes for tensor in have.values())
    seen = f"{odd[0]} differs" if odd else f"{len(have)} tensors, {size} bytes"
    return Check("final state bit-identical to the uninterrupted runs'", not odd, seen)


def _same_bits(torch: Any, one: Any, other: Any) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return bool(torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8)))


def _check_samples(steps: list[Line], truth: list[Line]) -> Check:
    def order(lines: list[Line]) -> list[tuple[int, int, list[int]]]:
        return [(line["iteration"], line["epoch"], line["samples"]) for line in lines]

    samples: dict[int, list[int]] = {}
    for line in steps:
        samples.setdefault(line["epoch"], []).extend(line["samples"])
    size = len({sample for line in truth for sample in line["samples"]})
    once = all(sorted(epoch) == list(range(size)) for epoch in samples.values())
    holds = once and order(steps) == order(truth)
    seen = f"{size} samples in each of {len(samples)} epochs" if holds else "a sample is missing, doubled or misplaced"
    return Check("every sample once an epoch, in the same order", holds, seen)


def _check_kills(kills: list[DemoKill]) -> Check:
    worst = max((kill.replayed for kill in kills), default=0)
    inside = sum(kill.place == "validation" for kill in kills)
    holds = len(kills) == 3 and inside == 1 and all(0 <= kill.replayed <= MOST_REPLAYED_ITERATIONS for kill in kills)
    resumed = all(kill.resumed_from > 0 for kill in kills)
    return Check(
        "three kills, one in validation, little replayed",
        holds and resumed,
        f"{len(kills)} kills, {inside} in validation, at most {worst} replayed",
    )


def _check_report(report: dict[str, Any]) -> Check:
    failed, breaches = report["failed"], report["breaches"]
    return Check(
        "no checkpoint failed, no audit found a wrong byte",
        not failed and not breaches and report["committed"] > 0,
        f"{report['committed']} after the last kill, {failed} failed, {breaches} wrong",
    )
