"""What an optimizer's class, a wrapper or torch's hooks add to its ``state_dict()``: saved, and handed back by
``load_state_dict``.

``state`` and ``param_groups`` are restored in place, bit for bit, whatever ``load_state_dict`` makes of them: torch's
own casts moments to the parameters' type.

What models add otherwise than by buffers and ``get_extra_state`` is not saved, which is said once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import nn

from checkflow.core.errors import MismatchError, UnsupportedError
from checkflow.core.state import STATE, TrainingState, inner_optimizers, is_composite, keeper_of, unwrap
from checkflow.runtime.format import codec

logger = logging.getLogger("checkflow")

_Optimizer = torch.optim.Optimizer
Optimizers = Mapping[str, _Optimizer]
Take = Callable[[Any, str], Any]
_PLAIN = ("state", "param_groups")
_SAVING = ("_optimizer_state_dict_pre_hooks", "_optimizer_state_dict_post_hooks")
_LOADING = ("_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks")


def state_dicts(optimizers: Optimizers) -> dict[str, dict[str, Any]]:
    """What ``state_dict()`` returns, of those optimizers where it may be more than torch's own."""
    return {name: _state_dict(name, one) for name, one in optimizers.items() if _is_own(one, "state_dict", _SAVING)}


def take_own(name: str, optimizer: _Optimizer, full: Mapping[str, Any], take: Take) -> dict[str, Any] | None:
    """What a ``state_dict()`` has that the optimizer's ``state`` and ``param_groups`` have not; None: nothing.

    Args:
        take: returns a structure without the tensors that are state tensors.
    """
    plain = _packed(optimizer)
    keys = {key: value for key, value in full.items() if key not in plain or not _is_plain(value, plain[key])}
    without = [key for key in _PLAIN if key not in full]
    return {"keys": take(keys, f"{STATE}/{name}"), "without": without} if keys or without else None


def refuse_unsaved(name: str, optimizer: _Optimizer, full: Mapping[str, Any], take: Take) -> None:
    """Refuse a ``state_dict()`` of which something cannot be saved, or handed back. Raises UnsupportedError."""
    if (own := take_own(name, optimizer, full, take)) is None:
        return
    codec.encode(own["keys"], name=f"the state_dict() of optimizer {name!r}")
    if not _takes(optimizer):
        raise UnsupportedError(
            f"{_named(name, optimizer)} adds {_listed(own)} to its state_dict(), and nothing takes that back: give it "
            "a load_state_dict(), or register_load_state_dict_pre_hook()"
        )


def refuse_mismatch(name: str, optimizer: _Optimizer, saved: Mapping[str, Any]) -> None:
    """Refuse what nothing of this optimizer takes back. Raises MismatchError."""
    own = saved.get("own")
    if own is not None and not _takes(optimizer):
        raise MismatchError(
            f"the checkpoint has {_listed(own)} from the state_dict() of optimizer {name!r}, and "
            f"{_named(name, optimizer)} of the job takes no such keys"
        )


def hand_back(optimizers: Optimizers, saved: Mapping[str, Mapping[str, Any]]) -> bool:
    """Call ``load_state_dict`` where there is something for it, or for torch's hooks. Returns whether any was called.

    Afterwards ``state`` and ``param_groups`` hold what they held before: the same tables and tensors. The tensors may
    have got other values.

    Raises:
        MismatchError: one raised an error, or changed the number of groups.
    """
    called = []
    before = {name: _Contents(optimizer) for name, optimizer in optimizers.items()}
    for name, optimizer in optimizers.items():
        own = saved[name].get("own") if name in saved else None
        if own is None and name in saved:
            _warn_of_nothing(name, optimizer)
        if own is None and not _has_hooks(optimizer, _LOADING):
            continue
        packed = {key: value for key, value in _packed(optimizer).items() if own is None or key not in own["without"]}
        called.append(name)
        try:
            keeper_of(optimizer).load_state_dict({**packed, **({} if own is None else own["keys"])})
        except Exception as error:
            raise MismatchError(
                f"the load_state_dict() of {_named(name, optimizer)} raised {type(error).__name__}: "
                f"{' '.join(str(error).split())}"
            ) from error
    if called:
        for name, optimizer in optimizers.items():
            before[name].put_back(name, optimizer)
    return bool(called)


def warn_of_models(models: Mapping[str, nn.Module], state: TrainingState) -> None:
    """Say what models add to their ``state_dict()`` that no checkpoint holds: no state tensor, and no extra state."""
    known = {item.tensor.untyped_storage()._cdata for item in state.tensors}
    for name, model in models.items():
        if not any(map(_saves_itself, model.modules())):
            continue
        try:
            found = unwrap(model).state_dict()
        except Exception as error:  # noqa: BLE001 - users' code may be ready only in training
            logger.debug("model %s has no state_dict() yet: %s: %s", name, type(error).__name__, error)
            continue
        added = [key for key, value in found.items() if not _is_known(key, value, known)]
        if added:
            logger.warning(
                "model %s adds %s to its state_dict(), and no checkpoint holds that: keep it in a buffer, return it "
                "from get_extra_state(), or pass an object that has it under state=",
                name, ", ".join(map(repr, added[:3])) + (f" and {len(added) - 3} more" if len(added) > 3 else ""),
            )  # fmt: skip


def _saves_itself(module: nn.Module) -> bool:
    """Whether a module may add something: by a method of its own, or by hooks of torch."""
    if isinstance(module, torch.jit.ScriptModule):
        return False
    methods = ("state_dict", "_save_to_state_dict")
    return (
        any(getattr(type(module), method) is not getattr(nn.Module, method) for method in methods)
        or bool(module._state_dict_hooks)
        or bool(module._state_dict_pre_hooks)
    )


