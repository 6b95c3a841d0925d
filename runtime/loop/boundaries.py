"""When boundaries are: what the loop, its loader and the hooks tell, and which end of an iteration that shows.

Where the boundary is: when the loader is asked for a batch after an optimizer step, so that whatever the loop did
after ``optimizer.step()`` (scheduler, EMA, clamps, validation) belongs to the finished iteration. After an epoch's last
batch: when ``epochs()`` is advanced, or the ``with`` block ends without an exception. ``step()`` marks it explicitly.
Without a loader and without ``step()``: when ``steps()`` is advanced, or at the first training forward after every
optimizer has stepped. What is done there is :mod:`.boundary_actions`'s.
"""

from __future__ import annotations

import functools
import logging
from pathlib import Path
from typing import Any

from checkflow.core.errors import CheckflowError
from checkflow.core.graph import AnchorKey, AnchorKind
from checkflow.core.plan import Plan
from checkflow.core.state import closures_repeat
from checkflow.runtime.interval.policy import Asked
from checkflow.runtime.job import compatibility
from checkflow.runtime.job.job import Job
from checkflow.runtime.job.progress import Progress
from checkflow.runtime.job.traits import allocated_peak_bytes
from checkflow.runtime.live_plan.active_plan import PlanInPlace
from checkflow.runtime.live_plan.planning import Planning
from checkflow.runtime.loop.boundary_actions import BoundaryWork
from checkflow.runtime.loop.hints import Unsaved
from checkflow.runtime.loop.pacing import Pace
from checkflow.runtime.loop.phase_clock import DATA, FORWARD_BACKWARD, OTHER, PhaseClock
from checkflow.runtime.loop.preemption import Preemption
from checkflow.runtime.persist.saver import Saving
from checkflow.runtime.snapshot.anchors import Sightings, in_backward
from checkflow.runtime.snapshot.executor import Execution
from checkflow.runtime.snapshot.program import Program

logger = logging.getLogger("checkflow")


