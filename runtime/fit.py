"""Whether a plan fits a live job, and what is refused before training begins."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from checkflow.errors import MismatchError, UnsupportedError
from checkflow.plan import Plan, describe_mismatch
from checkflow.runtime.loader import DataLoader
from checkflow.state import TrainingState, collect_state, dtype_name, optimizer_implementation, optimizer_parameters

Models = Mapping[str, nn.Module]
Optimizers = Mapping[str, torch.optim.Optimizer]


def check_arguments(
    *, loader: object, every: object, host_buffers: object, resume: object, on_error: object, audit: object
) -> None:
    """Refuse what ``Checkpointer`` cannot work with.

    Raises:
        UnsupportedError: the loader is not one of checkflow's.
        ValueError: any other argument is out of its range.
    """
    if loader is not None and not isinstance(loader, DataLoader):
        raise UnsupportedError(
            f"loader is a {type(loader).__name__}: pass a checkflow.DataLoader (it has the arguments of torch's), "
            "or none and iterate checkpointer.steps()"
        )
    if every is not None and not _is_count(every, 1):
        raise ValueError(f"every must be a whole number of iterations, at least 1, or None, not {every!r}")
    if not _is_count(host_buffers, 1):
        raise ValueError(f"host_buffers must be a whole number of at least 1, not {host_buffers!r}")
    if resume not in ("auto", "never", "must") and not _is_count(resume, 1):
        raise ValueError(f'resume must be "auto", "never", "must" or a step, not {resume!r}')
    if on_error not in ("warn", "raise"):
        raise ValueError(f'on_error must be "warn" or "raise", not {on_error!r}')
    if not _is_count(audit, 0):
        raise ValueError(f"audit must be a whole number of at least 0, not {audit!r}")


def _is_count(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def refuse_devices(models: Models, optimizers: Optimizers) -> None:
    """Refuse state that no copy engine of this version can copy.

    Raises:
        UnsupportedError: a state tensor does not lie in host memory.
    """
    for item in collect_state(models, optimizers).tensors:
        if item.tensor.device.type != "cpu":
            raise UnsupportedError(f"{item.name} lies on {item.tensor.device}: this version trains on the CPU only")


def implementations(models: Models, optimizers: Optimizers) -> dict[str, str]:
    """Optimizer name to implementation, as plans name it."""
    devices = (parameter.device.type for model in models.values() for parameter in model.parameters())
    device = next(devices, "cpu")
    return {name: optimizer_implementation(optimizer, device) for name, optimizer in optimizers.items()}


def refuse_other_job(plan: Plan, state: TrainingState, optimizers: Mapping[str, str]) -> None:
    """Hold the state that exists, and the optimizers' implementations, against the plan's fingerprint.

    Optimizer state that is planned and does not exist is let pass: optimizers make it late (at their first step, or
    when a parameter gets its first gradient).

    Args:
        optimizers: name to implementation.

    Raises:
        MismatchError: the plan was made for another job; it says what differs.
    """
    live = {item.name: (tuple(item.tensor.shape), dtype_name(item.tensor.dtype)) for item in state.tensors}
    late = {
        spec.name: (spec.shape, spec.dtype)
        for spec in plan.fingerprint.state
        if spec.name not in live and spec.name.partition("/")[0] in optimizers
    }
    lines = describe_mismatch(plan, {**live, **late}, dict(optimizers))
    if lines:
        more = f" (and {len(lines) - 1} more differences)" if len(lines) > 1 else ""
        raise MismatchError(f"the plan was made for another job: {lines[0]}{more}; make a new one: checkflow plan")


def undated_parameters(
    plan: Plan, models: Models, optimizers: Optimizers
) -> dict[str, tuple[tuple[str, torch.Tensor], ...]]:
    """By optimizer: parameters that it could write although the plan saw no write (they were frozen then)."""
    undated = {name for name, deadline in plan.deadlines.items() if deadline is None}
    tensors = [item for item in collect_state(models, {}).tensors if item.name in undated]
    found = {}
    for owner, optimizer in optimizers.items():
        managed = {id(parameter) for _, parameter in optimizer_parameters(models, optimizer)}
        found[owner] = tuple((item.name, item.tensor) for item in tensors if id(item.tensor) in managed)
    return found
