"""A run's report: its file beside the checkpoints, and the log lines at its start and end.

``report.json`` is replaced whole now and then, after a checkpoint, and at the end, without a sync: if a power cut takes
it, the next run starts a new one. Errors here are logged once and never reach training or checkpoints.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from checkflow.core.errors import ReportError
from checkflow.core.reports import capture_times, run_report
from checkflow.core.reports.capture_times import CaptureFile
from checkflow.core.reports.run_history import HeldIterations, HistoryPoint, extended
from checkflow.core.reports.run_report import (
    FILE,
    KEPT_RUNS,
    AllRanks,
    Bandwidths,
    Frequency,
    HeldSeconds,
    Lag,
    Measured,
    Moved,
    NewestCapture,
    Phases,
    PhaseTimes,
    RunReport,
)
from checkflow.core.state import training_device, unwrap
from checkflow.core.units import format_seconds, format_size, format_stall
from checkflow.runtime.job.job import Job
from checkflow.runtime.job.traits import allocated_peak_bytes, device_name
from checkflow.runtime.loop.phase_clock import Reading, Times
from checkflow.runtime.loop.training_loop import TrainingLoop
from checkflow.runtime.memory_tier.records import NOTHING
from checkflow.runtime.persist.saver import Saving
from checkflow.runtime.persist.timing import KeptSpells, times_of
from checkflow.runtime.ranks.council import Council
from checkflow.runtime.ranks.records import name_ranks
from checkflow.runtime.system import fs

logger = logging.getLogger("checkflow")

MOST_SHARE = 0.02  # of the time may go into reports during training
WRITTEN_EVERY_SECONDS = 5.0  # at least, from one writing to the next: each takes some milliseconds from training
REPORT_EVERY_SECONDS = 1.0  # at least, from one call of ``on_report`` to the next
CAPTURES_EVERY_SECONDS = 30.0  # at least, from one writing of the captures' times to the next
LEAST_SAID = 0.001  # of the time: the last line omits smaller parts
_ASIDE = f".broken-{FILE}"


class Reporter:
    """Reports of one run.

    Args:
        resumed_from: None: it started anew.
        imported: whether from imported weights, so that nothing is repeated.
        reclaimed: the step that the start put on storage, from the previous run's host memory.
        council: of several ranks, only rank 0 writes the file and speaks for all.
        on_report: the user's function; see :class:`.checkpointer.Checkpointer`.
    """

    def __init__(
        self,
        job: Job,
        loop: TrainingLoop,
        saving: Saving,
        directory: Path,
        *,
        run_id: str,
        resumed_from: int | None,
        imported: bool = False,
        reclaimed: int | None = None,
        council: Council,
        on_report: Callable[[dict[str, float]], object] | None = None,
    ) -> None:
        self._on_report, self._called, self._call_seconds = on_report, -math.inf, 0.0  # the last by time.monotonic
        self._warned_of_call = False
        self.speaks, self.ranks = council.rank == 0, council.world_size
        self._council = council
        self._loop, self._saving = loop, saving
        self._directory, self._run_id, self._resumed_from = directory, run_id, resumed_from
        self._reclaimed = reclaimed
        self._model = "+".join(type(unwrap(model)).__name__ for model in job.models.values())
        self._device = device_name(job.models)[1]
        self._models = job.models
        self._started = time.time()
        self._written = self._took_seconds = 0.0  # by time.monotonic
        self._captures_written = -math.inf  # likewise
        self._breaches = 0  # that were written
        self._warned = False  # that the file cannot be written was logged
        self._spells = KeptSpells(loop.clock.spells)
        self._history: tuple[HistoryPoint, ...] = ()
        self._ended = 0  # checkpoints committed or failed, at the newest point of the history
        # The newest durable step by then, and when its capture began.
        self._safe_step, self._safe_since = resumed_from, time.monotonic()
        earlier = self._read_earlier()
        self._earlier = [run_report.dump_run(run) for run in earlier[1 - KEPT_RUNS :]]
        # Iterations of an earlier run beyond this run's first step are repeated. A killed run had come further than
        # its last report says.
        self._replayed: int | None = 0 if imported else None
        self._exactly = imported
        last = earlier[-1] if earlier else None
        reached = max(NOTHING if last is None else last.iteration, NOTHING if reclaimed is None else reclaimed)
        if resumed_from is not None and reached != NOTHING and not imported:
            self._replayed = max(0, reached - resumed_from)
            self._exactly = last is not None and last.closed and last.iteration >= max(resumed_from, reached)

    def make(self, *, closed: bool = False) -> RunReport:
        """The report as of now. Any thread may ask for it."""
        loop, saving = self._loop, self._saving
        writer, place, clock = saving.writer, loop.place, loop.clock
        last, moved, promises = place.last_capture, place.moved, place.promises()
        reading = clock.read()
        failures = [failure for failure in (writer.last_failure, place.last_failure) if failure is not None]
        return RunReport(
            run_id=self._run_id,
            started_unix_seconds=round(self._started, 3),
            written_unix_seconds=round(time.time(), 3),
            closed=closed,
            model=self._model,
            device=self._device,
            iteration=loop.iteration,
            resumed_from=self._resumed_from,
            replayed_iterations=self._replayed,
            replayed_exactly=self._exactly,
            captures=saving.captures,
            committed=writer.committed,
            superseded=writer.superseded,
            void=writer.void,
            failed=writer.failed + place.aborted,
            last_failure=max(failures)[1] if failures else None,
            audited=writer.audited,
            audits_passed=writer.audited - writer.breaches,
            breaches=writer.breaches,
            checkpoint_bytes=writer.last.size_bytes if writer.last else None,
            plan=promises,
            planning=place.search(),
            frequency=loop.pace.report,
            phases=_phases(reading),
            held_seconds=HeldSeconds(**{what: max(held, 0.0) for what, held in clock.held_seconds.items()}),
            longest_hold_seconds=clock.longest_hold_seconds,
            bytes=Moved(
                state_bytes=last.moved.total_bytes if last else promises.state_bytes if promises else None,
                captured_bytes=moved.total_bytes,
                direct_bytes=moved.direct_bytes,
                snapshot_bytes=moved.snapshot_bytes,
                boundary_bytes=moved.boundary_bytes,
                persisted_bytes=writer.persisted_bytes,
            ),
            newest_capture=None
            if last is None
            else NewestCapture(
                last.step,
                last.moved.direct_bytes,
                last.moved.snapshot_bytes,
                last.moved.boundary_bytes,
                last.statistics.snapshot_peak_bytes,
            ),
            bandwidths=Bandwidths(
                offload_seconds=moved.offload_seconds,
                offload_bytes_per_second=_rate(moved.direct_bytes + moved.snapshot_bytes, moved.offload_seconds),
                persist_seconds=writer.persist_seconds,
                persist_bytes_per_second=_rate(writer.persisted_bytes, writer.persist_seconds),
                last_persist_seconds=writer.last.seconds if writer.last else None,
                large_offload_bytes_per_second=_rate(moved.large_bytes, moved.large_seconds),
            ),
            lag=self._lag(),
            measured=self._measured(reading),
            best_step=saving.metrics.best_step,
            reclaimed_step=self._reclaimed,
            memory_outlives_process=saving.tier.survives,
            held_measuring_seconds=max(0.0, reading.parts.get("measuring", 0.0)),
            held_at_ends_seconds=max(0.0, reading.parts.get("ends", 0.0)),
            ranks=self._of_all_ranks(),
            history=self._history,
            held_iterations=_held_iterations(reading),
        )

    def tell_ranks(self) -> None:
        """Tell rank 0 what checkpoints have cost this one."""
        loop, writer = self._loop, self._saving.writer
        held_seconds = sum(max(held, 0.0) for what, held in loop.clock.held_seconds.items() if what != "planning")
        self._council.note_costs(
            held_seconds, loop.place.moved.total_bytes, writer.persisted_bytes, writer.failed + loop.place.aborted
        )

    def _of_all_ranks(self) -> AllRanks | None:
        if not self.speaks:
            return None
        overview, silent = self._council.overview, self._council.view.silent
        return run_report.sum_up(self.ranks, sorted({*silent} - {*overview.left}), overview.costs)

    def checkpoint_ended(self) -> None:
        """On the writer's thread, after each checkpoint. Never raises."""
        if (durable := self._saving.writer.durable) is not None:
            self._spells.keep(durable.step, durable.begun)
        self.write_in_time()
        least_seconds = max(REPORT_EVERY_SECONDS, self._call_seconds / MOST_SHARE)
        if time.monotonic() - self._called >= least_seconds:
            self.call_back()

    def call_back(self, *, closed: bool = False) -> None:
        """Give the report's numbers to the user's function; what that raises is logged once.

        With ``closed`` it runs on the thread that closes, which an exit or Ctrl-C within it may end.
        """
        if self._on_report is None or not self.speaks:
            return
        begun = time.monotonic()
        try:
            self._on_report(run_report.scalars(self.make(closed=closed)))
        except BaseException as error:  # sys.exit, too, would end the writer's thread
            if closed and not isinstance(error, Exception):
                raise
            if not self._warned_of_call:
                self._warned_of_call = True
                logger.warning(
                    "on_report has raised %s: %s; training goes on, and it is called again",
                    type(error).__name__, error, exc_info=error,
                )  # fmt: skip
        self._called = time.monotonic()
        self._call_seconds = self._called - begun

    def write_in_time(self) -> None:
        """:meth:`write`, unless it was written a moment ago. What an audit has found does not wait."""
        least_seconds = max(WRITTEN_EVERY_SECONDS, self._took_seconds / MOST_SHARE)
        breached = self._saving.writer.breaches != self._breaches
        if breached or time.monotonic() - self._written >= least_seconds:
            self.write()
        else:
            self.tell_ranks()
            with self._faults_told():
                self._note()

    def write(self, *, closed: bool = False) -> None:
        """Replace the file. Never raises. Of several ranks, rank 0 does; the others tell it their part."""
        self.tell_ranks()
        if not self.speaks:
            return
        begun = time.monotonic()
        with self._faults_told():
            self._note(closed=closed)
            report = self.make(closed=closed)
            self._publish(FILE, run_report.dump_file([*self._earlier, run_report.dump_run(report)]))
            self._breaches = report.breaches
        self._written = time.monotonic()
        self._took_seconds = self._written - begun
        if closed or self._written - self._captures_written >= CAPTURES_EVERY_SECONDS:
            with self._faults_told():
                self._write_captures()

    def _publish(self, name: str, data: bytes) -> None:
        with fs.folder(str(self._directory)) as root:
            fs.publish(name, data, dir_fd=root)

    @contextlib.contextmanager
    def _faults_told(self) -> Iterator[None]:
        """What is raised within is logged once."""
        try:
            yield
        except OSError as error:
            if not self._warned:
                self._warned = True
                logger.warning(
                    "cannot write %s: %s; training and checkpoints go on without it",
                    self._directory / FILE, error.strerror or error,
                )  # fmt: skip
        except Exception:
            # A bug must not end the writer's thread.
            if not self._warned:
                self._warned = True
                logger.exception("cannot write %s; training and checkpoints go on without it", self._directory / FILE)

    def _note(self, *, closed: bool = False) -> None:
        """Add what has happened since the last checkpoint ended to the history."""
        writer, frequency, iteration = self._saving.writer, self._loop.pace.report, self._loop.iteration
        durable, ended = writer.durable, writer.committed + writer.failed
        if ended == self._ended and self._history and not closed:  # a void one ended
            return
        step = self._resumed_from if durable is None else durable.step
        point = HistoryPoint(
            checkpoints=ended - self._ended,
            unix_seconds=round(time.time(), 3),
            iteration=iteration,
            durable_step=step,
            memory_interval=frequency.memory_interval,
            disk_interval=frequency.disk_interval,
            failed=writer.failed + self._loop.place.aborted,
            lag_iterations=max(0, iteration - (self._safe_step or 0)),
            lag_seconds=round(max(0.0, time.monotonic() - self._safe_since), 6),
        )
        self._history, self._ended = extended(self._history, point), ended
        if durable is not None:
            self._safe_step, self._safe_since = step, durable.begun

    def _write_captures(self) -> None:
        """Replace the file with the times of the last captures, if there are any."""
        captures = self._loop.place.last_captures
        if not captures:
            return
        persisted = {one.step: one for one in self._saving.writer.recent}
        file = CaptureFile(
            self._run_id,
            self._model,
            self._device,
            tuple(times_of(one, persisted.get(one.step), self._spells.of(one.step, one.begun)) for one in captures),
        )
        self._publish(capture_times.FILE, capture_times.dumps(file))
        self._captures_written = time.monotonic()

    def _read_earlier(self) -> tuple[RunReport, ...]:
        """The runs in the file. A damaged file is set aside."""
        path = self._directory / FILE
        try:
            with fs.folder(str(self._directory)) as root:
                data = fs.read_small(FILE, run_report.MAX_BYTES + 1, dir_fd=root)
            return run_report.loads(data, str(path))
        except FileNotFoundError:
            return ()
        except (ReportError, OSError) as error:
            reason = error if isinstance(error, ReportError) else f"cannot read {path}: {error.strerror or error}"
            logger.warning("beginning a new report, the old one is set aside as %s: %s", _ASIDE, reason)
        with contextlib.suppress(OSError):  # the first write will say why
            path.rename(self._directory / _ASIDE)
        return ()

    def _lag(self) -> Lag:
        newest, durable = self._saving.newest, self._saving.writer.durable
        captured_step = None if newest is None else newest[0]
        durable_step = self._resumed_from if durable is None else durable.step
        iterations, seconds = None, None
        if captured_step is not None and durable_step is not None:
            iterations = max(0, captured_step - durable_step)
        if newest is not None and durable is not None:
            seconds = max(0.0, newest[1] - durable.begun)
        since = None if durable is None else time.monotonic() - durable.committed
        return Lag(captured_step, durable_step, iterations, seconds, since)

    def _measured(self, reading: Reading) -> Measured:
        peak, before = allocated_peak_bytes(self._models), self._loop.place.peak_before_bytes
        reserved = None if peak is None else torch.cuda.max_memory_reserved(training_device(self._models))
        # Torch keeps one peak a device, which the user may reset. It counts for the plan if it moved under the plan.
        return Measured(reading.computing_seconds, reading.stall_seconds, peak, reserved, peak_exactly=peak != before)


