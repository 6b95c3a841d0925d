"""Makes the plan of a job that brings none: records an iteration, has another process plan it, and keeps the plan.

docs/explanation/planning.md, "In a running job", has the stages. No copies run beside *quiet* iterations.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checkflow.core import plan as plans
from checkflow.core.errors import CheckflowError, PlanError, TraceError
from checkflow.core.generators import is_generator
from checkflow.core.plan import Plan
from checkflow.core.planner_api import PendingPlan, PlanLimits, Planner, PlanResponse, Recorder
from checkflow.core.reports.run_report import PlanSource
from checkflow.core.state import (
    STATE,
    StateTensor,
    TrainingState,
    implementation_options,
    training_device,
    unwrap,
)
from checkflow.core.units import format_seconds
from checkflow.runtime.job import compatibility
from checkflow.runtime.job.job import Job
from checkflow.runtime.job.traits import IterationWatch, Seen, Traits, as_tensors, device_name
from checkflow.runtime.live_plan.cache import PlanCache
from checkflow.runtime.live_plan.unsaved import identities, saved_identities, warn_unsaved
from checkflow.runtime.snapshot.share import RankShare
from checkflow.runtime.state.variables import Variables
from checkflow.runtime.system.signals import raised_by_handler

logger = logging.getLogger("checkflow")

MOST_RECORDINGS = 8
TIMED = 2
PATIENCE = 5
RETRY_SECONDS = 10.0  # before the first retry
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
    """A plan to install at this boundary; None: the installed one never fitted."""

    plan: Plan | None
    source: PlanSource | None  # None: no plan
    path: Path | None
    seconds: float  # that making it took, recording included


@dataclass(frozen=True)
class _Recording:
    """A recorded iteration, and what is known of it."""

    recorded: Any
    stepped: frozenset[str]
    seen: Seen


@dataclass(frozen=True)
class _Look:
    """What shows cheaply, at each boundary, that a job may have changed."""

    state: TrainingState
    options: list[Any]  # the optimizers'

    def is_like(self, other: _Look | None) -> bool:
        return other is not None and self.state is other.state and self.options == other.options


class Planning:
    """The search for a plan, driven by the Checkpointer at boundaries.

    Args:
        check: replays a plan before it runs.
        follow: whether a job that changes gets a new plan.
        share: what this rank copies.
    """

    def __init__(
        self,
        job: Job,
        cache: PlanCache,
        planner: Planner,
        check: Callable[[Plan], object],
        limits: PlanLimits,
        *,
        follow: bool,
        share: RankShare,
    ) -> None:
        self._share = share
        self._parts: tuple[TrainingState, TrainingState] | None = None  # the state that was last divided, and the share
        self._given, self._models, self._optimizers, self._walk = job, job.models, job.optimizers, job.walk
        self._cache, self._planner, self._check, self._limits = cache, planner, check, limits
        self._follow = follow
        self._device = device_name(job.models)[1]
        self.watch = IterationWatch(training_device(job.models))
        self.stage = Stage.UNPLANNED
        self.reason = ""  # of the last failure
        self._error: PlanError | None = None
        self._plan: Plan | None = None
        self._confirmed = False  # the plan fitted the job at a boundary, with all its state
        self._compared: _Look | None = None  # what was last compared with it
        self._warned = False  # that the job changed was logged
        self._recorder: Recorder | None = None  # of the current iteration
        self._recordings = 0
        self._best: _Recording | None = None
        self._timings: list[Seen] = []
        #: Whether the last boundary had more to do than compare the job with its plan.
        self.busy = True
        self._making: PendingPlan | None = None
        self._begun = 0.0
        self._failures, self._again = 0, 0.0
        #: Whether there can never be a plan, even if the job changes.
        self.forgone = False
        self._hopeless: Any = None  # the job for which there is no plan
        self._seen_hopeless: _Look | None = None  # what was last compared with it
        self._saved: frozenset[int] = frozenset()  # objects that checkpoints hold, at the recorded iteration
        self._handed: set[int] = set()  # objects in batches: a resumed loader hands out unused ones again
        #: Whether to look for unsaved objects that the next iteration needs: once, and not if batches are drawn
        #: before the boundary that the forward pass marks.
        self.warns_unsaved = True
        self._kept = False  # the plan was found at the start
        self._unlike: tuple[Traits, int] | None = None  # traits that differ from the plan, and for how long
        self._searched: set[Traits] = set()  # traits without a kept plan; searching is slow
        cache.tidy()  # of a dead run

    # What the Checkpointer asks

    @property
    def quiet(self) -> bool:
        """Whether the iteration that begins now is recorded or timed."""
        return self.stage in (Stage.RECORDED, Stage.TIMED)

    def find_kept(self) -> Arrival | None:
        """At the start: a kept plan that fits the state that exists."""
        return None if self.forgone else self._find(lambda plan: not self._state_differences(plan))

    def batch_handed(self, batch: Any) -> None:
        self.watch.batch_handed(batch)
        if self.warns_unsaved and self.stage in (Stage.UNPLANNED, Stage.RECORDED):
            self._handed |= identities(batch)

    def begin(self, batch: Any = None) -> None:
        """An iteration begins, with this batch if there is a loader: record it if one is wanted."""
        if self.stage is not Stage.RECORDED or self._recorder is not None:
            return
        with self._giving_up():
            self._saved = saved_identities(self._given) if self.warns_unsaved else frozenset()
            self._recorder = self._planner.recorder(
                self._models, self._optimizers, name=self._name(), beside=self._beside
            )
            self._recorder.begin(batch)

    def boundary(self, stepped: Collection[str], micro_batches: int | None) -> Arrival | None:
        """End an iteration, first its recording; returns what to install, and then :meth:`placed` or :meth:`refused`
        follows.

        Args:
            stepped: the optimizers that did.
            micro_batches: how many batches it used, if known.
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
            # What a rank copies shows only with all state.
            if not self._share.view.whole and (kept := self.find_kept()) is not None:
                return kept
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
        self._plan, self._compared, self._unlike, self._warned = arrival.plan, None, None, False
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
        """Give up planning for good, because of how this optimizer steps. As :meth:`boundary`; the caller logs it."""
        self.close()
        had, self._plan, self.forgone = self._plan, None, True
        self.reason = f"optimizer {optimizer} does not run its closure just once in a step"
        self.stage, self.watch.timing = Stage.GIVEN_UP, False
        return None if had is None else Arrival(None, None, None, 0.0)

    def refuted(self, plan: Plan) -> None:
        """The plan does not fit the job: the next start must not use it."""
        self._cache.drop(plan)

    def refused(self, error: CheckflowError) -> None:
        """The plan could not be installed."""
        self._fail(str(error))

    def abandon(self) -> None:
        """Drop a recording: its iteration will not end."""
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            recorder.abandon()

    def take_error(self) -> PlanError | None:
        """Why planning failed since the last call, if it did."""
        error, self._error = self._error, None
        return error

    def close(self) -> None:
        """Release everything."""
        self.abandon()
        making, self._making = self._making, None
        if making is not None:
            making.close()
            self._cache.tidy()

    # Recording and timing

    def _name(self) -> str:
        return "+".join(type(unwrap(model)).__name__ for model in self._models.values())

    def _beside(self) -> Sequence[StateTensor]:
        """The tensors in Variables. The plan of one of several ranks has none: each copies its own at the boundary."""
        gathering = self._walk.gather(looks=False)
        for name, one in self._given.objects.items():
            if isinstance(one, Variables):
                pairs = zip(one.state_dict().items(), one.held(), strict=True)
                gathering.take({key: now for (key, now), held in pairs if not is_generator(held)}, f"{STATE}/{name}")
        return gathering.given

    def _record_next(self) -> None:
        self.stage, self._begun = Stage.RECORDED, time.perf_counter()
        self._recordings, self._best = 0, None

    def _end_recording(self, recorder: Recorder, stepped: frozenset[str], seen: Seen) -> None:
        self._recordings += 1
        self._walk.current()  # FSDP2 shards again what it kept whole since an evaluation
        with self._giving_up():
            try:
                recorded = recorder.end(batch=as_tensors(seen.traits.batch), micro_batches=seen.traits.micro_batches)
            except TraceError as error:
                self.reason = str(error)
            else:
                if self.warns_unsaved:
                    self.warns_unsaved = not warn_unsaved(recorded.carried, self._saved | self._handed)
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
            self.stage = Stage.RECORDED  # the recorded one was odd: the end of an epoch, a skipped step
            return
        self._making = None
        with self._giving_up(), self._failing():
            self._making = self._planner.start(
                best.recorded,
                usual_seconds=min(one.seconds for one in alike or usual),
                autocast=best.seen.traits.autocast,
                device=self._device,
                limits=self._limits,
                file=self._cache.file,
                of_rank=self._share.for_plan(self._walk.current()),
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

    def _accept(self, answer: PlanResponse) -> Arrival | None:
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
        """Log a failure and try again later."""
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
        """Turn an expected error into a failure that may pass."""
        try:
            yield
        except CheckflowError as error:
            self._fail(str(error))

    @contextlib.contextmanager
    def _giving_up(self) -> Iterator[None]:
        """Turn a bug of recorder or planner into "no plan", not the job's end."""
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
            "checkpoints are copies of all state at a boundary, which pauses training: as often as overhead= and "
            "every= allow, at ends of epochs and at the end of training"
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
        """The job as its last boundary found it, since walking all state is slow; or anew, as it is now."""
        state = self._walk.current() if anew else self._walk.latest
        return _Look(state, [implementation_options(optimizer) for optimizer in self._optimizers.values()])

    def _is_another(self) -> bool:
        """Whether the job has changed since planning was given up."""
        now, before = self._look(), self._seen_hopeless
        self._seen_hopeless = now
        return not now.is_like(before) and bool(self._job() != self._hopeless)

    def _job(self) -> Any:
        """The job's identity, for comparison."""
        state = self._walk.current()
        tensors = [(item.name, item.tensor.shape, item.tensor.dtype) for item in state.tensors]
        return tensors, state.ties, compatibility.implementations(self._models, self._optimizers)

    def _state_differences(self, plan: Plan) -> list[str]:
        """How the job's state and optimizers differ from the plan's."""
        state = self._walk.current()
        implementations = compatibility.implementations(self._models, self._optimizers)
        lines = compatibility.differences(plan, self._copied(state), implementations, self._share.view.world_size)
        return lines if state.ties == plan.fingerprint.ties else [*lines, "other tensors are tied"]

    def _copied(self, state: TrainingState) -> TrainingState:
        """What this process copies of the state."""
        if self._parts is None or self._parts[0] is not state:
            self._parts = state, self._share.copied(state)
        return self._parts[1]

    def _hold_against(self, plan: Plan, seen: Seen) -> Arrival | None:
        """Check that the job is still the one that was planned, and react if it is not."""
        odd: list[str] = []
        now = self._look(anew=not self._confirmed)  # an unfit kept plan must not capture this boundary
        if not now.is_like(self._compared):
            odd, self._compared = self._state_differences(plan), now
            self._searched.clear()
        moved = bool(odd) and not self._share.view.whole  # more or less state: hardly a part is what the plan has
        if not odd:
            self._confirmed = True
            odd = self._held_traits(plan, seen)
        if not odd:
            return None
        if not self._confirmed:  # a kept plan, and all state exists only now
            logger.info("the kept plan does not fit this job: %s", odd[0])
        elif not (self._follow or moved):
            # The newest kept plan was taken by the state alone: another one may fit better.
            if self._kept and seen.traits not in self._searched:
                self._searched.add(seen.traits)
                if (own := self._find_alike(seen.traits)) is not None:
                    return own
            if not self._warned:
                self._warned = True
                logger.warning(
                    'the job differs from the one that its plan was made for: %s; plan="auto" makes a new one', odd[0]
                )
            return None
        else:
            logger.info("the job differs from the one that its plan was made for: %s", odd[0])
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
