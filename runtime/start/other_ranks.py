"""What goes on exactly with another number of ranks than saved a version, and what would be lost.

State that ranks hold together is dealt anew, and so are the samples of checkflow's loaders. What a rank had to itself
is not: values of its own under a name that all ranks have, and the place of a loader that deals by itself.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator

import torch
import xxhash

from checkflow.core.boxes import Box, whole
from checkflow.core.errors import MismatchError
from checkflow.core.state import LOADER, is_beside, optimizer_parameters
from checkflow.runtime.format import codec
from checkflow.runtime.format.layout import STORED_TYPES
from checkflow.runtime.format.manifest import owner_of
from checkflow.runtime.job.job import Job
from checkflow.runtime.ranks.records import name_ranks
from checkflow.runtime.state import stages
from checkflow.runtime.state.collect import fits
from checkflow.runtime.state.gathering import stored_in
from checkflow.runtime.store.reader import Checkpoint

logger = logging.getLogger("checkflow")

_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")  # of batch norm: each rank's are as good
_GENERATORS = (tuple(torch.Generator().get_state().shape), (16,))  # of the states of torch's, in memory and on devices
_CHUNK_BYTES = 1 << 26


def refuse_loss(checkpoint: Checkpoint, job: Job, ranks: int, *, accepted: bool) -> None:
    """Refuse a version that other ranks saved if something of it would be lost; log what is not the same.

    Args:
        checkpoint: all of it, not a rank's part.
        ranks: that go on.
        accepted: whether the user accepts the loss; then it is logged.

    Raises:
        MismatchError: something would be lost; the message names the loader or a tensor, and the way out.
    """
    saved = checkpoint.manifest.world_size
    if saved == ranks:
        return
    stages.refuse_shared_names(checkpoint.manifest, job.models, ranks)
    found = itertools.chain(_of_loader(checkpoint, job), _of_tensors(checkpoint, job), _of_objects(checkpoint))
    first = next(found, None)
    if first is None:
        return
    if not accepted:
        raise MismatchError(
            f"{_count(saved)} saved it, and {ranks} would go on: {first}; start with {saved} as before, or accept that "
            'loss with Checkpointer(accept=("ranks",))'
        )
    gone = tuple(range(ranks, saved))
    dropped = f"what {name_ranks(gone)} had alone is dropped" if gone else "new ranks take what rank 0 had"
    logger.warning("step %d goes on with %s in place of %d, as accepted: %s", checkpoint.step, _count(ranks), saved,
                   "; ".join([first, *found, dropped]))  # fmt: skip


def _count(ranks: int) -> str:
    return f"{ranks} rank{'s' if ranks > 1 else ''}"


def _of_loader(checkpoint: Checkpoint, job: Job) -> Iterator[str]:
    """Its place, if that is of a rank alone. All ranks are at the same place: rank 0's says it."""
    state = codec.decode(checkpoint.extra_bytes).get("loader")
    if job.loader is not None and state is not None and (name := job.loader.deals_itself(state)):
        yield (
            f"the loader ({name}) deals to the ranks by itself, so that samples of epoch {state['epoch']} would be "
            "used twice or never"
        )


def _of_objects(checkpoint: Checkpoint) -> Iterator[str]:
    """The first tensor under ``state=`` that rank 0 has not. Other values that differ there are only logged: they may
    be times, or the rank's number."""
    first = codec.decode(checkpoint.extra_bytes).get("job", {}).get("objects", {})
    held, own = stored_in(first).keys(), dict[str, int]()
    for rank in range(1, checkpoint.manifest.world_size):
        if (data := checkpoint.rank_extra_bytes(rank)) is None:
            continue
        objects = codec.decode(data).get("job", {}).get("objects", {})
        if alone := sorted(stored_in(objects).keys() - held):
            yield f"rank {rank} has {alone[0]}, and rank 0 has not"
            return
        for name, state in objects.items():
            if name not in first or codec.encode(state) != codec.encode(first[name]):
                own.setdefault(name, rank)
    for name, rank in own.items():
        logger.warning(
            "state[%r] of rank %d has other values than that of rank 0: each rank keeps its own, a new rank takes "
            "those of rank 0, and those of ranks that are no more are dropped", name, rank,
        )  # fmt: skip


