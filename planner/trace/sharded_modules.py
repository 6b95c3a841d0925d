"""Takes FSDP2's own objects along in a trace: they hold parameters beside the modules, and change as it runs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn


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
        for group in () if state is None else _groups(state):
            group._reset_sharded_params = True  # else it looks up addresses, which fakes have not
            for parameter in group.fsdp_params:
                parameter.sharded_param = of(parameter.sharded_param)
                parameter._sharded_param_data = of(parameter._sharded_param_data)


def _state(module: nn.Module) -> Any:
    fully_shard = sys.modules.get("torch.distributed.fsdp._fully_shard._fsdp_state")
    return None if fully_shard is None else fully_shard._get_module_fsdp_state(module)


def _groups(state: Any) -> list[Any]:
    """Return its groups of parameters; torch before 2.12 has one at most."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]
