"""What a checkpoint of every iteration costs a training job on this machine's CPU, as ratios within one run.

Plain training, training with every boundary captured, and training with every iteration committed take turns in one
process: a machine whose speed drifts drifts for all. Beside them: one memcpy and one fsynced write of the whole state.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import checkflow
from checkflow.core.machine.device import find_device
from checkflow.core.units import format_seconds, format_size
from checkflow.planner.pipeline import Subject, plan_model
from checkflow.planner.schedule.scheduler import PlanRequest

WARM_UP = 5  # iterations
MODES = {"plain": None, "captured": {"every": None}, "durable": {"every": 1}}


def real_step(model: str) -> checkflow.TrainingStep:
    """A shipped model with real tensors (the planner's loader would build it without memory)."""
    step: checkflow.TrainingStep = importlib.import_module(f"checkflow.models.{model}").build(batch_size=32)
    return step


def plan_for(model: str) -> checkflow.Plan:
    """The plan that ``checkflow plan MODEL --device cpu`` would make."""
    device = find_device("cpu")
    request = PlanRequest(
        bandwidth_bytes_per_second=device.link_bandwidth_bytes_per_second,
        memory_bandwidth_bytes_per_second=device.memory_bandwidth_bytes_per_second,
    )
    outcome = plan_model(Subject(model, 32, {}, None), device, request, "segment").outcome
    if outcome.plan is None:
        raise SystemExit(f"{model} has no plan on the CPU: {outcome.explanation}")
    return outcome.plan


def timed(function: Callable[[], object]) -> float:
    begun = time.perf_counter()
    function()
    return time.perf_counter() - begun


class RawLimits:
    """The hardware's own limits: one copy, and one durable write, of as many bytes as the state has."""

    def __init__(self, directory: Path, size_bytes: int) -> None:
        self._path = directory / "raw"
        self._source, self._target = bytearray(os.urandom(size_bytes)), bytearray(size_bytes)
        self.copy_seconds()  # touches the target

    def copy_seconds(self) -> float:
        """One memcpy between two touched places of host memory."""
        target, source = ((ctypes.c_char * len(one)).from_buffer(one) for one in (self._target, self._source))
        return timed(lambda: ctypes.memmove(target, source, len(self._source)))

    def write_seconds(self) -> float:
        """One write and fsync into a new file, which is removed afterwards."""
        seconds = timed(self._write)
        self._path.unlink()
        return seconds

    def _write(self) -> None:
        with open(self._path, "xb", buffering=0) as file:
            rest = memoryview(self._source)
            while rest:
                rest = rest[file.write(rest) :]  # one call takes 2 GiB at most
            os.fsync(file.fileno())


def run_round(
    step: checkflow.TrainingStep, iterations: int, options: dict[str, Any] | None, plan: checkflow.Plan
) -> tuple[list[float], dict[str, Any] | None]:
    """Seconds of each iteration and, where there was a Checkpointer, what its report grew by; both after the warm-up.

    The first iterations are left out: the first three checkpoints are audited, which later ones seldom are.
    """
    seconds: list[float] = []
    if options is None:
        for _ in range(iterations):
            seconds.append(timed(lambda: step.run(step.batch)))
        return seconds[WARM_UP:], None
    with tempfile.TemporaryDirectory() as directory:
        checkpointer = checkflow.Checkpointer(
            step.models, step.optimizers, directory=directory, plan=plan, audit=0, **options
        )
        with checkpointer:
            last = time.perf_counter()
            for n in checkpointer.steps(iterations):
                if n == WARM_UP:
                    warm = checkpointer.report()
                step.run(step.batch)
                now = time.perf_counter()
                seconds.append(now - last)
                last = now
    return seconds[WARM_UP:], growth(warm, checkpointer.report())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="digits")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--iterations", type=int, default=20)
    arguments = parser.parse_args()
    if arguments.iterations <= WARM_UP:
        parser.error(f"--iterations must be more than {WARM_UP}")
    plan = plan_for(arguments.model)
    torch.manual_seed(0)
    step = real_step(arguments.model)
    for _ in range(3):
        step.run(step.batch)
    seconds: dict[str, list[float]] = {mode: [] for mode in MODES}
    reports: dict[str, list[dict[str, Any]]] = {mode: [] for mode in MODES}
    for _ in range(arguments.rounds):
        for mode, options in MODES.items():
            times, report = run_round(step, arguments.iterations, options, plan)
            seconds[mode] += times
            if report:
                reports[mode].append(report)
    state_bytes = sum(spec.size_bytes for spec in plan.fingerprint.state)
    with tempfile.TemporaryDirectory() as directory:
        raw = RawLimits(Path(directory), state_bytes)
        copy_seconds = statistics.median(raw.copy_seconds() for _ in range(5))
        write_seconds = statistics.median(raw.write_seconds() for _ in range(5))
    base = statistics.median(seconds["plain"])
    result: dict[str, Any] = {
        "model": arguments.model,
        "cores": os.cpu_count(),
        "state_bytes": state_bytes,
        "raw_copy_seconds": copy_seconds,
        "raw_fsynced_write_seconds": write_seconds,
        "plain_iteration_seconds": base,
        "modes": {mode: summary(seconds[mode], reports[mode], base) for mode in ("captured", "durable")},
    }
    print(f"{arguments.model}: state {format_size(state_bytes)}, plain iteration {format_seconds(base)}")
    print(f"limits: memcpy of the state {format_seconds(copy_seconds)}, fsynced write {format_seconds(write_seconds)}")
    for mode, row in result["modes"].items():
        held = row["held_seconds_per_iteration"]
        print(
            f"{mode:9s} iteration x {row['iteration_ratio']:.3f}, training thread held {format_seconds(held)} "
            f"an iteration ({held / copy_seconds:.2f} memcpys), {row['captures']} captures"
        )
    print(json.dumps(result))


def growth(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """What was added to the counts and the seconds held between two reports."""
    held = {phase: after["held_seconds"][phase] - seconds for phase, seconds in before["held_seconds"].items()}
    return {"held_seconds": held, "captures": after["captures"] - before["captures"]}


def summary(seconds: list[float], reports: list[dict[str, Any]], plain_seconds: float) -> dict[str, Any]:
    """One mode's figures over all its rounds."""
    captures = sum(report["captures"] for report in reports)
    held = sum(report["held_seconds"][phase] for report in reports for phase in ("boundary", "anchors"))
    return {
        "iteration_ratio": statistics.median(seconds) / plain_seconds,
        "held_seconds_per_iteration": held / captures,
        "waited_for_storage_seconds_per_iteration": sum(r["held_seconds"]["buffers"] for r in reports) / captures,
        "captures": captures,
    }


if __name__ == "__main__":
    main()