def _phases(reading: Reading) -> Phases:
    return Phases(
        clock="host",
        iterations=reading.iterations,
        iteration=_times(reading.iteration),
        **{name: _times(times) for name, times in reading.phases.items()},
    )


def _held_iterations(reading: Reading) -> tuple[HeldIterations, ...]:
    waits = reading.histograms
    ends = sorted({end for bins in waits.values() for end in bins})
    return tuple(
        HeldIterations(float(f"{end:.3g}"), **{wait: bins.get(end, 0) for wait, bins in waits.items()}) for end in ends
    )


def _times(times: Times) -> PhaseTimes:
    return PhaseTimes(times.total, times.median, times.p99)


def _rate(size_bytes: int, seconds: float | None) -> float | None:
    return size_bytes / seconds if seconds else None


# The lines that a person sees


def start_line(report: RunReport, directory: Path, ranks: int = 1) -> str:
    """What runs, where its checkpoints go, what was restored, and what is repeated."""
    of_ranks = [] if ranks == 1 else [f"{ranks} ranks, of which each copies its share of the state"]
    return "; ".join(
        [*of_ranks, _plan_words(report), f"checkpoints go to {directory}", _resume_words(report, directory)]
    )


def _plan_words(report: RunReport) -> str:
    plan = report.plan
    if plan is None and report.planning is not None and report.planning.failure is not None:
        return f"no plan, since {report.planning.failure}: all state is copied at each boundary that is saved"
    if plan is None:
        return "no plan yet, one of the first iterations is recorded for it"
    whose = {"given": "the given plan", "cache": "a kept plan", "recorded": "a plan of this job"}[plan.source]
    often = _often(report.frequency)
    return f"{whose} runs: a checkpoint every {often}, predicted stall {format_stall(plan.stall_seconds)}"


