"""Batches and results as users build them: containers, dataclasses, and objects that hold tensors.

Looks also into leaves of torch's pytree that are mappings, dataclasses, or objects with tensor attributes (a
``BatchEncoding``, a graph's ``Data``, a ``PackedSequence``).
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree


def tensors_of(structure: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a structure, in its order."""
    return _tensors_of(structure, ())


def _tensors_of(structure: Any, around: tuple[int, ...]) -> Iterator[torch.Tensor]:
    for leaf in pytree.tree_leaves(structure):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif id(leaf) not in around:  # objects may be cyclic
            for value in _parts(leaf).values():
                yield from _tensors_of(value, (*around, id(leaf)))


def with_tensors(structure: Any, replace: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return the structure with other tensors; parts without tensors stay the same object."""
    return _with_tensors(structure, replace, ())


def _with_tensors(structure: Any, replace: Callable[[torch.Tensor], torch.Tensor], around: tuple[int, ...]) -> Any:
    def leaf_with(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return replace(leaf)
        if next(tensors_of(leaf), None) is None or id(leaf) in around:
            return leaf
        changed = {key: _with_tensors(value, replace, (*around, id(leaf))) for key, value in _parts(leaf).items()}
        if isinstance(leaf, tuple):  # a named tuple that pytree does not know, such as PackedSequence
            return tuple.__new__(type(leaf), changed.values())
        twin = copy.copy(leaf)
        for key, value in changed.items():
            if isinstance(leaf, dict) and key in leaf:
                dict.__setitem__(twin, key, value)
            if key in getattr(leaf, "__dict__", {}):
                twin.__dict__[key] = value
            elif dataclasses.is_dataclass(leaf):
                object.__setattr__(twin, key, value)  # one with slots, or frozen
        return twin

    return pytree.tree_map(leaf_with, structure)


def _parts(leaf: Any) -> Mapping[Any, Any]:
    """Return what a leaf of pytree holds, by name: items, fields or attributes; of a tuple by place."""
    if isinstance(leaf, type | nn.Module | torch.optim.Optimizer | torch.nn.utils.parametrize.ParametrizationList):
        return {}
    if isinstance(leaf, tuple):
        return dict(enumerate(leaf))
    parts: dict[Any, Any] = dict(leaf) if isinstance(leaf, dict) else {}
    if dataclasses.is_dataclass(leaf):
        parts |= {field.name: getattr(leaf, field.name, None) for field in dataclasses.fields(leaf)}
    # Only attributes that are or contain tensors; does not search an object's objects.
    held = getattr(leaf, "__dict__", None)
    if isinstance(held, dict) and not callable(leaf):
        parts |= {key: value for key, value in held.items() if _holds_tensors(value)}
    return parts


def _holds_tensors(value: Any) -> bool:
    return any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(value))
