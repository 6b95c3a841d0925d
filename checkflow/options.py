"""The command line's options: their types, their texts, and how what is typed becomes data."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from checkflow.errors import CheckflowError

if TYPE_CHECKING:
    from checkflow.hardware import Device


CHUNK_BYTES = 8 * 2**20


class Optimizer(enum.StrEnum):
    SGD = "sgd"
    MOMENTUM = "momentum"
    ADAM = "adam"
    ADAMW = "adamw"


class Formulation(enum.StrEnum):
    AUTO = "auto"
    FLOW = "flow"
    GREEDY = "greedy"


class PolicyName(enum.StrEnum):
    DIRECT = "direct"
    SNAPSHOT = "snapshot"


class GranularityName(enum.StrEnum):
    SEGMENT = "segment"
    OPERATOR = "operator"


class SolverName(enum.StrEnum):
    AUTO = "auto"
    GUROBI = "gurobi"
    HIGHS = "highs"
    CBC = "cbc"


def _size(text: str) -> int:
    from checkflow.hardware import parse_size

    try:
        return parse_size(text)
    except CheckflowError as error:
        raise typer.BadParameter(str(error)) from None


def _chunk_size(text: str | int) -> int:
    size_bytes = _size(str(text))  # the default comes here too, as a number
    if size_bytes < 1:
        raise typer.BadParameter("a chunk has at least one byte")
    return size_bytes


def _bandwidth(text: str) -> float:
    from checkflow.hardware import parse_bandwidth

    try:
        return parse_bandwidth(text)
    except CheckflowError as error:
        raise typer.BadParameter(str(error)) from None


def read_settings(pairs: Sequence[str]) -> dict[str, str]:
    """``["width=64"]`` to ``{"width": "64"}``.

    Raises:
        typer.BadParameter: a pair without "=", or a key given twice.
    """
    settings: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key.isidentifier():
            raise typer.BadParameter(f"--set takes key=value, not {pair!r}")
        if key in settings:
            raise typer.BadParameter(f"--set gives {key} twice")
        settings[key] = value
    return settings


def choose_device(text: str) -> Device:
    """A device of the catalogue by its name, or a .json file that describes one.

    Raises:
        typer.BadParameter: neither a known name nor a .json file.
        CheckflowError: the file cannot be read, or is no description of a device.
    """
    from checkflow.hardware import find_device, read_device

    if text.endswith(".json"):
        return read_device(text)
    try:
        return find_device(text)
    except CheckflowError as error:
        raise typer.BadParameter(f"{error} (or FILE.json that describes one)") from None


Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="path/model.py[:function], package.module:function, or a shipped model")
]
PlanFile = Annotated[Path, typer.Argument(metavar="PLAN", help="a plan file, made by: checkflow plan MODEL -o FILE")]
BatchSize = Annotated[int | None, typer.Option("--batch-size", min=1, help="passed to the model's build function")]
Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="a further argument of build; may be repeated")
]
OptimizerOption = Annotated[Optimizer | None, typer.Option("--optimizer", help="replaces the model's own")]
DeviceOption = Annotated[
    str, typer.Option("--device", metavar="NAME|FILE", help="a GPU by name, cpu, or a .json file that describes one")
]
Bandwidth = Annotated[
    float | None,
    typer.Option("--bandwidth", metavar="RATE", parser=_bandwidth, help="of the link, such as 63GB/s [the device's]"),
]
MemoryLimit = Annotated[
    int | None,
    typer.Option("--memory-limit", metavar="SIZE", parser=_size, help="such as 24GB [the device's memory less 5 %]"),
]
ExtraMemory = Annotated[
    int | None,
    typer.Option("--extra-memory", metavar="SIZE", parser=_size, help="that the plan may add to training's own peak"),
]
RelaxMemory = Annotated[
    bool, typer.Option("--relax-memory", help="where no plan fits the memory, take the one that exceeds it least")
]
FormulationOption = Annotated[Formulation, typer.Option("--formulation", help="auto: greedy, certified by flow")]
PolicyOption = Annotated[PolicyName, typer.Option("--policy", help="whether bytes may leave without a copy on the GPU")]
GranularityOption = Annotated[GranularityName, typer.Option("--granularity", help="segment is what eager jobs can run")]
ChunkSize = Annotated[
    int,
    typer.Option("--chunk-size", metavar="SIZE", parser=_chunk_size, show_default="8MiB", help="the largest chunk"),
]
SolverOption = Annotated[SolverName, typer.Option("--solver", help="auto: Gurobi with a licence of your own, or HiGHS")]
TimeLimit = Annotated[float, typer.Option("--time-limit", metavar="SECONDS", min=0.001, help="for the solver")]
MaxInterval = Annotated[
    int | None,
    typer.Option("--max-interval", metavar="K", min=1, help="at most so many iterations from checkpoint to checkpoint"),
]
Overhead = Annotated[
    float, typer.Option("--overhead", min=0.0, max=100.0, help="the share of training's time that stalls may take")
]
Output = Annotated[Path | None, typer.Option("-o", "--output", metavar="FILE", help="write the plan here")]
Json = Annotated[bool, typer.Option("--json", help="one JSON object on standard output, and nothing else")]
