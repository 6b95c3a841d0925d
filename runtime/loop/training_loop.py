"""The user's training loop, as the Checkpointer, the loader and the hooks report it.

:mod:`.boundaries` finds the ends of iterations in these events, and :mod:`.boundary_actions` does what is due there.
"""

from __future__ import annotations

import functools
import logging
from pathlib import Path
from typing import Any

from checkflow.anchors.stream import AnchorStream, Subscriber
from checkflow.core.errors import CheckflowError
from checkflow.core.graph import AnchorKey, AnchorKind
from checkflow.core.plan import Plan
from checkflow.core.state import closures_repeat
from checkflow.runtime.interval.algorithm import Asked
from checkflow.runtime.job import compatibility
from checkflow.runtime.job.job import Job
from checkflow.runtime.job.progress import Progress
from checkflow.runtime.job.traits import allocated_peak_bytes
from checkflow.runtime.live_plan.active_plan import PlanInPlace
from checkflow.runtime.live_plan.planning import Planning
from checkflow.runtime.loop import hints
from checkflow.runtime.loop.agreement import Agreement
from checkflow.runtime.loop.boundaries import Boundaries, Boundary
from checkflow.runtime.loop.boundary_actions import BoundaryActions
from checkflow.runtime.loop.hints import Hints
from checkflow.runtime.loop.pacing import Pace
from checkflow.runtime.loop.phase_clock import DATA, FORWARD_BACKWARD, PhaseClock
from checkflow.runtime.loop.preemption import Preemption
from checkflow.runtime.persist.saver import Saving
from checkflow.runtime.snapshot.executor import Execution
from checkflow.runtime.snapshot.program import Program
from checkflow.runtime.snapshot.share import RankShare

logger = logging.getLogger("checkflow")

SILENT_TURNS = 100  # of steps() without an optimizer's step before a hint: batches may be accumulated, steps skipped


