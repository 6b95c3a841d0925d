"""Whether a plan fits a live job, and what is refused before training begins."""

from __future__ import annotations

import logging
import math
import operator
import signal
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TypeGuard

import torch
import torch.distributed
from torch import nn

from checkflow.errors import CheckflowError, MismatchError, UnsupportedError
from checkflow.graph import BOUNDARY, AnchorKey, AnchorKind
from checkflow.hardware import parse_seconds, parse_size
from checkflow.plan import Plan, describe_mismatch
from checkflow.regions import compiled_regions
from checkflow.runtime import job_arguments
from checkflow.runtime.policy import Asked
from checkflow.runtime.preemption import HEEDED
from checkflow.runtime.resumable import ResumableLoader
from checkflow.state import (
    TrainingState,
    collect_state,
    dtype_name,
    optimizer_implementation,
    optimizer_parameters,
)

logger = logging.getLogger("checkflow")

Models = Mapping[str, nn.Module]
Optimizers = Mapping[str, torch.optim.Optimizer]
MOST_HOST_BUFFERS = 1000  # each of the size of the state: more is a slip, and would take hours to make


def check_arguments(
    *, model: object, optimizer: object, loader: object, directory: object, plan: object, state: object,
    host_buffers: object, resume: object, on_error: object, audit: object,
) -> None:  # fmt: skip
    """Refuse what ``Checkpointer`` cannot work with.

    Raises:
        UnsupportedError: the loader is not one of checkflow's.
        TypeError, ValueError: any other argument is of another type; is out of its range.
    """
    job_arguments.refuse_no_job(model, optimizer)
    if loader is not None and not isinstance(loader, ResumableLoader):
        raise UnsupportedError(
            f"loader is a {type(loader).__name__}: pass checkflow.resumable(loader), or a checkflow.DataLoader, "
            "or none and iterate checkpointer.steps()"
        )
    job_arguments.refuse_no_directory(directory)
    job_arguments.refuse_no_plan(plan)
    job_arguments.refuse_no_objects(state)
    if not _is_count(host_buffers, 1) or host_buffers > MOST_HOST_BUFFERS:
        raise ValueError(f"host_buffers must be a whole number from 1 to {MOST_HOST_BUFFERS}, not {host_buffers!r}")
    if resume not in ("auto", "never", "must") and not _is_count(resume, 0):
        raise ValueError(f'resume must be "auto", "never", "must" or a step, not {resume!r}')
    if on_error not in ("warn", "raise"):
        raise ValueError(f'on_error must be "warn" or "raise", not {on_error!r}')
    if not _is_count(audit, 0):
        raise ValueError(f"audit must be a whole number of at least 0, not {audit!r}")


def refuse_ranks() -> None:
    """Refuse a job of several processes.

    Raises:
        UnsupportedError: torch.distributed has more than one rank.
    """
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized() and (ranks := distributed.get_world_size()) > 1:
        raise UnsupportedError(
            f"torch.distributed has {ranks} ranks: this version checkpoints one process; save loader.state_dict() with "
            "what the job saves itself, which checkflow.DataLoader goes on from with any number of ranks"
        )


def read_asked(overhead: object, every: object, mtbf: object) -> Asked:
    """How often checkpoints are made, or what they may cost.

    Raises:
        ValueError: one of them is out of its range, or two of them contradict each other.
    """
    share = read_share(overhead)
    if every is not None and mtbf is not None:
        raise ValueError("every says how often already: pass every or mtbf, not both")
    if isinstance(every, str):
        return Asked(share, every_seconds=_read_time("every", every))
    if every is not None and not _is_count(every, 1):
        raise ValueError(
            f'every must be a whole number of iterations, at least 1, text such as "30s", or None, not {every!r}'
        )
    if mtbf is None or isinstance(mtbf, str):
        return Asked(share, every, mtbf_seconds=None if mtbf is None else _read_time("mtbf", mtbf))
    if isinstance(mtbf, bool) or not isinstance(mtbf, int | float) or not 0 < mtbf < math.inf:
        raise ValueError(f'mtbf must be seconds, more than 0, text such as "4h", or None, not {mtbf!r}')
    return Asked(share, every, mtbf_seconds=float(mtbf))


def _read_time(name: str, text: str) -> float:
    try:
        return parse_seconds(text)
    except CheckflowError as error:
        raise ValueError(f"{name}: {error}") from None


def read_share(overhead: object) -> float:
    """A share of training's time.

    Raises:
        ValueError: it is none.
    """
    if isinstance(overhead, bool) or not isinstance(overhead, int | float) or not 0 <= overhead < math.inf:
        raise ValueError(f"overhead must be a share of training's time, 0 or more, such as 0.035, not {overhead!r}")
    return float(overhead)


