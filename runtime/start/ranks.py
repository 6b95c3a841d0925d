"""How a job starts: all ranks restore the step that rank 0 finds, each its own part, or all refuse."""

from __future__ import annotations

import dataclasses
import functools
import logging
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import xxhash

from checkflow.core.errors import CheckflowError, CorruptCheckpointError
from checkflow.core.plan import Plan
from checkflow.core.state import held_tensors
from checkflow.runtime.arguments import Arguments
from checkflow.runtime.format.manifest import EXTRA, Manifest, names_of_rank
from checkflow.runtime.job.job import Job
from checkflow.runtime.loop.agreement import Agreement, LoneAgreement
from checkflow.runtime.ranks.council import Council
from checkflow.runtime.ranks.file_meeting import remove_earlier
from checkflow.runtime.ranks.records import Start, StartReport, name_ranks
from checkflow.runtime.snapshot.share import RankShare, WholeShare
from checkflow.runtime.start.alike import subjects
from checkflow.runtime.start.memory import LeftMemory, look, reclaim, reclaim_alone
from checkflow.runtime.start.other_ranks import refuse_loss
from checkflow.runtime.state import half_restored
from checkflow.runtime.state.meshes import ALONE, RankView
from checkflow.runtime.state.restore import Resumed, as_asked, naming, restore_rank, resume_from
from checkflow.runtime.state.stages import held_elsewhere
from checkflow.runtime.store import retention
from checkflow.runtime.store.discovery import recover, refuse
from checkflow.runtime.store.files import glance, step_name
from checkflow.runtime.store.reader import open_checkpoint
from checkflow.runtime.store.retention import Known, Rules
from checkflow.runtime.store.shared import SharedStore
from checkflow.runtime.store.store import Store

logger = logging.getLogger("checkflow")

RESTORE_SECONDS = 1800.0  # until all ranks have restored; one that ends or refuses ends the wait at once
_Place = Callable[[Mapping[str, Any]], None]


@dataclasses.dataclass(frozen=True)
class LoneStart:
    """The start of a process that trains alone. Where a version is damaged, it goes on from an older one.

    Attributes:
        reclaimed, give_back: as of :class:`RankStart`.
    """

    store: Store
    reclaimed: int | None
    give_back: Callable[[], None]
    view, ranked, agreement = ALONE, None, LoneAgreement

    def share(self, job: Job) -> WholeShare:
        """Return all of the job's state."""
        return WholeShare(self.view, job.models, job.optimizers)

    def restore(self, job: Job, arguments: Arguments, place: _Place, plan: Plan | None) -> Resumed | None:
        """Restore what ``resume`` asks for. Raises as :func:`.state.restore.resume_from`."""
        return resume_from(
            self.store, arguments.resume, job.models, job.optimizers, job.objects,
            host_tensors=None if plan is None else plan.host_tensors, fresh=arguments.fresh, place=place,
            check=functools.partial(refuse_loss, job=job, ranks=1, accepted="ranks" in arguments.accept),
        )  # fmt: skip

    def agree(self, job: Job) -> None:
        """Nobody else has restored."""


