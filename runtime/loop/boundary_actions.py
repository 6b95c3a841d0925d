"""What is done at each boundary: the count, the audits, the capture and its way to storage, the end by a signal.

:mod:`.pacing` decides which boundaries are captured, and which of these storage takes. A resume does not change the
count, and what it resumed from is not captured again.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from typing import NoReturn

from checkflow.core.state import TrainingState
from checkflow.runtime.format import codec
from checkflow.runtime.job.job import Job
from checkflow.runtime.job.progress import Progress
from checkflow.runtime.live_plan.active_plan import PlanInPlace
from checkflow.runtime.loop.agreement import Agreement
from checkflow.runtime.loop.boundaries import Boundaries, Boundary
from checkflow.runtime.loop.pacing import Pace
from checkflow.runtime.loop.phase_clock import PhaseClock
from checkflow.runtime.loop.preemption import Preemption
from checkflow.runtime.persist.saver import Saving
from checkflow.runtime.snapshot.executor import Execution
from checkflow.runtime.state.collect import capture_extra, compact_generators, versions_of
from checkflow.runtime.state.form import Form, changes, form_of
from checkflow.runtime.store.retention import EPOCH_END
from checkflow.runtime.system.signals import raised_by_handler

logger = logging.getLogger("checkflow")


class BoundaryActions:
    """Counts the iterations of a job, and does what is to be done at the end of each.

    Args:
        boundaries: where the iteration that is counted is to be forgotten.
        iteration: finished before, by the run that this one goes on from; 0: none.
        raising: whether a checkpoint that failed ends training.
        agreement: with all other ranks.
    """

    def __init__(
        self,
        job: Job,
        progress: Progress,
        saving: Saving,
        place: PlanInPlace,
        pace: Pace,
        clock: PhaseClock,
        preemption: Preemption,
        boundaries: Boundaries,
        *,
        iteration: int,
        raising: bool,
        agreement: Agreement,
    ) -> None:
        self._agreement = agreement
        self._job, self._progress, self._saving, self._place = job, progress, saving, place
        self._pace, self._clock, self._preemption, self._boundaries = pace, clock, preemption, boundaries
        self._raising = raising
        self.iteration = self._first_iteration = iteration
        self._captured_iteration = iteration  # at the start there is nothing to save, after a resume it is
        self._logged = ""  # of what a kill would lose
        job.walk.current()
        self._first_form: Form | None = form_of(job.walk, job.models, job.optimizers)  # None: its change is said
        self._form_of = job.walk.latest  # the state that was compared with it
        self._planning_seconds = self._no_cost_seconds = 0.0  # held for planning; of these, for what is done once
        # All state at a boundary that was not captured, and its version counters, in case it is the last one; and
        # whether an epoch ended there.
        self._passed: tuple[TrainingState | None, list[int]] = None, []
        self._passed_epoch_end = False
        # Likewise everything else, where the loader starts workers next: they may be lost to a signal.
        self._passed_extra: Callable[[], bytes] | None = None

    @property
    def _execution(self) -> Execution:
        """The plan that runs now."""
        return self._place.execution

    @property
    def captured(self) -> bool:
        """Whether the capture of the last boundary was begun, or the job was resumed from it."""
        return self._captured_iteration == self.iteration

    def raise_if_asked(self) -> None:
        """Raise what failed since the last call, where the user wants it raised."""
        error = self._saving.writer.take_error() or self._execution.take_error_in_compiling()
        if error is not None and self._raising:
            raise error

    def end_iteration(self, boundary: Boundary) -> None:
        """The state is now that of one more whole iteration.

        A boundary to be captured brings the capture in flight to its end first. Where that comes before the plan's
        interval is over (an epoch's end, the last iteration, and the first regular boundary after them), training waits
        for what is left of it. If a signal has asked for it, training ends here.
        """
        held_seconds, measuring = self._held_seconds(), self._pace.measuring
        with self._clock.holding("boundary"):
            self._pace.ended(self.iteration + 1, epoch_end=boundary.epoch_end, held_seconds=held_seconds)
        ending = self._agreement.arrive(self.iteration + 1)
        with self._clock.holding("planning"):
            self._change_plan(boundary, ending=ending)
        with self._clock.holding("boundary"):
            due = self._pass(boundary, ending=ending)
        part = "ends" if due and (boundary.epoch_end or boundary.last) else "measuring" if measuring else ""
        self._clock.end_iteration(captured=due, under_way=self._execution.capturer.under_way, part=part)
        if self._agreement.leave(self.iteration, captured=self.captured, ending=ending):
            self.end()
        planning = self._place.planning
        if planning is not None and not boundary.last and (self._job.loader is None or boundary.explicit):
            with self._clock.holding("planning"):
                planning.begin()  # otherwise when the loader hands a batch out

    def _held_seconds(self) -> float:
        """For which training was held so far: for checkpoints, and by looks at it; not to record it, or to plan."""
        held, planning = self._clock.held_seconds, self._place.planning
        since_seconds = held["planning"] - self._planning_seconds
        self._planning_seconds = held["planning"]
        if planning is not None and (planning.busy or self.iteration == self._first_iteration + 1):
            self._no_cost_seconds += since_seconds
        return sum(held.values()) - self._no_cost_seconds

    def _change_plan(self, boundary: Boundary, *, ending: bool) -> None:
        """What planning has come to, before this boundary is looked at."""
        planning = self._place.planning
        unplanned = self._place.plan is None and planning is not None
        if unplanned and self.iteration == self._first_iteration and not ending:
            self._execution.prepare()  # now: to touch so much memory takes long, and is no checkpoint's cost
        if planning is None:
            return
        if ending:
            planning.abandon()
            return
        micro_batches = boundary.micro_batches if boundary.explicit else planning.watch.handed
        before = self._execution
        # Without a loader nobody counts batches.
        self._place.turn(self._boundaries.stepped, None if self._job.loader is None else micro_batches)
        if self._execution is not before:
            self._clock.new_plan()
        error = planning.take_error()
        if error is not None and self._raising:
            raise error

    def _pass(self, boundary: Boundary, *, ending: bool) -> bool:
        """Bring the capture in flight to its end if this boundary is captured, and begin; returns whether it is."""
        saved = ending and self._agreement.is_saved(self.iteration + 1)
        epoch_end, final = boundary.epoch_end, boundary.last or saved
        demanded = final or self._saving.metrics.ranks(self.iteration + 1)
        due = self._pace.is_due(self.iteration + 1, epoch_end=epoch_end, demanded=demanded)
        self._execution.end_iteration(due=due, quiet=self._place.quiet or (due and (epoch_end or final)))
        due = due and self._pace.makes_room()
        self._boundaries.passed()
        self.iteration += 1
        self._progress.end_iteration()
        if not ending:  # otherwise when this boundary is saved
            self.raise_if_asked()
        self._apply_audits()
        if due:
            self._clock.shift(self._capture(epoch_end))
        else:
            state = self._job.walk.current(whole=False)
            self._passed_extra = self._extra_before_workers(epoch_end=epoch_end)
            if self._passed_extra is not None:
                state = self._job.walk.captured
            self._passed, self._passed_epoch_end = (state, _versions(state)), epoch_end
        self._pace.left()
        self._log_durability()
        return due

    def _log_durability(self) -> None:
        """What a kill would lose: once without a checkpoint, and once when this run has its first one."""
        durable, begun_anew = self._saving.writer.durable, self._saving.durable_step is None
        lost = "" if durable is None and not begun_anew else "all" if durable is None else "little"
        if lost == self._logged:
            return
        self._logged = lost
        if not self._agreement.leads:
            return
        if durable is None:
            logger.info("no checkpoint is on storage yet: a kill loses all that was trained so far")
        else:
            logger.info("step %d is on storage: a kill loses at most what was trained after it", durable.step)

    def end_without_batches(self) -> NoReturn:
        """Training is asked to end, and there are no workers any more that would bring it to a further boundary: end at
        the last one, which is saved if no iteration has begun since; what has begun is done again."""
        self._preemption.begin_ending()
        extra = self._passed_extra
        if not (self.captured or self._boundaries.under_way) and extra is not None:
            self.capture_passed(extra)
        self.end()

    def end_between(self) -> None:
        """End training between boundaries, where a signal asks for it."""
        if self._agreement.ends_between():
            self.end()

    def end(self) -> NoReturn:
        """Wait until storage has what was captured, and end training here."""
        self._execution.finish()
        self._saving.writer.settle()
        self.raise_if_asked()
        durable = self._saving.writer.durable
        if (self._first_iteration if durable is None else durable.step) != self.iteration:
            self._preemption.end(f"training ends at step {self.iteration}, which is not saved")
        elif self.iteration:
            self._preemption.end(f"training ends at step {self.iteration}, which is saved")
        self._preemption.end("training ends before its first step")

    def capture_passed(self, extra: Callable[[], bytes] | None = None) -> None:
        """Capture the last boundary, which was not, and after which no iteration has begun, if the state is still what
        it was there.

        Args:
            extra: what else was there; None: as it is now.
        """
        self._pace.is_due(self.iteration, demanded=True)  # what is demanded, storage is to take, too
        state, versions = self._passed
        now = self._job.walk.current()
        if state is None or now is not (state.base or state) or _versions(state) != versions:
            logger.warning("step %d is not saved: the state was changed after it", self.iteration)
            return
        with self._clock.holding("boundary"):
            self._execution.finish()
            self._execution.follow()
            self._execution.stream.boundary()  # what ran since (an evaluation) is no part of the iteration to come
            self._apply_audits()
            self._clock.shift(self._capture(self._passed_epoch_end, extra=extra))
        self._agreement.leave(self.iteration, captured=self.captured)

    def _apply_audits(self) -> None:
        writer = self._saving.writer
        self._execution.apply_audits(writer.take_written(), writer.breached_plans)

    def _capture(self, epoch_end: bool, extra: Callable[[], bytes] | None = None) -> float:
        """Capture this boundary; returns the seconds waited for storage and buffers."""
        # The first capture shows whether the job can be checkpointed at all; later ones must not end it.
        with self._execution.surviving() if self._saving.captures else contextlib.nullcontext():
            self._place.log_unplanned()
            self._warn_of_other_form()
            waited_seconds = self._begin(epoch_end, extra or self._extra())
            if self._place.quiet:
                self._execution.capturer.finish()
            return waited_seconds
        return 0.0

    def _warn_of_other_form(self) -> None:
        """Log once that what is saved has another form than the job began with: its script alone cannot resume it."""
        state, first = self._job.walk.latest, self._first_form
        if first is None or state is self._form_of:
            return
        self._form_of = state
        if not (found := list(changes(first, form_of(self._job.walk, self._job.models, self._job.optimizers)))):
            return
        self._first_form = None
        if self._agreement.leads:
            more = f", and {len(found) - 1} more" if len(found) > 1 else ""
            logger.warning(
                "step %d has another form than this run began with (%s%s): a script that resumes from it must bring "
                "its model and optimizer to that form before it makes the Checkpointer; checkflow.peek(directory) "
                "tells which (docs/how-to/own-loop.md)", self.iteration, found[0], more,
            )  # fmt: skip

    def _extra_before_workers(self, *, epoch_end: bool) -> Callable[[], bytes] | None:
        """What lies beside the state; None: the loader starts no workers before the next batch, as far as is known."""
        loader = self._job.loader
        if loader is None or loader.shield is None or not (epoch_end or loader.exhausted):
            return None
        try:
            return self._extra()
        except Exception as error:
            if raised_by_handler(error):  # it is training's
                raise
            return None  # it is for a rare case only: where it is captured, it is said

    def _extra(self) -> Callable[[], bytes]:
        """What lies beside the state, as it is now."""
        self._execution.capturer.join()
        known = {"iteration": self.iteration} | capture_extra(
            self._job.walk, self._job.optimizers, self._job.objects, self._progress.capture
        )
        generators = known.pop("generators")  # copies: they wait for the writer
        # Now, since the rest may share memory with what training goes on to write.
        newer = any("own" in one for one in known["job"]["optimizers"].values())
        encoded = codec.encode(known, marks=newer or None)

        def extra() -> bytes:
            return codec.with_entry(encoded, "generators", compact_generators(generators))

        return extra

    def _begin(self, epoch_end: bool, extra: Callable[[], bytes]) -> float:
        epochs = self._progress.epochs_over(epoch_end=epoch_end)
        info = {"epoch": epochs, EPOCH_END: epoch_end, "created": round(time.time(), 3)}
        waited_seconds = self._saving.begin(self._execution, self.iteration, extra, info, durable=self._pace.durable)
        self._pace.captured(self.iteration)
        self._captured_iteration = self.iteration
        return waited_seconds


def _versions(state: TrainingState) -> list[int]:
    return versions_of(state.tensors)
