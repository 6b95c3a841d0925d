"""Commands that measure this machine: ``checkflow probe``, and ``--device auto``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from checkflow.cli import options
from checkflow.cli.console import print_json, print_line, print_parts
from checkflow.cli.progress import working

if TYPE_CHECKING:
    from checkflow.cli.options import GranularityName
    from checkflow.core.machine.device import Device
    from checkflow.planner.pipeline import Planned, Subject
    from checkflow.planner.schedule.scheduler import PlanRequest


def probe(
    file: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE.json", help="write the device here, for --device FILE.json"),
    ] = None,
    directory: Annotated[
        Path, typer.Option("--directory", metavar="DIR", help="where checkpoints would lie, to measure its disk")
    ] = Path("."),
    quick: Annotated[
        bool, typer.Option("--quick", help="less data and fewer repetitions: seconds, not minutes")
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Measure this machine: its GPU if torch has one, else its CPU; memory, link and disk.

    Let nothing else run meanwhile: the figures lack what other programs use.
    """
    from checkflow.cli.tables import measurement as measurement_table
    from checkflow.core.machine.device import check_writable, write_device
    from checkflow.planner.measure.probe import FULL, QUICK
    from checkflow.planner.measure.probe import probe as measure

    if file is not None and file.suffix != ".json":
        raise typer.BadParameter(f"--device knows a file by its name: {file} must end in .json")
    if file is not None:
        check_writable(file)  # before the measurements
    with working("measuring") as progress:
        probed = measure(directory, QUICK if quick else FULL, progress=progress)
    if file is not None:
        write_device(probed.device, file)
    if as_json:
        print_json(measurement_table.probe_json(probed))
        return
    print_parts(measurement_table.probe_tables(probed))
    print_line(f"device written to {file}" if file is not None else "-o FILE.json writes the device for --device")


def measure_device() -> Device:
    """Measure this machine for ``--device auto``: quickly, without its disk."""
    from checkflow.planner.measure.probe import QUICK
    from checkflow.planner.measure.probe import probe as measure

    with working("measuring this machine") as progress:
        return measure(None, QUICK, progress=progress).device


def plan_measured(subject: Subject, device: Device, request: PlanRequest, granularity: GranularityName) -> Planned:
    """Run a training step on this machine, and plan it by its measured times."""
    from checkflow.planner.ilp.search import watched
    from checkflow.planner.pipeline import plan_measured_model

    with working(f"running {subject.target} on {device.name}") as progress, watched(progress):
        return plan_measured_model(subject, device, request, granularity.value, progress=progress)