@dataclasses.dataclass(frozen=True)
class RankStart:
    """A rank's store, and the step that all ranks are to restore; None: they begin anew.

    Attributes:
        left: what dead ranks have left in this machine's memory.
        ranked: the best checkpoints, by which all ranks judge states.
    """

    council: Council
    store: Store | SharedStore
    step: int | None
    left: LeftMemory
    ranked: tuple[Known, ...]
    pipelined: bool = False
    agreement = Agreement

    @property
    def reclaimed(self) -> int | None:
        """The newest step that this start has put on storage; None: none."""
        return max((one.step for one in self.council.view.attempts if one.ended == "committed"), default=None)

    @property
    def view(self) -> RankView:
        return RankView(self.council.rank, self.council.world_size, pipelined=self.pipelined)

    def share(self, job: Job) -> RankShare:
        """Return what this rank copies of the job's state."""
        return RankShare(self.view, job.models, job.optimizers)

    def give_back(self) -> None:
        """Free what dead ranks have left, since the job has been restored."""
        self.left.give_back()

    def restore(self, job: Job, arguments: Arguments, place: _Place, plan: Plan | None) -> Resumed | None:
        """Restore this rank's part of the step, and its random numbers. Each rank makes its own ``plan``, later.

        Raises:
            MismatchError: the step is of another job; nothing was changed.
            CorruptCheckpointError, StorageError: it is damaged, or cannot be read. Rank 0 sets a damaged one aside.
        """
        if self.step is None:
            return None
        path = self.store.directory / step_name(self.step)
        begun = half_restored.is_marked(job.models, job.optimizers)

        def begin() -> None:
            nonlocal begun
            begun = True

        try:
            half_restored.lift(job.models, job.optimizers)
            resumed = restore_rank(
                path, self.view, job.models, job.optimizers, job.objects, None, fresh=arguments.fresh, place=place,
                begin=begin, trust=self.store.trust,
            )  # fmt: skip
        except BaseException as error:
            if isinstance(error, CorruptCheckpointError):
                self.council.refuse(error)  # before other ranks find the folder gone
                self._settle(error)
            if begun:
                half_restored.mark(job.models, job.optimizers)
                if isinstance(error, CheckflowError):
                    raise type(error)(f"{error}; {half_restored.WARNING}") from error
            raise
        if isinstance(arguments.resume, int):
            self.store.rewind(arguments.resume)
        self.store.went_on_from(self.step)
        if self.council.rank and resumed.of_this_rank is None and not resumed.imported:
            logger.info(
                "rank %d is new since step %d: its random numbers follow from those of rank 0",
                self.view.rank,
                self.step,
            )
        return resumed

    def agree(self, job: Job) -> None:
        """All ranks have restored, and hold the same where they must. Raises what another rank refused with."""
        report = StartReport(restored=True, replicas=replica_digests(job, self.view), lacks=self._lacks(job))
        try:
            self.council.agree_restored(report, RESTORE_SECONDS)
        except CorruptCheckpointError as error:  # where another rank has read
            self._settle(error)
            raise

    def _lacks(self, job: Job) -> tuple[str, ...]:
        """What another stage must hold of the restored step."""
        if self.step is None or not self.pipelined:
            return ()
        described = glance(self.store.directory / step_name(self.step), trust=self.store.trust)
        named = names_of_rank(described.tensors, self.view.rank)
        held = {item.name for item in held_tensors(job.models, job.optimizers)}
        return held_elsewhere(named, held, job.models, job.optimizers)[1]

    def _settle(self, error: CorruptCheckpointError) -> None:
        """Rank 0 sets a damaged version aside, and the next start takes an older one; the other ranks wait for that."""
        if not isinstance(self.store, Store):  # rank 0 has it, and it alone renames
            self.council.await_settled(RESTORE_SECONDS)
            return
        try:
            if self.step is not None:
                self._set_aside(self.store, self.store.directory / step_name(self.step), error.block)
        finally:
            self.council.settle()

    def _set_aside(self, store: Store, path: Path, block: tuple[str, int] | None) -> None:
        """Unless it is whole: the one block, as all of it may take minutes to read; None: all of it."""

        def narrow(described: Manifest) -> Manifest:
            if block is None:
                return described
            files = {name: entry for name, entry in described.files.items() if name in (block[0], EXTRA)}
            return dataclasses.replace(described, tensors={}, ties=(), files=files)

        try:
            with open_checkpoint(path, narrow, trust=store.trust) as checkpoint:
                if block is None:
                    checkpoint.verify()
                else:
                    checkpoint.verify_block(*block)
        except CorruptCheckpointError as error:
            refuse(path, error, store.set_aside)
        else:
            logger.error("%s stays, although a rank has found it damaged: rank 0 reads it whole", path)


def open_store(arguments: Arguments, generation: str = "") -> Store:
    """The directory of checkpoints, locked, without what dead ranks have left of their meetings.

    Args:
        generation: of several ranks' start.
    """
    store = Store(
        arguments.directory,
        run_id=uuid.uuid4().hex[:16],
        trust=arguments.trust,
        **dataclasses.asdict(arguments.rules),
    )
    remove_earlier(store.directory, generation)
    return store


