"""Where the plan of a job comes from when the job brings none: recorded from itself, made beside it, kept for later.

The stages, in words. A job is *unplanned* until its first iteration has made the state complete. The next iteration is
*recorded*: the planner's recorder watches every operator of it. What is recorded must be an iteration like those to
come: one in which every optimizer stepped, and which looks from outside (:mod:`.job.traits`) like one of the two after
it. If it is not, the next one is recorded, ``MOST_RECORDINGS`` of them at most, and the best is taken. These next two
are *timed*, without the recorder; the shorter says how long an iteration usually lasts. Then a process of its own
*makes* the plan, while training goes on. When it is there it is replayed, put in place at a boundary, and kept
(:mod:`.cache`): the job is *planned*.

What fails is said once, with its reason, and tried again *later*, each time after twice as long; what can only fail
again (nothing that could be recorded, no plan that satisfies what was asked) is *given up*.

A planned job is held against its plan at every boundary: its state and its optimizers, as the boundary before found
them, and the traits of its iterations, the latter only once ``PATIENCE`` iterations in a row were all alike and none as
planned. A job that is another one now
keeps its plan and is told so once (``plan=None``), or gets a kept plan that fits, or a new one (``plan="auto"``), which
begins with a recording.

Iterations that are recorded or timed are *quiet*: no copies go on beside them, the Checkpointer sees to it.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checkflow.core import plan as plans
from checkflow.core.device import format_seconds
from checkflow.core.errors import CheckflowError, PlanError, TraceError
from checkflow.core.plan import Plan
from checkflow.core.planner_api import Answer, Making, Planner, Recorder, Wishes
from checkflow.core.run_report import PlanSource
from checkflow.core.state import TrainingState, implementation_options, training_device, unwrap
from checkflow.runtime.job import compatibility
from checkflow.runtime.job.job import Job
from checkflow.runtime.job.traits import IterationWatch, Seen, Traits, as_tensors, device_name
from checkflow.runtime.live_plan.cache import PlanCache
from checkflow.runtime.live_plan.unsaved import identities, saved_identities, tell_unsaved
from checkflow.runtime.system.signals import raised_by_handler

logger = logging.getLogger("checkflow")

MOST_RECORDINGS = 8
TIMED = 2
PATIENCE = 5
RETRY_SECONDS = 10.0  # before the first new attempt
MOST_RETRY_SECONDS = 3600.0


class Stage(enum.StrEnum):
    UNPLANNED = "unplanned"
    RECORDED = "recording"
    TIMED = "timing"
    MAKING = "making the plan"
    PLANNED = "planned"
    LATER = "trying again later"
    GIVEN_UP = "given up"


_AT_REST = (Stage.PLANNED, Stage.LATER, Stage.GIVEN_UP)


@dataclass(frozen=True)
class Arrival:
    """A plan that is to be put in place at this boundary; None: the one that is in place never fitted."""

    plan: Plan | None
    source: PlanSource | None  # None: where there is no plan
    path: Path | None
    seconds: float  # that it took to make it, recording included


@dataclass(frozen=True)
class _Recording:
    """A recorded iteration, and what is known of it."""

    recorded: Any
    stepped: frozenset[str]
    seen: Seen


@dataclass(frozen=True)
class _Look:
    """What tells cheaply, at each boundary, that a job may have become another one."""

    state: TrainingState
    options: list[Any]  # of the optimizers

    def is_like(self, other: _Look | None) -> bool:
        """Whether nothing has changed since the other one."""
        return other is not None and self.state is other.state and self.options == other.options


class Planning:
    """The search for a plan, driven by the Checkpointer at boundaries.

    Args:
        cache: plans that were kept.
        planner: makes recorders and plans.
        check: replays a plan before it is executed.
        follow: whether a job that becomes another one gets a new plan.
    """

    def __init__(
        self,
        job: Job,
        cache: PlanCache,
        planner: Planner,
        check: Callable[[Plan], object],
        wishes: Wishes,
        *,
        follow: bool,
    ) -> None:
        self._given, self._models, self._optimizers, self._walk = job, job.models, job.optimizers, job.walk
        self._cache, self._planner, self._check, self._wishes = cache, planner, check, wishes
        self._follow = follow
        self._device = device_name(job.models)[1]
        self.watch = IterationWatch(training_device(job.models))
        self.stage = Stage.UNPLANNED
        self.reason = ""  # of the last failure
        self._error: PlanError | None = None
        self._plan: Plan | None = None
        self._confirmed = False  # the plan in place fitted the job at a boundary, all its state being there
        self._compared: _Look | None = None  # what was last held against it
        self._told = False  # that the job is another one
        self._recorder: Recorder | None = None  # watches the iteration that goes on
        self._recordings = 0
        self._best: _Recording | None = None
        self._timings: list[Seen] = []
        #: Whether the last boundary had more to do than to hold the job against its plan, as each one does.
        self.busy = True
        self._making: Making | None = None
        self._begun = 0.0
        self._failures, self._again = 0, 0.0
        #: Whether there can be no plan, whatever the job becomes.
        self.forgone = False
        self._hopeless: Any = None  # the job for which planning was given up
        self._seen_hopeless: _Look | None = None  # what was last held against that
        self._saved: frozenset[int] = frozenset()  # what checkpoints hold, as the recorded iteration found it
        self._handed: set[int] = set()  # of batches: a resumed loader hands out again what reached no step
        #: Whether what goes from one iteration to the next is to be looked at: not after it was, and not where batches
        #: are drawn before the boundary that the forward pass marks.
        self.tells_unsaved = True
        self._kept = False  # the plan is one that was found at the start
        self._unlike: tuple[Traits, int] | None = None  # traits that were not as planned, and for how long
        self._searched: set[Traits] = set()  # traits for which no kept plan was found: reading them all takes long
        cache.tidy()  # of an earlier life

    # What the Checkpointer asks

    @property
    def quiet(self) -> bool:
        """Whether the iteration that begins now is recorded or timed."""
        return self.stage in (Stage.RECORDED, Stage.TIMED)

    @property
    def failing(self) -> bool:
        """Whether the last attempt at a plan came to nothing."""
        return self._failures > 0 or self.stage is Stage.GIVEN_UP

    def find_kept(self) -> Arrival | None:
        """At the start: a kept plan that fits what there is of the job's state, put in place at once."""
        return None if self.forgone else self._find(lambda plan: not self._state_differences(plan))

    def batch_handed(self, batch: Any) -> None:
        """The loader hands out a batch."""
        self.watch.batch_handed(batch)
        if self.tells_unsaved and self.stage in (Stage.UNPLANNED, Stage.RECORDED):
            self._handed |= identities(batch)

    def begin(self, batch: Any = None) -> None:
        """The iteration begins, with this batch if there is a loader: record it, if it is to be recorded."""
        if self.stage is not Stage.RECORDED or self._recorder is not None:
            return
        with self._giving_up():
            self._saved = saved_identities(self._given) if self.tells_unsaved else frozenset()
            self._recorder = self._planner.recorder(self._models, self._optimizers, name=self._name())
            self._recorder.begin(batch)

    def boundary(self, stepped: Collection[str], micro_batches: int | None) -> Arrival | None:
        """An iteration has ended. First of all a recording of it ends: nothing of ours is part of it.

        Args:
            stepped: the optimizers that did.
            micro_batches: how many batches it used, if anybody counts.

        Returns:
            What is to be put in place now, if anything is; :meth:`placed` or :meth:`refused` follows.
        """
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            recorder.abandon()
        seen = self.watch.end(micro_batches)
        self.busy = self.stage not in _AT_REST
        arrival = self._proceed(recorder, frozenset(stepped), seen)
        self.busy |= arrival is not None or self.stage not in _AT_REST
        return arrival

    def _proceed(self, recorder: Recorder | None, stepped: frozenset[str], seen: Seen) -> Arrival | None:
        if self.stage is Stage.UNPLANNED:
            self._record_next()
        elif self.stage is Stage.RECORDED and recorder is not None:
            self._end_recording(recorder, stepped, seen)
        elif self.stage is Stage.TIMED:
            self._end_timing(seen)
        elif self.stage is Stage.MAKING:
            return self._poll()
        elif (self.stage is Stage.LATER and time.monotonic() >= self._again) or (
            self.stage is Stage.GIVEN_UP and self._follow and not self.forgone and self._is_another()
        ):
            self._record_next()
        elif self.stage is Stage.PLANNED and self._plan is not None:
            return self._hold_against(self._plan, seen)
        return None

    def placed(self, arrival: Arrival) -> None:
        """The plan runs from this boundary on."""
        self._plan, self._compared, self._unlike, self._told = arrival.plan, None, None, False
        self._searched.clear()
        self._confirmed, self._kept = arrival.source == "recorded", arrival.source == "cache"
        if arrival.plan is None:
            if not self.forgone:
                self._record_next()
            return
        self.stage, self._failures, self.reason = Stage.PLANNED, 0, ""
        if arrival.source == "recorded" and arrival.path is not None:
            self._cache.keep(arrival.path)

    def forgo(self, optimizer: str) -> Arrival | None:
        """There can be no plan because of how this optimizer steps, and none is looked for any more. Who calls says so.

        Returns:
            As :meth:`boundary`.
        """
        self.close()
        had, self._plan, self.forgone = self._plan, None, True
        self.reason = f"optimizer {optimizer} does not run its closure just once in a step"
        self.stage, self.watch.timing = Stage.GIVEN_UP, False
        return None if had is None else Arrival(None, None, None, 0.0)

    def refuted(self, plan: Plan) -> None:
        """The job has shown that the plan does not fit it: the next start must not begin with it."""
        self._cache.drop(plan)

    def refused(self, error: CheckflowError) -> None:
        """The plan could not be put in place."""
        self._fail(str(error))

    def abandon(self) -> None:
        """No iteration goes on: a recording of it is of no use."""
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            recorder.abandon()

    def take_error(self) -> PlanError | None:
        """Why planning failed since the last call, if it did."""
        error, self._error = self._error, None
        return error

    def close(self) -> None:
        """Give everything back."""
        self.abandon()
        making, self._making = self._making, None
        if making is not None:
            making.close()
            self._cache.tidy()

    # Recording and timing

    def _name(self) -> str:
        return "+".join(type(unwrap(model)).__name__ for model in self._models.values())

    def _record_next(self) -> None:
        self.stage, self._begun = Stage.RECORDED, time.perf_counter()
        self._recordings, self._best = 0, None

    def _end_recording(self, recorder: Recorder, stepped: frozenset[str], seen: Seen) -> None:
        self._recordings += 1
        with self._giving_up():
            try:
                recorded = recorder.end(batch=as_tensors(seen.traits.batch), micro_batches=seen.traits.micro_batches)
            except TraceError as error:
                self.reason = str(error)
            else:
                if self.tells_unsaved:
                    self.tells_unsaved = not tell_unsaved(recorded.carried, self._saved | self._handed)
                if self._best is None or len(stepped) >= len(self._best.stepped):
                    self._best = _Recording(recorded, stepped, seen)
        if self.stage is Stage.GIVEN_UP:
            return
        last = self._recordings >= MOST_RECORDINGS
        if self._best is not None and (last or self._best.stepped >= self._optimizers.keys()):
            self.stage, self._timings, self.watch.timing = Stage.TIMED, [], True
        elif last:
            self._give_up(f"none of {self._recordings} iterations could be recorded: {self.reason}")

    def _end_timing(self, seen: Seen) -> None:
        self._timings.append(seen)
        if len(self._timings) < TIMED:
            return
        self.watch.timing = False
        best, usual = self._best, self._timings
        assert best is not None
        alike = [one for one in usual if one.looks_like(best.seen)]
        if not alike and usual[0].looks_like(usual[1]) and self._recordings < MOST_RECORDINGS:
            self.stage = Stage.RECORDED  # what was recorded was the odd one: the end of an epoch, a skipped step
            return
        self._making = None
        with self._giving_up(), self._failing():
            self._making = self._planner.start(
                best.recorded,
                usual_seconds=min(one.seconds for one in alike or usual),
                autocast=best.seen.traits.autocast,
                device=self._device,
                wishes=self._wishes,
                file=self._cache.file,
            )
        self._best = None
        if self._making is not None:
            self.stage = Stage.MAKING

    # The plan that is made

    def _poll(self) -> Arrival | None:
        assert self._making is not None
        answer = self._making.poll()
        if answer is None:
            return None
        self._making = None
        return self._accept(answer)

    def _accept(self, answer: Answer) -> Arrival | None:
        if answer.path is None:
            self._cache.tidy()
            if answer.final:
                self._give_up(answer.reason)
            else:
                self._fail(answer.reason)
            return None
        try:
            plan = plans.load(answer.path)
            self._check(plan)
            if odd := self._state_differences(plan):
                raise PlanError(f"the job has changed while its plan was made: {odd[0]}")
        except CheckflowError as error:
            self._fail(str(error))
            return None
        return Arrival(plan, "recorded", Path(answer.path), time.perf_counter() - self._begun)

    def _fail(self, reason: str) -> None:
        """Say so, and try again later."""
        self._failures += 1
        pause = min(RETRY_SECONDS * 2 ** (self._failures - 1), MOST_RETRY_SECONDS)
        self.stage, self.reason, self._again = Stage.LATER, reason, time.monotonic() + pause
        self._error = PlanError(f"no plan could be made of this job: {reason}")
        logger.warning(
            "no plan could be made of this job; %s, and it is tried again in %s: %s",
            self._meanwhile(), format_seconds(pause), reason,
        )  # fmt: skip

    def _give_up(self, reason: str) -> None:
        self.stage, self.reason, self._hopeless = Stage.GIVEN_UP, reason, self._job()
        self._seen_hopeless = self._look()
        self._error = PlanError(f"this job gets no plan: {reason}")
        logger.error("this job gets no plan, %s: %s", self._meanwhile(), reason)

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        """What is known to go wrong may go well another time."""
        try:
            yield
        except CheckflowError as error:
            self._fail(str(error))

    @contextlib.contextmanager
    def _giving_up(self) -> Iterator[None]:
        """A fault of the recorder, or of the planner, is no reason to end the job: it is said, and there is no plan."""
        try:
            yield
        except CheckflowError as error:
            self.abandon()
            self._give_up(str(error))
        except Exception as error:
            self.abandon()
            if raised_by_handler(error):
                raise
            logger.exception("a fault in recording an iteration, or in starting to plan it")
            self._give_up(f"{type(error).__name__}: {' '.join(str(error).split())}")

    def _meanwhile(self) -> str:
        if self._plan is not None:
            return "the old one goes on"
        return (
            "checkpoints are copies of all state at a boundary, which holds training: as often as overhead= and every= "
            "allow, at ends of epochs and at the end of training"
        )

    # A job that has become another one

    def _find(self, fits: Callable[[Plan], bool]) -> Arrival | None:
        def usable(plan: Plan) -> bool:
            if plan.fingerprint.device != self._device or not fits(plan):
                return False
            self._check(plan)
            return True

        self.busy = True
        found = self._cache.find(usable)
        return None if found is None else Arrival(found[0], "cache", found[1], 0.0)

    def _find_alike(self, traits: Traits) -> Arrival | None:
        """A kept plan for the job as it is, state and iterations."""
        return self._find(lambda plan: not self._state_differences(plan) and Traits.of(plan.fingerprint) == traits)

    def _look(self, *, anew: bool = False) -> _Look:
        """The job as its last boundary found it: a look at all state takes a while, and each boundary has one anyway.

        Args:
            anew: as it is now.
        """
        state = self._walk.current() if anew else self._walk.latest
        return _Look(state, [implementation_options(optimizer) for optimizer in self._optimizers.values()])

    def _is_another(self) -> bool:
        """Whether the job is not the one any more for which planning was given up."""
        now, before = self._look(), self._seen_hopeless
        self._seen_hopeless = now
        return not now.is_like(before) and bool(self._job() != self._hopeless)

    def _job(self) -> Any:
        """What makes the job another one, as something to compare."""
        state = self._walk.current()
        tensors = [(item.name, item.tensor.shape, item.tensor.dtype) for item in state.tensors]
        return tensors, state.ties, compatibility.implementations(self._models, self._optimizers)

    def _state_differences(self, plan: Plan) -> list[str]:
        """What differs between the state and the optimizers that a plan was made for and the job's."""
        state = self._walk.current()
        lines = compatibility.differences(plan, state, compatibility.implementations(self._models, self._optimizers))
        return lines if state.ties == plan.fingerprint.ties else [*lines, "other tensors are tied"]

    def _hold_against(self, plan: Plan, seen: Seen) -> Arrival | None:
        """Find out whether the job is still the one that the plan was made for, and do what follows if it is not."""
        odd: list[str] = []
        now = self._look(anew=not self._confirmed)  # a kept plan that does not fit must not capture this boundary
        if not now.is_like(self._compared):
            odd, self._compared = self._state_differences(plan), now
            self._searched.clear()
        if not odd:
            self._confirmed = True
            odd = self._held_traits(plan, seen)
        if not odd:
            return None
        if not self._confirmed:  # a kept plan, and only now is all state there
            logger.info("the kept plan does not fit this job: %s", odd[0])
        elif not self._follow:
            # Of several kept plans the newest was taken, by the state alone: the job may have one of its own.
            if self._kept and seen.traits not in self._searched:
                self._searched.add(seen.traits)
                if (own := self._find_alike(seen.traits)) is not None:
                    return own
            if not self._told:
                self._told = True
                logger.warning('the job is not the one that its plan was made for: %s; plan="auto" follows it', odd[0])
            return None
        else:
            logger.info("the job is not the one that its plan was made for: %s", odd[0])
        kept = self._find_alike(seen.traits)
        if kept is None and self._confirmed:
            self._record_next()
            return None
        return kept or Arrival(None, None, None, 0.0)

    def _held_traits(self, plan: Plan, seen: Seen) -> list[str]:
        """How iterations differ from the plan's, if they have for long enough."""
        planned = Traits.of(plan.fingerprint)
        if seen.traits == planned:
            self._unlike = None
            return []
        times = 1 if self._unlike is None or self._unlike[0] != seen.traits else self._unlike[1] + 1
        self._unlike = (seen.traits, times)
        return seen.traits.differences(planned) if times >= PATIENCE else []
