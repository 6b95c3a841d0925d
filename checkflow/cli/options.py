"""The command line's options: types, help texts, and parsers."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from checkflow.core.errors import CheckflowError

if TYPE_CHECKING:
    from checkflow.core.machine.device import Device


AUTO = "auto"  # as a device: this machine, measured
CHUNK_BYTES = 8 * 2**20
_MOST_OVERHEAD = 1e9
LEAST_CHUNK_BYTES = 64 * 2**10  # 2.6 µs at 25 GB/s; a copy takes some 4 µs to start
LEAST_BARE_BYTES = 10**6  # a smaller number without a unit means gigabytes, or is a slip
LEAST_SECONDS = 0.001


class Optimizer(enum.StrEnum):
    SGD = "sgd"
    MOMENTUM = "momentum"
    ADAM = "adam"
    ADAMW = "adamw"


class Formulation(enum.StrEnum):
    AUTO = "auto"
    FLOW = "flow"
    PER_TENSOR = "per-tensor"
    GREEDY = "greedy"


class PolicyName(enum.StrEnum):
    DIRECT = "direct"
    SNAPSHOT = "snapshot"


class GranularityName(enum.StrEnum):
    SEGMENT = "segment"
    OPERATOR = "operator"


class ParallelName(enum.StrEnum):
    DDP = "ddp"
    FSDP = "fsdp"


class SolverName(enum.StrEnum):
    AUTO = "auto"
    GUROBI = "gurobi"
    HIGHS = "highs"
    CBC = "cbc"


def refuse_plan_file(model: str) -> None:
    if model.endswith(".json"):
        raise typer.BadParameter(
            f"{model} is no model: of a plan file, checkflow show {model} shows what is in it, and checkflow check "
            f"{model} replays it"
        )


def _size(text: str) -> int:
    from checkflow.core.units import parse_size

    _want_unit(text, "GB")
    try:
        return parse_size(text)
    except CheckflowError as error:
        raise typer.BadParameter(str(error)) from None


def _want_unit(text: str, unit: str) -> None:
    """Refuse a number too small to be bytes: 63 probably means 63 GB/s."""
    try:
        number = float(text)
    except ValueError:
        return  # it has a unit, or is not a number
    if 0 < number < LEAST_BARE_BYTES:
        bare = unit.replace("GB", "B")
        raise typer.BadParameter(f"{text} would be {text} {bare}: write {text}{unit} (or {text}{bare}, if so)")


def _chunk_size(text: str | int) -> int:
    if isinstance(text, int):  # the default
        return text
    size_bytes = _size(text)
    if size_bytes < LEAST_CHUNK_BYTES:
        raise typer.BadParameter(
            f"a chunk of {size_bytes} bytes crosses the link in less time than its copy takes to start,"
            f" and plans name every chunk: at least {LEAST_CHUNK_BYTES // 1024}KiB"
        )
    return size_bytes


def _time_limit(text: str | float) -> float:
    try:
        seconds = float(text)
    except ValueError:
        raise typer.BadParameter(f"not a number of seconds: {text!r}") from None
    if not seconds >= LEAST_SECONDS:  # NaN neither
        raise typer.BadParameter(f"the time limit is at least {LEAST_SECONDS} s, or inf for none, not {text}")
    return seconds


def check_solver_asked(formulation: Formulation, solver: SolverName) -> None:
    """Refuse a solver (typer.BadParameter) for the formulation that needs none."""
    if formulation is Formulation.GREEDY and solver is not SolverName.AUTO:
        raise typer.BadParameter(
            f"--formulation greedy asks no solver: leave --solver {solver.value} out, or choose --formulation flow"
        )


def is_given(context: typer.Context, name: str) -> bool:
    """Whether this option, or argument, was given on the command line."""
    source = context.get_parameter_source(name)
    return source is not None and source.name != "DEFAULT"


def refuse_given(context: typer.Context, *, besides: Sequence[str], why: str) -> None:
    """Refuse given options (typer.BadParameter), except ``besides``, which would do nothing."""
    for parameter in context.command.params:
        name = parameter.name or ""
        if name not in besides and is_given(context, name):
            raise typer.BadParameter(f"{parameter.opts[0]} does nothing here: {why}")


def read_bandwidth(text: str) -> float:
    """Parse bytes per second; typer.BadParameter without a unit."""
    from checkflow.core.units import parse_bandwidth

    _want_unit(text.removesuffix("/s"), "GB/s")
    try:
        return parse_bandwidth(text)
    except CheckflowError as error:
        raise typer.BadParameter(str(error)) from None


def _overhead(text: str | float) -> float:
    number, percent = str(text).strip(), False  # the default comes here too, as a number
    if number.endswith("%"):
        number, percent = number[:-1], True
    try:
        share = float(number) / (100 if percent else 1)
    except ValueError:
        raise typer.BadParameter(f"not a share: {text!r} (write it like 0.035 or 3.5%)") from None
    if not 0 <= share < _MOST_OVERHEAD:
        raise typer.BadParameter(f"a share of training's time is 0 or more, and finite, not {text}")
    return share


def _link_share(text: str | float) -> float:
    try:
        share = float(text)  # the default comes here too, as a number
    except ValueError:
        raise typer.BadParameter(f"not a share: {text!r} (write it like 0.5)") from None
    if not 0 < share <= 1:
        raise typer.BadParameter(f"a share of the link is above 0 and at most 1, not {text}")
    return share


def read_settings(pairs: Sequence[str]) -> dict[str, str]:
    """Parse ``["width=64"]`` to ``{"width": "64"}``; typer.BadParameter without "=", or if a key comes twice."""
    settings: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key.isidentifier():
            raise typer.BadParameter(f"--set takes key=value, not {pair!r}")
        if key in settings:
            raise typer.BadParameter(f"--set gives {key} twice")
        settings[key] = value
    return settings


def read_mesh(text: str) -> tuple[tuple[str, int], ...]:
    """Parse "replicate=8,shard=8"; typer.BadParameter for anything else."""
    found: dict[str, int] = {}
    for part in text.split(","):
        name, equals, size = part.strip().partition("=")
        if not equals or not size.isdecimal() or int(size) < 1 or name in found:
            raise typer.BadParameter(f"a mesh is written like replicate=8,shard=8, not {text!r}")
        found[name] = int(size)
    return tuple(found.items())


def choose_device(text: str) -> Device:
    """Return a device of the catalogue by its name, or of a .json file; "auto" is neither.

    Raises typer.BadParameter for an unknown name or a missing file, CheckflowError for an invalid one.
    """
    from checkflow.core.machine.device import find_device, read_device

    if text.endswith(".json"):
        if not Path(text).exists():
            raise typer.BadParameter(f"no device file {text}: checkflow probe -o {text} makes one of this machine")
        return read_device(text)
    try:
        return find_device(text)
    except CheckflowError as error:
        raise typer.BadParameter(f"{error} (or FILE.json that describes one, or auto)") from None


def _shipped_models(incomplete: str) -> list[str]:
    """For a shell's completion; files are its own work."""
    from checkflow import models

    files = Path(models.__path__[0]).glob("[a-z]*.py")
    return sorted(file.stem for file in files if file.stem.startswith(incomplete))


Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="path/model.py[:function], package.module:function, or a shipped model",
        autocompletion=_shipped_models,
    ),
]
PlanFile = Annotated[Path, typer.Argument(metavar="PLAN", help="a plan file, made by: checkflow plan MODEL -o FILE")]
BatchSize = Annotated[int | None, typer.Option("--batch-size", min=1, help="passed to the model's build function")]
Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="a further argument of build; may be repeated")
]
OptimizerOption = Annotated[Optimizer | None, typer.Option("--optimizer", help="replace the model's own")]
DeviceOption = Annotated[
    str,
    typer.Option(
        "--device",
        metavar="NAME|FILE|auto",
        help="a GPU by name, cpu, or a .json file that describes one (see: checkflow probe); auto: this machine, on "
        "which the step is run and measured, so that such plans differ from run to run",
    ),
]
Bandwidth = Annotated[
    float | None,
    typer.Option(
        "--bandwidth",
        metavar="RATE",
        parser=read_bandwidth,
        help="bandwidth of the link, such as 63GB/s [the device's]",
    ),
]
LinkShare = Annotated[
    float,
    typer.Option(
        "--link-share",
        metavar="SHARE",
        parser=_link_share,
        show_default="1",
        help="the part of the link that this job may use, such as 0.5 if two GPUs share one switch",
    ),
]
MemoryLimit = Annotated[
    int | None,
    typer.Option(
        "--memory-limit",
        metavar="SIZE",
        parser=_size,
        help="memory that the job may use, such as 24GB [the device's memory less 5 %]",
    ),
]
ExtraMemory = Annotated[
    int | None,
    typer.Option("--extra-memory", metavar="SIZE", parser=_size, help="most to add to training's own peak"),
]
RelaxMemory = Annotated[
    bool, typer.Option("--relax-memory", help="if no plan fits the memory, take the one that exceeds it least")
]
FormulationOption = Annotated[
    Formulation,
    typer.Option("--formulation", help="auto: greedy, certified by flow; per-tensor always plans --policy snapshot"),
]
PolicyOption = Annotated[PolicyName, typer.Option("--policy", help="direct: bytes may leave without a copy on the GPU")]
GranularityOption = Annotated[GranularityName, typer.Option("--granularity", help="segment is what eager jobs can run")]
ChunkSize = Annotated[
    int,
    typer.Option("--chunk-size", metavar="SIZE", parser=_chunk_size, show_default="8MiB", help="the largest chunk"),
]
SolverOption = Annotated[SolverName, typer.Option("--solver", help="auto: Gurobi with a licence of your own, or HiGHS")]
TimeLimit = Annotated[
    float,
    typer.Option("--time-limit", metavar="SECONDS", parser=_time_limit, help="for each run of the solver; inf: none"),
]
MaxInterval = Annotated[
    int | None,
    typer.Option("--max-interval", metavar="K", min=1, help="most iterations from one checkpoint to the next"),
]
Overhead = Annotated[
    float,
    typer.Option(
        "--overhead",
        metavar="SHARE",
        parser=_overhead,
        show_default="0.035",
        help="the share of training's time that stalls may take: 0.035, or 3.5%",
    ),
]
RanksOption = Annotated[
    int | None, typer.Option("--ranks", metavar="N", min=2, help="plan one of N ranks, on a cluster of this device")
]
Mesh = Annotated[
    str | None,
    typer.Option("--mesh", metavar="MESH", help="how the ranks are laid out, such as replicate=8,shard=8"),
]
ParallelOption = Annotated[
    ParallelName | None,
    typer.Option("--parallel", help="wrap the model so; without it and --mesh, the file wraps it itself"),
]
Output = Annotated[
    Path | None,
    typer.Option("-o", "--output", metavar="FILE", help="write the plan here; without a plan, FILE stays as it is"),
]
Perfetto = Annotated[
    Path | None,
    typer.Option("--perfetto", metavar="FILE.json", help="write a trace for https://ui.perfetto.dev"),
]
Json = Annotated[bool, typer.Option("--json", help="print one JSON object, and nothing else")]
Html = Annotated[
    Path | None,
    typer.Option("--html", metavar="FILE", help="write a page for a browser, in one file that needs no network"),
]
