"""The plan that runs in a job now, where it came from, and how another one takes its place at a boundary.

A plan that was given runs from the beginning to the end. A job that makes its own (:mod:`.planning`) begins with a kept
one, or with none; then what is saved is copied at the boundary itself.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from checkflow.errors import CheckflowError, MismatchError, PlanError
from checkflow.hardware import format_seconds
from checkflow.plan import Plan
from checkflow.runtime import fit
from checkflow.runtime.barriers import Program, compile_plan
from checkflow.runtime.execution import UNPLANNED, Execution
from checkflow.runtime.planning import Arrival, Planning

logger = logging.getLogger("checkflow")

Execute = Callable[[Plan, Program], Execution]


class PlanInPlace:
    """One plan at a time.

    Args:
        given: the user's own plan, or None.
        planning: where plans come from if none was given.
        execute: puts a plan's hooks into the job.
        every: iterations from one checkpoint to the next, if the user has asked for that.

    Raises:
        PlanError, MismatchError, StorageError: as :class:`.execution.Execution`.
    """

    def __init__(self, given: Plan | None, planning: Planning | None, execute: Execute, every: int | None) -> None:
        self.planning, self._execute, self._asked_every = planning, execute, every
        self.every = every  # iterations from one durable checkpoint to the next, a multiple of the plan's interval
        self.source = "" if given is None else "given"
        self.seconds = 0.0  # that it took to make it
        self._aborted = 0  # captures, under plans that run no more
        self._told = False
        self._refuted = ""  # the digest of the plan that was last found not to fit
        if planning is not None and (kept := planning.find_kept()) is not None and kept.plan is not None:
            try:
                self.execution = execute(kept.plan, compile_plan(kept.plan))
                self._placed(planning, kept)
                return
            except (PlanError, MismatchError) as error:
                logger.warning("passing over a plan: %s: %s", kept.path, error)
        self.execution = execute(given or UNPLANNED, compile_plan(given or UNPLANNED))

    @property
    def plan(self) -> Plan | None:
        return None if self.execution.plan is UNPLANNED else self.execution.plan

    @property
    def aborted(self) -> int:
        """Captures that were given up."""
        return self._aborted + self.execution.aborted

    @property
    def quiet(self) -> bool:
        """Whether no copies may go on beside the iteration that begins."""
        return self.planning is not None and self.planning.quiet

    def turn(self, micro_batches: int | None) -> None:
        """At a boundary, before anything else of ours: what planning has come to.

        Args:
            micro_batches: how many batches the iteration used, if anybody counts.
        """
        if self.planning is None:
            return
        if self.execution.distrusted and self.plan is not None and self._refuted != self.plan.digest:
            self._refuted = self.plan.digest
            self.planning.refuted(self.plan)
        arrival = self.planning.boundary(self.execution.stepped, micro_batches)
        if arrival is None:
            return
        plan = UNPLANNED if arrival.plan is None else arrival.plan
        try:
            self.execution.finish()
        except CheckflowError as error:
            self.planning.refused(error)  # it is asked for again later
            raise
        try:
            execution = self._execute(plan, compile_plan(plan))
        except CheckflowError as error:
            self.execution.capturer.rearrange()
            self.planning.refused(error)
            return
        self.execution.remove_hooks()
        self._aborted += self.execution.aborted
        execution.stepped |= self.execution.stepped
        self.execution = execution
        self._placed(self.planning, arrival)

    def tell_unplanned(self) -> None:
        """A boundary is captured: if that is done without a plan, say so once."""
        if self.plan is None and not self._told:
            self._told = True
            logger.info("there is no plan yet: all state is copied at a boundary that is saved, which holds training")

    def report(self) -> dict[str, Any]:
        """Which plan runs, where it came from, and what it promises."""
        plan, planning = self.plan, self.planning
        return {
            "plan": None if plan is None else plan.digest,
            "plan_source": self.source or None,
            "plan_interval": None if plan is None else plan.interval,
            "planning": None if planning is None else str(planning.stage),
            "planning_seconds": self.seconds,
            "planning_failure": None if planning is None else planning.reason or None,
            "planned_peak_bytes": None if plan is None else plan.plan_peak_bytes,
            "planned_stall_seconds": None if plan is None else plan.stall_seconds,
        }

    def _placed(self, planning: Planning, arrival: Arrival) -> None:
        planning.placed(arrival)
        self.source, self.seconds = arrival.source, arrival.seconds
        if arrival.plan is None:
            self.every = self._asked_every
            return
        interval = arrival.plan.interval
        self.every = fit.round_every(self._asked_every, interval)
        made = f"recorded from this job, planned in {format_seconds(arrival.seconds)} and kept"
        logger.info(
            "a plan runs from here on, %s in %s: a checkpoint every %s",
            made if arrival.source == "recorded" else "kept", arrival.path,
            "iteration" if interval == 1 else f"{interval} iterations",
        )  # fmt: skip
