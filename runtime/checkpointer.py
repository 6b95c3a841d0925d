"""Checkpointer: what a training script holds. It knows when boundaries are, and leaves the rest to its parts.

At each boundary: the capture in flight is brought to its end, then the next one begins (:mod:`.capture`); anchors drive
it through the iteration (:mod:`.anchors`); the writer commits it (:mod:`.persist`, :mod:`.store`).

Where the boundary is: when the loader is asked for a batch after an optimizer step, so that whatever the loop did
after ``optimizer.step()`` (scheduler, EMA, clamps, validation) belongs to the finished iteration. After an epoch's last
batch: when ``epochs()`` is advanced, or the ``with`` block ends without an exception. ``step()`` marks it explicitly.
Without a loader and without ``step()``: when ``steps()`` is advanced, or at the first training forward after every
optimizer has stepped.
"""

from __future__ import annotations

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
from checkflow.errors import CheckflowError, MismatchError, StorageError, UnsupportedError
from checkflow.graph import AnchorKey, AnchorKind
from checkflow.plan import Plan
from checkflow.runtime import extra_state
from checkflow.runtime.anchors import AnchorHooks
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
from checkflow.runtime.persist import Writer
from checkflow.runtime.reader import recover
from checkflow.runtime.resume import restore
from checkflow.runtime.store import Store
from checkflow.state import (
    as_models,
    as_optimizers,
    collect_state,
    optimizer_implementation,
    optimizer_parameters,
)

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
        every: iterations from one durable checkpoint to the next, each of them committed, training waiting if storage
            is slower. None: every boundary is captured in host memory as planned, and storage takes the newest as fast
            as it goes.
        host_buffers: staging buffers of the size of the state; three let capture and persist overlap fully.
        keep_latest: how many of the newest checkpoints stay on storage, at least 2.
        keep_epochs: whether the ones made at the ends of epochs stay too.
        resume: "auto" goes on from the newest valid checkpoint if there is one, "must" demands one, "never" demands an
            empty directory.
        on_error: a checkpoint that fails is logged ("warn"), or raised at the next boundary ("raise").
        audit: hold staged bytes against the state at the boundary on the first three checkpoints, after every change
            of layout, and then on every ``audit``-th; 1: all, 0: none but those.

    Raises:
        PlanError, MismatchError: the plan is damaged, cannot be executed, or was made for another job.
        StorageError, LockedError: the directory cannot be written, or another process writes there.
        UnsupportedError: something on the list of refusals.
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
        resume: Literal["auto", "never", "must"] = "auto",
        on_error: Literal["warn", "raise"] = "warn",
        audit: int = 100,
    ) -> None:
        _check_arguments(loader, every, host_buffers, resume, on_error, audit)
        self._models, self._optimizers = as_models(model), as_optimizers(optimizer)
        self._objects = dict(state or {})
        self._plan = plan if isinstance(plan, Plan) else plans.load(plan)
        check_plan(self._plan)
        self._every, self._on_error, self._audit_every = every, on_error, audit
        self._loader = loader
        self._walk = StateWalk(self._models, self._optimizers)
        self._refuse_device()
        self._implementations = {
            name: optimizer_implementation(one, _device_type(self._models)) for name, one in self._optimizers.items()
        }
        self._refuse_other_models()
        program = compile_plan(self._plan)

        self.iteration = 0
        self.resumed_from: int | None = None
        self._epoch = 0
        self._stepped: set[str] = set()
        self._explicit = False
        self._positions: list[int] = []  # loader positions of batches handed out and not yet counted (step() only)
        self._position = 0  # samples of this epoch that reached a step
        self._generators: Mapping[str, Any] | None = None  # to be restored when training goes on
        self._captures = self._aborted = 0
        self._held = {"boundary": 0.0, "anchors": 0.0, "buffers": 0.0}
        self._longest_hold_seconds = 0.0
        self._closed = False

        self._store = Store(directory, run_id=uuid.uuid4().hex[:16], keep_latest=keep_latest, keep_epochs=keep_epochs)
        try:
            self._resume(resume)
            self._hooks = AnchorHooks(
                self._models,
                self._optimizers,
                [work.key for work in program.works],
                self._on_anchor,
                self._on_forward if loader is None else None,
            )
        except BaseException:
            self._store.close()
            raise
        self._engine = HostCopyEngine()
        self._writer = Writer(self._commit, self._recycle, supersede=every is None)
        self._capturer = Capturer(self._plan, program, self._walk, self._engine, host_buffers, self._writer.submit)
        self._undated = self._undated_parameters()
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
            yield self._epoch
            self._epoch += 1
            self._position = 0
            self._positions.clear()
            if not self._explicit:
                self._boundary(epoch_end=True)

    def steps(self, count: int) -> Iterator[int]:
        """Iterations from where the last run stopped up to ``count``, for loops without epochs."""
        while self.iteration < count:
            self._restore_generators()
            yield self.iteration
            if not self._explicit:
                self._count_batches()
                self._boundary()

    def step(self) -> None:
        """Mark the boundary here: for loops that fetch batches ahead of using them.

        One call counts as many batches as the plan has micro-batches.
        """
        self._explicit = True
        for _ in range(self._plan.fingerprint.micro_batches):
            if self._positions:
                self._position = self._positions.pop(0)
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
        """Finish and commit what is in flight, then give everything back: hooks, threads, memory, the lock."""
        if self._closed:
            return
        self._closed = True
        try:
            self._hooks.remove()
            if self._loader is not None and self._loader.listener is self:
                self._loader.listener = None
                self._loader.epochs_counted_elsewhere = False
            # Whatever has not been copied yet has not been written either: the capture in flight can still be whole.
            self._capturer.finish()
            self._writer.close()
        finally:
            self._engine.close()
            self._capturer.close()
            self._store.close()
        self._raise_if_asked()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None and not self._explicit and not self._closed:
            self._count_batches()
            self._boundary()
        self.close()

    # What the loader and the hooks call

    def on_batch_requested(self) -> None:
        """The loader is asked for a batch that it has."""
        if not self._explicit:
            self._count_batches()
            self._boundary()

    def on_batch_handed(self) -> None:
        """The loader is about to hand out a batch."""
        assert self._loader is not None
        self._positions.append(self._loader.position)
        self._restore_generators()

    def _on_forward(self) -> None:
        if not self._explicit and self._stepped.issuperset(self._optimizers):
            self._boundary()
        self._restore_generators()

    def _on_anchor(self, key: AnchorKey) -> None:
        begun = time.perf_counter()
        try:
            self._guard(key)
        except Exception:
            # The hook runs inside the user's forward, backward or step: a fault of ours must not surface there.
            self._capturer.abort()
            self._aborted += 1
            if self._on_error == "raise":
                raise
            logger.exception("the checkpoint of step %d is given up, training goes on", self.iteration)
        if key.kind is AnchorKind.OPTIMIZER_POST:
            self._stepped.add(key.name)
        self._note_hold("anchors", time.perf_counter() - begun)

    def _guard(self, key: AnchorKey) -> None:
        """Do what the plan, and caution beyond it, ask for before the job goes on from an anchor."""
        self._capturer.reached(key)
        if key.kind is AnchorKind.OPTIMIZER_PRE:
            due = [name for name, parameter in self._undated.get(key.name, ()) if parameter.grad is not None]
            if due:
                self._capturer.require_undated(due)
        elif key.kind is AnchorKind.OPTIMIZER_POST:
            # What follows (EMA, clamps, another optimizer) may write what no operator was seen to write.
            self._capturer.require_undated()
            if self._optimizers.keys() <= self._stepped | {key.name}:
                self._capturer.release_all()

    # Boundaries

    def _count_batches(self) -> None:
        """Every batch handed out so far has reached a step, if one was made."""
        if self._stepped and self._positions:
            self._position = self._positions[-1]
            self._positions.clear()

    def _boundary(self, *, epoch_end: bool = False) -> None:
        if not self._stepped:
            return
        begun = time.perf_counter()
        self._capturer.finish()
        self._stepped.clear()
        self._hooks.reset()
        self.iteration += 1
        self._raise_if_asked()
        waited_seconds = 0.0
        if self.iteration % (self._every or self._plan.interval) == 0:
            waited_seconds = self._capture(epoch_end)
        self._held["buffers"] += waited_seconds
        self._note_hold("boundary", time.perf_counter() - begun - waited_seconds)

    def _capture(self, epoch_end: bool) -> float:
        try:
            extra = extra_state.encode(self._extra())
            audit = self._captures < FIRST_AUDITS or (self._audit_every and self._captures % self._audit_every == 0)
            info = {"epoch": self._epoch, "epoch_end": epoch_end, "created": round(time.time(), 3)}
            waited_seconds = self._capturer.begin(
                self.iteration, extra, info, audit=bool(audit), optimizers=self._implementations
            )
        except CheckflowError as error:
            # The first capture tells whether the job can be checkpointed at all; later ones must not end it.
            if self._captures == 0 or self._on_error == "raise":
                raise
            logger.warning("no checkpoint of step %d, training goes on: %s", self.iteration, error)
            return 0.0
        self._captures += 1
        return waited_seconds

    def _extra(self) -> dict[str, Any]:
        loader = None
        if self._loader is not None:
            loader = {**self._loader.state_dict(), "epoch": self._epoch, "position": self._position}
            if not self._loader.epochs_counted_elsewhere:
                loader["epoch"] = self._loader.epoch
        return {
            "iteration": self.iteration,
            "epoch": self._epoch,
            "position": self._position,
            "loader": loader,
            "generators": capture_generators(),
            "job": capture_extra(self._models, self._optimizers, self._objects),
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
        if error is not None and self._on_error == "raise":
            raise error

    def _note_hold(self, phase: str, seconds: float) -> None:
        self._held[phase] += seconds
        self._longest_hold_seconds = max(self._longest_hold_seconds, seconds)

    # Resume

    def _resume(self, mode: str) -> None:
        if mode == "never":
            if found := self._store.checkpoints():
                raise StorageError(
                    f'resume="never", but {self._store.directory} holds {found[0].name}: choose another one'
                )
            return
        checkpoint = recover(self._store)
        if checkpoint is None:
            if mode == "must":
                raise StorageError(f'resume="must", but {self._store.directory} holds no valid checkpoint')
            return
        with checkpoint:
            resumed = restore(
                checkpoint, self._models, self._optimizers, self._objects, host_tensors=self._plan.host_tensors
            )
        extra = resumed.extra
        self.iteration = self.resumed_from = extra["iteration"]
        self._epoch, self._position, self._generators = extra["epoch"], extra["position"], extra["generators"]
        if self._loader is not None and extra["loader"] is not None:
            self._loader.load_state_dict(extra["loader"])
        logger.info("resumed from step %d of %s", self.iteration, self._store.directory)

    def _restore_generators(self) -> None:
        if self._generators is not None:
            restore_generators(self._generators)
            self._generators = None

    # Refusals

    def _refuse_device(self) -> None:
        for item in collect_state(self._models, self._optimizers).tensors:
            if item.tensor.device.type != "cpu":
                raise UnsupportedError(f"{item.name} lies on {item.tensor.device}: this version trains on the CPU only")

    def _refuse_other_models(self) -> None:
        """Hold parameters and buffers against the plan; optimizer state may not exist before the first step."""
        live = collect_state(self._models, {})
        names = {item.name: (tuple(item.tensor.shape), str(item.tensor.dtype)[6:]) for item in live.tensors}
        rest = {
            spec.name: (spec.shape, spec.dtype)
            for spec in self._plan.fingerprint.state
            if spec.name.partition("/")[0] in self._optimizers
        }
        if lines := plans.describe_mismatch(self._plan, {**rest, **names}, self._implementations):
            more = f" (and {len(lines) - 1} more differences)" if len(lines) > 1 else ""
            raise MismatchError(f"the plan was made for another job: {lines[0]}{more}; make a new one: checkflow plan")

    def _undated_parameters(self) -> dict[str, list[tuple[str, torch.Tensor]]]:
        """By optimizer: parameters that it could write although the plan saw no write (they were frozen then)."""
        undated = {name for name, deadline in self._plan.deadlines.items() if deadline is None}
        found: dict[str, list[tuple[str, torch.Tensor]]] = {}
        for owner, optimizer in self._optimizers.items():
            managed = {id(parameter) for _, parameter in optimizer_parameters(self._models, optimizer)}
            found[owner] = [
                (item.name, item.tensor)
                for item in collect_state(self._models, {}).tensors
                if item.name in undated and id(item.tensor) in managed
            ]
        return found


def _device_type(models: Mapping[str, nn.Module]) -> str:
    return next((parameter.device.type for model in models.values() for parameter in model.parameters()), "cpu")


def _check_arguments(
    loader: object, every: object, host_buffers: object, resume: object, on_error: object, audit: object
) -> None:
    if loader is not None and not isinstance(loader, DataLoader):
        raise UnsupportedError(
            f"loader is a {type(loader).__name__}: pass a checkflow.DataLoader (it has the arguments of torch's), "
            "or none and iterate checkpointer.steps()"
        )
    if every is not None and (isinstance(every, bool) or not isinstance(every, int) or every < 1):
        raise ValueError(f"every must be a whole number of iterations, at least 1, or None, not {every!r}")
    if isinstance(host_buffers, bool) or not isinstance(host_buffers, int) or host_buffers < 1:
        raise ValueError(f"host_buffers must be a whole number of at least 1, not {host_buffers!r}")
    if resume not in ("auto", "never", "must"):
        raise ValueError(f'resume must be "auto", "never" or "must", not {resume!r}')
    if on_error not in ("warn", "raise"):
        raise ValueError(f'on_error must be "warn" or "raise", not {on_error!r}')
    if isinstance(audit, bool) or not isinstance(audit, int) or audit < 0:
        raise ValueError(f"audit must be a whole number of at least 0, not {audit!r}")
