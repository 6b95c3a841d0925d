"""Runs a plan in a live job: its hooks, its guards, and its captures.

All that runs inside the user's loop, forward, backward or step runs in :meth:`Execution.surviving`: a fault of
checkpointing voids the checkpoint under way and nothing else.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from checkflow.anchors.occurrences import Place
from checkflow.anchors.stream import AnchorStream, Subscriber
from checkflow.core.errors import CheckflowError, ConsistencyError
from checkflow.core.graph import BOUNDARY, AnchorKey, AnchorKind
from checkflow.core.plan import Certificate, Fingerprint, Plan
from checkflow.core.timeline import Step, Timeline
from checkflow.core.units import format_size
from checkflow.runtime.job import compatibility
from checkflow.runtime.job.job import Job
from checkflow.runtime.memory_tier.staging import StagingBuffers
from checkflow.runtime.snapshot.capturer import Capture, Capturer
from checkflow.runtime.snapshot.program import Program, compile_plan
from checkflow.runtime.snapshot.share import RankShare
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


class Execution:
    """One plan in one job, from the boundary at which it is installed. MismatchError if the job lacks an anchor of it.

    Args:
        implementations: of the optimizers by name, as plans name them.
        deliver: takes each complete capture, on any thread.
        stream: of the job's anchors; outlives one plan.
        iteration: returns the number of the last one that is finished.
        stepped: the optimizers that have stepped since the last boundary; changes as training goes on.
        holding: returns a context in which an anchor's work holds training.
        raising: whether a fault is raised inside the user's loop, after it was handled.
        share: what this rank copies.
    """

    def __init__(
        self,
        plan: Plan,
        program: Program,
        job: Job,
        engine: CopyEngine,
        buffers: StagingBuffers,
        deliver: Callable[[Capture], None],
        stream: AnchorStream,
        *,
        iteration: Callable[[], int],
        stepped: Collection[str],
        holding: Callable[[], contextlib.AbstractContextManager[object]],
        implementations: Mapping[str, str],
        raising: bool,
        known_to_fit: bool = False,
        resumed: bool = False,
        share: RankShare,
    ) -> None:
        self.plan = plan
        self.stream = stream
        # Forward anchors that do not fire, and whether optimizers step unseen.
        self._unseen: tuple[frozenset[Place], bool] = (frozenset(), False)
        self._logged_silent: frozenset[Place] = frozenset()  # silent anchors that were logged
        self._fired = self._whole = False  # an anchor has fired, an iteration has passed, under these hooks
        self._graphs: weakref.WeakSet[Any] = weakref.WeakSet()  # CUDA graphs that were replayed under this plan
        self._error_in_compiling: CheckflowError | None = None
        # Backward of GPU tensors and of host tensors runs on two threads at once.
        self._one_hook = threading.RLock()
        self._models, self._optimizers, self._walk = job.models, job.optimizers, job.walk
        self._implementations, self._raising = implementations, raising
        self._iteration, self._stepped, self._holding = iteration, stepped, holding
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
            share=share,
        )
        self.captures = self.aborted = 0
        self.distrusted = False
        self._said = ""
        self.last_failure: tuple[float, str] | None = None  # time.monotonic, and the reason
        self._guards = self._make_guards()
        self._keys = self._planned_keys()
        job.walk.current()
        self._hooked = job.walk.outer
        self._subscribe()

    @contextlib.contextmanager
    def surviving(self) -> Iterator[None]:
        """Let a fault of checkpointing void only the checkpoint under way; a signal handler's error goes on to
        training.
        """
        try:
            yield
        except Exception as error:
            if self._give_up(error):
                raise

    def _give_up(self, error: Exception) -> bool:
        """Void the checkpoint under way; returns whether to raise the error to training."""
        step = self.capturer.step or self._iteration()
        lost = self.capturer.abort()
        if isinstance(error, WrittenError):
            self.capturer.settled.drop([error.name])
        elif isinstance(error, ConsistencyError):
            self._distrust()
        self._note(step, error, lost=lost)
        return self._raising or raised_by_handler(error)

    def _note(self, step: int, error: Exception, *, lost: bool) -> None:
        """Count and log a checkpoint's failure, unless it will be raised."""
        reason = " ".join(str(error).split())
        said = f"{type(error).__name__}: {reason}"
        if lost:
            self.aborted += 1
            self.last_failure = (time.monotonic(), said)
        if not self._raising and said != self._said:  # log a reason that recurs at every boundary once
            what = "is given up" if lost else "was complete before this"
            trace = None if isinstance(error, CheckflowError) else error
            logger.warning("the checkpoint of step %d %s: %s", step, what, said, exc_info=trace)
        self._said = said

    def _note_failed(self) -> None:
        """Note failed captures among the concluded ones; the one in flight goes on."""
        failed = self.capturer.take_failed()
        for step, error in failed:
            self._note(step, error, lost=True)
        if failed and self._raising:
            raise failed[0][1]

    def reached(self, key: AnchorKey) -> None:
        """An anchor fired: do the plan's work and the guards' before the job continues."""
        self._fired = True
        if self.capturer.gathering:
            with self._holding(), self._one_hook:
                try:
                    self._guard(key)
                except Exception as error:
                    if self._give_up(error):
                        raise
        elif key.kind is AnchorKind.GRADIENT:
            self.stream.skip_gradients()
        if key.kind is AnchorKind.OPTIMIZER_POST:
            self.capturer.note()  # what has written, and what the loop may write next

    def end_iteration(self, *, due: bool, quiet: bool) -> None:
        """Pass a boundary: go on, or end the capture if another one is due. ``quiet``: wait for all copies."""
        with self.surviving():
            if quiet:
                self.capturer.finish()
            elif due:
                self.capturer.conclude()
            else:
                self.capturer.go_on()
        self._note_failed()
        self._whole = self._whole or self._fired
        if self.stream.replays and not self._optimizers.keys() <= {*self._stepped}:
            self.stream.steps.known = True  # one that no hook has seen may have stepped inside of the graph
        self.follow(idle=not (due or self.capturer.step is not None))
        self.stream.boundary()

    def finish(self) -> None:
        """End the capture in flight, and wait for all before it."""
        with self._one_hook, self.surviving():
            self.capturer.finish()
        self._note_failed()

    def follow(self, *, idle: bool = False) -> None:
        """Hang hooks on modules that were replaced or compiled; otherwise a deadline would pass unseen.

        ``idle``: no deadline comes before the next call, so replaced modules can wait.
        """
        if not idle:
            self._walk.current()
        replaced = not idle and self._walk.outer is not self._hooked
        outdated = self.stream.outdated(self._subscriber, replaced=replaced)
        if replaced or outdated:
            self.finish()  # its last tensors might be written where hooks are gone
            self._guards = self._make_guards()
            self._hooked = self._walk.outer
        if outdated:
            self._fired = self._whole = False
            try:
                self._keys = self._keys if self.distrusted else self._planned_keys()
                self._subscribe()
            except CheckflowError as error:
                logger.warning("the job no longer has what the plan was made for: %s", error)
                self._keys = []
                self._subscribe()
                self._distrust()

    def take_error_in_compiling(self) -> CheckflowError | None:
        """Return the error that could not be raised into the compiler."""
        error, self._error_in_compiling = self._error_in_compiling, None
        return error

    def apply_audits(self, written: Collection[str], breached_plans: Collection[str]) -> None:
        """Act on audits: names of tensors that are written against the plan, and digests of refuted plans."""
        self.capturer.settled.drop(written)
        if self.plan.digest in breached_plans and not self.distrusted:
            self.aborted += self.capturer.abort()  # the one in flight relies on the same plan
            self._distrust()

    def prepare(self) -> None:
        """Make room for captures; see :meth:`.capturer.Capturer.prepare`."""
        self.capturer.prepare(self._implementations)

    def begin(self, step: int, extra: bytes | Callable[[], bytes], info: Mapping[str, Any], *, audit: bool) -> float:
        """Start the capture of this boundary; see :meth:`.capturer.Capturer.begin`."""
        self._adapt_to_anchors()
        waited_seconds = self.capturer.begin(step, extra, info, audit=audit, optimizers=self._implementations)
        self.captures += 1
        self.capturer.require(self._guards.at_forward.get(BOUNDARY, ()))
        return waited_seconds

    def _subscribe(self) -> None:
        """Hang hooks at the anchors that have work, in place of those of the plan before."""
        reached = self.reached
        self._subscriber = Subscriber(
            places=frozenset((key.kind, key.name) for key in self._keys),
            forward=reached, gradient=reached, step_begins=reached, step_ends=reached,
            model=self._on_model, unseen=self._on_traced, repeated=self._on_repeated, unevaluated=self._on_repeated,
            replayed=self._on_replay,
        )  # fmt: skip
        self.stream.subscribe("execution", self._subscriber)

    def _on_model(self, _name: str, _arguments: Any) -> None:
        """Batch norm writes its statistics; no optimizer's step need follow."""
        self.capturer.note()

    def _on_repeated(self, optimizer: str) -> None:
        """Parameters are written between anchors: copy everything at the boundary from now on."""
        if optimizer not in self.stream.repeated:
            self.stream.repeated.add(optimizer)
            logger.warning(
                "optimizer %s does not run its closure just once in a step, so that there is no plan for it: from now "
                "on all state is copied at each boundary that is saved, which pauses training",
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

    def _on_replay(self, graph: Any) -> None:
        """End the capture in flight before a graph's first replay: no anchor comes before what it writes."""
        if graph not in self._graphs:
            self._graphs.add(graph)
            if self.plan is not UNPLANNED and self.capturer.step is not None:
                self.finish()

    def _on_traced(self, _module: str) -> None:
        """A hook is being compiled: finish the capture before compiled code writes what it should have copied."""
        try:
            self.finish()
        except CheckflowError as error:  # never raise into the compiler
            self._error_in_compiling = error

    def _planned_keys(self) -> list[AnchorKey]:
        """The anchors that have work, or guard buffers, in the job as it is now."""
        guards = compatibility.make_guards(self.plan, self._models, self._optimizers)
        return [*(key for _, key in compile_plan(self.plan).position), *guards.at_forward]

    def _make_guards(self) -> compatibility.Guards:
        return compatibility.make_guards(self.plan, self._models, self._optimizers, self._unseen[0])

    def _adapt_to_anchors(self) -> None:
        """Move the plan's work to anchors that fire; others, mostly in compiled code, do not."""
        unseen = self.stream.silent, self.stream.steps.known
        blind = unseen[1] and not self._unseen[1]
        if unseen != self._unseen:
            self._unseen = unseen
            self.capturer.follow(self._compile())
            self._guards = self._make_guards()
        newly = unseen[0] - self._logged_silent if self._whole else frozenset()
        self._logged_silent |= newly
        if blind:
            logger.warning(
                "an optimizer steps inside of compiled code or of a CUDA graph, where no hook sees it, or "
                "checkpointer.step() is called twice in an iteration: all state is copied at each boundary, which "
                "pauses training; call optimizer.step() outside of it, and checkpointer.step() once"
            )
        elif not unseen[1] and (size := compatibility.bytes_due_at(self.plan, newly)):
            logger.warning(
                "%s is due in modules whose forward no hook sees (%s is the first), compiled, inside of a CUDA graph "
                "or not run yet: it is copied earlier, which may pause training; where code is compiled, pass what "
                "torch.compile(model) returns, and make a new plan",
                format_size(size), min(newly)[1],
            )  # fmt: skip

    def _compile(self) -> Program:
        """The plan's work at anchors that fire. Without optimizers' anchors, unwritten tensors are due at the
        boundary.
        """
        silent, blind = self._unseen
        return compile_plan(self.plan, silent, blind=blind, undated_at_boundary=not self._optimizers)

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
            # EMA, clamps or another optimizer may now write what no operator writes.
            capturer.require_after_step()
            if self._optimizers.keys() <= {*self._stepped, key.name}:
                capturer.complete_iteration()
