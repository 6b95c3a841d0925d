"""Checkpointer: what a training script holds. It knows when boundaries are, and leaves the rest to its parts.

At each boundary that is captured: the capture in flight is brought to its end, then the next one begins
(:mod:`.capture`); anchors drive it through the plan's iterations (:mod:`.anchors`); the writer commits it
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
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import torch
from torch import nn

from checkflow import plan as plans
from checkflow.errors import CheckflowError, ConsistencyError, StorageError, UnsupportedError
from checkflow.graph import BOUNDARY, AnchorKey, AnchorKind
from checkflow.hardware import format_size
from checkflow.plan import Plan
from checkflow.runtime import extra_state, fit
from checkflow.runtime.anchors import AnchorHooks, Place, Sightings
from checkflow.runtime.barriers import compile_plan
from checkflow.runtime.capture import Capture, Capturer, CaptureReport
from checkflow.runtime.copy_engine import HostCopyEngine
from checkflow.runtime.live_state import (
    Stateful,
    StateWalk,
    capture_extra,
    capture_generators,
    restore_generators,
)
from checkflow.runtime.loader import DataLoader
from checkflow.runtime.opening import step_name
from checkflow.runtime.persist import Writer
from checkflow.runtime.reader import Checkpoint, open_checkpoint, recover
from checkflow.runtime.resume import restore
from checkflow.runtime.settled import WrittenError
from checkflow.runtime.store import Store
from checkflow.state import as_models, as_optimizers, collect_state

logger = logging.getLogger("checkflow")

# Set by the package's face: replays a plan before it is executed (the runtime knows nothing of the planner).
check_plan: Callable[[Plan], object] = plans.validate

FIRST_AUDITS = 3


class Checkpointer:
    """Makes a training job survive failures: consistent, durable checkpoints by a plan, and resume.

    Args:
        model, optimizer: one of each, or dicts of several.
        loader: a ``checkflow.DataLoader``; iterate ``checkpointer.loader`` instead of it.
        directory: where checkpoints go; made if it is missing.
        plan: a plan file, or a Plan, made for this job (``checkflow plan``).
        state: further objects with ``state_dict`` and ``load_state_dict``, by name (schedulers, scalers).
        every: iterations from one durable checkpoint to the next, a multiple of the plan's interval. Each is committed
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
        plan: Plan | str | os.PathLike[str],
        state: Mapping[str, Stateful] | None = None,
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
        self._plan = plan if isinstance(plan, Plan) else plans.load(plan)
        check_plan(self._plan)
        fit.check_every(every, self._plan.interval)
        self._every, self._on_error, self._audit_every = every, on_error, audit
        self._loader = loader
        self._walk = StateWalk(self._models, self._optimizers)
        fit.refuse_devices(self._models, self._optimizers)
        self._implementations = fit.implementations(self._models, self._optimizers)
        fit.refuse_other_job(self._plan, collect_state(self._models, {}), self._implementations)
        program = compile_plan(self._plan)

        self.iteration = 0
        self.resumed_from: int | None = None
        self._epoch = 0
        self._stepped: set[str] = set()
        self._explicit = self._in_steps = False
        self._began = False  # an iteration, since the last boundary
        # Version counters of all state at a boundary that was not captured, in case it is the last one.
        self._passed: list[int] = []
        self._left_epochs = False  # with ``break``, after the epoch's last batch
        # Loader epoch and position after each batch that was handed out and has not reached a step.
        self._positions: list[tuple[int, int]] = []
        self._loader_epoch = 0
        self._position = 0  # samples of this epoch that reached a step
        self._generators: Mapping[str, Any] | None = None  # to be restored when training goes on
        self._captures = self._aborted = 0
        self._distrusted = self._no_end_said = False
        self._sightings = Sightings()
        # What the plan's anchors do not tell: forwards that are not seen, and whether optimizers step unseen.
        self._unseen: tuple[frozenset[Place], bool] = (frozenset(), False)
        self._error_in_compiling: CheckflowError | None = None
        self._said = ""
        self._held = {"boundary": 0.0, "anchors": 0.0, "buffers": 0.0}
        self._longest_hold_seconds = 0.0
        self._closed = False

        with contextlib.ExitStack() as undo:
            self._store = Store(
                directory, run_id=uuid.uuid4().hex[:16], keep_latest=keep_latest, keep_epochs=keep_epochs
            )
            undo.callback(self._store.close)
            self._resume(resume)
            self._captured_iteration = self.iteration  # at the start there is nothing to save, after a resume it is
            self._engine = HostCopyEngine()
            undo.callback(self._engine.close)
            self._writer = Writer(self._commit, self._recycle, supersede=every is None)
            undo.callback(self._writer.close)
            self._capturer = Capturer(self._plan, program, self._walk, self._engine, host_buffers, self._writer.submit)
            self._guards = self._make_guards()
            self._keys = self._planned_keys()
            self._hooks = self._hook()
            self._hooked_state = self._walk.current()
            undo.pop_all()
        if loader is not None:
            loader.listener = self

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
        while self._epoch < count:
            loader.set_epoch(self._epoch, self._position)
            if self._position == 0 or loader.exhausted:  # no first batch will come, or code before it may draw numbers
                self._restore_generators()
            try:
                yield self._epoch
            except GeneratorExit:  # the loop was left with ``break``
                self._left_epochs = loader.exhausted
                self._leave_loop()
                raise
            self._end_epoch()
        self._leave_loop()
        self._restore_generators()  # a run that was finished already: what follows the loop sees them as it did then

    def _end_epoch(self) -> None:
        if self._explicit and self._positions:
            logger.warning(
                "%d batches of epoch %d were handed out and not counted by step(): after a resume they are used again; "
                "pass their number to step()",
                len(self._positions), self._epoch,
            )  # fmt: skip
        self._epoch += 1
        self._position = 0
        self._positions.clear()
        if not self._explicit:
            self._boundary(epoch_end=True)

    def steps(self, count: int) -> Iterator[int]:
        """Iterations from where the last run stopped up to ``count``, for loops without epochs."""
        self._in_steps = True
        while self.iteration < count:
            self._restore_generators()
            try:
                yield self.iteration
            except GeneratorExit:  # the loop was left with ``break``
                self._leave_loop()
                raise
            if not self._explicit:
                self._count_batches()
                self._boundary(last=self.iteration + 1 >= count)
        self._in_steps = False
        self._leave_loop()
        self._restore_generators()

    def _leave_loop(self) -> None:
        """No training follows to copy behind, and what does may write at no anchor: put the best weights back."""
        with self._surviving():
            self._capturer.finish()

    def step(self, batches: int | None = None) -> None:
        """Mark the boundary here: for loops that fetch batches ahead of using them.

        Args:
            batches: how many batches reached this step; None: as many as the plan has micro-batches.
        """
        self._explicit = True
        count = self._plan.fingerprint.micro_batches if batches is None else batches
        for _ in range(min(count, len(self._positions))):
            self._loader_epoch, self._position = self._positions.pop(0)
        self._boundary()

    def report(self) -> dict[str, Any]:
        """What checkpointing did and cost so far, in bytes and seconds."""
        writer, last = self._writer, self._capturer.last_report
        return {
            "iteration": self.iteration,
            "resumed_from": self.resumed_from,
            "captures": self._captures,
            "committed": writer.committed,
            "failed": writer.failed + self._aborted,
            "superseded": writer.superseded,
            "audited": writer.audited,
            "breaches": writer.breaches,
            "held_seconds": dict(self._held),
            "longest_hold_seconds": self._longest_hold_seconds,
            "last_persist_seconds": writer.last.seconds if writer.last else None,
            "checkpoint_bytes": writer.last.size_bytes if writer.last else None,
            "planned_peak_bytes": self._plan.plan_peak_bytes,
            "planned_stall_seconds": self._plan.stall_seconds,
            "snapshot_peak_bytes": last.statistics.snapshot_peak_bytes if last else 0,
            "boundary_bytes": last.boundary_bytes if last else 0,
        }

    @property
    def last_capture(self) -> CaptureReport | None:
        """The last capture that ended: its log of executed copies, and what it cost."""
        return self._capturer.last_report

    def close(self) -> None:
        """Finish and commit what is in flight, then give everything back: hooks, threads, memory, the lock.

        If it is interrupted, call it again.
        """
        self._close(raising=True)

    def _close(self, *, raising: bool) -> None:
        if self._closed:
            return
        try:
            self._hooks.remove()
            if self._loader is not None and self._loader.listener is self:
                self._loader.listener = None
                self._loader.epochs_counted_elsewhere = False
            # Whatever has not been copied yet has not been written either: the capture in flight can still be whole.
            with self._surviving():
                self._capturer.finish()
        except CheckflowError as error:
            if raising:
                raise
            logger.warning("%s", error)
        finally:
            self._writer.close()
            self._engine.close()
            self._capturer.close()
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

    def on_batch_handed(self) -> None:
        """The loader is about to hand out a batch."""
        assert self._loader is not None
        self._positions.append((self._loader.epoch, self._loader.position))
        self._restore_generators()

    def _on_forward(self) -> None:
        if self._loader is None:
            self._note_unseen_steps()
            if not self._explicit and not self._in_steps and self._stepped.issuperset(self._optimizers):
                self._boundary()
            self._restore_generators()

    def _on_training(self) -> None:
        self._began = True

    def _on_traced(self) -> None:
        """A hook is being compiled into code, which will write what was to be copied there."""
        try:
            with self._surviving():
                self._capturer.finish()
        except CheckflowError as error:  # nothing may be raised into the compiler
            self._error_in_compiling = error

    def _note_unseen_steps(self) -> None:
        if self._hooks.take_unseen_step():  # which optimizer it was is not known
            self._stepped.update(self._optimizers)

    def _miss_boundary(self) -> None:
        """An optimizer steps, and all have stepped: an iteration has ended that nobody saw the end of."""
        implicit = self._loader is None and not self._explicit and not self._in_steps
        if implicit and not self._no_end_said and self._stepped.issuperset(self._optimizers):
            self._no_end_said = True
            logger.warning(
                "no checkpoint is made: where an iteration ends is not seen, since no model that was passed runs "
                "forward in uncompiled code; iterate checkpointer.steps(n), or call checkpointer.step() after each"
            )

    def _on_anchor(self, key: AnchorKey) -> None:
        begun = time.perf_counter()
        if key.kind is AnchorKind.OPTIMIZER_PRE:
            self._miss_boundary()
        with self._surviving():
            self._guard(key)
        if key.kind is AnchorKind.OPTIMIZER_POST:
            self._stepped.add(key.name)
        self._note_hold("anchors", time.perf_counter() - begun)

    @contextlib.contextmanager
    def _surviving(self) -> Iterator[None]:
        """A fault of checkpointing voids the checkpoint under way and goes no further, unless errors are to be raised.

        Everything that runs inside the user's loop, forward, backward or step is run in this.
        """
        try:
            yield
        except Exception as error:
            step = self._capturer.step or self.iteration
            lost = self._capturer.abort()
            self._aborted += lost
            if isinstance(error, WrittenError):
                self._capturer.settled.drop([error.name])
            elif isinstance(error, ConsistencyError):
                self._distrust()
            if self._on_error == "raise":
                raise
            reason = " ".join(str(error).split())
            said = f"{type(error).__name__}: {reason}"
            if said != self._said:  # the same reason at every boundary is said once
                what = "is given up" if lost else "was complete before this"
                trace = None if isinstance(error, CheckflowError) else error
                logger.warning("the checkpoint of step %d %s: %s", step, what, said, exc_info=trace)
            self._said = said

    def _hook(self) -> AnchorHooks:
        return AnchorHooks(
            self._models, self._optimizers, self._keys, self._on_anchor, self._on_forward, self._on_training,
            self._on_traced, self._sightings,
        )  # fmt: skip

    def _planned_keys(self) -> list[AnchorKey]:
        """The anchors that have work, or guard buffers, in the job as it is now."""
        guards = fit.make_guards(self._plan, self._models, self._optimizers)
        return [*(key for _, key in compile_plan(self._plan).position), *guards.at_forward]

    def _make_guards(self) -> fit.Guards:
        return fit.make_guards(self._plan, self._models, self._optimizers, self._unseen[0])

    def _follow(self) -> None:
        """Put hooks on modules that took the place of others, or were compiled; a deadline would pass unseen."""
        state = self._walk.current()
        replaced = state is not self._hooked_state
        outdated = self._hooks.outdated(replaced=replaced)
        if replaced or outdated:
            with self._surviving():  # its last tensors might be written where no hook is any more
                self._capturer.finish()
            self._guards = self._make_guards()
            self._hooked_state = state
        if outdated:
            self._hooks.remove()
            try:
                self._keys = self._keys if self._distrusted else self._planned_keys()
                self._hooks = self._hook()
            except CheckflowError as error:
                logger.warning("the job no longer has what the plan was made for: %s", error)
                self._keys = []
                self._hooks = self._hook()
                self._distrust()

    def _distrust(self) -> None:
        if not self._distrusted:
            self._distrusted = True
            logger.error(
                "the plan does not fit this job: from now on all state is copied at each boundary, which holds "
                "training; make a new plan"
            )
            self._capturer.distrust()

    def _guard(self, key: AnchorKey) -> None:
        """Do what the plan, and caution beyond it, ask for before the job goes on from an anchor."""
        self._capturer.reached(key)
        if key in self._guards.at_forward:
            self._capturer.require(self._guards.at_forward[key])
        if key.kind is AnchorKind.OPTIMIZER_PRE:
            if fit.group_sizes(self._optimizers[key.name]) != self._guards.sizes[key.name]:  # gradual unfreezing
                self._guards = self._make_guards()
            late = self._guards.at_step[key.name]
            self._capturer.require([chunk for owner, chunk in late if owner is None or owner.grad is not None])
        elif key.kind is AnchorKind.OPTIMIZER_POST:
            # What follows (EMA, clamps, another optimizer) may write what no operator was seen to write.
            self._capturer.require_after_step()
            if self._optimizers.keys() <= self._stepped | {key.name}:
                self._capturer.complete_iteration()

    # Boundaries

    def _count_batches(self) -> None:
        """Every batch handed out so far has reached a step, if one was made."""
        self._note_unseen_steps()
        if self._stepped and self._positions:
            self._loader_epoch, self._position = self._positions[-1]
            self._positions.clear()

    def _boundary(self, *, epoch_end: bool = False, last: bool = False) -> None:
        """The state is now that of one more whole iteration.

        A boundary to be captured brings the capture in flight to its end first. Where that comes before the plan's
        interval is over (an epoch's end, the last iteration, and the first regular boundary after them), training waits
        for what is left of it.
        """
        self._note_unseen_steps()
        if not self._stepped:
            return
        begun = time.perf_counter()
        due = self._is_due(self.iteration + 1, extra=epoch_end or last)
        with self._surviving():
            if due:
                self._capturer.finish()
            else:
                self._capturer.go_on()
        self._stepped.clear()
        self._began = False
        self._follow()
        self._hooks.reset()
        self.iteration += 1
        self._raise_if_asked()
        self._heed_writer()
        if not due and self._every is None:
            self._passed = self._versions()
        waited_seconds = self._capture(epoch_end) if due else 0.0
        self._held["buffers"] += waited_seconds
        self._note_hold("boundary", time.perf_counter() - begun - waited_seconds)

    def _is_due(self, iteration: int, *, extra: bool) -> bool:
        """Whether a boundary is captured.

        Args:
            extra: whether it is the last one, or an epoch's: captured too, unless the user has said how often.
        """
        return iteration % (self._every or self._plan.interval) == 0 or (extra and self._every is None)

    def _capture_last_boundary(self) -> None:
        """Training has ended, and did not say so at its last boundary: save that if the state is still what it was.

        It is not where a further iteration has begun, nor where what followed the loop wrote (the best weights, put
        back), as far as version counters tell.
        """
        captured = self._captured_iteration == self.iteration
        if captured or self._stepped or self._began or not self._is_due(self.iteration, extra=True):
            return
        if self._versions() != self._passed:
            logger.warning("the state was changed after step %d, which is not saved therefore", self.iteration)
            return
        with self._surviving():
            self._capturer.finish()
        self._follow()
        self._heed_writer()
        self._held["buffers"] += self._capture(epoch_end=False)

    def _versions(self) -> list[int]:
        return [item.tensor._version for item in self._walk.current().tensors]

    def _heed_writer(self) -> None:
        """What its audits found out about the job."""
        self._capturer.settled.drop(self._writer.take_written())
        if self._writer.breaches and not self._distrusted:
            self._aborted += self._capturer.abort()  # one in flight was begun in the same way
            self._distrust()

    def _capture(self, epoch_end: bool) -> float:
        """Capture this boundary; returns the seconds waited for storage and buffers."""
        # The first capture tells whether the job can be checkpointed at all; later ones must not end it.
        with self._surviving() if self._captures else contextlib.nullcontext():
            return self._begin(epoch_end)
        return 0.0

    def _heed_anchors(self) -> None:
        """Execute the plan at the anchors that fire in this job, since others, in compiled code above all, do not."""
        unseen = self._hooks.silent, self._sightings.steps.known
        if unseen == self._unseen:
            return
        newly = unseen[0] - self._unseen[0]
        blind = unseen[1] and not self._unseen[1]
        self._unseen = unseen
        self._capturer.follow(compile_plan(self._plan, unseen[0], blind=unseen[1]))
        self._guards = self._make_guards()
        if blind:
            logger.warning(
                "an optimizer steps in code that is compiled in one piece, where nothing tells when: all state is "
                "copied at each boundary, which holds training; call optimizer.step() outside of it"
            )
        elif size := fit.bytes_due_at(self._plan, newly):
            logger.warning(
                "%s is due where modules run forward unseen (%s is the first), inside of compiled code or not run yet: "
                "it is copied earlier, which may hold training; where code is compiled, compile the model and pass "
                "what torch.compile returns, and make a new plan",
                format_size(size), min(newly)[1],
            )  # fmt: skip

    def _begin(self, epoch_end: bool) -> float:
        self._heed_anchors()
        extra = extra_state.encode(self._extra())
        audit = self._captures < FIRST_AUDITS or (self._audit_every and self._captures % self._audit_every == 0)
        info = {"epoch": self._epoch, "epoch_end": epoch_end, "created": round(time.time(), 3)}
        # One being gathered, one being committed, none queueing: that bounds what a failure can cost.
        waited_seconds = 0.0 if self._every is None else self._writer.wait_until_at_most(1)
        waited_seconds += self._capturer.begin(
            self.iteration, extra, info, audit=bool(audit), optimizers=self._implementations
        )
        self._captures += 1
        self._captured_iteration = self.iteration
        self._capturer.require(self._guards.at_forward.get(BOUNDARY, ()))
        return waited_seconds

    def _extra(self) -> dict[str, Any]:
        loader = None
        if self._loader is not None:
            epoch = self._epoch if self._loader.epochs_counted_elsewhere else self._loader_epoch
            loader = {**self._loader.state_dict(), "epoch": epoch, "position": self._position}
        return {
            "iteration": self.iteration,
            "epoch": self._epoch,
            "position": self._position,
            "loader": loader,
            "generators": capture_generators(),
            "job": capture_extra(self._walk, self._optimizers, self._objects),
        }

    def _commit(self, capture: Capture) -> Path:
        return self._store.commit(
            capture.step,
            capture.layout,
            capture.buffer.view,
            capture.extra,
            capture.info,
            ties=capture.ties,
            absent=capture.absent,
            plan_digest=self._plan.digest,
        )

    def _recycle(self, capture: Capture) -> None:
        self._capturer.recycle(capture)

    def _raise_if_asked(self) -> None:
        error = self._writer.take_error()
        if error is None:
            error, self._error_in_compiling = self._error_in_compiling, None
        if error is not None and self._on_error == "raise":
            raise error

    def _note_hold(self, phase: str, seconds: float) -> None:
        self._held[phase] += seconds
        self._longest_hold_seconds = max(self._longest_hold_seconds, seconds)

    # Resume

    def _resume(self, mode: str | int) -> None:
        if mode == "never":
            if found := self._store.checkpoints():
                raise StorageError(
                    f'resume="never", but {self._store.directory} holds {found[0].name}: choose another one'
                )
            return
        checkpoint = self._open(mode) if isinstance(mode, int) else recover(self._store)
        if checkpoint is None:
            if mode == "must":
                raise StorageError(f'resume="must", but {self._store.directory} holds no valid checkpoint')
            return
        with checkpoint:
            resumed = restore(
                checkpoint, self._models, self._optimizers, self._objects, host_tensors=self._plan.host_tensors
            )
        if isinstance(mode, int):
            self._store.rewind(mode)  # only now: what was refused must not have hidden anything
        extra = resumed.extra
        self.iteration = self.resumed_from = extra["iteration"]
        self._epoch, self._position, self._generators = extra["epoch"], extra["position"], extra["generators"]
        self._loader_epoch = extra["loader"]["epoch"] if extra["loader"] is not None else 0
        if self._loader is not None and extra["loader"] is not None:
            self._loader.load_state_dict(extra["loader"])
        logger.info("resumed from step %d of %s", self.iteration, self._store.directory)

    def _open(self, step: int) -> Checkpoint:
        """Exactly this checkpoint, verified."""
        for path in self._store.checkpoints():
            if path.name == step_name(step):
                checkpoint = open_checkpoint(path)
                checkpoint.verify()
                return checkpoint
        raise StorageError(f"resume={step}, but {self._store.directory} holds no checkpoint of that step")

    def _restore_generators(self) -> None:
        if self._generators is not None:
            restore_generators(self._generators)
            self._generators = None
