"""A run's report beside a plan: its promises, and what was measured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from checkflow.core.reports.run_report import PlanInForce, RunReport
from checkflow.core.units import format_rate, format_seconds, format_size

Unit = Literal["seconds", "bytes", "bytes_per_second", "iterations"]


@dataclass(frozen=True, slots=True)
class Row:
    """One figure; None: there is no plan, or no measurement, as the note says."""

    what: str
    unit: Unit
    planned: float | None
    measured: float | None
    note: str

    @property
    def ratio(self) -> float | None:
        return self.measured / self.planned if self.planned and self.measured is not None else None

    def text(self, value: float | None) -> str:
        """The planned or measured value, for people."""
        if value is None:
            return "-"
        if self.unit == "seconds":
            return format_seconds(value) if value else "none"
        if self.unit == "iterations":
            number = str(int(value)) if value == int(value) else f"{value:.3g}"
            return f"{number} iteration{'' if value == 1 else 's'}"
        return format_size(value) if self.unit == "bytes" else format_rate(value)


@dataclass(frozen=True, slots=True)
class RunComparison:
    """A run beside a plan."""

    source: str  # the report's file
    number: int  # of the run in the file, from 1
    runs: int
    run: RunReport
    plan: PlanInForce | None  # the one that ran last, or that the user named
    rows: tuple[Row, ...]

    @property
    def ran(self) -> bool:
        return self.plan == self.run.plan or (
            self.plan is not None and self.run.plan is not None and self.plan.digest == self.run.plan.digest
        )

    @property
    def origin(self) -> str:
        """Which plan this is, for people."""
        if self.plan is None:
            return "no plan ran"
        if self.ran:
            origin = {
                "given": "given by the job",
                "cache": "kept from an earlier run",
                "recorded": "recorded from this job",
            }
            return f"the plan that ran, {origin[(self.run.plan or self.plan).source]}"
        return "this plan is not the one that ran"


def compare_run(source: str, runs: Sequence[RunReport], plan: PlanInForce | None) -> RunComparison:
    """Compare the newest of at least one run, the last, with a plan; None: its own."""
    run = runs[-1]
    chosen = run.plan if plan is None else plan
    return RunComparison(source, len(runs), len(runs), run, chosen, tuple(_rows(run, chosen)))


def _rows(run: RunReport, plan: PlanInForce | None) -> Iterable[Row]:
    measured, bandwidths, phases = run.measured, run.bandwidths, run.phases

    def planned(name: str) -> float | None:
        return None if plan is None else getattr(plan, name)

    yield Row(
        "iteration", "seconds", planned("iteration_seconds"), measured.iteration_seconds,
        "forward, backward and update: the median",
    )  # fmt: skip
    yield Row(
        "stall", "seconds", planned("stall_seconds"), measured.stall_seconds,
        "held at anchors and boundaries: the median",
    )  # fmt: skip
    reserved = "" if measured.peak_reserved_bytes is None else f"; {format_size(measured.peak_reserved_bytes)} reserved"
    given = (
        "allocated on the device" if measured.peak_exactly else "allocated before this plan: its own is at most that"
    )
    note = f"{given}{reserved}" if measured.peak_bytes is not None else f"not measured on {run.device}"
    yield Row("peak", "bytes", planned("peak_bytes"), measured.peak_bytes, note)
    note = "while it copied" if bandwidths.offload_bytes_per_second is not None else "not measured"
    if bandwidths.large_offload_bytes_per_second is not None:
        note += f"; {format_rate(bandwidths.large_offload_bytes_per_second)} in large copies"
    yield Row(
        "link", "bytes_per_second", planned("bandwidth_bytes_per_second"), bandwidths.offload_bytes_per_second, note
    )
    yield Row(
        "storage", "bytes_per_second", None if plan is None else _durable_rate(plan),
        bandwidths.persist_bytes_per_second, "planned: needed for the plan's interval",
    )  # fmt: skip
    done = phases.iterations
    waits = f"waited for storage and buffers: {format_seconds(phases.persist_wait.total_seconds)}"
    yield Row(
        "interval", "iterations", planned("interval"), done / run.captures if run.captures else None,
        f"{run.captures} captures in {done} iterations",
    )  # fmt: skip
    yield Row(
        "interval on storage", "iterations", run.frequency.disk_interval, done / run.committed if run.committed else
        None, f"{run.committed} committed; {waits}",
    )  # fmt: skip


def _durable_rate(plan: PlanInForce) -> float | None:
    seconds = plan.interval * plan.iteration_seconds + plan.stall_seconds
    return plan.state_bytes / seconds if seconds else None
