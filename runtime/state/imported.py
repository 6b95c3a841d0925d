"""Fits imported weights, and an optimizer's state if it came along, to a job: what was not imported starts anew."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import nn

from checkflow.core.errors import MismatchError
from checkflow.core.state import optimizer_parameters
from checkflow.runtime.state.collect import ANY_CLASS_S, modules_with_extra_state, refuse_other_class

logger = logging.getLogger("checkflow")

HINT = (
    "these are imported weights: import into another directory what the job has (--weights-only leaves the "
    "optimizer's state out), or take what fits with checkflow.load_weights(model, source, strict=False)"
)
Models = Mapping[str, nn.Module]
Optimizers = Mapping[str, torch.optim.Optimizer]


def accept_any_tie(sources: MutableMapping[str, str], ties: Collection[tuple[str, str]]) -> None:
    """Let a tensor of the job have any of its names in the source."""
    for further, name in ties:
        if name not in sources and further in sources:
            sources[name] = sources[further]


def refuse_mismatch(job: Mapping[str, Any], tensors: Collection[str], models: Models, optimizers: Optimizers) -> None:
    """Compare what was imported, all but shapes, with the job, before anything is restored. Raises MismatchError.

    Args:
        tensors: names of the imported ones.
    """
    if odd := sorted(job["modules"].keys() - dict(modules_with_extra_state(models)).keys()):
        raise MismatchError(f"the checkpoint's extra state of {odd[0]} is not in the job")
    for owner, saved in job["optimizers"].items():
        if owner not in optimizers:
            raise MismatchError(f"the checkpoint's state of optimizer {owner!r} is not in the job")
        refuse_other_class(owner, optimizers[owner], saved)
        known = {name for name, _ in optimizer_parameters(models, optimizers[owner])}
        of_tensors = {name.partition("/")[2].rpartition(".")[0] for name in tensors if name.startswith(f"{owner}/")}
        if odd := sorted((of_tensors | saved["values"].keys()) - known):
            raise MismatchError(f"optimizer {owner!r} of the job has no parameter {odd[0]}, of which there is state")


def restore_extra(job: Mapping[str, Any], models: Models, optimizers: Optimizers) -> None:
    """Restore what was imported and is no tensor. The optimizers keep the job's hyperparameters."""
    for name, module in modules_with_extra_state(models):
        if name in job["modules"]:
            module.set_extra_state(job["modules"][name])
    for owner, saved in job["optimizers"].items():
        parameters = dict(optimizer_parameters(models, optimizers[owner]))
        for name, values in saved["values"].items():
            optimizers[owner].state[parameters[name]].update(values)


def log(
    where: object, job: Mapping[str, Any], models: Models, optimizers: Optimizers, objects: Collection[str]
) -> None:
    """Say what begins anew, and which hyperparameters were others."""
    modules = dict(modules_with_extra_state(models)).keys() - job["modules"].keys()
    anew = ", ".join([*(name for name in optimizers if name not in job["optimizers"]), *objects, *sorted(modules)])
    held = " and ".join(["weights", *(f"state of {owner}" for owner in job["optimizers"])])
    logger.warning(
        "%s holds imported %s and nothing else: %sthe place in the data and random numbers begin anew",
        where, held, f"{anew}, " if anew else "",
    )  # fmt: skip
    for owner, saved in job["optimizers"].items():
        if missing := sorted(_without_state(models, optimizers[owner])):
            logger.warning("%s has no state for %d parameters, such as %s: it begins anew for them",
                           where, len(missing), missing[0])  # fmt: skip
        for option, then, now in _differences(saved, models, optimizers[owner]):
            logger.warning(
                "%s of %s was %s where it was imported from: taking the script's %s", option, owner, then, now
            )


def _without_state(models: Models, optimizer: torch.optim.Optimizer) -> Iterator[str]:
    for name, parameter in optimizer_parameters(models, optimizer):
        if parameter.requires_grad and not optimizer.state.get(parameter):
            yield name


def _differences(
    saved: Mapping[str, Any], models: Models, optimizer: torch.optim.Optimizer
) -> Iterator[tuple[str, Any, Any]]:
    """Options that differ, each once, with its value of the first parameter that has another one."""
    names = {id(parameter): name for name, parameter in optimizer_parameters(models, optimizer)}
    groups = {names[id(one)]: group for group in optimizer.param_groups for one in group["params"]}
    seen = set(ANY_CLASS_S)
    for then in saved["groups"]:
        for now in (groups[name] for name in then["params"] if name in groups):
            for option in [key for key in then if key in now and key not in seen]:
                before, after = _plain(then[option]), _plain(now[option])
                if before != after:
                    seen.add(option)
                    yield option, before, after


def _plain(value: Any) -> Any:
    """A value that can be compared: numbers for tensors of one, lists for tuples."""
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else value.tolist()
    return [_plain(one) for one in value] if isinstance(value, tuple | list) else value