class Boundaries:
    """Follows the user's loop: the loader and the hooks tell it what happens, and it finds the boundaries in that.

    Args:
        iteration: finished before, by the run that this one goes on from; 0: none.
        progress: where in its epochs the job is.
        saving: what captures are copied with and written by.
        given: the user's own plan, if there is one.
        planning: where plans come from otherwise.
        asked: how often checkpoints are made, or what they may cost.
        directory: of the checkpoints.
        raising: whether a checkpoint that failed ends training.
        preemption: says when training is to end.

    Raises:
        PlanError, MismatchError, StorageError: as :class:`.live_plan.active_plan.PlanInPlace`.
    """

    def __init__(
        self,
        job: Job,
        *,
        iteration: int,
        progress: Progress,
        saving: Saving,
        given: Plan | None,
        planning: Planning | None,
        asked: Asked,
        directory: Path,
        raising: bool,
        preemption: Preemption,
    ) -> None:
        self._job, self._progress, self._saving = job, progress, saving
        self._raising, self._preemption, self._resumed = raising, preemption, iteration > 0
        self.explicit = False  # step() marks them
        self.in_steps = False
        self.looping: bool | None = None  # whether epochs() or steps() goes on; None: neither was called
        self._left_epochs = False  # with ``break``, after the epoch's last batch
        self._sightings = Sightings(
            repeated={name for name, optimizer in job.optimizers.items() if closures_repeat(optimizer)}
        )
        self._no_end_said = False
        self._unsaved = Unsaved()
        self.clock = PhaseClock()
        self._makes_plans = planning is not None
        read_peak = functools.partial(allocated_peak_bytes, job.models)
        self.place = PlanInPlace(given, planning, self._execute, asked.every, read_peak)
        self.pace = Pace(asked, job, saving, self.place, directory, iteration)
        self._work = BoundaryWork(
            job, progress, saving, self.place, self.pace, self.clock, preemption,
            iteration=iteration, raising=raising,
        )  # fmt: skip

    def _execute(self, plan: Plan, program: Program) -> Execution:
        return Execution(
            plan, program, self._job,
            self._saving.engine, self._saving.buffers, self._saving.submit, self,
            implementations=compatibility.implementations(self._job.models, self._job.optimizers),
            raising=self._raising, known_to_fit=self._makes_plans, resumed=self._resumed, sightings=self._sightings,
        )  # fmt: skip

    @property
    def execution(self) -> Execution:
        """The plan that runs now."""
        return self.place.execution

    @property
    def iteration(self) -> int:
        """The last one that is finished, counted over the whole job."""
        return self._work.iteration

    # What the Checkpointer says of the loop

    def end_epoch(self, *, last: bool = False) -> None:
        """The loop over an epoch's batches has ended, and what followed it in the epoch.

        Args:
            last: whether training ends with this epoch.
        """
        if self.explicit and self._progress.waiting:
            self._unsaved.not_counted(self._progress.waiting, self._progress.number)
        self._tell_unsaved_epoch()
        self._progress.end_epoch()
        if not self.explicit:
            self._boundary(epoch_end=True, last=last)

    def end_step(self, *, last: bool) -> None:
        """The body of a loop over iterations has ended."""
        if not self.explicit:
            self._work.began = self._work.began or not self._job.optimizers
            self._count_batches()
            if self._never_stepped:
                self._unsaved.turn_without_step()
            elif self._job.loader is not None and self._work.iterated:
                self._unsaved.batches_from_elsewhere()
            self._boundary(last=last)

    def _tell_unsaved_epoch(self) -> None:
        progress = self._progress
        self.execution.note_unseen_steps()
        used = progress.position > 0  # of this epoch, by a step
        if self._never_stepped and not used:
            self._unsaved.no_step()
        elif self.explicit or self._work.closed:
            return
        elif self._work.iterated and not (used or progress.waiting):
            self._unsaved.epoch_from_elsewhere(progress.number)
        elif progress.waiting and not self._work.iterated:
            self._unsaved.left_over(progress.waiting, progress.number)

    @property
    def _never_stepped(self) -> bool:
        """Whether there are optimizers, and none has stepped in this run."""
        begins = self.iteration == self._work.first_iteration and not self.execution.stepped
        return begins and not self._work.closed and bool(self._job.optimizers)

    def step(self, batches: int | None) -> None:
        """The user says that this is a boundary; see :meth:`.checkpointer.Checkpointer.step`."""
        first, self.explicit = not self.explicit, True
        self.execution.note_unseen_steps()
        # A batch was fetched after the optimizer's step and before this first call: that was taken for the boundary,
        # and is the one which is meant here. How many batches had reached it was not known there.
        passed = first and not self._work.iterated and self._progress.take_back()
        self._work.began = self._work.began or not (self._job.optimizers or passed or batches == 0)
        if self._job.loader is not None and batches != 0:
            self._unsaved.step_from_elsewhere()
        count = self.execution.plan.fingerprint.micro_batches if batches is None else batches
        if batches is not None:
            self._tell_too_many(batches)
        ended = self._progress.count(count)
        self._boundary(epoch_end=ended, micro_batches=count)

    def _tell_too_many(self, batches: int) -> None:
        """An epoch's last iteration may have fewer batches than others; anywhere else the loop has counted wrongly."""
        loader, waiting = self._job.loader, self._progress.waiting
        if loader is not None and batches > waiting and not loader.exhausted:
            self._unsaved.too_many(batches, waiting)

    def metric(self, name: str, value: float) -> None:
        """The user says what the state is worth; see :meth:`.checkpointer.Checkpointer.metric`."""
        self.execution.note_unseen_steps()
        metrics, late = self._saving.metrics, not self._work.iterated
        metrics.record(self.iteration + (not late), name, value, late=late)
        if not late or self._work.closed:
            return
        if metrics.ranks(self.iteration) and not self._is_saved_or_coming():
            if self._work.began:
                logger.warning(
                    "%s of step %d is one of the best, and a model has run in training mode since: it is not saved",
                    name, self.iteration,
                )  # fmt: skip
            self._work.capture_passed()
        self._saving.keep(self.iteration)

    def _is_saved_or_coming(self) -> bool:
        """Whether the last boundary was captured, and that was not in vain: its capture may have given way."""
        number = self.iteration
        return number == self._work.first_iteration or self._saving.metrics.is_there(number)

    def leave_loop(self, *, in_epoch: bool = False) -> None:
        """No training follows to copy behind, and what does may write at no anchor: put the best weights back.

        Args:
            in_epoch: whether the loop over epochs was left with ``break``.
        """
        self.looping = False
        self._left_epochs = in_epoch and self._job.loader is not None and self._job.loader.exhausted
        if self.place.planning is not None:
            self.place.planning.abandon()
        self.execution.finish()

    def end_loop(self) -> None:
        """The loop came to its end by itself: what follows it is no part of training, and may write what it likes."""
        self.leave_loop()
        self._tell_no_step()
        self._capture_last_boundary()
        if self._preemption.begin_ending():
            self._work.end()

    def end_training(self) -> None:
        """The ``with`` block has ended, without an exception."""
        if not self.explicit and self._left_epochs:
            self.end_epoch()
        elif not self.explicit:
            if not self._job.optimizers and self._job.loader is None and self._work.began:
                self._unsaved.all_in_one()
            self._count_batches()
            if self._job.loader is not None and self._work.iterated:
                self._unsaved.batches_from_elsewhere()
            self._boundary()
        elif self._progress.waiting and self.iteration == self._work.first_iteration and self.execution.stepped:
            self._unsaved.never_told()
        if self.iteration > self._work.first_iteration:
            self._saving.metrics.warn_missing()
        self._tell_no_step()
        self._capture_last_boundary()

    def end_untold(self) -> None:
        """Nothing follows, and nothing says whether what was done since the last boundary is a whole iteration."""
        self.execution.note_unseen_steps()
        if self._work.iterated:
            self._unsaved.closed(self.iteration)
            return
        try:
            self._capture_last_boundary()
        except CheckflowError as error:  # whoever closes has no use for it
            logger.warning("step %d is not saved: %s", self.iteration, error)

    def _tell_no_step(self) -> None:
        self.execution.note_unseen_steps()
        if self._never_stepped:
            self._unsaved.no_step()

    @property
    def closed(self) -> bool:
        """Whether nothing is followed any more; a close that was interrupted may have more to give back."""
        return self._work.closed

    def close(self) -> None:
        """Take the hooks away and bring the capture in flight to its end; once more, if that was interrupted."""
        self._work.closed, self.looping = True, False
        self.execution.remove_hooks()
        capturer = self.execution.capturer
        try:
            # Whatever has not been copied yet has not been written either: the capture in flight can still be whole.
            self.execution.finish()
        except BaseException:
            capturer.abort()  # without hooks, nothing tells any more what is written
            raise
        finally:
            capturer.release()
            if self.place.planning is not None:
                self.place.planning.close()

    def raise_if_asked(self) -> None:
        """Raise what failed since the last call, where the user wants it raised."""
        self._work.raise_if_asked()

    # What preemption asks

    @property
    def expects_boundary(self) -> bool:
        """Whether the loop that goes on will come to a boundary, as far as it has shown."""
        if self.looping is not None:
            return self.looping
        return self._work.began or self._progress.waiting > 0 or self.iteration > self._work.first_iteration

    def hasten(self) -> None:
        """Let snapshots leave, from any thread."""
        try:
            self._saving.engine.hasten()
        except CheckflowError as error:  # it promises nothing, and who calls has more to do
            logger.warning("snapshots are left to the training thread: %s", error)

    def persist_seconds(self) -> float | None:
        """How long the last commit took."""
        last = self._saving.writer.last
        return None if last is None else last.seconds

    def end_workers_by(self, end: float) -> None:
        """From here on no worker of the loader is waited for longer than until then."""
        if (loader := self._job.loader) is not None and loader.listener is self:
            loader.workers_end_by = end

    # What the loader and the hooks call

    def on_lost_worker(self) -> None:
        """A worker has ended while a batch was waited for; where a signal is the reason, this ends training."""
        if self._preemption.is_asked_soon():
            self._work.end_without_batches()

    def on_seeds_needed(self) -> None:
        """The loader draws an epoch's seeds, one of another make is about to fetch, or an epoch has ended: numbers are
        drawn from here on."""
        self._progress.restore_generators()

    def on_fetching_ahead(self) -> None:
        """Of what is handed out from here on, nobody but the loop can tell what has reached a step."""
        self.explicit = True

    def on_batch_requested(self) -> None:
        """The loader is asked for a batch that it has."""
        if not self.explicit:
            self._count_batches()
            self._boundary()
        self.clock.enter(DATA)

    def on_batch_handed(self, batch: Any) -> None:
        """The loader is about to hand out a batch."""
        self.clock.enter(FORWARD_BACKWARD)
        self._unsaved.batches += 1
        self._tell_epoch()
        self._progress.batch_handed()
        self._progress.restore_generators()
        self.pace.saw(batch)
        if (planning := self.place.planning) is not None:
            with self.clock.holding("planning"):
                planning.batch_handed(batch)
                if not self.explicit:
                    planning.begin(batch)

    def _tell_epoch(self) -> None:
        """At a resumed run's first batch, to a loop that may count epochs itself: from 0, as it looks."""
        loader = self._job.loader
        if self._unsaved.batches == 1 and self._resumed and self.looping is None and not self.explicit:
            assert loader is not None
            if loader.epoch:
                logger.info(
                    "epoch %d goes on: a loop that counts epochs itself begins at checkpointer.loader.epoch, or "
                    "iterates checkpointer.epochs(n)",
                    loader.epoch,
                )  # fmt: skip

    def on_forward(self, model: str, arguments: Any) -> None:
        if self._job.loader is None:
            self.execution.note_unseen_steps()
            stepped = bool(self._job.optimizers) and self.execution.stepped.issuperset(self._job.optimizers)
            if stepped and not self.explicit and not self.in_steps:
                hooks = self.execution.hooks
                if (planning := self.place.planning) is not None:
                    planning.warns_unsaved = False  # the batch of this iteration was drawn before its begin
                self._boundary()
                if self.execution.hooks is not hooks:  # hung in too late for the forward that runs already
                    self.execution.reached(AnchorKey(AnchorKind.FORWARD, f"{model}/"))
            self._progress.restore_generators()
            self.pace.saw(arguments)
        self.execution.capturer.note()  # batch norm writes its statistics; no optimizer's step need follow
        if (planning := self.place.planning) is not None:
            planning.watch.forward(model, arguments)

    def on_evaluation(self) -> None:
        if self._preemption.asked:
            self.execution.finish()
        if not self._job.optimizers:  # otherwise it is a part of the iteration until they step
            self.clock.enter(OTHER)
        self.pace.evaluated()
        if (planning := self.place.planning) is not None:
            planning.watch.evaluated()

    def on_training(self) -> None:
        self._work.began = True
        self.clock.enter(FORWARD_BACKWARD)

    def on_anchor(self, key: AnchorKey) -> None:
        kind = key.kind
        if kind is AnchorKind.OPTIMIZER_PRE:
            self.clock.step_begins()
            self._miss_boundary()
        elif kind is AnchorKind.OPTIMIZER_POST:
            self.clock.step_ends(FORWARD_BACKWARD if in_backward() else OTHER)
        elif kind is AnchorKind.GRADIENT:
            self.clock.enter(FORWARD_BACKWARD)
        execution = self.place.execution
        if not (execution.capturer.gathering or self._preemption.asked):
            execution.reached(key)  # which has nothing to do but to take note
            return
        with self.clock.holding("anchors"):
            execution.reached(key)
            if self._preemption.asked:  # what is complete now is safe, whether or not the next boundary comes in time
                execution.finish()

    def _miss_boundary(self) -> None:
        """An optimizer steps, and all have stepped: an iteration has ended that nobody saw the end of."""
        implicit = self._job.loader is None and not self.explicit and not self.in_steps
        if implicit and not self._no_end_said and self.execution.stepped.issuperset(self._job.optimizers):
            self._no_end_said = True
            logger.warning(
                "no checkpoint is made: where an iteration ends is not seen, since no model that was passed runs "
                "forward in uncompiled code; iterate checkpointer.steps(n), or call checkpointer.step() after each"
            )

    # Boundaries

    def _count_batches(self) -> None:
        """Every batch handed out so far has reached a step, if one was made."""
        self.execution.note_unseen_steps()
        if self._work.iterated:
            self._progress.count()

    def _boundary(self, *, epoch_end: bool = False, last: bool = False, micro_batches: int | None = None) -> None:
        """An iteration has ended here, if one has begun."""
        self.execution.note_unseen_steps()
        if self._work.iterated:
            self._work.end_iteration(
                epoch_end=epoch_end, last=last, explicit=self.explicit, micro_batches=micro_batches
            )
        else:
            self._work.end_if_idle()

    def _capture_last_boundary(self) -> None:
        """Training has ended, and did not say so at its last boundary: save that if the state is still what it was.

        It is not where a further iteration has begun, nor where what followed the loop wrote (the best weights, put
        back), as far as version counters tell, and whose memory it is.
        """
        if self._work.captured_iteration == self.iteration or self._work.closed:
            return
        if self.execution.stepped or self._work.began:
            self._unsaved.end(self.iteration)
        self._work.capture_passed()