def _start_alone(council: Council, arguments: Arguments) -> LoneStart:
    store = open_store(arguments)
    try:
        return LoneStart(store, *reclaim_alone(store, arguments.resume, council))
    except BaseException:
        store.close()
        raise


def start_rank(council: Council, arguments: Arguments, job: Job) -> LoneStart | RankStart:
    """Come to the start with all ranks. Rank 0 opens the directory, and finds the newest step."""
    if council.alone:  # it passes over what is damaged, which ranks cannot do each by itself
        return _start_alone(council, arguments)
    mode, rules = arguments.resume, arguments.rules
    report = StartReport(subjects(arguments, job, RankView(council.rank, council.world_size)), names=_names_of(job))

    def shared(start: Start) -> SharedStore:
        return SharedStore(arguments.directory, run_id=start.run_id, rules=rules, trust=arguments.trust)

    if council.rank:
        left = look(Path(arguments.directory).absolute(), council.rank, locked=False)
        start = council.agree_start(
            dataclasses.replace(report, kept=left.report()),
            assist=lambda start, attempt: left.assist(council, shared(start), attempt, start.dead_run_id),
        )
        return RankStart(council, shared(start), start.step, left, _ranked(start, rules), start.pipelined)
    opened = open_store(arguments, council.generation)

    def choose(reports: Mapping[int, StartReport]) -> int | None:
        reclaim(opened, mode, left, reports, council)
        step = _choose(opened, arguments, job, council.world_size)
        if rules.keep_best:
            known = {one.step: one for one in opened.look() if not isinstance(mode, int) or one.step <= mode}
            best = retention.best(rules, known.values())[: rules.keep_best]
            council.tell_best(tuple((one, known[one].metrics[str(rules.monitor)]) for one in best))
        return step

    try:
        left = look(opened.directory, 0, locked=True)
        start = council.agree_start(dataclasses.replace(report, kept=left.report()), choose, opened.run_id)
    except BaseException:
        opened.close()
        raise
    return RankStart(council, opened, start.step, left, _ranked(start, rules), start.pipelined)


def _ranked(start: Start, rules: Rules) -> tuple[Known, ...]:
    return tuple(Known(step, metrics={str(rules.monitor): value}) for step, value in start.best)


def _choose(store: Store, arguments: Arguments, job: Job, ranks: int) -> int | None:
    """The step to go on from, as ``resume`` asks. Its bytes are verified by the ranks that read them."""

    def take(path: Path) -> int:
        described = glance(path, trust=store.trust)
        if described.world_size != ranks:  # rank 0 reads what is compared for all
            with naming(path), open_checkpoint(path, trust=store.trust) as checkpoint:
                refuse_loss(checkpoint, job, ranks, accepted="ranks" in arguments.accept)
        return described.step

    return as_asked(store, arguments.resume, take, lambda: recover(store.checkpoints(), take, store.set_aside))


def _names_of(job: Job) -> str:
    """Of the models' tensors, which pipeline stages do not have in common."""
    names = sorted(item.name for item in held_tensors(job.models, {}))
    return xxhash.xxh3_128_hexdigest("\0".join(names).encode())


def replica_digests(job: Job, view: RankView) -> dict[str, str]:
    """Digests of what this rank and others must hold alike, by owner, part of the mesh and holders."""
    state = job.walk.current()
    placed = view.placements(state, job.models, job.optimizers)
    hashes: dict[str, xxhash.xxh3_128] = {}
    for item in state.tensors:
        holders = placed[item.name].holders
        if view.rank not in holders or len(holders) == 1 or not item.tensor.nbytes:
            continue
        name = f"{item.name.partition('/')[0]} of {name_ranks(holders)}"
        found = hashes.setdefault(name, xxhash.xxh3_128())
        found.update(f"{item.name}{placed[item.name].box}".encode())
        here = item.tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        found.update(here.reshape(-1).view(torch.uint8).numpy().data)
    return {name: found.hexdigest() for name, found in hashes.items()}
