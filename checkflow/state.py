"""Names of state tensors, the same for the planner and the runtime.

A state tensor is named ``<owner>/<key>``. The owner is the name of a model or an optimizer; the key is the model's own
``state_dict`` key, or ``<parameter>.<state>`` for an optimizer, where ``<parameter>`` is the model's key (preceded by
``<model>.`` where there are several models). Wrappers' prefixes ("module.", "_orig_mod.") are no part of a name.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from checkflow.errors import UnsupportedError
from checkflow.graph import StateKind

DEFAULT_MODEL, DEFAULT_OPTIMIZER = "model", "optimizer"


@dataclass(frozen=True, slots=True)
class StateTensor:
    """A live state tensor and where it was found."""

    name: str
    kind: StateKind
    tensor: torch.Tensor
    module: str = ""  # buffers: "<model>/<path of the owning module>"


@dataclass(frozen=True)
class TrainingState:
    """All state tensors of a job, each storage region once, in naming order (models first, then optimizers)."""

    tensors: tuple[StateTensor, ...]
    ties: tuple[tuple[str, str], ...]  # (further name, name in ``tensors``)


def as_models(model: nn.Module | Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """The models by name; a single one is called "model"."""
    return {DEFAULT_MODEL: model} if isinstance(model, nn.Module) else dict(model)


def as_optimizers(
    optimizer: torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer] | None,
) -> dict[str, torch.optim.Optimizer]:
    """The optimizers by name; a single one is called "optimizer"."""
    if optimizer is None:
        return {}
    return {DEFAULT_OPTIMIZER: optimizer} if isinstance(optimizer, torch.optim.Optimizer) else dict(optimizer)


def unwrap(model: nn.Module) -> nn.Module:
    """The user's module inside DistributedDataParallel, DataParallel and torch.compile wrappers."""
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            model = model.module
        elif isinstance(inner := model.__dict__.get("_modules", {}).get("_orig_mod"), nn.Module):
            model = inner
        else:
            return model


def clean_key(key: str) -> str:
    """A qualified name without the "_orig_mod" that torch.compile puts around inner modules."""
    return ".".join(part for part in key.split(".") if part != "_orig_mod")


