"""Checkpointer: what a training script holds. It knows when boundaries are, and leaves the rest to its parts.

At each boundary that is captured: the capture in flight is brought to its end, then the next one begins
(:mod:`.capture`); anchors drive it through the plan's iterations (:mod:`.execution`); the writer commits it
(:mod:`.persist`, :mod:`.store`). Captured are the boundaries whose number, counted over the whole job, is a multiple of
the plan's interval; a resume does not change the count, and what it resumed from is not captured again.

Where the boundary is: when the loader is asked for a batch after an optimizer step, so that whatever the loop did
after ``optimizer.step()`` (scheduler, EMA, clamps, validation) belongs to the finished iteration. After an epoch's last
batch: when ``epochs()`` is advanced, or the ``with`` block ends without an exception. ``step()`` marks it explicitly.
Without a loader and without ``step()``: when ``steps()`` is advanced, or at the first training forward after every
optimizer has stepped.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any, Literal, Self

import torch
from torch import nn

from checkflow import plan as plans
from checkflow.errors import CheckflowError, PlanError, UnsupportedError
from checkflow.graph import AnchorKey, AnchorKind
from checkflow.handover import Planner, Wishes
from checkflow.plan import Plan
from checkflow.runtime import extra_state, fit
from checkflow.runtime.anchors import Sightings
from checkflow.runtime.barriers import Program, compile_plan
from checkflow.runtime.capture import CaptureReport
from checkflow.runtime.execution import Execution
from checkflow.runtime.live_state import Stateful, StateWalk, capture_extra
from checkflow.runtime.loader import DataLoader
from checkflow.runtime.plan_cache import PlanCache
from checkflow.runtime.plan_in_place import PlanInPlace
from checkflow.runtime.planning import Planning
from checkflow.runtime.progress import Progress
from checkflow.runtime.resume import resume_from
from checkflow.runtime.saving import Saving
from checkflow.runtime.store import Store
from checkflow.state import as_models, as_optimizers, collect_state, refuse_closures

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
        model, optimizer: one of each, or dicts of several.
        loader: a ``checkflow.DataLoader``; iterate ``checkpointer.loader`` instead of it.
        directory: where checkpoints go; made if it is missing.
        plan: None: the job makes its own plan. One of its first iterations is recorded, which takes up to twice its
            usual time; the plan is made in another process while training goes on, and kept in the directory for the
            next start. Until it is there, what is saved is copied at the boundary itself (ends of epochs, the end of
            training, and what ``every`` asks for). "auto": likewise, and a job that becomes another one (layers added,
            parameters unfrozen, another batch size, optimizer or autocast) gets a new plan. Or a plan file, or a Plan,
            made for this job (``checkflow plan``).
        state: further objects with ``state_dict`` and ``load_state_dict``, by name (schedulers, scalers).
        overhead, extra_memory: what the plan that a job makes may cost: of training's time, the share that it may stand
            still (0.035 are 3.5 %), and the memory that snapshots may add to training's own peak, in bytes or as text
            ("2GB"); None: what the device has. A plan that is given has its own.
        every: iterations from one durable checkpoint to the next, a multiple of the plan's interval (it is rounded up
            to one where the job makes its plan, and the log says so). Each is committed
            while the next one is gathered, and training waits if storage is slower, so that a failure costs at most two
            intervals and the one under way. None: as often as planned (each boundary whose number is a multiple of the
            plan's interval), at the ends of epochs and at the end of training, in host memory; storage takes the newest
            as fast as it goes.
        host_buffers: staging buffers of the size of the state; three let capture and persist overlap fully.
        keep_latest: how many of the newest checkpoints stay on storage, at least 2.
        keep_epochs: whether the ones made at the ends of epochs stay too.
        resume: "auto" goes on from the newest valid checkpoint if there is one, "must" demands one, "never" demands an
            empty directory; a number goes back to the checkpoint of that step and sets later ones aside.
        on_error: a checkpoint that fails is logged ("warn"), or raised at the next boundary ("raise").
        audit: hold staged bytes against the state at the boundary on the first three checkpoints, after every change
            of layout, and then on every ``audit``-th; 1: all, 0: none but those.

    Raises:
        PlanError, MismatchError: the plan is damaged, cannot be executed, or was made for another job.
        StorageError, LockedError: the directory cannot be written, or another process writes there.
        UnsupportedError: something on the list of refusals.
        ValueError: an argument is out of its range, or ``every`` does not fit the plan; it says what does.
    """

    def __init__(
        self,
        model: nn.Module | Mapping[str, nn.Module],
        optimizer: torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer],
        loader: DataLoader | None = None,
        *,
        directory: str | os.PathLike[str],
        plan: Plan | str | os.PathLike[str] | None = None,
        state: Mapping[str, Stateful] | None = None,
        overhead: float = 0.035,
        extra_memory: int | str | None = None,
        every: int | None = None,
        host_buffers: int = 3,
        keep_latest: int = 2,
        keep_epochs: bool = True,
        resume: Literal["auto", "never", "must"] | int = "auto",
        on_error: Literal["warn", "raise"] = "warn",
        audit: int = 100,
    ) -> None:
        fit.check_arguments(
            loader=loader, every=every, host_buffers=host_buffers, resume=resume, on_error=on_error, audit=audit
        )
        self._models, self._optimizers = as_models(model), as_optimizers(optimizer)
        self._objects = dict(state or {})
        self._wishes = Wishes(fit.read_share(overhead), fit.read_size(extra_memory))
        self._own_plan = plan is None or plan == "auto"
        given = None
        if plan is not None and plan != "auto":
            given = plan if isinstance(plan, Plan) else plans.load(plan)
        if given is not None:
            check_plan(given)
            fit.check_every(every, given.interval)
        self._every, self._on_error = every, on_error
        self._loader = loader
        self._walk = StateWalk(self._models, self._optimizers)
        fit.refuse_devices(self._models, self._optimizers)
        refuse_closures(self._optimizers)
        fit.refuse_objects(self._objects)
        if given is not None:
            implementations = fit.implementations(self._models, self._optimizers)
            fit.refuse_other_job(given, collect_state(self._models, {}), implementations)
            compile_plan(given)

        self.iteration = 0
        self.resumed_from: int | None = None
        self._progress = Progress(loader)
        self._explicit = self._in_steps = False
        self._began = False  # an iteration, since the last boundary
        # Version counters of all state at a boundary that was not captured, in case it is the last one.
        self._passed: list[int] = []
        self._left_epochs = False  # with ``break``, after the epoch's last batch
        self._sightings = Sightings()
        self._no_end_said = False
        self._held = {"boundary": 0.0, "anchors": 0.0, "buffers": 0.0, "planning": 0.0}
        self._longest_hold_seconds = 0.0
        self._closed = False

        with contextlib.ExitStack() as undo:
            self._store = Store(
                directory, run_id=uuid.uuid4().hex[:16], keep_latest=keep_latest, keep_epochs=keep_epochs
            )
            undo.callback(self._store.close)
            planning = None if given is not None else self._make_planning(follow=plan == "auto")
            self._resume(resume, given)
            self._captured_iteration = self.iteration  # at the start there is nothing to save, after a resume it is
            self._saving = Saving(self._store, each=every is not None, host_buffers=host_buffers, audit=audit)
            undo.callback(self._saving.close)
            self._place = PlanInPlace(given, planning, self._execute, every)
            undo.pop_all()
        if loader is not None:
            loader.listener = self

    def _make_planning(self, *, follow: bool) -> Planning:
        cache = PlanCache(self._store.directory, self._wishes)
        return Planning(
            self._models, self._optimizers, self._walk, cache, make_planner(), check_plan, self._wishes, follow=follow
        )

    def _execute(self, plan: Plan, program: Program) -> Execution:
        return Execution(
            plan, program, self._models, self._optimizers, self._walk,
            self._saving.engine, self._saving.buffers, self._saving.writer.submit, self,
            implementations=fit.implementations(self._models, self._optimizers),
            raising=self._on_error == "raise", known_to_fit=self._own_plan, sightings=self._sightings,
        )  # fmt: skip

    @property
    def _execution(self) -> Execution:
        """The plan that runs now."""
        return self._place.execution

    # What users call

    @property
    def loader(self) -> DataLoader:
        """The training loader; iterating it marks the boundaries."""
        if self._loader is None:
            raise UnsupportedError("this Checkpointer was made without a loader")
        return self._loader

    def epochs(self, count: int) -> Iterator[int]:
        """The epochs from where the last run stopped up to ``count``; iterate the loader once in each.

        Raises:
            UnsupportedError: without a loader nobody knows the place in an epoch; use ``steps``.
        """
        loader = self.loader
        loader.epochs_counted_elsewhere = True
        progress = self._progress
        while progress.epoch < count:
            loader.set_epoch(progress.epoch, progress.position)
            if (
                progress.position == 0 or loader.exhausted
            ):  # no first batch will come, or code before it may draw numbers
                self._progress.restore_generators()
            try:
                yield progress.epoch
            except GeneratorExit:  # the loop was left with ``break``
                self._left_epochs = loader.exhausted
                self._leave_loop()
                raise
            self._end_epoch()
        self._leave_loop()
        # A run that was finished already: what follows the loop sees them as it did then.
        self._progress.restore_generators()

    def _end_epoch(self) -> None:
        if self._explicit and self._progress.waiting:
            logger.warning(
                "%d batches of epoch %d were handed out and not counted by step(): after a resume they are used again; "
                "pass their number to step()",
                self._progress.waiting, self._progress.epoch,
            )  # fmt: skip
        self._progress.end_epoch()
        if not self._explicit:
            self._boundary(epoch_end=True)

    def steps(self, count: int) -> Iterator[int]:
        """Iterations from where the last run stopped up to ``count``, for loops without epochs."""
        self._in_steps = True
        while self.iteration < count:
            self._progress.restore_generators()
            try:
                yield self.iteration
            except GeneratorExit:  # the loop was left with ``break``
                self._leave_loop()
                raise
            if not self._explicit:
                self._began = self._began or not self._optimizers
                self._count_batches()
                self._boundary(last=self.iteration + 1 >= count)
        self._in_steps = False
        self._leave_loop()
        self._progress.restore_generators()

    def _leave_loop(self) -> None:
        """No training follows to copy behind, and what does may write at no anchor: put the best weights back."""
        if self._place.planning is not None:
            self._place.planning.abandon()
        self._execution.finish()

    def step(self, batches: int | None = None) -> None:
        """Mark the boundary here: for loops that fetch batches ahead of using them.

        Args:
            batches: how many batches reached this step; None: as many as the plan has micro-batches (one, as long as a
                job that makes its own plan has none).
        """
        self._explicit = True
        self._began = self._began or not self._optimizers
        count = self._execution.plan.fingerprint.micro_batches if batches is None else batches
        self._progress.count(count)
        self._boundary(micro_batches=count)

    def report(self) -> dict[str, Any]:
        """What checkpointing did and cost so far, in bytes and seconds."""
        last = self._execution.capturer.last_report
        return {
            "iteration": self.iteration,
            "resumed_from": self.resumed_from,
            **self._saving.report(),
            "failed": self._saving.writer.failed + self._place.aborted,
            "held_seconds": dict(self._held),
            "longest_hold_seconds": self._longest_hold_seconds,
            **self._place.report(),
            "snapshot_peak_bytes": last.statistics.snapshot_peak_bytes if last else 0,
            "boundary_bytes": last.boundary_bytes if last else 0,
        }

    @property
    def last_capture(self) -> CaptureReport | None:
        """The last capture that ended: its log of executed copies, and what it cost."""
        return self._execution.capturer.last_report

    def close(self) -> None:
        """Finish and commit what is in flight, then give everything back: hooks, threads, memory, the lock.

        If it is interrupted, call it again.
        """
        self._close(raising=True)

    def _close(self, *, raising: bool) -> None:
        if self._closed:
            return
        try:
            if self._place.planning is not None:
                self._place.planning.close()
            self._execution.remove_hooks()
            if self._loader is not None and self._loader.listener is self:
                self._loader.listener = None
                self._loader.epochs_counted_elsewhere = False
            # Whatever has not been copied yet has not been written either: the capture in flight can still be whole.
            self._execution.finish()
        except CheckflowError as error:
            if raising:
                raise
            logger.warning("%s", error)
        finally:
            self._saving.close()
            self._store.close()
            self._closed = True
        if raising:
            self._raise_if_asked()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None and not self._closed:
                if not self._explicit and self._left_epochs:
                    self._end_epoch()
                elif not self._explicit:
                    if not self._optimizers and self._loader is None and self._began:
                        logger.warning(
                            "without an optimizer and a loader nothing tells where an iteration ends, and all that ran "
                            "counts as one: iterate checkpointer.steps(), or call checkpointer.step() after each"
                        )
                    self._count_batches()
                    self._boundary()
                self._capture_last_boundary()
        finally:
            self._close(raising=kind is None)

    # What the loader and the hooks call

    def on_batch_requested(self) -> None:
        """The loader is asked for a batch that it has."""
        if not self._explicit:
            self._count_batches()
            self._boundary()

    def on_batch_handed(self, batch: Any) -> None:
        """The loader is about to hand out a batch."""
        self._progress.batch_handed()
        self._progress.restore_generators()
        if (planning := self._place.planning) is not None:
            planning.watch.batch_handed(batch)
            if not self._explicit:
                planning.begin(batch)

    def on_forward(self, model: str, arguments: Any) -> None:
        if self._loader is None:
            self._execution.note_unseen_steps()
            stepped = bool(self._optimizers) and self._execution.stepped.issuperset(self._optimizers)
            if stepped and not self._explicit and not self._in_steps:
                hooks = self._execution.hooks
                self._boundary()
                if self._execution.hooks is not hooks:  # hung in too late for the forward that runs already
                    self._execution.reached(AnchorKey(AnchorKind.FORWARD, f"{model}/"))
            self._progress.restore_generators()
        if (planning := self._place.planning) is not None:
            planning.watch.forward(model, arguments)

    def on_evaluation(self) -> None:
        if (planning := self._place.planning) is not None:
            planning.watch.evaluated()

    def on_training(self) -> None:
        self._began = True

    def on_anchor(self, key: AnchorKey) -> None:
        begun = time.perf_counter()
        if key.kind is AnchorKind.OPTIMIZER_PRE:
            self._miss_boundary()
        self._execution.reached(key)
        self._note_hold("anchors", time.perf_counter() - begun)

    def _miss_boundary(self) -> None:
        """An optimizer steps, and all have stepped: an iteration has ended that nobody saw the end of."""
        implicit = self._loader is None and not self._explicit and not self._in_steps
        if implicit and not self._no_end_said and self._execution.stepped.issuperset(self._optimizers):
            self._no_end_said = True
            logger.warning(
                "no checkpoint is made: where an iteration ends is not seen, since no model that was passed runs "
                "forward in uncompiled code; iterate checkpointer.steps(n), or call checkpointer.step() after each"
            )

    # Boundaries

    @property
    def _iterated(self) -> bool:
        """Whether there was an iteration since the last boundary: without optimizers it takes none of their steps."""
        return bool(self._execution.stepped) or (not self._optimizers and self._began)

    def _count_batches(self) -> None:
        """Every batch handed out so far has reached a step, if one was made."""
        self._execution.note_unseen_steps()
        if self._iterated:
            self._progress.count()

    def _boundary(self, *, epoch_end: bool = False, last: bool = False, micro_batches: int | None = None) -> None:
        """The state is now that of one more whole iteration.

        A boundary to be captured brings the capture in flight to its end first. Where that comes before the plan's
        interval is over (an epoch's end, the last iteration, and the first regular boundary after them), training waits
        for what is left of it.
        """
        self._execution.note_unseen_steps()
        if not self._iterated:
            return
        begun = time.perf_counter()
        self._turn(micro_batches)
        turned = time.perf_counter()
        self._note_hold("planning", turned - begun)
        due = self._place.is_due(self.iteration + 1, extra=epoch_end or last)
        self._execution.end_iteration(due=due or self._place.quiet)
        self._began = False
        self.iteration += 1
        self._raise_if_asked()
        self._execution.heed(self._saving.writer)
        if not due and self._every is None:
            self._passed = self._versions()
        waited_seconds = self._capture(epoch_end) if due else 0.0
        self._held["buffers"] += waited_seconds
        self._note_hold("boundary", time.perf_counter() - turned - waited_seconds)
        if self._place.planning is not None and not last and (self._loader is None or self._explicit):
            self._place.planning.begin()  # otherwise when the loader hands a batch out

    def _turn(self, micro_batches: int | None) -> None:
        """What planning has come to, before this boundary is looked at."""
        planning = self._place.planning
        if planning is None:
            return
        if self._loader is None:
            micro_batches = None  # nobody counts
        elif not self._explicit:
            micro_batches = planning.watch.handed
        self._place.turn(micro_batches)
        error = planning.take_error()
        if error is not None and self._on_error == "raise":
            raise error

    def _capture_last_boundary(self) -> None:
        """Training has ended, and did not say so at its last boundary: save that if the state is still what it was.

        It is not where a further iteration has begun, nor where what followed the loop wrote (the best weights, put
        back), as far as version counters tell.
        """
        captured = self._captured_iteration == self.iteration
        if captured or self._execution.stepped or self._began or not self._place.is_due(self.iteration, extra=True):
            return
        if self._versions() != self._passed:
            logger.warning("the state was changed after step %d, which is not saved therefore", self.iteration)
            return
        self._execution.finish()
        self._execution.follow()
        self._execution.heed(self._saving.writer)
        self._held["buffers"] += self._capture(epoch_end=False)

    def _versions(self) -> list[int]:
        return [item.tensor._version for item in self._walk.current().tensors]

    def _capture(self, epoch_end: bool) -> float:
        """Capture this boundary; returns the seconds waited for storage and buffers."""
        # The first capture tells whether the job can be checkpointed at all; later ones must not end it.
        with self._execution.surviving() if self._saving.captures else contextlib.nullcontext():
            self._place.tell_unplanned()
            waited_seconds = self._begin(epoch_end)
            if self._place.quiet:
                self._execution.capturer.finish()
            return waited_seconds
        return 0.0

    def _begin(self, epoch_end: bool) -> float:
        job = capture_extra(self._walk, self._optimizers, self._objects)
        extra = extra_state.encode({"iteration": self.iteration, **self._progress.capture(), "job": job})
        info = {"epoch": self._progress.epoch, "epoch_end": epoch_end, "created": round(time.time(), 3)}
        waited_seconds = self._saving.begin(self._execution, self.iteration, extra, info)
        self._captured_iteration = self.iteration
        return waited_seconds

    def _raise_if_asked(self) -> None:
        error = self._saving.writer.take_error() or self._execution.take_error_in_compiling()
        if error is not None and self._on_error == "raise":
            raise error

    def _note_hold(self, phase: str, seconds: float) -> None:
        self._held[phase] += seconds
        self._longest_hold_seconds = max(self._longest_hold_seconds, seconds)

    # Resume

    def _resume(self, mode: str | int, plan: Plan | None) -> None:
        resumed = resume_from(
            self._store, mode, self._models, self._optimizers, self._objects,
            host_tensors=None if plan is None else plan.host_tensors,
        )  # fmt: skip
        if resumed is None:
            return
        self.iteration = self.resumed_from = resumed.extra["iteration"]
        self._progress.resume(resumed.extra)
        logger.info("resumed from step %d of %s", self.iteration, self._store.directory)
