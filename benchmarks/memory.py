"""The predicted peak of training memory against what a CUDA GPU's allocator measures, with and without checkpoints.

"requested" is what training asked for, "allocated" what the allocator gave it (blocks are up to 1 MiB larger), both
without cuBLAS's workspace; "reserved" adds gaps. "context" is what the driver, kernels and other processes hold.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import importlib
import itertools
import json
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import checkflow
from checkflow.core.errors import CheckflowError, UnsupportedError
from checkflow.core.machine.device import Device, find_device, read_device
from checkflow.core.units import format_size
from checkflow.planner.measure.machine import this_machine
from checkflow.planner.model_file.load import OPTIMIZERS, load_training_step
from checkflow.planner.pipeline import Subject, plan_model
from checkflow.planner.schedule.scheduler import PlanRequest
from checkflow.planner.trace.trace import trace

MODELS = ("alexnet", "mnasnet", "resnet18", "vgg11", "vit", "resnet3d", "transformer", "bert")
CHOICES = ("sgd", "adam")
WARM_UP, ITERATIONS = 3, 5


@dataclass(frozen=True)
class Peaks:
    """The largest sums of bytes while a job trained, and what lies beside its tensors."""

    requested_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    workspace_bytes: int
    context_bytes: int


@dataclass(frozen=True)
class Row:
    """One model with one optimizer. A measurement that could not be made is a line that says why."""

    model: str
    optimizer: str
    batch_size: int
    predicted_bytes: int
    peak_operator: str
    plain: Peaks
    predicted_with_checkpoints_bytes: int | None
    with_checkpoints: Peaks | str

    @property
    def ratio(self) -> float:
        """Measured of predicted."""
        return self.plain.allocated_bytes / self.predicted_bytes

    @property
    def ratio_with_checkpoints(self) -> float | None:
        """Likewise, with a checkpoint of every iteration that the plan makes one of."""
        predicted, found = self.predicted_with_checkpoints_bytes, self.with_checkpoints
        return None if predicted is None or isinstance(found, str) else found.allocated_bytes / predicted


def predict(model: str, batch_size: int, optimizer: str) -> tuple[int, str]:
    """The eager peak of a training step on a GPU, in bytes, and the operator during which it occurs."""
    _, step = load_training_step(model, batch_size=batch_size, settings={}, optimizer=optimizer)
    graph = trace(step, name=model, target="cuda", compute_capability=this_machine().compute_capability)
    during, _ = graph.live_bytes(eager=True)
    index = max(range(len(during)), key=during.__getitem__)
    operator = graph.operators[index]
    return during[index], f"{operator.target} of {operator.phase} in {operator.module or 'no module'}"


def plan_for(model: str, batch_size: int, optimizer: str, device: Device) -> checkflow.Plan | str:
    """The plan that ``checkflow plan MODEL --device …`` makes, or why there is none."""
    request = PlanRequest(
        bandwidth_bytes_per_second=device.link_bandwidth_bytes_per_second,
        memory_bandwidth_bytes_per_second=device.memory_bandwidth_bytes_per_second,
        copy_seconds=device.copy_seconds,
    )
    outcome = plan_model(Subject(model, batch_size, {}, optimizer), device, request, "segment").outcome
    return outcome.plan if outcome.plan is not None else f"no plan: {outcome.explanation}"


def real_step(model: str, batch_size: int, optimizer: str) -> checkflow.TrainingStep:
    """A shipped model's training step with its tensors on the GPU."""
    with torch.device("cuda"):
        step: checkflow.TrainingStep = importlib.import_module(f"checkflow.models.{model}").build(batch_size=batch_size)
        step.optimizers = {  # of the parameters alone: a group's own lr and momentum would count
            name: OPTIMIZERS[optimizer]([{"params": group["params"]} for group in other.param_groups])
            for name, other in step.optimizers.items()
        }
    return step


@dataclass(frozen=True)
class Before:
    """What is taken of the GPU before a job begins: in the allocator, and outside of it."""

    allocated_bytes: int
    context_bytes: int


def measure(step: checkflow.TrainingStep, before: Before, iterations: Iterator[Any]) -> Peaks:
    """Train once for each item of ``iterations``, of which the first ``WARM_UP`` are not measured."""
    result = None  # held as a training loop holds it
    for n, _ in enumerate(iterations):
        if n == WARM_UP:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        result = step.run(step.batch)
    torch.cuda.synchronize()
    stats = torch.cuda.memory_stats()
    held = torch.cuda.memory_allocated()
    torch._C._cuda_clearCublasWorkspaces()
    workspace = held - torch.cuda.memory_allocated()
    del result
    return Peaks(
        requested_bytes=stats["requested_bytes.all.peak"] - workspace - before.allocated_bytes,
        allocated_bytes=stats["allocated_bytes.all.peak"] - workspace - before.allocated_bytes,
        reserved_bytes=stats["reserved_bytes.all.peak"],
        workspace_bytes=workspace,
        context_bytes=before.context_bytes,
    )


