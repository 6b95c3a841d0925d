"""The report of a run: what checkpointing did and cost, beside the plan's promises. Pure data, and its file.

docs/reference/run-report.md describes every field. pydantic is imported only where a file is read.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from checkflow.core.errors import ReportError, first_fault
from checkflow.core.graph import STRICT, Many
from checkflow.core.plan import Plan
from checkflow.core.reports.run_history import HeldIterations, HistoryPoint
from checkflow.core.small_files import check_density, check_fields, read_object, read_regular

FILE = "report.json"
KEPT_RUNS = 32
MOST_RANKS = 16  # that a report names with their costs
VERSION = 1
MAX_BYTES = 1 << 22  # some six times the size of KEPT_RUNS long runs
PlanSource = Literal["given", "cache", "recorded"]
_MOST = 1e18  # no bytes, seconds or count reach it


@dataclass(frozen=True, slots=True)
class PhaseTimes:
    """Seconds of one phase, over all iterations and in one of them."""

    __pydantic_config__ = STRICT
    total_seconds: float
    median_seconds: float | None
    p99_seconds: float | None


@dataclass(frozen=True, slots=True)
class Phases:
    """Where the time of whole iterations went; the phases' totals add up to ``iteration``'s."""

    __pydantic_config__ = STRICT
    clock: Literal["host"]  # on a GPU, host times do not say when the device worked
    iterations: int
    iteration: PhaseTimes
    data: PhaseTimes
    forward_backward: PhaseTimes
    update: PhaseTimes
    snapshot_wait: PhaseTimes
    persist_wait: PhaseTimes
    planning: PhaseTimes
    other: PhaseTimes


@dataclass(frozen=True, slots=True)
class PlanInForce:
    """The plan that ran last, and its promises."""

    __pydantic_config__ = STRICT
    digest: str
    source: PlanSource
    policy: str
    interval: int
    state_bytes: int
    iteration_seconds: float
    stall_seconds: float
    training_peak_bytes: int
    peak_bytes: int
    bandwidth_bytes_per_second: float


@dataclass(frozen=True, slots=True)
class PlanningReport:
    """The search for a plan, if the job makes its own."""

    __pydantic_config__ = STRICT
    stage: str
    seconds: float
    failure: str | None


@dataclass(frozen=True, slots=True)
class FrequencyChange:
    """Intervals that changed at a boundary, and why."""

    __pydantic_config__ = STRICT
    step: int
    memory: int
    disk: int
    reason: str


@dataclass(frozen=True, slots=True)
class Frequency:
    """How often checkpoints are made, and why."""

    __pydantic_config__ = STRICT
    memory_interval: int | None
    disk_interval: int | None
    reason: str
    iteration_seconds: float | None
    baseline_seconds: float | None
    capture_cost_seconds: float | None
    persist_cost_seconds: float | None
    persist_seconds: float | None
    overhead_share: float | None
    overhead_allowed: float
    changes: Many[FrequencyChange]


@dataclass(frozen=True, slots=True)
class HeldSeconds:
    """How long training was held, the time outside of whole iterations included."""

    __pydantic_config__ = STRICT
    anchors: float
    boundary: float
    buffers: float
    planning: float


@dataclass(frozen=True, slots=True)
class Moved:
    """Bytes over the whole run."""

    __pydantic_config__ = STRICT
    state_bytes: int | None
    captured_bytes: int
    direct_bytes: int
    snapshot_bytes: int
    boundary_bytes: int
    persisted_bytes: int


@dataclass(frozen=True, slots=True)
class NewestCapture:
    """The newest capture that has ended."""

    __pydantic_config__ = STRICT
    step: int
    direct_bytes: int
    snapshot_bytes: int
    boundary_bytes: int
    snapshot_peak_bytes: int


@dataclass(frozen=True, slots=True)
class Bandwidths:
    """Bytes by the seconds in which they were really copied or written."""

    __pydantic_config__ = STRICT
    offload_seconds: float | None
    offload_bytes_per_second: float | None
    persist_seconds: float
    persist_bytes_per_second: float | None
    last_persist_seconds: float | None
    large_offload_bytes_per_second: float | None = None


@dataclass(frozen=True, slots=True)
class Lag:
    """How far storage is behind host memory."""

    __pydantic_config__ = STRICT
    captured_step: int | None
    durable_step: int | None
    iterations: int | None
    seconds: float | None
    since_durable_seconds: float | None


@dataclass(frozen=True, slots=True)
class Measured:
    """Measurements to compare with the plan's promises, since that plan runs."""

    __pydantic_config__ = STRICT
    iteration_seconds: float | None
    stall_seconds: float | None
    peak_bytes: int | None
    peak_reserved_bytes: int | None
    peak_exactly: bool = False  # otherwise an upper bound of the plan's own peak


