"""Checkpointer: what a training script holds: its arguments, its loops, its beginning and its end.

When boundaries are, and what is done at each, is :mod:`.boundaries`'.
"""

from __future__ import annotations

import contextlib
import logging
import os
import uuid
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any, Literal, Self

import torch
from torch import nn

from checkflow import plan as plans
from checkflow.errors import CheckflowError, PlanError, UnsupportedError
from checkflow.handover import Planner, Wishes
from checkflow.plan import Plan
from checkflow.runtime import fit
from checkflow.runtime.barriers import compile_plan
from checkflow.runtime.boundaries import Boundaries
from checkflow.runtime.capture import CaptureReport
from checkflow.runtime.job import Job
from checkflow.runtime.live_state import Stateful, StateWalk
from checkflow.runtime.loader import DataLoader
from checkflow.runtime.plan_cache import PlanCache
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
        models, optimizers = as_models(model), as_optimizers(optimizer)
        self._job = job = Job(models, optimizers, dict(state or {}), loader, StateWalk(models, optimizers))
        wishes = Wishes(fit.read_share(overhead), fit.read_size(extra_memory))
        given = None
        if plan is not None and plan != "auto":
            given = plan if isinstance(plan, Plan) else plans.load(plan)
            check_plan(given)
            fit.check_every(every, given.interval)
        fit.refuse_devices(models, optimizers)
        refuse_closures(optimizers)
        fit.refuse_objects(job.objects)
        if given is not None:
            implementations = fit.implementations(models, optimizers)
            fit.refuse_other_job(given, collect_state(models, {}), implementations)
            compile_plan(given)

        self.resumed_from: int | None = None
        self._progress = Progress(loader)
        self._closed = False
        with contextlib.ExitStack() as undo:
            self._store = Store(
                directory, run_id=uuid.uuid4().hex[:16], keep_latest=keep_latest, keep_epochs=keep_epochs
            )
            undo.callback(self._store.close)
            planning = None
            if given is None:
                cache = PlanCache(self._store.directory, wishes)
                planning = Planning(job, cache, make_planner(), check_plan, wishes, follow=plan == "auto")
            self._resume(resume, given)
            self._saving = Saving(self._store, each=every is not None, host_buffers=host_buffers, audit=audit)
            undo.callback(self._saving.close)
            self._boundaries = Boundaries(
                job, iteration=self.resumed_from or 0, progress=self._progress, saving=self._saving,
                given=given, planning=planning, every=every, raising=on_error == "raise",
            )  # fmt: skip
            undo.pop_all()
        if loader is not None:
            loader.listener = self._boundaries

    # What users call

    @property
    def loader(self) -> DataLoader:
        """The training loader; iterating it marks the boundaries."""
        if self._job.loader is None:
            raise UnsupportedError("this Checkpointer was made without a loader")
        return self._job.loader

    @property
    def iteration(self) -> int:
        """Iterations that are finished, over all runs of the job."""
        return self._boundaries.iteration

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
            # No first batch will come, or code before it may draw numbers.
            if progress.position == 0 or loader.exhausted:
                progress.restore_generators()
            try:
                yield progress.epoch
            except GeneratorExit:  # the loop was left with ``break``
                self._boundaries.leave_loop(in_epoch=True)
                raise
            self._boundaries.end_epoch()
        self._boundaries.leave_loop()
        # A run that was finished already: what follows the loop sees them as it did then.
        self._progress.restore_generators()

    def steps(self, count: int) -> Iterator[int]:
        """Iterations from where the last run stopped up to ``count``, for loops without epochs."""
        boundaries = self._boundaries
        boundaries.in_steps = True
        while self.iteration < count:
            self._progress.restore_generators()
            try:
                yield self.iteration
            except GeneratorExit:  # the loop was left with ``break``
                boundaries.leave_loop()
                raise
            boundaries.end_step(last=self.iteration + 1 >= count)
        boundaries.in_steps = False
        boundaries.leave_loop()
        self._progress.restore_generators()

    def step(self, batches: int | None = None) -> None:
        """Mark the boundary here: for loops that fetch batches ahead of using them.

        Args:
            batches: how many batches reached this step; None: as many as the plan has micro-batches (one, as long as a
                job that makes its own plan has none).
        """
        self._boundaries.step(batches)

    def report(self) -> dict[str, Any]:
        """What checkpointing did and cost so far, in bytes and seconds."""
        boundaries, last = self._boundaries, self.last_capture
        return {
            "iteration": self.iteration,
            "resumed_from": self.resumed_from,
            **self._saving.report(),
            "failed": self._saving.writer.failed + boundaries.place.aborted,
            "held_seconds": dict(boundaries.held_seconds),
            "longest_hold_seconds": boundaries.longest_hold_seconds,
            **boundaries.place.report(),
            "snapshot_peak_bytes": last.statistics.snapshot_peak_bytes if last else 0,
            "boundary_bytes": last.boundary_bytes if last else 0,
        }

    @property
    def last_capture(self) -> CaptureReport | None:
        """The last capture that ended: its log of executed copies, and what it cost."""
        return self._boundaries.execution.capturer.last_report

    def close(self) -> None:
        """Finish and commit what is in flight, then give everything back: hooks, threads, memory, the lock.

        If it is interrupted, call it again.
        """
        self._close(raising=True)

    def _close(self, *, raising: bool) -> None:
        if self._closed:
            return
        loader = self._job.loader
        if loader is not None and loader.listener is self._boundaries:
            loader.listener = None
            loader.epochs_counted_elsewhere = False
            loader.end_workers()
        try:
            self._boundaries.close()
        except CheckflowError as error:
            if raising:
                raise
            logger.warning("%s", error)
        finally:
            self._saving.close()
            self._store.close()
            self._closed = True
        if raising:
            self._boundaries.raise_if_asked()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None and not self._closed:
                self._boundaries.end_training()
        finally:
            self._close(raising=kind is None)

    def _resume(self, mode: str | int, plan: Plan | None) -> None:
        job = self._job
        resumed = resume_from(
            self._store, mode, job.models, job.optimizers, job.objects,
            host_tensors=None if plan is None else plan.host_tensors,
        )  # fmt: skip
        if resumed is None:
            return
        self.resumed_from = resumed.extra["iteration"]
        self._progress.resume(resumed.extra)
        logger.info("resumed from step %d of %s", self.resumed_from, self._store.directory)