def read_size(extra_memory: object) -> int | None:
    """Bytes, given as a number or as text such as "2GB".

    Raises:
        ValueError: neither.
    """
    if extra_memory is None or _is_count(extra_memory, 0):
        return extra_memory
    if isinstance(extra_memory, str):
        try:
            return parse_size(extra_memory)
        except CheckflowError as error:
            raise ValueError(f"extra_memory: {error}") from None
    raise ValueError(f'extra_memory must be bytes, text such as "2GB", or None, not {extra_memory!r}')


def read_signals(signals: object) -> tuple[signal.Signals, ...]:
    """The signals that end training, given by name.

    Raises:
        ValueError: something else, or a signal that cannot mean this.
    """
    names = tuple(signals) if isinstance(signals, tuple | list | set | frozenset) else None
    if names is None or not all(name in HEEDED for name in names):
        raise ValueError(
            f"signals must be a tuple of some of {', '.join(HEEDED)} (Ctrl-C is heeded beside them), or () for none, "
            f"not {signals!r}"
        )
    return tuple(signal.Signals[name] for name in dict.fromkeys(names))


def read_batches(batches: object) -> int:
    """How many batches reached a step.

    Raises:
        ValueError: it is not a whole number of at least 0.
    """
    try:
        count = -1 if isinstance(batches, bool) else operator.index(batches)  # type: ignore[arg-type]
    except TypeError:
        count = -1
    if count < 0:
        raise ValueError(f"step() takes how many batches reached it, a whole number of at least 0, not {batches!r}")
    return count


def read_grace(grace_seconds: object) -> float:
    """Seconds from a signal to the end.

    Raises:
        ValueError: no number of seconds above 0.
    """
    number = isinstance(grace_seconds, int | float) and not isinstance(grace_seconds, bool)
    if not number or not 0 < grace_seconds < math.inf:  # type: ignore[operator]
        raise ValueError(f"grace_seconds must be a number of seconds above 0, not {grace_seconds!r}")
    return float(grace_seconds)  # type: ignore[arg-type]


def check_every(every: int | None, interval: int) -> None:
    """Refuse checkpoints at boundaries that the plan does not make checkpoints of.

    Raises:
        ValueError: ``every`` is no multiple of the plan's interval; it says which values near it are.
    """
    if every is not None and every % interval:
        below = every - every % interval
        near = f"{below} or {below + interval}" if below else str(interval)
        raise ValueError(f"every={every} is no multiple of the plan's interval of {interval}: use {near}")


def round_every(every: int | None, interval: int) -> int | None:
    """``every``, rounded up to boundaries that a plan of this interval makes checkpoints of; says so if it changes."""
    if every is None or every % interval == 0:
        return every
    rounded = every + interval - every % interval
    logger.warning(
        "every=%d is no multiple of the interval of this job's plan, %d: from now on a checkpoint every %d iterations",
        every, interval, rounded,
    )  # fmt: skip
    return rounded


def _is_count(value: object, least: int) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def copied_device(models: Models, optimizers: Optimizers) -> torch.device:
    """The device whose memory a job's state is copied from: its GPU, or the CPU where no state lies on one.

    Raises:
        UnsupportedError: state that no copy engine of this version can copy.
    """
    state = collect_state(models, optimizers)
    elsewhere = (item.tensor.device for item in state.tensors if item.tensor.device.type not in ("cpu", "meta"))
    device = next(elsewhere, torch.device("cpu"))
    refuse_other_memory(state, device)
    return device


def refuse_other_memory(state: TrainingState, device: torch.device) -> None:
    """Refuse state tensors that lie neither in host memory nor on this device: nothing would order their copies.

    Raises:
        UnsupportedError: there is one; it is named.
    """
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


def refuse_objects(objects: Mapping[str, object]) -> None:
    """Refuse what cannot be saved and put back as ``state=``: by its methods, and by what it would save now.

    Raises:
        UnsupportedError: there is such; it is named.
    """
    for name, value in objects.items():
        if not all(callable(getattr(value, method, None)) for method in ("state_dict", "load_state_dict")):
            raise UnsupportedError(
                f"state[{name!r}] is a {type(value).__name__}, without state_dict and load_state_dict: pass an object "
                "that has both, such as a scheduler"
            )
        job_arguments.refuse_unsaved(name, value)


def implementations(models: Models, optimizers: Optimizers) -> dict[str, str]:
    """Optimizer name to implementation, as plans name it."""
    devices = (parameter.device.type for model in models.values() for parameter in model.parameters())
    device = next((device for device in devices if device != "cpu"), "cpu")
    return {name: optimizer_implementation(optimizer, device) for name, optimizer in optimizers.items()}


