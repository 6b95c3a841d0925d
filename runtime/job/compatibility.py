"""Holds a plan against a live job: can its state be copied, does the plan fit, does ``every`` suit its interval, and
what to guard in case the job branches or unfreezes parameters.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from checkflow.anchors.regions import compiled_regions
from checkflow.core.errors import MismatchError, UnsupportedError
from checkflow.core.graph import BOUNDARY, AnchorKey, AnchorKind
from checkflow.core.plan import Plan, describe_mismatch
from checkflow.core.state import (
    TrainingState,
    collect_state,
    dtype_name,
    is_beside,
    optimizer_implementation,
    optimizer_parameters,
)

logger = logging.getLogger("checkflow")

Models = Mapping[str, nn.Module]
Optimizers = Mapping[str, torch.optim.Optimizer]


def check_every(every: int | None, interval: int) -> None:
    """Refuse checkpoints at boundaries that the plan does not capture, by a ValueError."""
    if every is not None and every % interval:
        below = every - every % interval
        near = f"{below} or {below + interval}" if below else str(interval)
        raise ValueError(f"every={every} is no multiple of the plan's interval of {interval}: use {near}")


def round_every(every: int | None, interval: int) -> int | None:
    """Round ``every`` up to a multiple of the plan's interval, and log a change."""
    if every is None or every % interval == 0:
        return every
    rounded = every + interval - every % interval
    logger.warning(
        "every=%d is no multiple of the interval of this job's plan, %d: from now on a checkpoint every %d iterations",
        every, interval, rounded,
    )  # fmt: skip
    return rounded


def copied_device(models: Models, optimizers: Optimizers, *, of_a_rank: bool = False) -> torch.device:
    """The device that a job's state is copied from: its GPU, or the CPU if no state is on a GPU.

    Raises UnsupportedError for state that no copy engine can copy, or that other processes may write.
    """
    state = collect_state(models, optimizers, of_a_rank=of_a_rank)
    _refuse_shared(state)
    elsewhere = (item.tensor.device for item in state.tensors if item.tensor.device.type not in ("cpu", "meta"))
    device = next(elsewhere, torch.device("cpu"))
    refuse_other_memory(state, device)
    return device


def _refuse_shared(state: TrainingState) -> None:
    """Refuse parameters that several processes train. Buffers in shared memory are accepted."""
    for item in state.tensors:
        if item.kind == "parameter" and item.tensor.device.type == "cpu" and item.tensor.untyped_storage().is_shared():
            raise UnsupportedError(
                f"parameter {item.name} lies in memory that processes share (share_memory(), or a model that was "
                "passed to a process), where another one may write it while it is copied: train in one process, and "
                "make the optimizer and the Checkpointer of copy.deepcopy(model), which is that process's own"
            )


def refuse_other_memory(state: TrainingState, device: torch.device) -> None:
    """Refuse state tensors that are neither in host memory nor on this device: nothing would order their copies."""
    for item in state.tensors:
        tensor = item.tensor
        if tensor.is_meta:
            raise UnsupportedError(
                f"state tensor {item.name} is on the meta device, without values: initialise it before training "
                "(model.to_empty(device=...), then load or reset its parameters)"
            )
        if tensor.device.type not in ("cpu", "cuda") or (tensor.device.type == "cuda" and torch.version.hip):
            raise UnsupportedError(
                f"state tensor {item.name} lies on {tensor.device}: this version trains on one NVIDIA GPU or on the CPU"
            )
        if tensor.device.type != "cpu" and tensor.device != device:
            raise UnsupportedError(
                f"state tensor {item.name} lies on {tensor.device}, and what is copied on {device}: this version "
                "trains on one GPU; move the models there before the Checkpointer is made"
            )
    for item in state.tensors:
        tensor = item.tensor
        if tensor.nbytes and not tensor.data_ptr():
            raise UnsupportedError(
                f"state tensor {item.name} is a {type(tensor).__name__} without memory of its own: give its class "
                "__tensor_flatten__ and __tensor_unflatten__, which name the tensors that hold its values"
            )


def implementations(models: Models, optimizers: Optimizers) -> dict[str, str]:
    """Each optimizer's implementation by name, as plans name it."""
    devices = (parameter.device.type for model in models.values() for parameter in model.parameters())
    device = next((device for device in devices if device != "cpu"), "cpu")
    return {name: optimizer_implementation(optimizer, device) for name, optimizer in optimizers.items()}


def refuse_other_job(plan: Plan, state: TrainingState, optimizers: Mapping[str, str], *, resumed: bool = False) -> None:
    """Compare existing state and optimizers (name to implementation) with the plan's fingerprint; MismatchError.

    A resumed job may have optimizer state that the plan lacks (a parameter was unfrozen), as the run that made it did.
    """
    if resumed:
        planned = {spec.name for spec in plan.fingerprint.state}
        known = [item for item in state.tensors if item.kind != "optimizer" or item.name in planned]
        state = TrainingState(tuple(known), state.ties)
    lines = differences(plan, state, optimizers)
    if lines:
        more = f" (and {len(lines) - 1} more differences)" if len(lines) > 1 else ""
        raise MismatchError(
            f"the plan was made for another job, on {plan.fingerprint.device}: {lines[0]}{more}; "
            "make a new one: checkflow plan MODEL --device NAME (cpu, for a job on the CPU), or have this job make its "
            'own: plan="auto"'
        )


