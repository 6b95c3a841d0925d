"""The plan that runs in a job, where it came from, and its replacement by another one at a boundary.

A given plan runs from beginning to end. A job that makes its own (:mod:`.planning`) begins with a kept plan or none;
without one, all state is copied at the boundary.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection

from checkflow.core.errors import CheckflowError, MismatchError, PlanError
from checkflow.core.plan import Plan
from checkflow.core.reports.run_report import PlanInForce, PlanningReport, PlanSource, promises_of
from checkflow.core.units import format_seconds, format_stall
from checkflow.runtime.job import compatibility
from checkflow.runtime.live_plan.planning import Arrival, Planning
from checkflow.runtime.snapshot.capturer import CaptureReport
from checkflow.runtime.snapshot.executor import UNPLANNED, Execution
from checkflow.runtime.snapshot.program import Program, compile_plan
from checkflow.runtime.transfer.engine import MovedBytes

logger = logging.getLogger("checkflow")

Execute = Callable[[Plan, Program], Execution]


class PlanInPlace:
    """One plan at a time.

    Args:
        given: the user's own plan, or None.
        planning: where plans come from if none was given.
        execute: installs a plan's hooks in the job.
        every: iterations from one checkpoint to the next, if the user asked for that.
        read_peak: the peak of allocated device memory in bytes, if known.
        rounds: whether ``every`` becomes a multiple of a plan's interval: other ranks' plans may have other intervals.
    """

    def __init__(
        self,
        given: Plan | None,
        planning: Planning | None,
        execute: Execute,
        every: int | None,
        read_peak: Callable[[], int | None],
        *,
        rounds: bool,
    ) -> None:
        self._rounds = rounds
        self.planning, self._execute, self._asked_every, self._read_peak = planning, execute, every, read_peak
        self.peak_before_bytes = read_peak()  # before this plan ran
        self.every = every  # iterations between durable checkpoints, a multiple of the plan's interval
        self.source: PlanSource | None = None if given is None else "given"
        self.seconds = 0.0  # that making it took
        self._aborted, self._moved = 0, MovedBytes()  # captures under earlier plans
        self._last_failure: tuple[float, str] | None = None  # likewise
        self._promises: PlanInForce | None = None
        self._logged = False
        self._refuted = ""  # digest of the last plan that did not fit
        if planning is not None and (kept := planning.find_kept()) is not None and kept.plan is not None:
            try:
                self.execution = execute(kept.plan, compile_plan(kept.plan))
                self._placed(planning, kept)  # the start line reports it
                return
            except (PlanError, MismatchError) as error:
                logger.warning("passing over a plan: %s: %s", kept.path, error)
        self.execution = execute(given or UNPLANNED, compile_plan(given or UNPLANNED))

    @property
    def plan(self) -> Plan | None:
        return None if self.execution.plan is UNPLANNED else self.execution.plan

    @property
    def aborted(self) -> int:
        """Captures that were dropped."""
        return self._aborted + self.execution.aborted

    @property
    def last_failure(self) -> tuple[float, str] | None:
        """When (time.monotonic) a capture was last dropped, and why."""
        return self.execution.last_failure or self._last_failure

    @property
    def moved(self) -> MovedBytes:
        """Bytes of all captures that ended."""
        return self._moved + self.execution.capturer.moved

    @property
    def last_capture(self) -> CaptureReport | None:
        """The last one that ended, under the plan that runs."""
        return self.execution.capturer.last_report

    @property
    def last_captures(self) -> tuple[CaptureReport, ...]:
        """The last few of them."""
        return tuple(self.execution.capturer.reports)

    @property
    def quiet(self) -> bool:
        """Whether no copies may run beside the iteration that begins."""
        return self.planning is not None and self.planning.quiet

    def turn(self, stepped: Collection[str], micro_batches: int | None) -> None:
        """At a boundary, before anything else of ours: what planning has come to.

        Args:
            stepped: the optimizers that did, in the iteration.
            micro_batches: how many batches the iteration used, if anybody counts.
        """
        if self.planning is None:
            return
        if self.execution.distrusted and self.plan is not None and self._refuted != self.plan.digest:
            self._refuted = self.plan.digest
            self.planning.refuted(self.plan)
        if (repeated := self.execution.stream.repeated) and not self.planning.forgone:
            arrival = self.planning.forgo(min(repeated))
        else:
            arrival = self.planning.boundary(stepped, micro_batches)
        if arrival is None:
            return
        plan = UNPLANNED if arrival.plan is None else arrival.plan
        try:
            self.execution.finish()
        except CheckflowError as error:
            self.planning.refused(error)  # tried again later
            raise
        try:
            execution = self._execute(plan, compile_plan(plan))
        except CheckflowError as error:
            self.execution.capturer.rearrange()
            self.planning.refused(error)
            return
        self._aborted, self._moved, self._last_failure = self.aborted, self.moved, self.last_failure
        self.execution = execution
        self._placed(self.planning, arrival)
        self._log_placed(arrival)

    def log_unplanned(self) -> None:
        """Log once that a boundary is captured without a plan."""
        if self.plan is None and self.planning is not None and not (self._logged or self.planning.forgone):
            self._logged = True
            logger.info("there is no plan yet: all state is copied at a boundary that is saved, which pauses training")

    def promises(self) -> PlanInForce | None:
        """Which plan runs, where it came from, and what it promises."""
        plan = self.plan
        if plan is None or self.source is None:
            return None
        known = self._promises
        if known is None or (known.digest, known.source) != (plan.digest, self.source):
            self._promises = known = promises_of(plan, self.source)  # slow for 100,000 steps, so cached
        return known

    def search(self) -> PlanningReport | None:
        """How far the search for a plan has come, if there is one."""
        planning = self.planning
        return None if planning is None else PlanningReport(str(planning.stage), self.seconds, planning.reason or None)

    def _placed(self, planning: Planning, arrival: Arrival) -> None:
        planning.placed(arrival)
        self.peak_before_bytes = self._read_peak()
        self.source, self.seconds = arrival.source, arrival.seconds
        if arrival.plan is None:
            self.every = self._asked_every
            return
        if self._rounds:
            self.every = compatibility.round_every(self._asked_every, arrival.plan.interval)

    def _log_placed(self, arrival: Arrival) -> None:
        if arrival.plan is None:
            return
        interval = arrival.plan.interval
        made = f"recorded from this job, planned in {format_seconds(arrival.seconds)} and kept"
        logger.info(
            "a plan runs from here on, %s in %s: at most a checkpoint every %s, predicted stall %s",
            made if arrival.source == "recorded" else "kept", arrival.path,
            "iteration" if interval == 1 else f"{interval} iterations", format_stall(arrival.plan.stall_seconds),
        )  # fmt: skip
