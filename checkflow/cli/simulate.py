"""``checkflow simulate``: what failures leave of a training run, under each way of making checkpoints."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from checkflow.cli import options, planning
from checkflow.cli.console import FOUND, INFEASIBLE, complain, expect_page, print_json, print_parts, write_page
from checkflow.cli.options import GranularityName, PolicyName
from checkflow.cli.progress import working
from checkflow.core.errors import CheckflowError, PlanError

if TYPE_CHECKING:
    from checkflow.cli.tables.simulation import Given
    from checkflow.core.machine.device import Device
    from checkflow.core.plan import Plan
    from checkflow.planner.pipeline import Planned
    from checkflow.simulate.simulation import Simulation
    from checkflow.simulate.strategies import StorageSpeed

# Options of the failures, not of the plan.
OF_FAILURES = (
    "mtbf", "duration", "restart", "storage", "shape", "every", "runs", "seed", "overhead", "page", "as_json",
)  # fmt: skip
_NO_TIME = re.compile(r"\s*0+(\.0+)?\s*(ms|s|min|h|d)?\s*", re.ASCII)
_MOST_SECONDS = 1e10  # three hundred years


def _time(text: str | float) -> float:
    from checkflow.core.units import parse_seconds

    if isinstance(text, float):  # a default
        return text
    try:
        seconds = parse_seconds(text)
    except CheckflowError as error:
        raise typer.BadParameter(str(error)) from None
    if seconds > _MOST_SECONDS:
        raise typer.BadParameter(f"{text} is longer than any training takes")
    return seconds


def _start(text: str | float) -> float:
    return 0.0 if isinstance(text, str) and _NO_TIME.fullmatch(text) else _time(text)


def _shape(text: str | float) -> float:
    from checkflow.simulate.simulation import LEAST_SHAPE, MOST_SHAPE

    try:
        shape = float(text)
    except ValueError:
        raise typer.BadParameter(f"not a number: {text!r}") from None
    if not LEAST_SHAPE <= shape <= MOST_SHAPE:  # NaN neither
        raise typer.BadParameter(f"a shape is from {LEAST_SHAPE} to {MOST_SHAPE}, not {text}")
    return shape


Mtbf = Annotated[
    float,
    typer.Option("--mtbf", metavar="TIME", parser=_time, help="mean time between failures of the job, such as 4h"),
]
Duration = Annotated[
    float,
    typer.Option(
        "--duration", metavar="TIME", parser=_time, show_default="30d", help="length of a run; the job does not end"
    ),
]
Restart = Annotated[
    float,
    typer.Option(
        "--restart",
        metavar="TIME",
        parser=_start,
        show_default="1min",
        help="from a failure until the job starts to read its checkpoint",
    ),
]
StorageRate = Annotated[
    float | None,
    typer.Option(
        "--storage",
        metavar="RATE",
        parser=options.read_bandwidth,
        help="speed at which storage writes (fsync included) and reads a checkpoint [the device file's disk]",
    ),
]
Shape = Annotated[
    float,
    typer.Option(
        "--shape",
        metavar="NUMBER",
        parser=_shape,
        show_default="1",
        help="shape of the Weibull distribution of times between failures; 1: at random, 0.7: in clusters",
    ),
]
Every = Annotated[
    list[float] | None,
    typer.Option(
        "--every",
        metavar="TIME",
        parser=_time,
        help="add synchronous checkpoints at this distance, such as 1h; may be repeated",
    ),
]
Runs = Annotated[int, typer.Option("--runs", metavar="N", min=1, help="how many runs to simulate")]
Seed = Annotated[int, typer.Option("--seed", metavar="N", min=0, help="seed of the failures' times")]


def _storage(device: Device | None, asked: float | None) -> StorageSpeed:
    """Return the storage for checkpoints; typer.BadParameter if neither the user nor the device gives it.

    ``device`` is None for a plan file's, known by name only, or one not measured yet, without its disk.
    """
    from checkflow.simulate.strategies import StorageSpeed

    if asked is not None:
        return StorageSpeed(asked, asked)
    if device is None or device.disk_write_bytes_per_second is None:
        raise typer.BadParameter(
            "the speed of storage is not known: give --storage RATE, such as 1GB/s, or, with a MODEL, --device FILE, "
            "a file that checkflow probe -o FILE made"
        )
    write = device.disk_write_bytes_per_second
    return StorageSpeed(write, device.disk_read_bytes_per_second or write)


def _read_plan(file: str) -> Plan:
    from checkflow.core import plan as plans
    from checkflow.planner.schedule.replay import check_plan

    plan = plans.load(file)
    check_plan(plan)
    return plan


def _device_limit_bytes(plan: Plan) -> int | None:
    """Return what a job may use of a plan's device; None: unknown."""
    from checkflow.core.machine.device import find_device, usable_bytes

    try:
        return usable_bytes(find_device(plan.fingerprint.device).memory_bytes)
    except CheckflowError:  # the name of a device file's device
        return None