def _often(frequency: Frequency) -> str:
    """How often checkpoints are made at the start, and whether that is still being measured."""

    def words(interval: int) -> str:
        return "iteration" if interval == 1 else f"{interval} iterations"

    memory, disk = frequency.memory_interval, frequency.disk_interval
    if memory is None:
        return "so many seconds, as asked"
    if frequency.reason == "every":
        return words(memory)
    if disk is None:
        return f"{words(memory)} until it is measured what one costs"
    captured = "" if memory == disk else f", and one in host memory every {words(memory)}"
    return f"{words(disk)}{captured}, as measured before"


def _resume_words(report: RunReport, directory: Path) -> str:
    if report.resumed_from is None:
        return "nothing to go on from, training begins anew"
    resumed, lost = f"resumed from step {report.resumed_from} of {directory}", report.replayed_iterations
    if report.reclaimed_step == report.resumed_from:
        resumed += " (which the run before had in host memory)"
    if lost is None:
        return f"{resumed}, how many iterations are done again is not known"
    iterations = f"{lost} iteration{'' if lost == 1 else 's'}"
    if report.replayed_exactly:
        again = f"{iterations} {'is' if lost == 1 else 'are'} done again"
        return f"{resumed}, {again if lost else 'no iteration is done again'}"
    # The run was killed, ended by os._exit, or could not write its last report.
    known = f": {iterations} up to its last report, and those since" if lost else ""
    return f"{resumed}, the previous run did not report its end, and what it did after that step is repeated{known}"


