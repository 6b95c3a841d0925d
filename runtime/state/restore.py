"""Restores a checkpoint in place into a live job's tensors, after all names, shapes and dtypes were compared.

Each block is read once and verified before it is copied. After damage half-way, an older checkpoint overwrites
everything; if there is none, the job is marked (:mod:`.half_restored`).
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import xxhash
from torch import nn

from checkflow.core.boxes import Box, whole
from checkflow.core.errors import CheckflowError, CorruptCheckpointError, MismatchError, StorageError
from checkflow.core.state import (
    TrainingState,
    dtype_name,
    is_beside,
    memory_order,
    optimizer_parameters,
    training_device,
)
from checkflow.runtime.format import codec
from checkflow.runtime.format.layout import STORED_TYPES
from checkflow.runtime.format.manifest import Manifest, TensorEntry, names_of_rank
from checkflow.runtime.state import half_restored, imported, own_keys, stages
from checkflow.runtime.state.collect import (
    GROWN,
    Stateful,
    derived_generators,
    drop_state,
    make_lazy_state,
    make_state_by_stepping,
    refuse_extra_mismatch,
    refuse_unfit_state,
    restore_extra,
    restore_optimizers,
    share_lazy_state,
    with_tensors,
)
from checkflow.runtime.state.gathering import make_tensor, stored_in
from checkflow.runtime.state.meshes import ALONE, RankView
from checkflow.runtime.state.objects import Fitted, fit, refuse_unknown
from checkflow.runtime.store.discovery import open_verified, recover
from checkflow.runtime.store.files import has_manifest, step_name
from checkflow.runtime.store.filling import fill_all
from checkflow.runtime.store.parts import narrow_to
from checkflow.runtime.store.reader import Checkpoint, open_checkpoint
from checkflow.runtime.store.store import Store
from checkflow.runtime.store.trust import Trust
from checkflow.runtime.system.aligned_memory import no_collection

logger = logging.getLogger("checkflow")

_Job = tuple[
    Mapping[str, nn.Module], Mapping[str, torch.optim.Optimizer], Mapping[str, Stateful], Collection[str] | None
]
_Extra = Mapping[str, Any]
_T = TypeVar("_T")


@dataclass(frozen=True)
class Resumed:
    """What a restore returns besides the job's state."""

    step: int
    extra: Mapping[str, Any]  # as the checkpointer saved it
    of_this_rank: bytes | None = None  # extra state that this rank alone saved; None: it was not there, or it is rank 0
    run_id: str = ""  # of the run that made the checkpoint
    fitted: Fitted | None = None  # which of the job's objects went on; None: it was an import, which has none

    @property
    def imported(self) -> bool:
        """Whether only weights were restored."""
        return "imported" in self.extra


class _Restore:
    """One restore, and whether it, or one before it, has begun to change the job."""

    def __init__(
        self,
        job: _Job,
        place: Callable[[_Extra], None],
        check: Callable[[Checkpoint], None],
        fresh: Collection[str],
        *,
        begun: bool,
    ) -> None:
        self.job, self.place, self.check, self.fresh, self.begun = job, place, check, fresh, begun

    def run(self, checkpoint: Checkpoint) -> Resumed:
        with naming(checkpoint.path):
            try:
                self.check(checkpoint)
                return restore(checkpoint, *self.job, fresh=self.fresh, place=self.place, begin=self._begin)
            except MismatchError:
                if not self.begun:
                    checkpoint.verify()  # a mismatch counts only if it is not damage
                raise

    def _begin(self) -> None:
        self.begun = True


def resume_from(
    store: Store,
    mode: str | int,
    models: Mapping[str, nn.Module],
    optimizers: Mapping[str, torch.optim.Optimizer],
    objects: Mapping[str, Stateful],
    *,
    host_tensors: Collection[str] | None = (),
    fresh: Collection[str] = (),
    place: Callable[[_Extra], None] = lambda extra: None,
    check: Callable[[Checkpoint], None] = lambda checkpoint: None,
) -> Resumed | None:
    """Restore what ``Checkpointer(resume=mode)`` asks for; None if the job starts anew.

    Raises StorageError if the mode demands a checkpoint that does not exist; after other errors a changed job is
    marked.

    Args:
        fresh: names of objects that may begin anew, see :func:`.objects.fit`.
        place: given the extra state, moves the loop before state is changed, or raises MismatchError. Called again for
            an older checkpoint if a newer one turns out to be damaged.
        check: called before that with each checkpoint; likewise.
    """
    begun = half_restored.is_marked(models, optimizers)
    found = _Restore((models, optimizers, objects, host_tensors), place, check, fresh, begun=begun)
    try:
        half_restored.lift(models, optimizers)
        resumed = _resume(store, mode, found)
        if resumed is None and found.begun:
            raise CorruptCheckpointError(f"{store.directory} holds no whole checkpoint")
    except BaseException as error:
        if not found.begun:
            raise
        half_restored.mark(models, optimizers)
        if isinstance(error, CheckflowError):
            raise type(error)(f"{error}; {half_restored.WARNING}") from error
        raise
    if resumed is not None:
        if isinstance(mode, int):
            store.rewind(mode)  # only now: a refused restore must hide nothing
        store.went_on_from(resumed.step)
    return resumed