class TrainingLoop:
    """Follows the user's loop, and has its boundaries checkpointed.

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
        agreement: with all other ranks.
        share: which part of the state this rank copies.

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
        agreement: Agreement,
        share: RankShare,
    ) -> None:
        self._job, self._progress, self._saving, self._preemption = job, progress, saving, preemption
        self._boundaries = Boundaries(job.optimizers, loader=job.loader is not None)
        self._hints = Hints()
        self._drawn = self._silent_turns = 0  # batches in this run; turns of steps() without an optimizer's step
        self._resumed = iteration > 0
        repeated = {name for name, optimizer in job.optimizers.items() if closures_repeat(optimizer)}
        self._stream = stream = AnchorStream(job.models, job.optimizers, repeated)

        def execute(plan: Plan, program: Program) -> Execution:
            return Execution(
                plan, program, job, saving.engine, saving.buffers, saving.submit, stream,
                iteration=lambda: self.iteration, stepped=self._boundaries.stepped,
                holding=functools.partial(self.clock.holding, "anchors"),
                implementations=compatibility.implementations(job.models, job.optimizers),
                raising=raising, known_to_fit=planning is not None, resumed=self._resumed, share=share,
            )  # fmt: skip

        read_peak = functools.partial(allocated_peak_bytes, job.models)
        self.clock = PhaseClock()
        stream.add("clock", self.clock.subscriber(optimizers=bool(job.optimizers)))
        if job.loader is None:
            stream.add("loop", Subscriber(model=self._begin_forward, step_begins=self._hint_at_step))
        rounds = agreement.alike(True, otherwise=False)
        self.place = PlanInPlace(given, planning, execute, asked.every, read_peak, rounds=rounds)
        self._agreement = agreement
        self.pace = Pace(asked, job, saving, self.place, directory, iteration, agreement)
        self._actions = BoundaryActions(
            job, progress, saving, self.place, self.pace, self.clock, preemption, self._boundaries,
            iteration=iteration, raising=raising, agreement=agreement,
        )  # fmt: skip
        self._subscribe_behind_execution()
        agreement.follow(lambda: self._boundaries.under_way or progress.waiting > 0)

    def _subscribe_behind_execution(self) -> None:
        """Subscribe those that an anchor tells when the plan's work there is done."""
        boundaries, end = self._boundaries, self._finish_if_asked
        self._stream.add("boundaries", Subscriber(
            step_ends=lambda key: boundaries.optimizer_stepped(key.name), training=boundaries.model_ran,
        ))  # fmt: skip
        self._stream.add("end", Subscriber(forward=end, gradient=end, step_begins=end, step_ends=end, evaluation=end))
        self._stream.add("pace", Subscriber(evaluation=self.pace.evaluated))
        if (planning := self.place.planning) is not None:
            watch = planning.watch
            self._stream.add("watch", Subscriber(model=watch.forward, evaluation=watch.evaluated))

    @property
    def execution(self) -> Execution:
        """The plan that runs now."""
        return self.place.execution

    @property
    def iteration(self) -> int:
        """The last one that is finished, counted over the whole job."""
        return self._actions.iteration

    @property
    def closed(self) -> bool:
        """Whether nothing is followed any more; a close that was interrupted may have more to give back."""
        return self._boundaries.closed

    # What the Checkpointer reports

    def begin_loop(self, *, in_steps: bool = False) -> None:
        """``epochs()`` or ``steps()`` is entered."""
        self._agreement.over(None)
        self._boundaries.loop_begins(in_steps=in_steps)

    def end_epoch(self, *, last: bool = False) -> None:
        """The loop over an epoch's batches has ended, and what followed it in the epoch.

        Args:
            last: whether training ends with this epoch.
        """
        self._note_unseen_steps()
        self._hint_at_epoch_end()
        self._progress.end_epoch()
        if not self._boundaries.explicit:
            self._finish(self._boundaries.epoch_ended(last=last))

    def _hint_at_epoch_end(self) -> None:
        boundaries, waiting, number = self._boundaries, self._progress.waiting, self._progress.number
        if boundaries.explicit and waiting:
            self._hints.give(hints.NOT_COUNTED, number, waiting)
        used = self._progress.position > 0  # of this epoch, by a step
        if boundaries.never_stepped and not used:
            self._hint_no_step()
        elif boundaries.explicit or boundaries.closed:
            return
        elif boundaries.iterated and not (used or waiting):
            self._hints.give(hints.EPOCH_FROM_ELSEWHERE, number)
        elif waiting and not boundaries.iterated:
            self._hints.give(hints.LEFT_OVER, waiting, number)

    def end_turn(self, *, last: bool) -> None:
        """The body of a loop over iterations has ended."""
        if self._boundaries.explicit:
            return
        self._note_unseen_steps()
        boundary = self._boundaries.turn_ended(last=last)
        if self._boundaries.never_stepped:
            self._silent_turns += 1
            if self._silent_turns == SILENT_TURNS:
                self._hint_no_step()
        self._finish_with_all_drawn(boundary)

    def step(self, batches: int | None) -> None:
        """The user says that this is a boundary; see :meth:`.checkpointer.Checkpointer.step`."""
        boundaries, progress, loader = self._boundaries, self._progress, self._job.loader
        first = not boundaries.explicit
        boundaries.marking_begins()
        self._note_unseen_steps()
        # A batch was fetched after the optimizer's step and before this first call: that was taken for the boundary,
        # and is the one which is meant here. How many batches had reached it was not known there.
        passed = first and not boundaries.iterated and progress.take_back()
        count = self.execution.plan.fingerprint.micro_batches if batches is None else batches
        if loader is not None and batches != 0 and not self._drawn:
            self._hints.give(hints.STEP_FROM_ELSEWHERE)
        # An epoch's last iteration may have fewer batches than others; anywhere else the loop has counted wrongly.
        elif loader is not None and (batches or 0) > progress.waiting and not loader.exhausted:
            self._hints.give(hints.TOO_MANY, count, progress.waiting)
        ran = not passed and batches != 0
        if ran and self._job.optimizers and not boundaries.under_way and (loader is None or progress.waiting):
            self._stream.steps.replayed()  # no hook has seen anything: a CUDA graph may hold the whole step
            self._note_unseen_steps()
        epoch_end = progress.count(count)
        self._finish(boundaries.marked(micro_batches=count, epoch_end=epoch_end, ran=ran))

    def metric(self, name: str, value: float) -> None:
        """The user says what the state is worth; see :meth:`.checkpointer.Checkpointer.metric`."""
        self._note_unseen_steps()
        boundaries, metrics = self._boundaries, self._saving.metrics
        number, late = self.iteration, not boundaries.iterated
        metrics.record(number + (not late), name, value, late=late)
        if not late or boundaries.closed:
            return
        # The last boundary may have been captured in vain: its capture may have given way. Ranks must decide alike, and
        # do not know that.
        there = self._agreement.alike(metrics.is_there(number), otherwise=self._actions.captured)
        if metrics.ranks(number) and boundaries.any_passed and not there:
            if boundaries.began:
                logger.warning(
                    "%s of step %d is one of the best, and a model has run in training mode since: it is not saved",
                    name, number,
                )  # fmt: skip
            else:
                self._actions.capture_passed()
        self._saving.keep(number)

    def leave_loop(self, *, in_epoch: bool = False, early: bool = True) -> None:
        """No training follows to copy behind, and what does may write at no anchor: put the best weights back.

        Args:
            in_epoch: whether it was the loop over epochs.
            early: whether it was left with ``break``.
        """
        at_epoch_end = in_epoch and self._job.loader is not None and self._job.loader.exhausted
        self._boundaries.loop_left(early=early, at_epoch_end=at_epoch_end)
        if self.place.planning is not None:
            self.place.planning.abandon()
        self.execution.finish()

    def end_loop(self) -> None:
        """The loop came to its end by itself: what follows it is no part of training, and may write what it likes."""
        self.leave_loop(early=False)
        self._hint_if_never_stepped()
        self._capture_last_boundary()
        self._agreement.over(self.iteration)
        self._actions.end_between()

    def end_training(self) -> None:
        """The ``with`` block has ended, without an exception."""
        boundaries, job = self._boundaries, self._job
        if boundaries.ends_with_epoch:
            self.end_epoch()
        elif not boundaries.explicit:
            if not job.optimizers and job.loader is None and boundaries.began:
                self._hints.give(hints.ALL_IN_ONE)
            self._note_unseen_steps()
            self._finish_with_all_drawn(boundaries.training_ended())
        elif self._progress.waiting and not boundaries.any_passed and boundaries.stepped:
            self._hints.give(hints.NEVER_COUNTED)
        if boundaries.any_passed:
            self._saving.metrics.warn_missing()
        self._hint_if_never_stepped()
        self._capture_last_boundary()

    def end_unmarked(self) -> None:
        """Nothing follows, and nothing says whether what was done since the last boundary is a whole iteration."""
        self._note_unseen_steps()
        if self._boundaries.iterated:
            self._hints.give(hints.CLOSED_INSIDE, self.iteration)
            return
        try:
            self._capture_last_boundary()
        except CheckflowError as error:  # whoever closes has no use for it
            logger.warning("step %d is not saved: %s", self.iteration, error)

    def close(self) -> None:
        """Take the hooks away and bring the capture in flight to its end; once more, if that was interrupted."""
        self._agreement.over(self.iteration)
        self._boundaries.close()
        self._stream.remove()
        capturer = self.execution.capturer
        try:
            # Whatever has not been copied yet has not been written either: the capture in flight can still be whole.
            self.execution.finish()
        except BaseException:
            capturer.abort()  # without hooks, nothing shows any more what is written
            raise
        finally:
            capturer.release()
            if self.place.planning is not None:
                self.place.planning.close()

    def raise_if_asked(self) -> None:
        """Raise what failed since the last call, where the user wants it raised."""
        self._actions.raise_if_asked()

    # What preemption asks: Training

    @property
    def expects_boundary(self) -> bool:
        return self._boundaries.is_expected(waiting=self._progress.waiting)

    def hasten(self) -> None:
        self._agreement.ask_end()
        try:
            self._saving.engine.hasten()
        except CheckflowError as error:  # it promises nothing, and who calls has more to do
            logger.warning("snapshots are left to the training thread: %s", error)

    def persist_seconds(self) -> float | None:
        last = self._saving.writer.last
        return None if last is None else last.seconds

    def end_workers_by(self, end: float) -> None:
        if (loader := self._job.loader) is not None and loader.listener is self:
            loader.workers_end_by = end

    # What the loader reports: LoaderListener

    def on_lost_worker(self) -> None:
        if self._preemption.is_asked_soon():
            self._actions.end_without_batches()

    def on_seeds_needed(self) -> None:
        self._progress.restore_generators()

    def on_fetching_ahead(self) -> None:
        self._boundaries.marking_begins()

    def on_batch_requested(self) -> None:
        if not self._boundaries.explicit:
            self._note_unseen_steps()
            boundary = self._boundaries.batch_requested()
            if boundary is not None:
                self._progress.count()
            self._finish(boundary)
        self.clock.enter(DATA)

    def on_batch_handed(self, batch: Any) -> None:
        self.clock.enter(FORWARD_BACKWARD)
        self._drawn += 1
        self._log_epoch()
        self._progress.batch_handed()
        self._progress.restore_generators()
        self.pace.saw(batch)
        if (planning := self.place.planning) is not None:
            with self.clock.holding("planning"):
                planning.batch_handed(batch)
                if not self._boundaries.explicit:
                    planning.begin(batch)

    def _log_epoch(self) -> None:
        """At a resumed run's first batch, to a loop that may count epochs itself: from 0, as it looks."""
        if self._drawn == 1 and self._resumed and not self._boundaries.explicit and self._boundaries.looping is None:
            assert self._job.loader is not None
            if epoch := self._job.loader.epoch:
                logger.info(
                    "epoch %d goes on: a loop that counts epochs itself begins at checkpointer.loader.epoch, or "
                    "iterates checkpointer.epochs(n)",
                    epoch,
                )  # fmt: skip

    # What the anchors tell

    def _begin_forward(self, model: str, arguments: Any) -> None:
        """A whole model is about to run forward in training mode: without a loader, that may end an iteration."""
        self._note_unseen_steps()
        if (boundary := self._boundaries.forward()) is not None:
            hung = self._stream.hung
            if (planning := self.place.planning) is not None:
                planning.warns_unsaved = False  # the batch of this iteration was drawn before its begin
            self._finish(boundary)
            if self._stream.hung != hung:  # hung in too late for the forward that runs already
                self.execution.reached(AnchorKey(AnchorKind.FORWARD, f"{model}/"))
        self._progress.restore_generators()
        self.pace.saw(arguments)

    def _hint_at_step(self, _key: AnchorKey) -> None:
        """An optimizer steps: without a loader, hint if all have stepped, and no forward has been seen since."""
        if self._boundaries.ends_at_forward:
            self._hints.give(hints.UNSEEN_END)

    def _finish_if_asked(self, *_key: AnchorKey) -> None:
        """End the capture, if training is to end: it is safe then, whether or not the next boundary comes in time."""
        if self._preemption.asked:
            with self.clock.holding("anchors"):
                self.execution.finish()

    def _note_unseen_steps(self) -> None:
        """Optimizers may have stepped in code that no anchor could leave; which of them is not known."""
        if self._stream.steps.take():
            self._boundaries.optimizer_stepped(*self._job.optimizers)

    # Ends

    def _finish(self, boundary: Boundary | None) -> None:
        """Have a boundary checkpointed; without one, end training where that is asked for and nothing would be lost."""
        if boundary is not None:
            self._actions.end_iteration(boundary)
            return
        idle = not (self._boundaries.closed or self._boundaries.under_way or self._progress.waiting)
        if idle and self._actions.captured:
            self._actions.end_between()

    def _finish_with_all_drawn(self, boundary: Boundary | None) -> None:
        """Likewise; every batch handed out so far has reached a step, if one was made."""
        if boundary is not None:
            self._progress.count()
            if self._job.loader is not None and not self._drawn:
                self._hints.give(hints.BATCHES_FROM_ELSEWHERE)
        self._finish(boundary)

    def _hint_if_never_stepped(self) -> None:
        self._note_unseen_steps()
        if self._boundaries.never_stepped:
            self._hint_no_step()

    def _hint_no_step(self) -> None:
        """An epoch, turns of ``steps()`` or training have ended without an optimizer's step."""
        if self._silent_turns:
            self._hints.give(hints.TURNS_WITHOUT_STEP, self._silent_turns)
        elif self._drawn and not self._hints.given(hints.LEFT_OVER):
            self._hints.give(hints.NO_STEP, self._drawn)

    def _capture_last_boundary(self) -> None:
        """Training has ended, and did not say so at its last boundary: save that if the state is still what it was.

        It is not where a further iteration has begun, nor where what followed the loop wrote (the best weights, put
        back), as far as version counters show, and whose memory it is.
        """
        if self._actions.captured or self._boundaries.closed:
            return
        if self._boundaries.under_way:
            self._hints.give(hints.ENDED_INSIDE, self.iteration)
        else:
            self._actions.capture_passed()