def end_line(report: RunReport, directory: Path, where: str) -> str:
    """What was committed, what it cost, and where the directory is now."""
    parts = [f"{report.committed} checkpoint{'' if report.committed == 1 else 's'} committed"]
    if report.lag.durable_step is not None:
        parts[0] += f", the newest of step {report.lag.durable_step}"
    if report.failed:
        parts.append(f"{report.failed} failed, the last one by {report.last_failure}")
    parts += _held_words(report)
    if report.ranks is not None and report.ranks.count > 1:
        parts.append(_ranks_words(report.ranks))
    parts.append(f"see {directory / FILE}" if where == str(directory) else f"the directory is {where}")
    return "; ".join(parts)


def _ranks_words(ranks: AllRanks) -> str:
    slowest = ranks.each[0]
    words = f"the {ranks.heard} ranks" if ranks.heard == ranks.count else f"{ranks.heard} of {ranks.count} ranks"
    words += f" wrote {format_size(ranks.written_bytes)}, and rank {slowest.rank} was held longest"
    words += f" ({format_seconds(slowest.held_seconds)})"
    return f"{words}; {name_ranks(ranks.silent)} did not answer" if ranks.silent else words


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.995 else f"{100 * share:.2g} %"


def _held_words(report: RunReport) -> list[str]:
    """How long checkpoints held training: like ``overhead`` a share of training's own time, without planning."""
    own = report.own_seconds
    if not own > 0:
        return []

    def share(seconds: float) -> str:
        return _percent(seconds / own)

    held = report.checkpoint_seconds
    words = f"checkpoints held training for {format_seconds(held)} in {report.phases.iterations} iterations, "
    words += f"{share(held)} of its own time"
    of_it = [
        f"{share(seconds)} {what}"
        for seconds, what in (
            (report.held_measuring_seconds, "to measure what they cost"),
            (report.held_at_ends_seconds, "at the ends of epochs and of training"),
        )
        if seconds > LEAST_SAID * held
    ]
    words += f" ({', '.join(of_it)})" if of_it else ""
    planning, often = report.phases.planning.total_seconds, report.frequency
    found = [words]
    if planning > LEAST_SAID * own:
        found.append(f"planning held it for {format_seconds(planning)}")
    if often.overhead_share is not None and often.reason != "every":
        found.append(
            f"at this interval they cost {_percent(often.overhead_share)} with what they slow down, and overhead "
            f"allows {100 * often.overhead_allowed:.3g} %"
        )
    return found