def _resume(store: Store, mode: str | int, found: _Restore) -> Resumed | None:
    def exactly(path: Path) -> Resumed:
        with open_verified(path, store.trust) as checkpoint:  # whole first: no other one could repair a half restore
            return found.run(checkpoint)

    return as_asked(store, mode, exactly, lambda: _restore_newest(store, found, anew=mode == "auto"))


def as_asked(
    store: Store, mode: str | int, exactly: Callable[[Path], _T], newest: Callable[[], _T | None]
) -> _T | None:
    """What a job with ``Checkpointer(resume=mode)`` goes on from; None: it starts anew.

    Args:
        exactly: takes the checkpoint of the step asked for.
        newest: takes the newest one, if there is one.

    Raises:
        StorageError: the mode demands a checkpoint that does not exist, or an empty directory; and what these raise.
    """
    paths = store.checkpoints()
    if mode == "never":
        if paths:
            raise StorageError(f'resume="never", but {store.directory} holds {paths[0].name}: choose another one')
        return None
    if isinstance(mode, int):
        path = store.directory / step_name(mode)
        if path not in paths:
            raise StorageError(f"resume={mode}, but {store.directory} holds no checkpoint of that step")
        return exactly(path)
    found = newest()
    if found is None and mode == "must":
        raise StorageError(f'resume="must", but {store.directory} holds no valid checkpoint')
    return found


