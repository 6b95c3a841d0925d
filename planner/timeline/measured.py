"""Measures a training step on this machine: the time of the whole, and each operator's share of it.

Runs some iterations unwatched, for the time, and some recorded (:mod:`.record.recorder`), for the shares. Recording
costs time, so recorded times are scaled to sum to an unwatched iteration's. The weights change, as in training.
"""

from __future__ import annotations

import contextlib
import gc
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch.utils import _pytree as pytree

from checkflow.core.errors import CheckflowError, TraceError
from checkflow.core.graph import TrainingGraph
from checkflow.core.machine.device import Device, find_device
from checkflow.core.state import refuse_closures, refuse_hidden_state
from checkflow.core.training_step import TrainingStep
from checkflow.core.units import format_size
from checkflow.planner.measure.machine import free_memory_bytes
from checkflow.planner.measure.timing import Clock, Spread, clock_of, spread_of
from checkflow.planner.record.recorder import IterationRecorder, RecordedIteration
from checkflow.planner.timeline.roofline import durations_seconds
from checkflow.planner.trace.trace import user_line

WARM_UP = 2  # iterations that do not count: they make optimizer state and fill caches
RUNS = 5  # unwatched, and as many recorded
LEAST_ALIKE = 3  # recorded iterations that must have the same operators
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Prediction:
    """The roofline's prediction for the same graph."""

    device: str  # whose numbers
    seconds: float  # of an iteration
    measured_seconds: float

    @property
    def ratio(self) -> float:
        return self.seconds / self.measured_seconds


@dataclass(frozen=True, slots=True)
class StepTimes:
    """How long a training step takes on this machine."""

    step: Spread  # seconds of an unwatched iteration
    recorded: Spread  # seconds of a recorded iteration's operators together
    operator_quartile_share: float  # sum of the operators' interquartile ranges, over the time of all
    predictions: tuple[Prediction, ...] = ()


@dataclass(frozen=True)
class MeasuredStep:
    """A training step as it ran on this machine."""

    graph: TrainingGraph  # the recorded one
    durations_seconds: tuple[float, ...]  # one for each operator; together the median of an unwatched iteration
    times: StepTimes


def measure_step(
    step: TrainingStep,
    *,
    name: str,
    runs: int = RUNS,
    clock: Clock | None = None,
    progress: Progress = lambda part: None,
) -> MeasuredStep:
    """Run a training step for real, where its tensors are, 2 + 2 * ``runs`` times, and measure it.

    Raises:
        TraceError: the step fails, or its iterations differ from each other.
        CheckflowError: it does not fit the machine's memory.
    """
    refuse_closures(step.optimizers)
    refuse_hidden_state(step.optimizers)
    device = _device_of(step)
    timer = clock_of(device) if clock is None else clock
    with failures_reported(name, device), _nothing_collected():
        progress("a first iteration")
        timer.laps(lambda: step.run(step.batch), WARM_UP)
        progress(f"{runs} iterations")
        unwatched = spread_of(timer.laps(lambda: step.run(step.batch), runs))
        held, recorded = None, []
        for number in range(runs):
            progress(f"recorded iteration {number + 1} of {runs}")
            recorder = IterationRecorder(step.models, step.optimizers, name=name)
            recorder.begin(step.batch, held=held)
            try:
                held = step.run(step.batch)  # like a loop, this frees the last result only now
                recorded.append(recorder.end(batch=step.batch, micro_batches=step.micro_batches))
            finally:
                recorder.abandon()
    return combine(name, unwatched, recorded)


