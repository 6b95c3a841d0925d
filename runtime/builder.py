"""Assembles a Checkpointer's parts: checks the plan, opens the directory, resumes the job, starts the rest.

If a step fails, the parts made before are closed.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from checkflow.core import plan as plans
from checkflow.core.errors import UnsupportedError
from checkflow.core.plan import Plan
from checkflow.core.planner_api import Planner
from checkflow.core.state import LOADER, STATE, closures_repeat, collect_state, refuse_hidden_state
from checkflow.runtime import resources
from checkflow.runtime.arguments import Arguments, refuse_objects
from checkflow.runtime.job import compatibility, hyperparameters
from checkflow.runtime.job.job import Job
from checkflow.runtime.job.progress import Progress
from checkflow.runtime.live_plan.cache import PlanCache
from checkflow.runtime.live_plan.planning import Planning
from checkflow.runtime.loop.preemption import Preemption
from checkflow.runtime.loop.training_loop import TrainingLoop
from checkflow.runtime.memory_tier.records import NOTHING
from checkflow.runtime.persist.rank_commit import RankCommit
from checkflow.runtime.persist.saver import Saving
from checkflow.runtime.ranks.council import Council
from checkflow.runtime.reporter import Reporter
from checkflow.runtime.snapshot.program import compile_plan
from checkflow.runtime.start.ranks import LoneStart, RankStart, start_rank
from checkflow.runtime.state.collect import refuse_unsaved
from checkflow.runtime.state.objects import log_fresh, refuse_unknown
from checkflow.runtime.state.own_keys import warn_of_models
from checkflow.runtime.store.shared import SharedStore
from checkflow.runtime.store.store import Store


@dataclass(frozen=True)
class Parts:
    """What a Checkpointer is made of. ``resumed_from`` is None if the run started anew."""

    progress: Progress
    preemption: Preemption
    store: Store | SharedStore
    saving: Saving
    loop: TrainingLoop
    reporter: Reporter
    resumed_from: int | None


def read_plan(
    plan: Plan | str | os.PathLike[str] | None, every: int | None, check_plan: Callable[[Plan], object]
) -> Plan | None:
    """The user's own plan, replayed; None: the job makes its own. ValueError if ``every`` does not fit."""
    if plan is None or plan == "auto":
        return None
    given = plan if isinstance(plan, Plan) else plans.load(plan)
    check_plan(given)
    compatibility.check_every(every, given.interval)
    return given


@contextlib.contextmanager
def refusing_together(council: Council) -> Iterator[None]:
    """Have all ranks raise what one cannot start for, and leave the council."""
    try:
        yield
    except BaseException as error:
        cause = council.refuse(error)
        council.close("it cannot start")
        if cause is error:
            raise
        raise cause from error


def check_job(job: Job, given: Plan | None) -> torch.device:
    """Refuse a job that cannot be checkpointed, or not by this plan; returns the device of its state."""
    device = compatibility.copied_device(job.models, job.optimizers, of_a_rank=job.walk.of_a_rank)
    refuse_hidden_state(job.optimizers)
    for name in {STATE, LOADER}.intersection((*job.models, *job.optimizers)):
        raise UnsupportedError(f"no model or optimizer can be called {name}, as files of other state are")
    refuse_unsaved(job.walk, job.optimizers)
    warn_of_models(job.models, job.walk.latest)
    refuse_objects(job.objects, job.walk.gather(looks=False).take)
    if given is not None:
        implementations = compatibility.implementations(job.models, job.optimizers)
        compatibility.refuse_other_job(given, collect_state(job.models, {}), implementations)
        compile_plan(given)
    return device


def assemble(
    job: Job,
    given: Plan | None,
    arguments: Arguments,
    device: torch.device,
    council: Council,
    *,
    check_plan: Callable[[Plan], object],
    make_planner: Callable[[], Planner],
) -> Parts:
    """Open the directory, resume the job, and make all other parts; with all other ranks."""
    asked, loader = arguments.asked, job.loader
    progress = Progress(loader, arguments.accept)
    preemption = Preemption(arguments.signals, arguments.grace_seconds, None if loader is None else loader.shield)
    resources.take_over(arguments.directory)
    with contextlib.ExitStack() as undo:
        start = start_rank(council, arguments, job)
        store = start.store
        undo.callback(store.close)
        share = start.share(job)
        planning = None
        if given is None:
            cache = PlanCache(store.directory, arguments.plan_limits, start.view)
            planning = Planning(
                job, cache, make_planner(), check_plan, arguments.plan_limits, follow=arguments.follow, share=share
            )
            for name in [name for name, optimizer in job.optimizers.items() if closures_repeat(optimizer)][:1]:
                planning.forgo(name)
        resumed_from, imported, run_id = _resume(start, arguments, job, progress, given)
        start.give_back()
        if arguments.rules.monitor is not None:
            store.look()  # the best of earlier runs still counts
        saving = Saving(
            store, RankCommit(council, store), device,
            each=asked.every is not None or asked.every_seconds is not None,
            host_buffers=arguments.host_buffers, audit=arguments.audit,
            base=(NOTHING if resumed_from is None else resumed_from, run_id), ranked=start.ranked,
        )  # fmt: skip
        undo.callback(saving.close)
        loop = TrainingLoop(
            job, iteration=resumed_from or 0, progress=progress, saving=saving, given=given, planning=planning,
            asked=asked, directory=store.directory, raising=arguments.raising, preemption=preemption,
            agreement=start.agreement(
                council, preemption, by_number=asked.every is not None, grace_seconds=arguments.grace_seconds
            ),
            share=share,
        )  # fmt: skip
        undo.callback(loop.close)
        reporter = Reporter(
            job, loop, saving, store.directory,
            run_id=store.run_id, resumed_from=resumed_from, imported=imported, reclaimed=start.reclaimed,
            council=council, on_report=arguments.on_report,
        )  # fmt: skip
        start.agree(job)
        undo.pop_all()
    return Parts(progress, preemption, store, saving, loop, reporter, resumed_from)


def _resume(
    start: LoneStart | RankStart, arguments: Arguments, job: Job, progress: Progress, plan: Plan | None
) -> tuple[int | None, bool, str]:
    """The step that the job resumed from, whether it was imported weights, and the run that made it."""
    script, asked = arguments.hyperparameters == "script", hyperparameters.ask(job)
    made = hyperparameters.values_of_schedules(job)

    def place(extra: Mapping[str, Any]) -> None:
        progress.resume(hyperparameters.placed(job, asked, extra, script=script))

    resumed = start.restore(job, arguments, place, plan)
    progress.hyperparameters = hyperparameters.record(asked)
    if resumed is None:
        refuse_unknown(arguments.fresh, job.objects)
        progress.begin_anew()
        return None, False, ""
    if resumed.fitted is not None:
        progress.dropped = resumed.fitted.dropped
        if resumed.fitted.anew or resumed.fitted.gone:
            rates = hyperparameters.begin_schedules(job, made, resumed.fitted)
            if start.store.commits:
                log_fresh(resumed.fitted, rates)
        goes_on = hyperparameters.settle(job, asked, resumed.extra, script=script)
        progress.hyperparameters = hyperparameters.record(goes_on)
    return resumed.extra["iteration"], resumed.imported, resumed.run_id
