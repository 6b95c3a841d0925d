"""``checkflow probe``: measure the machine that it runs on, and write the device file that ``--device FILE`` reads."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from checkflow import options
from checkflow.console import print_json, print_parts, working


def probe(
    file: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE.json", help="write the device here, for --device FILE.json"),
    ] = None,
    directory: Annotated[
        Path, typer.Option("--directory", metavar="DIR", help="where checkpoints would lie: its disk is measured")
    ] = Path("."),
    quick: Annotated[
        bool, typer.Option("--quick", help="less data and fewer repetitions: seconds, not minutes")
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Measure this machine: its GPU where torch has one, else its CPU; memory, link and disk.

    Let nothing else run meanwhile: what a neighbour takes is missing in the figures.
    """
    from checkflow import report_time
    from checkflow.hardware import check_writable, write_device
    from checkflow.planner.probe import FULL, QUICK
    from checkflow.planner.probe import probe as measure

    if file is not None and file.suffix != ".json":
        raise typer.BadParameter(f"--device knows a file by its name: {file} must end in .json")
    if file is not None:
        check_writable(file)  # not only after the measurements
    with working("measuring") as progress:
        probed = measure(directory, QUICK if quick else FULL, progress=progress)
    if file is not None:
        write_device(probed.device, file)
    if as_json:
        print_json(report_time.probe_json(probed))
        return
    print_parts(report_time.probe_tables(probed))
    typer.echo(f"device written to {file}" if file is not None else "-o FILE.json writes the device for --device")