def combine(name: str, step: Spread, recorded: Sequence[RecordedIteration]) -> MeasuredStep:
    """Merge recorded iterations into one graph, with the median of each operator's times, scaled to the step's.

    Leaves out iterations whose operators differ from most (a loss scaler that skips a step); TraceError if few remain.
    """
    kinds = Counter(_operators(one) for one in recorded)
    (common, times) = kinds.most_common(1)[0]
    if times < min(LEAST_ALIKE, len(recorded)):
        raise TraceError(
            f"cannot plan {name} by running it: {len(recorded)} iterations gave {len(kinds)} different orders of"
            " operators; without --device auto it is traced instead"
        )
    alike = [one for one in recorded if _operators(one) == common]
    each = [spread_of(times) for times in zip(*(one.durations_seconds for one in alike), strict=True)]
    together = sum(spread.median for spread in each)
    factor = step.median / together if together else 0.0
    return MeasuredStep(
        graph=alike[-1].graph,
        durations_seconds=tuple(spread.median * factor for spread in each),
        times=StepTimes(
            step=step,
            recorded=spread_of([sum(one.durations_seconds) for one in alike]),
            operator_quartile_share=sum(spread.upper - spread.lower for spread in each) / together if together else 0.0,
        ),
    )


def with_predictions(measured: MeasuredStep, devices: Sequence[Device]) -> MeasuredStep:
    """Add the roofline's predictions of the same graph on these devices, with torch's current settings."""
    seconds = measured.times.step.median
    predictions = tuple(
        Prediction(device.name, sum(durations_seconds(measured.graph, device)), seconds) for device in devices
    )
    return replace(measured, times=replace(measured.times, predictions=predictions))


def rooflines(probed: Device) -> list[Device]:
    """Return the devices to compare with what was measured: the probed one, and the catalogue's entry for it.

    That entry is the one with the card's name, or "cpu" for any CPU, since ``--device cpu`` plans with it.
    """
    try:
        return [probed, find_device("cpu" if probed.kind == "cpu" else probed.name)]
    except CheckflowError:
        return [probed]


def move(step: TrainingStep, device: torch.device) -> None:
    """Move models and batch to the device, if ``build`` did not make them there."""
    for model in step.models.values():
        model.to(device)  # in place, so that optimizers keep their parameters
    step.batch = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), step.batch)


def check_room(name: str, needed_bytes: int, device: torch.device) -> None:
    """Refuse with CheckflowError a training step that the device has no room for, before it is allocated."""
    free = free_memory_bytes(device)
    if needed_bytes > free:
        raise CheckflowError(_too_large(name, device, f"needs {format_size(needed_bytes)} of {format_size(free)} free"))


def _too_large(name: str, device: torch.device, why: str) -> str:
    where = "GPU" if device.type == "cuda" else "machine"
    return (
        f"{name} is too large to be run on this {where} ({why}): plan it with a device of the catalogue, such as"
        " --device H200, or with the file that checkflow probe writes where it is to run"
    )


def _device_of(step: TrainingStep) -> torch.device:
    """Return the first accelerator that a parameter lies on, else the CPU."""
    devices = (parameter.device for model in step.models.values() for parameter in model.parameters())
    return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))


def _operators(recorded: RecordedIteration) -> tuple[str, ...]:
    return tuple(operator.name for operator in recorded.graph.operators)


@contextlib.contextmanager
def _nothing_collected() -> Iterator[None]:
    """Collect Python's garbage before and not within, where it would count as one operator's time."""
    gc.collect()
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


@contextlib.contextmanager
def failures_reported(name: str, device: torch.device) -> Iterator[None]:
    """Turn what the user's step raises, out-of-memory included, into an error of one line."""
    try:
        yield
    except CheckflowError:
        raise
    except torch.OutOfMemoryError as error:
        raise CheckflowError(_too_large(name, device, "its memory ran out")) from error
    except Exception as error:
        if "can't allocate memory" in str(error):  # torch's words for host memory
            raise CheckflowError(_too_large(name, device, "its memory ran out")) from error
        line = user_line(error)
        reason = str(error).strip().partition("\n")[0]
        place = f" at {line}" if line else ""
        raise TraceError(f"cannot run {name}: {type(error).__name__}{place}: {reason}") from error
