"""Pipeline stages: each rank holds other tensors of one model. What all together saved goes on under other ranks."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from checkflow.core.errors import MismatchError
from checkflow.core.state import optimizer_parameters, parameter_paths
from checkflow.runtime.format import codec
from checkflow.runtime.format.manifest import STAGES, Manifest, is_own
from checkflow.runtime.state.collect import modules_with_extra_state
from checkflow.runtime.store.reader import Checkpoint

Models = Mapping[str, nn.Module]
Optimizers = Mapping[str, torch.optim.Optimizer]


def of_stages(checkpoint: Checkpoint) -> bool:
    """Whether stages saved a version."""
    return STAGES in checkpoint.manifest.info


def job_of_all(checkpoint: Checkpoint, first: Mapping[str, Any], rank: int = 0) -> dict[str, Any]:
    """Extra state of the job, of all ranks together.

    Args:
        first: of ``rank``: what it has counts before what other ranks have.
    """
    jobs = [first]
    if of_stages(checkpoint):
        for other in range(checkpoint.manifest.world_size):
            data = checkpoint.rank_extra_bytes(other) if other else checkpoint.extra_bytes
            if other != rank and data is not None:
                jobs.append(codec.decode(data)["job"])
    return _joined(jobs)


def refuse_own_keys(checkpoint: Checkpoint, job: Mapping[str, Any], ranks: int) -> None:
    """Refuse keys that an optimizer's class has added, if the number of stages is another now: they may number each
    stage's parameters. Raises MismatchError.
    """
    for owner, saved in job["optimizers"].items() if checkpoint.manifest.world_size != ranks else ():
        if saved.get("own") is not None:
            raise MismatchError(
                f"optimizer {owner!r} has {', '.join(map(repr, saved['own']['keys']))} in its state_dict(), so it goes "
                f"on with as many ranks as saved it: {checkpoint.manifest.world_size}, not {ranks}"
            )


def narrowed(job: Mapping[str, Any], models: Models, optimizers: Optimizers, *, pipelined: bool) -> dict[str, Any]:
    """A job's extra state with parameters in the order of these optimizers.

    Args:
        pipelined: these are of one stage: without what other stages hold.
    """
    modules = dict(modules_with_extra_state(models))
    of_models = {_of_optimizers(name, models) for name in parameter_paths(models)}
    found = {}
    for owner, saved in job["optimizers"].items():
        if owner not in optimizers:  # refused later
            found[owner] = saved
            continue
        names = {id(parameter): name for name, parameter in optimizer_parameters(models, optimizers[owner])}
        here = of_models | set(names.values())
        lists = [[names[id(one)] for one in group["params"]] for group in optimizers[owner].param_groups]
        groups = []
        for number, group in enumerate(saved["groups"]):
            order = {name: place for place, name in enumerate(lists[number] if number < len(lists) else ())}
            kept = [name for name in group["params"] if name in here or not pipelined]
            groups.append({**group, "params": sorted(kept, key=lambda name: order.get(name, len(order)))})
        values = {name: one for name, one in _values(saved).items() if name in here or not pipelined}
        found[owner] = {**saved, "groups": groups, **_with_values(values)}
    kept_modules = {name: value for name, value in job["modules"].items() if name in modules or not pipelined}
    return {**job, "modules": kept_modules, "optimizers": found}


def held_elsewhere(
    named: Collection[str], held: Collection[str], models: Models, optimizers: Collection[str]
) -> tuple[set[str], tuple[str, ...]]:
    """Names of a version that other stages must hold: all of them, and those that are of models.

    Args:
        named: of the version.
        held: of this rank's job, each under all of its names.
    """
    lacking = sorted(name for name in named if name not in held and name.partition("/")[0] in models)
    parameters = {_of_optimizers(name, models) for name in lacking}

    def of_lacking(name: str) -> bool:
        owner, _, rest = name.partition("/")
        return owner in optimizers and any(start in parameters for start in _starts(rest))

    return {*lacking, *(name for name in named if name not in held and of_lacking(name))}, tuple(lacking)


def refuse_shared_names(described: Manifest, models: Models, ranks: int) -> None:
    """Refuse a version in which several stages hold a parameter under one name, if their number is another now: nothing
    says whose values count where. Raises MismatchError.
    """
    if STAGES not in described.info or described.world_size == ranks:
        return
    parameters = parameter_paths(models).keys()
    for name in filter(is_own, described.tensors):
        shared = name.split("/", 2)[2]
        if shared in parameters:
            raise MismatchError(
                f"several stages hold {shared}, each with values of its own, so it goes on with as many ranks as saved "
                f"it: {described.world_size}, not {ranks}; give the parameters of each stage names of their own"
            )


def _of_optimizers(name: str, models: Models) -> str:
    """What optimizers call a model's parameter."""
    return name.replace("/", ".", 1) if len(models) > 1 else name.partition("/")[2]


def _starts(name: str) -> Iterator[str]:
    while name:
        name = name.rpartition(".")[0]
        yield name


def _joined(jobs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    first = jobs[0]
    found: dict[str, Any] = {}
    for owner, saved in first["optimizers"].items():
        of_owner = [job["optimizers"][owner] for job in jobs if owner in job["optimizers"]]
        if any(len(one["groups"]) != len(saved["groups"]) for one in of_owner):
            raise MismatchError(f"optimizer {owner!r} has not the same number of parameter groups on all stages")
        groups = []
        for number, group in enumerate(saved["groups"]):
            names = dict.fromkeys(name for one in of_owner for name in one["groups"][number]["params"])
            groups.append({**group, "params": list(names)})
        values: dict[str, tuple[Any, list[int]]] = {}
        for one in of_owner:
            for name, value in _values(one).items():
                values.setdefault(name, value)
        found[owner] = {**saved, "groups": groups, **_with_values(values)}
    modules = {name: value for job in reversed(jobs) for name, value in job["modules"].items()}
    return {**first, "modules": modules, "optimizers": found}


def _values(saved: Mapping[str, Any]) -> dict[str, tuple[Any, list[int]]]:
    """Of each parameter, values that are no tensors of the state, and which of their leaves lie on the device."""
    apart, begin, found = set(saved.get("values_apart", ())), 0, {}
    for name, value in saved["values"].items():
        count = len(pytree.tree_leaves(value))
        found[name] = value, [number for number in range(count) if begin + number in apart]
        begin += count
    return found


def _with_values(values: Mapping[str, tuple[Any, list[int]]]) -> dict[str, Any]:
    apart, begin = [], 0
    for value, on_device in values.values():
        apart += [begin + number for number in on_device]
        begin += len(pytree.tree_leaves(value))
    return {"values": {name: value for name, (value, _) in values.items()}, "values_apart": apart}
