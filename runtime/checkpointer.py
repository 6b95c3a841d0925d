"""Checkpointer: the object that a training script holds, with its loops, its start and its end.

Its parts are made by :mod:`.builder`; what happens in its loops goes to :mod:`.loop.training_loop`.
"""

from __future__ import annotations

import logging
import os
import sys
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, SupportsFloat

import torch
from torch import nn

from checkflow.core import plan as plans
from checkflow.core.errors import PlanError, UnsupportedError
from checkflow.core.plan import Plan
from checkflow.core.planner_api import PlanLimits, Planner
from checkflow.core.reports.run_report import to_dict
from checkflow.core.state import as_models, as_optimizers, held_tensors, is_distributed
from checkflow.runtime import resources
from checkflow.runtime.arguments import (
    Arguments,
    check_arguments,
    read_accept,
    read_asked,
    read_batches,
    read_fresh,
    read_grace,
    read_signals,
    read_size,
    read_trust,
    refuse_for_ranks,
)
from checkflow.runtime.builder import assemble, check_job, read_plan, refusing_together
from checkflow.runtime.data.base import ResumableLoader
from checkflow.runtime.data.worker_processes import is_lost_worker
from checkflow.runtime.job.job import Job
from checkflow.runtime.log_handler import show_lines
from checkflow.runtime.ranks.identity import find_identity
from checkflow.runtime.ranks.joining import join
from checkflow.runtime.reporter import start_line
from checkflow.runtime.snapshot.capturer import CaptureReport
from checkflow.runtime.state.collect import Stateful, StateWalk
from checkflow.runtime.store import retention
from checkflow.runtime.store.retention import Rules

logger = logging.getLogger("checkflow")