def empty_gpu() -> Before:
    """Give everything back that can be."""
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return Before(torch.cuda.memory_allocated(), int(total - free - torch.cuda.memory_reserved()))


def measure_plain(model: str, batch_size: int, optimizer: str) -> Peaks:
    before = empty_gpu()
    return measure(real_step(model, batch_size, optimizer), before, iter(range(WARM_UP + ITERATIONS)))


def measure_with_checkpoints(model: str, batch_size: int, optimizer: str, plan: checkflow.Plan) -> Peaks | str:
    """As above, with checkpoints; in a version that has no engine for GPUs, what it answers."""
    before = empty_gpu()
    step = real_step(model, batch_size, optimizer)
    with tempfile.TemporaryDirectory() as directory:
        try:
            with checkflow.Checkpointer(step.models, step.optimizers, directory=directory, plan=plan) as checkpointer:
                return measure(step, before, iter(checkpointer.steps(WARM_UP + ITERATIONS)))
        except UnsupportedError as error:
            return f"not available yet: {error}"


def make_row(model: str, batch_size: int, optimizer: str, device: Device | None) -> Row:
    """Predict and measure one case, at half the batch size as often as memory does not suffice."""
    while True:
        try:
            plain = measure_plain(model, batch_size, optimizer)
            break
        except torch.cuda.OutOfMemoryError:
            if batch_size == 1:
                raise
            batch_size //= 2
    predicted, operator = predict(model, batch_size, optimizer)
    plan = "no plan: name the GPU with --device" if device is None else plan_for(model, batch_size, optimizer, device)
    return Row(
        model=model,
        optimizer=optimizer,
        batch_size=batch_size,
        predicted_bytes=predicted,
        peak_operator=operator,
        plain=plain,
        predicted_with_checkpoints_bytes=None if isinstance(plan, str) else plan.plan_peak_bytes,
        with_checkpoints=plan
        if isinstance(plan, str)
        else measure_with_checkpoints(model, batch_size, optimizer, plan),
    )


HEADER = (
    f"{'model':12} {'optimizer':>9} {'batch':>5} {'predicted':>10} {'requested':>10} {'allocated':>10} {'ratio':>6} "
    f"{'reserved':>10} {'workspace':>10}  with checkpoints"
)


def line_of(row: Row) -> str:
    """A row of the table under ``HEADER``."""
    plain, found, ratio = row.plain, row.with_checkpoints, row.ratio_with_checkpoints
    sizes = (row.predicted_bytes, plain.requested_bytes, plain.allocated_bytes)
    cells = " ".join(f"{format_size(size):>10}" for size in sizes)
    others = " ".join(f"{format_size(size):>10}" for size in (plain.reserved_bytes, plain.workspace_bytes))
    told = found if isinstance(found, str) else f"{format_size(found.allocated_bytes)} of {ratio:.3f} times the plan's"
    return f"{row.model:12} {row.optimizer:>9} {row.batch_size:5} {cells} {row.ratio:6.3f} {others}  {told}"


def as_json(gpu: str, rows: Sequence[Row]) -> Mapping[str, Any]:
    """Everything that was found, ratios included."""
    ratios = [{"ratio": row.ratio, "ratio_with_checkpoints": row.ratio_with_checkpoints} for row in rows]
    found = [{**dataclasses.asdict(row), **ratio} for row, ratio in zip(rows, ratios, strict=True)]
    return {"gpu": gpu, "torch": torch.__version__, "cuda": torch.version.cuda, "rows": found}


def device_of(gpu: str, asked: str | None) -> Device | None:
    """What to plan for: the device that was asked for, else the catalogue's entry for this GPU, if it has one."""
    if asked is not None:
        return read_device(asked) if asked.endswith(".json") else find_device(asked)
    try:
        return find_device(gpu)
    except CheckflowError:
        return None


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="*", choices=MODELS, default=MODELS)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--device", help="what to plan for: a name of the catalogue, or a .json file")
    parser.add_argument("--output", type=Path)
    chosen = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("there is no CUDA GPU here, and so nothing to measure")
        return 0
    gpu = torch.cuda.get_device_name()
    device = device_of(gpu, chosen.device)
    short = re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")
    output = chosen.output or Path(__file__).parent / "results" / f"memory-{short}.json"
    print(f"{gpu}, torch {torch.__version__}, CUDA {torch.version.cuda}")
    print(HEADER)
    rows: list[Row] = []
    for model, optimizer in itertools.product(chosen.only, CHOICES):
        rows.append(make_row(model, chosen.batch_size, optimizer, device))
        print(line_of(rows[-1]), flush=True)
    output.write_text(json.dumps(as_json(gpu, rows), indent=2) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
