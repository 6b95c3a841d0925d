"""What must be the same on all ranks, in words, so that a start can say what differs.

Ranks may differ in all that nothing here names: their generators' seeds, batches that a loader of another make deals by
itself, the layers of pipeline stages.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import xxhash

from checkflow.core.state import StateTensor, dtype_name, optimizer_parameters
from checkflow.runtime.arguments import Arguments
from checkflow.runtime.job.job import Job
from checkflow.runtime.ranks.records import HIDDEN, name_ranks
from checkflow.runtime.state.meshes import RankView, ranks_around

_RANKS_OWN = ("on_report",)  # arguments that a rank may have alone
_MOST = 40  # characters of a value that is told in full


def subjects(arguments: Arguments, job: Job, view: RankView) -> dict[str, str]:
    """What this rank says of each subject; see :class:`.ranks.records.StartReport`.

    Raises:
        UnsupportedError: a tensor has no definite place.
    """
    found = {"the number of ranks": str(view.world_size)}
    found |= {f"the argument {name}": _in_words(value) for name, value in _values_of(arguments)}
    found["the models"] = _in_words(sorted(job.models))
    found["the optimizers"] = _in_words(sorted((name, type(one).__name__) for name, one in job.optimizers.items()))
    found["state="] = _in_words(sorted(job.objects))
    together = _together(job, view)
    for owner, tensors in job_tensors(job).items():
        for ranks, items in _by_ranks(tensors, together).items():
            of_ranks = f" of {owner}'s tensors on {name_ranks(ranks)}" if len(ranks) > 1 else f" of {owner}'s tensors"
            names = [item.name for item in items]
            here = f"{HIDDEN}{_digest(sorted(names))}"
            if len(ranks) > 1:
                found[f"the names{of_ranks}{HIDDEN}{_digest(ranks)}"] = HIDDEN + _digest(sorted(names))
                found[f"the shapes{of_ranks}{here}"] = HIDDEN + _digest([tuple(item.held.shape) for item in items])
                found[f"the dtypes{of_ranks}{here}"] = HIDDEN + _digest([dtype_name(one.held.dtype) for one in items])
            # Which gradients belong together follows from it, for wrappers and for scripts that reduce them.
            found[f"the order{of_ranks}{here}"] = HIDDEN + _digest(names)
    for owner, optimizer in job.optimizers.items():
        known = {id(parameter): name for name, parameter in optimizer_parameters(job.models, optimizer)}
        groups = [[known[id(one)] for one in group["params"]] for group in optimizer.param_groups]
        if not any(len(together.get(number, ())) > 1 for number in known):
            continue  # each rank trains its own parameters, as it likes
        here = HIDDEN + _digest(sorted(known.values()))
        found[f"the parameter groups of {owner}{here}"] = HIDDEN + _digest(groups)
        for option, values in _options(optimizer).items():
            found[f"{option} of {owner}{here}"] = _in_words(values[0] if len(set(map(repr, values))) == 1 else values)
    if job.loader is not None:
        found |= {f"the loader's {name}": _in_words(value) for name, value in job.loader.dealt_by().items()}
    return found


def job_tensors(job: Job) -> dict[str, list[StateTensor]]:
    """The models' tensors by model, in the order of their modules."""
    found: dict[str, list[StateTensor]] = {owner: [] for owner in job.models}
    for item in job.walk.current().tensors:
        if (owner := item.name.partition("/")[0]) in found:
            found[owner].append(item)
    return found


def _together(job: Job, view: RankView) -> dict[int, tuple[int, ...]]:
    """By identity, the ranks that hold parts of a tensor, or the same, under one name."""
    state = job.walk.current()
    placed = view.placements(state, job.models, job.optimizers)
    return {id(item.held): ranks_around(item, placed[item.name]) for item in state.tensors}


def _by_ranks(
    tensors: Collection[StateTensor], together: Mapping[int, tuple[int, ...]]
) -> dict[tuple[int, ...], list[StateTensor]]:
    found: dict[tuple[int, ...], list[StateTensor]] = {}
    for item in tensors:
        ranks = together[id(item.held)]
        found.setdefault(ranks if len(ranks) > 1 else (), []).append(item)
    return found


def _values_of(arguments: Any) -> Iterator[tuple[str, Any]]:
    """The arguments as plain values, by name."""
    for one in dataclasses.fields(arguments):
        value = getattr(arguments, one.name)
        if one.name in _RANKS_OWN:
            continue
        if dataclasses.is_dataclass(value):
            yield from _values_of(value)
        else:
            yield one.name, str(Path(value).absolute()) if one.name == "directory" else value


def _options(optimizer: torch.optim.Optimizer) -> dict[str, list[Any]]:
    """Its options that say how it computes, each of all groups. A whole number may be the rank itself."""
    found: dict[str, list[Any]] = {}
    for group in optimizer.param_groups:
        for name, value in group.items():
            value = value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
            if isinstance(value, bool | float | tuple):
                found.setdefault(name, []).append(value)
    return found


def _in_words(value: Any) -> str:
    """A value as text, or the digest of a long one. Of a set the order differs from process to process."""
    text = repr(sorted(value) if isinstance(value, frozenset) else value)
    return text if len(text) <= _MOST else HIDDEN + _digest(text)


def _digest(value: Any) -> str:
    return xxhash.xxh3_64_hexdigest(repr(value).encode())[:12]