def differences(plan: Plan, state: TrainingState, optimizers: Mapping[str, str], ranks: int = 1) -> list[str]:
    """How existing state and optimizers (name to implementation) differ from a plan's fingerprint, a line each.

    Of several ranks, ``state`` has the parts that this one copies.

    Planned optimizer state may be missing: optimizers make it at their first step, or at a parameter's first gradient.
    Tensors in lists and the like are not compared: what the plan does not know of them is copied at the boundary.
    """
    compared = [item for item in state.tensors if not item.inside]
    live = {item.name: (tuple(item.tensor.shape), dtype_name(item.tensor.dtype)) for item in compared}
    late = {
        spec.name: (spec.shape, spec.dtype)
        for spec in plan.fingerprint.state
        if spec.name not in live and (spec.name.partition("/")[0] in optimizers or is_beside(spec.name))
    }
    return describe_mismatch(plan, {**live, **late}, dict(optimizers), ranks)


@dataclass(frozen=True)
class Guards:
    """Chunks to guard beyond the plan, by index, in case the job is not what was traced: unfreezes, or branches."""

    #: By optimizer, what it may write at its step although the plan says later or never: (parameter, chunk). A
    #: parameter counts only if it has a gradient; None stands for the optimizer's own state.
    at_step: Mapping[str, tuple[tuple[torch.Tensor | None, int], ...]]
    #: By optimizer, how many parameters each of its groups had: where that changes, guards must be made anew.
    sizes: Mapping[str, tuple[int, ...]]
    #: By a module's first forward, or that of the compiled region around it, buffers of its own that it may write there
    #: although the plan says later or never; those of a module whose forward is not seen are due at the boundary.
    at_forward: Mapping[AnchorKey, tuple[int, ...]]


def group_sizes(optimizer: torch.optim.Optimizer) -> tuple[int, ...]:
    return tuple(len(group["params"]) for group in optimizer.param_groups)


def bytes_due_at(plan: Plan, places: Collection[tuple[AnchorKind, str]]) -> int:
    """The bytes of state due at these anchors."""
    due = 0
    for group in plan.timeline.groups:
        key = None if group.first_write is None else plan.timeline.steps[group.first_write - 1].anchor
        if key is not None and (key.kind, key.name) in places:
            due += sum(size for _, size in group.members)
    return due


def make_guards(
    plan: Plan,
    models: Models,
    optimizers: Optimizers,
    silent: Collection[tuple[AnchorKind, str]] = (),
) -> Guards:
    """Find tensors that could be written earlier than the plan says. ``silent``: forward anchors that do not fire."""
    steps = {step.anchor: index for index, step in enumerate(plan.timeline.steps) if step.anchor is not None}
    chunks: dict[str, list[int]] = {}
    for index, chunk in enumerate(plan.chunks):
        chunks.setdefault(plan.whole_name(chunk.tensor), []).append(index)

    def later_than(step: int, name: str) -> list[int]:
        """The chunks of a tensor that the plan copies after a step, in case it is written there."""
        due = plan.deadlines
        found = chunks.get(name, ())
        return [index for index in found if (at := due[plan.chunks[index].tensor]) is None or at > step]

    tensors = collect_state(models, {}, of_a_rank=True).tensors
    at_step: dict[str, tuple[tuple[torch.Tensor | None, int], ...]] = {}
    for owner, optimizer in optimizers.items():
        managed = {id(parameter) for _, parameter in optimizer_parameters(models, optimizer)}
        written: dict[str, torch.Tensor | None] = {item.name: item.held for item in tensors if id(item.held) in managed}
        written |= {name: None for name in chunks if name.partition("/")[0] == owner}
        here = steps.get(AnchorKey(AnchorKind.OPTIMIZER_PRE, owner), -1)
        at_step[owner] = tuple((tensor, index) for name, tensor in written.items() for index in later_than(here, name))
    at_forward: dict[AnchorKey, tuple[int, ...]] = {}
    regions = compiled_regions(models)
    for item in tensors:
        if item.kind != "buffer" or item.name not in chunks:
            continue
        region = regions.get(item.module)
        key = AnchorKey(AnchorKind.FORWARD, item.module if region is None else region.name)
        if (key.kind, key.name) in silent:
            key = BOUNDARY
        if late := later_than(steps.get(key, -1), item.name):
            at_forward[key] = (*at_forward.get(key, ()), *late)
    return Guards(at_step, {name: group_sizes(optimizer) for name, optimizer in optimizers.items()}, at_forward)