@dataclass(frozen=True, slots=True)
class RankCosts:
    """What checkpoints have cost one rank up to its newest one."""

    __pydantic_config__ = STRICT
    rank: int
    held_seconds: float
    persist_seconds: float
    copied_bytes: int
    written_bytes: int
    failed: int


@dataclass(frozen=True, slots=True)
class AllRanks:
    """What checkpoints have cost all ranks, as far as rank 0 has heard."""

    __pydantic_config__ = STRICT
    count: int
    heard: int
    silent: Many[int]
    copied_bytes: int
    written_bytes: int
    slowest_writer: int
    each: Many[RankCosts]  # at most MOST_RANKS; the one first that was held longest


@dataclass(frozen=True)
class RunReport:
    """One run of a job. Units are in the names; null means unknown or absent."""

    __pydantic_config__ = STRICT
    run_id: str
    started_unix_seconds: float
    written_unix_seconds: float
    closed: bool
    model: str
    device: str
    iteration: int
    resumed_from: int | None
    replayed_iterations: int | None
    replayed_exactly: bool
    captures: int
    committed: int
    superseded: int
    void: int
    failed: int
    last_failure: str | None
    audited: int
    audits_passed: int
    breaches: int
    checkpoint_bytes: int | None
    plan: PlanInForce | None
    planning: PlanningReport | None
    frequency: Frequency
    phases: Phases
    held_seconds: HeldSeconds
    longest_hold_seconds: float
    bytes: Moved
    newest_capture: NewestCapture | None
    bandwidths: Bandwidths
    lag: Lag
    measured: Measured
    version: Literal[1] = 1
    best_step: int | None = None
    reclaimed_step: int | None = None
    memory_outlives_process: bool = False
    held_measuring_seconds: float = 0.0
    held_at_ends_seconds: float = 0.0
    ranks: AllRanks | None = None
    history: Many[HistoryPoint] = ()  # at most MOST_POINTS, the oldest first
    held_iterations: Many[HeldIterations] = ()  # by the end of the bin

    @property
    def checkpoint_seconds(self) -> float:
        """Seconds of whole iterations in which checkpoints, and looks for them, held training."""
        return self.phases.snapshot_wait.total_seconds + self.phases.persist_wait.total_seconds

    @property
    def own_seconds(self) -> float:
        """Training's own time in whole iterations, of which ``overhead`` is a share."""
        return self.phases.iteration.total_seconds - self.checkpoint_seconds - self.phases.planning.total_seconds


def sum_up(count: int, silent: Sequence[int], costs: Sequence[RankCosts]) -> AllRanks | None:
    """Return what ``count`` ranks cost together, from those that have told theirs; None: none has."""
    if not costs:
        return None
    return AllRanks(
        count=count,
        heard=len(costs),
        silent=tuple(silent),
        copied_bytes=sum(one.copied_bytes for one in costs),
        written_bytes=sum(one.written_bytes for one in costs),
        slowest_writer=max(costs, key=lambda one: (one.persist_seconds, -one.rank)).rank,
        each=tuple(sorted(costs, key=lambda one: (-one.held_seconds, one.rank))[:MOST_RANKS]),
    )


@dataclass(frozen=True)
class ReportFile:
    """The last runs in one directory, the newest last."""

    __pydantic_config__ = STRICT
    format: Literal["checkflow-report"]
    version: Literal[1]
    runs: Many[RunReport]


def promises_of(plan: Plan, source: PlanSource) -> PlanInForce:
    return PlanInForce(
        digest=plan.digest,
        source=source,
        policy=plan.policy,
        interval=plan.interval,
        state_bytes=sum(spec.size_bytes for spec in plan.fingerprint.state),
        iteration_seconds=plan.timeline.iteration_seconds,
        stall_seconds=plan.stall_seconds,
        training_peak_bytes=plan.timeline.training_peak_bytes,
        peak_bytes=plan.plan_peak_bytes,
        bandwidth_bytes_per_second=plan.bandwidth_bytes_per_second,
    )


def to_dict(report: RunReport) -> dict[str, Any]:
    plain = dataclasses.asdict(dataclasses.replace(report, history=(), held_iterations=()))
    plain["frequency"]["changes"] = list(plain["frequency"]["changes"])
    for name, kind in (
        ("history", HistoryPoint),
        ("held_iterations", HeldIterations),
    ):  # asdict is slow
        names = [field.name for field in dataclasses.fields(kind)]
        plain[name] = [{field: getattr(one, field) for field in names} for one in getattr(report, name)]
    if plain["ranks"] is not None:
        plain["ranks"] |= {name: list(plain["ranks"][name]) for name in ("silent", "each")}
    return plain