def _is_known(key: str, value: Any, storages: Collection[int]) -> bool:
    if value is None or key.rpartition(".")[2] == "_extra_state":
        return True
    if not isinstance(value, torch.Tensor):
        return False
    return is_composite(value) or value.untyped_storage()._cdata in storages


def _warn_of_nothing(name: str, optimizer: _Optimizer) -> None:
    if not _is_own(optimizer, "state_dict", _SAVING):
        return
    if (own := take_own(name, optimizer, _state_dict(name, optimizer), lambda value, _: value)) is not None:
        logger.warning(
            "the checkpoint has nothing of %s, which %s adds to its state_dict(): that begins anew",
            _listed(own), _named(name, optimizer),
        )  # fmt: skip


class _Contents:
    """What an optimizer's ``state`` and ``param_groups`` hold, and which wrappers and inner optimizers share them."""

    def __init__(self, optimizer: _Optimizer) -> None:
        self._state = [
            (key, table, dict(table) if isinstance(table, dict) else None) for key, table in optimizer.state.items()
        ]
        self._groups = [dict(group) for group in optimizer.param_groups]
        numbers = {id(group): number for number, group in enumerate(optimizer.param_groups)}
        keeper = keeper_of(optimizer)
        self._sharing = [
            (
                one,
                one.state is optimizer.state,
                one.param_groups is optimizer.param_groups,
                [numbers.get(id(group)) for group in one.param_groups],
            )
            for one in (keeper, *inner_optimizers(keeper), *inner_optimizers(optimizer))
            if one is not optimizer
        ]

    def put_back(self, name: str, optimizer: _Optimizer) -> None:
        """Put it into whatever containers are there now, which the optimizer may have under other names, too."""
        if len(optimizer.param_groups) != len(self._groups):
            raise MismatchError(f"the load_state_dict() of {_named(name, optimizer)} changed the number of its groups")
        for group, content in zip(optimizer.param_groups, self._groups, strict=True):
            group.clear()
            group.update(content)
        optimizer.state.clear()
        for key, table, held in self._state:
            if held is not None:
                table.clear()
                table.update(held)
            optimizer.state[key] = table
        # Torch's load_state_dict makes new containers: a schedule of a wrapper would set rates that nothing reads.
        for one, state, groups, numbers in self._sharing:
            if state and one.state is not optimizer.state:
                one.state = optimizer.state
            if groups and one.param_groups is not optimizer.param_groups:
                one.param_groups = optimizer.param_groups
            for place, number in enumerate(numbers[: len(one.param_groups)]):
                if number is not None:
                    one.param_groups[place] = optimizer.param_groups[number]


def _state_dict(name: str, optimizer: _Optimizer) -> dict[str, Any]:
    try:
        found: Any = keeper_of(optimizer).state_dict()
    except Exception as error:
        raise UnsupportedError(
            f"the state_dict() of {_named(name, optimizer)} raised {type(error).__name__}, so that it cannot be saved: "
            f"{' '.join(str(error).split())}"
        ) from error
    if not isinstance(found, dict):
        raise UnsupportedError(
            f"the state_dict() of {_named(name, optimizer)} returned a {type(found).__name__}, no dictionary"
        )
    return dict(found)


def _packed(optimizer: _Optimizer) -> dict[str, Any]:
    """What torch's own ``state_dict()`` returns, without hooks: parameters numbered over the groups."""
    numbers: dict[int, int] = {}
    groups = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            numbers.setdefault(id(parameter), len(numbers))
        groups.append({**group, "params": [numbers[id(parameter)] for parameter in group["params"]]})
    state = {
        numbers.get(id(key), key) if isinstance(key, torch.Tensor) else key: table
        for key, table in optimizer.state.items()
    }
    return {"state": state, "param_groups": groups}


def _is_plain(value: Any, plain: Any) -> bool:
    """Whether a part of a ``state_dict()`` is torch's own: the same values, in containers of any identity."""
    if value is plain:
        return True
    if isinstance(plain, dict):
        return (
            isinstance(value, dict)
            and value.keys() == plain.keys()
            and all(_is_plain(value[key], inner) for key, inner in plain.items())
        )
    if isinstance(plain, list):
        return type(value) is list and len(value) == len(plain) and all(map(_is_plain, value, plain))
    return type(plain) in (bool, int, float, str) and type(value) is type(plain) and bool(value == plain)


def _is_own(optimizer: _Optimizer, method: str, hooks: tuple[str, ...]) -> bool:
    keeper = keeper_of(optimizer)
    replaced = getattr(type(keeper), method) is not getattr(_Optimizer, method) or method in vars(keeper)
    return replaced or _has_hooks(optimizer, hooks)


def _has_hooks(optimizer: _Optimizer, hooks: tuple[str, ...]) -> bool:
    return any(vars(one).get(name) for one in {optimizer, keeper_of(optimizer)} for name in hooks)


def _takes(optimizer: _Optimizer) -> bool:
    return _is_own(optimizer, "load_state_dict", _LOADING)


def _named(name: str, optimizer: _Optimizer) -> str:
    return f"optimizer {name!r}, a {type(keeper_of(optimizer)).__name__},"


def _listed(own: Mapping[str, Any]) -> str:
    return ", ".join(sorted(repr(key) for key in own["keys"])) or "no state and no groups"
