"""Sharded models in a trace: takes FSDP2's own objects along, and steps optimizers on what this rank has."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from checkflow.core.errors import TraceError
from checkflow.core.state import is_distributed


def sharding_objects(modules: Iterable[nn.Module]) -> Iterator[Any]:
    """Yield what ``fully_shard`` keeps for these modules: states, contexts, groups of parameters, parameters."""
    seen: set[int] = set()
    for module in modules:
        state = _state(module)
        if state is None or id(state) in seen:
            continue
        seen.add(id(state))
        yield from (state, state._state_ctx, state._comm_ctx)
        for group in _groups(state):
            yield from (group, group.comm_ctx, *group.fsdp_params)


def replace_sharded(modules: Iterable[nn.Module], of: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Replace the parameters that FSDP2 puts back into modules, and the memory that it gathers them from."""
    for module in modules:
        state = _state(module)
        _refuse_flat(module)
        for group in () if state is None else _groups(state):
            if type(group.offload_policy).__name__ == "CPUOffloadPolicy":
                raise TraceError(
                    "fully_shard with CPUOffloadPolicy is not planned: the parameters that it keeps in host memory "
                    "need no copy of the device"
                )
            group._reset_sharded_params = True  # else it looks up addresses, which fakes have not
            for parameter in group.fsdp_params:
                parameter.sharded_param = of(parameter.sharded_param)
                parameter._sharded_param_data = of(parameter._sharded_param_data)


def _refuse_flat(module: nn.Module) -> None:
    """Refuse FSDP1 over several ranks, whose flat parameters are no state tensors of the whole."""
    flat = sys.modules.get("torch.distributed.fsdp.fully_sharded_data_parallel")
    if flat is not None and isinstance(module, flat.FullyShardedDataParallel) and module.world_size > 1:
        raise TraceError("FullyShardedDataParallel of several ranks is not planned: use torch's newer fully_shard")


def _state(module: nn.Module) -> Any:
    fully_shard = sys.modules.get("torch.distributed.fsdp._fully_shard._fsdp_state")
    return None if fully_shard is None else fully_shard._get_module_fsdp_state(module)


def _groups(state: Any) -> list[Any]:
    """Return its groups of parameters; torch before 2.12 has one at most."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def on_parts(func: Any, args: Sequence[Any]) -> list[Any] | None:
    """Return the arguments of an element-wise update of lists with this rank's parts of DTensors; None: no such call.

    An optimizer updates all parameters in a few such calls. torch finds out anew for each DTensor how it is laid out,
    which takes longer than all else; where all tensors of an update lie alike, the parts are updated alike.
    """
    name = getattr(func, "__name__", "")
    if not (name.startswith("_foreach_") and name.endswith("_") and args and isinstance(args[0], list | tuple)):
        return None
    lists = [arg for arg in args if isinstance(arg, list | tuple) and arg and isinstance(arg[0], torch.Tensor)]
    alike = all(
        all(
            is_distributed(one) and (one.device_mesh, one.placements) == (row[0].device_mesh, row[0].placements)
            for one in row
        )
        for row in zip(*lists, strict=False)
        if is_distributed(row[0]) or any(map(is_distributed, row))
    )
    if not alike or not any(map(is_distributed, args[0])):
        return None
    return [[_part(one) for one in arg] if any(arg is found for found in lists) else arg for arg in args]


def _part(tensor: Any) -> Any:
    return tensor._local_tensor if is_distributed(tensor) else tensor
