"""Checkpointer: what a training script holds: its arguments, its loops, its beginning and its end.

Its parts are made by :mod:`.builder`. When boundaries are is :mod:`.loop.boundaries`', and what is done at each
:mod:`.loop.boundary_actions`'s.
"""

from __future__ import annotations

import logging
import os
import sys
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from types import TracebackType
from typing import Any, Literal, Self, SupportsFloat

import torch
from torch import nn

from checkflow.core import plan as plans
from checkflow.core.errors import PlanError, UnsupportedError
from checkflow.core.plan import Plan
from checkflow.core.planner_api import Planner, Wishes
from checkflow.core.run_report import to_dict
from checkflow.core.state import as_models, as_optimizers
from checkflow.runtime import resources
from checkflow.runtime.arguments import (
    Arguments,
    check_arguments,
    read_asked,
    read_batches,
    read_grace,
    read_signals,
    read_size,
    read_trust,
    refuse_ranks,
)
from checkflow.runtime.builder import assemble, check_job, read_plan
from checkflow.runtime.data.base import ResumableLoader
from checkflow.runtime.data.worker_processes import tells_of_lost_worker
from checkflow.runtime.job.job import Job
from checkflow.runtime.log_handler import show_lines
from checkflow.runtime.reporter import start_line
from checkflow.runtime.snapshot.capturer import CaptureReport
from checkflow.runtime.state.collect import Stateful, StateWalk
from checkflow.runtime.store import retention
from checkflow.runtime.store.retention import Rules

logger = logging.getLogger("checkflow")


def _no_planner() -> Planner:
    raise PlanError("a job that makes its own plan needs the planner: use checkflow.Checkpointer")


# Set by the package's face (the runtime knows nothing of the planner): what replays a plan before it is executed, and
# what makes the planner of a job that brings no plan.
check_plan: Callable[[Plan], object] = plans.validate
make_planner: Callable[[], Planner] = _no_planner