class Checkpointer:
    """Makes a training job survive failures: consistent, durable checkpoints by a plan, and resume.

    Args:
        model, optimizer: one of each, or dicts of several; optimizer None: what trains the models has no state to save.
        loader: a ``checkflow.DataLoader``, or the result of ``checkflow.resumable``; iterate it, or
            ``checkpointer.loader``, which is the same object.
        directory: where checkpoints go; made if it is missing.
        plan: None: the job makes its own plan. One of its first iterations is recorded, which takes up to twice its
            usual time; another process makes the plan while training goes on, and it is kept in the directory for the
            next start. Until then, checkpoints copy all state at the boundary, as often as ``overhead`` allows (the
            first after four iterations or ten seconds) or as ``every`` asks. "auto": the same, and a job that changes
            (layers added, parameters unfrozen, another batch size, optimizer or autocast) gets a new plan. Or a plan
            file, or a Plan, made for this job (``checkflow plan``).
        state: further objects with ``state_dict`` and ``load_state_dict``, by name (schedulers, scalers).
        overhead: the share of training's own time that checkpoints may cost (0.035 is 3.5 %): waits and slowdown, but
            not planning. It bounds the waits in the plan that a job makes, and then the job itself: the cost is
            measured, and checkpoints become rarer or more frequent with it.
        extra_memory: what snapshots may add to training's peak, in bytes or as text ("2GB"), under a plan that the job
            makes; None: what the device has.
        every: how often, whatever it costs. An integer: iterations between durable checkpoints, a multiple of the
            plan's interval (rounded up to one if the job makes its plan, and logged). Exactly these are made, and one
            at the end of training, but none at the ends of epochs. A text such as "30s" or "10min": time between
            checkpoints, validation included, at the nearest boundary of the plan's interval; the ends of epochs and of
            training are saved, too. Each is committed while the next one is gathered, and training waits if storage is
            slower. So a failure costs at most two intervals and the one under way. None: as often as ``overhead``
            allows and storage can take, at most as planned, and at the ends of epochs and of training; more often in
            host memory, if that is cheap. The newest stays there until storage takes it, and if the job is killed, the
            next one on this machine finds it. The frequency is found in the first iterations and kept in the directory
            for the next start.
        mtbf: mean time between failures, in seconds or as text ("4h"): checkpoints become rarer than ``overhead``
            allows if that wastes less time, replays after failures included.
        host_buffers: staging buffers of the size of the state; three let capture and persist overlap fully.
        keep_latest: how many of the newest checkpoints stay on storage, at least 2.
        keep_epochs: for how many of the newest epochs (of :meth:`epochs`) the checkpoint at the end stays, too; True:
            all.
        keep_every: of each so many iterations one checkpoint stays, too: that of a multiple, or the next one after it;
            None: no such rule.
        keep_best: how many of the best stay, however old, by the metric ``monitor`` (see ``metric``), the lowest or the
            highest value first (``mode``). A state that is one of them is saved, whatever ``every`` and ``overhead``
            say. Of equal values the older one is better; NaN and infinite values have no rank. Each run judges all
            checkpoints by its own ``monitor`` and ``mode``.
        monitor, mode: see ``keep_best``. With ``monitor`` alone, ``checkflow ls`` shows the best, but nothing more is
            kept.
        resume: "auto" resumes from the newest valid checkpoint if there is one, "must" demands one, "never" demands an
            empty directory; a number goes back to that step's checkpoint and sets later ones aside. From what
            ``checkflow import`` made, the models are restored, and optimizers of which it has state; everything else
            starts anew, with a warning.
        hyperparameters: whose values continue if the script's differ from those that the checkpoint was made with: the
            "checkpoint"'s, or the "script"'s, of which only changed ones are set. The log has a line for each
            difference. Compared are numbers, flags and texts in the optimizers' groups and in torch's schedulers under
            ``state``, torch's seed (below 2^32), and the loader's seed and batch size. The batch size is always the
            script's. Another seed of the loader is refused with "checkpoint". The how-to page on hyperparameters says
            what "script" does.
        on_error: a failed checkpoint is logged ("warn"), or raised at the next boundary ("raise").
        signals: names of signals that ask the job to end. Training goes on to its next boundary, is saved there
            whatever ``every`` says, and ends with :class:`checkflow.Preempted`, exit code 75; the same signal again
            ends it at once. Ctrl-C does the same with KeyboardInterrupt. (): both are ignored. Earlier handlers are
            called, too, and restored by ``close``. Works only for a Checkpointer made in the main thread.
        grace_seconds: from the signal to the end. If no boundary comes in time, training ends where it is, and the
            checkpoint in flight is finished.
        audit: compare staged bytes with the state at the boundary, for the first three checkpoints, after every change
            of layout, and then for every ``audit``-th; 1: all, 0: only the first ones.
        trust: whose checkpoints the job resumes from. None: those of root and the job's own user that not everyone may
            write to; a start that finds another user's files names them and ends. A group's name: its members', too.
            "anyone": all.
        on_report: a function for TensorBoard, W&B and the like. It gets the numbers of :meth:`report` by their places,
            such as "lag/seconds" or "iteration", after a checkpoint has ended, at most once a second and so that it
            takes at most 2 % of the time, and once at the end. It runs on the thread that writes checkpoints (the last
            time on the one that closes), so training does not wait for it. A slow one delays checkpoints, also the last
            ones within ``grace_seconds``. What it raises is logged once. Of several ranks, rank 0 alone calls it.
        accept: differences from the checkpoint that would otherwise end the start, by name. "ranks": another number of
            ranks, although a loader deals the samples by itself, or ranks hold tensors of their own. "loader": a loader
            that does not repeat the batches that it gave before. "length": data of another length, at an epoch's end.
        fresh: names under ``state`` whose objects begin anew where the checkpoint has none of that name, or one of
            another kind, such as another class of scheduler; a name that only the checkpoint has is dropped. Where it
            fits, it is resumed. An optimizer whose schedulers all begin anew has the rates that they set.

    Raises:
        PlanError, MismatchError: the plan is damaged, cannot be executed, or was made for another job.
        StorageError, LockedError: the directory cannot be written, or another process writes there.
        UnsupportedError: something on the list of refusals.
        TypeError: an argument has a wrong type.
        ValueError: an argument is out of its range, ``every`` does not fit the plan, or ``fresh`` has a name that
            nobody knows; the message says what does.
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
        on_report: Callable[[dict[str, float]], object] | None = None,
        accept: Collection[str] = (),
        fresh: Collection[str] = (),
    ) -> None:
        check_arguments(
            model=model, optimizer=optimizer, loader=loader, directory=directory, plan=plan, state=state,
            host_buffers=host_buffers, resume=resume, hyperparameters=hyperparameters, on_error=on_error, audit=audit,
            on_report=on_report,
        )  # fmt: skip
        rules = Rules(keep_latest, keep_epochs, keep_every, keep_best, monitor, mode)
        asked = read_asked(overhead, every, mtbf)
        arguments = Arguments(
            directory, rules, asked, PlanLimits(asked.overhead, read_size(extra_memory)), follow=plan == "auto",
            resume=resume, hyperparameters=hyperparameters, host_buffers=host_buffers, audit=audit,
            raising=on_error == "raise", signals=read_signals(signals), grace_seconds=read_grace(grace_seconds),
            trust=read_trust(trust), on_report=on_report, accept=read_accept(accept), fresh=read_fresh(fresh),
        )  # fmt: skip
        show_lines()
        models = as_models(model)
        optimizers = as_optimizers(optimizer, models)
        sharded = any(is_distributed(item.tensor) for item in held_tensors(models, optimizers))
        council = join(find_identity(sharded=sharded), Path(os.fspath(directory)).absolute())
        walk = StateWalk(models, optimizers, of_a_rank=not council.alone)
        self._job = job = Job(models, optimizers, dict(state or {}), loader, walk)
        with refusing_together(council):
            if not council.alone:  # each rank's plan is another one
                refuse_for_ranks(plan)
            given = read_plan(plan, asked.every, self._check_plan)
            device = check_job(job, given)
            parts = assemble(
                job, given, arguments, device, council, check_plan=self._check_plan, make_planner=self._make_planner
            )
        self._progress, self._preemption, self._store = parts.progress, parts.preemption, parts.store
        self._saving, self._loop, self._reporter = parts.saving, parts.loop, parts.reporter
        self.resumed_from = parts.resumed_from
        self._bodies = 0  # of epochs() and steps(), that run now
        self._held = resources.Resources(
            loader, self._loop, self._saving, self._store, self._preemption, self._reporter, council
        )  # fmt: skip
        weakref.finalize(self, resources.dropped, self._held).atexit = False  # at exit everything is released anyway
        self._begin()

    # The runtime does not know the planner: checkflow.api overrides both.

    @staticmethod
    def _check_plan(plan: Plan) -> None:
        """Replay a plan before it is executed."""
        plans.validate(plan)

    @staticmethod
    def _make_planner() -> Planner:
        """The planner of a job that brings no plan."""
        raise PlanError("a job that makes its own plan needs the planner: use checkflow.Checkpointer")

    def _begin(self) -> None:
        """Write the first report, and follow the loader and the signals."""
        self._saving.writer.after_each = self._reporter.checkpoint_ended
        self._reporter.write()
        if self._reporter.speaks:
            logger.info("%s", start_line(self._reporter.make(), self._store.directory, self._reporter.ranks))
        if (loader := self._job.loader) is not None:
            resources.warn_displaced(loader)
            loader.follow(self._loop)
        self._preemption.listen(self._loop)

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
        return self._loop.iteration

    @property
    def durable_step(self) -> int | None:
        """The iteration of the newest durable checkpoint, which no failure can lose; None: there is none yet."""
        return self._saving.durable_step

    @property
    def preempted(self) -> bool:
        """Whether a signal has asked the job to end, which it will at the next boundary."""
        return self._preemption.preempted

    def epochs(self, start: int, stop: int | None = None, /) -> Iterator[int]:
        """The epochs of ``range(stop)`` or ``range(start, stop)`` from where the last run stopped; iterate the loader
        once in each. They are counted over the whole job: use one loop for all of them.

        Raises:
            UnsupportedError: there is no loader, so nobody knows the position in an epoch; use ``steps``. Or this
                Checkpointer was closed before the loop begins.
        """
        self._refuse_closed()
        loader = self.loader
        loader.epochs_counted_elsewhere = True
        progress = self._progress
        self._loop.begin_loop()
        progress.numbers = numbers = range(start) if stop is None else range(start, stop)
        self._log_nothing_left(progress.epoch, numbers, "epochs")
        while progress.epoch < len(numbers):
            loader.set_epoch(progress.epoch, progress.position)
            # Restore now: no first batch will come, or code before it may draw numbers.
            if progress.position == 0 or loader.exhausted:
                progress.restore_generators()
            self._bodies += 1
            try:
                yield numbers[progress.epoch]
            except GeneratorExit:  # the loop was left with ``break``
                self._loop.leave_loop(in_epoch=True)
                raise
            finally:
                self._bodies -= 1
            self._loop.end_epoch(last=progress.epoch + 1 >= len(numbers))
        self._loop.end_loop()
        # A run that was finished already: what follows the loop sees them as it did then.
        self._progress.restore_generators()

    def steps(self, start: int, stop: int | None = None, /) -> Iterator[int]:
        """The turns of ``range(stop)`` or ``range(start, stop)`` from where the last run stopped, for loops without
        epochs. They are counted over the whole job: use one loop for all of them.

        Each number comes once, as from ``range``, and is usually an iteration. If a turn ends several, by ``step()`` or
        by fetching from the loader, as many numbers are skipped. A turn in which no optimizer steps (accumulation, a
        scaler that skips) belongs to the iteration that ends with the next step, since no checkpoint holds its
        gradients; ``iteration`` does not count it. A resume continues after the last turn that ended a saved iteration,
        and repeats such turns.

        Raises:
            UnsupportedError: this Checkpointer was closed before the loop begins.
        """
        self._refuse_closed()
        self._loop.begin_loop(in_steps=True)
        numbers = range(start) if stop is None else range(start, stop)
        progress = self._progress
        done = max(progress.turns, progress.turn)
        self._log_nothing_left(done, numbers, "steps")
        without, longest = 0, 0  # consecutive turns without an optimizer step: now, and at most
        while done < len(numbers):
            progress.turn = done
            progress.restore_generators()
            self._bodies += 1
            try:
                yield numbers[done]
            except GeneratorExit:  # the loop was left with ``break``
                self._loop.leave_loop()
                raise
            finally:
                self._bodies -= 1
            before = self.iteration
            # After so many more turns without a step training may end: the boundary before them is to be saved.
            self._loop.end_turn(last=done + 1 + longest >= len(numbers))
            without = without + 1 if self.iteration == before else 0
            longest = max(longest, without)
            done = max(done + 1, progress.turns)  # one turn may call step() several times
            progress.turn = done
        self._loop.end_loop()
        progress.restore_generators()

    def _refuse_closed(self) -> None:
        if self._loop.closed:
            raise UnsupportedError(
                f"this Checkpointer of {self._store.directory} is closed, and would save nothing: make another one, "
                "which goes on from the newest checkpoint"
            )

    def _log_nothing_left(self, done: int, numbers: range, what: str) -> None:
        """Log that the loop would do nothing: it is a second one of this run, or the job was finished before."""
        if done < len(numbers):
            return
        if self.iteration == self.resumed_from:
            logger.info(
                "nothing is left to do: %d %s were asked for, and earlier runs did %d; ask for more to go on, or begin "
                "anew in another directory", len(numbers), what, done,
            )  # fmt: skip
        elif self.iteration > (self.resumed_from or 0):
            logger.warning(
                "%s(%d, %d) has nothing left to do: %d are done, counted over the whole job, and the loop has %d",
                what, numbers.start, numbers.stop, done, len(numbers),
            )  # fmt: skip

    def step(self, batches: int | None = None) -> None:
        """Mark the boundary here: for loops that fetch batches ahead of using them, and for whole steps in CUDA graphs.

        A forward pass that no optimizer's step has followed belongs to the next iteration. Where neither was seen since
        the last boundary, an optimizer has stepped inside of a graph, and all state is copied here.

        Args:
            batches: how many batches reached this step, at most all that were handed out; None: as many as the plan has
                micro-batches (one, as long as a job that makes its own plan has none). 0 before the loop says that it
                fetches ahead and that ``step()`` marks all boundaries.

        Raises:
            ValueError: it is not a whole number of at least 0.
            UnsupportedError: this Checkpointer was closed, and not inside of its loop, which goes on without it.
        """
        if self._loop.closed and self._bodies:
            return
        self._refuse_closed()
        self._loop.step(None if batches is None else read_batches(batches))

    def metric(self, name: str, value: SupportsFloat) -> None:
        """Record how good the state is now: ``checkpointer.metric("val_loss", 0.3)``.

        It belongs to the checkpoint of exactly this state. After an optimizer's step that is the next boundary: after
        an epoch's last batch the end of that epoch, in the body of ``steps()`` the end of that iteration. After
        ``checkpointer.step()`` or the end of a loop, and before an optimizer steps again, it is the last boundary, even
        if that is already written. So a batch's loss, recorded before the optimizer steps, describes the state that the
        last iteration left. The newest value for a state counts.

        With ``keep_best``, a state that is one of the best by ``monitor`` is saved even if no checkpoint was due. Other
        states keep their metrics if they become checkpoints. They are in the manifest's ``info["metrics"]`` and durable
        with it; a later metric is durable soon after, and when this is closed.

        Args:
            name: any; 1 to 200 printable characters.
            value: a number, or a tensor of one element, for which this waits. NaN and infinite ones are kept, without a
                rank.

        Raises:
            ValueError: one of them is something else.
        """
        number = retention.check_value(retention.check_name("name", name), value)
        if self._held.closed:
            logger.warning("the metric %s is not kept: this Checkpointer is closed", name)
            return
        self._loop.metric(name, number)

    def report(self) -> dict[str, Any]:
        """What checkpointing did and cost so far, beside what the plan promised: JSON values, in bytes and seconds.

        docs/reference/run-report.md describes each field. ``report.json`` in the directory holds the last runs, with
        this one last, as of one of its newest checkpoints or its end.
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
        return self._loop.place.last_capture

    def close(self) -> None:
        """Commit what is in flight, then release everything: hooks, threads, memory, the lock, signals.

        If no exception is being raised, the last reported boundary is saved, if the state has not changed since. Only
        the end of a ``with`` block also ends an unreported iteration. May be called again, also after an interrupt.

        Raises:
            StorageError: the last checkpoint is not durable, whatever ``on_error`` says; the message says what is. The
                end of a ``with`` block raises it too, unless an exception has ended the block.
        """
        try:
            if not (self._held.closed or self._loop.closed) and sys.exception() is None:
                self._loop.end_unmarked()
        finally:
            self._close(raising=True)

    def _close(self, *, raising: bool) -> None:
        if self._held.closed:
            return
        error = self._held.close()
        if not raising:
            resources.log_error(error)
            return
        if error is not None and error is not self._held.lost:
            raise error
        self._loop.raise_if_asked()  # the reason itself, where it was asked for
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
            lost = is_lost_worker(error) and self._preemption.is_asked_soon()
            if kind is None and not self._held.closed:
                self._loop.end_training()
        finally:
            self._close(raising=kind is None)
        if lost:
            logger.warning("%s: the signal that asked the job to end has ended a worker; training ends here", error)
            self._preemption.end_late()