def _of_tensors(checkpoint: Checkpoint, job: Job) -> Iterator[str]:
    """The first tensor of which ranks have values of their own. Statistics of batch norm are only logged, and states of
    torch's generators."""
    copies: dict[str, list[str]] = {}
    for name in checkpoint.manifest.tensors:
        rank, plain = owner_of(name)
        if rank is not None and not plain.startswith(f"{LOADER}/"):  # _of_loader says what is lost of it
            copies.setdefault(plain, []).append(name)
    shapes = _shapes_of_parameters(job)
    statistics = {name for name in copies if name.rpartition(".")[2] in _STATISTICS}
    generators = {name for name in copies if _is_generator(checkpoint, name)}
    others = sorted(
        copies.keys() - statistics - generators, key=lambda name: (name.partition("/")[0] in job.optimizers, name)
    )
    for name in others:
        if odd := _unlike(checkpoint, name, copies[name]):
            yield f"{name} of rank {owner_of(odd)[0]} has other values than that of a rank before it"
            return
        of, shape = name.rpartition(".")[0], checkpoint.manifest.tensors[name].shape
        if of in shapes and not fits(shape, shapes[of]):
            yield f"{name} has the shape {list(shape)} on each rank, as a part of its parameter of {list(shapes[of])}"
            return
    if unlike := [name for name in sorted(statistics) if _unlike(checkpoint, name, copies[name])]:
        more = f" and {len(unlike) - 1} more" if len(unlike) > 1 else ""
        logger.info(
            "ranks have batch-norm statistics of their own, since nothing broadcasts them: of %s%s each rank keeps "
            "its own, and a new rank takes those of rank 0", unlike[0], more,
        )  # fmt: skip

    for name in [name for name in sorted(generators) if _unlike(checkpoint, name, copies[name])]:
        logger.info("ranks have random generators of their own in %s: each rank keeps its own, and a new rank takes "
                    "that of rank 0", name)  # fmt: skip


def _is_generator(checkpoint: Checkpoint, name: str) -> bool:
    """Whether a tensor under ``state=`` is the state of one."""
    entry = checkpoint.manifest.tensors[name]
    return is_beside(name) and entry.dtype == "uint8" and tuple(entry.shape) in _GENERATORS


def _shapes_of_parameters(job: Job) -> dict[str, tuple[int, ...]]:
    """By the name that begins those of an optimizer's state."""
    return {
        f"{owner}/{name}": tuple(parameter.shape)
        for owner, optimizer in job.optimizers.items()
        for name, parameter in optimizer_parameters(job.models, optimizer)
    }


def _unlike(checkpoint: Checkpoint, name: str, copies: list[str]) -> str | None:
    """A copy that differs from the tensor; None: all are alike."""
    first = _digest(checkpoint, name)
    return next((copy for copy in copies if _digest(checkpoint, copy) != first), None)


def _digest(checkpoint: Checkpoint, name: str) -> str:
    """Of a tensor's dtype, shape and values, read in parts."""
    entry = checkpoint.manifest.tensors[name]
    found = xxhash.xxh3_128(f"{entry.dtype}{entry.shape}".encode())
    everything = whole(entry.shape)
    rows = entry.shape[0] if entry.shape else 1
    row_bytes = everything.volume // max(1, rows) * STORED_TYPES[entry.dtype].element_bytes
    step = max(1, _CHUNK_BYTES // max(1, row_bytes))
    for begin in range(0, rows, step):
        box = everything
        if entry.shape:
            offsets, lengths = (begin, *everything.offsets[1:]), (min(step, rows - begin), *entry.shape[1:])
            box = Box(entry.shape, offsets, lengths)
        data = bytearray(box.volume * STORED_TYPES[entry.dtype].element_bytes)
        checkpoint.read_boxes_into([(name, box, memoryview(data))])
        found.update(data)
    return found.hexdigest()