def refuse_other_job(plan: Plan, state: TrainingState, optimizers: Mapping[str, str]) -> None:
    """Hold the state that exists, and the optimizers' implementations, against the plan's fingerprint.

    Args:
        optimizers: name to implementation.

    Raises:
        MismatchError: the plan was made for another job; it says what differs.
    """
    lines = differences(plan, state, optimizers)
    if lines:
        more = f" (and {len(lines) - 1} more differences)" if len(lines) > 1 else ""
        raise MismatchError(
            f"the plan was made for another job, on {plan.fingerprint.device}: {lines[0]}{more}; "
            "make a new one: checkflow plan MODEL --device NAME (cpu, for a job on the CPU), or have this job make its "
            'own: plan="auto"'
        )


def differences(plan: Plan, state: TrainingState, optimizers: Mapping[str, str]) -> list[str]:
    """What differs between a plan's fingerprint and the state that exists, and the optimizers: a line each.

    Optimizer state that is planned and does not exist is let pass: optimizers make it late (at their first step, or
    when a parameter gets its first gradient).

    Args:
        optimizers: name to implementation.
    """
    live = {item.name: (tuple(item.tensor.shape), dtype_name(item.tensor.dtype)) for item in state.tensors}
    late = {
        spec.name: (spec.shape, spec.dtype)
        for spec in plan.fingerprint.state
        if spec.name not in live and spec.name.partition("/")[0] in optimizers
    }
    return describe_mismatch(plan, {**live, **late}, dict(optimizers))


@dataclass(frozen=True)
class Guards:
    """What caution guards beyond the plan, as indices of its chunks.

    A right plan leaves nothing to do here. A plan of another job, or a job that does what it did not do while it was
    traced (unfreezes a parameter, takes another branch), meets these.
    """

    #: By optimizer, what it may write at its step although the plan says later or never: (parameter, chunk). A
    #: parameter counts only if it has a gradient; None stands for the optimizer's own state.
    at_step: Mapping[str, tuple[tuple[torch.Tensor | None, int], ...]]
    #: By optimizer, how many parameters each of its groups had: where that changes, guards must be made anew.
    sizes: Mapping[str, tuple[int, ...]]
    #: By a module's first forward, or that of the compiled region around it, buffers of its own that it may write there
    #: although the plan says later or never; those of a module whose forward is not seen are due at the boundary.
    at_forward: Mapping[AnchorKey, tuple[int, ...]]


def group_sizes(optimizer: torch.optim.Optimizer) -> tuple[int, ...]:
    """How many parameters each group of an optimizer has."""
    return tuple(len(group["params"]) for group in optimizer.param_groups)


def bytes_due_at(plan: Plan, places: Collection[tuple[AnchorKind, str]]) -> int:
    """How much state is due at these anchors."""
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
    """Find out which tensors could be written earlier than the plan says.

    Args:
        silent: forward anchors that do not fire.
    """
    steps = {step.anchor: index for index, step in enumerate(plan.timeline.steps) if step.anchor is not None}
    chunks: dict[str, list[int]] = {}
    for index, chunk in enumerate(plan.chunks):
        chunks.setdefault(chunk.tensor, []).append(index)
    tensors = collect_state(models, {}).tensors
    at_step: dict[str, tuple[tuple[torch.Tensor | None, int], ...]] = {}
    for owner, optimizer in optimizers.items():
        managed = {id(parameter) for _, parameter in optimizer_parameters(models, optimizer)}
        written: dict[str, torch.Tensor | None] = {item.name: item.held for item in tensors if id(item.held) in managed}
        written |= {name: None for name in chunks if name.partition("/")[0] == owner}
        here = steps.get(AnchorKey(AnchorKind.OPTIMIZER_PRE, owner), -1)
        at_step[owner] = tuple(
            (tensor, index)
            for name, tensor in written.items()
            if (deadline := plan.deadlines.get(name)) is None or deadline > here
            for index in chunks.get(name, ())
        )
    at_forward: dict[AnchorKey, tuple[int, ...]] = {}
    regions = compiled_regions(models)
    for item in tensors:
        if item.kind != "buffer" or item.name not in chunks:
            continue
        region = regions.get(item.module)
        key = AnchorKey(AnchorKind.FORWARD, item.module if region is None else region.name)
        if (key.kind, key.name) in silent:
            key = BOUNDARY
        due = plan.deadlines[item.name]
        if due is None or due > steps.get(key, -1):
            at_forward[key] = (*at_forward.get(key, ()), *chunks[item.name])
    return Guards(at_step, {name: group_sizes(optimizer) for name, optimizer in optimizers.items()}, at_forward)
