"""A plan at work in a live job: its hooks, its guards, and the captures that it gathers.

The Checkpointer says when boundaries are and which of them are captured; this does at each anchor what the plan, and
caution beyond it, ask for. Everything that runs inside the user's loop, forward, backward or step is run in
:meth:`Execution.surviving`: a fault of checkpointing voids the checkpoint under way and goes no further.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Protocol

from checkflow.core.device import format_size
from checkflow.core.errors import CheckflowError, ConsistencyError
from checkflow.core.graph import BOUNDARY, AnchorKey, AnchorKind
from checkflow.core.plan import Certificate, Fingerprint, Plan
from checkflow.core.timeline import Step, Timeline
from checkflow.runtime.job import compatibility
from checkflow.runtime.job.job import Job
from checkflow.runtime.memory_tier.staging import StagingBuffers
from checkflow.runtime.snapshot.anchors import AnchorHooks, Place, Sightings
from checkflow.runtime.snapshot.capturer import Capture, Capturer
from checkflow.runtime.snapshot.program import Program, compile_plan
from checkflow.runtime.snapshot.unwritten import WrittenError
from checkflow.runtime.system.signals import raised_by_handler
from checkflow.runtime.transfer.engine import CopyEngine

logger = logging.getLogger("checkflow")


#: What runs as long as a job has no plan: nothing is scheduled, all state is copied at the boundary itself.
UNPLANNED = Plan(
    fingerprint=Fingerprint("", (), (), (), 1, "", (), ""),
    policy="direct",
    bandwidth_bytes_per_second=1.0,
    unit_bytes=1,
    timeline=Timeline("segment", (Step("anchor", str(BOUNDARY), 0.0, 0, anchor=BOUNDARY),), ()),
    chunks=(),
    graph_peak_bytes=0,
    plan_peak_bytes=0,
    stall_seconds=0.0,
    interval=1,
    certificate=Certificate("feasible", "none", "none", "", 0, 0),
)


class Listener(Protocol):
    """Whom the hooks call: the Checkpointer, which times them and finds boundaries."""

    @property
    def iteration(self) -> int: ...  # finished so far
    @property
    def stepped(self) -> Collection[str]: ...  # optimizers, since the last boundary
    def on_stepped(self, optimizer: str) -> None: ...
    def on_anchor(self, key: AnchorKey) -> None: ...
    def on_forward(self, model: str, arguments: Any) -> None: ...
    def on_training(self) -> None: ...
    def on_evaluation(self) -> None: ...


class Execution:
    """One plan in one job, from the boundary at which it is put in place.

    Args:
        program: the plan, compiled.
        implementations: of the optimizers by name, as plans name them.
        deliver: takes each complete capture, on any thread.
        raising: whether a fault is raised inside the user's loop, after it has been dealt with.
        known_to_fit, resumed: as in :class:`.capturer.Capturer`.
        sightings: what is known of the job's anchors; it outlives one plan.

    Raises:
        MismatchError: the plan has an anchor that the job does not have.
        StorageError: no host memory for the staging buffers.
    """

    def __init__(
        self,
        plan: Plan,
        program: Program,
        job: Job,
        engine: CopyEngine,
        buffers: StagingBuffers,
        deliver: Callable[[Capture], None],
        listener: Listener,
        *,
        implementations: Mapping[str, str],
        raising: bool,
        known_to_fit: bool = False,
        resumed: bool = False,
        sightings: Sightings | None = None,
    ) -> None:
        self.plan = plan
        self._sightings = Sightings() if sightings is None else sightings
        # What the plan's anchors do not tell: forwards that are not seen, and whether optimizers step unseen.
        self._unseen: tuple[frozenset[Place], bool] = (frozenset(), False)
        self._told: frozenset[Place] = frozenset()  # anchors that the log has called silent
        self._fired = self._whole = False  # an anchor, and a whole iteration, under these hooks
        self._error_in_compiling: CheckflowError | None = None
        # Backward of what lies on a GPU and of what lies in host memory run on two threads at once.
        self._one_hook = threading.RLock()
        self._models, self._optimizers, self._walk = job.models, job.optimizers, job.walk
        self._implementations, self._listener, self._raising = implementations, listener, raising
        self.capturer = Capturer(
            plan,
            program if job.optimizers else self._compile(),
            job.walk,
            engine,
            buffers,
            deliver,
            known_to_fit=known_to_fit,
            resumed=resumed,
            at_boundary=plan is UNPLANNED,
        )
        self.captures = self.aborted = 0
        self.distrusted = False
        self._said = ""
        self.last_failure: tuple[float, str] | None = None  # when, by time.monotonic, and why
        self._guards = self._make_guards()
        self._keys = self._planned_keys()
        self._hooks = self._hook()
        self._hooked_state = job.walk.current()

    @contextlib.contextmanager
    def surviving(self) -> Iterator[None]:
        """A fault of checkpointing voids the checkpoint under way and no more, unless errors are to be raised.

        What a signal's handler raises meanwhile voids it, too, and goes on to training, whose it is.
        """
        try:
            yield
        except Exception as error:
            if self._give_up(error):
                raise

    def _give_up(self, error: Exception) -> bool:
        """Void the checkpoint under way, for this reason; returns whether that is training's to know."""
        step = self.capturer.step or self._listener.iteration
        lost = self.capturer.abort()
        if isinstance(error, WrittenError):
            self.capturer.settled.drop([error.name])
        elif isinstance(error, ConsistencyError):
            self._distrust()
        self._note(step, error, lost=lost)
        return self._raising or raised_by_handler(error)

    def _note(self, step: int, error: Exception, *, lost: bool) -> None:
        """Count what went wrong with a checkpoint, and say it, unless it is to be raised."""
        reason = " ".join(str(error).split())
        said = f"{type(error).__name__}: {reason}"
        if lost:
            self.aborted += 1
            self.last_failure = (time.monotonic(), said)
        if not self._raising and said != self._said:  # the same reason at every boundary is said once
            what = "is given up" if lost else "was complete before this"
            trace = None if isinstance(error, CheckflowError) else error
            logger.warning("the checkpoint of step %d %s: %s", step, what, said, exc_info=trace)
        self._said = said

    def _note_failed(self) -> None:
        """Of concluded captures: what did not arrive voids its own checkpoint, and none that is in flight."""
        failed = self.capturer.take_failed()
        for step, error in failed:
            self._note(step, error, lost=True)
        if failed and self._raising:
            raise failed[0][1]

    def reached(self, key: AnchorKey) -> None:
        """An anchor fired: do what the plan, and caution beyond it, ask for before the job goes on from it."""
        self._fired = True
        if self.capturer.gathering:
            with self._one_hook:
                try:
                    self._guard(key)
                except Exception as error:
                    if self._give_up(error):
                        raise
        if key.kind is AnchorKind.OPTIMIZER_POST:
            self._listener.on_stepped(key.name)
            self.capturer.note()  # what has written, and what the loop may write next

    def end_iteration(self, *, due: bool, quiet: bool) -> None:
        """A boundary: the capture in flight goes on, or is brought to its end if another one is due.

        Args:
            quiet: no copy goes on behind this boundary: the host waits for its end.
        """
        with self.surviving():
            if quiet:
                self.capturer.finish()
            elif due:
                self.capturer.conclude()
            else:
                self.capturer.go_on()
        self._note_failed()
        self._whole = self._whole or self._fired
        self.follow(idle=not (due or self.capturer.step is not None))
        self._hooks.reset()

    def finish(self) -> None:
        """Bring the capture in flight to its end, and wait for those before it."""
        with self._one_hook, self.surviving():
            self.capturer.finish()
        self._note_failed()

    def follow(self, *, idle: bool = False) -> None:
        """Put hooks on modules that took the place of others, or were compiled; a deadline would pass unseen.

        Args:
            idle: there is no deadline until this is called again: what took others' place has time until then.
        """
        state = self._hooked_state if idle else self._walk.current()
        replaced = state is not self._hooked_state
        outdated = self._hooks.outdated(replaced=replaced)
        if replaced or outdated:
            self.finish()  # its last tensors might be written where no hook is any more
            self._guards = self._make_guards()
            self._hooked_state = state
        if outdated:
            self._fired = self._whole = False
            self._hooks.remove()
            try:
                self._keys = self._keys if self.distrusted else self._planned_keys()
                self._hooks = self._hook()
            except CheckflowError as error:
                logger.warning("the job no longer has what the plan was made for: %s", error)
                self._keys = []
                self._hooks = self._hook()
                self._distrust()

    def take_error_in_compiling(self) -> CheckflowError | None:
        """What could not be raised into the compiler."""
        error, self._error_in_compiling = self._error_in_compiling, None
        return error

    def apply_audits(self, written: Collection[str], breached_plans: Collection[str]) -> None:
        """Act on what audits found since the last call.

        Args:
            written: tensors that the plan calls unwritten, and that were written.
            breached_plans: digests of the plans that an audit refuted.
        """
        self.capturer.settled.drop(written)
        if self.plan.digest in breached_plans and not self.distrusted:
            self.aborted += self.capturer.abort()  # one in flight was begun in the same way
            self._distrust()

    def prepare(self) -> None:
        """Make room for captures of the state as it is now; see :meth:`.capturer.Capturer.prepare`."""
        self.capturer.prepare(self._implementations)

    def begin(self, step: int, extra: bytes | Callable[[], bytes], info: Mapping[str, Any], *, audit: bool) -> float:
        """Start the capture of this boundary; see :meth:`.capturer.Capturer.begin`."""
        self._follow_anchors()
        waited_seconds = self.capturer.begin(step, extra, info, audit=audit, optimizers=self._implementations)
        self.captures += 1
        self.capturer.require(self._guards.at_forward.get(BOUNDARY, ()))
        return waited_seconds

    def remove_hooks(self) -> None:
        self._hooks.remove()

    def _hook(self) -> AnchorHooks:
        listener = self._listener
        return AnchorHooks(
            self._models, self._optimizers, self._keys,
            listener.on_anchor, listener.on_forward, listener.on_training, listener.on_evaluation,
            self._on_traced, self._on_repeated, self._sightings,
        )  # fmt: skip

    def _on_repeated(self, optimizer: str) -> None:
        """Parameters are written at moments that no anchor tells: nothing is copied later than at the boundary."""
        if optimizer not in self._sightings.repeated:
            self._sightings.repeated.add(optimizer)
            logger.warning(
                "optimizer %s does not run its closure just once in a step, so that there is no plan for it: from now "
                "on all state is copied at each boundary that is saved, which holds training",
                optimizer,
            )  # fmt: skip
        if self.plan is UNPLANNED or self.distrusted:
            return
        with self._one_hook, self.surviving():
            step = self.capturer.step
            if step is not None and self.capturer.abort():
                self.aborted += 1
                self.last_failure = (time.monotonic(), f"optimizer {optimizer} wrote before all was copied")
            self.distrusted = True
            self.capturer.distrust()

    def _on_traced(self) -> None:
        """A hook is being compiled into code, which will write what was to be copied there."""
        try:
            self.finish()
        except CheckflowError as error:  # nothing may be raised into the compiler
            self._error_in_compiling = error

    def _planned_keys(self) -> list[AnchorKey]:
        """The anchors that have work, or guard buffers, in the job as it is now."""
        guards = compatibility.make_guards(self.plan, self._models, self._optimizers)
        return [*(key for _, key in compile_plan(self.plan).position), *guards.at_forward]

    def _make_guards(self) -> compatibility.Guards:
        return compatibility.make_guards(self.plan, self._models, self._optimizers, self._unseen[0])

    def _follow_anchors(self) -> None:
        """Execute the plan at the anchors that fire in this job, since others, in compiled code above all, do not."""
        unseen = self._hooks.silent, self._sightings.steps.known
        blind = unseen[1] and not self._unseen[1]
        if unseen != self._unseen:
            self._unseen = unseen
            self.capturer.follow(self._compile())
            self._guards = self._make_guards()
        newly = unseen[0] - self._told if self._whole else frozenset()
        self._told |= newly
        if blind:
            logger.warning(
                "an optimizer steps in code that is compiled in one piece, where nothing tells when: all state is "
                "copied at each boundary, which holds training; call optimizer.step() outside of it"
            )
        elif not unseen[1] and (size := compatibility.bytes_due_at(self.plan, newly)):
            logger.warning(
                "%s is due where modules run forward unseen (%s is the first), inside of compiled code or not run yet: "
                "it is copied earlier, which may hold training; where code is compiled, compile the model and pass "
                "what torch.compile returns, and make a new plan",
                format_size(size), min(newly)[1],
            )  # fmt: skip

    def _compile(self) -> Program:
        """The plan's work at the anchors that fire. Without optimizers none tells when what seems unwritten is safe."""
        silent, blind = self._unseen
        return compile_plan(self.plan, silent, blind=blind, undated_at_boundary=not self._optimizers)

    @property
    def repeated(self) -> Collection[str]:
        """The optimizers for which there is no plan, by how they run their closures."""
        return self._sightings.repeated

    @property
    def hooks(self) -> AnchorHooks:
        """Those that hang in the job now."""
        return self._hooks

    def _distrust(self) -> None:
        if not self.distrusted:
            self.distrusted = True
            logger.error(
                "the plan does not fit this job: from now on all state is copied at each boundary, which holds "
                "training; make a new plan"
            )
            self.capturer.distrust()

    def _guard(self, key: AnchorKey) -> None:
        capturer = self.capturer
        capturer.reached(key)
        if guarded := self._guards.at_forward.get(key):
            capturer.require(guarded)
        if key.kind is AnchorKind.OPTIMIZER_PRE:
            sizes = compatibility.group_sizes(self._optimizers[key.name])
            if sizes != self._guards.sizes[key.name]:  # gradual unfreezing
                self._guards = self._make_guards()
            late = self._guards.at_step[key.name]
            capturer.require([chunk for owner, chunk in late if owner is None or owner.grad is not None])
        elif key.kind is AnchorKind.OPTIMIZER_POST:
            # What follows (EMA, clamps, another optimizer) may write what no operator was seen to write.
            capturer.require_after_step()
            if self._optimizers.keys() <= {*self._listener.stepped, key.name}:
                capturer.complete_iteration()
