"""``checkflow simulate``: what failures leave of a training run, under each way of making checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from checkflow import cli_ask, cli_probe, options
from checkflow.console import print_json, print_parts, working
from checkflow.errors import CheckflowError, InfeasibleError
from checkflow.options import GranularityName, PolicyName

if TYPE_CHECKING:
    from checkflow.hardware import Device
    from checkflow.simulating import Storage

FOUND = 0
# What is asked of the failures, and not of the plan.
OF_FAILURES = ("mtbf", "duration", "restart", "storage", "shape", "every", "runs", "seed", "overhead", "as_json")


def _time(text: str | float) -> float:
    from checkflow.hardware import parse_seconds

    if isinstance(text, float):  # a default
        return text
    try:
        return parse_seconds(text)
    except CheckflowError as error:
        raise typer.BadParameter(str(error)) from None


def _start(text: str | float) -> float:
    return 0.0 if text in ("0", "0s") else _time(text)


def _shape(text: str | float) -> float:
    from checkflow.simulating import LEAST_SHAPE, MOST_SHAPE

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
    float, typer.Option("--duration", metavar="TIME", parser=_time, show_default="30d", help="of a run, starts and all")
]
Restart = Annotated[
    float,
    typer.Option(
        "--restart",
        metavar="TIME",
        parser=_start,
        show_default="1min",
        help="from a failure until the job reads its checkpoint; to read it comes beside",
    ),
]
StorageRate = Annotated[
    float | None,
    typer.Option(
        "--storage",
        metavar="RATE",
        parser=options.read_bandwidth,
        help="at which storage takes a checkpoint, fsync and all, and gives it back [what a device file says of its "
        "disk]",
    ),
]
Shape = Annotated[
    float,
    typer.Option(
        "--shape",
        metavar="NUMBER",
        parser=_shape,
        show_default="1",
        help="of the Weibull distribution of the times between failures: 1: at random; 0.7: one soon follows another",
    ),
]
Every = Annotated[
    list[float] | None,
    typer.Option(
        "--every",
        metavar="TIME",
        parser=_time,
        help="show synchronous checkpoints so far apart, too, such as 1h; may be repeated",
    ),
]
Runs = Annotated[int, typer.Option("--runs", metavar="N", min=1, help="how many are simulated")]
Seed = Annotated[int, typer.Option("--seed", metavar="N", min=0, help="of the failures' times")]


def storage_of(device: Device | None, asked: float | None) -> Storage:
    """What checkpoints are written to.

    Args:
        device: None where a plan file brings its own, of which it says the name alone.

    Raises:
        typer.BadParameter: neither the user nor the device says it.
    """
    from checkflow.simulating import Storage

    if asked is not None:
        return Storage(asked, asked)
    write = None if device is None else device.disk_write_bytes_per_second
    if device is None or write is None:
        raise typer.BadParameter(
            "how fast is storage? --storage RATE says it, such as 1GB/s; of a MODEL, --device FILE with a file that "
            "checkflow probe -o FILE has made does, too"
        )
    return Storage(write, device.disk_read_bytes_per_second or write)


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
    as_json: options.Json = False,
) -> int:
    """Simulate long training with failures: what is left of its time under each way of making checkpoints.

    Synchronous checkpoints as often as is best for them, CheckFreq's, and checkflow's by a plan; all meet the same
    failures. A plan file brings its own device and link.
    """
    from checkflow import plan as plans
    from checkflow import report_simulation
    from checkflow.planner.replay import check_plan
    from checkflow.simulating import Failures, restore_seconds, ways_of
    from checkflow.simulating import simulate as run

    plan, chosen = None, None
    if subject.endswith(".json"):
        options.refuse_given(context, besides=("subject", *OF_FAILURES), why="a plan file brings its own")
        plan = plans.load(subject)
        check_plan(plan)
        written_to = storage_of(None, storage)
    else:
        chosen = cli_ask.device(device)
        written_to = storage_of(chosen, storage)
        request = cli_ask.request(
            chosen,
            bandwidth,
            memory_limit,
            link_share,
            policy=policy.value,
            max_interval=max_interval,
            overhead=overhead,
        )
        planning = cli_probe.plan_measured if device == options.AUTO else cli_ask.plan
        outcome = planning(
            cli_ask.subject(subject, batch_size, settings, optimizer), chosen, request, granularity
        ).outcome
        if outcome.plan is None:
            raise InfeasibleError(outcome.explanation)
        plan = outcome.plan
    ways = ways_of(
        plan,
        written_to,
        mtbf_seconds=mtbf,
        overhead=overhead,
        memory_bytes=None if chosen is None else chosen.memory_bytes,
        every_seconds=every or (),
    )
    failures = Failures(mtbf, restart + restore_seconds(plan, written_to), shape)
    with working("failing"):
        found = run(ways, plan.timeline.iteration_seconds, failures, duration, runs=runs, seed=seed)
    if as_json:
        print_json(report_simulation.simulation_json(plan, written_to, found))
    else:
        print_parts(report_simulation.simulation_tables(plan, written_to, found))
    return FOUND