def _restore_newest(store: Store, found: _Restore, *, anew: bool) -> Resumed | None:
    """Restore the newest whole checkpoint, as :func:`.store.discovery.recover` finds it, reading it once.

    If the job may start ``anew``, the oldest checkpoint is verified whole first: after damage its state must be
    unchanged.
    """
    paths = store.checkpoints()
    older = 0  # index of the next older one with a manifest; kept, since there may be many

    def take(path: Path) -> Resumed:
        nonlocal older
        number = paths.index(path) + 1
        if older < number:
            older = next((n for n in range(number, len(paths)) if has_manifest(paths[n])), len(paths))
        first = anew and not found.begun and older == len(paths)
        with open_checkpoint(path, ahead=not first, trust=store.trust) as checkpoint:
            if first:
                checkpoint.verify()
            return found.run(checkpoint)

    return recover(paths, take, store.set_aside)


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Have a mismatch name the checkpoint and say what can be done."""
    try:
        yield
    except MismatchError as error:
        found = str(error).removeprefix(f"{path}: ")
        raise MismatchError(f"{path}: {found}; run the job as it was, or pass another directory") from error


def restore(
    checkpoint: Checkpoint,
    models: Mapping[str, nn.Module],
    optimizers: Mapping[str, torch.optim.Optimizer],
    objects: Mapping[str, Stateful],
    host_tensors: Collection[str] | None = (),
    *,
    fresh: Collection[str] = (),
    place: Callable[[_Extra], None] = lambda extra: None,
    begin: Callable[[], None] = lambda: None,
    view: RankView = ALONE,
) -> Resumed:
    """Make the job's state equal to the checkpoint's, bit for bit, with every byte verified.

    Args:
        view: a rank's: it restores its parts of tensors, and verifies what it reads; see :func:`restore_rank`.
        host_tensors: names of state tensors that optimizers keep in host memory; None: unknown, assume torch's step
            counters.
        fresh: names of objects that may begin anew, see :func:`.objects.fit`.
        place: called when the job's parts fit, before ``begin``, with the checkpoint's extra state.
        begin: called before the first change.

    Raises:
        MismatchError: the checkpoint is of another job; nothing was changed.
        ValueError: ``fresh`` has a name that nobody knows; nothing was changed.
        CorruptCheckpointError, StorageError: a checksum is wrong, or a file cannot be read; if ``begin`` was called,
            the job's state is undefined.
    """
    own = checkpoint.rank_extra_bytes(view.rank)
    extra = _extra_of(checkpoint, own, models, optimizers, view)
    if from_import := "imported" in extra:
        given = optimizers, objects
        optimizers = {name: one for name, one in optimizers.items() if name in extra["job"]["optimizers"]}
    with no_collection():
        state, live, boxes = _look(models, optimizers, view)
    held = names_of_rank(checkpoint.manifest.tensors, view.rank)
    of_loader = stored_in(extra.get("loader"))
    alone = stored_in(extra["job"]) | of_loader
    if lacking := sorted(alone.keys() - held.keys()):
        raise CorruptCheckpointError(f"{checkpoint.path} lacks the tensor {lacking[0]}, which its extra state names")
    named = {name: source for name, source in held.items() if name not in alone and not is_beside(name)}
    stages.refuse_shared_names(checkpoint.manifest, models, view.world_size)
    sources = {**named, **dict(checkpoint.ties)}
    compare = functools.partial(_refuse_mismatch, checkpoint, named, sources, models, optimizers)
    if from_import:
        imported.accept_any_tie(sources, state.ties)
        try:
            imported.refuse_mismatch(extra["job"], named, models, optimizers)
            compare(live, boxes, state.ties)
        except MismatchError as error:
            where = str(checkpoint.path)
            found = str(error).removeprefix(f"{where}: ").removesuffix(GROWN)
            raise MismatchError(f"{where}: {found}; {imported.HINT}") from None
        refuse_unknown(fresh, objects)
    else:
        compare(live, boxes, state.ties)
        refuse_extra_mismatch(extra["job"], models, optimizers)
        fitted = fit(extra["job"], objects, fresh, extra.get("dropped", ()))
    # Once: an optimizer that has not stepped yet lacks state for every parameter.
    parameters = {owner: dict(optimizer_parameters(models, optimizer)) for owner, optimizer in optimizers.items()}
    for name in sorted(named.keys() - live.keys()):
        if (owner := name.partition("/")[0]) in optimizers:
            shape = tuple(checkpoint.manifest.tensors[named[name]].shape)
            refuse_unfit_state(name, optimizers[owner], parameters[owner], shape)
    device = training_device(models)
    beside = {
        name: make_tensor(checkpoint.manifest.tensors[held[name]], device if one.apart else torch.device("cpu"))
        for name, one in alone.items()
    }
    if of_loader:  # it may refuse the checkpoint, and that before any of the job's state is changed
        with no_collection():
            fill_all(checkpoint, [(held[name], beside[name], None) for name in of_loader])
        extra = {**extra, "loader": with_tensors(extra["loader"], models, optimizers, beside)}
    place(extra)
    begin()
    if makers := _makers(named, live, parameters):
        for owner in makers:
            make_state_by_stepping(optimizers[owner])
        state, live, boxes = _look(models, optimizers, view)
        compare(live, boxes, state.ties)
    gone = {name for name in (*live, *dict(state.ties)) if name not in sources}
    if not from_import:
        gone |= _in_another_order(checkpoint, state, sources)
    drop_state(gone, models, optimizers)
    live = {name: tensor for name, tensor in live.items() if name not in gone}
    ties = {further: name for further, name in state.ties if name in live}
    for name, source in named.items():
        owner = name.partition("/")[0]
        if name not in live and name not in ties:
            live[name] = make_lazy_state(
                name, optimizers[owner], parameters[owner], checkpoint.manifest.tensors[source],
                on_host=None if host_tensors is None else name in host_tensors, as_parameter=from_import,
            )  # fmt: skip
    for further, name in checkpoint.ties:
        owner = further.partition("/")[0]
        if owner in optimizers and further not in live and further not in ties:
            share_lazy_state(further, optimizers[owner], parameters[owner], live[ties.get(name, name)])
    if boxes:  # what was made lies in parts, too
        state, live, boxes = _look(models, optimizers, view)
        live = {name: tensor for name, tensor in live.items() if name in sources}
        compare(live, boxes, state.ties)
    targets = [
        *((sources[name], tensor, boxes.get(name)) for name, tensor in live.items()),
        *((held[name], tensor, None) for name, tensor in beside.items() if name not in of_loader),
    ]
    with no_collection():
        fill_all(checkpoint, targets)
    if view.whole:
        checkpoint.verify_rest()
    if not from_import:
        job = with_tensors(fitted.saved, models, optimizers, beside)
        restore_optimizers(job, models, optimizers)
        if own_keys.hand_back(optimizers, job["optimizers"]):
            with no_collection():
                fill_all(checkpoint, targets)  # the user's code had the tensors
        restore_extra(job, models, fitted.objects)
        return Resumed(checkpoint.step, extra, own, checkpoint.manifest.run_id, fitted)
    imported.restore_extra(extra["job"], models, optimizers)
    if not view.rank:
        imported.log(checkpoint.path, extra["job"], models, *given)
    return Resumed(checkpoint.step, extra, own, checkpoint.manifest.run_id)


def _extra_of(
    checkpoint: Checkpoint, own: bytes | None, models: Mapping[str, nn.Module],
    optimizers: Mapping[str, torch.optim.Optimizer], view: RankView,
) -> _Extra:  # fmt: skip
    """The checkpoint's extra state, as this process restores it; ``own``: what its rank had to itself."""
    extra: _Extra = codec.decode(checkpoint.extra_bytes)
    if own is not None:
        extra = {**extra, **codec.decode(own)}
    elif view.rank and extra.get("generators") is not None:  # an import has none
        extra = {**extra, "generators": derived_generators(extra["generators"], view.rank)}
    if view.pipelined or stages.of_stages(checkpoint):
        stages.refuse_own_keys(checkpoint, extra["job"], view.world_size)
        joined = stages.job_of_all(checkpoint, extra["job"], view.rank)
        extra = {**extra, "job": stages.narrowed(joined, models, optimizers, pipelined=view.pipelined)}
    return extra