class Checkpointer:
    """Makes a training job survive failures: consistent, durable checkpoints by a plan, and resume.

    Args:
        model, optimizer: one of each, or dicts of several; None: what trains the models holds no state to save.
        loader: a ``checkflow.DataLoader``, or what ``checkflow.resumable`` made of another; iterate
            ``checkpointer.loader`` instead of it.
        directory: where checkpoints go; made if it is missing.
        plan: None: the job makes its own plan. One of its first iterations is recorded, which takes up to twice its
            usual time; the plan is made in another process while training goes on, and kept in the directory for the
            next start. Until it is there, what is saved is copied at the boundary itself: ends of epochs, the end of
            training, what ``every`` asks for, and, once no plan could be made, as often as ``overhead`` allows.
            "auto": likewise, and a job that becomes another one (layers added,
            parameters unfrozen, another batch size, optimizer or autocast) gets a new plan. Or a plan file, or a Plan,
            made for this job (``checkflow plan``).
        state: further objects with ``state_dict`` and ``load_state_dict``, by name (schedulers, scalers).
        overhead: what checkpoints may cost of training's own time, which it would take without them (0.035 are 3.5 %):
            what holds it up and whatever they slow down, planning aside; first of the plan that a job makes, then of
            the job itself. It is measured, and checkpoints are made less
            often while they cost more, and again more often when they do not.
        extra_memory: that snapshots may add to training's own peak, in bytes or as text ("2GB"), under a plan that the
            job makes; None: what the device has.
        every: how often, whatever it costs. Iterations from one durable checkpoint to the next, a multiple of the
            plan's interval (it is rounded up to one where the job makes its plan, and the log says so): exactly these
            are made, and one at the end of training wherever that comes; not at the ends of epochs. Or text such as
            "30s" or "10min": so far apart by the clock, validation included, at the boundary of the plan's interval
            that is nearest; ends of epochs and the end of training are saved besides. Each is committed while the next
            one is gathered, and training waits if storage is slower, so that a failure costs at most two intervals and
            the one under way. None: as often as ``overhead`` allows and storage can take, at most as planned; more
            often, if that is cheap, in host memory, where the newest is kept until storage takes it; and at the ends of
            epochs and of training. What is in host memory when the job is killed is the next one's, on the same
            machine. How often is found out in the job's first iterations, and kept in the directory for the next start.
        mtbf: mean time between failures, in seconds or as text ("4h"): checkpoints become rarer than ``overhead``
            allows where that wastes less, replays after failures included.
        host_buffers: staging buffers of the size of the state; three let capture and persist overlap fully.
        keep_latest: how many of the newest checkpoints stay on storage, at least 2.
        keep_epochs: of how many epochs (of :meth:`epochs`) the checkpoint made at the end stays too, the newest first;
            True: of all.
        keep_every: of each so many iterations the first checkpoint stays too: that of a multiple of it, if one is made
            there, or else the next one; None: no such rule.
        keep_best: how many of the best stay, however old, by the metric ``monitor`` (see ``metric``), the lowest or the
            highest value first (``mode``). A state that is told to be one of them is saved, whatever ``every`` and
            ``overhead`` say. Of equal values the older one is the better, and NaN and infinite values have no rank. A
            run that starts with another ``monitor`` or ``mode`` judges earlier checkpoints by its own.
        monitor, mode: see ``keep_best``. With ``monitor`` alone nothing more is kept, and ``checkflow ls`` shows which
            is the best.
        resume: "auto" goes on from the newest valid checkpoint if there is one, "must" demands one, "never" demands an
            empty directory; a number goes back to the checkpoint of that step and sets later ones aside. From imported
            weights (``checkflow import``) the models are restored, and everything else begins anew: a warning says so.
        hyperparameters: what goes on where the script asks for other ones than when the checkpoint was made, which the
            log says at the start, a line a difference: the "checkpoint"'s, or the "script"'s, of which only those that
            were changed are set. Compared are the numbers, flags and texts in the optimizers' groups and in torch's
            schedulers under ``state``, torch's seed (below 2^32; without ``manual_seed`` it is drawn), and the loader's
            seed and batch size. With "script" a learning rate that a scheduler has moved is scaled by the script's rate
            over the one it was made with, as ``initial_lr`` and ``base_lrs`` are, so that the schedule goes on from
            there (if the old one was 0, the script's is taken); what a scheduler has done by its other numbers stays,
            and the new ones count from here. With torch's seed the generators of torch are the script's, and Python's
            and NumPy's the checkpoint's; an epoch that has begun keeps its order. The loader's batch size is always the
            script's: its position counts samples. Another seed of the loader is refused with "checkpoint".
        on_error: a checkpoint that fails is logged ("warn"), or raised at the next boundary ("raise").
        signals: by name, those that ask the job to end. Training goes on to its next boundary, is saved there whatever
            ``every`` says, and ends with :class:`checkflow.Preempted`, exit code 75; the same signal again ends it at
            once. Ctrl-C likewise, with KeyboardInterrupt. (): neither is heeded. Handlers that were there are called
            too, and put back by ``close``. Only a Checkpointer made in the main thread can do this.
        grace_seconds: from the signal to the end, all of it: where no boundary comes in time, training ends where it
            is, and what was being saved is brought to its end.
        audit: hold staged bytes against the state at the boundary on the first three checkpoints, after every change
            of layout, and then on every ``audit``-th; 1: all, 0: none but those.
        trust: whose checkpoints the job goes on from. None: what belongs to root or to the job's own user, and may not
            be written by everyone; a start where other users have put something refuses it, and names them. A group's
            name: what belongs to its members, too. "anyone": whatever is there.

    Raises:
        PlanError, MismatchError: the plan is damaged, cannot be executed, or was made for another job.
        StorageError, LockedError: the directory cannot be written, or another process writes there.
        UnsupportedError: something on the list of refusals.
        TypeError: an argument is of another type.
        ValueError: an argument is out of its range, or ``every`` does not fit the plan; it says what does.
    """

    def __init__(
        self,
        model: nn.Module | Mapping[str, nn.Module],
        optimizer: torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer] | None = None,
        loader: ResumableLoader | None = None,
        *,
        directory: str | os.PathLike[str],
        plan: Plan | str | os.PathLike[str] | None = None,
        state: Mapping[str, Stateful] | None = None,
        overhead: float = 0.035,
        extra_memory: int | str | None = None,
        every: int | str | None = None,
        mtbf: float | str | None = None,
        host_buffers: int = 3,
        keep_latest: int = 2,
        keep_epochs: bool | int = 1,
        keep_every: int | None = None,
        keep_best: int = 0,
        monitor: str | None = None,
        mode: Literal["min", "max"] = "min",
        resume: Literal["auto", "never", "must"] | int = "auto",
        hyperparameters: Literal["checkpoint", "script"] = "checkpoint",
        on_error: Literal["warn", "raise"] = "warn",
        signals: Collection[str] = ("SIGTERM", "SIGUSR1"),
        grace_seconds: float = 25,
        audit: int = 100,
        trust: str | None = None,
    ) -> None:
        check_arguments(
            model=model, optimizer=optimizer, loader=loader, directory=directory, plan=plan, state=state,
            host_buffers=host_buffers, resume=resume, hyperparameters=hyperparameters, on_error=on_error, audit=audit,
        )  # fmt: skip
        rules = Rules(keep_latest, keep_epochs, keep_every, keep_best, monitor, mode)
        refuse_ranks()
        asked = read_asked(overhead, every, mtbf)
        arguments = Arguments(
            directory, rules, asked, Wishes(asked.overhead, read_size(extra_memory)), follow=plan == "auto",
            resume=resume, hyperparameters=hyperparameters, host_buffers=host_buffers, audit=audit,
            raising=on_error == "raise", signals=read_signals(signals), grace_seconds=read_grace(grace_seconds),
            trust=read_trust(trust),
        )  # fmt: skip
        show_lines()
        models = as_models(model)
        optimizers = as_optimizers(optimizer, models)
        self._job = job = Job(models, optimizers, dict(state or {}), loader, StateWalk(models, optimizers))
        given = read_plan(plan, asked.every, check_plan)
        device = check_job(job, given)
        parts = assemble(job, given, arguments, device, check_plan=check_plan, make_planner=make_planner)
        self._progress, self._preemption, self._store = parts.progress, parts.preemption, parts.store
        self._saving, self._boundaries, self._reporter = parts.saving, parts.boundaries, parts.reporter
        self.resumed_from = parts.resumed_from
        self._loops = 0  # epochs() and steps() that go on
        self._held = resources.Holdings(
            loader, self._boundaries, self._saving, self._store, self._preemption, self._reporter
        )
        weakref.finalize(self, resources.dropped, self._held).atexit = False  # at exit all that is held is given back
        self._begin()

    def _begin(self) -> None:
        """Write the first report, and follow the loader and the signals."""
        self._saving.writer.after_each = self._reporter.write_in_time
        self._reporter.write()
        logger.info("%s", start_line(self._reporter.make(), self._store.directory))
        if (loader := self._job.loader) is not None:
            resources.tell_displaced(loader)
            loader.follow(self._boundaries)
        self._preemption.listen(self._boundaries)

    # What users call

    @property
    def loader(self) -> ResumableLoader:
        """The training loader; iterating it marks the boundaries."""
        if self._job.loader is None:
            raise UnsupportedError("this Checkpointer was made without a loader")
        return self._job.loader

    @property
    def iteration(self) -> int:
        """Iterations that are finished, over all runs of the job."""
        return self._boundaries.iteration

    @property
    def durable_step(self) -> int | None:
        """The iteration of the newest durable checkpoint, up to which a resume loses nothing whatever happens from now
        on; None: there is none yet."""
        return self._saving.durable_step

    @property
    def preempted(self) -> bool:
        """Whether a signal has asked the job to end: it will, at the next boundary."""
        return self._preemption.preempted

    def epochs(self, start: int, stop: int | None = None, /) -> Iterator[int]:
        """The epochs of ``range(stop)`` or ``range(start, stop)`` from where the last run stopped; iterate the loader
        once in each. They are counted over the whole job: one loop for all of them.

        Raises:
            UnsupportedError: without a loader nobody knows the place in an epoch; use ``steps``. Or this Checkpointer
                was closed before the loop begins.
        """
        self._refuse_closed()
        loader = self.loader
        loader.epochs_counted_elsewhere = True
        progress = self._progress
        self._boundaries.looping = True
        progress.numbers = numbers = range(start) if stop is None else range(start, stop)
        self._tell_nothing_left(progress.epoch, numbers, "epochs")
        while progress.epoch < len(numbers):
            loader.set_epoch(progress.epoch, progress.position)
            # No first batch will come, or code before it may draw numbers.
            if progress.position == 0 or loader.exhausted:
                progress.restore_generators()
            self._loops += 1
            try:
                yield numbers[progress.epoch]
            except GeneratorExit:  # the loop was left with ``break``
                self._boundaries.leave_loop(in_epoch=True)
                raise
            finally:
                self._loops -= 1
            self._boundaries.end_epoch(last=progress.epoch + 1 >= len(numbers))
        self._boundaries.end_loop()
        # A run that was finished already: what follows the loop sees them as it did then.
        self._progress.restore_generators()

    def steps(self, start: int, stop: int | None = None, /) -> Iterator[int]:
        """The turns of ``range(stop)`` or ``range(start, stop)`` from where the last run stopped, for loops without
        epochs. They are counted over the whole job: one loop for all of them.

        Each number is handed out once, as by ``range``, and is usually an iteration (where a turn ends several, by
        ``step()`` or by what it fetches from the loader, as many numbers are passed over). A turn in which no optimizer
        steps (gradients are accumulated, a scaler or the loop skips the step) is none: it belongs to the iteration that
        ends with the next step, since its gradients are in no checkpoint, and ``iteration`` does not count it. A resume
        goes on with the number after the last turn that ended a saved iteration, and so does such turns again.

        Raises:
            UnsupportedError: this Checkpointer was closed before the loop begins.
        """
        self._refuse_closed()
        boundaries = self._boundaries
        boundaries.in_steps = boundaries.looping = True
        numbers = range(start) if stop is None else range(start, stop)
        progress = self._progress
        done = max(progress.turns, progress.turn)
        self._tell_nothing_left(done, numbers, "steps")
        without, longest = 0, 0  # turns in which no optimizer steps, in a row: now, and at most
        while done < len(numbers):
            progress.turn = done
            progress.restore_generators()
            self._loops += 1
            try:
                yield numbers[done]
            except GeneratorExit:  # the loop was left with ``break``
                boundaries.leave_loop()
                raise
            finally:
                self._loops -= 1
            before = self.iteration
            # After so many more turns without a step training may end: the boundary before them is to be saved.
            boundaries.end_step(last=done + 1 + longest >= len(numbers))
            without = without + 1 if self.iteration == before else 0
            longest = max(longest, without)
            done = max(done + 1, progress.turns)  # of which several end in one where that calls step() as often
            progress.turn = done
        boundaries.in_steps = False
        boundaries.end_loop()
        progress.restore_generators()

    def _refuse_closed(self) -> None:
        if self._boundaries.closed:
            raise UnsupportedError(
                f"this Checkpointer of {self._store.directory} is closed, and would save nothing: make another one, "
                "which goes on from the newest checkpoint"
            )

    def _tell_nothing_left(self, done: int, numbers: range, what: str) -> None:
        """The loop would do nothing, since what is done is counted over the whole job: it is a second one of this run,
        or the job was finished before, which may be as it should."""
        if done < len(numbers):
            return
        if self.iteration == self.resumed_from:
            logger.info(
                "all of %s(%d, %d) is done already: the run that this one goes on from ended it, and %d are done, "
                "counted over the whole job; ask for more to go on, or begin anew in another directory",
                what, numbers.start, numbers.stop, done,
            )  # fmt: skip
        elif self.iteration > (self.resumed_from or 0):
            logger.warning(
                "%s(%d, %d) has nothing left to do: %d are done, counted over the whole job, and the loop has %d",
                what, numbers.start, numbers.stop, done, len(numbers),
            )  # fmt: skip

    def step(self, batches: int | None = None) -> None:
        """Mark the boundary here: for loops that fetch batches ahead of using them.

        Args:
            batches: how many batches reached this step; None: as many as the plan has micro-batches (one, as long as a
                job that makes its own plan has none). Of more than were handed out, those that were are counted. 0
                before the loop says that it will fetch ahead, and that ``step()`` marks all boundaries.

        Raises:
            ValueError: it is not a whole number of at least 0.
            UnsupportedError: this Checkpointer was closed, and not inside of its loop, which goes on without it.
        """
        if self._boundaries.closed and self._loops:
            return
        self._refuse_closed()
        self._boundaries.step(None if batches is None else read_batches(batches))

    def metric(self, name: str, value: SupportsFloat) -> None:
        """Tell what the state is worth, as it is now: ``checkpointer.metric("val_loss", 0.3)``.

        It belongs to the checkpoint of just this state. After an optimizer's step, that is the boundary to come: after
        an epoch's last batch the end of that epoch, in the body of ``steps()`` the end of that iteration. After
        ``checkpointer.step()``, or after a loop that has ended, and before an optimizer steps again, it is the boundary
        just passed: its checkpoint gets the metric although it may be written already. So the loss of a batch, told
        before the optimizer steps, describes the state that the last iteration left. Told again of the same state, the
        newest value counts.

        With ``keep_best``, a state that is one of the best by ``monitor`` is saved though no checkpoint was due. Other
        states keep their metrics if they become checkpoints. They are in ``info["metrics"]`` of the manifest, durable
        with it; one that comes after its checkpoint is durable soon after, and when this is closed.

        Args:
            name: any; 1 to 200 printable characters.
            value: a number, or a tensor of one element, for which this waits. NaN and infinite ones are kept, and have
                no rank.

        Raises:
            ValueError: one of them is something else.
        """
        number = retention.check_value(retention.check_name("name", name), value)
        if self._held.closed:
            logger.warning("the metric %s is not kept: this Checkpointer is closed", name)
            return
        self._boundaries.metric(name, number)

    def report(self) -> dict[str, Any]:
        """What checkpointing did and cost so far, beside what the plan promised: JSON values, in bytes and seconds.

        Each field is in docs/reference/run-report.md. ``report.json`` in the checkpoints' directory holds the same of
        the last runs, this one last, as of its newest checkpoint, and of its end once it is closed.
        """
        return to_dict(self._reporter.make(closed=self._held.closed))

    def __repr__(self) -> str:
        report = self._reporter.make(closed=self._held.closed)
        plan = "no plan yet" if report.plan is None else f"plan {report.plan.source}"
        closed = ", closed" if self._held.closed else ""
        return (
            f"<Checkpointer of {report.model} on {report.device}, {plan}: iteration {report.iteration}, "
            f"{report.committed} checkpoints committed to {self._store.directory}{closed}>"
        )

    @property
    def last_capture(self) -> CaptureReport | None:
        """The last capture that ended: its log of executed copies, and what it cost."""
        return self._boundaries.execution.capturer.last_report

    def close(self) -> None:
        """Finish and commit what is in flight, then give everything back: hooks, threads, memory, the lock, signals.

        Without an exception on its way the last boundary that the loop has told of is saved, if the state is still what
        it was there. That an iteration has ended which nothing told of, only the end of a ``with`` block says.

        Once more is harmless; if it is interrupted, call it again.

        Raises:
            StorageError: the last checkpoint is not durable, whatever ``on_error`` says; it tells what is. The end of a
                ``with`` block raises it too, unless an exception has ended that.
        """
        try:
            if not (self._held.closed or self._boundaries.closed) and sys.exception() is None:
                self._boundaries.end_untold()
        finally:
            self._close(raising=True)

    def _close(self, *, raising: bool) -> None:
        if self._held.closed:
            return
        error = self._held.close()
        if not raising:
            resources.tell(error)
            return
        if error is not None and error is not self._held.lost:
            raise error
        self._boundaries.raise_if_asked()  # the reason itself, where it was asked for
        if error is not None:
            raise error
        self._preemption.end_late()

    def __enter__(self) -> Self:
        self._refuse_closed()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        lost = False
        try:
            lost = tells_of_lost_worker(error) and self._preemption.is_asked_soon()
            if kind is None and not self._held.closed:
                self._boundaries.end_training()
        finally:
            self._close(raising=kind is None)
        if lost:
            logger.warning("%s: of the signal that has asked the job to end, which ends where it is", error)
            self._preemption.end_late()
