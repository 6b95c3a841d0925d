"""The controller of the intervals in a live job: its clock, and what it learns of plans, captures and storage.

Iterations that are not like others are left out: the first two of a run, those recorded or beside planning, the first
under another plan, an epoch's first and last, and those around a change between with and without evaluation.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import time
from collections import deque
from pathlib import Path
from typing import Any

from checkflow.core.plan import Plan
from checkflow.core.reports.run_report import Frequency
from checkflow.core.state import dtype_name
from checkflow.runtime.interval.algorithm import Asked, Costs
from checkflow.runtime.interval.controller import Controller
from checkflow.runtime.interval.measurements import LEAST, RECENT, Iteration, median
from checkflow.runtime.interval.profile import Identity, ProfileCache
from checkflow.runtime.job import compatibility
from checkflow.runtime.job.job import Job
from checkflow.runtime.job.traits import describe, device_name
from checkflow.runtime.live_plan.active_plan import PlanInPlace
from checkflow.runtime.live_plan.planning import TIMED, Stage
from checkflow.runtime.loop.agreement import Agreement
from checkflow.runtime.persist.saver import FIRST_AUDITS, Saving
from checkflow.runtime.snapshot.executor import Execution
from checkflow.runtime.system.mounts import file_system

logger = logging.getLogger("checkflow")

WARM_UP = 2  # iterations
UNDISTURBED = 2 + TIMED  # iterations, the first of a run without a plan: one makes state, one is recorded
WORTH_SECONDS = 10.0  # of training: worth a pause, and a disturbed measurement
SHORT_EPOCH = 4  # iterations: its first and last ones are too much of it to be left out
MIXED, MIXED_SHARE = 50, 0.8  # iterations, and how many of them differ from the one before in whether it evaluated

clock = time.perf_counter  # seconds; tests put another one here


class Evaluation:
    """Which iterations are compared where some evaluate: those like the one before.

    Where hardly any is (a teacher or an adversary runs in every second one), those without evaluation show by
    themselves, and the others as soon as free ones of both kinds have shown by what evaluation lengthens one.
    """

    def __init__(self) -> None:
        self._changes: deque[bool] = deque(maxlen=MIXED)
        self._free: dict[bool, deque[float]] = {kind: deque(maxlen=RECENT) for kind in (False, True)}

    def add(self, seconds: float, *, evaluated: bool, before: bool, free: bool) -> tuple[bool, float]:
        """An iteration that is like others otherwise.

        Args:
            evaluated: whether it did.
            before: whether the one before it did.
            free: without a checkpoint under way.

        Returns:
            Whether it may be compared, and the seconds by which evaluation lengthens one like it.
        """
        self._changes.append(evaluated != before)
        if free:
            self._free[evaluated].append(seconds)
        mixed = len(self._changes) == MIXED and sum(self._changes) >= MIXED_SHARE * MIXED
        if not mixed:
            return evaluated == before, 0.0
        if not evaluated:
            return True, 0.0
        without, with_it = self._free[False], self._free[True]
        if min(len(without), len(with_it)) < LEAST:
            return False, 0.0
        return True, median(with_it) - median(without)


class Pace:
    """Reports to the controller what happens, and to the boundaries what it decides.

    Args:
        directory: of the checkpoints; the profile is kept there.
        start: iterations that are finished already.
        agreement: with all other ranks. Rank 0 measures and decides for all.
    """

    def __init__(
        self,
        asked: Asked,
        job: Job,
        saving: Saving,
        place: PlanInPlace,
        directory: Path,
        start: int,
        agreement: Agreement,
    ) -> None:
        self._agreement = agreement
        self._follows = not agreement.leads
        self._asked, self._job, self._saving, self._place = asked, job, saving, place
        self._cache, self._directory = ProfileCache(directory), directory
        epoch = None if job.loader is None else job.loader.batches
        self.controller = Controller(asked, start=start, epoch_iterations=epoch)
        self._identity: Identity | None = None
        self._kept: Costs | None = None
        # What the controller knows. Of several ranks, plans run on all of them if there is an interval.
        self._execution: Execution | None = None
        plan = place.plan
        self._interval = 0 if plan is None else plan.interval
        agreement.note_plan(self._interval)
        # The job's own batch is known at the first boundary; until then it is taken to be the plan's.
        self._foreseen = None if plan is None else self._find_costs(plan, str(plan.fingerprint.batch))[1]
        self._place_controller(start, self._foreseen, quiet=True)  # the line at the start has it
        self._batch: str | None = None
        self._seen = self._in_epoch = 0  # iterations
        self._held_seconds = 0.0
        self._waits = device_name(job.models)[0] == "cpu"  # elsewhere the host may wait while the device computes
        self._began = clock()
        self._unlike = True  # the iteration that goes on is none like others
        self._evaluates = self._evaluated = False
        self._evaluation = Evaluation()
        self._in_flight = self._began_now = False  # a capture, in this iteration; at this boundary
        self._last = clock()  # when the last capture began, or the run
        self._regular = False  # the boundary that was last found to be due is so by its number
        self._outstanding, self._finished = 0, self._count_finished()
        self.durable = True  # whether storage takes the boundary that was last found to be due

    @property
    def report(self) -> Frequency:
        """How often checkpoints are made, why, and what was measured."""
        return self.controller.report

    @property
    def measuring(self) -> bool:
        """Whether checkpoints are made to find out what they cost."""
        return not self._follows and self._asked.every_seconds is None and self.controller.intervals is None

    def saw(self, batch: Any) -> None:
        """What the job trains on."""
        if self._batch is None:
            self._batch = str(describe(batch))

    def evaluated(self) -> None:
        """A model ran forward, and not in training mode."""
        self._evaluates = True

    # At a boundary, in this order

    def ended(self, number: int, *, epoch_end: bool, held_seconds: float) -> None:
        """An iteration has ended: called before anything is done at the boundary that it ends at.

        Args:
            held_seconds: for which training waited for checkpointing so far.
        """
        if self._follows:
            return
        now, loader = clock(), self._job.loader
        self._seen, self._in_epoch = self._seen + 1, self._in_epoch + 1
        last = epoch_end or (loader is not None and loader.position == 0)
        short = loader is not None and (loader.batches or math.inf) <= SHORT_EPOCH
        planning = self._place.planning
        stage = None if planning is None else planning.stage
        busy = stage is Stage.RECORDED or (stage is Stage.MAKING and self._place.plan is not None)
        unlike = self._unlike or busy or self._seen <= WARM_UP
        at_edge = not short and (last or (loader is not None and self._in_epoch == 1))
        writer = self._saving.writer
        finished, outstanding = self._count_finished(), writer.outstanding
        persist = writer.last if finished > self._finished else None
        persisted = bool(self._outstanding or outstanding or finished > self._finished)
        like, evaluation_seconds = not (unlike or at_edge), 0.0
        if like:
            like, evaluation_seconds = self._evaluation.add(
                now - self._began, evaluated=self._evaluates, before=self._evaluated,
                free=not (self._in_flight or persisted),
            )  # fmt: skip
        self.controller.ended(
            Iteration(
                number, now - self._began,
                captured=self._in_flight,
                persisted=persisted,
                counts=like,
                evaluation_seconds=evaluation_seconds,
                persist_seconds=persist.seconds if persist is not None and persist.error is None else None,
                persist_failed=persist is not None and persist.error is not None,
                held_seconds=held_seconds - self._held_seconds if self._waits else 0.0,
            )
        )  # fmt: skip
        self._finished, self._began, self._held_seconds = finished, now, held_seconds
        self._evaluated, self._evaluates, self._unlike = self._evaluates, False, False
        if last:
            self._in_epoch = 0
        costs = self.controller.costs
        if costs is not None and costs is not self._kept and self._identity is not None:
            self._cache.keep(self._identity, costs)
            self._kept = costs

    def is_due(self, number: int, *, epoch_end: bool = False, demanded: bool = False) -> bool:
        """Whether this boundary is captured, by the plan that runs from it on.

        Args:
            epoch_end: captured too, unless the user has said after how many iterations, or a control leaves it out.
            demanded: captured and written, whatever was decided or said: training ends here.
        """
        self._follow(number)
        place = self._place
        early = place.plan is None and self._seen < UNDISTURBED and clock() - self._last < WORTH_SECONDS
        asked = self._asked.every is not None or self._asked.every_seconds is not None
        ahead = self._agreement.ahead
        wanted = (asked or not early) and self.controller.is_due(number + ahead)
        self._regular = due = self._agreement.is_due(number, ahead, wanted=wanted)
        # What only rank 0 has measured cannot leave out an epoch's end, which all ranks capture unasked.
        left_out = self._agreement.alike(self.controller.leaves_out_epochs, otherwise=False)
        extra = demanded or (epoch_end and self._asked.every is None and not left_out)
        # Of several ranks, a boundary was agreed some iterations ago: all others write it.
        self.durable = extra or self._agreement.alike(self.controller.is_durable(number), otherwise=True)
        return due or extra

    def makes_room(self) -> bool:
        """Whether a capture of this boundary has somewhere to go, or is worth waiting for."""
        return self.durable or self._place.execution.capturer.make_room()

    def captured(self, number: int) -> None:
        """The capture of this boundary has begun."""
        if self._follows:
            return
        audited = self._place.plan is not None and self._place.execution.captures <= FIRST_AUDITS
        self.controller.captured(number, durable=self.durable, counts=self._regular and not audited)
        self._began_now, self._last = True, clock()

    def left(self) -> None:
        """The boundary is behind, and the next iteration begins."""
        self._in_flight = self._began_now or self._place.execution.capturer.under_way
        self._began_now = False
        self._outstanding = self._saving.writer.outstanding

    # What else there is to know

    def _count_finished(self) -> int:
        return self._saving.writer.committed + self._saving.writer.failed

    def _follow(self, number: int) -> None:
        """Another plan is in place, or this is the first boundary."""
        plan = self._place.plan
        own = 0 if plan is None else plan.interval
        replaced, first = self._execution is not self._place.execution, self._execution is None
        if replaced:
            self._agreement.note_plan(own)
        before, self._interval = self._interval, self._of_all(own)
        if not replaced and self._interval == before:
            return
        interval, self._execution, self._unlike = self._interval, self._place.execution, not first
        if not (first or before or interval):
            return  # other ranks have no plan yet, so that nothing is cheaper
        self._identity, known = self._find_costs(plan if interval else None, self._batch or "")
        self._kept = known
        if interval and self._place.every is not None and not self._follows and self._place.every < interval:
            logger.warning(
                "every=%d is less than the interval of a rank's plan, %d: training waits for what is left to copy at "
                "each checkpoint",
                self._place.every, interval,
            )  # fmt: skip
        if first and self._foreseen is not None:
            if known == self._foreseen:
                return
            logger.info("the job is not the one that was measured before: what checkpoints cost is measured anew")
        self._place_controller(number, known)

    def _of_all(self, own: int) -> int:
        """The interval of the plan that runs, or the longest of all ranks'; 0: there is none, or not on all."""
        if self._follows or not own:
            return own
        longest = self._agreement.plan_interval
        if longest is None:
            return own
        return max(own, longest) if longest else 0

    def _place_controller(self, number: int, known: Costs | None, *, quiet: bool = False) -> None:
        self.controller.place(
            number,
            max(1, self._interval),
            every=self._place.every,
            planned=self._interval > 0,
            # Other ranks do not learn which captures storage takes.
            tiers=self._agreement.alike(self._saving.host_buffers > 1, otherwise=False),
            known=known,
            quiet=quiet,
        )

    def _find_costs(self, plan: Plan | None, batch: str) -> tuple[Identity | None, Costs | None]:
        """What the profile of this job is kept for, and what it holds; no costs, where it holds none or none is asked.

        Args:
            batch: what the job trains on.
        """
        if self._place.every is not None or self._asked.every_seconds is not None or self._follows:
            return self._identity, None
        identity = self._identify(plan, batch)
        return identity, self._cache.find(identity)

    def _identify(self, plan: Plan | None, batch: str) -> Identity:
        job = self._job
        state = job.walk.current().tensors  # a resume makes it in another order
        tensors = sorted((item.name, tuple(item.tensor.shape), dtype_name(item.tensor.dtype)) for item in state)
        model = repr((tensors, sorted(compatibility.implementations(job.models, job.optimizers).items())))
        kind, size_bytes = file_system(self._directory)
        return Identity(
            model=hashlib.sha256(model.encode()).hexdigest()[:32],
            batch=batch,
            plan="" if plan is None else plan.digest,
            device=f"{device_name(job.models)[1]}, {os.cpu_count()} cores",
            ranks=self._agreement.world_size,
            file_system=f"{kind or 'unknown'}, {size_bytes} bytes",
        )