def restore_rank(
    path: Path,
    view: RankView,
    models: Mapping[str, nn.Module],
    optimizers: Mapping[str, torch.optim.Optimizer],
    objects: Mapping[str, Stateful],
    host_tensors: Collection[str] | None = (),
    *,
    fresh: Collection[str] = (),
    place: Callable[[_Extra], None] = lambda extra: None,
    begin: Callable[[], None] = lambda: None,
    trust: Trust | None = None,
) -> Resumed:
    """:func:`restore` of one of several ranks, from a version that any number of ranks saved.

    It opens the files that hold something of its parts, and reads their blocks once. No tensor is whole in memory.
    """
    state, _, _ = _look(models, optimizers, view)
    placed = view.placements(state, models, optimizers)
    placed |= {further: placed[name] for further, name in state.ties}
    parameters = {
        f"{owner}/{path}": parameter
        for owner, optimizer in optimizers.items()
        for path, parameter in optimizer_parameters(models, optimizer)
    }
    of_parameter = {id(item.held): placed[item.name].box for item in state.tensors if item.kind == "parameter"}

    def box_of(name: str, entry: TensorEntry) -> Box:
        """What this rank needs of a tensor of the version."""
        if name in placed:
            box = placed[name].box
        else:
            of = name.rpartition(".")[0]
            # Of state that the optimizer has yet to make; what is not in the job is refused later. What lies in a list
            # or is part of a tensor is read whole.
            box = (of_parameter.get(id(parameters[of])) if of in parameters else None) or whole(entry.shape)
        return box if box.shape == entry.shape else whole(entry.shape)  # a number, or a mismatch that is found later

    def narrow(described: Manifest) -> Manifest:
        stages.refuse_shared_names(described, models, view.world_size)
        named = names_of_rank(described.tensors, view.rank)
        elsewhere, _ = stages.held_elsewhere(named, placed, models, optimizers) if view.pipelined else (set(), ())
        wanted: dict[str, Box] = {}
        further = [(name, of) for name, of in described.ties if name in placed]
        for name, source in (*named.items(), *further):
            if name in elsewhere:
                continue
            box = box_of(name, described.tensors[source])
            if wanted.setdefault(source, box) != box:  # two tensors of the job that are one in the version
                wanted[source] = whole(box.shape)
        return narrow_to(described, wanted, view.rank)

    with naming(path), open_checkpoint(path, narrow, trust=trust) as checkpoint:
        return restore(
            checkpoint, models, optimizers, objects, host_tensors, fresh=fresh, place=place, begin=begin, view=view
        )


def _look(
    models: Mapping[str, nn.Module], optimizers: Mapping[str, torch.optim.Optimizer], view: RankView
) -> tuple[TrainingState, dict[str, torch.Tensor], dict[str, Box]]:
    """The job's state, its tensors (of a rank: its parts) by name, and of a rank their boxes."""
    state = view.state(models, optimizers)
    live = {item.name: item.tensor for item in state.tensors if not item.inside}  # those are made anew
    placed = view.placements(state, models, optimizers)
    return state, live, {name: one.box for name, one in placed.items()}