def module_names(models: Mapping[str, nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """("<model>/<module path>", module) for every module, each once, under its first name."""
    seen: set[int] = set()
    for owner, model in models.items():
        for path, module in unwrap(model).named_modules():
            if id(module) not in seen and type(module).__name__ != "OptimizedModule":
                seen.add(id(module))
                yield f"{owner}/{clean_key(path)}", module


def region(tensor: torch.Tensor) -> tuple[int, int, tuple[int, ...], tuple[int, ...]]:
    """What makes two tensors the same memory: storage, offset, shape and strides (real and fake tensors alike)."""
    return tensor.untyped_storage()._cdata, int(tensor.storage_offset()), tuple(tensor.shape), tuple(tensor.stride())


@functools.cache
def dtype_name(dtype: torch.dtype) -> str:
    """A dtype as files name it: "float32" for torch.float32."""
    return str(dtype).removeprefix("torch.")


def memory_order(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """The dimensions in the order in which memory runs through them, outermost first; None if the tensor is not dense.

    A contiguous tensor has (0, 1, 2, …), a channels_last one (0, 2, 3, 1).
    """
    # Dimensions of size 1 may carry any stride, and so stand anywhere in the order.
    strides = tensor.stride()
    order = sorted((d for d in range(tensor.dim()) if tensor.shape[d] != 1), key=lambda d: -strides[d])
    expected = 1
    for d in reversed(order):
        if strides[d] != expected:
            return None
        expected *= tensor.shape[d]
    if order == sorted(order):
        return tuple(range(tensor.dim()))
    return (*(d for d in range(tensor.dim()) if tensor.shape[d] == 1), *order)


def _model_tensors(owner: str, model: nn.Module) -> Iterator[StateTensor]:
    for path, module in unwrap(model).named_modules(remove_duplicate=False):
        prefix = clean_key(path) + "." if clean_key(path) else ""
        for key, parameter in module._parameters.items():
            if parameter is not None:
                yield StateTensor(f"{owner}/{prefix}{key}", "parameter", parameter)
        for key, buffer in module._buffers.items():
            if buffer is not None and key not in module._non_persistent_buffers_set:
                yield StateTensor(f"{owner}/{prefix}{key}", "buffer", buffer, f"{owner}/{clean_key(path)}")


def parameter_names(models: Mapping[str, nn.Module]) -> dict[int, str]:
    """Maps ``id(parameter)`` to the name of its optimizer state: the model's key, or "<model>.<key>" for several."""
    names: dict[int, str] = {}
    for owner, model in models.items():
        for found in _model_tensors(owner, model):
            if found.kind == "parameter":
                name = found.name.partition("/")[2]
                names.setdefault(id(found.tensor), name if len(models) == 1 else f"{owner}.{name}")
    return names


def parameter_paths(models: Mapping[str, nn.Module]) -> dict[str, torch.Tensor]:
    """Maps "<model>/<parameter>" to the parameter, ties under each of their names."""
    return {
        found.name: found.tensor
        for owner, model in models.items()
        for found in _model_tensors(owner, model)
        if found.kind == "parameter"
    }


def optimizer_parameters(
    models: Mapping[str, nn.Module], optimizer: torch.optim.Optimizer
) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, parameter) of everything an optimizer updates; a parameter of no model is "group<g>.param<i>"."""
    names = parameter_names(models)
    for g, group in enumerate(optimizer.param_groups):
        for i, parameter in enumerate(group["params"]):
            yield names.get(id(parameter), f"group{g}.param{i}"), parameter


def _optimizer_tensors(owner: str, models: Mapping[str, nn.Module], optimizer: Any) -> Iterator[StateTensor]:
    known = parameter_names(models)
    for name, parameter in optimizer_parameters(models, optimizer):
        if id(parameter) not in known:
            yield StateTensor(f"{owner}/{name}", "parameter", parameter)
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor):
                yield StateTensor(f"{owner}/{name}.{key}", "optimizer", value)


def collect_state(models: Mapping[str, nn.Module], optimizers: Mapping[str, torch.optim.Optimizer]) -> TrainingState:
    """Every state tensor as it is now: persistent buffers and parameters, then optimizer state that exists.

    Raises:
        UnsupportedError: two models or optimizers share a name, or a tensor has no dense memory of its own
            (an expanded tensor, one that overlaps another without being the same region, or a lazy one).
    """
    if clash := set(models) & set(optimizers):
        raise UnsupportedError(f"a model and an optimizer have the same name: {sorted(clash)[0]}")
    found: list[StateTensor] = []
    for owner, model in models.items():
        found.extend(_model_tensors(owner, model))
    for owner, optimizer in optimizers.items():
        found.extend(_optimizer_tensors(owner, models, optimizer))
    first: dict[tuple[int, int, tuple[int, ...], tuple[int, ...]], str] = {}
    unique, ties = [], []
    for item in found:
        if is_lazy(item.tensor):
            raise UnsupportedError(
                f"state tensor {item.name} has no shape yet: run the model once on a batch first, as torch asks for "
                "lazy modules, before the optimizer is made"
            )
        if item.tensor.layout is not torch.strided:
            raise UnsupportedError(
                f"state tensor {item.name} is {item.tensor.layout}; only strided tensors can be checkpointed"
            )
        here = region(item.tensor)
        if here in first and item.tensor.numel():
            ties.append((item.name, first[here]))
        else:
            first[here] = item.name
            unique.append(item)
    _refuse_overlap(unique)
    return TrainingState(tuple(unique), tuple(ties))


def _refuse_overlap(tensors: list[StateTensor]) -> None:
    """Each tensor must be dense (its elements fill one range of its storage, in any order), and the ranges disjoint."""
    ranges: dict[int, list[tuple[int, int, str]]] = {}
    for item in tensors:
        tensor = item.tensor
        if not tensor.numel():
            continue
        if memory_order(tensor) is None:
            raise UnsupportedError(
                f"state tensor {item.name} is expanded or has gaps in memory; call .contiguous() on it"
            )
        begin = int(tensor.storage_offset()) * tensor.element_size()
        ranges.setdefault(tensor.untyped_storage()._cdata, []).append((begin, begin + tensor.nbytes, item.name))
    for spans in ranges.values():
        spans.sort()
        for (_, end, one), (begin, _, other) in itertools.pairwise(spans):
            if begin < end:
                raise UnsupportedError(f"state tensors {one} and {other} overlap in memory without being the same")


def optimizer_implementation(optimizer: torch.optim.Optimizer, device_type: str) -> str:
    """Class and implementation of an optimizer, such as "Adam foreach": what decides which operators update the state.

    Args:
        device_type: where the parameters lie ("cuda", "cpu"): torch chooses foreach by default on CUDA only.
    """
    kind = type(optimizer).__name__
    flags = {
        (bool(group.get("fused")), group.get("foreach") if "foreach" in group else False, bool(group.get("capturable")))
        for group in optimizer.param_groups
    }
    names = set()
    for fused, foreach, capturable in flags:
        chosen = foreach if foreach is not None else device_type == "cuda"
        names.add(("fused" if fused else "foreach" if chosen else "for-loop") + (" capturable" if capturable else ""))
    return " ".join([kind, *sorted(names)])


def host_counters(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """On the CPU, the state of no dimension that counts as lying in host memory: step counters and their like.

    All but capturable and fused optimizers keep most of these there whatever the device: they are copied at the
    boundary, and are no part of device memory.
    """
    for group in optimizer.param_groups:
        if group.get("capturable") or group.get("fused"):
            continue
        for parameter in group["params"]:
            for value in optimizer.state.get(parameter, {}).values():
                if isinstance(value, torch.Tensor) and value.dim() == 0:
                    yield value