def simulate(
    context: typer.Context,
    subject: Annotated[str, typer.Argument(metavar="MODEL|PLAN", help="a model, or a plan file (.json)")],
    mtbf: Mtbf,
    duration: Duration = 30 * 86400.0,
    restart: Restart = 60.0,
    storage: StorageRate = None,
    shape: Shape = 1.0,
    every: Every = None,
    runs: Runs = 1000,
    seed: Seed = 0,
    batch_size: options.BatchSize = None,
    settings: options.Settings = None,
    optimizer: options.OptimizerOption = None,
    device: options.DeviceOption = "RTX 3090",
    bandwidth: options.Bandwidth = None,
    link_share: options.LinkShare = 1.0,
    memory_limit: options.MemoryLimit = None,
    policy: options.PolicyOption = PolicyName.DIRECT,
    granularity: options.GranularityOption = GranularityName.SEGMENT,
    max_interval: options.MaxInterval = None,
    overhead: options.Overhead = 0.035,
    page: Annotated[
        Path | None,
        typer.Option("--html", metavar="FILE.html", help="write a page: the same on 1 to 16,384 GPUs, with charts"),
    ] = None,
    as_json: options.Json = False,
) -> int:
    """Simulate long training with failures: how much of the time is left under each way of making checkpoints.

    Synchronous checkpoints, CheckFreq's, and checkflow's by a plan meet the same failures. A plan file brings its own
    device and link.
    """
    from checkflow.cli.tables.simulation import Given
    from checkflow.simulate.simulation import Failures, simulate_failures
    from checkflow.simulate.strategies import restore_seconds, ways_of

    of_plan = subject.endswith(".json")
    if of_plan:
        options.refuse_given(
            context, besides=("subject", "memory_limit", *OF_FAILURES), why="a plan file brings its own"
        )
    _refuse_size(mtbf, duration, runs, page)
    expect_page(page)
    known = None if of_plan or device == options.AUTO else planning.device_of(device)
    written_to = _storage(known, storage)
    if of_plan:
        plan = _read_plan(subject)
        limit_bytes = _device_limit_bytes(plan) if memory_limit is None else memory_limit
    else:
        chosen = known or planning.device_of(device)
        request = planning.request_of(
            chosen, bandwidth, memory_limit, link_share, policy=policy.value, max_interval=max_interval,
            overhead=overhead,
        )  # fmt: skip
        asked = planning.subject_of(subject, batch_size, settings, optimizer)
        planned = planning.planner_for(device)(asked, chosen, request, granularity)
        if planned.outcome.plan is None:
            return _print_no_plan(planned, as_json)
        plan, limit_bytes = planned.outcome.plan, request.memory_limit_bytes
    failures = Failures(mtbf, restart + restore_seconds(plan, written_to), shape)
    ways = ways_of(
        plan, written_to, mtbf_seconds=mtbf, overhead=overhead, memory_limit_bytes=limit_bytes,
        every_seconds=every or (),
    )  # fmt: skip
    with working("simulating failures") as say:
        found = simulate_failures(
            ways.ways, plan.timeline.iteration_seconds, failures, duration, runs=runs, seed=seed,
            progress=lambda share: say(f"{runs:,} runs", share, 1.0),
        )  # fmt: skip
    given = Given(plan, written_to, overhead, limit_bytes, ways.left_out)
    _print_found(given, found, as_json)
    if page is not None:
        _write_page(page, given, restart, duration, shape, every or [], seed, said=not as_json)
    return FOUND


def _write_page(
    file: Path, given: Given, restart: float, duration: float, shape: float, every: Sequence[float], seed: int,
    *, said: bool,
) -> None:  # fmt: skip
    from checkflow.simulate import scaling
    from checkflow.views.simulation import simulation_page

    by_gpus = [scaling.GPU_SECONDS_A_FAILURE / count for count in scaling.GPU_COUNTS]
    with working("simulating clusters") as say:
        found = scaling.points(
            given.plan, given.storage, [*by_gpus, *scaling.MTBF_SECONDS], restart_seconds=restart,
            duration_seconds=duration, shape=shape, overhead=given.overhead,
            memory_limit_bytes=given.memory_limit_bytes, every_seconds=every or [scaling.EPOCH_SECONDS], seed=seed,
            progress=lambda share: say("1 to 16,384 GPUs", share, 1.0),
        )  # fmt: skip
    shown = simulation_page(
        found[: len(by_gpus)], found[len(by_gpus) :], given.plan, given.storage, restart_seconds=restart,
        duration_seconds=duration, shape=shape,
    )  # fmt: skip
    write_page(shown, file, said=said)


def _refuse_size(mtbf: float, duration: float, runs: int, page: Path | None) -> None:
    """Refuse what cannot be simulated soon, before anything is planned."""
    from checkflow.simulate import scaling
    from checkflow.simulate.simulation import check_size

    try:
        check_size(mtbf, duration, runs)
        if page is not None:
            scaling.check_duration(duration)
    except PlanError as error:
        raise typer.BadParameter(str(error)) from None


def _print_no_plan(planned: Planned, as_json: bool) -> int:
    from checkflow.cli.tables.simulation import no_simulation_json

    if as_json:
        print_json(no_simulation_json(planned))
    complain(planned.outcome.explanation)
    return INFEASIBLE


def _print_found(given: Given, found: Simulation, as_json: bool) -> None:
    from checkflow.cli.tables.simulation import simulation_json, simulation_tables

    if as_json:
        print_json(simulation_json(given, found))
    else:
        print_parts(simulation_tables(given, found))