def _in_another_order(checkpoint: Checkpoint, state: TrainingState, sources: Mapping[str, str]) -> set[str]:
    """Optimizer state whose dimensions have another order in memory than in the job that saved it: made anew."""
    shared = {name for pair in state.ties for name in pair}
    found = set()
    for item in state.tensors:
        if item.kind == "optimizer" and item.whole is None and not item.inside and item.name not in shared:
            entry = checkpoint.manifest.tensors.get(sources.get(item.name, ""))
            order = memory_order(item.tensor)
            row_major = tuple(range(item.tensor.dim()))
            if entry is not None and order is not None and (entry.permutation or row_major) != order:
                found.add(item.name)
    return found


def _makers(
    named: Collection[str],
    live: Mapping[str, torch.Tensor],
    parameters: Mapping[str, Mapping[str, torch.Tensor]],
) -> list[str]:
    """The optimizers whose missing state only they can make: part of a tensor subclass, not a plain tensor."""
    makers = []
    missing = [name.partition("/") for name in set(named) - live.keys()]
    for owner, paths in parameters.items():
        odd = [key for of, _, key in missing if of == owner and key.rpartition(".")[0] not in paths]
        if any(key.startswith(f"{path}.") for key in odd for path in paths):
            makers.append(owner)
    return makers


def _refuse_mismatch(
    checkpoint: Checkpoint,
    named: Mapping[str, str],
    sources: Mapping[str, str],
    models: Mapping[str, nn.Module],
    optimizers: Mapping[str, torch.optim.Optimizer],
    live: Mapping[str, torch.Tensor],
    boxes: Mapping[str, Box],
    ties: Collection[tuple[str, str]],
) -> None:
    """Compare job and checkpoint. ``named``: what the job calls the checkpoint's tensors; ``boxes``: a rank's parts."""
    tied, tensors = dict(ties), checkpoint.manifest.tensors
    for name, tensor in live.items():
        if name not in sources:
            if name.partition("/")[0] in models:
                raise MismatchError(f"{checkpoint.path}: the job's {name} is not in the checkpoint{GROWN}")
            continue
        _compare(checkpoint, name, tensor, tensors[sources[name]], boxes.get(name))
    for name, source in named.items():
        owner = name.partition("/")[0]
        if name not in live and name not in tied and owner not in optimizers:
            raise MismatchError(f"{checkpoint.path}: the checkpoint's {name} is not in the job{GROWN}")
        first = tied.get(name, name)
        if (other := sources.get(first, source)) != source:
            read = functools.partial(_read, checkpoint, boxes.get(first))
            refuse_difference(checkpoint.path, other, source, read, "job")


def refuse_difference(
    where: str | Path, name: str, further: str, read: Callable[[str], tuple[str, bytearray]], owner: str
) -> None:
    """Two names of one tensor must have one value in what it is set from.

    Args:
        read: gives a tensor's dtype and shape, in words, and its bytes.
        owner: of the tensor.

    Raises:
        MismatchError: they do not.
    """

    def digest(one: str) -> str:
        kind, data = read(one)  # one after the other: such a tensor may be a model's largest
        return f"{kind} {xxhash.xxh3_128_hexdigest(data)}"

    if digest(name) != digest(further):
        raise MismatchError(
            f"{where} has different values for {name} and {further}, which are one tensor in the {owner}"
        )


def _read(checkpoint: Checkpoint, box: Box | None, name: str) -> tuple[str, bytearray]:
    """A tensor's dtype and shape, and its bytes, or those of a rank's part of it."""
    entry = checkpoint.manifest.tensors[name]
    if box is None or box.shape != entry.shape:
        box = whole(entry.shape)
    data = bytearray(box.volume * STORED_TYPES[entry.dtype].element_bytes)
    checkpoint.read_boxes_into([(name, box, memoryview(data))])
    return f"{entry.dtype}{list(entry.shape)}", data


def _compare(checkpoint: Checkpoint, name: str, tensor: torch.Tensor, entry: TensorEntry, box: Box | None) -> None:
    shape = tensor.shape if box is None else box.shape
    if shape == entry.shape and dtype_name(tensor.dtype) == entry.dtype:  # nearly always: formatting is slow
        return
    have, want = f"{dtype_name(tensor.dtype)}{list(shape)}", f"{entry.dtype}{list(entry.shape)}"
    raise MismatchError(f"{checkpoint.path}: {name} is {want} in the checkpoint, {have} in the job{GROWN}")