def scalars(report: RunReport) -> dict[str, float]:
    """Return every number of a report by its place, such as "lag/seconds"; without lists, texts and unknown ones."""
    found: dict[str, float] = {}

    def add(plain: dict[str, Any], before: str) -> None:
        for name, value in plain.items():
            if isinstance(value, dict):
                add(value, f"{before}{name}/")
            elif isinstance(value, int | float) and not isinstance(value, bool):
                found[before + name] = value

    add(to_dict(report), "")
    del found["version"]  # of the format
    return found


def dump_run(report: RunReport) -> str:
    """Return one run's line of the file."""
    return json.dumps(to_dict(report), allow_nan=False, ensure_ascii=True)


def dump_file(runs: Iterable[str]) -> bytes:
    """Return the file, one dumped run per line, headed by its format so that readers can stop early."""
    lines = ",\n".join(runs)
    return f'{{"format": "checkflow-report", "version": {VERSION}, "runs": [\n{lines}\n]}}\n'.encode()


def is_report(path: str | os.PathLike[str]) -> bool:
    """Whether a file says at its beginning that it is a report; False if unreadable."""
    try:
        head = _read(path, 64)
    except ReportError:
        return False
    return head.translate(None, b" \t\r\n").startswith(b'{"format":"checkflow-report"')


def load(path: str | os.PathLike[str]) -> tuple[RunReport, ...]:
    """Return the runs of a report file, the newest last.

    Raises:
        ReportError: the file cannot be read, is damaged, or is of another version; one line with the reason.
    """
    return loads(_read(path, MAX_BYTES + 1), str(path))


def loads(data: bytes, name: str) -> tuple[RunReport, ...]:
    """Return the runs of a report's content, as :func:`load`; ``name`` is the file's, for messages."""
    from pydantic import TypeAdapter, ValidationError

    if len(data) > MAX_BYTES:
        raise ReportError(f"{name} is no run report: it has more than {MAX_BYTES} bytes")
    try:
        check_density(data)
        plain = json.loads(data, object_pairs_hook=read_object)
    except (ValueError, RecursionError) as error:
        raise ReportError(f"{name} is no run report: {_one_line(error)}") from None
    version = plain.get("version") if isinstance(plain, dict) else None
    if isinstance(version, int) and 0 <= version < 10**6 and version != VERSION:
        raise ReportError(f"{name} is a report of version {version}; this checkflow reads version {VERSION}")
    try:
        check_fields(plain, ReportFile)
        del plain  # a hostile file may be large
        runs: tuple[RunReport, ...] = TypeAdapter(ReportFile).validate_json(data).runs
    except ValidationError as error:
        raise ReportError(f"{name} is no run report: {first_fault(error)}") from None
    except ValueError as error:
        raise ReportError(f"{name} is no run report: {error}") from None
    for index, run in enumerate(runs):
        if problem := _contradiction(run):
            raise ReportError(f"{name} contradicts itself: runs.{index}.{problem}")
    return runs


def latest(runs: Sequence[RunReport], name: str) -> RunReport:
    """Return the newest run; ReportError if there is none."""
    if not runs:
        raise ReportError(f"{name} holds no run")
    return runs[-1]


def _contradiction(run: RunReport) -> str | None:
    """Return what no run can have: a negative or immense figure, or more parts than the whole."""
    for place, number in _numbers(to_dict(run), ""):
        if not abs(number) < _MOST:
            return f"{place} is beyond all measure"
        if number < 0:
            return f"{place} is negative"
    if run.audits_passed + run.breaches != run.audited:
        return "audited is not audits_passed and breaches together"
    if run.phases.iterations > run.iteration:
        return "phases.iterations is more than the job has"
    for wait in ("snapshot_wait", "persist_wait"):
        held = sum(getattr(one, wait) for one in run.held_iterations)
        if held > run.phases.iterations:  # it may be fewer: Ctrl-C came between two counters
            return f"held_iterations has {held} iterations of {run.phases.iterations} by {wait}"
    if run.plan is not None and run.plan.interval < 1:
        return "plan.interval is no number of iterations"
    whole = run.phases.iteration.total_seconds
    parts = math.fsum(
        getattr(run.phases, field.name).total_seconds
        for field in dataclasses.fields(Phases)
        if field.name not in ("clock", "iterations", "iteration")
    )
    if abs(parts - whole) > 1e-3 + 1e-6 * whole:
        return "phases do not add up to the iterations' time"
    return None


def _numbers(value: Any, place: str) -> Iterator[tuple[str, float]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _numbers(inner, f"{place}.{key}" if place else key)
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from _numbers(inner, f"{place}.{index}")
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield place, value


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _read(path: str | os.PathLike[str], most_bytes: int) -> bytes:
    try:
        return read_regular(path, most_bytes)
    except OSError as error:
        raise ReportError(f"cannot read the report {path}: {error.strerror or error}") from error
